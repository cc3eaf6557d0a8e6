"""The way in: a client of a sidecar, or of several in front of one log."""

import asyncio
import itertools
from types import TracebackType
from typing import NamedTuple, Self

import grpc.aio

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client.admin import Admin
from seqdedupe.client.connection import ClientCalls, typed_errors
from seqdedupe.client.credentials import Credentials
from seqdedupe.client.cursor import Cursor, SidecarCursor
from seqdedupe.client.producer import Producer
from seqdedupe.client.producer_session import DELIVERY_TIMEOUT_SECONDS, ProducerConfig
from seqdedupe.client.publisher import Publisher
from seqdedupe.client.reader import PartitionedReader, PartitionedStart, PartitionEnds, Reader, Start
from seqdedupe.client.route import Addresses, OnWaiting, Sidecars
from seqdedupe.client.stream import SharedConnections
from seqdedupe.errors import UnavailableError, error
from seqdedupe.limits import MAX_INDEX
from seqdedupe.message_id import MessageId, Position, checked_index
from seqdedupe.names import partition_name, topic_name
from seqdedupe.v1 import batch_pb2, read_pb2

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""An encoded HealthCheckResponse with `status` (field 1) SERVING (1)."""

_POLL_SECONDS = 0.05

_MAX_INT64 = 2**63 - 1
"""More a request cannot say, and no topic has."""


class TopicEnds(NamedTuple):
    """What a topic holds: the index of the first message left, and the position of the last one there ever was."""

    first_index: int
    last: Position


class Located(NamedTuple):
    """An index, in an incarnation of its topic."""

    incarnation: int
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method nobody needs here


class Client:
    """A client of the sidecar at `host:port` or `unix:path`: `async with Client(address) as client`.

    Or of several in front of one log: their addresses separated by commas, or in a list. Each topic is looked for
    where it is likeliest to be, and followed to where it is; a sidecar that is gone is left for another. One of them
    may send this client to the others in the list, and to hosts in a domain that stands there too (`*.example.org`),
    to nobody else.

    All of them are shown its `credentials`; left out they are what the environment says, see `Credentials`.

    Raises INVALID_ADDRESS for text that is no address, INVALID_CREDENTIALS.

    Its producers share a connection to each sidecar, and those of one topic a stream; any number of names works. Each
    reader has a connection of its own, made when it is first read, and this object one to each sidecar for the other
    calls. It belongs to one event loop.
    """

    def __init__(self, address: Addresses = DEFAULT_ADDRESS, credentials: Credentials | None = None) -> None:
        credentials = Credentials.from_environment() if credentials is None else credentials
        self._sidecars = Sidecars.parse(address, credentials)
        self.address: str = address if isinstance(address, str) else str(self._sidecars)
        """As it was given."""
        self._connections = SharedConnections(self._sidecars)
        self._calls = ClientCalls(self._sidecars)
        self.admin: Admin = Admin(self._calls)
        """The calls for operators."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Lets go of this object's connections. Producers and readers are closed by themselves."""
        await self._calls.close()

    def producer(
        self,
        topic: str,
        name: str,
        config: ProducerConfig = ProducerConfig(),  # noqa: B008
        *,
        on_waiting: OnWaiting | None = None,
    ) -> Producer:
        """A producer, to be entered, see `Producer`."""
        return Producer(self._connections, topic, name, config, on_waiting)

    def publisher(
        self,
        topic: str,
        *,
        on_waiting: OnWaiting | None = None,
        delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS,
    ) -> Publisher:
        """A publisher to a topic of deduplication IDs, to be entered, see `Publisher`."""
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
        """A reader, see `Reader`."""
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
        skip_damaged: bool = False,
        on_waiting: OnWaiting | None = None,
    ) -> PartitionedReader:
        """A reader of all partitions of a topic, see `PartitionedReader`."""
        whole = topic_name(topic)

        async def ends() -> list[PartitionEnds]:
            count = (await self.admin.topic(whole)).partitions
            if not count:
                raise error("INVALID_REQUEST", f"{whole} has no partitions", hint="Read it with a plain reader.")
            found = [await self.ends(partition_name(whole, k)) for k in range(count)]
            return [PartitionEnds(Position.before(one.last.incarnation, one.first_index), one.last) for one in found]

        def part(k: int, start: Start) -> Reader:
            name = partition_name(whole, k)
            return Reader(
                self._sidecars,
                name,
                start,
                follow=follow,
                skip_damaged=skip_damaged,
                on_waiting=on_waiting,
                partition=k,
            )

        return PartitionedReader(whole, start, ends, part)

    def cursor(self, topic: str, name: str) -> SidecarCursor:
        """A named cursor of the topic, kept by the sidecar (`Cursor`, docs/guides/cursors.md). At most 32 a topic."""
        return SidecarCursor(self._calls, topic, name)

    async def ends(self, topic: str) -> TopicEnds:
        """What the topic holds now. Raises NotFoundError; RECOVERING if its end is still not known after 30 seconds."""
        request = read_pb2.GetLastMessageIdRequest(topic=topic_name(topic))
        answer = await self._calls.call(lambda sidecar: sidecar.read.GetLastMessageId, request)
        return TopicEnds(answer.first_index, Position.from_proto(answer.last))

    async def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        """The first message published at or after a time; the end if there is none. Raises NotFoundError."""
        time_ms = min(max(publish_time_ms, -_MAX_INT64), _MAX_INT64)
        return await self._locate(read_pb2.LocateRequest(topic=topic_name(topic), publish_time_ms=time_ms))

    async def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        """Where about so many bytes of the stored form end, at least a message after `from_index` unless that is the
        end. Raises NotFoundError, PositionError, InvalidRequestError."""
        budget = read_pb2.ByteBudget(from_index=checked_index(from_index), bytes=min(size_bytes, _MAX_INT64))
        return await self._locate(read_pb2.LocateRequest(topic=topic_name(topic), byte_budget=budget))

    async def position_at(self, topic: str, index: int) -> Position:
        """The position of the message with this index: all that says which one it is.

        Raises NotFoundError, PositionError if the message is trimmed or not there yet, InvalidRequestError for what is
        no index, DamagedError.
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
        """Until the sidecar, or one of them, says that it serves. Raises UnavailableError if none does in time."""
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
    """That of a record's first row."""
    if record.run_rows:
        message_id = MessageId(record.run_ledger_ids[0], record.run_entry_ids[0], record.run_batch_indexes[0])
    else:
        message_id = MessageId.of(record.incarnation, record.base_index)
    return Position(record.incarnation, message_id, record.base_index, record.ownership)
