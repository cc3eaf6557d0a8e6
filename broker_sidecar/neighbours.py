"""Other sidecars, as far as this one has to do with them."""

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

ANSWER_SECONDS = 5.0

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
