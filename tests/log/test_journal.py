"""The journal: what a round of several logs costs, and what a start takes back, no matter what was done to the
files."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError
from seqdedupe.format import journal as rounds_format
from seqdedupe.format.headers import key_of
from seqdedupe.format.journal import JournalRound, Part
from seqdedupe.log.embedded import commit, journal_replay
from seqdedupe.log.embedded.inspection import Intact, inspect
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.log.embedded.segment import LogIdentity, segment_path
from seqdedupe.log.embedded.writer import LeftFile, Syncer, Writer
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner
from tests.log.power import Disk
from tests.log.rounds import Rounds, failing_syncs, found_in, ids_in, logs_in, naming_as_synced, path_of, put

ALL = [1, 2, 3]
FLIPPED_EVERY = 37
"""It has no divisor in common with what heads are made of."""
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def make_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Rounds]:
    return lambda: Rounds(tmp_path / "data" / "logs", monkeypatch)


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are synced from now on."""
    really, names = os.fdatasync, list[str]()

    def sync(fd: int) -> None:
        names.append(Path(path_of(fd)).name)
        really(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    return names


async def test_a_round_of_several_is_one_sync(
    make_rounds: Callable[[], Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = await make_rounds().begin()
    with monkeypatch.context() as patch:
        names = synced(patch)
        await rounds.together(1, 2, 3)
    assert [name.endswith(".journal") for name in names] == [True]
    await rounds.end()
    assert rounds.fatal == []


async def test_a_round_of_one_needs_no_journal(
    make_rounds: Callable[[], Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = await make_rounds().begin(1)
    with monkeypatch.context() as patch:
        names = synced(patch)
        await rounds.together(1)
    assert names == [f"{0:020d}.log"]
    await rounds.end()
    assert not (rounds.folder / "journal").exists()


async def test_what_is_written_in_bulk_is_not_written_twice(
    make_rounds: Callable[[], Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = await make_rounds().begin(2)
    with monkeypatch.context() as patch:
        names = synced(patch)
        await rounds.together(1, 2, size=commit.SYNC_BYTES)
    assert names == [f"{0:020d}.log"] * 2
    await rounds.end()


async def test_the_end_leaves_no_journal(make_rounds: Callable[[], Rounds]) -> None:
    rounds = await make_rounds().begin()
    await rounds.together(1, 2, 3)
    assert list((rounds.folder / "journal").glob("*.journal"))
    await rounds.end()
    assert not list((rounds.folder / "journal").glob("*.journal"))


# -- a start --------------------------------------------------------------------------------------------------------


async def killed(rounds: Rounds, to: Path, *, count: int = 3, size: int = 300) -> Path:
    """A copy of the logs as kill -9 leaves them after this many rounds; the journal has all of them."""
    await rounds.begin()
    for _ in range(count):
        await rounds.together(1, 2, 3, size=size)
    shutil.copytree(rounds.folder, to)
    await rounds.end()
    return to


def cut(folder: Path, *incarnations: int, to: int = 0) -> None:
    """The power cut took the ends of the last segments."""
    for incarnation in incarnations:
        os.truncate(max((folder / str(incarnation)).glob("*.log")), to)


def journal_of(folder: Path) -> Path:
    (path,) = (folder / "journal").glob("*.journal")
    return path


async def test_what_segments_lack_is_taken_back(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    folder = await killed(make_rounds(), tmp_path / "killed")
    cut(folder, 1, 2)
    cut(folder, 3, to=130)
    assert await found_in(folder, ALL) == {i: [0, 1, 2] for i in ALL}


async def test_a_list_says_who_has_something_to_take_back(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    folder = await killed(make_rounds(), tmp_path / "killed")
    logs = logs_in(folder)
    await logs.create(9, TOPIC, SECRET)
    assert {name.incarnation: name.is_unfinished for name in await logs.list()} == dict.fromkeys(ALL, True) | {9: False}
    await (await logs.open(1, 0)).close()
    assert {name.incarnation for name in await logs.list() if name.is_unfinished} == {2, 3}
    await logs.close()


async def test_who_looks_without_writing_sees_it(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    folder = await killed(make_rounds(), tmp_path / "killed")
    cut(folder, 1)
    cut(folder, 3, to=130)
    before = files_in(folder)
    for incarnation in ALL:
        found = list(inspect(folder / str(incarnation), LogIdentity(incarnation, key_of(SECRET))))
        assert [type(one) for one in found] == [Intact]
        assert [len(one.table) for one in found if isinstance(one, Intact)] == [4]
    assert files_in(folder) == before


async def test_what_is_there_is_written_again(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sync that failed the system shows what the disk does not have."""
    folder = await killed(make_rounds(), tmp_path / "killed")
    really, written = os.pwrite, dict[str, int]()

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        written[path_of(fd)] = written.get(path_of(fd), 0) + len(data)
        return really(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    await found_in(folder, ALL)
    paths = [segment_path(folder / str(i), 0) for i in ALL]
    assert {str(path): path.stat().st_size for path in paths}.items() <= written.items()


async def test_what_retention_has_dropped_is_not_made_again(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    assert await after_retention(make_rounds(), tmp_path / "killed")


async def after_retention(rounds: Rounds, to: Path) -> bool:
    folder = await killed(rounds, to, count=6, size=900)
    first, second, *_ = sorted((folder / "1").glob("*.log"))
    first.unlink()
    logs = logs_in(folder)
    try:
        log = await logs.open(1, 0)
        found = await ids_in(log)
        await log.close()
        return found == list(range(int(second.stem), 6)) and not first.exists()
    finally:
        await logs.close()


async def test_control_replay_into_segments_that_are_gone(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = make_rounds()
    monkeypatch.setattr(journal_replay, "base_indexes", lambda folder: [0])
    with pytest.raises(DamagedError):
        await after_retention(rounds, tmp_path / "killed")


async def after_a_cut_of_the_last_segment(rounds: Rounds, to: Path) -> bool:
    folder = await killed(rounds, to, count=5, size=900)
    cut(folder, 1)
    logs = logs_in(folder)
    try:
        log = await logs.open(1, 0)
        found = await ids_in(log), log.cut_bytes
        await log.close()
        return found == ([0, 1, 2, 3, 4], 0)
    finally:
        await logs.close()


async def test_each_part_goes_to_its_own_segment(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    assert await after_a_cut_of_the_last_segment(make_rounds(), tmp_path / "killed")


@pytest.mark.parametrize("checks", [True, False])
async def test_control_replay_into_a_newer_segment(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, checks: bool
) -> None:
    rounds = make_rounds()
    monkeypatch.setattr(journal_replay, "segment_path", lambda folder, base: max(folder.glob("*.log")))
    if not checks:
        monkeypatch.setattr(journal_replay, "_check_place", lambda *arguments: None)
    try:
        assert not await after_a_cut_of_the_last_segment(rounds, tmp_path / "killed")
    except DamagedError:
        return


async def a_topic_made_anew(rounds: Rounds, to: Path) -> None:
    """The topic of one log was deleted, and another log made for it."""
    folder = await killed(rounds, to)
    cut(folder, 2, 3)
    shutil.rmtree(folder / "1")
    again = Rounds(folder, pytest.MonkeyPatch())
    await again.logs.create(9, TOPIC, SECRET)
    log = await again.logs.open(9, 0)
    assert (await ids_in(log), log.size_bytes, log.cut_bytes) == ([], 0, 0)
    await log.close()
    await again.open(2, 3, 9, term=2)
    await again.together(2, 3, 9)
    assert [len(await ids_in(again.owners[i].log)) for i in (2, 3, 9)] == [4, 4, 1]
    assert not list((folder / "journal").glob("*.kept"))
    await again.end()
    assert not (folder / "1").exists()


async def test_a_topic_made_anew_gets_nothing(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    await a_topic_made_anew(make_rounds(), tmp_path / "killed")


@pytest.mark.parametrize("checks", [True, False])
async def test_control_replay_into_a_topic_made_anew(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, checks: bool
) -> None:
    rounds, really = make_rounds(), JournalReplay.take_back

    def take_back(self: JournalReplay, folder: Path, identity: Any) -> None:
        self._read()
        if 1 in self._parts and identity.incarnation == 9:
            self._parts[9] = self._parts.pop(1)
        really(self, folder, identity)

    monkeypatch.setattr(JournalReplay, "take_back", take_back)
    if not checks:
        monkeypatch.setattr(journal_replay, "_check_place", lambda *arguments: None)
    with pytest.raises((DamagedError, AssertionError)):
        await a_topic_made_anew(rounds, tmp_path / "killed")


async def test_a_missing_folder_is_damage(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    folder = await killed(make_rounds(), tmp_path / "killed")
    shutil.rmtree(folder / "1")
    with pytest.raises(DamagedError):
        await found_in(folder, [1])
    assert not (folder / "1").exists()


# -- a journal that lies --------------------------------------------------------------------------------------------


async def a_lost_journal(rounds: Rounds, to: Path) -> dict[int, list[int]]:
    """For two rounds a segment has the second one only, and the journal is gone."""
    folder = await killed(rounds, to, count=2)
    shutil.rmtree(folder / "journal")
    (folder / journal_replay.BEGUN_FILE).unlink()
    path = segment_path(folder / "1", 0)
    raw = path.read_bytes()
    # After the marker stand two records of one size.
    at = 127
    middle = at + (len(raw) - at) // 2
    path.write_bytes(raw[:at] + bytes(middle - at) + raw[middle:])
    return await found_in(folder, [1])


async def test_a_lost_journal_is_no_torn_tail(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        await a_lost_journal(make_rounds(), tmp_path / "killed")


async def test_control_a_lost_journal_taken_for_a_torn_tail(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records name what their own file was synced up to, not what the journal has."""
    naming_as_synced(monkeypatch, "_file_synced")
    assert await a_lost_journal(make_rounds(), tmp_path / "killed") == {1: []}


async def an_old_journal(rounds: Rounds, to: Path) -> dict[int, list[int]]:
    """A journal that was forgotten is there again; a log has other records at its places by now."""
    folder = await killed(rounds, to)
    old = journal_of(folder)
    raw = old.read_bytes()
    again = Rounds(folder, pytest.MonkeyPatch())
    await again.open(*ALL, term=2)
    await again.together(1, 2)
    await again.end()
    shutil.rmtree(folder / "1")
    logs = logs_in(folder)
    await logs.create(1, TOPIC, SECRET)
    owner = await Owner(await logs.open(1, 0), 7).open()
    for i in range(2):
        owner.append(i, 1, 111)
        await owner.until_stored(i + 1)
    await owner.log.close()
    await logs.close()
    old.write_bytes(raw)
    return await found_in(folder, ALL)


async def test_an_old_journal_that_reappears(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    found = await an_old_journal(make_rounds(), tmp_path / "killed")
    assert found == {1: [0, 1], 2: [0, 1, 2, 3], 3: [0, 1, 2]}


def believe_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalReplay, "_forgotten", lambda self: 0)


def believe_it_and_look_at_nothing(patch: pytest.MonkeyPatch) -> None:
    believe_it(patch)
    patch.setattr(journal_replay, "_check_place", lambda *arguments: None)


@pytest.mark.parametrize("plant", [believe_it, believe_it_and_look_at_nothing])
async def test_control_an_old_journal_that_is_believed(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    rounds = make_rounds()
    plant(monkeypatch)
    try:
        found = await an_old_journal(rounds, tmp_path / "killed")
    except DamagedError:
        return
    assert found[1] != [0, 1]


async def a_refused_round_that_survives(
    rounds: Rounds, to: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """The sync of the second round failed; it stands in the journal all the same, and what it says was undone."""
    await rounds.begin()
    with monkeypatch.context() as patch:
        patch.setattr(JournalReplay, "forget", lambda *arguments: (_ for _ in ()).throw(OSError("not now")))
        with patch.context() as failing:
            failing_syncs(failing, lambda path: "/journal/" in path)
            await rounds.together(1, 2)
        await rounds.forget()
        await rounds.together(1, 2, size=500)
        shutil.copytree(rounds.folder, to)
    await rounds.end()
    first = min((to / "journal").glob("*.journal"))
    key = key_of((to / "journal" / "secret").read_bytes())
    one, refused = rounds_format.rounds_in(first.read_bytes(), key)
    other = [Part(*part[:3], part.body[:-1] + b"!") for part in refused.parts]
    assert refused.parts
    first.write_bytes(
        first.read_bytes()[: one.end]
        + rounds_format.encoded(
            other,
            number=refused.number,
            previous=refused.previous,
            forgotten=refused.forgotten,
            file_offset=one.end,
            key=key,
        )
    )
    return await found_in(to, [1, 2])


async def test_a_refused_round_is_not_taken_back(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await a_refused_round_that_survives(make_rounds(), tmp_path / "killed", monkeypatch)
    assert found == {1: [0, 1], 2: [0, 1]}


async def test_control_a_refused_round_that_is_taken_back(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = make_rounds()

    def everything(found: list[JournalRound], *arguments: int) -> Iterator[JournalRound]:
        return iter(found)

    monkeypatch.setattr(journal_replay, "confirmed", everything)
    with pytest.raises(DamagedError):
        await a_refused_round_that_survives(rounds, tmp_path / "killed", monkeypatch)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def every_byte_flipped(rounds: Rounds, to: Path) -> None:
    """What a round says is there, or its log is damaged, the last round included: no power cut flips a bit.

    The third log is not in the last one, so its own segment cannot tell that something is missing.
    """
    await rounds.begin()
    await rounds.together(1, 2, 3)
    await rounds.together(1, 2)
    shutil.copytree(rounds.folder, to)
    await rounds.end()
    cut(to, *ALL)
    path = journal_of(to)
    raw = path.read_bytes()
    files = files_in(to)
    for at in range(0, len(raw), FLIPPED_EVERY):
        flipped = bytearray(raw)
        flipped[at] ^= 0x10
        there = put(files | {path.relative_to(to): bytes(flipped)}, to.with_name(f"flipped-{at}"))
        for incarnation, all_ids in ((1, [0, 1]), (3, [0])):
            try:
                found = (await found_in(there, [incarnation]))[incarnation]
            except DamagedError:
                continue
            assert found == all_ids, f"byte {at}"


async def test_every_byte_flipped(make_rounds: Callable[[], Rounds], tmp_path: Path) -> None:
    await every_byte_flipped(make_rounds(), tmp_path / "killed")


async def test_control_every_byte_flipped(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, really = make_rounds(), journal_replay.confirmed
    monkeypatch.setattr(journal_replay, "confirmed", lambda *arguments: (one for one in really(*arguments) if one))
    with pytest.raises(AssertionError, match="byte"):
        await every_byte_flipped(rounds, tmp_path / "killed")


async def test_a_newer_journal(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rounds_format, "FORMAT_VERSION", 2)
        folder = await killed(make_rounds(), tmp_path / "killed")
    with pytest.raises(SeqdedupeError, match="NEWER_FORMAT"):
        await found_in(folder, [1])


# -- disks that fail ------------------------------------------------------------------------------------------------


class FailingOnce:
    """The n-th call that concerns the journal fails; a write leaves half of what it was given."""

    CALLS = ("open", "mkdir", "write", "pwrite", "fsync", "fdatasync", "unlink")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, code: int) -> None:
        self.left = number
        self._folder = str(folder)
        self._code = code
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, really: Any) -> Any:
        def call(target: Any, *arguments: Any, **keys: Any) -> Any:
            path = path_of(target) if isinstance(target, int) else str(target)
            if path.startswith(self._folder):
                self.left -= 1
                if self.left == -1:
                    if name in ("write", "pwrite"):
                        really(target, arguments[0][: len(arguments[0]) // 2], *arguments[1:])
                    raise OSError(self._code, os.strerror(self._code))
            return really(target, *arguments, **keys)

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_a_journal_that_fails_disturbs_nobody(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """At each of its calls. All is acknowledged, and survives a power cut."""
    number = 0
    while True:
        with monkeypatch.context() as patch:
            data = tmp_path / f"data-{number}"
            disk = Disk(data, patch)
            rounds = Rounds(data / "logs", patch)
            failing = FailingOnce(patch, data / "logs" / "journal", number, code)
            await rounds.begin()
            await rounds.together(1, 2, 3)
            await rounds.forget()
            await rounds.together(1, 2)
            await rounds.together(1, 2, size=500)
            found = disk.after_a_power_cut(tmp_path / f"cut-{number}") / "logs"
            await rounds.end()
        assert rounds.fatal == []
        ids = await found_in(found, ALL)
        assert [len(ids[i]) for i in ALL] == [3, 3, 1]
        if failing.left >= 0:
            break
        number += 1
    assert number > 15


async def a_background_sync_that_fails(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """What a power cut leaves when the segment of one log could never be synced by itself."""
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "data", patch)
        await rounds.begin()
        await rounds.together(1, 2, 3)
        failing_syncs(patch, lambda path: "/logs/1/" in path)
        await rounds.forget()
        await rounds.end()
    return await found_in(disk.after_a_power_cut(tmp_path / "cut") / "logs", ALL)


async def test_a_background_sync_that_fails_ends_the_process_and_keeps_the_journal(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = make_rounds()
    assert await a_background_sync_that_fails(rounds, tmp_path, monkeypatch) == {i: [0] for i in ALL}
    assert rounds.fatal
    assert all("/logs/1/" in why and "cannot be synced" in why for why in rounds.fatal)


async def test_control_a_background_sync_that_fails_and_the_journal_is_forgotten(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = make_rounds()

    def sync(self: Syncer, left: LeftFile) -> None:
        with suppress(OSError):
            os.fdatasync(left.file)
        os.close(left.file)

    monkeypatch.setattr(Syncer, "_sync", sync)
    assert await a_background_sync_that_fails(rounds, tmp_path, monkeypatch) != {i: [0] for i in ALL}


async def closed_without_descriptors(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would end the process when a log is closed whose file was released, and no more files can be opened."""
    await rounds.begin()
    await rounds.together(1, 2, 3)
    await rounds.forget()
    with monkeypatch.context() as patch:
        really = os.open

        def no_more(path: Any, *arguments: Any, **keys: Any) -> int:
            if str(path).endswith(".log"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return really(path, *arguments, **keys)

        patch.setattr(os, "open", no_more)
        await rounds.close(1, 2)
    await rounds.end()
    return rounds.fatal


async def test_a_log_is_closed_without_a_descriptor(
    make_rounds: Callable[[], Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = make_rounds()
    assert await closed_without_descriptors(rounds, monkeypatch) == []
    assert await found_in(rounds.folder, ALL) == {i: [0] for i in ALL}


async def test_control_a_file_that_was_let_go_of_is_synced_again(
    make_rounds: Callable[[], Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = Writer.close

    def close(self: Writer) -> None:
        self.sync_file()
        really(self)

    monkeypatch.setattr(Writer, "close", close)
    fatal = await closed_without_descriptors(make_rounds(), monkeypatch)
    assert fatal
    assert all(os.strerror(errno.EMFILE) in why for why in fatal)


async def test_a_log_that_cannot_take_its_part_back_keeps_its_own(
    make_rounds: Callable[[], Rounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await killed(make_rounds(), tmp_path / "killed")
    cut(folder, *ALL)
    with monkeypatch.context() as patch:
        again = Rounds(folder, patch)
        with patch.context() as failing:
            really = os.pwrite

            def pwrite(fd: int, data: bytes, offset: int) -> int:
                if "/1/" in path_of(fd):
                    raise OSError(errno.EROFS, "a file system that cannot be written")
                return really(fd, data, offset)

            failing.setattr(os, "pwrite", pwrite)
            with pytest.raises(UnavailableError):
                await again.logs.open(1, 0)
            await again.open(2, 3, term=2)
            await again.together(2, 3)
        await again.end()
    assert [path.name for path in (folder / "journal").iterdir() if path.suffix in (".journal", ".kept")] == ["1.kept"]
    assert await found_in(folder, ALL) == {1: [0, 1, 2], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
    assert not list((folder / "journal").glob("*.kept"))
