"""What a client and its server take of the processor and of memory, as Linux tells."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SESSION, _USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 3, 11, 12, 21
"""Places in `/proc/PID/stat` after the name of the command."""


def _stat(process: int | str) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()


def _processes(session: int) -> Iterator[list[str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            fields = _stat(folder.name)
            if int(fields[_SESSION]) == session:
                yield fields


def _cpu_seconds(fields: list[str]) -> float:
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_SECOND


def cpu_seconds_of(process: int) -> float:
    """Processor time that a process has taken so far, to a hundredth of a second."""
    return _cpu_seconds(_stat(process))


def cpu_seconds(session: int) -> float:
    """The same of the processes of a session, those aside that have ended."""
    return sum(map(_cpu_seconds, _processes(session)))


def resident_bytes(session: int) -> int:
    """What they have in memory."""
    return sum(int(fields[_RESIDENT_PAGES]) for fields in _processes(session)) * _PAGE_BYTES


def _most_resident_bytes() -> int:
    """What this process has had in memory. (That of `getrusage` is its parent's, if that had more.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Usage:
    """Of this process, a client, and of its server, which is a session of processes, from now on."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._client_before, self._server_before = time.process_time(), cpu_seconds(server)

    def so_far(self) -> dict[str, float]:
        """Seconds of the processor, and megabytes resident: the client's are the most that it has had."""
        return {
            "client_cpu_seconds": time.process_time() - self._client_before,
            "server_cpu_seconds": cpu_seconds(self._server) - self._server_before,
            "client_mb": _most_resident_bytes() / (1 << 20),
            "server_mb": resident_bytes(self._server) / (1 << 20),
        }
