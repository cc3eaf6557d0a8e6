"""Where a Delta table lies: its log, commit by commit; on a disk, how they are made durable; on S3, how it is opened.

Begin with `DeltaLog`.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from deltalake.fs import DeltaStorageHandler

from seqdedupe.errors import error
from seqdedupe.files import sync_folder

Action = dict[str, Any]
"""What a commit does, as the Delta protocol has it: one key, such as `add` or `commitInfo`."""

MAX_COMMIT_BYTES = 64 * 1024 * 1024
"""What is read of a commit on S3; what it is comes first in it."""


class DeltaLog:
    """The commits of one table. (`DeltaTable.history` gives those of a version that is not the newest numbers of
    others, and lets no other thread of this process run while it waits for a server.)"""

    def __init__(self, uri: str) -> None:
        """Raises INVALID_CONFIGURATION if the environment says to commit on S3 in another way."""
        self.uri = uri
        self.options = _options_of(uri)
        """What the table is opened with; none on a disk."""

    def commit(self, version: int) -> list[Action]:
        """The actions of a commit; none if its file is gone, as those are that are older than the table keeps them."""
        name = f"_delta_log/{version:020}.json"
        try:
            text = Path(self.uri, name).read_bytes() if self.options is None else self._fetch(name)
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
        files = DeltaStorageHandler(self.uri, self.options, {name: MAX_COMMIT_BYTES})
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

    def sync(self, after: int, last: int) -> None:
        """On a disk, makes all commits after one and up to another durable, which delta-rs leaves to the operating
        system: first the files that they add, then they themselves.

        Raises OSError; and INVALID_OUTPUT if one of these files is not whole, as after a power cut, and nothing has
        taken it out of the table since.
        """
        root, added = Path(self.uri), self._added(after, last)
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

    def _added(self, after: int, last: int) -> dict[Path, tuple[int, int]]:
        """The files that these commits add, and do not remove again, with their sizes and the versions that add
        them."""
        added: dict[Path, tuple[int, int]] = {}
        for version in range(after + 1, last + 1):
            for action in self.commit(version):
                for kind in ("add", "remove"):
                    if kind not in action:
                        continue
                    path = Path(self.uri, unquote(action[kind]["path"]))
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


# -- On S3, and on what speaks its protocol: how a table is opened, and what is said when it is refused.

SCHEME: Final = "s3://"

_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=+-]+)+")
"""A bucket, and folders whose names nobody has to encode."""

_OPTIONS: Final = {"conditional_put": "etag", "retry_timeout": "30s"}
"""A commit is a PUT that is refused if its version is there (`If-None-Match: *`), whatever the environment says."""

_OTHER_WAYS = ("AWS_COPY_IF_NOT_EXISTS", "AWS_S3_LOCKING_PROVIDER")
"""Of the environment: who commits in another way does not notice those who commit as we do."""

_COLOURS = re.compile(r"\x1b\[\d*m|↳")
_BODY = re.compile(r"<(?:\?xml|Error|!doctype|html)\b.*", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"(status code[\s:]*\d{3}[^:\n]*|error response)[:\n].*", re.DOTALL)
"""What follows the status is the server's, whatever it is written in."""
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_CODE = re.compile(r"<Code>(\w+)</Code>")


def _options_of(uri: str) -> dict[str, str] | None:
    """What a table there is opened with; none for a file of this machine. Keys are not among it: each process has its
    own, from its environment. Raises INVALID_CONFIGURATION if that says to commit in another way."""
    if not uri.startswith(SCHEME):
        return None
    for name in _OTHER_WAYS:
        if os.environ.get(name):
            what = f"{name} is set: tables on S3 are committed to by conditional PUTs, and by nothing else"
            raise error(
                "INVALID_CONFIGURATION", what, hint=f"Take {name} out of the environment of driver and workers."
            )
    return dict(_OPTIONS)


def is_table_url(uri: str) -> bool:
    """Whether it is one of a folder in a bucket, and its only name: not `a/./b`, which is `a/b` to the server."""
    return bool(_URL.fullmatch(uri)) and not {".", ".."} & set(uri.split("/"))


def plain(cause: object) -> str:
    """What went wrong, on one line. Of a server's answer only the code: the rest may have the ID of the key. Of its URL
    not who asks."""
    text = _USER.sub("", _COLOURS.sub(" ", str(cause)))
    code = _CODE.search(text)
    said = code[1] if code else ""
    return " ".join(_BODY.sub(said, _ANSWER.sub(rf"\1 {said}", text)).split())
