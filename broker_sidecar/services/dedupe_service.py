"""DedupeService: a broker with its own log attaches its topics to the sidecar. Each attachment is one stream."""

import asyncio
import secrets
from collections import deque
from typing import Any

import grpc
import grpc.aio
import numpy as np

from broker_sidecar.rpc import Context, field_tags, parse_columns, refusals, unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.rules import Action
from broker_sidecar.streams import Stream, Streams, unasked
from seqdedupe.batch import INT32, INT64, Binary, binary, column_of_names, values
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name, whole_of
from seqdedupe.topic.attached import ADMISSION_BYTES, CHECK_BYTES, AttachedTopic, BrokerAttachment, Columns
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.sessions import NAMES_A_STEP
from seqdedupe.v1 import dedupe_pb2
from seqdedupe.wire import alias

# -- The messages of `DedupeService.Attach` as bytes: the steps of a broker, and their columns.

_AttachResponse = alias(dedupe_pb2.AttachResponse)
_Attached = alias(dedupe_pb2.Attached)
_End = alias(dedupe_pb2.End)

MAX_CHECKS = 256
"""The most checks in one message."""

MAX_FIELDS = 2 * MAX_CHECKS
"""The most fields in one message. This includes other steps and fields of newer brokers."""

SMALL_BYTES = 64 * 1024
"""A message of at most this size can always be parsed, with any content."""


def parse_steps(data: bytes) -> Any:
    """Return the steps in a message, of the alias schema. Raises MALFORMED_MESSAGE, INVALID_REQUEST."""
    if len(data) > SMALL_BYTES:
        # 16 MiB can hold millions of empty checks, and parsed they take half a gigabyte.
        deque(field_tags(data, "an AttachRequest", MAX_FIELDS), 0)
    request = parse_columns(dedupe_pb2.AttachRequest, data)
    if len(request.checks) > MAX_CHECKS:
        raise error("INVALID_REQUEST", f"a message has more than {MAX_CHECKS} checks")
    return request


def columns_of(message: Any) -> Columns:
    """Return the columns of a `Check` or `Replay`. Raises INVALID_REQUEST."""
    lowest = values(message.sequence_ids, INT64, "sequence_ids")
    highest = lowest
    if message.highest_sequence_ids:
        highest = values(message.highest_sequence_ids, INT64, "highest_sequence_ids")
    return Columns(values(message.handles, INT32, "handles"), lowest, highest, np.frombuffer(message.passes, np.uint8))


# -- An attachment, and the service.

SERVICE = "seqdedupe.v1.DedupeService"

MAX_TOKEN = 2**64 - 1

MAX_UNSENT_BYTES = 256 * 1024
"""The maximum size of unsent answers. Above this size, the sidecar reads no messages of the broker until answers are
sent."""

TRIM_NEWS_SECONDS = 0.1
"""A change of the trim position waits for this time, to be sent together with an answer. While the broker is busy, it
is never sent alone."""

END_SECONDS = 1.0
"""The time for sending the reason when an attachment ends. A client that does not read during this time does not get
the reason."""


