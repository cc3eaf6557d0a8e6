"""What operators ask a sidecar: `Admin`. Topics and producers are the messages of `admin.proto`.

After it stand the calls that are streams: a topic's numbers into a file and back, a window of deduplication IDs dealt
to the partitions of a topic, and backups.
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
from seqdedupe.message_id import Position
from seqdedupe.names import is_namespace, partition_name, partition_of, topic_name
from seqdedupe.v1 import admin_pb2

T = TypeVar("T")

_LIST_SIDECARS = admin_pb2.ListSidecarsRequest()

MOVE_TIMEOUT_SECONDS = 24 * 3600.0
"""For a topic to be moved, which may have a large log."""

_ENTRY_FORMATS = {
    "": admin_pb2.ENTRY_FORMAT_UNSPECIFIED,
    "plain": admin_pb2.ENTRY_FORMAT_PLAIN,
    "packed": admin_pb2.ENTRY_FORMAT_PACKED,
}


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
"""By what messages find their partitions, by name."""


class PolicyState(NamedTuple):
    """A policy of a topic or a namespace."""

    set: admin_pb2.TopicPolicy
    """What is set there."""
    applied: admin_pb2.TopicPolicy
    """What is in force there, each value of it."""


@contextmanager
def _making_a_request() -> Iterator[None]:
    """Raises INVALID_REQUEST for a number or a text that a request has no room for."""
    try:
        yield
    except ValueError as e:
        raise error("INVALID_REQUEST", f"a request cannot say this: {e}") from e


def _state(answer: Any) -> PolicyState:
    return PolicyState(answer.policy, answer.applied)


class Admin:
    """The calls of `AdminService`.

    Each waits for a topic that recovers, and raises UnavailableError if that, or the answer, takes over 30 seconds.
    Where there are several sidecars it goes to the one that owns the topic, or, if it concerns no single topic, to one
    that answers.
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
    ) -> admin_pb2.Topic:
        """With so many partitions, for good; 0: it is not partitioned. What its policy (of each partition) leaves out
        is inherited, and so is `deduplication_enabled` None. `entry_format` is `plain` or `packed`, where the log is a
        Pulsar cluster's; left out, it is the sidecar's default. There a topic of `plain` entries can have a `schema`,
        the text of JSON that `pulsar-admin schemas upload` takes. `deduplication_mode` is `sequence-id`, the default,
        or `deduplication-id`, for good; then `deduplication_route` says by what messages find their partitions: `id`,
        the default, or `key`. Raises InvalidRequestError (TOPIC_EXISTS)."""
        if deduplication_mode not in MODES:
            why = f"{deduplication_mode!r} is no deduplication mode: sequence-id and deduplication-id are"
            raise error("INVALID_REQUEST", why)
        if deduplication_route not in ROUTES:
            raise error("INVALID_REQUEST", f"{deduplication_route!r} is no deduplication route: id and key are")
        if entry_format not in _ENTRY_FORMATS:
            raise error("INVALID_REQUEST", f"{entry_format!r} is no entry format: plain and packed are")
        given = admin_pb2.TopicPolicy(deduplication_enabled=deduplication_enabled)
        given.MergeFrom(policy or admin_pb2.TopicPolicy())
        with _making_a_request():
            request = admin_pb2.CreateTopicRequest(
                topic=topic_name(topic),
                policy=given,
                partitions=partitions,
                entry_format=_ENTRY_FORMATS[entry_format],
                schema=schema,
                deduplication_mode=MODES[deduplication_mode],
                deduplication_route=ROUTES[deduplication_route],
            )
        return (await self._calls.call(lambda sidecar: sidecar.admin.CreateTopic, request)).topic

    async def delete_topic(self, topic: str) -> None:
        """Deletes the topic, its log and its producers for good. Raises NotFoundError."""
        request = admin_pb2.DeleteTopicRequest(topic=topic_name(topic))
        await self._calls.call(lambda sidecar: sidecar.admin.DeleteTopic, request)

    async def topic(self, topic: str) -> admin_pb2.Topic:
        """Raises NotFoundError."""
        request = admin_pb2.GetTopicRequest(topic=topic_name(topic))
        return (await self._calls.call(lambda sidecar: sidecar.admin.GetTopic, request)).topic

    async def topics(self) -> list[admin_pb2.Topic]:
        """All topics, by name, as one sidecar lists them: whole, or an error."""

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
        """The policy of a topic, or of a namespace (`tenant/namespace`). Raises NotFoundError."""
        if is_namespace(name):
            of_namespace = admin_pb2.GetNamespacePolicyRequest(namespace=name)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.GetNamespacePolicy, of_namespace))
        request = admin_pb2.GetTopicPolicyRequest(topic=topic_name(name))
        return _state(await self._calls.call(lambda sidecar: sidecar.admin.GetTopicPolicy, request))

    async def set_policy(self, name: str, policy: admin_pb2.TopicPolicy) -> PolicyState:
        """Sets these values for a topic or a namespace; the others stay. In force, and durable, when it returns.

        Raises InvalidRequestError, NotFoundError.
        """
        if is_namespace(name):
            of_namespace = admin_pb2.SetNamespacePolicyRequest(namespace=name, policy=policy)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.SetNamespacePolicy, of_namespace))
        request = admin_pb2.SetTopicPolicyRequest(topic=topic_name(name), policy=policy)
        topic = (await self._calls.call(lambda sidecar: sidecar.admin.SetTopicPolicy, request)).topic
        return PolicyState(topic.set_policy, topic.policy)

    async def remove_policy(self, name: str, *values: str) -> PolicyState:
        """These values (none: all) are inherited again. Otherwise as `set_policy`."""
        if is_namespace(name):
            with _making_a_request():
                of_namespace = admin_pb2.RemoveNamespacePolicyRequest(namespace=name, values=values)
            return _state(await self._calls.call(lambda sidecar: sidecar.admin.RemoveNamespacePolicy, of_namespace))
        with _making_a_request():
            request = admin_pb2.RemoveTopicPolicyRequest(topic=topic_name(name), values=values)
        topic = (await self._calls.call(lambda sidecar: sidecar.admin.RemoveTopicPolicy, request)).topic
        return PolicyState(topic.set_policy, topic.policy)

    async def producers(self, topic: str) -> list[admin_pb2.Producer]:
        """All producers of a topic in the order in which they first came. Raises NotFoundError."""
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
        """Raises NotFoundError."""
        with _making_a_request():
            request = admin_pb2.GetProducerRequest(topic=topic_name(topic), producer_name=name)
        return (await self._calls.call(lambda sidecar: sidecar.admin.GetProducer, request)).producer

    async def message_state(
        self, topic: str, producer_name: str = "", sequence_id: int = 0, *, deduplication_id: bytes | str = b""
    ) -> admin_pb2.GetMessageStateResponse:
        """What is known of one message: of this producer, or with this deduplication ID. Raises NotFoundError."""
        one = deduplication_id.encode() if isinstance(deduplication_id, str) else deduplication_id
        with _making_a_request():
            request = admin_pb2.GetMessageStateRequest(
                topic=topic_name(topic), producer_name=producer_name, sequence_id=sequence_id, deduplication_id=one
            )
        return await self._calls.call(lambda sidecar: sidecar.admin.GetMessageState, request)

    async def in_flight(self, topic: str, *, longer_than_ms: int = 0) -> admin_pb2.ListInFlightResponse:
        """The producers with messages in flight for at least so long, the longest first. Raises NotFoundError."""
        with _making_a_request():
            request = admin_pb2.ListInFlightRequest(topic=topic_name(topic), longer_than_ms=longer_than_ms)
        return await self._calls.call(lambda sidecar: sidecar.admin.ListInFlight, request)

    async def reset_producer(self, topic: str, name: str, persisted: int) -> admin_pb2.ResetProducerResponse:
        """Sets a producer's highest persisted sequence ID to a lower one (-1: none); durable when it returns.

        Its sessions are fenced, and what it sends above that ID is new again. Raises NotFoundError,
        InvalidRequestError. After OutcomeUnknownError look at the producer before doing it again: whoever has opened
        the name since would be reset a second time.
        """
        with _making_a_request():
            request = admin_pb2.ResetProducerRequest(topic=topic_name(topic), producer_name=name, persisted=persisted)
        return await self._calls.call(lambda sidecar: sidecar.admin.ResetProducer, request)

    async def cursors(self, topic: str) -> list[admin_pb2.TopicCursor]:
        """The named cursors of a topic, by name. Raises NotFoundError."""
        request = admin_pb2.ListCursorsRequest(topic=topic_name(topic))
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ListCursors, request)).cursors)

    async def hold_cursor(self, topic: str, name: str, retention_in_mb: int) -> None:
        """Has retention keep what the cursor has not passed, as long as the log is not larger than this; 0: not any
        more. Raises NotFoundError, InvalidRequestError, UnavailableError: then it may be in force or not."""
        with _making_a_request():
            request = admin_pb2.SetCursorHoldRequest(
                topic=topic_name(topic), name=name, hold_retention_in_mb=retention_in_mb
            )
        await self._calls.call(lambda sidecar: sidecar.admin.SetCursorHold, request)

    async def delete_cursor(self, topic: str, name: str) -> None:
        """Removes a cursor: it keeps nothing any more. Raises NotFoundError, UnavailableError: then it may be gone."""
        with _making_a_request():
            request = admin_pb2.DeleteCursorRequest(topic=topic_name(topic), name=name)
        await self._calls.call(lambda sidecar: sidecar.admin.DeleteCursor, request)

    async def snapshot(self, topic: str) -> Position:
        """Takes a snapshot now; returns when it is durable, with the position after which recovery would start."""
        request = admin_pb2.SnapshotRequest(topic=topic_name(topic))
        return Position.from_proto((await self._calls.call(lambda sidecar: sidecar.admin.Snapshot, request)).position)

    async def export_watermarks(self, topic: str, path: Path) -> int:
        """Writes the highest persisted ID of every producer that has one, as of one moment, to a file of watermarks.

        Returns how many there are, and holds them all meanwhile. What a producer sends later is not in it. Raises
        NotFoundError, UnavailableError, OSError: then a file that was there is as it was.
        """
        return await self._transfer(export_watermarks, topic, path, is_look=True)

    async def import_watermarks(self, topic: str, path: Path) -> int:
        """Takes a file of watermarks over into a topic that nobody has used. In force, and durable, when it returns how
        many there were.

        Raises INVALID_SOURCE, NEWER_FORMAT, OSError, InvalidRequestError (TOPIC_IN_USE), NotFoundError,
        UnavailableError: then nothing is in force, but after OutcomeUnknownError perhaps all. Repeating it is harmless.
        """
        return await self._transfer(import_watermarks, topic, path, is_look=False)

    async def import_window(self, topic: str, path: Path) -> int:
        """Takes a file of deduplication IDs over into a topic of these that has no messages. In force, and durable,
        when it returns how many there were. The partitions of a partitioned topic get those that belong there, one
        after the other; the folder for temporary files needs room for another copy.

        Raises INVALID_SOURCE, NEWER_FORMAT, OSError, InvalidRequestError (TOPIC_IN_USE), NotFoundError,
        UnavailableError: then nothing is in force, but after OutcomeUnknownError perhaps all; of a partitioned topic
        what the error says. Repeating it is harmless.
        """

        def bring(one: str, part: Path) -> Awaitable[int]:
            return self._transfer(import_window, one, part, is_look=False)

        found = await self.topic(topic)
        if found.partitions:
            return await import_dealt_window(found, path, self.topic, bring)
        return await bring(topic, path)

    async def export_snapshot(self, topic: str, path: Path) -> admin_pb2.SnapshotHead:
        """Writes the topic's snapshot, as of one moment, to a file; returns of which position it is.

        Raises NotFoundError, UnavailableError, OSError: then a file that was there is as it was.
        """
        return await self._transfer(export_snapshot, topic, path, is_look=True)

    async def import_snapshot(self, topic: str, path: Path) -> admin_pb2.Topic:
        """Puts such a file in the place of the topic's snapshot, durably, and opens the topic from it.

        Raises INVALID_SOURCE, NEWER_FORMAT, OSError, PositionError if the file is not of this topic's log as it is,
        NotFoundError: then nothing has changed; UnavailableError: then do it again.
        """
        return await self._transfer(import_snapshot, topic, path, is_look=False)

    async def _transfer(
        self, act: Callable[[SidecarAddress, Any, str, Path], Awaitable[T]], topic: str, path: Path, *, is_look: bool
    ) -> T:
        name = topic_name(topic)

        def at(sidecar: SidecarConnection) -> Awaitable[T]:
            return act(sidecar.address, sidecar.admin, name, path)

        return await self._calls.at(name, at, is_look=is_look)

    async def rebuild_topic(self, topic: str) -> admin_pb2.Topic:
        """Makes the store's records of a topic anew from its log. Raises NotFoundError, InvalidRequestError
        (LOG_INCOMPLETE); UnavailableError: then do it again."""
        request = admin_pb2.RebuildTopicRequest(topic=topic_name(topic))
        return (await self._calls.call(lambda sidecar: sidecar.admin.RebuildTopic, request)).topic

    async def sidecars(self) -> list[admin_pb2.ClusterSidecar]:
        """The sidecars of a cluster, by name, as its topics show them: all or an error."""
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ListSidecars, _LIST_SIDECARS)).sidecars)

    async def forget_sidecar(self, name: str) -> list[str]:
        """Removes the subscriptions of a sidecar that is gone for good; returns on which topics it had one.

        Raises NotFoundError if it has none, InvalidRequestError (SIDECAR_ALIVE), UnavailableError: then some may be
        removed, and doing it again removes what is left.
        """
        with _making_a_request():
            request = admin_pb2.ForgetSidecarRequest(name=name)
        return list((await self._calls.call(lambda sidecar: sidecar.admin.ForgetSidecar, request)).topics)

    async def move_topic(self, topic: str, to: str = "") -> str:
        """Moves a topic to the sidecar at this address, or to whichever takes it first; returns the address of the one
        that serves it now. Where all of its log has to be copied that takes as long as it takes.

        Raises NotFoundError, InvalidRequestError; UnavailableError (MOVE_FAILED): then it stays where it was, or is
        taken again there.
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
        """How one sidecar does, and which of its topics, in this order, are on the page asked for: see
        `GetStatisticsRequest`. Raises InvalidRequestError."""
        with _making_a_request():
            request = admin_pb2.GetStatisticsRequest(search=search, order=order, offset=offset, limit=limit)
        return await self._calls.call(lambda sidecar: sidecar.admin.GetStatistics, request)

    async def backup(
        self, name: str, told: Callable[[list[admin_pb2.BackupResponse]], None] = lambda so_far: None
    ) -> list[admin_pb2.BackupResponse]:
        """Makes a backup of this name below the sidecar's `backup_directory`; what each process says at its end, when
        all is durable. Where topics are spread over processes each makes its own part, and all have to be among the
        addresses that the client was given.

        `told` gets what each has said last. Raises InvalidRequestError (no `backup_directory`),
        ConfigurationError (DIRECTORY_NOT_EMPTY), NOT_OWNER for a process that the client may not go to;
        UnavailableError (BACKUP_FAILED), DataLossError.
        """
        with _making_a_request():
            request = admin_pb2.BackupRequest(name=name)
        return await make_backups(self._calls, await self._spread_over(), request, told)

    async def confirm_backup(self, made: list[admin_pb2.BackupResponse]) -> None:
        """Tells the processes that their parts of a backup, as `backup` returned them, were verified. Durable on
        return.

        The metric `seqdedupe_backup_timestamp_seconds` is the moment of the earliest part. Raises InvalidRequestError,
        UnavailableError.
        """
        request = admin_pb2.ConfirmBackupRequest(made_at_us=min(one.made_at_us for one in made))
        await confirm_backups(self._calls, await self._spread_over(), request)

    async def _spread_over(self) -> list[str]:
        """The addresses of the processes that topics are spread over; none if they are not."""
        try:
            return [one.name for one in await self.sidecars() if one.shards]
        except InvalidRequestError:
            return []

    async def version(self) -> admin_pb2.GetVersionResponse:
        """The sidecar's version and limits."""
        return await self._calls.call(lambda sidecar: sidecar.admin.GetVersion, admin_pb2.GetVersionRequest())


