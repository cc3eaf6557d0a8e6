"""Two files of the data directory itself: SHARDS contains the directory's shards. WORKERS contains the number of
workers among which the directory is split.

A directory with neither file contains all topics, for one process. Both files are text. A file that is not completely
valid is refused.
"""

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
from rocksdict import WriteBatch

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.names import ALL_SHARDS, SHARDS, from_text, shards_of_worker, to_text
from seqdedupe.store.db import Store
from seqdedupe.store.parts import INSTANCE_NAME, LAST_OPENING, seal

MANIFEST_FILE = "BACKUP"
"""The file that marks a folder as a backup (`transfer/backup`), which is not a data directory."""
SHARDS_FILE = "SHARDS"
WORKERS_FILE = "WORKERS"
FORMAT_VERSION = 1

MAX_WORKERS = SHARDS
CLUSTER_ID_BYTES = 8
"""The bytes of a generated cluster ID."""
CLUSTER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_RESTORE_ALL = "Restore the data directory, all of it, from one backup."

_FIRST_LINE = re.compile(r"seqdedupe-\w+ (\d{1,9})\n", re.ASCII)
_SHARDS = re.compile(r".*\ncluster ([\w.-]+)\nshards ([0-9,-]+) of (\d{1,9})\n.*\n", re.ASCII)
_WORKERS = re.compile(r".*\ncluster ([\w.-]+)\nworkers (\d{1,3})(?: to (\d{1,3}))?\n.*\n", re.ASCII)


@dataclass(frozen=True, slots=True)
class Claim:
    """The shards of a cluster that belong to a directory."""

    cluster_id: str
    shards: frozenset[int]

    def encode(self) -> bytes:
        """Return the bytes of SHARDS."""
        return _sealed("shards", f"cluster {self.cluster_id}\nshards {to_text(self.shards)} of {SHARDS}\n")


@dataclass(frozen=True, slots=True)
class Split:
    """The workers of a directory. `to` is set while the number of workers is being changed from `workers` to `to`."""

    cluster_id: str
    workers: int
    to: int | None = None

    def encode(self) -> bytes:
        """Return the bytes of WORKERS."""
        way = f" to {self.to}" if self.to is not None else ""
        return _sealed("workers", f"cluster {self.cluster_id}\nworkers {self.workers}{way}\n")


def read_claim(directory: Path) -> Claim | None:
    """Return the claim of the directory; None for a directory without shards. Raises STORE_DAMAGED, NEWER_FORMAT,
    OSError."""
    path = directory / SHARDS_FILE
    if (data := _read(path)) is None:
        return None
    claim = None
    if said := _SHARDS.fullmatch(data.decode("ascii", "replace")):
        try:
            claim = Claim(said[1], from_text(said[2]))
        except SeqdedupeError:
            claim = None
    if claim is None or claim.encode() != data:
        raise _damaged(path, data)
    return claim


def read_split(directory: Path) -> Split | None:
    """Return how the directory is split among workers; None if the directory is not split.

    Raises STORE_MISSING if the directory contains a worker's directory but does not state the number of workers;
    STORE_DAMAGED, NEWER_FORMAT, OSError.
    """
    path = directory / WORKERS_FILE
    if (data := _read(path)) is None:
        if of_worker(directory, 0).exists():
            why = f"{directory} has directories of workers, and no file {WORKERS_FILE}, which says how many"
            raise error("STORE_MISSING", why, hint=_RESTORE_ALL)
        return None
    said = _WORKERS.fullmatch(data.decode("ascii", "replace"))
    split = Split(said[1], int(said[2]), int(said[3]) if said[3] else None) if said else None
    if split is None or split.encode() != data:
        raise _damaged(path, data)
    return split


def write(directory: Path, said: Claim | Split) -> None:
    """Write the directory's file. After a crash either the old or the new file exists. When this returns, the new file
    is durable. Raises OSError."""
    name = SHARDS_FILE if isinstance(said, Claim) else WORKERS_FILE
    new = directory / f"{name}.new"
    write_synced(new, said.encode())
    os.replace(new, directory / name)
    sync_folder(directory)


def of_worker(directory: Path, worker: int) -> Path:
    """Return the directory of a worker, counted from 0."""
    return directory / f"worker-{worker}"


def whole_of(directory: Path) -> Path | None:
    """Return the split directory that contains this worker's directory; None if this directory does not belong to a
    worker."""
    whole = directory.absolute().parent
    return whole if (directory / SHARDS_FILE).exists() and (whole / WORKERS_FILE).exists() else None


def parts_of(directory: Path) -> list[Path]:
    """Return the directories of the workers. If the directory is not split, return the directory itself. Raises the
    errors of `check_stays` and `check_workers`."""
    split = check_stays(directory)
    if split is None:
        return [directory]
    check_workers(directory, split)
    return [of_worker(directory, worker) for worker in range(split.workers)]


def check_stays(directory: Path) -> Split | None:
    """Return how the directory is split. Raises INVALID_CONFIGURATION if the number of workers is being changed, and
    the errors of `read_split`."""
    split = read_split(directory)
    if split is not None and split.to is not None:
        why = f"{directory} is on its way from {split.workers} workers to {split.to}"
        raise error(
            "INVALID_CONFIGURATION",
            why,
            hint="Start the sidecar with this directory. The sidecar continues the change.",
        )
    return split


