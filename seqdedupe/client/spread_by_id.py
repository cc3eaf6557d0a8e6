"""Sending messages with IDs of their own to all partitions of a topic: each has a delivery."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.client.results import BatchResult
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.routing import partition_of
from seqdedupe.v1 import admin_pb2


class Part(Protocol):
    """The delivery to a partition."""

    async def close(self) -> None: ...

    def abandon(self) -> None: ...

    async def send(self, batch: Batch) -> BatchResult: ...


def check_route_is_known(whole: admin_pb2.Topic) -> None:
    """Raises RECOVERING while the sidecar does not know by what messages find their partitions."""
    if whole.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED:
        raise error("RECOVERING", f"by what messages of topic {whole.name} find their partitions is not known yet")


class SpreadById:
    """The batches of a publisher over the deliveries to the partitions, in order, which are open."""

    def __init__(self, parts: Sequence[Part], route: int) -> None:
        self._parts = parts
        self._by_key = route == admin_pb2.DEDUPLICATION_ROUTE_KEY

    async def send(self, batch: Batch) -> BatchResult:
        """Returns when all of a batch is in the log; raises what the first partition has raised that failed: some of it
        may be in the others, and is DUP when it is sent again. Raises INVALID_BATCH where a key is missing."""
        if self._by_key:
            self._check_keys(batch)
        some = self._rows_by_partition(batch)
        sent = await asyncio.gather(
            *(self._parts[k].send(batch.take(rows)) for k, rows in some), return_exceptions=True
        )
        result = BatchResult.undecided(np.full(len(batch), NO_SEQUENCE_ID, np.int64))
        for (k, rows), outcome in zip(some, sent, strict=True):
            if isinstance(outcome, SeqdedupeError) and outcome.reason == "INVALID_REQUEST" and len(some) > 1:
                # Closed meanwhile: of this partition alone it is certain that nothing was sent.
                raise error("OUTCOME_UNKNOWN", f"nothing went to partition {k}: {outcome.message}") from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            result.put(rows, outcome)
            result.partitions[rows] = k
        return result

    def _check_keys(self, batch: Batch) -> None:
        for row in range(len(batch)):
            if not batch.keys.is_there(row):
                why = f"row {row} has no key, by which messages find their partitions in this topic"
                raise error("INVALID_BATCH", why)

    def _rows_by_partition(self, batch: Batch) -> list[tuple[int, Int64s]]:
        column = batch.keys if self._by_key else batch.deduplication_ids
        of_rows = np.array([partition_of(value, b"", len(self._parts)) for value in column.values()], np.int64)
        return [(int(k), np.flatnonzero(of_rows == k)) for k in np.unique(of_rows)]

    def abandon(self) -> None:
        """As of each of them."""
        for part in self._parts:
            part.abandon()

    async def close(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(part.close() for part in self._parts))
