"""Whether this process lives, for whoever started it, and for itself.

`Manager` tells a service manager, as `sd_notify(3)` has it: that the sidecar serves, how far it is, that it stops; and,
if it wants that (`WatchdogSec`), again and again that the event loop runs. NOTIFY_SOCKET in the environment says where;
without it nobody is told. That nobody listens there changes nothing. `Listener` hears what workers tell their parent
so. `Watchdog` ends a process whose event loop stands still.
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
"""A change of the status is told after so long; more often if the manager's patience is shorter."""
BEATS_WITHIN_PATIENCE = 4

SOCKET_VARIABLE = "NOTIFY_SOCKET"
PATIENCE_VARIABLE = "WATCHDOG_USEC"
"""A process that says nothing for so many microseconds stands still."""
PROCESS_VARIABLE = "WATCHDOG_PID"

_MAX_NOTICE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, as the kernel says."""


def patience_seconds(environment: Mapping[str, str]) -> float | None:
    """After how long without a word this process counts as one that stands still; None: never."""
    microseconds = environment.get(PATIENCE_VARIABLE, "")
    is_ours = environment.get(PROCESS_VARIABLE, str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() and int(microseconds) else None


class Manager:
    """Whoever started this process, if that one wants to be told. Telling never waits and never fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        where = environment.get(SOCKET_VARIABLE, "")
        # With @ for the zero byte: a name that is in no file system.
        self._address = f"\0{where[1:]}" if where.startswith("@") else where
        self._patience_seconds = patience_seconds(environment)
        self._owed: dict[str, str] = {}

    @property
    def is_there(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._address)

    def tell(self, **values: str) -> None:
        """Tells it. While the manager takes nothing it is kept, and told with what comes next."""
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
            # Gone, or never there: the sidecar serves without it.
            logger.debug("the service manager is not told: %s", e)
        self._owed.clear()

    async def keep_telling(self, status: Callable[[], str]) -> None:
        """Tells that the event loop runs, and the status if there is another one, until it is cancelled."""
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
    """Where the processes that this one starts tell what they would tell a service manager.

    `on_told` is called with the number of the process and what it tells; the kernel says which one it is, so nobody
    else can speak for it. Reads on the event loop it is made on, until `close`.
    """

    def __init__(self, on_told: Callable[[int, dict[str, str]], None]) -> None:
        self._on_told = on_told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The kernel finds a name that is free.
        self._socket.bind("")
        self._name: bytes = self._socket.getsockname()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def environment(self) -> dict[str, str]:
        """For a process that is to be heard here."""
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


# -- A process whose event loop stands still ends. The threads of Pulsar's client go on answering the broker's pings,
# so that it would hold its topics for ever, and no other sidecar could have them.

STANDS_STILL_SECONDS = 30.0
"""As long as a broker waits for a ping, by default. No step of the event loop takes a second."""
LOOKS = 10
"""So many looks in a row must find the event loop where it was. A process that was stopped as a whole, or had no
processor, has not looked either, and goes on."""
TELL_SECONDS = 2


class Watchdog:
    """Watches the event loop it is made on, by a thread, until the process ends. `end` is called there, and ends it.

    A loop that is kept by something that never lets go of the interpreter's lock is not noticed.
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
                # Should telling why not end, because nobody takes what is told.
                signal.alarm(TELL_SECONDS)
                faulthandler.dump_traceback()
                self._end(f"its event loop has stood still for {self._limit_seconds:.0f} s")
