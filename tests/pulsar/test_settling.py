"""Under load the line, the topic and the broker fail in every way; each time what is unknown settles by itself.

All that was acknowledged is there once, for a consumer of Pulsar's own client too, and no operator was needed.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.log.pulsar import writer
from seqdedupe.log.pulsar.entries import EntryFormat
from tests.pulsar.faults import SEND_TIMEOUT_SECONDS, Faults, Load, check_all
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster, kill_and_start, quiet
from tests.pulsar.publishers import Process

BOTH = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)
MARKER_AND_SESSION = 2
"""Entries without messages."""


@BOTH
async def test_what_is_unknown_settles_without_an_operator(
    broker: Broker,
    cluster: Cluster,
    topic: str,
    tmp_path: Path,
    entry_format: EntryFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is sent twice: Pulsar's deduplication is not needed.
    await cluster.create(topic, deduplicates=False)
    monkeypatch.setattr(writer, "SEND_TIMEOUT_SECONDS", SEND_TIMEOUT_SECONDS)
    async with (
        Line(broker) as line,
        Process(cluster, topic, entry_format, tmp_path, "one", line) as process,
        Load(process) as load,
    ):
        await load.begin()

        faults = Faults(broker, cluster, topic, line, load)
        for fault in (faults.cut, faults.no_answer, faults.unload, faults.throw_out, faults.freeze):
            await load.goes_on()
            await fault()
        await load.goes_on()
        await load.end()
        other = Process(cluster, topic, entry_format, tmp_path, "other")
        await check_all(cluster, topic, load, other, entry_format)


async def test_a_broker_is_killed_and_started_again(
    mortal_broker: Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(mortal_broker.service_url, mortal_broker.admin_url)
    monkeypatch.setattr(writer, "SEND_TIMEOUT_SECONDS", SEND_TIMEOUT_SECONDS)
    async with AsyncExitStack() as stack:
        loads = {}
        for entry_format in EntryFormat:
            name = f"{topic}-{entry_format.value}"
            await cluster.create(name)
            process = Process(cluster, name, entry_format, tmp_path, entry_format.value)
            loads[entry_format] = await stack.enter_async_context(Load(process))
            await loads[entry_format].begin()
        for load in loads.values():
            await load.goes_on()
        await kill_and_start(mortal_broker)
        for entry_format, load in loads.items():
            await load.goes_on()
            await load.end()
            name = f"{topic}-{entry_format.value}"
            other = Process(cluster, name, entry_format, tmp_path, f"other-{entry_format.value}")
            await check_all(cluster, name, load, other, entry_format)


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_a_stock_producer_without_deduplication_doubles(
    broker: Broker, cluster: Cluster, topic: str, deduplicates: bool
) -> None:
    await cluster.create(topic, deduplicates=deduplicates)
    async with Line(broker) as line:
        client = pulsar.asyncio.Client(line.service_url, logger=quiet())
        producer = await client.create_producer(topic, batching_enabled=False, send_timeout_millis=0)
        line.hold_answers()
        sending = [asyncio.ensure_future(producer.send(b"%d" % i, sequence_id=i)) for i in range(50)]
        await cluster.until_received(topic, 50)
        line.cut()
        await asyncio.gather(*sending)
        await client.close()
    payloads = [entry.payload for entry in await cluster.read(topic)]
    assert payloads == [b"%d" % i for i in range(50)] * (1 if deduplicates else 2)
