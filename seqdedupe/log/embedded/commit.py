"""Group commit: one thread writes and syncs for all topics of a sidecar, with one journal. Begin with `Committer`.

The thread takes all appends that have arrived, writes them with one call per topic, and makes them durable. The thread
then notifies the event loop, topic by topic. Appends that arrive while the thread writes form the next group.

A group of one topic is durable when the topic's segment is synced. A group of several topics is durable when the
journal is synced. The topics' segments are synced later.

A topic's flush policy may let written batches wait for their sync. Such a topic is notified twice: when the batches are
written, and when a sync of the segment has made the batches durable.
"""

import asyncio
import logging
import os
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from seqdedupe.errors import SeqdedupeError
from seqdedupe.figures import Buckets
from seqdedupe.files import sync_folder, write_all
from seqdedupe.format import journal
from seqdedupe.format.journal import Part
from seqdedupe.log.embedded.journal_replay import JournalReplay, journal_path
from seqdedupe.log.embedded.writer import FatalError, LateAppends, Syncer, Writer, WriteTerm, WrittenAppends

GATHER_SECONDS = 0.0001
"""After a group of several batches, the next group waits for this time, so that more batches can arrive.

A client that sends several batches at once usually has more in flight. On few cores the wake-ups and syncs of small
groups cost more than the wait (`python -m bench publish single_messages`). A lone batch never waits.
"""

MAX_OPEN_FILES = 1024
"""The most files held open for topics that are written to. With more topics, the most recently used files stay open.

A file whose records are in the journal must be synced before the file is closed. So each topic above the limit costs
one more sync.
"""

OPEN_FILES_SHARE = 8
"""The limit is also at most this fraction of the process's open-file limit: 128 of 1024."""

MAX_ROUND = 128
"""The most topics in one round."""

MAX_LATE_BYTES = 32 * 1024 * 1024
"""When topics with a flush policy have written this number of bytes, all data that waits for a sync is synced. The
limit exists because memory holds the waiting data."""

SYNC_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
GROUP_BATCHES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
"""Bucket bounds of the metrics of rounds."""

IDLE_SECONDS = 10
"""A file that is idle for this time is closed. This is also the interval at which the journal is emptied."""


class Closing(NamedTuple):
    """A request to the thread to release a writer for good."""

    writer: Writer
    closed: "asyncio.Future[None]"


class Signal(Enum):
    """The messages, other than work, from the event loop to the thread."""

    TICK = "look for idle files"
    END = "end when all is done that came before"


