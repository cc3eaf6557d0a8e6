"""Verdicts, receipts, what is in flight, and the policy, over the wire."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from seqdedupe.limits import LINK_LEFT_OUT, MAX_BATCH_ROWS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, publish_pb2
from tests.broker_sidecar.calls import (
    DUP,
    NOT_DUP,
    UNKNOWN,
    Client,
    batch,
    frame_bytes,
    receipt_of,
    refused,
    verdicts,
)
from tests.broker_sidecar.gate import Gate

LARGE_PAYLOAD_BYTES = 1_900_000
WAIT_SECONDS = LAST_RESORT_SECONDS


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, Gate]]:
    """A sidecar behind a gate, shared by this module's tests."""
    folder = tmp_path_factory.mktemp("held")
    sidecar, gate = Sidecar(folder / "sidecar"), Gate(folder / "gate")
    gate.start(sidecar)
    yield sidecar, gate
    sidecar.kill()


@pytest.fixture
def gate(held: tuple[Sidecar, Gate]) -> Iterator[Gate]:
    yield held[1]
    held[1].open()


@pytest.fixture
def client(held: tuple[Sidecar, Gate]) -> Iterator[Client]:
    client = Client(held[0].address)
    yield client
    client.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns when the condition holds; fails after a time that is long for anything here."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.005)


def pushed(client: Client, topic: str, name: str, sequence_id: int) -> None:
    """Returns when the sidecar has handed a message to the log."""
    wait_until(lambda: client.producer(topic, name)[0] >= sequence_id, f"{name} {sequence_id}")


def test_a_receipt_says_where_every_message_stands(client: Client, topic: str) -> None:
    assert client.open(topic, "another").HasField("durable_index"), "of an empty topic it is 0"
    epochs = client.epochs(topic, "p", "q")
    stream = client.stream(topic)
    incarnation = client.topic(topic).incarnation
    for first in (0, 6):
        ids = [("p", first), ("q", first), ("q", first + 2), ("p", first + 5)]
        receipt = stream.receipt(batch(ids, epochs, {"p": first - 1, "q": -1 if not first else 2}))
        assert list(receipt.verdicts) == []
        assert receipt.first_index == (0 if not first else 4)
        place = receipt.first_message_id
        assert (place.ledger_id, place.entry_id, place.batch_index) == (incarnation, receipt.first_index, -1)
        assert client.open(topic, "another").durable_index == receipt.first_index + 4
    stored = [(record.base_index, record.rows) for record in client.records(topic)]
    assert stored == [(0, 4), (4, 4)]
    last = client.topic(topic).last
    assert (last.index, last.message_id.entry_id, last.incarnation) == (7, 7, incarnation)


