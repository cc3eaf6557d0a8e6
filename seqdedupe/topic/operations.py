"""Requests to a live topic other than frames and reads: Open, the state of one message, messages in flight, the reset
of a producer, and named cursors.

Each change is a record in the log (`control`). When the call returns, the change is durable.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from seqdedupe.batch import Binary, without_producers
from seqdedupe.core.id_table import IMPORTED, NOWHERE
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.errors import DamagedError, PositionError, error
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import check_cursor_name, producer_name
from seqdedupe.topic.base import State
from seqdedupe.topic.control import CursorChange, ProducerSessions, Purge, Reset
from seqdedupe.topic.frame import InFlight, check_by_id
from seqdedupe.topic.judge import since_ms
from seqdedupe.topic.policy import LARGEST, MAX_CURSORS, MAX_NOTE_BYTES, NamedCursor
from seqdedupe.topic.readers import NOT_KNOWN, Room, any_room, find_in_log, index_in_log, publish_time_ms
from seqdedupe.topic.sessions import NAMES_A_STEP, OpenAnswer, SessionStarts, check_count, encoded_names
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("seqdedupe.topic")

MILLISECONDS_A_SECOND = 1000

# -- Open: starts and resumes sessions of a topic with a log. Each name is handled independently; several names share a
# control record. Older sessions are fenced at once. The call returns when the names' messages in flight have settled.

MAX_LOOKED_UP = 64
"""The maximum number of names for which `Open` looks up the position of the last message: each name may need a read."""


class CheckNames(Protocol):
    """Checks whether the client may open these names. `writes` is true if opening needs a record in the log. The check
    may raise an error."""

    def __call__(self, names: list[str], /, *, writes: bool) -> None: ...


async def open_sessions(
    topic: Topic,
    names: list[str],
    epochs: list[int] | None,
    check: CheckNames = lambda names, *, writes: None,
) -> OpenAnswer:
    """Start sessions (`epochs` None), or resume the sessions with these epochs. Each name is handled independently.
    Older sessions are fenced at once. `check` is called with some names just before they are opened, and may raise.

    Returns when the names' messages in flight have settled and their epochs are durable. Raises the errors of
    `Sessions.open`, the reason why the topic accepts nothing now, or LOG_REFUSED. After an error no session was fenced.
    With more than NAMES_A_STEP names, some sessions may be fenced.
    """
    topic.check_serving()
    if topic.window is not None:
        raise error(
            "INVALID_REQUEST",
            f"topic {topic.name} is one of deduplication IDs, and has no producers: no producer needs to be opened",
            hint="Give each message a deduplication ID (`client.publisher(topic)`), or use a topic of sequence IDs.",
        )
    check_count(names)
    if len(names) > NAMES_A_STEP:
        # Check before any name is opened. Names that are opened in one step are checked there.
        await check_names(names, topic.producers)
    if epochs is not None and len(epochs) != len(names):
        raise error("INVALID_REQUEST", f"epochs has {len(epochs)} values for {len(names)} producer names")
    parts = [slice(first, first + NAMES_A_STEP) for first in range(0, len(names), NAMES_A_STEP)]
    begun: list[SessionStarts] = []
    changes: list[asyncio.Future[None]] = []
    for part in parts:
        if begun:
            await asyncio.sleep(0)
        begun.append(await _begin(topic, names[part], None if epochs is None else epochs[part], check, changes))
    await asyncio.gather(*changes)
    if len(changes) < len(begun):
        await topic.all_settled()
    if epochs is not None:
        # The log may show messages of another owner, which that owner does not know yet.
        topic.check_serving()
    answer = OpenAnswer([], [], [])
    for one in begun:
        if answer.epochs:
            await asyncio.sleep(0)
        answer.extend(_opened(topic, one))
    places = [place for place in range(len(names)) if place not in answer.refusals]
    for place in places[:MAX_LOOKED_UP]:
        if answer.indexes[place] < 0 <= answer.persisted[place]:
            number = topic.producers.add(names[place].encode())
            answer.indexes[place] = await index_in_log(topic.producers, number, topic.log)
    return answer


async def check_names(names: list[str], known: Producers | None = None) -> None:
    """Raise INVALID_NAME for names that Open cannot accept. The checks are the same as in `check_count` and
    `encoded_names`. Each step of the event loop checks only some names."""
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
) -> SessionStarts:
    """Put the sessions of some names in force. If a record is needed to make them durable, the record is added to
    `changes`."""
    topic.check_serving()
    if topic.flight.has(Purge):
        # Only when this purge has settled is it known whether the names are forgotten. No later purge will contain
        # them.
        topic.sessions.use(names)
        await topic.all_settled()
        topic.check_serving()
    while epochs is not None and topic.sessions.are_in_flight(names):
        # Only when this has settled is it known whether these sessions have been fenced.
        await topic.all_settled()
        topic.check_serving()
    check(names, writes=topic.sessions.need_a_record(names, epochs))
    if epochs is None and topic.sessions.term_is_used_up:
        topic.owner.begin_another_term()
    opening = topic.sessions.open(names, epochs)
    if (opening.durable_epochs < opening.epochs).any():
        # Everything in flight is before this record in the log, and has settled when this record has settled.
        changes.append(topic.append_change(ProducerSessions(opening.names, opening.epochs)))
    return opening


def _opened(topic: Topic, opening: SessionStarts) -> OpenAnswer:
    """Return the answer for some names, after all messages and records for which these names wait have settled."""
    answer = topic.sessions.opened(opening)
    if opening.is_resume and topic.producers.has_forgotten:
        had_nothing = np.flatnonzero(opening.durable_epochs == NO_EPOCH)
        gone = [opening.names[k] for k in had_nothing]
        topic.resumed_after_purge(gone)
        topic.sessions.note_forgotten(gone, opening.epochs[had_nothing])
        columns = zip(opening.places.tolist(), opening.names, opening.epochs.tolist(), strict=True)
        answer.forgotten.extend(
            place
            for place, name, epoch in columns
            if place not in answer.refusals
            and (answer.persisted[place] == NO_SEQUENCE_ID or topic.sessions.was_forgotten(name, epoch))
        )
    return answer


# -- The state of one message.


class MessageState(Enum):
    """The known state of a message. The values are the same as on the wire."""

    NOT_SEEN = 1
    IN_FLIGHT = 2
    PASSED_OVER = 3
    """The producer has a higher ID in flight, but not this one."""
    STORED = 4
    BELOW_WATERMARK = 5
    """The message may have been stored, or may never have been sent."""
    IMPORTED = 6
    """The deduplication ID was part of an imported window."""


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """The known data of one message: the state, the position if the state is STORED, and the numbers of the message's
    producer."""

    state: MessageState
    pushed: int
    persisted: int
    in_flight_ms: int = 0
    position: Position | None = None
    publish_time_ms: int = 0
    """0: the publish time is not known, or no longer known."""


class ProducerInFlight(NamedTuple):
    """The messages that a producer has had in flight for a long time."""

    name: bytes
    first_id: int
    last_id: int
    in_flight_ms: int


async def message_state(topic: Topic, name: str, sequence_id: int, room: Room = any_room) -> MessageStatus:
    """Return the state of a message. If the message is no longer in the ring, the end of the log is searched
    (`find_in_log`).

    Raises INVALID_NAME, INVALID_SEQUENCE_ID; INVALID_REQUEST in a topic of deduplication IDs; RECOVERING or LOG_DAMAGED
    while the state is not certain.
    """
    encoded = producer_name(name)
    if sequence_id < 0:
        raise error("INVALID_SEQUENCE_ID", f"the sequence ID is {sequence_id}: they begin with 0")
    topic.check_knows_its_end()
    _check_has_producers(topic)
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"the content of topic {topic.name} is being determined: {topic.why}")
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


async def state_by_id(topic: Topic, deduplication_id: bytes, room: Room = any_room) -> MessageStatus:
    """Return the state of the message with this deduplication ID.

    Raises INVALID_DEDUPLICATION_ID; INVALID_REQUEST in a topic of sequence IDs; RECOVERING, LOG_DAMAGED, STORE_DAMAGED,
    STORE_UNAVAILABLE or WINDOW_MISSING while the state is not certain.
    """
    topic.check_knows_its_end()
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"the content of topic {topic.name} is being determined: {topic.why}")
    if topic.window is None:
        raise error("INVALID_REQUEST", f"topic {topic.name} is one of sequence IDs: name producer and sequence ID")
    frame = check_by_id(without_producers(Binary.of_all([deduplication_id]), Binary.of_all([b""])).encode())
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
    """Raise INVALID_REQUEST in a topic that has no producers."""
    if topic.window is not None:
        why = f"topic {topic.name} is one of deduplication IDs, and knows neither producers nor sequence IDs"
        raise error(
            "INVALID_REQUEST", why, hint="`seqdedupe topics show` shows the messages whose IDs the topic knows."
        )


async def _position_of(topic: Topic, index: int) -> Position:
    """Return the position of a message. The position has no message ID if retention has dropped the message, or the
    message is damaged."""
    try:
        return await topic.position_before(index + 1)
    except (PositionError, DamagedError):
        return Position(topic.incarnation, None, index)


async def in_flight(topic: Topic, longer_than_ms: int) -> list[ProducerInFlight]:
    """Return the producers with messages in flight for at least `longer_than_ms`, and the IDs of these messages. The
    longest time comes first.

    Messages that settle meanwhile may be omitted. Raises INVALID_REQUEST.
    """
    if longer_than_ms < 0:
        raise error("INVALID_REQUEST", f"longer_than_ms is {longer_than_ms}: it should be 0 or higher")
    if topic.window is not None:
        return []
    until_seconds = topic.now_seconds() - longer_than_ms / MILLISECONDS_A_SECOND
    generation = -1
    while generation != topic.producers.generation:
        # If producers were renumbered meanwhile, restart.
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
    """Set a producer's persisted ID and fence the producer's sessions. When this returns, the change is durable and in
    force. Return the previous ID.

    The producer's messages in flight settle first. Raises INVALID_NAME, PRODUCER_NOT_FOUND; INVALID_REQUEST if the
    producer has not sent that ID, or in a topic of deduplication IDs. Raises the reason why the topic accepts nothing
    now, or LOG_REFUSED. After an error, nothing has changed, and no session is fenced. If the caller is cancelled, the
    outcome is unknown.
    """
    encoded = producer_name(name)
    topic.check_serving()
    _check_has_producers(topic)
    number = topic.producers.number(encoded)
    if number is None or not topic.producers.is_known(number):
        raise error("PRODUCER_NOT_FOUND", f"topic {topic.name} knows no producer {name!r}", topic=topic.name)
    # Everything in flight is before the record in the log, and is persisted when the record is persisted.
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
        "topic %s: producer %r was reset from sequence ID %d to %d: what it sends above that counts as new, even "
        "if it is stored",
        topic.name,
        name,
        before,
        persisted,
    )
    return before


# -- Named cursors: readers and operators look at, move, hold and remove them.

CursorContent = tuple[Position, str]
"""A position, and a note."""


def cursors_of(topic: Topic) -> tuple[NamedCursor, ...]:
    """Return the cursors in force, by name. Raises RECOVERING, LOG_DAMAGED, NOT_OWNER while the cursors are not
    certain."""
    topic.check_knows_its_end()
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"the content of topic {topic.name} is being determined: {topic.why}")
    return topic.policy.cursors


def kept_by_cursor(topic: Topic, name: str) -> CursorContent | None:
    """Return a cursor's value. Raises INVALID_NAME and the errors of `cursors_of`."""
    check_cursor_name(name)
    found = next((one for one in cursors_of(topic) if one.name == name), None)
    return None if found is None else (found.position, found.note)


