"""A sidecar whose windows of deduplication IDs have memory for a few: runs are made, merged and dropped all the time.

A bug may be planted, which `BUG` in the environment names.
"""

import os
import sys
from typing import Any

from broker_sidecar import kernels

MODULE = "tests.broker_sidecar.small_windows"
BUG = "SEQDEDUPE_TEST_WINDOWS_BUG"
MEGABYTE = 16 * 1024
"""For `deduplication_window_memory_in_mb`."""


def _filters_lie() -> None:
    from seqdedupe.core.id_runs import add_to_filter
    from seqdedupe.store import windows

    lie: Any = lambda hashes, words: add_to_filter(hashes[len(hashes) // 2 :], words)  # noqa: E731
    windows.add_to_filter = lie  # type: ignore[attr-defined]


def _snapshots_name_no_runs() -> None:
    """And have no pieces of what lies in them."""
    from seqdedupe.store import windows

    real = windows.put

    def put(batch: Any, incarnation: int, stored: windows.StoredIds, pieces: windows.WrittenPieces) -> None:
        if stored.runs:
            stored = windows.StoredIds(stored.key, stored.next_index, stored.next_index, moved_from=0)
        real(batch, incarnation, stored, pieces)

    windows.put = put  # type: ignore[assignment]


BUGS = {"filters lie": _filters_lie, "snapshots name no runs": _snapshots_name_no_runs}


def main() -> int:
    """As the sidecar's."""
    kernels.prepare()
    from broker_sidecar import data
    from broker_sidecar.__main__ import main
    from seqdedupe.store import windows
    from seqdedupe.topic import window_runs

    data.BYTES_A_MB = MEGABYTE  # type: ignore[attr-defined]
    window_runs.MAX_RUNS = 3
    window_runs.PAGES_A_PART = 4
    windows.PAGES_A_WRITE = 2
    if bug := os.environ.pop(BUG, ""):
        BUGS[bug]()
    return main()


if __name__ == "__main__":
    sys.exit(main())
