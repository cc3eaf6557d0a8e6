"""What is asked of a live topic beside frames: sessions, where one message is, what is in flight, a reset, cursors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT64S, Batch, Binary
from seqdedupe.core.id_table import IMPORTED, NOWHERE
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED, PUSHED, STATED
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, COLUMNS_END, PLACES, PUBLISH_TIME_MS, RECORD_END, RECORD_START
from seqdedupe.format.headers import NO_KEY
from seqdedupe.format.jit import Int64s
from seqdedupe.format.records import END, body_of, scan_record, span
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.log.contract import LargerRecordError, Log
from seqdedupe.message_id import Position
from seqdedupe.names import check_cursor_name, producer_name
from seqdedupe.topic.base import State
from seqdedupe.topic.control import CursorChange, ProducerSessions, Purge, Reset
from seqdedupe.topic.frame import InFlight, check_by_id
from seqdedupe.topic.judge import since_ms
from seqdedupe.topic.policy import LARGEST, MAX_CURSORS, MAX_NOTE_BYTES, NamedCursor
from seqdedupe.topic.sessions import NAMES_A_STEP, OpenAnswer, SessionStarts, check_count, encoded_names
from seqdedupe.topic.topic import Topic

# -- Where a producer's message stands when the ring of recent messages has forgotten it.

NOT_KNOWN = -1

LOOKED_THROUGH_MESSAGES = 2**16
"""How far back from the log's end a message is looked for: so many messages, and about so many bytes."""
LOOKED_THROUGH_BYTES = 64 * 1024 * 1024
_PAGE_BYTES = 256 * 1024
"""Looked through in one step of the event loop."""

LOOK_BYTES = 1024 * 1024
"""What a look into the log holds at once, about, unless one record is larger."""

Room = Callable[[int], Awaitable[int]]
"""Asked before something is read from the log how many bytes that may be: at least so many, 0: any number."""


async def _any_room(least_bytes: int) -> int:
    return max(LOOK_BYTES, least_bytes)


async def index_in_log(producers: Producers, number: int, log: Log) -> int:
    """The index of the message that holds a producer's persisted ID; NOT_KNOWN if it is gone, or cannot be read now.

    It takes a read of the log: STATED is the base index of the batch that holds the message, unless retention has
    dropped that, or deduplication was off meanwhile.
    """
    last = int(producers.numbers[number, PERSISTED])
    stated = int(producers.numbers[number, STATED])
    if last < 0 or stated < log.first_index:
        return NOT_KNOWN
    [name] = producers.names_from(number, 1)
    try:
        raw, _ = await log.read(stated, stated + 1, 1)
        page = bytes(raw)
        places = next(_records(log, page))
    except SeqdedupeError:
        return NOT_KNOWN
    return _index_in_record(page, places, name, last)


async def find_in_log(log: Log, name: bytes, sequence_id: int, end_index: int, room: Room = _any_room) -> int:
    """The index of the newest message with this ID of this producer among the last ones before `end_index`.

    NOT_KNOWN if it is not found in as much as is looked through, but for what is damaged. Raises what a log raises that
    cannot be read now. One page is held at a time, and none while `room` is asked for the next one.
    """
    mark = sequence_id.to_bytes(8, "little")
    found = NOT_KNOWN
    try:
        async for page in _pages(log, await _looked_through_from(log, end_index), end_index, room):
            # Most pages do not have both, which is told without taking them apart.
            for places in _records(log, page) if mark in page and name in page else ():
                columns = page[places[RECORD_START] : places[COLUMNS_END]]
                if mark in columns and name in columns:
                    found = max(found, _index_in_record(page, places, name, sequence_id))
            del page  # until there is another one
    except PositionError:
        # Retention was faster.
        pass
    return found


async def _looked_through_from(log: Log, end_index: int) -> int:
    """The first index that is not too far from the end, in messages and in bytes."""
    low, high = max(log.first_index, end_index - LOOKED_THROUGH_MESSAGES), end_index
    while low < high:
        middle = (low + high) // 2
        if await log.locate_bytes(middle, LOOKED_THROUGH_BYTES, end_index) < end_index:
            low = middle + 1
        else:
            high = middle
    return low


