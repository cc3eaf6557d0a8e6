"""The wrapper in Pulsar's own Python runtime, on a real broker, killed and restarted."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pytest

from pulsar_broker.instance import FULL_NAME, Instance, details
from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.errors import NotFoundError
from seqdedupe.functions.wheel import build
from seqdedupe.testing import Sidecar
from tests.pulsar.admin import call

MESSAGES = 4000
TIMEOUT_SECONDS = 240.0

CODE = '''
import os
import time

import pulsar

import seqdedupe.functions.instance as instances
from seqdedupe.functions import DedupeFunction


class Copy(pulsar.Function):
    """Slowly enough to be killed within."""

    def process(self, input, context):
        time.sleep(0.0005)
        return input


class Two(Copy):
    def process(self, input, context):
        context.publish(context.get_user_config_value("other"), input)
        return super().process(input, context)


class Unchecked(DedupeFunction):
    """A control arm: takes any subscription."""

    def process(self, input, context):
        instances.check_deployment = lambda details: None
        return super().process(input, context)
'''

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "mine.py").write_text(CODE)
    build([folder / "mine.py"], folder / "mine-1-py3-none-any.whl")
    return folder / "mine-1-py3-none-any.whl"


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(broker.service_url)
    yield client
    client.close()


def give(client: pulsar.Client, topic: str, first: int, count: int, *, batched: bool = True) -> None:
    """Numbers, under the key by which a partitioned topic spreads them."""
    producer = client.create_producer(topic, batching_enabled=batched, block_if_queue_full=True)
    for i in range(first, first + count):
        producer.send_async(b"%d" % i, None, partition_key=str(i % 16))
    producer.flush()
    producer.close()


def published(sidecar: Sidecar, topic: str) -> list[int]:
    with blocking.Client(sidecar.address) as client:
        try:
            with client.reader(topic) as reader:
                return [int(message.payload or b"") for message in reader]
        except NotFoundError:
            return []


def until(is_so: Callable[[], bool], *instances: Instance) -> None:
    """Waits for what no event tells of."""
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        if time.monotonic() > give_up_at:
            raise TimeoutError("\n".join(instance.log[-3000:] for instance in instances))
        time.sleep(0.1)


def until_published(sidecar: Sidecar, topic: str, count: int, *instances: Instance) -> None:
    until(lambda: len(published(sidecar, topic)) >= count, *instances)


def wrapped(name: str, topic: str, sidecar: Sidecar, **config: Any) -> dict[str, Any]:
    given = {"wrapped": "mine.Copy", "sidecar_address": sidecar.address, "output_topic": f"{name}-out"} | config
    return details(name, topic, class_name=FULL_NAME, userConfig=json.dumps(given))


def test_killed_terminated_and_unloaded_it_publishes_each_result_once_and_in_order(
    broker: Broker,
    pulsar_home: Path,
    client: pulsar.Client,
    start_sidecar: Any,
    topic: str,
    tmp_path: Path,
    wheel: Path,
) -> None:
    sidecar = start_sidecar()
    name = topic.rpartition("/")[2]
    function = wrapped(name, topic, sidecar, wrapped="mine.Two", other=f"{name}-other", max_in_flight_messages=200)
    give(client, topic, 0, MESSAGES // 2)
    give(client, topic, MESSAGES // 2, MESSAGES // 2, batched=False)
    with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function) as instance:
        for kill in range(4):
            until_published(sidecar, f"{name}-out", MESSAGES * kill // 6 + 1, instance)
            instance.kill()
        call(broker, "PUT", f"{topic.replace('://', '/')}/unload")
        sidecar.kill()
        starts = instance.starts
        until(lambda: "waiting to publish" in instance.log, instance)
        instance.terminate()
        until(lambda: instance.starts > starts, instance)
        sidecar.start()
        until_published(sidecar, f"{name}-out", MESSAGES, instance)
        until(lambda: backlog(broker, topic, function) == 0, instance)
        assert instance.starts == 6
    assert published(sidecar, f"{name}-out") == published(sidecar, f"{name}-other") == list(range(MESSAGES))


def backlog(broker: Broker, topic: str, function: dict[str, Any]) -> int:
    """Inputs that are not acknowledged."""
    stats = call(broker, "GET", f"{topic.replace('://', '/')}/stats?getPreciseBacklog=true")
    return int(stats["subscriptions"][f"public/default/{function['name']}"]["msgBacklog"])


def test_the_same_function_unwrapped_doubles(
    broker: Broker, pulsar_home: Path, client: pulsar.Client, topic: str, tmp_path: Path, wheel: Path
) -> None:
    name = topic.rpartition("/")[2]
    function = details(name, topic, class_name="mine.Copy", output=f"{topic}-out", processingGuarantees="ATLEAST_ONCE")
    give(client, topic, 0, MESSAGES)
    reader = client.create_reader(f"{topic}-out", pulsar.MessageId.earliest)
    seen: Counter[int] = Counter()
    with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function) as instance:
        for kill in range(3):
            while len(seen) < MESSAGES * (kill + 1) // 5:
                seen[int(reader.read_next(60_000).data())] += 1
            instance.kill()
        while len(seen) < MESSAGES:
            seen[int(reader.read_next(60_000).data())] += 1
    assert max(seen.values()) > 1


def test_four_partitions_and_two_instances(
    broker: Broker,
    pulsar_home: Path,
    client: pulsar.Client,
    start_sidecar: Any,
    topic: str,
    tmp_path: Path,
    wheel: Path,
) -> None:
    sidecar = start_sidecar()
    name = topic.rpartition("/")[2]
    call(broker, "PUT", f"{topic.replace('://', '/')}/partitions", body=b"4")
    function = wrapped(name, topic, sidecar) | {"parallelism": 2}
    give(client, topic, 0, MESSAGES)
    out = f"{name}-out"
    with (
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 0) as first,
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 1) as second,
    ):
        for kill, instance in enumerate((first, second, first)):
            until_published(sidecar, out, MESSAGES * kill // 5 + 1, first, second)
            instance.kill()
        until_published(sidecar, out, MESSAGES, first, second)
    found = published(sidecar, out)
    assert sorted(found) == list(range(MESSAGES))
    for key in range(16):
        of_key = [i for i in found if i % 16 == key]
        assert of_key == sorted(of_key)


def test_without_its_checks_a_shared_subscription_loses(
    broker: Broker,
    pulsar_home: Path,
    client: pulsar.Client,
    start_sidecar: Any,
    topic: str,
    tmp_path: Path,
    wheel: Path,
) -> None:
    sidecar = start_sidecar()
    name = topic.rpartition("/")[2]
    function = wrapped(name, topic, sidecar) | {
        "className": "mine.Unchecked",
        "retainOrdering": False,
        "parallelism": 2,
    }
    function["source"]["subscriptionType"] = "SHARED"
    with (
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 0) as first,
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 1) as second,
    ):
        until(lambda: consumers(broker, topic, name) == 2, first, second)
        give(client, topic, 0, MESSAGES, batched=False)
        until(lambda: backlog(broker, topic, function) == 0, first, second)
    assert len(set(published(sidecar, f"{name}-out"))) < MESSAGES


def consumers(broker: Broker, topic: str, name: str) -> int:
    try:
        stats = call(broker, "GET", f"{topic.replace('://', '/')}/stats")
    except OSError:
        return 0
    return len(stats["subscriptions"].get(f"public/default/{name}", {}).get("consumers", ()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"processingGuarantees": "ATLEAST_ONCE"}, "processingGuarantees: MANUAL"),
        ({"retainOrdering": False, "source": {"subscriptionType": "SHARED"}}, "retainOrdering: true"),
    ],
)
def test_a_deployment_that_cannot_work_ends_the_process_and_says_what_to_set(
    broker: Broker,
    pulsar_home: Path,
    client: pulsar.Client,
    shared_sidecar: Sidecar,
    topic: str,
    tmp_path: Path,
    wheel: Path,
    changes: dict[str, Any],
    said: str,
) -> None:
    function = wrapped(topic.rpartition("/")[2], topic, shared_sidecar)
    function["source"] |= changes.pop("source", {})
    give(client, topic, 0, 3)
    with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function | changes) as instance:
        until(lambda: instance.starts > 1, instance)
        assert said in instance.log


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


def answers(broker: Broker, path: str) -> bool:
    try:
        call(broker, "GET", path)
    except OSError:
        return False
    return True


def test_deployed_by_a_worker_over_a_sidecar_on_pulsar_a_stock_consumer_sees_each_result_once(
    pulsar_home: Path, tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    name, topic = "deployed", "persistent://public/default/given"
    with (
        Broker(pulsar_home, with_functions=True) as broker,
        Sidecar(
            tmp_path / "sidecar",
            log="pulsar",
            pulsar_service_url=broker.service_url,
            pulsar_admin_url=broker.admin_url,
            pulsar_manage_topic_policies=True,
        ) as sidecar,
    ):
        client = pulsar.Client(broker.service_url)
        give(client, topic, 0, MESSAGES)
        config = {"wrapped": "mine.Copy", "sidecar_address": sidecar.address, "output_topic": f"{name}-out"}
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
        until(lambda: answers(broker, "worker/cluster/leader"))
        deploy(broker, wheel, function)
        for kill in range(2):
            until_published(sidecar, f"{name}-out", MESSAGES * kill // 3 + 1)
            until(lambda: len(instances_of(broker, name)) == 1)
            for process in instances_of(broker, name):
                process.kill()
        until_published(sidecar, f"{name}-out", MESSAGES)
        reader = client.create_reader(f"persistent://public/default/{name}-out", pulsar.MessageId.earliest)
        seen = []
        while reader.has_message_available():
            message = reader.read_next(60_000)
            if "seqdedupe.kind" not in message.properties():
                seen.append(int(message.data()))
        client.close()
    assert seen == list(range(MESSAGES))
