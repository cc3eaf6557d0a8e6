"""What of the calls to a real sidecar stands in its audit trail, and what becomes of them when it cannot be written."""

import asyncio
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker_sidecar.security.audit import Audit
from broker_sidecar.security.subject import Subject, set_caller
from broker_sidecar.security.takeovers import MAX_OPENS, Openers
from broker_sidecar.security.trail import Trail
from seqdedupe.audit_trail import verify
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2


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

    with pytest.raises(UnavailableError, match="it was carried out, but"):
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


def test_openers_are_bounded() -> None:
    openers = Openers()
    for epoch in range(MAX_OPENS + 10):
        openers.opened(1, epoch, "s")
    assert [openers.of(1, epoch) for epoch in (9, 10)] == [None, "s"]
