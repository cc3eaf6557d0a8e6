"""A client that keeps to its duty (publish.proto) and to nothing else: it resends when and as often as it likes."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from seqdedupe.core.rule import NOT_DUP, UNKNOWN
from seqdedupe.limits import LINK_LEFT_OUT, NO_SEQUENCE_ID
from seqdedupe.topic.frame import FrameReceipt, Refusal
from tests.batches import batch
from tests.property.disk import Violation

MAX_GAP = 3
MAX_ROWS = 4
"""For one producer in a frame."""

MAX_UNACKED = 24
"""With this many messages without a receipt a producer makes no new ones."""


class State(Enum):
    """Where a session is."""

    CLOSED = 1
    """It has to be opened, or resumed if it has an epoch."""
    OPEN = 2
    FENCED = 3
    """The end of it: another process has the name."""


@dataclass(eq=False)
class Session:
    """One client process's use of one producer name, from its Open to its end."""

    name: str
    number: int
    state: State = State.CLOSED
    epoch: int = 0
    answered: list[int] = field(default_factory=list)
    """What Open answered as persisted, each time."""
    unacked: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    last_sent: int = NO_SEQUENCE_ID
    cursor: int = 0
    """Where sending goes on: at the first message not below this."""
    must_resend: bool = False
    request: object = None
    """The Open that it waits for."""
    confirmed_before: int = NO_SEQUENCE_ID
    """The highest ID that was known to be in the log when that was sent."""
    highest: int = NO_SEQUENCE_ID
    """For all messages made, also those from before it was forgotten."""
    acked_before: int = 0
    """This many messages had a receipt when it was forgotten."""
    missed_that_forgotten: bool = False
    """It has not heard the answer that said so."""
    is_told_no_more: bool = False
    """Nor does anybody know that any more. What the next one says looks like lost data, which is a false alarm."""
    may_be_forgotten: bool = False
    lives: int = 0
    """Receipts of frames that were sent before a resume was asked for, or answered, say nothing after it: it may have
    been forgotten in between."""

    def payload(self, sequence_id: int) -> bytes:
        return f"{self.name}/{self.number}/{sequence_id}".encode()

    def resend(self) -> None:
        """What is sent next begins with the first message without a receipt."""
        self.cursor = self.unacked[0] if self.unacked else self.cursor
        self.must_resend = False

    def take(self, random: Random, rows: int, may_be_new: bool) -> list[int]:
        """The next messages to send, new ones among them: no message without a receipt is omitted between them."""
        if self.must_resend:
            self.resend()
        at = bisect_left(self.unacked, self.cursor)
        taken = self.unacked[at : at + rows]
        while may_be_new and len(taken) < rows:
            made = self.highest = max([self.highest, *self.answered]) + random.randint(1, MAX_GAP)
            self.unacked.append(made)
            taken.append(made)
        if taken:
            self.cursor = taken[-1] + 1
        return taken

    def take_old(self, random: Random, rows: int) -> list[int]:
        """Messages sent before, from any on, with receipt or without."""
        if not self.sent:
            return []
        at = random.randrange(len(self.sent))
        return self.sent[at : at + rows]

    def link(self, first: int) -> int:
        """The highest ID below this one that was sent in this session or that Open answered."""
        at = bisect_left(self.sent, first)
        return max([NO_SEQUENCE_ID, *(p for p in self.answered if p < first), *self.sent[max(at - 1, 0) : at]])

    def may_leave_link_out(self, first: int) -> bool:
        """Whether every message before this one has its receipt."""
        return not self.unacked or self.unacked[0] >= first

    def has_sent(self, ids: list[int]) -> None:
        for sequence_id in ids:
            at = bisect_left(self.sent, sequence_id)
            if at == len(self.sent) or self.sent[at] != sequence_id:
                insort(self.sent, sequence_id)
        self.last_sent = ids[-1]

    def ack(self, sequence_id: int) -> None:
        at = bisect_left(self.unacked, sequence_id)
        if at < len(self.unacked) and self.unacked[at] == sequence_id:
            del self.unacked[at]
            self.acked.append(sequence_id)

    def asks(self, request: object) -> None:
        """An Open is sent."""
        self.request = request
        self.lives += self.may_be_forgotten
        acked = max(self.acked[self.acked_before :], default=NO_SEQUENCE_ID)
        self.confirmed_before = max([*self.answered, acked])

    def opened(self, epoch: int, persisted: int, *, is_forgotten: bool) -> None:
        """Open has answered. What is not above `persisted` is in the log, as a Dup would say."""
        self.lives += self.may_be_forgotten
        is_forgotten |= self.is_told_no_more
        self.missed_that_forgotten = self.is_told_no_more = False
        if is_forgotten and persisted < self.confirmed_before:
            # It begins again, from nothing: links do not reach over this.
            self.answered, self.sent, self.last_sent = [], [], NO_SEQUENCE_ID
            self.acked_before = len(self.acked)
        elif persisted < self.confirmed_before:
            raise Violation(f"{self.name} resumes at {persisted}, confirmed was {self.confirmed_before}: data is lost")
        if self.epoch and persisted > max([self.highest, *self.answered]):
            self.state = State.FENCED
            return
        self.state, self.epoch = State.OPEN, epoch
        self.answered.append(persisted)
        for sequence_id in self.unacked[: bisect_left(self.unacked, persisted + 1)]:
            self.ack(sequence_id)
        self.must_resend = True


