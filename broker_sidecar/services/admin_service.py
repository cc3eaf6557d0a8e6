"""AdminService: the calls about topics, their policies, their producers, and other sidecars. This file also combines
the calls of the other groups.

`AdminService` contains `CreateTopic` to `GetTopic`, the policies of topics and namespaces, `Snapshot` and `GetVersion`.
`ProducerCalls` answers about producers and single messages. `ClusterCalls` lists sidecars, forgets lost sidecars, finds
the owner of a topic and moves the topic. Cursors are in `read_service.py`, exports, imports and backups in
`transfer_calls.py`, and statistics in `statistics.py`. A topic of a Pulsar cluster is moved by
`cluster/pulsar_cluster.py`. A topic on a sidecar's own log is sent by `cluster/departures.py`, and received by the
calls of `arrival_calls.py`.
"""

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import grpc

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.gate import Guard
from broker_sidecar.rpc import unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.services.arrival_calls import ArrivalCalls
from broker_sidecar.services.read_service import Cursors
from broker_sidecar.services.statistics import Statistics, partitioned_to_proto, policy_to_proto, topic_to_proto
from broker_sidecar.services.transfer_calls import BackupCalls, TransferCalls
from broker_sidecar.streams import Stream, Streams
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import EPOCH, PERSISTED, PUSHED
from seqdedupe.errors import error
from seqdedupe.format.headers import FORMAT_VERSION
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from seqdedupe.log.contract import Layout
from seqdedupe.names import namespace_name, producer_name, to_text, topic_name
from seqdedupe.store.parts import LogKind
from seqdedupe.topic import directory, listing, operations
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics, delete, find, look_for
from seqdedupe.topic.policy import DeduplicationRoute, Policy
from seqdedupe.topic.registry import Closed
from seqdedupe.topic.topic import Topic
from seqdedupe.topic_facts import ENTRY_FORMATS
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from broker_sidecar.cluster.pulsar_cluster import LogCluster

SERVICE = "seqdedupe.v1.AdminService"

PAGE_TOPICS = 1_000
"""The most topics in one answer."""

CREATION_SECONDS = 20.0
"""The time after which the answer says that the topic is still being created. The clients wait for 30 seconds."""


