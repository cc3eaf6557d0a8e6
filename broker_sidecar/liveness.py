"""The liveness of this process, for the process that started it, and for itself.

`Manager` reports to a service manager, as in `sd_notify(3)`: that the sidecar serves, its progress, and that it stops.
If the service manager has a limit for silence (`WatchdogSec`), `Manager` also reports regularly that the event loop
runs. NOTIFY_SOCKET in the environment is the manager's address. Without this variable, nothing is reported. If nothing
listens at the address, the reports are lost, and the process continues. `Listener` receives such reports from workers
for their parent. `Watchdog` ends a process whose event loop is stuck.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger("seqdedupe.notify")

BEAT_SECONDS = 5.0
"""The time after which a change of the status is reported. It is shorter if the manager's time limit is shorter."""
BEATS_WITHIN_PATIENCE = 4

SOCKET_VARIABLE = "NOTIFY_SOCKET"
PATIENCE_VARIABLE = "WATCHDOG_USEC"
"""The microseconds without a report after which a process counts as stuck."""
PROCESS_VARIABLE = "WATCHDOG_PID"

_MAX_NOTICE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, as reported by the kernel."""


def patience_seconds(environment: Mapping[str, str]) -> float | None:
    """Return the time without a report after which this process counts as stuck; None: never."""
    microseconds = environment.get(PATIENCE_VARIABLE, "")
    is_ours = environment.get(PROCESS_VARIABLE, str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() and int(microseconds) else None


class Manager:
    """The service manager that started this process, if it wants reports. Reporting never waits and never fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        where = environment.get(SOCKET_VARIABLE, "")
        # @ stands for the zero byte: a name that is in no file system.
        self._address = f"\0{where[1:]}" if where.startswith("@") else where
        self._patience_seconds = patience_seconds(environment)
        self._owed: dict[str, str] = {}

    @property
    def is_there(self) -> bool:
        """Whether there is a manager that wants reports."""
        return bool(self._address)

    def tell(self, **values: str) -> None:
        """Report these values. If the manager accepts nothing now, they are kept and sent with the next report."""
        if not self.is_there:
            return
        self._owed |= values
        lines = "\n".join(f"{name}={value}" for name, value in self._owed.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending:
                sending.sendto(lines.encode(), self._address)
        except BlockingIOError:
            return
        except OSError as e:
            # The manager has gone, or never existed: the sidecar serves without it.
            logger.debug("the service manager cannot be notified: %s", e)
        self._owed.clear()

    async def keep_telling(self, status: Callable[[], str]) -> None:
        """Report that the event loop runs, and the status if it has changed, until cancelled."""
        beat_seconds = min(BEAT_SECONDS, (self._patience_seconds or BEAT_SECONDS) / BEATS_WITHIN_PATIENCE)
        told = ""
        while self.is_there:
            now = status()
            values = {} if now == told else {"STATUS": now}
            if self._patience_seconds is not None:
                values["WATCHDOG"] = "1"
            if values:
                self.tell(**values)
            told = now
            await asyncio.sleep(beat_seconds)


class Listener:
    """A receiver for the reports that child processes would send to a service manager.

    `on_told` is called with the process's number and the reported values. The kernel identifies the sender, so no other
    process can report for it. It reads on the event loop on which it was made, until `close`.
    """

    def __init__(self, on_told: Callable[[int, dict[str, str]], None]) -> None:
        self._on_told = on_told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The kernel chooses a free name.
        self._socket.bind("")
        self._name: bytes = self._socket.getsockname()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to report here."""
        return {SOCKET_VARIABLE: f"@{self._name[1:].decode()}"}

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        told, passed, _, _ = self._socket.recvmsg(_MAX_NOTICE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                lines = told.decode(errors="replace").splitlines()
                self._on_told(_CREDENTIALS.unpack(data)[0], dict(line.split("=", 1) for line in lines if "=" in line))


# -- A process whose event loop is stuck ends. Otherwise the threads of Pulsar's client would still answer the broker's
# pings: the process would hold its topics for ever, and no other sidecar could have them.

STANDS_STILL_SECONDS = 30.0
"""The time that a broker waits for a ping, by default. No step of the event loop takes a second."""
LOOKS = 10
"""The number of consecutive looks that must find the event loop in the same place. If the whole process was stopped or
had no processor, the thread has not looked either, so the process is not ended."""
TELL_SECONDS = 2


class Watchdog:
    """A thread that watches the event loop on which it was created. If the loop is stuck, the thread calls `end`, which
    ends the process.

    The thread cannot detect a loop that is blocked by code that never releases the interpreter's lock.
    """

    def __init__(self, end: Callable[[str], None], limit_seconds: float = STANDS_STILL_SECONDS) -> None:
        self._end = end
        self._limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._beats = 0
        self._beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _beat(self) -> None:
        self._beats += 1
        self._loop.call_later(self._limit_seconds / LOOKS / 2, self._beat)

    def _watch(self) -> None:
        seen = looks = 0
        while True:
            time.sleep(self._limit_seconds / LOOKS)
            seen, looks = (seen, looks + 1) if self._beats == seen else (self._beats, 0)
            if looks == LOOKS:
                # The report may block, because no process reads it. Then this alarm ends the process.
                signal.alarm(TELL_SECONDS)
                faulthandler.dump_traceback()
                self._end(f"its event loop has stood still for {self._limit_seconds:.0f} s")