class DedupeService:
    """The handlers of DedupeService."""

    def __init__(self, topics: Topics[AttachedTopic], streams: Streams, permissions: Permissions) -> None:
        self._topics = topics
        self._streams = streams
        self._permissions = permissions

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "Attach": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._attach, publishes=True)),
            "GetProducer": unary(dedupe_pb2.DedupeServiceGetProducerRequest, self._get_producer),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _get_producer(
        self, request: dedupe_pb2.DedupeServiceGetProducerRequest
    ) -> dedupe_pb2.DedupeServiceGetProducerResponse:
        pushed, persisted = self._topics.get(request.topic).numbers_of(request.producer_name)
        return dedupe_pb2.DedupeServiceGetProducerResponse(pushed=pushed, persisted=persisted)

    async def _attach(self, _requests: object, _context: Context, stream: Stream) -> None:
        first = await stream.read_first()
        if first is grpc.aio.EOF:
            return
        request = parse_steps(first)
        if not request.HasField("begin") or len(request.ListFields()) > 1:
            raise error("INVALID_REQUEST", "the first message must be begin, alone and without a token")
        topic = await self._topic_of(topic_name(request.begin.topic))
        # The stream holds the topic, so the stream is never ended to make room for another stream, even if no client
        # publishes.
        stream.frames_in_flight += 1
        hold = _Hold(topic, stream, self._permissions)
        try:
            await hold.serve()
        except SeqdedupeError as e:
            await hold.tell_end(e)
            raise
        finally:
            hold.close()

    async def _topic_of(self, name: str) -> AttachedTopic:
        """Return the topic to attach. If it does not exist, create it."""
        # The broker's replay and reports determine the state of the whole topic, for all producer names in them.
        self._permissions.check_topic(Action.ATTACH, name)
        await self._topics.waiting.use(name)
        if not self._topics.is_there(name):
            # A broker's partition is no separate topic. As everywhere, the rules apply to the broker's topic.
            others = (one for one in self._topics.registry.names() if one != name)
            self._permissions.check_creates(whole_of(name) or name, others)
        return await self._topics.get_or_create(name)


