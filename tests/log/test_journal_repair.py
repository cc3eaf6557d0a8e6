"""What becomes of logs whose journal is lost, damaged or half made; power cuts while it is taken back."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.format.headers import key_of
from seqdedupe.format.journal import SECTOR_BYTES, rounds_in
from seqdedupe.log.embedded import journal_replay
from seqdedupe.log.embedded.commit import Committer, Journal
from seqdedupe.log.embedded.journal_replay import BEGUN_FILE, JournalReplay
from seqdedupe.log.embedded.writer import Syncer
from tests.log.power import Disk
from tests.log.rounds import Cuts, LosingDisk, Rounds, failing_syncs, found_in, ids_in, logs_in, put
from tests.log.test_journal import ALL, a_background_sync_that_fails, cut, files_in, journal_of, killed

WHOLE = {i: [0, 1, 2] for i in ALL}
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(tmp_path / "data" / "logs", monkeypatch)


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


# -- a journal that is gone, or given up ----------------------------------------------------------------------------


async def test_a_journal_that_is_gone_is_missed(rounds: Rounds, tmp_path: Path) -> None:
    """Nothing stands after what it held, so that no record tells."""
    folder = await killed(rounds, tmp_path / "killed")
    cut(folder, *ALL, to=127)
    shutil.rmtree(folder / "journal")
    for incarnation in ALL:
        with pytest.raises(DamagedError, match="journal is missing") as raised:
            await found_in(folder, [incarnation], has_journal=True)
        assert "--give-up-journal" in raised.value.hint
    assert await found_in(folder, ALL, has_journal=True, gives_up_journal=True) == {i: [] for i in ALL}


async def test_control_nobody_said_that_there_was_one(rounds: Rounds, tmp_path: Path) -> None:
    folder = await killed(rounds, tmp_path / "killed")
    cut(folder, *ALL, to=127)
    shutil.rmtree(folder / "journal")
    (folder / BEGUN_FILE).unlink()
    assert await found_in(folder, ALL) == {i: [] for i in ALL}


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def torn_at_its_first_round(path: Path) -> None:
    os.truncate(path, 100)


def cut_in_its_last_part(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def changed_in_its_last_part(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)


async def without_the_newest_file(rounds: Rounds, to: Path, damage: Callable[[Path], None], *, is_second: bool) -> Path:
    """Its rounds were the last ones, and stand in no segment."""
    await rounds.begin()
    if is_second:
        await rounds.together(*ALL)
        rounds.logs.committer._journal.end_file()
    await rounds.together(*ALL)
    shutil.copytree(rounds.folder, to)
    await rounds.end()
    cut(to, *ALL, to=127)
    damage(max((to / "journal").glob("*.journal")))
    return to


@pytest.mark.parametrize("damage", [removed, emptied, torn_at_its_first_round])
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("has_journal", [False, True])
async def test_the_newest_file_is_missed(
    rounds: Rounds, tmp_path: Path, damage: Callable[[Path], None], is_second: bool, has_journal: bool
) -> None:
    """Also where the store that knew of a journal is lost."""
    folder = await without_the_newest_file(rounds, tmp_path / "killed", damage, is_second=is_second)
    for incarnation in ALL:
        with pytest.raises(DamagedError, match="newest file is missing or damaged") as raised:
            await found_in(folder, [incarnation], has_journal=has_journal)
        assert "--give-up-journal" in raised.value.hint
    kept = [0] if is_second else []
    assert await found_in(folder, ALL, gives_up_journal=True) == dict.fromkeys(ALL, kept)


@pytest.mark.parametrize("damage", [removed, emptied, torn_at_its_first_round])
async def test_control_nobody_said_that_there_was_a_newest_file(
    rounds: Rounds, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = await without_the_newest_file(rounds, tmp_path / "killed", damage, is_second=True)
    (folder / BEGUN_FILE).unlink()
    assert await found_in(folder, ALL, has_journal=True) == {i: [0] for i in ALL}


async def test_no_file_that_was_forgotten_is_missed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an earlier version has forgotten it, which says nothing of it elsewhere, and after it was given up."""
    folder = await without_the_newest_file(rounds, tmp_path / "killed", removed, is_second=True)
    before = (folder / BEGUN_FILE).read_bytes()
    for gives_up in (True, False):
        again = Rounds(folder, monkeypatch, has_journal=True, gives_up_journal=gives_up)
        await again.open(*ALL, term=2)
        await again.together(*ALL)
        await again.end()
        (folder / BEGUN_FILE).write_bytes(before)
    assert await found_in(folder, ALL, has_journal=True) == {i: [0, 1, 2] for i in ALL}


