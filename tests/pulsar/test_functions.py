"""The wrapper in Pulsar's own Python runtime, on a real broker, through everything that can go wrong around it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pytest

from pulsar_broker.instance import FULL_NAME, Instance, details
from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.entry_properties import EntryOwner
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.entries import encoded_part, packed_message
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.batches import batch
from tests.pulsar.admin import call
from tests.pulsar.deployed import arrival
from tests.pulsar.flights import LIMIT_SECONDS, Result, flights, give, read
from tests.pulsar.functions import Case, Work, left, pulsar_keys, stored, until, wheel_in
from tests.pulsar.owners import quiet, send_native

pytestmark = pytest.mark.timeout(2 * LAST_RESORT_SECONDS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_in(tmp_path_factory.mktemp("wheel"))


async def test_each_result_is_there_once_and_in_order(
    broker: Broker, pulsar_home: Path, topic: str, tmp_path: Path, wheel: Path
) -> None:
    case = Case(flights=2000, has_several=True, pause_ms=0.5)
    async with Work(pulsar_home, broker, tmp_path, wheel, topic.rpartition("/")[2], case) as work:
        await work.through(
            [
                *(work.kill, work.doubt, work.kill, work.lose_receipts, work.kill, work.unload_input),
                *(work.kill_sidecar, work.unload_output, work.kill, work.terminate),
            ]
        )
        assert work.differences() == {}


async def test_four_partitions_two_instances_and_a_broker_that_is_killed(
    mortal_broker: Broker, pulsar_home: Path, topic: str, tmp_path: Path, wheel: Path
) -> None:
    case = Case(flights=1500, partitions=4, instances=2, pause_ms=0.5)
    async with Work(pulsar_home, mortal_broker, tmp_path, wheel, topic.rpartition("/")[2], case) as work:
        await work.through([work.kill, work.kill_broker, work.kill, work.kill])
        assert work.differences() == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"processingGuarantees": "ATLEAST_ONCE"}, "processingGuarantees: MANUAL"),
        ({"retainOrdering": False, "source": {"subscriptionType": "SHARED"}}, "retainOrdering: true"),
    ],
)
async def test_a_deployment_that_cannot_work_ends_the_process_and_says_what_to_set(
    broker: Broker,
    pulsar_home: Path,
    shared_sidecar: Sidecar,
    topic: str,
    tmp_path: Path,
    wheel: Path,
    changes: dict[str, Any],
    said: str,
) -> None:
    config = {"wrapped": "deployed.One", "sidecar_address": shared_sidecar.address, "output_topic": "never"}
    function = details(topic.rpartition("/")[2], topic, class_name=FULL_NAME, userConfig=json.dumps(config))
    function["source"] |= changes.pop("source", {})
    give(broker.service_url, topic, flights(3), batched=True)
    with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function | changes) as instance:
        await until(lambda: instance.starts > 1, instance)
        assert said in instance.log


async def test_a_log_topic_has_the_reason_why_the_instance_ended(
    broker: Broker, pulsar_home: Path, shared_sidecar: Sidecar, topic: str, tmp_path: Path, wheel: Path
) -> None:
    """Which is the last line before the process is gone."""
    config = {"wrapped": "deployed.Missing", "sidecar_address": shared_sidecar.address}
    function = details(
        topic.rpartition("/")[2],
        topic,
        class_name=FULL_NAME,
        userConfig=json.dumps(config),
        logTopic=f"{topic}-log",
    )
    give(broker.service_url, topic, flights(3), batched=True)
    client = pulsar.Client(broker.service_url, logger=quiet())
    try:
        reader = client.create_reader(f"{topic}-log", pulsar.MessageId.earliest)
        with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function) as instance:
            await until(lambda: instance.starts > 1, instance)
            line = await asyncio.to_thread(reader.read_next, int(LIMIT_SECONDS * 1000))
            while b"the instance ends" not in line.data():
                line = await asyncio.to_thread(reader.read_next, int(LIMIT_SECONDS * 1000))
        assert b"deployed.Missing cannot be imported" in line.data()
    finally:
        client.close()


def deploy(broker: Broker, wheel: Path, function: dict[str, Any]) -> None:
    """Makes a function by the worker's REST call, as `pulsar-admin functions create` does."""
    parts = {
        b'name="data"; filename="%s"' % wheel.name.encode(): (b"application/octet-stream", wheel.read_bytes()),
        b'name="functionConfig"': (b"application/json", json.dumps(function).encode()),
    }
    body = b"".join(
        b"--edge\r\nContent-Disposition: form-data; %s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (name, *part)
        for name, part in parts.items()
    )
    call(
        broker,
        "POST",
        f"functions/public/default/{function['name']}",
        version="v3",
        body=body + b"--edge--\r\n",
        content_type="multipart/form-data; boundary=edge",
    )


