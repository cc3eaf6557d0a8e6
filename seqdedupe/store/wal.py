"""What a power cut tore off RocksDB's manifest and write-ahead logs is cut off before RocksDB reads them.

Of what was written and not synced, a power cut leaves any pages and sectors, with zeros or old bytes between
them. RocksDB takes some of these patterns for padding and goes on with what stands after the hole, some for
damage, and on some it loops for ever (types of recycled files, as of RocksDB 9.8). So this store reads the files
itself: whole records, each following on the one before, up to the first that does not. Whether something durable
stood after it, the durable sequence number tells.
"""

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from seqdedupe.errors import error

logger = logging.getLogger("seqdedupe.store")

_BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<IHB")
"""Masked checksum of type and body, length, type. No record crosses a block; a rest too short for it is padding."""

_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_BATCH = struct.Struct("<QI")
"""What a record of a log begins with: the sequence number of its first change, and how many changes it has."""

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
"""Set in tags of values that older versions may skip."""


@dataclass(frozen=True, slots=True)
class WholePart:
    """Up to where RocksDB's files are whole: `sequence` is the last change, `ends` each file's end in bytes."""

    sequence: int
    ends: dict[Path, int]

    def cut(self) -> None:
        """Cuts the rest off. What a crash leaves of this is cut the same way again. Raises `OSError`."""
        for path, end in self.ends.items():
            torn_bytes = path.stat().st_size - end
            if torn_bytes:
                logger.warning("cut %d bytes off %s that were never durable", torn_bytes, path)
                with path.open("r+b") as file:
                    file.truncate(end)


def whole_part(folder: Path) -> WholePart:
    """Reads the manifest, and the logs of what is not in table files yet. Raises STORE_DAMAGED, `OSError`."""
    manifest = _manifest(folder)
    oldest_log = sequence = 0
    ends = {manifest: 0}
    for edit, end in _records(manifest.read_bytes()):
        ends[manifest] = end
        for tag, value in _numbers(edit):
            if tag in (_LOG_NUMBER, _OLDEST_LOG_NUMBER):
                oldest_log = max(oldest_log, value)
            elif tag == _LAST_SEQUENCE:
                # Of the tables, not of what the logs have besides.
                sequence = value
    # A hole in one log is one before the next too: its first change does not follow then.
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
    """The whole records from the file's start to the first bad one, each with the byte after it."""
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
    """Tags and values at the beginning of a record of the manifest, where all numbers of the store as a whole stand."""
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
