"""What of the calls to a real sidecar stands in its audit trail, and what becomes of them when it cannot be written."""

import asyncio
import hashlib
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from broker_sidecar.security.audit import MAX_LINE_BYTES_TOLD, MAX_OPENS, Audit, Openers, Trail
from broker_sidecar.security.permissions import CHANGES, Denial, request_class
from broker_sidecar.security.subject import Subject, set_caller
from seqdedupe.audit_trail import verify
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import MAX_NAME_BYTES
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Refused, refused, status
from tests.broker_sidecar.raw_http2 import RawConnection
from tests.broker_sidecar.security.by_name import Caller, Ruled
from tests.broker_sidecar.security.showing import bearer, token_of, unary, wait_until
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys


def lines(path: Path) -> list[dict[str, Any]]:
    verify([path])
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(path: Path, *names: str) -> list[tuple[Any, ...]]:
    """These members of all lines but those of starts and stops."""
    events = [line for line in lines(path) if line["event"] not in ("started", "stopped")]
    return [tuple(line.get(name) for name in ("event", *names)) for line in events]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, authentication="token", audit_file=tmp_path / "audit.jsonl") as sidecar:
        yield sidecar


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def connect(sidecar: Sidecar) -> Client:
    return Client(sidecar.address, credentials=Credentials(token_file=sidecar.data / "token"))


def test_what_an_operator_does(sidecar: Sidecar, path: Path) -> None:
    with connect(sidecar) as client:
        client.admin.create_topic("orders")
        with client.producer("orders", "p") as producer:
            producer.send(b"secret payload", 1).result()
        client.admin.reset_producer("orders", "p", 0)
        with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
            client.admin.delete_topic("invoices")
        client.admin.delete_topic("orders")
    assert shown(path, "call", "subject", "why") == [
        ("call", "AdminService/CreateTopic", "operator", None),
        ("done", "AdminService/CreateTopic", "operator", None),
        ("call", "AdminService/ResetProducer", "operator", None),
        ("done", "AdminService/ResetProducer", "operator", None),
        ("call", "AdminService/DeleteTopic", "operator", None),
        ("failed", "AdminService/DeleteTopic", "operator", "TOPIC_NOT_FOUND"),
        ("call", "AdminService/DeleteTopic", "operator", None),
        ("done", "AdminService/DeleteTopic", "operator", None),
    ]
    assert {line["address"] for line in lines(path) if line["event"] == "call"} == {"ipv4:127.0.0.1"}
    assert "invoices" in next(line["request"] for line in lines(path) if line["event"] == "failed")
    text = path.read_text()
    assert "secret payload" not in text
    assert (sidecar.data / "token").read_text().strip() not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_who_shows_nothing_is_told_once_and_counted(sidecar: Sidecar, path: Path) -> None:
    with grpc.insecure_channel(sidecar.address) as channel:
        call: Any = channel.unary_unary("/seqdedupe.v1.AdminService/DeleteTopic")
        for _ in range(50):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                call(admin_pb2.DeleteTopicRequest(topic="t").SerializeToString())
    assert sidecar.stop() == 0
    assert shown(path, "call", "reason", "repeats") == [
        ("unauthenticated", "AdminService/DeleteTopic", "UNAUTHENTICATED", None),
        ("unauthenticated", "AdminService/DeleteTopic", "UNAUTHENTICATED", 49),
    ]


def test_an_unknown_call_is_one_of_who_shows_nothing_whatever_its_name(sidecar: Sidecar, path: Path) -> None:
    with grpc.insecure_channel(sidecar.address) as channel:
        for k in range(20):
            call: Any = channel.unary_unary(f"/nobody/has{k}")
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                call(b"")
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED") as raised:
                call(b"", metadata=bearer(token_of(sidecar)))
            assert status(raised.value).reason == "UNKNOWN_CALL"
    assert sidecar.stop() == 0
    assert shown(path, "call", "reason", "repeats") == [
        ("unauthenticated", "unknown", "UNAUTHENTICATED", None),
        ("unauthenticated", "unknown", "UNAUTHENTICATED", 19),
    ]


def test_every_line_says_where_a_call_came_from(sidecar: Sidecar, path: Path) -> None:
    """gRPC hands over calls that it has ended itself, and does not say then."""
    connection = RawConnection(sidecar.address)
    headers: tuple[dict[str, str | bytes], ...] = ({"grpc-encoding": "gzip"}, {"grpc-timeout": "0n"}, {})
    for each in headers:
        call = connection.begin("/seqdedupe.v1.AdminService/GetVersion", each)
        assert connection.wait_ended([call], TIMEOUT_SECONDS)
    # Before the connection ends: of a call that gRPC hands over after that, it does not know the address any more.
    assert sidecar.stop() == 0
    connection.close()
    assert {address for _, address in shown(path, "address")} == {"ipv4:127.0.0.1"}


