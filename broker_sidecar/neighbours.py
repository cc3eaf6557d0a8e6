"""Other sidecars, as far as this one has to do with them."""

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import new_channel, typed_errors
from seqdedupe.errors import SeqdedupeError
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

ANSWER_SECONDS = 5.0
TAKE_SECONDS = 15.0
"""To take over a topic: some of it may have to be read."""

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def answers(address: str) -> bool:
    """Whether the sidecar at this address gives any answer: one whose event loop stands still, or that is stopped, does
    not."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as e:
            return e.code() not in _NO_ANSWER
        return True


async def instance_name(address: str) -> str | None:
    """That of the sidecar at this address; None if none answers there."""
    try:
        version: admin_pb2.GetVersionResponse = await _call(address, "GetVersion", admin_pb2.GetVersionRequest())
    except SeqdedupeError:
        return None
    return version.instance_name


async def topic(address: str, name: str) -> admin_pb2.Topic:
    """A topic, as the sidecar at this address knows it. Raises what that one refuses it for, UNREACHABLE."""
    found: admin_pb2.Topic = (await _call(address, "GetTopic", admin_pb2.GetTopicRequest(topic=name))).topic
    return found


async def take(address: str, name: str) -> None:
    """The sidecar at this address takes the topic, and serves it on return. Raises as `topic`, NOT_OWNER."""
    await _call(address, "TakeTopic", admin_pb2.TakeTopicRequest(topic=name), TAKE_SECONDS)


async def _call(address: str, name: str, request: Message, timeout_seconds: float = ANSWER_SECONDS) -> Any:
    there = SidecarAddress.parse(address)
    async with new_channel(there) as channel:
        with typed_errors(there):
            return await getattr(AdminServiceStub(channel), name)(request, timeout=timeout_seconds)
