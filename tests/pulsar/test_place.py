"""A real broker removes what a durable snapshot says that nobody needs, and nothing else; what is gone is said."""

import itertools
import time
from collections.abc import AsyncIterator

import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import START_TIMEOUT_SECONDS, Broker
from seqdedupe.errors import DamagedError
from seqdedupe.log.contract import Retention
from seqdedupe.log.pulsar.entries import EntryFormat, Settings
from seqdedupe.log.pulsar.log import PulsarLog, Shared
from tests.log.conformance import Owner, parsed
from tests.pulsar.owners import Cluster, quiet, until

pytestmark = pytest.mark.timeout(START_TIMEOUT_SECONDS * 4)

INCARNATION = 1_700_000_000_000_000
LEDGER_ROWS = 1_200
"""Of more than 1,000 entries Pulsar's deduplication needs none any more for its own recovery."""
SETTINGS = Settings(EntryFormat.PLAIN, "SEQUENCE_ID", 0, "host:6680")

_openings = itertools.count(1)


@pytest.fixture
def cluster(broker: Broker) -> Cluster:
    return Cluster(broker.service_url, broker.admin_url)


@pytest.fixture
async def shared(cluster: Cluster) -> AsyncIterator[Shared]:
    async def claim(_: str, known: int) -> int:
        return next(number for number in _openings if number > known)

    clock, connect, answers = lambda: time.time_ns() // 1_000_000, cluster.connect, cluster.answers
    client = pulsar.asyncio.Client(cluster.service_url, operation_timeout_seconds=10, logger=quiet())
    yield Shared(client, "one", "host:6680", clock, claim, cluster.admin, connect, answers)
    await client.close()


async def opened(shared: Shared, topic: str, covered_index: int = 0, place: bytes = b"") -> PulsarLog:
    log = PulsarLog(shared, topic, INCARNATION, SETTINGS, place)
    try:
        await log.begin(covered_index)
    except DamagedError:
        await log.close()
        raise
    return log


async def fill(cluster: Cluster, shared: Shared, topic: str, ledgers: int) -> None:
    """So many ledgers of LEDGER_ROWS messages each."""
    for term in range(1, ledgers + 1):
        log = await opened(shared, topic)
        owner = await Owner(log, term).open()
        for first_id in range(0, LEDGER_ROWS, 10):
            owner.append(LEDGER_ROWS * term + first_id, 10, 500)
        await owner.until_stored(LEDGER_ROWS // 10)
        await log.close()
        await cluster.admin.unload(topic)


async def read_to(log: PulsarLog, first: int, stop: int) -> int:
    """The first index from `first` on that was not read, as every message before it was."""
    at = first
    while at < stop:
        for record in parsed(await log.read(at, stop, 100_000)):
            assert record.base_index == at
            at += record.rows
    return at


async def ledgers_left(cluster: Cluster, topic: str) -> int:
    path = topic.replace("://", "/")
    await cluster.url.call("POST", f"{path}/trim")
    return sum(ledger["entries"] > 0 for ledger in (await cluster.url.get(f"{path}/internalStats"))["ledgers"])


async def test_the_subscription_keeps_what_the_last_durable_snapshot_needs(
    cluster: Cluster, shared: Shared, topic: str
) -> None:
    end = 3 * LEDGER_ROWS
    await cluster.create(topic)
    await cluster.admin.create_subscription(topic, "seqdedupe-one")
    await fill(cluster, shared, topic, 3)
    log = await opened(shared, topic)
    await Owner(log, 4).open()
    old = log.place_at(end)
    reading = await opened(shared, topic, end, old)
    at = await read_to(reading, 0, 500)

    async def is_trimmed() -> bool:
        return await ledgers_left(cluster, topic) == before - 2

    before = await ledgers_left(cluster, topic)
    # Pulsar itself would keep nothing.
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    first = await log.may_trim_to(end, Retention(0))
    assert 2 * LEDGER_ROWS < first < end
    await log.trim(first)
    for place in (old, log.place_at(end)):
        assert await ledgers_left(cluster, topic) == before
        await log.snapshot_is_durable(place)
    await until(is_trimmed)
    new = log.place_at(end)
    await log.close()
    await cluster.admin.unload(topic)

    log = await opened(shared, topic, end, new)
    assert log.first_index == first
    assert await read_to(log, first, end) == end
    await log.close()
    # What stood before is gone, and nobody takes what is left for all there was.
    with pytest.raises(DamagedError, match="NO_STATE"):
        await opened(shared, topic)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await read_to(reading, at, end)
    await reading.close()


async def test_a_reader_that_was_kept_reads_on_over_unloads(cluster: Cluster, shared: Shared, topic: str) -> None:
    await cluster.create(topic)
    await fill(cluster, shared, topic, 2)
    log = await opened(shared, topic)
    await Owner(log, 3).open()
    at, end = 0, 2 * LEDGER_ROWS
    while at < end:
        at = await read_to(log, at, min(at + 600, end))
        await cluster.admin.unload(topic)
    await log.close()
