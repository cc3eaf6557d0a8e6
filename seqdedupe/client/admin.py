"""The calls for operators: `Admin`. The types of topics and producers are messages of `admin.proto`.

The functions after `Admin` make the streaming calls. These functions export watermarks and snapshots of a topic to a
file, and import such files. They also distribute a window of deduplication IDs over the partitions of a topic, and make
backups.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import ClientCalls, SidecarConnection, call, check_not_forked, typed_errors
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.exports import (
    Watermark,
    known_in,
    parse_block,
    read_snapshot,
    read_watermarks,
    read_window,
    write_watermarks,
    writing_snapshot,
    writing_window,
)
from seqdedupe.figures import counted
from seqdedupe.message_id import Position
from seqdedupe.names import is_namespace, partition_name, partition_of, topic_name
from seqdedupe.topic_facts import ENTRY_FORMATS, is_routed_by_key
from seqdedupe.v1 import admin_pb2

T = TypeVar("T")

_LIST_SIDECARS = admin_pb2.ListSidecarsRequest()

MOVE_TIMEOUT_SECONDS = 24 * 3600.0
"""The time limit for moving a topic, which may have a large log."""

MODES = {
    "": admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED,
    "sequence-id": admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID,
    "deduplication-id": admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID,
}
"""Deduplication modes by name."""


ROUTES = {
    "": admin_pb2.DEDUPLICATION_ROUTE_UNSPECIFIED,
    "id": admin_pb2.DEDUPLICATION_ROUTE_ID,
    "key": admin_pb2.DEDUPLICATION_ROUTE_KEY,
}
"""Deduplication routes (what selects a message's partition) by name."""


class PolicyState(NamedTuple):
    """A policy of a topic or a namespace."""

    set: admin_pb2.TopicPolicy
    """The values set for this topic or namespace."""
    applied: admin_pb2.TopicPolicy
    """All values in force there, set or inherited."""


@contextmanager
def _making_a_request() -> Iterator[None]:
    """Raise INVALID_REQUEST if an argument's value does not fit into its field of the request."""
    try:
        yield
    except ValueError as e:
        raise error("INVALID_REQUEST", f"a request cannot say this: {e}") from e


def _state(answer: Any) -> PolicyState:
    return PolicyState(answer.policy, answer.applied)


class Admin:
    """The calls of `AdminService`.

    Each call waits while its topic recovers. The call raises UnavailableError if the recovery or the answer takes more
    than 30 seconds. With several sidecars, a call about one topic goes to the topic's owner, and any other call to one
    sidecar that answers.
    """

    def __init__(self, calls: ClientCalls) -> None:
        self._calls = calls

    async def create_topic(
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
        take_over: bool = False,
        watermarks: admin_pb2.StockWatermarks | None = None,
    ) -> admin_pb2.Topic:
        """Create a topic. Raises InvalidRequestError (TOPIC_EXISTS).

        - `partitions`: the number of partitions, which cannot be changed later; 0 creates a topic without partitions.
        - `entry_format`: for a log in a Pulsar cluster, `plain`, `packed` or `native`. Empty: the sidecar's default.
        - `schema`: for `plain` entries in a Pulsar cluster, the JSON text that `pulsar-admin schemas upload` accepts.
        - `deduplication_mode`: `sequence-id` (the default) or `deduplication-id`. The mode cannot be changed later.
        - `deduplication_route`: in a topic of deduplication IDs, what selects the partition: `id` (default), `key`.
        - `deduplication_enabled`: None inherits the setting.
        - `policy`: the policy of the topic, or of each partition. Unset values are inherited.
        - `take_over`: the topic exists in Pulsar, and becomes a topic of the sidecar. The call then takes no
          `partitions` and no policy, and also raises TOPIC_IN_USE and TOPIC_TERMINATED.
        - `watermarks`: with `take_over`, what `exports.read_stock` returns. The sidecar then reads only later entries.
          INVALID_REQUEST if they are not those of this topic, or their last entry is not stored any more.
        """
        if deduplication_mode not in MODES:
            raise error("INVALID_REQUEST", f"{deduplication_mode!r} is no mode: sequence-id and deduplication-id are")
        if deduplication_route not in ROUTES:
            raise error("INVALID_REQUEST", f"{deduplication_route!r} is not a deduplication route: use id or key")
        if entry_format not in ENTRY_FORMATS:
            raise error("INVALID_REQUEST", f"{entry_format!r} is not an entry format: use plain, packed or native")
        given = admin_pb2.TopicPolicy(deduplication_enabled=deduplication_enabled)
        given.MergeFrom(policy or admin_pb2.TopicPolicy())
        with _making_a_request():
            request = admin_pb2.CreateTopicRequest(
                topic=topic_name(topic),
                policy=given,
                partitions=partitions,
                entry_format=ENTRY_FORMATS[entry_format],
                schema=schema,
                deduplication_mode=MODES[deduplication_mode],
                deduplication_route=ROUTES[deduplication_route],
                take_over=take_over,
                watermarks=watermarks,
            )
        return (await self._calls.call(lambda sidecar: sidecar.admin.CreateTopic, request)).topic

    async def delete_topic(self, topic: str) -> None:
        """Delete the topic, its log and its producers permanently. Raises NotFoundError."""
        request = admin_pb2.DeleteTopicRequest(topic=topic_name(topic))
        await self._calls.call(lambda sidecar: sidecar.admin.DeleteTopic, request)

    async def topic(self, topic: str) -> admin_pb2.Topic:
        """Return the state of a topic. Raises NotFoundError."""
        request = admin_pb2.GetTopicRequest(topic=topic_name(topic))
        return (await self._calls.call(lambda sidecar: sidecar.admin.GetTopic, request)).topic

    async def topics(self) -> list[admin_pb2.Topic]:
        """Return one sidecar's list of all topics, sorted by name. Raises an error if the sidecar cannot list all."""

        async def all_pages(sidecar: SidecarConnection) -> list[admin_pb2.Topic]:
            topics: list[admin_pb2.Topic] = []
            request = admin_pb2.ListTopicsRequest()
            while True:
                page = await call(sidecar.address, sidecar.channel, sidecar.admin.ListTopics, request)
                topics += page.topics
                if not page.next:
                    return topics
                request.after = page.next

        return await self._calls.at("", all_pages, is_look=True)

    async def policy(self, name: str) -> PolicyState:
        """Return the policy of a topic, or of a namespace (`tenant/namespace`). Raises NotFoundError."""
        if is_namespace(name):
            of_namespace = admin_pb2.GetNamespacePolicyRequest(namespace=name)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.GetNamespacePolicy, of_namespace))
        request = admin_pb2.GetTopicPolicyRequest(topic=topic_name(name))
        return _state(await self._calls.call(lambda sidecar: sidecar.admin.GetTopicPolicy, request))

    async def set_policy(self, name: str, policy: admin_pb2.TopicPolicy) -> PolicyState:
        """Set these values for a topic or a namespace. Values that are unset in `policy` do not change. When the call
        returns, the new values are in force and durable.

        Raises InvalidRequestError, NotFoundError."""
        if is_namespace(name):
            of_namespace = admin_pb2.SetNamespacePolicyRequest(namespace=name, policy=policy)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.SetNamespacePolicy, of_namespace))
        request = admin_pb2.SetTopicPolicyRequest(topic=topic_name(name), policy=policy)
        topic = (await self._calls.call(lambda sidecar: sidecar.admin.SetTopicPolicy, request)).topic
        return PolicyState(topic.set_policy, topic.policy)

    async def remove_policy(self, name: str, *values: str) -> PolicyState:
        """Remove these values, or without `values` all values, from a topic's or namespace's policy. The topic or
        namespace then inherits them. Durability and errors are the same as for `set_policy`."""
        if is_namespace(name):
            with _making_a_request():
                of_namespace = admin_pb2.RemoveNamespacePolicyRequest(namespace=name, values=values)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.RemoveNamespacePolicy, of_namespace))
        with _making_a_request():
            request = admin_pb2.RemoveTopicPolicyRequest(topic=topic_name(name), values=values)
        topic = (await self._calls.call(lambda sidecar: sidecar.admin.RemoveTopicPolicy, request)).topic
        return PolicyState(topic.set_policy, topic.policy)

    async def producers(self, topic: str) -> list[admin_pb2.Producer]:
        """Return all producers of a topic, in the order of their first use. Raises NotFoundError."""
        name = topic_name(topic)

        async def all_pages(sidecar: SidecarConnection) -> list[admin_pb2.Producer]:
            producers: dict[str, admin_pb2.Producer] = {}
            request = admin_pb2.ListProducersRequest(topic=name)
            while True:
                page = await call(sidecar.address, sidecar.channel, sidecar.admin.ListProducers, request)
                producers |= {producer.name: producer for producer in page.producers}
                if not page.next_offset:
                    return list(producers.values())
                request.offset = page.next_offset

        return await self._calls.at(name, all_pages, is_look=True)

    async def producer(self, topic: str, name: str) -> admin_pb2.Producer:
        """Return the state of a producer. Raises NotFoundError."""
        with _making_a_request():
            request = admin_pb2.GetProducerRequest(topic=topic_name(topic), producer_name=name)
        return (await self._calls.call(lambda sidecar: sidecar.admin.GetProducer, request)).producer

    async def message_state(
        self, topic: str, producer_name: str = "", sequence_id: int = 0, *, deduplication_id: bytes | str = b""
    ) -> admin_pb2.GetMessageStateResponse:
        """Return the state of one message, identified by producer and sequence ID or by deduplication ID. Raises
        NotFoundError."""
        one = deduplication_id.encode() if isinstance(deduplication_id, str) else deduplication_id
        with _making_a_request():
            request = admin_pb2.GetMessageStateRequest(
                topic=topic_name(topic), producer_name=producer_name, sequence_id=sequence_id, deduplication_id=one
            )
        return await self._calls.call(lambda sidecar: sidecar.admin.GetMessageState, request)

    async def in_flight(self, topic: str, *, longer_than_ms: int = 0) -> admin_pb2.ListInFlightResponse:
        """Return the producers that have had messages in flight for at least `longer_than_ms`. The producer with the
        longest time comes first. Raises NotFoundError."""
        with _making_a_request():
            request = admin_pb2.ListInFlightRequest(topic=topic_name(topic), longer_than_ms=longer_than_ms)
        return await self._calls.call(lambda sidecar: sidecar.admin.ListInFlight, request)

    async def reset_producer(self, topic: str, name: str, persisted: int) -> admin_pb2.ResetProducerResponse:
        """Set a producer's highest persisted sequence ID to a lower ID (-1: none). When the call returns, the change is
        durable.

        The producer's sessions are fenced, and the topic accepts messages above that ID as new. Raises NotFoundError,
        InvalidRequestError. After OutcomeUnknownError, read the producer's state before you repeat the call. If a
        client has opened the producer name since the first call, the second call would also reset that client."""
        with _making_a_request():
            request = admin_pb2.ResetProducerRequest(topic=topic_name(topic), producer_name=name, persisted=persisted)
        return await self._calls.call(lambda sidecar: sidecar.admin.ResetProducer, request)

    async def cursors(self, topic: str) -> list[admin_pb2.TopicCursor]:
        """Return the named cursors of a topic, sorted by name. Raises NotFoundError."""
        request = admin_pb2.ListCursorsRequest(topic=topic_name(topic))
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ListCursors, request)).cursors)

    async def hold_cursor(self, topic: str, name: str, retention_in_mb: int) -> None:
        """Make retention keep all messages after the cursor, as long as the log has at most `retention_in_mb` MB. With
        0, retention no longer keeps messages for the cursor. Raises NotFoundError, InvalidRequestError. After
        UnavailableError the change may be in force or not."""
        with _making_a_request():
            request = admin_pb2.SetCursorHoldRequest(
                topic=topic_name(topic), name=name, hold_retention_in_mb=retention_in_mb
            )
        await self._calls.call(lambda sidecar: sidecar.admin.SetCursorHold, request)

    async def delete_cursor(self, topic: str, name: str) -> None:
        """Delete a cursor and its position. Raises NotFoundError. After UnavailableError the cursor may or may not be
        deleted."""
        with _making_a_request():
            request = admin_pb2.DeleteCursorRequest(topic=topic_name(topic), name=name)
        await self._calls.call(lambda sidecar: sidecar.admin.DeleteCursor, request)

    async def snapshot(self, topic: str) -> Position:
        """Take a snapshot now. When the snapshot is durable, return the position after which recovery would start."""
        request = admin_pb2.SnapshotRequest(topic=topic_name(topic))
        return Position.from_proto((await self._calls.call(lambda sidecar: sidecar.admin.Snapshot, request)).position)

    async def export_watermarks(self, topic: str, path: Path) -> int:
        """Write a file of watermarks: the highest persisted ID of every producer that has persisted messages. The
        sidecar reads all IDs at one moment. Messages published after that moment are not included.

        Return the number of watermarks. The call holds all watermarks in memory. Raises NotFoundError,
        UnavailableError, OSError: after any of these errors an existing file is unchanged."""
        return await self._transfer(export_watermarks, topic, path, is_look=True)

    async def import_watermarks(self, topic: str, path: Path) -> int:
        """Import a file of watermarks into an unused topic, and return the number of watermarks. When the call returns,
        all watermarks are in force and durable.

        After INVALID_SOURCE, NEWER_FORMAT, OSError, InvalidRequestError (TOPIC_IN_USE), NotFoundError or
        UnavailableError, no watermark is in force. After OutcomeUnknownError, all watermarks may be in force. The call
        may be repeated after any error."""
        return await self._transfer(import_watermarks, topic, path, is_look=False)

    async def import_window(self, topic: str, path: Path) -> int:
        """Import a file of deduplication IDs into a topic of deduplication IDs that has no messages. Return the number
        of IDs. When the call returns, all IDs are in force and durable. In a partitioned topic, the call imports into
        one partition after the other, and each partition receives the IDs of its messages. The folder for temporary
        files needs room for a second copy of the file.

        After INVALID_SOURCE, NEWER_FORMAT, OSError, InvalidRequestError (TOPIC_IN_USE), NotFoundError or
        UnavailableError, no ID is in force. After OutcomeUnknownError, all IDs may be in force. For a partitioned
        topic, the error states how many partitions have received their IDs. The call may be repeated after any error.
        """

        def bring(one: str, part: Path) -> Awaitable[int]:
            return self._transfer(import_window, one, part, is_look=False)

        found = await self.topic(topic)
        if found.partitions:
            return await import_dealt_window(found, path, self.topic, bring)
        return await bring(topic, path)

    async def export_snapshot(self, topic: str, path: Path) -> admin_pb2.SnapshotHead:
        """Write a snapshot of the topic, taken at one moment, to a file. Return the head of the snapshot, which
        contains the snapshot's position.

        Raises NotFoundError, UnavailableError, OSError: after any of these errors an existing file is unchanged."""
        return await self._transfer(export_snapshot, topic, path, is_look=True)

    async def import_snapshot(self, topic: str, path: Path) -> admin_pb2.Topic:
        """Replace the topic's snapshot durably by a file that `export_snapshot` has written, and open the topic from
        this snapshot.

        After INVALID_SOURCE, NEWER_FORMAT, OSError, NotFoundError, or PositionError (the file does not fit the topic's
        current log), nothing has changed. After UnavailableError repeat the call."""
        return await self._transfer(import_snapshot, topic, path, is_look=False)

    async def _transfer(
        self, act: Callable[[SidecarAddress, Any, str, Path], Awaitable[T]], topic: str, path: Path, *, is_look: bool
    ) -> T:
        name = topic_name(topic)

        def at(sidecar: SidecarConnection) -> Awaitable[T]:
            return act(sidecar.address, sidecar.admin, name, path)

        return await self._calls.at(name, at, is_look=is_look)

    async def rebuild_topic(self, topic: str) -> admin_pb2.Topic:
        """Rebuild the store's records of a topic from its log. Raises NotFoundError, InvalidRequestError
        (LOG_INCOMPLETE). After UnavailableError repeat the call."""
        request = admin_pb2.RebuildTopicRequest(topic=topic_name(topic))
        return (await self._calls.call(lambda sidecar: sidecar.admin.RebuildTopic, request)).topic

    async def sidecars(self) -> list[admin_pb2.ClusterSidecar]:
        """Return the sidecars of a cluster, sorted by name, as found in the topics of the cluster. Raises an error if
        the list would be incomplete."""
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ListSidecars, _LIST_SIDECARS)).sidecars)

    async def forget_sidecar(self, name: str) -> list[str]:
        """Remove the subscriptions of a sidecar that is permanently gone. Return the topics on which the sidecar had a
        subscription.

        Raises NotFoundError if the sidecar has no subscriptions, and InvalidRequestError (SIDECAR_ALIVE). After
        UnavailableError some subscriptions may be removed; repeating the call removes the rest."""
        with _making_a_request():
            request = admin_pb2.ForgetSidecarRequest(name=name)
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ForgetSidecar, request)).topics)

    async def move_topic(self, topic: str, to: str = "") -> str:
        """Move a topic to the sidecar at this address, or without an address to the first sidecar that accepts the
        topic. Return the address of the sidecar that serves the topic now. If the whole log must be copied, the call
        returns only after the copy.

        Raises NotFoundError, InvalidRequestError. After UnavailableError (MOVE_FAILED) the former owner still owns the
        topic, or takes the topic over again.
        """
        with _making_a_request():
            request = admin_pb2.MoveTopicRequest(topic=topic_name(topic), to=to)
        moved = await self._calls.call(lambda sidecar: sidecar.admin.MoveTopic, request, MOVE_TIMEOUT_SECONDS)
        return moved.owner_address

    async def statistics(
        self,
        *,
        search: str = "",
        order: "admin_pb2.StatisticsOrder.ValueType" = admin_pb2.STATISTICS_ORDER_UNSPECIFIED,
        offset: int = 0,
        limit: int = 0,
    ) -> admin_pb2.GetStatisticsResponse:
        """Return the statistics of one sidecar, and the requested page of the sidecar's topics in the requested order.
        See `GetStatisticsRequest`. Raises InvalidRequestError."""
        with _making_a_request():
            request = admin_pb2.GetStatisticsRequest(search=search, order=order, offset=offset, limit=limit)
        return await self._calls.call(lambda sidecar: sidecar.admin.GetStatistics, request)

    async def backup(
        self, name: str, told: Callable[[list[admin_pb2.BackupResponse]], None] = lambda so_far: None
    ) -> list[admin_pb2.BackupResponse]:
        """Make a backup with this name in the sidecar's `backup_directory`, and return the last response of each
        process. When the call returns, all parts of the backup are durable.

        If topics are spread over several processes, each process writes one part of the backup, and the client's
        addresses must include all processes. After each response, the client calls `told` with the latest response of
        each process.

        Raises:

        - InvalidRequestError if the sidecar has no `backup_directory`.
        - ConfigurationError (DIRECTORY_NOT_EMPTY) if the directory of the new backup is not empty.
        - UnavailableError (NOT_OWNER) for a process that the client may not connect to.
        - UnavailableError (BACKUP_FAILED) if a process cannot make its part of the backup.
        - DataLossError if stored data of a process is damaged or missing."""
        with _making_a_request():
            request = admin_pb2.BackupRequest(name=name)
        return await make_backups(self._calls, await self._spread_over(), request, told)

    async def confirm_backup(self, made: list[admin_pb2.BackupResponse]) -> None:
        """Report to all processes that the parts of a backup are verified. `made` is the return value of `backup`. When
        the call returns, the report is durable.

        The metric `seqdedupe_backup_timestamp_seconds` is the time of the earliest part. Raises InvalidRequestError,
        UnavailableError."""
        request = admin_pb2.ConfirmBackupRequest(made_at_us=min(one.made_at_us for one in made))
        await confirm_backups(self._calls, await self._spread_over(), request)

    async def _spread_over(self) -> list[str]:
        """Return the addresses of the processes over which topics are spread; empty if topics are not spread."""
        try:
            return [one.name for one in await self.sidecars() if one.shards]
        except InvalidRequestError:
            return []

    async def version(self) -> admin_pb2.GetVersionResponse:
        """Return the sidecar's version and limits."""
        return await self._calls.call(lambda sidecar: sidecar.admin.GetVersion, admin_pb2.GetVersionRequest())


