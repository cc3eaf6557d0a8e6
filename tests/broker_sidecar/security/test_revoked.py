"""Certificates that are revoked, before and while their connections are open; lists that cannot be."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from broker_sidecar.security.revoked import Revoked
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.security.issuing import issue, of_server, revoke
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
            wait_until(lambda: any("revoked certificates was read again" in str(one["event"]) for one in sidecar.log))
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


BAD_LISTS = {
    "none": (None, "cannot be read"),
    "empty": (b"", "holds no lists"),
    "noise": (b"\xff\x00" * 99, "holds no lists"),
    "a certificate": (GOOD.certificate, "holds no lists"),
    "half a list": (revoke(OF_CLIENTS, GOOD)[:200] + b"\n-----END X509 CRL-----\n", "holds something else"),
    "a list, and more": (revoke(OF_CLIENTS, GOOD) + b"more", "holds no lists"),
    "of another authority": (revoke(OTHERS, GOOD), "none of the authorities"),
    "out of date": (revoke(OF_CLIENTS, GOOD, ends=timedelta(days=-1)), "was to be replaced by"),
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
