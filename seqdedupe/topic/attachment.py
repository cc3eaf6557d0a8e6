"""A broker's hold on its topic: the replay of its log, then checks, and reports of what became of them.

Nothing here waits, and nothing is half done: what is wrong raises, and has changed nothing. What the broker has to
keep to stands in dedupe.proto.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from seqdedupe.core import ranges
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED, UNKNOWN
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_POSITION_BYTES
from seqdedupe.names import new_producer_name, producer_name
from seqdedupe.topic.policy import OverlapPolicy, Policy

MAX_ADMISSIONS_IN_FLIGHT = 1 << 20
"""Of one attachment; 16 bytes each."""

NO_ADMISSION = -1
RELEASED = -1
_NO_PASSES: Uint8s = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Columns:
    """Messages or entries, with one value each: handle (int32), lowest and highest sequence ID (int64), passes.

    `highest` may be `lowest` itself, and `passes` empty. Of one length otherwise, or `check` raises INVALID_REQUEST.
    """

    handles: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    passes: np.ndarray = field(default_factory=lambda: _NO_PASSES)

    def check(self) -> None:
        """Raises INVALID_REQUEST unless there are rows, not too many, and a value in every column for each."""
        rows = len(self.lowest)
        if not 1 <= rows <= MAX_BATCH_ROWS:
            raise error("INVALID_REQUEST", f"there are {rows} sequence IDs: 1 to {MAX_BATCH_ROWS} are taken at once")
        if len(self.handles) != rows or len(self.highest) != rows or len(self.passes) not in (0, rows):
            raise error("INVALID_REQUEST", f"the columns do not have one value for each of the {rows} sequence IDs")


@dataclass(frozen=True, slots=True)
class Checked:
    """Verdicts, and the number of the first admission among them (NO_ADMISSION if there is none)."""

    verdicts: Uint8s
    first_admission: int


@dataclass(slots=True)
class _Admitted:
    """The admissions of one check, of which `left` are in flight: producer row and highest ID of each."""

    rows: Int64s2
    at_seconds: float


class Attachment:
    """Replay, checks and reports. `position` is that of the last entry that is known to be stored."""

    def __init__(self, producers: Producers, position: bytes) -> None:
        self.position = position
        self.replayed = 0
        self.is_ready = False
        """Whether the replay has ended: checks are answered."""
        self.has_failed = False
        """Whether an admission has failed, and nobody has reset yet."""
        self._producers = producers
        self._rows_of: Int64s = np.zeros(64, np.int64)
        self._handles = 0
        self._in_flight: deque[_Admitted] = deque()
        self._admitted = 0
        self._settled = 0

    @property
    def in_flight(self) -> int:
        """Admissions of which nothing was reported."""
        return self._admitted - self._settled

    @property
    def waits_since(self) -> float | None:
        """When the oldest admission in flight was given; None if there is none."""
        return self._in_flight[0].at_seconds if self._in_flight else None

    # -- names -------------------------------------------------------------------------------------------------

    def register(self, first_handle: int, names: list[bytes]) -> None:
        """These names get the next handles. Raises INVALID_REQUEST, INVALID_NAME."""
        if first_handle != self._handles:
            raise error(
                "INVALID_REQUEST", f"first_handle is {first_handle}: the next handle is {self._handles}",
                next_handle=self._handles,
            )  # fmt: skip
        for name in names:
            try:
                shown = name.decode()
            except UnicodeDecodeError as e:
                raise error("INVALID_NAME", "a producer name is not UTF-8") from e
            if producer_name(shown) not in self._producers:
                new_producer_name(shown)
        end = self._handles + len(names)
        if end > len(self._rows_of):
            self._rows_of = np.resize(self._rows_of, max(end, 2 * len(self._rows_of)))
        self._rows_of[self._handles : end] = self._producers.add_all(names)
        self._handles = end

    def release(self, handles: np.ndarray) -> None:
        """These handles are not used any more. Raises INVALID_REQUEST."""
        rows = self._rows()
        if len(handles) and (handles.min() < 0 or handles.max() >= len(rows) or (rows[handles] < 0).any()):
            raise error("INVALID_REQUEST", "handles are released that are not registered")
        rows[handles] = RELEASED

    def _rows(self) -> Int64s:
        return self._rows_of[: self._handles]

    # -- replay ------------------------------------------------------------------------------------------------

    def replay(
        self,
        columns: Columns,
        positions: bytes,
        offsets: np.ndarray,
        previous: bytes,
        previous_offsets: np.ndarray,
    ) -> None:
        """Entries that follow on `position` in the log. Raises REPLAY_GAP if they do not, INVALID_REQUEST, …"""
        if self.is_ready:
            raise error("INVALID_REQUEST", "the replay has ended already")
        columns.check()
        self._check_sound(columns, overlap=False)
        starts = _offsets(offsets, len(positions), len(columns.lowest), "positions")
        before = _offsets(previous_offsets, len(previous), len(columns.lowest), "previous_positions")
        lengths = np.diff(starts)
        if lengths.min() < 1 or lengths.max() > MAX_POSITION_BYTES:
            raise error("INVALID_REQUEST", f"a position has 1 to {MAX_POSITION_BYTES} bytes")
        if not ranges.follow(self.position, positions, starts, previous, before):
            raise error(
                "REPLAY_GAP",
                f"after {self.replayed} entries, the last of which is at {_shown(self.position)}, comes one that was "
                "not written right after it: entries are missing",
                replayed=self.replayed,
            )
        producers = self._producers
        ranges.replay_ranges(
            columns.handles, columns.highest, columns.passes, self._rows(), producers.numbers, producers.dirty
        )
        self.replayed += len(columns.lowest)
        self.position = positions[int(starts[-2]) :]

    def end_replay(self, last_position: bytes) -> None:
        """The log's last entry is at this position (empty: there is none). Raises REPLAY_GAP if that is another one."""
        if self.is_ready:
            raise error("INVALID_REQUEST", "the replay has ended already")
        if last_position != self.position:
            raise error(
                "REPLAY_GAP",
                f"the log ends with {_shown(last_position)}, but the last entry known is {_shown(self.position)}",
                replayed=self.replayed,
            )
        self.is_ready = True

    # -- verdicts ----------------------------------------------------------------------------------------------

    def check(self, columns: Columns, policy: Policy, now_seconds: float) -> Checked:
        """The verdicts; what is new is in flight from now on.

        Raises NOT_ATTACHED before the replay has ended, INVALID_REQUEST, INVALID_SEQUENCE_ID, OVERLAP, QUEUE_FULL.
        """
        if not self.is_ready:
            raise error("NOT_ATTACHED", "the replay has not ended yet")
        columns.check()
        is_refused = policy.deduplication_enabled and policy.overlap is OverlapPolicy.REJECT
        self._check_sound(columns, overlap=is_refused)
        rows = len(columns.lowest)
        if self.has_failed:
            return Checked(np.full(rows, UNKNOWN, np.uint8), NO_ADMISSION)
        if self.in_flight + rows > MAX_ADMISSIONS_IN_FLIGHT:
            raise error("QUEUE_FULL", f"of {self.in_flight} admissions nothing was reported yet")
        verdicts = np.empty(rows, np.uint8)
        admitted = np.empty((rows, 2), np.int64)
        new = ranges.decide_ranges(
            columns.handles,
            columns.lowest,
            columns.highest,
            columns.passes,
            self._rows(),
            self._producers.numbers,
            policy.deduplication_enabled,
            verdicts,
            admitted,
        )
        if not new:
            return Checked(verdicts, NO_ADMISSION)
        first = self._admitted
        self._in_flight.append(_Admitted(admitted[:new].copy() if new < rows else admitted, now_seconds))
        self._admitted += new
        return Checked(verdicts, first)

    def _check_sound(self, columns: Columns, *, overlap: bool) -> None:
        found = np.zeros(1, np.int64)
        numbers = self._producers.numbers
        wrong = ranges.look(
            columns.handles, columns.lowest, columns.highest, columns.passes, self._rows(), numbers, overlap, found
        )
        if wrong != ranges.SOUND:
            raise self._unsound(columns, wrong, int(found[0]))

    def _unsound(self, columns: Columns, wrong: int, row: int) -> SeqdedupeError:
        handle, lowest, highest = (int(column[row]) for column in (columns.handles, columns.lowest, columns.highest))
        if wrong == ranges.BAD_HANDLE:
            return error("INVALID_REQUEST", f"message {row} has the handle {handle}, which is not registered", row=row)
        if wrong == ranges.BAD_ID:
            return error(
                "INVALID_SEQUENCE_ID",
                f"message {row} has the sequence IDs {lowest} to {highest}: they should be 0 or higher, and rise",
                row=row,
            )
        numbers = self._producers.numbers[self._rows()[handle]]
        persisted = int(numbers[PERSISTED])
        return error(
            "OVERLAP",
            f"message {row} has the sequence IDs {lowest} to {highest}, of which those up to {persisted} are "
            "persisted: split it",
            row=row,
            pushed=int(numbers[PUSHED]),
            persisted=persisted,
        )

    # -- outcomes ----------------------------------------------------------------------------------------------

    def report(self, first_admission: int, persisted: int, position: bytes, failed: int) -> None:
        """So many of the oldest admissions are persisted, the last at this position; so many after them have failed.

        Raises NOT_ATTACHED if the report is out of order, or says that something was stored after a failure;
        INVALID_REQUEST.
        """
        if bool(persisted) != bool(position) or len(position) > MAX_POSITION_BYTES:
            raise error(
                "INVALID_REQUEST", f"the last of {persisted} persisted admissions needs a position of 1 to "
                f"{MAX_POSITION_BYTES} bytes",
            )  # fmt: skip
        if first_admission != self._settled or persisted + failed > self.in_flight:
            raise error(
                "NOT_ATTACHED",
                f"{persisted + failed} admissions are reported from number {first_admission} on, but "
                f"{self.in_flight} are in flight from number {self._settled} on",
                first_admission=self._settled,
                in_flight=self.in_flight,
            )
        if persisted and self.has_failed:
            raise error("NOT_ATTACHED", "an admission is reported persisted after one that failed: the log has a hole")
        for rows in self._take(persisted):
            ranges.confirm_ranges(rows, self._producers.numbers, self._producers.dirty)
        if persisted:
            self.position = position
        for _ in self._take(failed):
            self.has_failed = True

    def _take(self, count: int) -> list[Int64s2]:
        """So many of the oldest admissions, which have settled."""
        taken = []
        self._settled += count
        while count:
            oldest = self._in_flight[0]
            part = oldest.rows[:count]
            taken.append(part)
            count -= len(part)
            if len(part) == len(oldest.rows):
                self._in_flight.popleft()
            else:
                oldest.rows = oldest.rows[len(part) :]
        return taken

    def reset(self) -> None:
        """Takes back what was pushed and is not persisted. Raises INVALID_REQUEST while anything is in flight."""
        if self.in_flight:
            raise error(
                "INVALID_REQUEST", f"{self.in_flight} admissions are in flight: report them as failed before the reset"
            )
        self._producers.fail_in_flight()
        self.has_failed = False


def _offsets(offsets: np.ndarray, size: int, count: int, column: str) -> Int64s:
    """Checked offsets of a column with so many values. Raises INVALID_REQUEST."""
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != size or (offsets[1:] < offsets[:-1]).any():
        raise error("INVALID_REQUEST", f"the offsets of {column} do not fit {count} values of {size} bytes")
    return offsets.astype(np.int64)


def _shown(position: bytes) -> str:
    return repr(position) if position else "its start"
