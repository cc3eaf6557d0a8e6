"""The files of a Delta table: reading the table's log commit by commit, making files on a disk durable, and opening
tables on S3.

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
"""An action of a commit, as in the Delta protocol: one key, such as `add` or `commitInfo`."""

MAX_COMMIT_BYTES = 64 * 1024 * 1024
"""The part of a commit on S3 that is read. The kind of the commit comes first in it."""


class DeltaLog:
    """The commits of one table. (`DeltaTable.history` is not used. For a version that is not the newest, it returns
    commits with wrong numbers. It also blocks all other threads of this process while it waits for a server.)"""

    def __init__(self, uri: str) -> None:
        """Raise INVALID_CONFIGURATION if the environment sets another commit method for S3."""
        self.uri = uri
        self.options = _options_of(uri)
        """The options with which the table is opened; none on a disk."""

    def commit(self, version: int) -> list[Action]:
        """Return the actions of a commit; no actions if the commit's file no longer exists, because the table no longer
        keeps commits of this age."""
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
            what = f"version {version} of the Delta table {self.uri} is incomplete"
            hint = f"A power cut can cause this. If it is the last version, remove {name}, and start the job again."
            raise error("INVALID_OUTPUT", what, hint=hint) from None

    def _fetch(self, name: str) -> bytes:
        # With a given size, the handler does not ask for it, which would let no other thread run. The server knows the
        # size.
        files = DeltaStorageHandler(self.uri, self.options, {name: MAX_COMMIT_BYTES})
        return bytes(files.open_input_file(name).read(MAX_COMMIT_BYTES))

    def restored_version(self, after: int | None, last: int) -> int | None:
        """Return the version that the last RESTORE has brought back, in the commits after `after` and up to `last`;
        None if there was none.

        Raises POSITION_WENT_BACK if the table was restored to a time: the version of that time is not certain.
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
        hint = "RESTORE it once more, to the number of the version, and start the job again: it continues from there."
        raise error("POSITION_WENT_BACK", f"{what}: it is not known which version has the positions", hint=hint)

    def sync(self, after: int, last: int) -> None:
        """On a disk, make the commits after `after` and up to `last` durable, because delta-rs does not sync. First
        sync the files that these commits add, then the commits.

        Raises OSError; and INVALID_OUTPUT if one of these files is not whole, as after a power cut, and no later commit
        has removed it from the table.
        """
        root, added = Path(self.uri), self._added(after, last)
        folders: set[Path] = set()
        for path, (size_bytes, version) in added.items():
            if not _sync_file(path, size_bytes):
                what = f"the file {path}, which version {version} of the Delta table {root} added, is incomplete"
                hint = (
                    f"A power cut can cause this. RESTORE the table to version {version - 1}, and start the job again: "
                    "it writes the missing rows again."
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
        """Return the files that these commits add and do not remove again. For each file, return the size and the
        version that adds the file."""
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
    """Make the file durable. Return whether the file exists and has that size."""
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


# -- On S3, and on servers with its protocol: how a table is opened, and the error when it is refused.

SCHEME: Final = "s3://"

_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=+-]+)+")
"""A bucket, and folders whose names need no encoding."""

_OPTIONS: Final = {"conditional_put": "etag", "retry_timeout": "30s"}
"""A commit is a PUT that is refused if its version is there (`If-None-Match: *`), with any environment."""

_OTHER_WAYS = ("AWS_COPY_IF_NOT_EXISTS", "AWS_S3_LOCKING_PROVIDER")
"""Variables of the environment. A process that commits in another way does not notice commits made in this way."""

_COLOURS = re.compile(r"\x1b\[\d*m|↳")
_BODY = re.compile(r"<(?:\?xml|Error|!doctype|html)\b.*", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"(status code[\s:]*\d{3}[^:\n]*|error response)[:\n].*", re.DOTALL)
"""The text after the status is the server's, in any format."""
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_CODE = re.compile(r"<Code>(\w+)</Code>")


def _options_of(uri: str) -> dict[str, str] | None:
    """Return the options to open the table at this URL; no options for a folder of this machine. The options contain no
    keys, because each process takes the keys from its environment. Raises INVALID_CONFIGURATION if the environment sets
    another commit method."""
    if not uri.startswith(SCHEME):
        return None
    for name in _OTHER_WAYS:
        if os.environ.get(name):
            what = f"{name} is set, but commits to tables on S3 use only conditional PUTs"
            raise error(
                "INVALID_CONFIGURATION", what, hint=f"Remove {name} from the environment of driver and workers."
            )
    return dict(_OPTIONS)


def is_table_url(uri: str) -> bool:
    """Return whether the text is the URL of a folder in a bucket, and the only name of this folder. For example,
    `a/./b` is another name of `a/b`."""
    return bool(_URL.fullmatch(uri)) and not {".", ".."} & set(uri.split("/"))


def plain(cause: object) -> str:
    """Return the error text on one line. A server's answer is cut to its code, because the rest may contain the ID of
    the key. The URL is shown without the user."""
    text = _USER.sub("", _COLOURS.sub(" ", str(cause)))
    code = _CODE.search(text)
    said = code[1] if code else ""
    return " ".join(_BODY.sub(said, _ANSWER.sub(rf"\1 {said}", text)).split())
