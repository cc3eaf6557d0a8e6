"""Tokens that others sign: those that are taken, and all the ways to get in without one."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from broker_sidecar.security import tokens
from broker_sidecar.security.tokens import LEEWAY_SECONDS, Claims, SignedTokens, read_keys, verify
from seqdedupe.errors import SeqdedupeError
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys

HOUR = 3600
HERE = "ipv4:127.0.0.1:50000"
ED, EC, RSA = Issuer("ed"), Issuer("ec", "ES256"), Issuer("rsa", "RS256")
ISSUERS = {issuer.kid: issuer for issuer in (ED, EC, RSA)}
FOREIGN = {kid: Issuer(kid, issuer.algorithm) for kid, issuer in ISSUERS.items()}
"""Others that say they are those."""


@pytest.fixture
def keys(tmp_path: Path) -> tokens.Keys:
    return read_keys(write_keys(tmp_path / "keys.json", [issuer.jwk() for issuer in ISSUERS.values()]))


def why(keys: tokens.Keys, token: str | bytes) -> str:
    """For what reason the token is refused."""
    shown = token if isinstance(token, bytes) else token.encode()
    with pytest.raises(SeqdedupeError) as raised:
        verify(shown, keys, AUDIENCE)
    assert shown.decode("latin-1") not in str(raised.value) or len(shown) < len("a.b.c")
    return raised.value.reason


def encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("kid", ISSUERS)
def test_a_valid_token_says_who_and_until_when(keys: tokens.Keys, kid: str) -> None:
    issued = int(time.time())
    ends = issued + HOUR
    token = ISSUERS[kid].token(sub="spiffe://example.org/shop", exp=ends, iat=issued)
    claims = verify(token.encode(), keys, AUDIENCE)
    assert claims == Claims("spiffe://example.org/shop", ends + LEEWAY_SECONDS, issued)
    assert verify(ISSUERS[kid].token(aud=["other", AUDIENCE]).encode(), keys, AUDIENCE).subject == "shop"


@pytest.mark.parametrize("kid", ISSUERS)
def test_one_that_is_signed_with_another_key_is_refused(keys: tokens.Keys, kid: str) -> None:
    assert why(keys, FOREIGN[kid].token()) == "UNAUTHENTICATED"
    # Expired besides: nobody learns that from a forged one.
    assert why(keys, FOREIGN[kid].token(exp=1)) == "UNAUTHENTICATED"
    head, said, signature = ISSUERS[kid].token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(said + "=="))
    assert why(keys, ".".join([head, encoded(claims | {"sub": "operator"}), signature])) == "UNAUTHENTICATED"
    assert why(keys, ".".join([head, said, ""])) == "UNAUTHENTICATED"
    assert why(keys, ".".join([head, said, FOREIGN[kid].token().rpartition(".")[2]])) == "UNAUTHENTICATED"


@pytest.mark.parametrize("kid", ISSUERS)
@pytest.mark.parametrize("other", ["none", "None", "HS256", "HS512", "RS256", "ES256", "EdDSA", "PS256", "ES384"])
def test_the_header_chooses_no_algorithm(keys: tokens.Keys, kid: str, other: str) -> None:
    """The public key as the secret of an HMAC, in all the forms in which it is known; no signature at all; others."""
    issuer = ISSUERS[kid]
    if other == issuer.algorithm:
        return
    said = encoded({"sub": "operator", "aud": AUDIENCE, "exp": int(time.time()) + HOUR})
    for header in ({"alg": other, "kid": kid}, {"alg": other, "kid": kid, "jwk": FOREIGN[kid].jwk()}):
        signed = f"{encoded(header)}.{said}"
        assert why(keys, f"{signed}.") == "UNAUTHENTICATED"
        public = issuer.key.public_key()
        for secret in (
            json.dumps(issuer.jwk()).encode(),
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        ):
            for algorithm in ("HS256", "HS512"):
                hmac = jwt.get_algorithm_by_name(algorithm)
                made = base64.urlsafe_b64encode(hmac.sign(signed.encode(), secret)).rstrip(b"=").decode()
                assert why(keys, f"{signed}.{made}") == "UNAUTHENTICATED"


BAD_CLAIMS: dict[str, dict[str, Any]] = {
    "no subject": {"sub": None},
    "an empty subject": {"sub": ""},
    "a subject with a control character": {"sub": "shop\n"},
    "a subject that turns the writing": {"sub": "shop\u202e"},
    "half of a character": {"sub": "\ud800"},
    "a long subject": {"sub": "s" * 256},
    "no audience": {"aud": None},
    "another audience": {"aud": "other"},
    "a longer audience": {"aud": AUDIENCE + "x"},
    "audiences without ours": {"aud": ["other", "another"]},
    "no audiences": {"aud": []},
    "no end": {"exp": None},
    "an end that is no number": {"exp": "tomorrow"},
    "a number as text": {"exp": str(int(time.time()) + HOUR)},
    "a truth as the end": {"exp": True},
    "a list as the end": {"exp": [1]},
    "an end beyond all numbers": {"exp": float("inf")},
    "no number as the end": {"exp": float("nan")},
    "a text as its begin": {"iat": "1"},
    "a begin before all numbers": {"iat": float("-inf")},
    "not yet valid": {"nbf": int(time.time()) + HOUR},
    "from the future": {"iat": int(time.time()) + HOUR},
}


@pytest.mark.parametrize("case", BAD_CLAIMS)
def test_what_a_token_must_say(keys: tokens.Keys, case: str) -> None:
    assert why(keys, ED.token(**BAD_CLAIMS[case])) == "UNAUTHENTICATED"


def test_a_number_as_the_subject_is_none(keys: tokens.Keys) -> None:
    said = {"sub": 5, "aud": AUDIENCE, "exp": int(time.time()) + HOUR}
    token = jwt.api_jws.encode(json.dumps(said).encode(), ED.key, "EdDSA", headers={"kid": "ed"})
    assert why(keys, token) == "UNAUTHENTICATED"


def test_an_expired_one_is_told_so_and_clocks_may_differ_by_little(keys: tokens.Keys) -> None:
    now = int(time.time())
    assert why(keys, ED.token(exp=now - LEEWAY_SECONDS - 1)) == "TOKEN_EXPIRED"
    assert verify(ED.token(nbf=now + 3, iat=now + 3).encode(), keys, AUDIENCE).subject == "shop"
    # An end after all times is one that can be waited for.
    assert verify(ED.token(exp=10**400).encode(), keys, AUDIENCE).expires_at_seconds < 10**12


@pytest.mark.parametrize("kid", ISSUERS)
def test_whose_an_expired_one_was_is_proven_by_its_signature(keys: tokens.Keys, kid: str) -> None:
    def subject_of(token: str) -> tuple[str, str | None]:
        with pytest.raises(SeqdedupeError) as raised:
            verify(token.encode(), keys, AUDIENCE)
        return raised.value.reason, raised.value.numbers.get("subject")

    assert subject_of(ISSUERS[kid].token(iat=1, exp=2)) == ("TOKEN_EXPIRED", "shop")
    assert subject_of(FOREIGN[kid].token(iat=1, exp=2)) == ("UNAUTHENTICATED", None)
    with pytest.raises(SeqdedupeError) as raised:
        verify(ISSUERS[kid].token(iat=1, exp=2).encode(), keys, AUDIENCE)
    assert raised.value.message == "the token expired at 1970-01-01T00:00:02Z; its subject is 'shop'"
    assert raised.value.numbers["expired_at"] == "1970-01-01T00:00:02Z"
    with pytest.raises(SeqdedupeError) as raised:
        verify(FOREIGN[kid].token(iat=1, exp=2).encode(), keys, AUDIENCE)
    assert "shop" not in raised.value.message
    assert "1970" not in raised.value.message
    # An end before all times is named too.
    with pytest.raises(SeqdedupeError, match="TOKEN_EXPIRED"):
        verify(ISSUERS[kid].token(iat=1, exp=-(10**400)).encode(), keys, AUDIENCE)
    # It says nothing about anybody here.
    assert subject_of(ISSUERS[kid].token(iat=1, exp=2, aud="other")) == ("UNAUTHENTICATED", None)


def test_the_longest_life(keys: tokens.Keys) -> None:
    now = int(time.time())

    def why_of(**claims: Any) -> str:
        try:
            return verify(ED.token(**claims).encode(), keys, AUDIENCE, HOUR).subject
        except SeqdedupeError as e:
            return e.message

    assert why_of(iat=now, exp=now + HOUR) == "shop"
    assert "is valid for 3601 s, from `iat` to `exp`: at most 3600 s" in why_of(iat=now, exp=now + HOUR + 1)
    # One of a long life is not taken near its end either.
    assert "at most 3600" in why_of(iat=now - 10 * HOUR, exp=now + HOUR)
    assert "at most 3600" in why_of(iat=now, exp=10**400)
    assert "at most 3600" in why_of(iat=-(10**400), exp=now + 1)
    assert "no `iat`" in why_of(iat=None)
    assert verify(ED.token(iat=None, exp=now + 100 * HOUR).encode(), keys, AUDIENCE).subject == "shop"


@pytest.mark.parametrize(
    "header",
    [{"kid": None}, {"kid": "unknown"}, {"kid": ""}, {"crit": ["exp"]}, {"crit": ["b64"], "b64": False}],
    ids=str,
)
def test_a_header_that_names_no_key_or_wants_what_is_not_known(keys: tokens.Keys, header: dict[str, Any]) -> None:
    assert why(keys, ED.token(header)) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "shown", [b"", b".", b"..", b"a.b.c", b"\xff.\xff.\xff", b"x" * 8000, b"." * 8000, b"e30.e30."]
)
def test_what_is_no_token(keys: tokens.Keys, shown: bytes) -> None:
    assert why(keys, shown) == "UNAUTHENTICATED"


@pytest.mark.parametrize("other", [b"\xa0", b"\xc2\xa0", b" ", b"\n", b"*", b"="])
def test_bytes_that_base64_does_not_have_make_it_another_token(keys: tokens.Keys, other: bytes) -> None:
    token = ED.token().encode()
    head, said, signature = token.split(b".")
    for shown in (token + other, other + token, b".".join([head, said, signature[:9] + other + signature[9:]])):
        assert why(keys, shown) == "UNAUTHENTICATED"


def test_a_kid_that_is_no_text(keys: tokens.Keys) -> None:
    for kid in (5, [1], {"a": 1}, None):
        assert why(keys, f"{encoded({'alg': 'EdDSA', 'kid': kid})}.{encoded({})}.e30") == "UNAUTHENTICATED"


BAD_KEYS: dict[str, Callable[[], object]] = {
    "nothing": list,
    "a private key": lambda: [ED.jwk(private=True)],
    "a private RSA key": lambda: [RSA.jwk(private=True)],
    "a secret": lambda: [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}],
    "no kid": lambda: [{name: value for name, value in ED.jwk().items() if name != "kid"}],
    "an empty kid": lambda: [ED.jwk() | {"kid": ""}],
    "a number as kid": lambda: [ED.jwk() | {"kid": 5}],
    "two with one kid": lambda: [ED.jwk(), EC.jwk() | {"kid": "ed"}],
    "another curve": lambda: [Issuer("a", "ES384").jwk()],
    "a short RSA key": lambda: [Issuer("a", "RS256", rsa_bits=1024).jwk()],
    "an algorithm of another key": lambda: [RSA.jwk() | {"alg": "HS256"}],
    "PS256": lambda: [RSA.jwk() | {"alg": "PS256"}],
    "a key to encrypt with": lambda: [RSA.jwk() | {"use": "enc"}],
    "half a key": lambda: [{"kty": "EC", "crv": "P-256", "x": EC.jwk()["x"], "kid": "a"}],
    "a point that is on no curve": lambda: [EC.jwk() | {"x": EC.jwk()["y"]}],
    "text": lambda: ["key"],
    "no list": lambda: 5,
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_a_set_of_keys_is_taken_whole_or_not(tmp_path: Path, case: str) -> None:
    path = tmp_path / "keys.json"
    bad = BAD_KEYS[case]()
    good = [EC.jwk() | {"kid": "good"}] if isinstance(bad, list) and bad else []
    for found in (bad, [*good, *bad] if isinstance(bad, list) else bad):
        path.write_text(json.dumps({"keys": found}))
        with pytest.raises(SeqdedupeError) as raised:
            read_keys(path)
        assert raised.value.reason == "INVALID_CONFIGURATION"
        assert str(path) in raised.value.message
        # What a secret key consists of is not repeated.
        for part in ("d", "k", "x"):
            secret = bad[-1].get(part) if isinstance(bad, list) and bad and isinstance(bad[-1], dict) else None
            assert not secret or secret not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"5", b'"keys"', b"\xff", b"[" * 100_000, None])
def test_a_file_that_is_no_set_of_keys(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SeqdedupeError) as raised:
        read_keys(path)
    assert raised.value.reason == "INVALID_CONFIGURATION"


def test_keys_are_read_again_and_what_is_remembered_goes_with_them(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json", [ED.jwk()])
    changes: list[str] = []
    tokens = SignedTokens(path, AUDIENCE, lambda: changes.append("changed"))
    old, new = ED.token(), EC.token()
    assert tokens.claims_of(old.encode(), HERE, time.time()).subject == "shop"
    with pytest.raises(SeqdedupeError):
        tokens.claims_of(new.encode(), HERE, time.time())
    assert changes == []
    # A token of a key that was added just now makes it be read at once.
    write_keys(path, [EC.jwk()])
    assert tokens.claims_of(new.encode(), HERE, time.time()).subject == "shop"
    assert changes == ["changed"]
    with pytest.raises(SeqdedupeError):
        tokens.claims_of(old.encode(), HERE, time.time())
    # A broken file changes nothing.
    path.write_text("{")
    with pytest.raises(SeqdedupeError):
        tokens.claims_of(old.encode(), HERE, time.time())
    assert tokens.watched.problem is not None
    assert tokens.claims_of(new.encode(), HERE, time.time()).subject == "shop"
    assert changes == ["changed"]


def test_the_same_keys_read_again_end_nobodys_stream(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json", [ISSUERS[kid].jwk() for kid in ISSUERS])
    changes: list[str] = []
    tokens = SignedTokens(path, AUDIENCE, lambda: changes.append("changed"))
    tokens.watched.reload()
    write_keys(path, [ISSUERS[kid].jwk() for kid in ISSUERS])
    tokens.watched.reload()
    assert changes == []
    # Another key of the same name is another one.
    first, *others = ISSUERS
    write_keys(path, [Issuer(first).jwk(), *(ISSUERS[kid].jwk() for kid in others)])
    tokens.watched.reload()
    assert changes == ["changed"]


def test_what_is_remembered_expires_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keys(tmp_path / "keys.json", [ED.jwk()])
    tokens = SignedTokens(path, AUDIENCE, lambda: None)
    now = time.time()
    token = ED.token(exp=int(now) - LEEWAY_SECONDS + 2).encode()
    assert tokens.claims_of(token, HERE, now).subject == "shop"
    while verified_at(token, tokens):
        time.sleep(0.05)
    with pytest.raises(SeqdedupeError) as raised:
        tokens.claims_of(token, HERE, time.time())
    assert raised.value.reason == "TOKEN_EXPIRED"
    monkeypatch.setattr("broker_sidecar.security.tokens.MAX_REMEMBERED", 3)
    for k in range(10):
        assert tokens.claims_of(ED.token(sub=f"shop-{k}").encode(), HERE, now).subject == f"shop-{k}"
    assert len(tokens._verified) <= 3


def verified_at(token: bytes, tokens: SignedTokens) -> bool:
    """Whether it is taken now."""
    try:
        return bool(tokens.claims_of(token, HERE, time.time()))
    except SeqdedupeError:
        return False
