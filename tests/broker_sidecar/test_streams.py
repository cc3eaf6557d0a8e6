"""Clients that do not read, read slowly, or go away: bounded memory, and nobody else notices."""

import time
from collections.abc import Callable

import grpc
import psutil
import pytest

from seqdedupe.limits import MAX_BATCH_ROWS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import read_pb2
from tests.broker_sidecar.calls import (
    DUP,
    NOT_DUP,
    TIMEOUT_SECONDS,
    Client,
    batch,
    encoded,
    names_of,
    receipt_of,
    verdicts,
)

MIB = 1024 * 1024
PAYLOAD_BYTES = 1_500_000


def resident_bytes(sidecar: Sidecar) -> int:
    size: int = psutil.Process(sidecar.pid).memory_info().rss
    return size


def until_it_stands(value: Callable[[], int], seconds: float = 1.0) -> int:
    """What a count is when it has not changed for a while."""
    before, since = value(), time.monotonic()
    until = since + 120
    while time.monotonic() < since + seconds:
        assert time.monotonic() < until
        time.sleep(0.02)
        now = value()
        if now != before:
            before, since = now, time.monotonic()
    return before


def test_a_client_that_never_reads_its_receipts(client: Client, shared: Sidecar, topic: str) -> None:
    """Old rows make answers larger than what is sent: the sidecar stops reading instead of storing them up."""
    epochs = client.epochs(topic, "p", "q")
    content = batch([("p", i) for i in range(MAX_BATCH_ROWS)], epochs, payloads=[b""] * MAX_BATCH_ROWS)
    client.publish_unary(topic, content)
    bystander = client.stream(topic)
    bystander.receipt(batch([("q", 0)], epochs))
    greedy = Client(shared.address)
    stream = greedy.stream(topic)
    data = encoded(content)
    frames = [stream.send(data) for _ in range(100)]
    before = resident_bytes(shared)
    taken = until_it_stands(lambda: client.topic(topic).dup) // MAX_BATCH_ROWS
    # Unbounded it would take them all, and hold 190 MB of answers.
    assert 1 <= taken <= 30
    assert resident_bytes(shared) - before < 100 * MIB
    for i in range(1, 50):
        assert verdicts(bystander.receipt(batch([("q", i)], epochs)), 1) == [NOT_DUP]
    # When it reads at last, it finds all of them, in messages that are not too large for a client's defaults.
    for frame in frames:
        answer = receipt_of(stream.answer(frame))
        assert set(answer.verdicts) == {DUP}
        assert len(answer.known_indexes) >= MAX_BATCH_ROWS - 50
    assert client.topic(topic).dup == 100 * MAX_BATCH_ROWS
    stream.end()
    bystander.end()
    greedy.close()


