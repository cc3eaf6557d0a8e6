"""What the producers of a client share: a connection to each sidecar, and over it a stream for each topic.

Sessions are opened over a second connection, which ends when nothing was called over it for some seconds. Proxies limit
the streams of a connection, and publish streams may have taken all of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from seqdedupe.address import SidecarAddress
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.client.stream import Link, PublishStream
from seqdedupe.errors import UnavailableError

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN"}
"""With these a stream ends when its connection does, when nothing comes over it any more, or when something on the way
has ended it: another connection may lead past that."""

_Place = tuple[asyncio.AbstractEventLoop, SidecarAddress]


@dataclass(slots=True, eq=False)
class _Shared:
    """Two connections to a sidecar, and the streams by topic."""

    first: Link
    second: Link
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
            first, second = (Link(self.sidecars.new_channel(address, is_brief=brief)) for brief in (False, True))
            shared = self._shared[place] = _Shared(first, second)
        shared.users += 1
        try:
            stream = shared.streams.get(topic)
            if stream is None or stream.has_ended:
                stream = shared.streams[topic] = PublishStream(shared.first, shared.second, address, topic)
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
                await shared.first.channel.close()
                await shared.second.channel.close()

    def _forget(self, place: _Place, shared: _Shared) -> None:
        if self._shared.get(place) is shared:
            del self._shared[place]
