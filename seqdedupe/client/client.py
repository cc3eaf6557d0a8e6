"""The entry point: a client of one sidecar, or of several in front of one log."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import grpc.aio

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client.connection import ClientCalls, typed_errors
from seqdedupe.client.credentials import Credentials
from seqdedupe.client.cursor import Cursor, SidecarCursor
from seqdedupe.client.producer import Producer
from seqdedupe.client.producer_session import DELIVERY_TIMEOUT_SECONDS, ProducerConfig
from seqdedupe.client.publisher import Publisher
from seqdedupe.client.reader import PartitionedReader, PartitionedStart, PartitionEnds, Reader, Start
from seqdedupe.client.route import Addresses, OnWaiting, Sidecars
from seqdedupe.client.stream import SharedConnections
from seqdedupe.errors import AccessDeniedError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_INDEX
from seqdedupe.message_id import MessageId, Position, checked_index
from seqdedupe.names import partition_name, topic_name
from seqdedupe.v1 import batch_pb2, read_pb2

if TYPE_CHECKING:
    from seqdedupe.client.admin import Admin

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""An encoded HealthCheckResponse with `status` (field 1) SERVING (1)."""

_POLL_SECONDS = 0.05

_MAX_INT64 = 2**63 - 1
"""No index in a topic exceeds this number, the largest that a request can contain."""


class TopicEnds(NamedTuple):
    """The two ends of a topic: the index of the first message that is still stored, and the position of the last
    message ever stored."""

    first_index: int
    last: Position


class Located(NamedTuple):
    """An index in an incarnation of its topic."""

    incarnation: int
    index: int  # type: ignore[assignment]  # a field: the method of tuples is not needed here


