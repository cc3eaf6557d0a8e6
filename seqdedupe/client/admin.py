"""What operators ask a sidecar. Topics and producers are the messages of `admin.proto`."""

import grpc.aio

from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, typed_errors
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub


class Admin:
    """The calls of `AdminService`. Each raises UnavailableError if the sidecar does not answer in 30 seconds."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub = AdminServiceStub(channel)

    async def create_topic(self, topic: str, *, deduplication_enabled: bool = True) -> admin_pb2.Topic:
        """Raises InvalidRequestError (TOPIC_EXISTS)."""
        request = admin_pb2.CreateTopicRequest(
            topic=topic_name(topic), policy=admin_pb2.TopicPolicy(deduplication_enabled=deduplication_enabled)
        )
        with typed_errors(self._address):
            return (await self._stub.CreateTopic(request, timeout=CALL_TIMEOUT_SECONDS)).topic

    async def delete_topic(self, topic: str) -> None:
        """Deletes the topic, its log and its producers for good. Raises NotFoundError."""
        request = admin_pb2.DeleteTopicRequest(topic=topic_name(topic))
        with typed_errors(self._address):
            await self._stub.DeleteTopic(request, timeout=CALL_TIMEOUT_SECONDS)

    async def topic(self, topic: str) -> admin_pb2.Topic:
        """Raises NotFoundError."""
        request = admin_pb2.GetTopicRequest(topic=topic_name(topic))
        with typed_errors(self._address):
            return (await self._stub.GetTopic(request, timeout=CALL_TIMEOUT_SECONDS)).topic

    async def topics(self) -> list[admin_pb2.Topic]:
        """All topics, by name."""
        topics: list[admin_pb2.Topic] = []
        request = admin_pb2.ListTopicsRequest()
        with typed_errors(self._address):
            while True:
                page = await self._stub.ListTopics(request, timeout=CALL_TIMEOUT_SECONDS)
                topics += page.topics
                if not page.next:
                    return topics
                request.after = page.next

    async def set_topic_policy(self, topic: str, *, deduplication_enabled: bool) -> admin_pb2.Topic:
        """In force, and durable, when it returns. Raises NotFoundError."""
        request = admin_pb2.SetTopicPolicyRequest(
            topic=topic_name(topic), policy=admin_pb2.TopicPolicy(deduplication_enabled=deduplication_enabled)
        )
        with typed_errors(self._address):
            return (await self._stub.SetTopicPolicy(request, timeout=CALL_TIMEOUT_SECONDS)).topic

    async def producers(self, topic: str) -> list[admin_pb2.Producer]:
        """All producers of a topic in the order in which they first came. Raises NotFoundError."""
        producers: list[admin_pb2.Producer] = []
        request = admin_pb2.ListProducersRequest(topic=topic_name(topic))
        with typed_errors(self._address):
            while True:
                page = await self._stub.ListProducers(request, timeout=CALL_TIMEOUT_SECONDS)
                producers += page.producers
                if not page.next_offset:
                    return producers
                request.offset = page.next_offset

    async def producer(self, topic: str, name: str) -> admin_pb2.Producer:
        """Raises NotFoundError."""
        request = admin_pb2.GetProducerRequest(topic=topic_name(topic), producer_name=name)
        with typed_errors(self._address):
            return (await self._stub.GetProducer(request, timeout=CALL_TIMEOUT_SECONDS)).producer

    async def snapshot(self, topic: str) -> Position:
        """Takes a snapshot now; returns when it is durable, with the position after which recovery would start."""
        request = admin_pb2.SnapshotRequest(topic=topic_name(topic))
        with typed_errors(self._address):
            return Position.from_proto((await self._stub.Snapshot(request, timeout=CALL_TIMEOUT_SECONDS)).position)

    async def version(self) -> admin_pb2.GetVersionResponse:
        """The sidecar's version and limits."""
        with typed_errors(self._address):
            return await self._stub.GetVersion(admin_pb2.GetVersionRequest(), timeout=CALL_TIMEOUT_SECONDS)
