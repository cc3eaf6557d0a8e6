"""Two owners of one topic at once, as a split of Pulsar's exclusive producers lets them in, and an oracle."""

from itertools import pairwise

from seqdedupe.log.pulsar.entries import INDEX, KIND, MARKER, NUMBER, OWNER, Entry, Message
from seqdedupe.log.pulsar.terms import Receipts, Standing, Terms, Verdict
from seqdedupe.message_id import MessageId
from tests.batches import batch
from tests.log.pulsar.topics import INCARNATION, marker, owner, rows


class Topic:
    """What is stored, in order. Everybody may write."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._ledger, self._entry = 10, 0

    def add(self, message: Message) -> MessageId:
        message_id = MessageId(self._ledger, self._entry)
        self._entry += 1
        self.entries.append(Entry(message, message_id, 1000))
        return message_id

    def roll_over(self) -> None:
        self._ledger, self._entry = self._ledger + 1, 0


class Process:
    """One that opens the topic for writing, appends, and confirms by the rule of receipts.

    With `believes` every receipt confirms. Several appends are under way until `hear` is called.
    """

    def __init__(self, topic: Topic, name: str, *, believes: bool = False) -> None:
        self.name = name
        self.confirmed: list[str] = []
        self.is_open = False
        self._topic = topic
        self._believes = believes
        self._term = self._number = self._index = 0
        self._under_way: list[tuple[Message, MessageId]] = []
        self._sent = self._openings = 0
        self._whose = ""

    def open(self, *, highest_term: int | None = None) -> None:
        """Marks, with a term above the highest it has read, or above a stale one, until a marker takes ownership."""
        self.hear()
        self.is_open = True
        while True:
            term = (self._read(len(self._topic.entries)).owner.term if highest_term is None else highest_term) + 1
            highest_term = None
            self._openings += 1
            self._whose = f"{self.name}{self._openings}"
            position = self._topic.add(marker(term, self._whose))
            standing = self._read(len(self._topic.entries))
            if standing.owner == owner(term, self._whose):
                break
        self._term, self._number, self._index = term, 1, standing.next_index
        self._receipts = Receipts(position)

    def _read(self, count: int) -> Standing:
        terms = Terms(Standing.start(INCARNATION))
        for entry in self._topic.entries[:count]:
            terms.judge(entry.message)
        return terms.standing

    def append(self) -> None:
        """What it sends is stored, whoever owns the topic."""
        self._sent += 1
        payload = f"{self.name}{self._sent}".encode()
        (message,) = rows(
            self._term, self._number, self._index, batch([("p", self._index)], payloads=[payload]), self._whose
        )
        self._number, self._index = self._number + 1, self._index + 1
        self._under_way.append((message, self._topic.add(message)))

    def send_again(self) -> None:
        """The client connects again, and sends what it has no receipt for; the receipts are those of the copies."""
        self._under_way = [(message, self._topic.add(message)) for message, _ in self._under_way]

    def hear(self) -> None:
        """The receipts come. What they do not confirm is looked for in the topic; an owner that lost stops."""
        under_way, self._under_way = self._under_way, []
        for message, message_id in under_way:
            if not self._believes and not self._receipts.confirms(message_id):
                found = self._look_for(message)
                if found is None:
                    self.is_open = False
                    return
                self._receipts.was_read(found)
            self.confirmed.append((message.payload or b"").decode())

    def _look_for(self, message: Message) -> MessageId | None:
        terms = Terms(Standing.start(INCARNATION))
        for entry in self._topic.entries:
            if terms.judge(entry.message) is Verdict.VALID and entry.message == message:
                return entry.message_id
        return None


def valid_in(topic: Topic) -> list[tuple[int, Message]]:
    """The oracle: the places and messages of all valid entries, markers too."""
    terms = [
        int((entry.message.properties.get(OWNER) or "::0").split(":")[2])
        if entry.message.properties.get(KIND) == MARKER
        else 0
        for entry in topic.entries
    ]
    takes = [at for at, term in enumerate(terms) if term and term > max([0, *terms[:at]])]
    found: list[tuple[int, Message]] = []
    for start, end in pairwise([*takes, len(topic.entries)]):
        seen = set()
        for at in range(start, end):
            message = topic.entries[at].message
            said = message.properties.get(OWNER), message.properties.get(NUMBER)
            if said[0] == topic.entries[start].message.properties[OWNER] and said not in seen:
                seen.add(said)
                found.append((at, message))
    return found


def payloads_of(valid: list[tuple[int, Message]]) -> list[str]:
    return [(message.payload or b"").decode() for _, message in valid if INDEX in message.properties]
