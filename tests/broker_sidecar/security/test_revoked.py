"""Certificates that are revoked, before and while their connections are open; lists that cannot be."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.x509.name import _ASN1Type
from grpc.experimental import session_cache

from broker_sidecar.security.authentication import Revoked
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.security.issuing import Issued, issue, of_server, revoke, subject_of
from tests.broker_sidecar.security.showing import bearer, rules_for_all, token_of, unary, wait_until
from tests.broker_sidecar.security.test_certificates import CREATE, VERSION, channel_to, code_of, tls_keys

AUTHORITY, OF_CLIENTS, OTHERS = trustme.CA(), trustme.CA(), trustme.CA()
REVOKED, LATER, GOOD = (issue(OF_CLIENTS, names=["shop.example"]) for _ in range(3))


def test_a_revoked_certificate_is_refused_also_on_an_open_connection(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    keys = tls_keys(folder, of_server(AUTHORITY))
    authorities = OF_CLIENTS.cert_pem.bytes() + OTHERS.cert_pem.bytes()
    (folder / "clients.pem").write_bytes(authorities)
    lists = folder / "revoked.pem"
    # Another authority's list names the same number: it is not this one's certificate.
    lists.write_bytes(revoke(OF_CLIENTS, REVOKED) + revoke(OTHERS, GOOD))
    keys |= {"tls_client_ca_file": folder / "clients.pem", "tls_client_crl_file": lists}
    keys["rules_file"] = rules_for_all(tmp_path)
    with Sidecar(tmp_path, authentication="token", **keys) as sidecar:
        token = token_of(sidecar)
        for client, code in ((GOOD, grpc.StatusCode.OK), (REVOKED, grpc.StatusCode.UNAUTHENTICATED)):
            for shown in ("", token):
                assert code_of(channel_to(sidecar, client, AUTHORITY), shown) is code
        with channel_to(sidecar, LATER, AUTHORITY) as later, channel_to(sidecar, GOOD, AUTHORITY) as good:
            create = unary(good, CREATE)
            create(admin_pb2.CreateTopicRequest(topic="t").SerializeToString(), timeout=TIMEOUT_SECONDS)
            streams: list[Any] = []
            for channel in (later, good):
                follow = read_pb2.ReadStreamRequest(topic="t", follow=True)
                streams.append(read_pb2_grpc.ReadServiceStub(channel).ReadStream(follow, timeout=TIMEOUT_SECONDS))
                streams[-1].initial_metadata()

            new = folder / "new.pem"
            new.write_bytes(revoke(OTHERS, LATER))
            os.replace(new, lists)
            wait_until(
                lambda: any("read again: the list of revoked certificates" in str(one["event"]) for one in sidecar.log)
            )
            # REVOKED is in no list any more; LATER is in one of another authority only.
            assert code_of(channel_to(sidecar, REVOKED, AUTHORITY), "") is grpc.StatusCode.OK
            for stream in streams:
                assert refused(lambda stream=stream: list(stream)).reason == "TOKEN_EXPIRED"  # type: ignore[misc]

            new.write_bytes(revoke(OF_CLIENTS, LATER))
            os.replace(new, lists)
            call = unary(later, VERSION)

            def is_refused() -> bool:
                try:
                    call(b"", timeout=TIMEOUT_SECONDS, metadata=bearer(token))
                except grpc.RpcError as e:
                    return bool(e.code() is grpc.StatusCode.UNAUTHENTICATED)
                return False

            wait_until(is_refused)
            unary(good, VERSION)(b"", timeout=TIMEOUT_SECONDS)


def test_a_revoked_intermediate_authority(tmp_path: Path) -> None:
    """Anyone who comes by way of it is refused, with the operator's token too, and in a resumed session of TLS."""
    folder = tmp_path / "tls"
    keys = tls_keys(folder, of_server(AUTHORITY))
    root = trustme.CA()
    good, bad = root.create_child_ca(), root.create_child_ca()
    root.cert_pem.write_to_path(folder / "clients.pem")
    lists = folder / "revoked.pem"
    lists.write_bytes(revoke(root))
    keys |= {"tls_client_ca_file": folder / "clients.pem", "tls_client_crl_file": lists}
    keys["rules_file"] = rules_for_all(tmp_path)
    sessions = session_cache.ssl_session_cache_lru(10)  # type: ignore[no-untyped-call]
    by_way_of = {one: of_client(one) for one in (good, bad)}
    # It shows its way up, and the other one that it does not need.
    both = Issued(by_way_of[good].certificate + bad.cert_pem.bytes(), by_way_of[good].key)

    def resuming() -> grpc.Channel:
        tls = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes(), by_way_of[bad].key, by_way_of[bad].certificate)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_session_cache", sessions)]
        # Sessions are kept by the host's name.
        return grpc.secure_channel(sidecar.address.replace("127.0.0.1", "localhost"), tls, options)

    with Sidecar(tmp_path, authentication="token", **keys) as sidecar:
        token = token_of(sidecar)
        # Before it is revoked.
        for client in (*by_way_of.values(), both):
            assert code_of(channel_to(sidecar, client, AUTHORITY), "") is grpc.StatusCode.OK
        assert code_of(resuming(), "") is grpc.StatusCode.OK
        new = folder / "new.pem"
        new.write_bytes(revoke(root, Issued(bad.cert_pem.bytes(), b"")))
        os.replace(new, lists)
        wait_until(
            lambda: any("read again: the list of revoked certificates" in str(one["event"]) for one in sidecar.log)
        )
        for shown in ("", token):
            assert code_of(channel_to(sidecar, by_way_of[good], AUTHORITY), shown) is grpc.StatusCode.OK
            assert code_of(channel_to(sidecar, by_way_of[bad], AUTHORITY), shown) is grpc.StatusCode.UNAUTHENTICATED
            assert code_of(channel_to(sidecar, both, AUTHORITY), shown) is grpc.StatusCode.UNAUTHENTICATED
            assert code_of(resuming(), shown) is grpc.StatusCode.UNAUTHENTICATED