class AdminService:
    """All handlers of AdminService: the handlers in this file, and the handlers of the other groups."""

    def __init__(self, config: Config, data: Data, streams: Streams, guard: Guard, statistics: Statistics) -> None:
        self._topics = data.all_topics
        self._cluster = data.cluster
        self.pulsar_url = ""
        """The URL of the door for clients of Apache Pulsar, once it listens."""
        self._peers = data.peers
        self._permissions = guard.permissions
        self._statistics = statistics
        self.producers = ProducerCalls(data, streams, guard.permissions)
        self._arrivals = ArrivalCalls(data, streams, guard)
        self._groups = (
            self.producers,
            Cursors(data.topics, guard.permissions),
            TransferCalls(data.all_topics, streams, guard),
            ClusterCalls(data, statistics.is_serving),
            self._arrivals,
            BackupCalls(config, data, streams),
            statistics,
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "CreateTopic": unary(admin_pb2.CreateTopicRequest, self._create_topic),
            "DeleteTopic": unary(admin_pb2.DeleteTopicRequest, self._delete_topic),
            "ListTopics": unary(admin_pb2.ListTopicsRequest, self._list_topics),
            "GetTopic": unary(admin_pb2.GetTopicRequest, self._get_topic),
            "SetTopicPolicy": unary(admin_pb2.SetTopicPolicyRequest, self._set_topic_policy),
            "GetTopicPolicy": unary(admin_pb2.GetTopicPolicyRequest, self._get_topic_policy),
            "RemoveTopicPolicy": unary(admin_pb2.RemoveTopicPolicyRequest, self._remove_topic_policy),
            "SetNamespacePolicy": unary(admin_pb2.SetNamespacePolicyRequest, self._set_namespace_policy),
            "GetNamespacePolicy": unary(admin_pb2.GetNamespacePolicyRequest, self._get_namespace_policy),
            "RemoveNamespacePolicy": unary(admin_pb2.RemoveNamespacePolicyRequest, self._remove_namespace_policy),
            "Snapshot": unary(admin_pb2.SnapshotRequest, self._snapshot),
            "GetVersion": unary(admin_pb2.GetVersionRequest, self._get_version),
        }
        for group in self._groups:
            methods |= group.methods()
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # -- topics ------------------------------------------------------------------------------------------------

    async def _create_topic(self, request: admin_pb2.CreateTopicRequest) -> admin_pb2.CreateTopicResponse:
        by_id = _mode_of(request, self._topics.kind.log)
        policy = Policy.of_request(request.policy).check_has_effect(self._topics.kind.log)
        policy = replace(policy.check_fits(by_deduplication_id=by_id), by_deduplication_id=by_id)
        policy = replace(policy, route=_route_of(request))
        layout = _layout_of(request, self._topics.kind.log)
        partitions = max(1, request.partitions)
        self._permissions.check_creates(topic_name(request.topic), self._topics.registry.names(), partitions)
        topics, name = self._topics, request.topic
        if request.take_over:
            there = list(self._topics.registry.names())
            check = partial(self._permissions.check_creates, topic_name(name), there)
            await in_time(name, listing.take_over(topics, name, layout, check))
        elif request.partitions:
            await in_time(name, directory.create_partitioned(topics, name, request.partitions, policy, layout))
        else:
            await in_time(name, topics.create(name, policy=policy, layout=layout))
        return admin_pb2.CreateTopicResponse(topic=self._topic(topic_name(request.topic)))

    async def _delete_topic(self, request: admin_pb2.DeleteTopicRequest) -> admin_pb2.DeleteTopicResponse:
        full = await look_for(self._topics, request.topic)
        if full in self._topics.partitions:
            await directory.delete_partitioned(self._topics, full)
        else:
            await delete(self._topics, full, self._arrivals.check_is_known)
        return admin_pb2.DeleteTopicResponse()

    async def _list_topics(self, request: admin_pb2.ListTopicsRequest) -> admin_pb2.ListTopicsResponse:
        wholes = (whole for whole in self._topics.partitions if not self._topics.registry.is_being_made(whole))
        names = sorted([*map(_name, self._topics.all()), *wholes])
        first = bisect_right(names, topic_name(request.after)) if request.after else 0
        page = names[first : first + PAGE_TOPICS]
        here = admin_pb2.ListTopicsResponse(
            topics=map(self._topic, page), next=page[-1] if first + PAGE_TOPICS < len(names) else ""
        )
        if self._peers is None or request.only_here:
            return here
        return await self._peers.list_topics(request.after, here, PAGE_TOPICS)

    async def _get_topic(self, request: admin_pb2.GetTopicRequest) -> admin_pb2.GetTopicResponse:
        full = await look_for(self._topics, request.topic)
        partitions = self._topics.partitions
        await self._topics.waiting.use(*(partitions.names(full) if full in partitions else [full]))
        return admin_pb2.GetTopicResponse(topic=self._topic(full))

    def _topic(self, name: str) -> admin_pb2.Topic:
        """Return a topic by its full name, as it is now. Raises TOPIC_NOT_FOUND."""
        if self._topics.registry.is_being_made(name):
            raise self._topics.ownership.missing(name)
        if name in self._topics.partitions:
            partitions = directory.partitions_of(self._topics, name)
            return partitioned_to_proto(name, partitions, self._topics.partitions.unused.get(name, 0))
        topic = self._topics.look_at(name)
        return topic_to_proto(topic, self._topics.partitions_beside(name))

    async def _snapshot(self, request: admin_pb2.SnapshotRequest) -> admin_pb2.SnapshotResponse:
        topic = await find(self._topics, request.topic)
        topic.check_serving()
        await topic.keeper.snapshot()
        return admin_pb2.SnapshotResponse(
            position=(await topic.position_before(topic.keeper.snapshot_index)).to_proto()
        )

    async def _get_version(self, request: admin_pb2.GetVersionRequest) -> admin_pb2.GetVersionResponse:
        return admin_pb2.GetVersionResponse(
            version=version("seqdedupe"),
            record_format_version=FORMAT_VERSION,
            uptime_seconds=self._statistics.uptime_seconds,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_batch_rows=MAX_BATCH_ROWS,
            instance_name=self._cluster.shared.instance_name if self._cluster is not None else "",
            pulsar_url=self.pulsar_url,
        )

    # -- policies ----------------------------------------------------------------------------------------------

    async def _get_topic_policy(self, request: admin_pb2.GetTopicPolicyRequest) -> admin_pb2.GetTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        policy, applied = policy_to_proto(topic.policy), policy_to_proto(topic.applied)
        return admin_pb2.GetTopicPolicyResponse(policy=policy, applied=applied)

    async def _set_topic_policy(self, request: admin_pb2.SetTopicPolicyRequest) -> admin_pb2.SetTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        policy = self._policy_in(request.policy).check_fits(by_deduplication_id=topic.window is not None)
        await topic.set_policy(topic.newest_policy.with_values_of(policy))
        return admin_pb2.SetTopicPolicyResponse(topic=topic_to_proto(topic))

    async def _remove_topic_policy(
        self, request: admin_pb2.RemoveTopicPolicyRequest
    ) -> admin_pb2.RemoveTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        await topic.set_policy(topic.newest_policy.without(list(request.values)))
        return admin_pb2.RemoveTopicPolicyResponse(topic=topic_to_proto(topic))

    async def _get_namespace_policy(
        self, request: admin_pb2.GetNamespacePolicyRequest
    ) -> admin_pb2.GetNamespacePolicyResponse:
        namespace = namespace_name(request.namespace)
        self._topics.ownership.check(namespace)
        policy, applied = self._policies_of(namespace)
        return admin_pb2.GetNamespacePolicyResponse(policy=policy, applied=applied)

    async def _set_namespace_policy(
        self, request: admin_pb2.SetNamespacePolicyRequest
    ) -> admin_pb2.SetNamespacePolicyResponse:
        namespace = namespace_name(request.namespace)
        given = self._policy_in(request.policy)
        if self._peers is not None and not request.only_here:
            return await self._peers.everywhere("SetNamespacePolicy", request, self._set_namespace_policy)
        await self._topics.namespaces.change(namespace, lambda policy: policy.with_values_of(given))
        policy, applied = self._policies_of(namespace)
        return admin_pb2.SetNamespacePolicyResponse(policy=policy, applied=applied)

    async def _remove_namespace_policy(
        self, request: admin_pb2.RemoveNamespacePolicyRequest
    ) -> admin_pb2.RemoveNamespacePolicyResponse:
        namespace, values = namespace_name(request.namespace), list(request.values)
        if self._peers is not None and not request.only_here:
            Policy().without(values)
            return await self._peers.everywhere("RemoveNamespacePolicy", request, self._remove_namespace_policy)
        await self._topics.namespaces.change(namespace, lambda policy: policy.without(values))
        policy, applied = self._policies_of(namespace)
        return admin_pb2.RemoveNamespacePolicyResponse(policy=policy, applied=applied)

    def _policy_in(self, message: admin_pb2.TopicPolicy) -> Policy:
        """Return the values that a request sets; there must be at least one."""
        policy = Policy.of_request(message)
        if policy == Policy():
            raise error("INVALID_REQUEST", "policy is missing or sets nothing: set at least one value")
        return policy.check_has_effect(self._topics.kind.log)

    def _policies_of(self, namespace: str) -> tuple[admin_pb2.TopicPolicy, admin_pb2.TopicPolicy]:
        namespaces = self._topics.namespaces
        return policy_to_proto(namespaces.policy(namespace)), policy_to_proto(namespaces.applied(namespace))


