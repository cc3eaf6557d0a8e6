"""What must hold, all the time and at each answer."""

from dataclasses import replace

from seqdedupe.core.rule import DUP, DURABLE_EPOCH, EPOCH, NOT_DUP, PERSISTED, PUSHED
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.topic import control
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, Refusal
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.sessions import OpenAnswer
from seqdedupe.topic.topic import Topic
from tests.property.client import Frame, Session
from tests.property.disk import CheckedStorage, Promised, Row, Violation
from tests.property.wires import OpenRequest


class Judge:
    """Collects what is wrong in `violations`. The log's storage adds what it finds when a batch becomes durable."""

    def __init__(self, incarnation: int) -> None:
        self.violations: list[str] = []
        self.storage = CheckedStorage(incarnation, self.violations)
        self.topic: Topic
        self.seen_from = 0

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def process_started(self, topic: Topic) -> None:
        """What this process sees of the log begins where its snapshot ends."""
        self.topic = topic
        self.seen_from = topic.confirmed_index

    def recovered(self) -> None:
        """The topic begins to serve: its numbers are those of the log, and no session is forgotten."""
        topic, rows = self.topic, len(self.storage.rows)
        if not topic.next_index == topic.confirmed_index == rows:
            self.wrong(
                f"recovery ended at {topic.confirmed_index}, next {topic.next_index}; the log has {rows} messages"
            )
        if topic.policy != self.storage.policy:
            self.wrong(f"after recovery the policy is {topic.policy}, in the log is {self.storage.policy}")
        for name, promised in self.storage.promised.items():
            number = topic.producers.number(name.encode())
            if number is None:
                if promised.highest >= 0 or promised.epoch:
                    self.wrong(f"{name} is forgotten after recovery")
                continue
            pushed, persisted, epoch = topic.producers.numbers[number, [PUSHED, PERSISTED, EPOCH]].tolist()
            if not pushed == persisted == promised.highest:
                self.wrong(
                    f"after recovery {name} has pushed {pushed}, persisted {persisted}; "
                    f"in the log is {promised.highest}"
                )
            if epoch < promised.epoch:
                self.wrong(f"after recovery {name} has epoch {epoch}, answered was {promised.epoch}")

    def check(self, failures: list[BaseException]) -> None:
        """Raises `Violation` if something has been found. `failures` are those of the process's tasks."""
        for failure in failures:
            if not isinstance(failure, UnavailableError):
                raise Violation(f"a task failed: {failure!r}") from failure
        failures.clear()
        topic = self.topic
        for name, promised in self.storage.promised.items():
            number = topic.producers.number(name.encode())
            if number is None:
                continue
            persisted, epoch = topic.producers.numbers[number, [PERSISTED, DURABLE_EPOCH]].tolist()
            # A reset that is in the log may have been reported to nobody yet, and recovery repeats earlier ones first.
            is_reset = epoch >= promised.reset_epoch and (self.is_serving() or not promised.reset_epoch)
            is_purged = self.is_serving() and not self.topic.flight.has(control.Purge)
            if persisted > promised.highest and is_reset and (is_purged or not promised.purges):
                self.wrong(f"{name} has persisted {persisted}, in the log is {promised.highest}")
        if topic.keeper.snapshot_index > topic.confirmed_index:
            self.wrong(f"a snapshot covers {topic.keeper.snapshot_index}, confirmed is {topic.confirmed_index}")
        if self.violations:
            raise Violation("; ".join(self.violations))

    def receipt(self, frame: Frame, receipt: FrameReceipt) -> None:
        """It points at exactly the messages that it speaks of; they can be read, and their links are right."""
        verdicts = receipt.verdicts if receipt.verdicts is not None else [NOT_DUP] * len(frame.rows)
        known = dict(zip(receipt.known_rows.tolist(), receipt.known_indexes.tolist(), strict=True))
        index = receipt.first_index
        before = dict(frame.links)
        started: set[str] = set()
        for row, ((session, sequence_id), verdict) in enumerate(zip(frame.rows, verdicts, strict=True)):
            expected = Row(session.name, sequence_id, session.payload(sequence_id))
            if verdict == NOT_DUP:
                if not 0 <= index < self.topic.confirmed_index or self.storage.rows[index] != expected:
                    self.wrong(f"{frame}: NotDup, but {expected[:2]} is not at index {index}")
                elif session.name not in started and self.storage.links[index] != before[session.name]:
                    self.wrong(f"{frame}: {expected[:2]} is stored with another link: {self.storage.links[index]}")
                started.add(session.name)
                index += 1
            elif verdict == DUP:
                self._dup(frame, expected, is_known=row in known)
            if row in known and (verdict != DUP or self.storage.rows[known[row]] != expected):
                self.wrong(f"{frame}: index {known[row]} is not that of {expected[:2]}")
            before[session.name] = sequence_id

    def _dup(self, frame: Frame, row: Row, *, is_known: bool) -> None:
        if not self.storage.holds(*row, below_index=self.topic.confirmed_index):
            self.wrong(f"{frame}: Dup, but the log does not hold {row}")
        elif self.storage.promise(row.name).purges:
            # For what came before it was forgotten nothing is known.
            pass
        elif not is_known and self.storage.indexes[row[:2]][0] >= self.seen_from and not self.storage.may_double:
            self.wrong(f"{frame}: Dup, without the index of {row[:2]}")

    def refusal(self, frame: Frame, refusal: Refusal, pushed: dict[str, int]) -> None:
        """Nothing of the frame was stored. `pushed`: the numbers when it came; what was above has no other copy."""
        was_purged = any(self.storage.promise(session.name).purges for session, _ in frame.rows)
        if refusal.error.reason == "INVALID_EPOCH" and not was_purged:
            self.wrong(f"{frame} is refused with {refusal.error}, but Open had answered")
        if refusal.error.reason == "FENCED":
            for p in refusal.producers:
                if p.epoch >= self.storage.promise(p.name).stored_epoch:
                    self.wrong(f"{frame} is fenced by a session of {p.name} that the log does not hold")
        for session, sequence_id in frame.rows:
            is_stored = sequence_id > pushed[session.name] and (session.name, sequence_id) in self.storage.indexes
            # After a reset the one that is stored may be another one.
            promised = self.storage.promise(session.name)
            is_stored = is_stored and not promised.reset_epoch and not promised.purges
            if is_stored and refusal.error.reason != "OUTCOME_UNKNOWN":
                self.wrong(f"{frame} is refused, but {session.name} {sequence_id} was stored")

    def is_serving(self) -> bool:
        return self.topic.state is State.SERVING

    def stored(self, request: OpenRequest) -> list[Promised]:
        """What the log holds as the request comes."""
        return [replace(self.storage.promise(session.name)) for session in request.sessions]

    def reset_answered(self, name: str) -> None:
        """For earlier sessions nothing will come any more."""
        promised = self.storage.promise(name)
        if not promised.reset_epoch:
            self.wrong(f"the reset of {name} is answered, but not in the log")
        promised.epoch = max(promised.epoch, promised.reset_epoch)

    def open_refused(self, name: str, epochs: list[int] | None, place: int, e: SeqdedupeError) -> None:
        """Only a session that the log holds fences another one."""
        if epochs is None or e.reason != "FENCED":
            self.wrong(f"Open of {name} with epochs {epochs} gets {e}")
        elif epochs[place] >= self.storage.promise(name).stored_epoch and not self.storage.promise(name).purges:
            self.wrong(f"Open of {name} is fenced by a session that the log does not hold")

    def policy_answered(self, policy: Policy) -> None:
        """It is in force, and in the log, unless another one came after it."""
        if self.topic.policy != self.storage.policy:
            self.wrong(f"the policy {policy} is answered, but {self.topic.policy} is in force")

    def opened(self, request: OpenRequest, opened: OpenAnswer, before: list[Promised]) -> None:
        """All that was stored when the Open came is counted; of earlier sessions nothing will come any more."""
        for place, session in enumerate(request.sessions):
            name, promised = session.name, self.storage.promise(session.name)
            if place in opened.refusals:
                continue
            epoch, persisted, index = opened.epochs[place], opened.persisted[place], opened.indexes[place]
            if epoch < promised.reset_epoch:
                # It has been fenced meanwhile, no matter what it learns.
                promised.epoch = max(promised.epoch, epoch)
                continue
            is_same = (before[place].reset_epoch, before[place].purges) == (promised.reset_epoch, promised.purges)
            highest = before[place].highest if is_same else -1
            if not highest <= persisted <= promised.highest:
                self.wrong(f"Open answers {persisted} for {name}, in the log was {highest} when it came")
            if request.epochs is None and epoch > promised.epoch and persisted != promised.highest:
                self.wrong(f"a new session of {name} begins at {persisted}, but the log has {promised.highest}")
            if index >= 0 and self.storage.rows[index][:2] != (name, persisted):
                self.wrong(f"Open answers index {index} for {name} {persisted}")
            promised.epoch = max(promised.epoch, epoch)

    def acknowledged(self, session: Session) -> None:
        """What has a receipt is in the log."""
        for sequence_id in session.acked:
            if not self.storage.holds(session.name, sequence_id, session.payload(sequence_id)):
                self.wrong(f"{session.name} {sequence_id} is acknowledged and not in the log")
