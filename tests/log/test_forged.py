"""Payloads that pose as records. Header, incarnation, offsets and checksums are public: only the keyed tag is not.

Anyone who publishes chooses what stands in a payload, and can work out where in the file it will stand. Each test has a
control arm in which recovery believes headers without looking at their tags: there the forgery does its harm.
"""

import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.errors import DamagedError
from seqdedupe.format import headers, records
from seqdedupe.format.headers import NO_KEY, key_of
from seqdedupe.format.jit import Int64s
from seqdedupe.format.journal import SECTOR_BYTES
from seqdedupe.format.layout import CANONICAL, COLUMNS_END, PLACES, ROWS, layout
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.batches import batch
from tests.log.batches import SECRET, TOPIC, encoded_batch
from tests.log.conformance import Owner, replayed
from tests.log.test_damage import File, put

INCARNATION = 77
FORGED_BODY = encoded_batch(0, 1)


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    def fatal(reason: str) -> None:
        raise AssertionError(reason)

    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 5_000, fatal=fatal)
    yield made
    await made.close()


def without_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery believes a header that names this incarnation and its own place, as it would have to without a tag."""

    def find_header(raw: np.ndarray, incarnation: int, file_offset: int, base_index: int, key: Int64s) -> int:
        whole, at = raw.tobytes(), -1
        name = incarnation.to_bytes(8, "little")
        while (at := whole.find(name, at + 1)) >= 0:
            start = at - headers.INCARNATION_AT
            place = int.from_bytes(whole[start + headers.FILE_OFFSET_AT :][:8], "little")
            if start >= 0 and start + headers.HEADER_BYTES <= len(whole) and place == file_offset + start:
                return start
        return -1

    monkeypatch.setattr(records, "find_header", find_header)


def forged_record(place: int, synced: int, base_index: int, key: Int64s) -> bytes:
    """A record in every way, but for the key that its maker does not have."""
    body, rows, column_bytes = FORGED_BODY
    header = headers.header(
        body,
        headers.BATCH_TAG,
        rows=rows,
        column_bytes=column_bytes,
        incarnation=INCARNATION,
        file_offset=place,
        base_index=base_index,
        publish_time_ms=5_000,
        synced_offset=synced,
        ownership=0,
        key=key,
    )
    return header + body


def carrier(record_start: int, base_index: int, synced: int | None, key: Int64s) -> tuple[bytes, int, int]:
    """A batch for `append` whose payload is a forged record; `synced` None: synced up to its own place."""
    size = len(forged_record(0, 0, 0, key))
    encoded = batch([("attacker", base_index)], payloads=[b"\xee" * (SECTOR_BYTES + size)]).encode()
    place = record_start + headers.HEADER_BYTES + len(encoded) - size
    encoded = encoded[:-size] + forged_record(place, place if synced is None else synced, base_index, key)
    places = np.zeros(PLACES, np.int64)
    assert layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), places) == CANONICAL
    return encoded, int(places[ROWS]), int(places[COLUMNS_END])


async def attacked(logs: EmbeddedLogs, path: Path, claim: Callable[[int], int | None], key: Int64s) -> list[int]:
    """Three times: a message is acknowledged, a carrier is written after it, and a power cut loses the carrier's head.

    Returns the sequence IDs that are left in the end; those of the victim are 0, 100, 200.
    """
    await logs.create(INCARNATION, TOPIC, SECRET)
    end = 0
    for kill in range(3):
        log = await logs.open(INCARNATION, end)
        owner = await Owner(log, kill + 1).open()
        victim_at = size_of(path)
        owner.append(100 * kill, 1, 300)
        await owner.until_stored(1)
        carrier_at = size_of(path)
        owner.log.append(*carrier(carrier_at, end + 1, claim(victim_at), key))
        await owner.until_stored(2)
        await log.close()
        with path.open("r+b") as file:
            # The victim was acknowledged, and is on the disk. For what came later, the first sector is not.
            file.seek(carrier_at)
            file.write(bytes(to_sector_end(carrier_at)))
        end += 1
    log = await logs.open(INCARNATION, end - 1)
    ids = [i for record in await replayed(log) if record.rows for i in record.batch.sequence_ids]
    await log.close()
    return ids


def to_sector_end(at: int) -> int:
    return SECTOR_BYTES - at % SECTOR_BYTES


def size_of(path: Path) -> int:
    return path.stat().st_size


CLAIMS: dict[str, Callable[[int], int | None]] = {
    "all of it was synced": lambda victim_at: None,
    "it was synced up to the middle of the victim": lambda victim_at: victim_at + 150,
}


def path_of(tmp_path: Path) -> Path:
    return tmp_path / "logs" / str(INCARNATION) / f"{0:020d}.log"


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("key", ["none", "a guess"])
async def test_a_forged_record_says_nothing(logs: EmbeddedLogs, tmp_path: Path, claim: str, key: str) -> None:
    guess = NO_KEY if key == "none" else key_of(secrets.token_bytes(16))
    assert await attacked(logs, path_of(tmp_path), CLAIMS[claim], guess) == [0, 100, 200]


@pytest.mark.parametrize("claim", CLAIMS)
async def test_control_without_the_tag_it_does(
    logs: EmbeddedLogs, tmp_path: Path, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_tags(monkeypatch)
    with pytest.raises(DamagedError):
        await attacked(logs, path_of(tmp_path), CLAIMS[claim], NO_KEY)


async def test_control_whoever_has_the_key_is_believed(logs: EmbeddedLogs, tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        await attacked(logs, path_of(tmp_path), CLAIMS["all of it was synced"], key_of(SECRET))


def two_segments() -> tuple[File, File, int]:
    """A log whose second segment has, in a torn record's payload, a record of the first one at the same offset."""
    first, second = File(0), File(0)
    first.add_marker(0, 1)
    first.add(0, 1, 1_000)
    for _ in range(6):
        first.add(first.stored[-1].end, 1, 1_000)
    second = File(first.next_index)
    second.add_marker(0, 2)
    torn_at = len(second.raw)
    second.add(torn_at, 1, len(first.raw))
    copied = next(r for r in first.stored if r.start > torn_at + SECTOR_BYTES)
    raw = bytearray(second.raw)
    raw[copied.start : copied.end] = first.raw[copied.start : copied.end]
    lost = to_sector_end(torn_at)
    raw[torn_at : torn_at + lost] = bytes(lost)
    second.raw = bytes(raw)
    return first, second, torn_at


