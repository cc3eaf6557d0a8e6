"""What a topic answers to a frame."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.log.contract import Runs

_NO_INDEXES = np.zeros(0, np.int64)


@dataclass(slots=True)
class Receipt:
    """The outcome of a frame that was not refused, as `Receipt` in publish.proto has it."""

    frame: int
    verdicts: Uint8s | None
    """None: all rows are NOT_DUP."""
    first_index: int
    """-1 if no row is new."""
    runs: Runs = ()
    """The message IDs of the rows that are new, once they are stored."""
    known_rows: Int64s = field(default_factory=lambda: _NO_INDEXES)
    known_indexes: Int64s = field(default_factory=lambda: _NO_INDEXES)
    imported_rows: Int64s = field(default_factory=lambda: _NO_INDEXES)
    """Those with verdict DUP whose IDs were imported: no message of the topic has them."""
    durable_at: int = 0
    """0: the rows that are new are durable. Else they are only written, until the topic is durable up to this index."""

    def stands_at(self, first_index: int) -> None:
        """The new rows have these indexes in the log, which need not be those that they were to get."""
        if self.known_rows.size:
            moved = np.where(self.known_indexes >= self.first_index, first_index - self.first_index, 0)
            self.known_indexes = self.known_indexes + moved
        self.first_index = first_index


@dataclass(frozen=True, slots=True)
class ProducerNumbers:
    """What a refusal says of a producer."""

    name: str
    epoch: int
    current_epoch: int
    sequence_id: int
    previous_sequence_id: int
    pushed: int
    persisted: int
    expected_sequence_id: int | None = None
    """With GAP: the one that is missing where the gap is."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A frame of which nothing was admitted."""

    frame: int
    error: SeqdedupeError
    producers: list[ProducerNumbers] = field(default_factory=list)


class OutOfStepError(Exception):
    """Raised from what has failed after rows of a frame were decided: they count as in flight, and will not be."""


Reply = Callable[[Receipt | Refusal], None]
"""Is called once for each frame."""
