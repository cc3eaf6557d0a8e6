"""A folder of backups: what it lists, which are good, what is kept and removed, and what is restored from it."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError, DamagedError, UnavailableError
from seqdedupe.files import UNFINISHED
from seqdedupe.store.db import Store
from seqdedupe.store.directories import MANIFEST_FILE
from seqdedupe.transfer.backup import LOCK_FILE, REMOVING, BackupFault, BackupMaker, Earlier, LastBackup, read_manifest
from seqdedupe.transfer.backup_places import TIME_NAME, FolderPlace, KeptBackup, place_at
from tests.backup.test_restoring import made
from tests.doctor.directories import fingerprint, opened

NAMES = [f"202611{day:02}T020000Z" for day in range(1, 7)]
DAY_US = 24 * 3600 * 1_000_000


def fails(making: BackupMaker) -> None:
    making.manifest.left_out.append(BackupFault("t", 1, "its log was closed"))


async def place_with(tmp_path: Path, *names: str) -> FolderPlace:
    earlier: list[Path] = []
    for name in names:
        earlier.append(await made(tmp_path, *earlier, to=f"place/{name}"))
    return FolderPlace(tmp_path / "place")


def good(place: FolderPlace) -> list[str]:
    # A new one: what was read before is not read again.
    fresh = FolderPlace(Path(place.url))
    return [name for name in fresh.names() if not fresh.look(name, reads_all=True).problem]


def flip(path: Path) -> None:
    """Changes a bit of a file, and its inode: no other backup shares the damage."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()
    path.write_bytes(raw)


async def test_a_backup_is_listed_with_what_it_holds(tmp_path: Path) -> None:
    place = await place_with(tmp_path, NAMES[0])
    [name] = place.names()
    found = place.look(name, reads_all=True)
    assert (found.problem, found.made_at_us, found.topics) == ("", 1_700_000_000_000_000, 1)
    files = [path for path in (tmp_path / "place" / name).rglob("*") if path.is_file() and path.name != MANIFEST_FILE]
    assert found.size_bytes == sum(path.stat().st_size for path in files) > 30 * 500


async def test_one_that_is_not_as_it_was_written_is_not_good(tmp_path: Path) -> None:
    place = await place_with(tmp_path, NAMES[0])
    whole = tmp_path / "place" / NAMES[0]
    file = max((whole / "logs").rglob("*.log"))
    raw = file.read_bytes()
    assert good(place) == NAMES[:1]
    for damage, reads_all in ((raw[:-1], False), (raw[:-1] + bytes([raw[-1] ^ 1]), True)):
        file.write_bytes(damage)
        assert FolderPlace(tmp_path / "place").look(NAMES[0], reads_all=reads_all).problem
        with pytest.raises(DamagedError, match="is not good"):
            FolderPlace(tmp_path / "place").check(NAMES[0])
        file.write_bytes(raw)
    file.rename(tmp_path / "moved")
    assert "is missing" in place.look(NAMES[0], reads_all=False).problem
    (tmp_path / "moved").rename(file)
    (whole / MANIFEST_FILE).unlink()
    assert place.look(NAMES[0], reads_all=False).problem.startswith(f"{NAMES[0]} is not a backup")
    assert good(place) == []


async def test_the_newest_good_ones_are_kept(tmp_path: Path) -> None:
    """Neither what is damaged, nor what was damaged where it was taken, nor what is not whole counts; and what people
    have named stays."""
    place = await place_with(tmp_path, *NAMES[:3], "before-upgrade")
    folder = tmp_path / "place"
    await made(tmp_path, to=f"place/{NAMES[3]}", break_at=fails)
    (folder / NAMES[4]).mkdir()
    await made(tmp_path, to=f"place/{NAMES[5]}")
    flip(max((folder / NAMES[2] / "logs").rglob("*.log")))
    assert place.keep(NAMES[5], 3).removed == []
    assert FolderPlace(folder).keep(NAMES[5], 2).removed == NAMES[:1]
    assert FolderPlace(folder).names() == [*NAMES[1:], "before-upgrade"]
    assert FolderPlace(folder).keep(NAMES[5], 1).removed == NAMES[1:5]
    assert FolderPlace(folder).names() == [NAMES[5], "before-upgrade"]


async def test_control_who_counts_all_of_them_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = await place_with(tmp_path, NAMES[0], NAMES[1])
    (tmp_path / "place" / NAMES[1] / MANIFEST_FILE).unlink()
    monkeypatch.setattr(FolderPlace, "look", lambda _, name, **__: KeptBackup(name, ""))
    place.keep(NAMES[1], 1)
    monkeypatch.undo()
    assert good(place) == []


