"""Power cuts while the journal confirms what segments do not have yet: what was acknowledged is found again."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.embedded import commit, journal_replay
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.log.embedded.writer import LeftFile, Syncer, Writer
from tests.log.rounds import Cuts, LosingDisk, Rounds


async def cuts_at_every_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Three logs with small segments, a journal with small files, and fewer open files than logs."""
    print(f"seed {seed}")
    monkeypatch.setattr(commit, "FILE_BYTES", 4_000)
    monkeypatch.setattr(commit, "MAX_OPEN_FILES", 3)
    with monkeypatch.context() as patch:
        disk = LosingDisk(tmp_path / "data", patch)
        rounds = Rounds(tmp_path / "data" / "logs", patch)
        await rounds.begin()
        cuts = Cuts(disk, rounds, patch, Random(seed))
        for _ in range(2):
            await rounds.together(1, 2, 3)
            await rounds.together(2)
            await rounds.together(1, 2, size=700)
            await rounds.together(3, 2)
            await rounds.together(1)
        await rounds.end()
    assert rounds.fatal == []
    assert len(cuts.images) > 20
    await cuts.check(tmp_path / "cuts")


@pytest.mark.parametrize("seed", range(3))
async def test_what_was_acknowledged_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    await cuts_at_every_sync(tmp_path, monkeypatch, seed)


def forget_before_the_segments_are_synced(patch: pytest.MonkeyPatch) -> None:
    def sync(self: Syncer, left: LeftFile) -> None:
        os.close(left.file)

    patch.setattr(Syncer, "_sync", sync)


def close_a_segment_that_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    def let_go(self: Writer) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    patch.setattr(Writer, "let_go", let_go)


def confirm_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "os", NoSync())


class NoSync:
    """`os`, with a sync that does nothing."""

    def __getattr__(self, name: str) -> object:
        return (lambda fd: None) if name == "fdatasync" else getattr(os, name)


def take_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalReplay, "take_back", lambda self, folder, identity: None)


def leave_the_journals_folder_unsynced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "sync_folder", lambda folder: None)


def take_back_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    """And forget it at the first round."""
    patch.setattr(journal_replay, "_put_back", lambda folder, identity, base, parts: None)


@pytest.mark.parametrize(
    "plant",
    [
        forget_before_the_segments_are_synced,
        close_a_segment_that_is_not_synced,
        confirm_before_the_sync,
        take_nothing_back,
        leave_the_journals_folder_unsynced,
        take_back_without_a_sync,
    ],
)
async def test_control_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, SeqdedupeError), match=r"cut \d+, log|LOG_DAMAGED") as found:
        await cuts_at_every_sync(tmp_path, monkeypatch, 1)
    print(str(found.value)[:400])
