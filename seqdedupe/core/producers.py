"""The producers of one topic: names, numbers, who uses them, the ring of recent messages, freeing of forgotten ones.

Begin with `Producers`.
"""

from collections.abc import Iterator
from itertools import compress

import numpy as np
import numpy.typing as npt

from seqdedupe.core.name_table import Growing, Names, joined
from seqdedupe.core.recent import NO_MESSAGE, find, find_duplicates, new_ring, persist, with_room
from seqdedupe.core.replay import list_names, persist_all
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
from seqdedupe.format.columns import ROWS
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID

# -- Which producers somebody uses, by producer number: what it takes to tell who has been idle for long.
#
# Time is counted in periods, each of which somebody says has passed. Whoever uses a producer sets its count to 0: a
# stream when it begins to, and from then on for as long as it is connected. So it costs a stream nothing to go on
# with the producers that it has, and a producer five bytes; only those that several streams use are kept in sets,
# too.

Int32s = npt.NDArray[np.int32]

NO_STREAM = 0
"""Of a use that is over at once. Streams have numbers from 1 on."""

MAX_STREAM = 2**31 - 1
"""After so many the streams' numbers begin again."""

MAX_PERIODS = 255
"""Counting ends here."""

_ROW = np.dtype([("idle", np.uint8), ("stream", np.int32)])


class Activity:
    """Of each producer the periods that it has been idle, and the stream that used it last; and the streams."""

    def __init__(self, capacity: int) -> None:
        self._table = Growing(capacity, (), _ROW)
        self._last_stream = NO_STREAM
        self._connected: dict[int, set[int]] = {}
        """By the streams' numbers, the producers that another stream has used since."""

    def reserve(self, capacity: int) -> None:
        """There is room for so many producers; new ones are in use."""
        self._table.reserve(capacity)

    @property
    def _idle(self) -> Uint8s:
        return self._table.rows["idle"]

    @property
    def _stream(self) -> Int32s:
        return self._table.rows["stream"]

    def connect(self) -> int:
        """A stream begins: its number. What it uses is in use until `disconnect`."""
        self._last_stream = self._last_stream % MAX_STREAM + 1
        self._connected[self._last_stream] = set()
        return self._last_stream

    def disconnect(self, stream: int) -> None:
        """The stream with this number has ended."""
        self._connected.pop(stream, None)

    def use(self, numbers: Int64s, stream: int = NO_STREAM) -> None:
        """These are being used, by this stream for as long as it is connected."""
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
        """What several streams have used is in use as long as one of them is connected; a stream at each step."""
        for shared in list(self._connected.values()):
            self._idle[np.fromiter(shared, np.int64, len(shared))] = 0
            yield

    def renew_all(self) -> None:
        """All are in use now."""
        self._idle[:] = 0

    def pass_period(self, first: int, end: int) -> None:
        """A period has passed for the producers `first` to `end` (not included)."""
        idle = self._idle[first:end]
        idle += idle < MAX_PERIODS
        idle[np.isin(self._stream[first:end], np.array(list(self._connected), np.int32))] = 0

    def idle_for(self, periods: int, first: int, end: int) -> Int64s:
        """Those of `first` to `end` (not included) that have been idle for as long, rising."""
        return first + np.flatnonzero(self._idle[first:end] >= periods)

    def keep(self, kept: Int64s, new_numbers: Int64s, capacity: int) -> None:
        """These go on under new numbers, in this order (`new_numbers`: by the old ones); the others are gone."""
        left = Growing(capacity, (), _ROW)
        left.rows[: len(kept)] = self._table.rows[kept]
        self._table = left
        for stream, shared in self._connected.items():
            left_numbers = new_numbers[np.fromiter(shared, np.int64, len(shared))]
            self._connected[stream] = set(left_numbers[left_numbers >= 0].tolist())


# -- Many producer rows (see `rule`) at once: marked as changed, found to say nothing, moved to the front.

Bools = npt.NDArray[np.bool_]

