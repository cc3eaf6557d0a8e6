"""The outputs for one topic that are not settled. This module puts the outputs into frames, and decides when an output
is settled. It does no I/O."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary
from seqdedupe.client.pending import FRAME_NUMBERS, Verdict
from seqdedupe.errors import error
from seqdedupe.functions.identity import FunctionOutput
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID

FULL_FRAME_BYTES = 128 * 1024
"""Inputs that are ready at the same time share a frame until the frame has this size."""
MAX_FRAME_ROWS = 4096
MANY_NAMES = 10_000
"""If there are this many names, idle names are forgotten. (Each ledger of an input topic has separate names.)"""


class Row(NamedTuple):
    """An output, with its producer name."""

    name: str
    sequence_id: int
    output: FunctionOutput
    settled: Callable[[], None]
    """A function that is called once, when the log contains the output."""


class _Name:
    """A producer name. `epoch` is NO_EPOCH while the name has no session."""

    __slots__ = ("epoch", "has_sent", "opened", "queued", "sent", "settled", "waiting")

    def __init__(self) -> None:
        self.epoch = NO_EPOCH
        self.has_sent = False
        """Whether a message was sent since the session was opened. If so, the next message has a link to it."""
        self.opened: list[Callable[[int], None]] = []
        self.settled = self.queued = self.sent = NO_SEQUENCE_ID
        self.waiting: list[tuple[int, int, Callable[[], None]]] = []
        """A heap of (sequence ID, order, callback)."""

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.opened

    def settle_up_to(self, sequence_id: int) -> None:
        """Settle the outputs up to this ID. An output up to this ID that is not in the log will never be there."""
        self.settled = max(self.settled, sequence_id)
        while self.waiting and self.waiting[0][0] <= self.settled:
            heapq.heappop(self.waiting)[2]()


class OutputFrame(NamedTuple):
    """A frame in flight."""

    number: int
    batch: Batch
    groups: Sequence[Sequence[Row]]


class Backlog:
    """The outputs to publish to a topic, in the order in which they were added.

    The rows of one `add` stay together in one frame. If a row is added again while its copy is in flight, row and copy
    settle together. A row whose ID is not above the settled ID of its producer name is settled at once.
    """

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._unopened: dict[str, None] = {}
        self._many_names = MANY_NAMES
        self._unsent: deque[Sequence[Row]] = deque()
        self._frames: deque[OutputFrame] = deque()
        self._answered: set[int] = set()
        self._order = itertools.count()
        self.not_dup = self.dup = 0

    def add(self, rows: Iterable[Row]) -> None:
        """Add the outputs of one input for this topic."""
        group = []
        for row in rows:
            name = self._name(row.name)
            if row.sequence_id <= name.settled:
                row.settled()
                continue
            heapq.heappush(name.waiting, (row.sequence_id, next(self._order), row.settled))
            if row.sequence_id > name.queued:
                name.queued = row.sequence_id
                group.append(row)
        if group:
            self._unsent.append(group)

    def ask(self, name: str, answer: Callable[[int], None]) -> None:
        """Call `answer` with the highest sequence ID that the log contains under a name. The call happens once the
        session of the name has started."""
        found = self._name(name)
        if found.epoch == NO_EPOCH:
            found.opened.append(answer)
        else:
            answer(found.settled)

    def _name(self, name: str) -> _Name:
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= self._many_names:
                self.forget_idle()
                self._many_names = max(MANY_NAMES, 2 * len(self._names))
            found = self._names[name] = _Name()
            self._unopened[name] = None
        return found

    # -- sessions ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is anything to send, or a name to open."""
        return bool(self._unsent or self._frames) or any(self._names[name].opened for name in self._unopened)

    @property
    def waits_for_answers(self) -> bool:
        """Whether frames are in flight."""
        return bool(self._frames)

    def rewind(self) -> None:
        """Prepare to send all unsettled outputs again when the sessions are resumed, because the stream has ended."""
        for frame in reversed(self._frames):
            self._unsent.extendleft(reversed(frame.groups))
        self._frames.clear()
        self._answered.clear()

    def forget_idle(self) -> None:
        """Forget the names with nothing in flight. If such a name is used again, opening it returns the settled ID."""
        # Drop rows that are settled: starting a session may have settled rows that were waiting to be sent.
        unsettled = (
            [row for row in group if row.sequence_id > self._names[row.name].settled] for group in self._unsent
        )
        self._unsent = deque(group for group in unsettled if group)
        self._names = {name: state for name, state in self._names.items() if not state.is_idle}
        self._unopened = {name: None for name in self._unopened if name in self._names}

    def sessions(self) -> dict[str, int]:
        """Return the epochs of the names that have a session."""
        return {name: state.epoch for name, state in self._names.items() if state.epoch}

    def unopened(self) -> list[str]:
        """Return the names that have no session."""
        return list(self._unopened)

    def lost(self, name: str) -> bool:
        """Record that another process has taken the name over. Return whether this process still needs the name. If
        this process needs the name, it must start a new session."""
        self._names[name].epoch = NO_EPOCH
        self._unopened[name] = None
        return not self._names[name].is_idle

    def opened(self, name: str, epoch: int, persisted: int, *, is_forgotten: bool = False) -> None:
        """Record that a session was started or resumed. Outputs at or below `persisted` are settled.

        Raises DATA_LOSS if `persisted` is lower than an ID that was settled before.
        """
        state = self._names[name]
        if is_forgotten:
            state.settled = NO_SEQUENCE_ID
        if persisted < state.settled:
            raise error(
                "DATA_LOSS",
                f"the sidecar has an older state than before: of {name!r} it holds messages up to {persisted}, and had "
                f"acknowledged {state.settled}",
            )
        state.epoch, state.sent, state.has_sent = epoch, persisted, False
        self._unopened.pop(name, None)
        state.settle_up_to(persisted)
        answers, state.opened = state.opened, []
        for answer in answers:
            answer(state.settled)

    # -- frames ------------------------------------------------------------------------------------------------

    def next_frame(self) -> OutputFrame | None:
        """Return the next frame to send. Return None if there is nothing to send, or if a name must be opened or
        answers must arrive first.

        Links keep only the order of messages with the same name, and an input from a new ledger has new names. So
        before the first frame of a name is sent, all earlier frames must be settled. Otherwise the sidecar could refuse
        the earlier frames and accept this frame.
        """
        groups: list[Sequence[Row]] = []
        begun: set[str] = set()
        rows = size_bytes = 0
        while self._unsent and rows < MAX_FRAME_ROWS:
            group = [row for row in self._unsent[0] if row.sequence_id > self._names[row.name].settled]
            if any(not self._names[row.name].epoch for row in group):
                break
            begins = {row.name for row in group if not self._names[row.name].has_sent}
            if (groups or self._frames) and not begins <= begun:
                break
            begun |= begins
            size_bytes += sum(row.output.size_bytes for row in group)
            if groups and size_bytes > FULL_FRAME_BYTES:
                break
            self._unsent.popleft()
            if group:
                groups.append(group)
                rows += len(group)
        if not groups:
            return None
        frame = OutputFrame(next(FRAME_NUMBERS), self._batch([row for group in groups for row in group]), groups)
        self._frames.append(frame)
        return frame

    def _batch(self, rows: list[Row]) -> Batch:
        names = list(dict.fromkeys(row.name for row in rows))
        places = {name: place for place, name in enumerate(names)}
        states = [self._names[name] for name in names]
        links = np.array([state.sent for state in states], np.int64)
        for row in rows:
            self._names[row.name].sent = row.sequence_id
            self._names[row.name].has_sent = True
        outputs = [row.output for row in rows]
        times = [output.event_time_ms for output in outputs]
        property_offsets, property_names, property_values = batches.properties(
            dict(output.properties) for output in outputs
        )
        several = len(names) > 1
        return Batch(
            producer_names=Binary.of_all([name.encode() for name in names]),
            epochs=np.array([state.epoch for state in states], np.int64),
            previous_sequence_ids=links,
            producer_indexes=np.array([places[row.name] for row in rows], np.int32) if several else NO_INT32S,
            sequence_ids=np.array([row.sequence_id for row in rows], np.int64),
            event_times_ms=np.array(times, np.int64) if any(times) else NO_INT64S,
            keys=Binary.of([output.key for output in outputs]),
            property_offsets=property_offsets,
            property_names=property_names,
            property_values=property_values,
            payloads=Binary.of_all([output.payload for output in outputs]),
        )

    def rows_of(self, number: int) -> int | None:
        """Return the number of rows of a frame in flight; None for any other frame."""
        return next((len(frame.batch) for frame in self._frames if frame.number == number), None)

    def receipt(self, number: int, verdicts: npt.NDArray[np.uint8]) -> bool:
        """Record a receipt. A receipt without verdicts means that all rows are new. Return whether the receipt settles
        the frame. Otherwise the frame must be sent again.

        Frames settle in the order in which they were sent, even if their receipts arrive in another order.
        """
        rows = self.rows_of(number)
        if rows is None:
            return True
        dup = int((verdicts == Verdict.DUP).sum())
        not_dup = int((verdicts == Verdict.NOT_DUP).sum()) if len(verdicts) else rows
        if dup + not_dup < rows:
            return False
        self.dup += dup
        self.not_dup += not_dup
        self._answered.add(number)
        while self._frames and self._frames[0].number in self._answered:
            settled = self._frames.popleft()
            self._answered.remove(settled.number)
            for group in settled.groups:
                for row in group:
                    self._names[row.name].settle_up_to(row.sequence_id)
        return True
