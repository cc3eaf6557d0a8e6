"""Calls that show a token, or anything else in its place."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from broker_sidecar.security.rules import Action
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, dedupe_pb2, publish_pb2, read_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Refused, status

Metadata = tuple[tuple[str, str], ...]

FILES = (admin_pb2, dedupe_pb2, publish_pb2, read_pb2, health_pb2, reflection_pb2)
METHODS: list[MethodDescriptor] = [
    method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]  # fmt: skip
"""All calls that a sidecar of any kind of log has."""

OF_BROKERS = "seqdedupe.v1.DedupeService"
OF_PUBLISHED = ("seqdedupe.v1.PublishService", "seqdedupe.v1.ReadService")


def is_served(method: MethodDescriptor, log: str) -> bool:
    """Whether a sidecar with this log has the call."""
    service = method.containing_service.full_name
    return service not in OF_PUBLISHED if log == "broker" else service != OF_BROKERS


def rules_for_all(folder: Path) -> Path:
    """A file of rules by which everybody may do everything."""
    path = folder / "rules.toml"
    actions = [action.value for action in Action]
    path.write_text(f'[[allow]]\nsubjects = ["**"]\nactions = {actions}\ntopics = ["**"]\n')
    return path


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def token_of(sidecar: Sidecar) -> str:
    """The data directory's token."""
    return sidecar.token_file.read_text().strip()


def unary(channel: grpc.Channel, path: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    """A call of bytes."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return call


def made(channel: grpc.Channel, method: MethodDescriptor, request: bytes, metadata: Metadata) -> Refused | None:
    """Makes the call with this one request, and takes its first answer. Returns why it was refused, if it was.

    On the wire a unary call is a stream with one message.
    """
    path = f"/{method.containing_service.full_name}/{method.name}"
    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    call = stream(iter([request]), metadata=metadata, timeout=TIMEOUT_SECONDS)
    try:
        next(iter(call))
    except StopIteration:
        return None
    except grpc.RpcError as e:
        if e.code() is grpc.StatusCode.UNAUTHENTICATED:
            return status(e)
        return None
    finally:
        call.cancel()
    return None


def wait_until(condition: Callable[[], bool]) -> None:
    """For what no event tells of."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise AssertionError("it never came to that")
        time.sleep(0.01)
