"""Cursors: the contract of a cursor, and two kinds of cursor. A cursor stores the position up to which a reader has
read a topic.

A `FileCursor` is stored in a file. A `SidecarCursor` is stored by the sidecar. Each kind must pass the test suite
tests/client/cursors.py.
"""

import asyncio
import fcntl
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from seqdedupe import files
from seqdedupe.client.connection import ClientCalls
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe.names import check_cursor_name, topic_name
from seqdedupe.v1 import read_pb2

MAX_NOTE_BYTES = 1024


class Kept(NamedTuple):
    """The value of a cursor: a position, and a note of up to 1,024 bytes of UTF-8. Only the cursor's owner interprets
    the note."""

    position: Position
    note: str = ""


class Cursor(ABC):
    """Durable storage of one position. The stored value survives a power cut.

    Effects outside the cursor's own transaction happen at least once: after a crash, the reader delivers the messages
    since the last `compare_and_set` again. So effects should be idempotent. For exactly-once effects, store the
    position in the same database as the effects, in the same transaction.
    """

    @abstractmethod
    async def read(self) -> Kept | None:
        """Return the stored value; None if nothing was ever stored. If the value cannot be read, raise the cause; never
        return an older value."""

    @abstractmethod
    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        """Store `new` in one step if the stored value equals `expected` (None: nothing is stored). When the call
        returns, the new value is durable.

        Raises CURSOR_MOVED if another value is stored, and INVALID_POSITION for a value that cannot be stored. After
        OUTCOME_UNKNOWN, an error that is not a SeqdedupeError, or a cancellation, either the old or the new value is
        stored completely. After any other error nothing has changed.
        """


def check(kept: Kept) -> None:
    """Raise INVALID_POSITION or INVALID_REQUEST for a value that a cursor cannot store."""
    position, note = kept
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position!r} is not a position: its parts do not fit together")
    try:
        size = len(note.encode())
    except UnicodeEncodeError as e:
        what = "a cursor's note is not valid Unicode"
        raise error("INVALID_REQUEST", what, hint="Give a note of valid text.") from e
    if size > MAX_NOTE_BYTES:
        what = f"a cursor's note has {size} bytes: at most {MAX_NOTE_BYTES} are taken"
        raise error("INVALID_REQUEST", what, hint="Shorten the note, or store its content elsewhere.")


def moved(name: str, expected: Kept | None, found: Kept | None) -> SeqdedupeError:
    """Return the error of a compare-and-set whose expected value differs from the stored value."""
    there = "nothing" if found is None else f"the position {found.position}"
    wanted = "nothing" if expected is None else f"{expected.position}"
    if found and expected and found.position == expected.position:
        there += " with another note"
    return error(
        "CURSOR_MOVED", f"the cursor {name} keeps {there}, and not {wanted}: another process has moved the cursor"
    )


class CursorMoves:
    """Moves a cursor that only this object moves. This class recognizes its own moves, even if the answer to a move was
    lost."""

    def __init__(self, cursor: Cursor) -> None:
        self.kept: Kept | None = None
        """The value last read, or last set with success."""
        self._cursor = cursor
        self._in_doubt: set[Kept] = set()  # moves from that value that may have taken effect

    async def read(self) -> Kept | None:
        """Return the cursor's value. The next move expects this value."""
        self.kept = await self._cursor.read()
        return self.kept

    async def move(self, new: Kept) -> None:
        """Store `new`. Raises the errors of `compare_and_set`. CURSOR_MOVED is raised only if another owner has stored
        the current value."""
        while True:
            try:
                await self._cursor.compare_and_set(self.kept, new)
            except SeqdedupeError as e:
                if e.reason == "OUTCOME_UNKNOWN":
                    self._in_doubt.add(new)
                if e.reason != "CURSOR_MOVED" or not self._in_doubt:
                    raise
                found = await self._cursor.read()
                if found not in self._in_doubt:
                    raise
                self.kept = found
                self._in_doubt.clear()  # the other moves expected a value that is no longer stored
            except BaseException:
                self._in_doubt.add(new)
                raise
            else:
                self.kept = new
                self._in_doubt.clear()
                return


# -- A cursor in a file. `docs/guides/cursors.md` describes the format byte by byte.

