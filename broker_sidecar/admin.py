"""AdminService: topics, producers, policies, snapshots."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc

from broker_sidecar.arriving import Arriving
from broker_sidecar.backup import Backup
from broker_sidecar.leaving import Leaving
from broker_sidecar.listing import Listing
from broker_sidecar.operate import Operate, producer_proto
from broker_sidecar.peers import Peers
from broker_sidecar.policies import Policies
from broker_sidecar.read import Cursors
from broker_sidecar.rpc import unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.trail import Trail
from broker_sidecar.sidecars import Sidecars
from broker_sidecar.statistics import Statistics
from broker_sidecar.streams import Streams
from broker_sidecar.topics import layout_of, mode_of, partitioned_to_proto, policy_of, route_of, topic_to_proto
from broker_sidecar.transfer import Transfer
from seqdedupe.errors import error
from seqdedupe.format.headers import FORMAT_VERSION
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import producer_name, topic_name
from seqdedupe.topic import lookup
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lookup import delete, find, look_for
from seqdedupe.topic.registry import Closed
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from broker_sidecar.cluster import Cluster

SERVICE = "seqdedupe.v1.AdminService"

PAGE_ITEMS = 1_000
"""Topics or producers in one answer."""

CREATION_SECONDS = 20.0
"""Whoever asks for a topic is told after so long that it is still being made: the clients wait for 30 seconds."""


class AdminService:
    """The handlers of AdminService."""

    def __init__(
        self,
        topics: Topics[Any],
        own: Topics[Topic] | None,
        streams: Streams,
        permissions: Permissions,
        trail: Trail,
        cluster: "Cluster | None",
        peers: Peers | None,
        logs: EmbeddedLogs | None,
        leaving: Leaving | None,
        is_serving: Callable[[], bool],
        statistics: Statistics,
        backup: Backup,
    ) -> None:
        """`own` are the topics if they are on the sidecar's own log, or on that of a `cluster`. `peers` have the other
        shards, if there are some."""
        self._topics = topics
        self._permissions = permissions
        self._transfer = Transfer(topics, streams, permissions, trail)
        self._operate = Operate(own)
        self._cursors = Cursors(own, permissions)
        self._backup = backup
        self._peers = peers
        self._policies = Policies(topics, peers)
        self._sidecars = Sidecars(topics, cluster, peers, leaving, is_serving)
        self._arriving = Arriving(logs if peers is None else None, own, streams, permissions, trail)
        self._instance_name = cluster.shared.instance_name if cluster is not None else ""
        self._listing = Listing()
        self._statistics = statistics

    def handlers(self) -> grpc.GenericRpcHandler:
        calls = (
            ("CreateTopic", admin_pb2.CreateTopicRequest, self._create),
            ("DeleteTopic", admin_pb2.DeleteTopicRequest, self._delete),
            ("ListTopics", admin_pb2.ListTopicsRequest, self._list),
            ("GetTopic", admin_pb2.GetTopicRequest, self._get),
            ("SetTopicPolicy", admin_pb2.SetTopicPolicyRequest, self._policies.set_of_topic),
            ("GetTopicPolicy", admin_pb2.GetTopicPolicyRequest, self._policies.of_topic),
            ("RemoveTopicPolicy", admin_pb2.RemoveTopicPolicyRequest, self._policies.remove_of_topic),
            ("SetNamespacePolicy", admin_pb2.SetNamespacePolicyRequest, self._policies.set_of_namespace),
            ("GetNamespacePolicy", admin_pb2.GetNamespacePolicyRequest, self._policies.of_namespace),
            ("RemoveNamespacePolicy", admin_pb2.RemoveNamespacePolicyRequest, self._policies.remove_of_namespace),
            ("ListProducers", admin_pb2.ListProducersRequest, self.producers),
            ("GetProducer", admin_pb2.GetProducerRequest, self.producer),
            ("Snapshot", admin_pb2.SnapshotRequest, self._snapshot),
            ("GetStatistics", admin_pb2.GetStatisticsRequest, self._statistics.answer),
            ("GetVersion", admin_pb2.GetVersionRequest, self._version),
        )
        methods: dict[str, Any] = {name: unary(kind, call) for name, kind, call in calls}  # type: ignore[arg-type]
        for part in (self._operate, self._cursors, self._transfer, self._sidecars, self._arriving, self._backup):
            methods |= part.methods()
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _create(self, request: admin_pb2.CreateTopicRequest) -> admin_pb2.CreateTopicResponse:
        by_id = mode_of(request, self._topics.kind.log)
        policy = policy_of(request.policy).check_has_effect(self._topics.kind.log)
        policy = replace(policy.check_fits(by_deduplication_id=by_id), by_deduplication_id=by_id)
        policy = replace(policy, route=route_of(request))
        layout = layout_of(request, self._topics.kind.log)
        partitions = max(1, request.partitions)
        self._permissions.check_creates(topic_name(request.topic), self._topics.registry.names(), partitions)
        topics, name = self._topics, request.topic
        if request.partitions:
            await in_time(name, lookup.create_partitioned(topics, name, request.partitions, policy, layout))
        else:
            await in_time(name, topics.create(name, policy=policy, layout=layout))
        return admin_pb2.CreateTopicResponse(topic=self._topic(topic_name(request.topic)))

    async def _delete(self, request: admin_pb2.DeleteTopicRequest) -> admin_pb2.DeleteTopicResponse:
        full = await look_for(self._topics, request.topic)
        if full in self._topics.partitions:
            await lookup.delete_partitioned(self._topics, full)
        else:
            self._arriving.check_is_known(full)
            await delete(self._topics, full)
        return admin_pb2.DeleteTopicResponse()

    async def _list(self, request: admin_pb2.ListTopicsRequest) -> admin_pb2.ListTopicsResponse:
        names = sorted([*map(_name, self._topics.all()), *self._topics.partitions])
        first = bisect_right(names, topic_name(request.after)) if request.after else 0
        page = names[first : first + PAGE_ITEMS]
        here = admin_pb2.ListTopicsResponse(
            topics=map(self._topic, page), next=page[-1] if first + PAGE_ITEMS < len(names) else ""
        )
        if self._peers is None or request.only_here:
            return here
        return await self._peers.list_topics(request.after, here, PAGE_ITEMS)

    async def _get(self, request: admin_pb2.GetTopicRequest) -> admin_pb2.GetTopicResponse:
        full = await look_for(self._topics, request.topic)
        partitions = self._topics.partitions
        await self._topics.waiting.use(*(partitions.names(full) if full in partitions else [full]))
        return admin_pb2.GetTopicResponse(topic=self._topic(full))

    def _topic(self, name: str) -> admin_pb2.Topic:
        """A topic by its full name, as it is now. Raises TOPIC_NOT_FOUND."""
        if name in self._topics.partitions:
            partitions = lookup.partitions_of(self._topics, name)
            return partitioned_to_proto(name, partitions, self._topics.partitions.unused.get(name, 0))
        topic = self._topics.look_at(name)
        return topic_to_proto(topic, self._topics.partitions_beside(name))

    async def _owned(self, name: str) -> Any:
        """The topic, for what is said of its producers. Raises TOPIC_NOT_FOUND, or NOT_OWNER: what is known of them
        here may be old."""
        topic = await find(self._topics, name)
        if topic.state is State.STANDBY:
            topic.check_may_go_on()
        return topic

    async def producers(self, request: admin_pb2.ListProducersRequest) -> admin_pb2.ListProducersResponse:
        """See `ListProducers`. Raises what that answers, TOPIC_NOT_FOUND and NOT_OWNER among it."""
        topic = await self._owned(request.topic)
        if not 0 <= request.limit <= PAGE_ITEMS:
            raise error("INVALID_REQUEST", f"limit is {request.limit}: it should be 0 to {PAGE_ITEMS}")
        page, following = self._listing.page(topic.producers, request.offset, request.limit or PAGE_ITEMS)
        return admin_pb2.ListProducersResponse(
            producers=[producer_proto(topic, name, number) for number, name in page], next_offset=following
        )

    async def producer(self, request: admin_pb2.GetProducerRequest) -> admin_pb2.GetProducerResponse:
        """See `GetProducer`. Raises what that answers, PRODUCER_NOT_FOUND among it."""
        topic = await self._owned(request.topic)
        name = producer_name(request.producer_name)
        number = topic.producers.number(name)
        if number is None or not topic.producers.is_known(number):
            raise error(
                "PRODUCER_NOT_FOUND", f"topic {topic.name} knows no producer {request.producer_name!r}",
                topic=topic.name,
            )  # fmt: skip
        return admin_pb2.GetProducerResponse(producer=producer_proto(topic, name, number))

    async def _snapshot(self, request: admin_pb2.SnapshotRequest) -> admin_pb2.SnapshotResponse:
        topic = await find(self._topics, request.topic)
        topic.check_serving()
        await topic.keeper.snapshot()
        return admin_pb2.SnapshotResponse(
            position=(await topic.position_before(topic.keeper.snapshot_index)).to_proto()
        )

    async def _version(self, request: admin_pb2.GetVersionRequest) -> admin_pb2.GetVersionResponse:
        return admin_pb2.GetVersionResponse(
            version=version("seqdedupe"),
            record_format_version=FORMAT_VERSION,
            uptime_seconds=self._statistics.uptime_seconds,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_batch_rows=MAX_BATCH_ROWS,
            instance_name=self._instance_name,
        )


async def in_time(name: str, creation: Awaitable[object]) -> None:
    """Waits for a topic that is being made. Raises RECOVERING if that takes long: it goes on, and whoever asks again
    waits for it again."""
    try:
        async with asyncio.timeout(CREATION_SECONDS):
            await creation
    except TimeoutError as e:
        raise error(
            "RECOVERING",
            f"topic {name} is still being made after {CREATION_SECONDS:.0f} seconds",
            hint="Wait, and ask for the topic, or try again: TOPIC_EXISTS then says that it has been made.",
            retry_delay_ms=1_000,
        ) from e


def _name(topic: TopicBase | Closed) -> str:
    return topic.record.name if isinstance(topic, Closed) else topic.name
