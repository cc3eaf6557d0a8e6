"""The calls of AdminService that take a topic's numbers out of a sidecar, and into one: streams of columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from broker_sidecar.rpc import Context, parse, parse_small
from broker_sidecar.steps import INT64, names_of, values
from broker_sidecar.streams import Stream, Streams, messages
from seqdedupe import wire
from seqdedupe.batch import Binary
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.state import TopicBase
from seqdedupe.topic.watermarks import WatermarksImport, begin_import, watermarks
from seqdedupe.v1 import admin_pb2


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
            "ImportWatermarks": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_watermarks)),
        }

    async def _export_watermarks(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(admin_pb2.ExportWatermarksRequest, data)
        for names, persisted in watermarks(self._topics.get(request.topic)):
            column = Binary.of_all(names)
            answer = wire.ExportWatermarksResponse(
                producer_name_offsets=column.offsets.tobytes(),
                producer_names=column.data,
                persisted=persisted.tobytes(),
            )
            await stream.write(answer.SerializeToString())

    async def _import_watermarks(self, _requests: object, _context: Context, stream: Stream) -> None:
        try:
            producers = await self._imported(stream)
        except SeqdedupeError:
            # A client that is still writing when its call ends is told of a broken call instead of why.
            async for _ in messages(stream):
                pass
            raise
        await stream.write(admin_pb2.ImportWatermarksResponse(producers=producers).SerializeToString())

    async def _imported(self, stream: Stream) -> int:
        """Reads and carries out an import; returns how many producers it has."""
        importing: WatermarksImport | None = None
        topic: TopicBase | None = None
        producers = 0
        async for data in messages(stream):
            request = _columns(data)
            if importing is None:
                topic = self._topics.get(request.topic)
                importing = begin_import(topic)
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


def _columns(data: bytes) -> Any:
    """An ImportWatermarksRequest of the alias schema. Raises as `parse_small`."""
    request = parse_small(wire.ImportWatermarksRequest, data)
    # See `steps.parse_steps`.
    request.DiscardUnknownFields()
    if request.ByteSize() != len(data):
        return wire.ImportWatermarksRequest.FromString(
            parse(admin_pb2.ImportWatermarksRequest, data).SerializeToString()
        )
    return request
