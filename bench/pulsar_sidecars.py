"""300 topics over three sidecars: messages a second published to all of them, against one topic on one sidecar.

The sidecars share a broker, and all are on the same machine. Each topic is asked for where a client looks first, so
that the topics are spread as in use. What is opened before is not timed.
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
from seqdedupe.testing import Sidecar

SIDECARS = 3
TOPICS = 300
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


async def _create(addresses: Sequence[str], topics: Sequence[str]) -> None:
    async with Client(list(addresses)) as client:
        for first in range(0, len(topics), CREATED_AT_ONCE):
            await asyncio.gather(*map(client.admin.create_topic, topics[first : first + CREATED_AT_ONCE]))


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with WarmBroker(get(), **KEYS) as broker, ExitStack() as stack:
        addresses = [
            stack.enter_context(Sidecar(folder / f"sidecar-{k}", **broker.sidecar_keys)).address
            for k in range(SIDECARS)
        ]
        topics = [f"{NAMESPACE}/many-{k}" for k in range(TOPICS)]
        one = f"{NAMESPACE}/one"
        asyncio.run(_create(addresses, topics))
        asyncio.run(_create(addresses[:1], [one]))
        yield Figure(
            arms={
                "300 topics, three sidecars": lambda: setup.run(_published(addresses, topics, BATCHES_EACH)),
                "one topic, one sidecar": lambda: setup.run(_published(addresses[:1], [one], TOPICS * BATCHES_EACH)),
            },
            ratios=[Ratio("all ÷ one", over("300 topics, three sidecars", "one topic, one sidecar"), at_least=0.7)],
            rounds=3,
            notes=["arms in messages a second, `plain`"],
        )
