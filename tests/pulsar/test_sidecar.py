"""A sidecar as a process in front of a real broker that is reached by TLS and with a token."""

import itertools
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.errors import EXIT_WRONG, ConfigurationError, SeqdedupeError, UnavailableError
from seqdedupe.log.pulsar.admin_url import AdminUrl
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import Client as RawClient
from tests.broker_sidecar.calls import refused
from tests.pulsar import secured
from tests.pulsar.owners import until
from tests.pulsar.secured import folder as folder
from tests.pulsar.secured import ports as ports

LIMIT_BYTES = 4 * 1024 * 1024
"""That of the broker, which is not what brokers have as they are delivered."""


@pytest.fixture(scope="module")
def broker(pulsar_home: Path, folder: Path, ports: tuple[int, int]) -> Iterator[Broker]:
    keys = secured.keys(folder, *ports) | {"maxMessageSize": LIMIT_BYTES}
    with Broker(pulsar_home, secured.token(), **keys) as broker:
        yield broker


async def test_how_large_an_entry_may_be_is_asked_by_tls_and_with_a_token(
    broker: Broker, folder: Path, ports: tuple[int, int]
) -> None:
    url = f"pulsar+ssl://127.0.0.1:{ports[0]}"
    tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    assert await Brokers(url, secured.token, tls).max_entry_bytes() == LIMIT_BYTES
    with pytest.raises(ConfigurationError, match="PULSAR_FORBIDS"):
        await Brokers(url, lambda: secured.token(key=b"another key"), tls).max_entry_bytes()
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        await Brokers(url, secured.token).max_entry_bytes()


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


def logged(sidecar: Sidecar, words: str) -> bool:
    sidecar.check_running()
    return any(words in entry["event"] for entry in sidecar.log)


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


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
                for entry_format in ("plain", "native"):
                    name = f"{topic}-{entry_format}"
                    client.admin.create_topic(name, entry_format=entry_format)
                    with client.producer(name, "p") as producer:
                        producer.send(b"one", 1).result()
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
        receipts[0].result(LAST_RESORT_SECONDS)
        ends(one)
        receipts += [producer.send(b"%d" % number) for number in range(50, 100)]
        for receipt in receipts:
            receipt.result(LAST_RESORT_SECONDS)
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
    assert sidecar.wait() == EXIT_WRONG
    assert words in sidecar.errors[-1]
