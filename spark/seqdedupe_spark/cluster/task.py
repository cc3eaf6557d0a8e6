"""What tasks that read from brokers have in common: what fails and may pass is tried again, from where they are."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from seqdedupe.client.connection import Backoff
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import UnavailableError, error
from seqdedupe.log.pulsar.places import Ledgers
from seqdedupe_spark.cluster.connection import MAX_QUEUE_ENTRIES, QUEUE_BYTES, Connection, connected
from seqdedupe_spark.cluster.settings import Cluster
from seqdedupe_spark.ranges import Range

STEP_BYTES = 1024 * 1024
"""About so much is read at a time."""


class Task(ABC):
    """The reading of one range."""

    def __init__(self, span: Range, timeout_seconds: float | None) -> None:
        self._span = span
        self._timeout_seconds = timeout_seconds

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all of the range was read."""

    @abstractmethod
    def _read(self, connection: Connection) -> AsyncGenerator[Sequence[StoredBatch], None]:
        """The messages that are still to be read. Raises UnavailableError for what may pass."""

    async def steps(self, cluster: Cluster) -> AsyncGenerator[Sequence[StoredBatch], None]:
        """The messages of the range. What fails and may pass is tried again."""
        backoff, heard = Backoff(0.05, 5.0), time.monotonic()
        while not self.is_done:
            try:
                async with connected(cluster) as connection, aclosing(self._read(connection)) as steps:
                    async for step in steps:
                        yield step
                        backoff, heard = Backoff(0.05, 5.0), time.monotonic()
            except UnavailableError as e:
                delay = backoff.next_seconds()
                if self._timeout_seconds is not None and time.monotonic() + delay - heard > self._timeout_seconds:
                    what = f"no message of {self._span} has come for {self._timeout_seconds:g} seconds"
                    raise error("UNREACHABLE", f"{what}: {e.message}", hint=e.hint) from e
                await asyncio.sleep(delay)


def queue_entries(ledgers: Ledgers) -> int:
    """Pulsar's client bounds what it fetches ahead by number only."""
    return max(2, min(MAX_QUEUE_ENTRIES, QUEUE_BYTES * len(ledgers) // max(ledgers.size_bytes, 1)))
