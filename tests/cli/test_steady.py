"""A file that becomes another one while it is read: never half of one and half of the other without a word."""

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.cli import record_source as source_module
from seqdedupe.cli.record_source import RecordSource, SourceRecord
from seqdedupe.errors import SeqdedupeError

LINES = 20_000
"""More than a buffer holds."""

Change = Callable[[Path], None]


def _lines(count: int, word: str = "line") -> bytes:
    return b"".join(b"%s %06d\n" % (word.encode(), number) for number in range(count))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(_lines(LINES))
    os.utime(path, ns=(0, 0))  # so that what is written at once has another time
    return path


def _replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def _cut(path: Path) -> None:
    os.truncate(path, 100)


def _rewrite(path: Path) -> None:
    path.write_bytes(_lines(LINES, "LINE"))


def _rewrite_longer(path: Path) -> None:
    path.write_bytes(_lines(2 * LINES, "longer"))


def _insert_a_line_before(path: Path) -> None:
    path.write_bytes(b"new\n" + path.read_bytes())


def _remove(path: Path) -> None:
    path.unlink()


CHANGES = [_replace, _cut, _rewrite, _rewrite_longer, _insert_a_line_before, _remove]


def _read_changed(source: RecordSource, path: Path, change: Change) -> list[SourceRecord]:
    """What the source gives of a file that is changed after its first record."""
    records: Iterator[SourceRecord] = iter(source)
    read = [next(records)]
    change(path)
    read.extend(records)
    return read


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_published(file: Path, change: Change) -> None:
    with RecordSource(file) as source:
        source.check()
        with pytest.raises(SeqdedupeError, match="while it was read") as caught:
            _read_changed(source, file, change)
    assert caught.value.reason == "SOURCE_CHANGED"
    assert "with the unchanged file" in caught.value.hint


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_looked_at(file: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last byte of the first reading and the second one's first."""
    original = source_module.SteadyFile.check

    def check(raw: source_module.SteadyFile, *, is_complete: bool) -> None:
        change(file)
        raw.readinto(bytearray(1))
        original(raw, is_complete=is_complete)

    with RecordSource(file) as source:
        monkeypatch.setattr(source_module.SteadyFile, "check", check)
        with pytest.raises(SeqdedupeError, match="while it was read; nothing was sent") as caught:
            source.check()
    assert caught.value.reason == "SOURCE_CHANGED"


def test_a_compressed_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(_lines(LINES)))
    with RecordSource(path) as source:
        source.check()
        with pytest.raises(SeqdedupeError, match="was replaced, moved or removed while it was read"):
            _read_changed(source, path, _replace)


def test_a_file_may_grow_and_its_access_time_change(file: Path) -> None:
    def grow(path: Path) -> None:
        with path.open("ab") as end:
            end.write(b"more\n")

    with RecordSource(file) as source:
        source.check()
        grow(file)
        read = _read_changed(source, file, grow)
    assert [record.payload for record in read[LINES:]] == [b"more", b"more"]


def test_a_pipe_may_be_removed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    writer = os.open(tmp_path / "a", os.O_RDWR)
    os.write(writer, b"1\n2\n")
    with RecordSource(tmp_path / "a") as source:
        os.close(writer)
        assert len(_read_changed(source, tmp_path / "a", _remove)) == 2


class _StillError(Exception):
    """The source waits for more."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_followed_file_that_changes(file: Path, change: Change) -> None:
    """After all of it is read: with a file that was cut and is longer again by now, too."""
    with RecordSource(file, follow=True) as source:
        waits = 0

        def before_waiting() -> None:
            nonlocal waits
            waits += 1
            if waits == 1:
                change(file)
            else:
                raise _StillError

        source.before_waiting = before_waiting
        read = list[SourceRecord]()
        with pytest.raises(SeqdedupeError, match="while it was read") as caught:
            read.extend(source)
    assert caught.value.reason == "SOURCE_CHANGED"


def test_without_the_look_back_a_followed_file_goes_on_in_another(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the others are held against."""
    monkeypatch.setattr(source_module, "_TAIL_BYTES", 0)
    monkeypatch.setattr(source_module.SteadyFile, "check", lambda *_, **__: None)
    with RecordSource(file, follow=True) as source:
        source.before_waiting = lambda: _rewrite_longer(file)
        records = iter(source)
        for _ in range(LINES):
            next(records)
        assert b"longer" not in next(records).payload[:6]  # the middle of another line