def instances_of(broker: Broker, name: str) -> list[psutil.Process]:
    """The worker's processes that run a function."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "python_instance_main.py" in line and broker.service_url in line and name in line:
            found.append(process)
    return found


def leader_is_ready(broker: Broker) -> bool:
    """Before it is, it refuses to make a function whose code it has stored already, so that it cannot be made again."""
    try:
        return call(broker, "GET", "worker/cluster/leader/ready") is True
    except OSError:
        return False


@contextmanager
def run(command: Sequence[str], environment: dict[str, str], printed: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A command, which is killed with all that it has started when the block ends."""
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def test_run_locally_by_pulsars_own_command(
    broker: Broker, pulsar_home: Path, shared_sidecar: Sidecar, topic: str, tmp_path: Path, wheel: Path
) -> None:
    name, some = topic.rpartition("/")[2], flights(100)
    output = f"{name}-output"
    config = {"wrapped": "deployed.One", "sidecar_address": shared_sidecar.address, "output_topic": output}
    command = [
        *(str(pulsar_home / "bin" / "pulsar-admin"), "functions", "localrun"),
        *("--broker-service-url", broker.service_url, "--name", name, "--inputs", topic),
        *("--py", str(wheel), "--classname", FULL_NAME, "--user-config", json.dumps(config)),
        *("--processing-guarantees", "MANUAL", "--retain-ordering", "--subs-position", "Earliest"),
    ]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PULSAR_LOG_DIR": str(tmp_path),
    }
    give(broker.service_url, topic, some, batched=True)
    with run(command, environment, tmp_path / "printed") as process:
        await until(lambda: process.poll() is not None or len(stored(shared_sidecar, output)) >= len(some))
        expected = [Result(one.key, arrival(one.fields)) for one in some]
        assert stored(shared_sidecar, output) == expected, (tmp_path / "printed").read_text()


async def test_deployed_by_a_worker_over_a_sidecar_on_pulsar_a_stock_consumer_sees_each_result_once(
    pulsar_home: Path, tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    name, topic, output = "deployed", "persistent://public/default/given", "persistent://public/default/output"
    some = flights(2000)
    with (
        Broker(pulsar_home, with_functions=True) as broker,
        Sidecar(tmp_path / "sidecar", **pulsar_keys(broker, "public/default")) as sidecar,
        blocking.Client(sidecar.address) as client,
    ):

        def published() -> int:
            try:
                return client.ends(output).last.index + 1
            except SeqdedupeError:
                return 0

        config = {"wrapped": "deployed.One", "sidecar_address": sidecar.address, "output_topic": output, "pause_ms": 1}
        function = {
            "tenant": "public",
            "namespace": "default",
            "name": name,
            "className": FULL_NAME,
            "runtime": "PYTHON",
            "inputs": [topic],
            "subscriptionPosition": "Earliest",
            "processingGuarantees": "MANUAL",
            "retainOrdering": True,
            "userConfig": config,
        }
        give(broker.service_url, topic, some, batched=True)
        await until(lambda: leader_is_ready(broker))
        deploy(broker, wheel, function)
        for kill in range(2):
            await until(lambda kill=kill: published() > len(some) * kill // 3)  # type: ignore[misc]
            await until(lambda: len(instances_of(broker, name)) == 1)
            for process in instances_of(broker, name):
                process.kill()
        await until(lambda: published() >= len(some))
        assert read(broker.service_url, output) == [Result(one.key, arrival(one.fields)) for one in some]


async def test_a_native_input_topic_gives_each_result_once_and_nothing_of_void_entries(
    broker: Broker, pulsar_home: Path, topic: str, tmp_path: Path, wheel: Path
) -> None:
    """A void entry has a message that nobody was told is stored. Pulsar delivers it like any other."""
    some, name = flights(1500), topic.rpartition("/")[2]
    output, half = f"{topic}-output", len(some) // 2
    config = {"wrapped": "deployed.One", "output_topic": output, "pause_ms": 1}
    with Sidecar(tmp_path / "sidecar", **pulsar_keys(broker, "public/default")) as sidecar:

        def publish(first: int, stop: int) -> None:
            with blocking.Client(sidecar.address) as client, client.producer(topic, "flights") as producer:
                for number in range(first, stop):
                    producer.send(some[number].payload, number, key=some[number].key)
                producer.flush()

        def function(**more: str) -> dict[str, Any]:
            given = json.dumps(config | {"sidecar_address": sidecar.address} | more)
            return details(name, topic, class_name=FULL_NAME, userConfig=given)

        with blocking.Client(sidecar.address) as client:
            for one in (topic, output):
                client.admin.create_topic(one, entry_format="native")
            incarnation = client.admin.topic(topic).incarnation
        publish(0, half)
        sidecar.stop()
        void = batch([("flights", half)], payloads=[some[-1].payload])
        lost = EntryOwner(incarnation, 1, 7)
        await send_native(broker.service_url, topic, packed_message(lost, 40, half, 1, encoded_part(void)))
        sidecar.spawn()
        await asyncio.to_thread(sidecar.wait_until_serving)
        publish(half, len(some))
        # The control arm: by Pulsar's message IDs alone the function would get the void message too.
        with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function()) as instance:
            await until(lambda: instance.starts > 1, instance)
            assert "Set identity to 'index'" in instance.log
        (tmp_path / "index").mkdir()
        function_of_indexes = function(identity="index")
        with Instance(pulsar_home, tmp_path / "index", broker.service_url, wheel, function_of_indexes) as instance:
            for kill in range(2):
                await until(lambda kill=kill: len(stored(sidecar, output)) > len(some) * kill // 3, instance)  # type: ignore[misc]
                instance.kill()
            await until(lambda: left(broker, topic) == 0, instance)
            assert "has no index and is skipped" in instance.log
        assert stored(sidecar, output) == [Result(one.key, arrival(one.fields)) for one in some]
