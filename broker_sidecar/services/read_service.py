"""ReadService: pages, streams, searches for positions, and named cursors (including the cursor calls of
AdminService)."""

import asyncio
import struct
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from broker_sidecar.rpc import Context, parse_small, unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import caller
from broker_sidecar.shares import Share
from broker_sidecar.streams import Stream, Streams, unasked
from seqdedupe.errors import error
from seqdedupe.log.contract import LargerRecordError
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.topic import operations, policy
from seqdedupe.topic.directory import Topics, find
from seqdedupe.topic.readers import (
    PAGE_BYTES,
    Followers,
    Page,
    check_index,
    end_index,
    index_after,
    read_on,
    read_page,
    shown_end,
)
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2, read_pb2

SERVICE = "seqdedupe.v1.ReadService"

LEAST_PAGE_BYTES = 16 * 1024
"""The smallest size limit of a page. The largest is PAGE_BYTES, unless a single message is larger. With this small
limit, hundreds of clients that do not read still leave some memory free."""

_TAIL = struct.Struct("<BqBqBq")
_SKIPPED = struct.Struct("<HBBqBq")
"""Field 16, whose tag takes two bytes. It contains an IndexRange."""

UNKNOWN_END = -1

_LEAST_ALIVE_MS, _MOST_ALIVE_MS = 1_000, 3_600_000
"""The limits of the interval at which a client may ask for answers."""


def _encode(topic: Topic, page: Page) -> bytes:
    """Encode a ReadResponse or ReadStreamResponse. The stored records are already in this encoding."""
    end = topic.confirmed_index if topic.knows_its_end else UNKNOWN_END
    tail = _TAIL.pack(13 << 3 | 1, page.next_index, 14 << 3 | 1, end, 15 << 3 | 1, topic.incarnation)
    if page.skipped:
        tail += _SKIPPED.pack(0x0182, 18, 1 << 3 | 1, page.skipped.start, 2 << 3 | 1, page.skipped.stop)
    return b"".join((page.records, tail))


async def _start(topic: Topic, start: read_pb2.ReadStart, *, skip_damaged: bool) -> int:
    """Return the index at which to begin reading."""
    match start.WhichOneof("start"):
        case "after":
            index = await index_after(topic, Position.from_proto(start.after), skip_damaged=skip_damaged)
        case "index":
            index = start.index
        case "latest":
            return end_index(topic)
        case _:
            return topic.log.first_index
    await check_index(topic, index)
    return index


@dataclass(slots=True, eq=False)
class Reading:
    """The state of a stream of pages."""

    topic: Topic
    index: int
    """The index of the next message to send."""
    stop: int | None

    @property
    def lag(self) -> int:
        """The number of available messages that were not sent yet."""
        end = self.topic.readable_index
        return max(0, (end if self.stop is None else min(end, self.stop)) - self.index)


