"""Operations of readers and operators on the named cursors of a topic: look, move, hold, remove.

Each change is a record in the log (`control`), durable on return.
"""

from dataclasses import replace

from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.names import check_cursor_name
from seqdedupe.topic.base import State
from seqdedupe.topic.control import CursorChange
from seqdedupe.topic.policy import LARGEST, MAX_CURSORS, MAX_NOTE_BYTES, NamedCursor
from seqdedupe.topic.topic import Topic

CursorContent = tuple[Position, str]
"""A position, and a note."""


def cursors_of(topic: Topic) -> tuple[NamedCursor, ...]:
    """Return the cursors in force, by name. Raises RECOVERING, LOG_DAMAGED, NOT_OWNER while they are not certain."""
    topic.check_knows_its_end()
    if topic.state is State.RECOVERING:
        raise error("RECOVERING", f"what topic {topic.name} holds is being found out: {topic.why}")
    return topic.policy.cursors


def kept_by_cursor(topic: Topic, name: str) -> CursorContent | None:
    """Return what a cursor keeps. Raises as `cursors_of`, INVALID_NAME."""
    check_cursor_name(name)
    found = next((one for one in cursors_of(topic) if one.name == name), None)
    return None if found is None else (found.position, found.note)


async def move_cursor(topic: Topic, name: str, expected: CursorContent | None, new: CursorContent) -> None:
    """Replace what a cursor keeps, if that is `expected`: durable on return. If it keeps `new` already, nothing is
    written.

    Changes in progress count as done: if they fail, this fails too. Raises CURSOR_MOVED, INVALID_NAME,
    INVALID_POSITION, INVALID_REQUEST, TOO_MANY_CURSORS. Raises why the topic takes nothing now, or LOG_REFUSED: then
    the cursor is unchanged. A caller that is cancelled here does not know the outcome.
    """
    check_cursor_name(name)
    position, note = new
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position} is no position: its parts do not fit together")
    if (size := len(note.encode())) > MAX_NOTE_BYTES:
        what = f"the note has {size} bytes: at most {MAX_NOTE_BYTES} are taken"
        raise error("INVALID_REQUEST", what, hint="Shorten the note, or keep what it says elsewhere.")
    topic.check_serving()
    cursors = {one.name: one for one in topic.newest_policy.cursors}
    found = cursors.get(name)
    if (None if found is None else (found.position, found.note)) != expected:
        there = "nothing" if found is None else f"the position {found.position}"
        wanted = "nothing" if expected is None else f"{expected[0]}"
        raise error(
            "CURSOR_MOVED",
            f"the cursor {name!r} of {topic.name} keeps {there}, and not {wanted}, or not with that note",
        )
    if found is None and len(cursors) >= MAX_CURSORS:
        raise error("TOO_MANY_CURSORS", f"topic {topic.name} has {len(cursors)} cursors: that is the most")
    moved = NamedCursor(name, position, note, 0 if found is None else found.hold_retention_in_mb)
    if moved != found or moved not in topic.policy.cursors:
        await topic.append_change(CursorChange(name, moved))


async def hold_cursor(topic: Topic, name: str, mb: int) -> None:
    """Make retention wait for the cursor while the log is not larger than `mb`; 0: never. Raises CURSOR_NOT_FOUND,
    INVALID_REQUEST, and as `move_cursor`."""
    if not 0 <= mb <= LARGEST:
        raise error("INVALID_REQUEST", f"hold_retention_in_mb is {mb}: it should be 0 to {LARGEST}")
    await topic.append_change(CursorChange(name, replace(_cursor(topic, name), hold_retention_in_mb=mb)))


async def remove_cursor(topic: Topic, name: str) -> None:
    """Remove the cursor. Raises CURSOR_NOT_FOUND, and as `move_cursor`."""
    await topic.append_change(CursorChange(_cursor(topic, name).name, None))


def _cursor(topic: Topic, name: str) -> NamedCursor:
    topic.check_serving()
    for one in topic.newest_policy.cursors:
        if one.name == name:
            return one
    raise error("CURSOR_NOT_FOUND", f"topic {topic.name} has no cursor {name!r}", topic=topic.name)