async def in_time(name: str, creation: Awaitable[object]) -> None:
    """Wait for a topic that is being created.

    Raises RECOVERING if that takes long. The creation continues, and a repeated request waits for it again."""
    try:
        async with asyncio.timeout(CREATION_SECONDS):
            await creation
    except TimeoutError as e:
        raise error(
            "RECOVERING",
            f"topic {name} is still being created after {CREATION_SECONDS:.0f} seconds",
            hint="Wait, and look the topic up or repeat the call. TOPIC_EXISTS means that the topic was created.",
            retry_delay_ms=1_000,
        ) from e


def _name(topic: TopicBase | Closed) -> str:
    return topic.record.name if isinstance(topic, Closed) else topic.name


# -- The options of a CreateTopic.


def _layout_of(request: admin_pb2.CreateTopicRequest, log: LogKind) -> Layout:
    """Return the requested layout. Raises INVALID_REQUEST."""
    value = request.entry_format
    given = {
        "entry_format": value != admin_pb2.ENTRY_FORMAT_UNSPECIFIED,
        "schema": request.schema,
        "take_over": request.take_over,
        "watermarks": request.HasField("watermarks"),
    }
    for field, is_given in given.items():
        if is_given and log is not LogKind.PULSAR:
            why = f"{field} can be set only on a sidecar with log = 'pulsar'"
            raise error("INVALID_REQUEST", why, hint=f"Omit {field}.")
    if request.take_over and (request.partitions or request.policy != admin_pb2.TopicPolicy()):
        why = "partitions and policy cannot be set for a topic that is taken over"
        raise error("INVALID_REQUEST", why, hint="Omit them. Set its policy when it serves.")
    watermarks = request.watermarks if request.HasField("watermarks") else None
    if watermarks is not None and not request.take_over:
        raise error("INVALID_REQUEST", "watermarks can be set only for a topic that is taken over", hint="Omit them.")
    for name, known in ENTRY_FORMATS.items():
        if known == value:
            return Layout(name, request.schema, watermarks)
    raise error("INVALID_REQUEST", f"entry_format is {value}, which this version does not know")


