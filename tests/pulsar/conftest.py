"""One real Pulsar broker for all tests of a process that want one; those that harm it start their own."""

import functools
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar.asyncio
import pytest

from pulsar_broker.distribution import Unavailable, home
from pulsar_broker.standalone import Broker
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.pulsar.members import MakeMember, Member, safe_namespace
from tests.pulsar.owners import Cluster, quiet
from tests.tiers import PULSAR

StartBroker = Callable[..., Broker]

LIMIT_BYTES = 2 * 1024 * 1024
"""The largest entry that the shared broker takes. Brokers as they are delivered take more: tests of sizes notice what
does not ask."""

_topics = itertools.count()


@functools.cache
def has_distribution() -> bool:
    try:
        home()
    except Unavailable:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "pulsar_home" in getattr(item, "fixturenames", ()) and not has_distribution():
        PULSAR.missing()


@pytest.fixture(scope="session")
def pulsar_home() -> Path:
    """Pulsar's distribution."""
    return home()


@pytest.fixture(scope="session")
def broker(pulsar_home: Path) -> Iterator[Broker]:
    """A broker for all tests that do not harm it; each uses its own topics."""
    with Broker(pulsar_home, maxMessageSize=LIMIT_BYTES) as broker:
        yield broker


@pytest.fixture
def start_broker(pulsar_home: Path) -> Iterator[StartBroker]:
    """Starts brokers with keys of `standalone.conf`, each with data of its own; they are gone when the test ends."""
    started: list[Broker] = []

    def start(**keys: Any) -> Broker:
        broker = Broker(pulsar_home, **keys)
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        broker.close()


@pytest.fixture
def mortal_broker(start_broker: StartBroker) -> Broker:
    """A broker for one test, which kills it and starts it again. Opening a topic may fail for some seconds after that.

    What is started over the data of a kill -9 may write its bookie's registration again and again, for ever and with
    a whole core: to Pulsar 4.0 it is never what was to be written, since it compares identities. So nobody shares it.
    """
    return start_broker()


@pytest.fixture
def cluster(broker: Broker) -> Cluster:
    return Cluster(broker.service_url, broker.admin_url)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[pulsar.asyncio.Client]:
    client = pulsar.asyncio.Client(
        cluster.service_url, operation_timeout_seconds=int(LAST_RESORT_SECONDS), logger=quiet()
    )
    yield client
    await client.close()


@pytest.fixture
async def namespace(cluster: Cluster) -> str:
    """The name of a namespace that nobody else uses, whose topics can be logs as they are."""
    return await safe_namespace(cluster)


@pytest.fixture
async def member(cluster: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[MakeMember]:
    """Makes sidecars of the test's cluster and namespace, each with its own folder; not started yet."""
    every: list[Member] = []

    def make(**keys: Any) -> Member:
        every.append(Member(cluster, namespace, tmp_path / f"member-{len(every)}", **keys))
        return every[-1]

    yield make
    for one in every:
        await one.kill()


@pytest.fixture
def topic() -> str:
    """The full name of a topic that nobody else uses."""
    return f"persistent://public/default/topic-{os.getpid()}-{next(_topics)}"
