"""The calls of AdminService about the sidecars of a cluster: who there is, who is gone for good, who has a topic."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from broker_sidecar.leaving import Leaving
from broker_sidecar.moving import Moves
from broker_sidecar.peers import Peers
from broker_sidecar.rpc import unary
from seqdedupe.errors import error
from seqdedupe.log.pulsar import sidecars
from seqdedupe.shards import to_text
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.finding import find
from seqdedupe.topic.publishing import Topic
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from broker_sidecar.cluster import Cluster


class Sidecars:
    """The handlers. `cluster` is None if the log is not a cluster's, `peers` if this process has all topics, `leaving`
    if it has no logs of its own."""

    def __init__(
        self,
        topics: Topics[Any],
        cluster: "Cluster | None",
        peers: Peers | None,
        leaving: Leaving | None,
        is_serving: Callable[[], bool],
    ) -> None:
        self._topics: Topics[Topic] = topics
        self._known_cluster = cluster
        self._peers = peers
        self._leaving = leaving
        self._is_serving = is_serving
        self._moves = Moves()

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        return {
            "GetShards": unary(admin_pb2.GetShardsRequest, self._shards),
            "ListSidecars": unary(admin_pb2.ListSidecarsRequest, self._list),
            "ForgetSidecar": unary(admin_pb2.ForgetSidecarRequest, self._forget),
            "MoveTopic": unary(admin_pb2.MoveTopicRequest, self._move),
            "TakeTopic": unary(admin_pb2.TakeTopicRequest, self._take),
        }

    @property
    def _cluster(self) -> "Cluster":
        if self._known_cluster is None:
            raise error(
                "INVALID_REQUEST",
                "this is only for sidecars in front of a cluster, and here the log is not a cluster's",
                hint="Nothing has to be listed, forgotten or taken here: this sidecar has all of its topics itself. "
                "Where log = 'broker', or topics are spread over processes, a topic stays where it is.",
            )
        return self._known_cluster

    async def _list(self, _request: admin_pb2.ListSidecarsRequest) -> admin_pb2.ListSidecarsResponse:
        if self._peers is not None:
            return admin_pb2.ListSidecarsResponse(sidecars=await self._peers.list_sidecars(len(self._topics.records)))
        shared, namespaces = self._cluster.shared, self._cluster.namespaces
        return admin_pb2.ListSidecarsResponse(
            sidecars=[
                admin_pb2.ClusterSidecar(
                    name=one.name,
                    addresses=sorted(one.addresses),
                    topics_owned=one.topics_owned,
                    subscriptions=len(one.subscribed),
                    kept_entries=one.kept_entries,
                    kept_bytes=one.kept_bytes,
                    is_this=one.name == shared.instance_name,
                )
                for one in await sidecars.sidecars(shared.admin, namespaces)
            ]
        )

    async def _shards(self, _request: admin_pb2.GetShardsRequest) -> admin_pb2.GetShardsResponse:
        if self._peers is None:
            raise error("INVALID_REQUEST", "here no shards of topics are spread over the processes of a cluster")
        return admin_pb2.GetShardsResponse(
            cluster_id=self._peers.claim.cluster_id,
            shards=to_text(self._peers.claim.shards),
            process_id=self._peers.process_id,
            is_serving=self._is_serving(),
            topics=len(self._topics.records),
        )

    async def _forget(self, request: admin_pb2.ForgetSidecarRequest) -> admin_pb2.ForgetSidecarResponse:
        shared, namespaces = self._cluster.shared, self._cluster.namespaces
        if request.name == shared.instance_name:
            raise error("SIDECAR_ALIVE", f"{request.name} is the sidecar that was asked")
        topics = await sidecars.forget(shared.admin, namespaces, request.name, self._cluster.neighbours.instance_name)
        return admin_pb2.ForgetSidecarResponse(topics=topics)

    async def _move(self, request: admin_pb2.MoveTopicRequest) -> admin_pb2.MoveTopicResponse:
        if self._leaving is not None and self._peers is None:
            return admin_pb2.MoveTopicResponse(owner_address=await self._leaving.move(request.topic, request.to))
        cluster = self._cluster
        topic = await find(self._topics, request.topic)
        address = await self._moves.move(topic, request.to, cluster.shared, cluster.neighbours)
        return admin_pb2.MoveTopicResponse(owner_address=address)

    async def _take(self, request: admin_pb2.TakeTopicRequest) -> admin_pb2.TakeTopicResponse:
        _ = self._cluster
        await (await find(self._topics, request.topic)).take()
        return admin_pb2.TakeTopicResponse()
