"""The cursors for threads."""

from pathlib import Path

from seqdedupe.client import cursor as _cursor
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.cursor import Kept


class Cursor:
    """As `seqdedupe.client.Cursor`, with calls that block: of any kind of those."""

    def __init__(self, cursor: _cursor.Cursor) -> None:
        self._cursor = cursor

    @property
    def on_loop(self) -> _cursor.Cursor:
        """The cursor whose calls are awaited on the event loop."""
        return self._cursor

    def read(self) -> Kept | None:
        """What is kept; None if nothing ever was."""
        return run(self._cursor.read)

    def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        """Keeps `new` if what is kept equals `expected`, see `seqdedupe.client.Cursor.compare_and_set`."""
        run(lambda: self._cursor.compare_and_set(expected, new))


class FileCursor(Cursor):
    """As `seqdedupe.client.FileCursor`, with calls that block."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(_cursor.FileCursor(path))
        self.path = Path(path)


AnyCursor = Cursor | _cursor.Cursor
"""What readers and pipes for threads take."""


def on_loop(cursor: AnyCursor) -> _cursor.Cursor:
    """The cursor whose calls are awaited."""
    return cursor.on_loop if isinstance(cursor, Cursor) else cursor