# -- Export and import of a topic's numbers, as streams. A broken stream is not resumed automatically.

SENT_AT_ONCE_BYTES = 256 * 1024

_BYTES_A_WATERMARK = 4 + 8


async def export_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """Export watermarks, see `Admin.export_watermarks`. The file and the sidecar's stream have different orders, so the
    function holds all watermarks in memory."""
    check_not_forked()
    marks: list[Watermark] = []
    with typed_errors(address):
        async for answer in stub.ExportWatermarks(admin_pb2.ExportWatermarksRequest(topic=topic)):
            names = (answer.producer_names[start:end] for start, end in pairwise(answer.producer_name_offsets))
            marks += map(Watermark, names, answer.persisted)
    marks.sort()
    return await asyncio.to_thread(write_watermarks, path, marks)


async def import_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """Import watermarks, see `Admin.import_watermarks`."""
    check_not_forked()
    with closing(read_watermarks(path)) as marks:
        # `watermarks` yields the first watermark only after the whole file is checked. So an invalid file sends
        # nothing.
        first = await asyncio.to_thread(next, marks, None)
        with typed_errors(address):
            return await _imported(
                stub.ImportWatermarks, _requests(topic, chain([first] if first else [], marks)), "producers"
            )


async def import_window(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """Import a window, see `Admin.import_window`."""
    check_not_forked()
    with closing(read_window(path)) as parts:
        checksum = await asyncio.to_thread(next, parts)
        with typed_errors(address):
            return await _imported(stub.ImportWindow, _window_requests(topic, checksum, parts), "ids")


async def _imported(method: Any, requests: Iterator[Any], field: str) -> int:
    """Return the value of this field in the answer. Raises DecodeError if the last request had a different value in the
    field."""
    sent = 0

    def counted() -> Iterator[Any]:
        nonlocal sent
        for request in requests:
            sent = getattr(request, field)
            yield request

    answer = await method(counted())
    if answer is None or getattr(answer, field) != sent:
        raise DecodeError(f"it does not take over the {sent} {field} that were sent")
    return sent


def _window_requests(topic: str, checksum: bytes, blocks: Iterable[bytes]) -> Iterator[admin_pb2.ImportWindowRequest]:
    ids = 0
    yield admin_pb2.ImportWindowRequest(topic=topic, checksum=checksum)
    for block in blocks:
        ids += len(parse_block(block).sizes)
        yield admin_pb2.ImportWindowRequest(block=block)
    yield admin_pb2.ImportWindowRequest(ids=ids)


async def export_snapshot(address: SidecarAddress, stub: Any, topic: str, path: Path) -> admin_pb2.SnapshotHead:
    """Export a snapshot, see `Admin.export_snapshot`."""
    check_not_forked()
    head: admin_pb2.SnapshotHead | None = None
    producers = 0
    with typed_errors(address), writing_snapshot(path) as take:
        async for answer in stub.ExportSnapshot(admin_pb2.ExportSnapshotRequest(topic=topic)):
            head = head or answer.part.head
            producers += len(answer.part.persisted)
            take(answer.part)
        if head is None or producers != head.producers:
            why = f"the snapshot of {topic} came without its end"
            raise error("OUTCOME_UNKNOWN", why, hint="Export the snapshot again.")
    return head


async def import_snapshot(address: SidecarAddress, stub: Any, topic: str, path: Path) -> admin_pb2.Topic:
    """Import a snapshot, see `Admin.import_snapshot`."""
    check_not_forked()
    with closing(read_snapshot(path)) as parts:
        first = await asyncio.to_thread(next, parts, None)
        requests = (
            admin_pb2.ImportSnapshotRequest(topic=topic, part=part) for part in chain([first] if first else [], parts)
        )
        with typed_errors(address):
            answer: admin_pb2.ImportSnapshotResponse | None = await stub.ImportSnapshot(requests)
            if answer is None or not answer.topic.name:
                raise DecodeError("it names no topic")
    return answer.topic


def _requests(topic: str, marks: Iterable[Watermark]) -> Iterator[admin_pb2.ImportWatermarksRequest]:
    producers = size = 0
    some: list[Watermark] = []
    for mark in marks:
        if size > SENT_AT_ONCE_BYTES:
            yield _request(topic, some)
            some, size = [], 0
        some.append(mark)
        size += len(mark.producer) + _BYTES_A_WATERMARK
        producers += 1
    last = _request(topic, some)
    last.producers = producers
    yield last


def _request(topic: str, marks: list[Watermark]) -> admin_pb2.ImportWatermarksRequest:
    request = admin_pb2.ImportWatermarksRequest(topic=topic)
    if marks:
        request.producer_name_offsets.extend(accumulate((len(mark.producer) for mark in marks), initial=0))
        request.producer_names = b"".join(mark.producer for mark in marks)
        request.persisted.extend(mark.sequence_id for mark in marks)
    return request


# -- Distribution of one window of deduplication IDs over a topic's partitions: each gets the IDs that belong there.
#
# The bytes that a partition receives depend only on the file and the number of partitions. So after an interrupted
# import the same file may be imported again: a partition that already has its part recognizes the part.

AT_ONCE = 64
"""The number of partitions whose parts are written during one pass over the file. Each part has a block in memory."""


class WindowOfPartition(NamedTuple):
    """The part of an imported window that belongs to one partition."""

    topic: str
    path: Path
    ids: int


async def import_dealt_window(
    whole: admin_pb2.Topic,
    path: Path,
    look: Callable[[str], Awaitable[admin_pb2.Topic]],
    bring: Callable[[str, Path], Awaitable[int]],
) -> int:
    """Import a window into a partitioned topic, and return the number of IDs. A partition that receives no IDs does not
    change.

    `look` returns the state of a topic. `bring` imports a file into a topic. Raises the errors of
    `Admin.import_window`, with the number of partitions that already have their part. Raises INVALID_REQUEST for a
    topic with the route `key`, where the ID does not determine the partition. Raises RECOVERING while the route is
    unknown.
    """
    # Imported here: it imports modules for archives and random numbers, which no other call of a client needs.
    from tempfile import TemporaryDirectory

    _check_id_leads(whole)
    ids = done = 0
    for first in range(0, whole.partitions, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, whole.partitions))
        with TemporaryDirectory(prefix="seqdedupe-") as folder:
            parts = await asyncio.to_thread(_dealt, whole, path, Path(folder), numbers)
            for part in parts:
                _check_takes(await look(part.topic))
            for part in parts:
                try:
                    ids += await bring(part.topic, part.path)
                except SeqdedupeError as e:
                    raise _broken_off(e, part.topic, done) from e
                done += 1
    return ids