RULES = """
[[allow]]
subjects = ["shop", "thief"]
actions = ["publish", "create"]
topics = ["orders"]
"""
REFUSALS = 1_100
"""More different ones than the trail has ever kept apart."""


def test_a_flood_of_refusals_hides_nothing_and_stays_small(tmp_path: Path, path: Path) -> None:
    """One caller is refused again and again, for topics with long names; what others do stands in the trail."""
    issuer = Issuer("ed")
    (tmp_path / "rules.toml").write_text(RULES)
    keys: dict[str, Any] = {
        "rules_file": tmp_path / "rules.toml",
        "token_keys_file": write_keys(tmp_path / "keys.json", [issuer.jwk()]),
        "token_audience": AUDIENCE,
    }
    with Sidecar(tmp_path, authentication="token", audit_file=path, **keys) as sidecar:
        shop, thief = (Client(sidecar.address, Credentials(token=issuer.token(sub=who))) for who in ("shop", "thief"))
        with shop, thief, connect(sidecar) as operator, grpc.insecure_channel(sidecar.address) as channel:
            with shop.producer("orders", "till") as producer:
                producer.send(b"one", 1).result()
            begin_bytes = path.stat().st_size
            for k in range(REFUSALS):
                with pytest.raises(SeqdedupeError, match="NOT_ALLOWED"):
                    thief.admin.topic("x" * 200 + str(k))
            with thief.producer("orders", "till") as producer:
                producer.send(b"two", 2).result()
            with pytest.raises(SeqdedupeError, match="NOT_ALLOWED"):
                shop.admin.topic("invoices")
            with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
                operator.admin.delete_topic("invoices")
            version = unary(channel, "/seqdedupe.v1.AdminService/GetVersion")
            ended = issuer.token(sub="shop", iat=1, exp=int(time.time()) - 60)
            for shown in ("wrong", ended, ended):
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    version(b"", metadata=bearer(shown))
            (tmp_path / "rules.toml").write_text(RULES + "# the same\n")
            wait_until(lambda: any("read again: the rules file" in str(one["event"]) for one in sidecar.log))
        assert sidecar.stop() == 0
    found = lines(path)
    taken = [line for line in found if line["event"] == "producers taken over"]
    assert [(one["subject"], one["from_subject"], one["producer_names"]) for one in taken] == [
        ("thief", "shop", "'till'")
    ]
    assert [one["why"] for one in found if one["event"] == "failed"] == ["TOPIC_NOT_FOUND"]
    assert [one["what"] for one in found if one["event"] == "read again"] == ["the rules file"]
    unknown = [
        (one["reason"], one.get("subject"), one.get("kind")) for one in found if one["event"] == "unauthenticated"
    ]
    assert ("UNAUTHENTICATED", None, None) in unknown
    assert ("TOKEN_EXPIRED", "shop", "jwt") in unknown
    denied = [one for one in found if one["event"] == "denied"]
    assert [one["topic"] for one in denied if one["subject"] == "shop"] == ["persistent://public/default/invoices"]
    others = [one for one in found if one["event"] == "others refused"]
    assert {(one["subject"], one["address"]) for one in others} == {("thief", "ipv4:127.0.0.1")}
    assert sum(one.get("repeats", 1) for one in [*denied, *others] if one["subject"] == "thief") == REFUSALS
    # Ten seconds are enough for all of it where the machine is not busy.
    rounds = len({one["time"] for one in others})
    assert path.stat().st_size - begin_bytes < (rounds + 1) * 64 * 1024


def test_starts_and_stops_and_a_chain_over_both(sidecar: Sidecar, path: Path) -> None:
    assert sidecar.stop() == 0
    sidecar.start()
    sidecar.kill()
    sidecar.start()
    assert [line["event"] for line in lines(path)] == ["started", "stopped", "started", "started"]


def test_an_operator_is_refused_while_it_cannot_be_written(sidecar: Sidecar, path: Path) -> None:
    with connect(sidecar) as client:
        client.admin.create_topic("orders")
        # No file of this process may grow beyond what this one is.
        soft, hard = resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (path.stat().st_size, -1))
        with pytest.raises(UnavailableError, match="AUDIT_UNAVAILABLE"):
            client.admin.delete_topic("orders")
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert client.admin.topic("orders").name.endswith("/orders")
        client.admin.delete_topic("orders")
    assert [event for event, _ in shown(path, "call")] == ["call", "done", "call", "done"]


