"""The call of AdminService that makes a backup of all that this process has, while it serves."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.rpc import Context, parse_small
from broker_sidecar.streams import Stream, Streams
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import UNFINISHED
from seqdedupe.log.embedded.inspection import DurablePart
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import whole_of
from seqdedupe.store import directories
from seqdedupe.store.parts import incarnation_of
from seqdedupe.store.topics import TopicRecord, TopicState
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.registry import Phase
from seqdedupe.transfer.backup import OF_THE_WHOLE, BackupFault, BackupMaker
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.backup")

# -- What goes into a backup, of one moment.
#
# What the store says, and how far readers may see the logs, is looked at in one step of the event loop. The rest is
# copying: a log is only appended to, and retention waits.

Run = Callable[..., Awaitable[Any]]
"""Calls a function in the backup's thread."""


class _Moment(NamedTuple):
    """What there is to be copied."""

    at_us: int
    records: list[TopicRecord]
    """Of the topics that there are."""
    rows: Iterator[tuple[bytes, bytes]]
    """All records of the store but those of topics that are being made or deleted, or were moved to other sidecars."""
    parts: dict[int, Sequence[DurablePart]]
    """Of each log that is open, by incarnation."""
    closed: dict[int, SeqdedupeError]
    """Why others are not."""


async def back_up(data: Data, folder: Path, making: BackupMaker, others: list[Path], run: Run) -> int:
    """Makes a backup of the data directory in this folder; how many topics it has. `others` are perhaps backups too.

    Raises DRAINING, STORE_DAMAGED, STORE_UNAVAILABLE, and what `BackupMaker` raises.
    """
    await run(making.begin, others)
    topics = data.all_topics
    if data.logs is None:
        # The messages are elsewhere.
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
    """As of this call, which nothing comes between."""
    topics, store = data.all_topics, data.store
    if topics.is_draining:
        raise error("DRAINING", "the sidecar is shutting down")
    rows = store.scan(b"", b"\xff")
    # From the first one on the store is shown as it is now, whenever the others are read.
    first = list(islice(rows, 1))
    moved = {one.record.incarnation for one in topics.registry.closed_topics() if data.has_moved(one.record)}
    active = [record for record in store.topics() if record.state is TopicState.ACTIVE]
    records = [record for record in active if record.incarnation not in moved]
    wanted = {None, *(record.incarnation for record in records)}
    kept = ((key, value) for key, value in chain(first, rows) if incarnation_of(key) in wanted)
    closed = {one.record.incarnation: one.told for one in topics.registry.closed_topics()}
    return _Moment(time.time_ns() // 1000, records, kept, parts, closed)


async def _add_logs(making: BackupMaker, moment: _Moment, topics: Topics[Any], run: Run) -> list[TopicRecord]:
    """The topics that are in the backup."""
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
    """Whether the topic is being deleted, or was."""
    entry = topics.registry.get(record.name)
    if entry is None or entry.record is None or entry.record.incarnation != record.incarnation:
        return True
    return entry.phase is Phase.DELETING


PROGRESS_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class BackupCalls:
    """The handler. One backup is made at a time."""

    def __init__(self, config: Config, data: Data, streams: Streams) -> None:
        self._data = data
        self._streams = streams
        self._data_directory = Path(config.data_directory)
        self._backup_directory = config.backup_directory
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "seqdedupe-backup")

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        return {"Backup": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._backup))}

    async def _backup(self, data: bytes, _context: Context, stream: Stream) -> None:
        name = parse_small(admin_pb2.BackupRequest, data).name
        # It does not give way to another stream.
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
        """As `_place`. A disk that is elsewhere may not answer: then a thread of its own waits, not the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._place, name)
        except OSError as e:
            raise error("BACKUP_FAILED", f"{self._backup_directory} cannot be read: {e}") from e

    async def _made(self, making: BackupMaker, others: list[Path], stream: Stream) -> int:
        """Makes it, and says how far it is; how many topics it has."""
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
        """A backup that is whole after the block, or gone. Raises BACKUP_FAILED."""
        making = BackupMaker(to)
        try:
            yield making
        except BaseException as e:
            making.stop()
            # In its thread: what runs there is at its end by then.
            self._thread.submit(making.remove)
            if isinstance(e, OSError):
                raise error("BACKUP_FAILED", f"the backup {to} cannot be written: {e}") from e
            raise

    def _place(self, name: str) -> tuple[Path, list[Path]]:
        """Where a backup of this name goes, and where others are. Raises INVALID_REQUEST, DIRECTORY_NOT_EMPTY."""
        folder = Path(self._backup_directory).absolute()
        if not self._backup_directory or not folder.is_dir():
            why = f"{folder} is not there" if self._backup_directory else "it was not told where to"
            hint = "Set backup_directory in the sidecar's configuration: a folder that is there."
            raise error("INVALID_REQUEST", f"this sidecar makes no backups: {why}", hint=hint)
        if not _NAME.fullmatch(name) or name.endswith(UNFINISHED):
            what = "it should be 1 to 100 ASCII letters, digits and any of ._-, the first one a letter or digit"
            raise error("INVALID_REQUEST", f"{name!r} cannot be the name of a backup: {what}")
        below = [self._data_directory.name] if directories.whole_of(self._data_directory) else []
        # The name itself may be there if other workers have their parts in it, but as a folder.
        for there in {folder / name, folder.joinpath(name, *below)}:
            if there.is_symlink() or (there.exists() and (not below or there != folder / name)):
                raise error("DIRECTORY_NOT_EMPTY", f"{there} is there", hint="Choose another name, or remove that.")
        return folder.joinpath(name, *below), [path.joinpath(*below) for path in folder.iterdir() if path.is_dir()]


def _progress(making: BackupMaker) -> admin_pb2.BackupResponse:
    return admin_pb2.BackupResponse(bytes=making.bytes_done, linked_bytes=making.bytes_linked)


def _faults(faults: Iterable[BackupFault]) -> Iterable[admin_pb2.BackupFault]:
    return (admin_pb2.BackupFault(topic=one.topic, incarnation=one.incarnation, what=one.what) for one in faults)