# -- A topic's numbers, from a sidecar into a file and back, as streams, which are not begun again by themselves.

SENT_AT_ONCE_BYTES = 256 * 1024

_BYTES_A_WATERMARK = 4 + 8


async def export_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.export_watermarks`. The sidecar's order is not the file's, so all of them are held for once."""
    check_not_forked()
    marks: list[Watermark] = []
    with typed_errors(address):
        async for answer in stub.ExportWatermarks(admin_pb2.ExportWatermarksRequest(topic=topic)):
            names = (answer.producer_names[start:end] for start, end in pairwise(answer.producer_name_offsets))
            marks += map(Watermark, names, answer.persisted)
    marks.sort()
    return await asyncio.to_thread(write_watermarks, path, marks)


async def import_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_watermarks`."""
    check_not_forked()
    with closing(read_watermarks(path)) as marks:
        # With the first one the whole file has been checked, before anything is sent.
        first = await asyncio.to_thread(next, marks, None)
        with typed_errors(address):
            return await _imported(
                stub.ImportWatermarks, _requests(topic, chain([first] if first else [], marks)), "producers"
            )


async def import_window(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_window`."""
    check_not_forked()
    with closing(read_window(path)) as parts:
        checksum = await asyncio.to_thread(next, parts)
        with typed_errors(address):
            return await _imported(stub.ImportWindow, _window_requests(topic, checksum, parts), "ids")


