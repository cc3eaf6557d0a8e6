"""Changes the number of workers of a data directory that has topics. Each log is moved to the worker that now has the
log's shard.

The new parts are created next to the old parts, in the folder `moving`. Each part contains a store with the records of
its topics, a claim, and the logs, which are renamed. The old stores do not change, so an interrupted change restarts
from them. When everything is complete, `moving` is renamed to `moved`. After the renaming, the old stores are not
needed, and each new part replaces an old part.
"""

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from seqdedupe.errors import DamagedError, UnavailableError, error
from seqdedupe.files import DIRECTORY_LOCK, locked_directory, sync_folder
from seqdedupe.format.headers import key_of
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.log.embedded.log_folder import secret_of
from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.log.embedded.segment import LogIdentity
from seqdedupe.log.embedded.tail import open_segments
from seqdedupe.names import ALL_SHARDS, shard_of, shards_of_worker
from seqdedupe.store import directories
from seqdedupe.store.db import Store
from seqdedupe.store.directories import SHARDS_FILE, WORKERS_FILE, Claim, Split, of_worker
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.transfer import stored_records

logger = logging.getLogger("seqdedupe.workers")

LOGS, STORE = "logs", "store"
MOVING, MOVED = "moving", "moved"
_OF_A_PART = (LOGS, STORE, SHARDS_FILE)
_OF_A_WORKER = {*_OF_A_PART, DIRECTORY_LOCK, "kernels", f"{STORE}.creating", f"{SHARDS_FILE}.new"}

_NOTHING_MOVED = "Nothing was moved. Start with the number that the data directory has, or see docs/guides/workers.md."

TRIES = 120
"""The number of attempts to write a snapshot to a store that accepts nothing now."""
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Part:
    """An old part, with its store open."""

    folder: Path
    shards: frozenset[int]
    store: Store

    def active(self) -> list[TopicRecord]:
        """Return the active topics. Remains of topics that were being created or deleted are dropped, as at any
        start."""
        return [record for record in self.store.topics() if record.state is TopicState.ACTIVE]


def change(folder: Path, count: int) -> None:
    """Change the directory's number of workers to `count`, or resume such a change. Blocks.

    The caller has the directory's lock. If this is interrupted at any point, the next call resumes the change. Raises
    DIRECTORY_IN_USE if a worker still runs. Before anything is moved, raises INVALID_CONFIGURATION, LOG_DAMAGED,
    STORE_MISSING, STORE_DAMAGED, SHARD_CLAIMED_TWICE if the change is impossible. Raises STORE_UNAVAILABLE; OSError.
    """
    split = directories.read_split(folder) or Split(secrets.token_hex(directories.CLUSTER_ID_BYTES), 1)
    if split == Split(split.cluster_id, count):
        return
    with ExitStack() as held:
        for place, _ in places(folder, split.workers):
            if place != folder and place.exists():
                held.enter_context(locked_directory(place))
        _change(folder, split, count)


def _change(folder: Path, split: Split, count: int) -> None:
    """Change from one number of workers to another:

    1. Open the stores of the old parts.
    2. Check that nothing prevents the change, and that every log is complete without its journal.
    3. Record in the directory that it is changing.
    4. Make the new parts in `moving`, with all records of the stores.
    5. Rename the logs into the new parts.
    6. Rename `moving` to `moved`: the old stores are not needed any more.
    7. Put each new part in its place.

    A change interrupted between 3 and 6 resumes with 1 and 4; after 6, with 7.
    """
    if (folder / MOVED).exists() and split.to is not None:
        # The process that made this name may have been killed before its sync, and the old stores are removed next.
        sync_folder(folder)
        _take_places(folder, split)
        return
    if split.to is None and split.workers > 1:
        directories.check_workers(folder, split)
    with ExitStack() as opened:
        old = []  # 1
        for place, shards in places(folder, split.workers):
            has_topics = split.to is not None or _incarnations(place / LOGS)
            if has_topics and not (place / STORE).is_dir():
                raise error("STORE_MISSING", f"{place / STORE} is missing, so its topics cannot be moved")
            store = Store.open(place / STORE)
            opened.callback(store.close)
            old.append(_Part(place, shards, store))
        if split.to is None:
            _check(folder, split, count, old)  # 2
            if (folder / MOVED).exists():
                # The folder has no files. From now on the existence of the folder has a meaning.
                shutil.rmtree(folder / MOVED)
                sync_folder(folder)
            split = Split(split.cluster_id, split.workers, count)
            directories.write(folder, split)  # 3
            logger.info("changing the number of workers from %d to %d", split.workers, count)
        asyncio.run(_make_all(folder, split, old))  # 4
        _move_logs(folder, split, old)  # 5
    (folder / MOVING).rename(folder / MOVED)  # 6
    sync_folder(folder)
    _take_places(folder, split)  # 7


