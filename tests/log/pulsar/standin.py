"""A Pulsar topic in memory that does what a real one was seen to do, on command; nothing is random.

topic = PulsarTopic(deduplicates=False)
a, b = topic.producer("a"), topic.producer("b")    both exclusive, at once: a split
a.send(message)       it is on its way
a.store(1)            the broker takes the oldest that is on its way; its receipt is on its way back
a.hear()              the receipts that have come, in order
a.lose()              the oldest that is on its way is refused, and nowhere; what comes after it is not
a.connect_again()     receipts on their way are lost, and all without a receipt is sent again
a.end(lands=2)        the producer is gone; of what was on its way the two oldest are stored
topic.roll_over()     a new ledger
topic.trim(ledgers=1) the oldest ledger is deleted
topic.keep_from(id)   the durable subscription keeps this entry, and all after it; topic.retain_nothing() drops the rest
topic.read(after)     as a Reader does: over what was trimmed it jumps, and says nothing
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator

from seqdedupe.log.pulsar.entries import PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.ledgers import Ledger, Ledgers
from seqdedupe.message_id import MessageId

NO_RECEIPT = MessageId(-1, -1)
"""What Pulsar's deduplication answers for an entry that it has seen."""


class PulsarTopic:
    """What is stored outlives everybody who writes."""

    def __init__(self, *, deduplicates: bool = True, clock_ms: Callable[[], int] | None = None) -> None:
        self.entries: list[PulsarEntry] = []
        self.hidden: list[MessageId] = []
        self._deduplicates = deduplicates
        self._highest: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._ledger, self._entry, self._now_ms = 10, 0, 1000
        self._clock_ms = clock_ms
        self._stores_nothing = False
        self.is_terminated = False
        """Then it takes nothing more; anyone who had it still seems to."""
        self.kept_from: MessageId | None = None
        """Where the durable subscription stands; None is at the first entry."""

    def producer(self, name: str) -> "Producer":
        """One more, no matter who else there is. A name that was used before goes on with rising sequence IDs."""
        return Producer(self, name, self.highest(name) + 1)

    def highest(self, name: str) -> int:
        """The highest sequence ID of a name; -1 if it is not known."""
        return self._highest.get(name, -1)

    def add(self, message: PulsarMessage, name: str = "", sequence_id: int = -1) -> MessageId:
        """The broker is given an entry; without a name it is a stranger's."""
        if self._stores_nothing:
            return NO_RECEIPT
        if name and self._deduplicates:
            if sequence_id <= self.highest(name):
                return NO_RECEIPT
            self._highest[name] = sequence_id
        message_id = MessageId(self._ledger, self._entry)
        self._entry += 1
        self._sizes[self._ledger] = self._entry
        self._now_ms = self._clock_ms() if self._clock_ms else self._now_ms + 1
        self.entries.append(PulsarEntry(message, message_id, self._now_ms, name, sequence_id))
        return message_id

    def add_hidden(self) -> None:
        """A broker stores an entry that it gives to no reader, and says that this one is the last."""
        self.hidden.append(MessageId(self._ledger, self._entry))
        self._entry += 1
        self._sizes[self._ledger] = self._entry

    @property
    def last(self) -> MessageId:
        """The last entry, as the broker says."""
        return max([NO_RECEIPT, *self.hidden[-1:], *(entry.message_id for entry in self.entries[-1:])])

    def forget_from_now_on(self) -> None:
        """Takes all that comes for seen before, and stores nothing: as it does when a write to its disk has failed."""
        self._stores_nothing = True

    def roll_over(self) -> None:
        # Ledgers of other topics lie between.
        self._ledger, self._entry = self._ledger + 3, 0

    def trim(self, ledgers: int) -> None:
        gone = sorted({entry.message_id.ledger_id for entry in self.entries})[:ledgers]
        self.entries = [entry for entry in self.entries if entry.message_id.ledger_id not in gone]

    @property
    def first_ledger(self) -> int:
        """That of the first entry left; without one, the current ledger."""
        return self.entries[0].message_id.ledger_id if self.entries else self._ledger

    @property
    def ledgers(self) -> Ledgers:
        """As the broker lists them: what was stored counts, whether or not a reader is given it."""
        left = sorted(one for one in self._sizes.items() if one[0] >= self.first_ledger)
        return Ledgers([Ledger(ledger, entries, 100 * entries) for ledger, entries in left])

    def keep_from(self, message_id: MessageId) -> None:
        assert any(entry.message_id == message_id for entry in self.entries), "what it is to keep is gone already"
        self.kept_from = message_id

    def retain_nothing(self) -> None:
        """All ledgers go that the durable subscription does not need."""
        if self.kept_from is not None:
            self.entries = [e for e in self.entries if e.message_id.ledger_id >= self.kept_from.ledger_id]

    def read(self, after: MessageId | None = None) -> Iterator[PulsarEntry]:
        at = 0 if after is None else bisect_right(self.entries, after, key=lambda entry: entry.message_id)
        return iter(self.entries[at:])

    def next(self, after: MessageId | None, start: MessageId) -> PulsarEntry | None:
        """The first entry that is left after one, and not before another one."""
        at = bisect_left(self.entries, start, key=lambda entry: entry.message_id)
        if after is not None:
            at = max(at, bisect_right(self.entries, after, key=lambda entry: entry.message_id))
        return self.entries[at] if at < len(self.entries) else None


class Producer:
    """One of a client: it sends in order, and sends again what it has no receipt for."""

    def __init__(self, topic: PulsarTopic, name: str, first_sequence_id: int) -> None:
        self._topic = topic
        self._name = name
        self._next_sequence_id = first_sequence_id
        self._pending: deque[tuple[int, PulsarMessage | None]] = deque()
        self._receipts: deque[MessageId | None] = deque()

    def send(self, message: PulsarMessage) -> None:
        self._pending.append((self._next_sequence_id, message))
        self._next_sequence_id += 1

    def store(self, count: int | None = None) -> None:
        """The broker takes this many (None: all) of those that it has not answered."""
        on_their_way = list(self._pending)[len(self._receipts) :]
        for sequence_id, message in on_their_way[:count]:
            self._receipts.append(message and self._topic.add(message, self._name, sequence_id))

    def lose(self) -> None:
        at = len(self._receipts)
        if at < len(self._pending):
            self._pending[at] = self._pending[at][0], None

    def connect_again(self) -> None:
        self._receipts.clear()

    def hear(self) -> list[MessageId | None]:
        """None of what was refused."""
        heard = list(self._receipts)
        for _ in heard:
            self._pending.popleft()
        self._receipts.clear()
        return heard

    def end(self, lands: int = 0) -> None:
        self.store(lands)
        self._pending.clear()
        self._receipts.clear()
