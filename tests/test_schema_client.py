"""The smallest client that keeps all duties: the published schema is all that one needs."""

import ast
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests import schema_client
from tests.schema_client import SchemaClient

StartSidecar = Callable[..., Sidecar]

MAX_LINES = 330
KILLS = 7
PRODUCERS = 3
MESSAGES_A_CALL = 40


def test_it_is_small_and_needs_only_generated_classes() -> None:
    source = Path(schema_client.__file__).read_text()
    assert len(source.splitlines()) <= MAX_LINES
    imported = {
        node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module
    } | {name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if "seqdedupe" in name or "tests" in name} == {"seqdedupe.v1"}
    others = imported - {"seqdedupe.v1"} - sys.stdlib_module_names - {"collections.abc"}
    assert others == {"grpc", "google.rpc"}


def messages(first: int, count: int) -> list[tuple[int, bytes]]:
    return [(i, f"payload {i}".encode() * (i % 5)) for i in range(first, first + count)]


def test_publish_resend_and_read(sidecar: Sidecar) -> None:
    client = SchemaClient(sidecar.address, "t", "p")
    client.publish(messages(0, 100))
    client.publish(messages(0, 120))
    assert client.dups == 100
    assert list(client.read()) == [(i, "p", i, payload) for i, payload in messages(0, 120)]
    # Its own process with the same name, as after a restart that lost what was acknowledged.
    other = SchemaClient(sidecar.address, "t", "p")
    other.publish(messages(110, 20))
    assert other.dups == 10
    assert [i for _, _, i, _ in client.read()] == list(range(130))
    # The first one has been fenced by that, and says so instead of fighting.
    with pytest.raises(Exception, match="opened by another session"):
        client.publish(messages(130, 1))


def test_kill_9_under_load(sidecar: Sidecar, pytestconfig: pytest.Config) -> None:
    """Three producers publish without a pause while the sidecar is killed: all there, once, in order."""
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    rng = random.Random(seed)
    stopping = threading.Event()
    clients = [SchemaClient(sidecar.address, "t", f"p{k}") for k in range(PRODUCERS)]
    sent = dict.fromkeys(range(PRODUCERS), 0)
    failures: list[BaseException] = []

    def produce(k: int) -> None:
        try:
            while not stopping.is_set():
                # Each call begins with some that have their receipts already: they must be Dup.
                first = max(0, sent[k] - 5)
                clients[k].publish(messages(first, sent[k] + MESSAGES_A_CALL - first))
                sent[k] += MESSAGES_A_CALL
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=produce, args=(k,), daemon=True) for k in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        before = [client.persisted for client in clients]
        while not failures and all(c.persisted == b for c, b in zip(clients, before, strict=True)):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.3))
        sidecar.restart()
    stopping.set()
    for thread in threads:
        thread.join(LAST_RESORT_SECONDS)
    assert not failures
    found: dict[str, list[tuple[int, bytes]]] = {f"p{k}": [] for k in range(PRODUCERS)}
    for position, (index, name, sequence_id, payload) in enumerate(clients[0].read()):
        assert index == position
        found[name].append((sequence_id, payload))
    assert found == {f"p{k}": messages(0, sent[k]) for k in range(PRODUCERS)}
    assert all(client.dups > 0 for client in clients)


def test_acknowledged_data_that_is_gone_is_said(start_sidecar: StartSidecar) -> None:
    """Another sidecar on the same address, without the data: the client must not go on as if nothing were."""
    first = start_sidecar()
    client = SchemaClient(first.address, "t", "p")
    client.publish(messages(0, 10))
    first.kill()
    (first.data).rename(first.folder / "gone")
    first.start()
    # However often the name is opened: no session there has the epoch of one of the history that is lost. Epochs begin
    # anywhere, so it was never given, or is not the newest one.
    SchemaClient(first.address, "t", "p").publish(messages(0, 1))
    with pytest.raises(RuntimeError, match=r"another session|never gave the epoch"):
        client.publish(messages(10, 10))
