"""The parent of several workers: starts each of them, and again when it ends, until all are to stop."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from broker_sidecar import directory
from broker_sidecar.notify import BEATS_WITHIN_PATIENCE, PROCESS_VARIABLE, Listener, Manager, patience_seconds
from seqdedupe.locks import Lock

logger = logging.getLogger("seqdedupe.workers")

EXIT_ERROR = 1

_BEFORE_IT_SERVED = (-signal.SIGTERM, -signal.SIGINT)
"""How a worker ends that is told to stop before it has a handler for it: it has not opened anything yet."""

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
"""Before a worker that has ended is started again: twice as long each time, until one has run for so long."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_ONCE = ("--rebuild-store", "--give-up-journal")
"""Flags of a start that somebody wants, and not of each that follows."""


class Worker:
    """A worker's process, and whichever takes its place."""

    def __init__(self, number: int, flags: list[str]) -> None:
        self._number = number
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._looks = 0
        self.serves = False
        """Whether it has said so, which it does only where somebody wants to know."""
        self.environment: Mapping[str, str] = os.environ

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def told(self, values: Mapping[str, str]) -> None:
        """It has said this."""
        self._looks = 0
        # One that stops says nothing more at its end, and is not to be ended for that.
        self.serves = (self.serves or "READY" in values) and "STOPPING" not in values

    def look(self) -> None:
        """To be called at each beat. kill -9, if it serves and has said nothing for as many as it is given: its event
        loop stands still. Looks are counted, and not time: what was stopped as a whole goes on."""
        self._looks += 1
        if self._process is not None and self.serves and self._looks > BEATS_WITHIN_PATIENCE:
            logger.error("worker stands still", extra={"worker": self._number, "pid": self._process.pid})
            self.serves = False
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self, stopping: asyncio.Event) -> int:
        """Until it has ended by itself after `stopping`; its exit status, 0 if there was nothing to drain."""
        delay_seconds = FIRST_DELAY_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            try:
                status = await self._run_once(stopping)
            except OSError as e:
                # There can be no process now. The other workers must not end with this one.
                logger.error("worker not started: %s", e, extra={"worker": self._number})
                status = EXIT_ERROR
            if stopping.is_set():
                return 0 if status in _BEFORE_IT_SERVED else status
            if asyncio.get_running_loop().time() - began > LONGEST_DELAY_SECONDS:
                delay_seconds = FIRST_DELAY_SECONDS
            told = {"worker": self._number, "status": status, "delay_seconds": delay_seconds}
            logger.error("worker ended", extra=told)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay_seconds)
                return status
            delay_seconds = min(2 * delay_seconds, LONGEST_DELAY_SECONDS)

    async def _run_once(self, stopping: asyncio.Event) -> int:
        """From its start to its end; the exit status. Raises OSError if it cannot be started."""
        self.serves = False
        command = [sys.executable, "-m", "broker_sidecar", *self._flags]
        self._process = process = await asyncio.create_subprocess_exec(
            *command, env=self.environment, preexec_fn=partial(_end_with, os.getpid())
        )
        self._flags = [flag for flag in self._flags if flag not in _ONCE]
        logger.info("worker started", extra={"worker": self._number, "pid": process.pid})
        if stopping.is_set():
            self.send(signal.SIGTERM)
        return await process.wait()

    def send(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


async def run_all(workers: Sequence[Worker], lock: Lock) -> int:
    """Runs them until SIGTERM or SIGINT, and tells the service manager how they are; the exit status, 0 if all have
    drained. They are stopped too when the directory's lock is lost."""
    stopping = asyncio.Event()
    manager = Manager(os.environ)

    def stop() -> None:
        stopping.set()
        manager.tell(STOPPING="1", STATUS="Draining")
        send(signal.SIGTERM)

    def send(number: int) -> None:
        for worker in workers:
            worker.send(number)

    async def stop_without_lock() -> None:
        logger.critical("the workers are stopped: %s", await directory.lost(lock))
        stop()

    watching = asyncio.ensure_future(stop_without_lock())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, send, signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    with _managed(manager, workers):
        statuses = await asyncio.gather(*(worker.run(stopping) for worker in workers))
    logger.info("stopped")
    if watching.done():
        return EXIT_ERROR
    watching.cancel()
    # Of one that was killed it is negative: it has not drained.
    return max(EXIT_ERROR if status < 0 else status for status in statuses)


@contextlib.contextmanager
def _managed(manager: Manager, workers: Sequence[Worker]) -> Iterator[None]:
    """During the block the service manager is told what the workers say together, if there is one; and one of them
    that stands still is ended, to be started again, for the manager sees the parent alone."""
    if not manager.is_there:
        yield
        return
    is_watched = patience_seconds(os.environ) is not None
    is_ready = False

    def status() -> str:
        return f"{sum(worker.serves for worker in workers)} of {len(workers)} workers serve"

    def beat() -> str:
        if is_watched:
            for worker in workers:
                worker.look()
        return status()

    def told(pid: int, values: dict[str, str]) -> None:
        nonlocal is_ready
        for worker in workers:
            if worker.pid == pid:
                worker.told(values)
        if not is_ready and all(worker.serves for worker in workers):
            is_ready = True
            manager.tell(READY="1", STATUS=status())

    listener = Listener(told)
    environment = {name: value for name, value in os.environ.items() if name != PROCESS_VARIABLE}
    for worker in workers:
        worker.environment = environment | listener.environment()
    telling = asyncio.ensure_future(manager.keep_telling(beat))
    try:
        yield
    finally:
        telling.cancel()
        listener.close()


def _end_with(parent: int) -> None:
    """In a worker before it begins: it drains when its parent is killed. Nobody would start it again. A SIGHUP that
    comes before there is anything to be read again is for nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_ERROR)