async def publish_time_ms(log: Log, index: int, room: Room = _any_room) -> int:
    """When the log took the message with this index; 0 if retention has dropped it, or it is damaged."""
    try:
        async for page in _pages(log, index, index + 1, room):
            return int(next(_records(log, page))[PUBLISH_TIME_MS])
    except PositionError:
        pass
    return 0


async def _pages(log: Log, start: int, stop: int, room: Room) -> AsyncIterator[bytes]:
    """The records with these messages, many at once, without what is damaged, or retention has dropped meanwhile.

    Whoever has looked at a page drops it before the next one is asked for.
    """
    here = max(start, log.first_index)
    covers = np.empty(5, np.int64)
    least_bytes = 0
    while here < stop:
        most_bytes = await room(least_bytes)
        try:
            raw, _ = await log.read(here, stop, _PAGE_BYTES, most_bytes)
        except LargerRecordError as e:
            least_bytes = e.size
            continue
        except DamagedError:
            after = await log.next_readable(here)
            if after == here:
                raise
            here = after
            continue
        page, least_bytes = bytes(raw), 0
        del raw
        span(np.frombuffer(page, np.uint8), covers)
        here = int(covers[-1])
        yield page
        del page


def _records(log: Log, page: bytes) -> Iterator[Int64s]:
    """The places of a page's records, each until the next is asked for."""
    raw = np.frombuffer(page, np.uint8)
    places = np.empty(PLACES, np.int64)
    at = 0
    while at < len(page):
        if scan_record(raw, at, log.incarnation, -1, NO_KEY, places) != END:
            raise error("LOG_DAMAGED", f"a record of the log {log.place} cannot be read")
        yield places
        at = int(places[RECORD_END])


def _index_in_record(raw: bytes, places: Int64s, name: bytes, sequence_id: int) -> int:
    """The index of the message with this ID of this producer in a scanned record, or NOT_KNOWN."""
    batch = batches.decode(body_of(raw, places))
    producers_in_batch = [batch.producer_names[p] for p in range(len(batch.epochs))]
    if name not in producers_in_batch:
        return NOT_KNOWN
    mine = batch.sequence_ids == sequence_id
    if len(producers_in_batch) > 1:
        mine &= batch.producer_indexes == producers_in_batch.index(name)
    rows = np.flatnonzero(mine)
    return int(places[BASE_INDEX] + rows[-1]) if len(rows) else NOT_KNOWN


# -- Open: sessions of a topic with a log are started and resumed, each name by itself, some with one control record.

MAX_LOOKED_UP = 64
"""Of so many names at most `Open` answers where their last message stands: that may take a read each."""


