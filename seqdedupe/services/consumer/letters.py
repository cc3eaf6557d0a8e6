"""Dead letters on their way to a topic: the consumer's own outbox."""

import asyncio
import concurrent.futures
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Row, delete, select, update

from seqdedupe.client import Client, Publisher
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.route import OnWaiting
from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES
from seqdedupe.message_id import Position
from seqdedupe.services.consumer import database, work
from seqdedupe.services.consumer.database import DEAD_LETTERS
from seqdedupe.services.consumer.ownership import Stop
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.services")

PUBLISHED_TOGETHER = 100
_POLL_SECONDS = 0.02


def deduplication_id(consumer: str, topic: str, incarnation: int, index: int) -> str:
    """Under which a dead letter is published, however often: it says which message was given up, and by whom. Where
    that is too long, its SHA-256."""
    text = f"{consumer}/{topic}/{incarnation}/{index}"
    return text if len(text.encode()) <= MAX_DEDUPLICATION_ID_BYTES else hashlib.sha256(text.encode()).hexdigest()


async def check_topic(client: Client, topic: str) -> None:
    """Raises INVALID_OPTION for a topic of sequence IDs: dead letters come in no order, and a watermark would lose
    those that come late; and for one that wants a key of every message. Raises NotFoundError."""
    found = await client.admin.topic(topic)
    if found.deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY:
        why = f"{topic} finds partitions by keys, and a dead letter need not have one"
        raise error("INVALID_OPTION", why, hint="Create one with the route `id`, or without partitions.")
    if found.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"{topic} is not a topic of deduplication IDs, and dead letters have no order",
            hint="Create one: seqdedupe topics create --deduplication-mode deduplication-id TOPIC",
        )


class DeadLetters:
    """Publishes what was given up for a topic, beside the consumer's work, and deletes what is there.

    Any process may, and several at once: the topic takes each dead letter once.
    """

    def __init__(
        self, client: Client, engine: Engine, consumers: Sequence[str], stop: Stop, on_waiting: OnWaiting | None
    ) -> None:
        self._client = client
        self._engine = engine
        self._mine = DEAD_LETTERS.c.consumer.in_(consumers) & DEAD_LETTERS.c.dead_letter_topic.is_not(None)
        self._stop = stop
        self._on_waiting = on_waiting
        self._looked_at = float("-inf")
        self._publishing: concurrent.futures.Future[list[bool]] | None = None
        self._rows: Sequence[Row[Any]] = ()

    def keep_up(self) -> None:
        """From time to time: looks what there is, without waiting for anything. Raises what ends a publisher; Away."""
        if time.monotonic() - self._looked_at >= work.KEEP_UP_SECONDS:
            self._looked_at = time.monotonic()
            self._step()

    def finish(self) -> None:
        """Until there are none left. Raises Stopped, and what `keep_up` does."""
        while self._step():
            self._stop.pause(_POLL_SECONDS)

    def close(self) -> None:
        """What is under way may be in the topic or not; whoever comes next finds out."""
        if self._publishing is not None:
            self._publishing.cancel()

    def _step(self) -> bool:
        """Whether there are any."""
        if self._publishing is not None:
            if not self._publishing.done():
                return True
            publishing, self._publishing = self._publishing, None
            self._settle(publishing.result())
        wanted = select(DEAD_LETTERS).where(self._mine).order_by(DEAD_LETTERS.c.given_up_ms)
        with database.reaching(), self._engine.begin() as connection:
            found = connection.execute(wanted.limit(PUBLISHED_TOGETHER)).all()
        if not found:
            return False
        self._rows = [row for row in found if row.dead_letter_topic == found[0].dead_letter_topic]
        begun = self._publish(found[0].dead_letter_topic, self._rows)
        self._publishing = asyncio.run_coroutine_threadsafe(begun, event_loop())
        return True

    def _settle(self, are_there: Sequence[bool]) -> None:
        with database.reaching(), self._engine.begin() as connection:
            for row, is_there in zip(self._rows, are_there, strict=True):
                same = (DEAD_LETTERS.c.incarnation == row.incarnation) & (
                    DEAD_LETTERS.c.message_index == row.message_index
                )
                this = (DEAD_LETTERS.c.consumer == row.consumer) & same
                if is_there:
                    connection.execute(delete(DEAD_LETTERS).where(this))
                else:  # it stays for people
                    connection.execute(update(DEAD_LETTERS).where(this).values(dead_letter_topic=None))

    async def _publish(self, topic: str, rows: Sequence[Row[Any]]) -> list[bool]:
        """Of each, whether it is in the topic, durable, or (False) is not taken there."""
        async with self._client.publisher(
            topic, on_waiting=self._on_waiting, delivery_timeout_seconds=None
        ) as publisher:
            return await asyncio.gather(*(_send(publisher, row) for row in rows))


async def _send(publisher: Publisher, row: Row[Any]) -> bool:
    of_message = {
        "REAL_TOPIC": row.topic,
        "REAL_SUBSCRIPTION": row.consumer,
        "ORIGIN_MESSAGE_ID": str(Position.parse(row.position).message_id or ""),
        "EXCEPTION_MESSAGE": row.error,
    }
    try:
        await publisher.send(
            row.payload,
            deduplication_id=deduplication_id(row.consumer, row.topic, row.incarnation, row.message_index),
            key=row.message_key,
            event_time=row.event_time_ms or None,
            properties=json.loads(row.properties) | of_message,
        )
    except InvalidRequestError:
        # Too large, or its topic is not what it was: it would end the consumer at each start.
        logger.exception(
            "the dead letter of index %d stays in its table: its topic does not take it", row.message_index
        )
        return False
    return True
