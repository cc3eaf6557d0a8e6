"""Tells a stock client where its topic is: at this door, or at the door of the sidecar that owns the topic.

Among workers and shards, the topic's name determines the owner. In a Pulsar cluster, the log determines the owner.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

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

R = TypeVar("R")

logger = logging.getLogger("broker_sidecar.door")

FRESH_SECONDS = 5.0
"""The time for which a door's address is cached. If a client is redirected to a sidecar that has ended, the client asks
again."""

OPEN_SECONDS = 5.0
"""The maximum time that a lookup waits for the opening of a topic that was not used yet."""

MAX_OWNERS = 1_000
"""The most other sidecars that are kept in memory."""

MAX_ASKED = 4
"""The most questions about topics that another sidecar is asked at the same time. Each question opens a connection."""

SILENT_SECONDS = 1.0
"""The pause after which one question finds out whether a silent sidecar answers again."""

Partitions = Callable[[str], Awaitable[int]]
"""A function that returns the number of partitions of a topic that this sidecar does not know."""


class AskedOwner:
    """Another sidecar, which this sidecar asks about its topics."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._free_turns = MAX_ASKED
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        """The waiting questions by the client's connection, in the order of the next turns. A queue is never empty.
        Its length is at most `MAX_REQUESTS`: at this number, the door reads no more data from the connection."""
        self._is_silent = False
        self._asked_again_at = 0.0
        self.door_url = ""
        """The URL of its door for clients; empty if it is not known, or there is none."""
        self.told_at = 0.0

    async def take_turn(self, client: object) -> None:
        """Wait for the turn of a question. `answer` or `end_turn` must follow.

        The connections of clients get turns one after another, so a client with many questions only delays its own.
        """
        if self._free_turns:
            self._free_turns -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.end_turn()
            raise

    def end_turn(self) -> None:
        """Leave the turn to the next question."""
        while self._waiting:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free_turns += 1

    def check(self) -> None:
        """Raise UNREACHABLE if the last question had no answer, unless it is time to ask again."""
        if self._is_silent and time.monotonic() < self._asked_again_at:
            raise self._silent()

    async def answer(self, question: Callable[[str], Awaitable[R]]) -> R:
        """Return the answer to a question, which is called with the address. Raises the other sidecar's refusal;
        UNREACHABLE if it does not answer, or did not answer before."""
        self.check()
        if self._is_silent:
            # Until this question ends, no other one is asked.
            self._asked_again_at = math.inf
        try:
            answer = await question(self.address)
            self._is_silent = False
            return answer
        except SeqdedupeError as e:
            was_silent, self._is_silent = self._is_silent, e.reason in {"UNREACHABLE", "OUTCOME_UNKNOWN"}
            # A refusal of this sidecar's own token says nothing about the client's token.
            if not self._is_silent and e.reason not in ("UNAUTHENTICATED", "TOKEN_EXPIRED", "NOT_ALLOWED"):
                raise
            if not was_silent:
                logger.warning("the sidecar at %s does not answer questions of this sidecar: %s", self.address, e)
            raise self._silent() from e
        finally:
            self._asked_again_at = time.monotonic() + SILENT_SECONDS

    def _silent(self) -> SeqdedupeError:
        return error("UNREACHABLE", f"the sidecar at {self.address} does not answer this sidecar")


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
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._counting: dict[str, asyncio.Task[int]] = {}
        """The questions for the partitions of other sidecars' topics, by topic."""
        self._owners: dict[str, AskedOwner] = {}
        """Other sidecars by address."""
        self.scheme = "pulsar"
        """The scheme of the URLs at which this door can be reached."""
        self.own_url = ""
        """The URL with which other doors redirect clients to this door; empty if the URL is not known."""

    async def partitions(
        self, command: CommandPartitionedTopicMetadata, elsewhere: Partitions | None, client: object
    ) -> CommandPartitionedTopicMetadataResponse:
        """Answer how many partitions a topic has. For topics that are not in this sidecar, ask the owner of the topic's
        shard, or `elsewhere`. `client` is the client's connection."""
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
                    answer.partitions = await self._partitions_at(self._owner(owner), full, client)
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

    def _owner(self, address: str) -> AskedOwner:
        if (owner := self._owners.get(address)) is None:
            if len(self._owners) >= MAX_OWNERS:
                self._owners.clear()
            owner = self._owners[address] = AskedOwner(address)
        return owner

    async def _partitions_at(self, owner: AskedOwner, full: str, client: object) -> int:
        """Return the number of partitions of another sidecar's topic. Raises that sidecar's refusal, UNREACHABLE."""
        if full not in self._counting:
            owner.check()
            await owner.take_turn(client)
            if full in self._counting:
                owner.end_turn()
        return await shared(self._counting, full, lambda: self._count(owner, full))

    async def _count(self, owner: AskedOwner, full: str) -> int:
        """Ask the owner, and end the turn."""
        try:
            if self._neighbours is None:
                raise _no_door(full, owner.address)
            neighbours = self._neighbours
            return (await owner.answer(lambda address: neighbours.topic(address, full))).partitions
        finally:
            owner.end_turn()

    async def _owners_door(self, full: str) -> str:
        """Return the URL of the door of another sidecar that owns the topic; empty if the URL is not known."""
        if self._neighbours is not None and (owner := await self._other_owner(full)):
            with suppress(SeqdedupeError):
                return await self._door_at(owner)
        return ""

    async def _door_at(self, address: str) -> str:
        """Return the URL of the door of the sidecar at this address; empty if there is no door that clients of this
        door can use. Raises the errors of `Neighbours.door_at`."""
        owner = self._owner(address)
        url = owner.door_url
        if not url or time.monotonic() - owner.told_at > FRESH_SECONDS:
            url = await shared(self._asking, address, lambda: self._ask(owner))
        # A client without TLS cannot follow a redirect to a door with TLS, and a client with TLS cannot follow a
        # redirect to a door without TLS.
        return url if url != self.own_url and url.startswith(f"{self.scheme}://") else ""

    async def _ask(self, owner: AskedOwner) -> str:
        owner.door_url = await owner.answer(self._neighbours.door_at) if self._neighbours is not None else ""
        owner.told_at = time.monotonic()
        return owner.door_url

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


def _no_door(full: str, owner: str) -> SeqdedupeError:
    """Return the reason why a client is not sent to the owner of a topic's shard."""
    what = f"topic {full} belongs to the sidecar at {owner}, which has no door that this client can use"
    hint = "Set pulsar_listen at all processes, each with another advertised_pulsar_address, and TLS at all or none."
    return error("NOT_OWNER", what, hint=hint, owner_address=owner)
