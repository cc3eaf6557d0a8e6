"""Tells a stock client where its topic is: at this door, or at the door of the sidecar that owns the topic.

Among workers and shards, the topic's name determines the owner. In a Pulsar cluster, the log determines the owner.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from broker_sidecar.cluster.peers import Neighbours
from broker_sidecar.door.pulsar_codes import lookup_code_of, told
from broker_sidecar.security.permissions import Permissions
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.names import topic_name
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandLookupTopic,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
)
from seqdedupe.tasks import shared
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics, find, look_for
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("broker_sidecar.door")

FRESH_SECONDS = 5.0
"""The time for which a door's address is cached. If a client is redirected to a sidecar that has ended, the client asks
again."""

OPEN_SECONDS = 5.0
"""The maximum time that a lookup waits for the opening of a topic that was not used yet."""

MAX_DOORS = 1_000
"""The most addresses that are kept."""

MAX_ASKED = 4
"""The most questions about topics that another sidecar is asked at the same time. Each question opens a connection."""

Partitions = Callable[[str], Awaitable[int]]
"""A function that returns the number of partitions of a topic that this sidecar does not know."""


class TopicLookup:
    """The answers to PARTITIONED_METADATA and LOOKUP, for all connections."""

    def __init__(
        self,
        topics: Topics[Topic],
        permissions: Permissions,
        neighbours: Neighbours | None = None,
        *,
        names_itself: bool = False,
    ) -> None:
        """Without `neighbours`, every topic is found at this door. `names_itself` is true if clients may have the
        addresses of several doors: the Go client does not stay at its present address. It uses the next address of its
        service URL, which may be the door of another sidecar, or not a door at all."""
        self._topics = topics
        self._names_itself = names_itself
        self._permissions = permissions
        self._neighbours = neighbours
        self._doors: dict[str, tuple[float, str]] = {}
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._counting: dict[str, asyncio.Task[int]] = {}
        """The questions for the partitions of other sidecars' topics, by topic."""
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_ASKED))
        """By the address of another sidecar: the turns of questions about its topics."""
        self.scheme = "pulsar"
        """The scheme of the URLs at which this door can be reached."""
        self.own_url = ""
        """The URL with which other doors redirect clients to this door; empty if the URL is not known."""

    async def partitions(
        self, command: CommandPartitionedTopicMetadata, elsewhere: Partitions | None
    ) -> CommandPartitionedTopicMetadataResponse:
        """Answer how many partitions a topic has. For topics that are not in this sidecar, ask the owner of the topic's
        shard, or `elsewhere`."""
        # A client treats a field without a value as a missing answer.
        answer = CommandPartitionedTopicMetadataResponse(
            request_id=command.request_id, response=CommandPartitionedTopicMetadataResponse.Success, partitions=0
        )
        try:
            full = topic_name(command.topic)
            self._check_may_look(full)
            # The topic may not exist yet.
            with suppress(NotFoundError):
                if owner := self._owner_of_shard(full):
                    answer.partitions = await self._partitions_at(owner, full)
                    return answer
                await look_for(self._topics, full)
            partitions = self._topics.partitions
            if full in partitions:
                answer.partitions = len(partitions.names(full))
            elif elsewhere is not None and self._topics.registry.found(full) is None:
                answer.partitions = await elsewhere(full)
        except SeqdedupeError as e:
            answer.response = CommandPartitionedTopicMetadataResponse.Failed
            answer.error, answer.message = lookup_code_of(e), told(e)
        return answer

    async def look_up(self, command: CommandLookupTopic) -> CommandLookupTopicResponse:
        """Answer where a topic is.

        If another door has redirected the client to this door, do not redirect the client again in a Pulsar cluster,
        because the owner of the topic may be changing there. The owner of a topic's shard does not change, and a topic
        that was moved to another sidecar's own log is certainly there.
        """
        answer = CommandLookupTopicResponse(request_id=command.request_id, authoritative=True)
        try:
            full = topic_name(command.topic)
            self._check_may_look(full)
            if owner := self._owner_of_shard(full):
                url = await self._door_at(owner)
                if not url:
                    raise _no_door(full, owner)
            else:
                may_change = command.authoritative and self._topics.kind.log.is_shared
                url = "" if may_change else await self._owners_door(full)
        except SeqdedupeError as e:
            answer.response = CommandLookupTopicResponse.Failed
            answer.error, answer.message = lookup_code_of(e), told(e)
            return answer
        answer.response = CommandLookupTopicResponse.Redirect if url else CommandLookupTopicResponse.Connect
        if not url and (command.authoritative or self._names_itself):
            url = self.own_url
        if url.startswith("pulsar+ssl"):
            answer.brokerServiceUrlTls = url
        elif url:
            answer.brokerServiceUrl = url
        else:
            # The client stays at the address that it uses now, so the door need not know its own name. The Java client
            # accepts no URL without a port.
            answer.brokerServiceUrl, answer.proxy_through_service_url = "pulsar://seqdedupe:6650", True
            answer.brokerServiceUrlTls = "pulsar+ssl://seqdedupe:6651"
        return answer

    def _owner_of_shard(self, full: str) -> str:
        """Return the address of the sidecar that has the topic's shard; empty if it is this sidecar.

        Raises SHARD_CLAIMED_TWICE; NOT_OWNER if the address is not known yet."""
        try:
            self._topics.ownership.check(full)
        except SeqdedupeError as e:
            if owner := e.numbers.get("owner_address", ""):
                return owner
            raise
        return ""

    async def _partitions_at(self, owner: str, full: str) -> int:
        """Return the number of partitions of a topic that belongs to the sidecar at this address. Raises that sidecar's
        refusal, UNREACHABLE."""
        return await shared(self._counting, full, lambda: self._count(owner, full))

    async def _count(self, owner: str, full: str) -> int:
        if self._neighbours is None:
            raise _no_door(full, owner)
        async with self._turns[owner]:
            try:
                return (await self._neighbours.topic(owner, full)).partitions
            except SeqdedupeError as e:
                raise _not_of_client(owner, e) from e

    async def _owners_door(self, full: str) -> str:
        """Return the URL of the door of another sidecar that owns the topic; empty if the URL is not known."""
        if self._neighbours is not None and (owner := await self._other_owner(full)):
            with suppress(SeqdedupeError):
                return await self._door_at(owner)
        return ""

    async def _door_at(self, address: str) -> str:
        """Return the URL of the door of the sidecar at this address; empty if there is no door that clients of this
        door can use. Raises the errors of `Neighbours.door_at`."""
        told_at, url = self._doors.get(address, (0.0, ""))
        if not url or time.monotonic() - told_at > FRESH_SECONDS:
            url = await shared(self._asking, address, lambda: self._ask(address))
        # A client without TLS cannot follow a redirect to a door with TLS, and a client with TLS cannot follow a
        # redirect to a door without TLS.
        return url if url != self.own_url and url.startswith(f"{self.scheme}://") else ""

    async def _ask(self, address: str) -> str:
        try:
            url = await self._neighbours.door_at(address) if self._neighbours is not None else ""
        except SeqdedupeError as e:
            raise _not_of_client(address, e) from e
        if len(self._doors) >= MAX_DOORS:
            self._doors.clear()
        self._doors[address] = time.monotonic(), url
        return url

    async def _other_owner(self, full: str) -> str:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                topic = await find(self._topics, full)
            if topic.state is not State.STANDBY:
                return ""
            # If a topic has lost its owner, a sidecar takes the topic over when a client asks for the topic.
            topic.asked.tell()
            return topic.owner_address
        except TimeoutError:
            return ""
        except SeqdedupeError as e:
            return e.numbers.get("owner_address", "")

    def _check_may_look(self, full: str) -> None:
        request = admin_pb2.GetTopicRequest(topic=full).SerializeToString()
        self._permissions.check_call("/seqdedupe.v1.AdminService/GetTopic", request)


def _not_of_client(owner: str, e: SeqdedupeError) -> SeqdedupeError:
    """Return the error for a client if another sidecar has refused this sidecar's question. A refusal of this sidecar's
    own token says nothing about the client's token."""
    if e.reason not in ("UNAUTHENTICATED", "TOKEN_EXPIRED", "NOT_ALLOWED"):
        return e
    logger.warning("the sidecar at %s refuses questions of this sidecar: %s", owner, e)
    return error("UNREACHABLE", f"the sidecar at {owner} does not answer this sidecar")


def _no_door(full: str, owner: str) -> SeqdedupeError:
    """Return the reason why a client is not sent to the owner of a topic's shard."""
    what = f"topic {full} belongs to the sidecar at {owner}, which has no door that this client can use"
    hint = "Set pulsar_listen at all processes, each with another advertised_pulsar_address, and TLS at all or none."
    return error("NOT_OWNER", what, hint=hint, owner_address=owner)
