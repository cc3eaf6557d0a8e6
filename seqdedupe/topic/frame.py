"""The stages of a frame in a topic: the frame is checked, cut to its new rows, in flight, and finally answered.

`check` makes a `Frame` from bytes; `cut` returns the new rows of a frame as a separate frame. `Flight` contains the
frames and control records that the topic has passed to its log, until they settle. `FrameReceipt` and `Refusal` are the
answers.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT64S
from seqdedupe.core.id_table import bad_id
from seqdedupe.core.producers import NO_STREAM, Producers, are_all
from seqdedupe.core.rule import NOT_DUP
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import layout
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s
from seqdedupe.format.layout import (
    BAD,
    COLUMNS_END,
    DEDUPLICATION_ID_OFFSETS,
    KEY_OFFSETS,
    KEY_VALIDITY,
    NAME_OFFSETS,
    NAMES,
    PLACES,
    PRODUCER_INDEXES,
    PRODUCERS,
    PROPERTY_NAME_OFFSETS,
    PROPERTY_NAMES,
    PROPERTY_OFFSETS,
    PROPERTY_VALUE_OFFSETS,
    PROPERTY_VALUES,
    ROWS,
    SEQUENCE_IDS,
    size,
    start,
    take,
)
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_DEDUPLICATION_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
)
from seqdedupe.log.contract import Runs
from seqdedupe.tasks import Broadcast
from seqdedupe.topic.control import Change, CursorChange, Purge, Reset
from seqdedupe.topic.policy import Policy

_WRONG = {
    layout.NO_ROWS: "it has no rows, or its sequence_ids are not 8 bytes each",
    layout.TOO_MANY_ROWS: f"it has more than {MAX_BATCH_ROWS} rows",
    layout.BAD_NAMES: "its columns of producers do not fit together",
    layout.BAD_NAME_LENGTH: f"the name of producer {{bad}} is not 1 to {MAX_NAME_BYTES} bytes long",
    layout.BAD_PRODUCER_COLUMN: "producer_indexes has not one value a row",
    layout.BAD_PRODUCER_INDEX: "row {bad} points outside the list of producers",
    layout.UNUSED_PRODUCER: "producer {bad} has no row",
    layout.BAD_SEQUENCE_ID: "the sequence ID of row {bad} is below 0",
    layout.NOT_ASCENDING: "the sequence ID of row {bad} is not above the one before it of the same producer",
    layout.BAD_EVENT_TIMES: "event_times_ms has not one value a row",
    layout.BAD_KEYS: "the columns of keys do not fit together",
    layout.BAD_PROPERTIES: "the columns of properties do not fit together",
    layout.BAD_COMPLETE_UP_TO: "complete_up_to has not one value a producer",
    layout.BAD_DEDUPLICATION_IDS: "the columns of deduplication IDs do not fit together",
    layout.BAD_PAYLOADS: "the columns of payloads do not fit together",
    layout.PAYLOAD_TOO_LARGE: f"the payload of row {{bad}} is larger than {MAX_PAYLOAD_BYTES} bytes",
}
_REASONS = {
    layout.TOO_MANY_ROWS: "BATCH_TOO_LARGE",
    layout.BAD_NAME_LENGTH: "INVALID_NAME",
    layout.BAD_SEQUENCE_ID: "INVALID_SEQUENCE_ID",
    layout.NOT_ASCENDING: "NOT_ASCENDING",
    layout.PAYLOAD_TOO_LARGE: "MESSAGE_TOO_LARGE",
}


# -- The producers as which a frame may be published.

NamesJudge = Callable[[Bytes, Int64s2], Uint8s]
"""A function that returns 1 for each allowed name at these places of a buffer."""

_NOT_JUDGED = 0
_FORBIDDEN = 1
_ALLOWED = 2


class Allowing:
    """The decisions about the producer names that one client may use in a topic. A name is judged once, until the
    decision becomes invalid.

    `deny` creates the error for forbidden names.
    """

    def __init__(self, producers: Producers, judge: NamesJudge, deny: Callable[[list[str]], SeqdedupeError]) -> None:
        self.producers = producers
        self.deny = deny
        self.generation = 0
        """The number of times that earlier judgements became invalid."""
        self._judge = judge
        self._judged = np.zeros(0, np.uint8)
        self._numbers = producers.generation

    def judge_again(self, judge: NamesJudge) -> None:
        """Use this judge from now on, and drop earlier judgements."""
        self._judge = judge
        self._judged[:] = _NOT_JUDGED
        self.generation += 1

    def forbidden(self, numbers: Int64s) -> Int64s:
        """Return those of these producers, by number, that are forbidden."""
        # Every frame whose names differ from the previous frame's passes here, and nearly always all names are allowed.
        is_of_these = self._numbers == self.producers.generation
        if is_of_these and are_all(self._judged, numbers, _ALLOWED):
            return NO_INT64S
        if not is_of_these:
            self._judged[:], self._numbers = _NOT_JUDGED, self.producers.generation
        if len(self._judged) < len(self.producers):
            more = np.zeros(2 * len(self.producers), np.uint8)
            more[: len(self._judged)] = self._judged
            self._judged = more
        new = numbers[self._judged[numbers] == _NOT_JUDGED]
        if len(new):
            self._judged[new] = _FORBIDDEN + self._judge(*self.producers.listed(new))
        found: Int64s = numbers[self._judged[numbers] == _FORBIDDEN]
        return found


# -- Frames.


@dataclass(slots=True)
class NumbersCache:
    """The producers' numbers in the last frame of a stream. The next frame usually has the same list of names."""

    names: bytes = b""
    numbers: Int64s = field(default_factory=lambda: NO_INT64S)
    generation: int = 0
    """The generation of the numbers, see `Producers`."""
    stream: int = NO_STREAM
    """The stream's number in its topic; a unary call has none."""
    allowing: Allowing | None = None
    """The producers under which the client may publish; None: all."""
    forbidden: Int64s = field(default_factory=lambda: NO_INT64S)
    """The numbers of the producers under which the client may not publish."""
    judged: int = 0
    """The generation of the judgements, see `Allowing`."""

    def is_of(self, names: bytes, producers: Producers) -> bool:
        """Return whether the cache contains the current numbers for this list of names."""
        if names != self.names or self.generation != producers.generation:
            return False
        return self.allowing is None or self.judged == self.allowing.generation


