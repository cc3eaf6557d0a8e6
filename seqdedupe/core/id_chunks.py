"""Chunks of a window of deduplication IDs, pieces of them, as snapshots keep them, and how far a window is to reach."""

from dataclasses import dataclass

import numpy as np

from seqdedupe.format.jit import Uint8s

NO_LIMIT = -1

PARTS = 16
"""A window moves forward by one in so many parts of it, or less."""

PIECE_BYTES = 64 * 1024
"""Of IDs with their lengths, that a snapshot writes at once: what writes them holds the whole process."""


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How far back a window reaches at least: until one of these is reached by what came later. NO_LIMIT: never."""

    messages: int
    id_bytes: int = NO_LIMIT
    milliseconds: int = NO_LIMIT


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a window: it is forgotten as a whole."""

    first_index: int
    rows: int
    id_bytes: int
    first_time_ms: int
    last_time_ms: int

    @property
    def end_index(self) -> int:
        return self.first_index + self.rows


@dataclass(frozen=True, slots=True)
class Piece:
    """The IDs of messages that follow one another, of one chunk."""

    chunk_index: int
    """The index of the chunk's first message: a chunk is forgotten as a whole."""
    first_index: int
    first_time_ms: int
    """When the chunk's first message was published, in milliseconds since 1970."""
    last_time_ms: int
    """And the last one of this piece."""
    sizes: Uint8s
    """Of each ID how many bytes it has, 1 to 255."""
    ids: Uint8s
    """One after the other."""

    @property
    def end_index(self) -> int:
        """The index after its last message's."""
        return self.first_index + len(self.sizes)

    def fits(self) -> bool:
        """Whether the sizes cut the IDs, and it lies in its chunk."""
        whole = len(self.ids) == int(self.sizes.sum(dtype=np.int64)) and 0 <= self.chunk_index <= self.first_index
        return bool(whole and len(self.sizes) and self.sizes.min() > 0)
