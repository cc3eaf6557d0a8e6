"""The calls of AdminService about single messages and producers of topics on the sidecar's own log."""

from typing import Any

import grpc

from broker_sidecar.rpc import unary
from seqdedupe.core.rule import EPOCH, PERSISTED, PUSHED
from seqdedupe.errors import error
from seqdedupe.names import producer_name
from seqdedupe.topic import operations
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lookup import find
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

PAGE_ITEMS = 1_000
"""Producers in one answer."""


class Operate:
    """The handlers. `topics` are those on the sidecar's own log; None if it has none."""

    def __init__(self, topics: Topics[Topic] | None) -> None:
        self._topics = topics

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        return {
            "GetMessageState": unary(admin_pb2.GetMessageStateRequest, self._message_state),
            "ListInFlight": unary(admin_pb2.ListInFlightRequest, self._in_flight),
            "ResetProducer": unary(admin_pb2.ResetProducerRequest, self._reset),
        }

    async def _topic(self, name: str) -> Topic:
        if self._topics is None:
            raise error(
                "INVALID_REQUEST",
                "this is only for topics on the sidecar's own log, and these are a broker's",
                hint="Ask the broker: messages are there alone.",
            )
        return await find(self._topics, name)

    async def _message_state(self, request: admin_pb2.GetMessageStateRequest) -> admin_pb2.GetMessageStateResponse:
        topic = await self._topic(request.topic)
        if request.deduplication_id:
            found = await operations.state_by_id(topic, request.deduplication_id)
        else:
            found = await operations.message_state(topic, request.producer_name, request.sequence_id)
        return admin_pb2.GetMessageStateResponse(
            state=found.state.value,  # type: ignore[arg-type]
            in_flight_ms=found.in_flight_ms,
            position=found.position and found.position.to_proto(),
            publish_time_ms=found.publish_time_ms,
            pushed=found.pushed,
            persisted=found.persisted,
        )

    async def _in_flight(self, request: admin_pb2.ListInFlightRequest) -> admin_pb2.ListInFlightResponse:
        found = await operations.in_flight(await self._topic(request.topic), request.longer_than_ms)
        return admin_pb2.ListInFlightResponse(
            in_flight=[
                admin_pb2.InFlight(
                    producer_name=one.name.decode(),
                    first_sequence_id=one.first_id,
                    last_sequence_id=one.last_id,
                    in_flight_ms=one.in_flight_ms,
                )
                for one in found[:PAGE_ITEMS]
            ],
            producers=len(found),
        )

    async def _reset(self, request: admin_pb2.ResetProducerRequest) -> admin_pb2.ResetProducerResponse:
        topic = await self._topic(request.topic)
        before = await operations.reset_producer(topic, request.producer_name, request.persisted)
        name = producer_name(request.producer_name)
        return admin_pb2.ResetProducerResponse(
            producer=producer_proto(topic, name, topic.producers.add(name)), persisted_before=before
        )


def producer_proto(topic: TopicBase, name: bytes, number: int) -> admin_pb2.Producer:
    """A producer as it is now."""
    numbers = topic.producers.numbers[number]
    return admin_pb2.Producer(
        name=name.decode(),
        pushed=int(numbers[PUSHED]),
        persisted=int(numbers[PERSISTED]),
        epoch=int(numbers[EPOCH]),
    )
