"""PublishService: it opens sessions, passes frames from a client to a topic, and returns the answers."""

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np

from broker_sidecar.rpc import Context, abort, field_tags, parse, refusals, unary
from broker_sidecar.security.audit import Trail
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.rules import Action
from broker_sidecar.security.subject import caller
from broker_sidecar.shares import Share
from broker_sidecar.streams import COPIES, Stream, Streams, unasked
from seqdedupe import wire
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_OPEN_NAMES
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.message_id import MessageId
from seqdedupe.names import topic_name, whole_of
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics, check_gap_policy, find, find_or_create
from seqdedupe.topic.frame import Allowing, FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import check_names, open_sessions
from seqdedupe.topic.sessions import NAMES_A_STEP, OpenAnswer, wrong_count
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import LookedUp
from seqdedupe.v1 import publish_pb2

logger = logging.getLogger("broker_sidecar.publish")

# -- The messages of PublishService as bytes: frames in, answers out.

MAX_FRAMES = 256
"""The most frames in one message of a stream. They are admitted together while other streams wait."""

MAX_FIELDS = 2 * MAX_FRAMES
"""The most fields in one message of a stream. This includes the topic and fields of newer clients."""

# The last fields of an early receipt.
_DURABLE_AT = struct.Struct("<Bq")

_NO_BATCH_INDEX = b"\xff" * 4

_NUMBER_BYTES = 9
"""The size of `Frame.number` with its tag."""


def parse_publish(data: bytes) -> tuple[str, bytes]:
    """Return topic and batch of a unary request. Raises MALFORMED_MESSAGE."""
    request = parse(wire.PublishRequest, data)
    if len(data) == _field_bytes(len(request.topic.encode())) + _field_bytes(len(request.batch)):
        return request.topic, request.batch
    # A batch may legally come in several pieces that protobuf merges, but the alias schema shows only the last piece.
    # So a request that is longer than its visible parts is parsed again with the published schema.
    published = parse(publish_pb2.PublishRequest, data)
    return published.topic, published.batch.SerializeToString()


