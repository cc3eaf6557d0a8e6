"""The calls of AdminService that export data from a sidecar, import data into a sidecar, and make backups.

`TransferCalls` contains the calls that stream a topic's state in columns. `BackupCalls` contains the call that makes a
backup of all data of this process.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.gate import Guard
from broker_sidecar.rpc import Context, columns, parse, parse_small, unary
from broker_sidecar.security.rules import Action
from broker_sidecar.services.statistics import topic_to_proto
from broker_sidecar.streams import Stream, Streams, messages
from seqdedupe.batch import INT64, names_of, values
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import UNFINISHED
from seqdedupe.log.embedded.inspection import DurablePart
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import topic_name, whole_of
from seqdedupe.store import directories
from seqdedupe.store.parts import TopicRecord, TopicState, incarnation_of
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.directory import Topics, find, look_for
from seqdedupe.topic.listing import renew
from seqdedupe.topic.registry import Phase
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.backup import OF_THE_WHOLE, REMOVING, BackupFault, BackupMaker
from seqdedupe.transfer.topic_state import (
    SnapshotReader,
    WatermarksImport,
    WindowImport,
    begin_import,
    snapshot_answers,
    watermark_answers,
)
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.backup")

MAX_PART_BYTES = 5 * 256 * 1024
"""The most bytes of a part of an export: 4,096 producers with the longest names, and their numbers."""

SILENT_SECONDS = 2.0
"""The time for which a client may be silent after a refusal. Then it receives the reason, even if it has not ended its
side."""


class TransferCalls:
    """The handlers."""

    def __init__(self, topics: Topics[Any], streams: Streams, guard: Guard) -> None:
        self._topics = topics
        self._streams = streams
        self._permissions = guard.permissions
        self._trail = guard.trail

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        # On the wire, a call with one answer looks the same as a call with a stream of answers.
        return {
            "ExportWatermarks": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_watermarks)),
            "ExportSnapshot": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._export_snapshot)),
            "ImportSnapshot": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_snapshot)),
            "RebuildTopic": unary(admin_pb2.RebuildTopicRequest, self._rebuild_topic),
            "ImportWatermarks": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_watermarks)),
            "ImportWindow": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._import_window)),
        }

    async def _export_watermarks(self, data: bytes, _context: Context, stream: Stream) -> None:
        request = parse_small(admin_pb2.ExportWatermarksRequest, data)
        topic = await find(self._topics, request.topic)
        _check_has_producers(topic)
        await self._streams.export(stream, watermark_answers(topic), MAX_PART_BYTES)

    async def _export_snapshot(self, data: bytes, _context: Context, stream: Stream) -> None:
        topic = await find(self._topics, parse_small(admin_pb2.ExportSnapshotRequest, data).topic)
        _check_has_producers(topic)
        await self._streams.export(stream, snapshot_answers(topic), MAX_PART_BYTES)

    async def _import_snapshot(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            name: str | None = None
            reader = SnapshotReader()
            async for data in messages(stream):
                request = columns(admin_pb2.ImportSnapshotRequest, data)
                if name is None:
                    name = topic_name(request.topic)
                    self._permissions.check_topic(Action.ADMINISTER, name)
                if request.part.ByteSize():
                    stream.moves()
                reader.add(request.part)
            head, loaded = reader.finish()
            with _writing(stream):
                found = await look_for(self._topics, name or "")
                async with self._trail.change("ImportSnapshot", f"topic: {name}"):
                    topic = await renew(self._topics, found, head.position.incarnation, loaded)
        await stream.write(admin_pb2.ImportSnapshotResponse(topic=topic_to_proto(topic)).SerializeToString())

    async def _rebuild_topic(self, request: admin_pb2.RebuildTopicRequest) -> admin_pb2.RebuildTopicResponse:
        topic = await renew(self._topics, await look_for(self._topics, request.topic), None, None)
        return admin_pb2.RebuildTopicResponse(topic=topic_to_proto(topic))

    async def _import_watermarks(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            with ExitStack() as ended:
                producers = await self._imported(stream, ended)
        await stream.write(admin_pb2.ImportWatermarksResponse(producers=producers).SerializeToString())

    async def _imported(self, stream: Stream, ended: ExitStack) -> int:
        """Read an import from the stream, and carry it out. Return the number of imported producers."""
        importing: WatermarksImport[Any] | None = None
        topic: TopicBase | None = None
        producers = 0
        async for data in messages(stream):
            request = columns(admin_pb2.ImportWatermarksRequest, data)
            if importing is None:
                self._permissions.check_topic(Action.ADMINISTER, topic_name(request.topic))
                topic = await find(self._topics, request.topic)
                _check_has_producers(topic)
                importing = begin_import(topic)
                ended.callback(importing.close)
            elif request.topic and (topic is None or topic_name(request.topic) != topic.name):
                raise error("INVALID_REQUEST", "an import must be for a single topic")
            with _writing(stream):
                if request.producer_names or request.persisted:
                    stream.moves()
                    names = names_of(request)
                    if isinstance(topic, Topic):
                        self._permissions.check_disk(self._topics)
                    await importing.add(names, values(request.persisted, INT64, "persisted"))
                    producers += len(names)
                if request.HasField("producers"):
                    if request.producers != producers:
                        raise error("INVALID_REQUEST", f"producers is {request.producers}, but {producers} were sent")
                    async with self._trail.change("ImportWatermarks", f"topic: {topic.name if topic else ''}"):
                        await importing.finish()
                    return producers
        raise error("INVALID_REQUEST", "the import ended without the number of its producers: nothing was imported")

    async def _import_window(self, _requests: object, _context: Context, stream: Stream) -> None:
        async with _read_to_its_end(stream):
            with ExitStack() as ended:
                ids = await self._imported_window(stream, ended)
        await stream.write(admin_pb2.ImportWindowResponse(ids=ids).SerializeToString())

    async def _imported_window(self, stream: Stream, ended: ExitStack) -> int:
        """Read an import from the stream, and carry it out. Return the number of imported IDs."""
        importing: WindowImport | None = None
        name = ""
        async for data in messages(stream):
            request = parse(admin_pb2.ImportWindowRequest, data)
            if importing is None:
                name = topic_name(request.topic)
                self._permissions.check_topic(Action.ADMINISTER, name)
                importing = WindowImport(_with_window(await find(self._topics, name)), request.checksum)
                ended.callback(importing.close)
            with _writing(stream):
                if request.block:
                    stream.moves()
                    await importing.add(request.block)
                if request.HasField("ids"):
                    async with self._trail.change("ImportWindow", f"topic: {name}"):
                        await importing.finish(request.ids)
                    return request.ids
        raise error("INVALID_REQUEST", "the import ended without the number of its IDs: nothing was imported")


def _with_window(topic: TopicBase) -> Topic:
    """Return the topic if this sidecar has the topic's log. Raises INVALID_REQUEST for a topic on a broker's own
    log."""
    if not isinstance(topic, Topic):
        raise error("INVALID_REQUEST", f"topic {topic.name} accepts no deduplication IDs: a broker has its log")
    return topic


def _check_has_producers(topic: TopicBase) -> None:
    """Raise INVALID_REQUEST for a topic of deduplication IDs, because such a file does not contain the topic's
    window."""
    if topic.window is not None:
        why = f"topic {topic.name} has deduplication IDs: only a backup can export and import its state"
        raise error("INVALID_REQUEST", why, hint="Use `seqdedupe backup`.")


@contextmanager
def _writing(stream: Stream) -> Iterator[None]:
    """Prevent that this stream is ended to make room for another stream while data is written."""
    stream.frames_in_flight += 1
    try:
        yield
    finally:
        stream.frames_in_flight -= 1


@asynccontextmanager
async def _read_to_its_end(stream: Stream) -> AsyncIterator[None]:
    """After a refusal, read the client's messages until the client ends or is silent. Then raise the refusal.

    If the call ended while the client still writes, the client would see a broken call without the reason. A silent
    client waits for the answer, and receives the reason.
    """
    try:
        yield
    except SeqdedupeError:
        with suppress(TimeoutError):
            said: object = None
            while said is not grpc.aio.EOF:
                async with asyncio.timeout(SILENT_SECONDS):
                    said = await stream.read()
        raise


# -- A backup of all data of this process at one moment, while it serves.
#
# One step of the event loop looks at the store, and at the ends of the logs that readers may see. The rest is copying:
# a log is only appended to, and retention waits.

Run = Callable[..., Awaitable[Any]]
"""Calls a function in the backup's thread."""


