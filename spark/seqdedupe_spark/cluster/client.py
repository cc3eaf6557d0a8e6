"""What planning asks of a sidecar, asked of the brokers: by looking at a few entries of each topic."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from seqdedupe.client.blocking.loop import run
from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.errors import DamagedError, NotFoundError
from seqdedupe.log.pulsar.finder import Finder
from seqdedupe.message_id import Position
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.cluster.connection import Connection, connected
from seqdedupe_spark.cluster.settings import Cluster

AT_ONCE = 16
"""So many topics are looked at at once."""

T = TypeVar("T")


class ClusterClient:
    """Has those methods of `seqdedupe.client.blocking.Client` that planning calls. Each connects for itself.

    Where a topic ends, anybody who reads it can say: what is valid there stays valid. More may follow at any moment, of
    which its owner knows and a reader does not.
    """

    def __init__(
        self, cluster: Cluster, namespaces: Collection[str], is_wanted: Callable[[str], bool], *, skips: bool
    ) -> None:
        """Lists those topics of the namespaces that are wanted, by their full names. One that no sidecar writes is
        skipped, or an error."""
        self.admin = self
        self._cluster = cluster
        self._namespaces = namespaces
        self._is_wanted = is_wanted
        self._skips = skips

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def topics(self) -> list[admin_pb2.Topic]:
        """Those that are wanted. Raises INVALID_OPTION."""

        async def all_of(connection: Connection) -> list[admin_pb2.Topic]:
            places = asyncio.Semaphore(AT_ONCE)

            async def one(topic: str) -> admin_pb2.Topic | None:
                async with places:
                    # It may have been deleted meanwhile.
                    with suppress(NotFoundError):
                        if not self._skips or await connection.is_log(topic):
                            return await _listed(connection, topic)
                return None

            names = [
                name
                for namespace in self._namespaces
                for name in await connection.admin.topics(namespace)
                if self._is_wanted(name)
            ]
            return [topic for topic in await asyncio.gather(*map(one, names)) if topic is not None]

        return self._call(all_of)

    def ends(self, topic: str) -> TopicEnds:
        """Raises NotFoundError."""
        return self._find(topic, _ends)

    def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        async def locate(finder: Finder) -> Located:
            return Located(finder.incarnation, await finder.first_at(publish_time_ms))

        return self._find(topic, locate)

    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        async def locate(finder: Finder) -> Located:
            before, _ = await finder.around(from_index)
            after = await finder.known_at(finder.ledgers.after(before.at + 1, size_bytes))
            return Located(finder.incarnation, max(after.standing.next_index, from_index + 1))

        return self._find(topic, locate)

    def position_at(self, topic: str, index: int) -> Position:
        """Raises PositionError, NotFoundError."""
        return self._find(topic, lambda finder: finder.position_of(index))

    def _find(self, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
        async def found(connection: Connection) -> T:
            return await _looked(connection, topic, find)

        return self._call(found)

    def _call(self, call: Callable[[Connection], Awaitable[T]]) -> T:
        async def connect_and_call() -> T:
            async with connected(self._cluster) as connection:
                return await call(connection)

        return run(connect_and_call)


async def _listed(connection: Connection, topic: str) -> admin_pb2.Topic:
    async def look(finder: Finder) -> admin_pb2.Topic:
        first_index, last = await _ends(finder)
        return admin_pb2.Topic(
            name=topic,
            state=admin_pb2.TOPIC_STATE_SERVING,
            first_index=first_index,
            last=last.to_proto(),
            log_bytes=finder.ledgers.size_bytes,
        )

    return await _looked(connection, topic, look)


async def _ends(finder: Finder) -> TopicEnds:
    end, beginning = await finder.end(), await finder.beginning()
    last = end.last or Position.before(finder.incarnation, end.standing.next_index)
    return TopicEnds(beginning.standing.next_index, last)


async def _looked(connection: Connection, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
    """What is found in a topic as it is now. Raises TOPIC_NOT_FOUND."""
    incarnation = await connection.incarnation(topic)
    finder = await connection.finder(topic, incarnation)
    while True:
        try:
            return await find(finder)
        except DamagedError:
            # What was trimmed meanwhile is no damage.
            before, finder = finder, await connection.finder(topic, incarnation)
            if before.ledgers.first_id == finder.ledgers.first_id:
                raise
