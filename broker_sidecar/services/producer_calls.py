"""The calls of AdminService about a topic's producers, and about single messages of the producers."""

import secrets
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from broker_sidecar.data import Data
from broker_sidecar.rpc import unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.streams import Stream, Streams
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import EPOCH, PERSISTED, PUSHED
from seqdedupe.errors import error
from seqdedupe.names import producer_name
from seqdedupe.topic import operations
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics, find
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

PAGE_PRODUCERS = 1_000
"""The most producers in one answer."""


class ProducerCalls:
    """The handlers. Calls about messages need a topic on the sidecar's own log. Calls about producers work for all
    topics.
    """

    def __init__(self, data: Data, streams: Streams, permissions: Permissions) -> None:
        self._streams = streams
        self._permissions = permissions
        self._all_topics = data.all_topics
        self._topics = data.topics
        self._pages = ProducerPages()

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        call = self._streams.call
        return {
            "ListProducers": call(
                admin_pb2.ListProducersRequest, self._owned, lambda request, _: self.list_producers(request)
            ),
            "GetProducer": unary(admin_pb2.GetProducerRequest, self.get_producer),
            "GetMessageState": call(admin_pb2.GetMessageStateRequest, self._own_topic, self._get_message_state),
            "ListInFlight": call(admin_pb2.ListInFlightRequest, self._own_topic, self._list_in_flight),
            "ResetProducer": unary(admin_pb2.ResetProducerRequest, self._reset_producer),
        }

    async def _owned(self, name: str) -> Any:
        """Return the topic, for answers about its producers.

        Raises TOPIC_NOT_FOUND. Raises NOT_OWNER if the topic is on another sidecar, because the state in this sidecar
        may be outdated.
        """
        topic = await find(self._all_topics, name)
        if topic.state is State.STANDBY:
            topic.check_may_go_on()
        return topic

    async def list_producers(self, request: admin_pb2.ListProducersRequest) -> admin_pb2.ListProducersResponse:
        """Answer `ListProducers`. Raises its errors, among them TOPIC_NOT_FOUND and NOT_OWNER."""
        topic = await self._owned(request.topic)
        if not 0 <= request.limit <= PAGE_PRODUCERS:
            raise error("INVALID_REQUEST", f"limit is {request.limit}: it should be 0 to {PAGE_PRODUCERS}")
        page, following = self._pages.page(topic.producers, request.offset, request.limit or PAGE_PRODUCERS)
        return admin_pb2.ListProducersResponse(
            producers=[producer_proto(topic, name, number) for number, name in page], next_offset=following
        )

    async def get_producer(self, request: admin_pb2.GetProducerRequest) -> admin_pb2.GetProducerResponse:
        """Answer `GetProducer`. Raises its errors, among them PRODUCER_NOT_FOUND."""
        topic = await self._owned(request.topic)
        name = producer_name(request.producer_name)
        number = topic.producers.number(name)
        if number is None or not topic.producers.is_known(number):
            raise error(
                "PRODUCER_NOT_FOUND", f"topic {topic.name} knows no producer {request.producer_name!r}",
                topic=topic.name,
            )  # fmt: skip
        return admin_pb2.GetProducerResponse(producer=producer_proto(topic, name, number))

    def _own_topics(self) -> Topics[Topic]:
        if self._topics is None:
            raise error(
                "INVALID_REQUEST",
                "this call needs a log that the sidecar writes, and here a broker has the logs",
                hint="Ask the broker, because only the broker has the messages.",
            )
        return self._topics

    async def _own_topic(self, name: str) -> Topic:
        return await find(self._own_topics(), name)

    async def _get_message_state(
        self, request: admin_pb2.GetMessageStateRequest, stream: Stream
    ) -> admin_pb2.GetMessageStateResponse:
        topic = await self._own_topic(request.topic)

        # The search in the log takes turns with readers for memory.
        room = stream.reserve_in_turn
        if request.deduplication_id:
            found = await operations.state_by_id(topic, request.deduplication_id, room)
        else:
            found = await operations.message_state(topic, request.producer_name, request.sequence_id, room)
        return admin_pb2.GetMessageStateResponse(
            state=found.state.value,  # type: ignore[arg-type]
            in_flight_ms=found.in_flight_ms,
            position=found.position and found.position.to_proto(),
            publish_time_ms=found.publish_time_ms,
            pushed=found.pushed,
            persisted=found.persisted,
        )

    async def _list_in_flight(
        self, request: admin_pb2.ListInFlightRequest, _stream: Stream
    ) -> admin_pb2.ListInFlightResponse:
        found = await operations.in_flight(await self._own_topic(request.topic), request.longer_than_ms)
        return admin_pb2.ListInFlightResponse(
            in_flight=[
                admin_pb2.InFlight(
                    producer_name=one.name.decode(),
                    first_sequence_id=one.first_id,
                    last_sequence_id=one.last_id,
                    in_flight_ms=one.in_flight_ms,
                )
                for one in found[:PAGE_PRODUCERS]
            ],
            producers=len(found),
        )

    async def _reset_producer(self, request: admin_pb2.ResetProducerRequest) -> admin_pb2.ResetProducerResponse:
        topic = await self._own_topic(request.topic)
        self._permissions.check_disk(self._own_topics())
        before = await operations.reset_producer(topic, request.producer_name, request.persisted)
        name = producer_name(request.producer_name)
        return admin_pb2.ResetProducerResponse(
            producer=producer_proto(topic, name, topic.producers.add(name)), persisted_before=before
        )


def producer_proto(topic: TopicBase, name: bytes, number: int) -> admin_pb2.Producer:
    """Return a producer as it is now."""
    numbers = topic.producers.numbers[number]
    return admin_pb2.Producer(
        name=name.decode(),
        pushed=int(numbers[PUSHED]),
        persisted=int(numbers[PERSISTED]),
        epoch=int(numbers[EPOCH]),
    )


# -- Pages of a topic's producers. An opaque number leads to the next page, while names are added and forgotten.

_NUMBER_BITS = 32
_MASK = 2**31 - 1

Page = list[tuple[int, bytes]]
"""Numbers and names."""


class ProducerPages:
    """Assigns to each page the place of the next page: a producer number, and an ID of the current numbering.

    The numbering changes when names of forgotten producers are freed, when a topic is opened again, and when the
    process restarts.
    """

    def __init__(self) -> None:
        self._numberings: WeakKeyDictionary[Producers, int] = WeakKeyDictionary()

    def page(self, producers: Producers, place: int, count: int) -> tuple[Page, int]:
        """Return at most `count` names from a place on (0: the first name), and the next place; 0 at the end.

        Names of forgotten producers are omitted. If the place belongs to an earlier numbering, the pages restart at the
        first name, so that no name is missed. Raises INVALID_REQUEST.
        """
        if place < 0:
            raise error("INVALID_REQUEST", f"offset is {place}: it should be 0, or the next_offset of a page")
        numbering = self._numberings.setdefault(producers, secrets.randbelow(_MASK)) + producers.generation & _MASK
        first = place & 2**_NUMBER_BITS - 1 if place >> _NUMBER_BITS == numbering else 0
        names = producers.names_from(first, count) if first < len(producers) else []
        page = [(number, name) for number, name in enumerate(names, first) if producers.is_known(number)]
        after = first + len(names)
        return page, numbering << _NUMBER_BITS | after if after < len(producers) else 0