def test_a_batch_of_old_and_new_ids_is_judged_row_by_row(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q", "old")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0), ("p", 1), ("p", 2), ("q", 7), ("old", 1)], epochs, {"q": -1, "old": -1}))
    rows = [("q", 6), ("p", 1), ("q", 7), ("q", 8), ("p", 2), ("p", 3), ("old", 1), ("p", 9)]
    receipt = stream.receipt(batch(rows, epochs, {"q": -1, "p": 0, "old": -1}))
    assert list(receipt.verdicts) == [DUP, DUP, DUP, NOT_DUP, DUP, NOT_DUP, DUP, NOT_DUP]
    # 6 of "q" is at the watermark's foot and was never sent: Dup, but without a place, which would be a proof.
    assert list(receipt.known_rows) == [1, 2, 4, 6]
    assert list(receipt.known_indexes) == [1, 3, 2, 4]
    assert list(receipt.known_entry_ids) == [1, 3, 2, 4]
    assert set(receipt.known_ledger_ids) == {client.topic(topic).incarnation}
    assert receipt.first_index == 5
    assert client.rows(topic)[5:] == [("q", 8), ("p", 3), ("p", 9)]
    [_, cut] = client.records(topic)
    # The rows before the cut are the links now, and who has no row left is not in the batch.
    links = dict(zip(cut.batch.producer_names.decode(), cut.batch.previous_sequence_ids, strict=True))
    assert links == {"q": 7, "p": 2}


def test_all_old_is_acknowledged_and_nothing_appended(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    content = batch([("p", i) for i in range(50)], epochs)
    stream.receipt(content)
    before = client.state(topic)
    for _ in range(3):
        again = stream.receipt(content)
        assert list(again.verdicts) == [DUP] * 50
        assert (again.first_index, again.HasField("first_message_id")) == (-1, False)
        assert list(again.known_indexes) == list(range(50))
    unary = client.publish_unary(topic, content)
    assert list(unary.verdicts) == [DUP] * 50
    assert client.state(topic) == before


def test_in_flight_is_unknown_until_the_log_has_spoken(client: Client, gate: Gate, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream, other = client.stream(topic), client.stream(topic)
    stream.receipt(batch([("p", 0)], epochs))
    with gate.closed():
        first = stream.send(batch([("p", 1), ("p", 2)], epochs))
        pushed(client, topic, "p", 2)
        # In flight: not acknowledged, not shown to readers, and no Dup for anybody.
        again = other.receipt(batch([("p", 0), ("p", 1), ("p", 2)], epochs))
        assert list(again.verdicts) == [DUP, UNKNOWN, UNKNOWN]
        assert list(again.known_rows) == [0]
        assert again.first_index == -1
        assert client.end_index(topic) == 1
        assert client.rows(topic) == [("p", 0)]
        assert client.producer(topic, "p")[:2] == (2, 0)
        mixed = other.send(batch([("p", 2), ("p", 3)], epochs))
        pushed(client, topic, "p", 3)
        assert first not in stream.arrived
    assert verdicts(receipt_of(stream.answer(first)), 2) == [NOT_DUP] * 2
    answer = receipt_of(other.answer(mixed))
    assert list(answer.verdicts) == [UNKNOWN, NOT_DUP]
    # Unknown has ended by itself.
    assert list(other.receipt(batch([("p", 1), ("p", 2), ("p", 3)], epochs)).verdicts) == [DUP] * 3
    assert client.rows(topic) == [("p", i) for i in range(4)]


def test_link_may_be_left_out_only_with_nothing_in_flight(client: Client, gate: Gate, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    left_out = batch([("p", 5)], epochs, {"p": LINK_LEFT_OUT})
    with gate.closed():
        frame = stream.send(batch([("p", 0)], epochs))
        pushed(client, topic, "p", 0)
        assert refused(lambda: client.publish_unary(topic, left_out)).reason == "LINK_REQUIRED"
    stream.answer(frame)
    assert verdicts(client.publish_unary(topic, left_out), 1) == [NOT_DUP]


def test_kill_while_in_flight_ends_unknown(held: tuple[Sidecar, Gate], topic: str, tmp_path: Path) -> None:
    """A kill in the middle of a sync: the page cache has the write, so recovery finds it; the resend is Dup."""
    sidecar, gate = Sidecar(tmp_path / "sidecar"), Gate(tmp_path / "gate")
    gate.start(sidecar)
    client = Client(sidecar.address)
    try:
        epochs = client.epochs(topic, "p")
        stream = client.stream(topic)
        stream.receipt(batch([("p", 0)], epochs))
        gate.close()
        frame = stream.send(batch([("p", 1)], epochs))
        wait_until(lambda: gate.holds, "a sync")
        sidecar.kill()
        with pytest.raises(grpc.RpcError) as e:
            stream.answer(frame)
        assert e.value.code() == grpc.StatusCode.UNAVAILABLE
        gate.open()
        sidecar.start()
        opened = client.open(topic, "p", epochs=list(epochs.values()))
        assert list(opened.persisted) == [1]
        receipt = client.publish_unary(topic, batch([("p", 1), ("p", 2)], epochs))
        assert list(receipt.verdicts) == [DUP, NOT_DUP]
        assert client.rows(topic) == [("p", 0), ("p", 1), ("p", 2)]
    finally:
        client.close()
        sidecar.kill()


def test_open_waits_for_what_is_in_flight_and_fences_when_it_is_durable(client: Client, gate: Gate, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0)], epochs))
    opened: list[publish_pb2.OpenResponse] = []
    with gate.closed():
        frame = stream.send(batch([("p", 1)], epochs))
        pushed(client, topic, "p", 1)
        thread = threading.Thread(target=lambda: opened.append(client.open(topic, "p")))
        thread.start()
        wait_until(lambda: client.producer(topic, "p")[2] != epochs["p"], "the new epoch")
        # The older session is shut out although the new one is not answered yet; for good only when that is certain.
        refusal = stream.refusal(batch([("p", 2)], epochs))
        assert (refusal.reason, refusal.retry_delay_ms > 0) == ("RECOVERING", True)
        assert not opened
    thread.join()
    assert stream.refusal(batch([("p", 2)], epochs, {"p": 1})).reason == "FENCED"
    # What was in flight has settled first: it counts.
    assert list(opened[0].persisted) == [1]
    assert verdicts(receipt_of(stream.answer(frame)), 1) == [NOT_DUP]
    assert client.rows(topic) == [("p", 0), ("p", 1)]


def test_unary_call_is_refused_when_the_queue_is_full_and_streams_wait(client: Client, gate: Gate, topic: str) -> None:
    """A full queue holds streams back and refuses unary calls; nothing is lost, and others are not touched."""
    names = [f"p{i}" for i in range(5)]
    epochs = client.epochs(topic, *names, "small")
    client.epochs(topic + "-other", "p")
    streams = {name: client.stream(topic) for name in names}
    payload = bytes(LARGE_PAYLOAD_BYTES)
    frames = {}
    small = batch([("small", 0)], epochs)
    with gate.closed():
        for name, stream in streams.items():
            # More than a stream may have in flight, and together more than the topic may.
            frames[name] = [
                stream.send(batch([(name, i)], epochs, payloads=[payload]))
                for i in range(10)
            ]  # fmt: skip
        wait_until(lambda: is_full(client, topic), "a full queue")
        answer = refused(lambda: client.publish_unary(topic, small))
        assert (answer.reason, answer.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert answer.retry_delay_ms > 0
        admitted = sum(client.producer(topic, name)[0] + 1 for name in names)
        # 64 MiB, and at most one frame a stream above that.
        assert admitted * LARGE_PAYLOAD_BYTES < 64 * 1024 * 1024 + 6 * 4_000_000
        # Reads and questions are answered meanwhile.
        assert client.end_index(topic + "-other") == 0
    for name, stream in streams.items():
        for frame in frames[name]:
            assert verdicts(receipt_of(stream.answer(frame)), 1) == [NOT_DUP]
        stream.end()
    assert verdicts(client.publish_unary(topic, small), 1) == [NOT_DUP]
    assert client.end_index(topic) == 51


def is_full(client: Client, topic: str) -> bool:
    """Asks with what is refused in any case: the queue is looked at first."""
    return refused(lambda: client.publish_unary(topic, batch([("small", 0)], {"small": 2**60}))).reason == "QUEUE_FULL"


def test_receipts_of_one_commit_come_together_and_answers_in_any_order(client: Client, gate: Gate, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0)], epochs))
    with gate.closed():
        new = stream.send(batch([("p", 1)], epochs))
        pushed(client, topic, "p", 1)
        old = stream.send(batch([("p", 0)], epochs))
        assert list(receipt_of(stream.answer(old)).verdicts) == [DUP]
        assert stream.arrived[-1] == old
    stream.answer(new)


