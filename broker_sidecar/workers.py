"""Several sidecars on one data directory, each with its own shards, and the parent that starts them again.

`count_of` returns the number of workers. `divide` has `division.py` move the topics if that number has changed. `run`
is the parent, and `Worker` is one process and its successors.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from broker_sidecar import data_directory, kernels, telemetry
from broker_sidecar.config import Config
from broker_sidecar.liveness import BEATS_WITHIN_PATIENCE, PROCESS_VARIABLE, Listener, Manager, patience_seconds
from broker_sidecar.security import tokens
from seqdedupe.address import SidecarAddress, cannot_listen, family_of
from seqdedupe.errors import EXIT_FAILED, error
from seqdedupe.locks import Lock
from seqdedupe.names import shards_of_worker, to_text
from seqdedupe.store import directories
from seqdedupe.store.directories import Claim, Split, of_worker

logger = logging.getLogger("seqdedupe.workers")


def count_of(config: Config) -> int:
    """Return the number of workers to run. 1: the calling process is the sidecar, as without workers.

    Raises INVALID_CONFIGURATION if the data directory, or the one above a worker's, is changing to another number, or
    if its topics are on another log. Raises the errors of `read_split`.
    """
    folder = Path(config.data_directory)
    if (whole := directories.whole_of(folder)) is not None:
        directories.check_stays(whole)
    split = directories.read_split(folder)
    if split is None:
        return config.workers or 1
    if config.log != "embedded":
        raise error(
            "INVALID_CONFIGURATION", f"log = {config.log!r}: {folder} has workers with embedded logs", key="log"
        )
    if split.to is not None and config.workers not in (0, split.to):
        raise error(
            "INVALID_CONFIGURATION",
            f"workers is {config.workers}, but the data directory {folder} is being changed to {split.to}",
            hint=f"Start it with workers = {split.to} first.",
            key="workers",
        )
    return config.workers or split.to or split.workers


def divide(config: Config, count: int) -> None:
    """Give the data directory this number of workers, also if it had another number. Blocks.

    The caller has the directory's lock. Raises as `division.change`.
    """
    folder = Path(config.data_directory)
    split = directories.read_split(folder)
    if split is None:
        is_due = count > 1 and data_directory.has_data(folder)
    else:
        is_due = split.workers > 0 and (split.to or split.workers, split.to is None) != (count, True)
    if is_due:
        telemetry.configure(config.log_level, config.log_format)
        if kernels.prepare(config.data_directory):
            kernels.compile_first(config.data_directory)
        # Import it here: it imports compiled code.
        from broker_sidecar import division

        division.change(folder, count)


def run(config: Config, count: int, flags: Sequence[str], lock: Lock) -> int:
    """Run `count` workers with these flags until SIGTERM or SIGINT. Start a worker again if it ends.

    Return the exit status, 0 if all have drained. `lock` is the directory's. Raises CANNOT_LISTEN, OSError, and as
    `make`.
    """
    telemetry.configure(config.log_level, config.log_format)
    with contextlib.ExitStack() as held:
        folder = Path(config.data_directory)
        split = make(folder, count)
        if config.authentication == "token":
            tokens.make(folder)
            tokens.tell(folder, config.log_format)
        listen = [held.enter_context(_reserved(address)) for address in _addresses(config.listen, count)]
        advertised = _addresses(config.advertised_address, count) or listen
        also = [held.enter_context(_reserved(address)) for address in _addresses(config.also_listen, count)]
        metrics = _addresses(config.metrics_listen, count)
        logger.info("workers", extra={"addresses": ",".join(map(str, advertised)), "cluster_id": split.cluster_id})
        workers = [
            Worker(k, [*flags, *_flags(k, split, config, listen[k], advertised, also, metrics)])
            for k in range(split.workers)
        ]
        return asyncio.run(run_all(workers, lock))


def _flags(
    worker: int,
    split: Split,
    config: Config,
    listen: SidecarAddress,
    advertised: Sequence[SidecarAddress],
    also: Sequence[SidecarAddress],
    metrics: Sequence[SidecarAddress],
) -> list[str]:
    """Return a worker's flags: those that follow the parent's own flags. The last of equal flags counts."""
    keys = {
        "data-directory": of_worker(Path(config.data_directory), worker),
        "workers": 1,
        "listen": listen,
        "advertised-address": advertised[worker],
        "shards": to_text(shards_of_worker(worker, split.workers)),
        "peers": ",".join(map(str, advertised)),
        "cluster-id": split.cluster_id,
    }
    if also:
        keys["also-listen"] = also[worker]
    if metrics:
        keys["metrics-listen"] = metrics[worker]
    if config.audit_file:
        keys["audit-file"] = f"{config.audit_file}.{worker}"
    return [text for name, value in keys.items() for text in (f"--{name}", str(value))]


def make(folder: Path, count: int) -> Split:
    """Return how the directory is split. A new one is now split into `count` workers.

    Raises the errors of `read_split` and `check_workers`; OSError."""
    split = directories.read_split(folder) or Split(secrets.token_hex(directories.CLUSTER_ID_BYTES), 0, count)
    if split.to is not None:
        # The directory is still empty. The split becomes durable before any part, so that a part lost later is noticed.
        directories.write(folder, split)
        for worker in range(split.to):
            of_worker(folder, worker).mkdir(exist_ok=True)
            directories.write(of_worker(folder, worker), Claim(split.cluster_id, shards_of_worker(worker, split.to)))
        split = Split(split.cluster_id, split.to)
        directories.write(folder, split)
    directories.check_workers(folder, split)
    return split


def _addresses(first: str, count: int) -> list[SidecarAddress]:
    """Return the workers' addresses: consecutive ports, free ones (port 0), or a socket's path with a number after it.

    Return an empty list if there is no first address."""
    if not first:
        return []
    address = SidecarAddress.parse(first)
    if address.path:
        return [replace(address, path=f"{address.path}.{worker}") for worker in range(count)]
    return [replace(address, port=address.port and address.port + worker) for worker in range(count)]


@contextlib.contextmanager
def _reserved(address: SidecarAddress) -> Iterator[SidecarAddress]:
    """Yield the address with a port that no other process gets during the block, while workers may come and go.

    Raises CANNOT_LISTEN."""
    if address.path:
        yield address
        return
    with socket.socket(family_of(address.host)) as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserving.bind((address.host.strip("[]"), address.port))
        except (OSError, OverflowError) as e:
            raise cannot_listen(address, e) from e
        yield replace(address, port=reserving.getsockname()[1])


# -- The parent of several workers: it starts each, and starts it again when it ends, until all are to stop.

_BEFORE_IT_SERVED = (-signal.SIGTERM, -signal.SIGINT)
"""The exit statuses of a worker that is stopped before it has a signal handler. It has not opened anything yet."""

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
"""The delays before an ended worker starts again: doubled each time, until a worker has run for the longest one."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_ONCE = ("--rebuild-store", "--give-up-journal")
"""Flags for one start by an operator, not for the starts that follow."""


