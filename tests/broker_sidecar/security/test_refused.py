"""A token that was refused costs no signature check when it comes again, and its call leaves nothing behind.

Costs three seconds of CPU.
"""

import gc
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker_sidecar.security import tokens
from broker_sidecar.security.tokens import (
    EARLY_SECONDS,
    LEEWAY_SECONDS,
    MAX_HOSTS,
    MAX_TOKENS,
    MAX_WHY_LETTERS,
    RefusedTokens,
    SignedTokens,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_TOKEN_BYTES
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys

KEY, OTHER = Issuer("key"), Issuer("other")
FORGER = Issuer("key")
HERE, THERE = "ipv4:10.0.0.1:50000", "ipv4:10.0.0.2:50000"
CALLS = 300


class Checked:
    """The tokens of a sidecar, and how many signatures were checked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys_file = write_keys(folder / "keys.json", [KEY.jwk()])
        self.tokens = SignedTokens(self.keys_file, AUDIENCE, lambda: None)
        self.checks = 0
        verify = tokens.verify

        def counted(token: bytes, keys: tokens.Keys, audience: str, max_lifetime_seconds: float) -> tokens.Claims:
            self.checks += 1
            return verify(token, keys, audience, max_lifetime_seconds)

        monkeypatch.setattr(tokens, "verify", counted)

    def show(self, token: str | bytes, address: str = HERE, now_seconds: float | None = None) -> str:
        """Why it is refused; who it is of."""
        shown = token if isinstance(token, bytes) else token.encode()
        try:
            return self.tokens.claims_of(shown, address, time.time() if now_seconds is None else now_seconds).subject
        except SeqdedupeError as e:
            return e.reason


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (FORGER.token(), "UNAUTHENTICATED"),
        (KEY.token(exp=1), "TOKEN_EXPIRED"),
        (KEY.token(aud="another"), "UNAUTHENTICATED"),
        (OTHER.token(), "UNAUTHENTICATED"),
        ("no token", "UNAUTHENTICATED"),
    ],
    ids=["forged", "expired", "another audience", "unknown key", "none"],
)
def test_one_that_comes_again_and_again_is_checked_once(
    checked: Checked, monkeypatch: pytest.MonkeyPatch, bad: str, reason: str
) -> None:
    assert {checked.show(bad, f"ipv4:10.0.0.1:{port}") for port in range(50_000, 50_000 + CALLS)} == {reason}
    assert checked.checks == 1
    # Good ones go on meanwhile, of the same caller too.
    assert checked.show(KEY.token()) == "shop"
    # For somebody else it belongs to another caller.
    assert checked.show(bad, THERE) == reason
    assert checked.checks == 3
    # With nothing remembered, each call costs a check: that is what is counted here.
    monkeypatch.setattr(RefusedTokens, "add", lambda *_: None)
    checked.tokens._refused.clear()
    for _ in range(5):
        checked.show(bad)
    assert checked.checks == 8


def test_why_is_told_as_at_first(checked: Checked) -> None:
    said: list[tuple[str, str, str]] = []
    for _ in range(2):
        with pytest.raises(SeqdedupeError) as raised:
            checked.tokens.claims_of(KEY.token(aud="another").encode(), HERE, time.time())
        said.append((raised.value.reason, raised.value.message, raised.value.hint))
    assert said[0] == said[1]


def test_what_others_have_shown_is_not_pushed_out(checked: Checked) -> None:
    bad = FORGER.token()
    checked.show(bad, THERE)
    for k in range(MAX_TOKENS + 5):
        checked.show(f"flood {k}", HERE)
    before = checked.checks
    checked.show(bad, THERE)
    assert checked.checks == before
    # It its own has names the last ones.
    checked.show(f"flood {MAX_TOKENS + 4}", HERE)
    assert checked.checks == before
    checked.show("flood 0", HERE)
    assert checked.checks == before + 1


def flooding(network: str, count: int) -> Iterator[str]:
    for k in range(count):
        yield f"ipv6:%5B{network}:{k:x}:{k:x}%5D:50000"


def test_who_has_a_network_is_one(checked: Checked) -> None:
    bad = FORGER.token()
    checked.show(bad, THERE)
    for address in flooding("2001:db8:1:2:3:4", MAX_HOSTS + 5):
        checked.show("flood", address)
    assert checked.checks == 2
    checked.show(bad, THERE)
    assert checked.checks == 2
    # IPv4 within IPv6 is no such network.
    for k in range(3):
        checked.show("flood", f"ipv6:%5B::ffff:10.0.0.{k}%5D:50000")
    assert checked.checks == 5
    assert checked.show("flood", "ipv6:%5Bfe80::1%25eth0%5D:1") == checked.show("flood", "unix:") == "UNAUTHENTICATED"


def test_it_is_bounded_whatever_comes() -> None:
    tokens = RefusedTokens()
    e = error("UNAUTHENTICATED", "x" * 100_000)
    for host in range(MAX_HOSTS + 50):
        address = f"ipv4:10.0.{host >> 8}.{host & 255}:1"
        for k in range(MAX_TOKENS + 2 if host % 100 == 0 else 1):
            tokens.add(b"%d" % k * MAX_TOKEN_BYTES, address, e, 0, 1)
    assert len(tokens._of_hosts) == MAX_HOSTS
    assert max(map(len, tokens._of_hosts.values())) == MAX_TOKENS
    assert {len(one.why) for of in tokens._of_hosts.values() for one in of.values()} == {MAX_WHY_LETTERS}
    # The first hosts have made room.
    assert "ipv4:10.0.0.0" not in tokens._of_hosts


def test_other_keys_are_asked_at_once(checked: Checked) -> None:
    new = OTHER.token()
    assert [checked.show(new), checked.show(new)] == ["UNAUTHENTICATED"] * 2
    write_keys(checked.keys_file, [KEY.jwk(), OTHER.jwk()])
    assert checked.show(new) == "shop"
    # One of a key that is taken out is refused, and taken again when the key is back.
    write_keys(checked.keys_file, [KEY.jwk()])
    assert checked.show("anything") == checked.show(new) == "UNAUTHENTICATED"
    write_keys(checked.keys_file, [OTHER.jwk()])
    assert checked.show(new) == "shop"


def test_one_of_tomorrow_is_taken_when_its_time_has_come(checked: Checked) -> None:
    now = time.time()
    early = KEY.token(nbf=int(now) + LEEWAY_SECONDS + 2, iat=None)
    assert [checked.show(early, now_seconds=now) for _ in range(CALLS)] == ["UNAUTHENTICATED"] * CALLS
    assert checked.checks == 1
    checked.show(early, now_seconds=now + EARLY_SECONDS)
    assert checked.checks == 2
    until = time.monotonic() + LAST_RESORT_SECONDS
    while checked.show(early) != "shop":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_clock_that_was_wrong_costs_a_check_not_a_token(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stood in the far future when the token was refused as expired."""
    good = KEY.token(iat=None)
    with monkeypatch.context() as m:
        m.setattr(tokens, "LEEWAY_SECONDS", -(10**6))
        assert checked.show(good, now_seconds=time.time() + 10**6) == "TOKEN_EXPIRED"
    assert checked.show(good) == "shop"


class Held:
    """What a call has with it."""

    def __init__(self) -> None:
        self.request = bytes(100_000)


@contextmanager
def no_collector() -> Iterator[None]:
    """What is in a circle stays, so that nothing may be in one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_of(checked: Checked) -> tuple[int, int]:
    """Makes calls with bad tokens; how many of them are still there afterwards, and how much memory."""
    calls: list[weakref.ref[Held]] = []

    def call(k: int) -> None:
        held = Held()
        calls.append(weakref.ref(held))
        checked.show(f"{FORGER.token()}{k}" if k % 2 else KEY.token(exp=1), f"ipv4:10.0.{k}.1:1")
        assert held.request

    call(0)
    tracemalloc.start()
    try:
        with no_collector():
            for k in range(CALLS // 2):
                call(k)
            alive = sum(one() is not None for one in calls)
            return alive, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_nothing_of_a_refused_call_stays(checked: Checked) -> None:
    alive, held_bytes = left_of(checked)
    assert alive == 0
    assert held_bytes < 1_000 * CALLS


def test_a_remembered_error_would_hold_the_calls(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before this one would find: the error holds by its traceback everything that the call had."""
    errors: list[SeqdedupeError] = []
    add = RefusedTokens.add

    def keeping(self: RefusedTokens, token: bytes, address: str, e: SeqdedupeError, *times: float) -> None:
        errors.append(e)
        add(self, token, address, e, *times)

    monkeypatch.setattr(tokens.RefusedTokens, "add", keeping)
    alive, held_bytes = left_of(checked)
    assert alive >= CALLS // 2
    assert held_bytes > 100_000 * CALLS // 2
