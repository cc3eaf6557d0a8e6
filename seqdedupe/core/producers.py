"""The producers of one topic: names, numbers, and the ring of recent messages."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from seqdedupe.core.recent import NEW_NUMBERS, RECENT_MESSAGES, find, find_duplicates, persist
from seqdedupe.core.replay import list_names, persist_all
from seqdedupe.core.rule import EPOCH, NUMBERS, PERSISTED, PUSHED, decide, first_ids, refusal
from seqdedupe.format.columns import EPOCHS, LINKS, NAME_OFFSETS, NAMES, PRODUCERS, ROWS, start

_FIRST_CAPACITY = 64
_GROWTH = 1.25

NEW_EPOCH = 2
"""In `dirty`, next to NEW_NUMBERS: Open gave an epoch, which must be durable before it is answered."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


class Producers:
    """What is known of a topic's producers. A producer's *number* is its place in the order in which names came.

    `numbers[number]` are its `pushed`, `persisted`, epoch and newest message in the ring; `dirty[number]` tells what
    changed since the last `collect_dirty`.
    """

    def __init__(self) -> None:
        self._number_of: dict[bytes, int] = {}
        self.numbers: Int64s = _rows(_FIRST_CAPACITY)
        self.dirty: Uint8s = np.zeros(_FIRST_CAPACITY, np.uint8)
        self._ring: Int64s = np.zeros((RECENT_MESSAGES, 3), np.int64)
        self._entered = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._number_of

    def names_from(self, first: int, count: int | None = None) -> list[bytes]:
        """The names from this number on, at most `count`."""
        backwards = len(self) - first
        if count is None or backwards <= count:
            # The newest ones: from the end, so that a million known names cost nothing.
            return list(islice(reversed(self._number_of), backwards))[::-1]
        return list(islice(self._number_of, first, first + count))

    def number(self, name: bytes) -> int | None:
        """The producer's number, None if the name never came."""
        return self._number_of.get(name)

    def add(self, name: bytes) -> int:
        """The producer's number, a new one if the name is new."""
        number = self._number_of.setdefault(name, len(self._number_of))
        if number >= len(self.dirty):
            self._grow(number + 1)
        return number

    def load(self, names: list[bytes], persisted: Int64s, epochs: Int64s) -> None:
        """Takes over a snapshot. Only before anything else came."""
        self._number_of = dict(zip(names, range(len(names)), strict=True))
        self.numbers = _rows(max(len(names), _FIRST_CAPACITY))
        self.numbers[: len(names), PUSHED] = persisted
        self.numbers[: len(names), PERSISTED] = persisted
        self.numbers[: len(names), EPOCH] = epochs
        self.dirty = np.zeros(len(self.numbers), np.uint8)

    def _grow(self, needed: int) -> None:
        old = len(self.dirty)
        capacity = max(needed, int(old * _GROWTH) + _FIRST_CAPACITY)
        # In place: the allocator moves a large array's pages instead of copying them. No view of it is kept.
        self.numbers.resize((capacity, NUMBERS), refcheck=False)
        self.dirty.resize(capacity, refcheck=False)
        self.numbers[old:] = _NEW

    # -- admission ---------------------------------------------------------------------------------------------

    def known(self, encoded: bytes, places: Int64s) -> Int64s | None:
        """The numbers of a batch's producers; None if one of them never came, or comes twice."""
        found = [self._number_of.get(name, -1) for name in _names(encoded, places)]
        if min(found) < 0 or len(set(found)) < len(found):
            return None
        return np.array(found, np.int64)

    def refusal(self, view: Uint8s, places: Int64s, slots: Int64s, link_may_be_left_out: bool) -> int:
        """See `rule.refusal`."""
        return int(refusal(view, places, slots, self.numbers, link_may_be_left_out))

    def decide(self, view: Uint8s, places: Int64s, slots: Int64s, deduplicate: bool) -> tuple[int, Uint8s]:
        """How many rows are new, and the verdicts. See `rule.decide`."""
        verdicts = np.empty(places[ROWS], np.uint8)
        return int(decide(view, places, slots, self.numbers, deduplicate, verdicts)), verdicts

    def originals(self, view: Uint8s, places: Int64s, slots: Int64s, verdicts: Uint8s) -> tuple[Int64s, Int64s]:
        """The rows with verdict DUP whose original is still known, and the originals' indexes."""
        found = np.empty(len(verdicts), np.int64)
        if not find_duplicates(view, places, slots, self.numbers, self._ring, self._entered, verdicts, found):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows = np.flatnonzero(found >= 0)
        return rows, found[rows]

    def numbers_in_frame(self, view: Uint8s, places: Int64s) -> list[tuple[bytes, int, int, int]]:
        """Name, epoch, first sequence ID and link of each producer of a batch: for a refusal's answer."""
        first = first_ids(view, places)
        raw = view.tobytes()
        return [
            (
                name,
                _load64(raw, start(places, EPOCHS) + 8 * p),
                int(first[p]),
                _load64(raw, start(places, LINKS) + 8 * p),
            )
            for p, name in enumerate(_names(raw, places))
        ]

    # -- outcomes ----------------------------------------------------------------------------------------------

    def persist(self, view: Uint8s, places: Int64s, slots: Int64s) -> None:
        """A batch is in the log, at `places[BASE_INDEX]`. See `recent.persist`."""
        self._entered = persist(view, places, slots, self.numbers, self.dirty, self._ring, self._entered)

    def replay(self, raw: bytes, table: Int64s, count: int) -> None:
        """`count` scanned records are in the log: merges them by maximum; names that are new get numbers."""
        names, first_name = list_names(raw, table, count)
        slots = np.array([self.add(name) for name in names], np.int64)
        self._entered = persist_all(
            np.frombuffer(raw, np.uint8), table, count, slots, first_name,
            self.numbers, self.dirty, self._ring, self._entered,
        )  # fmt: skip

    def fail_in_flight(self) -> None:
        """What was pushed and is not persisted never will be."""
        self.numbers[: len(self), PUSHED] = self.numbers[: len(self), PERSISTED]

    # -- sessions and snapshots --------------------------------------------------------------------------------

    def set_epoch(self, number: int, epoch: int) -> None:
        """Open gave the producer this epoch."""
        self.numbers[number, EPOCH] = epoch
        self.dirty[number] |= NEW_EPOCH

    def have_new_epoch(self, numbers: list[int]) -> bool:
        """Whether any of these producers has an epoch that `collect_dirty` has not seen."""
        return bool((self.dirty[numbers] & NEW_EPOCH).any())

    def mark_dirty(self, numbers: Int32s) -> None:
        """What `collect_dirty` gave out was not stored."""
        self.dirty[numbers] = NEW_NUMBERS | NEW_EPOCH

    def index_of(self, number: int, sequence_id: int) -> int:
        """The index of the message with this ID, -1 if it is not known (any more)."""
        return int(find(sequence_id, number, self.numbers, self._ring, self._entered))

    def collect_dirty(self) -> tuple[Int32s, Int64s, Int64s]:
        """Numbers, persisted IDs and epochs of the producers that changed, which count as clean from now on."""
        changed = np.flatnonzero(self.dirty[: len(self)])
        self.dirty[changed] = 0
        return changed.astype(np.int32), self.numbers[changed, PERSISTED], self.numbers[changed, EPOCH]


_NEW = np.array([-1, -1, 0, -1], np.int64)
"""A producer of which nothing is known: pushed, persisted, epoch, newest message."""


def _rows(count: int) -> Int64s:
    rows = np.empty((count, NUMBERS), np.int64)
    rows[:] = _NEW
    return rows


def _load64(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], "little", signed=True)


def _names(encoded: bytes, places: Int64s) -> list[bytes]:
    producers = int(places[PRODUCERS])
    offsets = np.frombuffer(encoded, np.int32, producers + 1, start(places, NAME_OFFSETS)).tolist()
    names = int(start(places, NAMES))
    return [encoded[names + offsets[p] : names + offsets[p + 1]] for p in range(producers)]
