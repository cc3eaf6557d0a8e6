"""Where positions live: the contract of a cursor, a place that keeps how far somebody has got with a topic.

Two kinds are here: in a file, and with the sidecar. tests/client/cursors.py is the suite that each kind has to pass.
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
    """What a cursor keeps: a position, and a note of its owner's, up to 1,024 bytes of UTF-8 that nobody else reads."""

    position: Position
    note: str = ""


class Cursor(ABC):
    """A place that keeps one position. What is kept survives a power cut.

    Effects that are not in the cursor's own transaction are at least once: after a crash what came since the last
    `compare_and_set` comes again. So they should be idempotent. Exactly once takes a position in the database that
    the effects go to, in their transaction.
    """

    @abstractmethod
    async def read(self) -> Kept | None:
        """What is kept; None if nothing ever was. Raises what keeps it from being read, never something older."""

    @abstractmethod
    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        """Keeps `new` if what is kept equals `expected` (None: nothing is), in one step; durable when it returns.

        Raises CURSOR_MOVED, which changes nothing, if something else is kept; INVALID_POSITION for what cannot be kept.
        If it raises OUTCOME_UNKNOWN or what is no SeqdedupeError, or is cancelled, either may be kept: the one or the
        other, and whole. All other errors say that nothing has changed.
        """


def check(kept: Kept) -> None:
    """Raises INVALID_POSITION, INVALID_REQUEST for what no cursor keeps."""
    position, note = kept
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position!r} is no position: its parts do not fit together")
    try:
        size = len(note.encode())
    except UnicodeEncodeError as e:
        what = "a cursor's note is not valid Unicode"
        raise error("INVALID_REQUEST", what, hint="Give a note of valid text.") from e
    if size > MAX_NOTE_BYTES:
        what = f"a cursor's note has {size} bytes: at most {MAX_NOTE_BYTES} are taken"
        raise error("INVALID_REQUEST", what, hint="Shorten the note, or keep what it says elsewhere.")


def moved(name: str, expected: Kept | None, found: Kept | None) -> SeqdedupeError:
    """The error of a compare-and-set that finds something else than it expects."""
    there = "nothing" if found is None else f"the position {found.position}"
    wanted = "nothing" if expected is None else f"{expected.position}"
    if found and expected and found.position == expected.position:
        there += " with another note"
    return error("CURSOR_MOVED", f"the cursor {name} keeps {there}, and not {wanted}: somebody else has moved it")


class CursorMoves:
    """The moves of a cursor by its one owner, who knows a move of its own again, also one whose answer was lost."""

    def __init__(self, cursor: Cursor) -> None:
        self.kept: Kept | None = None
        """What was last read, or set with success."""
        self._cursor = cursor
        self._in_doubt: set[Kept] = set()  # moves from there, which may be in force

    async def read(self) -> Kept | None:
        """What the cursor keeps, from which the next move goes."""
        self.kept = await self._cursor.read()
        return self.kept

    async def move(self, new: Kept) -> None:
        """Keeps `new`. Raises as `compare_and_set`: CURSOR_MOVED only if what is kept is no move of this owner's."""
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
                self._in_doubt.clear()  # the others went from what is kept no more
            except BaseException:
                self._in_doubt.add(new)
                raise
            else:
                self.kept = new
                self._in_doubt.clear()
                return


# -- A cursor in a file: `docs/guides/cursors.md` has the format, byte by byte.

MAGIC = b"seqdedupe-cursor"
FORMAT_VERSION = 1

_HEAD = files.head_of(MAGIC, FORMAT_VERSION)
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


# -- A cursor that the sidecar keeps: named, of one topic, in the topic's log and the sidecar's store.


class SidecarCursor(Cursor):
    """A named cursor of a topic. Made by `Client.cursor`; who may read the topic moves those whose names are its own
    (docs/reference/rules.md).

    Its calls wait for up to 30 seconds for a topic that recovers, or moves. Raises NotFoundError if there is no topic,
    INVALID_NAME, TOO_MANY_CURSORS, AccessDeniedError, UnavailableError (LOG_REFUSED, SHARE_EXCEEDED: it did not move).
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
