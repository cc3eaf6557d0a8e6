"""The producers of one topic: names, numbers, activity, the ring of recent messages, and the removal of empty rows.

Begin with `Producers`.
"""

from collections.abc import Iterator
from itertools import compress

import numpy as np
import numpy.typing as npt

from seqdedupe.core.name_table import Growing, Names, joined
from seqdedupe.core.recent import (
    NO_MESSAGE,
    find,
    find_duplicates,
    list_names,
    new_ring,
    persist,
    persist_all,
    with_room,
)
from seqdedupe.core.rule import (
    DURABLE_EPOCH,
    EPOCH,
    NEWEST,
    NUMBERS,
    PERSISTED,
    PUSHED,
    STATED,
    confirm,
    decide_batch,
    fail,
    gaps,
    mark,
    refusal,
)
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel
from seqdedupe.format.layout import ROWS
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID

# -- Which producers are in use, by producer number, and for how long the others have been idle.
#
# Time is counted in periods. The caller calls `pass_period` when a period has passed. Use of a producer sets its count
# to 0: when a stream first uses it, and then as long as the stream is connected. So a stream pays nothing for further
# use of its producers. A producer costs five bytes; only producers that several streams use are also kept in sets.

Int32s = npt.NDArray[np.int32]

NO_STREAM = 0
"""The stream of a use that is over at once. Streams are numbered from 1."""

MAX_STREAM = 2**31 - 1
"""The highest number of a stream. The numbers then begin again."""

MAX_PERIODS = 255
"""The count of idle periods ends here."""

_ROW = np.dtype([("idle", np.uint8), ("stream", np.int32)])


class Activity:
    """The activity of all producers: each producer's number of idle periods, and the stream that last used the
    producer. Also contains the connected streams."""

    def __init__(self, capacity: int) -> None:
        self._table = Growing(capacity, (), _ROW)
        self._last_stream = NO_STREAM
        self._connected: dict[int, set[int]] = {}
        """By stream number, the producers that another stream has used since."""

    def reserve(self, capacity: int) -> None:
        """Make room for this number of producers. New producers count as in use."""
        self._table.reserve(capacity)

    @property
    def _idle(self) -> Uint8s:
        return self._table.rows["idle"]

    @property
    def _stream(self) -> Int32s:
        return self._table.rows["stream"]

    def connect(self) -> int:
        """Begin a stream, and return the stream's number. Producers that the stream uses are in use until
        `disconnect`."""
        self._last_stream = self._last_stream % MAX_STREAM + 1
        self._connected[self._last_stream] = set()
        return self._last_stream

    def disconnect(self, stream: int) -> None:
        """End the stream with this number."""
        self._connected.pop(stream, None)

    def use(self, numbers: Int64s, stream: int = NO_STREAM) -> None:
        """Mark producers as used by this stream, for as long as the stream is connected."""
        self._idle[numbers] = 0
        if stream == NO_STREAM:
            return
        before = self._stream[numbers]
        of_others = (before != stream) & (before != NO_STREAM)
        if of_others.any():
            for number, other in zip(numbers[of_others].tolist(), before[of_others].tolist(), strict=True):
                if other in self._connected:
                    self._connected[other].add(number)
        self._stream[numbers] = stream

    def use_shared(self) -> Iterator[None]:
        """Mark the producers that several streams have used, while one of these streams is connected. Each step handles
        one stream."""
        for shared in list(self._connected.values()):
            self._idle[np.fromiter(shared, np.int64, len(shared))] = 0
            yield

    def renew_all(self) -> None:
        """Mark all producers as used now."""
        self._idle[:] = 0

    def pass_period(self, first: int, end: int) -> None:
        """Count one more period for the producers from `first` to before `end`."""
        idle = self._idle[first:end]
        idle += idle < MAX_PERIODS
        idle[np.isin(self._stream[first:end], np.array(list(self._connected), np.int32))] = 0

    def idle_for(self, periods: int, first: int, end: int) -> Int64s:
        """Return the producers from `first` to before `end` that were idle for `periods`, in ascending order."""
        return first + np.flatnonzero(self._idle[first:end] >= periods)

    def keep(self, kept: Int64s, new_numbers: Int64s, capacity: int) -> None:
        """Keep these producers, numbered in this order, and drop the others. `new_numbers` has the new number for each
        old number."""
        left = Growing(capacity, (), _ROW)
        left.rows[: len(kept)] = self._table.rows[kept]
        self._table = left
        for stream, shared in self._connected.items():
            left_numbers = new_numbers[np.fromiter(shared, np.int64, len(shared))]
            self._connected[stream] = set(left_numbers[left_numbers >= 0].tolist())


