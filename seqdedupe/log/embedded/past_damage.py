"""Where the records of a segment file go on after damage: with the next header that this log wrote where it stands."""

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from seqdedupe.format import records
from seqdedupe.format.headers import HEADER_BYTES
from seqdedupe.log.embedded.segment import CHUNK_BYTES, Identity, Read, Segment, read_piece

SECTOR_BYTES = 512
"""What is read at once where the disk does not give a larger piece."""


class Onward(NamedTuple):
    """Where to read on, and which index comes there."""

    offset: int
    next_index: int


def past_damage(
    file: int, identity: Identity, at: int, end: int, index: int, base_index: int, read: Read
) -> Onward | None:
    """Where to read on after a record at `at` that should have that index, and cannot be read.

    None if no header of this log follows before `end`. Where the record's own header is whole, it says how long the
    record is and how many messages are in it.
    """
    least = max(index, base_index)
    own = next(headers_from(file, identity, at, min(at + HEADER_BYTES, end), least, read), None)
    if own is not None and records.base_index_of(own[1]) == index:
        size_bytes, next_index = records.end_of(own[1])
        return Onward(at + size_bytes, next_index)
    following = own or next(headers_from(file, identity, at + 1, end, least, read), None)
    return None if following is None else Onward(following[0], records.base_index_of(following[1]))


def look_past(
    segment: Segment, offset: int, end: int, index: int, payloads_from: int | None, following_index: int
) -> Onward | None:
    """`past_damage` of a segment that readers have open, for use in any thread; None if the record can be read by now.

    `following_index` is that after the segment. What the disk cannot give is damage too. Raises LOG_UNREADABLE.
    """
    try:
        with segment.opened() as file:
            piece = read_piece(
                file, segment.identity, offset, end, index, payloads_from=payloads_from, read=read_what_can_be
            )
            if piece.size:
                return None
            found = past_damage(file, segment.identity, offset, end, index, segment.base_index, read_what_can_be)
    except FileNotFoundError:
        found = None
    return found or Onward(end, following_index)


def headers_from(
    file: int, identity: Identity, at: int, end: int, base_index: int, read: Read = os.pread
) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of the headers that this log wrote where they stand, between two offsets of a segment file.

    Those that name an index below `base_index`, that of the segment or a higher one, are passed over.
    """
    while at + HEADER_BYTES <= end:
        raw = read(file, min(CHUNK_BYTES, end - at), at)
        if len(raw) < HEADER_BYTES:
            break
        view = np.frombuffer(raw, np.uint8)
        found = records.find_header(view, identity.incarnation, at, base_index, identity.key)
        if found < 0:
            at += len(raw) - HEADER_BYTES + 1
        else:
            yield at + found, bytes(raw[found : found + HEADER_BYTES])
            at += found + HEADER_BYTES


def read_what_can_be(file: int, size: int, offset: int) -> bytes:
    """`os.pread` of all there is, with zeros in place of what the disk cannot give."""
    parts, at_once = [], size
    while size:
        try:
            raw = os.pread(file, min(at_once, size), offset)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            if at_once > SECTOR_BYTES:
                at_once = max(at_once // 2, SECTOR_BYTES)
                continue
            raw = bytes(min(SECTOR_BYTES - offset % SECTOR_BYTES, size))
        if not raw:
            break
        parts.append(raw)
        offset, size, at_once = offset + len(raw), size - len(raw), 2 * at_once
    return b"".join(parts)
