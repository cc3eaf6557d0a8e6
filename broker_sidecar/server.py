"""The sidecar's process: start, serve, drain.

SIGTERM or SIGINT drains: health says NOT_SERVING, what is in flight is finished, a last snapshot is durable, exit 0.
SIGHUP reads again what an operator may replace.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from broker_sidecar import directory, logs
from broker_sidecar.config import Config
from broker_sidecar.data import fatal
from broker_sidecar.listening import connections_within, raise_limit
from broker_sidecar.notify import Manager
from broker_sidecar.security import tokens
from broker_sidecar.sidecar import Sidecar
from broker_sidecar.watchdog import Watchdog
from seqdedupe.errors import SeqdedupeError
from seqdedupe.locks import Lock
from seqdedupe.store.directories import whole_of

logger = logging.getLogger("seqdedupe.server")

EXIT_ERROR = 1


async def _serve(config: Config, lock: Lock, repairs: dict[str, bool]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    sidecar = Sidecar(config, connections=connections_within(raise_limit()), **repairs)
    if config.log == "pulsar":
        Watchdog(fatal)
    watching = asyncio.ensure_future(_end_without(lock))
    manager = Manager(os.environ)
    telling = asyncio.ensure_future(manager.keep_telling(sidecar.status))
    await sidecar.listen()
    loop.add_signal_handler(signal.SIGHUP, sidecar.reload)
    logger.info("listening", extra={"address": str(sidecar.address)})
    if config.log == "embedded" and not config.retention_was_chosen:
        logger.warning(
            "messages are kept for ever, until the disk is full: set default_retention_size_in_mb or "
            "default_retention_time_in_minutes; -1 says that it is wanted"
        )
    folder = Path(config.data_directory)
    if config.authentication == "token" and whole_of(folder) is None:
        tokens.tell(tokens.path_of(folder), config.log_format)
    recovery = asyncio.ensure_future(sidecar.recover())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({recovery, stop}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done():
        recovery.result()
        keep_freed_memory()
        logger.info("serving", extra={"address": str(sidecar.address)})
        manager.tell(READY="1", STATUS=sidecar.status())
        await stop
    recovery.cancel()
    logger.info("draining")
    manager.tell(STOPPING="1", STATUS="Draining")
    await sidecar.stop()
    telling.cancel()
    watching.cancel()
    logger.info("stopped")


async def _end_without(lock: Lock) -> None:
    fatal(await directory.lost(lock))


def run(config: Config, lock: Lock, **repairs: bool) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. An error at the start is one clear line.

    `lock` is the data directory's. `repairs` are those of `Data`, for this start alone.
    """
    logs.configure(config.log_level, config.log_format)
    if config.backup_directory and not Path(config.backup_directory).is_dir():
        # It may be a disk that is not mounted yet, and serving does not need it.
        logger.warning("no backup can be made before backup_directory is there: %s", config.backup_directory)
    give_back_freed_memory()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_served(config, lock, repairs))
    return uvloop.run(_served(config, lock, repairs))


async def _served(config: Config, lock: Lock, repairs: dict[str, bool]) -> int:
    """Serves; the exit status. What is wrong is said in one line."""
    status = EXIT_ERROR
    try:
        await _serve(config, lock, repairs)
        status = 0
    except SeqdedupeError as e:
        print(f"seqdedupe: {e} {e.hint}", file=sys.stderr)
    except TimeoutError:
        print(
            "seqdedupe: draining took too long: what was in flight is decided at the next start",
            file=sys.stderr,
        )
    except OSError as e:
        failure = directory.failed(Path(config.data_directory), e)
        print(f"seqdedupe: {failure} {failure.hint}", file=sys.stderr)
    if config.log == "pulsar":
        # Threads that still wait for a cluster would hold the process up, and abort it once the loop is closed.
        logging.shutdown()
        os._exit(status)
    return status


# -- What the C library does with freed memory.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3), with values in bytes."""

_AT_START = ((_TRIM_THRESHOLD, 8 << 20), (_MMAP_THRESHOLD, 4 << 20))
_WHILE_SERVING = ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 256 << 20))


def give_back_freed_memory() -> None:
    """Gives large blocks back as soon as start-up frees them, where the C library is glibc.

    Each thread frees into a heap of its own, and what stays at the end of one cannot be given back later: tens of
    megabytes for each thread that reads a log or a snapshot.
    """
    _set(_AT_START)


def keep_freed_memory() -> None:
    """Gives back what start-up has freed, and keeps what is freed from now on, where the C library is glibc.

    Pages given back while serving have to be fetched again, at microseconds a page.
    """
    _set(_WHILE_SERVING)


def _set(parameters: tuple[tuple[int, int], ...]) -> None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for parameter, value in parameters:
            library.mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        logger.debug("the C library has no mallopt")
