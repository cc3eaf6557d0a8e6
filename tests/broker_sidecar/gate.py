"""A sidecar whose log can be held in its sync: what is in flight stays in flight for as long as a test wants.

Python runs `sitecustomize` before anything else of a process; this one stands in front of `os.fdatasync`, and waits
while a file is there. All the rest, the sync included, is the real thing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqdedupe.testing import Sidecar

_PROGRAM = """
import os, time

_sync = os.fdatasync

def fdatasync(file):
    while "/logs/" in os.readlink(f"/proc/self/fd/{{file}}") and os.path.exists({gate!r}):
        open({waiting!r}, "w").close()
        time.sleep(0.001)
    _sync(file)

os.fdatasync = fdatasync
"""


class Gate:
    """`close` holds every sync of a log from now on; `open` lets them go."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "closed"
        self._waiting = folder / "waiting"
        folder.mkdir(parents=True)
        program = _PROGRAM.format(gate=str(self._file), waiting=str(self._waiting))
        (folder / "sitecustomize.py").write_text(program)
        self._folder = folder

    def start(self, sidecar: Sidecar) -> None:
        """Starts a sidecar behind this gate."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(self._folder)
        try:
            sidecar.start()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before

    def close(self) -> None:
        self._waiting.unlink(missing_ok=True)
        self._file.touch()

    def open(self) -> None:
        self._file.unlink(missing_ok=True)

    @property
    def holds(self) -> bool:
        """Whether a sync waits."""
        return self._waiting.exists()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self.open()
