"""Processes that a test starts."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(command: Sequence[str | Path], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """A process for the length of a block, killed if it still runs then: a test that fails waits for nobody."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