class ReadService:
    """The handlers of ReadService."""

    def __init__(self, topics: Topics[Topic], streams: Streams, permissions: Permissions) -> None:
        self._topics = topics
        self._permissions = permissions
        self._streams = streams
        self._followers = Followers(_encode)
        self.readings: set[Reading] = set()
        self.sent_messages = self.sent_bytes = 0
        """The counts in the pages of all streams and calls."""

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            # On the wire, a call with one answer looks the same as a call with a stream of answers.
            "Read": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._read, is_call=True)),
            "ReadStream": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._read_stream)),
            "Locate": self._streams.call(read_pb2.LocateRequest, partial(find, self._topics), self._locate),
            "GetLastMessageId": unary(read_pb2.GetLastMessageIdRequest, self._get_last_message_id),
            **Cursors(self._topics, self._permissions).reading(),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _read(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(read_pb2.ReadRequest, data)
        topic = await find(self._topics, request.topic)
        index = await _start(topic, request.start, skip_damaged=request.skip_damaged)
        asked = _checked_stop(request.stop_index)
        if index >= topic.readable_index and not 0 < asked <= index:
            # An empty page says that this is the end.
            await shown_end(topic)
        stop = min(topic.readable_index, asked or topic.readable_index)
        page = Page(b"", index)
        if index < stop:
            page = await self._page(topic, index, stop, stream, skip_damaged=request.skip_damaged)
        self._count(index, page)
        answer = _encode(topic, page)
        del page  # free it while the client takes the answer
        await stream.write_reserved(answer)

    async def _page(self, topic: Topic, index: int, stop: int, stream: Stream, *, skip_damaged: bool) -> Page:
        """Return a page for a unary call. Do not wait for memory: if too little memory is free, raise QUEUE_FULL or
        SHARE_EXCEEDED."""
        size = next_page_bytes(stream.share)
        while True:
            stream.reserve_now(size, "readers hold all the memory for pages")
            try:
                page_bytes = min(size, PAGE_BYTES)
                return await read_page(topic, index, stop, page_bytes, skip_damaged=skip_damaged, most_bytes=size)
            except LargerRecordError as e:
                size = e.size

    async def _read_stream(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(read_pb2.ReadStreamRequest, data)
        topic = await find(self._topics, request.topic)
        index = await _start(topic, request.start, skip_damaged=request.skip_damaged)
        stop: int | None = None
        if request.HasField("stop_index"):
            stop = _checked_stop(request.stop_index)
        elif not request.follow:
            stop = end_index(topic)
        alive_ms = request.alive_ms and min(max(request.alive_ms, _LEAST_ALIVE_MS), _MOST_ALIVE_MS)
        # Answer at once, so that the caller knows that the sidecar serves it, and where the end is.
        said = read_pb2.ReadStreamResponse(alive_ms=alive_ms).SerializeToString()
        await stream.write(_encode(topic, Page(b"", index)) + said)

        last_bytes = 0

        async def room(least_bytes: int) -> int:
            """Reserve memory before a page is read. The size is a guess: the next message is probably as large as the
            previous message."""
            size = max(next_page_bytes(stream.share), last_bytes, least_bytes)
            return await stream.reserve(size, least_bytes or LEAST_PAGE_BYTES)

        reading = Reading(topic, index, stop)
        self.readings.add(reading)
        writing = asyncio.Lock()
        keeping = unasked(_keep_alive(stream, reading, writing, alive_ms / 1000))
        try:
            async for page in read_on(
                topic, index, stop, room, skip_damaged=request.skip_damaged, followers=self._followers
            ):
                async with writing:
                    await stream.write_reserved(page.encoded)
                self._count(reading.index, page)
                reading.index = page.next_index
                last_bytes = len(page.records)
                del page  # free it until the next page
                if reading.index >= topic.readable_index:
                    # The next message may come much later.
                    stream.release()
        finally:
            keeping.cancel()
            self.readings.discard(reading)
        if stop is None or reading.index < stop:
            index = reading.index
            raise error("DRAINING", f"topic {topic.name} is closing: continue reading at index {index}", index=index)

    def _count(self, index: int, page: Page) -> None:
        self.sent_messages += page.next_index - index
        self.sent_bytes += len(page.records)

    async def _locate(self, request: read_pb2.LocateRequest, _stream: Stream) -> read_pb2.LocateResponse:
        topic = await find(self._topics, request.topic)
        end = topic.readable_index
        match request.WhichOneof("by"):
            case "publish_time_ms":
                index = await topic.log.locate_time(request.publish_time_ms, end)
            case "byte_budget":
                budget = request.byte_budget
                if budget.bytes <= 0:
                    raise error("INVALID_REQUEST", f"byte_budget.bytes is {budget.bytes}: it should be above 0")
                await check_index(topic, budget.from_index)
                index = end
                if budget.from_index < end:
                    index = await topic.log.locate_bytes(budget.from_index, budget.bytes, end)
            case _:
                raise error("INVALID_REQUEST", "Locate needs publish_time_ms or byte_budget")
        if index >= end:
            # This is the topic's end, unless the certain part has grown meanwhile.
            topic.check_knows_its_end()
        return read_pb2.LocateResponse(index=index, incarnation=topic.incarnation)

    async def _get_last_message_id(
        self, request: read_pb2.GetLastMessageIdRequest
    ) -> read_pb2.GetLastMessageIdResponse:
        topic = await find(self._topics, request.topic)
        # A client judges by this answer whether the topic has lost the end that a standby has shown to it.
        await shown_end(topic)
        return read_pb2.GetLastMessageIdResponse(last=topic.last_position.to_proto(), first_index=topic.log.first_index)


async def _keep_alive(stream: Stream, reading: Reading, writing: asyncio.Lock, seconds: float) -> None:
    """Send an empty page whenever no other answer was sent for `seconds`. With 0, never send one."""
    said_at = stream.moved_at
    while seconds:
        await asyncio.sleep(max(said_at, stream.moved_at) + seconds - time.monotonic())
        async with writing:
            moved_at = stream.moved_at
            if time.monotonic() < max(said_at, moved_at) + seconds:
                continue
            await stream.write(_encode(reading.topic, Page(b"", reading.index)))
            # These pages do not count as activity when another stream needs a place.
            said_at, stream.moved_at = stream.moved_at, moved_at


def next_page_bytes(share: Share) -> int:
    """Return the size limit of the next page. The less memory remains for the caller, the smaller are the caller's
    pages."""
    return max(LEAST_PAGE_BYTES, int(PAGE_BYTES * share.free_part**2))


def _checked_stop(stop_index: int) -> int:
    if stop_index < 0:
        raise error("INVALID_POSITION", f"stop_index is {stop_index}: indexes begin with 0")
    return stop_index


# -- The calls about named cursors: those of ReadService for readers, and those of AdminService.

RECORD_BYTES = 256
"""The most bytes of a moved cursor in the log, in addition to its name and its content."""


class Cursors:
    """The handlers for cursors. `topics` are the topics on the sidecar's own log, or None if the sidecar has no such
    topics."""

    def __init__(self, topics: Topics[Topic] | None, permissions: Permissions) -> None:
        self._topics = topics
        self._permissions = permissions

    def reading(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers of ReadService by the name of the call."""
        return {
            "GetCursor": unary(read_pb2.GetCursorRequest, self.get),
            "MoveCursor": unary(read_pb2.MoveCursorRequest, self.move),
        }

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers of AdminService by the name of the call."""
        return {
            "ListCursors": unary(admin_pb2.ListCursorsRequest, self._list_cursors),
            "SetCursorHold": unary(admin_pb2.SetCursorHoldRequest, self._set_cursor_hold),
            "DeleteCursor": unary(admin_pb2.DeleteCursorRequest, self.delete),
        }

    async def _topic(self, name: str) -> Topic:
        if self._topics is None:
            what = "cursors are kept in the logs of topics, but here a broker has the logs"
            raise error("INVALID_REQUEST", what, hint="Store the position in the broker.")
        return await find(self._topics, name)

    async def get(self, request: read_pb2.GetCursorRequest) -> read_pb2.GetCursorResponse:
        """Return the value of a cursor. Raises the errors of `operations.kept_by_cursor`."""
        kept = operations.kept_by_cursor(await self._topic(request.topic), request.name)
        if kept is None:
            return read_pb2.GetCursorResponse()
        position, note = kept
        return read_pb2.GetCursorResponse(kept=read_pb2.CursorValue(position=position.to_proto(), note=note))

    async def move(self, request: read_pb2.MoveCursorRequest) -> read_pb2.MoveCursorResponse:
        """Move a cursor. Raises SHARE_EXCEEDED and the errors of `operations.move_cursor`."""
        if not request.HasField("new"):
            raise error("INVALID_REQUEST", "new is missing: set the value that the cursor should store")
        expected = _kept(request.expected) if request.HasField("expected") else None
        await self._wait_for_turn(request)
        topic = await self._topic(request.topic)
        # From here on one step of the event loop: each of several concurrent moves counts the cursors of the others.
        there = [cursor.name for cursor in topic.newest_policy.cursors]
        if request.name not in there:
            self._permissions.check_new_cursor(topic.name, there)
        await operations.move_cursor(topic, request.name, expected, _kept(request.new))
        return read_pb2.MoveCursorResponse()

    async def _wait_for_turn(self, request: read_pb2.MoveCursorRequest) -> None:
        """Wait as long as the caller's share requires before a cursor moves. Without this limit, a caller with only the
        right to read could fill the topic's log.

        Raises SHARE_EXCEEDED.
        """
        shares, now_seconds = self._permissions.shares, time.monotonic()
        use = shares.of(caller().name)
        if not caller().is_unrestricted:
            size = RECORD_BYTES + len(request.name.encode()) + request.new.ByteSize()
            wait_seconds = use.move(topic_name(request.topic), size, now_seconds)
            if wait_seconds:
                await asyncio.sleep(wait_seconds)
        shares.check_rate(use, request.ByteSize(), time.monotonic())

    async def _list_cursors(self, request: admin_pb2.ListCursorsRequest) -> admin_pb2.ListCursorsResponse:
        answer = admin_pb2.ListCursorsResponse()
        policy.fill_cursors(operations.cursors_of(await self._topic(request.topic)), answer.cursors)
        return answer

    async def _set_cursor_hold(self, request: admin_pb2.SetCursorHoldRequest) -> admin_pb2.SetCursorHoldResponse:
        topic = await self._topic(request.topic)
        if self._topics is not None and self._topics.kind.log.is_shared:
            what = "Pulsar decides about retention of topics on its log: cursors cannot hold it back"
            raise error("INVALID_REQUEST", what)
        await operations.hold_cursor(topic, request.name, request.hold_retention_in_mb)
        return admin_pb2.SetCursorHoldResponse()

    async def delete(self, request: admin_pb2.DeleteCursorRequest) -> admin_pb2.DeleteCursorResponse:
        """Remove a cursor. Raises the errors of `operations.remove_cursor`."""
        await operations.remove_cursor(await self._topic(request.topic), request.name)
        return admin_pb2.DeleteCursorResponse()


def _kept(value: read_pb2.CursorValue) -> operations.CursorContent:
    return Position.from_proto(value.position), value.note
