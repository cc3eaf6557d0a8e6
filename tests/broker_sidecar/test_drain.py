"""SIGTERM: what is in flight is finished, a last snapshot is durable, health says so, and clients go on later."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Answer, Client, batch, receipt_of, refused, verdicts
from tests.broker_sidecar.gate import Gate
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.load import Publisher, compare, stored_ids

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROUNDS = 2


def watch_health(client: Client, service: str) -> list[int]:
    """The statuses of a service as they come, until the server is gone."""
    seen: list[int] = []
    first = threading.Event()

    def watch() -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            for answer in health_of(client.channel).Watch(request, timeout=TIMEOUT_SECONDS):
                seen.append(answer.status)
                first.set()
        except grpc.RpcError:
            pass

    threading.Thread(target=watch, daemon=True).start()
    assert first.wait(TIMEOUT_SECONDS)
    return seen


def code_of(call: Callable[[], object]) -> grpc.StatusCode | None:
    try:
        call()
    except grpc.RpcError as e:
        return e.code()
    return None


def failures_of(sidecar: Sidecar) -> list[dict[str, object]]:
    """What the sidecar logged as its own defects."""
    return [entry for entry in sidecar.log if entry["level"] in ("error", "critical")]


def test_drain_under_load(start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    sidecar = start_sidecar(deduplication_entries_interval=1_000_000, deduplication_snapshot_interval_seconds=0)
    publishers = [Publisher(sidecar.address, "t", [f"{k}-{i}" for i in range(3)], seed + k) for k in range(2)]
    for publisher in publishers:
        publisher.start()
    for _ in range(ROUNDS):
        before = [sum(publisher.verdicts) for publisher in publishers]
        while any(sum(p.verdicts) < b + 500 and p.failure is None for p, b in zip(publishers, before, strict=True)):
            time.sleep(0.002)
        client = Client(sidecar.address)
        whole, of_topic = watch_health(client, ""), watch_health(client, "persistent://public/default/t")
        assert (whole[-1], of_topic[-1]) == (SERVING, SERVING)
        began = len(sidecar.log)
        assert sidecar.stop() == 0
        client.close()
        assert (whole[-1], of_topic[-1]) == (NOT_SERVING, NOT_SERVING)
        assert [e["event"] for e in sidecar.log[began:] if e["event"] in ("draining", "stopped")] == [
            "draining",
            "stopped",
        ]
        assert not sidecar.errors
        sidecar.start()
        # The last snapshot covers everything: there is nothing to be read again.
        assert " 0 messages read" in next(e["event"] for e in sidecar.log[began:] if "messages read" in e["event"])
    for publisher in publishers:
        publisher.finish()
    found = stored_ids(sidecar.address, "t")
    compare(found, {name: ids for publisher in publishers for name, ids in publisher.ids.items()})
    assert not failures_of(sidecar)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Sidecar, Gate]]:
    sidecar, gate = Sidecar(tmp_path / "sidecar", drain_timeout_seconds=1), Gate(tmp_path / "gate")
    yield sidecar, gate
    gate.open()
    sidecar.kill()


def in_flight(client: Client, gate: Gate) -> tuple[dict[str, int], Callable[[], Answer]]:
    """A frame that waits for its sync. Returns the epochs and what waits for its answer."""
    epochs = client.epochs("t", "p")
    stream = client.stream("t")
    stream.receipt(batch([("p", 0)], epochs))
    gate.close()
    frame = stream.send(batch([("p", 1)], epochs))
    while not gate.holds:
        time.sleep(0.001)
    return epochs, lambda: stream.answer(frame)


def test_calls_while_draining(held: tuple[Sidecar, Gate]) -> None:
    """Until what is in flight has settled: new work is sent to the successor, reading goes on, nothing is a defect."""
    sidecar, gate = held
    sidecar.keys["drain_timeout_seconds"] = 30
    gate.start(sidecar)
    client = Client(sidecar.address)
    epochs, answer = in_flight(client, gate)
    other = client.stream("t")
    other.receipt(batch([("p", 0)], epochs))
    follow = client.reading.ReadStream(read_pb2.ReadStreamRequest(topic="t", follow=True), timeout=TIMEOUT_SECONDS)
    assert next(follow).end_index == 1
    sidecar.signal(signal.SIGTERM)
    while client.topic("t").state != admin_pb2.TOPIC_STATE_DRAINING:
        time.sleep(0.002)
    again = batch([("p", 2)], epochs)
    call: Callable[[], object]
    for call in (
        lambda: client.publish_unary("t", again),
        lambda: client.open("t", "p", epochs=list(epochs.values())),
        lambda: client.open("new", "p"),
        lambda: client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="new")),
        lambda: client.admin.Snapshot(admin_pb2.SnapshotRequest(topic="t")),
    ):
        one = refused(call)
        assert (one.reason, one.code) == ("DRAINING", grpc.StatusCode.UNAVAILABLE)
        assert one.retry_delay_ms > 0
    assert other.refusal(again).reason == "DRAINING"
    assert client.rows("t") == [("p", 0)]
    gate.open()
    # What was in flight is acknowledged, to a client that is still there.
    assert verdicts(receipt_of(answer()), 1) == [1]
    codes = set()
    # The stores are closed by and by; anyone who asks now may be refused, but not by a defect.
    while psutil.pid_exists(sidecar.pid) and psutil.Process(sidecar.pid).status() != psutil.STATUS_ZOMBIE:
        for call in (
            lambda: list(client.reading.ReadStream(read_pb2.ReadStreamRequest(topic="t"), timeout=TIMEOUT_SECONDS)),
            lambda: client.topic("t"),
            lambda: client.end_index("t"),
            lambda: client.reading.Locate(read_pb2.LocateRequest(topic="t", publish_time_ms=5)),
            lambda: client.publish_unary("t", again),
            lambda: client.admin.SetTopicPolicy(
                admin_pb2.SetTopicPolicyRequest(topic="t", policy=admin_pb2.TopicPolicy(deduplication_enabled=True))
            ),
            lambda: client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="t")),
        ):
            codes.add(code_of(call))
    # CANCELLED is gRPC's own answer to a call that arrives while its server is being taken down.
    assert codes <= {None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert sidecar.wait() == 0
    with pytest.raises(grpc.RpcError) as e:
        list(follow)
    assert e.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not failures_of(sidecar)
    sidecar.start()
    assert client.rows("t") == [("p", 0), ("p", 1)]
    assert verdicts(client.publish_unary("t", again), 1) == [1]
    client.close()


def test_drain_timeout(held: tuple[Sidecar, Gate]) -> None:
    """What cannot settle in time is left to recovery: a clear line, status 1, and the next start decides."""
    sidecar, gate = held
    gate.start(sidecar)
    client = Client(sidecar.address)
    epochs, answer = in_flight(client, gate)
    began = time.monotonic()
    # The gate stays closed: the sync never returns.
    assert sidecar.stop() == 1
    assert 1 <= time.monotonic() - began < 20
    assert any("draining took too long" in line for line in sidecar.errors)
    assert not any("Traceback" in line for line in sidecar.errors)
    with pytest.raises(grpc.RpcError):
        answer()
    gate.open()
    sidecar.start()
    assert list(client.open("t", "p", epochs=list(epochs.values())).persisted) == [1]
    assert client.rows("t") == [("p", 0), ("p", 1)]
    client.close()


def test_drain_timeout_while_a_topic_is_made(held: tuple[Sidecar, Gate]) -> None:
    """Its end, which was asked for, is none that a supervisor would have to know of."""
    sidecar, gate = held
    gate.start(sidecar)
    client = Client(sidecar.address)
    gate.close()
    making = client.admin.CreateTopic.future(admin_pb2.CreateTopicRequest(topic="t"))
    while not gate.holds:
        time.sleep(0.001)
    assert sidecar.stop() == 1
    assert any("draining took too long" in line for line in sidecar.errors)
    assert not [entry for entry in sidecar.log if entry["level"] == "critical"]
    making.cancel()
    client.close()


def test_sigterm_while_starting(start_sidecar: Callable[..., Sidecar]) -> None:
    """Asked to end before it serves, it ends all the same, and cleanly."""
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    client.publish_unary("t", batch([("p", 0)], client.epochs("t", "p")))
    sidecar.kill()
    began = len(sidecar.log)
    sidecar.spawn()
    while not any("RECOVERING" in entry["event"] for entry in sidecar.log[began:]):
        time.sleep(0.001)
    assert sidecar.stop() == 0
    sidecar.start()
    assert client.rows("t") == [("p", 0)]
    client.close()
