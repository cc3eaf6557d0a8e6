"""A cursor in a file: `docs/cursors.md` has the format, byte by byte."""

import asyncio
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqdedupe import sealed
from seqdedupe.client.cursor import Cursor, Kept, check, moved
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.message_id import Position

MAGIC = b"seqdedupe-cursor"
FORMAT_VERSION = 1

_HEAD = sealed.head_of(MAGIC, FORMAT_VERSION)
_LENGTH = struct.Struct("<I")


class FileCursor(Cursor):
    """A cursor in a file on a local disk, in a folder that is there. Processes of one machine may share it.

    A new position is written to a file beside it, synced, renamed over it, and the folder is synced: after a crash
    there is the old one or the new one, whole. Beside it stands a lock file, `.NAME.lock`, that is never removed. If
    the path is a symbolic link, all of that is where it points to, and the link stays.

    Its calls raise INVALID_OPTION without that folder (as of a disk that is not mounted: a cursor in it may keep
    something) and for a path that is a folder; OSError for what else the file system refuses; CURSOR_DAMAGED if any
    byte is not as it was written, NEWER_FORMAT if a newer version wrote it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    async def read(self) -> Kept | None:
        return await asyncio.to_thread(self._read)

    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        check(new)
        await asyncio.to_thread(self._compare_and_set, expected, new)

    def _compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        with self._locked() as path:
            if (found := self._read()) != expected:
                raise moved(str(self.path), expected, found)
            with sealed.writing(path, _HEAD) as put:
                for part in (new.position.to_bytes(), new.note.encode()):
                    put(_LENGTH.pack(len(part)) + part)

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        """No other process, nor thread, compares and sets meanwhile, by whichever link. The system lets go of the lock
        with a process. Gives the file itself."""
        path = self._file
        lock = path.with_name(f".{path.name}.lock")
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._without_folder() from e
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(file)

    @property
    def _file(self) -> Path:
        """Where the path leads, now."""
        return Path(os.path.realpath(self.path))

    def _read(self) -> Kept | None:
        try:
            with self.path.open("rb") as file:
                size = sealed.check(self.path, file, _HEAD, 2 * _LENGTH.size, "a cursor")
                return _parsed(file.read(size))
        except (FileNotFoundError, NotADirectoryError) as e:
            if self._file.parent.is_dir():
                return None
            raise self._without_folder() from e
        except IsADirectoryError as e:
            hint = "Name a file in a folder that is there."
            raise error("INVALID_OPTION", f"the cursor's path {self.path} is a folder", hint=hint) from e
        except (InvalidRequestError, ValueError) as e:
            raise self._damaged(str(e)) from e
        except SeqdedupeError as e:
            raise self._damaged(e.message) if e.reason == "INVALID_SOURCE" else e from e

    def _without_folder(self) -> SeqdedupeError:
        what = f"the folder of the cursor {self.path} is not there"
        return error("INVALID_OPTION", what, hint="Is its disk mounted? A cursor makes its file, and no folder.")

    def _damaged(self, why: str) -> SeqdedupeError:
        return error("CURSOR_DAMAGED", why if str(self.path) in why else f"{self.path}: {why}")


def _parsed(body: bytes) -> Kept:
    """Raises ValueError, INVALID_POSITION."""
    parts = []
    while len(body) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        parts.append(body[_LENGTH.size : end])
        body = body[end:]
    position, note = parts
    kept = Kept(Position.from_bytes(position), note.decode())
    check(kept)
    return kept