NEW_ROW = np.array([-1, -1, 0, 0, -1, -1], np.int64)
"""The producer row of a producer of which nothing is known."""


@kernel()
def mark_all(numbers: Int64s, dirty: Uint8s) -> int:
    """`rule.mark` for all of these. Returns 0."""
    for i in range(numbers.shape[0]):
        mark(dirty, numbers[i])
    return 0


def are_empty(rows: Int64s) -> Bools:
    """Which of these producer rows say no more than that of a name that never came."""
    empty = np.empty(len(rows), np.uint8)
    find_empty(rows, empty)
    return empty.view(bool)


@kernel()
def find_empty(numbers: Int64s2, empty: Uint8s) -> int:
    """Says of producer rows, in `empty`, which ones say nothing. Returns 0."""
    for row in range(empty.shape[0]):
        ids = numbers[row, PUSHED] >= 0 or numbers[row, PERSISTED] >= 0
        empty[row] = not (ids or numbers[row, EPOCH] > NO_EPOCH or numbers[row, DURABLE_EPOCH] > NO_EPOCH)
    return 0


@kernel()
def are_all(column: Uint8s, numbers: Int64s, value: int) -> bool:
    """Whether a column by producer number has this value for all of these; not where it does not reach so far."""
    at = 0
    while at < numbers.shape[0] and numbers[at] < column.shape[0] and column[numbers[at]] == value:
        at += 1
    return bool(at == numbers.shape[0])