async def test_a_clock_that_went_back_does_not_remove_the_new_one(tmp_path: Path) -> None:
    place = await place_with(tmp_path, *NAMES[:3])
    assert place.keep(NAMES[1], 1).removed == NAMES[:1]
    assert good(place) == NAMES[1:3]


def put_in_future(backup: Path) -> int:
    """The moment of a backup that was made while the clock was a day ahead."""
    manifest = read_manifest(backup)
    manifest.made_at_us = time.time_ns() // 1000 + DAY_US
    manifest.write(backup)
    later_ns = manifest.made_at_us * 1000
    os.utime(backup / MANIFEST_FILE, ns=(later_ns, later_ns))
    return manifest.made_at_us


@pytest.mark.parametrize("ahead", [0, 3, 5])
async def test_a_backup_from_the_future_is_neither_newest_nor_counted_nor_removed(tmp_path: Path, ahead: int) -> None:
    """No matter where its name is among the others."""
    place = await place_with(tmp_path, *NAMES)
    put_in_future(tmp_path / "place" / NAMES[ahead])
    others = [name for name in NAMES if name != NAMES[ahead]]
    assert place.newest_good() == (max(others), [NAMES[ahead]])
    assert place.keep(others[-1], 2) == (others[:-2], [NAMES[ahead]])
    assert place.names() == sorted([*others[-2:], NAMES[ahead]])
    earlier = Earlier.newest([tmp_path / "place" / name for name in place.names()])
    assert earlier is not None
    assert earlier.folder.name == others[-1]


async def test_where_all_are_from_the_future_one_must_be_named(tmp_path: Path) -> None:
    place = await place_with(tmp_path, NAMES[0])
    put_in_future(tmp_path / "place" / NAMES[0])
    with pytest.raises(DamagedError, match=f"only backups whose moments are in the future: {NAMES[0]}"):
        place.newest_good()
    place.restore(NAMES[0], tmp_path / "restored")


async def test_a_last_backup_of_the_future_gives_way_to_an_earlier_one(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000
    store = Store.open(tmp_path / "store")
    try:
        last = LastBackup(store)
        for at_us in (now_us + DAY_US, now_us, now_us - 1):
            await last.confirm(at_us)
            assert LastBackup(store).made_at_us == last.made_at_us == max(at_us, now_us)
    finally:
        store.close()


async def test_what_dead_processes_left_goes_and_what_is_written_stays(tmp_path: Path) -> None:
    place = await place_with(tmp_path, NAMES[5])
    folder = tmp_path / "place"
    left = [folder / f"{name}{suffix}" for name, suffix in zip(NAMES, (REMOVING, *[UNFINISHED] * 3), strict=False)]
    for path in left:
        path.mkdir()
    for path in left[1:3]:
        (path / LOCK_FILE).touch()
    lock = os.open(left[2] / LOCK_FILE, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place.keep(NAMES[5], 1)
    finally:
        os.close(lock)
    assert [path.exists() for path in left] == [False, False, True, True]


async def test_two_commands_at_once(tmp_path: Path) -> None:
    place = await place_with(tmp_path, NAMES[0])
    with place.locked():
        before = fingerprint(tmp_path / "place")
        with pytest.raises(UnavailableError, match="BACKUP_FAILED"), FolderPlace(tmp_path / "place").locked():
            pass
        assert fingerprint(tmp_path / "place") == before
    with place.locked():
        pass


async def test_the_newest_good_one_is_restored_or_one_by_name(tmp_path: Path) -> None:
    place = await place_with(tmp_path, *NAMES[:2])
    await made(tmp_path, to=f"place/{NAMES[2]}", break_at=fails)
    (tmp_path / "place" / NAMES[3]).mkdir()
    assert place.newest_good().name == NAMES[1]
    place.restore(NAMES[0], tmp_path / "restored")
    async with opened(tmp_path / "restored") as there:
        assert [message.sequence_id for message in await there.messages("t")] == list(range(30))


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="has no good backup"):
        FolderPlace(tmp_path).newest_good()
    with pytest.raises(DamagedError, match="is not there"):
        FolderPlace(tmp_path / "nowhere").names()
    for url in ("gs://bucket/prefix", "http://host/prefix", "s3://", "s3:///prefix"):
        with pytest.raises(ConfigurationError, match="INVALID_CONFIGURATION"):
            place_at(url)
    assert all(TIME_NAME.fullmatch(name) for name in NAMES)
