"""Who gets through the door, as whom, and what an unknown client can make the sidecar do."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
import trustme

from broker_sidecar.security.tokens import LEEWAY_SECONDS
from seqdedupe.pulsar_wire.frames import command_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, CommandPing, ExclusiveWithFencing, ServerError
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.door.wire import Wire, door_of, ids_of, single
from tests.broker_sidecar.pausing import wait_for
from tests.broker_sidecar.security.issuing import of_server
from tests.broker_sidecar.security.showing import token_of
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.broker_sidecar.security.test_certificates import tls_keys

OpenWire = Callable[..., Wire]

ISSUER = Issuer("door")
AUTHORITY = trustme.CA()

RULES = """
[[allow]]
subjects = ["shop"]
actions = ["publish"]
topics = ["persistent://public/default/orders"]
producers = ["shop-*"]

[[allow]]
subjects = ["shop"]
actions = ["create"]
topics = ["persistent://public/default/orders"]
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with rules, and with TLS."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "rules.toml").write_text(RULES)
    keys: dict[str, Any] = {
        "authentication": "token",
        "token_keys_file": write_keys(folder / "keys.json", [ISSUER.jwk()]),
        "token_audience": AUDIENCE,
        "rules_file": folder / "rules.toml",
    }
    with Sidecar(folder / "sidecar", pulsar_listen="127.0.0.1:0", **keys) as sidecar:
        yield sidecar


@pytest.fixture
def connect(guarded: Sidecar, open_wire: OpenWire) -> OpenWire:
    """Connects as the shop."""
    return lambda **claims: open_wire(door_of(guarded), token=ISSUER.token(**claims).encode())


@pytest.mark.parametrize("token", [None, b"", b"wrong", b"\xff\xfe", Issuer("door").token().encode()])
def test_who_is_unknown_is_told_so_and_let_go(guarded: Sidecar, open_wire: OpenWire, token: bytes | None) -> None:
    wire = open_wire(door_of(guarded), token=token)
    assert wire.connected.type == BaseCommand.ERROR
    assert wire.connected.error.error == ServerError.AuthenticationError
    with pytest.raises((EOFError, ConnectionError)):
        wire.produce("orders", "shop-1")


def test_the_rules_are_those_of_grpc(connect: OpenWire) -> None:
    wire = connect()
    assert wire.partitions("orders").partitionMetadataResponse.response == 0
    assert wire.look_up("orders").lookupTopicResponse.proxy_through_service_url
    assert wire.look_up("bills").lookupTopicResponse.error == ServerError.AuthorizationError
    assert wire.partitions("bills").partitionMetadataResponse.error == ServerError.AuthorizationError
    for topic, name in (("bills", "shop-1"), ("orders", "other"), ("orders", None)):
        assert wire.refused(topic, name).error == ServerError.AuthorizationError
    wire.produce("orders", "shop-1")
    wire.send(0, single(0))
    assert ids_of(wire.receipts(1)) == [0]


def test_the_operators_token(guarded: Sidecar, open_wire: OpenWire) -> None:
    wire = open_wire(door_of(guarded), token=token_of(guarded).encode())
    wire.produce("anything")


def test_who_may_not_publish_ends_nobodys_producer(guarded: Sidecar, connect: OpenWire, open_wire: OpenWire) -> None:
    """A producer that wants the topic for itself ends all others, for good."""
    owner, other = open_wire(door_of(guarded), token=token_of(guarded).encode()), connect()
    for topic, name in (("bills", "b"), ("orders", "o")):
        owner.produce(topic, name)
        refused = other.refused(topic, name, producer_access_mode=ExclusiveWithFencing)
        assert refused.error == ServerError.AuthorizationError
        owner.send(0, single(0))
        assert [i for i, _ in owner.receipts(1)] == [0]


def test_rules_that_change_end_a_producer_for_good(guarded: Sidecar, connect: OpenWire) -> None:
    wire = connect()
    wire.produce("orders", "shop-2")
    rules = Path(str(guarded.keys["rules_file"]))
    rules.write_text(RULES.replace("shop-*", "nobody"))
    try:
        number = 0

        def is_ended() -> bool:
            nonlocal number
            wire.send(number, single(number))
            number += 1
            return wire.next().type == BaseCommand.CLOSE_PRODUCER

        guarded.signal(1)
        wait_for(is_ended)
        assert wire.refused("orders", "shop-2").error == ServerError.AuthorizationError
    finally:
        rules.write_text(RULES)
        guarded.signal(1)
        wait_for(lambda: is_accepted(connect()))


