"""The calls about named cursors: those of ReadService, for who reads, and those of AdminService."""

import asyncio
import time
from typing import Any

import grpc

from broker_sidecar.rpc import unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import caller
from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.topic import cursors, moving_cursors
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.finding import find
from seqdedupe.topic.publishing import Topic
from seqdedupe.v1 import admin_pb2, read_pb2

RECORD_BYTES = 256
"""What a moved cursor takes in the log beside its name and what it keeps, at most."""


class Cursors:
    """The handlers. `topics` are those on the sidecar's own log; None if it has none."""

    def __init__(self, topics: Topics[Topic] | None, permissions: Permissions) -> None:
        self._topics = topics
        self._permissions = permissions

    def reading(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Those of ReadService, by the name of the call."""
        return {
            "GetCursor": unary(read_pb2.GetCursorRequest, self._get),
            "MoveCursor": unary(read_pb2.MoveCursorRequest, self._move),
        }

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Those of AdminService."""
        return {
            "ListCursors": unary(admin_pb2.ListCursorsRequest, self._list),
            "SetCursorHold": unary(admin_pb2.SetCursorHoldRequest, self._hold),
            "DeleteCursor": unary(admin_pb2.DeleteCursorRequest, self._delete),
        }

    async def _topic(self, name: str) -> Topic:
        if self._topics is None:
            what = "cursors are kept in the logs of topics, and these are on a broker's own"
            raise error("INVALID_REQUEST", what, hint="Keep the position with the broker.")
        return await find(self._topics, name)

    async def _get(self, request: read_pb2.GetCursorRequest) -> read_pb2.GetCursorResponse:
        kept = moving_cursors.kept(await self._topic(request.topic), request.name)
        if kept is None:
            return read_pb2.GetCursorResponse()
        position, note = kept
        return read_pb2.GetCursorResponse(kept=read_pb2.CursorValue(position=position.to_proto(), note=note))

    async def _move(self, request: read_pb2.MoveCursorRequest) -> read_pb2.MoveCursorResponse:
        if not request.HasField("new"):
            raise error("INVALID_REQUEST", "new is missing: what the cursor is to keep")
        expected = _kept(request.expected) if request.HasField("expected") else None
        await self._wait_for_turn(request)
        topic = await self._topic(request.topic)
        # From here on in one step: of moves that come together each one counts what the others make.
        there = [cursor.name for cursor in topic.newest_policy.cursors]
        if request.name not in there:
            self._permissions.check_new_cursor(topic.name, there)
        await moving_cursors.move(topic, request.name, expected, _kept(request.new))
        return read_pb2.MoveCursorResponse()

    async def _wait_for_turn(self, request: read_pb2.MoveCursorRequest) -> None:
        """Who may do no more than read must not fill the topic's log. Raises SHARE_EXCEEDED."""
        shares, now_seconds = self._permissions.shares, time.monotonic()
        use = shares.of(caller().name)
        if not caller().is_unrestricted:
            size = RECORD_BYTES + len(request.name.encode()) + request.new.ByteSize()
            wait_seconds = use.move(topic_name(request.topic), size, now_seconds)
            if wait_seconds:
                await asyncio.sleep(wait_seconds)
        shares.check_rate(use, request.ByteSize(), time.monotonic())

    async def _list(self, request: admin_pb2.ListCursorsRequest) -> admin_pb2.ListCursorsResponse:
        answer = admin_pb2.ListCursorsResponse()
        cursors.fill(moving_cursors.all_of(await self._topic(request.topic)), answer.cursors)
        return answer

    async def _hold(self, request: admin_pb2.SetCursorHoldRequest) -> admin_pb2.SetCursorHoldResponse:
        topic = await self._topic(request.topic)
        if self._topics is not None and self._topics.kind.log.is_shared:
            what = "retention of topics on Pulsar's log is Pulsar's: cursors cannot hold it back"
            raise error("INVALID_REQUEST", what)
        await moving_cursors.hold(topic, request.name, request.hold_retention_in_mb)
        return admin_pb2.SetCursorHoldResponse()

    async def _delete(self, request: admin_pb2.DeleteCursorRequest) -> admin_pb2.DeleteCursorResponse:
        await moving_cursors.remove(await self._topic(request.topic), request.name)
        return admin_pb2.DeleteCursorResponse()


def _kept(value: read_pb2.CursorValue) -> moving_cursors.Kept:
    return Position.from_proto(value.position), value.note
