"""A publisher: sends messages that have an ID of their own to a topic of deduplication IDs."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

import numpy as np

from seqdedupe.batch import NO_INT64S, Binary
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows, milliseconds
from seqdedupe.client.config import DELIVERY_TIMEOUT_SECONDS, ProducerConfig
from seqdedupe.client.delivery import Delivery
from seqdedupe.client.results import BatchResult, Published
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.client.waiting import OnWaiting
from seqdedupe.errors import error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES, NO_SEQUENCE_ID
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

Ids = Binary | Sequence[bytes | str]


def new_id() -> bytes:
    """A UUID of version 7, as 16 bytes: the time in milliseconds, then random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return (number & ~(0x3 << 62) | 0x2 << 62).to_bytes(16, "big")


class Publisher:
    """Sends to one topic of deduplication IDs, for one event loop: `async with client.publisher(topic) as publisher`.

    Each call returns when all that it sent is in the log, durable, and there once, however often it had to be sent. A
    call that is made again with the same ID, by whoever, within the topic's window, is answered with DUP and the index
    and message ID of the original. There is no order between calls that are under way at the same time. Whatever breaks
    or is refused for now is sent again, until `delivery_timeout_seconds` (None: for ever) have gone by since the call:
    then it raises OutcomeUnknownError, and the publisher goes on. That call, or one that is cancelled, may have sent,
    or not: made again with the same ID it does no harm.

    In a partitioned topic each message goes to the partition of its ID, or of its key, as the topic was made; a call
    that raises may have sent to some.
    """

    def __init__(
        self,
        sidecars: Sidecars,
        topic: str,
        on_waiting: OnWaiting | None = None,
        delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS,
        describe: Callable[[], Awaitable[admin_pb2.Topic]] | None = None,
    ) -> None:
        self.topic = topic_name(topic)
        config = ProducerConfig(delivery_timeout_seconds=delivery_timeout_seconds)  # which looks at it
        self._checks = Builder(b"", NO_SEQUENCE_ID, config, lambda batch: None)
        self._delivery = Delivery(sidecars, self.topic, on_waiting, config.delivery_timeout_seconds, describe)

    async def __aenter__(self) -> Self:
        self._delivery.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends it. Calls under way raise OUTCOME_UNKNOWN: wait for them before, if their messages matter. Later ones
        are INVALID_REQUEST."""
        await self._delivery.close()

    def abandon(self) -> None:
        """Ends its work, from any thread, when nobody can close it any more."""
        self._delivery.abandon()

    async def send(
        self,
        payload: bytes | None,
        *,
        deduplication_id: bytes | str | None = None,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Published:
        """Sends a message; returns when it is in the log.

        The ID has 1 to 255 bytes, text as UTF-8. Left out, the message gets a new one, which it keeps however often it
        is sent: another call is another message. Raises InvalidRequestError, OutcomeUnknownError without a receipt
        within `delivery_timeout_seconds`, and what ends the publisher: AccessDeniedError, NotFoundError, DamagedError;
        DataLossError, once the topic is not what earlier receipts said.
        """
        one = new_id() if deduplication_id is None else deduplication_id
        times = None if event_time is None else [milliseconds(event_time)]
        result = await self.send_batch(
            [payload],
            [one],
            keys=None if key is None else [key],
            event_times_ms=times,
            properties=None if properties is None else [properties],
        )
        return result[0]

    async def send_batch(
        self,
        payloads: Payloads,
        deduplication_ids: Ids | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchResult:
        """Sends messages in columns, at most 65,536 with 8 MiB together; returns when all are in the log. Otherwise as
        `send`.

        The result has an array for each of `verdicts`, `indexes` and `message_ids`; its `sequence_ids` are -1. A second
        copy of an ID in one batch is DUP of the first. Raises BATCH_TOO_LARGE.
        """
        rows = len(payloads.offsets) - 1 if isinstance(payloads, Binary) else len(payloads)
        batch = self._checks.check_columns(payloads, np.arange(rows), keys, event_times_ms, properties)
        batch.producer_names, batch.deduplication_ids = Binary(), _column(deduplication_ids, rows)
        batch.epochs = batch.previous_sequence_ids = batch.sequence_ids = NO_INT64S
        return await self._delivery.send(batch)


def _column(ids: Ids | None, rows: int) -> Binary:
    """The column of these IDs. Raises INVALID_DEDUPLICATION_ID, INVALID_BATCH."""
    if ids is None:
        ids = [new_id() for _ in range(rows)]
    column = ids if isinstance(ids, Binary) else Binary.of_all([_encoded(one) for one in ids])
    offsets = column.offsets
    sizes = offsets[1:] - offsets[:-1]
    if not column.validity and len(sizes) == rows and offsets[0] == 0 and offsets[-1] == len(column.data):
        if sizes.min() >= 1 and sizes.max() <= MAX_DEDUPLICATION_ID_BYTES:
            return column
        if sizes.min() >= 0:
            bad = np.flatnonzero((sizes < 1) | (sizes > MAX_DEDUPLICATION_ID_BYTES))[0]
            why = f"the deduplication ID of row {bad} has {sizes[bad]} bytes"
            raise error("INVALID_DEDUPLICATION_ID", f"{why}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
    raise error("INVALID_BATCH", f"deduplication_ids has not one value a row, of which there are {rows}")


def _encoded(one: object) -> bytes:
    if isinstance(one, str):
        try:
            return one.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_DEDUPLICATION_ID", f"the deduplication ID {one!r:.80} is not valid Unicode") from e
    if isinstance(one, bytes):
        return one
    raise error("INVALID_DEDUPLICATION_ID", f"a deduplication ID is {type(one).__name__}: it should be bytes or text")
