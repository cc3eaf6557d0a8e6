"""A backup that is not what was written is refused, no matter what has changed; and a restore leaves all or nothing."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import ConfigurationError, DamagedError, SeqdedupeError, UnavailableError
from seqdedupe.files import DIGEST_BYTES, MAGIC_BYTES, head_of, writing_sealed
from seqdedupe.format.headers import key_of
from seqdedupe.log.embedded.inspection import DurablePart
from seqdedupe.log.embedded.segment import LogIdentity
from seqdedupe.store.db import Store
from seqdedupe.store.directories import MANIFEST_FILE
from seqdedupe.transfer import backup as backup_module
from seqdedupe.transfer.backup import MAGIC, BackupMaker, Manifest, check, restore
from tests.doctor.directories import fingerprint, opened, segments


def do_nothing(_: BackupMaker) -> None:
    """Not broken off."""


async def made(
    folder: Path,
    *earlier: Path,
    to: str = "backup",
    before: Callable[[BackupMaker], None] = do_nothing,
    break_at: Callable[[BackupMaker], None] = do_nothing,
) -> Path:
    """A backup of a data directory with a topic of several segments."""
    data = folder / "data"
    if not data.exists():
        async with opened(data) as there:
            for i in range(30):
                await there.publish("t", [("p", i)], [bytes(500)])
            await there.topics.get("t").keeper.snapshot()
    making = BackupMaker(folder / to)
    making.begin(list(earlier))
    store = Store.open(data / "store")
    try:
        making.add_store(store.scan(b"", b"\xff"), 1_700_000_000_000_000)
        [record] = store.topics()
    finally:
        store.close()
    files = segments(data)
    ends = [int(path.stem) for path in files[1:]] + [30]
    identity = LogIdentity(record.incarnation, key_of(record.secret))
    parts = [
        DurablePart(path, identity, int(path.stem), path.stat().st_size, end)
        for path, end in zip(files, ends, strict=True)
    ]
    before(making)
    making.add_log(record, parts)
    break_at(making)
    try:
        making.finish()
    finally:
        # As the end of a process does.
        making._let_go()
    return folder / to


def is_there(folder: Path, name: str) -> bool:
    return any(folder.glob(f"{name}*"))


async def test_a_log_that_vanishes_at_any_moment_is_unreadable_and_no_failure_of_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deletion removes the folder before the n-th time that the copy looks at one of the files."""
    data = (await made(tmp_path)).with_name("data")
    whole = tmp_path / "whole"
    shutil.copytree(data, whole)
    reasons = []
    for name, really in (("stat", os.stat), ("open", os.open)):
        for n in itertools.count():
            shutil.rmtree(data)
            shutil.copytree(whole, data)
            left = n

            def vanish(path: Any, *rest: Any, really: Any = really, **more: Any) -> Any:
                nonlocal left
                if str(path).startswith(f"{data}/logs/"):
                    left -= 1
                    if left == -1:
                        shutil.rmtree(data / "logs")
                return really(path, *rest, **more)

            def begin_to_vanish(making: BackupMaker, patched: Any = vanish, name: str = name) -> None:
                monkeypatch.setattr(os, name, patched)

            try:
                await made(tmp_path, to=f"{name}-{n}", before=begin_to_vanish)
            except UnavailableError as e:
                reasons.append(e.reason)
            monkeypatch.undo()
            if left >= 0:
                break
    assert set(reasons) == {"LOG_UNREADABLE"}
    assert len(reasons) > 4


async def test_each_file_that_is_changed_cut_or_missing_is_noticed(tmp_path: Path) -> None:
    backup = await made(tmp_path)
    said = check(backup)
    assert (said.damaged, said.left_out) == ([], [])
    for path in [*(backup / file.path for file in said.files if file.size), backup / MANIFEST_FILE]:
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        for raw in (bytes(changed), whole[:-1], whole + b"\0", b""):
            path.write_bytes(raw)
            with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
                check(backup)
            with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
                restore(backup, tmp_path / "restored")
            assert not is_there(tmp_path, "restored")
        path.write_bytes(whole)
        moved = path.rename(tmp_path / "moved")
        with pytest.raises(SeqdedupeError):
            check(backup)
        with pytest.raises(SeqdedupeError):
            restore(backup, tmp_path / "restored")
        assert not is_there(tmp_path, "restored")
        moved.rename(path)
    check(backup)


async def test_another_version_is_told_from_damage(tmp_path: Path) -> None:
    backup = await made(tmp_path)
    with writing_sealed(backup / MANIFEST_FILE, head_of(MAGIC, backup_module.FORMAT_VERSION + 1)) as put:
        put(b"{}")
    with pytest.raises(DamagedError, match="NEWER_FORMAT"):
        check(backup)


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../escaped", "", "BACKUP"])
async def test_a_manifest_leads_nowhere_else(tmp_path: Path, path: str) -> None:
    backup = await made(tmp_path)
    body = (backup / MANIFEST_FILE).read_bytes()[MAGIC_BYTES + 4 : -DIGEST_BYTES]
    said = json.loads(body)
    said["files"][0]["path"] = path
    with writing_sealed(backup / MANIFEST_FILE, head_of(MAGIC, backup_module.FORMAT_VERSION)) as put:
        put(json.dumps(said).encode())
    with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
        restore(backup, tmp_path / "restored")