async def _imported(method: Any, requests: Iterator[Any], field: str) -> int:
    """What the answer says in this field. Raises DecodeError if it is not what the last request says there."""
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
    """See `Admin.export_snapshot`."""
    check_not_forked()
    head: admin_pb2.SnapshotHead | None = None
    producers = 0
    with typed_errors(address), writing_snapshot(path) as take:
        async for answer in stub.ExportSnapshot(admin_pb2.ExportSnapshotRequest(topic=topic)):
            head = head or answer.part.head
            producers += len(answer.part.persisted)
            take(answer.part)
        if head is None or producers != head.producers:
            raise error("OUTCOME_UNKNOWN", f"the snapshot of {topic} came without its end", hint="Export it again.")
    return head


async def import_snapshot(address: SidecarAddress, stub: Any, topic: str, path: Path) -> admin_pb2.Topic:
    """See `Admin.import_snapshot`."""
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


# -- One window of deduplication IDs, dealt to the partitions of a topic: each gets the IDs that belong there.
#
# What a partition gets follows from the file and the number of partitions alone, byte by byte. So the same file may
# be dealt again, whatever ended it before: a partition that has its part takes it for the same one.

AT_ONCE = 64
"""Of so many partitions the parts are written while the file is read once: each has a block in memory."""


class WindowOfPartition(NamedTuple):
    """What a partition gets."""

    topic: str
    path: Path
    ids: int


