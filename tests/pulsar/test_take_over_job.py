"""A job reads a real broker's topic, and the sidecar that takes the topic over reads only the rest: together they know
what the sidecar alone would know. What was not read of this very topic is refused."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from seqdedupe.cli.commands import cli
from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError
from seqdedupe.exports import read_stock, write_stock
from seqdedupe.log.contract import Layout
from seqdedupe.log.pulsar import taking_over
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog
from seqdedupe.names import partition_name
from seqdedupe.topic import listing
from seqdedupe.v1.admin_pb2 import StockWatermarks
from seqdedupe_spark import bootstrap_job, cluster
from seqdedupe_spark.service import PulsarCluster
from tests.pulsar.members import MakeMember, Member, reason_of
from tests.pulsar.owners import Cluster, until
from tests.pulsar.test_log import shared
from tests.pulsar.test_take_over import BOTH, CHUNKED_BYTES, is_dup, path_of, raw, send, store_raw
from tests.pulsar.test_take_over import topic as topic
from tests.spark.conftest import spark as spark
from tests.spark.run_job import QUICK

cluster.prepare()

from seqdedupe_spark.cluster import stock_reader  # noqa: E402 (after the kernels)

BATCH: dict[str, Any] = {"batching_enabled": True, "batching_max_publish_delay_ms": 10_000}


async def create(cluster: Cluster, topic: str) -> None:
    """Without deduplication, so that IDs may go down, and no cursor keeps the entries."""
    await cluster.admin.create_topic(topic, {})
    await cluster.admin.set_policy(topic, "deduplicationEnabled", False)

    async def is_off() -> bool:
        return not await cluster.deduplicates(topic)

    await until(is_off)


async def read(cluster: Cluster, topic: str) -> StockWatermarks:
    """What the job reads, in this process."""
    service = PulsarCluster(cluster.service_url, cluster.admin_url)

    def run() -> StockWatermarks:
        topics = stock_reader.stock_ranges(service, topic)
        marks = (stock_reader.read_marks(service, one) for each in topics for one in each.ranges)
        return stock_reader.stock_watermarks(service, topics, marks)

    return await asyncio.to_thread(run)


async def read_alone(cluster: Cluster, topic: str, entry_format: EntryFormat) -> dict[str, int]:
    """What a sidecar reads."""
    log = PulsarLog(shared(cluster), topic, 1, EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680"))
    await log.begin(0)
    await log.close()
    return log.earlier


async def take_over(one: Member, topic: str, watermarks: StockWatermarks | None) -> None:
    await one.run(listing.take_over(one.topics, topic, Layout(watermarks=watermarks)))


def arguments(cluster: Cluster, topic: str, output: Path) -> list[str]:
    return [str(output), "--topic", topic, "--address", cluster.service_url, "--admin-url", cluster.admin_url]


@BOTH
async def test_both_ways_find_the_same(
    entry_format: EntryFormat,
    spark: SparkSession,
    member: MakeMember,
    cluster: Cluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock_reader, "RANGE_BYTES", 200)
    monkeypatch.setattr(bootstrap_job, "start_session", lambda name: spark)
    await create(cluster, topic)
    await send(cluster, topic, "gone", 1, 2)
    first = await cluster.admin.first_ledger(topic)
    await cluster.admin.unload(topic)
    await send(cluster, topic, "batched", 10, 30, 20, compression_type=pulsar.CompressionType.LZ4, **BATCH)

    async def is_trimmed() -> bool:
        await cluster.trim(topic)
        return await cluster.admin.first_ledger(topic) > first

    await until(is_trimmed)

    await send(cluster, topic, "single", *range(20))
    await cluster.admin.unload(topic)
    await send(cluster, topic, "down", 9, 3)
    await send(cluster, topic, "single", 20)
    await send(cluster, topic, "chunked", 7, payload=bytes(CHUNKED_BYTES), chunking_enabled=True)
    await store_raw(cluster, topic, raw(producer_name=b"\xff"), raw(producer_name=b""), raw(marker_type=7))
    half: dict[str, Any] = {"uuid": b"u", "num_chunks_from_msg": 2, "total_chunk_msg_size": 2}
    await store_raw(cluster, topic, raw(b"x", chunk_id=0, **half))
    alone = await read_alone(cluster, topic, entry_format)
    assert alone == {"batched": 30, "single": 20, "down": 9, "chunked": 7, "\N{REPLACEMENT CHARACTER}": 4}

    output = tmp_path / "marks"
    assert await asyncio.to_thread(bootstrap_job.run_main, arguments(cluster, topic, output)) == 0
    watermarks = read_stock(output)
    [found] = watermarks.topics
    assert dict(zip(found.producer_names, found.persisted, strict=True)) == alone
    assert len(found.ledger_ids) == 2

    later = await cluster.admin.ledgers(topic)
    await send(cluster, topic, "single", 21)
    await send(cluster, topic, "new", 5, 6)
    await store_raw(cluster, topic, raw(b"x", chunk_id=1, **half))
    expected = alone | {"single": 21, "new": 6, "odd": 4, "gone": -1}
    one = member(entry_format=entry_format)
    await one.start()
    await take_over(one, topic, watermarks)
    await one.take(topic)
    assert await one.persisted(topic, *expected) == [*expected.values()]
    # Only the last entry that the job has read, and those after it, were read.
    assert one.topics.get(topic).skipped.earlier == 1 + 4
    assert len(later) > 20
    assert await is_dup(one, topic, 20, "single")
    assert await is_dup(one, topic, 30, "batched")
    assert (await one.ask(topic, 22, b"ours", "single")).first_index == 0
    await one.kill()
    other = member(entry_format=entry_format)
    await other.start()
    await other.take(topic)
    assert await other.persisted(topic, *expected) == [*(expected | {"single": 22}).values()]


async def test_a_killed_job_leaves_the_file_as_it_was(
    cluster: Cluster, topic: str, tmp_path: Path, spark: SparkSession
) -> None:
    """Killed while it reads. Its environment is that of the fixture."""
    await create(cluster, topic)
    await send(cluster, topic, "theirs", *range(10_000))
    output = tmp_path / "marks"
    output.write_bytes(b"before")
    command = [sys.executable, "-m", "seqdedupe_spark.bootstrap_job", *arguments(cluster, topic, output)]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | QUICK, start_new_session=True)

    async def reads() -> bool:
        assert process.returncode is None
        return bool((await cluster.admin.stats(topic)).subscriptions)

    try:
        await until(reads)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert output.read_bytes() == b"before"
    assert list((await read(cluster, topic)).topics[0].persisted) == [9_999]


Change = Callable[[StockWatermarks], object]


async def test_what_was_not_read_of_this_topic_is_refused_and_changes_nothing(
    member: MakeMember, cluster: Cluster, namespace: str, topic: str
) -> None:
    another = f"persistent://{namespace}/another"
    for name in (topic, another):
        await create(cluster, name)
        for sequence_id in (3, 8):
            await send(cluster, name, "theirs", sequence_id)
            await cluster.admin.unload(name)
    one = member()
    await one.start()
    good, of_another = await read(cluster, topic), await read(cluster, another)

    async def check_refused(watermarks: StockWatermarks, why: str) -> None:
        with pytest.raises(Exception, match=why) as caught:
            await take_over(one, topic, watermarks)
        assert caught.value.reason == "INVALID_REQUEST"  # type: ignore[attr-defined]
        assert await cluster.admin.properties(topic) == {}
        assert (await cluster.admin.stats(topic)).subscriptions == ()
        assert not one.topics.is_there(topic)

    await check_refused(of_another, "the watermarks are those of .*/another, not of .*/t")
    of_another.topics[0].topic = topic
    await check_refused(of_another, "which is not stored")
    changes: dict[Change, str] = {
        lambda w: setattr(w.topics[0].last, "publish_time_ms", 1): "the entry at .* is not the one that was read",
        lambda w: setattr(w.topics[0].first, "producer_name", "p"): "the entry at .* is not the one that was read",
        lambda w: w.topics[0].ledger_entries.__setitem__(0, 2): "the ledgers of .* are not those",
        lambda w: w.topics[0].ledger_ids.__setitem__(0, 1): "the ledgers of .* are not those",
        lambda w: w.topics[0].persisted.__setitem__(0, -1): "are not as a job writes them",
        lambda w: w.topics[0].persisted.append(1): "are not as a job writes them",
        lambda w: w.topics[0].ClearField("last"): "are of no entry",
        lambda w: w.topics.add(): "the watermarks are those of",
    }
    for change, why in changes.items():
        changed = StockWatermarks()
        changed.CopyFrom(good)
        change(changed)
        await check_refused(changed, why)
    # The control: unchanged, it is that of the topic.
    await taking_over.check_was_read(cluster.admin, Brokers(cluster.service_url), good.topics[0])

    await cluster.url.call("DELETE", f"{path_of(topic)}/truncate")
    await until(lambda: _is_gone(cluster, topic, good))
    await send(cluster, topic, "theirs", 3)
    await check_refused(good, "which is not stored: the topic was truncated")
    await cluster.admin.delete_topic(topic)
    await send(cluster, topic, "theirs", 3, 8)
    await check_refused(good, "or created again")
    await take_over(one, topic, await read(cluster, topic))
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [8]
    with pytest.raises(ConfigurationError, match="is a topic of a sidecar already"):
        await read(cluster, topic)


async def _is_gone(cluster: Cluster, topic: str, watermarks: StockWatermarks) -> bool:
    return await cluster.admin.first_ledger(topic) > watermarks.topics[0].last.ledger_id


async def test_a_topic_recreated_at_the_last_moment_is_refused(
    member: MakeMember, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check: otherwise IDs of the old topic would count in the new one."""
    await send(cluster, topic, "theirs", 3, 8)
    watermarks = await read(cluster, topic)
    one = member()
    await one.start()
    create_subscription = one.logs._admin.create_subscription

    async def later(name: str, subscription: str) -> None:
        await cluster.admin.delete_topic(topic)
        await send(cluster, topic, "theirs", 3)
        await create_subscription(name, subscription)

    monkeypatch.setattr(one.logs._admin, "create_subscription", later)
    assert await reason_of(take_over(one, topic, watermarks)) == "INVALID_REQUEST"
    assert await cluster.admin.properties(topic) == {}


