"""Killed at any step, the command leaves the old set of backups or the new one, and all that is listed is good."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.transfer.backup_places import FolderPlace
from tests.backup.keeping import KILLED
from tests.backup.test_places import NAMES, good, place_with

KEPT = 2
MOST_STEPS = 200
PARTS = 4
"""Each step has its kill in one of this number of tests."""


def keep(folder: Path, step: int, bug: str = "-") -> int:
    """The exit status of a command that is to be killed at this step."""
    arguments = [folder, NAMES[3], KEPT, "-", step, bug]
    command = [sys.executable, "-m", "tests.kernels", "tests.backup.keeping", *map(str, arguments)]
    done = subprocess.run(command, check=False, timeout=LAST_RESORT_SECONDS)
    assert done.returncode in (0, KILLED)
    return done.returncode


def wrong_after(folder: Path) -> str:
    place = FolderPlace(folder)
    if not set(NAMES[4 - KEPT : 4]) <= set(good(place)):
        return "a good one that is to be kept is gone"
    return "" if good(place) == place.names() else "one that is half removed is listed"


@pytest.mark.parametrize("part", range(PARTS))
async def test_killed_at_every_step(tmp_path: Path, part: int) -> None:
    whole = Path((await place_with(tmp_path, *NAMES[:4])).url)
    step = 0
    for step in range(1 + part, MOST_STEPS, PARTS):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        status = keep(copy, step)
        assert wrong_after(copy) == "", step
        assert keep(copy, 0) == 0
        assert sorted(path.name for path in copy.iterdir()) == [".lock", *NAMES[4 - KEPT : 4]]
        shutil.rmtree(copy)
        if status == 0:
            break
    # Two renames, and two folders with files in them.
    assert 8 < step < MOST_STEPS - 1


async def test_control_a_backup_that_is_removed_in_place_is_seen_half(tmp_path: Path) -> None:
    folder = Path((await place_with(tmp_path, *NAMES[:4])).url)
    assert keep(folder, 3, "removes_in_place") == KILLED
    assert wrong_after(folder) == "one that is half removed is listed"


@pytest.mark.parametrize("lost", [NAMES[3], NAMES[2]])
async def test_control_a_good_one_that_is_lost_is_missed(tmp_path: Path, lost: str) -> None:
    folder = Path((await place_with(tmp_path, *NAMES[:4])).url)
    shutil.rmtree(folder / lost)
    assert wrong_after(folder) == "a good one that is to be kept is gone"