def places(folder: Path, workers: int) -> list[tuple[Path, frozenset[int]]]:
    """Return the parts of a directory with this number of workers, and their shards. With one worker, the directory
    itself is the part."""
    if workers == 1:
        return [(folder, ALL_SHARDS)]
    return [(of_worker(folder, worker), shards_of_worker(worker, workers)) for worker in range(workers)]


# -- before anything is changed ---------------------------------------------------------------------------------------


def _check(folder: Path, split: Split, count: int, old: Sequence[_Part]) -> None:
    """Make every log complete without its journal, and check that the log can be renamed. Raises the errors of
    `change`."""
    if split.workers == 1 and (folder / SHARDS_FILE).exists():
        raise _refused(f"{folder} has shards of a cluster over several machines")
    for place in {place for place, _ in places(folder, count)} - {part.folder for part in old}:
        if there := [name for name in _OF_A_PART if (place / name).exists()]:
            raise _refused(f"{place} has {', '.join(there)} already")
    seen: set[int] = set()
    for part in old:
        _check_files(folder, part.folder)
        records = part.store.topics()
        if twice := seen.intersection(record.incarnation for record in records):
            raise _refused(f"the logs {sorted(twice)} exist twice, once in {part.folder}")
        seen.update(record.incarnation for record in records)
        if unknown := set(_incarnations(part.folder / LOGS)) - seen:
            why = f"{part.folder / LOGS} has the logs {sorted(unknown)}, which have no record in the store"
            raise error("STORE_MISSING", why)
        replay = JournalReplay(part.folder / LOGS, is_expected=part.store.has_journal)
        for record in part.active():
            try:
                _check_topic(part, record, replay)
            except DamagedError as e:
                raise error(e.reason, e.message, hint=_NOTHING_MOVED) from e


def _check_files(folder: Path, part: Path) -> None:
    device = folder.stat().st_dev
    logs = part / LOGS
    for path in (part, logs, part / STORE, *(logs / str(incarnation) for incarnation in _incarnations(logs))):
        if path.is_symlink() or (path.exists() and path.stat().st_dev != device):
            raise _refused(f"{path} is a link, or on another file system than {folder}")
    if part != folder:
        foreign = {path.name for path in part.iterdir()} - _OF_A_WORKER
        if foreign:
            raise _refused(f"{part} has files that are not a worker's: {', '.join(sorted(foreign))}")
    if any((folder / name).exists() and _has_files(folder / name) for name in (MOVING, MOVED)):
        raise _refused(f"{folder} has a folder {MOVING} or {MOVED} with files, although no change is under way")


def _check_topic(part: _Part, record: TopicRecord, replay: JournalReplay) -> None:
    if record.log is not LogKind.EMBEDDED:
        raise _refused(f"topic {record.name} has its log in {record.log.name.lower()!r}")
    if shard_of(record.name) not in part.shards:
        raise error("SHARD_CLAIMED_TWICE", f"{part.folder} has topic {record.name}, which is not in its shards")
    folder = part.folder / LOGS / str(record.incarnation)
    if _has_moved(folder, record.name):
        return
    found = secret_of(folder, record.secret)
    if found.why is not None:
        raise found.why
    identity = LogIdentity(record.incarnation, key_of(found.secret))
    replay.take_back(folder, identity)
    loaded = Snapshots(part.store, record.incarnation).load()
    open_segments(folder, identity, loaded.next_index if loaded is not None else 0)


