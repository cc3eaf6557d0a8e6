"""The producers of one topic: names, numbers, and the ring of recent messages."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from seqdedupe.core.activity import Activity, Int32s
from seqdedupe.core.recent import NO_MESSAGE, find, find_duplicates, new_ring, with_room
from seqdedupe.core.replay import list_names, persist, persist_all
from seqdedupe.core.rule import (
    CHANGED,
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
    refusal,
)
from seqdedupe.format.columns import NAME_OFFSETS, NAMES, PRODUCERS, ROWS, start
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s, kernel
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID

_FIRST_CAPACITY = 64
_GROWTH = 1.125

Bools = npt.NDArray[np.bool_]


class Producers:
    """What is known of a topic's producers. A producer's *number* is its place in the order in which names came.

    `numbers[number]` is its producer row (see `rule`); `dirty[number]` tells what changed since the last
    `collect_dirty`. `renumber` gives new numbers: whoever keeps one compares the `generation` that it is of.
    """

    def __init__(self) -> None:
        self._number_of: dict[bytes, int] = {}
        self._walked = 0
        """So many names the last call of `names_from` has gone over."""
        self._walk_anew()
        self.numbers: Int64s = _rows(_FIRST_CAPACITY)
        self.dirty: Uint8s = np.zeros(_FIRST_CAPACITY, np.uint8)
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

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._number_of

    def is_known(self, number: int) -> bool:
        """Whether the producer has not been forgotten."""
        return not (self._has_purged and _is_nothing(self.numbers[number : number + 1])[0])

    def known_count(self) -> int:
        """How many producers have not been forgotten."""
        return len(self) - (int(np.count_nonzero(self.empty())) if self._has_purged else 0)

    def names_from(self, first: int, count: int | None = None) -> list[bytes]:
        """The names from this number on, at most `count`. To go on where the last call ended walks over no others."""
        backwards = len(self) - first
        if count is None or backwards <= count:
            # The newest ones: from the end, so that a million known names cost nothing.
            return list(islice(reversed(self._number_of), backwards))[::-1]
        if first < self._walked:
            self._walk_anew()
        try:
            names = list(islice(self._walk, first - self._walked, first - self._walked + count))
        except RuntimeError:
            # Names have come since: Python goes on with no iterator over a table that has grown.
            self._walk_anew()
            names = list(islice(self._walk, first, first + count))
        self._walked = first + count
        return names

    def _walk_anew(self) -> None:
        self._walk, self._walked = iter(self._number_of), 0

    def names_of(self, numbers: Int64s) -> list[bytes]:
        """The names of the producers with these numbers, which rise."""
        wanted = set(numbers.tolist())
        first, last = int(numbers[0]), int(numbers[-1])
        return [name for i, name in enumerate(self.names_from(first, last - first + 1), first) if i in wanted]

    def number(self, name: bytes) -> int | None:
        """The producer's number, None if the name never came."""
        return self._number_of.get(name)

    def add(self, name: bytes) -> int:
        """The producer's number, a new one if the name is new."""
        number = self._number_of.setdefault(name, len(self._number_of))
        if number >= len(self.dirty):
            self._grow(number + 1)
        return number

    def add_all(self, names: list[bytes]) -> Int64s:
        """The producers' numbers, new ones for names that are new."""
        number_of = self._number_of
        numbers = np.array([number_of.setdefault(name, len(number_of)) for name in names], np.int64)
        if len(number_of) > len(self.dirty):
            self._grow(len(number_of))
        return numbers

    def load(self, names: list[bytes], persisted: Int64s, epochs: Int64s, stated: Int64s) -> None:
        """Takes over a snapshot: these are PERSISTED, DURABLE_EPOCH and STATED, by producer number.

        Only before anything else came.
        """
        self._number_of = dict(zip(names, range(len(names)), strict=True))
        self._walk_anew()
        self.numbers = _rows(max(len(names), _FIRST_CAPACITY))
        self.numbers[: len(names), PUSHED] = persisted
        self.numbers[: len(names), PERSISTED] = persisted
        self.numbers[: len(names), EPOCH] = epochs
        self.numbers[: len(names), DURABLE_EPOCH] = epochs
        self.numbers[: len(names), STATED] = stated
        self.dirty = np.zeros(len(self.numbers), np.uint8)
        self.activity = Activity(len(self.numbers))

    def _grow(self, needed: int) -> None:
        old = len(self.dirty)
        capacity = max(needed, int(old * _GROWTH) + _FIRST_CAPACITY)
        # In place: the allocator moves a large array's pages instead of copying them. No view of it is kept.
        self.numbers.resize((capacity, NUMBERS), refcheck=False)
        self.dirty.resize(capacity, refcheck=False)
        self.activity.grow(capacity)
        self.numbers[old:] = _NEW

    # -- admission ---------------------------------------------------------------------------------------------

    def known(self, encoded: bytes, places: Int64s) -> Int64s | None:
        """The numbers of a batch's producers; None if one of them never came, or comes twice."""
        found = [self._number_of.get(name, -1) for name in names_of(encoded, places)]
        if min(found) < 0 or len(set(found)) < len(found):
            return None
        return np.array(found, np.int64)

    def refusal(self, view: Uint8s, places: Int64s, producer_rows: Int64s, lone: bool, gapless: bool = False) -> int:
        """Why a frame is not admitted, or ADMITTED. See `rule.refusal`."""
        return refusal(view, places, producer_rows, self.numbers, lone, gapless, _NO_REASONS)

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
        return decide_batch(view, places, producer_rows, self.numbers, deduplicate, verdicts), verdicts

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
        with_room(self._ring, self._entered, int(places[ROWS]))
        self._entered = persist(view, places, producer_rows, self.numbers, self.dirty, self._ring, self._entered)

    def replay(self, raw: bytes, table: Int64s, count: int) -> None:
        """`count` scanned records are in the log: merges them by maximum; names that are new get numbers."""
        names, first_name = list_names(raw, table, count)
        producer_rows = self.add_all(names)
        with_room(self._ring, self._entered, int(table[:count, ROWS].sum()))
        self._entered = persist_all(
            np.frombuffer(raw, np.uint8), table, count, producer_rows, first_name,
            self.numbers, self.dirty, self._ring, self._entered,
        )  # fmt: skip

    def fail_in_flight(self) -> None:
        """What is in flight never will be in the log: see `rule.fail`."""
        fail(self.numbers, len(self))

    # -- sessions and snapshots --------------------------------------------------------------------------------

    def open(self, numbers: Int64s, epochs: Int64s) -> None:
        """Open gave these producers these epochs: they are in force at once, which fences their older sessions.

        They last only if `confirm_sessions` says so: `fail_in_flight` takes them back.
        """
        self.numbers[numbers, EPOCH] = epochs
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
            each = np.arange(len(numbers), dtype=np.int32)
            confirm(numbers, epochs, each, persisted, stated, self.numbers, self.dirty)

    def reset(self, numbers: Int64s, epochs: Int64s, persisted: Int64s, index: int) -> None:
        """A control record that sets these producers is in the log, before the message with this index.

        What was known of their IDs counts no more, and no message from before answers for one. What a producer has
        handed over since stays pushed. Live and in replay the same.
        """
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
        self.dirty[numbers] |= CHANGED

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
        self.dirty[numbers] |= CHANGED
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
        due: Int64s = idle[~in_flight & ~_is_nothing(rows)]
        return due

    def empty(self) -> Bools:
        """By producer number, whether nothing is known of it."""
        return _is_nothing(self.numbers[: len(self)])

    @property
    def numbers_by_name(self) -> dict[bytes, int]:
        """The table of names, in the order of their numbers: to be read."""
        return self._number_of

    def renumber(self, names: dict[bytes, int], stays: Bools, back: Int64s) -> Int64s:
        """These are the names from now on: of those that stay, in their order, and then of those in `back`.

        Returns the new number of each old one, -1 where it is gone. All count as changed. See `LettingGo`.
        """
        rows_back = self.numbers[back]
        new_numbers = np.empty(len(self), np.int64)
        staying = move_rows(self.numbers, stays.view(np.uint8), new_numbers)
        new_numbers[back] = np.arange(staying, len(names))
        capacity = max(len(names), _FIRST_CAPACITY)
        # See `_grow`.
        self.numbers.resize((capacity, NUMBERS), refcheck=False)
        self.numbers[staying : len(names)] = rows_back
        self.numbers[len(names) :] = _NEW
        self.dirty = np.zeros(capacity, np.uint8)
        self.dirty[: len(names)] = CHANGED
        self.activity.keep(np.concatenate([np.flatnonzero(stays), back]), new_numbers, capacity)
        self._number_of = names
        self._walk_anew()
        self.generation += 1
        self._has_purged = False
        return new_numbers

    def stated_below(self, index: int) -> Int64s:
        """The producers of which the log from this index on may not state epoch and persisted ID any more.

        Before what is below `index` is dropped they have to be stated again, with their DURABLE_EPOCH and PERSISTED.
        """
        numbers = self.numbers[: len(self)]
        is_something = (numbers[:, DURABLE_EPOCH] > 0) | (numbers[:, PERSISTED] >= 0)
        return np.flatnonzero(is_something & (numbers[:, STATED] < index))

    def mark_dirty(self, numbers: Int32s | Int64s) -> None:
        """What `collect_dirty` gave out was not stored."""
        self.dirty[numbers] = CHANGED

    def index_of(self, number: int, sequence_id: int) -> int:
        """The index of the message with this ID, -1 if it is not known (any more)."""
        return int(find(sequence_id, number, self.numbers, self._ring, self._entered))

    def collect_dirty(self, forgotten: Int64s | None = None) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Of the producers that changed: number, PERSISTED, DURABLE_EPOCH, STATED. They count as clean from now on.

        Of those that are to be forgotten too, as if they were.
        """
        if forgotten is not None:
            self.dirty[forgotten] |= CHANGED
        changed = np.flatnonzero(self.dirty[: len(self)])
        rows = self.numbers[changed]
        if forgotten is not None:
            rows[np.isin(changed, forgotten)] = _NEW
        collected = changed.astype(np.int32), rows[:, PERSISTED], rows[:, DURABLE_EPOCH], rows[:, STATED]
        # Last: without memory for a copy, all of them still have to be stored.
        self.dirty[changed] = 0
        return collected


def _is_nothing(rows: Int64s) -> Bools:
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


_NO_REASONS = np.zeros(0, np.uint8)

_NEW = np.array([-1, -1, 0, 0, -1, -1], np.int64)
"""The producer row of a producer of which nothing is known."""


def _rows(count: int) -> Int64s:
    rows = np.empty((count, NUMBERS), np.int64)
    rows[:] = _NEW
    return rows


def names_of(encoded: bytes, places: Int64s) -> list[bytes]:
    """The producer names of a batch that was laid out."""
    producers = int(places[PRODUCERS])
    offsets = np.frombuffer(encoded, np.int32, producers + 1, start(places, NAME_OFFSETS)).tolist()
    names = int(start(places, NAMES))
    return [encoded[names + offsets[p] : names + offsets[p + 1]] for p in range(producers)]
