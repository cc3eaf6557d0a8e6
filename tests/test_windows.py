"""The file of a window: it is what was written, or it is refused. 1 s."""

import hashlib
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from seqdedupe import windows
from seqdedupe.errors import SeqdedupeError
from seqdedupe.windows import LATEST_MS, Checksum, Known, parse, read, write

SOME = [Known(b"\0", 0), Known(b"\0\0", 5), Known(b"a", LATEST_MS), Known(b"a\xff", 7), Known(b"x" * 255, 1_000_000)]


def known_in(path: Path) -> list[Known]:
    checksum, *blocks = read(path)
    digest = Checksum()
    found: list[Known] = []
    for raw in blocks:
        block = parse(raw)
        digest.add(raw, len(block.sizes))
        ends = [0, *block.sizes.astype(int).cumsum().tolist()]
        ids = block.ids.tobytes()
        some = [Known(ids[a:b], t) for (a, b), t in zip(pairwise(ends), block.times_ms.tolist(), strict=True)]
        assert list(windows.known_in(raw)) == some
        found += some
    assert checksum == digest.finish() == path.read_bytes()[-32:]
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "window"
    assert write(path, SOME) == len(SOME)
    assert known_in(path) == SOME
    again = tmp_path / "again"
    write(again, iter(SOME))
    assert again.read_bytes() == path.read_bytes(), "equal windows make equal files"
    assert write(path, []) == 0
    assert known_in(path) == []


def test_any_number_goes_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BLOCK_BYTES", 64)
    rng = random.Random(3)
    ids = sorted({rng.randbytes(rng.choice([1, 2, 8, 16, 255])) for _ in range(500)})
    known = [Known(one, rng.randrange(LATEST_MS)) for one in ids]
    write(tmp_path / "window", known)
    assert len(list(read(tmp_path / "window"))) > 100
    assert known_in(tmp_path / "window") == known


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([Known(b"b", 1), Known(b"a", 1)], "INTERNAL"),
        ([Known(b"a", 1), Known(b"a", 2)], "INTERNAL"),
        ([Known(b"", 1)], "INVALID_DEDUPLICATION_ID"),
        ([Known(b"x" * 256, 1)], "INVALID_DEDUPLICATION_ID"),
        ([Known(b"a", -1)], "INVALID_REQUEST"),
        ([Known(b"a", LATEST_MS + 1)], "INVALID_REQUEST"),
    ],
)
def test_what_cannot_be_leaves_what_was_there(tmp_path: Path, wrong: list[Known], reason: str) -> None:
    path = tmp_path / "window"
    write(path, SOME)
    with pytest.raises(SeqdedupeError) as raised:
        write(path, wrong)
    assert raised.value.reason == reason
    assert known_in(path) == SOME
    assert [one.name for one in tmp_path.iterdir()] == ["window"]


def test_no_byte_may_change_or_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "window"
    write(path, SOME)
    raw = path.read_bytes()
    for at in range(len(raw)):
        for damaged in (raw[:at], raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(SeqdedupeError) as raised:
                list(read(path))
            assert raised.value.reason == "INVALID_SOURCE"
    path.write_bytes(raw + b"\0")
    with pytest.raises(SeqdedupeError):
        list(read(path))


def test_a_newer_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    body = windows.MAGIC + struct.pack("<I", 2) + b"whatever it is"
    (tmp_path / "window").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(SeqdedupeError) as raised:
        list(read(tmp_path / "window"))
    assert raised.value.reason == "NEWER_FORMAT"


def test_a_forged_file_does_not_hang_or_take_memory(tmp_path: Path) -> None:
    """Who can write the file can write the digest too."""
    for count in (2**32 - 1, 2**31, 3):
        body = windows._HEAD + struct.pack("<I", count) + b"\0" * 40
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
        block(1, [1], [1], b"a") + b"\0" * windows.MAX_BLOCK_BYTES,
    ],
)
def test_hostile_blocks_are_refused(wrong: bytes) -> None:
    with pytest.raises(SeqdedupeError) as raised:
        parse(wrong)
    assert raised.value.reason == "INVALID_REQUEST"


def test_random_bytes_are_no_block() -> None:
    rng = random.Random(5)
    good = block(3, [1, 2, 3], [1, 2, 1], b"abbc")
    for _ in range(2000):
        mutated = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            parsed: Any = parse(bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])]))
        except SeqdedupeError:
            continue
        assert int(parsed.sizes.sum(dtype=int)) == len(parsed.ids)
        assert len(parsed.sizes) == len(parsed.times_ms) > 0
