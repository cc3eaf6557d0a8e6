"""Archives of classes: one that is whole, for one Java and one set of jars, or none."""

import os
from pathlib import Path

import pytest

from pulsar_broker import quick
from pulsar_broker.quick import Archive


class Writer:
    def __init__(self, fails: bool = False) -> None:
        self.written = 0
        self._fails = fails

    def __call__(self, file: Path) -> None:
        file.write_bytes(b"classes" * 1000)
        self.written += 1
        if self._fails:
            raise OSError("no space left on device")


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    folder = tmp_path / "jars"
    folder.mkdir()
    return folder


def test_it_is_written_once(jars: Path, tmp_path: Path) -> None:
    write = Writer()
    for _ in range(2):
        Archive(jars, folder=tmp_path / "archives").make(write)
    assert write.written == 1
    file = Archive(jars, folder=tmp_path / "archives").file
    assert file is not None
    assert file.read_bytes() == b"classes" * 1000


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda _: b""])
def test_one_that_is_not_whole_is_written_again(damage, jars: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write, archive = Writer(), Archive(jars, folder=tmp_path / "archives")
    archive.make(write)
    assert archive.file is not None
    archive.file.write_bytes(damage(archive.file.read_bytes()))
    archive.make(write)
    assert write.written == 2
    assert archive.file.read_bytes() == b"classes" * 1000


def test_one_whose_writing_failed_is_none(jars: Path, tmp_path: Path) -> None:
    archive = Archive(jars, folder=tmp_path / "archives")
    with pytest.raises(OSError, match="no space"):
        archive.make(Writer(fails=True))
    assert archive.file is None
    assert not any((tmp_path / "archives").iterdir())


def test_other_jars_and_another_java_have_another(jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "archives"
    Archive(jars, folder=folder).make(Writer())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    with monkeypatch.context() as patch:
        patch.setenv("JAVA_HOME", str(tmp_path))
        assert Archive(jars, folder=folder).file is None
    assert Archive(jars, folder=folder).file is not None
    os.utime(jars, ns=(1, 1))
    assert Archive(jars, folder=folder).file is None


def test_a_broker_has_none_where_its_script_would_split_the_path(tmp_path: Path) -> None:
    home, file = tmp_path / "pulsar", tmp_path / "archive.jsa"
    assert str(file) in quick.archived(home, "SharedArchiveFile", file)["PULSAR_EXTRA_OPTS"]
    assert quick.archived(tmp_path / "my pulsar", "SharedArchiveFile", file) == {}
    assert quick.archived(home, "SharedArchiveFile", tmp_path / "an archive.jsa") == {}
