"""A topic whose message IDs the index does not say, served over gRPC: its ledgers roll over in mid-frame."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import grpc.aio
import pytest

from broker_sidecar.config import Config
from broker_sidecar.gate import Gate, Guard
from broker_sidecar.rpc import MethodCounts
from broker_sidecar.services.publish_service import PublishService
from broker_sidecar.services.read_service import ReadService
from broker_sidecar.streams import Streams
from seqdedupe.client import Client, MessageId, Position, PositionError, ProducerConfig
from seqdedupe.format.headers import BODY_AT, CHECKED_END, HEADER_BYTES
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.store.db import Store
from seqdedupe.topic import readers
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import batch_pb2, read_pb2
from seqdedupe.v1.read_pb2_grpc import ReadServiceStub
from tests.log.faulty import Storage
from tests.topic.logs import MemoryLogs

SIZES = (1, 20, 3, 9, 1, 7, 30)
COUNT = sum(SIZES)


class RollingLogs(MemoryLogs):
    """Logs with ledgers of seven rows each."""

    def __init__(self, packed: bool) -> None:
        super().__init__({})
        self.packed = packed

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        self.storages[incarnation] = (topic, Storage(incarnation, packed=self.packed))


@asynccontextmanager
async def served(folder: Path, packed: bool = False) -> AsyncIterator[str]:
    """The address of the publish and read services over such logs, in this process."""
    store = Store.open(folder / "store")
    topics: Topics[Topic] = Topics(
        store,
        lambda told: PublishedTopics(store, RollingLogs(packed), on_state=told),
        max_topics=10,
        allow_auto_topic_creation=True,
        on_state=lambda name, state: None,
    )
    await topics.open_all()
    guard = Guard(Config(data_directory=str(folder), authentication="none"), lambda: None)
    streams = Streams(10, guard.permissions)
    guard.begin(streams, lambda subject: None)
    server = grpc.aio.server()
    services = (
        PublishService(topics, streams, guard.permissions, guard.trail),
        ReadService(topics, streams, guard.permissions),
    )
    counts = MethodCounts()

    async def all_are_known(peer: str) -> bool:
        raise AssertionError(peer)

    server.add_generic_rpc_handlers([Gate(service.handlers(), guard, counts, all_are_known) for service in services])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await topics.drain()
        streams.drain()
        await server.stop(None)
        store.close()


async def publish(address: str, sizes: tuple[int, ...] = SIZES, payload_bytes: int = 10) -> list[MessageId]:
    """Publishes frames of this many rows; the message IDs of their receipts."""
    config = ProducerConfig(max_batch_rows=max(sizes), linger_ms=60_000)
    told = []
    async with Client(address) as client, client.producer("t", "p", config) as producer:
        for rows in sizes:
            receipts = [await producer.send(b"x" * payload_bytes) for _ in range(rows)]
            await producer.flush()
            told += [(await receipt).message_id for receipt in receipts]
    return [one for one in told if one is not None]


@asynccontextmanager
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield ReadServiceStub(channel)


def ids_by_the_schema(record: batch_pb2.Record) -> list[MessageId]:
    """The message IDs of a record's rows, from what batch.proto says alone."""
    runs = zip(record.run_rows, record.run_ledger_ids, record.run_entry_ids, record.run_batch_indexes, strict=True)
    return [
        MessageId(ledger, entry + step) if place == -1 else MessageId(ledger, entry, place + step)
        for rows, ledger, entry, place in runs
        for step in range(rows)
    ]


