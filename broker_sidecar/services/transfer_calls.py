"""The calls of AdminService that take a topic's numbers out of a sidecar, and into one: streams of columns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from broker_sidecar.gate import Guard
from broker_sidecar.proto_messages import topic_to_proto
from broker_sidecar.rpc import Context, columns, parse, parse_small, unary
from broker_sidecar.security.rules import Action
from broker_sidecar.streams import Stream, Streams, messages
from seqdedupe import wire
from seqdedupe.batch import INT64, names_of, values
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.directory import Topics, find, look_for
from seqdedupe.topic.renewal import renew
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.imports import WatermarksImport, WindowImport, begin_import
from seqdedupe.transfer.state_messages import SnapshotReader, snapshot_answers, watermark_answers
from seqdedupe.v1 import admin_pb2

MAX_PART_BYTES = 5 * 256 * 1024
"""Of an export: 4,096 producers with the longest names, and their numbers."""

SILENT_SECONDS = 2.0
"""A client that says nothing for so long after what was refused is told why, whether it has ended or not."""


class TransferCalls:
    """The handlers."""

    def __init__(self, topics: Topics[Any], streams: Streams, guard: Guard) -> None:
        self._topics = topics
        self._streams = streams
        self._permissions = guard.permissions
        self._trail = guard.trail

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        # On the wire a call with one answer is as one with a stream of them.
        return {
            "ExportWatermarks": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_watermarks)),
            "ExportSnapshot": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_snapshot)),
            "ImportSnapshot": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_snapshot)),
            "RebuildTopic": unary(admin_pb2.RebuildTopicRequest, self._rebuild_topic),
            "ImportWatermarks": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_watermarks)),
            "ImportWindow": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_window)),
        }

    async def _export_watermarks(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(admin_pb2.ExportWatermarksRequest, data)
        topic = await find(self._topics, request.topic)
        _check_has_producers(topic)
        await stream.write_each(watermark_answers(topic), MAX_PART_BYTES)

    async def _export_snapshot(self, data: bytes, _context: Context, stream: Stream) -> None:
        topic = await find(self._topics, parse_small(admin_pb2.ExportSnapshotRequest, data).topic)
        _check_has_producers(topic)
        await stream.write_each(snapshot_answers(topic), MAX_PART_BYTES)

    async def _import_snapshot(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            name: str | None = None
            reader = SnapshotReader()
            async for data in messages(stream):
                request = columns(wire.ImportSnapshotRequest, admin_pb2.ImportSnapshotRequest, data)
                if name is None:
                    name = topic_name(request.topic)
                    self._permissions.check_topic(Action.ADMINISTER, name)
                if request.part.ByteSize():
                    stream.moves()
                reader.add(request.part)
            head, loaded = reader.finish()
            with _writing(stream):
                found = await look_for(self._topics, name or "")
                async with self._trail.change("ImportSnapshot", f"topic: {name}"):
                    topic = await renew(self._topics, found, head.position.incarnation, loaded)
        await stream.write(admin_pb2.ImportSnapshotResponse(topic=topic_to_proto(topic)).SerializeToString())

    async def _rebuild_topic(self, request: admin_pb2.RebuildTopicRequest) -> admin_pb2.RebuildTopicResponse:
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
            request = columns(wire.ImportWatermarksRequest, admin_pb2.ImportWatermarksRequest, data)
            if importing is None:
                self._permissions.check_topic(Action.ADMINISTER, topic_name(request.topic))
                topic = await find(self._topics, request.topic)
                _check_has_producers(topic)
                importing = begin_import(topic)
                ended.callback(importing.close)
            elif request.topic and (topic is None or topic_name(request.topic) != topic.name):
                raise error("INVALID_REQUEST", "an import is into one topic")
            with _writing(stream):
                if request.producer_names or request.persisted:
                    stream.moves()
                    names = names_of(request)
                    await importing.add(names, values(request.persisted, INT64, "persisted"))
                    producers += len(names)
                if request.HasField("producers"):
                    if request.producers != producers:
                        raise error("INVALID_REQUEST", f"producers is {request.producers}, but {producers} have come")
                    async with self._trail.change("ImportWatermarks", f"topic: {topic.name if topic else ''}"):
                        await importing.finish()
                    return producers
        raise error("INVALID_REQUEST", "the import ended without the number of its producers: nothing is in force")

    async def _import_window(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            with ExitStack() as ended:
                ids = await self._imported_window(stream, ended)
        await stream.write(admin_pb2.ImportWindowResponse(ids=ids).SerializeToString())

    async def _imported_window(self, stream: Stream, ended: ExitStack) -> int:
        """Reads and carries out an import; returns how many IDs it has."""
        importing: WindowImport | None = None
        name = ""
        async for data in messages(stream):
            request = parse(admin_pb2.ImportWindowRequest, data)
            if importing is None:
                name = topic_name(request.topic)
                self._permissions.check_topic(Action.ADMINISTER, name)
                importing = WindowImport(_with_window(await find(self._topics, name)), request.checksum)
                ended.callback(importing.close)
            with _writing(stream):
                if request.block:
                    stream.moves()
                    await importing.add(request.block)
                if request.HasField("ids"):
                    async with self._trail.change("ImportWindow", f"topic: {name}"):
                        await importing.finish(request.ids)
                    return request.ids
        raise error("INVALID_REQUEST", "the import ended without the number of its IDs: nothing is in force")


def _with_window(topic: TopicBase) -> Topic:
    """Raises INVALID_REQUEST for a topic on a broker's own log."""
    if not isinstance(topic, Topic):
        raise error("INVALID_REQUEST", f"topic {topic.name} takes no deduplication IDs: its log is a broker's own")
    return topic


def _check_has_producers(topic: TopicBase) -> None:
    """Raises INVALID_REQUEST for a topic of deduplication IDs: its window is not in such a file."""
    if topic.window is not None:
        why = f"topic {topic.name} is one of deduplication IDs, whose state is exported and imported by backups alone"
        raise error("INVALID_REQUEST", why, hint="`seqdedupe backup` has all of it.")


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
