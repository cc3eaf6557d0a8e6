"""PublishService: sessions, and frames on their way to a topic and back."""

import asyncio
import struct
from collections import deque
from typing import Any

import grpc
import grpc.aio

from broker_sidecar.frames import encode_receipt, encode_refusal, parse_frames, parse_publish
from broker_sidecar.rpc import Context, Limiter, abort, unary
from seqdedupe.errors import error
from seqdedupe.message_id import MessageId
from seqdedupe.topic.admission import NumbersCache
from seqdedupe.topic.answers import Receipt, Refusal
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.publishing import Topic
from seqdedupe.v1 import publish_pb2

SERVICE = "seqdedupe.v1.PublishService"

MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Answers of one stream: a client that does not read its receipts is not read from any more."""

MAX_RESPONSE_BYTES = 2 * 1024 * 1024
"""Answers in one response, unless the first alone is larger: that stays below gRPC's default limit of 4 MiB."""

LAST_ANSWERS_SECONDS = 1.0
"""When the sidecar drains: for a client to read the answers that wait."""

MAX_STREAM_IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""Admitted on one stream and not answered."""

_STATE_OF_TOPIC = struct.Struct("<BqBq")


class _Stream:
    """One publish stream: how much it has under way, and the answers that wait to be sent."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.cache = NumbersCache()
        self.in_flight_bytes = 0
        self.in_flight_frames = 0
        self.has_ended = False
        self.unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.news = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def admit(self, frame: int, batch: bytes) -> None:
        """Hands a frame to the topic; the answer comes to `unsent`."""
        size = len(batch)
        self.in_flight_bytes += size
        self.in_flight_frames += 1

        def reply(answer: Receipt | Refusal) -> None:
            self.in_flight_bytes -= size
            self.in_flight_frames -= 1
            encoded = encode_receipt(self.topic, answer) if isinstance(answer, Receipt) else encode_refusal(answer)
            self.unsent.append(encoded)
            self.unsent_bytes += len(encoded)
            self.news.set()
            self.update_room()

        self.topic.admit(batch, frame, reply, self.cache)
        self.update_room()

    def end(self) -> None:
        """The client is not read from any more; what waits is still answered."""
        self.has_ended = True
        self.news.set()

    def update_room(self) -> None:
        if self.unsent_bytes < MAX_UNSENT_BYTES and self.in_flight_bytes < MAX_STREAM_IN_FLIGHT_BYTES:
            self.room.set()
        else:
            self.room.clear()

    async def wait_for_room(self) -> None:
        """Returns when another frame may be admitted."""
        await self.room.wait()
        if not self.topic.has_room():
            await self.topic.wait_for_room()

    def take_unsent(self) -> bytes:
        """Answers that wait, as one response: all, or as many as it may hold."""
        taken: list[bytes] = []
        size = 0
        while self.unsent and (not taken or size + len(self.unsent[0]) <= MAX_RESPONSE_BYTES):
            taken.append(self.unsent.popleft())
            size += len(taken[-1])
        self.unsent_bytes -= size
        self.update_room()
        taken.append(_STATE_OF_TOPIC.pack(3 << 3 | 1, self.topic.log.incarnation, 4 << 3 | 1, self.topic.term))
        return b"".join(taken)


class PublishService:
    """The handlers of PublishService."""

    def __init__(self, all_topics: Topics, streams: Limiter) -> None:
        self._topics = all_topics
        self._streams = streams

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "Open": unary(publish_pb2.OpenRequest, self._open),
            "Publish": grpc.unary_unary_rpc_method_handler(self._publish),
            "PublishStream": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _open(self, request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        topic = await self._topics.get_or_create(request.topic)
        epochs = list(request.epochs) or None
        opened = await topic.open_sessions(list(request.producer_names), epochs)
        response = publish_pb2.OpenResponse(
            incarnation=topic.log.incarnation,
            term=topic.term,
            epochs=opened.epochs,
            persisted=opened.persisted,
            persisted_indexes=opened.indexes,
        )
        for index in opened.indexes:
            message_id = topic.log.message_id(index) if index >= 0 else MessageId(-1, -1, -1)
            response.persisted_message_ids.append(message_id.to_proto())
        return response

    async def _publish(self, data: bytes, context: Context) -> bytes:
        try:
            name, batch = parse_publish(data)
            topic = self._topics.get(name)
            if not topic.has_room():
                raise error("QUEUE_FULL", f"topic {topic.name} has too much in flight")
            done: asyncio.Future[Receipt | Refusal] = asyncio.get_running_loop().create_future()

            def reply(answer: Receipt | Refusal) -> None:
                if not done.done():
                    done.set_result(answer)

            topic.admit(batch, 0, reply, NumbersCache(), lone=True)
            answer = await done
            if isinstance(answer, Refusal):
                raise answer.error
            state = _STATE_OF_TOPIC.pack(2 << 3 | 1, topic.log.incarnation, 3 << 3 | 1, topic.term)
            return encode_receipt(topic, answer) + state
        except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
            await abort(context, e)

    async def _stream(self, _requests: object, context: Context) -> None:
        try:
            with self._streams:
                await self._serve_stream(context)
        except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
            await abort(context, e)

    async def _serve_stream(self, context: Context) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        name, frames = parse_frames(first)
        topic = self._topics.get(name)
        stream = _Stream(topic)
        writer = asyncio.ensure_future(_write_answers(context, stream))
        # When the client is gone writing fails; the call is cancelled then, and nobody asks the task.
        writer.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            while True:
                for number, batch in frames:
                    await stream.wait_for_room()
                    stream.admit(number, batch)
                await stream.wait_for_room()
                data = await context.read()
                if data is grpc.aio.EOF:
                    break
                name, frames = parse_frames(data)
                if name and name != topic.name and self._topics.get(name) is not topic:
                    raise error("INVALID_REQUEST", "a stream is for one topic: open another stream for the other one")
            stream.end()
            await writer
        except asyncio.CancelledError:
            if self._streams.is_draining:
                stream.end()
                await asyncio.wait({writer}, timeout=LAST_ANSWERS_SECONDS)
            raise
        finally:
            writer.cancel()


async def _write_answers(context: Context, stream: _Stream) -> None:
    """The one task that writes to a stream: never the reader, which would stop reading when a client does."""
    while not stream.has_ended or stream.in_flight_frames or stream.unsent:
        await stream.news.wait()
        stream.news.clear()
        while stream.unsent:
            await context.write(stream.take_unsent())
