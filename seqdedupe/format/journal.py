"""A round in the journal: the data written to several segments at once. `docs/internals/formats.md` shows the
layout."""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from seqdedupe.format.headers import siphash
from seqdedupe.format.jit import Int64s

FORMAT_VERSION = 1

_TAG = struct.Struct("<q")
_HEAD = struct.Struct("<IIqqqqq")
_PLACE = struct.Struct("<qqqII")
HEAD_BYTES = _TAG.size + _HEAD.size
FILE_OFFSET_AT = _TAG.size + 8
SECTOR_BYTES = 512
"""A disk writes a piece of a file of this size completely, or not at all."""


class Part(NamedTuple):
    """The data written to one segment: whole records, one after the other."""

    incarnation: int
    base_index: int
    """The first index of the segment."""
    offset: int
    """The place in its file where the records begin."""
    body: bytes

    @property
    def end(self) -> int:
        """The place in the file where the records end."""
        return self.offset + len(self.body)


class Place(NamedTuple):
    """The place of a part, and its size and checksum."""

    incarnation: int
    base_index: int
    offset: int
    size: int
    crc32c: int


class JournalRound(NamedTuple):
    """A round whose head is intact."""

    version: int
    number: int
    """The number of the round. Numbers ascend over all rounds, including refused rounds, in all journals of a
    directory."""
    previous: int
    """The number of the previous confirmed round; 0 if there is none."""
    forgotten: int
    """Rounds up to this number need not exist any more."""
    parts: list[Part]
    """The intact parts."""
    damaged: list[int]
    """The incarnations of the other parts."""
    is_torn: bool
    """Whether a power cut before the round's sync can have left the damaged parts like this."""
    end: int
    """The place in the file where the next round begins."""


def encoded(
    parts: Sequence[Part], *, number: int, previous: int, forgotten: int, file_offset: int, key: Int64s
) -> bytes:
    """Return the bytes of a round, to be written at `file_offset`."""
    places = [_PLACE.pack(*part[:3], len(part.body), google_crc32c.value(part.body)) for part in parts]
    size = HEAD_BYTES + sum(map(len, places)) + sum(len(part.body) for part in parts)
    head = _HEAD.pack(FORMAT_VERSION, len(parts), file_offset, number, previous, forgotten, size)
    tagged = b"".join((head, *places))
    tag = siphash(np.frombuffer(tagged, np.uint8), 0, len(tagged), key)
    return b"".join((_TAG.pack(tag), tagged, *(part.body for part in parts)))


def round_at(raw: bytes, at: int, key: Int64s) -> JournalRound | None:
    """Return the round at this offset of a journal's file; None if there is no complete head of a round at this
    offset."""
    if at + HEAD_BYTES > len(raw):
        return None
    version, count, file_offset, number, previous, forgotten, size = _HEAD.unpack_from(raw, at + _TAG.size)
    head_end = at + HEAD_BYTES + count * _PLACE.size
    if file_offset != at or head_end > len(raw):
        return None
    if _TAG.unpack_from(raw, at)[0] != siphash(np.frombuffer(raw, np.uint8), at + _TAG.size, head_end, key):
        return None
    parts: list[Part] = []
    damaged: list[int] = []
    is_whole = True
    begin = head_end
    for entry in _PLACE.iter_unpack(raw[at + HEAD_BYTES : head_end]):
        place = Place(*entry)
        body = raw[begin : begin + place.size]
        begin += place.size
        if len(body) == place.size and google_crc32c.value(body) == place.crc32c:
            parts.append(Part(*place[:3], body))
        else:
            damaged.append(place.incarnation)
            is_whole = is_whole and is_written(raw, at, begin - place.size, begin)
    # The next round begins only after the sync of this one.
    is_torn = not is_whole and at + size >= len(raw)
    return JournalRound(version, number, previous, forgotten, parts, damaged, is_torn, at + size)


def rounds_in(raw: bytes, key: Int64s) -> Iterator[JournalRound]:
    """Yield all rounds of a journal's file that have intact heads, including rounds after damage."""
    at = 0
    while at < len(raw):
        found = round_at(raw, at, key)
        if found is None:
            at = _next_head(raw, at + 1, key)
        else:
            yield found
            at = found.end


def has_damaged_head(raw: bytes, at: int) -> bool:
    """Return whether a damaged round is at this offset: `round_at` finds no round there, and a power cut cannot be the
    reason."""
    fixed_end = at + HEAD_BYTES
    if not is_written(raw, at, at, fixed_end):
        return False
    _, count, file_offset, _, _, _, size = _HEAD.unpack_from(raw, at + _TAG.size)
    table_bytes = count * _PLACE.size
    contradicts_itself: bool = file_offset != at or size <= HEAD_BYTES + table_bytes
    return contradicts_itself or is_written(raw, at, at, fixed_end + table_bytes)


def is_written(raw: bytes | memoryview, begin: int, start: int, stop: int) -> bool:
    """Return whether each sector from `start` to `stop` contains bytes of a round or record. The round or record starts
    at `begin`. `raw` begins at the start of a sector.

    Files only grow. So a sector that a power cut has lost is missing, or has only zeros after the end of the earlier
    data.
    """
    sectors = range(start // SECTOR_BYTES * SECTOR_BYTES, stop, SECTOR_BYTES)
    return stop <= len(raw) and all(any(raw[max(begin, at) : at + SECTOR_BYTES]) for at in sectors)


def _next_head(raw: bytes, at: int, key: Int64s) -> int:
    """Return the offset of the next head; the end of the file if there is no further head. A head contains its own
    offset."""
    candidates: list[int] = []
    for shift in range(8):
        count = (len(raw) - shift) // 8
        numbers = np.frombuffer(raw, "<i8", count, shift)
        places = np.arange(count, dtype=np.int64) * 8 + shift - FILE_OFFSET_AT
        candidates += places[(numbers == places) & (places >= at)].tolist()
    return next((place for place in sorted(candidates) if round_at(raw, place, key) is not None), len(raw))
