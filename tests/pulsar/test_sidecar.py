"""A sidecar as a process in front of a real broker that is reached by TLS and with a token, through kills of both."""

import asyncio
import itertools
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pulsar
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.pulsar.messages import Received, Topic, messages
from pulsar_broker.standalone import START_TIMEOUT_SECONDS, Broker
from seqdedupe.client import Client, Producer, ProducerConfig, blocking
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.http import AdminUrl
from seqdedupe.testing import Sidecar, reserved_port
from seqdedupe.v1 import admin_pb2
from tests import warm
from tests.broker_sidecar.calls import Client as RawClient
from tests.broker_sidecar.calls import refused
from tests.pulsar import secured
from tests.pulsar.owners import quiet, until

pytestmark = pytest.mark.timeout(START_TIMEOUT_SECONDS * 4)

MESSAGES = 1_500
TOPICS = ("plain", "packed", "control")
"""In the last one nobody deduplicates."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secured")
    secured.certificates(folder)
    (folder / "token").write_text(secured.token())
    return folder


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """For TLS: of messages, and of admin calls."""
    with reserved_port() as messages, reserved_port() as calls:
        yield messages.getsockname()[1], calls.getsockname()[1]


@pytest.fixture(scope="module")
def broker(pulsar_home: Path, folder: Path, ports: tuple[int, int]) -> Iterator[Broker]:
    with Broker(pulsar_home, secured.token(), **secured.keys(folder, *ports)) as broker:
        yield broker


Start = Callable[..., Sidecar]

_namespaces = itertools.count()


@pytest.fixture
async def namespace(broker: Broker) -> str:
    """One that nobody else uses: a sidecar takes all topics of its namespaces."""
    name = f"public/sidecars-{next(_namespaces)}"
    url = AdminUrl(broker.admin_url, secured.token)

    async def is_made() -> bool:
        # A broker that was just started may break off.
        try:
            await url.call("PUT", f"namespaces/{name}", {"subscription_expiration_time_minutes": 0}, "TOPIC_EXISTS")
        except SeqdedupeError as e:
            return e.reason == "TOPIC_EXISTS"
        return True

    await until(is_made)
    return name


@pytest.fixture
def topic(namespace: str) -> str:
    return f"persistent://{namespace}/t"


@pytest.fixture
def made(tmp_path: Path, folder: Path, ports: tuple[int, int], namespace: str) -> Iterator[Start]:
    """Makes sidecars in front of the broker, with keys of `[pulsar]` without their prefix; not started yet."""
    every: list[Sidecar] = []

    def make(*, credentials: dict[str, Any] | None = None, **keys: Any) -> Sidecar:
        within: dict[str, Any] = {
            "service_url": f"pulsar+ssl://127.0.0.1:{ports[0]}",
            "admin_url": f"https://127.0.0.1:{ports[1]}",
            "tls_trust_certs_file_path": folder / "ca.pem",
            "manage_topic_policies": True,
            "namespaces": namespace,
        } | ({"token_file": folder / "token"} if credentials is None else credentials)
        pulsar_keys = {f"pulsar_{name}": value for name, value in within.items()}
        sidecar = Sidecar(tmp_path / f"sidecar-{len(every)}", log="pulsar", **(pulsar_keys | keys))
        every.append(sidecar)
        return sidecar

    yield make
    for sidecar in every:
        sidecar.kill()


def numbered(number: int) -> bytes:
    return b"message %d" % number


class Load:
    """A producer of a topic that has all its messages under way, as far as its bounds allow."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.verdicts: Counter[str] = Counter()
        self.settled = 0

    async def send(self, after: Callable[[int], Any]) -> None:
        """Sends all; `after` is awaited after each message that is handed over."""
        tasks = []
        for number in range(MESSAGES):
            tasks.append(asyncio.ensure_future(self._wait(await self._producer.send(numbered(number), number))))
            await after(number)
        await asyncio.gather(*tasks)

    async def _wait(self, receipt: Any) -> None:
        self.verdicts[(await receipt).verdict.name] += 1
        self.settled += 1


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


async def no_more(_: int) -> None:
    pass


