"""Tokens that expire and connections that end of age: clients of a real sidecar go on, nothing is lost or doubled."""

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import trustme

from broker_sidecar.security.tokens import LEEWAY_SECONDS
from seqdedupe.client import Client, Credentials, ProducerConfig
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.security.issuing import of_server
from tests.broker_sidecar.security.showing import bearer, rules_for_all, token_of, unary
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.broker_sidecar.with_constants import MODULE, environment
from tests.client.helpers import until

FEW = ProducerConfig(max_batch_rows=5, delivery_timeout_seconds=None)
ISSUER = Issuer("key")
ENDINGS = 3
"""This many times something ends under each client."""


def signed(folder: Path, keys: Path) -> dict[str, Any]:
    """The sidecar's keys so that signed tokens are taken."""
    rules = rules_for_all(folder)
    return {"authentication": "token", "token_keys_file": keys, "token_audience": AUDIENCE, "rules_file": rules}


async def publish_and_follow(address: str, shows: Credentials, is_over: asyncio.Event) -> None:
    """Publishes until it is over, and reads along: each message is there once, in order."""
    sent = 0
    read: list[int] = []

    async def follow(client: Client) -> None:
        async with client.reader("t", 0, follow=True) as reader:
            async for message in reader:
                read.append(message.sequence_id)  # noqa: PERF401 (it never ends by itself)

    async with Client(address, shows) as client, client.producer("t", "p", FEW) as producer:
        following = asyncio.ensure_future(follow(client))
        while not is_over.is_set():
            await producer.send(b"message", sequence_id=sent)
            sent += 1
            await asyncio.sleep(0.002)
        await producer.flush()
        await until(lambda: len(read) >= sent or following.done())
        following.cancel()
        await asyncio.wait({following})
    assert read == list(range(sent))
    assert sent > ENDINGS


async def test_clients_go_on_when_their_tokens_expire(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", [ISSUER.jwk()])
    issued: list[str] = []

    def issue() -> str:
        """A token that is taken for one or two seconds more."""
        if not issued or time.time() > ends_at(issued[-1]):
            issued.append(ISSUER.token(exp=int(time.time()) + 2 - LEEWAY_SECONDS))
        return issued[-1]

    with Sidecar(tmp_path, **signed(tmp_path, keys)) as sidecar:
        is_over = asyncio.Event()
        working = asyncio.ensure_future(publish_and_follow(sidecar.address, Credentials(token=issue), is_over))
        await until(lambda: len(issued) > ENDINGS or working.done())
        is_over.set()
        await working


def ends_at(token: str) -> float:
    import jwt

    return float(jwt.decode(token, options={"verify_signature": False})["exp"]) + LEEWAY_SECONDS


def test_a_stream_ends_with_its_token_and_not_before(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", [ISSUER.jwk()])
    with Sidecar(tmp_path, **signed(tmp_path, keys)) as sidecar, grpc.insecure_channel(sidecar.address) as channel:
        operator: dict[str, Any] = {"metadata": bearer(token_of(sidecar)), "timeout": TIMEOUT_SECONDS}
        request = admin_pb2.CreateTopicRequest(topic="t").SerializeToString()
        unary(channel, "/seqdedupe.v1.AdminService/CreateTopic")(request, **operator)
        reading = read_pb2_grpc.ReadServiceStub(channel)
        follow = read_pb2.ReadStreamRequest(topic="t", follow=True)
        stays = reading.ReadStream(follow, **operator)
        stays.initial_metadata()
        token = ISSUER.token(exp=int(time.time()) + 2 - LEEWAY_SECONDS)
        ends = reading.ReadStream(follow, metadata=bearer(token), timeout=TIMEOUT_SECONDS)
        answer = refused(lambda: list(ends))
        assert time.time() >= ends_at(token) - 0.1
        assert (answer.reason, answer.code) == ("TOKEN_EXPIRED", grpc.StatusCode.UNAUTHENTICATED)
        assert answer.retry_delay_ms == 0
        at = datetime.fromtimestamp(ends_at(token) - LEEWAY_SECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (answer.numbers["subject"], answer.numbers["expired_at"]) == ("shop", at)
        again = refused(lambda: list(reading.ReadStream(follow, metadata=bearer(token), timeout=TIMEOUT_SECONDS)))
        assert again.reason == "TOKEN_EXPIRED"
        assert stays.is_active()
        # When the keys change, those that were judged by the former ones show their tokens again.
        shown = reading.ReadStream(follow, metadata=bearer(ISSUER.token()), timeout=TIMEOUT_SECONDS)
        shown.initial_metadata()
        write_keys(keys, [Issuer("other").jwk()])
        assert refused(lambda: list(shown)).reason == "TOKEN_EXPIRED"
        forgotten = refused(
            lambda: list(reading.ReadStream(follow, metadata=bearer(ISSUER.token()), timeout=TIMEOUT_SECONDS))
        )
        assert forgotten.reason == "UNAUTHENTICATED"
        assert stays.is_active()
        stays.cancel()


async def test_clients_go_on_when_their_connections_are_old(tmp_path: Path) -> None:
    authority = trustme.CA()
    of_server(authority).write(tmp_path)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    changed = environment(
        security__authentication__MAX_CONNECTION_AGE_SECONDS=1, security__authentication__CONNECTION_GRACE_SECONDS=1
    )
    with Sidecar(
        tmp_path,
        module=MODULE,
        environment=changed,
        authentication="token",
        tls_certificate_file=tmp_path / "certificate.pem",
        tls_key_file=tmp_path / "key.pem",
    ) as sidecar:
        shows = Credentials(token_file=sidecar.token_file, tls_ca_file=tmp_path / "ca.pem")
        is_over = asyncio.Event()
        working = asyncio.ensure_future(publish_and_follow(sidecar.address, shows, is_over))
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        for _ in range(ENDINGS):
            # A stream that nobody ends is ended, with its connection.
            async with grpc.aio.secure_channel(sidecar.address, credentials) as channel:
                watch: Any = watching(channel)(b"", timeout=TIMEOUT_SECONDS)
                assert await watch.read()
                assert await ended(watch) is grpc.StatusCode.UNAVAILABLE
        is_over.set()
        await working


def watching(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream("/grpc.health.v1.Health/Watch")


async def ended(stream: Any) -> grpc.StatusCode:
    try:
        while True:
            if await stream.read() is grpc.aio.EOF:
                return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as e:
        return e.code()
