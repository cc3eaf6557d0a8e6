"""Cursors in files: the suite of all cursors, their bytes, and kill -9. Ten seconds."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqdedupe import files
from seqdedupe.client import DamagedError, MessageId, Position
from seqdedupe.client.cursor import FileCursor, Kept
from seqdedupe.errors import ConfigurationError
from tests.client.cursors import ONE, CursorSuite

KILLS = 8


class TestFileCursor(CursorSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "cursor"

    def make(self, place: Path) -> FileCursor:
        return FileCursor(place)


async def test_the_bytes_are_those_of_the_documentation(tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    await cursor.compare_and_set(None, Kept(ONE.position, "né"))
    position = ONE.position.to_bytes()
    body = b"seqdedupe-cursor" + (1).to_bytes(4, "little")
    body += len(position).to_bytes(4, "little") + position + (3).to_bytes(4, "little") + "né".encode()
    assert cursor.path.read_bytes() == body + hashlib.sha256(body).digest()


async def test_no_byte_may_be_another_one(tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    await cursor.compare_and_set(None, ONE)
    good = cursor.path.read_bytes()
    bad = [good[:k] + bytes([good[k] ^ 4]) + good[k + 1 :] for k in range(len(good))]
    bad += [good[:k] for k in range(len(good))] + [good + b"x"]
    for data in bad:
        cursor.path.write_bytes(data)
        for work in (cursor.read(), cursor.compare_and_set(None, ONE), cursor.compare_and_set(ONE, ONE)):
            with pytest.raises(DamagedError) as caught:
                await work
            assert caught.value.reason == "CURSOR_DAMAGED"
            assert str(cursor.path) in caught.value.message
        assert cursor.path.read_bytes() == data


@pytest.mark.parametrize(
    "body", [b"", b"\x00" * 8, b"\x02\0\0\0\xff\xff\0\0\0\0", b"\0\0\0\0\x01\0\0\0\xff", b"\0" * 12]
)
async def test_what_is_sealed_and_no_cursor_is_damaged(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "cursor"
    with files.writing_sealed(path, files.head_of(b"seqdedupe-cursor", 1)) as put:
        put(body)
    if body == b"\x00" * 8:  # an empty position is that of nothing: incarnation 0, index 0
        assert await FileCursor(path).read() == Kept(Position(0, None, 0))
        return
    with pytest.raises(DamagedError) as caught:
        await FileCursor(path).read()
    assert caught.value.reason == "CURSOR_DAMAGED"


async def test_a_newer_version_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    with files.writing_sealed(path, files.head_of(b"seqdedupe-cursor", 2)) as put:
        put(b"whatever it may be")
    with pytest.raises(DamagedError) as caught:
        await FileCursor(path).read()
    assert caught.value.reason == "NEWER_FORMAT"


async def test_a_symbolic_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    """By any link it is the same cursor, with one lock; and a disk that is not mounted is seen behind a link."""
    (tmp_path / "disk").mkdir()
    for name in ("one", "other"):
        (tmp_path / name).symlink_to("disk/cursor")
    await FileCursor(tmp_path / "one").compare_and_set(None, ONE)
    assert await FileCursor(tmp_path / "other").read() == ONE
    await FileCursor(tmp_path / "other").compare_and_set(ONE, ONE)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [".cursor.lock", "cursor"]
    assert all((tmp_path / name).is_symlink() for name in ("one", "other"))
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for work in (FileCursor(tmp_path / "one").read(), FileCursor(tmp_path / "one").compare_and_set(None, ONE)):
        with pytest.raises(ConfigurationError, match="is not there"):
            await work


async def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """It is never "no position": the disk may not be mounted."""
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path / "none" / "cursor", "is not there"),
        (tmp_path / "file" / "cursor", "is not there"),
        (tmp_path, "is a folder"),
    ):
        for work in (FileCursor(path).read(), FileCursor(path).compare_and_set(None, ONE)):
            with pytest.raises(ConfigurationError, match=why) as caught:
                await work
            assert caught.value.reason == "INVALID_OPTION"
    assert await FileCursor(tmp_path / "cursor").read() is None


MOVES = """# may start warm
import asyncio, sys
from seqdedupe.client import MessageId, Position
from seqdedupe.client.cursor import Kept
from seqdedupe.client.cursor import FileCursor
from seqdedupe.errors import ConfigurationError

async def main():
    cursor = FileCursor(sys.argv[1])
    while True:
        kept = await cursor.read()
        index = 0 if kept is None else kept.position.index + 1
        await cursor.compare_and_set(kept, Kept(Position(7, MessageId(7, index), index, 1)))
        print(index, flush=True)

asyncio.run(main())
"""


def test_after_kill_9_it_keeps_the_last_one_or_the_next(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    for k in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", MOVES, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.003 * k)  # wherever that is
            process.kill()
            told = [int(line) for line in process.stdout.read().split("\n") if line.isdecimal()]
        kept = asyncio.run(FileCursor(path).read())
        assert kept is not None
        if told:
            assert kept.position.index in (told[-1], told[-1] + 1)
        assert kept == Kept(Position(7, MessageId(7, kept.position.index), kept.position.index, 1))


async def test_without_the_lock_two_of_them_both_believe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what compares and sets needs to be one step."""
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.02))
    cursor = FileCursor(tmp_path / "cursor")
    new = [Kept(ONE.position, str(k)) for k in range(5)]
    done = await asyncio.gather(
        *(FileCursor(cursor.path).compare_and_set(None, one) for one in new), return_exceptions=True
    )
    assert done.count(None) > 1 or any(isinstance(one, FileNotFoundError) for one in done)