def stored(service_url: str, topic: str) -> list[bytes | None]:
    """The payloads of what counts in a topic, read with Pulsar's own client and nothing of this project's."""
    client = pulsar.Client(service_url, authentication=pulsar.AuthenticationToken(secured.token()), logger=quiet())
    try:
        consumer = client.subscribe(
            topic,
            "stock",
            initial_position=pulsar.InitialPosition.Earliest,
            consumer_type=pulsar.ConsumerType.Exclusive,
        )
        last = consumer.get_last_message_id()
        counts = Topic()
        found: list[Received] = []
        while True:
            entry = consumer.receive(timeout_millis=30_000)
            if counts.counts(entry.properties()):
                payload = None if entry.has_null_value() else entry.data()
                found += messages(payload, entry.properties(), entry.partition_key(), entry.event_timestamp())
            if entry.message_id() >= last:
                return [message.payload for message in found]
    finally:
        client.close()


def plainly_stored(service_url: str, topic: str) -> list[bytes]:
    """As a stock consumer has a `plain` topic that skips what says that it is no message."""
    client = pulsar.Client(service_url, authentication=pulsar.AuthenticationToken(secured.token()), logger=quiet())
    try:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            entry = reader.read_next(timeout_millis=30_000)
            if "seqdedupe.kind" not in entry.properties():
                found.append(entry.data())
        return found
    finally:
        client.close()


async def test_every_message_is_there_once_whatever_is_killed(made: Start, broker: Broker, namespace: str) -> None:
    """The sidecar is killed in the middle of a load, and then the broker. What was acknowledged is there once and in
    order, and sent again it is Dup. In a topic that does not deduplicate the same is there twice."""
    sidecar = made()
    await asyncio.to_thread(sidecar.start)
    names = [f"persistent://{namespace}/{name}" for name in TOPICS]
    plain, packed, control = names
    with blocking.Client(sidecar.address) as client:
        for name in names:
            entry_format = "packed" if name == packed else "plain"
            client.admin.create_topic(name, deduplication_enabled=name != control, entry_format=entry_format)
            assert client.admin.topic(name).entry_format
    config = ProducerConfig(max_batch_rows=20, max_in_flight_batches=8, delivery_timeout_seconds=None)
    client_of_all = Client(sidecar.address)
    async with client_of_all:
        producers = [await client_of_all.producer(name, "p", config).__aenter__() for name in names]
        loads = [Load(producer) for producer in producers]
        turns: dict[int, Callable[[], None]] = {
            MESSAGES // 3: sidecar.restart,
            2 * MESSAGES // 3: lambda: restart(broker),
        }
        in_flight = []

        async def kill_in_turn(number: int) -> None:
            if work := turns.get(number):
                in_flight.append(number + 1 - loads[0].settled)
                # On this thread: a broker ends with the one that started it.
                work()

        first, *others = loads
        await asyncio.gather(first.send(kill_in_turn), *(load.send(no_more) for load in others))
        assert min(in_flight) > 0, "nothing was in flight when something was killed"
        for load in loads:
            assert load.settled == MESSAGES
        for producer in producers:
            await producer.close()
        again = [Load(await client_of_all.producer(name, "p", config).__aenter__()) for name in names]
        for load in again:
            await load.send(no_more)
    assert [load.verdicts for load in again[:2]] == [Counter(DUP=MESSAGES)] * 2
    assert again[2].verdicts == Counter(NOT_DUP=MESSAGES)

    expected = [numbered(number) for number in range(MESSAGES)]
    for name in (plain, packed):
        assert await asyncio.to_thread(stored, broker.service_url, name) == expected
    assert await asyncio.to_thread(plainly_stored, broker.service_url, plain) == expected
    doubled = Counter(await asyncio.to_thread(stored, broker.service_url, control))
    assert doubled.keys() == set(expected)
    assert min(doubled.values()) == 2
    assert await asyncio.to_thread(sidecar.stop) == 0
    looked_at = await asyncio.to_thread(run, warm.COMMAND, "doctor", str(sidecar.data))
    assert looked_at.returncode == 0
    assert looked_at.stdout.count("its log is a Pulsar topic, and was not looked at") == len(TOPICS)
    salvaged = await asyncio.to_thread(
        run, warm.COMMAND, "doctor", str(sidecar.data), "--salvage", str(sidecar.folder / "new")
    )
    assert salvaged.returncode == 2
    assert "there is nothing to salvage here [INVALID_CONFIGURATION]" in salvaged.stderr