def _check_id_leads(whole: admin_pb2.Topic) -> None:
    by_key = is_routed_by_key(whole)
    if whole.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        why = f"topic {whole.name} is one of sequence IDs: a window of deduplication IDs cannot be imported into it"
        raise error("INVALID_REQUEST", why)
    if by_key:
        raise error(
            "INVALID_REQUEST",
            f"messages of topic {whole.name} find their partitions by their keys. A window has no keys, and "
            "does not say which partition a copy will go to",
            hint=f"Import the whole file into each partition: `seqdedupe import {whole.name}-partition-0 FILE`, and so "
            "on.",
        )


def _check_takes(partition: admin_pb2.Topic) -> None:
    """Raise TOPIC_IN_USE if the partition has messages and no imported window. The caller imports into AT_ONCE
    partitions at a time, and checks all of these first."""
    if partition.last.index >= 0 and not partition.window_imported:
        raise error("TOPIC_IN_USE", f"the window cannot be imported into topic {partition.name}: it has messages")


def _broken_off(e: SeqdedupeError, partition: str, done: int) -> SeqdedupeError:
    return error(
        e.reason,
        f"{partition}: {e.message} (in force in {counted(done, 'partition')} before it)",
        hint=f"{e.hint} After that, import the same file again. Parts that are already in force stay in force.",
        retry_delay_ms=e.retry_delay_ms,
        **e.numbers,
    )


