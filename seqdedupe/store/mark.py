"""The file DURABLE: the store's own lock, its format version, up to where its writes were durable, and whether there is
a journal.

A write-ahead log that is torn, cut short or missing may be what a power cut left of it, or damage. The number of
RocksDB's last synced write, kept here, tells the two apart: a store that opens with a lower one has lost something
that was durable. It moves after the sync, never before: then a torn log would be taken for damage.

While the logs beside the store may need their journal, the version says so: a program that knows of no journal takes it
for a newer one, and a journal that is missing is not taken for one that was never there.
"""

import fcntl
import os
import struct
import threading
from pathlib import Path

import google_crc32c

from seqdedupe.errors import error
from seqdedupe.store.records import FORMAT_VERSION, other_format

FILE_NAME = "DURABLE"

JOURNAL = 1 << 31
"""Set in the version while there is a journal."""

_MAGIC = b"seqdedupe-store\n"
_CHECKED = struct.Struct("<16sIQ")
_SIZE_BYTES = _CHECKED.size + 4


class Mark:
    """The file, open and locked. `sequence` is RocksDB's sequence number of the last durable write."""

    def __init__(self, descriptor: int, sequence: int, *, has_journal: bool) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.sequence = sequence
        self.has_journal = has_journal

    @staticmethod
    def create(folder: Path) -> None:
        """Writes the file anew, durable on return."""
        with (folder / FILE_NAME).open("xb") as file:
            file.write(_encoded(0, has_journal=False))
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def open(folder: Path) -> "Mark":
        """Raises DIRECTORY_IN_USE, STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        try:
            descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise error("STORE_DAMAGED", f"the store {folder} has no file {FILE_NAME}") from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sequence, has_journal = _decoded(os.pread(descriptor, _SIZE_BYTES + 1, 0))
            return Mark(descriptor, sequence, has_journal=has_journal)
        except BlockingIOError as e:
            os.close(descriptor)
            raise error("DIRECTORY_IN_USE", f"another process uses the store {folder}") from e
        except BaseException:
            os.close(descriptor)
            raise

    def move(self, sequence: int) -> None:
        """Everything up to this number is durable. Durable on return, and so few bytes that they are never
        torn.

        Raises `OSError`.
        """
        if sequence > self.sequence:
            with self._lock:
                self._write(sequence, self.has_journal)

    def tell_journal(self, has_journal: bool) -> None:
        """Whether the logs may need a journal; durable on return. For any thread. Raises `OSError`."""
        with self._lock:
            if has_journal != self.has_journal:
                self._write(self.sequence, has_journal)

    def _write(self, sequence: int, has_journal: bool) -> None:
        os.pwrite(self._descriptor, _encoded(sequence, has_journal=has_journal), 0)
        os.fdatasync(self._descriptor)
        self.sequence, self.has_journal = sequence, has_journal

    def close(self) -> None:
        """Lets go of the lock."""
        os.close(self._descriptor)


def _encoded(sequence: int, *, has_journal: bool) -> bytes:
    checked = _CHECKED.pack(_MAGIC, FORMAT_VERSION | (JOURNAL if has_journal else 0), sequence)
    crc: int = google_crc32c.value(checked)
    return checked + crc.to_bytes(4, "little")


def _decoded(data: bytes) -> tuple[int, bool]:
    """The sequence number, and whether there is a journal."""
    if len(data) != _SIZE_BYTES or google_crc32c.value(data[:-4]).to_bytes(4, "little") != data[-4:]:
        raise error("STORE_DAMAGED", f"the store's file {FILE_NAME} is damaged: its length or checksum is wrong")
    magic, version, sequence = _CHECKED.unpack_from(data)
    if magic != _MAGIC:
        raise error("STORE_DAMAGED", f"the store's file {FILE_NAME} is not one of this program")
    if version & ~JOURNAL != FORMAT_VERSION:
        raise other_format("the store", version & ~JOURNAL)
    return int(sequence), bool(version & JOURNAL)