def health(address: str, topic: str = "") -> str:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=topic)
        found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=120)  # type: ignore[attr-defined]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(found.status))


def listening(sidecar: Sidecar) -> str:
    """Where it listens, which it does before it serves."""
    return next((entry["address"] for entry in reversed(sidecar.log) if entry["event"] == "listening"), "")


def logged(sidecar: Sidecar, words: str) -> bool:
    sidecar.check_running()
    return any(words in entry["event"] for entry in sidecar.log)


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def in_flight(sidecar: Sidecar, topic: str) -> list[Any]:
    raw = RawClient(sidecar.address)
    try:
        return list(raw.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic=topic)).in_flight)
    finally:
        raw.close()


async def test_without_a_cluster_it_starts_says_so_and_stops_and_comes_back_with_it(
    made: Start, broker: Broker, topic: str
) -> None:
    sidecar = made(drain_timeout_seconds=3)
    sidecar.start()
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(topic)
        with client.producer(topic, "p") as producer:
            producer.send(b"one", 1).result()
    broker.freeze()
    try:
        sidecar.kill()
        sidecar.log.clear()
        sidecar.spawn()
        await until(lambda: bool(listening(sidecar)))
        assert health(sidecar.address) == health(sidecar.address, topic) == "NOT_SERVING"
        # It was told to stop, and nobody answers it.
        assert sidecar.stop() == 0
    finally:
        broker.thaw()
    broker.kill()
    sidecar.log.clear()
    sidecar.spawn()
    await until(lambda: logged(sidecar, "refused"))
    raw = RawClient(sidecar.address)
    found = raw.admin.GetTopic(admin_pb2.GetTopicRequest(topic=topic)).topic
    assert found.state == admin_pb2.TOPIC_STATE_RECOVERING
    assert "refused" in found.why
    # Nobody is told that there are no others.
    for call in (
        lambda: raw.admin.ListTopics(admin_pb2.ListTopicsRequest()),
        lambda: raw.admin.GetTopic(admin_pb2.GetTopicRequest(topic=topic + "-other")),
        lambda: raw.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic + "-other")),
        lambda: raw.open(topic + "-other", "p"),
    ):
        assert refused(call).reason == "RECOVERING"
    raw.close()
    assert health(sidecar.address) == "NOT_SERVING"
    broker.start()
    sidecar.wait_until_serving(START_TIMEOUT_SECONDS)
    assert health(sidecar.address) == health(sidecar.address, topic) == "SERVING"
    with blocking.Client(sidecar.address) as client, client.reader(topic) as reader:
        assert next(iter(reader)).payload == b"one"
    # In mid-load, with messages in flight that nobody settles: they are the next start's.
    with blocking.Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        broker.freeze()
        try:
            receipt = producer.send(b"two", 2)
            await until(lambda: bool(in_flight(sidecar, topic)))
            assert sidecar.stop() == 1
        finally:
            broker.thaw()
        sidecar.start()
        assert receipt.result().index == 1
    assert sidecar.errors == ["seqdedupe: draining took too long: what was in flight is decided at the next start"]


async def test_a_wrong_token_is_told_and_a_new_one_is_taken_and_no_log_shows_either(
    made: Start, tmp_path: Path, topic: str
) -> None:
    wrong, right = secured.token(key=b"another key"), secured.token()
    file = tmp_path / "token"
    file.write_text(wrong)
    sidecar = made(credentials={"token_file": file}, log_level="debug")
    process = sidecar.spawn()
    await until(lambda: logged(sidecar, "401"))
    arguments = arguments_of(process.pid)
    file.write_text(f"{right}\n")
    sidecar.wait_until_serving()
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(topic)
        with client.producer(topic, "p") as producer:
            producer.send(b"one", 1).result()
    assert sidecar.stop() == 0
    said = "\n".join([*sidecar.errors, *map(str, sidecar.log), arguments])
    assert "401" in said
    for secret in (wrong, right):
        assert secret not in said
        assert secret.rpartition(".")[2] not in said


