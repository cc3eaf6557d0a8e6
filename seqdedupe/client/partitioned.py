"""Sending to all partitions of a topic, for tasks: each has a producer of its own, in one order of calls."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Protocol

from seqdedupe.batch import Batch
from seqdedupe.client.awaited import BatchReceipt, Receipt, SpreadBatch
from seqdedupe.client.builder import Keys, Numbers, Payloads, Properties, PropertyRows, key_bytes
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.spread import Numbering


class Part(Protocol):
    """The producer of a partition."""

    _must_pause: bool

    async def _pause(self) -> None: ...

    def _check_open(self) -> None: ...

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt: ...

    def _add_batch(self, batch: Batch) -> PendingBatch: ...

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    async def abort(self) -> None: ...


class Spread:
    """The calls of a producer over its parts, which were opened. They mean what they mean there."""

    def __init__(self, numbers: Numbering, parts: Sequence[Part]) -> None:
        self._numbers = numbers
        self._parts = parts
        self._turn = asyncio.Lock()

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> Receipt:
        async with self._turn:  # in the order of the calls
            sequence_id, key = self._numbers.next_id(sequence_id), key_bytes(key)
            part = self._parts[self._numbers.partition(key)]
            await self._room(part)
            receipt = await part.send(payload, sequence_id, key=key, event_time=event_time, properties=properties)
            self._numbers.sent(sequence_id, () if receipt._row else (receipt._pending,))
            return receipt

    async def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None,
        keys: Keys | None,
        event_times_ms: Numbers | None,
        properties: PropertyRows | None,
    ) -> BatchReceipt:
        async with self._turn:
            batch = self._numbers.check_columns(payloads, sequence_ids, keys, event_times_ms, properties)
            some = [(self._parts[k], rows) for k, rows in self._numbers.rows_by_partition(batch)]
            for part, _ in some:
                await self._room(part)
            sent = [(rows, part._add_batch(batch.take(rows))) for part, rows in some]
            self._numbers.sent_batch(batch, [pending for _, pending in sent])
            return BatchReceipt(SpreadBatch(batch.sequence_ids, sent))

    async def _room(self, part: Part) -> None:
        if part._must_pause:  # once a batch
            await part._pause()
            part._must_pause = True
            for other in self._parts:
                other._check_open()
            part._must_pause = False

    async def flush(self) -> None:
        await self._all(lambda part: part.flush())

    async def close(self) -> None:
        await self._all(lambda part: part.close())

    async def abort(self) -> None:
        await self._all(lambda part: part.abort())

    async def _all(self, call: Callable[[Part], Coroutine[Any, Any, None]]) -> None:
        """Does it to all, and raises what the first one that failed has raised."""
        ends = await asyncio.gather(*(call(part) for part in self._parts), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
