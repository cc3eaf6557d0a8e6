"""A sidecar for brokers over its life: time-outs, limits, restarts, deletion, and what all other services say of it."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar.shares import MAX_SHARE_BYTES
from seqdedupe.client import BrokerClient, Entry, InvalidRequestError, SeqdedupeError
from seqdedupe.client import Client as ProducerClient
from seqdedupe.limits import MAX_BATCH_ROWS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.topic.attached import ADMISSION_BYTES, CHECK_BYTES
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.attaching import Attaching, attached, check, numbers
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, refused
from tests.broker_sidecar.health import health_of

StartSidecar = Callable[..., Sidecar]

N, D = NOT_DUP, DUP

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

FULL = "persistent://public/default/t"
EXIT_WRONG = 2
QUICK = with_constants.environment(seqdedupe__topic__attached__ADMISSION_TIMEOUT_SECONDS=1)


@pytest.fixture
def for_brokers(start_sidecar: StartSidecar) -> Sidecar:
    return start_sidecar(log="broker")


@contextmanager
def client_of(sidecar: Sidecar) -> Iterator[Client]:
    client = Client(sidecar.address)
    yield client
    client.close()


# -- limits ---------------------------------------------------------------------------------------------------------


def test_an_admission_of_which_nothing_is_reported_ends_the_attachment(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(log="broker", module=with_constants.MODULE, environment=QUICK)
    with attached(sidecar.address, "t", "a") as broker:
        assert broker.judge((0, 1), (0, 2)) == [N, N]
        broker.report(0, persisted=1, position=b"p1")
        why = broker.ended()
        assert (why.reason, "1 seconds" in why.message) == ("NOT_ATTACHED", True)
        assert refused(lambda: numbers(sidecar.address, "t", "a")).reason == "NOT_ATTACHED"
    with attached(sidecar.address, "t", "a") as broker:
        assert broker.replay_after == b"p1"
        assert broker.judge((0, 1), (0, 2)) == [D, N]
        broker.report(0, persisted=1, position=b"p2")
        with attached(sidecar.address, "other", "a") as other:
            # Somebody else's admission times out; an attachment with nothing in flight stays.
            assert other.judge((0, 1)) == [N]
            assert other.ended().reason == "NOT_ATTACHED"
        assert broker.judge((0, 2)) == [D]


def test_a_broker_that_does_not_report_is_told_to_wait_and_disturbs_nobody(for_brokers: Sidecar) -> None:
    with attached(for_brokers.address, "t", "a") as broker:
        for first in itertools.count(0, MAX_BATCH_ROWS):
            broker.send(checks=[check(*[(0, first + i) for i in range(MAX_BATCH_ROWS)])])
            answer = broker.answer()
            if answer.refusals:
                break
            assert len(answer.checked[0].verdicts) == MAX_BATCH_ROWS
        [refusal] = answer.refusals
        assert (refusal.reason, refusal.retry_delay_ms) == ("QUEUE_FULL", 50)
        most = MAX_SHARE_BYTES + MAX_BATCH_ROWS * ADMISSION_BYTES + CHECK_BYTES
        assert most // 4 < first * ADMISSION_BYTES <= most
        with attached(for_brokers.address, "other", "a") as other:
            assert other.judge((0, 1)) == [N]
        broker.report(0, persisted=first, position=b"far")
        assert broker.judge((0, 0), (0, first)) == [D, N]


# -- snapshots and the trim position --------------------------------------------------------------------------------


def test_what_may_be_trimmed_is_never_asked_for_again(start_sidecar: StartSidecar) -> None:
    """Positions are numbers here. News of the trim position comes by itself, and kill -9 takes nothing of it back."""
    sidecar = start_sidecar(log="broker", deduplication_entries_interval=5)
    next_id, told = 0, -1
    for _ in range(3):
        with grpc.insecure_channel(sidecar.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            broker = Attaching(channel, "t")
            broker.register("a")
            known = int(broker.replay_after or b"-1")
            assert told <= known < next_id
            entries = [(0, i, i, b"%d" % i) for i in range(known + 1, next_id)]
            if entries:
                broker.replay(*entries, after=broker.replay_after)
            assert broker.ready(b"%d" % (next_id - 1) if next_id else b"") == len(entries)
            for admission in range(12):
                assert broker.judge((0, next_id)) == [N]
                broker.report(admission, persisted=1, position=b"%d" % next_id)
                next_id += 1
            told = max(told, int(broker.trim_position or b"-1"))
            while told < next_id - 5:
                told = max(told, int(next(broker.call).trim_position or b"-1"))
            assert told < next_id
            sidecar.restart()


def test_without_a_snapshot_everything_is_replayed(for_brokers: Sidecar) -> None:
    with attached(for_brokers.address, "t", "a") as broker:
        assert broker.judge((0, 1)) == [N]
        broker.report(0, persisted=1, position=b"p1")
        assert broker.judge((0, 1)) == [D]
        assert broker.trim_position == b""
    for_brokers.restart()
    with grpc.insecure_channel(for_brokers.address) as channel:
        assert Attaching(channel, "t").replay_after == b""


def test_draining_ends_attachments_after_a_last_snapshot(for_brokers: Sidecar) -> None:
    with attached(for_brokers.address, "t", "a") as broker:
        assert broker.judge((0, 1), (0, 2)) == [N, N]
        broker.report(0, persisted=1, position=b"p1")
        assert broker.judge((0, 1)) == [D]
        status: list[int] = []
        stopping = threading.Thread(target=lambda: status.append(for_brokers.stop()))
        stopping.start()
        assert broker.ended().reason == "DRAINING"
        stopping.join(LAST_RESORT_SECONDS)
    assert status == [0]
    for_brokers.start()
    with attached(for_brokers.address, "t", "a") as broker:
        assert broker.replay_after == b"p1"
        assert broker.judge((0, 1), (0, 2)) == [D, N]


# -- topics ---------------------------------------------------------------------------------------------------------


def test_deleting_an_attached_topic_ends_its_attachment(for_brokers: Sidecar) -> None:
    with client_of(for_brokers) as client, attached(for_brokers.address, "t", "a") as broker:
        create = admin_pb2.CreateTopicRequest(topic="t")
        assert refused(lambda: client.admin.CreateTopic(create)).reason == "TOPIC_EXISTS"
        assert broker.judge((0, 1)) == [N]
        broker.report(0, persisted=1, position=b"p1")
        assert broker.judge((0, 1)) == [D]
        client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="t"))
        assert broker.ended().reason == "TOPIC_NOT_FOUND"
    with attached(for_brokers.address, "t", "a") as again:
        assert again.replay_after == b""
        assert again.incarnation > broker.incarnation
        assert again.judge((0, 1)) == [N]


def test_topics_are_not_made_where_that_is_not_wanted(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(log="broker", allow_auto_topic_creation=False)
    with client_of(sidecar) as client:
        with grpc.insecure_channel(sidecar.address) as channel:
            stream = Attaching(channel)
            stream.send_raw(b"\x12\x03\x0a\x01t")
            assert stream.ended().reason == "TOPIC_NOT_FOUND"
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t"))
    with attached(sidecar.address, "t", "a") as broker:
        assert broker.judge((0, 1)) == [N]


def test_a_policy_is_in_force_at_once_and_after_kill_9(for_brokers: Sidecar) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_enabled=True, overlap=admin_pb2.OVERLAP_POLICY_PULSAR)
    with client_of(for_brokers) as client, attached(for_brokers.address, "t", "a") as broker:
        assert broker.judge((0, 5)) == [N]
        broker.report(0, persisted=1, position=b"p1")
        assert broker.refusal(check((0, 4, 6))).reason == "OVERLAP"
        client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="t", policy=policy))
        assert broker.judge((0, 4, 6)) == [D]
        none = admin_pb2.SetTopicPolicyRequest(topic="t", policy=admin_pb2.TopicPolicy(retention_size_in_mb=1))
        assert refused(lambda: client.admin.SetTopicPolicy(none)).reason == "INVALID_REQUEST"
    for_brokers.restart()
    with client_of(for_brokers) as client, attached(for_brokers.address, "t", "a") as broker:
        assert broker.replay_after == b"p1", "a policy is stored with a snapshot"
        assert broker.judge((0, 4, 6)) == [D]
        assert client.topic("t").set_policy == policy


def test_health_of_a_topic_is_whether_its_checks_are_answered(for_brokers: Sidecar) -> None:
    seen: list[int] = []
    with grpc.insecure_channel(for_brokers.address) as channel:
        watch = health_of(channel).Watch(health_pb2.HealthCheckRequest(service=FULL))

        def becomes(status: int) -> None:
            while not seen or seen[-1] != status:
                seen.append(next(watch).status)

        becomes(SERVICE_UNKNOWN)
        broker = Attaching(channel, "t")
        becomes(NOT_SERVING)
        broker.ready()
        becomes(SERVING)
        broker.end()
        becomes(NOT_SERVING)
        assert health_of(channel).Check(health_pb2.HealthCheckRequest()).status == SERVING
        with attached(for_brokers.address, "t") as again:
            becomes(SERVING)
            again.send(checks=[check((9, 9))])
            again.answer()
            becomes(SERVING)
            again.send_raw(b"\xff")
            again.ended()
        becomes(NOT_SERVING)
        watch.cancel()
    assert seen == [SERVICE_UNKNOWN, NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING]


# -- other kinds of sidecars and clients ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["embedded", "broker"])
def test_a_data_directory_of_the_other_kind_is_refused_and_left_alone(start_sidecar: StartSidecar, first: str) -> None:
    second = {"embedded": "broker", "broker": "embedded"}[first]
    sidecar = start_sidecar(log=first)
    with client_of(sidecar) as client:
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t"))
    sidecar.stop()
    sidecar.keys["log"] = second
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    [line] = [line for line in sidecar.errors if "INVALID_CONFIGURATION" in line]
    assert f"log = {second!r}" in line
    assert (FULL if second == "embedded" else "has embedded logs") in line
    sidecar.keys["log"] = first
    sidecar.start()
    with client_of(sidecar) as client:
        assert client.topic("t").name == FULL


def test_the_logs_of_a_lost_store_are_not_taken_for_a_brokers_directory(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar()
    with client_of(sidecar) as client:
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t"))
    sidecar.stop()
    (sidecar.data / "store").rename(sidecar.folder / "lost")
    sidecar.keys["log"] = "broker"
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    assert any("INVALID_CONFIGURATION" in line for line in sidecar.errors)


async def test_a_client_of_the_wrong_kind_is_told_so(for_brokers: Sidecar, shared_sidecar: Sidecar) -> None:
    async with ProducerClient(for_brokers.address) as client:
        with pytest.raises(SeqdedupeError) as of_producer:
            async with client.producer("t", "p") as producer:
                await producer.send(b"x")
    assert "log = embedded" in of_producer.value.hint

    async def nothing(after: bytes) -> AsyncIterator[Entry]:
        for entry in list[Entry]():
            yield entry

    async with BrokerClient(shared_sidecar.address) as broker:
        with pytest.raises(SeqdedupeError) as of_broker:
            await broker.attach("t", nothing, last_position=b"")
    assert "log = broker" in of_broker.value.hint


async def test_a_bad_name_or_id_does_not_end_the_attachment_of_a_client(for_brokers: Sidecar) -> None:
    from seqdedupe.client import Range, Verdict
    from tests.conformance.broker import ListBroker, Stored

    broker = ListBroker(for_brokers.address, "t")
    await broker.attach()
    for bad in (Range("", 1), Range("a\0", 1), Range("x" * 256, 1), Range("\ud800", 1), Range("a", 2**63)):
        with pytest.raises(InvalidRequestError):
            await broker.publish(Stored(bad))
    assert await broker.publish(Stored(Range("a", 1))) is Verdict.NOT_DUP
    with client_of(for_brokers) as client:
        policy = admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT)
        client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="t", policy=policy))
    with pytest.raises(InvalidRequestError, match="GAP") as gap:
        await broker.publish(Stored(Range("a", 3)))
    assert (gap.value.numbers["row"], gap.value.numbers["expected_sequence_id"]) == ("0", "2")
    assert await broker.publish(Stored(Range("a", 2))) is Verdict.NOT_DUP
    await broker.close()


def test_the_command_shows_topics_and_producers(for_brokers: Sidecar, tmp_path: Path) -> None:
    command = str(Path(sys.executable).with_name("seqdedupe"))

    def run(*arguments: str) -> str:
        return subprocess.run(
            [command, *arguments],
            env=os.environ | {"SEQDEDUPE_ADDRESS": for_brokers.address},
            capture_output=True,
            text=True,
            check=True,
            timeout=LAST_RESORT_SECONDS,
            cwd=tmp_path,
        ).stdout

    with attached(for_brokers.address, "t", "a", "b") as broker:
        assert broker.judge((0, 5), (0, 6)) == [N, N]
        broker.report(0, persisted=1, position=b"p1")
        assert broker.judge((0, 5)) == [D]
        [topic] = json.loads(run("topics", "--json"))
        assert topic["name"] == FULL
        shown = json.loads(run("topics", "show", "t", "--json"))
        assert (shown["producers"], shown["state"]) == (2, "SERVING")
        found = json.loads(run("producers", "t", "--json"))
        assert {one["name"]: (one["pushed"], one["persisted"]) for one in found} == {"a": (6, 5), "b": (-1, -1)}
        run("snapshot", "t")
        run("topics", "show", "t")
        run("producers", "t")
        assert broker.judge((0, 5)) == [D]
        assert broker.trim_position == b"p1"