class _Hold:
    """Serves one attachment: reads and writes the messages of the attachment's stream.

    Only one task writes to the stream. The end of the attachment cancels only the other task. So no message is cut off,
    and the last message reports the end.
    """

    def __init__(self, topic: AttachedTopic, stream: Stream, permissions: Permissions) -> None:
        self._topic = topic
        self._stream = stream
        self._permissions = permissions
        self._token = secrets.randbelow(MAX_TOKEN) + 1
        self._held_bytes = 0
        """The memory for admissions in flight, as part of the memory that all clients share."""
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = False
        self._told_trim_position = b""
        self._attachment: BrokerAttachment = topic.attach(stream.end, self._trim_moved)
        self._writer = unasked(self._send_all())

    async def serve(self) -> None:
        """Answer the broker's messages until the broker ends its side of the stream. If the attachment ends earlier,
        raise the reason."""
        try:
            with self._stream.ending():
                await self._answer_all()
                self._has_ended = True
                self._news.set()
                await asyncio.wait({self._writer})
        finally:
            self._topic.detach(self._attachment)

    async def _answer_all(self) -> None:
        topic, attachment = self._topic, self._attachment
        attached = _Attached(token=self._token, replay_after=attachment.position, incarnation=topic.incarnation)
        self._say(_AttachResponse(attached=attached))
        while (data := await self._stream.read()) is not grpc.aio.EOF:
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                self._has_room.clear()
                await self._has_room.wait()
            request = parse_steps(data)
            if request.token != self._token:
                raise error("NOT_ATTACHED", "the token is not that of this attachment")
            if request.HasField("begin"):
                raise error("INVALID_REQUEST", "begin may be sent only once, in the first message")
            answer = _AttachResponse()
            await self._change(request, answer)
            for check in request.checks:
                self._check(check, answer)
            self._hold(attachment.held_bytes)
            if request.checks or request.HasField("end_replay"):
                self._say(answer)

    async def _change(self, request: Any, answer: Any) -> None:
        """Carry out all steps of a message except its checks."""
        topic, attachment = self._topic, self._attachment
        if request.HasField("register"):
            await self._register(request.register)
        if request.HasField("release"):
            attachment.release(values(request.release.handles, INT32, "handles"))
        if request.HasField("replay"):
            self._replay(request.replay)
        if request.HasField("end_replay"):
            attachment.end_replay(request.end_replay.last_position)
            topic.ready()
            answer.ready.replayed = attachment.replayed
        if request.HasField("report"):
            report = request.report
            topic.report(attachment, report.first_admission, report.persisted, report.position, report.failed)
        if request.HasField("reset"):
            attachment.reset()

    async def _register(self, register: Any) -> None:
        """Register the names, some in each step of the event loop. Invalid names raise an error before any name is
        registered."""
        topic, handle, column = self._topic, register.first_handle, column_of_names(register)
        starts = range(0, len(column.offsets) - 1, NAMES_A_STEP)
        parts = [Binary(column.offsets[first : first + NAMES_A_STEP + 1], column.data) for first in starts]
        if len(parts) > 1:
            for part in parts:
                self._attachment.check_names(part.values())
                await asyncio.sleep(0)
        for part in parts:
            names = part.values()
            self._permissions.check_new_names(topic.name, topic.producers, names, are_all_its=True)
            self._attachment.register(handle, names)
            handle += len(names)
            if part is not parts[-1]:
                await asyncio.sleep(0)

    def _replay(self, replay: Any) -> None:
        columns = columns_of(replay)
        self._attachment.replay(
            columns,
            binary(replay.position_offsets, replay.positions, "position_offsets"),
            binary(replay.previous_position_offsets, replay.previous_positions, "previous_position_offsets"),
        )
        self._topic.replayed(self._attachment, len(columns))

    def _check(self, check: Any, answer: Any) -> None:
        try:
            columns = columns_of(check)
            if not self._stream.share.fits(CHECK_BYTES + len(columns) * ADMISSION_BYTES):
                raise error("QUEUE_FULL", "this broker has too much in flight, or all clients together have")
            checked = self._topic.check(self._attachment, columns)
        except SeqdedupeError as e:
            refusals[e.reason] += 1
            answer.refusals.add(
                frame=check.frame,
                reason=e.reason,
                message=e.message,
                row=int(e.numbers.get("row", -1)),
                pushed=int(e.numbers.get("pushed", -1)),
                persisted=int(e.numbers.get("persisted", -1)),
                expected_sequence_id=int(e.numbers["expected_sequence_id"]) if e.reason == "GAP" else None,
                retry_delay_ms=e.retry_delay_ms,
            )
            return
        answer.checked.add(
            frame=check.frame, verdicts=checked.verdicts.tobytes(), first_admission=checked.first_admission
        )

    def _hold(self, size: int) -> None:
        more = size - self._held_bytes
        self._held_bytes = size
        if more > 0:
            self._stream.share.take(more)
        elif more < 0:
            self._stream.share.give_back(-more)

    def _say(self, answer: Any) -> None:
        self._unsent.append(answer.SerializeToString())
        self._unsent_bytes += len(self._unsent[-1])
        self._news.set()

    def _trim_moved(self) -> None:
        asyncio.get_running_loop().call_later(TRIM_NEWS_SECONDS, self._tell_trim)

    def _tell_trim(self) -> None:
        if self._told_trim_position != self._topic.trim_position:
            self._news.set()

    async def _send_all(self) -> None:
        """Send the answers and the trim position until no more answers follow."""
        while not self._has_ended or self._unsent:
            if not self._unsent:
                await self._news.wait()
            self._news.clear()
            self._told_trim_position = self._topic.trim_position
            trim = _AttachResponse(trim_position=self._told_trim_position)
            # Concatenated messages are one message.
            data = b"".join((*self._unsent, trim.SerializeToString()))
            self._unsent.clear()
            self._unsent_bytes = 0
            self._has_room.set()
            if data:
                await self._stream.write(data)

    async def tell_end(self, why: SeqdedupeError) -> None:
        """If the client reads, send the reason why the attachment ended as a message. A client that is writing would
        lose a reason that is only in the status."""
        end = _End(reason=why.reason, message=why.message, retry_delay_ms=why.retry_delay_ms)
        self._say(_AttachResponse(end=end))
        self._has_ended = True
        await asyncio.wait({self._writer}, timeout=END_SECONDS)

    def close(self) -> None:
        self._hold(0)
        self._writer.cancel()