class _Moment(NamedTuple):
    """The data to copy."""

    at_us: int
    records: list[TopicRecord]
    """The records of the existing topics."""
    rows: Iterator[tuple[bytes, bytes]]
    """All records of the store, except of topics that are being created or deleted, or were moved to other sidecars."""
    parts: dict[int, Sequence[DurablePart]]
    """The parts of each open log, by incarnation."""
    closed: dict[int, SeqdedupeError]
    """Why other logs are not open, by incarnation."""


async def back_up(data: Data, folder: Path, making: BackupMaker, others: list[Path], run: Run) -> int:
    """Make a backup of the data directory in `folder`. Return the number of topics. `others` are folders that may be
    earlier backups.

    Raises DRAINING, STORE_DAMAGED, STORE_UNAVAILABLE, and the errors of `BackupMaker`.
    """
    await run(making.begin, others)
    topics = data.all_topics
    if data.logs is None:
        # The messages are stored elsewhere.
        moment = _moment(data, {})
        await run(making.add_store, moment.rows, moment.at_us)
        records = moment.records
    else:
        await topics.waiting.use_all()
        async with data.logs.kept():
            moment = await _settled_moment(data, data.logs)
            await run(making.add_store, moment.rows, moment.at_us)
            records = await _add_logs(making, moment, topics, run)
    await run(making.add_file, folder / directories.SHARDS_FILE)
    whole = directories.whole_of(folder)
    for name in OF_THE_WHOLE:
        await run(making.add_of_the_whole, (whole or folder) / name, whole is not None)
    await run(making.finish)
    return len(records)


