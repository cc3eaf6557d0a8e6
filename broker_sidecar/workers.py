"""Run several sidecars, the workers, on one data directory. Each worker has its own shards. A parent process starts the
workers, and restarts a worker that ends.

`count_of` returns the number of workers. If this number has changed, `divide` calls `division.py` to move the topics.
`run` is the parent. `Worker` is one worker: its process, and the processes that replace it.
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
from broker_sidecar.config import Config, check
from broker_sidecar.security import tokens
from broker_sidecar.telemetry import BEATS_WITHIN_PATIENCE, PROCESS_VARIABLE, Listener, Manager, patience_seconds
from seqdedupe.address import SidecarAddress, cannot_listen, family_of
from seqdedupe.errors import EXIT_FAILED, error
from seqdedupe.files import Lock
from seqdedupe.names import shards_of_worker, to_text
from seqdedupe.store import directories
from seqdedupe.store.directories import Claim, Split, of_worker

logger = logging.getLogger("seqdedupe.workers")


def count_of(config: Config) -> int:
    """Return the number of workers to run. If the number is 1, the calling process itself is the sidecar.

    Raises INVALID_CONFIGURATION in these cases:

    - The data directory is being changed to a number of workers that differs from `workers`.
    - The directory is the part of one worker, and the whole data directory is being changed.
    - The data directory has workers, and the configured log is not embedded.
    - The configuration is not possible with the number of workers of the data directory.

    Also raises the errors of `read_split`.
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
            hint=f"First start the sidecar with workers = {split.to}.",
            key="workers",
        )
    count = config.workers or split.to or split.workers
    check(replace(config, workers=count))
    return count


def divide(config: Config, count: int) -> None:
    """Change the data directory to this number of workers, if it has another number. Blocks.

    The caller must hold the directory's lock. Raises the errors of `division.change`.
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
        # Import `division` only here, because it imports compiled code.
        from broker_sidecar import division

        division.change(folder, count)


def run(config: Config, count: int, flags: Sequence[str], lock: Lock) -> int:
    """Run `count` workers with these flags until SIGTERM or SIGINT. Restart a worker that ends.

    Return the exit status: 0 if all workers have drained. `lock` is the lock of the data directory. Raises
    CANNOT_LISTEN, OSError, and the errors of `make`.
    """
    telemetry.configure(config.log_level, config.log_format)
    with contextlib.ExitStack() as held:
        folder = Path(config.data_directory)
        split = make(folder, count)
        if config.authentication == "token":
            tokens.make(folder)
            tokens.tell(folder, config.log_format)
        listen = [held.enter_context(_reserved(address, "listen")) for address in addresses_of(config.listen, count)]
        advertised = addresses_of(config.advertised_address, count) or listen
        others = {key: addresses_of(getattr(config, key), count) for key in _OF_EACH_WORKER}
        for key in ("also_listen", "pulsar_listen"):
            others[key] = [held.enter_context(_reserved(address, key)) for address in others[key]]
        logger.info("workers", extra={"addresses": ",".join(map(str, advertised)), "cluster_id": split.cluster_id})
        workers = [
            Worker(k, [*flags, *_flags(k, split, config, listen[k], advertised, others)]) for k in range(split.workers)
        ]
        return asyncio.run(run_all(workers, lock))


_OF_EACH_WORKER = ("also_listen", "metrics_listen", "pulsar_listen", "advertised_pulsar_address")
"""The keys of which each worker has its own address, in addition to `listen` and `advertised_address`."""


def _flags(
    worker: int,
    split: Split,
    config: Config,
    listen: SidecarAddress,
    advertised: Sequence[SidecarAddress],
    others: Mapping[str, Sequence[SidecarAddress]],
) -> list[str]:
    """Return the flags that a worker gets after the parent's own flags. If a flag occurs twice, the last one counts.

    `others` has the addresses of all workers for each key of `_OF_EACH_WORKER`. The addresses are empty if the key is
    unset."""
    keys = {
        "data-directory": of_worker(Path(config.data_directory), worker),
        "workers": 1,
        "listen": listen,
        "advertised-address": advertised[worker],
        "shards": to_text(shards_of_worker(worker, split.workers)),
        "peers": ",".join(map(str, advertised)),
        "cluster-id": split.cluster_id,
    }
    keys |= {name.replace("_", "-"): addresses[worker] for name, addresses in others.items() if addresses}
    if config.audit_file:
        keys["audit-file"] = f"{config.audit_file}.{worker}"
    return [text for name, value in keys.items() for text in (f"--{name}", str(value))]


def make(folder: Path, count: int) -> Split:
    """Return how the directory is split. If the directory is new, split it into `count` workers.

    Raises the errors of `read_split` and `check_workers`; OSError.
    """
    split = directories.read_split(folder) or Split(secrets.token_hex(directories.CLUSTER_ID_BYTES), 0, count)
    if split.to is not None:
        # The directory is still empty. Make the split durable before the parts, so that a part that is lost later is
        # noticed.
        directories.write(folder, split)
        for worker in range(split.to):
            of_worker(folder, worker).mkdir(exist_ok=True)
            directories.write(of_worker(folder, worker), Claim(split.cluster_id, shards_of_worker(worker, split.to)))
        split = Split(split.cluster_id, split.to)
        directories.write(folder, split)
    directories.check_workers(folder, split)
    return split


def addresses_of(first: str, count: int) -> list[SidecarAddress]:
    """Return the addresses of the workers, or of the only process. The ports are consecutive; if the first port is 0
    (any free port), all ports are 0. For the Unix sockets of workers, the worker's number follows the path.

    Return an empty list if `first` is empty.
    """
    if not first:
        return []
    address = SidecarAddress.parse(first)
    if address.path and count > 1:
        return [address._replace(path=f"{address.path}.{worker}") for worker in range(count)]
    return [address._replace(port=address.port and address.port + worker) for worker in range(count)]


@contextlib.contextmanager
def _reserved(address: SidecarAddress, key: str) -> Iterator[SidecarAddress]:
    """Yield the address of this key with a port that is reserved during the block. So no other process gets the port
    while a worker is restarted.

    Raises CANNOT_LISTEN.
    """
    if address.path:
        yield address
        return
    with socket.socket(family_of(address.host)) as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserving.bind((address.host.strip("[]"), address.port))
        except (OSError, OverflowError) as e:
            raise cannot_listen(address, e, key) from e
        yield address._replace(port=reserving.getsockname()[1])


# -- The parent of several workers. It starts each worker, and restarts a worker that ends, until all workers must stop.

_BEFORE_IT_SERVED = (-signal.SIGTERM, -signal.SIGINT)
"""The exit statuses of a worker that is stopped before it has set a signal handler. Such a worker has not opened
anything yet."""

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
"""The delay before an ended worker is restarted. The delay doubles each time, up to LONGEST_DELAY_SECONDS. After a
worker has run for longer than that, the delay is reset."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_ONCE = ("--rebuild-store", "--give-up-journal")
"""Flags that an operator gives for one start. Restarts of a worker do not use them."""


