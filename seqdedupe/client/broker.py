"""For a broker with a log of its own: it attaches its topics to a sidecar, asks for verdicts, and reports.

What a broker has to keep to stands in dedupe.proto; this does of it what does not concern the broker's own log.
"""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc.aio

from seqdedupe import wire
from seqdedupe.address import SidecarAddress
from seqdedupe.client.attachment import ATTACH, Attachment, Entry
from seqdedupe.client.connection import call, new_channel
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError
from seqdedupe.names import topic_name
from seqdedupe.v1 import dedupe_pb2
from seqdedupe.v1.dedupe_pb2_grpc import DedupeServiceStub

REPLAY_ROWS = 8192
"""Entries in one message of the replay."""


class ProducerNumbers(NamedTuple):
    """The highest sequence ID that was judged new, and the highest that is in the log; -1 is none."""

    pushed: int
    persisted: int


Replay = Callable[[bytes], AsyncIterator[Entry]]
"""Gives every entry of the log after a position (empty: from the first), in order."""


class BrokerClient:
    """A broker's connection to its sidecar. Close it with `close`, or use it as a context."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """`credentials` left out are what the environment says. Raises INVALID_ADDRESS, INVALID_CREDENTIALS. Nothing is
        connected yet."""
        self._address = SidecarAddress.parse(address)
        self._credentials = Credentials.from_environment() if credentials is None else credentials
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and the attachments with it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = new_channel(self._address, self._credentials)
        return self._channel

    async def attach(self, topic: str, replay: Replay, *, last_position: bytes) -> Attachment:
        """Takes a topic, replays what the sidecar does not know of its log, and returns when checks are answered.

        Only when nothing that was admitted before is being written any more, and what is in the log is durable.
        `last_position` is that of the log's last entry (empty: there is none), as the log says it: a log that has lost
        its end is found out by it. Raises REPLAY_GAP, INVALID_NAME, and why the sidecar cannot be reached or does not
        take the topic; then nothing is attached.
        """
        stub: Any = self._connected().stream_stream(ATTACH, wire.AttachRequest.SerializeToString)
        attachment = Attachment(stub(wait_for_ready=False), self._address)
        try:
            after = await attachment.begin(topic_name(topic))
            entries: list[Entry] = []
            async for entry in replay(after):
                entries.append(entry)
                if len(entries) == REPLAY_ROWS:
                    await attachment.replay(entries)
                    entries = []
            if entries:
                await attachment.replay(entries)
            await attachment.end_replay(last_position)
        except BaseException:
            attachment.close()
            raise
        return attachment

    async def producer(self, topic: str, producer_name: str) -> ProducerNumbers | None:
        """A producer's numbers in an attached topic; None if its name never came. Raises NOT_ATTACHED, …"""
        stub = DedupeServiceStub(self._connected())
        request = dedupe_pb2.DedupeServiceGetProducerRequest(topic=topic_name(topic), producer_name=producer_name)
        try:
            found = await call(self._address, self._connected(), stub.GetProducer, request)
        except SeqdedupeError as e:
            if e.reason == "PRODUCER_NOT_FOUND":
                return None
            raise
        return ProducerNumbers(found.pushed, found.persisted)
