"""The façade for threads, against a real sidecar."""

import os
import subprocess
import sys
import threading

import pytest

from seqdedupe.client import (
    FencedError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    Position,
    ProducerConfig,
    UnavailableError,
    Verdict,
    blocking,
)
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2


def read_ids(client: blocking.Client, topic: str) -> list[int]:
    with client.reader(topic) as reader:
        return [message.sequence_id for message in reader]


def test_what_is_sent_is_read_back(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        client.wait_ready(LAST_RESORT_SECONDS)
        with client.producer(topic, "p") as producer:
            receipts = [
                producer.send(b"%d" % i, key=f"k{i}", event_time=i + 1, properties={"i": str(i)}) for i in range(2500)
            ]
            result = producer.send_batch([b"a", None], [9000, 9001]).result(LAST_RESORT_SECONDS)
            published = [receipt.result(LAST_RESORT_SECONDS) for receipt in receipts]
            assert all(receipt.done() for receipt in receipts)
            assert producer.last_sequence_id == 9001
            assert result.indexes.tolist() == [2500, 2501]
        with client.reader(topic) as reader:
            messages = list(reader)
            assert reader.position == messages[-1].position
        assert [p.verdict for p in published] == [Verdict.NOT_DUP] * 2500
        assert [p.message_id for p in published] == [m.message_id for m in messages[:2500]]
        assert [(m.payload, m.key, m.event_time_ms, m.properties) for m in messages] == [
            (b"%d" % i, b"k%d" % i, i + 1, {"i": str(i)}) for i in range(2500)
        ] + [(b"a", None, 0, {}), (None, None, 0, {})]
        with client.reader(topic, messages[10].position) as reader:
            assert sum(len(stored) for stored in reader.batches()) == 2502 - 11
        with client.producer(topic, "p") as producer:
            assert producer.persisted_position == Position(
                messages[-1].message_id.ledger_id, messages[-1].message_id, 2501
            )


def test_threads_share_a_producer(shared_sidecar: Sidecar, topic: str) -> None:
    config = ProducerConfig(max_batch_rows=7, max_in_flight_batches=3)
    with blocking.Client(shared_sidecar.address) as client, client.producer(topic, "p", config) as producer:
        sent: list[list[int]] = [[] for _ in range(4)]

        def send(thread: int) -> None:
            receipts = [producer.send(b"%d" % thread) for _ in range(500)]
            sent[thread] = [receipt.result(LAST_RESORT_SECONDS).sequence_id for receipt in receipts]

        threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with client.reader(topic) as reader:
            messages = list(reader)
    assert [m.sequence_id for m in messages] == list(range(2000))
    for number, ids in enumerate(sent):
        assert [m.sequence_id for m in messages if m.payload == b"%d" % number] == ids


def test_a_batch_that_lingers_goes_by_itself(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client, client.producer(topic, "p") as producer:
        for _ in range(30):
            receipts = [producer.send(b"") for _ in range(5)]
            for receipt in receipts:
                receipt.result(LAST_RESORT_SECONDS)


def test_kill_9_in_mid_flow(sidecar: Sidecar) -> None:
    config = ProducerConfig(max_batch_rows=20, max_in_flight_batches=5)
    with blocking.Client(sidecar.address) as client, client.producer("t", "p", config) as producer:
        receipts: list[blocking.Receipt] = []
        for kill in range(3):
            restarting = threading.Thread(target=sidecar.restart)
            for i in range(1500):
                if i == 700:
                    restarting.start()
                receipts.append(producer.send(b"%d" % len(receipts)))
            restarting.join()
            assert producer.counters.connections >= kill + 1
        published = [receipt.result(LAST_RESORT_SECONDS) for receipt in receipts]
        assert [p.sequence_id for p in published] == list(range(4500))
        assert producer.counters.connections == 4
        assert read_ids(client, "t") == list(range(4500))


def test_failures_come_as_typed_errors(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        older = client.producer(topic, "p")
        older.open()
        older.send(b"").result(LAST_RESORT_SECONDS)
        with client.producer(topic, "p"):
            with pytest.raises(FencedError):
                older.send(b"").result(LAST_RESORT_SECONDS)
            with pytest.raises(FencedError):
                older.send(b"")
        with pytest.raises(FencedError):
            older.close()
        with pytest.raises(NotFoundError):
            client.admin.topic("unknown")
        with pytest.raises(NotFoundError):
            list(client.reader("unknown"))
        with client.producer(topic, "q") as producer:
            producer.send(b"", 5)
            with pytest.raises(InvalidRequestError):
                producer.send(b"", 5)
        with pytest.raises(InvalidRequestError):
            producer.send(b"")
        producer.close()
    with blocking.Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"0\.1 seconds"):
        client.wait_ready(0.1)


def test_an_abort_ends_the_waiting(sidecar: Sidecar) -> None:
    with blocking.Client(sidecar.address) as client:
        producer = client.producer("t", "p", ProducerConfig(max_batch_rows=1, max_in_flight_batches=2))
        producer.open()
        producer.send(b"").result(LAST_RESORT_SECONDS)
        sidecar.kill()
        receipts = [producer.send(b"") for _ in range(2)]
        ends: list[type[BaseException]] = []

        def send_once_more() -> None:
            try:
                producer.send(b"")
            except (OutcomeUnknownError, InvalidRequestError) as e:
                ends.append(type(e))

        stuck = threading.Thread(target=send_once_more)
        stuck.start()
        stuck.join(0.1)
        assert stuck.is_alive()
        with pytest.raises(OutcomeUnknownError, match=r"0\.05 seconds"):
            receipts[0].result(0.05)
        producer.abort()
        stuck.join(LAST_RESORT_SECONDS)
        assert len(ends) == 1
        for receipt in receipts:
            with pytest.raises(OutcomeUnknownError):
                receipt.result(LAST_RESORT_SECONDS)


def test_closing_a_reader_ends_the_wait_of_another_thread(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        with client.producer(topic, "p") as producer:
            producer.send(b"")
        reader = client.reader(topic, follow=True)
        seen: list[int] = []
        first = threading.Event()

        def read() -> None:
            for message in reader:
                seen.append(message.index)
                first.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert first.wait(LAST_RESORT_SECONDS)
        reader.close()
        thread.join(LAST_RESORT_SECONDS)
        assert not thread.is_alive()
        assert seen == [0]


def test_a_gap_ends_the_producer(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        client.admin.create_topic(topic)
        ended = client.producer(topic, "p")
        ended.open()
        ended.send(b"", 5).result(LAST_RESORT_SECONDS)
        client.admin.set_policy(topic, admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT))
        ended.send(b"", 6).result(LAST_RESORT_SECONDS)
        with pytest.raises(InvalidRequestError, match="leaves sequence ID 7 out") as gap:
            ended.send(b"", 8).result(LAST_RESORT_SECONDS)
        assert (gap.value.reason, gap.value.numbers["expected_sequence_id"]) == ("GAP", "7")
        with pytest.raises(InvalidRequestError, match="GAP"):
            ended.send(b"", 9)
        with pytest.raises(InvalidRequestError, match="GAP"):
            ended.close()
        assert client.admin.producer(topic, "p").persisted == 6
        # Opened again it goes on where it was.
        with client.producer(topic, "p") as producer:
            producer.send(b"", 7).result(LAST_RESORT_SECONDS)


def test_admin(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        admin = client.admin
        made = admin.create_topic(topic)
        assert made.policy.deduplication_enabled
        with pytest.raises(InvalidRequestError, match="TOPIC_EXISTS"):
            admin.create_topic(topic)
        off = admin_pb2.TopicPolicy(deduplication_enabled=False)
        set_, applied = admin.set_policy(topic, off)
        assert set_ == off
        assert not applied.deduplication_enabled
        assert not admin.topic(topic).policy.deduplication_enabled
        assert admin.policy(topic) == (set_, applied)
        assert admin.remove_policy(topic, "deduplication_enabled") == (admin_pb2.TopicPolicy(), made.policy)
        with client.producer(topic, "b") as b, client.producer(topic, "a"):
            b.send(b"", 41)
        assert [p.name for p in admin.producers(topic)] == ["b", "a"]
        assert admin.producer(topic, "b").persisted == 41
        assert admin.snapshot(topic).index == 0
        assert made.name in [t.name for t in admin.topics()]
        assert admin.version().max_batch_rows == 65_536
        admin.delete_topic(topic)
        with pytest.raises(NotFoundError):
            admin.producers(topic)


def test_a_process_ends_quietly_with_everything_left_open(shared_sidecar: Sidecar, topic: str) -> None:
    program = (
        "import sys; from seqdedupe.client import blocking\n"
        "client = blocking.Client(sys.argv[1]); producer = client.producer(sys.argv[2], 'p'); producer.open()\n"
        "producer.send(b'').result(); next(iter(client.reader(sys.argv[2], follow=True)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, shared_sidecar.address, topic],
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_batches_and_places_without_asyncio(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        with client.producer(topic, "p") as producer:
            for number in range(50):
                producer.send_batch([b"%d" % row for row in range(number * 20, number * 20 + 20)])
        ends = client.ends(topic)
        assert (ends.first_index, ends.last.index) == (0, 999)
        assert client.locate_time(topic, 0) == (ends.last.incarnation, 0)
        assert client.locate_bytes(topic, 0, 10**6) == (ends.last.incarnation, 1000)
        with client.reader(topic, 5, stop_index=777) as reader:
            assert next(reader).payload == b"5"
            stored = list(reader.batches())
        assert [batch.batch.payloads[row] for batch in stored for row in range(len(batch))] == [
            b"%d" % row for row in range(6, 777)
        ]


FORKS = """
import os, sys
from seqdedupe.client import InvalidRequestError
from seqdedupe.client.blocking import Client

def refused(act):
    try:
        act()
    except InvalidRequestError as e:
        return "forked" in e.message
    return False

before = os.fork()
if not before:  # a child of a process that has not used the client is as good as any
    Client(sys.argv[1]).admin.version()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(before, 0)[1]) == 0

client = Client(sys.argv[1])
producer = client.producer("forks", "p")
producer.open()
producer.send(b"first").result()
receipt = producer.send(b"parent")
reader = client.reader("forks")
next(reader)
child = os.fork()
if not child:
    acts = (
        lambda: producer.send(b"child"), producer.flush, lambda: client.ends("forks"), client.admin.version,
        lambda: Client(sys.argv[1]).admin.version(), lambda: list(reader), client.producer("forks", "q").open,
    )
    os._exit(sum(not refused(act) for act in acts))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
receipt.result()
producer.close()
sys.exit(status)
"""


def test_a_forked_process_says_so_at_the_first_call(shared_sidecar: Sidecar) -> None:
    """A child has neither gRPC's threads nor ours: without this it would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, shared_sidecar.address],
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert done.returncode == 0, done.stderr


FORKS_UNDER_LOAD = """
import subprocess, sys, threading
from seqdedupe.client.blocking import Client

producer = Client(sys.argv[1]).producer(sys.argv[2], "p")
producer.open()
stopping = threading.Event()

def publish():
    while not stopping.is_set():
        producer.send(b"x").result()

threads = [threading.Thread(target=publish) for _ in range(2)]
for thread in threads:
    thread.start()
crashed = False
for _ in range(int(sys.argv[3])):
    if subprocess.run(["true"], preexec_fn=lambda: None).returncode:
        crashed = True
        break
stopping.set()
for thread in threads:
    thread.join()
sys.exit(3 if crashed else 0)
"""


@pytest.mark.parametrize(
    ("environment", "children", "status"), [({}, 60, 0), ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, 2000, 3)]
)
def test_programs_are_started_while_messages_are_under_way(
    environment: dict[str, str], children: int, status: int, shared_sidecar: Sidecar, topic: str
) -> None:
    """As Spark starts its JVM. With gRPC's own handlers, the control arm, a child crashes sooner or later."""
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_UNDER_LOAD, shared_sidecar.address, topic, str(children)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert done.returncode == status, done.stderr
