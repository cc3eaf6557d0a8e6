"""A broker whose log is a list in memory. It keeps to the duty that dedupe.proto states."""

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from seqdedupe.client import Attachment, BrokerClient, Entry, InvalidRequestError, ProducerNumbers, Range, Verdict


@dataclass(frozen=True)
class Stored:
    """An entry: what it was judged by, and what it holds."""

    range: Range
    ids: tuple[int, ...] = ()
    payload: str = ""
    chunk: tuple[int, int] | None = None
    """Which one, and how many its message has."""


def position(number: int) -> bytes:
    """For the entry with this number, from 0; empty before the first."""
    return f"0:{number}".encode() if number >= 0 else b""


class ListBroker:
    """One topic. `attach` first, and again whenever its sidecar was killed."""

    def __init__(self, address: str, topic: str) -> None:
        self.topic = topic
        self.log: list[Stored] = []
        self.appends = 0
        self.replayed = 0
        self.address = address
        self.client = BrokerClient(address)
        self.attachment: Attachment | None = None
        self.in_flight: deque[Stored] = deque()

    @property
    def attached(self) -> Attachment:
        assert self.attachment is not None
        return self.attachment

    async def attach(self) -> None:
        """What was handed to the log and has not settled is lost with the broker's own process."""
        self.in_flight.clear()
        self.replayed = 0
        await self.client.close()
        self.client = BrokerClient(self.address)
        self.attachment = await self.client.attach(self.topic, self._replay, last_position=position(len(self.log) - 1))

    async def _replay(self, after: bytes) -> AsyncIterator[Entry]:
        first = int(after.partition(b":")[2]) + 1 if after else 0
        for number in range(first, len(self.log)):
            self.replayed += 1
            yield Entry(self.log[number].range, position(number), position(number - 1))

    async def check(self, entry: Stored) -> Verdict:
        """The verdict; what is new is handed to the log."""
        [verdict] = await self.attached.check([entry.range])
        if verdict is Verdict.NOT_DUP:
            self.appends += 1
            self.in_flight.append(entry)
        return verdict

    def settle(self, last: Range | None = None) -> None:
        """The log stores the oldest in flight, or all up to this one."""
        while True:
            entry = self.in_flight.popleft()
            self.log.append(entry)
            self.attached.persisted(position(len(self.log) - 1))
            if last is None or entry.range == last:
                return

    async def publish(self, entry: Stored) -> Verdict:
        """Checks, stores and reports."""
        verdict = await self.check(entry)
        if verdict is Verdict.NOT_DUP:
            self.settle()
        return verdict

    def fail(self) -> None:
        """The log refuses all that is in flight; nobody is connected any more when this resets."""
        if self.in_flight:
            self.attached.failed(len(self.in_flight))
            self.in_flight.clear()
        self.attached.reset()

    async def numbers(self, name: str) -> ProducerNumbers:
        """For a producer, when all that was said is done."""
        await self.settled(name)
        return await self.client.producer(self.topic, name) or ProducerNumbers(-1, -1)

    async def settled(self, name: str) -> None:
        """Returns when all that was said is done: a check that is refused is answered after it."""
        try:
            await self.attached.check([Range(name, 1, 0)])
        except InvalidRequestError as e:
            assert e.reason == "INVALID_SEQUENCE_ID"  # noqa: PT017
        else:
            raise AssertionError("a falling range was judged")

    async def close(self) -> None:
        await self.client.close()
