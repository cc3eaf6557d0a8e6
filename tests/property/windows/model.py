"""What has to come of a topic of deduplication IDs: a list of all IDs ever stored, and how much may be forgotten."""

from collections.abc import Callable
from dataclasses import dataclass, field

from seqdedupe import batch as batches
from seqdedupe.batch import Binary
from seqdedupe.core.id_slots import PARTS
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.limits import NO_LIMIT, WindowLimits
from seqdedupe.log.contract import Runs
from seqdedupe.topic import control
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, Refusal
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.topic import Topic
from tests.log.faulty import Storage


@dataclass(eq=False)
class Frame:
    """IDs on their way, and what was so when they were decided about."""

    number: int
    ids: list[bytes]
    since_ms: int = 0
    floor: int = 0
    deduplicates: bool = True
    known: dict[bytes, int] = field(default_factory=dict)
    """For each ID that is in the log, confirmed, the highest index."""
    in_flight: frozenset[bytes] = frozenset()
    is_refused: bool = False
    answer: FrameReceipt | Refusal | None = None

    def encoded(self) -> bytes:
        payloads = [b"%d/" % self.number + one for one in self.ids]
        return batches.without_producers(Binary.of_all(self.ids), Binary.of_all(payloads)).encode()

    def __str__(self) -> str:
        return f"frame {self.number} of {[one[:8] for one in self.ids]}"


