"""The file of a window: it is what was written, or it is refused. 1 s."""

import hashlib
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from seqdedupe import exports
from seqdedupe.errors import SeqdedupeError
from seqdedupe.exports import LATEST_MS, KnownId, WindowChecksum, parse_block, read_window, write_window

SOME = [
    KnownId(b"\0", 0),
    KnownId(b"\0\0", 5),
    KnownId(b"a", LATEST_MS),
    KnownId(b"a\xff", 7),
    KnownId(b"x" * 255, 1_000_000),
]


def known_in(path: Path) -> list[KnownId]:
    checksum, *blocks = read_window(path)
    digest = WindowChecksum()
    found: list[KnownId] = []
    for raw in blocks:
        block = parse_block(raw)
        digest.add(raw, len(block.sizes))
        ends = [0, *block.sizes.astype(int).cumsum().tolist()]
        ids = block.ids.tobytes()
        some = [KnownId(ids[a:b], t) for (a, b), t in zip(pairwise(ends), block.times_ms.tolist(), strict=True)]
        assert list(exports.known_in(raw)) == some
        found += some
    assert checksum == digest.finish() == path.read_bytes()[-32:]
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "window"
    assert write_window(path, SOME) == len(SOME)
    assert known_in(path) == SOME
    again = tmp_path / "again"
    write_window(again, iter(SOME))
    assert again.read_bytes() == path.read_bytes(), "equal windows make equal files"
    assert write_window(path, []) == 0
    assert known_in(path) == []


def test_any_number_goes_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "WINDOW_BLOCK_BYTES", 64)
    rng = random.Random(3)
    ids = sorted({rng.randbytes(rng.choice([1, 2, 8, 16, 255])) for _ in range(500)})
    known = [KnownId(one, rng.randrange(LATEST_MS)) for one in ids]
    write_window(tmp_path / "window", known)
    assert len(list(read_window(tmp_path / "window"))) > 100
    assert known_in(tmp_path / "window") == known


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([KnownId(b"b", 1), KnownId(b"a", 1)], "INTERNAL"),
        ([KnownId(b"a", 1), KnownId(b"a", 2)], "INTERNAL"),
        ([KnownId(b"", 1)], "INVALID_DEDUPLICATION_ID"),
        ([KnownId(b"x" * 256, 1)], "INVALID_DEDUPLICATION_ID"),
        ([KnownId(b"a", -1)], "INVALID_REQUEST"),
        ([KnownId(b"a", LATEST_MS + 1)], "INVALID_REQUEST"),
    ],
)
def test_what_cannot_be_leaves_what_was_there(tmp_path: Path, wrong: list[KnownId], reason: str) -> None:
    path = tmp_path / "window"
    write_window(path, SOME)
    with pytest.raises(SeqdedupeError) as raised:
        write_window(path, wrong)
    assert raised.value.reason == reason
    assert known_in(path) == SOME
    assert [one.name for one in tmp_path.iterdir()] == ["window"]


def test_no_byte_may_change_or_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "window"
    write_window(path, SOME)
    raw = path.read_bytes()
    for at in range(len(raw)):
        for damaged in (raw[:at], raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(SeqdedupeError) as raised:
                list(read_window(path))
            assert raised.value.reason == "INVALID_SOURCE"
    path.write_bytes(raw + b"\0")
    with pytest.raises(SeqdedupeError):
        list(read_window(path))


def test_a_newer_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    body = exports.WINDOW_MAGIC + struct.pack("<I", 2) + b"whatever it is"
    (tmp_path / "window").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(SeqdedupeError) as raised:
        list(read_window(tmp_path / "window"))
    assert raised.value.reason == "NEWER_FORMAT"


def test_a_forged_file_does_not_hang_or_take_memory(tmp_path: Path) -> None:
    """Who can write the file can write the digest too."""
    for count in (2**32 - 1, 2**31, 3):
        body = exports._WINDOW_HEAD + struct.pack("<I", count) + b"\0" * 40
        (tmp_path / "window").write_bytes(body + hashlib.sha256(body).digest())
        with pytest.raises(SeqdedupeError):
            known_in(tmp_path / "window")


def block(rows: int, times: list[int], sizes: list[int], ids: bytes) -> bytes:
    return struct.pack("<I", rows) + struct.pack(f"<{len(times)}q", *times) + bytes(sizes) + ids


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\0\0\0",
        block(0, [], [], b""),
        block(1, [1], [1], b""),
        block(1, [1], [1], b"ab"),
        block(1, [1], [0], b""),
        block(2, [1, 1], [2, 0], b"ab"),
        block(2, [1, -1], [1, 1], b"ab"),
        block(1, [LATEST_MS + 1], [1], b"a"),
        block(2**32 - 1, [1], [1], b"a"),
        block(1, [1], [255], b"a" * 254),
        block(1, [1], [1], b"a") + b"\0" * exports.MAX_WINDOW_BLOCK_BYTES,
    ],
)
def test_hostile_blocks_are_refused(wrong: bytes) -> None:
    with pytest.raises(SeqdedupeError) as raised:
        parse_block(wrong)
    assert raised.value.reason == "INVALID_REQUEST"


def test_random_bytes_are_no_block() -> None:
    rng = random.Random(5)
    good = block(3, [1, 2, 3], [1, 2, 1], b"abbc")
    for _ in range(2000):
        mutated = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            parsed: Any = parse_block(bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])]))
        except SeqdedupeError:
            continue
        assert int(parsed.sizes.sum(dtype=int)) == len(parsed.ids)
        assert len(parsed.sizes) == len(parsed.times_ms) > 0
