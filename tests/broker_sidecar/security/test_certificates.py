"""TLS: what is spoken, whose certificates are taken, and certificates that change under open streams."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from grpc.experimental import session_cache

from broker_sidecar.config import Config
from broker_sidecar.security.authentication import Certificates, name_in
from seqdedupe.errors import EXIT_WRONG, SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.reflected import Reflected
from tests.broker_sidecar.security.issuing import Issued, issue, of_server, revoke
from tests.broker_sidecar.security.showing import bearer, rules_for_all, token_of, unary, wait_until

VERSION = "/seqdedupe.v1.AdminService/GetVersion"
CREATE = "/seqdedupe.v1.AdminService/CreateTopic"
TERM_SECONDS = 10
"""For a certificate that is to end: time enough for a first call."""
AUTHORITY, OTHER_AUTHORITY, OF_CLIENTS = trustme.CA(), trustme.CA(), trustme.CA()


def tls_keys(folder: Path, issued: Issued) -> dict[str, Any]:
    """The sidecar's keys for a certificate, which is written there."""
    folder.mkdir(exist_ok=True)
    issued.write(folder)
    return {"tls_certificate_file": folder / "certificate.pem", "tls_key_file": folder / "key.pem"}


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that speaks TLS."""
    folder = tmp_path_factory.mktemp("encrypted")
    with Sidecar(folder, authentication="token", **tls_keys(folder / "tls", of_server(AUTHORITY))) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One that wants certificates of its clients too."""
    folder = tmp_path_factory.mktemp("mutual")
    keys = tls_keys(folder / "tls", of_server(AUTHORITY))
    OF_CLIENTS.cert_pem.write_to_path(folder / "tls" / "clients.pem")
    keys |= {"tls_client_ca_file": folder / "tls" / "clients.pem", "rules_file": rules_for_all(folder)}
    with Sidecar(folder, authentication="token", **keys) as sidecar:
        yield sidecar


def channel_to(sidecar: Sidecar, client: Issued | None = None, authority: trustme.CA = AUTHORITY) -> grpc.Channel:
    shown = (client.key, client.certificate) if client is not None else ()
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *shown)
    return grpc.secure_channel(sidecar.address, credentials, [("grpc.use_local_subchannel_pool", 1)])


def code_of(channel: grpc.Channel, token: str) -> grpc.StatusCode:
    """What becomes of a call."""
    with channel:
        try:
            unary(channel, VERSION)(b"", timeout=TIMEOUT_SECONDS, metadata=bearer(token) if token else ())
        except grpc.RpcError as e:
            return e.code()
        return grpc.StatusCode.OK


def test_a_call_over_tls_and_none_without(encrypted: Sidecar) -> None:
    token = token_of(encrypted)
    assert code_of(channel_to(encrypted), token) is grpc.StatusCode.OK
    assert code_of(channel_to(encrypted), "") is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(grpc.insecure_channel(encrypted.address), token) is grpc.StatusCode.UNAVAILABLE
    assert code_of(channel_to(encrypted, authority=OTHER_AUTHORITY), token) is grpc.StatusCode.UNAVAILABLE
    # A certificate that nobody asked for makes nobody of anybody.
    assert code_of(channel_to(encrypted, issue(AUTHORITY, names=["a.example"])), "") is grpc.StatusCode.UNAUTHENTICATED


def test_reflection_and_json_over_tls_with_a_token(encrypted: Sidecar) -> None:
    """What `grpcurl -H "authorization: Bearer …"` does, from the list of services to a call."""
    shown = grpc.access_token_call_credentials(token_of(encrypted))
    tls = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes())
    with grpc.secure_channel(encrypted.address, grpc.composite_channel_credentials(tls, shown)) as channel:
        reflected = Reflected(channel)
        assert "seqdedupe.v1.AdminService" in reflected.services()
        calls = {method.name: method for method in reflected.service("seqdedupe.v1.AdminService").methods}
        made = reflected.call(calls["CreateTopic"], {"topic": "by-grpcurl"})
        assert made["topic"]["name"] == "persistent://public/default/by-grpcurl"
        names = [topic["name"] for topic in reflected.call(calls["ListTopics"], {})["topics"]]
        assert made["topic"]["name"] in names
    with channel_to(encrypted) as channel, pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        Reflected(channel).services()