@pytest.mark.parametrize("secret", [secured.CLIENT_SECRET, "a-wrong-one"])
async def test_an_issuer_gives_the_token(made: Start, tmp_path: Path, topic: str, secret: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(f'{{"client_id": "{secured.ROLE}", "client_secret": "{secret}"}}')
    with secured.issuer() as issuer:
        oauth2 = {"oauth2_issuer_url": issuer.url, "oauth2_credentials_file": file, "oauth2_audience": "urn:us"}
        sidecar = made(credentials=oauth2, log_level="debug")
        sidecar.spawn()
        if secret == secured.CLIENT_SECRET:
            sidecar.wait_until_serving()
            with blocking.Client(sidecar.address) as client:
                client.admin.create_topic(topic)
            assert issuer.audiences == ["urn:us"], "the token is kept"
        else:
            await until(lambda: logged(sidecar, "gives no token: it answers 401"))
        assert sidecar.stop() == 0
    assert secret not in "\n".join([*sidecar.errors, *map(str, sidecar.log)])


def test_a_topic_that_another_sidecar_makes_is_found(made: Start, topic: str) -> None:
    one, other = made(), made()
    one.start()
    other.start()
    raw, raw_other = RawClient(one.address), RawClient(other.address)
    raw.epochs(topic, "p")
    # It is not made twice, and it is known to be one's.
    answer = refused(lambda: raw_other.open(topic, "p"))
    assert (answer.reason, answer.numbers["owner_address"]) == ("NOT_OWNER", one.address)
    [found] = raw_other.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    assert found.incarnation == raw.admin.GetTopic(admin_pb2.GetTopicRequest(topic=topic)).topic.incarnation
    again = refused(lambda: raw_other.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic)))
    assert again.reason == "TOPIC_EXISTS"
    # What it knows of producers may be old.
    for name in ("ListProducers", "GetProducer"):
        request = getattr(admin_pb2, f"{name}Request")(topic=topic)
        assert refused(lambda: getattr(raw_other.admin, name)(request)).reason == "NOT_OWNER"  # noqa: B023
    assert one.stop() == other.stop() == 0
    raw.close()
    raw_other.close()


@pytest.mark.parametrize("ends", [Sidecar.kill, Sidecar.stop])
def test_a_client_with_both_addresses_goes_where_the_topic_is(
    made: Start, topic: str, ends: Callable[[Sidecar], object]
) -> None:
    """The owner ends with messages under way; the other sidecar is asked, and takes the topic."""
    one, other = made(), made()
    one.start()
    with blocking.Client(one.address) as client, client.producer(topic, "first"):
        other.start()  # and finds the topic
    with blocking.Client([other.address, one.address]) as client, client.producer(topic, "p") as producer:
        receipts = [producer.send(b"%d" % number) for number in range(50)]
        receipts[0].result(60)
        ends(one)
        receipts += [producer.send(b"%d" % number) for number in range(50, 100)]
        for receipt in receipts:
            receipt.result(60)
        assert [message.payload for message in client.reader(topic)] == [b"%d" % number for number in range(100)]
        assert {producer.name for producer in client.admin.producers(topic)} == {"first", "p"}
    assert other.stop() == 0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"log": "embedded"}, "log = 'embedded': the data directory has topics on the log 'pulsar'"),
        ({"instance_name": "another"}, "instance_name is 'another', but the data directory is that of 'one'"),
    ],
)
def test_a_data_directory_stays_what_it_is(made: Start, topic: str, keys: dict[str, Any], words: str) -> None:
    sidecar = made(instance_name="one")
    sidecar.start()
    raw = RawClient(sidecar.address)
    raw.epochs(topic, "p")
    raw.close()
    sidecar.stop()
    sidecar.keys |= keys
    sidecar.spawn()
    assert sidecar.wait() == 1
    assert words in sidecar.errors[-1]