async def move_cursor(topic: Topic, name: str, expected: CursorContent | None, new: CursorContent) -> None:
    """Set the value of a cursor, if its current value is `expected`. When this returns, the change is durable. If the
    current value is already `new`, nothing is written.

    Changes in progress count as done: if they fail, this change fails too. Raises CURSOR_MOVED, INVALID_NAME,
    INVALID_POSITION, INVALID_REQUEST, TOO_MANY_CURSORS. Raises the reason why the topic accepts nothing now, or
    LOG_REFUSED. After an error, the cursor is unchanged. If the caller is cancelled, the outcome is unknown.
    """
    check_cursor_name(name)
    position, note = new
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position} is not a position: its parts do not fit together")
    if (size := len(note.encode())) > MAX_NOTE_BYTES:
        what = f"the note has {size} bytes: at most {MAX_NOTE_BYTES} are taken"
        raise error("INVALID_REQUEST", what, hint="Shorten the note, or store its content elsewhere.")
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
    """Make retention keep the messages after the cursor while the log is not larger than `mb`; 0 removes this hold.
    Raises CURSOR_NOT_FOUND, INVALID_REQUEST, and the errors of `move_cursor`."""
    if not 0 <= mb <= LARGEST:
        raise error("INVALID_REQUEST", f"hold_retention_in_mb is {mb}: it should be 0 to {LARGEST}")
    await topic.append_change(CursorChange(name, replace(_cursor(topic, name), hold_retention_in_mb=mb)))


async def remove_cursor(topic: Topic, name: str) -> None:
    """Remove the cursor. Raises CURSOR_NOT_FOUND, and the errors of `move_cursor`."""
    await topic.append_change(CursorChange(_cursor(topic, name).name, None))


def _cursor(topic: Topic, name: str) -> NamedCursor:
    topic.check_serving()
    for one in topic.newest_policy.cursors:
        if one.name == name:
            return one
    raise error("CURSOR_NOT_FOUND", f"topic {topic.name} has no cursor {name!r}", topic=topic.name)