# -- Many producer rows (see `rule`) at once: marked as changed, tested for being empty, moved to the front.

Bools = npt.NDArray[np.bool_]

NEW_ROW = np.array([-1, -1, 0, 0, -1, -1], np.int64)
"""The row of a producer that is unknown."""


@kernel()
def mark_all(numbers: Int64s, dirty: Uint8s) -> int:
    """Call `rule.mark` for all of these. Return 0."""
    for i in range(numbers.shape[0]):
        mark(dirty, numbers[i])
    return 0


def are_empty(rows: Int64s) -> Bools:
    """Return which producer rows contain no more than the row of an unknown producer."""
    empty = np.empty(len(rows), np.uint8)
    find_empty(rows, empty)
    return empty.view(bool)


@kernel()
def find_empty(numbers: Int64s2, empty: Uint8s) -> int:
    """Write to `empty` which producer rows are empty. Return 0."""
    for row in range(empty.shape[0]):
        ids = numbers[row, PUSHED] >= 0 or numbers[row, PERSISTED] >= 0
        empty[row] = not (ids or numbers[row, EPOCH] > NO_EPOCH or numbers[row, DURABLE_EPOCH] > NO_EPOCH)
    return 0


@kernel()
def are_all(column: Uint8s, numbers: Int64s, value: int) -> bool:
    """Whether a column, indexed by producer number, has this value for all these producers. For a column that is too
    short, the answer is false."""
    at = 0
    while at < numbers.shape[0] and numbers[at] < column.shape[0] and column[numbers[at]] == value:
        at += 1
    return bool(at == numbers.shape[0])


@kernel()
def move_rows(numbers: Int64s2, stays: Uint8s, new_numbers: Int64s) -> int:
    """Move the producer rows to keep to the front, in place. `new_numbers` receives their new numbers, -1 for the other
    rows.

    Return the number of rows to keep.
    """
    staying = 0
    for row in range(stays.shape[0]):
        new_numbers[row] = -1
        if stays[row]:
            for column in range(NUMBERS):
                numbers[staying, column] = numbers[row, column]
            new_numbers[row] = staying
            staying += 1
    return staying


_FIRST_CAPACITY = 64
_WORD_BITS = 64


