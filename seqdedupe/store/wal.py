"""A look at RocksDB's own logs before it reads them.

RocksDB has record types for recycled log files, which this store never makes. One byte of damage turns an
ordinary type into such a one, and RocksDB's reader then loops for ever (as of RocksDB 9.8). So
these types are looked for first. Everything else that may be wrong RocksDB reports itself.
"""

import struct
from pathlib import Path

from seqdedupe.errors import error

_BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<IHB")
"""Checksum, length, type. No record crosses a block; a rest too short for a header is padding."""

_LAST_OWN_TYPE = 4
"""0 is none yet written; 1 to 4 are whole, first, middle and last."""


def check_logs(folder: Path) -> None:
    """Raises STORE_DAMAGED for a record type in a write-ahead log or manifest that RocksDB would choke on."""
    for path in sorted([*folder.glob("*.log"), *folder.glob("MANIFEST-*")]):
        data = path.read_bytes()
        for block in range(0, len(data), _BLOCK_BYTES):
            end = min(block + _BLOCK_BYTES, len(data))
            at = block
            while at + _HEADER.size <= end:
                _, length, kind = _HEADER.unpack_from(data, at)
                if kind > _LAST_OWN_TYPE:
                    raise error(
                        "STORE_DAMAGED",
                        f"the store's file {path} is damaged: at byte {at} stands a record of type {kind}",
                        offset=at,
                    )
                at += _HEADER.size + length