@pytest.mark.parametrize("packed", [False, True])
async def test_readers_get_the_message_ids_of_the_receipts(tmp_path: Path, packed: bool) -> None:
    async with served(tmp_path, packed) as address, Client(address) as client:
        told = await publish(address)
        assert len(told) == COUNT == len(set(told))
        assert len({one.ledger_id for one in told}) == -(-COUNT // 7)
        async with client.reader("t") as reader:
            messages = [message async for message in reader]
        assert [message.message_id for message in messages] == told
        assert [message.position.message_id for message in messages] == told
        last = (await client.ends("t")).last
        assert last == messages[-1].position == reader.position
        for first in range(COUNT):
            async with client.reader("t", first, stop_index=min(first + 12, COUNT)) as reader:
                assert [message.message_id async for message in reader] == told[first : first + 12], first
            async with client.reader("t", messages[first].position) as reader:
                assert [message.message_id async for message in reader] == told[first + 1 :], first
            if first % 5 == 0:
                async with client.reader("t", Position.before(last.incarnation, first)) as reader:
                    await anext(reader)
                    rest = [batch async for batch in reader.batches()]
                    assert [batch.message_id(row) for batch in rest for row in range(len(batch))] == told[first + 1 :]


async def test_a_page_by_the_schema_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as address, stub(address) as reading_of:
        told = await publish(address)
        for first, stop in ((0, COUNT), (0, 1), (5, 6), (2, 20), (20, 22), (22, 50), (COUNT - 1, COUNT)):
            start = read_pb2.ReadStart(index=first)
            page = await reading_of.Read(read_pb2.ReadRequest(topic="t", start=start, stop_index=stop))
            assert page.next_index == stop
            assert sum(record.rows for record in page.records) == stop - first
            assert [one for record in page.records for one in ids_by_the_schema(record)] == told[first:stop]
            for record in page.records:
                assert len(record.batch.sequence_ids) == record.rows == sum(record.run_rows)
                assert record.tag == 0


async def test_the_checksums_of_what_readers_get_are_right(tmp_path: Path) -> None:
    async with served(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        await publish(address, (20,))
        read: Any = channel.unary_unary("/seqdedupe.v1.ReadService/Read")
        for start, stop in ((0, 20), (3, 17)):
            request = read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(index=start), stop_index=stop)
            raw = await read(request.SerializeToString())
            [record] = read_pb2.ReadResponse.FromString(raw).records
            columns = raw[:CHECKED_END] + raw[BODY_AT : HEADER_BYTES + record.column_bytes]
            assert google_crc32c.value(columns) == record.column_crc32c
            body_end = HEADER_BYTES + len(record.batch.SerializeToString())
            assert google_crc32c.value(raw[HEADER_BYTES + record.column_bytes : body_end]) == record.payload_crc32c


async def test_a_large_batch_is_cut_with_its_message_ids(tmp_path: Path) -> None:
    async with served(tmp_path) as address, Client(address) as client, stub(address) as reading_of:
        told = await publish(address, (3, 12), payload_bytes=600_000)
        page = await reading_of.Read(read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(index=3)))
        assert page.ByteSize() < readers.CUT_BYTES + 1000
        assert 0 < page.next_index - 3 < 12
        async with client.reader("t") as reader:
            assert [message.message_id async for message in reader] == told


async def test_questions_for_a_place(tmp_path: Path) -> None:
    async with served(tmp_path) as address, Client(address) as client:
        told = await publish(address)
        last = (await client.ends("t")).last
        assert last.message_id == told[-1]
        assert (await client.locate_time("t", 0)).index == 0
        assert (await client.locate_bytes("t", 0, 1)).index == 1
        assert (await client.locate_bytes("t", 5, 10**9)).index == COUNT


async def test_a_position_with_another_message_id_is_refused(tmp_path: Path) -> None:
    """Also with the one that would be right in the embedded log."""
    async with served(tmp_path) as address, Client(address) as client:
        told = await publish(address)
        incarnation = (await client.ends("t")).last.incarnation
        for wrong in (MessageId.of(incarnation, 10), told[11], told[10]._replace(batch_index=0)):
            with pytest.raises(PositionError, match="POSITION_DIVERGED"):
                async with client.reader("t", Position(incarnation, wrong, 10)) as reader:
                    await anext(reader)
        async with client.reader("t", Position(incarnation, told[10], 10)) as reader:
            assert (await anext(reader)).message_id == told[11]
