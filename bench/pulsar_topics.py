"""What 300 topics cost a sidecar: connections to the brokers, and memory.

Measured is what a new sidecar has when each of 300 topics has a receipt, less what it had when the first topic had one.
The topics are deleted afterwards.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import KEYS, WarmBroker
from bench.pulsar_sidecars import FORMATS, create, names_of
from bench.pulsar_takeover import published
from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar

_MB = 1 << 20

_sidecars = itertools.count()


def _connections(sidecar: Sidecar, broker: Broker) -> int:
    port = int(broker.service_url.rpartition(":")[2])
    found = psutil.Process(sidecar.pid).net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in found)


async def _delete(address: str, topics: Sequence[str]) -> None:
    async with Client(address) as client:
        for topic in topics:
            await client.admin.delete_topic(topic)


def _cost(folder: Path, broker: Broker, entry_format: str) -> dict[str, float]:
    topics = names_of(entry_format)
    with Sidecar(folder / f"sidecar-{next(_sidecars)}", **broker.sidecar_keys) as sidecar:

        def serve(some: Sequence[str]) -> tuple[float, float]:
            setup.run(create([sidecar.address], some, entry_format))
            setup.run(published([sidecar.address], some))
            return _connections(sidecar, broker), psutil.Process(sidecar.pid).memory_info().rss / _MB

        # The first topic also loads what all need.
        first, all_of_them = serve(topics[:1]), serve(topics[1:])
        setup.run(_delete(sidecar.address, topics))
    connections, resident = (after - before for before, after in zip(first, all_of_them, strict=True))
    return {"connections": connections, "MB": resident}


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with WarmBroker(get(), **KEYS) as broker:
        yield Figure(
            arms={entry_format: partial(_cost, folder, broker, entry_format) for entry_format in FORMATS},
            ratios=[
                Ratio("connections, native", lambda measured: measured["native, connections"], unit=""),
                Ratio("memory, native", lambda measured: measured["native, MB"], unit="MB"),
                Ratio("memory, native ÷ plain", over("native, MB", "plain, MB")),
            ],
            rounds=3,
            notes=["arms in connections, and in MB resident, of 299 topics"],
        )
