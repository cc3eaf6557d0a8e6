"""300 topics over three sidecars, of which one is killed: how long the two others take to own its topics.

All topics are published to until each has a receipt. The time is divided by the number of topics that the sidecar had.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import KEYS, WarmBroker
from bench.pulsar_sidecars import FORMATS, SIDECARS, create, names_of
from pulsar_broker.distribution import get
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2

AT_ONCE = 16

_names = itertools.count()


async def published(addresses: Sequence[str], topics: Sequence[str]) -> float:
    """The seconds until a message to each topic has a receipt."""
    name, left = f"p{next(_names)}", iter(topics)
    async with Client(list(addresses)) as client:

        async def some() -> None:
            for topic in left:
                async with client.producer(topic, name) as producer:
                    await producer.send(b"x")

        began = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return time.perf_counter() - began


async def _owned(address: str, topics: Sequence[str]) -> int:
    """How many of these topics a sidecar owns."""
    async with Client(address) as client:
        found = await client.admin.topics()
        return sum(one.state == admin_pb2.TOPIC_STATE_SERVING for one in found if one.name in topics)


class Sidecars:
    """Three sidecars, and 300 topics of each format over them."""

    def __init__(self, sidecars: Sequence[Sidecar]) -> None:
        self._sidecars = sidecars
        self._addresses = [sidecar.address for sidecar in sidecars]
        for entry_format in FORMATS:
            setup.run(create(self._addresses, names_of(entry_format), entry_format))

    def taken_over(self, entry_format: str) -> float:
        """Milliseconds for each topic. The sidecar that owns most of them is killed, and started again."""
        topics = names_of(entry_format)
        # What an earlier take-over of the other topics has left without an owner gets one.
        setup.run(published(self._addresses, topics))
        each = [setup.run(_owned(address, topics)) for address in self._addresses]
        owned = max(each)
        sidecar = self._sidecars[each.index(owned)]
        sidecar.kill()
        seconds = setup.run(published(self._addresses, topics))
        sidecar.start()
        return seconds * 1000 / owned


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with WarmBroker(get(), **KEYS) as broker, ExitStack() as stack:
        started = [
            stack.enter_context(Sidecar(folder / f"sidecar-{k}", **broker.sidecar_keys)) for k in range(SIDECARS)
        ]
        sidecars = Sidecars(started)
        yield Figure(
            arms={entry_format: partial(sidecars.taken_over, entry_format) for entry_format in FORMATS},
            ratios=[Ratio("plain ÷ native", over("plain", "native"), at_least=0.97)],
            rounds=5,
            notes=["arms in milliseconds a topic"],
        )