def _dealt(whole: admin_pb2.Topic, path: Path, folder: Path, numbers: range) -> list[WindowOfPartition]:
    """Write the parts of the window for the partitions with these numbers. Return the parts that are not empty. Blocks
    the thread."""
    paths = {number: folder / str(number) for number in numbers}
    with ExitStack() as files, closing(read_window(path)) as blocks:
        writers = {number: files.enter_context(writing_window(part)) for number, part in paths.items()}
        next(blocks)
        for block in blocks:
            for one, time_ms in known_in(block):
                if (writer := writers.get(partition_of(one, b"", whole.partitions))) is not None:
                    writer.add(one, time_ms)
    return [
        WindowOfPartition(partition_name(whole.name, number), paths[number], writer.ids)
        for number, writer in writers.items()
        if writer.ids
    ]


# -- Backups: all processes make their own at the same time.

Told = Callable[[list[admin_pb2.BackupResponse]], None]


async def make_backups(
    calls: ClientCalls, processes: list[str], request: admin_pb2.BackupRequest, told: Told
) -> list[admin_pb2.BackupResponse]:
    """Make the parts of a backup, see `Admin.backup`. If `processes` is empty, the backup has one part, which the
    process at the client's first address makes."""
    check_not_forked()
    so_far: dict[int, admin_pb2.BackupResponse] = {}

    async def one(number: int, sidecar: SidecarConnection) -> admin_pb2.BackupResponse:
        last = admin_pb2.BackupResponse()
        with typed_errors(sidecar.address):
            async for last in sidecar.admin.Backup(request):
                so_far[number] = last
                told(list(so_far.values()))
        if not last.directory:
            what = f"the sidecar at {sidecar.address} did not say that its backup is whole"
            raise error("OUTCOME_UNKNOWN", what, hint="`seqdedupe verify` checks it. If it is incomplete, repeat it.")
        return last

    work = [asyncio.ensure_future(one(*numbered)) for numbered in enumerate(_connections(calls, processes))]
    try:
        return await asyncio.gather(*work)
    finally:
        # If one call has failed, the other calls are cancelled.
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def confirm_backups(calls: ClientCalls, processes: list[str], request: admin_pb2.ConfirmBackupRequest) -> None:
    """Confirm all parts of a backup, see `Admin.confirm_backup`. `processes` are the same as for `make_backups`."""
    for sidecar in _connections(calls, processes):
        with typed_errors(sidecar.address):
            await sidecar.admin.ConfirmBackup(request)


def _connections(calls: ClientCalls, processes: list[str]) -> list[SidecarConnection]:
    return [calls.connection_to(address) for address in processes] or [calls.first_connection()]