def check_workers(directory: Path, split: Split) -> None:
    """Raise STORE_MISSING if a worker's directory does not exist, SHARD_CLAIMED_TWICE like `check_once`, and the errors
    of reading a claim."""
    claims: dict[str, Claim] = {}
    for folder in sorted(directory.glob("worker-*")):
        if (claim := read_claim(folder)) is not None:
            claims[str(folder)] = claim
    for worker in range(split.workers):
        folder = of_worker(directory, worker)
        if str(folder) not in claims:
            raise error(
                "STORE_MISSING",
                f"{folder}, the directory of one of {split.workers} workers, is not there or has no file {SHARDS_FILE}",
                hint=_RESTORE_ALL,
            )
    check_once(claims)
    for worker in range(split.workers):
        folder = of_worker(directory, worker)
        if claims[str(folder)] != Claim(split.cluster_id, shards_of_worker(worker, split.workers)):
            what = f"{folder} says that it has {to_text(claims[str(folder)].shards)}"
            raise error(
                "SHARD_CLAIMED_TWICE",
                f"{what}, which is not what worker {worker} of {split.workers} of the cluster {split.cluster_id} has",
            )


def check_once(claims: dict[str, Claim]) -> None:
    """Raise SHARD_CLAIMED_TWICE if two of these claims, by directory, have the same shard, and INVALID_CONFIGURATION if
    they belong to different clusters."""
    clusters = {claim.cluster_id: where for where, claim in claims.items()}
    if len(clusters) > 1:
        both = " and ".join(f"{where} is of the cluster {cluster}" for cluster, where in clusters.items())
        raise error("INVALID_CONFIGURATION", both, hint="Keep the data directories of two clusters apart.")
    owners: dict[int, str] = {}
    for where, claim in claims.items():
        for shard in claim.shards:
            if (other := owners.setdefault(shard, where)) != where:
                raise error("SHARD_CLAIMED_TWICE", f"{other} and {where} both claim shard {shard}", shard=shard)


def unclaimed(claims: dict[str, Claim]) -> frozenset[int]:
    """Return the shards that are in none of these claims."""
    return ALL_SHARDS.difference(*(claim.shards for claim in claims.values()))


def _sealed(kind: str, said: str) -> bytes:
    checked = f"seqdedupe-{kind} {FORMAT_VERSION}\n{said}".encode()
    return checked + b"crc32c %08x\n" % google_crc32c.value(checked)


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):  # the code that makes the directory reports the obstacle
        return None
    version = _FIRST_LINE.match(data.decode("ascii", "replace"))
    if version and int(version[1]) > FORMAT_VERSION:
        what = f"{path} has format version {version[1]}, read is {FORMAT_VERSION}"
        raise error("NEWER_FORMAT", what, version=version[1], known_version=FORMAT_VERSION)
    return data


def _damaged(path: Path, data: bytes) -> SeqdedupeError:
    return error("STORE_DAMAGED", f"{path} is damaged: {data[:200]!r}", hint="Restore it from a backup.", file=path)


# -- The sidecar that a store belongs to, and the number of its openings of a cluster's topics for writing.

RANDOM_NAME_BYTES = 8
OPENINGS_BEGIN_SECONDS = 1_577_836_800
"""2020-01-01, the start of the seconds that are the numbers of openings."""
_NUMBER_BYTES = 8


class StoreInstance:
    """The name of the sidecar that has this store, and the numbers of its openings."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last_opening = int.from_bytes(store.sealed(LAST_OPENING), "little")

    def named(self, wanted: str) -> str:
        """Return the permanent name of the store: the stored name, otherwise `wanted`, or a random name if `wanted` is
        empty.

        The name becomes durable with the next data that the store makes durable. Raises INVALID_CONFIGURATION if the
        stored name differs from `wanted`, STORE_UNAVAILABLE.
        """
        stored = self._store.sealed(INSTANCE_NAME).decode()
        if stored and wanted not in ("", stored):
            raise error(
                "INVALID_CONFIGURATION",
                f"instance_name is {wanted!r}, but the data directory is that of {stored!r}: a sidecar keeps its name",
                hint="Leave the key out, or give a data directory that is new.",
                key="instance_name",
            )
        if not stored:
            stored = wanted or secrets.token_hex(RANDOM_NAME_BYTES)
            self._put(INSTANCE_NAME, stored.encode())
        return stored

    async def claim_opening(self, known: int) -> int:
        """Return a number for an opening, above `known` and above all earlier results. When this returns, the number is
        durable.

        The number is approximately the number of seconds since 2020. So later numbers are higher even if the store was
        lost.
        """
        clock = int(time.time()) - OPENINGS_BEGIN_SECONDS
        self._last_opening = opening = max(clock, known + 1, self._last_opening + 1)
        await self._store.flush(self._put(LAST_OPENING, opening.to_bytes(_NUMBER_BYTES, "little")))
        return opening

    def _put(self, key: bytes, body: bytes) -> int:
        batch = WriteBatch(raw_mode=True)
        batch.put(key, seal(key, body))
        return self._store.write(batch)
