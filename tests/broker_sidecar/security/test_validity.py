"""When credentials expire, as metrics show it, and whose expired tokens are still shown, as metrics and the log do."""

import math
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509

from broker_sidecar.security.authentication import OTHER, REPEAT_SECONDS, ExpiredTokens, Revoked
from broker_sidecar.security.tokens import LEEWAY_SECONDS, MAX_SUBJECTS, SignedTokens
from seqdedupe.errors import error
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.metrics.scraping import Page, scrape
from tests.broker_sidecar.security.issuing import Issued, issue, revoke
from tests.broker_sidecar.security.showing import rules_for_all, wait_until
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.broker_sidecar.security.test_certificates import code_of, tls_keys

ISSUER, STRANGER = Issuer("one"), Issuer("one")
DAY_SECONDS = 86_400
EXPIRY = "seqdedupe_credential_expiry_timestamp_seconds"
LIFETIME = "seqdedupe_credential_lifetime_seconds"
CALLS = "seqdedupe_expired_token_calls_total"


def signed_tokens(folder: Path) -> SignedTokens:
    return SignedTokens(write_keys(folder / "keys.json", [ISSUER.jwk()]), AUDIENCE, lambda: None)


def test_of_each_subject_the_latest_valid_token_counts(tmp_path: Path) -> None:
    tokens, now = signed_tokens(tmp_path), int(time.time())
    for subject, seconds in (("shop", 60), ("shop", DAY_SECONDS), ("bank", 3600), ("gone", 3600)):
        tokens.claims_of(ISSUER.token(sub=subject, exp=now + seconds, iat=now).encode(), "ipv4:127.0.0.1:1", now)
    tokens.claims_of(ISSUER.token(sub="no beginning", exp=now + 90, iat=None).encode(), "ipv4:127.0.0.1:1", now)
    found = {one.subject: one.validity for one in tokens.credentials(now)}
    assert {subject: one.ends_seconds - now - LEEWAY_SECONDS for subject, one in found.items()} == {
        "shop": DAY_SECONDS, "bank": 3600, "gone": 3600, "no beginning": 90,
    }  # fmt: skip
    assert found["shop"].starts_seconds == now
    assert found["no beginning"].starts_seconds == -math.inf
    assert {one.subject for one in tokens.credentials(now + 7200)} == {"shop"}


def test_tokens_of_many_subjects_have_few_series_and_those_near_their_end_are_among_them(tmp_path: Path) -> None:
    tokens, now = signed_tokens(tmp_path), int(time.time())
    begun = now - 99 * DAY_SECONDS
    for k in range(MAX_SUBJECTS + 5):
        tokens.claims_of(ISSUER.token(sub=f"hourly{k}", exp=now + 1800, iat=now - 1800).encode(), "ipv4:1:1", now)
    # It ends later than those, which are renewed as always.
    tokens.claims_of(ISSUER.token(sub="yearly", exp=now + DAY_SECONDS, iat=begun).encode(), "ipv4:1:1", now)
    found = tokens.credentials(now)
    assert len(found) == MAX_SUBJECTS
    assert found[0].subject == "yearly"


def test_a_token_that_ends_before_it_begins_breaks_nothing(tmp_path: Path) -> None:
    tokens, now = signed_tokens(tmp_path), int(time.time())
    tokens.claims_of(ISSUER.token(exp=now, iat=now + LEEWAY_SECONDS).encode(), "ipv4:127.0.0.1:1", now)
    [one] = tokens.credentials(now)
    assert one.validity.ends_seconds > one.validity.starts_seconds