MAGIC = b"seqdedupe-cursor"
FORMAT_VERSION = 1

_HEAD = files.head_of(MAGIC, FORMAT_VERSION)
_LENGTH = struct.Struct("<I")


class FileCursor(Cursor):
    """A cursor in a file on a local disk, in an existing folder. Several processes of one machine may share the file.

    `compare_and_set` writes the new position to a temporary file in the same folder, syncs this file, renames it over
    the old file, and syncs the folder. So after a crash the file contains either the old or the new position, complete.
    A lock file in the same folder, `.NAME.lock`, is never removed. If the path is a symbolic link, all these files are
    in the folder of the link's target, and the link is kept.

    Calls raise:

    - INVALID_OPTION: the folder does not exist, or the path is a folder. (The folder is not created: it may be missing
      because its disk is not mounted, and that disk may contain a cursor.)
    - OSError: the file system refuses the call for another reason.
    - CURSOR_DAMAGED: a byte of the file differs from the byte that was written.
    - NEWER_FORMAT: a newer version wrote the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path: Path = Path(path)

    async def read(self) -> Kept | None:
        return await asyncio.to_thread(self._read)

    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        check(new)
        await asyncio.to_thread(self._compare_and_set, expected, new)

    def _compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        with self._locked() as path:
            if (found := self._read()) != expected:
                raise moved(str(self.path), expected, found)
            with files.writing_sealed(path, _HEAD) as put:
                for part in (new.position.to_bytes(), new.note.encode()):
                    put(_LENGTH.pack(len(part)) + part)

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        """Lock out every other process and thread, even if another thread or process opens the file by another link.
        Yield the path of the file that the link points to. When a process ends, the operating system releases its lock.
        """
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
        """The file that the path currently points to."""
        return Path(os.path.realpath(self.path))

    def _read(self) -> Kept | None:
        try:
            with self.path.open("rb") as file:
                size = files.check_sealed(self.path, file, _HEAD, 2 * _LENGTH.size, "a cursor")
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
        return error(
            "INVALID_OPTION", what, hint="Check whether the folder's disk is mounted. A cursor creates no folder."
        )

    def _damaged(self, why: str) -> SeqdedupeError:
        return error("CURSOR_DAMAGED", why if str(self.path) in why else f"{self.path}: {why}")


def _parsed(body: bytes) -> Kept:
    """Return the value in these bytes. Raises ValueError, INVALID_POSITION."""
    parts = []
    while len(body) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        parts.append(body[_LENGTH.size : end])
        body = body[end:]
    position, note = parts
    kept = Kept(Position.from_bytes(position), note.decode())
    check(kept)
    return kept


# -- A named cursor of one topic that the sidecar stores, in the topic's log and in its own store.


class SidecarCursor(Cursor):
    """A named cursor of a topic, made by `Client.cursor`. A client with permission to read the topic may move the
    cursors whose names belong to the client (docs/reference/rules.md).

    Calls wait for up to 30 seconds while the topic recovers or moves. They raise NotFoundError for an unknown topic,
    INVALID_NAME, TOO_MANY_CURSORS, AccessDeniedError, or UnavailableError (LOG_REFUSED, SHARE_EXCEEDED: the cursor did
    not move).
    """

    def __init__(self, calls: ClientCalls, topic: str, name: str) -> None:
        self.topic = topic_name(topic)
        self.name = name
        check_cursor_name(name)
        self._calls = calls

    async def read(self) -> Kept | None:
        request = read_pb2.GetCursorRequest(topic=self.topic, name=self.name)
        answer = await self._calls.call(lambda sidecar: sidecar.read.GetCursor, request)
        if not answer.HasField("kept"):
            return None
        return Kept(Position.from_proto(answer.kept.position), answer.kept.note)

    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        check(new)
        request = read_pb2.MoveCursorRequest(topic=self.topic, name=self.name, new=_value(new))
        if expected is not None:
            request.expected.CopyFrom(_value(expected))
        await self._calls.call(lambda sidecar: sidecar.read.MoveCursor, request)


def _value(kept: Kept) -> read_pb2.CursorValue:
    return read_pb2.CursorValue(position=kept.position.to_proto(), note=kept.note)