class CheckNames(Protocol):
    """Whether these names may be opened, and whether that takes a record in the log. May raise."""

    def __call__(self, names: list[str], /, *, writes: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Begun:
    """Some names of a call, whose sessions are in force and may not be durable yet."""

    opening: SessionStarts
    names: int
    durable_epochs: Int64s
    """From before."""


async def open_sessions(
    topic: Topic,
    names: list[str],
    epochs: list[int] | None,
    check: CheckNames = lambda names, *, writes: None,
) -> OpenAnswer:
    """Starts sessions (`epochs` None), or resumes these, each name by itself. Older ones are fenced at once. `check` is
    called with some names right before these are opened, and may raise.

    Returns when what the names have in flight has settled and their epochs are durable. Raises what
    `Sessions.open` raises, or why the topic takes nothing now, or LOG_REFUSED: then nobody was fenced, or of more than
    NAMES_A_STEP names perhaps some were.
    """
    topic.check_serving()
    if topic.window is not None:
        raise error(
            "INVALID_REQUEST",
            f"topic {topic.name} is one of deduplication IDs, and has no producers: nothing has to be opened",
            hint="Publish without a session, every message with a deduplication ID: `client.publisher(topic)`.",
        )
    check_count(names)
    if len(names) > NAMES_A_STEP:
        # Before any of them is opened. What is opened in one step is looked at there.
        await check_names(names, topic.producers)
    if epochs is not None and len(epochs) != len(names):
        raise error("INVALID_REQUEST", f"epochs has {len(epochs)} values for {len(names)} producer names")
    parts = [slice(first, first + NAMES_A_STEP) for first in range(0, len(names), NAMES_A_STEP)]
    begun: list[_Begun] = []
    changes: list[asyncio.Future[None]] = []
    for part in parts:
        if begun:
            await asyncio.sleep(0)
        begun.append(await _begin(topic, names[part], None if epochs is None else epochs[part], check, changes))
    await asyncio.gather(*changes)
    if len(changes) < len(begun):
        await topic.all_settled()
    answer = OpenAnswer([], [], [])
    for one in begun:
        if answer.epochs:
            await asyncio.sleep(0)
        answer.extend(_opened(topic, one))
    places = [place for place in range(len(names)) if place not in answer.refusals]
    for place in places[:MAX_LOOKED_UP]:
        if answer.indexes[place] < 0:
            number = topic.producers.add(names[place].encode())
            answer.indexes[place] = await index_in_log(topic.producers, number, topic.log)
    return answer


async def check_names(names: list[str], known: Producers | None = None) -> None:
    """Raises INVALID_NAME for what an Open cannot take, as `check_count` and `encoded_names`, some at once."""
    check_count(names)
    for first in range(0, len(names), NAMES_A_STEP):
        encoded_names(names[first : first + NAMES_A_STEP], known)
        await asyncio.sleep(0)


async def _begin(
    topic: Topic,
    names: list[str],
    epochs: list[int] | None,
    check: CheckNames,
    changes: "list[asyncio.Future[None]]",
) -> _Begun:
    """The sessions of some names are in force. What the log has to say for that to be durable is added to `changes`."""
    topic.check_serving()
    if topic.flight.has(Purge):
        # Whether the names are being forgotten is not known before that has settled; no other one will name them.
        topic.sessions.use(names)
        await topic.all_settled()
        topic.check_serving()
    while epochs is not None and topic.sessions.are_in_flight(names):
        # Whether these sessions have been fenced is not known before that has settled.
        await topic.all_settled()
        topic.check_serving()
    check(names, writes=topic.sessions.need_a_record(names, epochs))
    if epochs is None and topic.sessions.term_is_used_up:
        topic.owner.begin_another_term()
    opening = topic.sessions.open(names, epochs)
    durable_epochs = topic.producers.numbers[opening.numbers, DURABLE_EPOCH]
    if (durable_epochs < opening.epochs).any():
        # All that is in flight stands before it, and has settled when it has.
        changes.append(topic.append_change(ProducerSessions(opening.names, opening.epochs)))
    return _Begun(opening, len(names), durable_epochs)


def _opened(topic: Topic, begun: _Begun) -> OpenAnswer:
    """What is answered of some names, once all that they wait for has settled."""
    opening = begun.opening
    answer = topic.sessions.opened(opening, begun.names)
    if opening.is_resume and topic.producers.has_forgotten:
        had_nothing = np.flatnonzero(begun.durable_epochs == NO_EPOCH)
        gone = [opening.names[k] for k in had_nothing]
        topic.resumed_after_purge(gone)
        topic.sessions.begin_anew(gone, opening.epochs[had_nothing])
        columns = zip(opening.places.tolist(), opening.names, opening.epochs.tolist(), strict=True)
        answer.forgotten.extend(
            place
            for place, name, epoch in columns
            if place not in answer.refusals
            and (answer.persisted[place] == NO_SEQUENCE_ID or topic.sessions.has_begun_anew(name, epoch))
        )
    return answer


logger = logging.getLogger("seqdedupe.topic")

MILLISECONDS_A_SECOND = 1000


class MessageState(Enum):
    """What is known of a message. Values as on the wire."""

    NOT_SEEN = 1
    IN_FLIGHT = 2
    PASSED_OVER = 3
    """A higher ID of its producer is in flight, it is not."""
    STORED = 4
    BELOW_WATERMARK = 5
    """It may have been stored, or never sent."""
    IMPORTED = 6
    """Its deduplication ID came with an imported window."""


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """What is known of one message: its state, where it stands if it is STORED, its producer's numbers."""

    state: MessageState
    pushed: int
    persisted: int
    in_flight_ms: int = 0
    position: Position | None = None
    publish_time_ms: int = 0
    """0: not known (any more)."""


class ProducerInFlight(NamedTuple):
    """What a producer has had in flight for long."""

    name: bytes
    first_id: int
    last_id: int
    in_flight_ms: int


async def message_state(topic: Topic, name: str, sequence_id: int, room: Room = _any_room) -> MessageStatus:
    """What is known of a message. One that the ring has forgotten is looked for at the log's end (`find_in_log`).

    Raises INVALID_NAME, INVALID_SEQUENCE_ID; INVALID_REQUEST in a topic of deduplication IDs; RECOVERING or LOG_DAMAGED
    while it is not certain.
    """
    encoded = producer_name(name)
    if sequence_id < 0:
        raise error("INVALID_SEQUENCE_ID", f"the sequence ID is {sequence_id}: they begin with 0")
    topic.check_knows_its_end()
    _check_has_producers(topic)
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"what topic {topic.name} holds is being found out: {topic.why}")
    number = topic.producers.number(encoded)
    if number is None:
        return MessageStatus(MessageState.NOT_SEEN, NO_SEQUENCE_ID, NO_SEQUENCE_ID)
    pushed, persisted = topic.producers.numbers[number, [PUSHED, PERSISTED]].tolist()
    if sequence_id > pushed:
        return MessageStatus(MessageState.NOT_SEEN, pushed, persisted)
    if sequence_id > persisted:
        since = topic.flight.since(number, sequence_id)
        if since is None:
            return MessageStatus(MessageState.PASSED_OVER, pushed, persisted)
        return MessageStatus(MessageState.IN_FLIGHT, pushed, persisted, in_flight_ms=_ms_since(topic, since))
    index = topic.producers.index_of(number, sequence_id)
    if index == NOT_KNOWN:
        index = await find_in_log(topic.log, encoded, sequence_id, topic.confirmed_index, room)
    if index == NOT_KNOWN:
        return MessageStatus(MessageState.BELOW_WATERMARK, pushed, persisted)
    return await _stored(topic, index, pushed, persisted, room)