@pytest.mark.parametrize("has_trail", [True, False], ids=["with a trail", "control: without"])
def test_a_call_is_in_the_trail_before_it_takes_effect(tmp_path: Path, has_trail: bool) -> None:
    path = tmp_path / "audit.jsonl"

    async def run() -> list[str]:
        audit = Audit(path) if has_trail else None
        set_caller(Subject("alice", "jwt", None, "ipv4:10.0.0.1:5"))
        seen: list[str] = []
        async with Trail(audit).change("/seqdedupe.v1.AdminService/DeleteTopic", "topic: t"):
            seen += [line["event"] for line in lines(path)] if has_trail else []
        if audit is not None:
            await audit.close()
        return seen

    assert (asyncio.run(run()) == ["call"]) == has_trail


async def test_what_cannot_be_told_afterwards_was_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    set_caller(Subject("alice", "jwt", None, "unix:"))

    def fail(_file: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(UnavailableError, match="the call was carried out, but"):
        async with Trail(audit).change("DeleteTopic", "topic: t"):
            monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.undo()
    await audit.close()


async def test_names_that_go_to_somebody_else(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    trail = Trail(audit)
    for subject, epoch, fenced in (
        ("alice", 1, []),
        ("alice", 2, [("a", 1), ("b", 1)]),
        ("bob", 3, [("a", 2)]),
        ("alice", 4, [("a", 3), ("b", 2)]),
        ("carol", 5, [("unknown", 99)]),
    ):
        set_caller(Subject(subject, "jwt", None, "ipv6:[::1]:5"))
        trail.opened("t", 7, [epoch], fenced)
    await audit.close()
    assert shown(tmp_path / "audit.jsonl", "subject", "from_subject", "producer_names", "address") == [
        ("producers taken over", "bob", "alice", "'a'", "ipv6:[::1]"),
        ("producers taken over", "alice", "bob", "'a'", "ipv6:[::1]"),
    ]


async def test_refused_names_are_cut(tmp_path: Path) -> None:
    """Anyone who is refused chooses them, and each of these letters takes twelve bytes of a line."""
    audit = Audit(tmp_path / "audit.jsonl")
    subject = Subject("alice", "jwt", None, "unix:")
    names = [f"{k:02d}" + "\U0001f4a3" * 60 for k in range(99)]
    Trail(audit).denied(Denial(subject, "publish", "t", ["till", *names], None))
    await audit.close()
    [line] = lines(tmp_path / "audit.jsonl")
    assert line["producers"] == 100
    assert line["producer_names"].startswith("'till' '00")
    assert line["producer_names"].endswith("…")
    assert (tmp_path / "audit.jsonl").stat().st_size < 1024


MOST = 10
"""Changes that may fail."""

LONG = 'é"\\\U0001f4a3'
"""Each letter takes more bytes in a line than in a request."""


def fill(message: Any, text: str, depth: int = 0) -> None:
    """Gives each field the most that it takes."""
    for one in message.DESCRIPTOR.fields:
        if one.containing_oneof is not None and message.WhichOneof(one.containing_oneof.name):
            continue
        if one.message_type is not None:
            if depth < 3:
                part = getattr(message, one.name).add() if one.is_repeated else getattr(message, one.name)
                part.SetInParent()
                fill(part, text, depth + 1)
            continue
        value: Any = one.enum_type.values[-1].number if one.enum_type else 2**31 - 1
        if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            value = text.encode() if one.type == FieldDescriptor.TYPE_BYTES else text
        elif one.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            value = True
        if one.is_repeated:
            getattr(message, one.name).extend([value] * 1_000)
        else:
            setattr(message, one.name, value)


@pytest.mark.parametrize("text", [LONG * 31, LONG * 1_000, "x" * 255], ids=["names", "texts", "plain names"])
async def test_no_line_about_a_call_is_longer_than_is_said(tmp_path: Path, text: str) -> None:
    """No matter what the caller says. Names of topics that there can be are there as a whole."""
    audit = Audit(tmp_path / "audit.jsonl")
    trail, address = Trail(audit), "ipv6:[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff%25interface]:65535"
    subject = Subject("alice", "certificate", None, address)
    set_caller(subject)
    name = "persistent://t/n/" + "x" * (MAX_NAME_BYTES - 17)
    for method in [*sorted(CHANGES), "/seqdedupe.v1.AdminService/ImportSnapshot"]:
        request = request_class(method)()
        fill(request, text)
        with pytest.raises(NotFoundError):
            async with trail.change(method, request if method in CHANGES else f"topic: {text}"):
                raise error("PRODUCER_NOT_FOUND", text)
        async with trail.change(method, request):
            pass
    trail.denied(Denial(subject, "publish", name, [text] * 100, None))
    trail.denied(Denial(subject, "read", name, [], None, cursor=text))
    trail.opened(name, 7, [1], [])
    set_caller(Subject("bob", "certificate", None, address))
    trail.opened(name, 7, [2], [(text, 1)] * 100)
    async with trail.change("/seqdedupe.v1.AdminService/DeleteTopic", admin_pb2.DeleteTopicRequest(topic=name)):
        pass
    await audit.close()
    written = (tmp_path / "audit.jsonl").read_bytes().splitlines()
    assert len(written) == 4 * len(CHANGES) + 4 + 3 + 2
    assert max(map(len, written)) <= MAX_LINE_BYTES_TOLD
    assert lines(tmp_path / "audit.jsonl")[-1]["request"] == f'topic: "{name}"'


async def test_a_long_text_is_told_by_its_length_and_hash(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    set_caller(Subject("alice", "jwt", None, "unix:"))
    schema = "{" * 4_000
    async with Trail(audit).change("CreateTopic", admin_pb2.CreateTopicRequest(topic="t", schema=schema)):
        pass
    await audit.close()
    shortened = f"{'{' * 32}… (4000 bytes, SHA-256 {hashlib.sha256(schema.encode()).hexdigest()[:16]})"
    assert {line["request"] for line in lines(tmp_path / "audit.jsonl")} == {f'topic: "t" schema: "{shortened}"'}


def test_who_changes_nothing_again_and_again_has_to_wait_and_an_operator_never_does(tmp_path: Path) -> None:
    """Each change that fails takes two lines, and is synced."""
    path, rules = tmp_path / "audit.jsonl", RULES.replace('"orders"', '"*"')
    environment = with_constants.environment(security__audit__MOST_FAILED=MOST)
    with Ruled(tmp_path, rules, audit_file=path, environment=environment) as sidecar:
        shop, thief, operator = (Caller(sidecar.address, name) for name in ("shop", "thief", "operator"))
        create = admin_pb2.CreateTopicRequest(topic="orders", schema="x" * 4_000)
        reasons: Counter[str] = Counter()

        def fail() -> Refused:
            why = refused(lambda: thief.admin.CreateTopic(create))
            reasons[why.reason] += 1
            return why

        why = fail()
        while why.reason != "SHARE_EXCEEDED" and reasons.total() < 100 * MOST:
            why = fail()
        assert (why.reason, why.numbers["share"]) == ("SHARE_EXCEEDED", "failed_changes")
        assert 0 < why.retry_delay_ms <= 10_000
        shop.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="carts"))
        for _ in range(2 * MOST):
            assert refused(lambda: operator.admin.CreateTopic(create)).reason == "INVALID_REQUEST"
        # It publishes as before, and after a while it may try again.
        thief.open("carts", "p")
        wait_until(lambda: fail().reason != "SHARE_EXCEEDED")
        for one in (shop, thief, operator):
            one.close()
        assert sidecar.stop() == 0
    failed = [line for line in lines(path) if line["event"] == "failed"]
    written = Counter((line["subject"], line["why"]) for line in failed if "request" in line)
    assert written == {
        ("thief", "INVALID_REQUEST"): reasons["INVALID_REQUEST"],
        ("operator", "INVALID_REQUEST"): 2 * MOST,
    }
    assert reasons["INVALID_REQUEST"] > MOST
    # What was not tried is reported once, and counted.
    not_tried = [line.get("repeats", 1) for line in failed if "request" not in line]
    assert sum(not_tried) == reasons["SHARE_EXCEEDED"]
    assert len(not_tried) < reasons["SHARE_EXCEEDED"]


def test_openers_are_bounded_and_each_subject_pushes_out_its_own() -> None:
    openers = Openers()
    openers.opened(2, 1, "other")
    for epoch in range(MAX_OPENS + 10):
        openers.opened(1, epoch, "s")
    assert [openers.of(1, epoch) for epoch in (10, 11)] == [None, "s"]
    assert openers.of(2, 1) == "other"
