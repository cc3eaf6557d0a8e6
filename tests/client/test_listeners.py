"""To whom of this machine's users a token goes, when somebody else listens at the sidecar's port."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker_sidecar.cluster.peers import Neighbours
from seqdedupe.address import SidecarAddress
from seqdedupe.client import BrokerClient, Client, Credentials, SeqdedupeError, blocking, listeners
from seqdedupe.client.listeners import Host, Looking, check_listener, in_tables, over_netlink
from seqdedupe.client.route import Sidecars
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar, reserved_port
from seqdedupe_spark.service import SidecarService as SparkSidecar
from tests.client import strangers
from tests.client.strangers import needs_root

SECRET = "s3cr3t-t0ken"
TIMEOUT_SECONDS = LAST_RESORT_SECONDS


def why(address: str, *trusted: int) -> str | None:
    """For what reason no token goes there."""
    try:
        check_listener(SidecarAddress.parse(address), frozenset(trusted))
    except SeqdedupeError as e:
        return e.reason
    return None


def listen(host: str, port: int = 0, *, v6_only: bool = False) -> socket.socket:
    """This process does."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in host:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
    listening.bind((host, port))
    listening.listen()
    return listening


async def by_client(address: str, shows: Credentials) -> None:
    async with Client(address, shows) as client:
        await client.admin.version()


async def by_thread(address: str, shows: Credentials) -> None:
    def ask() -> None:
        with blocking.Client(address, shows) as client:
            client.admin.version()

    await asyncio.to_thread(ask)


async def by_broker(address: str, shows: Credentials) -> None:
    async with BrokerClient(address, shows) as client:
        await client.producer("t", "p")


async def by_peer(address: str, shows: Credentials) -> None:
    await Neighbours(Sidecars.parse(address, shows)).shards(address)


async def by_spark(address: str, shows: Credentials) -> None:
    def ask() -> None:
        with SparkSidecar(address, token_file=str(shows.token_file)).connect() as client:
            client.admin.version()

    await asyncio.to_thread(ask)