async def state_by_id(topic: Topic, deduplication_id: bytes, room: Room = _any_room) -> MessageStatus:
    """What is known of the message with this deduplication ID.

    Raises INVALID_DEDUPLICATION_ID, INVALID_REQUEST in a topic of sequence IDs; RECOVERING, LOG_DAMAGED,
    STORE_DAMAGED, STORE_UNAVAILABLE or WINDOW_MISSING while it is not certain.
    """
    topic.check_knows_its_end()
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"what topic {topic.name} holds is being found out: {topic.why}")
    if topic.window is None:
        raise error("INVALID_REQUEST", f"topic {topic.name} is one of sequence IDs: name producer and sequence ID")
    payload, one = Binary.of_all([b""]), Binary.of_all([deduplication_id])
    batch = Batch(Binary(), NO_INT64S, NO_INT64S, NO_INT64S, payload, deduplication_ids=one)
    frame = check_by_id(batch.encode())
    looked_up = await topic.ids.runs.look_up(frame.encoded)
    index = topic.window.index_of(frame.view, frame.places)
    if index >= topic.confirmed_index:
        return MessageStatus(MessageState.IN_FLIGHT, NO_SEQUENCE_ID, NO_SEQUENCE_ID)
    since = since_ms(topic.applied, topic.ids.now())
    if index == NOWHERE and len(older := topic.ids.runs.older(frame, since, looked_up)):
        index = int(older[0])
    if index == IMPORTED:
        return MessageStatus(MessageState.IMPORTED, NO_SEQUENCE_ID, NO_SEQUENCE_ID)
    if index < topic.window.first_index:
        return MessageStatus(MessageState.NOT_SEEN, NO_SEQUENCE_ID, NO_SEQUENCE_ID)
    return await _stored(topic, index, NO_SEQUENCE_ID, NO_SEQUENCE_ID, room)


