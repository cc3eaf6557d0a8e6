"""The last round of a journal's file: what a power cut before its sync leaves of it, and what only damage does."""

from random import Random

import pytest

from seqdedupe.format import journal
from seqdedupe.format.headers import key_of
from seqdedupe.format.journal import Part, encoded, has_damaged_head, rounds_in

KEY = key_of(bytes(range(16)))
Sizes = list[list[int]]


def file_of(random: Random, sizes: Sizes, *, has_zeros: bool) -> tuple[bytes, int]:
    """Return a file with these parts in its rounds, and where the last round begins."""
    raw, last = b"", 0
    for number, some in enumerate(sizes, 7):
        last = len(raw)
        parts = [Part(i, 0, 127, body(random, size, has_zeros=has_zeros)) for i, size in enumerate(some, 1)]
        raw += encoded(parts, number=number, previous=number - 1, forgotten=0, file_offset=last, key=KEY)
    return raw, last


def body(random: Random, size: int, *, has_zeros: bool) -> bytes:
    zeros = random.randrange(size) if has_zeros else 0
    return bytes(random.choices(range(1, 256), k=size - zeros)) + bytes(zeros)


def is_damaged(raw: bytes) -> bool:
    """Whether a start would say so, of the last round or of what follows the last one that can be read."""
    *_, last = rounds_in(raw, KEY)
    return has_damaged_head(raw, last.end) or (bool(last.damaged) and not last.is_torn)


def after_a_power_cut(random: Random, raw: bytes, synced: int, sector: int) -> bytes:
    """For what was not synced any sector is lost, and any part of the file's end."""
    size = random.choice((len(raw), random.randint(synced, len(raw))))
    left = bytearray(raw[:synced] + bytes(size - synced))
    for at in range(synced // sector * sector, size, sector):
        if random.random() < 0.5:
            left[at : at + sector] = raw[at : min(at + sector, size)]
    return bytes(left)


def power_cuts(seed: int) -> None:
    random = Random(seed)
    for number in range(400):
        sizes = [[random.randint(1, 1500) for _ in range(random.randint(2, 20))] for _ in range(2)]
        raw, synced = file_of(random, sizes, has_zeros=number % 2 == 0)
        cut = after_a_power_cut(random, raw, synced, random.choice((512, 4096)))
        assert not is_damaged(cut), f"cut {number}"


@pytest.mark.parametrize("seed", range(2))
def test_no_power_cut_looks_like_damage(seed: int) -> None:
    power_cuts(seed)


def test_control_sectors_are_larger_than_a_disk_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SECTOR_BYTES", 8192)
    with pytest.raises(AssertionError, match="cut"):
        power_cuts(0)


@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_each_changed_byte_of_the_last_round_is_damage(flip: int) -> None:
    raw, last = file_of(Random(1), [[300, 200], [700, 90, 400]], has_zeros=False)
    assert not is_damaged(raw)
    for at in range(last, len(raw)):
        changed = bytearray(raw)
        changed[at] ^= flip
        assert is_damaged(bytes(changed)), f"byte {at - last}"


def test_the_last_round_cut_short_or_without_sectors_looks_like_one_that_was_not_synced() -> None:
    """Nothing tells them apart: a power cut before the sync leaves the same bytes."""
    raw, last = file_of(Random(1), [[300, 200], [700, 900, 400]], has_zeros=False)
    for kept in range(last, len(raw), 7):
        assert not is_damaged(raw[:kept]), f"byte {kept}"
    for kept in (last, *range(1024, len(raw), journal.SECTOR_BYTES)):
        assert not is_damaged(raw[:kept] + bytes(len(raw) - kept)), f"byte {kept}"


def test_a_part_is_no_torn_one_where_the_next_round_was_begun() -> None:
    raw, last = file_of(Random(1), [[300, 200], [700, 900], [300, 200]], has_zeros=False)
    assert not is_damaged(raw[: last - 512] + bytes(512))
    assert is_damaged(raw[: last - 512] + bytes(513))