class Producers:
    """The known state of a topic's producers. A producer's *number* is its place in the order in which names arrived.

    `numbers[number]` is the producer row (see `rule`). A bit of `dirty` shows whether the row has changed since the
    last `collect_dirty`. New names replace both arrays, so do not keep references to them. `renumber` assigns new
    numbers and changes `generation`. So a caller that keeps a number must also keep the generation, and compare it
    before using the number.
    """

    def __init__(self) -> None:
        self._names = Names()
        self._numbers = Growing(_FIRST_CAPACITY, (NUMBERS,), np.int64)
        self._dirty = Growing(_words(_FIRST_CAPACITY), (), np.uint64)
        self._ring = new_ring()
        self._entered = 0
        self.activity = Activity(_FIRST_CAPACITY)
        self.generation = 0
        """The number of times that producers were renumbered."""
        self.has_forgotten = False
        """Whether names were ever forgotten, also by earlier processes. If so, an unknown name may have had a
        session."""
        self.forgotten_stated = NO_MESSAGE
        """The log states `has_forgotten` from this index on; -1: not known."""
        self._has_purged = False
        """Whether some rows are empty and wait for their removal."""
        self._may_have_sessions = False

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    @property
    def numbers(self) -> Int64s:
        """The producer rows. There may be more rows than producers."""
        rows: Int64s = self._numbers.rows
        return rows

    @property
    def dirty(self) -> Uint8s:
        """One bit per producer, see `rule.mark`."""
        return self._dirty.rows.view(np.uint8)

    def is_known(self, number: int) -> bool:
        """Whether the producer has not been forgotten."""
        return not (self._has_purged and are_empty(self.numbers[number : number + 1])[0])

    def known_count(self) -> int:
        """Return the number of producers that have not been forgotten."""
        return len(self) - (int(np.count_nonzero(self.empty())) if self._has_purged else 0)

    def names_from(self, first: int, count: int | None = None) -> list[bytes]:
        """Return the names from number `first` on, at most `count`."""
        return self._names.some(first, count)

    def copied_names(self) -> Names:
        """Return a copy of all names, by number."""
        return self._names.copy()

    def names_of(self, numbers: Int64s) -> list[bytes]:
        """Return the names of the producers with these numbers."""
        return self._names.names(numbers)

    def listed(self, numbers: Int64s) -> tuple[Bytes, Int64s2]:
        """Return a buffer with the names of the producers with these numbers, and the begin and end of each name in the
        buffer."""
        return self._names.listed_some(numbers)

    def number(self, name: bytes) -> int | None:
        """Return the producer's number, or None if the name is unknown."""
        return self._names.number(name)

    def find_all(self, names: list[bytes]) -> Int64s:
        """Return the producers' numbers, -1 for unknown names."""
        return self._names.numbers(*joined(names))

    def add(self, name: bytes) -> int:
        """Return the producer's number. A new name gets a new number."""
        return int(self.add_all([name])[0])

    def add_all(self, names: list[bytes]) -> Int64s:
        """Return the producers' numbers. New names get new ones."""
        return self.add_listed(*joined(names))

    def add_listed(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """Do the same for names at `spans` (begin, end) of a buffer."""
        before = len(self)
        # Before the names are added: no name may have a number without a row.
        self._reserve(before + len(spans))
        numbers = self._names.add(raw, spans)
        self.numbers[before : len(self)] = NEW_ROW
        return numbers

    def take_in(self, names: Names) -> Int64s:
        """Do the same as `add_all`, and take ownership of `names`. If there are no producers yet, only make the
        rows."""
        if len(self):
            return self.add_listed(*names.listed())
        self._reserve(len(names))
        self._names = names
        self.numbers[: len(names)] = NEW_ROW
        return np.arange(len(names))

    def load(self, names: Names, persisted: Int64s, epochs: Int64s, stated: Int64s) -> None:
        """Load a snapshot: PERSISTED, DURABLE_EPOCH and STATED, by producer number.

        This object must be new. It takes ownership of `names`.
        """
        self.take_in(names)
        rows = self.numbers[: len(names)]
        rows[:, PUSHED] = persisted
        rows[:, PERSISTED] = persisted
        rows[:, EPOCH] = epochs
        rows[:, DURABLE_EPOCH] = epochs
        rows[:, STATED] = stated
        self._may_have_sessions = True

    def _reserve(self, producers: int) -> None:
        """Make room for this number of producers."""
        self._numbers.reserve(producers)
        self._dirty.reserve(_words(producers))
        self.activity.reserve(producers)

    # -- admission ---------------------------------------------------------------------------------------------

    def known(self, view: Uint8s, places: Int64s) -> Int64s | None:
        """Return the numbers of a batch's producers. Return None if a producer is unknown or occurs twice."""
        spans, _ = list_names(view, places.reshape(1, -1), 1)
        found = self._names.numbers(view, spans)
        if found.min() < 0 or len(set(found.tolist())) < len(found):
            return None
        return found

    def refusal(self, view: Uint8s, places: Int64s, producer_rows: Int64s, lone: bool, gapless: bool = False) -> int:
        """Return the reason why a frame is not admitted, or ADMITTED. See `rule.refusal`."""
        return refusal(view, places, producer_rows, self._numbers.rows, lone, gapless, _NO_REASONS)

    def expected_ids(self, view: Uint8s, places: Int64s, producer_rows: Int64s) -> Int64s:
        """Return the missing ID at the first gap for each producer of a frame; -1 if the producer has no gap."""
        expected = np.empty(len(producer_rows), np.int64)
        gaps(view, places, producer_rows, self.numbers, expected)
        return expected

    def reasons(self, view: Uint8s, places: Int64s, producer_rows: Int64s, lone: bool, gapless: bool = False) -> Uint8s:
        """Return, for each producer of a frame, the reason why the producer's messages are not admitted, or
        ADMITTED."""
        reasons = np.empty(len(producer_rows), np.uint8)
        refusal(view, places, producer_rows, self.numbers, lone, gapless, reasons)
        return reasons

    def decide(self, view: Uint8s, places: Int64s, producer_rows: Int64s, deduplicate: bool) -> tuple[int, Uint8s]:
        """Return the number of new rows, and the verdicts. See `rule.decide`."""
        verdicts = np.empty(places[ROWS], np.uint8)
        return decide_batch(view, places, producer_rows, self._numbers.rows, deduplicate, verdicts), verdicts

    def originals(self, view: Uint8s, places: Int64s, producer_rows: Int64s, verdicts: Uint8s) -> tuple[Int64s, Int64s]:
        """Return the rows with verdict DUP whose original is still known, and the originals' indexes."""
        found = np.empty(len(verdicts), np.int64)
        if not find_duplicates(view, places, producer_rows, self.numbers, self._ring, self._entered, verdicts, found):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows = np.flatnonzero(found >= 0)
        return rows, found[rows]

    # -- outcomes ----------------------------------------------------------------------------------------------

    def persist(self, view: Uint8s, places: Int64s, producer_rows: Int64s) -> None:
        """Merge a batch that is in the log at `places[BASE_INDEX]` by maximum, and enter its messages into the ring."""
        self._may_have_sessions = True
        with_room(self._ring, self._entered, int(places[ROWS]))
        numbers, dirty = self._numbers.rows, self._dirty.rows.view(np.uint8)
        self._entered = persist(view, places, producer_rows, numbers, dirty, self._ring, self._entered)

    def replay(self, raw: bytes, table: Int64s, count: int) -> None:
        """Merge `count` scanned records of the log by maximum. New names get numbers."""
        view = np.frombuffer(raw, np.uint8)
        spans, first_name = list_names(view, table, count)
        producer_rows = self.add_listed(view, spans)
        self._may_have_sessions = True
        with_room(self._ring, self._entered, int(table[:count, ROWS].sum()))
        self._entered = persist_all(
            view, table, count, producer_rows, first_name,
            self.numbers, self.dirty, self._ring, self._entered,
        )  # fmt: skip

    def fail_in_flight(self) -> None:
        """Revoke all messages in flight: they will never be in the log. See `rule.fail`."""
        fail(self.numbers, len(self))

    # -- sessions and snapshots --------------------------------------------------------------------------------

    def has_sessions(self) -> bool:
        """Whether any producer has a session in force. Open or a control record has started the session."""
        if self._may_have_sessions:
            self._may_have_sessions = bool((self.numbers[: len(self), EPOCH] > NO_EPOCH).any())
        return self._may_have_sessions

    def open(self, numbers: Int64s, epochs: Int64s) -> None:
        """Apply the epochs that Open has assigned at once. This fences the producers' older sessions.

        `confirm_sessions` makes the epochs permanent; `fail_in_flight` revokes them.
        """
        self.numbers[numbers, EPOCH] = epochs
        self._may_have_sessions = True
        self.activity.use(numbers)

    def confirm_sessions(self, numbers: Int64s, epochs: Int64s, persisted: Int64s | None, index: int) -> None:
        """Merge a control record with these sessions by maximum. The record is in the log, before the message with this
        index.

        If the record repeats the state of producers, `persisted` has the persisted IDs (-1: none). If Open started the
        sessions, `persisted` is None.
        Live and replayed records are treated alike.
        """
        if persisted is None:
            persisted = np.full(len(numbers), NO_SEQUENCE_ID, np.int64)
        # The record may be at the end of a segment. The segment is dropped as soon as the message before the record may
        # be dropped.
        stated = index - 1
        if len(numbers):
            self._may_have_sessions |= bool(epochs.any())
            each = np.arange(len(numbers), dtype=np.int32)
            confirm(numbers, epochs, each, persisted, stated, self.numbers, self.dirty)

    def reset(self, numbers: Int64s, epochs: Int64s, persisted: Int64s, index: int) -> None:
        """Apply a control record that resets these producers. The record is in the log before the message with this
        index.

        Earlier IDs of these producers are void, and no earlier message is an original. IDs that a producer has pushed
        since stay pushed. Live and replayed records are treated in the same way.
        """
        self._may_have_sessions = True
        rows = self.numbers[numbers]
        is_idle = rows[:, PUSHED] == rows[:, PERSISTED]
        rows[is_idle, PUSHED] = persisted[is_idle]
        rows[:, PERSISTED] = persisted
        rows[:, EPOCH] = np.maximum(rows[:, EPOCH], epochs)
        rows[:, DURABLE_EPOCH] = np.maximum(rows[:, DURABLE_EPOCH], epochs)
        # See `confirm_sessions`.
        rows[:, STATED] = index - 1
        rows[:, NEWEST] = NO_MESSAGE
        self.numbers[numbers] = rows
        mark_all(numbers, self.dirty)

    def purge(self, numbers: Int64s, index: int) -> None:
        """Apply a control record that forgets these producers. The record is in the log before the message with this
        index.

        Without producers, the record states that some producers were forgotten. The statements of this record and of
        earlier records about these producers are void. IDs that a producer has pushed since stay pushed, and its
        session stays in force. Live and replayed records are treated in the same way.
        """
        rows = self.numbers[numbers]
        has_sent = rows[:, PUSHED] != rows[:, PERSISTED]
        has_opened = rows[:, EPOCH] != rows[:, DURABLE_EPOCH]
        rows[~has_sent, PUSHED] = NO_SEQUENCE_ID
        rows[~(has_sent | has_opened), EPOCH] = NO_EPOCH
        rows[:, PERSISTED] = NO_SEQUENCE_ID
        rows[:, DURABLE_EPOCH] = NO_EPOCH
        rows[:, STATED] = rows[:, NEWEST] = NO_MESSAGE
        self.numbers[numbers] = rows
        mark_all(numbers, self.dirty)
        self._has_purged = True
        self.has_forgotten = True
        # See `confirm_sessions`.
        self.forgotten_stated = index - 1

    def due(self, periods: int, first: int, end: int) -> Int64s:
        """Return the producers from `first` to before `end` that must be forgotten: idle for `periods`, with nothing in
        flight."""
        idle = self.activity.idle_for(periods, first, min(end, len(self)))
        rows = self.numbers[idle]
        in_flight = (rows[:, PUSHED] != rows[:, PERSISTED]) | (rows[:, EPOCH] != rows[:, DURABLE_EPOCH])
        self.activity.use(idle[in_flight])
        due: Int64s = idle[~in_flight & ~are_empty(rows)]
        return due

    def empty(self) -> Bools:
        """Return by producer number whether the row is empty."""
        return are_empty(self.numbers[: len(self)])

    def renumber(self, names: Names, stays: Bools, back: Int64s) -> tuple[Int64s, Names]:
        """Keep only the remaining names, in their present order, followed by the names in `back`.

        Return the new number for each old number (-1 if the producer is removed), and the old names. All rows count as
        changed. See `LettingGo`.
        """
        rows_back = self.numbers[back]
        new_numbers = np.empty(len(self), np.int64)
        staying = move_rows(self.numbers, stays.view(np.uint8), new_numbers)
        new_numbers[back] = np.arange(staying, len(names))
        capacity = max(len(names), _FIRST_CAPACITY)
        self._numbers.shrink(capacity)
        self.numbers[staying : len(names)] = rows_back
        self._dirty = Growing(_words(capacity), (), np.uint64)
        mark_all(np.arange(len(names)), self.dirty)
        self.activity.keep(np.concatenate([np.flatnonzero(stays), back]), new_numbers, capacity)
        old, self._names = self._names, names
        self.generation += 1
        self._has_purged = False
        return new_numbers, old

    def stated_below(self, index: int, first: int = 0, end: int | None = None) -> Int64s:
        """Return the producers from `first` to before `end` whose state may be missing in the log from `index` on.

        Before the log below `index` is dropped, the DURABLE_EPOCH and PERSISTED of these producers must be written
        again.
        """
        numbers = self.numbers[first : len(self) if end is None else min(end, len(self))]
        is_something = (numbers[:, DURABLE_EPOCH] > 0) | (numbers[:, PERSISTED] >= 0)
        return first + np.flatnonzero(is_something & (numbers[:, STATED] < index))

    def mark_dirty(self, numbers: Int32s | Int64s) -> None:
        """Mark producers again whose rows from `collect_dirty` were not stored."""
        mark_all(numbers.astype(np.int64), self.dirty)

    def index_of(self, number: int, sequence_id: int) -> int:
        """Return the index of the message with this ID; -1 if the index is unknown or no longer known."""
        return int(find(sequence_id, number, self.numbers, self._ring, self._entered))

    def collect_dirty(self, forgotten: Int64s | None = None) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Return number, PERSISTED, DURABLE_EPOCH and STATED of the changed producers, and mark these producers as
        clean.

        `forgotten` producers are included, with the values of an unknown producer.
        """
        if forgotten is not None:
            mark_all(forgotten, self.dirty)
        words = np.flatnonzero(self._dirty.rows[: _words(len(self))] != 0)
        bits = np.flatnonzero(np.unpackbits(self._dirty.rows[words].view(np.uint8), bitorder="little").view(bool))
        changed = words[bits // _WORD_BITS] * _WORD_BITS + bits % _WORD_BITS
        # Column by column: to copy whole rows, most of them far apart, takes twice as long.
        persisted, epochs, stated = (self.numbers[changed, column] for column in (PERSISTED, DURABLE_EPOCH, STATED))
        if forgotten is not None:
            gone = np.isin(changed, forgotten)
            persisted[gone], epochs[gone], stated[gone] = NEW_ROW[PERSISTED], NEW_ROW[DURABLE_EPOCH], NEW_ROW[STATED]
        collected = changed.astype(np.int32), persisted, epochs, stated
        # This is the last step: if there is no memory for a copy, all rows still have to be stored.
        self._dirty.rows[words] = 0
        return collected


def _words(producers: int) -> int:
    return -(-producers // _WORD_BITS)


_NO_REASONS = np.zeros(0, np.uint8)


# -- Removal of empty rows and their names, while a topic serves.
#
# A table of a million names takes a fifth of a second to make. So the new table is made in steps while the old one is
# in use: between steps names are added, opened and used by their old numbers. All numbers change at once, in `finish`,
# which goes over rows only.

NAMES_A_STEP = 4096
"""The names that one step takes."""


class LettingGo:
    """The removal of some producers of a topic. Only one removal may be in progress."""

    def __init__(self, producers: Producers, is_free: Bools) -> None:
        """`is_free` contains, for each producer number, whether the row is `empty` and no session or message uses the
        number."""
        self._producers = producers
        self._stays = ~is_free
        self._taken = 0
        self._left = Names(int(np.count_nonzero(self._stays)))

    def prepare(self) -> Iterator[None]:
        """Copy names, `NAMES_A_STEP` per step. Call `finish` directly after the last step, with nothing in between."""
        while self._taken < len(self._producers):
            names = self._producers.names_from(self._taken, NAMES_A_STEP)
            stays = self._stays[self._taken : self._taken + len(names)].tolist()
            # Names that are newer than `is_free` stay.
            stays += [True] * (len(names) - len(stays))
            self._left.add_all(list(compress(names, stays)))
            self._taken += len(names)
            yield

    def finish(self, is_free: Bools) -> Int64s:
        """Renumber the remaining producers, in their order. Return the new number for each old number, -1 if the
        producer is removed.

        `is_free` is the current state. A producer that is used again since the beginning stays, and gets one of the
        last numbers. All rows count as changed.
        """
        newer = len(is_free) - len(self._stays)
        stays = np.concatenate([self._stays, np.ones(newer, bool)])
        back = np.flatnonzero(~stays & ~is_free)
        self._left.add_all(self._producers.names_of(back))
        new_numbers, self._left = self._producers.renumber(self._left, stays, back)
        return new_numbers

    def clear(self) -> Iterator[None]:
        """Release the old table, some of it at each step."""
        return self._left.clear()
