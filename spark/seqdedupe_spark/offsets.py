"""The offsets of a streaming query: what Spark keeps in a checkpoint, and gives back to plan a batch, or plan it again.

An offset is a position for each topic, after the last message of the batch: `{"TOPIC": "POSITION"}`. Where that batch
is the first to read a topic, `"starts"` has the position before its first message, in the same form. Spark logs the
ends of batches alone: to repeat its first one it asks for the start once more, and by then `latest`, a time or what
retention has left is another place.
"""

from collections.abc import Mapping
from typing import Any

from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.message_id import Position

Offsets = dict[str, Any]

_STARTS = "starts"
"""No topic has this name: they are full names."""

NOTHING_YET: Offsets = {_STARTS: None}
"""The offset before the first batch: where that starts its own offset says."""


def as_texts(positions: Mapping[str, Position]) -> dict[str, str]:
    return {topic: str(position) for topic, position in sorted(positions.items())}


def offset_after(before: Offsets, ends: Mapping[str, Position], starts: Mapping[str, Position]) -> Offsets:
    """The offset of the batch after another one that reads up to these ends, and some topics for the first time, from
    these starts. It is the other one if nothing is new: Spark then runs no batch."""
    if before != NOTHING_YET and not starts and ends == positions_in(before):
        return before
    return as_texts(ends) | ({_STARTS: as_texts(starts)} if starts else {})


def positions_in(offset: Offsets) -> dict[str, Position]:
    """Up to where a query is in each topic that it has read. Raises INVALID_POSITION."""
    return _parsed({topic: text for topic, text in offset.items() if topic != _STARTS})


def starts_in(before: Offsets, offset: Offsets) -> dict[str, Position]:
    """Where the batch between two offsets starts in its topics, as far as they say so. Raises INVALID_POSITION."""
    return _parsed(offset.get(_STARTS) or {}) | positions_in(before)


def _parsed(texts: Mapping[str, str]) -> dict[str, Position]:
    try:
        return {topic: Position.parse(text) for topic, text in texts.items()}
    except InvalidRequestError as e:
        raise error("INVALID_POSITION", f"the checkpoint's offsets are not this source's: {e.message}") from e
