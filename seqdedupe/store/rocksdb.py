"""RocksDB for the store: its options, creation in one step, opening, and the conversion of its errors."""

import errno
import fcntl
import logging
import os
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
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
from seqdedupe.files import holder_of, sync_folder
from seqdedupe.store.parts import FORMAT_VERSION, other_format

# -- The file DURABLE: the store's own lock, its format version, the end of its durable writes, and whether there is a
# journal.
#
# If a write-ahead log is torn, cut short or missing, the cause may be a power cut or damage. This file contains the
# number of RocksDB's last synced write, which distinguishes these causes: a store that opens with a lower number has
# lost durable data. The number is written after the sync, never before it. Otherwise a log torn by a power cut would be
# reported as damage.
#
# While the logs in the same directory may need their journal, the version has a flag for the journal. A program without
# support for journals then sees a newer version and stops. And a missing journal is then detected, instead of being
# treated as one that never existed.

FILE_NAME = "DURABLE"

JOURNAL = 1 << 31
"""The flag in the version while there is a journal."""

_MAGIC = b"seqdedupe-store\n"
_CHECKED = struct.Struct("<16sIQ")
_SIZE_BYTES = _CHECKED.size + 4


class Mark:
    """The store's file DURABLE, open and locked. `sequence` is RocksDB's sequence number of the last durable write."""

    def __init__(self, descriptor: int, sequence: int, *, has_journal: bool) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.sequence = sequence
        self.has_journal = has_journal

    @staticmethod
    def create(folder: Path) -> None:
        """Write a new file. When this returns, the file is durable."""
        with (folder / FILE_NAME).open("xb") as file:
            file.write(_encoded(0, has_journal=False))
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def open(folder: Path) -> "Mark":
        """Open and lock the file. Raises DIRECTORY_IN_USE, STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        try:
            descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise error("STORE_DAMAGED", f"the store {folder} has no file {FILE_NAME}") from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sequence, has_journal = _decoded(os.pread(descriptor, _SIZE_BYTES + 1, 0))
            return Mark(descriptor, sequence, has_journal=has_journal)
        except BlockingIOError as e:
            owner = holder_of(descriptor)
            os.close(descriptor)
            raise error("DIRECTORY_IN_USE", f"the store {folder} is in use: {owner} has it") from e
        except BaseException:
            os.close(descriptor)
            raise

    def move(self, sequence: int) -> None:
        """Record that all writes up to this sequence number are durable. When this returns, the record is durable. The
        record is too small to be torn.

        Raises `OSError`.
        """
        if sequence > self.sequence:
            with self._lock:
                self._write(sequence, self.has_journal)

    def tell_journal(self, has_journal: bool) -> None:
        """Record whether the logs may need a journal. When this returns, the record is durable. Any thread may call it.
        Raises `OSError`."""
        with self._lock:
            if has_journal != self.has_journal:
                self._write(self.sequence, has_journal)

    def _write(self, sequence: int, has_journal: bool) -> None:
        os.pwrite(self._descriptor, _encoded(sequence, has_journal=has_journal), 0)
        os.fdatasync(self._descriptor)
        self.sequence, self.has_journal = sequence, has_journal

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def _encoded(sequence: int, *, has_journal: bool) -> bytes:
    checked = _CHECKED.pack(_MAGIC, FORMAT_VERSION | (JOURNAL if has_journal else 0), sequence)
    crc: int = google_crc32c.value(checked)
    return checked + crc.to_bytes(4, "little")


def _decoded(data: bytes) -> tuple[int, bool]:
    """Return the sequence number, and whether there is a journal."""
    if len(data) != _SIZE_BYTES or google_crc32c.value(data[:-4]).to_bytes(4, "little") != data[-4:]:
        raise error("STORE_DAMAGED", f"the store's file {FILE_NAME} is damaged: its length or checksum is wrong")
    magic, version, sequence = _CHECKED.unpack_from(data)
    if magic != _MAGIC:
        raise error("STORE_DAMAGED", f"the store's file {FILE_NAME} is not one of this program")
    if version & ~JOURNAL != FORMAT_VERSION:
        raise other_format("the store", version & ~JOURNAL)
    return int(sequence), bool(version & JOURNAL)


# -- Torn ends of RocksDB's manifest and write-ahead logs, after a power cut, are removed before RocksDB reads them.
#
# After a power cut, any pages and sectors of unsynced data may be stored, with zeros or old bytes between them. RocksDB
# treats some of these patterns as padding and continues after the hole, and it treats others as damage. With some
# patterns, RocksDB loops forever (record types of recycled files, as of RocksDB 9.8). So this store reads the files
# itself. It accepts complete records, each following the previous record, up to the first record that does not. The
# durable sequence number tells whether durable data followed.

logger = logging.getLogger("seqdedupe.store")

_BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<IHB")
"""Masked checksum of type and body, length, type. No record crosses a block. A rest of a block that is too short for
this header is padding."""

_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_BATCH = struct.Struct("<QI")
"""The beginning of a record of a log: the sequence number of its first change, and its number of changes."""

# Tags of the manifest's records, the least significant bits of numbers first (varint).
_LOG_NUMBER = 2
_PREVIOUS_LOG_NUMBER = 9
_NEXT_FILE_NUMBER = 3
_LAST_SEQUENCE = 4
_OLDEST_LOG_NUMBER = 10
_LARGEST_COLUMN_FAMILY = 203
_NUMBERS = {
    _LOG_NUMBER,
    _PREVIOUS_LOG_NUMBER,
    _NEXT_FILE_NUMBER,
    _LAST_SEQUENCE,
    _OLDEST_LOG_NUMBER,
    _LARGEST_COLUMN_FAMILY,
}
_COMPARATOR = 1
_LENGTH_FOLLOWS = 1 << 13
"""The flag in tags of values that older versions may skip."""


@dataclass(frozen=True, slots=True)
class WholePart:
    """The valid part of RocksDB's files. `sequence` is the number of the last change, and `ends` the end of each file's
    valid part in bytes."""

    sequence: int
    ends: dict[Path, int]

    def cut(self) -> None:
        """Cut off the rest of each file. If a crash interrupts this, the next start cuts the files at the same places.
        Raises `OSError`."""
        for path, end in self.ends.items():
            torn_bytes = path.stat().st_size - end
            if torn_bytes:
                logger.warning("cut %d bytes off %s that were never durable", torn_bytes, path)
                with path.open("r+b") as file:
                    file.truncate(end)


def whole_part(folder: Path) -> WholePart:
    """Read the manifest, and the logs of data that is not in table files yet. Return the valid part of the files.
    Raises STORE_DAMAGED, `OSError`."""
    manifest = _manifest(folder)
    oldest_log = sequence = 0
    ends = {manifest: 0}
    for edit, end in _records(manifest.read_bytes()):
        ends[manifest] = end
        for tag, value in _numbers(edit):
            if tag in (_LOG_NUMBER, _OLDEST_LOG_NUMBER):
                oldest_log = max(oldest_log, value)
            elif tag == _LAST_SEQUENCE:
                # The number covers the tables, but not the additional data in the logs.
                sequence = value
    # A hole in one log also makes the next log unusable, because the sequence number of the next log's first change
    # does not follow.
    numbers = sorted(int(path.stem) for path in folder.glob("*.log") if path.stem.isdecimal())
    for log in (folder / f"{number:06}.log" for number in numbers if number >= oldest_log):
        ends[log] = 0
        for record, end in _records(log.read_bytes()):
            if len(record) < _BATCH.size:
                break
            first, changes = _BATCH.unpack_from(record)
            if changes and first != sequence + 1:
                break
            sequence += changes
            ends[log] = end
    return WholePart(sequence, ends)


def _manifest(folder: Path) -> Path:
    try:
        manifest = folder / (folder / "CURRENT").read_text("ascii").removesuffix("\n")
        if manifest.name.startswith("MANIFEST-") and manifest.parent == folder and manifest.is_file():
            return manifest
    except (FileNotFoundError, ValueError) as e:
        raise error("STORE_DAMAGED", f"the store {folder} has no file CURRENT that can be read") from e
    raise error("STORE_DAMAGED", f"the store {folder} lacks the manifest that its file CURRENT names")


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records from the file's start to the first invalid record, each with the offset of the byte
    after it."""
    parts: list[bytes] = []
    for block in range(0, len(data), _BLOCK_BYTES):
        at, block_end = block, min(block + _BLOCK_BYTES, len(data))
        while at + _HEADER.size <= block_end:
            checksum, length, kind = _HEADER.unpack_from(data, at)
            body = at + _HEADER.size
            at = body + length
            begins = kind in (_WHOLE, _FIRST)
            if not _WHOLE <= kind <= _LAST or begins == bool(parts) or at > block_end:
                return
            if _masked_crc(data[body - 1 : at]) != checksum:
                return
            parts.append(data[body:at])
            if kind in (_WHOLE, _LAST):
                yield b"".join(parts), at
                parts.clear()


