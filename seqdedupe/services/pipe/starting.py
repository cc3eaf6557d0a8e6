"""From where a pipe reads on: what the target holds says it, and a cursor where that is further. No I/O."""

from collections.abc import Sequence

from seqdedupe.client import Persisted, TopicEnds
from seqdedupe.client.cursor import Kept
from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.services.pipe.outputs import index_of

_ANOTHER_NAME = (
    "If the messages that are gone do not matter, give the pipe another name: it begins with the first one left, and "
    "none of those was published under this name."
)


def start_of(source: str, ends: TopicEnds, complete_up_to: int, persisted: Sequence[Persisted]) -> Position:
    """The position to read on from. `complete_up_to` and `persisted` are what the target answered when it was opened.

    The last input is asked for again: its outputs were one frame, but a log that stores each message by itself may
    hold only the first ones of them. Those that are there are DUP.

    Raises POSITION_TRIMMED if messages are gone that the pipe has not read, POSITION_AFTER_END if the source has lost
    messages that it has read.
    """
    incarnation, first_index = ends.last.incarnation, ends.first_index
    if complete_up_to < 0:
        if first_index and any(one.sequence_id >= 0 for one in persisted):
            raise error(
                "POSITION_TRIMMED",
                f"the partitions of the target no longer say up to which message of {source} all outputs are there, "
                f"and those before index {first_index} are gone by retention: some may never have been piped",
                hint=_ANOTHER_NAME + " What is left and was piped already comes twice then.",
                first_index=first_index,
            )
        return Position.before(incarnation, first_index)
    index = index_of(complete_up_to)
    if index > ends.last.index:
        raise error(
            "POSITION_AFTER_END",
            f"the target holds outputs of message {index} of {source}, which ends with index {ends.last.index}",
            index=index,
            end_index=ends.last.index + 1,
        )
    if index + 1 < first_index:
        raise error(
            "POSITION_TRIMMED",
            f"the pipe has read {source} up to index {index}, and the first message left has index {first_index}: "
            f"{first_index - index - 1:,} that it has not read are gone by retention",
            hint=_ANOTHER_NAME,
            index=index,
            first_index=first_index,
        )
    return Position.before(incarnation, max(index, first_index))


def later(start: Position, kept: Kept | None, persisted: Sequence[Persisted]) -> Position:
    """The position that a cursor keeps, if it is of this source, not before `start`, and the target still has all that
    it had when the position was kept; else `start`."""
    if kept is None or kept.position.incarnation != start.incarnation or kept.position.index < start.index:
        return start
    return kept.position if _holds(persisted, kept.note) else start


def note_of(persisted: Sequence[Persisted], sequence_id: int) -> str:
    """What a target holds that is one topic, for a cursor: which one it is, and up to which output."""
    return f"{persisted[0].incarnation}:{sequence_id}"


def _holds(persisted: Sequence[Persisted], note: str) -> bool:
    incarnation, _, sequence_id = note.partition(":")
    if not (incarnation.isdecimal() and sequence_id.removeprefix("-").isdecimal()):
        return False  # another owner's
    return persisted[0].incarnation == int(incarnation) and persisted[0].sequence_id >= int(sequence_id)