def test_frame_numbers_are_repeated_whatever_they_are(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    for i, number in enumerate((1, 0, 2**64 - 1, 1)):
        stream.send(batch([("p", i)], epochs), frame=number)
        assert verdicts(receipt_of(stream.answer(number)), 1) == [NOT_DUP]


def test_the_first_message_of_a_stream_may_be_a_frame(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    requests = [
        publish_pb2.PublishStreamRequest(
            topic=topic, frames=[publish_pb2.Frame(number=1, batch=batch([("p", 0)], epochs))]
        ),
        publish_pb2.PublishStreamRequest(frames=[publish_pb2.Frame(number=2, batch=batch([("p", 1)], epochs))]),
    ]
    answers = list(client.publish.PublishStream(iter(requests), timeout=WAIT_SECONDS))
    assert [receipt.frame for answer in answers for receipt in answer.receipts] == [1, 2]
    assert client.rows(topic) == [("p", 0), ("p", 1)]


def test_message_ids_of_dups_are_known_for_the_last_65536(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q")
    stream = client.stream(topic)
    stream.receipt(batch([("q", 0), ("q", 1)], epochs))
    ids = range(MAX_BATCH_ROWS - 1)
    stream.receipt(batch([("p", i) for i in ids], epochs, payloads=[b""] * len(ids)))
    receipt = stream.receipt(batch([("q", 0), ("q", 1), ("p", 0)], epochs))
    assert list(receipt.verdicts) == [DUP] * 3
    # 65,537 messages are in the log: the first one has left the ring.
    assert list(zip(receipt.known_rows, receipt.known_indexes, strict=True)) == [(1, 1), (2, 2)]


# -- policy ------------------------------------------------------------------------------------------------------


def set_policy(client: Client, topic: str, enabled: bool) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_enabled=enabled)
    answer = client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic=topic, policy=policy))
    assert answer.topic.policy.deduplication_enabled == enabled


def test_policy_off_stores_duplicates_and_on_again_knows_the_numbers(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    content = batch([("p", 0), ("p", 1)], epochs)
    stream.receipt(content)
    set_policy(client, topic, False)
    assert verdicts(stream.receipt(content), 2) == [NOT_DUP] * 2
    assert verdicts(stream.receipt(batch([("p", 2), ("p", 3)], epochs)), 2) == [NOT_DUP] * 2
    # Sessions and links stay, also with deduplication off.
    assert stream.refusal(batch([("p", 9)], epochs)).reason == "PREDECESSOR_MISSING"
    assert stream.refusal(batch([("p", 4)], {"p": 2**60})).reason == "INVALID_EPOCH"
    set_policy(client, topic, True)
    assert list(stream.receipt(batch([("p", i) for i in range(5)], epochs)).verdicts) == [DUP] * 4 + [NOT_DUP]
    assert client.rows(topic) == [("p", i) for i in (0, 1, 0, 1, 2, 3, 4)]


def test_a_policy_must_be_said(client: Client, topic: str) -> None:
    client.epochs(topic, "p")
    request = admin_pb2.SetTopicPolicyRequest(topic=topic)
    assert refused(lambda: client.admin.SetTopicPolicy(request)).reason == "INVALID_REQUEST"
    assert client.topic(topic).policy.deduplication_enabled


def test_raw_frame_helper_sends_what_the_schema_would() -> None:
    """The control of the helper of all these tests: its bytes are an ordinary message."""
    content = batch([("p", 0)], {"p": 1})
    expected = publish_pb2.PublishStreamRequest(topic="t", frames=[publish_pb2.Frame(number=3, batch=content)])
    assert publish_pb2.PublishStreamRequest.FromString(frame_bytes(3, content, "t")) == expected
