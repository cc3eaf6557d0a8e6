"""Where a stock client finds its topic: at this door, or at the door of the sidecar that owns the topic."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from broker_sidecar.door.pulsar_codes import lookup_code_of, told
from broker_sidecar.security.permissions import Permissions
from seqdedupe.errors import NotFoundError, SeqdedupeError
from seqdedupe.names import topic_name
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandLookupTopic,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
)
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics, find, look_for
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

FRESH_SECONDS = 5.0
"""The time for which a door's address is reused. A client that is sent to a sidecar that has ended comes back."""

OPEN_SECONDS = 5.0
"""The time for which a lookup waits until a topic has been opened that nobody has used."""

MAX_DOORS = 1_000
"""The most addresses that are kept."""

DoorAt = Callable[[str], Awaitable[str]]
"""Returns the URL of the door of the sidecar at this address; empty if it has none, or does not answer now."""

Partitions = Callable[[str], Awaitable[int]]
"""Returns how many partitions a topic that the sidecar does not know has."""


class TopicLookup:
    """The answers to PARTITIONED_METADATA and LOOKUP, for all connections."""

    def __init__(self, topics: Topics[Topic], permissions: Permissions, door_at: DoorAt | None = None) -> None:
        """Without `door_at`, every topic is found at this door."""
        self._topics = topics
        self._permissions = permissions
        self._door_at = door_at
        self._doors: dict[str, tuple[float, str]] = {}
        self.scheme = "pulsar"
        """How the URLs begin at which this door can be reached."""
        self.own_url = ""
        """The URL at which other doors send clients here; empty if it is not known."""

    async def partitions(
        self, command: CommandPartitionedTopicMetadata, elsewhere: Partitions | None
    ) -> CommandPartitionedTopicMetadataResponse:
        """Answer how many partitions a topic has. `elsewhere` is asked about topics that are not here."""
        # A client takes a field without a value for a missing answer.
        answer = CommandPartitionedTopicMetadataResponse(
            request_id=command.request_id, response=CommandPartitionedTopicMetadataResponse.Success, partitions=0
        )
        try:
            full = topic_name(command.topic)
            self._check_may_look(full)
            # The topic may not exist yet.
            with suppress(NotFoundError):
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

        A client that another door has sent here is not sent on: which sidecar owns the topic may be changing.
        """
        answer = CommandLookupTopicResponse(request_id=command.request_id, authoritative=True)
        try:
            full = topic_name(command.topic)
            self._check_may_look(full)
            with suppress(NotFoundError):
                self._topics.ownership.check(full)
            url = "" if command.authoritative else await self._owners_door(full)
        except SeqdedupeError as e:
            answer.response = CommandLookupTopicResponse.Failed
            answer.error, answer.message = lookup_code_of(e), told(e)
            return answer
        answer.response = CommandLookupTopicResponse.Redirect if url else CommandLookupTopicResponse.Connect
        if not url and (command.authoritative or self._door_at is not None):
            # Go's client does not keep to its present address: it takes the next one of its service URL, which may be
            # the door of another sidecar, or of none.
            url = self.own_url
        if url.startswith("pulsar+ssl"):
            answer.brokerServiceUrlTls = url
        elif url:
            answer.brokerServiceUrl = url
        else:
            # The client keeps to the address that it knows, so the door need not know by which name it is reached.
            # Java takes no URL without a port.
            answer.brokerServiceUrl, answer.proxy_through_service_url = "pulsar://seqdedupe:6650", True
            answer.brokerServiceUrlTls = "pulsar+ssl://seqdedupe:6651"
        return answer

    async def _owners_door(self, full: str) -> str:
        """Return the URL of the door of another sidecar that owns the topic; empty if that is not known."""
        if self._door_at is None or not (owner := await self._other_owner(full)):
            return ""
        known = self._doors.get(owner)
        if known is None or time.monotonic() - known[0] > FRESH_SECONDS:
            if len(self._doors) >= MAX_DOORS:
                self._doors.clear()
            known = self._doors[owner] = (time.monotonic(), await self._door_at(owner))
        url = known[1]
        # A client without TLS cannot follow to a door with it, nor the other way round.
        return url if url != self.own_url and url.startswith(f"{self.scheme}://") else ""

    async def _other_owner(self, full: str) -> str:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                topic = await find(self._topics, full)
            if topic.state is not State.STANDBY:
                return ""
            # A sidecar whose topic has lost its owner takes it over when it is asked.
            topic.asked.tell()
            return topic.owner_address
        except TimeoutError:
            return ""
        except SeqdedupeError as e:
            return e.numbers.get("owner_address", "")

    def _check_may_look(self, full: str) -> None:
        request = admin_pb2.GetTopicRequest(topic=full).SerializeToString()
        self._permissions.check_call("/seqdedupe.v1.AdminService/GetTopic", request)