class Client:
    """Client of the sidecar at `host:port` or `unix:path`. Use it as `async with Client(address) as client`.

    For several sidecars in front of one log, give the addresses separated by commas, or in a list. For each topic, the
    client first asks the sidecar that most likely owns the topic, and follows redirects to the owner. If a sidecar does
    not answer, the client tries the next sidecar. A sidecar may redirect the client only to addresses in the list, and
    to hosts in a domain of the list (`*.example.org`).

    The client presents its `credentials` to all sidecars. By default the credentials come from the environment, see
    `Credentials`.

    Raises INVALID_ADDRESS for text that is not an address, and INVALID_CREDENTIALS.

    The client's producers share one connection per sidecar, and the producers of one topic share a stream. The number
    of producer names is not limited. Each reader opens a separate connection at its first read. All other calls share
    one connection per sidecar. A client belongs to one event loop.
    """

    def __init__(self, address: Addresses = DEFAULT_ADDRESS, credentials: Credentials | None = None) -> None:
        credentials = Credentials.from_environment() if credentials is None else credentials
        self._sidecars = Sidecars.parse(address, credentials)
        self.address: str = address if isinstance(address, str) else str(self._sidecars)
        """The address as given."""
        self._connections = SharedConnections(self._sidecars)
        self._calls = ClientCalls(self._sidecars)

    @cached_property
    def admin(self) -> "Admin":
        """The calls for operators."""
        # Imported here: producers and readers do not need it.
        from seqdedupe.client.admin import Admin

        return Admin(self._calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the client's own calls. Close producers and readers separately."""
        await self._calls.close()

    def producer(
        self,
        topic: str,
        name: str,
        config: ProducerConfig = ProducerConfig(),  # noqa: B008
        *,
        on_waiting: OnWaiting | None = None,
    ) -> Producer:
        """Return a producer. Start it with `async with`: see `Producer`."""
        return Producer(self._connections, topic, name, config, on_waiting)

    def publisher(
        self,
        topic: str,
        *,
        on_waiting: OnWaiting | None = None,
        delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS,
    ) -> Publisher:
        """Return a publisher to a topic of deduplication IDs. Start it with `async with`: see `Publisher`."""
        return Publisher(self._sidecars, topic, on_waiting, delivery_timeout_seconds, lambda: self.admin.topic(topic))

    def reader(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        follow: bool = False,
        stop_index: int | None = None,
        skip_damaged: bool = False,
        on_waiting: OnWaiting | None = None,
        cursor: Cursor | None = None,
    ) -> Reader:
        """Return a reader, see `Reader`."""
        return Reader(
            self._sidecars,
            topic,
            start,
            follow=follow,
            stop_index=stop_index,
            skip_damaged=skip_damaged,
            on_waiting=on_waiting,
            cursor=cursor,
        )

    def partitioned_reader(
        self,
        topic: str,
        start: PartitionedStart = "earliest",
        *,
        follow: bool = False,
        stop_indexes: Sequence[int] | None = None,
        skip_damaged: bool = False,
        on_waiting: OnWaiting | None = None,
    ) -> PartitionedReader:
        """Return a reader of all partitions of a topic, see `PartitionedReader`. `stop_indexes` contains the
        `stop_index` of each partition, as for a `Reader`."""
        whole = topic_name(topic)

        async def ends() -> list[PartitionEnds]:
            count = await self.partitions(whole)
            if not count:
                raise error("INVALID_REQUEST", f"{whole} has no partitions", hint="Read the topic with a plain reader.")
            if stop_indexes is not None and len(stop_indexes) != count:
                given = counted(len(stop_indexes), "index", "indexes")
                what = f"stop_indexes has {given}, and {whole} has {counted(count, 'partition')}"
                raise error("INVALID_REQUEST", what, hint="Give one index for each partition.")
            found = [await self.ends(partition_name(whole, k)) for k in range(count)]
            return [PartitionEnds(Position.before(one.last.incarnation, one.first_index), one.last) for one in found]

        def part(k: int, start: Start) -> Reader:
            name = partition_name(whole, k)
            return Reader(
                self._sidecars,
                name,
                start,
                follow=follow,
                stop_index=None if stop_indexes is None else stop_indexes[k],
                skip_damaged=skip_damaged,
                on_waiting=on_waiting,
                partition=k,
            )

        return PartitionedReader(whole, start, ends, part)

    def cursor(self, topic: str, name: str) -> SidecarCursor:
        """Return a named cursor of the topic, which the sidecar stores (`Cursor`, docs/guides/cursors.md). A topic can
        have at most 32 cursors."""
        return SidecarCursor(self._calls, topic, name)

    async def ends(self, topic: str) -> TopicEnds:
        """Return the topic's current ends. Raises NotFoundError. Raises RECOVERING if the end of the topic is still
        unknown after 30 seconds."""
        request = read_pb2.GetLastMessageIdRequest(topic=topic_name(topic))
        answer = await self._calls.call(lambda sidecar: sidecar.read.GetLastMessageId, request)
        return TopicEnds(answer.first_index, Position.from_proto(answer.last))

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions that a reader reads; 0 if the topic is not partitioned. Raises NotFoundError
        and AccessDeniedError. If the caller has no right to the topic, AccessDeniedError names the right to read."""
        try:
            return (await self.admin.topic(topic)).partitions
        except AccessDeniedError as e:
            if e.reason == "NOT_ALLOWED":
                # Several rights allow the call. A reader needs the one that this call names.
                await self.ends(topic)
            raise

    async def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        """Return the index of the first message published at or after a time. If there is no such message, return the
        end of the topic. Raises NotFoundError."""
        time_ms = min(max(publish_time_ms, -_MAX_INT64), _MAX_INT64)
        return await self._locate(read_pb2.LocateRequest(topic=topic_name(topic), publish_time_ms=time_ms))

    async def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        """Return the index at which the messages from `from_index` on reach a stored size of about `size_bytes`. The
        returned index is above `from_index`, unless `from_index` is the end of the topic. Raises NotFoundError,
        PositionError, InvalidRequestError."""
        budget = read_pb2.ByteBudget(from_index=checked_index(from_index), bytes=min(size_bytes, _MAX_INT64))
        return await self._locate(read_pb2.LocateRequest(topic=topic_name(topic), byte_budget=budget))

    async def position_at(self, topic: str, index: int) -> Position:
        """Return the complete position of the message with this index.

        Raises NotFoundError; PositionError if the message is trimmed or does not exist yet; InvalidRequestError for an
        invalid index; DamagedError.
        """
        start, stop_index = read_pb2.ReadStart(index=checked_index(index)), min(index + 1, MAX_INDEX)
        request = read_pb2.ReadRequest(topic=topic_name(topic), start=start, stop_index=stop_index)
        answer = await self._calls.call(lambda sidecar: sidecar.read.Read, request)
        for record in answer.records:
            if record.HasField("batch"):
                return _position_of_first(record)
        raise error("POSITION_AFTER_END", f"{request.topic} has no message with index {index}", index=index)

    async def _locate(self, request: read_pb2.LocateRequest) -> Located:
        answer = await self._calls.call(lambda sidecar: sidecar.read.Locate, request)
        return Located(answer.incarnation, answer.index)

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Wait until at least one of the client's sidecars reports that it is serving. Raises UnavailableError if no
        sidecar serves within `timeout_seconds`."""
        why = "it says NOT_SERVING"
        try:
            async with asyncio.timeout(timeout_seconds):
                for address in itertools.cycle(self._sidecars.addresses):
                    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                    check = self._calls.connection(address).channel.unary_unary(_HEALTH_CHECK)
                    try:
                        with typed_errors(address):
                            if await check(b"", timeout=timeout_seconds) == _SERVING:
                                return
                        why = "it says NOT_SERVING"
                    except UnavailableError as e:
                        why = e.message
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as e:
            message = f"the sidecar at {self.address} is not ready after {timeout_seconds} seconds: {why}"
            raise error("UNREACHABLE", message) from e


def _position_of_first(record: batch_pb2.Record) -> Position:
    """Return the position of a record's first row."""
    if record.run_rows:
        message_id = MessageId(record.run_ledger_ids[0], record.run_entry_ids[0], record.run_batch_indexes[0])
    else:
        message_id = MessageId.of(record.incarnation, record.base_index)
    return Position(record.incarnation, message_id, record.base_index, record.ownership)
