"""Topics of a real broker that stock clients have used become topics of the sidecar: producers go on where they stood,
and consumers read on, and no crash in between changes that."""

import asyncio
import itertools
import struct
from pathlib import Path
from typing import Any

import pulsar
import pytest

from seqdedupe.client import blocking
from seqdedupe.entry_properties import KIND
from seqdedupe.errors import InvalidRequestError
from seqdedupe.log.pulsar.admin_url import StoredBefore
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.names import partition_name
from seqdedupe.pulsar_wire.connection import connect_to_owner
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, EncryptionKeys, MessageMetadata, Property, Shared
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import listing
from seqdedupe.topic.base import State
from seqdedupe.v1 import admin_pb2
from tests.pulsar.members import Kill, MakeMember, Member, reason_of
from tests.pulsar.owners import Cluster, quiet, until

BOTH = pytest.mark.parametrize("entry_format", [EntryFormat.PLAIN, EntryFormat.NATIVE], ids=lambda one: one.value)
CHUNKED_BYTES = 6 * 1024 * 1024
"""More than a broker takes in one entry."""
DEDUPLICATION_INTERVAL = 1000
"""After this number of entries a broker's deduplication keeps its numbers, and does not need the entries any more."""


@pytest.fixture
def topic(namespace: str) -> str:
    return f"persistent://{namespace}/t"


def path_of(topic: str) -> str:
    return topic.replace("://", "/")


async def send(
    cluster: Cluster, topic: str, name: str, *sequence_ids: int, payload: bytes = b"theirs", **options: Any
) -> None:
    """From a stock producer, which is gone then."""

    def run() -> None:
        client = pulsar.Client(cluster.service_url, logger=quiet())
        try:
            more = {"batching_enabled": False, "block_if_queue_full": True} | options
            producer = client.create_producer(topic, producer_name=name, **more)
            for sequence_id in sequence_ids:
                producer.send_async(payload, None, sequence_id=sequence_id)
            producer.flush()
        finally:
            client.close()

    await asyncio.to_thread(run)
    await cluster.until_nobody_writes(topic)


async def take_over(one: Member, topic: str) -> None:
    await one.run(listing.take_over(one.topics, topic))


def is_dup(one: Member, topic: str, sequence_id: int, producer: str) -> Any:
    async def ask() -> bool:
        return (await one.ask(topic, sequence_id, producer=producer)).first_index < 0

    return ask()