@needs_root
@pytest.mark.parametrize("call", [by_client, by_thread, by_broker, by_peer, by_spark])
async def test_the_token_goes_to_no_stranger(
    call: Callable[[str, Credentials], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    with strangers.serving() as stranger:
        address = f"127.0.0.1:{stranger.port}"
        with pytest.raises(SeqdedupeError) as raised:
            await call(address, Credentials(token_file=path))
        assert raised.value.reason == "UNTRUSTED_LISTENER"
        assert f"user {strangers.USER} listens at {address}" in raised.value.message
        # The control arm: somebody has said who that is. It is the first call that comes.
        monkeypatch.setenv("SEQDEDUPE_SIDECAR_USER", str(strangers.USER))
        with pytest.raises(SeqdedupeError):
            await call(address, Credentials(token_file=path, sidecar_user=str(strangers.USER)))
        assert stranger.said().endswith(f" Bearer {SECRET}")


@needs_root
async def test_who_owns_the_token_file_has_the_token_anyway(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    with strangers.serving() as stranger:
        os.chown(path, strangers.USER, strangers.USER)
        with pytest.raises(SeqdedupeError):
            await by_client(f"127.0.0.1:{stranger.port}", Credentials(token_file=path))
        assert stranger.said() == f"GetVersion Bearer {SECRET}"


async def test_who_shows_no_token_may_ask_anybody() -> None:
    with listen("127.0.0.1") as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(SeqdedupeError, match="UNREACHABLE") as raised:
        await by_client(f"127.0.0.1:{port}", Credentials(token=SECRET))
    assert "Nothing listens there" in raised.value.hint
    with pytest.raises(SeqdedupeError, match="UNREACHABLE"):
        await by_client(f"127.0.0.1:{port}", Credentials())


OURS, THEIRS = "ours", "theirs"
PLACES: dict[str, tuple[list[tuple[str, str, bool]], str, str | None]] = {
    "nobody": ([], "127.0.0.1", "UNREACHABLE"),
    "this user": ([(OURS, "127.0.0.1", False)], "127.0.0.1", None),
    "this user, everywhere": ([(OURS, "0.0.0.0", False)], "127.0.0.1", None),
    "this user, everywhere by IPv6": ([(OURS, "::", False)], "127.0.0.1", None),
    "this user, as IPv6 writes it": ([(OURS, "127.0.0.1", False)], "[::ffff:127.0.0.1]", None),
    "another loopback address": ([(OURS, "127.0.0.1", False)], "127.0.0.2", "UNREACHABLE"),
    "a stranger": ([(THEIRS, "127.0.0.1", False)], "127.0.0.1", "UNTRUSTED_LISTENER"),
    "a stranger everywhere": ([(THEIRS, "0.0.0.0", False)], "127.0.0.1", "UNTRUSTED_LISTENER"),
    "a stranger everywhere by IPv6": ([(THEIRS, "::", False)], "127.0.0.1", "UNTRUSTED_LISTENER"),
    "a stranger mapped into IPv6": ([(THEIRS, "::ffff:127.0.0.1", False)], "127.0.0.1", "UNTRUSTED_LISTENER"),
    "a stranger beside": ([(OURS, "127.0.0.1", False), (THEIRS, "::", True)], "127.0.0.1", None),
    "a stranger by IPv6": ([(THEIRS, "::1", False)], "[::1]", "UNTRUSTED_LISTENER"),
    "localhost": ([(OURS, "127.0.0.1", False)], "localhost", None),
    "localhost by IPv6": ([(OURS, "::1", False)], "localhost", None),
    "localhost, a stranger's half": (
        [(OURS, "127.0.0.1", False), (THEIRS, "::1", True)], "localhost", "UNTRUSTED_LISTENER"
    ),
}  # fmt: skip


@pytest.mark.parametrize("looking", [over_netlink, in_tables])
@pytest.mark.parametrize("case", PLACES)
def test_where_somebody_listens(case: str, looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    listening, host, reason = PLACES[case]
    if os.geteuid() != 0 and any(who is THEIRS for who, _, _ in listening):
        pytest.skip("needs another user's process")
    monkeypatch.setattr(listeners, "_way_to_look", lambda: looking)
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port()).getsockname()[1]
        for who, at, v6_only in listening:
            if who is OURS:
                stack.enter_context(listen(at, port, v6_only=v6_only))
            else:
                stack.enter_context(strangers.listening(at, port, v6_only=v6_only))
        assert why(f"{host}:{port}") == reason
        if reason == "UNTRUSTED_LISTENER":
            assert why(f"{host}:{port}", strangers.USER) is None


def test_who_listens_for_ipv6_alone_gets_no_ipv4() -> None:
    """The tables do not say that: there it counts as one who may."""
    with reserved_port() as reserving, listen("::", reserving.getsockname()[1], v6_only=True) as listening:
        assert why(f"127.0.0.1:{listening.getsockname()[1]}") == "UNREACHABLE"
        assert why(f"[::1]:{listening.getsockname()[1]}") is None


@needs_root
@pytest.mark.parametrize("looking", [over_netlink, in_tables])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "mapped"])
def test_a_connection_that_a_stranger_has_accepted_before(
    looking: Looking, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listened while the sidecar was away, and has gone. What goes over that connection still goes to it."""
    monkeypatch.setattr(listeners, "_way_to_look", lambda: looking)
    with strangers.listening("127.0.0.1") as stranger, socket.socket(family) as own:
        own.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", stranger.port))
        assert stranger.go_on() == "accepted"
        address = f"127.0.0.1:{stranger.port}"
        assert why(address) == "UNREACHABLE"
        with listen("127.0.0.1", stranger.port):
            assert why(address) == "UNTRUSTED_LISTENER"
            own.close()
            assert why(address) is None


def test_the_quickest_way_is_taken_that_finds_what_is_there() -> None:
    """Both ways are there on any Linux that tests run on, and netlink needs no table."""
    assert listeners._way_to_look() is over_netlink


def test_both_ways_find_the_same(shared_sidecar: Sidecar) -> None:
    port = SidecarAddress.parse(shared_sidecar.address).port
    here: Host = listeners._plain("127.0.0.1")
    found = []
    for looking in (over_netlink, in_tables):
        with looking() as look:
            found.append([look((here, port), (here, 0)), look((here, 1), (here, 0))])
    assert found == [[os.geteuid(), None]] * 2


@needs_root
async def test_a_producer_waits_until_the_stranger_has_gone(tmp_path: Path) -> None:
    with Sidecar(tmp_path, authentication="token") as sidecar:
        shows = Credentials(token_file=sidecar.token_file)
        async with Client(sidecar.address, shows) as client, client.producer("t", "p") as producer:
            assert (await (await producer.send(b"one"))).index == 0
            await asyncio.to_thread(sidecar.kill)
            with strangers.serving(SidecarAddress.parse(sidecar.address).port) as stranger:
                sent = await producer.send(b"two")
                with pytest.raises(SeqdedupeError, match="UNTRUSTED_LISTENER"):
                    await client.admin.version()
                # What it was shown: nobody has a token for it.
                async with Client(sidecar.address, Credentials()) as other:
                    with pytest.raises(SeqdedupeError):
                        await other.admin.version()
                assert stranger.said() == "GetVersion nothing"
            await asyncio.to_thread(sidecar.start)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                assert (await sent).index == 1


async def test_the_user_that_is_said(tmp_path: Path) -> None:
    assert Credentials(token="t", sidecar_user="root").trusted_users() == {0}
    assert Credentials(token="t", sidecar_user="54321").trusted_users() == {54_321}
    path = tmp_path / "token"
    path.write_text(SECRET)
    assert Credentials(token_file=path).trusted_users() == {path.stat().st_uid}
    with pytest.raises(SeqdedupeError, match="there is no user 'no-such-user'") as raised:
        Credentials(token="t", sidecar_user="no-such-user")
    assert raised.value.reason == "INVALID_CREDENTIALS"
