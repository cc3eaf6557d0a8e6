"""The commits of a Delta table, one file each: as they stand in its log, and made durable on a disk (`sync`)."""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltalake.fs import DeltaStorageHandler

from seqdedupe.errors import error
from seqdedupe.files import sync_folder

Action = dict[str, Any]
"""What a commit does, as the Delta protocol has it: one key, such as `add` or `commitInfo`."""

MAX_COMMIT_BYTES = 64 * 1024 * 1024
"""What is read of a commit on S3; what it is comes first in it."""


class DeltaLog:
    """Reads the commits of one table. (`DeltaTable.history` gives those of a version that is not the newest numbers of
    others, and lets no other thread of this process run while it waits for a server.)"""

    def __init__(self, uri: str, options: dict[str, str] | None) -> None:
        self.uri = uri
        self._options = options

    def commit(self, version: int) -> list[Action]:
        """The actions of a commit; none if its file is gone, as those are that are older than the table keeps them."""
        name = f"_delta_log/{version:020}.json"
        try:
            text = Path(self.uri, name).read_bytes() if self._options is None else self._fetch(name)
        except FileNotFoundError:
            return []
        lines = text.splitlines()
        if len(text) == MAX_COMMIT_BYTES:
            lines.pop()
        try:
            return [json.loads(line) for line in lines if line.strip()]
        except ValueError:
            what = f"version {version} of the Delta table {self.uri} is not whole"
            hint = f"Was there a power cut? If it is the last version, take {name} away, and start the job again."
            raise error("INVALID_OUTPUT", what, hint=hint) from None

    def _fetch(self, name: str) -> bytes:
        # Where the size is told it is not asked for, which would let no other thread run; the server knows better.
        files = DeltaStorageHandler(self.uri, self._options, {name: MAX_COMMIT_BYTES})
        return bytes(files.open_input_file(name).read(MAX_COMMIT_BYTES))

    def restored_version(self, after: int | None, last: int) -> int | None:
        """The version that the last RESTORE in the commits after one and up to another has brought back; None if there
        was none.

        Raises POSITION_WENT_BACK if it was restored to a time: which version that was others cannot tell for sure.
        """
        if after is None:
            return None
        for version in range(last, after, -1):
            for action in self.commit(version):
                info = action.get("commitInfo", {})
                if info.get("operation") == "RESTORE":
                    return self._brought_back(version, str(info.get("operationParameters", {}).get("version")))
        return None

    def _brought_back(self, version: int, said: str) -> int:
        if said.isdecimal():
            return int(said)
        what = f"the Delta table {self.uri} was restored, in version {version}, to a time"
        hint = "RESTORE it once more, to the number of the version, and start the job again: it goes on from there."
        raise error("POSITION_WENT_BACK", f"{what}: which version has the positions is not known", hint=hint)


# -- A Delta table on a disk: its commits made durable, which delta-rs leaves to the operating system.


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