def is_accepted(wire: Wire) -> bool:
    wire.ask_for_producer("orders", "shop-3")
    return wire.next().type == BaseCommand.PRODUCER_SUCCESS


def test_a_token_that_expires_ends_the_connection(connect: OpenWire) -> None:
    # The sidecar allows a little after `exp`, for clocks that differ.
    wire = connect(sub="shop", exp=int(time.time()) - LEEWAY_SECONDS + 3, iat=int(time.time()) - 100)
    wire.produce("orders", "shop-4")
    with pytest.raises((EOFError, ConnectionError)):
        wire.next()


def test_silent_clients_keep_nobody_out(guarded: Sidecar, connect: OpenWire, open_wire: OpenWire) -> None:
    """As many as one likes, from one place. The control: each of them was accepted."""
    silent = [open_wire(door_of(guarded), connects=False) for _ in range(200)]
    wire = connect()
    wire.produce("orders", "shop-5")
    is_open = []
    for one in silent:
        one.socket.setblocking(False)
        try:
            is_open.append(bool(one.socket.recv(1)))
        except BlockingIOError:
            is_open.append(True)
        except ConnectionError:
            is_open.append(False)
    assert 0 < sum(is_open) < 100


def test_answers_that_are_not_read_go_with_their_connection(guarded: Sidecar, open_wire: OpenWire) -> None:
    """The control: the connection stayed, with a megabyte that nothing counts, until the client closed it."""
    before = open_files(guarded)
    expires = int(time.time()) - LEEWAY_SECONDS + 8
    token = ISSUER.token(sub="shop", exp=expires, iat=expires - 100).encode()
    wire = open_wire(door_of(guarded), token=token)
    ping = command_frame(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
    wire.socket.settimeout(2)
    with pytest.raises(OSError):  # noqa: PT012
        while True:
            wire.socket.sendall(ping * 1000)
    wait_for(lambda: open_files(guarded) <= before)


def open_files(sidecar: Sidecar) -> int:
    return len(list(Path(f"/proc/{sidecar.pid}/fd").iterdir()))


def test_a_large_first_frame_is_not_received(guarded: Sidecar, open_wire: OpenWire) -> None:
    wire = open_wire(door_of(guarded), connects=False)
    wire.socket.sendall((1 << 20).to_bytes(4, "big"))
    with pytest.raises((EOFError, ConnectionError)):
        wire.next()


def test_what_is_open_to_others_must_be_allowed(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, pulsar_listen="0.0.0.0:0")
    sidecar.spawn()
    assert sidecar.wait() == 2
    assert "[INSECURE_LISTEN]" in sidecar.errors[-1]


def test_over_tls(tmp_path: Path) -> None:
    """Also with a certificate that is replaced: connections that begin later get the new one."""
    keys = tls_keys(tmp_path / "tls", of_server(AUTHORITY)) | {"authentication": "token"}
    authority = tmp_path / "authority.pem"
    AUTHORITY.cert_pem.write_to_path(authority)
    with Sidecar(tmp_path / "sidecar", pulsar_listen="127.0.0.1:0", **keys) as sidecar:
        for name in ("one", "two"):
            client = pulsar.Client(
                f"pulsar+ssl://localhost:{door_of(sidecar).port}",
                authentication=pulsar.AuthenticationToken(token_of(sidecar)),
                tls_trust_certs_file_path=str(authority),
                tls_validate_hostname=True,
                logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
            )
            producer = client.create_producer("t", producer_name=name)
            assert producer.send(b"x").entry_id() >= 0
            client.close()
            renewed = trustme.CA()
            of_server(renewed).write(tmp_path / "tls")
            renewed.cert_pem.write_to_path(authority)
            sidecar.signal(1)
            wait_for(lambda: _authority_of(door_of(sidecar).port, authority))
        with socket.create_connection(("127.0.0.1", door_of(sidecar).port)) as plain:
            plain.sendall(b"\x00\x00\x00\x06\x00\x00\x00\x02\x08\x02")
            plain.shutdown(socket.SHUT_WR)
            assert b"\x08\x03" not in plain.recv(1000)


def _authority_of(port: int, authority: Path) -> bool:
    """Whether the door shows a certificate of this authority."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with socket.create_connection(("127.0.0.1", port)) as there:
            context.wrap_socket(there, server_hostname="localhost").close()
    except ssl.SSLError:
        return False
    return True