def parse_frames(data: bytes) -> tuple[str, list[tuple[int, bytes]]]:
    """Parse a message of the stream. Return the topic and the frames (number, batch). Raises MALFORMED_MESSAGE,
    INVALID_REQUEST."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    # The usual layout of all messages but a stream's first: frames, each with its number and then its batch. This loop
    # costs half of a parse, and copies a large batch once instead of twice.
    while len(frames) <= MAX_FRAMES and data[at : at + 1] == wire.FRAMES_TAG:
        frame_bytes, number_at = wire.read_varint(data, at + 1)
        batch_at = number_at + _NUMBER_BYTES
        batch_bytes, start = wire.read_varint(data, batch_at + 1)
        at = start + batch_bytes
        if batch_bytes < 0 or at > len(data) or at != number_at + frame_bytes:
            break
        if data[number_at : number_at + 1] != wire.NUMBER_TAG or data[batch_at : batch_at + 1] != wire.BATCH_TAG:
            break
        frames.append((int.from_bytes(data[number_at + 1 : batch_at], "little"), data[start:at]))
        if at == len(data) and len(frames) <= MAX_FRAMES:
            return "", frames
    _check_number_of_fields(data)
    request = parse(wire.PublishStreamRequest, data)
    size = _field_bytes(len(request.topic.encode()))
    for frame in request.frames:
        size += _field_bytes((frame.number and _NUMBER_BYTES) + _field_bytes(len(frame.batch)))
    if size != len(data):  # as in `parse_publish`
        request = parse(publish_pb2.PublishStreamRequest, data)
        return request.topic, [(frame.number, frame.batch.SerializeToString()) for frame in request.frames]
    return request.topic, [(frame.number, frame.batch) for frame in request.frames]


def takes_early_receipts(data: bytes) -> bool:
    """Return whether the first message of the stream asks for early receipts. Raises MALFORMED_MESSAGE."""
    _check_number_of_fields(data)
    return bool(parse(wire.PublishStreamRequest, data).early_receipts)


def _check_number_of_fields(data: bytes) -> None:
    """Raise INVALID_REQUEST if the message has too many frames or fields to parse; MALFORMED_MESSAGE.

    A message of 16 MiB can contain millions of empty frames, which would need a gigabyte when parsed.
    """
    frames = 0
    for tag in field_tags(data, "a PublishStreamRequest", MAX_FIELDS):
        frames += tag == wire.FRAMES_TAG
        if frames > MAX_FRAMES:
            raise error("INVALID_REQUEST", f"a message has more than {MAX_FRAMES} frames")


def _field_bytes(size: int) -> int:
    """Return the encoded size of a field with `size` bytes and a tag of one byte."""
    return size and 1 + len(wire.varint(size)) + size


def encode_receipt(topic: Topic, receipt: FrameReceipt) -> bytes:
    """Encode an element of `PublishStreamResponse.receipts`, or `PublishResponse.receipt`, with tag and length."""
    if receipt.verdicts is None and len(receipt.runs) == 1 and (first := receipt.runs[0]).batch_index == -1:
        durable_at = _DURABLE_AT.pack(14 << 3 | 1, receipt.durable_at) if receipt.durable_at else b""
        receipts, size, frame, index, message_id, id_size, ledger, entry, place, none = wire.ALL_NEW_TAGS
        return wire.ALL_NEW.pack(
            receipts, size + len(durable_at),
            frame, receipt.frame,
            index, receipt.first_index,
            message_id, id_size,
            ledger, first.ledger_id, entry, first.entry_id, place, none,
        ) + durable_at  # fmt: skip
    return b"".join(wire.length_delimited(1, _receipt_message(topic, receipt).SerializeToString()))


def _receipt_message(topic: Topic, receipt: FrameReceipt) -> Any:
    """Return the receipt as a message of the alias schema."""
    message = wire.Receipt(frame=receipt.frame, first_index=receipt.first_index, durable_at=receipt.durable_at)
    if receipt.verdicts is not None:
        message.verdicts = receipt.verdicts.tobytes()
    if receipt.runs:
        first = message.first_message_id
        _, first.ledger_id, first.entry_id, first.batch_index = receipt.runs[0]
    if len(receipt.runs) > 1:
        rows, ledger_ids, entry_ids, places = zip(*receipt.runs, strict=True)
        message.run_rows = np.array(rows, np.uint32).tobytes()
        message.run_ledger_ids = np.array(ledger_ids, np.int64).tobytes()
        message.run_entry_ids = np.array(entry_ids, np.int64).tobytes()
        message.run_batch_indexes = np.array(places, np.int32).tobytes()
    if len(receipt.imported_rows):
        message.imported_rows = receipt.imported_rows.astype(np.uint32).tobytes()
    if len(receipt.known_rows):
        ledgers, entries, batch_indexes = topic.log.known_message_ids(receipt.known_indexes)
        message.known_rows = receipt.known_rows.astype(np.uint32).tobytes()
        message.known_indexes = receipt.known_indexes.tobytes()
        message.known_ledger_ids = ledgers.tobytes()
        message.known_entry_ids = entries.tobytes()
        if (known_batch_indexes := batch_indexes.tobytes()) != _NO_BATCH_INDEX * len(batch_indexes):
            message.known_batch_indexes = known_batch_indexes
    return message


def encode_refusal(refusal: Refusal) -> bytes:
    """Encode an element of `PublishStreamResponse.refusals`, with tag and length."""
    e = refusal.error
    message = publish_pb2.Refusal(
        frame=refusal.frame,
        reason=e.reason,
        message=e.message,
        retry_delay_ms=e.retry_delay_ms,
        owner_address=e.numbers.get("owner_address", ""),
        producers=[
            publish_pb2.ProducerRefusal(
                producer_name=p.name,
                epoch=p.epoch,
                current_epoch=p.current_epoch,
                sequence_id=p.sequence_id,
                previous_sequence_id=p.previous_sequence_id,
                pushed=p.pushed,
                persisted=p.persisted,
                expected_sequence_id=p.expected_sequence_id,
            )
            for p in refusal.producers
        ],
    )
    return b"".join(wire.length_delimited(2, message.SerializeToString()))


# -- A stream, and the service.

SERVICE = "seqdedupe.v1.PublishService"

MAX_RESPONSE_BYTES = 2 * 1024 * 1024
"""The most bytes of answers in one response, unless the first alone is larger. This stays below gRPC's default limit
of 4 MiB."""

LAST_ANSWERS_SECONDS = 1.0
"""The time in which a client can read the waiting answers when the sidecar drains, or when another sidecar has taken
over the topic."""

MAX_ANSWER_FACTOR = 3
"""The maximum ratio of a receipt of old rows to its batch, in bytes. A row takes at least 12 bytes of the batch. In the
receipt, an old row with a known place takes at most 33 bytes, and a new row that is a separate run takes 25 bytes."""

MAX_ANSWER_BYTES = 33 * MAX_BATCH_ROWS
"""The size of the longest receipt."""

FRAME_BYTES = 2048
"""The memory of a frame in flight in addition to its batch: objects of Python and numpy. For a small batch, this is
nearly the whole memory."""

NO_MESSAGE_ID = MessageId(-1, -1, -1).to_proto()

_STATE_OF_TOPIC = struct.Struct("<BqBq")
_NO_FRAMES: Mapping[str, str] = {wire.FRAMES_TAKEN: "0"}
_NO_NUMBERS: Mapping[str, str] = {}


class _FrameStream:
    """The frames in flight of one publish stream, and the answers that wait to be sent. A frame passes these steps:

    1. The stream reads the next message when there is room for a message as large as the previous one. `parse_frames`
       cuts the message into frames.
    2. The topic looks up on disk which rows it already has, while other streams are served (`take`).
    3. The frame waits until there is room for the frame and its answer.
    4. The topic judges the frame and passes it to its log, all in one step of the event loop (`admit`).
    5. The topic answers at once or when the frame is stored. The answer takes over the frame's room, and is sent
       (`send_all`).

    With `is_early`, receipts may be sent before their rows are durable.
    """

    def __init__(
        self, topic: Topic, stream: Stream, allowing: Allowing | None = None, *, is_early: bool = False
    ) -> None:
        self.topic = topic
        self.stream = stream
        self.cache = topic.connect(stream.end)
        self.cache.allowing = self.allowing = allowing
        self.has_ended = False
        self.is_gone = False
        self.unsent: deque[bytes] = deque()
        self._when_durable = self._is_durable if is_early else None
        self._tells_durable = False
        """Whether rows with an early receipt have become durable since the last response."""
        self._durable_index = 0
        self.news = asyncio.Event()

    async def take_all(self, frames: list[tuple[int, bytes]]) -> int:
        """Admit these frames, and remove the list's references to them. Return the size of the longest batch."""
        sizes = [len(batch) for _, batch in frames]
        behind_bytes = sum(sizes)
        if frames:
            self.stream.moves()
        try:
            for k, (number, batch) in enumerate(frames):
                behind_bytes -= sizes[k]
                frames[k] = 0, b""
                await self.take(number, batch, behind_bytes)
        finally:
            self.stream.share.has_read(0)
        return max(sizes, default=0)

    async def take(self, frame: int, batch: bytes, behind_bytes: int = 0) -> None:
        """Admit a frame when there is room for it, in the same step of the event loop in which its lookup ends.

        `behind_bytes` is the size of the later frames that were also read and are waiting.
        """
        ids, looked_up, size = self.topic.ids, None, len(batch)
        while True:
            if ids.window is not None:
                self.stream.share.has_read(size + behind_bytes)
                # Look up again after a wait. The window's runs may have changed, and then the event loop would wait
                # for the disk.
                looked_up = await ids.look_up(batch)
            if self.has_room(size):
                break
            self.stream.share.has_read(size + behind_bytes)
            await self.wait_for_room(size)
            self.stream.moves()
        self.admit(frame, batch, looked_up)

    def admit(self, frame: int, batch: bytes, looked_up: LookedUp | None = None) -> None:
        """Pass a frame to the topic. The answer is added to `unsent`. `looked_up`: see `Topic.admit`."""
        size = FRAME_BYTES + len(batch)
        self.stream.share.take(size)
        self.stream.frames_in_flight += 1

        def reply(answer: FrameReceipt | Refusal) -> None:
            if isinstance(answer, Refusal):
                refusals[answer.error.reason] += 1
                self.stream.frames_in_flight -= 1
            elif not answer.durable_at:
                self.stream.frames_in_flight -= 1
            encoded = b""
            if not self.is_gone:
                encoded = self._encoded(answer)
                if not self.unsent:  # else there is news already
                    self.news.set()
                self.unsent.append(encoded)
            self.stream.share.give_back(size - len(encoded))

        # Before the log has the frame, which it may have even if this raises.
        self.stream.error_numbers = _NO_NUMBERS
        try:
            self.topic.admit(batch, frame, reply, self.cache, when_durable=self._when_durable, looked_up=looked_up)
        except Exception:
            # No answer will come.
            self.stream.frames_in_flight -= 1
            self.stream.share.give_back(size)
            raise

    def _encoded(self, answer: FrameReceipt | Refusal) -> bytes:
        try:
            return encode_receipt(self.topic, answer) if isinstance(answer, FrameReceipt) else encode_refusal(answer)
        except Exception as e:
            # Without an answer the client would wait. When the stream has ended, it sends the frame again.
            logger.exception("an answer could not be encoded")
            self.stream.end(error("OUT_OF_MEMORY", f"the answer to a frame could not be encoded: {type(e).__name__}"))
            return b""

    def _is_durable(self) -> None:
        self.stream.frames_in_flight -= 1
        self._tells_durable = True
        self.news.set()

    def end(self) -> None:
        """End the input from the client. Frames in flight are still answered."""
        self.has_ended = True
        self.news.set()

    def give_up(self) -> None:
        """Drop waiting and later answers: the client has disconnected."""
        self.is_gone = True
        self.topic.disconnect(self.cache)
        self.stream.share.give_back(sum(map(len, self.unsent)))
        self.unsent.clear()

    def has_room(self, size: int, *, to_read: bool = False) -> bool:
        """Return whether a frame of `size` bytes may be admitted now, or read."""
        return self.stream.share.fits(_room_for(size), to_read=to_read) and self.topic.flight.has_room()

    async def wait_for_room(self, size: int, *, to_read: bool = False) -> None:
        """Wait until a frame of `size` bytes may be admitted, or read."""
        await self.stream.share.wait_for(_room_for(size), to_read=to_read)
        if not self.topic.flight.has_room():
            await self.topic.flight.wait_for_room()

    def take_unsent(self) -> tuple[bytes, int]:
        """Return a response with the waiting answers, up to the limit of a response, and the total size of these
        answers."""
        self._tells_durable = False
        taken: list[bytes] = []
        size = 0
        while self.unsent and (not taken or size + len(self.unsent[0]) <= MAX_RESPONSE_BYTES):
            taken.append(self.unsent.popleft())
            size += len(taken[-1])
        topic = self.topic
        if topic.knows_its_end:
            # Otherwise the log may show messages of another owner, which that owner does not know yet.
            self._durable_index = topic.confirmed_index
        incarnation, term, durable_index = wire.STATE_TAGS
        state = (incarnation, topic.incarnation, term, topic.term, durable_index, self._durable_index)
        taken.append(wire.STATE.pack(*state))
        return b"".join(taken), size

    async def send_all(self) -> None:
        """Write all answers. Only this task writes to the stream. If the task that reads also wrote, it would stop
        reading while the client does not read."""
        while not self.has_ended or self.stream.frames_in_flight or self.unsent:
            await self.news.wait()
            self.news.clear()
            while self.unsent or self._tells_durable:
                response, size = self.take_unsent()
                try:
                    await self.stream.write(response)
                finally:
                    self.stream.share.give_back(size)
                del response  # until there is news