async def test_the_first_round_of_the_newest_file_was_no_torn_one(rounds: Rounds, tmp_path: Path) -> None:
    """It was durable before the file was named. Everything that followed it is lost too."""
    folder = await without_the_newest_file(rounds, tmp_path / "killed", cut_in_its_last_part, is_second=True)
    for incarnation in ALL:
        with pytest.raises(DamagedError, match="a round of the journal is missing or damaged") as raised:
            await found_in(folder, [incarnation])
        assert "--give-up-journal" in raised.value.hint
    assert await found_in(folder, ALL, gives_up_journal=True) == {1: [0, 1], 2: [0, 1], 3: [0]}


async def the_last_round_damaged(rounds: Rounds, to: Path, damage: Callable[[Path], None]) -> Path:
    """It is the third one of its file, and its segments are cut."""
    folder = await killed(rounds, to)
    cut(folder, *ALL, to=127)
    damage(journal_of(folder))
    return folder


def changed_in_its_last_head(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    *_, last = rounds_in(bytes(raw), key_of((path.parent / "secret").read_bytes()))
    raw[raw.rindex(last.number.to_bytes(8, "little"))] ^= 1
    path.write_bytes(raw)


async def test_a_changed_byte_of_the_last_round_is_reported(rounds: Rounds, tmp_path: Path) -> None:
    """In a part to that log, in the head to all."""
    folder = await the_last_round_damaged(rounds, tmp_path / "killed", changed_in_its_last_part)
    with pytest.raises(DamagedError, match="part of the journal is damaged"):
        await found_in(folder, [3])
    assert await found_in(folder, [1, 2]) == {1: [0, 1, 2], 2: [0, 1, 2]}
    changed_in_its_last_part(journal_of(folder))
    changed_in_its_last_head(journal_of(folder))
    for incarnation in ALL:
        with pytest.raises(DamagedError, match="a round of the journal is missing or damaged"):
            await found_in(folder, [incarnation])
    assert await found_in(folder, ALL, gives_up_journal=True) == {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1]}


@pytest.mark.parametrize("is_cut", [True, False])
async def test_the_last_round_cut_short_is_taken_for_a_torn_one(rounds: Rounds, tmp_path: Path, is_cut: bool) -> None:
    """This is the limit, a fault of the disk and a power cut at once: a power cut alone, before the round's sync, may
    leave the same bytes, and then nobody learned that it is stored."""

    def without_its_last_sectors(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, (size - 1) // SECTOR_BYTES * SECTOR_BYTES)
        if not is_cut:
            os.truncate(path, size)

    folder = await the_last_round_damaged(rounds, tmp_path / "killed", without_its_last_sectors)
    assert await found_in(folder, ALL) == {i: [0, 1] for i in ALL}


async def test_a_round_is_refused_whose_file_nobody_can_be_told_of(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_syncs(patch, lambda path: path.endswith(BEGUN_FILE))
        await rounds.begin()
        await rounds.together(*ALL)
        journal = rounds.logs.committer._journal
        assert journal._confirmed < journal._number
    journal.wake()
    await rounds.together(*ALL)
    assert journal._confirmed == journal._number
    shutil.copytree(rounds.folder, tmp_path / "killed")
    assert await found_in(tmp_path / "killed", ALL) == {i: [0, 1] for i in ALL}
    await rounds.end()
    assert rounds.fatal == []


async def test_it_is_told_before_the_first_round_and_no_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[bool, int]] = []
    folder = tmp_path / "data" / "logs"

    def tell(has_journal: bool) -> None:
        told.append((has_journal, len(list((folder / "journal").glob("*.journal")))))

    rounds = await Rounds(folder, monkeypatch, tell_journal=tell).begin()
    await rounds.together(1, 2, 3)
    assert told == [(True, 0)]
    await rounds.end()
    assert told == [(True, 0), (False, 0)]


async def test_while_a_log_has_something_in_it_it_is_needed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await killed(rounds, tmp_path / "killed")
    told: list[bool] = []
    again = Rounds(folder, monkeypatch, tell_journal=told.append)
    await again.open(2, 3, term=2)
    await again.together(2, 3)
    await again.end()
    assert told == [True]
    assert (folder / "journal" / "1.kept").exists()


async def test_nothing_is_written_to_a_journal_of_which_nobody_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(has_journal: bool) -> None:
        raise OSError(errno.ENOSPC, "no room")

    rounds = await Rounds(tmp_path / "data" / "logs", monkeypatch, tell_journal=tell).begin()
    await rounds.together(1, 2, 3)
    assert not list((rounds.folder / "journal").glob("*.journal"))
    await rounds.end()
    assert rounds.fatal == []


def without_secret(folder: Path) -> None:
    (folder / "journal" / "secret").unlink()


def with_a_damaged_head(folder: Path) -> None:
    path = journal_of(folder)
    raw = bytearray(path.read_bytes())
    raw[20] ^= 1
    path.write_bytes(raw)


def with_a_damaged_part(folder: Path) -> None:
    """The first log's, of the first round with messages."""
    path = journal_of(folder)
    raw = bytearray(path.read_bytes())
    _, first, *_ = rounds_in(bytes(raw), key_of((folder / "journal" / "secret").read_bytes()))
    raw[raw.index(first.parts[0].body)] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [without_secret, with_a_damaged_head, with_a_damaged_part])
