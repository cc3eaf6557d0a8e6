"""What goes over the wire: the token with every call, and to whom; TLS, and what is said when it fails."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from seqdedupe.address import SidecarAddress
from seqdedupe.client import BrokerClient, Client, Credentials, SeqdedupeError, blocking
from seqdedupe.client.connection import new_channel
from seqdedupe.errors import ConfigurationError
from seqdedupe.testing import Sidecar
from tests.certificates import NOW, Authority, Issued
from tests.client.fronts import Front, fronts, in_order, move

SECRET = "s3cr3t-t0ken"
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
async def front(shared_sidecar: Sidecar) -> AsyncIterator[Front]:
    """Sees what is shown to a sidecar."""
    async with fronts(shared_sidecar.address, 1) as (one,):
        yield one


async def test_each_call_and_stream_carries_the_token_as_it_is_when_it_begins(
    front: Front, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    async with Client(front.address, Credentials(token_file=path)) as client:
        await client.admin.create_topic(topic)
        async with client.producer(topic, "p") as producer:
            await (await producer.send(b"one"))
            path.write_text("second\n")
            async with client.reader(topic) as reader:
                assert [message.payload async for message in reader] == [b"one"]
            # The stream was begun with the first one.
            await (await producer.send(b"two"))
        await client.admin.export_watermarks(topic, tmp_path / "watermarks")
        await client.admin.create_topic(f"{topic}-other")
        await client.admin.import_watermarks(f"{topic}-other", tmp_path / "watermarks")
    by_call = list(zip(front.calls, front.shown, strict=True))
    assert None not in front.shown
    for name in ("CreateTopic", "PublishStream", "Open"):
        assert (name, "Bearer first") in by_call
    for name in ("ReadStream", "GetLastMessageId", "ExportWatermarks", "CreateTopic", "ImportWatermarks"):
        assert (name, "Bearer second") in by_call


async def test_without_credentials_nothing_is_shown(front: Front, topic: str) -> None:
    async with Client(front.address, Credentials()) as client:
        await client.admin.create_topic(topic)
    assert set(front.shown) == {None}


async def test_a_thread_and_a_broker_show_it_too(front: Front) -> None:
    shows = Credentials(token=lambda: SECRET)

    def in_thread() -> None:
        with blocking.Client(front.address, shows) as client:
            client.admin.version()

    await asyncio.to_thread(in_thread)
    async with BrokerClient(front.address, shows) as broker:
        with pytest.raises(SeqdedupeError):  # that sidecar is none for brokers
            await broker.producer("t", "p")
    assert front.calls == ["GetVersion", "GetProducer"]
    assert front.shown == [f"Bearer {SECRET}"] * 2


@pytest.mark.parametrize("address", ["10.0.0.1:6660", "sidecar.example.org:6660", "[2001:db8::1]:6660", "0.0.0.0:6660"])
async def test_to_another_host_no_token_goes_without_tls(address: str, topic: str) -> None:
    shows = Credentials(token=SECRET)
    client = Client(address, shows)
    attempts: list[Callable[[], object]] = [
        lambda: client.admin.version(),
        lambda: client.producer(topic, "p").open(),
        lambda: client.reader(topic).next_batch(),
        lambda: BrokerClient(address, shows).producer(topic, "p"),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigurationError) as e:
            await attempt()  # type: ignore[misc]
        assert e.value.reason == "INSECURE_ADDRESS"
        assert SECRET not in str(e.value)
    for secure in (Credentials(token=SECRET, allow_insecure_token=True), Credentials()):
        await new_channel(SidecarAddress.parse(address), secure).close()


@pytest.mark.parametrize("address", ["127.0.0.1:6660", "localhost:6660", "[::1]:6660", "unix:/run/sidecar.sock"])
async def test_on_this_machine_it_goes_without_tls(address: str) -> None:
    await new_channel(SidecarAddress.parse(address), Credentials(token=SECRET)).close()


async def test_it_goes_to_a_listed_owner_and_to_no_other(shared_sidecar: Sidecar, topic: str) -> None:
    async with fronts(shared_sidecar.address, 3) as some:
        first, owner, stranger = in_order(some[:2], topic) + some[2:]
        async with Client([first.address, owner.address], Credentials(token=SECRET)) as client:
            move(some[:2], owner)
            await client.admin.create_topic(topic)
            assert (first.shown, owner.shown) == ([f"Bearer {SECRET}"], [f"Bearer {SECRET}"])
            owner.disown(stranger.address)
            first.disown(stranger.address)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.admin.topic(topic)
            assert first.calls[1:]
            assert owner.calls[1:]
        assert stranger.calls == []
        # Told of it, the client would have gone there.
        everywhere = [one.address for one in some]
        async with Client(everywhere, Credentials(token=SECRET)) as client:
            await client.admin.topic(topic)
        assert f"Bearer {SECRET}" in stranger.shown


# -- TLS ----------------------------------------------------------------------------------------------------------


def tls_of(issued: Issued, wanted: Authority | None = None) -> grpc.ServerCredentials:
    pair = issued.key_file.read_bytes(), issued.certificate_file.read_bytes()
    roots = wanted.ca_file.read_bytes() if wanted else None
    return grpc.ssl_server_credentials([pair], roots, wanted is not None)


async def test_publish_and_read_over_tls_with_token_and_certificate(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own")
    here = authority.issue("sidecar", "127.0.0.1", "localhost")
    shows = Credentials(
        token=SECRET,
        tls_ca_file=authority.ca_file,
        tls_certificate_file=own.certificate_file,
        tls_key_file=own.key_file,
    )
    async with (
        fronts(shared_sidecar.address, 1, tls_of(here, authority)) as (front,),
        Client(front.address.replace("127.0.0.1", "localhost"), shows) as client,
    ):
        async with client.producer(topic, "p") as producer:
            await (await producer.send(b"one"))
        async with client.reader(topic) as reader:
            assert [message.payload async for message in reader] == [b"one"]
        assert set(front.shown) == {f"Bearer {SECRET}"}


WRONG: dict[str, tuple[str, str, Callable[[Authority, Authority, Path], tuple[grpc.ServerCredentials, Credentials]]]]
WRONG = {
    "another authority's": (
        "TLS_FAILED",
        "does not trust the authority",
        lambda ours, other, _: (tls_of(other.issue("s", "127.0.0.1")), Credentials(tls_ca_file=ours.ca_file)),
    ),
    "of another host": (
        "TLS_FAILED",
        "does not name this host name",
        lambda ours, other, _: (tls_of(ours.issue("s", "example.org")), Credentials(tls_ca_file=ours.ca_file)),
    ),
    "of no host": (
        "TLS_FAILED",
        "does not name this host name",
        lambda ours, other, _: (tls_of(ours.issue("127.0.0.1")), Credentials(tls_ca_file=ours.ca_file)),
    ),
    "expired": (
        "TLS_FAILED",
        "has expired",
        lambda ours, other, _: (
            tls_of(ours.issue("s", "127.0.0.1", not_after=NOW - HOUR)),
            Credentials(tls_ca_file=ours.ca_file),
        ),
    ),
    "not valid yet": (
        "TLS_FAILED",
        "not valid yet",
        lambda ours, other, _: (
            tls_of(ours.issue("s", "127.0.0.1", not_before=NOW + HOUR)),
            Credentials(tls_ca_file=ours.ca_file),
        ),
    ),
    "no certificate of the client's": (
        "UNREACHABLE",
        "a valid certificate of the client",
        lambda ours, other, _: (tls_of(ours.issue("s", "127.0.0.1"), ours), Credentials(tls_ca_file=ours.ca_file)),
    ),
    "a certificate of a foreign client": (
        "UNREACHABLE",
        "a valid certificate of the client",
        lambda ours, other, _: (
            tls_of(ours.issue("s", "127.0.0.1"), ours),
            shows(ours, other.issue("foreign")),
        ),
    ),
    "no TLS by the client": (
        "UNREACHABLE",
        "want TLS",
        lambda ours, other, _: (tls_of(ours.issue("s", "127.0.0.1")), Credentials(token=SECRET)),
    ),
    "what is no certificate": (
        "TLS_FAILED",
        "PEM",
        lambda ours, other, folder: (
            tls_of(ours.issue("s", "127.0.0.1")),
            Credentials(tls_ca_file=written(folder / "ca.pem")),
        ),
    ),
    "the key of another certificate": (
        "TLS_FAILED",
        "PEM",
        lambda ours, other, _: (
            tls_of(ours.issue("s", "127.0.0.1")),
            shows(ours, Issued(ours.issue("a").certificate_file, ours.issue("b").key_file)),
        ),
    ),
}


def shows(ours: Authority, own: Issued) -> Credentials:
    return Credentials(tls_ca_file=ours.ca_file, tls_certificate_file=own.certificate_file, tls_key_file=own.key_file)


def written(path: Path) -> Path:
    path.write_text("no certificate")
    return path


@pytest.mark.parametrize("what", WRONG)
async def test_a_handshake_that_fails_says_why(shared_sidecar: Sidecar, tmp_path: Path, what: str) -> None:
    reason, hint, make = WRONG[what]
    tls, given = make(Authority(tmp_path), Authority(tmp_path, "other"), tmp_path)
    async with fronts(shared_sidecar.address, 1, tls) as (front,), Client(front.address, given) as client:
        with pytest.raises(SeqdedupeError) as e:
            await client.admin.version()
        assert e.value.reason == reason, e.value
        assert hint in e.value.hint, (e.value.hint, e.value)
        assert SECRET not in str(e.value)
        assert front.calls == []


async def test_tls_to_what_speaks_none_says_so(shared_sidecar: Sidecar, tmp_path: Path) -> None:
    given = Credentials(tls_ca_file=Authority(tmp_path).ca_file)
    async with Client(shared_sidecar.address, given) as client:
        with pytest.raises(SeqdedupeError) as e:
            await client.admin.version()
    assert e.value.reason == "TLS_FAILED"
    assert "speaks no TLS" in e.value.hint


async def test_replaced_tls_files_are_in_force_with_the_next_connection(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path
) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    given = shows(ours, other.issue("own"))
    tls = tls_of(ours.issue("sidecar", "127.0.0.1"), ours)
    async with (
        fronts(shared_sidecar.address, 1, tls) as (front,),
        Client(front.address, given) as client,
        Client(shared_sidecar.address) as inside,
    ):
        await inside.admin.create_topic(topic)
        producer, reader = client.producer(topic, "p"), client.reader(topic, follow=True)
        opening, reading = asyncio.create_task(producer.open()), asyncio.create_task(anext(reader))
        with pytest.raises(SeqdedupeError, match="UNREACHABLE"):
            await client.admin.version()
        ours.issue("own")  # into the same files
        await client.admin.version()
        await opening
        await (await producer.send(b"one"))
        assert (await reading).payload == b"one"
        await producer.close()
        await reader.close()
