"""Several sidecars on one data directory, each with shards of its own: how many, where, and with which flags."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from broker_sidecar import kernels, logs
from broker_sidecar.config import Config
from broker_sidecar.listening import cannot_listen, family_of
from broker_sidecar.security import own_token
from broker_sidecar.supervising import Worker, run_all
from seqdedupe.address import SidecarAddress
from seqdedupe.backup.manifest import MANIFEST_FILE
from seqdedupe.errors import error
from seqdedupe.locks import Lock
from seqdedupe.shards import shards_of_worker, to_text
from seqdedupe.store import directories
from seqdedupe.store.directories import Claim, Split, of_worker

logger = logging.getLogger("seqdedupe.workers")


def count_of(config: Config) -> int:
    """How many workers are to run. 1: the process that asks is the sidecar, as without workers.

    Raises INVALID_CONFIGURATION if the data directory is on its way to another number, or is a worker's of one that
    is, or its topics are on another log; and what `read_split` raises.
    """
    folder = Path(config.data_directory)
    if (whole := directories.whole_of(folder)) is not None:
        directories.check_stays(whole)
    split = directories.read_split(folder)
    if split is None:
        return config.workers or 1
    if config.log != "embedded":
        raise error(
            "INVALID_CONFIGURATION", f"log = {config.log!r}: {folder} has workers with logs of their own", key="log"
        )
    if split.to is not None and config.workers not in (0, split.to):
        raise error(
            "INVALID_CONFIGURATION",
            f"workers is {config.workers}, but the data directory {folder} is on its way to {split.to}",
            hint=f"Start it with {split.to} first.",
            key="workers",
        )
    return config.workers or split.to or split.workers


def check_is_no_backup(folder: Path) -> None:
    """Other backups share its files, which a sidecar would append to. Raises INVALID_CONFIGURATION."""
    for part in (folder, *folder.glob("worker-*")):
        if (part / MANIFEST_FILE).exists():
            raise error(
                "INVALID_CONFIGURATION",
                f"data_directory = {str(folder)!r} is a backup",
                hint=f"Restore it: seqdedupe restore {folder} DATA_DIRECTORY",
                key="data_directory",
            )


def divide(config: Config, count: int) -> None:
    """The data directory has so many workers from now on, also if it had another number. Blocks.

    The caller has the directory's lock. Raises as `dividing.change`.
    """
    folder = Path(config.data_directory)
    split = directories.read_split(folder)
    if split is None:
        is_due = count > 1 and any((folder / name).exists() for name in ("logs", "store"))
    else:
        is_due = split.workers > 0 and (split.to or split.workers, split.to is None) != (count, True)
    if is_due:
        logs.configure(config.log_level, config.log_format)
        if kernels.prepare(config.data_directory):
            kernels.say_compiling()
        # Not before: it imports what is compiled.
        from broker_sidecar import dividing

        dividing.change(folder, count)


def run(config: Config, count: int, flags: Sequence[str], lock: Lock) -> int:
    """Runs so many workers with these flags, until SIGTERM or SIGINT, and those that end again; returns the exit
    status, which is 0 if all of them have drained. `lock` is the directory's.

    Raises INVALID_CONFIGURATION if it cannot listen, and what `make` raises; OSError.
    """
    logs.configure(config.log_level, config.log_format)
    with contextlib.ExitStack() as held:
        folder = Path(config.data_directory)
        split = make(folder, count)
        if config.authentication == "token":
            own_token.tell(own_token.make(folder), config.log_format)
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
    """What a worker is told beside what the parent was told; the last flag counts."""
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
    """How the directory is split: into so many from now on, if it is new. Raises what `read_split` and `check_workers`
    raise; OSError."""
    split = directories.read_split(folder) or Split(secrets.token_hex(directories.CLUSTER_ID_BYTES), 0, count)
    if split.to is not None:
        # Nothing is in it yet. It is durable before any part of it, so that what is lost later is missed.
        directories.write(folder, split)
        for worker in range(split.to):
            of_worker(folder, worker).mkdir(exist_ok=True)
            directories.write(of_worker(folder, worker), Claim(split.cluster_id, shards_of_worker(worker, split.to)))
        split = Split(split.cluster_id, split.to)
        directories.write(folder, split)
    directories.check_workers(folder, split)
    return split


def _addresses(first: str, count: int) -> list[SidecarAddress]:
    """Those of the workers: the ports that follow, free ones (port 0), or a socket's path with a number after it. None,
    if there is no first."""
    if not first:
        return []
    address = SidecarAddress.parse(first)
    if address.path:
        return [replace(address, path=f"{address.path}.{worker}") for worker in range(count)]
    return [replace(address, port=address.port and address.port + worker) for worker in range(count)]


@contextlib.contextmanager
def _reserved(address: SidecarAddress) -> Iterator[SidecarAddress]:
    """The address with a port that nobody else is given during the block, in which a worker may come and go. Raises
    INVALID_CONFIGURATION."""
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
