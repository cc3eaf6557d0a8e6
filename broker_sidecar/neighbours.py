"""Other sidecars, as far as this one has to do with them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker_sidecar.snapshot_parts import Taking, part_of_answer
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import answer_of, new_channel, typed_errors
from seqdedupe.client.credentials import NO_CREDENTIALS
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.client.unreachable import is_of_tls
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.snapshots import Loaded
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

ANSWER_SECONDS = 5.0
OF_ALL_SECONDS = 12.0
"""Where an answer has to come from all processes: its caller waits for half a minute."""
TAKE_SECONDS = 15.0
"""To take over a topic: some of it may have to be read."""
SILENT_SECONDS = 30.0
"""So long a snapshot may not go on: an owner copies it as a whole before it gives out its parts."""

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_EXPORT = "/seqdedupe.v1.AdminService/ExportSnapshot"


class Neighbours:
    """The calls to other sidecars. Those that are listed are shown what this one has for them, token and certificate;
    to any other no token goes."""

    def __init__(self, listed: Sidecars | None = None) -> None:
        """None: none is listed, and whoever has something is a sidecar."""
        self._listed = listed
        self._for_others = replace(listed.credentials, token=None, token_file=None) if listed else NO_CREDENTIALS

    def allowed(self, address: str) -> SidecarAddress | None:
        """The address, if it is listed, or in a listed domain."""
        return self._listed.allowed(address) if self._listed else None

    def _channel(self, address: SidecarAddress, *, is_one: bool = True) -> grpc.aio.Channel:
        listed = self._listed.allowed(str(address)) if self._listed else None
        credentials = self._listed.credentials if self._listed and listed else self._for_others
        return new_channel(address, credentials, is_one=is_one)

    async def answers(self, address: str) -> bool:
        """Whether the sidecar at this address gives any answer: one whose event loop stands still, or that is stopped,
        does not. One with which there is no TLS is there, for all that is known."""
        async with self._channel(SidecarAddress.parse(address)) as channel:
            try:
                health: Any = health_pb2_grpc.HealthStub(channel)
                await health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
            except grpc.aio.AioRpcError as e:
                return e.code() not in _NO_ANSWER or is_of_tls(e.details() or "")
            return True

    async def shards(self, address: str) -> admin_pb2.GetShardsResponse:
        """What the process at this address claims. Raises UNREACHABLE, INVALID_REQUEST if it has no shards."""
        request = admin_pb2.GetShardsRequest()
        claimed: admin_pb2.GetShardsResponse = await self.ask(address, "GetShards", request, OF_ALL_SECONDS)
        return claimed

    async def topics(self, address: str, after: str) -> admin_pb2.ListTopicsResponse:
        """A page of those topics that the process at this address has itself. Raises UNREACHABLE."""
        request = admin_pb2.ListTopicsRequest(after=after, only_here=True)
        page: admin_pb2.ListTopicsResponse = await self.ask(address, "ListTopics", request, OF_ALL_SECONDS)
        return page

    async def instance_name(self, address: str) -> str | None:
        """That of the sidecar at this address; None if none answers there."""
        request = admin_pb2.GetVersionRequest()
        try:
            version: admin_pb2.GetVersionResponse = await self.ask(address, "GetVersion", request)
        except SeqdedupeError:
            return None
        return version.instance_name

    async def topic(self, address: str, name: str) -> admin_pb2.Topic:
        """A topic, as the sidecar at this address knows it. Raises what that one refuses it for, UNREACHABLE."""
        found: admin_pb2.Topic = (await self.ask(address, "GetTopic", admin_pb2.GetTopicRequest(topic=name))).topic
        return found

    async def take(self, address: str, name: str) -> None:
        """The sidecar at this address takes the topic, and serves it on return. Raises as `topic`, NOT_OWNER."""
        await self.ask(address, "TakeTopic", admin_pb2.TakeTopicRequest(topic=name), TAKE_SECONDS)

    @asynccontextmanager
    async def giving(self, address: str) -> AsyncIterator[Any]:
        """A call of ReceiveTopic at the sidecar at this address, which ends with the block. Raises what that one
        refuses it for, UNREACHABLE."""
        there = SidecarAddress.parse(address)
        async with self._channel(there) as channel:
            with typed_errors(there):
                call: Any = AdminServiceStub(channel).ReceiveTopic()
                try:
                    yield call
                finally:
                    call.cancel()

    async def ask(self, address: str, name: str, request: Message, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """What the sidecar at this address answers to a call of AdminService. Raises what that one refuses it for,
        UNREACHABLE, NOT_A_SIDECAR."""
        there = SidecarAddress.parse(address)
        async with self._channel(there) as channel:
            with typed_errors(there):
                return await answer_of(channel, getattr(AdminServiceStub(channel), name), request, timeout_seconds)

    async def snapshot_of(self, address: str, topic: str) -> tuple[int, Loaded]:
        """The snapshot of a topic as its owner has it now, and of which incarnation it is.

        Where some are listed, only from one of them, or in one of their domains. Raises INVALID_ADDRESS for any other,
        UNREACHABLE, OUTCOME_UNKNOWN if the call breaks, what the owner refuses it for, and what `Taking` raises.
        """
        owner = SidecarAddress.parse(address) if self._listed is None else self._listed.allowed(address)
        if owner is None:
            raise error("INVALID_ADDRESS", f"{address!r} is none of the sidecars {self._listed}: it is not asked")
        taking = Taking()
        async with self._channel(owner, is_one=False) as channel:
            call: Any = channel.unary_stream(_EXPORT, admin_pb2.ExportSnapshotRequest.SerializeToString)
            with typed_errors(owner):
                coming = call(admin_pb2.ExportSnapshotRequest(topic=topic))
                while (data := await _next(coming, owner)) is not grpc.aio.EOF:
                    taking.add(part_of_answer(data))
        head, loaded = taking.finish()
        if head.topic != topic:
            raise error("INVALID_REQUEST", f"{owner} gave a snapshot of {head.topic} for one of {topic}")
        return head.position.incarnation, loaded


async def _next(coming: Any, owner: SidecarAddress) -> Any:
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            return await coming.read()
    except TimeoutError as e:
        raise error("UNREACHABLE", f"the sidecar at {owner} said nothing for {SILENT_SECONDS:.0f} s") from e
