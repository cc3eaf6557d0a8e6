"""The places where a sidecar listens: addresses, and the path of a Unix socket."""

import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from seqdedupe.address import SidecarAddress, cannot_listen, family_of
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.locks import Lock

_LOCK_SUFFIX = ".lock"
_NAME_BYTES = 3
"""The random bytes of a socket's temporary name: the path of a socket may have no more than 107 letters."""
_CREDENTIALS = struct.Struct("3i")


def check_nobody_listens(address: SidecarAddress, key: str) -> None:
    """Raise CANNOT_LISTEN if another process listens at the address. Call this before slow steps.

    Other problems of an address appear when the sidecar listens there."""
    if address.path:
        path = Path(address.path)
        if path.exists() and not path.is_socket():
            raise cannot_listen(address, FileExistsError(), key)
        if owner := _listener(path):
            raise _taken(address, owner, key)
        return
    e = why_not_bound(address)
    if e is not None and e.errno == errno.EADDRINUSE:
        raise cannot_listen(address, e, key) from e


def why_not_bound(address: SidecarAddress) -> OSError | None:
    """Return why this process cannot listen at a host and port now; None if it can."""
    with socket.socket(family_of(address.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host.strip("[]"), address.port))
        except OSError as e:
            return e
    return None


class SocketPath:
    """The path of a Unix socket, which this process owns until `close`.

    gRPC removes any file that it finds at a path, both when it begins and when it ends. So it listens under another
    name in the same folder, and the socket is then moved to the path.
    """

    def __init__(self, address: SidecarAddress, mode: int, key: str) -> None:
        """Raises CANNOT_LISTEN if another process listens there, or is about to; OSError."""
        self._address = address
        self._path = Path(address.path)
        self._mode = mode
        self._key = key
        self._lock: Lock | None = None
        self._socket: tuple[int, int, int] | None = None
        self._own()

    def _own(self) -> None:
        if self._lock is None or not self._lock.is_held():
            try:
                lock = Lock.take(Path(f"{self._path}{_LOCK_SUFFIX}"))
            except BlockingIOError as e:
                raise _taken(self._address, str(e.strerror), self._key) from e
            if self._lock is not None:
                self._lock.close()
            self._lock = lock
        try:
            # Another process may listen that does not use such a lock.
            check_nobody_listens(self._address, self._key)
        except SeqdedupeError:
            self.close()
            raise

    def listen(self, add_port: Callable[[SidecarAddress], int]) -> None:
        """Make a server listen at the path. Raises CANNOT_LISTEN if another process does; RuntimeError; OSError."""
        self._own()
        # A process of another container may have the same number as this one, and the same folder.
        own = self._path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")
        add_port(replace(self._address, path=str(own)))
        own.chmod(self._mode)
        made = _identity(own)
        own.rename(self._path)
        self._socket = made

    def is_there(self) -> bool:
        """Whether the path still leads to this process."""
        try:
            return self._socket == _identity(self._path)
        except OSError:
            return False

    def close(self) -> None:
        """Remove the socket, unless another one has replaced it. May be called again."""
        if self.is_there():
            with suppress(OSError):
                self._path.unlink()
        self._socket = None
        if self._lock is not None:
            self._lock.remove()
            self._lock = None


def _identity(path: Path) -> tuple[int, int, int]:
    """Return a file's identity. Inode numbers are used again, so it has the time at which the socket was made."""
    found = os.stat(path, follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listener(path: Path) -> str:
    """Describe the process that listens at a path; empty if none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return ""
        except OSError as e:
            # It accepts no more connections now, or none from this process.
            return f"something that does not answer ({e.strerror or e})"
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return f"process {pid}"


def _taken(address: SidecarAddress, owner: str, key: str) -> SeqdedupeError:
    what = f"{key} = {str(address)!r}: cannot listen there, because {owner} does"
    return error("CANNOT_LISTEN", what, hint="Stop that process, or choose another path.")