@BOTH
async def test_producers_go_on_where_they_stood_and_consumers_read_on(
    entry_format: EntryFormat, member: MakeMember, cluster: Cluster, topic: str
) -> None:
    client = pulsar.Client(cluster.service_url, logger=quiet())
    consumer = await asyncio.to_thread(client.subscribe, topic, "theirs")
    batch: dict[str, Any] = {"batching_enabled": True, "batching_max_publish_delay_ms": 10_000}
    for compression in (pulsar.CompressionType.LZ4, pulsar.CompressionType.ZSTD):
        name = f"batched {compression.name}"
        await send(cluster, topic, name, 10, 20, 30, compression_type=compression, **batch)
    await send(cluster, topic, "single", 4, 5)
    await send(cluster, topic, "chunked", 7, payload=bytes(CHUNKED_BYTES), chunking_enabled=True)
    stood = {"batched LZ4": 30, "batched ZSTD": 30, "single": 5, "chunked": 7}
    one = member(entry_format=entry_format)
    await one.start()
    assert await reason_of(one.run(one.topics.create(topic))) == "TOPIC_EXISTS"
    await take_over(one, topic)
    await one.take(topic)
    assert one.topics.get(topic).skipped.earlier >= len(stood)
    assert await one.persisted(topic, *stood, "new") == [*stood.values(), -1]
    for index, (name, last) in enumerate(stood.items()):
        assert await is_dup(one, topic, last, name)
        assert (await one.ask(topic, last + 1, b"ours", name)).first_index == index

    def read() -> list[bytes]:
        found: list[bytes] = []
        while len(found) < 9 + len(stood):
            message = consumer.receive(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
            consumer.acknowledge(message)
            found += [] if KIND in message.properties() else [message.data()]
        return found

    found = await asyncio.to_thread(read)
    assert found == [b"theirs"] * 8 + [bytes(CHUNKED_BYTES)] + [b"ours"] * len(stood)
    client.close()


async def test_while_producers_are_connected_nothing_is_changed(
    member: MakeMember, cluster: Cluster, topic: str
) -> None:
    one = member(entry_format=EntryFormat.NATIVE)
    await one.start()
    client = pulsar.Client(cluster.service_url, logger=quiet())
    producer = client.create_producer(topic, producer_name="theirs")
    producer.send(b"m", sequence_id=3)
    assert await reason_of(take_over(one, topic)) == "TOPIC_IN_USE"
    assert await cluster.admin.properties(topic) == {}
    assert (await cluster.admin.stats(topic)).subscriptions == ()
    assert not one.topics.is_there(topic)
    producer.send(b"m", sequence_id=4)
    client.close()
    await cluster.until_nobody_writes(topic)
    await take_over(one, topic)
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [4]


async def test_a_producer_that_is_faster_only_delays_it(
    member: MakeMember, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects after the look, and before the sidecar's own producer: what it sends is read too."""
    await send(cluster, topic, "theirs", 3)
    one = member(entry_format=EntryFormat.NATIVE)
    await one.start()
    client = pulsar.Client(cluster.service_url, logger=quiet())
    set_properties = one.logs._admin.set_properties

    async def faster(name: str, properties: dict[str, str]) -> None:
        await set_properties(name, properties)
        producer = client.create_producer(topic, producer_name="theirs")
        producer.send(b"m", sequence_id=9)

    monkeypatch.setattr(one.logs._admin, "set_properties", faster)
    await take_over(one, topic)
    assert one.topics.get(topic).state is not State.SERVING
    assert "another writer holds" in one.topics.get(topic).why
    client.close()
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [9]


async def test_what_cannot_be_taken_over_is_refused_with_the_reason(
    member: MakeMember, namespace: str, cluster: Cluster, topic: str
) -> None:
    one = member()
    await one.start()
    assert await reason_of(take_over(one, topic)) == "TOPIC_NOT_FOUND"
    await send(cluster, topic, "theirs", 1)
    await take_over(one, topic)
    assert await reason_of(take_over(one, topic)) == "TOPIC_EXISTS"
    other = member()
    await other.start()
    assert await reason_of(take_over(other, topic)) == "TOPIC_EXISTS"
    ended = f"persistent://{namespace}/ended"
    await send(cluster, ended, "theirs", 1)
    await cluster.url.call("POST", f"{path_of(ended)}/terminate")
    assert await reason_of(take_over(one, ended)) == "TOPIC_TERMINATED"
    assert await reason_of(take_over(one, f"persistent://{namespace}/a-partition-0")) == "INVALID_TOPIC_NAME"
    assert await reason_of(take_over(one, "persistent://public/elsewhere/t")) == "INVALID_NAMESPACE"


async def store_raw(cluster: Cluster, topic: str, *entries: WireEntry) -> None:
    """From a producer that writes what it wants."""
    connection = await connect_to_owner(cluster.service_url, topic)
    stored: asyncio.Queue[int] = asyncio.Queue()
    producer = await connection.producer(
        topic, lambda number, _: stored.put_nowait(number), lambda *_: None, access_mode=Shared
    )
    for number, entry in enumerate(entries):
        producer.send(number, entry)
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await stored.get()
    await connection.close()
    await cluster.until_nobody_writes(topic)


def raw(payload: bytes = b"", **fields: Any) -> WireEntry:
    of_all: dict[str, Any] = {"producer_name": b"odd", "sequence_id": 4, "publish_time": 1}
    metadata = MessageMetadata(**of_all | fields)
    return WireEntry(metadata.SerializeToString(), payload)


ODD = {
    "a key that is not UTF-8": raw(partition_key=b"\xff"),
    "a property that is not UTF-8": raw(properties=[Property(key=b"\xff", value=b"\xff")]),
    "a name that is not UTF-8": raw(producer_name=b"\xff"),
    "no name": raw(producer_name=b""),
    "a long name": raw(producer_name=b"x" * 70_000),
    "a high ID": raw(sequence_id=2**64 - 1),
    "the highest ID": raw(sequence_id=2**63 - 1),
    "a copy": raw(properties=[Property(key=b"seqdedupe.entry", value=b"1:1:9:0123456789abcdef:3:2")]),
    "no place": raw(properties=[Property(key=b"seqdedupe.entry", value=b"one")]),
    "the kind of a marker": raw(properties=[Property(key=b"seqdedupe.kind", value=b"marker")]),
    "an entry of Pulsar's own": raw(marker_type=7),
    "a forged field": raw(seqdedupe=b"\x01"),
    "an empty batch of three": raw(num_messages_in_batch=3),
    "no batch of three": raw(b"no batch", num_messages_in_batch=3),
    "no compressed message": raw(b"x", compression=LZ4, uncompressed_size=10),
    "no compressed message, and a copy": raw(
        b"x",
        compression=LZ4,
        uncompressed_size=10,
        properties=[Property(key=b"seqdedupe.entry", value=b"1:1:9:0123456789abcdef:3:2")],
    ),
    "an encrypted message": raw(b"x", encryption_keys=[EncryptionKeys(key=b"k", value=b"v")]),
    "the last part alone": raw(b"x", uuid=b"u", num_chunks_from_msg=2, chunk_id=1, total_chunk_msg_size=2),
    "a field of another log": raw(seqdedupe=struct.pack("<BBQQQQq", 1, 1, 1, 9, 9, 3, 2), null_value=True),
}
"""Entries that a broker takes from anybody."""


@BOTH
@pytest.mark.parametrize("last", [True, False], ids=["last", "not last"])
async def test_no_odd_entry_is_in_the_way(
    last: bool, entry_format: EntryFormat, member: MakeMember, cluster: Cluster, namespace: str
) -> None:
    one = member(entry_format=entry_format)
    await one.start()
    for number, odd in enumerate(ODD.values()):
        topic = f"persistent://{namespace}/t{number}"
        await send(cluster, topic, "theirs", 3)
        await store_raw(cluster, topic, *([odd] if last else [odd, raw(producer_name=b"after", sequence_id=6)]))
        await take_over(one, topic)
        await one.take(topic)
        assert await one.persisted(topic, "theirs", "after") == [3, -1 if last else 6]
        assert (await one.ask(topic, 4, b"ours", "theirs")).first_index == 0


ENDS = {
    "of Pulsar's own": raw(marker_type=7),
    "of an end of a transaction": raw(marker_type=21, txnid_least_bits=1, txnid_most_bits=1),
    "a batch without messages": raw(num_messages_in_batch=0),
    "a part of a message": raw(uuid=b"u", num_chunks_from_msg=2, chunk_id=0, total_chunk_msg_size=2),
}
"""Entries that a broker says are the last, although readers of at least one format do not get them."""


@BOTH
async def test_an_end_that_no_reader_gets_is_no_obstacle(
    entry_format: EntryFormat, member: MakeMember, cluster: Cluster, namespace: str
) -> None:
    one = member(entry_format=entry_format)
    await one.start()
    topics = {f"persistent://{namespace}/t{number}": end for number, end in enumerate(ENDS.values())}
    for name, end in topics.items():
        await send(cluster, name, "theirs", 3)
        await store_raw(cluster, name, end, end)
        await take_over(one, name)
        await one.take(name)
        assert await one.persisted(name, "theirs", "odd") == [3, -1]
        assert (await one.ask(name, 4, b"ours", "theirs")).first_index == 0
    await one.kill()
    for name, end in topics.items():
        await store_raw(cluster, name, end)
    await one.start()
    for name in topics:
        await one.take(name)
        assert await one.persisted(name, "theirs") == [4]
        assert (await one.ask(name, 5, b"ours", "theirs")).first_index == 1


async def test_of_two_sidecars_one_takes_it_over(
    member: MakeMember, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what one has acknowledged would be of no log."""
    await send(cluster, topic, "theirs", 3)
    one, other = member(entry_format=EntryFormat.NATIVE), member(entry_format=EntryFormat.NATIVE)
    await one.start()
    await other.start()
    stored_before = one.logs._admin.stored_before

    async def slower(name: str) -> StoredBefore:
        before = await stored_before(name)
        await take_over(other, topic)
        await other.take(topic)
        assert (await other.ask(topic, 4, producer="theirs")).first_index == 0
        return before

    monkeypatch.setattr(one.logs._admin, "stored_before", slower)
    assert await reason_of(take_over(one, topic)) == "TOPIC_EXISTS"
    await other.stop()
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [4]


@pytest.mark.parametrize("deduplicates", [True, False])
@pytest.mark.parametrize("left", [True, False], ids=["some left", "none left"])
async def test_of_trimmed_entries_pulsars_deduplication_knows_the_producers(
    deduplicates: bool, left: bool, member: MakeMember, cluster: Cluster, topic: str
) -> None:
    """Without it nobody does: then the producer is new, as it would be at the broker."""
    await cluster.admin.create_topic(topic, {})
    if deduplicates:
        await cluster.until_deduplicating(topic)
    else:
        await cluster.admin.set_policy(topic, "deduplicationEnabled", False)

        async def is_off() -> bool:
            return not await cluster.deduplicates(topic)

        await until(is_off)
    await send(cluster, topic, "gone", *range(DEDUPLICATION_INTERVAL))
    last = DEDUPLICATION_INTERVAL - 1

    async def is_kept() -> bool:
        return not deduplicates or (await cluster.admin.stored_before(topic)).numbers.get("gone") == last

    await until(is_kept)
    before = await cluster.admin.first_ledger(topic)
    await cluster.admin.unload(topic)
    if left:
        await send(cluster, topic, "here", 0, 1, 2)
    retention = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    await cluster.admin.set_policy(topic, "retention", retention)

    async def is_trimmed() -> bool:
        await cluster.url.call("POST", f"{path_of(topic)}/trim")
        return await cluster.admin.first_ledger(topic) > before

    await until(is_trimmed)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    one = member(entry_format=EntryFormat.NATIVE)
    await one.start()

    async def is_taken_over() -> bool:
        # The retention that was just set may not be in force yet.
        return await reason_of(take_over(one, topic)) == ""

    await until(is_taken_over)
    await one.take(topic)
    expected = [last if deduplicates else -1, 2 if left else -1]
    assert await one.persisted(topic, "gone", "here") == expected
    # All that needs them is in the log now.
    await one.kill()
    other = member(entry_format=EntryFormat.NATIVE)
    await other.start()
    await other.take(topic)
    assert await other.persisted(topic, "gone", "here") == expected


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("kills", [True, False], ids=["kill", "failure"])
async def test_the_numbers_are_the_same_after_a_failure_at_any_step(
    kills: bool, partitions: int, member: MakeMember, namespace: str, cluster: Cluster
) -> None:
    """At each call of the admin URL that changes something; and the call is made once more."""
    one = member(entry_format=EntryFormat.NATIVE)
    await one.start()
    for at in itertools.count(1):
        topic = f"persistent://{namespace}/t{at}"
        if partitions:
            await cluster.url.call("PUT", f"{path_of(topic)}/partitions", partitions)
        names = [partition_name(topic, k) for k in range(partitions)] or [topic]
        for number, name in enumerate(names):
            await send(cluster, name, "theirs", 3, 8 + number)
        one.url.fails(at, kills=kills)
        try:
            reason = await reason_of(take_over(one, topic))
        except Kill:
            reason = ""
        has_failed = one.url.changes >= at
        one.url.fails(0)
        if one.url.is_dead:
            await one.kill()
            await one.start()
        if has_failed:
            reason = await reason_of(take_over(one, topic))
        assert reason in ("", "TOPIC_EXISTS")
        for number, name in enumerate(names):
            await one.take(name)
            assert await one.persisted(name, "theirs") == [8 + number]
            assert await is_dup(one, name, 8 + number, "theirs")
        if not has_failed:
            break
    assert at > (5 if partitions else 3)
    assert (topic in one.topics.partitions) == bool(partitions)


async def test_a_sidecar_that_comes_later_needs_no_entry_from_before(
    member: MakeMember, cluster: Cluster, topic: str
) -> None:
    await cluster.admin.create_topic(topic, {})
    # Its cursor would keep the entries.
    await cluster.admin.set_policy(topic, "deduplicationEnabled", False)
    await send(cluster, topic, "theirs", 3, 8)
    before = await cluster.admin.first_ledger(topic)
    await cluster.admin.unload(topic)
    one, other = member(entry_format=EntryFormat.NATIVE), member(entry_format=EntryFormat.NATIVE)
    await one.start()
    await take_over(one, topic)
    await one.take(topic)
    # No snapshot was taken: only the log has it.
    await one.kill()
    await other.start()
    await other.take(topic)
    assert await other.persisted(topic, "theirs") == [8]
    assert (await other.ask(topic, 9, producer="theirs")).first_index == 0
    await other.stop()
    await one.start()
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [9]
    await one.run(one.topics.get(topic).keeper.snapshot())
    await cluster.admin.delete_subscription(topic, f"seqdedupe-{other.store_name}")
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_trimmed() -> bool:
        await cluster.url.call("POST", f"{path_of(topic)}/trim")
        return await cluster.admin.first_ledger(topic) > before

    await until(is_trimmed)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    await one.kill()
    await one.start()
    await one.take(topic)
    assert await one.persisted(topic, "theirs") == [9]
    assert await is_dup(one, topic, 8, "theirs")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_the_call_of_the_admin_service(
    partitions: int, namespace: str, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    if partitions:
        await cluster.url.call("PUT", f"{path_of(topic)}/partitions", partitions)
    names = [partition_name(topic, k) for k in range(partitions)] or [topic]
    for name in names:
        await send(cluster, name, "theirs", 3, 8)
    sidecar = cluster.sidecar(tmp_path / "sidecar", namespace)

    def run() -> None:
        with sidecar, blocking.Client(sidecar.address) as client:
            several: list[dict[str, Any]] = [{"partitions": 2}, {"deduplication_enabled": False}]
            for more in several:
                with pytest.raises(InvalidRequestError, match="INVALID_REQUEST"):
                    client.admin.create_topic(topic, take_over=True, **more)
            made = client.admin.create_topic(topic, take_over=True)
            assert (made.state, made.partitions) == (admin_pb2.TOPIC_STATE_SERVING, partitions)
            for name in names:
                # An opening waits for the numbers that were found.
                with client.producer(name, "theirs") as producer:
                    assert producer.persisted_sequence_id == 8
            with pytest.raises(InvalidRequestError, match="TOPIC_EXISTS"):
                client.admin.create_topic(topic, take_over=True)

    await asyncio.to_thread(run)