def check_route_is_known(whole: admin_pb2.Topic) -> None:
    """Raises RECOVERING while the sidecar does not know by what messages find their partitions."""
    if whole.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED:
        raise error("RECOVERING", f"by what messages of topic {whole.name} find their partitions is not known yet")


async def import_dealt_window(
    whole: admin_pb2.Topic,
    path: Path,
    look: Callable[[str], Awaitable[admin_pb2.Topic]],
    bring: Callable[[str, Path], Awaitable[int]],
) -> int:
    """Imports it into a partitioned topic; returns how many IDs it has. A partition that none belongs to is left alone.

    `look` gives a topic as it is, `bring` imports a file into one. Raises as `Admin.import_window`, and then says how
    many partitions have their part; INVALID_REQUEST for a topic to whose partitions no ID leads, RECOVERING while that
    is not known.
    """
    # Here, since it imports archives and random numbers, which no other call of a client needs.
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
    check_route_is_known(whole)
    if whole.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        why = f"topic {whole.name} is one of sequence IDs: no window of deduplication IDs goes into it"
        raise error("INVALID_REQUEST", why)
    if whole.deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY:
        raise error(
            "INVALID_REQUEST",
            f"messages of topic {whole.name} find their partitions by their keys, which a window does not have: nobody "
            "knows in which partition a copy will come",
            hint=f"Import the whole file into each partition: `seqdedupe import {whole.name}-partition-0 FILE`, and so "
            "on.",
        )


