"""Files that an operator may replace at any time, and what is made of them."""

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
"""So often the files are looked at. A change is taken up when it was there at two looks: several files are replaced one
after the other, and one may be read in mid-write."""

REMIND_SECONDS = 600.0
"""So often it is said again that the files cannot be used."""

T = TypeVar("T")


class Watched(Generic[T]):
    """`value` is what `load` made of the files, and is made anew when one of them changes.

    Files that cannot be used change nothing: `value` stays, `problem` says why, and so does the log.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T], on_change: Callable[[], None]) -> None:
        """`on_change` is called when the value has become another one. Raises what `load` raises."""
        self.what = what
        self.problem: SeqdedupeError | None = None
        self.on_tried: Callable[[], None] = lambda: None
        """Called when the files were read again, whatever came of it."""
        self._paths = paths
        self._load = load
        self._on_change = on_change
        self._tried = self._seen = self._signature()
        self._reminds_at = 0.0
        self.value = load()

    def look(self, *, at_once: bool = False) -> None:
        """Takes up what had changed by the last look; `at_once`: by now."""
        signature = self._signature()
        if signature == self._tried:
            self._remind()
        elif at_once or signature == self._seen:
            self.reload()
        self._seen = signature

    def reload(self) -> None:
        """Takes up what is there now."""
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
            logger.info("%s was read again", self.what)
            if self.value != former:
                self._on_change()
        self.on_tried()

    def _remind(self) -> None:
        if self.problem is not None and time.monotonic() >= self._reminds_at:
            self._reminds_at = time.monotonic() + REMIND_SECONDS
            logger.error("%s stays as it was: %s %s", self.what, self.problem, self.problem.hint)

    def _signature(self) -> list[tuple[int, ...] | None]:
        return [_signature_of(path) for path in self._paths]


def _signature_of(path: Path) -> tuple[int, ...] | None:
    """Another one as soon as the file is another one or has changed; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


class Watching:
    """All such files of a sidecar. `on_tried` is told what was read again."""

    def __init__(self, watched: Iterable[Watched[Any]], on_tried: Callable[[Watched[Any]], None]) -> None:
        self._watched = list(watched)
        for one in self._watched:
            one.on_tried = partial(on_tried, one)

    @property
    def has_problem(self) -> bool:
        """Whether some of them say something that is not in force."""
        return any(one.problem is not None for one in self._watched)

    async def keep_looking(self) -> None:
        """Looks at all of them again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for one in self._watched:
                one.look()

    def reload(self) -> None:
        """Reads all of them again, changed or not."""
        for one in self._watched:
            one.reload()