def _mode_of(request: admin_pb2.CreateTopicRequest, log: LogKind) -> bool:
    """Return whether the request is for a topic of deduplication IDs. Raises INVALID_REQUEST."""
    mode = request.deduplication_mode
    if mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        if log is not LogKind.EMBEDDED:
            why = "deduplication_mode can be DEDUPLICATION_ID only on a sidecar with log = 'embedded'"
            raise error("INVALID_REQUEST", why)
        return True
    if mode not in (admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED, admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID):
        raise error("INVALID_REQUEST", f"deduplication_mode is {mode}, which this version does not know")
    return False


def _route_of(request: admin_pb2.CreateTopicRequest) -> DeduplicationRoute | None:
    """Return the value by which messages are assigned to partitions; None if the request has no such choice. Raises
    INVALID_REQUEST."""
    by_id = request.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    if by_id and request.partitions:
        try:
            return DeduplicationRoute(request.deduplication_route or DeduplicationRoute.ID.value)
        except ValueError:
            why = f"deduplication_route is {request.deduplication_route}, which this version does not know"
            raise error("INVALID_REQUEST", why) from None
    if request.deduplication_route != admin_pb2.DEDUPLICATION_ROUTE_UNSPECIFIED:
        why = "deduplication_route can be set only for topics of deduplication IDs with partitions"
        raise error("INVALID_REQUEST", why, hint="Omit deduplication_route.")
    return None


# -- Other sidecars.


