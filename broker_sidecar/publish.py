"""PublishService: sessions, and frames on their way to a topic and back."""

import asyncio
import struct
from collections import deque
from typing import Any

import grpc
import grpc.aio
import numpy as np

from broker_sidecar.rpc import Context, Limiter, abort, parse, unary
from broker_sidecar.topics import Topics
from seqdedupe import wire
from seqdedupe.admission import NumbersCache
from seqdedupe.errors import error
from seqdedupe.message_id import MessageId
from seqdedupe.topic import Receipt, Refusal, Topic
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

# A receipt whose rows are all new, its index and ID known: tag and length in `receipts`, frame, first_index, ID.
_ALL_NEW = struct.Struct("<BBBQBqBBBqBqBB")
_ALL_NEW_ID_BYTES = 20
_TAIL = struct.Struct("<BqBq")

_FRAME_BYTES = 9
"""`PublishStreamRequest.frame` with its tag."""
_FRAME_TAG = bytes((2 << 3 | 1,))
_BATCH_TAG = bytes((15 << 3 | 2,))


def encode_receipt(topic: Topic, receipt: Receipt) -> bytes:
    """An element of `PublishStreamResponse.receipts`, tag and length included."""
    first = topic.log.message_id(receipt.first_index) if receipt.first_index >= 0 else None
    if receipt.verdicts is None and first is not None and first.batch_index == -1:
        return _ALL_NEW.pack(
            1 << 3 | 2, _ALL_NEW.size - 2,
            1 << 3 | 1, receipt.frame,
            3 << 3 | 1, receipt.first_index,
            4 << 3 | 2, _ALL_NEW_ID_BYTES,
            1 << 3 | 1, first.ledger_id, 2 << 3 | 1, first.entry_id, 3 << 3, 1,
        )  # fmt: skip
    encoded = receipt_message(topic, receipt).SerializeToString()
    return b"".join([wire.varint(1 << 3 | 2), wire.varint(len(encoded)), encoded])


def receipt_message(topic: Topic, receipt: Receipt) -> Any:
    """The receipt as a message of the alias schema."""
    message = wire.Receipt(frame=receipt.frame, first_index=receipt.first_index)
    if receipt.verdicts is not None:
        message.verdicts = receipt.verdicts.tobytes()
    if receipt.first_index >= 0:
        _set_id(message.first_message_id, topic.log.message_id(receipt.first_index))
    if len(receipt.known_rows):
        ledgers, entries, batch_indexes = topic.log.message_ids(receipt.known_indexes)
        message.known_rows = receipt.known_rows.astype(np.uint32).tobytes()
        message.known_indexes = receipt.known_indexes.tobytes()
        message.known_ledger_ids = ledgers.tobytes()
        message.known_entry_ids = entries.tobytes()
        if (batch_indexes != -1).any():
            message.known_batch_indexes = batch_indexes.tobytes()
    return message


def _set_id(message: Any, message_id: MessageId) -> None:
    message.ledger_id, message.entry_id, message.batch_index = message_id


def encode_refusal(refusal: Refusal) -> bytes:
    """An element of `PublishStreamResponse.refusals`, tag and length included."""
    e = refusal.error
    message = publish_pb2.Refusal(
        frame=refusal.frame,
        reason=e.reason,
        message=e.message,
        retry_delay_ms=e.retry_delay_ms,
        producers=[
            publish_pb2.ProducerRefusal(
                producer_name=p.name,
                epoch=p.epoch,
                current_epoch=p.current_epoch,
                sequence_id=p.sequence_id,
                previous_sequence_id=p.previous_sequence_id,
                pushed=p.pushed,
                persisted=p.persisted,
            )
            for p in refusal.producers
        ],
    )
    encoded = message.SerializeToString()
    return b"".join([wire.varint(2 << 3 | 2), wire.varint(len(encoded)), encoded])


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

    def take_unsent(self) -> bytes:
        """Answers that wait, as one response: all, or as many as it may hold."""
        taken: list[bytes] = []
        size = 0
        while self.unsent and (not taken or size + len(self.unsent[0]) <= MAX_RESPONSE_BYTES):
            taken.append(self.unsent.popleft())
            size += len(taken[-1])
        self.unsent_bytes -= size
        self.update_room()
        taken.append(_TAIL.pack(3 << 3 | 1, self.topic.log.incarnation, 4 << 3 | 1, self.topic.term))
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
            request = _parse_publish(wire.PublishRequest, publish_pb2.PublishRequest, data)
            topic = self._topics.get(request.topic)
            if not topic.has_room():
                raise error("QUEUE_FULL", f"topic {topic.name} has too much in flight")
            done: asyncio.Future[Receipt | Refusal] = asyncio.get_running_loop().create_future()

            def reply(answer: Receipt | Refusal) -> None:
                if not done.done():
                    done.set_result(answer)

            topic.admit(request.batch, 0, reply, NumbersCache(), lone=True)
            answer = await done
            if isinstance(answer, Refusal):
                raise answer.error
            receipt = receipt_message(topic, answer).SerializeToString()
            return b"".join(
                [*wire.length_delimited(1, receipt),
                 struct.pack("<BqBq", 2 << 3 | 1, topic.log.incarnation, 3 << 3 | 1, topic.term)]
            )  # fmt: skip
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
        name, frame, batch = _parse_frame(first)
        topic = self._topics.get(name)
        stream = _Stream(topic)
        writer = asyncio.ensure_future(_write_answers(context, stream))
        # When the client is gone writing fails; the call is cancelled then, and nobody asks the task.
        writer.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            if batch or frame:
                stream.admit(frame, batch)
            while True:
                await stream.room.wait()
                if not topic.has_room():
                    await topic.wait_for_room()
                data = await context.read()
                if data is grpc.aio.EOF:
                    break
                name, frame, batch = _parse_frame(data)
                if name and name != topic.name and self._topics.get(name) is not topic:
                    raise error("INVALID_REQUEST", "a stream is for one topic: open another stream for the other one")
                stream.admit(frame, batch)
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


def _parse_publish(alias: Any, published: Any, data: bytes) -> Any:
    """A request with the batch as bytes. Raises MALFORMED_MESSAGE.

    A batch in several pieces is legal, protobuf merges them, but the alias schema shows only the last one. So a
    request that is not as long as its parts is read with the published schema.
    """
    request = parse(alias, data)
    frame = _FRAME_BYTES if alias is wire.PublishStreamRequest and request.frame else 0
    if len(data) != frame + _field_bytes(len(request.topic.encode())) + _field_bytes(len(request.batch)):
        request.batch = parse(published, data).batch.SerializeToString()
    return request


def _parse_frame(data: bytes) -> tuple[str, int, bytes]:
    """Topic, number and batch of a message of the stream. Raises MALFORMED_MESSAGE."""
    # What all but the first message look like: number, then the batch to the end. Half the cost of parsing it.
    if data[:1] == _FRAME_TAG and data[_FRAME_BYTES : _FRAME_BYTES + 1] == _BATCH_TAG:
        size, at = wire.read_varint(data, _FRAME_BYTES + 1)
        if at + size == len(data):
            return "", int.from_bytes(data[1:_FRAME_BYTES], "little"), data[at:]
    request = _parse_publish(wire.PublishStreamRequest, publish_pb2.PublishStreamRequest, data)
    return request.topic, request.frame, request.batch


def _field_bytes(size: int) -> int:
    """How long a field of so many bytes is encoded, with a tag of one byte."""
    return size and 1 + len(wire.varint(size)) + size
