"""Where positions live: the contract of a cursor, a place that keeps how far somebody has got with a topic.

tests/client/cursors.py is the suite that each kind of cursor has to pass.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import Position

MAX_NOTE_BYTES = 1024


class Kept(NamedTuple):
    """What a cursor keeps: a position, and a note of its owner's, up to 1,024 bytes of UTF-8 that nobody else reads."""

    position: Position
    note: str = ""


class Cursor(ABC):
    """A place that keeps one position. What is kept survives a power cut.

    Effects that are not in the cursor's own transaction are at least once: after a crash what came since the last
    `compare_and_set` comes again. So they should be idempotent. Exactly once takes a position in the database that
    the effects go to, in their transaction.
    """

    @abstractmethod
    async def read(self) -> Kept | None:
        """What is kept; None if nothing ever was. Raises what keeps it from being read, never something older."""

    @abstractmethod
    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        """Keeps `new` if what is kept equals `expected` (None: nothing is), in one step; durable when it returns.

        Raises CURSOR_MOVED, which changes nothing, if something else is kept; INVALID_POSITION for what cannot be kept.
        If it raises anything else, or is cancelled, either may be kept: the one or the other, and whole.
        """


def check(kept: Kept) -> None:
    """Raises INVALID_POSITION for what no cursor keeps."""
    position, note = kept
    if not position.is_whole() or min(position.incarnation, position.index + 1) < 0:
        raise error("INVALID_POSITION", f"{position!r} is no position: its parts do not fit together")
    try:
        size = len(note.encode())
    except UnicodeEncodeError as e:
        raise error("INVALID_POSITION", "a cursor's note is not valid Unicode") from e
    if size > MAX_NOTE_BYTES:
        raise error("INVALID_POSITION", f"a cursor's note has {size} bytes: at most {MAX_NOTE_BYTES} are taken")


def moved(name: str, expected: Kept | None, found: Kept | None) -> SeqdedupeError:
    """The error of a compare-and-set that finds something else than it expects."""
    there = "nothing" if found is None else f"the position {found.position}"
    wanted = "nothing" if expected is None else f"{expected.position}"
    if found and expected and found.position == expected.position:
        there += " with another note"
    return error("CURSOR_MOVED", f"the cursor {name} keeps {there}, and not {wanted}: somebody else has moved it")
