"""The commits of a Delta table, one file each, as they stand in its log."""

import json
from pathlib import Path
from typing import Any

from deltalake.fs import DeltaStorageHandler

from seqdedupe.errors import error

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