class Worker:
    """One worker: its current process, and the processes that replace it."""

    def __init__(self, number: int, flags: list[str]) -> None:
        self._number = number
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._looks = 0
        self.serves = False
        """Whether the worker has reported that it serves. Workers report this only if a service manager watches the
        parent."""
        self.environment: Mapping[str, str] = os.environ

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def told(self, values: Mapping[str, str]) -> None:
        """Record the values that the worker has reported."""
        self._looks = 0
        # A stopping worker reports nothing more, and must not be killed for its silence.
        self.serves = (self.serves or "READY" in values) and "STOPPING" not in values

    def look(self) -> None:
        """Kill the worker (-9) if it serves, but has sent no report for the allowed number of beats. Its event loop is
        then stuck.

        Call this method at each beat. It counts calls, not time. So a worker is not killed if the parent and the
        workers were suspended together.
        """
        self._looks += 1
        if self._process is not None and self.serves and self._looks > BEATS_WITHIN_PATIENCE:
            logger.error("worker does not respond", extra={"worker": self._number, "pid": self._process.pid})
            self.serves = False
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self, stopping: asyncio.Event) -> int:
        """Run the worker, with restarts, until it has ended after `stopping` was set. Return its exit status; 0 if the
        worker had nothing to drain."""
        delay_seconds = FIRST_DELAY_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            try:
                status = await self._run_once(stopping)
            except OSError as e:
                # The system cannot start a process now. This must not end the other workers.
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
        """Run one process of the worker, and return its exit status. Raises OSError if the process cannot be
        started."""
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
        """Send the worker a signal, if it is running."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


async def run_all(workers: Sequence[Worker], lock: Lock) -> int:
    """Run the workers until SIGTERM or SIGINT, and report their state to the service manager.

    Return the exit status: 0 if all workers have drained. The workers also stop if the lock of the data directory is
    lost.
    """
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
    # The status of a killed worker is negative. Such a worker has not drained.
    return max(EXIT_FAILED if status < 0 else status for status in statuses)


@contextlib.contextmanager
def _managed(manager: Manager, workers: Sequence[Worker]) -> Iterator[None]:
    """During the block, report the state of all workers together to the service manager, if there is one.

    Kill a stuck worker, so that it is restarted. The service manager watches only the parent.
    """
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
    """Prepare a worker's process before it begins. When the parent is killed, the worker receives SIGTERM and drains,
    because no process would restart the worker.

    Ignore SIGHUP until the worker has files to read again.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)
