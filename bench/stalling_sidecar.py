"""The sidecar on a disk that stalls: no sync of the log ends while the file exists that BENCH_STALL names."""

import os
import sys
import time

from broker_sidecar.__main__ import main

_LOOK_SECONDS = 0.01

_sync = os.fdatasync


def _stalling(file: int) -> None:
    while os.path.exists(os.environ["BENCH_STALL"]):
        time.sleep(_LOOK_SECONDS)
    _sync(file)


os.fdatasync = _stalling  # type: ignore[assignment]
sys.exit(main())