class PublishService:
    """The handlers of PublishService."""

    def __init__(self, all_topics: Topics[Topic], streams: Streams, permissions: Permissions, trail: Trail) -> None:
        self._topics = all_topics
        self._streams = streams
        self._permissions = permissions
        self._trail = trail

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "Open": unary(publish_pb2.OpenRequest, self.open),
            "Publish": grpc.unary_unary_rpc_method_handler(self._publish),
            "PublishStream": grpc.stream_stream_rpc_method_handler(
                self._streams.handler(self._publish_stream, publishes=True, error_numbers=_NO_FRAMES)
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def open(self, request: publish_pb2.OpenRequest, layout: Layout = AS_USUAL) -> publish_pb2.OpenResponse:
        """Open sessions, or resume the sessions with the given epochs. A topic that is created gets this layout.

        These are the steps:

        1. The request counts towards the caller's share, because a record of it is written to the log.
        2. Names under which the caller may not publish are removed and refused at their places. A caller whose disk
           share is full can open nothing, and can resume only names that are already in the log.
        3. The topic is found, or created.
        4. Names that are new to the topic must fit the shares. Resumed names are counted too: Open accepts the epoch of
           another name, so resuming can add names.
        5. The topic opens sessions for the remaining names. Many names are opened in parts, between which other callers
           may open names.
        6. The audit trail records which caller took over whose names, and the answer is created.
        """
        if len(request.producer_names) > MAX_OPEN_NAMES:  # before Python objects are made of them
            raise wrong_count()
        shares = self._permissions.shares
        shares.check_rate(shares.of(caller().name), request.ByteSize(), time.monotonic())  # 1
        names, epochs = list(request.producer_names), list(request.epochs)
        full = topic_name(request.topic)
        denied = await self.denied(full, names)  # 2
        if not epochs:
            self._permissions.check_disk(self._topics)
        topic = await self._topic_of(full, names, layout, is_resume=bool(epochs))  # 3
        if self._topics.partitions_beside(topic.name):
            check_gap_policy(topic.name, topic.applied.gap)
        if denied:
            names = [name for place, name in enumerate(names) if place not in denied]
            epochs = [epoch for place, epoch in enumerate(epochs) if place not in denied]
        # Held while names are counted.
        judged = await self._permissions.judge_known_names(topic.name, topic.producers)

        def check_new(some: list[str], *, writes: bool = False) -> None:
            if writes:
                self._permissions.check_disk(self._topics)
            self._permissions.check_new_names(topic.name, topic.producers, [name.encode() for name in some])

        check_new(names)  # 4
        opened = await open_sessions(topic, names, epochs or None, check_new)  # 5
        del judged
        if not epochs:
            fenced = ((names[place], epoch) for place, epoch in opened.fenced_epochs.items())
            self._trail.opened(topic.name, topic.log.incarnation, set(opened.epochs), fenced)  # 6
        return await _opened_to_proto(topic, opened.among(len(request.producer_names), denied))

    async def denied(self, topic: str, names: list[str]) -> dict[int, SeqdedupeError]:
        """Return the errors for the names under which the caller may not publish, by place.

        Raises NOT_ALLOWED, which names the first of them, if all names are denied.
        """
        self._permissions.check_topic(Action.PUBLISH, topic)
        places, denial = await self._permissions.denied_names(topic, names)
        if denial is None:
            return {}
        if len(places) == len(names):
            raise denial
        # The caller knows the name that it sent. 10,000 answers that repeat the names would not fit into one message.
        short = error("NOT_ALLOWED", "the caller may not publish as this producer")
        return dict.fromkeys(places, short)

    async def _topic_of(self, full: str, names: list[str], layout: Layout, *, is_resume: bool) -> Topic:
        """Return the topic of an Open, by its full name. Create it if necessary, unless the request will be refused."""
        await self._topics.waiting.use(full)
        try:
            return self._topics.get(full)
        except NotFoundError:
            if is_resume:
                return await find(self._topics, full)
        if whole_of(full) is not None:
            # A partition made by another process exists for every caller that may publish.
            with suppress(NotFoundError):
                return await find(self._topics, full)
        await check_names(names)
        self._permissions.check_creates(full, self._topics.registry.names())
        return await find_or_create(self._topics, full, layout)

    async def _publish(self, data: bytes, context: Context) -> bytes:
        try:
            name, batch = parse_publish(data)
            self._permissions.check_topic(Action.PUBLISH, topic_name(name))
            shares = self._permissions.shares
            shares.check_rate(use := shares.of(caller().name), len(data), time.monotonic())
            self._permissions.check_disk(self._topics)
            topic = await find(self._topics, name)
            self._check_unnamed(topic)
            looked_up = await topic.ids.look_up(batch) if topic.ids.window is not None else None
            share = Share(self._streams.budget, use)
            why = f"topic {topic.name} has too much in flight, or all clients together have"
            share.check(max(len(batch), _answer_bytes(len(batch))), why)
            if not topic.flight.has_room():
                raise error("QUEUE_FULL", why)
            share.take(len(batch))
            done: asyncio.Future[FrameReceipt | Refusal] = asyncio.get_running_loop().create_future()

            def reply(answer: FrameReceipt | Refusal) -> None:
                share.give_back(len(batch))
                if not done.done():
                    done.set_result(answer)

            cache = NumbersCache(allowing=self._permissions.allowing(topic.name, topic.producers))
            topic.admit(batch, 0, reply, cache, lone=True, looked_up=looked_up)
            answer = await done
            if isinstance(answer, Refusal):
                raise answer.error
            state = _STATE_OF_TOPIC.pack(2 << 3 | 1, topic.log.incarnation, 3 << 3 | 1, topic.term)
            return encode_receipt(topic, answer) + state
        except Exception as e:  # noqa: BLE001 (the caller gets an answer after every error)
            await abort(context, e)

    def _check_unnamed(self, topic: Topic) -> None:
        """Raise NOT_ALLOWED if the topic's messages have no producers, and the caller may publish only under certain
        producer names."""
        if topic.window is not None:
            self._permissions.check_publishes_unnamed(topic.name)

    async def _publish_stream(self, _requests: object, context: Context, stream: Stream) -> None:
        if any(key == wire.GREETING for key, _ in context.invocation_metadata() or ()):
            await stream.write(b"")
        first = await stream.read_first()
        if first is grpc.aio.EOF:
            return
        name, frames = parse_frames(first)
        is_early = takes_early_receipts(first)
        del first  # the frames are copies of it
        # Checked once here. After this, the topic judges every frame separately.
        self._permissions.check_topic(Action.PUBLISH, topic_name(name))
        stream.allowed.clear()
        topic = await find(self._topics, name)
        allowing = self._permissions.allowing(topic.name, topic.producers)
        publishing = _FrameStream(topic, stream, allowing, is_early=is_early)
        writer = unasked(publishing.send_all())
        try:
            await self._take_frames(publishing, frames)
            publishing.end()
            await writer
        except asyncio.CancelledError:
            if self._streams.is_draining or publishing.topic.state is State.STANDBY:
                publishing.end()
                await asyncio.wait({writer}, timeout=LAST_ANSWERS_SECONDS)
            raise
        finally:
            writer.cancel()
            publishing.give_up()

    async def _take_frames(self, publishing: _FrameStream, frames: list[tuple[int, bytes]]) -> None:
        """Admit these frames and all later frames, until the client ends its side of the stream."""
        topic = publishing.topic
        while True:
            if topic.has_successor:
                # Raises an error with the topic's place if it is not here.
                self._topics.get(topic.name)
                raise error("DRAINING", f"topic {topic.name} was reopened: open the stream again")
            # Test the limit here first: every frame passes here, and few callers have this limit.
            if publishing.stream.use.limits.bytes_on_disk is not None:
                self._permissions.check_disk(self._topics)
            if publishing.allowing is not None:
                self._check_unnamed(topic)
            size = await publishing.take_all(frames)
            # The next message probably has the same size. After the read it can no longer wait inside gRPC.
            if not publishing.has_room(size, to_read=True):
                await publishing.wait_for_room(size, to_read=True)
            data = await publishing.stream.read()
            if data is grpc.aio.EOF:
                return
            name, frames = parse_frames(data)
            del data  # the frames are copies of it
            # Compare names only. A caller must not learn about other topics.
            if name and topic_name(name) != topic.name:
                raise error("INVALID_REQUEST", "a stream is for one topic: open a second stream for the other topic")


async def _opened_to_proto(topic: Topic, opened: OpenAnswer) -> publish_pb2.OpenResponse:
    """Return the answer to an Open. Even with many names, this does not block other calls."""
    response = publish_pb2.OpenResponse(
        incarnation=topic.log.incarnation,
        term=topic.term,
        epochs=opened.epochs,
        persisted=opened.persisted,
        persisted_indexes=opened.indexes,
        forgotten=opened.forgotten,
        durable_index=topic.confirmed_index,
    )
    for k, (place, e) in enumerate(sorted(opened.refusals.items())):
        if k % NAMES_A_STEP == NAMES_A_STEP - 1:
            await asyncio.sleep(0)
        refusals[e.reason] += 1
        current = int(e.numbers.get("current_epoch", "0"))
        response.refusals.add(index=place, reason=e.reason, message=e.message, current_epoch=current)
    for first in range(0, len(opened.indexes), NAMES_A_STEP):
        if first:
            await asyncio.sleep(0)
        indexes = np.array(opened.indexes[first : first + NAMES_A_STEP], np.int64)
        columns = [column.tolist() for column in (*topic.log.known_message_ids(indexes), indexes)]
        response.persisted_message_ids.extend(
            MessageId(*message_id).to_proto() if index >= 0 else NO_MESSAGE_ID
            for *message_id, index in zip(*columns, strict=True)
        )
    return response


def _answer_bytes(size: int) -> int:
    """Return the largest size of the answer to a batch of `size` bytes."""
    return min(MAX_ANSWER_FACTOR * size, MAX_ANSWER_BYTES)


def _room_for(size: int) -> int:
    """Return the room that a stream needs for a batch of `size` bytes, and for the answer that replaces it."""
    return FRAME_BYTES + max(size, COPIES * _answer_bytes(size))
