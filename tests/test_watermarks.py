"""The file of watermarks: what is written is read, by us and by a reader made from the document alone."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe import exports
from seqdedupe.errors import ConfigurationError, DamagedError, InvalidRequestError, SeqdedupeError
from seqdedupe.exports import Watermark, read_stock, read_watermarks, write_stock, write_watermarks
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.v1.admin_pb2 import StockTopic, StockWatermarks

NAMES = st.text(min_size=1, max_size=60).map(lambda s: s.encode("utf-8", "replace"))
SOME = [Watermark(b"a", 0), Watermark(b"b" * 255, MAX_SEQUENCE_ID), Watermark("ü".encode(), 7)]


def read_by_the_document(data: bytes) -> list[tuple[bytes, int]]:
    assert data[:16] == b"seqdedupe-marks\n"
    assert int.from_bytes(data[16:20], "little") == 1
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    at, entries = 20, []
    while n := data[at]:
        name = data[at + 1 : at + 1 + n]
        entries.append((name, int.from_bytes(data[at + 1 + n : at + 9 + n], "little", signed=True)))
        at += 9 + n
    assert int.from_bytes(data[at + 1 : at + 9], "little") == len(entries)
    assert at + 9 == len(data) - 32
    return entries


@given(marks=st.dictionaries(NAMES, st.integers(0, MAX_SEQUENCE_ID), max_size=20))
def test_it_reads_what_it_wrote(tmp_path_factory: pytest.TempPathFactory, marks: dict[bytes, int]) -> None:
    path = tmp_path_factory.mktemp("marks") / "file"
    expected = sorted(marks.items())
    assert write_watermarks(path, (Watermark(*mark) for mark in expected)) == len(expected)
    assert list(read_watermarks(path)) == expected
    assert read_by_the_document(path.read_bytes()) == expected


def test_more_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    many = [Watermark(b"%07d" % i, i) for i in range(100_000)]
    write_watermarks(path, iter(many))
    assert path.stat().st_size > 2**20
    assert list(read_watermarks(path)) == many


STOCK = StockWatermarks(topics=[StockTopic(topic="persistent://public/default/t", producer_names=["p"], persisted=[7])])


def first_of(path: Path) -> object:
    return next(read_watermarks(path))


KINDS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "marks": (lambda path: write_watermarks(path, SOME[::2]), first_of),
    "stock": (lambda path: write_stock(path, STOCK), read_stock),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_changed_or_cut_is_noticed_before_anything_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write, read = KINDS[kind]
    write(path)
    whole = path.read_bytes()
    damaged = [whole[:i] for i in range(len(whole))] + [whole + b"\0"]
    damaged += [whole[:i] + bytes((whole[i] ^ bit,)) + whole[i + 1 :] for i in range(len(whole)) for bit in (1, 128)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ConfigurationError) as caught:
            read(path)
        assert caught.value.reason == "INVALID_SOURCE"
        assert str(path) in caught.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_version_is_told_from_damage(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write, read = KINDS[kind]
    write(path)
    data = path.read_bytes()[:-32]
    data = data[:16] + b"\2\0\0\0" + data[20:]
    path.write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(DamagedError, match="has format version 2") as caught:
        read(path)
    assert caught.value.reason == "NEWER_FORMAT"


def test_what_was_read_of_a_pulsar_topic_is_read_by_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_stock(path, STOCK)
    data = path.read_bytes()
    assert data[:20] == b"seqdedupe-stock\n\1\0\0\0"
    assert StockWatermarks.FromString(data[20:-32]) == STOCK == read_stock(path)
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    # Not what a request cannot hold; nor what no protobuf message is, although its digest fits.
    monkeypatch.setattr(exports, "MAX_STOCK_BYTES", 10)
    with pytest.raises(InvalidRequestError, match="INVALID_REQUEST"):
        write_stock(path, STOCK)
    assert path.read_bytes() == data
    other = data[:20] + b"\xff"
    path.write_bytes(other + hashlib.sha256(other).digest())
    with pytest.raises(ConfigurationError, match="INVALID_SOURCE"):
        read_stock(path)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Watermark(b"", 1), "INVALID_NAME"),
        (Watermark(b"x" * 256, 1), "INVALID_NAME"),
        (Watermark(b"\xff", 1), "INVALID_NAME"),
        (Watermark(b"z", -1), "INVALID_SEQUENCE_ID"),
        (Watermark(b"z", 2**63), "INVALID_SEQUENCE_ID"),
        (Watermark(b"a", 1), "INTERNAL"),
        (Watermark(b"b" * 255, 1), "INTERNAL"),
    ],
)
def test_what_cannot_be_is_refused_and_the_file_stays_as_it_was(tmp_path: Path, bad: Watermark, reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(SeqdedupeError) as caught:
        write_watermarks(path, [*SOME[:2], bad])
    assert caught.value.reason == reason
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Watermark]:
        yield SOME[0]
        raise InvalidRequestError("INVALID_NAME", "no", "", -1, {})

    with pytest.raises(InvalidRequestError):
        write_watermarks(tmp_path / "file", failing())
    assert not list(tmp_path.iterdir())