def of_client(authority: trustme.CA) -> Issued:
    """With those between it and the root."""
    issued = authority.issue_cert("shop.example")
    return Issued(b"".join(pem.bytes() for pem in issued.cert_chain_pems), issued.private_key_pem.bytes())


def as_peer(client: Issued) -> dict[str, list[bytes]]:
    """What gRPC says of a connection with this certificate."""
    own, end, rest = client.certificate.partition(b"-----END CERTIFICATE-----\n")
    return {"x509_pem_cert": [own + end], "x509_pem_cert_chain": [rest], "peer_dns": [b"shop.example"]}


def are_revoked(folder: Path, authorities: Sequence[trustme.CA], lists: bytes, *clients: Issued) -> list[bool]:
    (folder / "clients.pem").write_bytes(b"".join(one.cert_pem.bytes() for one in authorities))
    (folder / "revoked.pem").write_bytes(lists)
    revoked = Revoked(folder / "revoked.pem", folder / "clients.pem", lambda: None)

    def is_revoked(client: Issued) -> bool:
        try:
            revoked.check(as_peer(client))
        except SeqdedupeError as e:
            return (e.reason, e.numbers["subject"]) == ("UNAUTHENTICATED", "shop.example")
        return False

    return [is_revoked(client) for client in clients]


@pytest.mark.parametrize("kind", [trustme.KeyType.ECDSA, trustme.KeyType.RSA], ids=["P-256", "RSA"])
def test_an_authority_that_gets_another_key(tmp_path: Path, kind: trustme.KeyType) -> None:
    """Both are there, under one name, and each signs lists for what either has issued."""
    old = trustme.CA(organization_name="o", organization_unit_name="u", key_type=kind)
    new = trustme.CA(organization_name="o", organization_unit_name="u")
    clients = [of_client(old), of_client(old), of_client(new), of_client(new)]
    for authorities in ((old, new), (new, old)):
        lists = revoke(new, clients[0], clients[2])
        assert are_revoked(tmp_path, authorities, lists, *clients) == [True, False, True, False]
        if kind is trustme.KeyType.ECDSA:
            lists = revoke(old, clients[1]) + revoke(new, clients[3])
            assert are_revoked(tmp_path, authorities, lists, *clients) == [False, True, False, True]


def test_an_authority_in_the_file_that_is_revoked(tmp_path: Path) -> None:
    """What it has issued is refused, and what another one of its name has issued is not."""
    root = trustme.CA()
    old = trustme.CA(root, organization_name="o", organization_unit_name="u")
    new = trustme.CA(root, organization_name="o", organization_unit_name="u")
    lists = revoke(root, Issued(old.cert_pem.bytes(), b""))
    clients = [Issued(one.issue_cert("shop.example").cert_chain_pems[0].bytes(), b"") for one in (root, old, new)]
    assert are_revoked(tmp_path, [root, old], lists, *clients) == [False, True, True]
    assert are_revoked(tmp_path, [root, old, new], lists, *clients) == [False, True, False]
    assert are_revoked(tmp_path, [root, old, new], revoke(root), *clients) == [False] * 3


