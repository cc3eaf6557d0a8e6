"""Syncs segment files in the background, and has the journal forget what they hold by then."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

AT_ONCE = 8
"""So many files are synced together: most file systems make that one write, and each costs a sixth."""


class LeftFile(NamedTuple):
    """An open segment file that has to be synced before it is closed."""

    file: int
    path: Path


class Syncer:
    """A thread that does one thing after the other, but for files that are handed over in a row.

    `fatal` is called, in the thread, if a sync fails. Nothing is forgotten any more then: the journal has what the
    disk has not. At most `max_files` should wait to be synced.
    """

    def __init__(self, fatal: Callable[[str], None], max_files: int) -> None:
        self._fatal = fatal
        self._max_files = max_files
        self._queue: SimpleQueue[LeftFile | Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._has_failed = False
        self._left = 0
        """So many files are not closed yet."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="seqdedupe-sync", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether no more files should be left to it now."""
        return self._left >= self._max_files

    def sync(self, left: LeftFile) -> None:
        """Syncs the file, and closes it."""
        with self._lock:
            self._left += 1
        self._queue.put(left)

    def then(self, forget: Callable[[], None]) -> None:
        """Calls this when all files are synced that were handed over before. It must not raise."""
        self._queue.put(forget)

    def wait(self) -> None:
        """Returns when all is done that was handed over."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """The same, and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._fatal(f"the sync thread has failed: {e!r}")
            raise

    def _work(self) -> None:
        files: list[LeftFile] = []
        with ThreadPoolExecutor(AT_ONCE, "seqdedupe-sync") as threads:
            while True:
                work = self._queue.get()
                if isinstance(work, LeftFile):
                    files.append(work)
                    if len(files) < AT_ONCE and not self._queue.empty():
                        continue
                list(threads.map(self._sync, files))
                with self._lock:
                    self._left -= len(files)
                files.clear()
                if work is None:
                    return
                if isinstance(work, threading.Event):
                    work.set()
                elif not isinstance(work, LeftFile) and not self._has_failed:
                    work()

    def _sync(self, left: LeftFile) -> None:
        try:
            os.fdatasync(left.file)
        except OSError as e:
            self._has_failed = True
            self._fatal(f"{left.path} cannot be synced: {e}")
        finally:
            os.close(left.file)
