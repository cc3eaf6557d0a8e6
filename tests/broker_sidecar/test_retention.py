"""Retention over the wire: what a reader learns whose messages are gone."""

import asyncio
import time
from collections.abc import Callable

from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch, refused, verdicts

PAYLOAD_BYTES = 1_990_000
SEGMENT_BYTES = 128 * 1024 * 1024
BATCHES = SEGMENT_BYTES // (2 * PAYLOAD_BYTES) + 3
"""A little more than one segment."""


def test_a_trimmed_position_is_said_to_be_trimmed(start_sidecar: Callable[..., Sidecar]) -> None:
    sidecar = start_sidecar(default_retention_size_in_mb=1)
    client = Client(sidecar.address)
    epochs = client.epochs("t", "p")
    stream = client.stream("t")
    payloads = [bytes(PAYLOAD_BYTES)] * 2
    # The last one alone: a segment is left behind between two writes, and one write may take many frames.
    for i in range(BATCHES - 1):
        stream.send(batch([("p", 2 * i), ("p", 2 * i + 1)], epochs, payloads=payloads))
    stream.end()
    last = 2 * BATCHES - 2
    stored = client.publish_unary("t", batch([("p", last), ("p", last + 1)], epochs, payloads=payloads))
    assert verdicts(stored, 2) == [NOT_DUP] * 2
    old = read_pb2.ReadStart(index=0)
    page = client.reading.Read(read_pb2.ReadRequest(topic="t", start=old, stop_index=1))
    assert page.records[0].base_index == 0
    position = client.topic("t").last
    position.index = position.message_id.entry_id = 1
    # The control: nothing is trimmed before a snapshot covers it.
    assert client.topic("t").first_index == 0
    client.admin.Snapshot(admin_pb2.SnapshotRequest(topic="t"))
    until = time.monotonic() + LAST_RESORT_SECONDS
    while not (first := client.topic("t").first_index):
        assert time.monotonic() < until
        time.sleep(0.01)
    for start in ({"index": 0}, {"index": first - 1}, {"after": position}):
        request = read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(**start))
        for call in (
            lambda request=request: client.reading.Read(request),
            lambda start=start: list(client.records("t", **start)),
        ):
            answer = refused(call)
            assert (answer.reason, answer.numbers["first_index"]) == ("POSITION_TRIMMED", str(first))
            assert answer.retry_delay_ms == -1
    begin = refused(lambda: client.rows("t", after={"incarnation": position.incarnation, "index": -1}))
    assert begin.reason == "POSITION_TRIMMED"
    expected = list(range(first, 2 * BATCHES))
    for _ in range(2):
        found = [i for record in client.records("t") for i in record.batch.sequence_ids]
        assert found == expected
        assert client.reading.GetLastMessageId(read_pb2.GetLastMessageIdRequest(topic="t")).first_index == first
        # Deduplication does not need what is gone.
        assert list(client.publish_unary("t", batch([("p", 3)], epochs)).verdicts) == [DUP]
        sidecar.restart()
        client.topic("t")
    after = batch([("p", 2 * BATCHES)], epochs)
    assert verdicts(client.publish_unary("t", after), 1) == [NOT_DUP]
    expected.append(2 * BATCHES)
    # A store that has lost what covers the messages that are gone is not taken for one that never had it.
    sidecar.kill()
    asyncio.run(forget_snapshot(sidecar))
    sidecar.start()
    until = time.monotonic() + LAST_RESORT_SECONDS
    while client.topic("t").state != admin_pb2.TOPIC_STATE_DAMAGED:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "[STORE_MISSING]" in client.topic("t").why
    sidecar.kill()
    sidecar.keys["rebuild_store"] = True
    sidecar.start()
    assert client.topic("t").first_index == first
    assert [i for record in client.records("t") for i in record.batch.sequence_ids] == expected
    assert list(client.publish_unary("t", after).verdicts) == [DUP]
    del sidecar.keys["rebuild_store"]
    sidecar.restart()
    assert list(client.publish_unary("t", after).verdicts) == [DUP]
    client.close()


async def forget_snapshot(sidecar: Sidecar) -> None:
    """Leaves the topics' records in the store, and nothing else."""
    store = Store.open(sidecar.data / "store")
    for record in store.topics():
        await store.remove_topic(record.incarnation)
        await store.put_topics(record)
    store.close()