@dataclass(eq=False)
class Frame:
    """A batch on its way, and whose messages are in it."""

    number: int
    rows: list[tuple[Session, int]]
    links: dict[str, int]
    encoded: bytes
    is_unary: bool
    lives: dict[Session, int]
    """For each session, when it was sent."""

    def __str__(self) -> str:
        return f"frame {self.number} " + " ".join(f"{s.name}{s.number}:{i}" for s, i in self.rows)

    def answered(self, answer: FrameReceipt | Refusal) -> None:
        """The client hears what became of it."""
        mine = {session.name: session for session, _ in self.rows}
        if isinstance(answer, FrameReceipt):
            verdicts = answer.verdicts if answer.verdicts is not None else [NOT_DUP] * len(self.rows)
            for (session, sequence_id), verdict in zip(self.rows, verdicts, strict=True):
                if session.lives != self.lives[session]:
                    continue
                if verdict == UNKNOWN:
                    session.must_resend = True
                else:
                    session.ack(sequence_id)
            return
        for session in mine.values():
            session.must_resend = True
            # One of them may have been forgotten: a resume tells.
            first = next(sequence_id for owner, sequence_id in self.rows if owner is session)
            misses_what_was_there = answer.error.reason == "PREDECESSOR_MISSING" and session.unacked[:1] == [first]
            if answer.error.reason == "INVALID_EPOCH" or misses_what_was_there:
                session.state = State.CLOSED if session.state is State.OPEN else session.state
        if answer.error.reason == "FENCED":
            for p in answer.producers:
                # A refusal of an epoch that is no longer used says nothing.
                if mine[p.name].epoch == p.epoch:
                    mine[p.name].state = State.FENCED


def compose(number: int, taken: dict[Session, list[int]], random: Random, is_unary: bool) -> Frame:
    """A frame of these messages, those of different names mixed."""
    left = {session: list(ids) for session, ids in taken.items()}
    rows: list[tuple[Session, int]] = []
    while left:
        session = random.choice(list(left))
        rows.append((session, left[session].pop(0)))
        if not left[session]:
            del left[session]
    links = {}
    for session, ids in taken.items():
        links[session.name] = session.link(ids[0])
        if is_unary and session.may_leave_link_out(ids[0]) and random.random() < 0.5:
            links[session.name] = LINK_LEFT_OUT
        session.has_sent(ids)
    epochs = {session.name: session.epoch for session in taken}
    encoded = batch(
        [(session.name, sequence_id) for session, sequence_id in rows],
        epochs=epochs,
        links=links,
        payloads=[session.payload(sequence_id) for session, sequence_id in rows],
    ).encode()
    return Frame(number, rows, links, encoded, is_unary, {session: session.lives for session in taken})