def test_a_client_that_never_reads_the_receipts_of_new_messages(client: Client, shared: Sidecar, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q")
    greedy = Client(shared.address)
    stream = greedy.stream(topic)
    payload = bytes(PAYLOAD_BYTES)
    before = resident_bytes(shared)
    frames = [stream.send(batch([("p", i)], epochs, payloads=[payload])) for i in range(60)]
    until_it_stands(lambda: client.topic(topic).last.index)
    assert resident_bytes(shared) - before < 200 * MIB
    assert verdicts(client.publish_unary(topic, batch([("q", 0)], epochs)), 1) == [NOT_DUP]
    for frame in frames:
        assert verdicts(receipt_of(stream.answer(frame)), 1) == [NOT_DUP]
    greedy.close()


def test_a_slow_reader_holds_up_nobody_and_gets_everything(client: Client, shared: Sidecar, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    payload = bytes(PAYLOAD_BYTES)
    for i in range(40):
        stream.send(batch([("p", i)], epochs, payloads=[payload]))
    stream.end()
    request = read_pb2.ReadStreamRequest(topic=topic, follow=True)
    slow = [client.reading.ReadStream(request, timeout=LAST_RESORT_SECONDS) for _ in range(4)]
    heads = [next(reader) for reader in slow]
    assert [head.end_index for head in heads] == [40] * 4
    before = resident_bytes(shared)
    time.sleep(0.5)
    assert resident_bytes(shared) - before < 60 * MIB
    # Others read and publish meanwhile.
    assert sum(record.rows for record in client.records(topic)) == 40
    assert verdicts(client.publish_unary(topic, batch([("p", 40)], epochs)), 1) == [NOT_DUP]
    for reader in slow:
        found: list[int] = []
        while len(found) < 41:
            found += [i for record in next(reader).records for i in record.batch.sequence_ids]
        assert found == list(range(41))
        reader.cancel()


def test_followers_that_read_nothing_hold_little_memory_and_nobody_up(
    client: Client, shared: Sidecar, topic: str
) -> None:
    epochs = client.epochs(topic, "p")
    request = read_pb2.ReadStreamRequest(topic=topic, follow=True)
    stuck = [Client(shared.address) for _ in range(20)]
    unread = [one.reading.ReadStream(request, timeout=TIMEOUT_SECONDS) for one in stuck]
    for call in unread:
        next(call)
    follower = client.reading.ReadStream(request, timeout=TIMEOUT_SECONDS)
    payload = bytes(PAYLOAD_BYTES // 4)
    before = resident_bytes(shared)
    stream = client.stream(topic)
    frames, found = 100, list[int]()
    for i in range(frames):
        stream.receipt(batch([("p", i)], epochs, payloads=[payload]))
    while len(found) < frames:
        found += [i for record in next(follower).records for i in record.batch.sequence_ids]
    stream.end()
    assert found == list(range(frames))
    # All of it would be 750 MB.
    assert resident_bytes(shared) - before < 200 * MIB
    late: list[int] = []
    while len(late) < frames:
        late += [i for record in next(unread[-1]).records for i in record.batch.sequence_ids]
    assert late == found
    for one in stuck:
        one.close()


def test_a_client_that_goes_away_leaves_its_frames_and_no_debt(client: Client, shared: Sidecar, topic: str) -> None:
    """A cancelled call's frames stay admitted; what they took of the queue is returned when they have settled."""
    names = [f"p{i}" for i in range(25)]
    epochs = client.epochs(topic, *names)
    payload = bytes(PAYLOAD_BYTES)
    for name in names:
        leaving = Client(shared.address)
        stream = leaving.stream(topic)
        for i in range(4):
            stream.send(batch([(name, i)], epochs, payloads=[payload]))
        while client.producer(topic, name)[0] < 0:
            time.sleep(0.001)
        stream.call.cancel()
        leaving.close()
    # 150 MB were sent in all, more than the topic may have in flight: had it not come back, this would be refused.
    persisted = client.open(topic, *names, epochs=list(epochs.values())).persisted
    assert min(persisted) >= 0
    rest = [(name, i) for name, last in zip(names, persisted, strict=True) for i in range(last + 1, 4)]
    if rest:
        client.publish_unary(topic, batch(rest, epochs))
    found: dict[str, list[int]] = {name: [] for name in names}
    for record in client.records(topic):
        listed = names_of(record.batch)
        owners = record.batch.producer_indexes or [0] * record.rows
        for p, i in zip(owners, record.batch.sequence_ids, strict=True):
            found[listed[p]].append(i)
    assert found == {name: [0, 1, 2, 3] for name in names}


def test_a_stream_without_a_word_and_one_that_only_names_its_topic(client: Client, topic: str) -> None:
    client.open(topic, "p")
    silent: grpc.StreamStreamMultiCallable[bytes, bytes]
    silent = client.channel.stream_stream("/seqdedupe.v1.PublishService/PublishStream")
    assert list(silent(iter([]), timeout=LAST_RESORT_SECONDS)) == []
    polite = client.stream(topic)
    polite.end()
    assert polite.arrived == []


def test_follow_and_stop_index_wait_for_what_is_not_there_yet(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    follower = client.reading.ReadStream(
        read_pb2.ReadStreamRequest(topic=topic, follow=True), timeout=LAST_RESORT_SECONDS
    )
    stopper = client.reading.ReadStream(
        read_pb2.ReadStreamRequest(topic=topic, stop_index=3), timeout=LAST_RESORT_SECONDS
    )
    assert next(follower).end_index == next(stopper).end_index == 0
    for i in range(0, 6, 2):
        client.publish_unary(topic, batch([("p", i), ("p", i + 1)], epochs))
    stopped = [i for answer in stopper for record in answer.records for i in record.batch.sequence_ids]
    assert stopped == [0, 1, 2]
    followed: list[int] = []
    while len(followed) < 6:
        followed += [i for record in next(follower).records for i in record.batch.sequence_ids]
    assert followed == list(range(6))
    follower.cancel()
    with pytest.raises(grpc.RpcError):
        next(follower)
