"""A real broker removes what a durable snapshot says that nobody needs, and nothing else; what is gone is said."""

import itertools
import time

import pytest

from seqdedupe.errors import DamagedError, PositionError
from seqdedupe.log.pulsar import content
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from tests.log.conformance import Owner, parsed
from tests.pulsar.owners import Cluster, until

INCARNATION = 1_700_000_000_000_000
LEDGER_ROWS = 1_200
"""For more than 1,000 entries Pulsar's deduplication needs none any more for its own recovery."""
SETTINGS = EntrySettings(EntryFormat.PLAIN, "SEQUENCE_ID", 0, "host:6680")

_openings = itertools.count(1)


@pytest.fixture
def shared(cluster: Cluster) -> PulsarResources:
    async def claim(_: str, known: int) -> int:
        return next(number for number in _openings if number > known)

    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    brokers = Brokers(cluster.service_url)
    return PulsarResources("one", "host:6680", now_ms, claim, cluster.admin, cluster.answers, brokers)


async def opened(shared: PulsarResources, topic: str, covered_index: int = 0, place: bytes = b"") -> PulsarLog:
    log = PulsarLog(shared, topic, INCARNATION, SETTINGS, place)
    try:
        await log.begin(covered_index)
    except DamagedError:
        await log.close()
        raise
    return log


async def fill(cluster: Cluster, shared: PulsarResources, topic: str, ledgers: int) -> None:
    """This many ledgers of LEDGER_ROWS messages each."""
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
    cluster: Cluster, shared: PulsarResources, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A reader that is kept has read ahead, and may need nothing that is removed.
    monkeypatch.setattr(content, "KEPT_CURSORS", 0)
    end = 3 * LEDGER_ROWS
    await cluster.create(topic)
    await cluster.admin.create_subscription(topic, "seqdedupe-one")
    await fill(cluster, shared, topic, 3)
    log = await opened(shared, topic)
    await Owner(log, 4).open()
    places = [(index, log.place_at(index)) for index in (0, end)]
    reading = await opened(shared, topic, *places[1])
    assert await read_to(reading, 0, 500) >= 500
    before = await ledgers_left(cluster, topic)
    # Pulsar itself would keep nothing.
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_trimmed() -> bool:
        return await ledgers_left(cluster, topic) == before - 2

    for _, place in places:
        assert await ledgers_left(cluster, topic) == before
        log._moves_at = 0
        await log.snapshot_is_durable(place)
    await until(is_trimmed)
    await log.close()
    await cluster.admin.unload(topic)

    log = await opened(shared, topic, *places[1])
    assert 2 * LEDGER_ROWS <= log.first_index < end
    assert await read_to(log, log.first_index, end) == end
    # Anyone who has no snapshot, or an old one, does not take what is left for all there was.
    for covered_index, place in ((0, b""), places[0]):
        with pytest.raises(DamagedError, match="NO_STATE"):
            await opened(shared, topic, covered_index, place)
    # Old messages may go, and a reader that stood among them learns so.
    await reading.snapshot_is_durable(places[1][1])
    with pytest.raises(PositionError, match="POSITION_TRIMMED"):
        await read_to(reading, 0, end)
    assert reading.first_index == log.first_index
    assert await read_to(reading, log.first_index, end) == end
    for each in (log, reading):
        await each.close()


async def test_without_the_subscription_the_hole_is_a_gap(
    cluster: Cluster, shared: PulsarResources, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(content, "KEPT_BYTES", 0)
    monkeypatch.setattr(content, "KEPT_CURSORS", 0)
    await cluster.create(topic)
    await fill(cluster, shared, topic, 2)
    log = await opened(shared, topic)
    await Owner(log, 3).open()
    before = await ledgers_left(cluster, topic)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_trimmed() -> bool:
        return await ledgers_left(cluster, topic) < before

    await until(is_trimmed)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await read_to(log, 0, 2 * LEDGER_ROWS)
    await log.close()


async def test_a_reader_that_was_kept_reads_on_over_unloads(
    cluster: Cluster, shared: PulsarResources, topic: str
) -> None:
    await cluster.create(topic)
    await fill(cluster, shared, topic, 2)
    log = await opened(shared, topic)
    await Owner(log, 3).open()
    at, end = 0, 2 * LEDGER_ROWS
    while at < end:
        at = await read_to(log, at, min(at + 600, end))
        await cluster.admin.unload(topic)
    await log.close()
