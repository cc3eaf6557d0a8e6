"""The payment service: `python -m examples.shop.payments ADDRESS DATABASE`, as often as one likes at the same time.

Orders and refunds come over two topics, so a refund may come before the order that it follows. The inbox restores the
order of each customer's versions. A message that nobody can read goes to the dead letters, and the others go on.
"""

import asyncio
import json
import sys
from typing import Any

from sqlalchemy import Connection, insert, update

from examples.shop.tables import ACCOUNTS, BOOKINGS, connect
from seqdedupe.client import Client, Message
from seqdedupe.services.consumer import Consumer, ConsumerConfig
from seqdedupe.services.inbox import Inbox

TOPICS = ("shop-order", "shop-refund")
"""The relay is told `shop-{aggregatetype}`."""

CONFIG = ConsumerConfig(max_batch_messages=20, max_attempts=2, poison="dead letter")


def order_of(message: Message) -> dict[str, Any]:
    """What the order service has written. Raises ValueError for what is no JSON."""
    order: dict[str, Any] = json.loads(message.payload or b"")
    return order


def versions_of(message: Message) -> dict[str, int]:
    """Whose next version it is."""
    order = order_of(message)
    return {order["customer"]: order["version"]}


def book(connection: Connection, message: Message) -> None:
    """Done twice it would be wrong: it is done once, for it is committed together with the consumer's position."""
    order = order_of(message)
    cents = ACCOUNTS.c.cents + order["cents"]
    connection.execute(update(ACCOUNTS).where(ACCOUNTS.c.customer == order["customer"]).values(cents=cents))
    connection.execute(insert(BOOKINGS).values(order))


async def serve(address: str, database: str) -> None:
    """Consumes both topics until it is killed."""
    engine = connect(database)
    async with Client(address) as client, asyncio.TaskGroup() as group:
        for topic in TOPICS:
            inbox = Inbox("accounts", engine, book, versions=versions_of)
            consumer = Consumer(client, topic, f"payments of {topic}", engine, inbox, in_batches=True, config=CONFIG)
            group.create_task(consumer.run_async())


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
