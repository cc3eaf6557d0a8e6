"""The publisher for threads."""

import weakref
from datetime import datetime
from types import TracebackType
from typing import Self

from seqdedupe.client import client as _client
from seqdedupe.client import publisher as _publisher
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.builder import Keys, Numbers, Payloads, Properties, PropertyRows
from seqdedupe.client.pending import BatchResult, Published
from seqdedupe.client.publisher import Ids
from seqdedupe.client.route import OnWaiting
from seqdedupe.client.session import DELIVERY_TIMEOUT_SECONDS


class Publisher:
    """As `seqdedupe.client.Publisher`, with calls that block. Threads may share it."""

    def __init__(
        self,
        client: _client.Client,
        topic: str,
        on_waiting: OnWaiting | None = None,
        delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS,
    ) -> None:
        async def made() -> _publisher.Publisher:
            return client.publisher(topic, on_waiting=on_waiting, delivery_timeout_seconds=delivery_timeout_seconds)

        self._publisher = run(made)

    def __enter__(self) -> Self:
        run(self._publisher.__aenter__)
        # If nobody closes it, until the end of the interpreter: asyncio complains of a task that is lost.
        weakref.finalize(self, self._publisher.abandon)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self._publisher.topic

    def close(self) -> None:
        """Ends it; other threads that wait in it get OUTCOME_UNKNOWN, and later calls are INVALID_REQUEST."""
        run(self._publisher.close)

    def send(
        self,
        payload: bytes | None,
        *,
        deduplication_id: bytes | str | None = None,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Published:
        return run(
            lambda: self._publisher.send(
                payload, deduplication_id=deduplication_id, key=key, event_time=event_time, properties=properties
            )
        )

    def send_batch(
        self,
        payloads: Payloads,
        deduplication_ids: Ids | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchResult:
        return run(
            lambda: self._publisher.send_batch(
                payloads, deduplication_ids, keys=keys, event_times_ms=event_times_ms, properties=properties
            )
        )
