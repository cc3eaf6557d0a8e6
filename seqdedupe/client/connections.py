"""What the producers of a client share: a connection to each sidecar, and over it a stream for each topic."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from seqdedupe.address import SidecarAddress
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.client.stream import PublishStream
from seqdedupe.errors import UnavailableError

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "OUTCOME_UNKNOWN"}
"""With these a stream ends when its connection does, or when nothing comes over it any more."""

_Place = tuple[asyncio.AbstractEventLoop, SidecarAddress]


@dataclass(slots=True, eq=False)
class _Shared:
    """A connection, and its streams by topic."""

    channel: grpc.aio.Channel
    streams: dict[str, PublishStream] = field(default_factory=dict)
    users: int = 0


class Connections:
    """Made when a producer needs them, and closed when none does any more.

    Those who come after a connection was lost get a new one, which starts afresh.
    """

    def __init__(self, sidecars: Sidecars) -> None:
        self.sidecars = sidecars
        self._shared: dict[_Place, _Shared] = {}

    @asynccontextmanager
    async def stream(self, address: SidecarAddress, topic: str) -> AsyncIterator[PublishStream]:
        """The stream to this topic at this sidecar, for as long as the block lasts."""
        place = asyncio.get_running_loop(), address
        shared = self._shared.get(place)
        if shared is None:
            shared = self._shared[place] = _Shared(self.sidecars.new_channel(address))
        shared.users += 1
        try:
            stream = shared.streams.get(topic)
            if stream is None or stream.has_ended:
                stream = shared.streams[topic] = PublishStream(shared.channel, address, topic)
            stream.users += 1
            try:
                yield stream
            except UnavailableError as e:
                if stream.has_ended and e.reason in _CONNECTION_IS_LOST:
                    self._forget(place, shared)
                raise
            finally:
                stream.users -= 1
                if not stream.users:
                    if shared.streams.get(topic) is stream:
                        del shared.streams[topic]
                    await stream.close()
        finally:
            shared.users -= 1
            if not shared.users:
                self._forget(place, shared)
                await shared.channel.close()

    def _forget(self, place: _Place, shared: _Shared) -> None:
        if self._shared.get(place) is shared:
            del self._shared[place]
