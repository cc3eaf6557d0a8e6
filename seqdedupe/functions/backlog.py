"""The outputs for one topic that are not settled: in which frames they go, and when they are settled. No I/O."""

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
"""Inputs that are ready together go in one frame until it is as large as this."""
MAX_FRAME_ROWS = 4096
MANY_NAMES = 10_000
"""When there are so many, those with nothing under way are forgotten: each ledger of an input has names of its own."""


class Row(NamedTuple):
    """An output under its name."""

    name: str
    sequence_id: int
    output: FunctionOutput
    settled: Callable[[], None]
    """Called once, when the log holds it."""


class _Name:
    """A producer name. `epoch` is NO_EPOCH while it has no session."""

    __slots__ = ("epoch", "has_sent", "opened", "queued", "sent", "settled", "waiting")

    def __init__(self) -> None:
        self.epoch = NO_EPOCH
        self.has_sent = False
        """Whether anything was, since it was opened: then a link leads there."""
        self.opened: list[Callable[[int], None]] = []
        self.settled = self.queued = self.sent = NO_SEQUENCE_ID
        self.waiting: list[tuple[int, int, Callable[[], None]]] = []
        """A heap of (sequence ID, order, who is told)."""

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.opened

    def settle_up_to(self, sequence_id: int) -> None:
        """The log holds all up to this one: what it does not hold by then it never will."""
        self.settled = max(self.settled, sequence_id)
        while self.waiting and self.waiting[0][0] <= self.settled:
            heapq.heappop(self.waiting)[2]()


class OutputFrame(NamedTuple):
    """A frame on its way."""

    number: int
    batch: Batch
    groups: Sequence[Sequence[Row]]


class Backlog:
    """What is to be published to a topic, in the order in which it was added.

    The rows of one `add` are never parted. A row that comes again while its copy is under way settles with that; one
    at or below what is settled under its name is settled at once.
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
        """The outputs of one input for this topic."""
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
        """Answers the highest sequence ID that the log holds under a name, once its session has started."""
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
        """Whether there is anything to send or to ask."""
        return bool(self._unsent or self._frames) or any(self._names[name].opened for name in self._unopened)

    @property
    def waits_for_answers(self) -> bool:
        """Whether frames are on their way."""
        return bool(self._frames)

    def rewind(self) -> None:
        """The stream is gone: all that is not settled is to be sent again, when its sessions are resumed."""
        for frame in reversed(self._frames):
            self._unsent.extendleft(reversed(frame.groups))
        self._frames.clear()
        self._answered.clear()

    def forget_idle(self) -> None:
        """Lets go of the names with nothing under way. Who uses one again opens it, which tells what was settled."""
        # Of such a name nothing is left to be sent: a session may have told that it is settled.
        unsettled = (
            [row for row in group if row.sequence_id > self._names[row.name].settled] for group in self._unsent
        )
        self._unsent = deque(group for group in unsettled if group)
        self._names = {name: state for name, state in self._names.items() if not state.is_idle}
        self._unopened = {name: None for name in self._unopened if name in self._names}

    def sessions(self) -> dict[str, int]:
        """The epochs of the names that have a session."""
        return {name: state.epoch for name, state in self._names.items() if state.epoch}

    def unopened(self) -> list[str]:
        """The names that have none."""
        return list(self._unopened)

    def lost(self, name: str) -> bool:
        """Another process has taken the name over. Whether it is needed here: then it needs a new session."""
        self._names[name].epoch = NO_EPOCH
        self._unopened[name] = None
        return not self._names[name].is_idle

    def opened(self, name: str, epoch: int, persisted: int, *, is_forgotten: bool = False) -> None:
        """A session has started or was resumed. What is at or below `persisted` is settled.

        Raises DATA_LOSS if less is persisted than was settled before.
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
        """The next frame to send; None if there is nothing, a name has to be opened first, or answers awaited.

        Links keep the order of a name's messages alone. An input of a new ledger has other names than those before
        it, so where a name begins, what was sent before is settled first: else that could be refused, and this taken.
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
        """How many rows a frame has that is on its way."""
        return next((len(frame.batch) for frame in self._frames if frame.number == number), None)

    def receipt(self, number: int, verdicts: npt.NDArray[np.uint8]) -> bool:
        """Takes a receipt (no verdicts: all are new). Whether it settles the frame; if not, it has to be sent again.

        Frames settle in their order, whatever the order of their receipts.
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
