"""Files that an operator may replace at any time, and the values loaded from them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from seqdedupe.errors import SeqdedupeError

logger = logging.getLogger("seqdedupe.security")

LOOK_SECONDS = 1.0
"""The interval at which the files are checked. A change takes effect after two checks have found it, because an
operator replaces several files one after the other, and a file may be only partly written."""

REMIND_SECONDS = 600.0
"""The interval at which the log repeats that the files cannot be used."""

T = TypeVar("T")


class Watched(Generic[T]):
    """`value` is the result of `load` for the files. The files are loaded again when one of them changes.

    Invalid files change nothing: `value` is kept, `problem` contains the reason, and the log repeats the reason.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T], on_change: Callable[[], None]) -> None:
        """Load the value. `on_change` is called when a different value has been loaded. Raises the errors of `load`."""
        self.what = what
        self.problem: SeqdedupeError | None = None
        self.on_tried: Callable[[], None] = lambda: None
        """Called after each new attempt to read the files, with any outcome."""
        self._paths = paths
        self._load = load
        self._on_change = on_change
        self._tried = self._seen = self._signature()
        self._reminds_at = 0.0
        self.value = load()

    def look(self, *, at_once: bool = False) -> None:
        """Load the files if they changed before the previous call of `look`, and so are likely complete. With
        `at_once`, load the files if they have changed by now."""
        signature = self._signature()
        if signature == self._tried:
            self._remind()
        elif at_once or signature == self._seen:
            self.reload()
        self._seen = signature

    def reload(self) -> None:
        """Load the files as they are now."""
        self._tried = self._signature()
        former = self.value
        try:
            self.value = self._load()
        except SeqdedupeError as e:
            self.problem = e
            self._reminds_at = 0.0
            self._remind()
        else:
            self.problem = None
            logger.info("read again: %s", self.what)
            if self.value != former:
                self._on_change()
        self.on_tried()

    def _remind(self) -> None:
        if self.problem is not None and time.monotonic() >= self._reminds_at:
            self._reminds_at = time.monotonic() + REMIND_SECONDS
            logger.error("the former version of %s stays in force: %s %s", self.what, self.problem, self.problem.hint)

    def _signature(self) -> list[tuple[int, ...] | None]:
        return [_signature_of(path) for path in self._paths]


def _signature_of(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes as soon as the file is replaced or changed; None if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


class Watching:
    """All `Watched` objects of a sidecar. Each attempt to read the files of a `Watched` object again is followed by a
    call of `on_tried` with this object."""

    def __init__(self, watched: Iterable[Watched[Any]], on_tried: Callable[[Watched[Any]], None]) -> None:
        self._watched = list(watched)
        for one in self._watched:
            one.on_tried = partial(on_tried, one)

    @property
    def has_problem(self) -> bool:
        """Whether some files have contents that are not in force."""
        return any(one.problem is not None for one in self._watched)

    async def keep_looking(self) -> None:
        """Call `look` of all `Watched` objects repeatedly."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for one in self._watched:
                one.look()

    def reload(self) -> None:
        """Read the files of all `Watched` objects again, even if the files have not changed."""
        for one in self._watched:
            one.reload()
