"""A file that notices when it becomes another one while it is read."""

import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_TAIL_BYTES = 4096
"""So much of what was read last is looked at again after each read."""


class ChangedError(Exception):
    """The file is not the one any more that was begun; the text says in what."""


class SteadyFile(io.FileIO):
    """The raw bytes of a file, or of standard input (None). It may grow while it is read; all else is a ChangedError.

    Each read of a regular file finds out whether what was read before it still stands there, before its own bytes
    are given to anybody: so a file that was cut and written anew is not gone on with in its middle. `check` looks at
    the rest. Not noticed is what was changed before the last 4 KiB read, in a file that grew besides.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(0 if path is None else path, closefd=path is not None)
        self._path = path
        self._tail, self._tail_end = b"", 0
        status = os.fstat(self.fileno())
        self.is_regular = stat.S_ISREG(status.st_mode)
        self._size, self._modified_ns = status.st_size, status.st_mtime_ns

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """As of any raw file. Raises ChangedError."""
        start = self.tell() if self.is_regular else 0
        count = super().readinto(buffer) or 0
        if not self.is_regular:
            return count
        before = self._tail
        if os.pread(self.fileno(), len(before), self._tail_end - len(before)) != before:
            raise ChangedError("was cut or rewritten")
        if count:
            read = bytes(memoryview(buffer)[max(0, count - _TAIL_BYTES) : count])
            before = before if start == self._tail_end else b""
            self._tail, self._tail_end = (before + read)[-_TAIL_BYTES:], start + count
        return count

    def check(self, *, is_complete: bool) -> None:
        """Raises ChangedError if the name stands for another file by now (but for a pipe that was read to its end), if
        this one was cut, or if, though it is complete, it was written to without growing."""
        own = os.fstat(self.fileno())
        if self._path is not None and (self.is_regular or not is_complete):
            named = None
            with suppress(FileNotFoundError):
                named = os.stat(self._path)
            if named is None or not os.path.samestat(own, named):
                raise ChangedError("was replaced, moved or removed")
        if not self.is_regular:
            return
        if own.st_size < self._size:
            raise ChangedError("was cut")
        if is_complete and own.st_size == self._size and own.st_mtime_ns != self._modified_ns:
            raise ChangedError("was rewritten")
        self._size, self._modified_ns = own.st_size, own.st_mtime_ns
