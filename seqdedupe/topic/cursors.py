"""Named cursors: how far somebody has read a topic. They are kept with the topic's policy, and change one by one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seqdedupe.message_id import Position

MAX_CURSORS = 32
"""Of a topic. All of them are in its policy, and so in each snapshot."""

MAX_NOTE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class NamedCursor:
    """What it keeps, for whom, and up to which size of the log retention waits for it (MB; 0: it does not)."""

    name: str
    position: Position
    note: str = ""
    hold_retention_in_mb: int = 0


def fill(cursors: Iterable[NamedCursor], messages: Any) -> None:
    """Adds them to the `ControlCursor`s, or `TopicCursor`s, of a message."""
    for cursor in cursors:
        fill_one(cursor, messages.add())


def fill_one(cursor: NamedCursor, message: Any) -> None:
    """Sets the fields of a `ControlCursor` or `TopicCursor`."""
    message.name, message.note = cursor.name, cursor.note
    message.hold_retention_in_mb = cursor.hold_retention_in_mb
    message.position.SetInParent()
    message.position.ParseFromString(cursor.position.to_bytes())


def of(messages: Iterable[Any]) -> tuple[NamedCursor, ...]:
    """Those of a message."""
    return tuple(
        NamedCursor(one.name, Position.from_proto(one.position), one.note, one.hold_retention_in_mb) for one in messages
    )