async def test_a_sidecar_takes_over_partitions_with_a_file(
    namespace: str, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """One partition is empty, another gets messages later."""
    await cluster.url.call("PUT", f"{path_of(topic)}/partitions", 3)
    names = [partition_name(topic, k) for k in range(3)]
    await send(cluster, names[0], "theirs", 3, 8)
    await send(cluster, names[2], "theirs", 4)
    file = tmp_path / "marks"
    write_stock(file, await read(cluster, topic))
    await send(cluster, names[1], "theirs", 6)
    await send(cluster, names[2], "theirs", 5)
    sidecar = cluster.sidecar(tmp_path / "sidecar", namespace)

    def run() -> None:
        with sidecar, blocking.Client(sidecar.address) as client:
            command = ["topics", "create", topic, "--address", sidecar.address, "--watermarks"]
            assert "--watermarks is for --take-over" in CliRunner().invoke(cli, [*command, str(file)]).output
            damaged = tmp_path / "damaged"
            damaged.write_bytes(file.read_bytes()[:-1])
            refused = CliRunner().invoke(cli, [*command, str(damaged), "--take-over"])
            assert "its checksum does not fit" in str(refused.exception)
            made = CliRunner().invoke(cli, [*command, str(file), "--take-over"])
            assert (made.exit_code, "SERVING" in made.output) == (0, True), made.output
            for name, last in zip(names, (8, 6, 5), strict=True):
                with client.producer(name, "theirs") as producer:
                    assert producer.persisted_sequence_id == last

    await asyncio.to_thread(run)