@dataclass(slots=True)
class Frame:
    """A checked batch: its canonical encoding, the places of its columns, and its producers."""

    encoded: bytes
    view: Uint8s
    places: Int64s
    producer_rows: Int64s
    """For each producer of the batch: its row in the table of numbers."""
    rows: int
    column_bytes: int


def _laid_out(encoded: bytes) -> tuple[bytes, Uint8s, Int64s]:
    """Return a batch in its canonical encoding, and the places of its columns in the bytes. Raises
    `InvalidRequestError`."""
    if len(encoded) > MAX_BATCH_BYTES:
        raise error("BATCH_TOO_LARGE", f"the batch has {len(encoded)} bytes: at most {MAX_BATCH_BYTES} are accepted")
    places = np.empty(PLACES, np.int64)
    view = np.frombuffer(encoded, np.uint8)
    wrong = layout.layout(view, 0, len(encoded), places)
    if wrong != layout.CANONICAL:
        encoded = batches.canonical(encoded)
        view = np.frombuffer(encoded, np.uint8)
        wrong = layout.layout(view, 0, len(encoded), places)
    if wrong != layout.CANONICAL:
        why = _WRONG.get(wrong, "its fields do not fit together").format(bad=places[BAD])
        raise error(_REASONS.get(wrong, "INVALID_BATCH"), f"the batch is not valid: {why}")
    return encoded, view, places