async def _stored(topic: Topic, index: int, pushed: int, persisted: int, room: Room) -> MessageStatus:
    position = await _position_of(topic, index)
    time_ms = await publish_time_ms(topic.log, index, room)
    return MessageStatus(MessageState.STORED, pushed, persisted, position=position, publish_time_ms=time_ms)


def _check_has_producers(topic: Topic) -> None:
    """Raises INVALID_REQUEST if there is nothing to say of any."""
    if topic.window is not None:
        why = f"topic {topic.name} is one of deduplication IDs, and knows neither producers nor sequence IDs"
        raise error("INVALID_REQUEST", why, hint="`seqdedupe topics show` says of which messages it knows the IDs.")


async def _position_of(topic: Topic, index: int) -> Position:
    """That of a message, without a message ID if retention has dropped it, or it is damaged."""
    try:
        return await topic.position_before(index + 1)
    except (PositionError, DamagedError):
        return Position(topic.incarnation, None, index)


async def in_flight(topic: Topic, longer_than_ms: int) -> list[ProducerInFlight]:
    """The producers that have had something in flight for at least so long, the longest first, and which IDs.

    What settles meanwhile may be left out. Raises INVALID_REQUEST.
    """
    if longer_than_ms < 0:
        raise error("INVALID_REQUEST", f"longer_than_ms is {longer_than_ms}: it should be 0 or higher")
    if topic.window is not None:
        return []
    until_seconds = topic.now_seconds() - longer_than_ms / MILLISECONDS_A_SECOND
    generation = -1
    while generation != topic.producers.generation:
        # Where producers have other numbers by now it is begun anew.
        generation = topic.producers.generation
        found: dict[int, InFlight] = {}
        for part in topic.flight.by_producer(until_seconds):
            for number, one in part.items():
                found.setdefault(number, one).add(one.first_id, one.last_id)
            await asyncio.sleep(0)
    names = topic.producers.names_of(np.array(sorted(found))) if found else []
    listed = [
        ProducerInFlight(name, one.first_id, one.last_id, _ms_since(topic, one.since_seconds))
        for name, one in zip(names, (found[number] for number in sorted(found)), strict=True)
    ]
    return sorted(listed, key=lambda each: -each.in_flight_ms)


def _ms_since(topic: Topic, since_seconds: float) -> int:
    return int((topic.now_seconds() - since_seconds) * MILLISECONDS_A_SECOND)


async def reset_producer(topic: Topic, name: str, persisted: int) -> int:
    """Sets a producer's persisted ID, and fences its sessions; durable and in force on return. Returns what it was.

    What it has in flight settles first. Raises INVALID_NAME, PRODUCER_NOT_FOUND; INVALID_REQUEST if it has not sent
    that ID, or in a topic of deduplication IDs; why the topic takes nothing now, or LOG_REFUSED: then nothing has
    changed, and nobody is fenced. Whoever is cancelled here does not know.
    """
    encoded = producer_name(name)
    topic.check_serving()
    _check_has_producers(topic)
    number = topic.producers.number(encoded)
    if number is None or not topic.producers.is_known(number):
        raise error("PRODUCER_NOT_FOUND", f"topic {topic.name} knows no producer {name!r}", topic=topic.name)
    # All that is in flight stands before the record, and is persisted when that is.
    before = int(topic.producers.numbers[number, PUSHED])
    if not NO_SEQUENCE_ID <= persisted <= before:
        raise error(
            "INVALID_REQUEST",
            f"persisted is {persisted}: it should be {NO_SEQUENCE_ID} to {before}, which producer {name!r} has sent",
            persisted=before,
        )
    if topic.sessions.term_is_used_up:
        topic.owner.begin_another_term()
    opening = topic.sessions.open([name], None)
    await topic.append_change(Reset(opening.names, opening.epochs, np.array([persisted], np.int64)))
    logger.warning(
        "topic %s: producer %r was reset from sequence ID %d to %d: what it sends above that is new, stored or not",
        topic.name,
        name,
        before,
        persisted,
    )
    return before