def _masked_crc(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _numbers(edit: bytes) -> Iterator[tuple[int, int]]:
    """Yield the tags and values at the beginning of a record of the manifest. This beginning contains all numbers about
    the store as a whole."""
    at = 0
    while at < len(edit):
        tag, at = _varint(edit, at)
        if tag == _COMPARATOR or tag & _LENGTH_FOLLOWS:
            length, at = _varint(edit, at)
            at += length
        elif tag in _NUMBERS:
            value, at = _varint(edit, at)
            yield tag, value
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


MEMTABLE_BYTES = 16 * 1024 * 1024
MEMTABLES = 4
"""This number is enough for the writes of a compaction of a million producers before RocksDB would delay a writer."""

BLOCK_CACHE_BYTES = 4 * 1024 * 1024
BACKGROUND_JOBS = 2
BEHIND_MEMTABLES = 2
BEHIND_FILES = 12
"""The amounts of work left to RocksDB from which on writes that need not happen at once are delayed. RocksDB itself
delays all writes at 4 and at 20."""

INFO_LOG_BYTES = 1024 * 1024
INFO_LOGS = 2

_TABLE_MISSING = re.compile(r"No such file or directory.*\.sst")
_HINT_TABLE_MISSING = (
    "A power cut may remove a table file that was made while the store was opened. If the sidecar has "
    "the logs, no acknowledged message is lost: move the folder `store` away, and start once with "
    "--rebuild-store, which recreates the records from the logs. Or restore both `logs` and `store` from "
    "one backup."
)

_DAMAGE = re.compile(r"Corruption|does not exist|No such file|Invalid argument|Not implemented")


def _options(create: bool) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(create)
    options.set_error_if_exists(create)
    # Torn or damaged data has been found and cut off before RocksDB reads (`whole_part`).
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


_NOT_ALLOWED = "Give the folder and all files in it to the user that this process runs as (chown -R)."
_HINTS = {
    os.strerror(errno.EROFS): "Mount the file system for writing: it is read-only.",
    os.strerror(errno.EACCES): _NOT_ALLOWED,
    os.strerror(errno.EPERM): _NOT_ALLOWED,
}
"""Hints by the system's error text, which RocksDB quotes, for errors other than a full disk."""


@contextmanager
def rocksdb_errors(folder: Path) -> Iterator[None]:
    """Convert errors of RocksDB and of the system into STORE_DAMAGED or STORE_UNAVAILABLE."""
    try:
        yield
    except SeqdedupeError:
        raise
    except Exception as e:
        # RocksDB's own errors are bare `Exception`s with its text. Anything else is a defect and is not converted.
        if type(e) is not Exception and not isinstance(e, OSError | DbClosedError):
            raise
        text = str(e)
        if type(e) is Exception and _DAMAGE.search(text):
            hint = _HINT_TABLE_MISSING if _TABLE_MISSING.search(text) else None
            raise error("STORE_DAMAGED", f"the store {folder} is damaged: {text}", hint=hint) from e
        hint = next((hint for said, hint in _HINTS.items() if said in text), None)
        raise error("STORE_UNAVAILABLE", f"the store {folder} cannot be used: {text}", hint=hint) from e


def write(db: Rdict, batch: WriteBatch) -> None:
    """Write a batch, unsynced. Fail at once if RocksDB would make the caller wait."""
    options = WriteOptions()
    options.no_slowdown = True
    db.write(batch, options)


def is_behind(db: Rdict) -> bool:
    """Return whether RocksDB is behind. While it is behind, writes that can wait should be delayed."""
    if (db.property_int_value("rocksdb.num-immutable-mem-table") or 0) >= BEHIND_MEMTABLES:
        return True
    return (db.property_int_value("rocksdb.num-files-at-level0") or 0) >= BEHIND_FILES


def sync(db: Rdict) -> int:
    """Make earlier writes durable, and return the sequence number of the last durable write."""
    sequence: int = db.latest_sequence_number()
    db.flush_wal(True)
    return sequence


def create_rocksdb(folder: Path) -> None:
    """Create a new store in a folder that does not exist or is empty. The store is created completely, or not at
    all."""
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
    """Open an existing store. Opening the store read-only needs no room on the disk.

    A torn end that was never durable is cut off. Raises STORE_DAMAGED, also if durable data is missing;
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
    """Close the database. A failure to write its last memtable is harmless: synced data is in the log."""
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
