"""What a stream's checkpoint tells of the batch that is planned: when it was logged, and whether it was planned before.

A query's batches are planned by several processes in turn, so none of them remembers for all: each batch leaves a mark
beside Spark's logs.
"""

import logging
from functools import lru_cache
from pathlib import Path

from seqdedupe.files import sync_folder
from seqdedupe_spark.sink.window import Began, now

PLANNED = "seqdedupe-sink"
"""The folder in a checkpoint with an empty file that has the number of the last planned batch as its name."""

_log = logging.getLogger(__name__)


def began(location: str | None) -> Began:
    """The batch that is planned now, which is the last one in the checkpoint's log: what it has may have been written
    since that was logged. Leaves the mark that this batch was planned."""
    checkpoint = None if location is None else folder_of(location)
    logged = [] if checkpoint is None else _numbers(checkpoint / "offsets")
    if checkpoint is None or not logged:
        _say_once(location)
        return now()
    batch = max(logged)
    at_ms = (checkpoint / "offsets" / str(batch)).stat().st_mtime_ns // 1_000_000
    return Began(at_ms, may_repeat=not _is_new(checkpoint, batch), batch=batch)


def _is_new(checkpoint: Path, batch: int) -> bool:
    """Whether nobody can have written of the batch: the one before has the last mark, and this call has left the next,
    durable before a row is sent."""
    folder = checkpoint / PLANNED
    try:
        folder.mkdir(exist_ok=True)
        before = _numbers(folder)
        (folder / str(batch)).touch(exist_ok=False)
        sync_folder(folder)
        sync_folder(checkpoint)
        for number in before:
            if number < batch:
                (folder / str(number)).unlink(missing_ok=True)
    except OSError:  # The mark is there, or cannot be made.
        return False
    return max(before, default=batch) == batch - 1


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def folder_of(location: str) -> Path | None:
    """The folder that Spark takes for this checkpoint, if that is one of this machine. What follows the scheme is the
    path as it stands: `%20` is no space, and `#` and `?` end nothing."""
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = "", location
    has_host = path.startswith("//") and not path.startswith("///")
    return None if scheme not in ("", "file") or has_host else Path(path)


@lru_cache(16)
def _say_once(location: str | None) -> None:
    _log.warning(
        "the checkpoint %s cannot be looked at from here: that a topic still knows the IDs of a batch that is written "
        "again after a pause is not checked",
        location or "of the session's configuration",
    )