def test_what_openssl_sees(encrypted: Sidecar, tmp_path: Path) -> None:
    AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")

    def session(*options: str) -> str:
        command = ["openssl", "s_client", "-connect", encrypted.address, "-CAfile", str(tmp_path / "ca.pem"), *options]
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
        return (ran.stdout + ran.stderr).decode(errors="replace")

    # With security level 0 it is the server that refuses, not this client.
    weak = ("-cipher", "ALL:@SECLEVEL=0")
    for version, is_spoken in (("-tls1_3", True), ("-tls1_2", True), ("-tls1_1", False), ("-tls1", False)):
        said = session(version, "-alpn", "h2", "-verify_return_error", *(() if is_spoken else weak))
        assert ("ALPN protocol: h2" in said) == is_spoken, said
        assert ("Verify return code: 0 (ok)" in said and "BEGIN CERTIFICATE" in said) == is_spoken, said
    assert "ALPN protocol: h2" not in session("-alpn", "http/1.1")
    for cipher in ("NULL", "RC4", "3DES", "aNULL", "kRSA"):
        said = session("-tls1_2", "-cipher", f"{cipher}:@SECLEVEL=0")
        assert "BEGIN CERTIFICATE" not in said, cipher
    assert re.search(r"Cipher(?: is|\s*:) ECDHE-", session("-tls1_2"))


GOOD_CLIENTS = {
    "spiffe://example.org/shop": issue(OF_CLIENTS, uris=["spiffe://example.org/shop"], names=["shop.example"]),
    "shop.example": issue(OF_CLIENTS, names=["shop.example", "second.example"]),
}
BAD_CLIENTS = {
    "without SAN": issue(OF_CLIENTS),
    "with two URIs": issue(OF_CLIENTS, uris=["spiffe://example.org/a", "spiffe://example.org/b"]),
    "with the operator's name": issue(OF_CLIENTS, names=["operator"]),
    "with everybody's name": issue(OF_CLIENTS, names=["anonymous"]),
}
REFUSED_CLIENTS = {
    "of another authority": issue(OTHER_AUTHORITY, names=["shop.example"]),
    "of the server's authority": issue(AUTHORITY, names=["shop.example"]),
    "expired": issue(OF_CLIENTS, names=["shop.example"], begins=timedelta(days=-3), ends=timedelta(days=-2)),
    "from the future": issue(OF_CLIENTS, names=["shop.example"], begins=timedelta(days=2), ends=timedelta(days=3)),
    "none": None,
}


@pytest.mark.parametrize("name", GOOD_CLIENTS)
def test_a_client_is_who_its_certificate_says(mutual: Sidecar, name: str) -> None:
    client = GOOD_CLIENTS[name]
    assert code_of(channel_to(mutual, client), "") is grpc.StatusCode.OK
    # A token that is shown counts, and a wrong one is not made good by the certificate.
    assert code_of(channel_to(mutual, client), token_of(mutual)) is grpc.StatusCode.OK
    assert code_of(channel_to(mutual, client), "wrong") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("case", BAD_CLIENTS)
def test_a_certificate_that_does_not_say_who(mutual: Sidecar, case: str) -> None:
    assert code_of(channel_to(mutual, BAD_CLIENTS[case]), "") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("case", REFUSED_CLIENTS)
def test_whoever_has_no_certificate_that_counts_is_not_talked_to(mutual: Sidecar, case: str) -> None:
    assert code_of(channel_to(mutual, REFUSED_CLIENTS[case]), token_of(mutual)) is grpc.StatusCode.UNAVAILABLE


def test_the_name_is_the_uri_or_else_the_first_dns_name() -> None:
    assert name_in({"peer_uri": [b"spiffe://a/b"], "peer_dns": [b"c.example"]}) == "spiffe://a/b"
    assert name_in({"peer_dns": [b"c.example", b"d.example"]}) == "c.example"
    assert name_in({"peer_dns": [b"c" * 255]}) == "c" * 255
    nobody = [{"peer_dns": [name]} for name in (b"", b"a\nb", b"a\0b", b"\xff", "a\u202eb".encode(), b"c" * 256)]
    several = {"peer_uri": [b"a:b", b"c:d"], "peer_dns": [b"e.example"]}
    for peer in ({}, {"x509_common_name": [b"c.example"]}, several, *nobody):
        with pytest.raises(SeqdedupeError, match="client's certificate") as raised:
            name_in(peer)
        assert raised.value.reason == "UNAUTHENTICATED"


