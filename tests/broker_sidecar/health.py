"""Calls to the health service of a sidecar."""

from typing import Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class HealthCalls(Protocol):
    """What the stub has, and its types leave out."""

    Check: "grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
    Watch: "grpc.UnaryStreamMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


def health_of(channel: grpc.Channel) -> HealthCalls:
    return cast(HealthCalls, health_pb2_grpc.HealthStub(channel))
