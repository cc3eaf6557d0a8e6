"""The client for threads, and its calls for operators."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from seqdedupe.client import admin as _admin
from seqdedupe.client import client as _client
from seqdedupe.client.blocking.cursor import AnyCursor, Cursor
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.blocking.producer import Producer
from seqdedupe.client.blocking.publisher import Publisher
from seqdedupe.client.blocking.reader import PartitionedReader, Reader
from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.client.credentials import Credentials
from seqdedupe.client.reader import PartitionedStart, Start
from seqdedupe.client.route import Addresses, OnWaiting, Sidecars
from seqdedupe.client.session import DELIVERY_TIMEOUT_SECONDS, ProducerConfig
from seqdedupe.client.stream import Connections
from seqdedupe.message_id import Position
from seqdedupe.v1 import admin_pb2

T = TypeVar("T")


class Admin:
    """As `seqdedupe.client.Admin`, with calls that block."""

    def __init__(self, client: _client.Client) -> None:
        self._client = client

    def _run(self, call: Callable[[_admin.Admin], Coroutine[Any, Any, T]]) -> T:
        return run(lambda: call(self._client.admin))

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        entry_format: str = "",
        schema: str = "",
        deduplication_mode: str = "",
        deduplication_route: str = "",
        deduplication_enabled: bool | None = None,
        policy: admin_pb2.TopicPolicy | None = None,
    ) -> admin_pb2.Topic:
        return self._run(
            lambda admin: admin.create_topic(
                topic,
                partitions=partitions,
                entry_format=entry_format,
                schema=schema,
                deduplication_mode=deduplication_mode,
                deduplication_route=deduplication_route,
                deduplication_enabled=deduplication_enabled,
                policy=policy,
            )
        )

    def delete_topic(self, topic: str) -> None:
        self._run(lambda admin: admin.delete_topic(topic))

    def topic(self, topic: str) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.topic(topic))

    def topics(self) -> list[admin_pb2.Topic]:
        return self._run(lambda admin: admin.topics())

    def policy(self, name: str) -> _admin.PolicyState:
        return self._run(lambda admin: admin.policy(name))

    def set_policy(self, name: str, policy: admin_pb2.TopicPolicy) -> _admin.PolicyState:
        return self._run(lambda admin: admin.set_policy(name, policy))

    def remove_policy(self, name: str, *values: str) -> _admin.PolicyState:
        return self._run(lambda admin: admin.remove_policy(name, *values))

    def producers(self, topic: str) -> list[admin_pb2.Producer]:
        return self._run(lambda admin: admin.producers(topic))

    def producer(self, topic: str, name: str) -> admin_pb2.Producer:
        return self._run(lambda admin: admin.producer(topic, name))

    def message_state(
        self, topic: str, producer_name: str = "", sequence_id: int = 0, *, deduplication_id: bytes | str = b""
    ) -> admin_pb2.GetMessageStateResponse:
        return self._run(
            lambda admin: admin.message_state(topic, producer_name, sequence_id, deduplication_id=deduplication_id)
        )

    def in_flight(self, topic: str, *, longer_than_ms: int = 0) -> admin_pb2.ListInFlightResponse:
        return self._run(lambda admin: admin.in_flight(topic, longer_than_ms=longer_than_ms))

    def reset_producer(self, topic: str, name: str, persisted: int) -> admin_pb2.ResetProducerResponse:
        return self._run(lambda admin: admin.reset_producer(topic, name, persisted))

    def cursors(self, topic: str) -> list[admin_pb2.TopicCursor]:
        return self._run(lambda admin: admin.cursors(topic))

    def hold_cursor(self, topic: str, name: str, retention_in_mb: int) -> None:
        self._run(lambda admin: admin.hold_cursor(topic, name, retention_in_mb))

    def delete_cursor(self, topic: str, name: str) -> None:
        self._run(lambda admin: admin.delete_cursor(topic, name))

    def snapshot(self, topic: str) -> Position:
        return self._run(lambda admin: admin.snapshot(topic))

    def export_watermarks(self, topic: str, path: Path) -> int:
        return self._run(lambda admin: admin.export_watermarks(topic, path))

    def import_watermarks(self, topic: str, path: Path) -> int:
        return self._run(lambda admin: admin.import_watermarks(topic, path))

    def import_window(self, topic: str, path: Path) -> int:
        return self._run(lambda admin: admin.import_window(topic, path))

    def export_snapshot(self, topic: str, path: Path) -> admin_pb2.SnapshotHead:
        return self._run(lambda admin: admin.export_snapshot(topic, path))

    def import_snapshot(self, topic: str, path: Path) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.import_snapshot(topic, path))

    def rebuild_topic(self, topic: str) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.rebuild_topic(topic))

    def sidecars(self) -> list[admin_pb2.ClusterSidecar]:
        return self._run(lambda admin: admin.sidecars())

    def forget_sidecar(self, name: str) -> list[str]:
        return self._run(lambda admin: admin.forget_sidecar(name))

    def move_topic(self, topic: str, to: str = "") -> str:
        return self._run(lambda admin: admin.move_topic(topic, to))

    def statistics(
        self,
        *,
        search: str = "",
        order: "admin_pb2.StatisticsOrder.ValueType" = admin_pb2.STATISTICS_ORDER_UNSPECIFIED,
        offset: int = 0,
        limit: int = 0,
    ) -> admin_pb2.GetStatisticsResponse:
        return self._run(lambda admin: admin.statistics(search=search, order=order, offset=offset, limit=limit))

    def backup(
        self, name: str, told: Callable[[list[admin_pb2.BackupResponse]], None] = lambda so_far: None
    ) -> list[admin_pb2.BackupResponse]:
        return self._run(lambda admin: admin.backup(name, told))

    def version(self) -> admin_pb2.GetVersionResponse:
        return self._run(lambda admin: admin.version())


class Client:
    """As `seqdedupe.client.Client`, with calls that block. Threads may share it."""

    def __init__(self, address: Addresses = DEFAULT_ADDRESS, credentials: Credentials | None = None) -> None:
        credentials = Credentials.from_environment() if credentials is None else credentials
        self._sidecars = Sidecars.parse(address, credentials)
        self._connections = Connections(self._sidecars)
        self._client = _client.Client(address, credentials)
        self.address = self._client.address
        """As it was given."""
        self.admin = Admin(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def on_loop(self) -> _client.Client:
        """The client on the event loop that does this one's work: for coroutines that `blocking.loop.run` begins."""
        return self._client

    def close(self) -> None:
        """Lets go of this object's connections. Producers and readers are closed by themselves."""
        run(self._client.close)

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
        return Publisher(self._client, topic, on_waiting, delivery_timeout_seconds)

    def reader(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        follow: bool = False,
        stop_index: int | None = None,
        skip_damaged: bool = False,
        on_waiting: OnWaiting | None = None,
        cursor: AnyCursor | None = None,
    ) -> Reader:
        """A reader, see `Reader`."""
        return Reader(self._sidecars, topic, start, follow, stop_index, skip_damaged, on_waiting, cursor)

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
        reader = self._client.partitioned_reader(
            topic, start, follow=follow, skip_damaged=skip_damaged, on_waiting=on_waiting
        )
        return PartitionedReader(reader)

    def cursor(self, topic: str, name: str) -> Cursor:
        """A named cursor of the topic, for readers and pipes: see `seqdedupe.client.Client.cursor`."""
        return Cursor(self._client.cursor(topic, name))

    def ends(self, topic: str) -> TopicEnds:
        """What the topic holds now. Raises NotFoundError."""
        return self._call(lambda client: client.ends(topic))

    def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        """The first message published at or after a time, see `seqdedupe.client.Client.locate_time`."""
        return self._call(lambda client: client.locate_time(topic, publish_time_ms))

    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        """Where about so many bytes end, see `seqdedupe.client.Client.locate_bytes`."""
        return self._call(lambda client: client.locate_bytes(topic, from_index, size_bytes))

    def position_at(self, topic: str, index: int) -> Position:
        """The position of the message with this index, see `seqdedupe.client.Client.position_at`."""
        return self._call(lambda client: client.position_at(topic, index))

    def _call(self, call: Callable[[_client.Client], Coroutine[Any, Any, T]]) -> T:
        return run(lambda: call(self._client))

    def wait_ready(self, timeout_seconds: float) -> None:
        """Until the sidecar, or one of them, says that it serves. Raises UnavailableError if none does in time."""
        run(lambda: self._client.wait_ready(timeout_seconds))
