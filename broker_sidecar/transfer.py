"""The calls of AdminService that take a topic's numbers out of a sidecar, and into one: streams of columns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from broker_sidecar.policies import policy_of
from broker_sidecar.rpc import Context, check_small, parse, parse_columns, parse_small, unary
from broker_sidecar.steps import INT64, names_of, values
from broker_sidecar.streams import Stream, Streams, messages
from broker_sidecar.topics import topic_to_proto
from seqdedupe import wire
from seqdedupe.batch import Binary
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.finding import find, look_for
from seqdedupe.topic.renewing import renew
from seqdedupe.topic.saved import SavedParts, parts, saved
from seqdedupe.topic.state import TopicBase
from seqdedupe.topic.watermarks import WatermarksImport, begin_import, watermarks
from seqdedupe.v1 import admin_pb2

SILENT_SECONDS = 2.0
"""A client that says nothing for so long after what was refused is told why, whether it has ended or not."""


class Transfer:
    """The handlers."""

    def __init__(self, topics: Topics[Any], streams: Streams) -> None:
        self._topics = topics
        self._streams = streams

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        # On the wire a call with one answer is as one with a stream of them.
        return {
            "ExportWatermarks": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_watermarks)),
            "ExportSnapshot": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_snapshot)),
            "ImportSnapshot": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_snapshot)),
            "RebuildTopic": unary(admin_pb2.RebuildTopicRequest, self._rebuild),
            "ImportWatermarks": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_watermarks)),
        }

    async def _export_watermarks(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(admin_pb2.ExportWatermarksRequest, data)
        for names, persisted in watermarks(await find(self._topics, request.topic)):
            column = Binary.of_all(names)
            answer = wire.ExportWatermarksResponse(
                producer_name_offsets=column.offsets.tobytes(),
                producer_names=column.data,
                persisted=persisted.tobytes(),
            )
            await stream.write(answer.SerializeToString())

    async def _export_snapshot(self, data: bytes, _context: Context, stream: Stream) -> None:
        topic = await find(self._topics, parse_small(admin_pb2.ExportSnapshotRequest, data).topic)
        snapshot = saved(topic)
        await stream.write(_head(topic, snapshot).SerializeToString())
        for names, persisted, epochs, stated in parts(snapshot):
            column = Binary.of_all(names)
            answer = wire.ExportSnapshotResponse()
            answer.part.producer_name_offsets, answer.part.producer_names = column.offsets.tobytes(), column.data
            answer.part.persisted, answer.part.epochs = persisted.tobytes(), epochs.tobytes()
            answer.part.stated = stated.tobytes()
            await stream.write(answer.SerializeToString())

    async def _import_snapshot(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            name = ""
            head: admin_pb2.SnapshotHead | None = None
            async for data in messages(stream):
                request = _columns(wire.ImportSnapshotRequest, admin_pb2.ImportSnapshotRequest, data)
                if head is None:
                    if not request.part.HasField("head"):
                        raise error("INVALID_REQUEST", "the first message has the head of a snapshot")
                    name = request.topic
                    head = parse(admin_pb2.SnapshotHead, request.part.head.SerializeToString())
                    taken = _parts_of(head)
                if request.part.producer_names or request.part.persisted:
                    columns = ("persisted", "epochs", "stated")
                    numbers = [values(getattr(request.part, column), INT64, column) for column in columns]
                    taken.add(names_of(request.part), *numbers)
            if head is None:
                raise error("INVALID_REQUEST", "nothing has come")
            loaded = taken.finish()
            with _writing(stream):
                topic = await renew(self._topics, await look_for(self._topics, name), head.position.incarnation, loaded)
        await stream.write(admin_pb2.ImportSnapshotResponse(topic=topic_to_proto(topic)).SerializeToString())

    async def _rebuild(self, request: admin_pb2.RebuildTopicRequest) -> admin_pb2.RebuildTopicResponse:
        topic = await renew(self._topics, await look_for(self._topics, request.topic), None, None)
        return admin_pb2.RebuildTopicResponse(topic=topic_to_proto(topic))

    async def _import_watermarks(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            with ExitStack() as ended:
                producers = await self._imported(stream, ended)
        await stream.write(admin_pb2.ImportWatermarksResponse(producers=producers).SerializeToString())

    async def _imported(self, stream: Stream, ended: ExitStack) -> int:
        """Reads and carries out an import; returns how many producers it has."""
        importing: WatermarksImport[Any] | None = None
        topic: TopicBase | None = None
        producers = 0
        async for data in messages(stream):
            request = _columns(wire.ImportWatermarksRequest, admin_pb2.ImportWatermarksRequest, data)
            if importing is None:
                topic = await find(self._topics, request.topic)
                importing = begin_import(topic)
                ended.callback(importing.close)
            elif request.topic and self._topics.get(request.topic) is not topic:
                raise error("INVALID_REQUEST", "an import is into one topic")
            with _writing(stream):
                if request.producer_names or request.persisted:
                    names = names_of(request)
                    await importing.add(names, values(request.persisted, INT64, "persisted"))
                    producers += len(names)
                if request.HasField("producers"):
                    if request.producers != producers:
                        raise error("INVALID_REQUEST", f"producers is {request.producers}, but {producers} have come")
                    await importing.finish()
                    return producers
        raise error("INVALID_REQUEST", "the import ended without the number of its producers: nothing is in force")


@contextmanager
def _writing(stream: Stream) -> Iterator[None]:
    """What is being written keeps the stream from giving way to another one."""
    stream.frames_in_flight += 1
    try:
        yield
    finally:
        stream.frames_in_flight -= 1


@asynccontextmanager
async def _read_to_its_end(stream: Stream) -> AsyncIterator[None]:
    """A client that still writes when its call ends is told of a broken call, and not why: what it says is read.

    One that is silent waits for the answer: it gets it.
    """
    try:
        yield
    except SeqdedupeError:
        with suppress(TimeoutError):
            said: object = None
            while said is not grpc.aio.EOF:
                async with asyncio.timeout(SILENT_SECONDS):
                    said = await stream.read()
        raise


def _columns(alias: Any, published: type[Message], data: bytes) -> Any:
    """A request of the alias schema. Raises as `parse_small`."""
    check_small(published, data)
    return parse_columns(alias, published, data)


def _head(topic: TopicBase, snapshot: Loaded) -> Any:
    """The first part of a snapshot, of the alias schema."""
    policy = admin_pb2.TopicPolicy()
    decode_policy(snapshot.policy).fill(policy)
    position = Position(topic.incarnation, snapshot.message_id, snapshot.next_index - 1, snapshot.ownership)
    head = admin_pb2.SnapshotHead(
        topic=topic.name,
        term=snapshot.term,
        position=position.to_proto(),
        policy=policy,
        broker_position=snapshot.opaque,
        producers=len(snapshot.names),
        has_forgotten=snapshot.has_forgotten,
    )
    answer = wire.ExportSnapshotResponse()
    answer.part.head.ParseFromString(head.SerializeToString())
    return answer


def _parts_of(head: admin_pb2.SnapshotHead) -> SavedParts:
    """Raises INVALID_REQUEST, INVALID_POSITION."""
    position = Position.from_proto(head.position)
    policy = policy_of(head.policy)
    return SavedParts(
        head.term, position, policy, head.broker_position, head.producers, has_forgotten=head.has_forgotten
    )
