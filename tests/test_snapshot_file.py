"""The file of a snapshot: what is written is read, by us and by a reader made from the document alone."""

import hashlib
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError, DamagedError
from seqdedupe.exports import Watermark, read_snapshot, writing_snapshot
from seqdedupe.exports import write_watermarks as write_watermarks
from seqdedupe.v1 import admin_pb2

PARTS = [
    admin_pb2.SnapshotPart(head=admin_pb2.SnapshotHead(topic="t", term=3, producers=2)),
    admin_pb2.SnapshotPart(
        producer_name_offsets=[0, 1, 3], producer_names=b"abb", persisted=[5, -1], epochs=[1, 0], stated=[-1, 2]
    ),
]


def saved(path: Path, parts: list[admin_pb2.SnapshotPart]) -> bytes:
    with writing_snapshot(path) as take:
        for part in parts:
            take(part)
    return path.read_bytes()


def read_by_the_document(data: bytes) -> list[bytes]:
    assert data[:16] == b"seqdedupe-state\n"
    assert int.from_bytes(data[16:20], "little") == 1
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    at, parts = 20, []
    while n := int.from_bytes(data[at : at + 4], "little"):
        parts.append(data[at + 4 : at + 4 + n])
        at += 4 + n
    assert at + 4 == len(data) - 32
    return parts


@pytest.mark.parametrize("count", [0, 1, 2])
def test_it_reads_what_it_wrote(tmp_path: Path, count: int) -> None:
    data = saved(tmp_path / "file", PARTS[:count])
    assert list(read_snapshot(tmp_path / "file")) == PARTS[:count]
    assert read_by_the_document(data) == [part.SerializeToString() for part in PARTS[:count]]


def test_every_byte_changed_or_cut_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = saved(path, PARTS)
    damaged = [whole[:i] for i in range(len(whole))] + [whole + b"\0"]
    damaged += [whole[:i] + bytes((whole[i] ^ bit,)) + whole[i + 1 :] for i in range(len(whole)) for bit in (1, 128)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ConfigurationError) as caught:
            next(read_snapshot(path))
        assert caught.value.reason == "INVALID_SOURCE"
        assert str(path) in caught.value.message


def sealed_again(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_a_newer_version_is_told_from_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = saved(path, PARTS)[:-32]
    path.write_bytes(sealed_again(data[:16] + b"\2\0\0\0" + data[20:]))
    with pytest.raises(DamagedError, match="has format version 2") as caught:
        next(read_snapshot(path))
    assert caught.value.reason == "NEWER_FORMAT"


@pytest.mark.parametrize("body", [b"\5\0\0\0ab", b"\1\0\0\0\xff\0\0\0\0", b"\0\0\0\0\0", b"\1\0\0\0\x07", b"\0\0\0"])
def test_a_sound_digest_over_what_is_no_snapshot(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(sealed_again(b"seqdedupe-state\n\1\0\0\0" + body))
    with pytest.raises(ConfigurationError, match="INVALID_SOURCE"):
        list(read_snapshot(path))


def test_a_file_of_another_kind_is_none(tmp_path: Path) -> None:
    write_watermarks(tmp_path / "file", [Watermark(b"a", 1)])
    with pytest.raises(ConfigurationError, match="as a file of a snapshot does"):
        next(read_snapshot(tmp_path / "file"))


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing_snapshot(tmp_path / "nowhere" / "file"):
        pass
    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_what_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(AttributeError), writing_snapshot(path) as take:
        take(None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
