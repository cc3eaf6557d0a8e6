"""Processes that own a topic, or believe to, as an owner does by the rules; and an oracle of what is valid."""

from itertools import pairwise

from seqdedupe.entry_properties import ENTRY, KIND, MARKER, VERSION
from seqdedupe.log.pulsar.entries import PulsarMessage
from seqdedupe.log.pulsar.terms import Receipts, Terms, TermStanding, TermVerdict
from seqdedupe.message_id import MessageId
from tests.batches import batch
from tests.log.pulsar.standin import PulsarTopic
from tests.log.pulsar.topics import INCARNATION, marker, owner, rows


class Process:
    """One that opens the topic for writing, appends, and confirms by the rule of receipts.

    With `believes` every receipt confirms. What it appends is on its way until its `producer` learns otherwise.
    """

    def __init__(self, topic: PulsarTopic, name: str, *, believes: bool = False, version: int = VERSION) -> None:
        self.name = name
        self.confirmed: list[str] = []
        self.is_open = False
        self.producer = topic.producer(name)
        self._topic = topic
        self._believes = believes
        self._number = self._index = 0
        self._under_way: list[PulsarMessage] = []
        self._term = self._sent = self._openings = 0
        self._whose = ""
        self._version = version

    def open(self, *, lands: int = 0, highest_term: int | None = None) -> None:
        """Marks, with a term above the highest that it read, or above a stale one, until a marker takes ownership.

        For what it had on its way `lands` are stored before. What it finds then of its own is confirmed.
        """
        self.producer.end(lands)
        self.is_open = False
        while not self.is_open:
            self._openings += 1
            self._whose = f"{self.name}{self._openings}"
            self._term = (self._read().owner.term if highest_term is None else highest_term) + 1
            highest_term = None
            self.producer = self._topic.producer(self.name)
            self.producer.send(self._marker())
            self.producer.store()
            self.producer.hear()
            standing = self._read()
            self.is_open = standing.owner == owner(self._term, self._whose)
        self._settle()
        self._number, self._index = 1, standing.next_index
        self._receipts = Receipts(self._place_of(self._marker()) or MessageId(-1, -1))

    def _marker(self) -> PulsarMessage:
        return marker(self._term, self._whose, self._version)

    def append(self) -> None:
        """Hands over a message. It is on its way."""
        self._sent += 1
        payload = f"{self.name}{self._sent}".encode()
        sent = batch([("p", self._index)], payloads=[payload])
        (message,) = rows(self._term, self._number, self._index, sent, self._whose, self._version)
        self._number, self._index = self._number + 1, self._index + 1
        self._under_way.append(message)
        self.producer.send(message)

    def hear(self) -> None:
        """Receipts come. What they do not confirm is looked for in the topic; an owner that has lost stops."""
        for receipt in self.producer.hear():
            if receipt is None:
                # What comes after it is void.
                self.is_open = False
            if not self.is_open and not self._believes:
                return
            message = self._under_way[0]
            if receipt is None:
                self._under_way.pop(0)
                continue
            if not self._believes and not self._receipts.confirms(receipt):
                found = self._place_of(message)
                if found is None:
                    self.is_open = False
                    return
                self._receipts.was_read(found)
            self._confirm(self._under_way.pop(0))

    def _settle(self) -> None:
        """After an opening: what of the earlier one is in the topic is stored, and the rest never will be."""
        under_way, self._under_way = self._under_way, []
        for message in under_way:
            if self._place_of(message) is not None:
                self._confirm(message)

    def _confirm(self, message: PulsarMessage) -> None:
        self.confirmed.append((message.payload or b"").decode())

    def _read(self) -> TermStanding:
        terms, _ = judged(self._topic)
        return terms.standing

    def _place_of(self, message: PulsarMessage) -> MessageId | None:
        _, verdicts = judged(self._topic)
        for entry, verdict in zip(self._topic.read(), verdicts, strict=True):
            if verdict is TermVerdict.VALID and entry.message == message:
                return entry.message_id
        return None


def judged(topic: PulsarTopic) -> tuple[Terms, list[TermVerdict]]:
    """What a reader makes of all entries, none of which is trimmed: over the end of a ledger nothing is between."""
    terms = Terms(TermStanding.start(INCARNATION))
    return terms, [terms.judge(entry.message, MessageId(0, at)) for at, entry in enumerate(topic.read())]


def valid_in(topic: PulsarTopic) -> list[tuple[int, PulsarMessage]]:
    """The oracle: the places and messages of all valid entries, markers too."""
    terms = [
        int(entry.message.properties[ENTRY].split(":")[2]) if entry.message.properties.get(KIND) == MARKER else 0
        for entry in topic.entries
    ]
    takes = [at for at, term in enumerate(terms) if term and term > max([0, *terms[:at]])]
    found: list[tuple[int, PulsarMessage]] = []
    for start, end in pairwise([*takes, len(topic.entries)]):
        next_number = 0
        for at in range(start, end):
            message = topic.entries[at].message
            *of_owner, number, _ = message.properties.get(ENTRY, "::").split(":")
            if of_owner == topic.entries[start].message.properties[ENTRY].split(":")[:4]:
                if int(number) > next_number:
                    break
                if int(number) == next_number:
                    next_number += 1
                    found.append((at, message))
    return found


def payloads_of(valid: list[tuple[int, PulsarMessage]]) -> list[str]:
    return [(message.payload or b"").decode() for _, message in valid if message.payload]
