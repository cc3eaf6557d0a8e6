"""The manifest of a backup: which files it has, and what it lacks. Written last: without one nothing is a backup.

`docs/formats-backup.md` has the format.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.files import check_sealed, head_of, writing_sealed

MANIFEST_FILE = "BACKUP"
MAGIC = b"seqdedupe-backup"
FORMAT_VERSION = 1

_HEAD = head_of(MAGIC, FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of a backup."""

    path: str
    """Below the backup's folder, with `/` between the parts."""
    size: int
    crc32c: int
    mtime_ns: int
    """When the sidecar's own file was last written to, if that had no more than was copied; else 0."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A topic that is not whole in the backup, because it was not where it was taken."""

    topic: str
    incarnation: int
    what: str


@dataclass(slots=True)
class Manifest:
    """What a backup holds."""

    made_at_us: int
    """The moment that it is of, since 1970."""
    version: str
    """Of the program that made it."""
    files: list[BackupFile] = field(default_factory=list)
    damaged: list[Fault] = field(default_factory=list)
    """Places where the copy is damaged as the original is."""
    left_out: list[Fault] = field(default_factory=list)
    """Topics of which there is nothing but the name."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def write(self, folder: Path) -> None:
        """Writes it, durable on return. Raises OSError."""
        with writing_sealed(folder / MANIFEST_FILE, _HEAD) as put:
            put(json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())


def read(folder: Path) -> Manifest:
    """The manifest of a backup. Raises BACKUP_DAMAGED if there is none or it is not what was written, NEWER_FORMAT;
    OSError."""
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            size = check_sealed(path, file, _HEAD, 1, "a backup's manifest")
            said: dict[str, Any] = json.loads(file.read(size))
    except FileNotFoundError as e:
        if not folder.exists():
            raise error("BACKUP_DAMAGED", f"{folder} is not there", hint="Is that the backup's name, and place?") from e
        what = f"{folder} is no backup, or one that was never finished: it has no file {MANIFEST_FILE}"
        raise error("BACKUP_DAMAGED", what) from e
    except SeqdedupeError as e:
        if e.reason == "NEWER_FORMAT":
            raise
        raise damaged(folder, e.message) from e
    try:
        files = [BackupFile(**one) for one in said.pop("files")]
        damaged_, left_out = ([Fault(**one) for one in said.pop(name)] for name in ("damaged", "left_out"))
        manifest = Manifest(**said, files=files, damaged=damaged_, left_out=left_out)
        _check_paths(file.path for file in files)
    except (KeyError, TypeError, InvalidRequestError) as e:
        raise damaged(folder, f"its manifest says what cannot be: {e}") from e
    return manifest


def damaged(folder: Path, what: str) -> SeqdedupeError:
    """The error of a backup that is not what was written."""
    return error("BACKUP_DAMAGED", f"{folder} is damaged: {what}")


def _check_paths(paths: Iterable[str]) -> None:
    """Raises INVALID_REQUEST for one that leads elsewhere."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or parts[0] == "/" or MANIFEST_FILE in parts:
            raise error("INVALID_REQUEST", f"{path!r} is no file of a backup")
