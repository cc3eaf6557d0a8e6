"""RocksDB as the store wants it: its options, creation in one step, opening, and its errors as ours."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder
from seqdedupe.store.mark import Mark
from seqdedupe.store.wal import whole_part

MEMTABLE_BYTES = 16 * 1024 * 1024
MEMTABLES = 4
"""Room for what a compaction of a million producers writes before RocksDB would hold a writer up."""

BLOCK_CACHE_BYTES = 4 * 1024 * 1024
BACKGROUND_JOBS = 2
BEHIND_MEMTABLES = 2
BEHIND_FILES = 12
"""From so many on that RocksDB has not worked off, what can wait is not written. It holds writers up at 4 and at 20."""

INFO_LOG_BYTES = 1024 * 1024
INFO_LOGS = 2

_TABLE_MISSING = re.compile(r"No such file or directory.*\.sst")
_HINT_TABLE_MISSING = (
    "A power cut may take a table file that was made while the store was opened. Where the sidecar has the logs, no "
    "acknowledged message is lost with it: move the store folder away, and start once with --rebuild-store, which "
    "makes its records anew from the logs. Or restore log and store from one backup."
)

_DAMAGE = re.compile(r"Corruption|does not exist|No such file|Invalid argument|Not implemented")


def _options(create: bool) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(create)
    options.set_error_if_exists(create)
    # What is torn or damaged has been found and cut off before RocksDB reads (`wal`).
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_max_write_buffer_number(MEMTABLES)
    options.set_max_background_jobs(BACKGROUND_JOBS)
    options.set_max_log_file_size(INFO_LOG_BYTES)
    options.set_keep_log_file_num(INFO_LOGS)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    options.set_block_based_table_factory(blocks)
    return options


@contextmanager
def rocksdb_errors(folder: Path) -> Iterator[None]:
    """Turns what RocksDB and the system raise into STORE_DAMAGED or STORE_UNAVAILABLE."""
    try:
        yield
    except SeqdedupeError:
        raise
    except Exception as e:
        # RocksDB's own errors are bare `Exception`s with its text; anything else is a defect and stays what
        # it is.
        if type(e) is not Exception and not isinstance(e, OSError | DbClosedError):
            raise
        text = str(e)
        if type(e) is Exception and _DAMAGE.search(text):
            hint = _HINT_TABLE_MISSING if _TABLE_MISSING.search(text) else None
            raise error("STORE_DAMAGED", f"the store {folder} is damaged: {text}", hint=hint) from e
        raise error("STORE_UNAVAILABLE", f"the store {folder} cannot be used: {text}") from e


def write(db: Rdict, batch: WriteBatch) -> None:
    """Writes a batch, unsynced. Fails at once where RocksDB would make the caller wait."""
    options = WriteOptions()
    options.no_slowdown = True
    db.write(batch, options)


def is_behind(db: Rdict) -> bool:
    """Whether what can wait had better not be written now."""
    if (db.property_int_value("rocksdb.num-immutable-mem-table") or 0) >= BEHIND_MEMTABLES:
        return True
    return (db.property_int_value("rocksdb.num-files-at-level0") or 0) >= BEHIND_FILES


def sync(db: Rdict) -> int:
    """Makes durable what was written before; up to which sequence number that is."""
    sequence: int = db.latest_sequence_number()
    db.flush_wal(True)
    return sequence


def create_rocksdb(folder: Path) -> None:
    """Makes a new store in a folder that does not exist or is empty: whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _descriptor(folder.parent) as parent:
        fcntl.flock(parent, fcntl.LOCK_EX)
        if folder.exists() and any(folder.iterdir()):
            return
        unfinished = folder.with_name(folder.name + ".creating")
        shutil.rmtree(unfinished, ignore_errors=True)
        Rdict(str(unfinished), _options(create=True)).close()
        Mark.create(unfinished)
        sync_folder(unfinished)
        unfinished.rename(folder)
        os.fsync(parent)


def open_rocksdb(folder: Path, mark: Mark, *, read_only: bool = False) -> Rdict:
    """Opens an existing store; for reading only, that needs no room on the disk.

    A torn end that was never durable is cut off. Raises STORE_DAMAGED, if something durable is missing too;
    STORE_UNAVAILABLE.
    """
    access = AccessType.read_only() if read_only else AccessType.read_write()
    with rocksdb_errors(folder):
        whole = whole_part(folder)
        _check_durable(folder, whole.sequence, mark)
        whole.cut()
        db = Rdict(str(folder), _options(create=False), access_type=access)
        try:
            _check_durable(folder, db.latest_sequence_number(), mark)
        except BaseException:
            db.close()
            raise
    return db


def _check_durable(folder: Path, sequence: int, mark: Mark) -> None:
    if sequence < mark.sequence:
        raise error(
            "STORE_DAMAGED",
            f"the store {folder} has lost durable writes: it ends at {sequence}, and was at {mark.sequence}",
            sequence=sequence,
            durable_sequence=mark.sequence,
        )


def close_rocksdb(db: Rdict) -> None:
    """Closes it, and is content if its last memtable could not be written: what was synced is in the log."""
    try:
        db.close()
    except Exception as e:
        if type(e) is not Exception:
            raise


@contextmanager
def _descriptor(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
