"""The sidecar with 2 ms added to each sync of the log; says at its end how many there were."""

import json
import os
import sys
import time

from broker_sidecar.__main__ import main

ADDED_SECONDS = 0.002

_sync = os.fdatasync
_count = 0


def _slow(file: int) -> None:
    global _count
    _count += 1
    time.sleep(ADDED_SECONDS)
    _sync(file)


os.fdatasync = _slow  # type: ignore[assignment]
status = main()
print(json.dumps({"event": "syncs", "count": _count}), file=sys.stderr, flush=True)
sys.exit(status)
