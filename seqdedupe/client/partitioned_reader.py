"""The reader of a partitioned topic: its partitions' messages, each partition in order, all of them in turn."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from seqdedupe.client.messages import Messages
from seqdedupe.client.reader import Reader, Start
from seqdedupe.client.stored import Message, StoredBatch
from seqdedupe.errors import error
from seqdedupe.message_id import Position

_FORM = "partitions-1:"
"""What the text of a position begins with: its version."""


class PartitionedPosition(NamedTuple):
    """Where a reader of a partitioned topic is: a position in each partition, in the order of their numbers.

    `str()` gives a text, `parse` takes it back. There is no order between two of them.
    """

    partitions: tuple[Position, ...]

    def __str__(self) -> str:
        return _FORM + ",".join(map(str, self.partitions))

    @staticmethod
    def parse(text: str) -> "PartitionedPosition":
        """The position that `str()` printed. Raises INVALID_POSITION."""
        if not text.startswith(_FORM):
            raise error("INVALID_POSITION", f"{text[:80]!r} is no position in a partitioned topic, as {_FORM}123@45,…")
        return PartitionedPosition(tuple(Position.parse(one) for one in text.removeprefix(_FORM).split(",")))


PartitionedStart = PartitionedPosition | Literal["earliest", "latest"]


class PartitionEnds(NamedTuple):
    """The positions before the first message that a partition has left, and after its last one."""

    earliest: Position
    latest: Position


class PartitionedReader(Messages):
    """Reads all partitions of a topic: `async for message in reader`, or `reader.batches()` for whole batches.

    It is a `Reader` of each partition, with what that says, and hands out one batch of each in turn as they come:
    between messages of two partitions there is no order. It ends when each of them has ended, with `follow` never.
    `message.partition` says where a message is from, and `position` is to be read on from.

    `ends` looks at all partitions; `part` makes a reader of one. Made by `Client.partitioned_reader`. Raises what
    `Reader` does, INVALID_REQUEST for a topic without partitions, INVALID_POSITION for a position of another number of
    them.
    """

    def __init__(
        self,
        topic: str,
        start: PartitionedStart,
        ends: Callable[[], Awaitable[list[PartitionEnds]]],
        part: Callable[[int, Start], Reader],
    ) -> None:
        if not isinstance(start, PartitionedPosition) and start not in ("earliest", "latest"):
            what = f"{start!r} is neither a position in a partitioned topic nor 'earliest' nor 'latest'"
            raise error("INVALID_POSITION", what)
        self.topic = topic
        self._start = start
        self._ends = ends
        self._part = part
        self._readers: list[Reader] = []
        self._fetching: dict[int, asyncio.Task[bool]] = {}
        self._ended: set[int] = set()
        self._starts: tuple[Position, ...] = ()
        self._turn = 0  # whose batch is in hand, or was
        self._holds = False  # whether it is
        self._closed = False

    @property
    def position(self) -> PartitionedPosition | None:
        """After the last message handed out of each partition; None before the first call that reads, unless it was
        told where to start."""
        if not self._readers:
            return self._start if isinstance(self._start, PartitionedPosition) else None
        each = zip(self._readers, self._starts, strict=True)
        return PartitionedPosition(tuple(reader.position or start for reader, start in each))

    @property
    def skipped(self) -> dict[int, list[range]]:
        """With `skip_damaged`, by partition the indexes of messages that were passed over, in order."""
        return {k: reader.skipped for k, reader in enumerate(self._readers)}

    def has_in_hand(self) -> bool:
        return self._holds and self._readers[self._turn].has_in_hand()

    def next_in_hand(self) -> Message | None:
        return self._readers[self._turn].next_in_hand() if self._holds else None

    def rest_in_hand(self) -> StoredBatch | None:
        return self._readers[self._turn].rest_in_hand() if self._holds else None

    def take_record(self) -> bool:
        """As of a single topic, of the next partition that has one."""
        if not self._readers:
            return False
        self._holds = False
        count = len(self._readers)
        for k in ((self._turn + 1 + i) % count for i in range(count)):
            reader = self._readers[k]
            task = self._fetching.get(k)
            if task is not None:
                if not task.done():
                    continue
                del self._fetching[k]
                if not task.result():
                    self._ended.add(k)
            if reader.has_in_hand() or reader.take_record():
                self._turn, self._holds = k, True
                return True
        return False

    async def fetch(self) -> bool:
        if not self._readers and not self._closed:
            await self._open()
        while not self._closed:
            if self.take_record():
                return True
            for k, reader in enumerate(self._readers):
                if k not in self._ended and k not in self._fetching:
                    self._fetching[k] = asyncio.ensure_future(reader.fetch())
            if not self._fetching:
                return False
            await asyncio.wait(self._fetching.values(), return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _open(self) -> None:
        ends = await self._ends()
        if isinstance(self._start, PartitionedPosition):
            self._starts = self._start.partitions
            if len(self._starts) != len(ends):
                what = f"the position has {len(self._starts)} partitions, and {self.topic} has {len(ends)}"
                raise error("INVALID_POSITION", what, hint="It is of another topic, or of one that was made anew.")
        else:
            self._starts = tuple(one.earliest if self._start == "earliest" else one.latest for one in ends)
        self._readers = [self._part(k, start) for k, start in enumerate(self._starts)]

    async def close(self) -> None:
        self._closed = True
        for reader in self._readers:
            await reader.close()
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
