"""A topic's numbers, from a sidecar into a file and back, as streams, which are not begun again by themselves."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from seqdedupe import snapshot_file, watermarks, windows
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import check_not_forked, typed_errors
from seqdedupe.errors import error
from seqdedupe.v1 import admin_pb2
from seqdedupe.watermarks import Watermark

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
    return await asyncio.to_thread(watermarks.write, path, marks)


async def import_watermarks(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_watermarks`."""
    check_not_forked()
    with closing(watermarks.read(path)) as marks:
        # With the first one the whole file has been checked, before anything is sent.
        first = await asyncio.to_thread(next, marks, None)
        with typed_errors(address):
            return await _imported(
                stub.ImportWatermarks, _requests(topic, chain([first] if first else [], marks)), "producers"
            )


async def import_window(address: SidecarAddress, stub: Any, topic: str, path: Path) -> int:
    """See `Admin.import_window`."""
    check_not_forked()
    with closing(windows.read(path)) as parts:
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
        ids += len(windows.parse(block).sizes)
        yield admin_pb2.ImportWindowRequest(block=block)
    yield admin_pb2.ImportWindowRequest(ids=ids)


async def export_snapshot(address: SidecarAddress, stub: Any, topic: str, path: Path) -> admin_pb2.SnapshotHead:
    """See `Admin.export_snapshot`."""
    check_not_forked()
    head: admin_pb2.SnapshotHead | None = None
    producers = 0
    with typed_errors(address), snapshot_file.writing(path) as take:
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
    with closing(snapshot_file.read(path)) as parts:
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