def test_another_certificate_under_open_streams(tmp_path: Path) -> None:
    """What is open goes on, new connections see the new one; a bad one changes nothing, and is reported."""
    folder = tmp_path / "tls"
    keys = tls_keys(folder, of_server(AUTHORITY))
    with Sidecar(tmp_path, authentication="token", **keys) as sidecar:
        token = token_of(sidecar)
        shown: dict[str, Any] = {"metadata": bearer(token), "timeout": TIMEOUT_SECONDS}
        with channel_to(sidecar) as open_channel:
            create = unary(open_channel, CREATE)
            create(admin_pb2.CreateTopicRequest(topic="t").SerializeToString(), **shown)
            follow = read_pb2.ReadStreamRequest(topic="t", follow=True)
            stream = read_pb2_grpc.ReadServiceStub(open_channel).ReadStream(follow, **shown)
            stream.initial_metadata()

            # A certificate without its key, for as long as somebody needs to look: nothing happens.
            replace(folder, Issued(of_server(OTHER_AUTHORITY).certificate, (folder / "key.pem").read_bytes()))
            wait_until(
                lambda: any("former version of TLS stays in force" in str(entry["event"]) for entry in sidecar.log)
            )
            assert code_of(channel_to(sidecar), token) is grpc.StatusCode.OK

            replace(folder, of_server(OTHER_AUTHORITY))
            wait_until(lambda: any("read again: TLS" in str(entry["event"]) for entry in sidecar.log))
            # gRPC asks for news at each new connection, and uses them from the next one on at the latest.
            wait_until(lambda: code_of(channel_to(sidecar, authority=OTHER_AUTHORITY), token) is grpc.StatusCode.OK)
            assert code_of(channel_to(sidecar), token) is grpc.StatusCode.UNAVAILABLE
            assert stream.is_active()
            unary(open_channel, VERSION)(b"", **shown)
            stream.cancel()


@pytest.mark.parametrize("seconds", [0, 3600], ids=["after all connections", "control: within an hour"])
def test_a_resumed_session_does_not_outlive_its_certificate(tmp_path: Path, seconds: int) -> None:
    """TLS does not look at the certificate again."""
    keys = tls_keys(tmp_path / "tls", of_server(AUTHORITY))
    OF_CLIENTS.cert_pem.write_to_path(tmp_path / "tls" / "clients.pem")
    keys |= {"tls_client_ca_file": tmp_path / "tls" / "clients.pem", "rules_file": rules_for_all(tmp_path)}
    environment = with_constants.environment(security__authentication__LONGEST_CONNECTION_SECONDS=seconds)
    sessions = session_cache.ssl_session_cache_lru(10)  # type: ignore[no-untyped-call]
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_session_cache", sessions)]

    def resuming() -> grpc.Channel:
        tls = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes(), client.key, client.certificate)
        # Sessions are kept by the host's name.
        return grpc.secure_channel(sidecar.address.replace("127.0.0.1", "localhost"), tls, options)

    module = with_constants.MODULE
    with Sidecar(tmp_path, authentication="token", module=module, environment=environment, **keys) as sidecar:
        ends = timedelta(seconds=TERM_SECONDS)
        client = issue(OF_CLIENTS, names=["shop.example"], ends=ends)
        until = time.time() + TERM_SECONDS
        assert code_of(resuming(), "") is grpc.StatusCode.OK
        wait_until(lambda: time.time() > until)
        expected = grpc.StatusCode.OK if seconds else grpc.StatusCode.UNAUTHENTICATED
        assert code_of(resuming(), "") is expected
        assert code_of(channel_to(sidecar, client), "") is grpc.StatusCode.UNAVAILABLE


def test_a_unix_socket_beside_tls(tmp_path: Path) -> None:
    """Over it nobody needs a certificate, but the token all the same."""
    keys = tls_keys(tmp_path / "tls", of_server(AUTHORITY))
    OF_CLIENTS.cert_pem.write_to_path(tmp_path / "tls" / "clients.pem")
    (tmp_path / "tls" / "revoked.pem").write_bytes(revoke(OF_CLIENTS))
    keys |= {"tls_client_ca_file": tmp_path / "tls" / "clients.pem", "rules_file": rules_for_all(tmp_path)}
    keys |= {"tls_client_crl_file": tmp_path / "tls" / "revoked.pem", "also_listen": f"unix:{tmp_path}/s"}
    with Sidecar(tmp_path, authentication="token", **keys) as sidecar:
        token = token_of(sidecar)
        assert code_of(channel_to(sidecar, GOOD_CLIENTS["shop.example"]), "") is grpc.StatusCode.OK
        assert code_of(channel_to(sidecar), token) is grpc.StatusCode.UNAVAILABLE
        for shown, code in ((token, grpc.StatusCode.OK), ("", grpc.StatusCode.UNAUTHENTICATED)):
            assert code_of(grpc.insecure_channel(f"unix:{tmp_path}/s"), shown) is code


