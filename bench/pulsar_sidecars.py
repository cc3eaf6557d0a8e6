"""300 topics over three sidecars: messages a second published to all of them, against one topic on one sidecar.

The sidecars share a broker, and all are on the same machine. Each topic is asked for where a client looks first, so
that the topics are spread as in use. What is opened before is not timed. So with `plain` and with `native` topics.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import grpc.aio

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import rising
from bench.pulsar_setup import KEYS, NAMESPACE, WarmBroker
from pulsar_broker.distribution import get
from seqdedupe.client import Client
from seqdedupe.client.route import in_order
from seqdedupe.errors import InvalidRequestError
from seqdedupe.testing import Sidecar

SIDECARS = 3
TOPICS = 300
FORMATS = ("plain", "native")
ROWS = 250
BATCHES_EACH = 2
"""To each of the topics; to the one topic as many as to all of them."""
IN_FLIGHT = 20
"""Batches, of each topic."""
CREATED_AT_ONCE = 16

_names = itertools.count()


async def _published(addresses: Sequence[str], topics: Sequence[str], batches: int) -> float:
    """Messages a second to all of the topics together, a producer each, confirmed."""
    name = f"p{next(_names)}"
    make = rising(name, ROWS)
    async with AsyncExitStack() as stack:
        channels = {
            address: await stack.enter_async_context(grpc.aio.insecure_channel(address, options=setup.LARGE))
            for address in addresses
        }
        streams = [await setup.opened(channels[in_order(topic, addresses)[0]], [name], topic) for topic in topics]
        began = time.perf_counter()
        await asyncio.gather(*(one.publish(make, batches, IN_FLIGHT) for one in streams))
        return len(topics) * batches * ROWS / (time.perf_counter() - began)


async def create(addresses: Sequence[str], topics: Sequence[str], entry_format: str) -> None:
    async with Client(list(addresses)) as client:

        async def one(topic: str) -> None:
            try:
                await client.admin.create_topic(topic, entry_format=entry_format)
            except InvalidRequestError as e:
                # On a slow machine the call is made again, and finds what it has created.
                if e.reason != "TOPIC_EXISTS":
                    raise

        for first in range(0, len(topics), CREATED_AT_ONCE):
            await asyncio.gather(*map(one, topics[first : first + CREATED_AT_ONCE]))


def names_of(entry_format: str) -> list[str]:
    """The names of 300 topics."""
    return [f"{NAMESPACE}/{entry_format}-{k}" for k in range(TOPICS)]


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with WarmBroker(get(), **KEYS) as broker, ExitStack() as stack:
        addresses = [
            stack.enter_context(Sidecar(folder / f"sidecar-{k}", **broker.sidecar_keys)).address
            for k in range(SIDECARS)
        ]

        def all_of(entry_format: str) -> float:
            return setup.run(_published(addresses, names_of(entry_format), BATCHES_EACH))

        def one_of(entry_format: str) -> float:
            one = f"{NAMESPACE}/one-{entry_format}"
            return setup.run(_published(addresses[:1], [one], TOPICS * BATCHES_EACH))

        for entry_format in FORMATS:
            setup.run(create(addresses, names_of(entry_format), entry_format))
            setup.run(create(addresses[:1], [f"{NAMESPACE}/one-{entry_format}"], entry_format))
        yield Figure(
            arms={
                "300 topics, plain": lambda: all_of("plain"),
                "300 topics, native": lambda: all_of("native"),
                "one topic, plain": lambda: one_of("plain"),
                "one topic, native": lambda: one_of("native"),
            },
            ratios=[
                Ratio("300 topics ÷ one, plain", over("300 topics, plain", "one topic, plain"), at_least=0.7),
                Ratio("300 topics ÷ one, native", over("300 topics, native", "one topic, native")),
                Ratio("300 topics, native ÷ plain", over("300 topics, native", "300 topics, plain"), at_least=0.97),
            ],
            rounds=3,
            notes=["arms in messages a second"],
        )