# -- What readers and operators do with the named cursors of a topic: look, move, hold, remove.

CursorContent = tuple[Position, str]
"""A position, and a note."""


def cursors_of(topic: Topic) -> tuple[NamedCursor, ...]:
    """The cursors that are in force, by name. Raises RECOVERING, LOG_DAMAGED, NOT_OWNER while that is not certain."""
    topic.check_knows_its_end()
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"what topic {topic.name} holds is being found out: {topic.why}")
    return topic.policy.cursors


def kept_by_cursor(topic: Topic, name: str) -> CursorContent | None:
    """What a cursor keeps. Raises as `cursors_of`, INVALID_NAME."""
    check_cursor_name(name)
    found = next((one for one in cursors_of(topic) if one.name == name), None)
    return None if found is None else (found.position, found.note)


async def move_cursor(topic: Topic, name: str, expected: CursorContent | None, new: CursorContent) -> None:
    """Has it keep something else, if it keeps this: durable on return. Where that is what it keeps, nothing is written.

    What is under way counts as if it were done: if it fails, this fails with it. Raises CURSOR_MOVED, INVALID_NAME,
    INVALID_POSITION, INVALID_REQUEST, TOO_MANY_CURSORS; why the topic takes nothing now, or LOG_REFUSED: then it is as
    it was. Whoever is cancelled here does not know.
    """
    check_cursor_name(name)
    position, note = new
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position} is no position: its parts do not fit together")
    if (size := len(note.encode())) > MAX_NOTE_BYTES:
        what = f"the note has {size} bytes: at most {MAX_NOTE_BYTES} are taken"
        raise error("INVALID_REQUEST", what, hint="Shorten the note, or keep what it says elsewhere.")
    topic.check_serving()
    cursors = {one.name: one for one in topic.newest_policy.cursors}
    found = cursors.get(name)
    if (None if found is None else (found.position, found.note)) != expected:
        there = "nothing" if found is None else f"the position {found.position}"
        wanted = "nothing" if expected is None else f"{expected[0]}"
        raise error(
            "CURSOR_MOVED",
            f"the cursor {name!r} of {topic.name} keeps {there}, and not {wanted}, or not with that note",
        )
    if found is None and len(cursors) >= MAX_CURSORS:
        raise error("TOO_MANY_CURSORS", f"topic {topic.name} has {len(cursors)} cursors: that is the most")
    moved = NamedCursor(name, position, note, 0 if found is None else found.hold_retention_in_mb)
    if moved != found or moved not in topic.policy.cursors:
        await topic.append_change(CursorChange(name, moved))


async def hold_cursor(topic: Topic, name: str, mb: int) -> None:
    """Has retention wait for it while the log is not larger than this; 0: not any more. Raises CURSOR_NOT_FOUND,
    INVALID_REQUEST, and as `move_cursor`."""
    if not 0 <= mb <= LARGEST:
        raise error("INVALID_REQUEST", f"hold_retention_in_mb is {mb}: it should be 0 to {LARGEST}")
    await topic.append_change(CursorChange(name, replace(_cursor(topic, name), hold_retention_in_mb=mb)))


async def remove_cursor(topic: Topic, name: str) -> None:
    """It keeps nothing any more. Raises CURSOR_NOT_FOUND, and as `move_cursor`."""
    await topic.append_change(CursorChange(_cursor(topic, name).name, None))


def _cursor(topic: Topic, name: str) -> NamedCursor:
    topic.check_serving()
    for one in topic.newest_policy.cursors:
        if one.name == name:
            return one
    raise error("CURSOR_NOT_FOUND", f"topic {topic.name} has no cursor {name!r}", topic=topic.name)