def _has_moved(folder: Path, name: str) -> bool:
    """Return whether it is certain that another sidecar has the topic.

    Raises INVALID_CONFIGURATION if a move of the topic is not finished. Workers cannot finish a move.
    """
    is_known = log_folder.moved_to(folder) is not None
    if log_folder.leaving_to(folder) is not None or (folder / log_folder.ARRIVED_FILE).exists():
        raise _refused(f"topic {name} is being moved from one sidecar to another, and only one of them has recorded it")
    if is_known and log_folder.has_messages(folder):
        raise _refused(f"topic {name} was moved to another sidecar, which may not serve it yet")
    return is_known


def _refused(why: str) -> Exception:
    return error(
        "INVALID_CONFIGURATION",
        f"{why}: the number of workers is not changed",
        hint=_NOTHING_MOVED,
        key="workers",
    )


# -- the new parts ----------------------------------------------------------------------------------------------------


async def _make_all(folder: Path, split: Split, old: Sequence[_Part]) -> None:
    """Create the new parts, except for their logs. Existing remains are recreated."""
    for place, shards in places(folder / MOVING, split.to or 0):
        (place / LOGS).mkdir(parents=True, exist_ok=True)
        if (place / STORE).exists():
            shutil.rmtree(place / STORE)
        store = Store.open(place / STORE)
        try:
            await _fill(store, shards, old)
        finally:
            store.close()
        if split.to != 1:
            directories.write(place, Claim(split.cluster_id, shards))
        sync_folder(place)
    sync_folder(folder / MOVING)
    sync_folder(folder)


async def _fill(new: Store, shards: frozenset[int], old: Sequence[_Part]) -> None:
    """Copy the topics with these shards, and the policies of all namespaces. Each policy comes from the part with the
    namespace's shard."""
    records = []
    for part in old:
        for namespace, policy in part.store.namespace_policies():
            if shard_of(namespace) in part.shards:
                await new.put_namespace_policy(namespace, policy)
        for record in part.active():
            if shard_of(record.name) in shards:
                records.append(record)
                await _copy(part.store, new, record.incarnation)
    # No incarnation is used twice, not even that of a deleted topic.
    new.next_incarnation(max(part.store.next_incarnation(0) for part in old))
    await new.put_topics(*records)


async def _copy(old: Store, new: Store, incarnation: int) -> None:
    for left in reversed(range(TRIES)):
        try:
            await stored_records.copy(old, new, incarnation)
            return
        except UnavailableError:
            # The store accepts nothing while its background work is too far behind.
            if not left:
                raise
            await asyncio.sleep(PAUSE_SECONDS)


def _move_logs(folder: Path, split: Split, old: Sequence[_Part]) -> None:
    new = places(folder / MOVING, split.to or 0)
    for part in old:
        for record in part.active():
            name = str(record.incarnation)
            target = next(place for place, shards in new if shard_of(record.name) in shards) / LOGS / name
            source = part.folder / LOGS / name
            if source.exists():
                os.rename(source, target)
            elif not target.exists():
                raise error("STORE_MISSING", f"the log of {record.name} is neither in {source} nor in {target}")
    for place in [*(place for place, _ in new), *(part.folder for part in old)]:
        if (place / LOGS).exists():
            sync_folder(place / LOGS)


# -- the end ----------------------------------------------------------------------------------------------------------


def _take_places(folder: Path, split: Split) -> None:
    """Replace each old part of the directory by the new part in the folder `moved`. As long as a new part is still in
    `moved`, its old part has not been replaced."""
    targets = [place for place, _ in places(folder, split.to or 0)]
    others = [place for place, _ in places(folder, split.workers) if place not in targets]
    for place in targets:
        place.mkdir(exist_ok=True)
        new = folder / MOVED / place.relative_to(folder)
        for name in _OF_A_PART:
            if (new / name).exists():
                _remove(place / name)
                os.rename(new / name, place / name)
        sync_folder(place)
        sync_folder(new)
    for place in others:
        for path in (place / LOGS, place / STORE) if place == folder else (place,):
            _remove(path)
    sync_folder(folder)
    if split.to == 1:
        (folder / WORKERS_FILE).unlink()
        sync_folder(folder)
    else:
        directories.write(folder, Split(split.cluster_id, split.to or 0))
    shutil.rmtree(folder / MOVED)
    logger.info("the number of workers is %d", split.to)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def _incarnations(logs: Path) -> list[int]:
    return incarnations(logs) if logs.exists() else []
