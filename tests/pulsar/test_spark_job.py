"""Reader jobs straight from a broker that is reached by TLS and with a token: killed, moved, and unloaded beneath."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.names import partition_name, topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import reader_job
from seqdedupe_spark.audit_job import TopicReport, audit, selection_of
from seqdedupe_spark.options import Options, parse
from seqdedupe_spark.planning import SUBSCRIPTION_PREFIX, TopicListing, open_client
from seqdedupe_spark.rounds import JobConfig, ReaderJob
from tests.pulsar import secured
from tests.pulsar.owners import quiet
from tests.pulsar.test_sidecar import broker as broker
from tests.pulsar.test_sidecar import folder as folder
from tests.pulsar.test_sidecar import ports as ports
from tests.spark.conftest import spark as spark
from tests.spark.jobs import (
    JOB,
    TABLE,
    CarelessSqliteStore,
    Database,
    Gate,
    GatedStore,
    each_once,
    publish,
    select,
    source,
    sqlite_database,
)


@pytest.fixture(scope="module")
def sidecar(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, ports: tuple[int, int], broker: Broker
) -> Iterator[Sidecar]:
    keys: dict[str, Any] = {
        "pulsar_service_url": f"pulsar+ssl://127.0.0.1:{ports[0]}",
        "pulsar_admin_url": f"https://127.0.0.1:{ports[1]}",
        "pulsar_tls_trust_certs_file_path": folder / "ca.pem",
        "pulsar_token_file": folder / "token",
        "pulsar_manage_topic_policies": True,
    }
    with Sidecar(tmp_path_factory.mktemp("sidecar"), log="pulsar", **keys) as sidecar:
        yield sidecar


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


class Direct:
    """The source options for reading a topic from the broker."""

    def __init__(self, folder: Path, ports: tuple[int, int]) -> None:
        self.given = {
            "service.url": f"pulsar+ssl://127.0.0.1:{ports[0]}",
            "admin.url": f"https://127.0.0.1:{ports[1]}",
            "pulsar.client.tlsTrustCertsFilePath": str(folder / "ca.pem"),
            "pulsar.client.authPluginClassName": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "pulsar.client.authParams": (folder / "token").as_uri(),
        }

    def arguments(self) -> list[str]:
        """The same for a command."""
        of_client = [("--pulsar-client", f"{n.rpartition('.')[2]}={v}") for n, v in self.given.items() if "client" in n]
        urls = ["--address", self.given["service.url"], "--admin-url", self.given["admin.url"]]
        return [*urls, *(part for pair in of_client for part in pair)]

    def options(self, topic: str, **more: object) -> Options:
        return parse(self.given | {"topic": topic} | {name: str(value) for name, value in more.items()})


@pytest.fixture
def direct(folder: Path, ports: tuple[int, int]) -> Direct:
    return Direct(folder, ports)


@pytest.fixture
def unload(broker: Broker) -> Callable[[str], None]:
    admin = PulsarAdmin(AdminUrl(broker.admin_url, secured.token))
    return lambda topic: asyncio.run(admin.unload(topic))


@pytest.mark.parametrize("entry_format", ["packed", "native"])
def test_a_job_moves_to_the_brokers_and_back(
    spark: SparkSession,
    sidecar: Sidecar,
    direct: Direct,
    database: Database,
    unload: Callable[[str], None],
    topic: str,
    entry_format: str,
) -> None:
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(topic, entry_format=entry_format)

    def read(options: Options) -> int:
        return ReaderJob(spark, JobConfig(JOB, options, database.store, TABLE), select).run().read

    publish(sidecar.address, topic, 400)
    assert read(source(sidecar.address, topic=topic)) == 400
    publish(sidecar.address, topic, 300, first=400)
    unload(topic)
    publish(sidecar.address, topic, 100, first=700)
    assert read(direct.options(topic, maxOffsetsPerTrigger=170)) == 400
    each_once(database.indexes(topic), 800)
    with blocking.Client(sidecar.address) as client:
        assert database.position(topic) == client.ends(topic).last
    publish(sidecar.address, topic, 50, first=800)
    assert read(source(sidecar.address, topic=topic)) == 50
    each_once(database.indexes(topic), 850)
    arguments = ["--job", JOB, "--store", database.url, "--topic", topic, "--to", "latest", *direct.arguments()]
    assert CliRunner().invoke(reader_job.cli, ["reset", *arguments]).exit_code == 0
    with blocking.Client(sidecar.address) as client:
        assert database.position(topic) == client.ends(topic).last


def publish_keyed(address: str, topic: str, count: int) -> None:
    """This many messages, again if they are there."""
    with blocking.Client(address) as client, client.producer(topic, "p") as producer:
        for i in range(count):
            producer.send(f"value {i}".encode(), i, key=f"key {i}")
        producer.flush()


def test_partitions_that_hold_messages_twice_are_read_once_and_audited(
    spark: SparkSession, sidecar: Sidecar, direct: Direct, database: Database, topic: str
) -> None:
    """Straight from the broker, and on through the sidecar."""
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(topic, partitions=2, entry_format="packed", deduplication_enabled=False)

    def run(options: Options) -> tuple[int, int]:
        done = ReaderJob(spark, JobConfig(JOB, options, database.store, TABLE, deduplicate=True), select).run()
        return done.read, done.duplicates

    for _ in range(2):
        publish_keyed(sidecar.address, topic, 60)
    assert run(direct.options(topic, maxOffsetsPerTrigger=70)) == (120, 60)
    publish_keyed(sidecar.address, topic, 80)
    assert run(source(sidecar.address, topic=topic)) == (80, 60)
    values = database.query(f"SELECT value FROM {TABLE}")
    assert Counter(values) == Counter((f"value {i}".encode(),) for i in range(80))
    topics = [partition_name(topic_name(topic), k) for k in range(2)]
    with blocking.Client(sidecar.address) as client:
        assert [database.position(one) for one in topics] == [client.ends(one).last for one in topics]
    report = audit(spark, selection_of([topic], None), sidecar.address)
    assert [one.topic for one in report.topics] == topics
    assert sum(one.doubled.messages for one in report.topics) == 120
    for one in report.topics:
        assert isinstance(one, TopicReport)
        assert one.out_of_order.messages == one.missing.messages == 0


def kill_who_comes(gate: Gate, first: Callable[[], None]) -> threading.Thread:
    def kill() -> None:
        pid = gate.wait(LAST_RESORT_SECONDS)
        first()
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("where", ["in", "after"])
def test_a_worker_is_killed_and_the_topic_unloaded(
    spark: SparkSession,
    sidecar: Sidecar,
    direct: Direct,
    database: Database,
    unload: Callable[[str], None],
    topic: str,
    tmp_path: Path,
    where: str,
) -> None:
    for first in range(0, 600, 200):
        publish(sidecar.address, topic, 200, first=first)
        unload(topic)
    gate = Gate(tmp_path / "gate")
    killer = kill_who_comes(gate, lambda: unload(topic))
    config = JobConfig(JOB, direct.options(topic, maxOffsetsPerTrigger=250), database.store, TABLE)
    ReaderJob(spark, replace(config, store=partial(GatedStore, database.store, gate, where)), select).run()
    killer.join()
    each_once(database.indexes(topic), 600)


def publish_plainly(direct: Direct, topic: str, first: int, count: int) -> None:
    """With Pulsar's own client, in batches."""
    given = direct.given
    client = pulsar.Client(
        given["service.url"],
        authentication=pulsar.AuthenticationToken(secured.token()),
        tls_trust_certs_file_path=given["pulsar.client.tlsTrustCertsFilePath"],
        logger=quiet(),
    )
    producer = client.create_producer(topic, batching_enabled=True, batching_max_messages=20)
    for n in range(first, first + count):
        producer.send_async(b"%d" % n, lambda *_: None)
    producer.flush()
    client.close()


