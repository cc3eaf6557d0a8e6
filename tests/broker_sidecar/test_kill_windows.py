"""kill -9 of a sidecar that makes, merges and drops runs of deduplication IDs all the time. About 20 s."""

from pathlib import Path

import pytest

from tests.broker_sidecar import kill_windows


async def test_each_message_once_and_each_copy_knows_its_original(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    load, on_disk = await kill_windows.run(tmp_path, 6, seed)
    assert load.dups > 1000
    assert on_disk > 6 * kill_windows.WINDOW / 4


@pytest.mark.parametrize("bug", ["filters lie", "snapshots name no runs"])
async def test_control_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    with pytest.raises(AssertionError):
        await kill_windows.run(tmp_path, 2, 1, bug)