def replace(folder: Path, issued: Issued) -> None:
    new = folder.with_name("new")
    new.mkdir(exist_ok=True)
    issued.write(new)
    for name in ("certificate.pem", "key.pem"):
        os.replace(new / name, folder / name)


def of_key(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def locked(issued: Issued) -> bytes:
    """The key, with a password."""
    key = load_pem_private_key(issued.key, None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))


GOOD = of_server(AUTHORITY)
PAST = issue(AUTHORITY, names=["localhost"], begins=timedelta(days=-3), ends=timedelta(days=-2))
FUTURE = issue(AUTHORITY, names=["localhost"], begins=timedelta(days=2), ends=timedelta(days=3))
BAD_FILES: dict[str, tuple[bytes | None, bytes | None, bytes | None, str]] = {
    "no certificate": (None, GOOD.key, None, "certificate.pem cannot be read"),
    "no key": (GOOD.certificate, None, None, "key.pem cannot be read"),
    "an empty certificate": (b"", GOOD.key, None, "certificate.pem holds no certificates"),
    "an empty key": (GOOD.certificate, b"", None, "key.pem holds no private key"),
    "half a certificate": (GOOD.certificate[:300], GOOD.key, None, "certificate.pem holds no certificates"),
    "noise": (b"\xff\x00" * 99, GOOD.key, None, "certificate.pem holds no certificates"),
    "the key for the certificate": (GOOD.key, GOOD.key, None, "certificate.pem holds no certificates"),
    "the certificate for the key": (GOOD.certificate, GOOD.certificate, None, "key.pem holds no private key"),
    "a key with a password": (GOOD.certificate, locked(GOOD), None, "key.pem holds no private key"),
    "another key": (GOOD.certificate, of_server(AUTHORITY).key, None, "does not fit the key"),
    "a key that gRPC has not": (GOOD.certificate, of_key(ed25519.Ed25519PrivateKey.generate()), None, "not fit the"),
    "an expired certificate": (*PAST, None, "is valid only from"),
    "one that is not valid yet": (*FUTURE, None, "is valid only from"),
    "another curve": (
        *issue(AUTHORITY, names=["localhost"], key=ec.generate_private_key(ec.SECP521R1())), None, "does not accept"
    ),
    "no authorities": (*GOOD, b"", "clients.pem holds no certificates"),
    "a key as authority": (*GOOD, GOOD.key, "clients.pem holds no certificates"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_cannot_be_are_named(tmp_path: Path, case: str) -> None:
    certificate, key, authorities, why = BAD_FILES[case]
    for name, content in (("certificate.pem", certificate), ("key.pem", key), ("clients.pem", authorities)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    config = Config(
        tls_certificate_file=str(tmp_path / "certificate.pem"),
        tls_key_file=str(tmp_path / "key.pem"),
        tls_client_ca_file="" if authorities is None else str(tmp_path / "clients.pem"),
    )
    with pytest.raises(SeqdedupeError) as raised:
        Certificates(config)
    assert raised.value.reason == "INVALID_CONFIGURATION"
    assert why in raised.value.message
    assert "PRIVATE KEY" not in raised.value.message


def test_a_start_with_bad_files_is_one_clear_line(tmp_path: Path) -> None:
    keys = tls_keys(tmp_path / "tls", Issued(GOOD.certificate, of_server(AUTHORITY).key))
    sidecar = Sidecar(tmp_path, authentication="token", **keys)
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    [line] = sidecar.errors
    assert "does not fit the key" in line
    assert "INVALID_CONFIGURATION" in line


def test_a_refused_call_is_told_without_the_token(encrypted: Sidecar) -> None:
    with channel_to(encrypted) as channel:
        answer = refused(lambda: unary(channel, VERSION)(b"", timeout=TIMEOUT_SECONDS, metadata=bearer("wrong")))
    assert answer.reason == "UNAUTHENTICATED"
