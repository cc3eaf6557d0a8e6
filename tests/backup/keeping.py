"""What `seqdedupe backup --keep` does after a sidecar has made a backup, as a process to be killed at any of its steps.

    python -m tests.kernels tests.backup.keeping FOLDER NEW COUNT URL STEP BUG

Verifies the backup NEW in FOLDER, uploads it to URL unless that is `-`, and keeps COUNT in each place. It kills itself
at its change STEP of files; 0 is never. BUG plants one: `removes_first`, `removes_in_place`, or `-`.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from seqdedupe.transfer.backup_places import BackupPlace, BucketPlace, FolderPlace

CHANGES = {"os.rename", "os.remove", "os.rmdir"}
KILLED = -signal.SIGKILL


def _remove_in_place(self: FolderPlace, name: str) -> None:
    shutil.rmtree(Path(self.url, name))


def main() -> None:
    folder, new, count, url, step, bug = sys.argv[1:]
    left = int(step)

    def look(event: str, _: object) -> None:
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    here = FolderPlace(Path(folder))
    places: list[BackupPlace] = [here]
    if bug == "removes_in_place":
        FolderPlace.remove = _remove_in_place  # type: ignore[method-assign]
    sys.addaudithook(look)
    with here.locked():
        here.check(new)
        if url != "-":
            bucket = BucketPlace(url)
            places.append(bucket)
            if bug == "removes_first":
                bucket.keep(new, int(count) - 1)
            bucket.upload(Path(folder, new), new)
            bucket.check(new, reads_all=False)
        for place in places:
            place.keep(new, int(count))


if __name__ == "__main__":
    main()