class ClusterCalls:
    """The handlers of the calls about other sidecars, and about topics that move from one sidecar to another."""

    def __init__(self, data: Data, is_serving: Callable[[], bool]) -> None:
        self._topics = data.all_topics
        self._known_cluster = data.cluster
        self._peers = data.peers
        self._leaving = data.leaving
        self._is_serving = is_serving

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        return {
            "GetShards": unary(admin_pb2.GetShardsRequest, self._get_shards),
            "ListSidecars": unary(admin_pb2.ListSidecarsRequest, self._list_sidecars),
            "ForgetSidecar": unary(admin_pb2.ForgetSidecarRequest, self._forget_sidecar),
            "MoveTopic": unary(admin_pb2.MoveTopicRequest, self._move_topic),
            "TakeTopic": unary(admin_pb2.TakeTopicRequest, self._take_topic),
        }

    @property
    def _cluster(self) -> "LogCluster":
        if self._known_cluster is None:
            raise error(
                "INVALID_REQUEST",
                "this call is only for sidecars in front of a Pulsar cluster (log = 'pulsar')",
                hint="All topics of this sidecar are its own: there is nothing to list, forget or take. With log = "
                "'broker', or with shards, a topic cannot move to another sidecar.",
            )
        return self._known_cluster

    async def _list_sidecars(self, _request: admin_pb2.ListSidecarsRequest) -> admin_pb2.ListSidecarsResponse:
        if self._peers is not None:
            return admin_pb2.ListSidecarsResponse(sidecars=await self._peers.list_sidecars(len(self._topics.registry)))
        cluster = self._cluster
        return admin_pb2.ListSidecarsResponse(
            sidecars=[
                admin_pb2.ClusterSidecar(
                    name=one.name,
                    addresses=sorted(one.addresses),
                    topics_owned=one.topics_owned,
                    subscriptions=len(one.subscribed),
                    kept_entries=one.kept_entries,
                    kept_bytes=one.kept_bytes,
                    is_this=one.name == cluster.shared.instance_name,
                )
                for one in await cluster.sidecars()
            ]
        )

    async def _get_shards(self, _request: admin_pb2.GetShardsRequest) -> admin_pb2.GetShardsResponse:
        if self._peers is None:
            raise error("INVALID_REQUEST", "this process has no shards of a cluster")
        return admin_pb2.GetShardsResponse(
            cluster_id=self._peers.claim.cluster_id,
            shards=to_text(self._peers.claim.shards),
            process_id=self._peers.process_id,
            is_serving=self._is_serving(),
            topics=len(self._topics.registry),
        )

    async def _forget_sidecar(self, request: admin_pb2.ForgetSidecarRequest) -> admin_pb2.ForgetSidecarResponse:
        if request.name == self._cluster.shared.instance_name:
            raise error("SIDECAR_ALIVE", f"{request.name} is the sidecar that this call has reached")
        return admin_pb2.ForgetSidecarResponse(topics=await self._cluster.forget(request.name))

    async def _move_topic(self, request: admin_pb2.MoveTopicRequest) -> admin_pb2.MoveTopicResponse:
        if self._leaving is not None and self._peers is None:
            return admin_pb2.MoveTopicResponse(owner_address=await self._leaving.move(request.topic, request.to))
        cluster = self._cluster
        topic = await find(self._topics, request.topic)
        address = await cluster.moves.move(topic, request.to, cluster)
        return admin_pb2.MoveTopicResponse(owner_address=address)

    async def _take_topic(self, request: admin_pb2.TakeTopicRequest) -> admin_pb2.TakeTopicResponse:
        _ = self._cluster
        await (await find(self._topics, request.topic)).owner.take()
        return admin_pb2.TakeTopicResponse()


# -- The calls about a topic's producers, and about single messages of the producers.

PAGE_PRODUCERS = 1_000
"""The most producers in one answer."""


class ProducerCalls:
    """The handlers of the calls about producers and messages. Calls about messages need a topic on the sidecar's own
    log. Calls about producers work for all topics."""

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
        """Return the topic for a call about the topic's producers.

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
                "this call needs a log that the sidecar writes, but here a broker has the logs",
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
        """Return at most `count` names from a place on, and the place of the next page. The place 0 is the first name.
        At the end, the next place is 0.

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
