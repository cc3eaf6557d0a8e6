"""Two owners of one topic at once, on purpose: what either acknowledges is in the log once, and counts.

Each control arm leaves out one of the things that this rests on, and shows what it is for.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import terms
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.log import PulsarLog
from seqdedupe.log.pulsar.logs import PulsarLogs
from seqdedupe.names import namespace_of
from seqdedupe.topic.base import State
from tests.log.conformance import Owner as OwnerOfLog
from tests.log.conformance import replayed
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster, until
from tests.pulsar.publishers import INCARNATION, Process, Publisher, check, found_by_a_stock_client, lost
from tests.pulsar.split import split

BOTH = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)

MANY = 1_000_000
"""More than are published."""

MakeProcess = Callable[..., Process]


@pytest.fixture
async def process(cluster: Cluster, topic: str, tmp_path: Path) -> AsyncIterator[MakeProcess]:
    """Makes processes that want the topic."""
    made: list[Process] = []

    def make(entry_format: EntryFormat, name: str, line: Line | None = None) -> Process:
        made.append(Process(cluster, topic, entry_format, tmp_path, name, line))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def messages_in(log: PulsarLog) -> int:
    return sum(record.rows for record in await replayed(log))


async def stop(*publishing: "asyncio.Future[None]") -> None:
    """No error is overlooked."""
    for one in publishing:
        one.cancel()
    for result in await asyncio.gather(*publishing, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError), result


@BOTH
async def test_what_two_owners_acknowledge_stands_there_once(
    cluster: Cluster, topic: str, process: MakeProcess, entry_format: EntryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.create(topic, deduplicates=False)
    a, b = process(entry_format, "a"), process(entry_format, "b")
    # What was lost is not taken back here.
    await split(monkeypatch, topic, entry_format, a.shared.brokers, b.shared.brokers, openings=(1, 9))
    of_a, of_b = publishers = Publisher("of a"), Publisher("of b")
    had = await a.start()
    publishing = asyncio.ensure_future(of_a.publish(had, MANY))
    await until(lambda: of_a.acknowledged > 300)
    # Both are under load from here on; a believes still, and learns that all it sends is stored.
    has = await b.start()
    assert has.state is State.SERVING
    await of_b.publish(has, 300)
    await until(lambda: had.state is State.STANDBY)
    await stop(publishing)

    acknowledged = of_a.acknowledged
    found = await found_by_a_stock_client(cluster, topic)
    assert not list(lost(found, publishers))
    assert found.void > 0, "the first owner never sent anything after the other one's marker"
    # Its producer goes to the other owner, which knows all of that.
    await of_a.publish(has, acknowledged + 100)
    await of_b.publish(has, 400)
    check(await found_by_a_stock_client(cluster, topic), publishers)


@BOTH
async def test_two_owners_that_take_the_topic_from_each_other(
    cluster: Cluster, topic: str, process: MakeProcess, entry_format: EntryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both producers live all the time: anyone who finds the other's marker marks again."""
    await cluster.create(topic, deduplicates=False)
    a, b = process(entry_format, "a"), process(entry_format, "b")
    one, other = a.shared.brokers, b.shared.brokers
    left = await split(monkeypatch, topic, entry_format, one, other, openings=(10, MANY))
    of_a, of_b = publishers = Publisher("of a"), Publisher("of b")
    first, second = await a.start(), await b.start()
    publishing = [
        asyncio.ensure_future(one.publish(had, MANY)) for one, had in zip(publishers, (first, second), strict=True)
    ]
    await until(lambda: not left[one])
    before = of_b.acknowledged
    await until(lambda: of_b.acknowledged > before + 100)
    await stop(*publishing)
    assert min(had.counters.log_failures for had in (first, second)) > 3, "they did not lose it to each other"
    found = await found_by_a_stock_client(cluster, topic)
    assert not list(lost(found, publishers))
    assert found.void > 0
    await of_a.publish(second, of_a.acknowledged + 100)
    await of_b.publish(second, 1000)
    check(await found_by_a_stock_client(cluster, topic), publishers)


@pytest.mark.parametrize("believes", [False, True])
async def test_with_receipts_believed_acknowledged_messages_are_void(
    cluster: Cluster, topic: str, process: MakeProcess, monkeypatch: pytest.MonkeyPatch, believes: bool
) -> None:
    await cluster.create(topic)
    if believes:
        monkeypatch.setattr(terms.Receipts, "confirms", lambda self, receipt: True)
    a, b = process(EntryFormat.PLAIN, "a"), process(EntryFormat.PLAIN, "b")
    await split(monkeypatch, topic, EntryFormat.PLAIN, a.shared.brokers, b.shared.brokers, openings=(1, 9))
    of_a, of_b = publishers = Publisher("of a"), Publisher("of b")
    had = await a.start()
    await of_a.publish(had, 30)
    await of_b.publish(await b.start(), 30)
    publishing = asyncio.ensure_future(of_a.publish(had, 60))
    await until(lambda: publishing.done() or had.state is State.STANDBY)
    publishing.cancel()
    await asyncio.wait([publishing])
    found = await found_by_a_stock_client(cluster, topic)
    assert list(lost(found, publishers)) == [("of a", i) for i in range(30, 60) if believes]
    assert of_b.acknowledged == 29