async def test_a_record_that_was_read_and_published_again_says_nothing(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the right tag, and names the offset at which it stands: but of another segment."""
    first, second, torn_at = two_segments()
    put(tmp_path, (0, first.raw), (first.next_index, second.raw))
    log = await logs.open(INCARNATION, first.next_index)
    assert log.cut_bytes == len(second.raw) - torn_at
    await log.close()
    with monkeypatch.context() as planted:
        without_tags(planted)
        with pytest.raises(DamagedError):
            await logs.open(INCARNATION, first.next_index)


async def test_a_synced_offset_above_the_records_own_place_is_damage(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = File(0)
    file.add_marker(0, 1)
    file.add(len(file.raw) + 1, 3)
    put(tmp_path, (0, file.raw))
    for covered_index in (0, 3):
        with pytest.raises(DamagedError, match="no crash leaves"):
            await logs.open(INCARNATION, covered_index)


async def test_a_record_of_another_owner_is_damage(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = File(0)
    file.add_marker(0, 1)
    file.add(0, 3)
    changed = bytearray(file.raw)
    whole = File(0)
    whole.token = b"another token..."
    whole.add_marker(0, 1)
    whole.add(0, 3)
    changed[file.stored[1].start :] = whole.raw[file.stored[1].start :]
    put(tmp_path, (0, bytes(changed)))
    with pytest.raises(DamagedError, match="not written under the marker"):
        await logs.open(INCARNATION, 0)


async def test_the_secret(logs: EmbeddedLogs, tmp_path: Path) -> None:
    await logs.create(INCARNATION, TOPIC, SECRET)
    path = tmp_path / "logs" / str(INCARNATION) / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == SECRET
    await (await logs.open(INCARNATION, 0, SECRET)).close()
    with pytest.raises(DamagedError, match="secret of another log"):
        await logs.open(INCARNATION, 0, bytes(16))
    term = 0
    for left in (b"", SECRET[:-1], None):
        os.unlink(path)
        if left is not None:
            path.write_bytes(left)
        with pytest.raises(DamagedError, match="missing or short"):
            await logs.open(INCARNATION, 0)
        # The store's record has it too: then it is written again, by who writes; who looks leaves it as it is.
        log = await logs.open(INCARNATION, 0, SECRET)
        assert (path.read_bytes() if path.exists() else None) == left
        await log.open_for_writing(term := term + 1, os.urandom(16), lambda outcome: None)
        await log.close()
        assert path.read_bytes() == SECRET
        await (await logs.open(INCARNATION, 0)).close()
        assert path.stat().st_mode & 0o777 == 0o600


async def test_an_older_format_is_refused(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = File(0)
    file.add_marker(0, 1)
    raw = bytearray(file.raw)
    raw[headers.VERSION_AT] = 1
    for has_secret in (True, False):
        put(tmp_path, (0, bytes(raw)))
        if not has_secret:
            (tmp_path / "logs" / str(INCARNATION) / "secret").unlink()
        with pytest.raises(DamagedError) as refused:
            await logs.open(INCARNATION, 0)
        assert refused.value.reason == "OLDER_FORMAT"
