"""AdminService: topics, producers, policies, snapshots."""

import time
from bisect import bisect_right
from importlib.metadata import version
from operator import itemgetter
from typing import Any

import grpc

from broker_sidecar.rpc import unary
from seqdedupe.core.rule import EPOCH, PERSISTED, PUSHED
from seqdedupe.errors import error
from seqdedupe.format.headers import FORMAT_VERSION
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from seqdedupe.names import producer_name, topic_name
from seqdedupe.topic.directory import Closed, Topics
from seqdedupe.topic.policy import OverlapPolicy, Policy
from seqdedupe.topic.state import TopicBase
from seqdedupe.v1 import admin_pb2

SERVICE = "seqdedupe.v1.AdminService"

PAGE_ITEMS = 1_000
"""Topics or producers in one answer."""


class AdminService:
    """The handlers of AdminService."""

    def __init__(self, topics: Topics[Any]) -> None:
        self._topics = topics
        self._began = time.monotonic()

    def handlers(self) -> grpc.GenericRpcHandler:
        calls = (
            ("CreateTopic", admin_pb2.CreateTopicRequest, self._create),
            ("DeleteTopic", admin_pb2.DeleteTopicRequest, self._delete),
            ("ListTopics", admin_pb2.ListTopicsRequest, self._list),
            ("GetTopic", admin_pb2.GetTopicRequest, self._get),
            ("SetTopicPolicy", admin_pb2.SetTopicPolicyRequest, self._set_policy),
            ("ListProducers", admin_pb2.ListProducersRequest, self._producers),
            ("GetProducer", admin_pb2.GetProducerRequest, self._producer),
            ("Snapshot", admin_pb2.SnapshotRequest, self._snapshot),
            ("GetVersion", admin_pb2.GetVersionRequest, self._version),
        )
        methods: dict[str, Any] = {name: unary(kind, call) for name, kind, call in calls}  # type: ignore[arg-type]
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _create(self, request: admin_pb2.CreateTopicRequest) -> admin_pb2.CreateTopicResponse:
        policy = _policy(request.policy) if request.HasField("policy") else Policy()
        topic = await self._topics.create(request.topic, policy=policy)
        return admin_pb2.CreateTopicResponse(topic=_topic(topic))

    async def _delete(self, request: admin_pb2.DeleteTopicRequest) -> admin_pb2.DeleteTopicResponse:
        await self._topics.delete(request.topic)
        return admin_pb2.DeleteTopicResponse()

    async def _list(self, request: admin_pb2.ListTopicsRequest) -> admin_pb2.ListTopicsResponse:
        topics = [(_name(topic), topic) for topic in self._topics.all()]
        first = bisect_right(topics, topic_name(request.after), key=itemgetter(0)) if request.after else 0
        page = topics[first : first + PAGE_ITEMS]
        return admin_pb2.ListTopicsResponse(
            topics=[_topic(topic) for _, topic in page],
            next=page[-1][0] if first + PAGE_ITEMS < len(topics) else "",
        )

    async def _get(self, request: admin_pb2.GetTopicRequest) -> admin_pb2.GetTopicResponse:
        return admin_pb2.GetTopicResponse(topic=_topic(self._topics.look_at(request.topic)))

    async def _set_policy(self, request: admin_pb2.SetTopicPolicyRequest) -> admin_pb2.SetTopicPolicyResponse:
        if not request.HasField("policy"):
            raise error("INVALID_REQUEST", "policy is missing: say the whole policy")
        topic = self._topics.get(request.topic)
        await topic.set_policy(_policy(request.policy))
        return admin_pb2.SetTopicPolicyResponse(topic=_topic(topic))

    async def _producers(self, request: admin_pb2.ListProducersRequest) -> admin_pb2.ListProducersResponse:
        topic = self._topics.get(request.topic)
        if request.offset < 0:
            raise error("INVALID_REQUEST", f"offset is {request.offset}: it should be 0 or higher")
        offset = min(request.offset, len(topic.producers))
        names = topic.producers.names_from(offset, PAGE_ITEMS)
        following = offset + len(names)
        return admin_pb2.ListProducersResponse(
            producers=[_producer(topic, name, offset + i) for i, name in enumerate(names)],
            next_offset=following if following < len(topic.producers) else 0,
        )

    async def _producer(self, request: admin_pb2.GetProducerRequest) -> admin_pb2.GetProducerResponse:
        topic = self._topics.get(request.topic)
        name = producer_name(request.producer_name)
        number = topic.producers.number(name)
        if number is None:
            raise error(
                "PRODUCER_NOT_FOUND", f"topic {topic.name} knows no producer {request.producer_name!r}",
                topic=topic.name,
            )  # fmt: skip
        return admin_pb2.GetProducerResponse(producer=_producer(topic, name, number))

    async def _snapshot(self, request: admin_pb2.SnapshotRequest) -> admin_pb2.SnapshotResponse:
        topic = self._topics.get(request.topic)
        topic.check_serving()
        await topic.snapshot()
        return admin_pb2.SnapshotResponse(position=(await topic.position_before(topic.snapshot_index)).to_proto())

    async def _version(self, request: admin_pb2.GetVersionRequest) -> admin_pb2.GetVersionResponse:
        return admin_pb2.GetVersionResponse(
            version=version("seqdedupe"),
            record_format_version=FORMAT_VERSION,
            uptime_seconds=int(time.monotonic() - self._began),
            max_batch_bytes=MAX_BATCH_BYTES,
            max_batch_rows=MAX_BATCH_ROWS,
        )


def _policy(message: admin_pb2.TopicPolicy) -> Policy:
    """Raises INVALID_REQUEST for a value that this version does not know."""
    try:
        return Policy(message.deduplication_enabled, OverlapPolicy(message.overlap))
    except ValueError as e:
        raise error("INVALID_REQUEST", f"policy.overlap is {message.overlap}: no such policy is known") from e


def _name(topic: TopicBase | Closed) -> str:
    return topic.record.name if isinstance(topic, Closed) else topic.name


def _topic(topic: TopicBase | Closed) -> admin_pb2.Topic:
    if isinstance(topic, Closed):
        return admin_pb2.Topic(
            name=topic.record.name,
            incarnation=topic.record.incarnation,
            state=topic.state.value,  # type: ignore[arg-type]
            why=str(topic.why),
        )
    counters = topic.counters
    return admin_pb2.Topic(
        name=topic.name,
        incarnation=topic.incarnation,
        term=topic.term,
        state=topic.state.value,  # type: ignore[arg-type]
        policy=admin_pb2.TopicPolicy(
            deduplication_enabled=topic.policy.deduplication_enabled,
            overlap=topic.policy.overlap.value,  # type: ignore[arg-type]
        ),
        first_index=topic.first_index,
        last=topic.certain_position.to_proto(),
        producers=len(topic.producers),
        log_bytes=topic.log_bytes,
        snapshot_index=topic.snapshot_index,
        not_dup=counters.not_dup,
        dup=counters.dup,
        unknown=counters.unknown,
        refused=counters.refused,
        why=topic.why,
    )


def _producer(topic: TopicBase, name: bytes, number: int) -> admin_pb2.Producer:
    numbers = topic.producers.numbers[number]
    return admin_pb2.Producer(
        name=name.decode(),
        pushed=int(numbers[PUSHED]),
        persisted=int(numbers[PERSISTED]),
        epoch=int(numbers[EPOCH]),
    )
