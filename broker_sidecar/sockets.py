"""The addresses at which a sidecar listens: TCP addresses, and the path of a Unix socket."""

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
"""The number of random bytes in a socket's temporary name. The name must be short, because a socket's path may have at
most 107 characters."""
_CREDENTIALS = struct.Struct("3i")


def check_nobody_listens(address: SidecarAddress, key: str) -> None:
    """Raise CANNOT_LISTEN if another process listens at the address. Call this function before slow steps of a start.

    Other problems of the address are only reported when the sidecar begins to listen.
    """
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
    """The path of a Unix socket. This process owns the path until `close`.

    gRPC removes every file at the path on which it listens, both when it begins and when it ends. So gRPC listens at a
    temporary path in the same folder, and the socket is then renamed to its final path.
    """

    def __init__(self, address: SidecarAddress, mode: int, key: str) -> None:
        """Raises CANNOT_LISTEN if another process listens at the path or holds the lock for it; OSError."""
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
            # A process that does not use this lock may be listening at the path.
            check_nobody_listens(self._address, self._key)
        except SeqdedupeError:
            self.close()
            raise

    def listen(self, add_port: Callable[[SidecarAddress], int]) -> None:
        """Make a server listen at the path. Raises CANNOT_LISTEN if another process listens there; RuntimeError;
        OSError."""
        self._own()
        # The temporary name is random. A process ID is not enough, because a process in another container may have the
        # same ID and use the same folder.
        own = self._path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")
        add_port(replace(self._address, path=str(own)))
        own.chmod(self._mode)
        made = _identity(own)
        own.rename(self._path)
        self._socket = made

    def is_there(self) -> bool:
        """Whether the path still leads to this process's socket."""
        try:
            return self._socket == _identity(self._path)
        except OSError:
            return False

    def close(self) -> None:
        """Remove the socket, unless another socket has replaced it. May be called repeatedly."""
        if self.is_there():
            with suppress(OSError):
                self._path.unlink()
        self._socket = None
        if self._lock is not None:
            self._lock.remove()
            self._lock = None


def _identity(path: Path) -> tuple[int, int, int]:
    """Return a file's identity. It includes the modification time, because inode numbers are reused."""
    found = os.stat(path, follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listener(path: Path) -> str:
    """Return a description of the process that listens at a path; empty if no process listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return ""
        except OSError as e:
            # The listener accepts no more connections at the moment, or no connections from this process.
            return f"something that does not answer ({e.strerror or e})"
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return f"process {pid}"


def _taken(address: SidecarAddress, owner: str, key: str) -> SeqdedupeError:
    what = f"{key} = {str(address)!r}: cannot listen there, because {owner} does"
    return error("CANNOT_LISTEN", what, hint="Stop that process, or choose a different path.")