def test_a_worker_is_killed_where_no_sidecar_writes(
    spark: SparkSession,
    broker: Broker,
    direct: Direct,
    database: Database,
    unload: Callable[[str], None],
    topic: str,
    tmp_path: Path,
) -> None:
    """After its transaction, and before anybody learned."""
    publish_plainly(direct, topic, 0, 200)
    options = direct.options(topic, maxOffsetsPerTrigger=4)
    gate = Gate(tmp_path / "gate")
    killer = kill_who_comes(gate, lambda: unload(topic))
    stopping = partial(GatedStore, database.store, gate, "after")
    ReaderJob(spark, JobConfig(JOB, options, stopping, TABLE), select).run()
    killer.join()
    publish_plainly(direct, topic, 200, 100)
    ReaderJob(spark, JobConfig(JOB, options, database.store, TABLE), select).run()
    each_once(values(database, TABLE), 300)
    # Its driver has released what is committed.
    position, admin = database.position(topic), PulsarAdmin(AdminUrl(broker.admin_url, secured.token))
    let_go = asyncio.run(admin.storage(topic, SUBSCRIPTION_PREFIX + JOB)).let_go
    assert position.message_id is not None
    assert let_go == position.message_id._replace(entry_id=position.message_id.entry_id - 1)


def values(database: Database, table: str) -> list[int]:
    return [int(str(row[0])) for row in database.query(f"SELECT CAST(value AS TEXT) FROM {table} ORDER BY rowid")]


def test_without_the_compare_the_task_tried_again_doubles_its_rows(
    spark: SparkSession, sidecar: Sidecar, direct: Direct, database: Database, topic: str, tmp_path: Path
) -> None:
    publish(sidecar.address, topic, 200)
    options = direct.options(topic)
    listing = TopicListing(open_client(options.service, options.selection))
    believed = listing.resolve([topic], "earliest", "")[topic]
    gate = Gate(tmp_path / "gate")
    killer = kill_who_comes(gate, lambda: None)
    careless = partial(CarelessSqliteStore, str(tmp_path / "out.db"), believed)
    config = JobConfig(JOB, options, partial(GatedStore, careless, gate, "after"), TABLE)
    ReaderJob(spark, config, select).run()
    killer.join()
    assert len(database.indexes(topic)) == 400


def test_a_token_is_in_no_plan_and_no_error(
    spark: SparkSession, sidecar: Sidecar, direct: Direct, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(sidecar.address, topic, 20)
    token = secured.token()
    given = direct.given | {"pulsar.client.authParams": f"token:{token}", "topic": topic}
    frame = spark.read.format("seqdedupe").options(**given).load()
    assert frame.count() == 20
    frame.explain(mode="extended")
    wrong = spark.read.format("seqdedupe").options(**(given | {"pulsar.client.authParams": f"token:no{token}"}))
    with pytest.raises(Exception, match="PULSAR_FORBIDS") as failure:
        wrong.load().count()
    shown = "".join(capfd.readouterr()) + str(failure.value)
    assert "PythonScan" in shown or "BatchScan" in shown
    assert token not in shown
    options = parse({name: value for name, value in given.items() if "auth" not in name})
    with pytest.raises(ConfigurationError, match="PULSAR_FORBIDS"):
        open_client(options.service, options.selection).ends(topic_name(topic))
