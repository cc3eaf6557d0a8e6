"""A topic's numbers, from a sidecar into a file and back, as streams, which are not begun again by themselves."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import accumulate, chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from seqdedupe import exports
from seqdedupe.address import SidecarAddress
from seqdedupe.client.calls import Calls, Connection
from seqdedupe.client.connection import check_not_forked, typed_errors
from seqdedupe.client.partitioned import check_route_is_known
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.exports import Watermark
from seqdedupe.names import partition_name, partition_of
from seqdedupe.v1 import admin_pb2

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
    return await asyncio.to_thread(exports.write_watermarks, path, marks)


async def import_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_watermarks`."""
    check_not_forked()
    with closing(exports.read_watermarks(path)) as marks:
        # With the first one the whole file has been checked, before anything is sent.
        first = await asyncio.to_thread(next, marks, None)
        with typed_errors(address):
            return await _imported(
                stub.ImportWatermarks, _requests(topic, chain([first] if first else [], marks)), "producers"
            )


async def import_window(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_window`."""
    check_not_forked()
    with closing(exports.read_window(path)) as parts:
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
        ids += len(exports.parse_block(block).sizes)
        yield admin_pb2.ImportWindowRequest(block=block)
    yield admin_pb2.ImportWindowRequest(ids=ids)


async def export_snapshot(address: SidecarAddress, stub: Any, topic: str, path: Path) -> admin_pb2.SnapshotHead:
    """See `Admin.export_snapshot`."""
    check_not_forked()
    head: admin_pb2.SnapshotHead | None = None
    producers = 0
    with typed_errors(address), exports.writing_snapshot(path) as take:
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
    with closing(exports.read_snapshot(path)) as parts:
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


class Part(NamedTuple):
    """What a partition gets."""

    topic: str
    path: Path
    ids: int


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


def _dealt(whole: admin_pb2.Topic, path: Path, folder: Path, numbers: range) -> list[Part]:
    """Writes what each of these partitions gets; those that get something. Blocks."""
    paths = {number: folder / str(number) for number in numbers}
    with ExitStack() as files, closing(exports.read_window(path)) as blocks:
        writers = {number: files.enter_context(exports.writing_window(part)) for number, part in paths.items()}
        next(blocks)
        for block in blocks:
            for one, time_ms in exports.known_in(block):
                if (writer := writers.get(partition_of(one, b"", whole.partitions))) is not None:
                    writer.add(one, time_ms)
    return [
        Part(partition_name(whole.name, number), paths[number], writer.ids)
        for number, writer in writers.items()
        if writer.ids
    ]


# -- Having backups made: each process makes its own, all at once.

Told = Callable[[list[admin_pb2.BackupResponse]], None]


async def make(
    calls: Calls, processes: list[str], request: admin_pb2.BackupRequest, told: Told
) -> list[admin_pb2.BackupResponse]:
    """See `Admin.backup`. Without `processes` there is one, which is that of the client's first address."""
    check_not_forked()
    so_far: dict[int, admin_pb2.BackupResponse] = {}

    async def one(number: int, sidecar: Connection) -> admin_pb2.BackupResponse:
        last = admin_pb2.BackupResponse()
        with typed_errors(sidecar.address):
            async for last in sidecar.admin.Backup(request):
                so_far[number] = last
                told(list(so_far.values()))
        if not last.directory:
            raise error("OUTCOME_UNKNOWN", f"the sidecar at {sidecar.address} did not say that its backup is whole")
        return last

    connections = [calls.connection_to(address) for address in processes] or [calls.first_connection()]
    work = [asyncio.ensure_future(one(number, connection)) for number, connection in enumerate(connections)]
    try:
        return await asyncio.gather(*work)
    finally:
        # Where one has failed the others are given up.
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