@kernel()
def move_rows(numbers: Int64s2, stays: Uint8s, new_numbers: Int64s) -> int:
    """Moves the producer rows that stay to the front, in place: `new_numbers` says where, -1 for the others.

    Returns how many stay.
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
    """What is known of a topic's producers. A producer's *number* is its place in the order in which names came.

    `numbers[number]` is its producer row (see `rule`); a bit of `dirty` tells whether that has changed since the last
    `collect_dirty`. Both are other arrays after names have come: nobody may keep them. `renumber` gives new numbers:
    whoever keeps one compares the `generation` that it is of.
    """

    def __init__(self) -> None:
        self._names = Names()
        self._numbers = Growing(_FIRST_CAPACITY, (NUMBERS,), np.int64)
        self._dirty = Growing(_words(_FIRST_CAPACITY), (), np.uint64)
        self._ring = new_ring()
        self._entered = 0
        self.activity = Activity(_FIRST_CAPACITY)
        self.generation = 0
        """How often the numbers have changed."""
        self.has_forgotten = False
        """Whether names were ever forgotten, also before this process: one that had a session may be known no more."""
        self.forgotten_stated = NO_MESSAGE
        """From this index on the log states that; -1: not known."""
        self._has_purged = False
        """Whether some names are only kept until they are let go."""
        self._may_have_sessions = False

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    @property
    def numbers(self) -> Int64s:
        """The producer rows; there may be more than producers."""
        rows: Int64s = self._numbers.rows
        return rows

    @property
    def dirty(self) -> Uint8s:
        """A bit a producer: see `rule.mark`."""
        return self._dirty.rows.view(np.uint8)

    def is_known(self, number: int) -> bool:
        """Whether the producer has not been forgotten."""
        return not (self._has_purged and are_empty(self.numbers[number : number + 1])[0])

    def known_count(self) -> int:
        """How many producers have not been forgotten."""
        return len(self) - (int(np.count_nonzero(self.empty())) if self._has_purged else 0)

    def names_from(self, first: int, count: int | None = None) -> list[bytes]:
        """The names from this number on, at most `count`."""
        return self._names.some(first, count)

    def copied_names(self) -> Names:
        """All names as of now, by number."""
        return self._names.copy()

    def names_of(self, numbers: Int64s) -> list[bytes]:
        """The names of the producers with these numbers."""
        return self._names.names(numbers)

    def listed(self, numbers: Int64s) -> tuple[Bytes, Int64s2]:
        """The names of the producers with these numbers in a buffer, and from where to where each stands in it."""
        return self._names.listed_some(numbers)

    def number(self, name: bytes) -> int | None:
        """The producer's number, None if the name never came."""
        return self._names.number(name)

    def find_all(self, names: list[bytes]) -> Int64s:
        """The producers' numbers, -1 for names that never came."""
        return self._names.numbers(*joined(names))

    def add(self, name: bytes) -> int:
        """The producer's number, a new one if the name is new."""
        return int(self.add_all([name])[0])

    def add_all(self, names: list[bytes]) -> Int64s:
        """The producers' numbers, new ones for names that are new."""
        return self.add_listed(*joined(names))

    def add_listed(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """The same, for names that stand in a buffer, each from a place up to another."""
        before = len(self)
        # First: no name may have a number without a row.
        self._reserve(before + len(spans))
        numbers = self._names.add(raw, spans)
        self.numbers[before : len(self)] = NEW_ROW
        return numbers

    def take_in(self, names: Names) -> Int64s:
        """`add_all` for names that are its own from now on: where it has none yet, that takes no more than the rows."""
        if len(self):
            return self.add_listed(*names.listed())
        self._reserve(len(names))
        self._names = names
        self.numbers[: len(names)] = NEW_ROW
        return np.arange(len(names))

    def load(self, names: Names, persisted: Int64s, epochs: Int64s, stated: Int64s) -> None:
        """Takes over a snapshot: these are PERSISTED, DURABLE_EPOCH and STATED, by producer number.

        Only before anything else came. The names are its own from now on.
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
        """There is room for so many."""
        self._numbers.reserve(producers)
        self._dirty.reserve(_words(producers))
        self.activity.reserve(producers)

    # -- admission ---------------------------------------------------------------------------------------------

    def known(self, view: Uint8s, places: Int64s) -> Int64s | None:
        """The numbers of a batch's producers; None if one of them never came, or comes twice."""
        spans, _ = list_names(view, places.reshape(1, -1), 1)
        found = self._names.numbers(view, spans)
        if found.min() < 0 or len(set(found.tolist())) < len(found):
            return None
        return found

    def refusal(self, view: Uint8s, places: Int64s, producer_rows: Int64s, lone: bool, gapless: bool = False) -> int:
        """Why a frame is not admitted, or ADMITTED. See `rule.refusal`."""
        return refusal(view, places, producer_rows, self._numbers.rows, lone, gapless, _NO_REASONS)

    def expected_ids(self, view: Uint8s, places: Int64s, producer_rows: Int64s) -> Int64s:
        """Of each producer of a frame the ID that is missing at the first gap, -1 if none is."""
        expected = np.empty(len(producer_rows), np.int64)
        gaps(view, places, producer_rows, self.numbers, expected)
        return expected

    def reasons(self, view: Uint8s, places: Int64s, producer_rows: Int64s, lone: bool, gapless: bool = False) -> Uint8s:
        """Of each producer of a frame, why what it sends is not admitted, or ADMITTED."""
        reasons = np.empty(len(producer_rows), np.uint8)
        refusal(view, places, producer_rows, self.numbers, lone, gapless, reasons)
        return reasons

    def decide(self, view: Uint8s, places: Int64s, producer_rows: Int64s, deduplicate: bool) -> tuple[int, Uint8s]:
        """How many rows are new, and the verdicts. See `rule.decide`."""
        verdicts = np.empty(places[ROWS], np.uint8)
        return decide_batch(view, places, producer_rows, self._numbers.rows, deduplicate, verdicts), verdicts

    def originals(self, view: Uint8s, places: Int64s, producer_rows: Int64s, verdicts: Uint8s) -> tuple[Int64s, Int64s]:
        """The rows with verdict DUP whose original is still known, and the originals' indexes."""
        found = np.empty(len(verdicts), np.int64)
        if not find_duplicates(view, places, producer_rows, self.numbers, self._ring, self._entered, verdicts, found):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows = np.flatnonzero(found >= 0)
        return rows, found[rows]

    # -- outcomes ----------------------------------------------------------------------------------------------

    def persist(self, view: Uint8s, places: Int64s, producer_rows: Int64s) -> None:
        """A batch is in the log, at `places[BASE_INDEX]`: merges it by maximum, and its messages enter the ring."""
        self._may_have_sessions = True
        with_room(self._ring, self._entered, int(places[ROWS]))
        numbers, dirty = self._numbers.rows, self._dirty.rows.view(np.uint8)
        self._entered = persist(view, places, producer_rows, numbers, dirty, self._ring, self._entered)

    def replay(self, raw: bytes, table: Int64s, count: int) -> None:
        """`count` scanned records are in the log: merges them by maximum; names that are new get numbers."""
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
        """What is in flight never will be in the log: see `rule.fail`."""
        fail(self.numbers, len(self))

    # -- sessions and snapshots --------------------------------------------------------------------------------

    def has_sessions(self) -> bool:
        """Whether a session of any of them is in force, by Open or by a control record."""
        if self._may_have_sessions:
            self._may_have_sessions = bool((self.numbers[: len(self), EPOCH] > NO_EPOCH).any())
        return self._may_have_sessions

    def open(self, numbers: Int64s, epochs: Int64s) -> None:
        """Open gave these producers these epochs: they are in force at once, which fences their older sessions.

        They last only if `confirm_sessions` says so: `fail_in_flight` takes them back.
        """
        self.numbers[numbers, EPOCH] = epochs
        self._may_have_sessions = True
        self.activity.use(numbers)

    def confirm_sessions(self, numbers: Int64s, epochs: Int64s, persisted: Int64s | None, index: int) -> None:
        """A control record with these sessions is in the log, before the message with this index: merges by maximum.

        `persisted` (-1: none) is there where it states a producer anew; None where Open started the sessions. Live and
        in replay the same.
        """
        if persisted is None:
            persisted = np.full(len(numbers), NO_SEQUENCE_ID, np.int64)
        # It may stand at the end of a segment that is dropped as soon as the message before it may be dropped.
        stated = index - 1
        if len(numbers):
            self._may_have_sessions |= bool(epochs.any())
            each = np.arange(len(numbers), dtype=np.int32)
            confirm(numbers, epochs, each, persisted, stated, self.numbers, self.dirty)

    def reset(self, numbers: Int64s, epochs: Int64s, persisted: Int64s, index: int) -> None:
        """A control record that sets these producers is in the log, before the message with this index.

        What was known of their IDs counts no more, and no message from before answers for one. What a producer has
        handed over since stays pushed. Live and in replay the same.
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
        """A control record is in the log, before the message with this index, that forgets these producers, or (none)
        says that some were: what it and earlier ones say of them counts no more.

        What a producer has handed over since stays pushed, and its session in force. Live and in replay the same.
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
        """Those of the producers `first` to `end` that can be forgotten: idle for as long, and nothing is in flight."""
        idle = self.activity.idle_for(periods, first, min(end, len(self)))
        rows = self.numbers[idle]
        in_flight = (rows[:, PUSHED] != rows[:, PERSISTED]) | (rows[:, EPOCH] != rows[:, DURABLE_EPOCH])
        self.activity.use(idle[in_flight])
        due: Int64s = idle[~in_flight & ~are_empty(rows)]
        return due

    def empty(self) -> Bools:
        """By producer number, whether nothing is known of it."""
        return are_empty(self.numbers[: len(self)])

    def renumber(self, names: Names, stays: Bools, back: Int64s) -> tuple[Int64s, Names]:
        """These are the names from now on: of those that stay, in their order, and then of those in `back`.

        Returns the new number of each old one, -1 where it is gone, and the old names. All count as changed. See
        `LettingGo`.
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
        """Those of the producers `first` to `end` (not included) of which the log from this index on may not state
        epoch and persisted ID any more.

        Before what is below `index` is dropped they have to be stated again, with their DURABLE_EPOCH and PERSISTED.
        """
        numbers = self.numbers[first : len(self) if end is None else min(end, len(self))]
        is_something = (numbers[:, DURABLE_EPOCH] > 0) | (numbers[:, PERSISTED] >= 0)
        return first + np.flatnonzero(is_something & (numbers[:, STATED] < index))

    def mark_dirty(self, numbers: Int32s | Int64s) -> None:
        """What `collect_dirty` gave out was not stored."""
        mark_all(numbers.astype(np.int64), self.dirty)

    def index_of(self, number: int, sequence_id: int) -> int:
        """The index of the message with this ID, -1 if it is not known (any more)."""
        return int(find(sequence_id, number, self.numbers, self._ring, self._entered))

    def collect_dirty(self, forgotten: Int64s | None = None) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Of the producers that changed: number, PERSISTED, DURABLE_EPOCH, STATED. They count as clean from now on.

        Of those that are to be forgotten too, as if they were.
        """
        if forgotten is not None:
            mark_all(forgotten, self.dirty)
        words = np.flatnonzero(self._dirty.rows[: _words(len(self))] != 0)
        bits = np.flatnonzero(np.unpackbits(self._dirty.rows[words].view(np.uint8), bitorder="little").view(bool))
        changed = words[bits // _WORD_BITS] * _WORD_BITS + bits % _WORD_BITS
        # Column by column: whole rows, most of them far apart, take twice as long to copy.
        persisted, epochs, stated = (self.numbers[changed, column] for column in (PERSISTED, DURABLE_EPOCH, STATED))
        if forgotten is not None:
            gone = np.isin(changed, forgotten)
            persisted[gone], epochs[gone], stated[gone] = NEW_ROW[PERSISTED], NEW_ROW[DURABLE_EPOCH], NEW_ROW[STATED]
        collected = changed.astype(np.int32), persisted, epochs, stated
        # Last: without memory for a copy, all of them still have to be stored.
        self._dirty.rows[words] = 0
        return collected


def _words(producers: int) -> int:
    return -(-producers // _WORD_BITS)


_NO_REASONS = np.zeros(0, np.uint8)


# -- Freeing names and rows of producers of which nothing is known, while a topic serves.
#
# A table of a million names takes a fifth of a second to make. So the new one is made beside the one in use, some
# names at a time; in between names come, are opened and used as always, by their old numbers. All numbers change at
# once, in `finish`, which goes over rows only.

NAMES_A_STEP = 4096
"""Taken before others have their turn."""


class LettingGo:
    """The producers of a topic go on without some of them. Only one of these may be under way."""

    def __init__(self, producers: Producers, is_free: Bools) -> None:
        """`is_free`, by producer number: who is `empty`, and nobody holds it."""
        self._producers = producers
        self._stays = ~is_free
        self._taken = 0
        self._left = Names(int(np.count_nonzero(self._stays)))

    def prepare(self) -> Iterator[None]:
        """Takes names, `NAMES_A_STEP` at each step. Where it ends, `finish` may follow, if nothing comes in between."""
        while self._taken < len(self._producers):
            names = self._producers.names_from(self._taken, NAMES_A_STEP)
            stays = self._stays[self._taken : self._taken + len(names)].tolist()
            # Those that are newer than `is_free` stay.
            stays += [True] * (len(names) - len(stays))
            self._left.add_all(list(compress(names, stays)))
            self._taken += len(names)
            yield

    def finish(self, is_free: Bools) -> Int64s:
        """The others have new numbers from now on, in their order. Returns the new number of each old one, -1: gone.

        `is_free` as it is now: who came back since stays, and gets one of the last numbers. All count as changed.
        """
        newer = len(is_free) - len(self._stays)
        stays = np.concatenate([self._stays, np.ones(newer, bool)])
        back = np.flatnonzero(~stays & ~is_free)
        self._left.add_all(self._producers.names_of(back))
        new_numbers, self._left = self._producers.renumber(self._left, stays, back)
        return new_numbers

    def clear(self) -> Iterator[None]:
        """Gives back the old table, some of it at each step."""
        return self._left.clear()