SPELLINGS: dict[str, Callable[[str], tuple[str, _ASN1Type]]] = {
    "PrintableString": lambda text: (text, _ASN1Type.PrintableString),
    "BMPString": lambda text: (text, _ASN1Type.BMPString),
    "capitals": lambda text: (text.upper(), _ASN1Type.UTF8String),
    "spaces": lambda text: (f" {text.replace(' ', '  ')} ", _ASN1Type.UTF8String),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_authority_whose_name_is_written_otherwise(tmp_path: Path, spelling: str) -> None:
    """TLS takes a certificate that names its authority so, and its list names the certificate all the same."""
    authority = trustme.CA(organization_name="the o", organization_unit_name="the u")
    spell = SPELLINGS[spelling]
    name = x509.Name([x509.NameAttribute(said.oid, *spell(str(said.value))) for said in subject_of(authority)])
    assert name.public_bytes() != subject_of(authority).public_bytes()
    revoked, good = (issue(authority, names=["shop.example"], issuer=name) for _ in range(2))
    assert are_revoked(tmp_path, [authority], revoke(authority, revoked), revoked, good) == [True, False]
    assert is_taken_by_tls(authority, good)


def is_taken_by_tls(authority: trustme.CA, client: Issued) -> bool:
    """Whether gRPC has a connection with this certificate."""
    own = of_server(AUTHORITY)
    server = grpc.server(ThreadPoolExecutor(1))
    tls = grpc.ssl_server_credentials([(own.key, own.certificate)], authority.cert_pem.bytes(), True)
    port = server.add_secure_port("127.0.0.1:0", tls)
    server.start()
    shown = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes(), client.key, client.certificate)
    with grpc.secure_channel(f"127.0.0.1:{port}", shown) as channel:
        try:
            unary(channel, VERSION)(b"", timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as e:
            return bool(e.code() is grpc.StatusCode.UNIMPLEMENTED)
        finally:
            server.stop(None)
    return False


BAD_LISTS = {
    "none": (None, "cannot be read"),
    "empty": (b"", "holds no lists"),
    "noise": (b"\xff\x00" * 99, "holds no lists"),
    "a certificate": (GOOD.certificate, "holds no lists"),
    "half a list": (revoke(OF_CLIENTS, GOOD)[:200] + b"\n-----END X509 CRL-----\n", "holds other data"),
    "a list, and more": (revoke(OF_CLIENTS, GOOD) + b"more", "holds no lists"),
    "of another authority": (revoke(OTHERS, GOOD), "none of the authorities"),
    "with those of others": (revoke(OF_CLIENTS, GOOD, is_indirect=True), "of other authorities"),
    "out of date": (revoke(OF_CLIENTS, GOOD, ends=timedelta(days=-1)), "is out of date: its successor was due by"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_lists_that_cannot_be_are_named(tmp_path: Path, case: str) -> None:
    content, why = BAD_LISTS[case]
    OF_CLIENTS.cert_pem.write_to_path(tmp_path / "clients.pem")
    if content is not None:
        (tmp_path / "revoked.pem").write_bytes(content)
    with pytest.raises(SeqdedupeError, match=why) as raised:
        Revoked(tmp_path / "revoked.pem", tmp_path / "clients.pem", lambda: None)
    assert raised.value.reason == "INVALID_CONFIGURATION"


def test_a_list_that_another_key_has_signed_in_the_name_of_an_authority(tmp_path: Path) -> None:
    forger = trustme.CA(organization_name="o", organization_unit_name="u")
    honest = trustme.CA(organization_name="o", organization_unit_name="u")
    honest.cert_pem.write_to_path(tmp_path / "clients.pem")
    (tmp_path / "revoked.pem").write_bytes(revoke(forger, GOOD))
    with pytest.raises(SeqdedupeError, match="none of the authorities"):
        Revoked(tmp_path / "revoked.pem", tmp_path / "clients.pem", lambda: None)
    (tmp_path / "revoked.pem").write_bytes(revoke(honest, GOOD))
    Revoked(tmp_path / "revoked.pem", tmp_path / "clients.pem", lambda: None)