async def _settled_moment(data: Data, logs: EmbeddedLogs) -> _Moment:
    while renewing := data.all_topics.registry.tasks(Phase.RENEWING):
        await asyncio.wait(renewing)
    return _moment(data, logs.parts())


def _moment(data: Data, parts: dict[int, Sequence[DurablePart]]) -> _Moment:
    """Return the data at the moment of this call. The call runs in one step of the event loop."""
    topics, store = data.all_topics, data.store
    if topics.is_draining:
        raise error("DRAINING", "the sidecar is shutting down")
    rows = store.scan(b"", b"\xff")
    # From the first record on, the scan shows the store at this moment, even if the other records are read later.
    first = list(islice(rows, 1))
    moved = {one.record.incarnation for one in topics.registry.closed_topics() if data.has_moved(one.record)}
    active = [record for record in store.topics() if record.state is TopicState.ACTIVE]
    records = [record for record in active if record.incarnation not in moved]
    wanted = {None, *(record.incarnation for record in records)}
    kept = ((key, value) for key, value in chain(first, rows) if incarnation_of(key) in wanted)
    closed = {one.record.incarnation: one.told for one in topics.registry.closed_topics()}
    return _Moment(time.time_ns() // 1000, records, kept, parts, closed)


async def _add_logs(making: BackupMaker, moment: _Moment, topics: Topics[Any], run: Run) -> list[TopicRecord]:
    """Add the logs, and return the topics that are in the backup."""
    gone: list[TopicRecord] = []
    for record in moment.records:
        try:
            if (parts := moment.parts.get(record.incarnation)) is None:
                why = moment.closed.get(record.incarnation)
                raise error("LOG_UNREADABLE", str(why) if why else "its log was closed")
            await run(making.add_log, record, parts)
        except SeqdedupeError as e:
            if e.reason not in ("LOG_UNREADABLE", "NEWER_FORMAT"):
                raise
            if _is_deleted(topics, record):
                gone.append(record)
            else:
                making.leave_out(record, e.message)
    # All partitions of a topic are deleted together.
    wholes = {whole_of(record.name) for record in gone if record.partitions}
    gone = [one for one in moment.records if one in gone or (one.partitions and whole_of(one.name) in wholes)]
    if gone:
        store = await run(making.open_store)
        try:
            for record in gone:
                await run(making.drop_log, record)
                await store.remove_topic(record.incarnation)
        finally:
            await run(store.close)
    left_out = {fault.incarnation for fault in making.manifest.left_out}
    return [record for record in moment.records if record not in gone and record.incarnation not in left_out]


def _is_deleted(topics: Topics[Any], record: TopicRecord) -> bool:
    """Return whether the topic is being deleted, or was deleted."""
    entry = topics.registry.get(record.name)
    if entry is None or entry.record is None or entry.record.incarnation != record.incarnation:
        return True
    return entry.phase is Phase.DELETING


PROGRESS_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class BackupCalls:
    """The handlers. Only one backup is made at a time."""

    def __init__(self, config: Config, data: Data, streams: Streams) -> None:
        self._data = data
        self._streams = streams
        self._data_directory = Path(config.data_directory)
        self._backup_directory = config.backup_directory
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "seqdedupe-backup")

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        return {
            "Backup": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._backup)),
            "ConfirmBackup": unary(admin_pb2.ConfirmBackupRequest, self._confirm_backup),
        }

    async def _confirm_backup(self, request: admin_pb2.ConfirmBackupRequest) -> admin_pb2.ConfirmBackupResponse:
        if not 0 < request.made_at_us <= time.time_ns() // 1000:
            raise error("INVALID_REQUEST", f"made_at_us is {request.made_at_us}, which is not a moment in the past")
        await self._data.last_backup.confirm(request.made_at_us)
        return admin_pb2.ConfirmBackupResponse()

    async def _backup(self, data: bytes, _context: Context, stream: Stream) -> None:
        name = parse_small(admin_pb2.BackupRequest, data).name
        # This stream does not give way to another one.
        stream.frames_in_flight += 1
        async with self._lock:
            to, others = await self._placed(name)
            async with self._making(to) as making:
                topics = await self._made(making, others, stream)
        answer = _progress(making)
        answer.directory, answer.topics, answer.made_at_us = str(to), topics, making.manifest.made_at_us
        answer.damaged.extend(_faults(making.manifest.damaged))
        answer.left_out.extend(_faults(making.manifest.left_out))
        extra = {"directory": str(to), "bytes": making.bytes_done, "linked_bytes": making.bytes_linked}
        logger.info("backup made", extra=extra)
        await stream.write(answer.SerializeToString())

    async def _placed(self, name: str) -> tuple[Path, list[Path]]:
        """Return the result of `_place`. `_place` runs in a separate thread, because a remote disk may not answer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._place, name)
        except OSError as e:
            raise error("BACKUP_FAILED", f"{self._backup_directory} cannot be read: {e}") from e

    async def _made(self, making: BackupMaker, others: list[Path], stream: Stream) -> int:
        """Make the backup and report the progress. Return its number of topics."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        work = asyncio.ensure_future(back_up(self._data, self._data_directory, making, others, run))
        try:
            while not (await asyncio.wait({work}, timeout=PROGRESS_SECONDS))[0]:
                await stream.write(_progress(making).SerializeToString())
            return await work
        finally:
            work.cancel()
            await asyncio.wait({work})

    @asynccontextmanager
    async def _making(self, to: Path) -> AsyncIterator[BackupMaker]:
        """Yield a backup that the block writes. After the block the backup is complete; after an error it is removed.
        Raises BACKUP_FAILED."""
        making = BackupMaker(to)
        try:
            yield making
        except BaseException as e:
            making.stop()
            # In the backup's thread: work that runs there has ended before this begins.
            self._thread.submit(making.remove)
            if isinstance(e, OSError):
                raise error("BACKUP_FAILED", f"the backup {to} cannot be written: {e}") from e
            raise

    def _place(self, name: str) -> tuple[Path, list[Path]]:
        """Return the place of a backup with this name, and the places of other backups. Raises INVALID_REQUEST,
        DIRECTORY_NOT_EMPTY."""
        folder = Path(self._backup_directory).absolute()
        if not self._backup_directory or not folder.is_dir():
            why = f"{folder} does not exist" if self._backup_directory else "backup_directory is not set"
            hint = "Set backup_directory in the sidecar's configuration to a folder that exists."
            raise error("INVALID_REQUEST", f"this sidecar makes no backups: {why}", hint=hint)
        if not _NAME.fullmatch(name) or name.endswith((UNFINISHED, REMOVING)):
            what = "it should be 1 to 100 ASCII letters, digits and any of ._-, and begin with a letter or digit"
            what += f"; it should not end with {UNFINISHED} or {REMOVING}"
            raise error("INVALID_REQUEST", f"{name!r} cannot be the name of a backup: {what}")
        below = [self._data_directory.name] if directories.whole_of(self._data_directory) else []
        # The folder `name` itself may exist if other workers have their parts in it.
        for there in {folder / name, folder.joinpath(name, *below)}:
            if there.is_symlink() or (there.exists() and (not below or there != folder / name)):
                raise error(
                    "DIRECTORY_NOT_EMPTY",
                    f"{there} exists already",
                    hint="Choose a different name, or remove that one.",
                )
        return folder.joinpath(name, *below), [path.joinpath(*below) for path in folder.iterdir() if path.is_dir()]


def _progress(making: BackupMaker) -> admin_pb2.BackupResponse:
    return admin_pb2.BackupResponse(bytes=making.bytes_done, linked_bytes=making.bytes_linked)


def _faults(faults: Iterable[BackupFault]) -> Iterable[admin_pb2.BackupFault]:
    return (admin_pb2.BackupFault(topic=one.topic, incarnation=one.incarnation, what=one.what) for one in faults)