async def test_a_link_in_it_is_not_followed(tmp_path: Path) -> None:
    backup = await made(tmp_path)
    file = next(file for file in check(backup).files if file.path.endswith("secret"))
    shutil.copyfile(backup / file.path, tmp_path / "elsewhere")
    (backup / file.path).unlink()
    (backup / file.path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="missing"):
        check(backup)
    with pytest.raises(DamagedError, match=r"missing.*BACKUP_DAMAGED"):
        restore(backup, tmp_path / "restored")
    (backup / file.path).unlink()
    with pytest.raises(DamagedError, match=r"missing.*BACKUP_DAMAGED"):
        restore(backup, tmp_path / "restored")


async def test_where_there_is_something_nothing_is_restored(tmp_path: Path) -> None:
    backup = await made(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "begun.unfinished").mkdir()
    for to in (tmp_path / "full", backup / "within", tmp_path / "begun", tmp_path / "full" / "file"):
        with pytest.raises(ConfigurationError, match="DIRECTORY_NOT_EMPTY"):
            restore(backup, to)
    (tmp_path / "empty").mkdir()
    before = fingerprint(backup)
    restore(backup, tmp_path / "empty")
    assert fingerprint(backup) == before
    async with opened(tmp_path / "empty") as there:
        assert [message.sequence_id for message in await there.messages("t")] == list(range(30))


async def test_what_was_not_finished_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off at its last steps, as a power cut does: all is written but the manifest, or its name."""

    def cut(*_: object, **__: object) -> None:
        raise OSError("the power was cut")

    def cut_after(self: Manifest, folder: Path) -> None:
        write(self, folder)
        cut()

    write = Manifest.write
    for step, left in ((cut, False), (cut_after, True)):
        with monkeypatch.context() as broken:
            broken.setattr(Manifest, "write", step)
            with pytest.raises(OSError, match="power"):
                await made(tmp_path)
        assert not (tmp_path / "backup").exists()
        unfinished = tmp_path / "backup.unfinished"
        assert (unfinished / MANIFEST_FILE).exists() == left
    check(await made(tmp_path))
    assert not unfinished.exists()


async def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await made(tmp_path)
    linked = await made(tmp_path, first, to="linked")

    def no_links(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    copied = await made(tmp_path, first, to="copied")
    for backup, links in ((linked, 2), (copied, 1)):
        shared = [file for file in check(backup).files if file.path.endswith(".log") and file.path.startswith("logs")]
        assert {(backup / file.path).stat().st_nlink for file in shared} == {links}


async def test_what_the_earlier_one_has_lost_is_copied(tmp_path: Path) -> None:
    """The newest folder is none, or lacks a file, or has a shorter one."""
    first = await made(tmp_path)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / MANIFEST_FILE).write_bytes(b"damaged")
    files = sorted((first / "logs").rglob("*.log"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    second = await made(tmp_path, first, tmp_path / "none", to="second")
    check(second)
    links = [path.stat().st_nlink for path in sorted((second / "logs").rglob("*.log"))]
    assert links[:2] == [1, 1]
    assert links[2] == 2


async def test_two_that_are_made_at_once_under_one_name(tmp_path: Path) -> None:
    """By two processes that share the folder: the one that came first has it, whole; the other one touches nothing."""

    def another(_: BackupMaker) -> None:
        second = BackupMaker(tmp_path / "backup")
        with pytest.raises(UnavailableError, match="BACKUP_FAILED"):
            second.begin([])
        second.remove()

    backup = await made(tmp_path, break_at=another)
    check(backup)
    assert sorted(path.name for path in backup.iterdir()) == [MANIFEST_FILE, "logs", "store"]


async def test_what_is_left_unfinished_goes_and_a_link_is_not_followed(tmp_path: Path) -> None:
    unfinished, elsewhere = tmp_path / "backup.unfinished", tmp_path / "elsewhere"
    for folder in (unfinished / "logs" / "1", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (unfinished / "link").symlink_to(elsewhere)
    (unfinished / MANIFEST_FILE).touch()
    assert sorted(path.name for path in (await made(tmp_path)).iterdir()) == [MANIFEST_FILE, "logs", "store"]
    assert (elsewhere / "file").exists()


async def test_it_can_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="OUTCOME_UNKNOWN"):
        await made(tmp_path, break_at=BackupMaker.stop)
    assert not (tmp_path / "backup").exists()


def test_of_no_workers_there_is_one_part(tmp_path: Path) -> None:
    assert backup_module.parts_of(tmp_path) == [tmp_path]
