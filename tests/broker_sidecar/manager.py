"""A service manager that starts one sidecar: it listens to what it receives, and does nothing."""

import contextlib
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from seqdedupe.testing import LAST_RESORT_SECONDS

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
_MAX_NOTICE_BYTES = 65_536


class Told:
    """What was reported, in order, as `NAME=value`."""

    def __init__(self, listening: socket.socket, address: str) -> None:
        self._socket = listening
        self._socket.settimeout(TIMEOUT_SECONDS)
        self.environment = {"NOTIFY_SOCKET": address}
        self.lines: list[str] = []

    def until(self, is_told: Callable[[str], bool]) -> str:
        """The first line from now on of which this is true; TimeoutError."""
        while True:
            new = self._socket.recv(_MAX_NOTICE_BYTES).decode().split("\n")
            self.lines += new
            for line in new:
                if is_told(line):
                    return line


@contextlib.contextmanager
def managing(*, is_abstract: bool = False) -> Iterator[Told]:
    """A manager for the length of a block, with a socket in a folder or in the abstract namespace."""
    with (
        tempfile.TemporaryDirectory(prefix="seqdedupe-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening,
    ):
        path = str(Path(folder, "notify"))
        listening.bind("" if is_abstract else path)
        name = f"@{listening.getsockname()[1:].decode()}" if is_abstract else path
        yield Told(listening, name)