async def test_a_damaged_journal_can_be_given_up(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """What stands in the segments counts, and what is intact in the journal; from then on all is as ever."""
    folder = await killed(rounds, tmp_path / "killed")
    damage(folder)
    with pytest.raises(DamagedError, match="LOG_DAMAGED"):
        await found_in(folder, ALL, has_journal=True)
    again = Rounds(folder, monkeypatch, has_journal=True, gives_up_journal=True)
    await again.open(*ALL, term=2)
    await again.together(*ALL)
    await again.end()
    assert await found_in(folder, ALL, has_journal=True) == {i: [0, 1, 2, 3] for i in ALL}


async def test_what_was_lost_with_a_journal_that_is_given_up_is_damage_of_its_log(
    rounds: Rounds, tmp_path: Path
) -> None:
    folder = await killed(rounds, tmp_path / "killed")
    with_a_damaged_part(folder)
    cut(folder, 1, 2, to=127)
    with pytest.raises(DamagedError):
        await found_in(folder, [1], gives_up_journal=True)
    assert await found_in(folder, [2, 3], gives_up_journal=True) == {2: [0, 1, 2], 3: [0, 1, 2]}


async def one_bad_read(rounds: Rounds, to: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    folder = await killed(rounds, to)
    really, bad = Path.read_bytes, [True]

    def read_bytes(self: Path) -> bytes:
        raw = bytearray(really(self))
        if self.suffix == ".journal" and bad:
            bad.clear()
            raw[20] ^= 1
        return bytes(raw)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    found = await found_in(folder, ALL)
    assert not bad
    return found


async def test_one_bad_read_is_no_damage(rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await one_bad_read(rounds, tmp_path / "killed", monkeypatch) == WHOLE


async def test_control_one_bad_read_that_is_believed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = JournalReplay._read

    def read_once(self: JournalReplay) -> None:
        self._is_read = self._is_read or bool(self._why)
        really(self)

    monkeypatch.setattr(JournalReplay, "_read", read_once)
    with pytest.raises(DamagedError):
        await one_bad_read(rounds, tmp_path / "killed", monkeypatch)


async def reads_for_all(rounds: Rounds, to: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a damaged journal is read when each log is opened several times."""
    folder = await killed(rounds, to)
    with_a_damaged_head(folder)
    really, reads = Path.read_bytes, list[Path]()

    def read_bytes(self: Path) -> bytes:
        if self.suffix == ".journal":
            reads.append(self)
        return really(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    logs = logs_in(folder)
    for incarnation in ALL * 3:
        with pytest.raises(DamagedError, match="a round of the journal"):
            await logs.open(incarnation, 0)
    await logs.close()
    return len(reads)


async def test_a_damaged_journal_is_not_read_once_more_for_each_log(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be long, and a start may open hundreds."""
    assert await reads_for_all(rounds, tmp_path / "killed", monkeypatch) == journal_replay.DAMAGED_READS


async def test_control_no_read_is_ever_believed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_replay, "DAMAGED_READS", 1_000)
    assert await reads_for_all(rounds, tmp_path / "killed", monkeypatch) == 2 * 3 * len(ALL)


# -- power cuts at their own places ------------------------------------------------------------------------------


async def a_folder_that_was_half_made(rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before was killed when it had written the secret and synced nothing."""
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "data", patch)
        for incarnation in ALL:
            await rounds.logs.create(incarnation, "persistent://public/default/t", bytes(16))
        (rounds.folder / "journal").mkdir()
        (rounds.folder / "journal" / "secret").write_bytes(bytes(range(16)))
        await rounds.begin()
        await rounds.together(1, 2, 3)
        found = disk.after_a_power_cut(tmp_path / "cut") / "logs"
        await rounds.end()
    assert await found_in(found, ALL) == {i: [0] for i in ALL}


async def test_a_folder_that_was_half_made_is_made_durable(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_folder_that_was_half_made(rounds, tmp_path, monkeypatch)


async def test_control_a_folder_that_is_there_is_taken_for_durable(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalReplay, "_make", lambda self: None)
    with pytest.raises((AssertionError, DamagedError)):
        await a_folder_that_was_half_made(rounds, tmp_path, monkeypatch)


async def a_sync_of_the_commit_thread_that_fails(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """Enough files wait to be synced that the thread does it itself when the journal is to be forgotten."""
    monkeypatch.setattr(Syncer, "is_full", property(lambda self: True))
    return await a_background_sync_that_fails(rounds, tmp_path, monkeypatch)


async def test_a_sync_of_the_commit_thread_that_fails_keeps_the_journal(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await a_sync_of_the_commit_thread_that_fails(rounds, tmp_path, monkeypatch) == {i: [0] for i in ALL}
    assert rounds.fatal


async def test_control_it_goes_on_as_if_nothing_had_failed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Committer, "_fail", lambda self, why: self._fatal(why))
    assert await a_sync_of_the_commit_thread_that_fails(rounds, tmp_path, monkeypatch) != {i: [0] for i in ALL}


class DiskWithBadBlock(Disk):
    """A block of the journal that could not be written holds nothing any more, the end of an earlier round included."""

    def ruin(self, path: Path) -> None:
        inode = path.stat().st_ino
        self._contents[inode] = self._contents[inode][:-100]


async def a_journal_that_fails_later(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """Three logs are in its first round, two in the one that fails; the power goes when that is acknowledged."""
    with monkeypatch.context() as patch:
        disk = DiskWithBadBlock(tmp_path / "data", patch)
        await rounds.begin()
        await rounds.forget()
        await rounds.open(3, term=2)
        await rounds.together(1, 2, 3)

        def is_ruined(path: str) -> bool:
            if not path.endswith(".journal"):
                return False
            disk.ruin(Path(path))
            return True

        failing_syncs(patch, is_ruined)
        await rounds.together(1, 2)
        found = disk.after_a_power_cut(tmp_path / "cut") / "logs"
        await rounds.end()
    return await found_in(found, ALL)


async def test_a_journal_that_fails_later_takes_nothing_of_earlier_rounds(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await a_journal_that_fails_later(rounds, tmp_path, monkeypatch)
    assert found == {1: [0, 1], 2: [0, 1], 3: [0]}
    assert rounds.fatal == []


async def test_control_earlier_rounds_are_left_to_a_journal_that_failed(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "has_failed", False)
    with pytest.raises(DamagedError, match="a round of the journal is missing or damaged"):
        await a_journal_that_fails_later(rounds, tmp_path, monkeypatch)


async def test_control_a_journal_that_failed_is_not_forgotten(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is in the segments, and nothing says that the journal need not be whole."""
    monkeypatch.setattr(Journal, "forget", lambda self, number: None)
    with pytest.raises(DamagedError, match="a round of the journal is missing or damaged"):
        await a_journal_that_fails_later(rounds, tmp_path, monkeypatch)


class EntriesSurvive(LosingDisk):
    """What was removed is gone at once."""

    entries_survive = True


async def power_cuts_while_it_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, depth: int = 2
) -> None:
    """At each sync of a start that takes it back and forgets it, and again at each of the start after that."""
    random = Random(seed)
    print(f"seed {seed}")
    with monkeypatch.context() as patch:
        data = tmp_path / f"{depth}-{random.random()}" / "data"
        put(files_in(folder), data / "logs")
        disk = EntriesSurvive(data, patch)
        make_durable(data)
        rounds = Rounds(data / "logs", patch)
        cuts = Cuts(disk, rounds, patch, random)
        await rounds.open(1, 2, term=2)
        await rounds.together(1, 2)
        await rounds.forget()
        await rounds.open(3, term=2)
        await rounds.end()
    assert len(cuts.images) > 15
    for number, (image, _) in enumerate(cuts.images):
        there = put(image, data.parent / str(number)) / "logs"
        found = await found_in(there, ALL)
        for incarnation in ALL:
            assert found[incarnation][:3] == [0, 1, 2], f"cut {number}, log {incarnation}"
    if depth > 1:
        shutil.rmtree(there)
        put({path.relative_to("logs"): raw for path, raw in random.choice(cuts.images)[0].items()}, there)
        await power_cuts_while_it_is_taken_back(tmp_path, monkeypatch, there, seed + 100, depth - 1)


def make_durable(folder: Path) -> None:
    """All of it, for who watches."""
    for path in [folder, *folder.rglob("*")]:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


async def a_power_cut(rounds: Rounds, to: Path) -> Path:
    """It took all segments but for their markers."""
    folder = await killed(rounds, to)
    cut(folder, *ALL, to=127)
    return folder


async def test_power_cuts_while_it_is_taken_back(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await a_power_cut(rounds, tmp_path / "killed")
    await power_cuts_while_it_is_taken_back(tmp_path, monkeypatch, folder, 1)


def take_back_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal_replay, "os", WithoutFsync())


def forget_before_it_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalReplay, "_keep", lambda self, incarnation, parts: None)


class WithoutFsync:
    def __getattr__(self, name: str) -> Any:
        return (lambda fd: None) if name == "fsync" else getattr(os, name)


@pytest.mark.parametrize("plant", [take_back_without_a_sync, forget_before_it_is_kept])
async def test_control_it_is_forgotten_too_early(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    folder = await a_power_cut(rounds, tmp_path / "killed")
    plant(monkeypatch)
    with pytest.raises((AssertionError, DamagedError)):
        await power_cuts_while_it_is_taken_back(tmp_path, monkeypatch, folder, 1)


async def test_a_deletion_that_a_crash_has_cut_short(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's folder is there, some of its files are not; others have begun to write meanwhile."""
    folder = await killed(rounds, tmp_path / "killed")
    for path in (folder / "1").glob("*.log"):
        path.unlink()
    cut(folder, 2, 3, to=127)
    again = Rounds(folder, monkeypatch)
    await again.open(2, 3, term=2)
    await again.together(2, 3)
    assert (folder / "journal" / "1.kept").exists()
    await again.logs.delete(1)
    await again.end()
    assert not (folder / "1").exists()
    assert not list((folder / "journal").glob("*.kept"))
    assert await found_in(folder, [2, 3]) == {2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}


async def test_what_is_kept_for_one_log_and_cannot_be_read_now_keeps_no_other_from_being_opened(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await killed(rounds, tmp_path / "killed")
    again = Rounds(folder, monkeypatch)
    await again.open(2, 3, term=2)
    await again.together(2, 3)
    await again.end()
    cut(folder, 1, to=127)
    kept = folder / "journal" / "1.kept"
    kept.rename(folder / "1.kept")
    # Reading it is an error of the system.
    kept.mkdir()
    logs = logs_in(folder)
    for incarnation in (1, 2, 3, 1, 1):
        if incarnation == 1:
            with pytest.raises(UnavailableError, match=r"1\.kept cannot be read"):
                await logs.open(1, 0)
        else:
            await (await logs.open(incarnation, 0)).close()
    kept.rmdir()
    (folder / "1.kept").rename(kept)
    log = await logs.open(1, 0)
    assert await ids_in(log) == [0, 1, 2]
    await log.close()
    await logs.close()
