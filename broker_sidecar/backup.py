"""The call of AdminService that makes a backup of all that this process has, while it serves."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from broker_sidecar.backing_up import back_up
from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.rpc import Context, parse_small
from broker_sidecar.streams import Stream, Streams
from seqdedupe.backup.making import Making
from seqdedupe.backup.manifest import Fault
from seqdedupe.errors import error
from seqdedupe.files import UNFINISHED
from seqdedupe.store import directories
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.backup")

PROGRESS_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Backup:
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

    async def _made(self, making: Making, others: list[Path], stream: Stream) -> int:
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
    async def _making(self, to: Path) -> AsyncIterator[Making]:
        """A backup that is whole after the block, or gone. Raises BACKUP_FAILED."""
        making = Making(to)
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


def _progress(making: Making) -> admin_pb2.BackupResponse:
    return admin_pb2.BackupResponse(bytes=making.bytes_done, linked_bytes=making.bytes_linked)


def _faults(faults: Iterable[Fault]) -> Iterable[admin_pb2.BackupFault]:
    return (admin_pb2.BackupFault(topic=one.topic, incarnation=one.incarnation, what=one.what) for one in faults)
