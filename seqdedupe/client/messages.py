"""What the readers of a topic and of a partitioned one have in common: a batch in hand, and then the next one."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from seqdedupe.client.stored import Message, StoredBatch


class Messages(ABC):
    """Messages one by one, or as whole batches. `fetch` waits; what is in hand is handed out without waiting."""

    topic: str

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while (message := self.next_in_hand()) is None:
            if not await self.fetch():
                raise StopAsyncIteration
        return message

    async def batches(self) -> AsyncIterator[StoredBatch]:
        """Whole batches as stored; the first and last, of each partition, are cut to what was asked for."""
        while (stored := await self.next_batch()) is not None:
            yield stored

    async def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self.rest_in_hand() if self.has_in_hand() or await self.fetch() else None

    @abstractmethod
    def has_in_hand(self) -> bool:
        """Whether the next message needs no waiting."""

    @abstractmethod
    def next_in_hand(self) -> Message | None:
        """The next message that needs no waiting; None if there is none."""

    @abstractmethod
    def rest_in_hand(self) -> StoredBatch | None:
        """What is left of the batch in hand, all of it handed out with this."""

    @abstractmethod
    async def fetch(self) -> bool:
        """Waits until another batch is in hand; false at the end and once closed. One task at a time."""

    @abstractmethod
    def take_record(self) -> bool:
        """Takes a batch in hand that was received already; false if there is none. Not while `fetch` is under way."""

    @abstractmethod
    async def close(self) -> None:
        """Ends it; a `fetch` under way ends too."""
