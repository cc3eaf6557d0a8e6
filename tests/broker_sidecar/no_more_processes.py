"""A sidecar where no other process can be started, as where a limit for processes is reached."""

import subprocess
import sys
from typing import NoReturn

from broker_sidecar.__main__ import main

MODULE = "tests.broker_sidecar.no_more_processes"


class NoMore(subprocess.Popen[str]):
    def __init__(self, *_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def __del__(self) -> None:
        """There is nothing to end."""


if __name__ == "__main__":
    subprocess.Popen = NoMore  # type: ignore[misc, assignment]
    sys.exit(main())
