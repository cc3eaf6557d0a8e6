"""The calls of AdminService about other sidecars, and about topics that move from one sidecar to another.

Begin with `ClusterCalls`: it lists sidecars, forgets lost sidecars, finds the owner of a topic and moves the topic.
With a Pulsar cluster, `Moves` releases a topic here and waits until another sidecar takes it over. A topic on a
sidecar's own log is sent by `cluster/departures.py`, and received by the calls of `arrival_calls.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from broker_sidecar.cluster.peers import TAKE_SECONDS, Neighbours
from broker_sidecar.data import Data
from broker_sidecar.rpc import unary
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import to_text
from seqdedupe.tasks import shielded
from seqdedupe.topic.directory import find
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from broker_sidecar.cluster.pulsar_cluster import LogCluster

logger = logging.getLogger("seqdedupe.server")

# -- Moving a topic of a cluster from this sidecar to another one.

AWAY_SECONDS = 2 * TAKE_SECONDS
"""The time for which this sidecar does not take over a released topic. Another sidecar must serve the topic within half
of this time. Clients wait for longer than this time."""
POLL_SECONDS = 0.1


class Moves:
    """Moves in progress. They continue after their callers have disconnected."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[str]] = {}

    async def move(self, topic: Topic, to: str, cluster: "LogCluster") -> str:
        """Release a topic, unless it is already at `to`. Return the address at which the topic is served afterwards.

        Raises NOT_OWNER and other reasons why the topic is not served here, INVALID_ADDRESS, MOVE_FAILED.
        """
        topic.check_serving()
        to = str(SidecarAddress.parse(to)) if to else ""
        if to == cluster.shared.address:
            return to
        if topic.name in self._under_way:
            raise error("MOVE_FAILED", f"topic {topic.name} is being moved already")
        return await shielded(self._under_way, topic.name, _move(topic, to, cluster))


async def _move(topic: Topic, to: str, cluster: "LogCluster") -> str:
    if to:
        await _check_can_have(topic, to, cluster.neighbours)
    await topic.owner.hand_over(to, AWAY_SECONDS)
    said = [f"no sidecar has taken it within {TAKE_SECONDS:.0f} s"]
    try:
        async with asyncio.timeout(TAKE_SECONDS):
            return await _taken(topic, to, cluster, said)
    except (SeqdedupeError, TimeoutError) as e:
        why = "; ".join(said)
        raise error("MOVE_FAILED", f"topic {topic.name} was not moved, and this sidecar takes it again: {why}") from e
    finally:
        # End keeping away. If no sidecar has the topic, this takes it back; otherwise it shows who has the topic.
        topic.owner.wanted.set()


async def _check_can_have(topic: Topic, address: str, others: Neighbours) -> None:
    """Raise MOVE_FAILED unless the sidecar at this address knows the topic and is a standby for it."""
    try:
        known = await others.topic(address, topic.name)
    except SeqdedupeError as e:
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {e}", hint=e.hint) from e
    if known.incarnation != topic.incarnation:
        what = f"the sidecar at {address} has another topic of that name, perhaps in another cluster"
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {what}")
    if known.state != admin_pb2.TOPIC_STATE_STANDBY:
        state = admin_pb2.TopicState.Name(known.state).removeprefix("TOPIC_STATE_")
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: at {address} it is {state}: {known.why}")


async def _taken(topic: Topic, to: str, cluster: "LogCluster", said: list[str]) -> str:
    """Return the address of the sidecar that serves the topic, once a sidecar does: the sidecar at `to`, or with an
    empty `to` any owner.

    Raises the reason why the sidecar at `to` does not serve the topic. The last element of `said` is the last error.
    """
    while True:
        try:
            address = to or await _next_owner(topic.name, cluster)
            await cluster.neighbours.take(address, topic.name)
            return address
        except SeqdedupeError as e:
            said[1:] = [str(e)]
            # It may have tried just before the release. If `to` is empty, the owner may be another one in the end.
            if to and e.reason != "NOT_OWNER":
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _next_owner(name: str, cluster: "LogCluster") -> str:
    """Return the address of the next owner of the topic, once another sidecar owns it."""
    while not (address := await cluster.owner_of(name)):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(POLL_SECONDS)
    return address


# -- The other calls.


class ClusterCalls:
    """The handlers."""

    def __init__(self, data: Data, is_serving: Callable[[], bool]) -> None:
        self._topics = data.all_topics
        self._known_cluster = data.cluster
        self._peers = data.peers
        self._leaving = data.leaving
        self._is_serving = is_serving
        self._moves = Moves()

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
                hint="This sidecar has all of its topics itself: there is nothing to list, forget or take. With log = "
                "'broker', or with shards, a topic stays where it is.",
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
        address = await self._moves.move(topic, request.to, cluster)
        return admin_pb2.MoveTopicResponse(owner_address=address)

    async def _take_topic(self, request: admin_pb2.TakeTopicRequest) -> admin_pb2.TakeTopicResponse:
        _ = self._cluster
        await (await find(self._topics, request.topic)).owner.take()
        return admin_pb2.TakeTopicResponse()
