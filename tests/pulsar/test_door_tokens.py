"""Consumers through a door before a broker with TLS, tokens and rights: each client shows the broker its own token."""

import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import InvalidRequestError
from seqdedupe.log.pulsar.admin_url import AdminUrl
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.wire import door_of
from tests.pulsar import secured
from tests.pulsar.owners import quiet
from tests.pulsar.secured import folder as folder
from tests.pulsar.secured import ports as ports

NAMESPACE = "public/secured"
TOPIC = f"persistent://{NAMESPACE}/t"


@pytest.fixture(scope="module")
def broker(pulsar_home: Path, folder: Path, ports: tuple[int, int]) -> Iterator[Broker]:
    keys = secured.keys(folder, *ports) | {"authorizationEnabled": "true"}
    with Broker(pulsar_home, secured.token(), **keys) as broker:
        yield broker


@pytest.fixture
async def namespace(broker: Broker, folder: Path, ports: tuple[int, int]) -> str:
    tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    admin = AdminUrl(f"https://127.0.0.1:{ports[1]}", secured.token, tls)
    with suppress(InvalidRequestError):
        # It may be there already.
        await admin.call("PUT", f"namespaces/{NAMESPACE}", {"subscription_expiration_time_minutes": 0}, "TOPIC_EXISTS")
    await admin.call("POST", f"namespaces/{NAMESPACE}/permissions/reader", ["consume"])
    return NAMESPACE


@pytest.fixture
def start(tmp_path: Path, folder: Path, namespace: str, ports: tuple[int, int]) -> Iterator[Callable[..., Sidecar]]:
    every: list[Sidecar] = []

    def started(**keys: Any) -> Sidecar:
        sidecar = Sidecar(
            tmp_path / f"sidecar-{len(every)}",
            log="pulsar",
            pulsar_listen="127.0.0.1:0",
            pulsar_service_url=f"pulsar+ssl://127.0.0.1:{ports[0]}",
            pulsar_admin_url=f"https://127.0.0.1:{ports[1]}",
            pulsar_namespaces=namespace,
            pulsar_token_file=str(folder / "token"),
            pulsar_tls_trust_certs_file_path=str(folder / "ca.pem"),
            pulsar_manage_topic_policies=True,
            pulsar_serve_consumers=True,
            **keys,
        )
        every.append(sidecar)
        sidecar.start()
        return sidecar

    yield started
    for sidecar in every:
        sidecar.kill()


@pytest.fixture
def client() -> Iterator[Callable[[Sidecar, str], pulsar.Client]]:
    every: list[pulsar.Client] = []

    def made(sidecar: Sidecar, token: str) -> pulsar.Client:
        authentication = pulsar.AuthenticationToken(token)
        every.append(pulsar.Client(f"pulsar://{door_of(sidecar)}", authentication, logger=quiet()))
        return every[-1]

    yield made
    for one in every:
        one.close()


Made = Callable[[Sidecar, str], pulsar.Client]


def test_the_rights_of_a_consumer_are_those_of_its_token(start: Callable[..., Sidecar], client: Made) -> None:
    sidecar = start()
    producer = client(sidecar, secured.token()).create_producer(TOPIC, producer_name="p")
    reader = client(sidecar, secured.token("reader"))
    consumer = reader.subscribe(TOPIC, "s", initial_position=pulsar.InitialPosition.Earliest)
    producer.send(b"one", sequence_id=1)
    while (message := consumer.receive(timeout_millis=int(LAST_RESORT_SECONDS * 1000))).data() != b"one":
        consumer.acknowledge(message)
    with pytest.raises(pulsar.AuthorizationError):
        client(sidecar, secured.token("stranger")).subscribe(TOPIC, "s2")


def test_the_sidecars_own_token_is_not_shown_to_the_broker(start: Callable[..., Sidecar], client: Made) -> None:
    """A client with it publishes, and the broker does not know it as a consumer."""
    sidecar = start(authentication="token")
    own = client(sidecar, sidecar.token_file.read_text().strip())
    own.create_producer(TOPIC, producer_name="q").send(b"one", sequence_id=1)
    with pytest.raises((pulsar.AuthenticationError, pulsar.AuthorizationError)):
        own.subscribe(TOPIC, "s3")
