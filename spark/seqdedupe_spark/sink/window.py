"""Does a topic still know the IDs of what a write may have written before? Only then is writing it again harmless."""

import logging
import time
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from seqdedupe.errors import error
from seqdedupe.v1 import admin_pb2

CLOCKS_MS = 5_000
"""The clocks of driver and sidecar may differ by so much."""

_log = logging.getLogger(__name__)

_planned: dict[str, int] = {}
"""Of each checkpoint the batch that was planned last in this process."""


class Began(NamedTuple):
    """When what is written may have been written for the first time, and whether it may have been before now."""

    at_ms: int
    may_repeat: bool

    def is_known_by(self, topic: admin_pb2.Topic) -> bool:
        """Whether the topic knows the IDs of all that came since."""
        return not topic.window_forgotten or topic.window_first_publish_time_ms <= self.at_ms - CLOCKS_MS

    def check(self, topic: admin_pb2.Topic) -> None:
        """Raises IDS_FORGOTTEN."""
        if not self.is_known_by(topic):
            since = _shown(topic.window_first_publish_time_ms)
            what = (
                f"{topic.name} knows the IDs of what came since {since}, and what is to be written again was begun at"
            )
            raise error("IDS_FORGOTTEN", f"{what} {_shown(self.at_ms)}: some of it may be there, and would be doubled")


def now() -> Began:
    """Of a write that begins."""
    return Began(time.time_ns() // 1_000_000, may_repeat=False)


def of_checkpoint(location: str | None) -> Began:
    """Of the batch of a stream that is planned now: what is in its checkpoint's log may have been written before, by
    a query that has ended, at the earliest when that was logged."""
    folder = None if location is None else _offsets_of(location)
    batches = [] if folder is None else [path for path in folder.iterdir() if path.name.isdecimal()]
    if not batches:
        _say_once(location)
        return now()
    last = max(batches, key=lambda path: int(path.name))
    before = _planned.get(str(folder))
    _planned[str(folder)] = int(last.name)
    return Began(last.stat().st_mtime_ns // 1_000_000, may_repeat=before is None or int(last.name) <= before)


@lru_cache(16)
def _say_once(location: str | None) -> None:
    _log.warning(
        "the checkpoint %s cannot be looked at from here: that a topic still knows the IDs of a batch that is written "
        "again after a pause is not checked",
        location or "of the session's configuration",
    )


def _offsets_of(location: str) -> Path | None:
    """The folder with the log of a checkpoint, if that is a file of this machine."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file") or parts.netloc:
        return None
    folder = Path(unquote(parts.path) if parts.scheme else location, "offsets")
    return folder if folder.is_dir() else None


def _shown(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