@pytest.mark.parametrize("marks", [True, False])
async def test_without_the_marker_what_was_settled_as_lost_lands_later(
    broker: Broker,
    cluster: Cluster,
    topic: str,
    process: MakeProcess,
    monkeypatch: pytest.MonkeyPatch,
    marks: bool,
) -> None:
    await cluster.create(topic)
    async with Line(broker) as line:
        slow, direct = process(EntryFormat.PLAIN, "slow", line), process(EntryFormat.PLAIN, "direct")
        await split(monkeypatch, topic, EntryFormat.PLAIN, slow.shared.brokers, direct.shared.brokers)
        log = await slow.log()
        owner = await OwnerOfLog(log, 1).open()
        owner.append(0, 5)
        await owner.until_stored(1)
        line.hold_requests()
        owner.append(5, 5)
        # The outcome is unknown, and somebody reads what came of it.
        settling = await direct.log()
        if marks:
            await OwnerOfLog(settling, 2).open()
        assert await messages_in(settling) == 5
        line.let_requests_through()
        await cluster.until_received(topic, 1 + 5 + marks + 5)
        later = await direct.log()
        assert await messages_in(later) == (5 if marks else 10)
        for one in (settling, later, log):
            await one.close()


async def test_without_the_subscription_messages_are_lost_and_that_is_said(
    cluster: Cluster, topic: str, process: MakeProcess
) -> None:
    kept, not_kept = f"{topic}-kept", f"{topic}-not"
    one = process(EntryFormat.PLAIN, "one")
    for name in (kept, not_kept):
        await cluster.create(name)
        # For more than 1000 Pulsar's deduplication needs none any more for its own recovery.
        for term, rows in enumerate((1100, 1100, 10), 1):
            log = await one.log(name)
            owner = await OwnerOfLog(log, term).open()
            owner.append(0, rows)
            await owner.until_stored(1)
            await log.close()
            await cluster.admin.unload(name)
    await cluster.admin.create_subscription(kept, "seqdedupe-one")

    async def ledgers_left(name: str) -> int:
        path = name.replace("://", "/")
        await cluster.url.call("POST", f"{path}/trim")
        return sum(ledger["entries"] > 0 for ledger in (await cluster.url.get(f"{path}/internalStats"))["ledgers"])

    async def is_trimmed() -> bool:
        return await ledgers_left(not_kept) < 3

    for name in (kept, not_kept):
        await cluster.admin.set_policy(name, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    await until(is_trimmed)
    assert await ledgers_left(kept) == 3
    log = await one.log(kept)
    assert await messages_in(log) == 2210
    await log.close()
    with pytest.raises(SeqdedupeError, match="NO_STATE"):
        await one.log(not_kept)


async def test_a_topic_of_which_nothing_is_left_is_not_an_empty_one(
    cluster: Cluster, topic: str, process: MakeProcess
) -> None:
    """It would count from 0 again, and take all that it had for new."""
    one = process(EntryFormat.PLAIN, "one")
    logs = PulsarLogs(one.shared, [namespace_of(topic)], EntryFormat.PLAIN, may_change_policies=True)
    incarnation = INCARNATION + os.getpid()
    await logs.create(incarnation, topic, b"")
    log = await logs.open(incarnation, 0)
    owner = await OwnerOfLog(log, 1).open()
    owner.append(0, 10)
    await owner.until_stored(1)
    await log.close()
    # An operator removes what keeps it. Somebody else has read it all.
    path = topic.replace("://", "/")
    await cluster.url.call("PUT", f"{path}/subscription/somebody", {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1})
    await cluster.url.call("DELETE", f"{path}/subscription/seqdedupe-one")
    await cluster.admin.set_policy(topic, "deduplicationEnabled", False)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_empty() -> bool:
        await cluster.admin.unload(topic)
        await cluster.admin.stats(topic)
        await cluster.url.call("POST", f"{path}/trim")
        return int((await cluster.url.get(f"{path}/internalStats"))["totalSize"]) == 0

    await until(is_empty)
    with pytest.raises(SeqdedupeError, match="NO_STATE"):
        await logs.open(incarnation, 0)