def check_by_id(encoded: bytes, *, wants_keys: bool = False) -> Frame:
    """Return the checked frame of an encoded batch for a topic of deduplication IDs. Raises `InvalidRequestError`, for
    example if every row must have a key, and a row has no key."""
    encoded, view, places = _laid_out(encoded)
    at: list[int] = places.tolist()
    if at[PRODUCERS]:
        why = "this topic takes deduplication IDs, and no producers and sequence IDs"
        raise error("INVALID_BATCH", f"the batch is not valid: {why}")
    if (row := bad_id(view, places, at[ROWS])) >= 0:
        bounds = view[start(at, DEDUPLICATION_ID_OFFSETS) + 4 * row :][:8].view(np.int32)
        why = f"the deduplication ID of row {row} has {bounds[1] - bounds[0]} bytes"
        raise error("INVALID_DEDUPLICATION_ID", f"{why}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
    if wants_keys and not _has_keys(view, at):
        why = "by its key each message finds its partition in this topic, and some have none"
        raise error("INVALID_BATCH", f"the batch is not valid: {why}", hint="Give every message a key.")
    if size(at, PROPERTY_OFFSETS):
        _check_properties(view, places)
    return Frame(encoded, view, places, NO_INT64S, at[ROWS], at[COLUMNS_END])


def _has_keys(view: Uint8s, at: list[int]) -> bool:
    """Whether every row has a key."""
    if not (validity := size(at, KEY_VALIDITY)):
        return size(at, KEY_OFFSETS) > 0
    begin = start(at, KEY_VALIDITY)
    return bool(np.unpackbits(view[begin : begin + validity], count=at[ROWS], bitorder="little").all())


def check(encoded: bytes, producers: Producers, cache: NumbersCache) -> Frame:
    """Return the checked frame of an encoded batch. Raises `InvalidRequestError`; INVALID_EPOCH for unknown names."""
    encoded, view, places = _laid_out(encoded)
    # Use plain numbers: reading one element of a numpy array costs as much as ten elements of a list.
    at: list[int] = places.tolist()
    if size(at, DEDUPLICATION_ID_OFFSETS):
        why = "this topic takes no deduplication IDs, but producers with sequence IDs (`client.producer`)"
        raise error("INVALID_BATCH", f"the batch is not valid: {why}")
    if size(at, PROPERTY_OFFSETS):
        _check_properties(view, places)
    names = encoded[start(at, NAME_OFFSETS) : start(at, NAMES) + size(at, NAMES)]
    if not cache.is_of(names, producers):
        known = producers.known(view, places)
        if known is None:
            raise _wrong_names(view, places, producers)
        if cache.allowing is not None:
            cache.forbidden, cache.judged = cache.allowing.forbidden(known), cache.allowing.generation
        cache.names, cache.numbers, cache.generation = names, known, producers.generation
        if not len(cache.forbidden):
            producers.activity.use(known, cache.stream)
    return Frame(encoded, view, places, cache.numbers, at[ROWS], at[COLUMNS_END])


def _check_properties(view: Uint8s, places: Int64s) -> None:
    for offsets, values in ((PROPERTY_NAME_OFFSETS, PROPERTY_NAMES), (PROPERTY_VALUE_OFFSETS, PROPERTY_VALUES)):
        if size(places, values) and not _is_text(view, places, offsets, values):
            raise error("INVALID_BATCH", "the batch is not valid: the names and values of properties are not all UTF-8")
    row = _row_with_a_name_twice(view, places)
    if row >= 0:
        raise error("INVALID_BATCH", f"the batch is not valid: row {row} has two properties of one name")


def _row_with_a_name_twice(view: Uint8s, places: Int64s) -> int:
    """Return the first row that lists a property's name twice; -1 if there is none."""
    of_rows = _column(view, places, PROPERTY_OFFSETS).view(np.int32)
    several = np.flatnonzero(of_rows[1:] - of_rows[:-1] > 1).tolist()
    if not several:
        return -1
    blob = _column(view, places, PROPERTY_NAMES).tobytes()
    first_of, bounds = of_rows.tolist(), _column(view, places, PROPERTY_NAME_OFFSETS).view(np.int32).tolist()
    for row in several:
        first, end = first_of[row], first_of[row + 1]
        if len({blob[bounds[i] : bounds[i + 1]] for i in range(first, end)}) < end - first:
            return int(row)
    return -1


def _is_text(view: Uint8s, places: Int64s, offsets: int, values: int) -> bool:
    """Return whether every value of a column is UTF-8: the bytes of the column are UTF-8, and no value begins within a
    character."""
    blob = _column(view, places, values)
    try:
        blob.tobytes().decode()
    except UnicodeDecodeError:
        return False
    begins = _column(view, places, offsets).view(np.int32)
    return not (blob[begins[begins < len(blob)]] & 0xC0 == 0x80).any()


def _column(view: Uint8s, places: Int64s, column: int) -> Uint8s:
    at = start(places, column)
    return view[at : at + size(places, column)]


def _wrong_names(view: Uint8s, places: Int64s, producers: Producers) -> SeqdedupeError:
    """Return the error for a list that contains unknown producers."""
    if not _is_text(view, places, NAME_OFFSETS, NAMES):
        return error("INVALID_NAME", "the batch is not valid: its producer names are not all UTF-8")
    names = names_of(view.tobytes(), places)
    if len(set(names)) < len(names):
        return error("INVALID_NAME", "the batch is not valid: a producer is listed twice")
    unknown = next(name for name in names if name not in producers).decode()
    return error("INVALID_EPOCH", f"producer {unknown!r} has no session on this topic: open it", producer_name=unknown)


def names_of(encoded: bytes, places: Int64s) -> list[bytes]:
    """Return the producer names of a batch whose layout is known."""
    producers = int(places[PRODUCERS])
    offsets = np.frombuffer(encoded, np.int32, producers + 1, start(places, NAME_OFFSETS)).tolist()
    names = int(start(places, NAMES))
    return [encoded[names + offsets[p] : names + offsets[p + 1]] for p in range(producers)]


def cut(frame: Frame, verdicts: Uint8s) -> Frame:
    """Return the new rows of a frame as a separate frame."""
    producer_rows = frame.producer_rows
    if frame.places[PRODUCERS] <= 1:
        out = np.empty(len(frame.encoded), np.uint8)
        encoded = out[: take(frame.view, frame.places, verdicts, NOT_DUP, out)].tobytes()
    else:
        rows = np.flatnonzero(verdicts == NOT_DUP)
        whole = batches.decode(frame.encoded)
        encoded = whole.take(rows).encode()
        producer_rows = np.ascontiguousarray(producer_rows[np.unique(whole.producer_indexes[rows])])
    view = np.frombuffer(encoded, np.uint8)
    places = np.empty(PLACES, np.int64)
    if layout.layout(view, 0, len(encoded), places) != layout.CANONICAL:
        raise error("INTERNAL", "a batch that was cut is not canonical")
    return Frame(encoded, view, places, producer_rows, int(places[ROWS]), int(places[COLUMNS_END]))


# -- The answers of a topic to a frame.

NONE_KNOWN = (NO_INT64S, NO_INT64S, NO_INT64S)
"""The last three columns of a `FrameReceipt` with only new rows. They are shared because this is the usual case, and
each new array costs a call."""


@dataclass(slots=True)
class FrameReceipt:
    """The outcome of a frame that was not refused, like `Receipt` in publish.proto."""

    frame: int
    verdicts: Uint8s | None
    """None: all rows are NOT_DUP."""
    first_index: int
    """The index of the first new row; -1 if no row is new."""
    runs: Runs = ()
    """The message IDs of the new rows, once they are stored."""
    known_rows: Int64s = field(default_factory=lambda: NO_INT64S)
    known_indexes: Int64s = field(default_factory=lambda: NO_INT64S)
    imported_rows: Int64s = field(default_factory=lambda: NO_INT64S)
    """The rows with verdict DUP whose IDs were imported: no message of the topic has these IDs."""
    durable_at: int = 0
    """0: the new rows are durable. Otherwise they are only written, and become durable when the topic is durable up to
    this index."""

    def stands_at(self, first_index: int) -> None:
        """Set the index that the first new row has in the log. This index may differ from the planned index."""
        if self.known_rows.size:
            moved = np.where(self.known_indexes >= self.first_index, first_index - self.first_index, 0)
            self.known_indexes = self.known_indexes + moved
        self.first_index = first_index


@dataclass(frozen=True, slots=True)
class RefusedProducer:
    """The details of one producer in a refusal."""

    name: str
    epoch: int
    current_epoch: int
    sequence_id: int
    previous_sequence_id: int
    pushed: int
    persisted: int
    expected_sequence_id: int | None = None
    """With GAP: the first ID that is missing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a frame of which no message was admitted."""

    frame: int
    error: SeqdedupeError
    producers: list[RefusedProducer] = field(default_factory=list)


class OutOfStepError(Exception):
    """A failure after rows of a frame were decided: the rows count as in flight, but will not be appended."""


Reply = Callable[[FrameReceipt | Refusal], None]
"""A function that is called once for each frame."""


# -- Frames and records that a topic has handed to its log, with an outcome that is not known yet.

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""The maximum number of bytes that are admitted and not settled, in one topic."""

MAX_IN_FLIGHT_FRAMES = 16_384

LISTED_AT_ONCE = 16
"""The number of frames examined in one step of the event loop. The largest frames take some ms each."""

FRAMES_A_PART = 256
"""The number of frames whose producers are examined in one step."""


@dataclass(slots=True, eq=False)
class Admitted:
    """A frame whose new rows are in flight."""

    frame: Frame
    receipt: FrameReceipt
    reply: Reply
    since_seconds: float
    """The time of admission, by the event loop's clock."""
    when_durable: Callable[[], None] | None = None
    """Set if the receipt may be sent before the frame is durable. It is called when the frame is durable."""
    is_told: bool = False
    """Whether the receipt was sent before the frame was durable."""

    @property
    def body(self) -> bytes:
        """The bytes that were passed to the log."""
        return self.frame.encoded


@dataclass(slots=True, eq=False)
class Changing:
    """A control record in flight. If the record was not stored, `done` raises the reason. The caller that waits for
    `done` may have been cancelled."""

    body: bytes
    change: Change
    done: "asyncio.Future[None]"

    def settled(self, why: SeqdedupeError | None = None) -> None:
        """Set the result of `done`: the record is stored, or was not stored for the reason `why`."""
        if self.done.cancelled():
            return
        if why is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(why)
            # Prevent Python's warning about an error that no caller reads.
            self.done.exception()


@dataclass(slots=True)
class InFlight:
    """The messages of a producer in flight: lowest and highest ID, and the time since which they are in flight."""

    first_id: int
    last_id: int
    since_seconds: float

    def add(self, first_id: int, last_id: int) -> None:
        """Add later messages."""
        self.first_id, self.last_id = min(self.first_id, first_id), max(self.last_id, last_id)


class Flight:
    """Frames and control records in the order in which they were passed to the log. They settle in the same order."""

    def __init__(self) -> None:
        self._admitted: deque[Admitted | Changing] = deque()
        self._changes: Counter[type[Change]] = Counter()
        self._bytes = 0
        self._ever = 0
        self._written = 0
        """The number of the oldest items that are in the log but not known to be durable."""
        self._settled = Broadcast()

    def __len__(self) -> int:
        return len(self._admitted)

    def __iter__(self) -> Iterator[Admitted | Changing]:
        """Iterate from the oldest item to the newest."""
        return iter(self._admitted)

    @property
    def bytes(self) -> int:
        """The bytes of everything in flight."""
        return self._bytes

    def add(self, admitted: Admitted | Changing) -> None:
        """Add the newest item. If this raises MemoryError, nothing has changed."""
        self._admitted.append(admitted)
        if isinstance(admitted, Admitted):
            self._bytes += len(admitted.frame.encoded)
        else:
            self._bytes += len(admitted.body)
            self._changes[type(admitted.change)] += 1
        self._ever += 1

    def take_back(self) -> None:
        """Remove the newest item, because it was not passed to the log."""
        newest = self._admitted.pop()
        self._bytes -= len(newest.body)
        if isinstance(newest, Changing):
            self._changes[type(newest.change)] -= 1
        self._ever -= 1

    def newest_policy(self, policy: Policy) -> Policy:
        """Return the policy that the topic will have when everything has settled. `policy` is the policy that is set
        now."""
        if self._changes[Policy] or self._changes[CursorChange]:
            for item in self._admitted:
                if isinstance(item, Changing):
                    if isinstance(item.change, Policy):
                        policy = item.change
                    elif isinstance(item.change, CursorChange):
                        policy = item.change.applied_to(policy)
        return policy

    @property
    def oldest(self) -> Admitted | Changing | None:
        """The item that settles next."""
        return self._admitted[0] if self._admitted else None

    def since(self, number: int, sequence_id: int) -> float | None:
        """Return the time since which a producer's message, or the oldest copy of it, has been in flight; None if it is
        not in flight."""
        for frame, since in self._frames():
            producer_rows, ids = _columns(frame)
            if (ids[producer_rows == number] == sequence_id).any():
                return since
        return None

    def by_producer(self, until_seconds: float) -> Iterator[dict[int, InFlight]]:
        """Yield the messages that have been in flight since `until_seconds` or longer, by producer number. Each part
        covers some frames, the oldest frames first.

        Each part shows the state at the time when it is requested: without settled frames, and without frames newer
        than the first part.
        """
        at, end = 0, self._ever
        while (at := max(at, self._ever - len(self._admitted))) < end:
            settled = self._ever - len(self._admitted)
            some = list(islice(self._admitted, at - settled, min(at + LISTED_AT_ONCE, end) - settled))
            at += len(some)
            found: dict[int, InFlight] = {}
            for item in some:
                if isinstance(item, Changing):
                    continue
                if item.since_seconds > until_seconds:
                    at = end
                    break
                producer_rows, ids = _columns(item.frame)
                for number, first, last in _spans(producer_rows, ids):
                    known = found.setdefault(number, InFlight(first, last, item.since_seconds))
                    known.add(first, last)
            yield found

    def _frames(self) -> Iterator[tuple[Frame, float]]:
        return ((item.frame, item.since_seconds) for item in self._admitted if isinstance(item, Admitted))

    def has(self, kind: type[Reset] | type[Purge]) -> bool:
        """Return whether a reset (or a purge) of producers is in flight."""
        return self._changes[kind] > 0

    def producer_rows(self) -> list[Int64s]:
        """Return the producers of all frames, in parts."""
        rows = [frame.producer_rows for frame, _ in self._frames()]
        return [np.concatenate(rows[first : first + FRAMES_A_PART]) for first in range(0, len(rows), FRAMES_A_PART)]

    def renumber(self, new_numbers: Int64s) -> None:
        """Give the producers new numbers, indexed by the old number."""
        for frame, _ in self._frames():
            frame.producer_rows = new_numbers[frame.producer_rows]

    def written(self, count: int) -> list[Admitted | Changing]:
        """Record that `count` more items are written. Return these items, the oldest item first."""
        some = list(islice(self._admitted, self._written, self._written + count))
        self._written += count
        return some

    def rows_told_early(self) -> int:
        """Return the number of messages that are written but not known to be durable, and whose senders have an early
        receipt."""
        written = islice(self._admitted, self._written)
        return sum(item.frame.rows for item in written if isinstance(item, Admitted) and item.is_told)

    def take(self) -> Admitted | Changing:
        """Remove and return the oldest item, which has settled. The caller must call `tell` afterwards."""
        admitted = self._admitted.popleft()
        if self._written:
            self._written -= 1
        if isinstance(admitted, Admitted):
            self._bytes -= len(admitted.frame.encoded)
        else:
            self._bytes -= len(admitted.body)
            self._changes[type(admitted.change)] -= 1
        return admitted

    def tell(self) -> None:
        """Wake the callers that wait for room or for settlement."""
        self._settled.tell()

    def has_room(self) -> bool:
        """Whether another frame may be admitted now."""
        return self._bytes < MAX_IN_FLIGHT_BYTES and len(self._admitted) < MAX_IN_FLIGHT_FRAMES

    async def wait_for_room(self) -> None:
        """Wait until another frame may be admitted."""
        while not self.has_room():
            await self._settled.wait()

    @property
    def ever(self) -> int:
        """The number of items that were added and not taken back."""
        return self._ever

    @property
    def settled(self) -> int:
        """The number of items that have settled: the first `settled` items that were ever added."""
        return self._ever - len(self._admitted)

    async def all_of_now(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until everything that is in flight now has settled. An error of `check`, which is called before each
        wait, ends the wait."""
        last = self._ever
        while self.settled < last:
            check()
            await self._settled.wait()


def _columns(frame: Frame) -> tuple[Int64s, Int64s]:
    """Return the producer's number and the sequence ID of each row of a frame."""
    ids = np.frombuffer(frame.encoded, np.int64, frame.rows, start(frame.places, SEQUENCE_IDS))
    several = size(frame.places, PRODUCER_INDEXES) > 0
    indexes = np.frombuffer(
        frame.encoded, np.int32, frame.rows if several else 0, start(frame.places, PRODUCER_INDEXES)
    )
    return frame.producer_rows[indexes] if len(indexes) else np.repeat(frame.producer_rows, len(ids)), ids


def _spans(producer_rows: Int64s, ids: Int64s) -> Iterator[tuple[int, int, int]]:
    """Return each producer's number with its first and its last ID. IDs rise within a frame."""
    order = np.argsort(producer_rows, kind="stable")
    sorted_rows, sorted_ids = producer_rows[order], ids[order]
    first = np.flatnonzero(np.diff(sorted_rows, prepend=-1))
    last = np.append(first[1:] - 1, len(order) - 1)
    return zip(sorted_rows[first].tolist(), sorted_ids[first].tolist(), sorted_ids[last].tolist(), strict=True)