class Worker:
    """A worker's process, and its successors."""

    def __init__(self, number: int, flags: list[str]) -> None:
        self._number = number
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._looks = 0
        self.serves = False
        """Whether the worker has reported that it serves. It only reports that if a service manager wants to know."""
        self.environment: Mapping[str, str] = os.environ

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def told(self, values: Mapping[str, str]) -> None:
        """Note these values that the worker has reported."""
        self._looks = 0
        # A worker that stops reports nothing more at its end, and must not be killed for that.
        self.serves = (self.serves or "READY" in values) and "STOPPING" not in values

    def look(self) -> None:
        """Kill the worker (-9) if it serves and has reported nothing for the allowed number of beats: its event loop is
        stuck.

        Call this at each beat. It counts calls, not time: if parent and workers were stopped together, they go on."""
        self._looks += 1
        if self._process is not None and self.serves and self._looks > BEATS_WITHIN_PATIENCE:
            logger.error("worker does not respond", extra={"worker": self._number, "pid": self._process.pid})
            self.serves = False
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self, stopping: asyncio.Event) -> int:
        """Run the worker until it has ended after `stopping`. Return its status, 0 if nothing was to drain."""
        delay_seconds = FIRST_DELAY_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            try:
                status = await self._run_once(stopping)
            except OSError as e:
                # No process can be started now. The other workers must not end because of this.
                logger.error("worker not started: %s", e, extra={"worker": self._number})
                status = EXIT_FAILED
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
        """Run the worker once, and return the exit status. Raises OSError if it cannot be started."""
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
        """Send the worker a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


async def run_all(workers: Sequence[Worker], lock: Lock) -> int:
    """Run the workers until SIGTERM or SIGINT, and report their state to the service manager.

    Return the exit status, 0 if all have drained. The workers also stop if the directory's lock is lost."""
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
        logger.critical("the workers are stopped: %s", await data_directory.lost(lock))
        stop()

    watching = asyncio.ensure_future(stop_without_lock())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, send, signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    with _managed(manager, workers):
        statuses = await asyncio.gather(*(worker.run(stopping) for worker in workers))
    logger.info("stopped")
    if watching.done():
        return EXIT_FAILED
    watching.cancel()
    # The status of a killed worker is negative: it has not drained.
    return max(EXIT_FAILED if status < 0 else status for status in statuses)


@contextlib.contextmanager
def _managed(manager: Manager, workers: Sequence[Worker]) -> Iterator[None]:
    """During the block, report the workers' joint state to the service manager, if there is one.

    A stuck worker is killed, and then starts again: the manager only sees the parent."""
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
    """Prepare a worker before it begins: it drains when its parent is killed, since nothing would start it again.

    A SIGHUP that comes before there are files to read again has no effect."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)