def test_subjects_that_are_told_apart_are_few(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_seconds = 1000.0
    expired = ExpiredTokens(lambda: now_seconds)
    for k in range(2 * MAX_SUBJECTS):
        for _ in range(3):
            expired.add(error("TOKEN_EXPIRED", "it has expired", subject=f"s{k}", kind="jwt"), "ipv4:127.0.0.1:1")
    assert len(expired.calls) == MAX_SUBJECTS + 1
    assert expired.calls[OTHER] == 3 * MAX_SUBJECTS
    assert len(caplog.records) == MAX_SUBJECTS + 1
    now_seconds += REPEAT_SECONDS
    expired.add(error("TOKEN_EXPIRED", "it has expired", subject="s0", kind="jwt"), "ipv4:127.0.0.1:1")
    assert vars(caplog.records[-1])["calls"] == 3
    # An error that proves no subject, and one with another reason.
    expired.add(error("TOKEN_EXPIRED", "other tokens count now"), "ipv4:127.0.0.1:1")
    expired.add(error("UNAUTHENTICATED", "who is it?", subject="s0"), "ipv4:127.0.0.1:1")
    assert sum(expired.calls.values()) == 6 * MAX_SUBJECTS + 1


def test_whose_token_has_expired_is_known_if_its_signature_is_good(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "token_keys_file": write_keys(tmp_path / "keys.json", [ISSUER.jwk()]),
        "token_audience": AUDIENCE,
    }
    keys |= {"authentication": "token", "rules_file": rules_for_all(tmp_path), "metrics_listen": "127.0.0.1:0"}
    past, now = int(time.time()) - 3600, int(time.time())
    good = ISSUER.token(sub="shop", exp=now + DAY_SECONDS, iat=now)
    expired = ISSUER.token(sub="bank", exp=past, iat=past - 3600)
    with Sidecar(tmp_path, **keys) as sidecar:

        def shown(token: str) -> grpc.StatusCode:
            return code_of(grpc.insecure_channel(sidecar.address), token)

        assert shown(good) is grpc.StatusCode.OK
        calls = 5
        for _ in range(calls):
            assert shown(expired) is grpc.StatusCode.UNAUTHENTICATED
        for forged in (STRANGER.token(sub="forged", exp=past), ISSUER.token(sub="elsewhere", exp=past, aud="other")):
            assert shown(forged) is grpc.StatusCode.UNAUTHENTICATED
        page = scrape(sidecar)
        assert page.value(EXPIRY, credential="token", subject="shop") == now + DAY_SECONDS + LEEWAY_SECONDS
        assert page.labels(EXPIRY, "subject") == {"shop"}
        assert page.value(CALLS, subject="bank") == calls
        assert page.labels(CALLS, "subject") == {"bank", OTHER}
        assert page.value("seqdedupe_refusals_total", reason="TOKEN_EXPIRED") == calls
    [told] = [line for line in sidecar.log if "TOKEN_EXPIRED" in str(line["event"])]
    assert (told["level"], told["subject"], told["calls"]) == ("warning", "bank", 1)
    at = datetime.fromtimestamp(past, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"the token expired at {at}; its subject is 'bank'" in str(told["event"])
    assert str(told["address"]).startswith("ipv4:127.0.0.1")
    assert not any(name in str(line) for line in sidecar.log for name in ("forged", "elsewhere"))


def test_certificates_and_lists_and_what_they_are_renewed_with(tmp_path: Path) -> None:
    authority, of_clients = trustme.CA(), trustme.CA()
    folder = tmp_path / "tls"

    def server(days: int) -> Issued:
        return issue(authority, names=["localhost"], ends=timedelta(days=days))

    keys = tls_keys(folder, server(5))
    of_clients.cert_pem.write_to_path(str(folder / "clients.pem"))
    lists = folder / "revoked.pem"
    lists.write_bytes(revoke(of_clients, ends=timedelta(days=3)))
    keys |= {"tls_client_ca_file": folder / "clients.pem", "tls_client_crl_file": lists}
    keys |= {"rules_file": rules_for_all(tmp_path), "metrics_listen": "127.0.0.1:0"}
    with Sidecar(tmp_path, authentication="token", **keys) as sidecar:
        page = scrape(sidecar)
        assert days_left(page, "server_certificate") == 5
        assert days_left(page, "revocation_list") == 3
        assert page.value(LIFETIME, credential="server_certificate") == 6 * DAY_SECONDS
        assert page.value(LIFETIME, credential="revocation_list") == 3 * DAY_SECONDS + 3600
        ends = x509.load_pem_x509_certificate(of_clients.cert_pem.bytes()).not_valid_after_utc
        assert page.value(EXPIRY, credential="client_authority") == ends.timestamp()

        lists.write_bytes(revoke(of_clients, ends=timedelta(days=9)))
        server(40).write(folder)
        wait_until(lambda: days_left(scrape(sidecar), "revocation_list") == 9)
        wait_until(lambda: days_left(scrape(sidecar), "server_certificate") == 40)


def test_a_list_with_the_same_names_for_longer_ends_no_streams(tmp_path: Path) -> None:
    authority, changes = trustme.CA(), 0
    client = issue(authority, names=["shop.example"])
    lists, authorities = tmp_path / "revoked.pem", tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(str(authorities))

    def changed() -> None:
        nonlocal changes
        changes += 1

    lists.write_bytes(revoke(authority, ends=timedelta(days=1)))
    revoked = Revoked(lists, authorities, changed)
    for ends, names, expected in ((2, [], 0), (2, [client], 1), (3, [client], 1)):
        lists.write_bytes(revoke(authority, *names, ends=timedelta(days=ends)))
        revoked.watched.reload()
        found = revoked.watched.value.validity
        assert found is not None
        assert round((found.ends_seconds - time.time()) / DAY_SECONDS) == ends
        assert changes == expected


def days_left(page: Page, credential: str) -> int:
    return round((page.value(EXPIRY, credential=credential) - time.time()) / DAY_SECONDS)