def _check_takes(partition: admin_pb2.Topic) -> None:
    """Raises TOPIC_IN_USE: before anything is in force in any of them, not when half of them have their part."""
    if partition.last.index >= 0 and not partition.window_imported:
        raise error("TOPIC_IN_USE", f"the window cannot be imported into topic {partition.name}: it has messages")


def _broken_off(e: SeqdedupeError, partition: str, done: int) -> SeqdedupeError:
    return error(
        e.reason,
        f"{partition}: {e.message} ({done} partitions before it have their part)",
        hint=f"{e.hint} Then import the same file again, all of it: what is in force stays.",
        retry_delay_ms=e.retry_delay_ms,
        **e.numbers,
    )


def _dealt(whole: admin_pb2.Topic, path: Path, folder: Path, numbers: range) -> list[WindowOfPartition]:
    """Writes what each of these partitions gets; those that get something. Blocks."""
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


# -- Having backups made: each process makes its own, all at once.

Told = Callable[[list[admin_pb2.BackupResponse]], None]


async def make_backups(
    calls: ClientCalls, processes: list[str], request: admin_pb2.BackupRequest, told: Told
) -> list[admin_pb2.BackupResponse]:
    """See `Admin.backup`. Without `processes` there is one, which is that of the client's first address."""
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
            raise error("OUTCOME_UNKNOWN", what, hint="`seqdedupe verify` says whether it is. Otherwise make another.")
        return last

    work = [asyncio.ensure_future(one(*numbered)) for numbered in enumerate(_connections(calls, processes))]
    try:
        return await asyncio.gather(*work)
    finally:
        # Where one has failed the others are given up.
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def confirm_backups(calls: ClientCalls, processes: list[str], request: admin_pb2.ConfirmBackupRequest) -> None:
    """See `Admin.confirm_backup`. `processes` are those that `make_backups` was given."""
    for sidecar in _connections(calls, processes):
        with typed_errors(sidecar.address):
            await sidecar.admin.ConfirmBackup(request)


def _connections(calls: ClientCalls, processes: list[str]) -> list[SidecarConnection]:
    return [calls.connection_to(address) for address in processes] or [calls.first_connection()]
