"""Answers the questions of planning from the brokers, instead of asking a sidecar. It reads a few entries of each
topic."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from seqdedupe.client.blocking.loop import run
from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.errors import DamagedError, NotFoundError, error
from seqdedupe.log.pulsar import wholes
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.finder import Finder
from seqdedupe.log.pulsar.wholes import Life, Whole
from seqdedupe.message_id import MessageId, Position
from seqdedupe.names import number_of, whole_of
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import stock
from seqdedupe_spark.cluster.broker_connection import BrokerConnection, connected
from seqdedupe_spark.cluster.stock_reader import last_readable
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.stock import STOCK, StockEnds

AT_ONCE = 16
"""The number of topics that are examined at the same time."""

T = TypeVar("T")


class ClusterClient:
    """Has the methods of `seqdedupe.client.blocking.Client` that planning uses. Each call opens a separate connection.

    Every reader can determine where a topic ends, because a valid entry stays valid. More entries may follow at any
    moment. Only the owner of the topic knows them.
    """

    def __init__(
        self,
        cluster: PulsarCluster,
        namespaces: Collection[str],
        is_wanted: Callable[[str], bool],
        *,
        skips: bool,
        may_lose: bool,
    ) -> None:
        """Use the topics of the namespaces for which `is_wanted` returns true, given their full names.

        A topic that no sidecar writes is skipped or read. A job reads such a topic with its subscription. Other callers
        read it only with `may_lose`.
        """
        self.admin = self
        self._cluster = cluster
        self._namespaces = namespaces
        self._is_wanted = is_wanted
        self._skips = skips
        self._may_lose = may_lose
        self._kept: dict[str, Position] = {}
        """By topic: the position from which the subscription keeps messages, as this client has set it."""
        self._readable: dict[str, tuple[MessageId, MessageId | None]] = {}
        """By the last entry of a topic: the last entry that a reader receives."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def topics(self) -> list[admin_pb2.Topic]:
        """Return the wanted topics. Raises INVALID_OPTION."""

        async def all_of(connection: BrokerConnection) -> list[admin_pb2.Topic]:
            places = asyncio.Semaphore(AT_ONCE)
            names, found = await self._names(connection.admin)
            due = {name: incarnation for whole in found for incarnation, name in whole.topics.items()}

            async def one(topic: str) -> admin_pb2.Topic | None:
                async with places:
                    # The topic may have been deleted meanwhile.
                    with suppress(NotFoundError):
                        incarnation = await connection.incarnation(topic)
                        if due.get(topic, incarnation) != incarnation:
                            # Pulsar has recreated the topic automatically: its earlier messages are lost.
                            return None
                        if incarnation != STOCK:
                            return await _listed(connection, topic)
                        if not self._skips:
                            return await self._stock(connection, topic)
                return None

            listed = [topic for topic in await asyncio.gather(*map(one, names)) if topic is not None]
            return listed + [admin_pb2.Topic(name=whole.topic, partitions=whole.partitions) for whole in found]

        return self._call(all_of)

    def ends(self, topic: str) -> TopicEnds | StockEnds:
        """Return the ends of the topic. Raises NotFoundError."""

        async def find(connection: BrokerConnection) -> TopicEnds | StockEnds:
            if await connection.is_log(topic):
                return await _looked(connection, topic, _ends)
            return await self._stock_ends(connection, topic)

        return self._call(find)

    def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        async def locate(finder: Finder) -> Located:
            return Located(finder.incarnation, await finder.first_at(publish_time_ms))

        async def find(connection: BrokerConnection) -> Located:
            if await connection.is_log(topic):
                return await _looked(connection, topic, locate)
            place = stock.before(await connection.admin.first_since(topic, publish_time_ms))
            last = (await self._stock_ends(connection, topic)).last
            return Located(STOCK, min(place.index, last.index) + 1)

        return self._call(find)

    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        async def locate(finder: Finder) -> Located:
            before, _ = await finder.around(from_index)
            after = await finder.known_at(finder.ledgers.after(before.at + 1, size_bytes))
            return Located(finder.incarnation, max(after.standing.next_index, from_index + 1))

        return self._find(topic, locate)

    def position_at(self, topic: str, index: int) -> Position:
        """Return the position at the index. Raises PositionError, NotFoundError."""
        return self._find(topic, lambda finder: finder.position_of(index))

    def subscribe(self, topic: str) -> None:
        """Create the job's subscription of a topic that no sidecar writes. From then on Pulsar keeps all messages that
        are still stored."""
        self._call(lambda connection: connection.admin.create_subscription(topic, self._cluster.subscription))

    def keep_from(self, topic: str, position: Position) -> None:
        """Move the subscription. Pulsar keeps the entry before the position, and all later entries."""
        entry = stock.entry_before(position)
        if entry.entry_id < 0 or self._kept.get(topic) == position:
            return
        # If the subscription was removed, the next look-up creates it again.
        with suppress(NotFoundError):
            self._call(lambda connection: connection.admin.keep_from(topic, self._cluster.subscription, entry))
            self._kept[topic] = position

    async def _names(self, admin: PulsarAdmin) -> tuple[list[str], list[Whole]]:
        """Return the wanted topics, and the partitioned topics that sidecars have created, with their partitions.

        A partitioned topic has no partitions while it is being created or deleted. Partitions that Pulsar has added are
        ignored.
        """
        names, found = list[str](), list[Whole]()
        for namespace in self._namespaces:
            wanted = [name for name in await admin.topics(namespace) if self._is_wanted(name)]
            of_wanted = {whole_of(name) for name in wanted}
            looked = {
                topic: await wholes.look_at(admin, topic)
                for topic in await admin.partitioned_topics(namespace)
                if topic in of_wanted or self._is_wanted(topic)
            }
            found += [whole for whole in looked.values() if whole is not None and whole.life is Life.MADE]
            for name in wanted:
                whole = looked.get(whole_of(name) or "")
                if whole is None or (whole.life is Life.MADE and number_of(name) < whole.partitions):
                    names.append(name)
        return names, found

    async def _stock(self, connection: BrokerConnection, topic: str) -> admin_pb2.Topic:
        if not self._cluster.subscription and not self._may_lose:
            raise error(
                "INVALID_OPTION",
                f"topic: no sidecar writes {topic}, and without a subscription Pulsar drops unread messages",
                hint="Read it with a reader job, which has a subscription, or set failOnDataLoss to false.",
            )
        size_bytes = (await connection.stored(topic)).ledgers.size_bytes
        return admin_pb2.Topic(name=topic, log_bytes=size_bytes)

    async def _stock_ends(self, connection: BrokerConnection, topic: str) -> StockEnds:
        found = await connection.stored(topic)
        ledgers = found.ledgers
        if not len(ledgers):
            return found
        last = ledgers.message_id(len(ledgers) - 1)
        if self._readable.get(topic, (None, None))[0] != last:
            self._readable[topic] = last, await last_readable(connection, topic, ledgers)
        readable = self._readable[topic][1]
        number = None if readable is None else ledgers.ordinal(readable)
        return replace(found, readable=0 if number is None else number + 1)

    def _find(self, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
        async def found(connection: BrokerConnection) -> T:
            return await _looked(connection, topic, find)

        return self._call(found)

    def _call(self, call: Callable[[BrokerConnection], Awaitable[T]]) -> T:
        async def connect_and_call() -> T:
            async with connected(self._cluster) as connection:
                return await call(connection)

        return run(connect_and_call)


async def _listed(connection: BrokerConnection, topic: str) -> admin_pb2.Topic:
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


async def _looked(connection: BrokerConnection, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
    """Return the result of `find` for a topic in its current state. Raises TOPIC_NOT_FOUND."""
    incarnation = await connection.incarnation(topic)
    finder = await connection.finder(topic, incarnation)
    while True:
        try:
            return await find(finder)
        except DamagedError:
            # Entries that were trimmed meanwhile are no damage.
            before, finder = finder, await connection.finder(topic, incarnation)
            if before.ledgers.first_id == finder.ledgers.first_id:
                raise
