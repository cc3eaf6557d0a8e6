"""The journal: one sync for a round that wrote to several segments.

What the round wrote there stands unsynced; it is written here once more, in one piece, and the sync of that confirms
it. The segments are synced in the background. When all are that a file of the journal speaks of, the file is forgotten.
After a crash `replaying` puts back what a segment lacks.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from seqdedupe.errors import SeqdedupeError
from seqdedupe.files import sync_folder, write_all
from seqdedupe.format import journal
from seqdedupe.format.journal import Part
from seqdedupe.log.embedded.journal_replay import JournalReplay, journal_path
from seqdedupe.log.embedded.writer import WrittenAppends

logger = logging.getLogger("seqdedupe.log")

SYNC_BYTES = 64 * 1024
"""A sync that is saved is worth so many bytes that are written twice."""

FILE_BYTES = 16 * 1024 * 1024
"""When a file has grown to this, its segments are synced. A start reads all that is there."""

MAX_FILES = 4
"""While so many files wait to be forgotten the disk is behind its work, and nothing new is written."""


class Journal:
    """Belongs to the commit thread, but for `forget`. Nothing is read or written before the first round that needs it.

    A write or sync of its own that fails is no failure: the segments are synced instead, and the journal rests.
    `tell` is called before anything is written, with whether an earlier version would miss something; it may raise
    OSError.
    """

    def __init__(self, replay: JournalReplay, tell: Callable[[bool], None]) -> None:
        self._replay = replay
        self._tell = tell
        self._folder = replay.folder
        self._is_ready = False
        self._rests = False
        self._file: int | None = None
        self._path = Path()
        self._is_begun = False
        """Whether it is said elsewhere that there is such a file."""
        self._end = 0
        self._number = 0
        """That of the last round, also if it was refused."""
        self._confirmed = 0
        """That of the last one that was not."""
        self._forgotten = 0
        self._to_forget: deque[tuple[int, Path]] = deque()
        """Files that are written no more, with the numbers of their last rounds."""

    @property
    def is_due(self) -> bool:
        """Whether the file should end now."""
        return self._file is not None and self._end >= FILE_BYTES

    @property
    def has_failed(self) -> bool:
        """Whether the file could not be written or synced."""
        return self._file is not None and self._rests

    def confirm(self, round_: Sequence[WrittenAppends]) -> bool:
        """Makes a round durable: all of it, or nothing of it counts. False if each segment has to be synced instead."""
        new = [news for news in round_ if news.buffers]
        size = sum(news.end - news.start for news in new)
        if size >= (len(new) - 1) * SYNC_BYTES or self._rests or len(self._to_forget) >= MAX_FILES:
            return False
        try:
            file = self._opened()
            if file is None:
                return False
            # A number is never given twice: what is refused may stand there all the same.
            self._number += 1
            raw = journal.encoded(
                [_part(news) for news in new],
                number=self._number,
                previous=self._confirmed,
                forgotten=self._forgotten,
                file_offset=self._end,
                key=self._replay.key,
            )
            write_all(file, raw, self._end)
            os.fdatasync(file)
            if not self._is_begun:
                self._replay.begun(self._number)
                self._is_begun = True
        except (OSError, SeqdedupeError) as e:
            logger.warning("the journal %s rests, and each segment is synced by itself: %s", self._folder, e)
            self._rests = True
            return False
        self._confirmed = self._number
        self._end += len(raw)
        return True

    def end_file(self) -> int:
        """The next round begins a new file. The number up to which all may be forgotten when the segments are synced
        of which it speaks."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._to_forget.append((self._number, self._path))
        return self._number

    def wake(self) -> None:
        """After a while: rests no longer, and what earlier processes left is emptied if it was not needed yet."""
        self._rests = False
        if not self._is_ready and self._replay.has_something:
            try:
                self._begin()
            except (OSError, SeqdedupeError) as e:
                logger.warning("the journal %s is not emptied now: %s", self._folder, e)

    def forget(self, number: int) -> None:
        """All segments are synced of which rounds up to this one speak. For the thread that has synced them."""
        try:
            while self._to_forget and self._to_forget[0][0] <= number:
                last, path = self._to_forget[0]
                self._replay.forget(last, [path])
                self._forgotten = last
                self._to_forget.popleft()
        except OSError as e:
            logger.warning("the journal %s is not emptied now: %s", self._folder, e)

    def end(self) -> None:
        """Nothing is written any more, and all is forgotten that could be."""
        try:
            if self._file is None and not self._to_forget and self._replay.is_empty:
                self._tell(False)
        except OSError as e:
            logger.warning("an earlier version would not open the logs %s: %s", self._folder.parent, e)

    def _begin(self) -> bool:
        """Empties what earlier processes left. Whether anything new may be written."""
        if not self._is_ready and self._replay.empty():
            self._tell(True)
            self._number = self._confirmed = self._forgotten = self._replay.highest
            self._is_ready = True
        return self._is_ready

    def _opened(self) -> int | None:
        """The file that is written to; None if there can be none. Raises OSError."""
        if not self._begin():
            return None
        if self._file is None:
            path = journal_path(self._folder, self._number + 1)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                sync_folder(self._folder)
            except OSError:
                os.close(file)
                raise
            self._file, self._path, self._end, self._is_begun = file, path, 0, False
        return self._file


def _part(news: WrittenAppends) -> Part:
    return Part(news.opening.writer.incarnation, news.base_index, news.start, b"".join(news.buffers))