def open_files_within(limit: int) -> int:
    """Return the number of segment files that may stay open if the process may open `limit` files. The same number of
    other files may wait for a sync."""
    return min(MAX_OPEN_FILES, max(1, limit // OPEN_FILES_SHARE))


def wall_ms() -> int:
    """Return the publish time of new messages, from the process's clock."""
    return time.time_ns() // 1_000_000


Work = WriteTerm | Closing | Signal


class Committer:
    """The commit thread. A `Committer` must be created on the event loop that receives the outcomes.

    The thread calls `fatal` with the reason why the process must end.
    """

    def __init__(self, clock_ms: Callable[[], int], fatal: Callable[[str], None], journal: "Journal") -> None:
        self.queue: SimpleQueue[Work] = SimpleQueue()
        self._clock_ms = clock_ms
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self.sync_seconds = Buckets(SYNC_SECONDS)
        """The duration of each sync, of the journal or of a segment, that made a round durable."""
        self.group_batches = Buckets(GROUP_BATCHES)
        """The number of batches in each round."""
        self._news: deque[WrittenAppends | LateAppends | Closing] = deque()
        self._announced = False
        self._gathers = False
        self._has_failed = False
        self._open: OrderedDict[Writer, float] = OrderedDict()
        """The writers that hold a file open, and the time when each file was last used. The least recently used file
        comes first."""
        self._late_bytes = 0
        """The number of bytes that were reported as written, but not as durable, since all waiting data was last
        synced."""
        self._journal = journal
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open_files = open_files_within(soft) if soft != resource.RLIM_INFINITY else MAX_OPEN_FILES
        # Each topic of a round may open a file, in addition to the files that are open.
        self._max_round = min(MAX_ROUND, self._max_open_files)
        self._syncer = Syncer(fatal, self._max_open_files)
        self._thread = threading.Thread(target=self._run, name="seqdedupe-commit", daemon=True)
        self._thread.start()
        self._timer = self._loop.call_later(IDLE_SECONDS, self._tick)

    async def close(self) -> None:
        """End the thread after it has done all work handed over."""
        self._timer.cancel()
        self.queue.put(Signal.END)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        ended = False
        try:
            while not ended:
                work = self._wait()
                ended = Signal.END in work
                for at in range(0, len(work), self._max_round):
                    self._round([item for item in work[at : at + self._max_round] if not isinstance(item, Signal)])
                    if len(self._open) > self._max_open_files:
                        self._let_go()
                if Signal.TICK in work:
                    self._let_go()
                    self._journal.wake()
                if self._journal.is_due or Signal.TICK in work:
                    self._forget()
            self._journal.wake()
            self._forget()
            for writer in self._open:
                self._leave(writer)
            self._syncer.close()
            if not self._has_failed:
                self._journal.end()
        except BaseException as e:
            self._fatal(f"the commit thread has failed: {e!r}")
            raise

    def _tick(self) -> None:
        # The commit thread waits without a time-out, because setting a timer for every batch costs more than packing
        # the batch's header.
        self._timer = self._loop.call_later(IDLE_SECONDS, self._tick)
        self.queue.put(Signal.TICK)

    def _wait(self) -> list[Work]:
        """Wait for work. Return all work that has arrived, at least one item."""
        work = [self.queue.get()]
        if self._gathers:
            time.sleep(GATHER_SECONDS)
        return work + [self.queue.get() for _ in range(self.queue.qsize())]

    def _round(self, work: list[WriteTerm | Closing]) -> None:
        """Write all appends of a round, and make the written data durable, either with one sync of the journal or with
        a sync of each file."""
        now_ms = self._clock_ms()
        written = []
        asked = []
        for item in work:
            if isinstance(item, Closing):
                continue
            try:
                news = item.writer.write(item, now_ms)
            except FatalError as e:
                self._fail(str(e))
                continue
            if news is not None:
                written.append(news)
            elif item.writer.is_due:
                asked.append(item.writer)
        self._gathers = any(news.opening.writer.has_more_coming for news in written)
        of_journal = [news for news in written if news.opening.writer.may_use_journal]
        if batches := sum(len(news.runs) for news in written):
            self.group_batches.add(batches)
        began = time.perf_counter()
        if self._journal.confirm(of_journal):
            self.sync_seconds.add(time.perf_counter() - began)
            for news in of_journal:
                news.opening.writer.in_journal()
        elif self._journal.has_failed:
            # The disk block that could not be written may also have held the end of a confirmed round.
            self._forget()
        for news in written:
            writer = news.opening.writer
            if self._sync(writer):
                if news.failure is not None:
                    self._tell(news)
                elif writer.has_unsynced:
                    self._tell(LateAppends(news.opening, news.runs))
                    self._late_bytes += news.end - news.start
                self._open[writer] = time.monotonic()
                self._open.move_to_end(writer)
        if self._late_bytes >= MAX_LATE_BYTES:
            self._late_bytes = 0
            asked += [writer for writer in self._open if writer.has_unsynced]
        for writer in asked:
            writer.is_due = True
            self._sync(writer)
        for item in work:
            if isinstance(item, Closing):
                self._open.pop(item.writer, None)
                try:
                    item.writer.close()
                except FatalError as e:
                    self._fail(str(e))
                self._tell_durable(item.writer)
                self._tell(item)

    def _sync(self, writer: Writer) -> bool:
        """If the writer's data must be durable now, sync it. Report all data that is durable. Return whether the sync
        succeeded."""
        try:
            if writer.is_due:
                began = time.perf_counter()
                writer.sync()
                self.sync_seconds.add(time.perf_counter() - began)
        except FatalError as e:
            self._fail(str(e))
            return False
        self._tell_durable(writer)
        return True

    def _tell_durable(self, writer: Writer) -> None:
        for news in writer.take_durable():
            self._tell(news)

    def _let_go(self) -> None:
        """Release the files above the limit and the idle files."""
        idle_since = time.monotonic() - IDLE_SECONDS
        while self._open:
            writer, used = next(iter(self._open.items()))
            if len(self._open) <= self._max_open_files and used > idle_since:
                break
            del self._open[writer]
            self._leave(writer)
            self._tell_durable(writer)

    def _leave(self, writer: Writer) -> None:
        """Close the writer's file. If the file is not synced, the background thread syncs the file before it closes the
        file. Data that is not in the journal either is synced here."""
        if self._syncer.is_full or writer.has_unsynced:
            try:
                writer.sync_file()
            except FatalError as e:
                self._fail(str(e))
        if (left := writer.let_go()) is not None:
            self._syncer.sync(left)

    def _forget(self) -> None:
        """Have the journal forget its rounds once all segments named in the rounds are synced.

        Segments whose files are not open are already being synced in the background.
        """
        leaving = [writer for writer in self._open if writer.is_in_journal]
        for writer in leaving:
            del self._open[writer]
            self._leave(writer)
        has_lost = self._journal.has_failed
        if not self._has_failed:
            number = self._journal.end_file()
            self._syncer.then(lambda: self._journal.forget(number))
        if has_lost:
            # The journal may have lost rounds. Report nothing new before the segments have these rounds and the journal
            # has forgotten them. Otherwise the next start would treat the loss as damage.
            self._syncer.wait()
        for writer in leaving:
            self._tell_durable(writer)

    def _fail(self, why: str) -> None:
        """Report that the process must end. Keep the journal."""
        self._has_failed = True
        self._fatal(why)

    def _tell(self, news: WrittenAppends | LateAppends | Closing) -> None:
        self._news.append(news)
        if not self._announced:
            self._announced = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._announced = False
        try:
            while self._news:
                news = self._news.popleft()
                if isinstance(news, WrittenAppends):
                    news.opening.writer.on_news(news)
                elif isinstance(news, LateAppends):
                    news.opening.writer.on_late(news)
                elif not news.closed.done():
                    news.closed.set_result(None)
        finally:
            # If a callback raises, the exception goes to the loop's handler. The remaining outcomes must not wait for
            # the next notification.
            if self._news:
                self._loop.call_soon(self._deliver)


# -- The journal: one sync for a round that wrote to several segments.
#
# The segments of such a round are not synced at once. The round is also written to the journal, in one piece, and the
# sync of the journal confirms the round. The segments are synced in the background. When all segments named in a
# journal file are synced, the journal forgets the file. After a crash, `journal_replay` writes the records that a
# segment lacks from the journal to the segment.

logger = logging.getLogger("seqdedupe.log")

SYNC_BYTES = 64 * 1024
"""The journal is used only if it writes fewer bytes than this per saved sync."""

FILE_BYTES = 16 * 1024 * 1024
"""When a journal file has this size, the segments named in it are synced. The size is limited because a start reads all
journal files."""

MAX_FILES = 4
"""While this number of journal files wait to be forgotten, the disk is behind, and the journal accepts no new
rounds."""


class Journal:
    """The journal. Only the commit thread may use it, except for `forget`. The journal is read and written only when a
    round first needs it.

    If a write or sync of the journal fails, the round does not fail. Instead, its segments are synced, and the journal
    is paused. `tell` is called before anything is written, and when the journal ends empty. Its argument is whether the
    journal may hold rounds that an earlier version of this program would miss. `tell` may raise OSError.
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
        """Whether the existence of this file is recorded outside the journal."""
        self._end = 0
        self._number = 0
        """The number of the last round, even if the round was refused."""
        self._confirmed = 0
        """The number of the last round that was confirmed."""
        self._forgotten = 0
        self._to_forget: deque[tuple[int, Path]] = deque()
        """Files that are no longer written to, with the numbers of their last rounds."""

    @property
    def is_due(self) -> bool:
        """Whether the journal should begin a new file now."""
        return self._file is not None and self._end >= FILE_BYTES

    @property
    def has_failed(self) -> bool:
        """Whether the file could not be written or synced."""
        return self._file is not None and self._rests

    def confirm(self, round_: Sequence[WrittenAppends]) -> bool:
        """Make a whole round durable in the journal, and return True. Return False if each segment must be synced
        instead."""
        new = [news for news in round_ if news.buffers]
        size = sum(news.end - news.start for news in new)
        if size >= (len(new) - 1) * SYNC_BYTES or self._rests or len(self._to_forget) >= MAX_FILES:
            return False
        try:
            file = self._opened()
            if file is None:
                return False
            # A number is never used twice, because a round that was refused may still be in the file.
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
            logger.warning("the journal %s is paused, and each segment is synced separately: %s", self._folder, e)
            self._rests = True
            return False
        self._confirmed = self._number
        self._end += len(raw)
        return True

    def end_file(self) -> int:
        """End the current file, so that the next round begins a new file. Return the number of the last round. Rounds
        up to this number may be forgotten when their segments are synced."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._to_forget.append((self._number, self._path))
        return self._number

    def wake(self) -> None:
        """End a pause of the journal. If earlier processes have left rounds, and no round of this process has needed
        the journal yet, empty the journal."""
        self._rests = False
        if not self._is_ready and self._replay.has_something:
            try:
                self._begin()
            except (OSError, SeqdedupeError) as e:
                logger.warning("the journal %s is not emptied now: %s", self._folder, e)

    def forget(self, number: int) -> None:
        """Forget all rounds up to `number`, whose segments are synced. The thread that synced the segments calls this
        method."""
        try:
            while self._to_forget and self._to_forget[0][0] <= number:
                last, path = self._to_forget[0]
                self._replay.forget(last, [path])
                self._forgotten = last
                self._to_forget.popleft()
        except OSError as e:
            logger.warning("the journal %s is not emptied now: %s", self._folder, e)

    def end(self) -> None:
        """End the use of the journal. Afterwards no data is written to the journal. If the journal is empty, record
        this fact."""
        try:
            if self._file is None and not self._to_forget and self._replay.is_empty:
                self._tell(False)
        except OSError as e:
            logger.warning("an earlier version would not open the logs %s: %s", self._folder.parent, e)

    def _begin(self) -> bool:
        """Remove the rounds that earlier processes left, unless this was done before. Return whether new rounds may be
        written."""
        if not self._is_ready and self._replay.empty():
            self._tell(True)
            self._number = self._confirmed = self._forgotten = self._replay.highest
            self._is_ready = True
        return self._is_ready

    def _opened(self) -> int | None:
        """Return the file to write to; None if the journal cannot be used now. Raises OSError."""
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