class Model(Storage):
    """A topic's log, and what may come of what is sent to it. What is wrong goes to `violations`."""

    def __init__(
        self, incarnation: int, name: str, violations: list[str], clock_ms: Callable[[], int], applied: Applied
    ) -> None:
        super().__init__(incarnation, clock_ms)
        self.name = name
        self.clock_ms = clock_ms
        self.ids: list[bytes] = []
        self.frames_of: list[int] = []
        """For each message the frame that it came in."""
        self.times_ms: list[int] = []
        self.indexes: dict[bytes, list[int]] = {}
        self.floor = 0
        """All before this index may be forgotten."""
        self.frames: dict[int, Frame] = {}
        self.flying: set[Frame] = set()
        self.applied = applied
        """For the policies that were in the log by now."""
        self.limits_ever: set[WindowLimits] = set()
        self._limits_without_policy = applied.window
        self.violations = violations

    # -- what may be forgotten -----------------------------------------------------------------------------------

    def may_forget(self, limits: WindowLimits, confirmed: int) -> None:
        """A message comes, with this many in the log before it, while these limits are in force."""
        self.limits_ever.add(limits)
        floor = confirmed - limits.messages
        if limits.id_bytes != NO_LIMIT:
            after = 0
            for index in range(confirmed - 1, max(self.floor, floor), -1):
                after += len(self.ids[index])
                if after >= limits.id_bytes:
                    floor = max(floor, index)
                    break
        if limits.milliseconds != NO_LIMIT:
            old = self.clock_ms() - limits.milliseconds
            while max(floor, self.floor) < confirmed and self.times_ms[max(floor, self.floor)] <= old:
                floor = max(floor, self.floor) + 1
        self.floor = max(self.floor, floor)

    def store_lost(self) -> None:
        """The window is made again from the log, as far back as that goes."""
        self.floor = max(self.floor, self.first_index)
        # The policy may stand later in it than what is read first.
        self.limits_ever.add(self._limits_without_policy)

    # -- frames --------------------------------------------------------------------------------------------------

    def decided(self, frame: Frame, topic: Topic) -> None:
        """This frame is being decided about now."""
        confirmed = topic.confirmed_index
        self.may_forget(topic.applied.window, confirmed)
        self.frames[frame.number] = frame
        frame.since_ms = self.clock_ms()
        frame.floor, frame.deduplicates = self.floor, topic.applied.deduplication_enabled
        frame.known = {
            one: below[-1] for one in frame.ids if (below := [k for k in self.indexes.get(one, ()) if k < confirmed])
        }
        frame.in_flight = frozenset(one for other in self.flying for one in other.ids)
        self.flying.add(frame)

    def answered(self, frame: Frame, answer: FrameReceipt | Refusal, topic: Topic) -> None:
        self.flying.discard(frame)
        frame.answer = answer
        if isinstance(answer, Refusal):
            self._refused(frame, answer)
            return
        known = dict(zip(answer.known_rows.tolist(), answer.known_indexes.tolist(), strict=True))
        index = answer.first_index
        for row, one in enumerate(frame.ids):
            verdict = NOT_DUP if answer.verdicts is None else int(answer.verdicts[row])
            if verdict == NOT_DUP:
                self._not_dup(frame, one, index, topic)
                index += 1
            elif not frame.deduplicates:
                self.wrong(f"{frame}: {one!r} is not new where nothing is deduplicated")
            elif verdict == DUP:
                self._dup(frame, one, known.get(row, -1), topic)
            elif one not in frame.in_flight:
                self.wrong(f"{frame}: {one!r} is Unknown, and no copy of it was in flight")

    def _not_dup(self, frame: Frame, one: bytes, index: int, topic: Topic) -> None:
        if not 0 <= index < topic.confirmed_index or (self.ids[index], self.frames_of[index]) != (one, frame.number):
            self.wrong(f"{frame}: {one!r} is NotDup, and not at index {index}")

    def _dup(self, frame: Frame, one: bytes, index: int, topic: Topic) -> None:
        if not 0 <= index < topic.confirmed_index or self.ids[index] != one:
            self.wrong(f"{frame}: {one!r} is Dup of index {index}, where it is not")
        elif self.frames_of[index] != frame.number and index != frame.known.get(one):
            self.wrong(f"{frame}: {one!r} is Dup of index {index}, its newest copy is {frame.known.get(one)}")

    def _refused(self, frame: Frame, refusal: Refusal) -> None:
        if refusal.error.retry_delay_ms < 0 and refusal.error.reason != "TOPIC_NOT_FOUND":
            self.wrong(f"{frame} is refused for good: {refusal.error}")
        if refusal.error.reason != "OUTCOME_UNKNOWN":
            frame.is_refused = True
            if frame.number in self.frames_of:
                self.wrong(f"{frame} is refused with {refusal.error}, and it is stored")

    # -- the log -------------------------------------------------------------------------------------------------

    def add_batch(self, batch: bytes, rows: int, column_bytes: int) -> Runs:
        self.may_forget(self.applied.window, len(self.ids))
        runs = super().add_batch(batch, rows, column_bytes)
        decoded = batches.decode(batch)
        for row, one in enumerate(decoded.deduplication_ids.values()):
            frame = self.frames[int((decoded.payloads[row] or b"").partition(b"/")[0])]
            if frame.is_refused:
                self.wrong(f"{frame} was refused, and is stored now")
            before = self.indexes.setdefault(one, [])
            if before and frame.deduplicates and before[-1] >= frame.floor:
                self.wrong(f"{frame}: {one!r} is stored at {before[-1]} and again at {len(self.ids)}")
            before.append(len(self.ids))
            self.ids.append(one)
            self.frames_of.append(frame.number)
            # The log says a little later when it was published: it is not known for less than from here on.
            self.times_ms.append(frame.since_ms)
        return runs

    def add_control(self, body: bytes) -> Runs:
        runs = super().add_control(body)
        change, _ = control.decode(body)
        if isinstance(change, Policy):
            self.applied = self.applied.under(change)
        return runs

    # -- the topic -----------------------------------------------------------------------------------------------

    def check(self, topic: Topic) -> None:
        """What the topic says of its window."""
        window = topic.window
        if window is None or topic.state is not State.SERVING:
            return
        if window.first_index > self.floor:
            self.wrong(f"the window begins at {window.first_index}, nothing before {self.floor} may be forgotten")
        if not window.first_index <= window.memory_index <= window.confirmed_index == topic.confirmed_index:
            self.wrong(f"the window goes from {window.first_index} to {window.confirmed_index}")
        if window.next_index != topic.next_index:
            self.wrong(f"the window goes on at {window.next_index}, the topic at {topic.next_index}")

    def check_has_moved(self, topic: Topic) -> None:
        """Something was just decided about: nothing is known that is long beyond the limit."""
        if topic.window is not None and len(self.limits_ever) == 1:
            (limits,) = self.limits_ever
            if len(topic.window) >= limits.messages + max(limits.messages // PARTS, 1):
                self.wrong(f"the window has {len(topic.window)} messages, it may have {limits.messages} and a part")

    def wrong(self, what: str) -> None:
        self.violations.append(f"{self.name}: {what}")
