"""A Delta table on a disk: its commits made durable, which delta-rs leaves to the operating system."""

import os
from pathlib import Path
from urllib.parse import unquote

from seqdedupe.errors import error
from seqdedupe.files import sync_folder
from seqdedupe_spark.stores.delta_log import DeltaLog


def sync(log: DeltaLog, after: int, last: int) -> None:
    """Makes all commits after one and up to another durable: first the files that they add, then they themselves.

    Raises OSError; and INVALID_OUTPUT if one of these files is not whole, as after a power cut, and nothing has taken
    it out of the table since.
    """
    root, added = Path(log.uri), _added(log, after, last)
    folders: set[Path] = set()
    for path, (size_bytes, version) in added.items():
        if not _sync_file(path, size_bytes):
            what = f"the file {path}, which version {version} of the Delta table {root} added, is not whole"
            hint = (
                f"Was there a power cut? RESTORE the table to version {version - 1}, and start the job again: it "
                "writes anew what is missing then."
            )
            raise error("INVALID_OUTPUT", what, hint=hint)
        folders.update(parent for parent in path.parents if parent.is_relative_to(root))
    for folder in folders:
        sync_folder(folder)
    for version in range(after + 1, last + 1):
        for path in (root / "_delta_log").glob(f"{version:020}.*"):
            _sync_file(path)
    for folder in (root / "_delta_log", root, root.parent):
        sync_folder(folder)


def _added(log: DeltaLog, after: int, last: int) -> dict[Path, tuple[int, int]]:
    """The files that these commits add, and do not remove again, with their sizes and the versions that add them."""
    added: dict[Path, tuple[int, int]] = {}
    for version in range(after + 1, last + 1):
        for action in log.commit(version):
            for kind in ("add", "remove"):
                if kind not in action:
                    continue
                path = Path(log.uri, unquote(action[kind]["path"]))
                added.pop(path, None)
                if kind == "add":
                    added[path] = (action[kind]["size"], version)
    return added


def _sync_file(path: Path, size_bytes: int | None = None) -> bool:
    """Whether it is there, and of that size; it is durable then."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if size_bytes is not None and os.fstat(file).st_size != size_bytes:
            return False
        os.fsync(file)
        return True
    finally:
        os.close(file)
