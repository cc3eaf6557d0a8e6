"""A bug put into the embedded log on purpose: damage below the synced offset is treated as a torn tail.

Every fifth byte of a stored record is flipped in turn. What was confirmed is still there, or opening is an error.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.errors import DamagedError
from seqdedupe.log import tail
from seqdedupe.log.embedded import EmbeddedLogs
from tests.log.conformance import Owner, replayed

INCARNATION = 77
BATCHES = 4
DAMAGED_RECORD = 2
"""Not the first and not the last one: those behind it name an offset behind it as synced."""

STEP = 5


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


def logs_in(folder: Path) -> EmbeddedLogs:
    return EmbeddedLogs(folder, clock_ms=lambda: 1000, fatal=unexpected)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("seqdedupe")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


async def write(folder: Path) -> tuple[Path, int, int]:
    """A log of confirmed batches: its file, and from where to where one of them stands in it."""
    logs = logs_in(folder)
    await logs.create(INCARNATION)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    sizes = []
    for i in range(BATCHES):
        owner.append(i, 1)
        await owner.until_stored(i + 1)
        sizes.append(log.size_bytes)
    await log.close()
    await logs.close()
    (file,) = (folder / str(INCARNATION)).iterdir()
    return file, sizes[DAMAGED_RECORD - 1], sizes[DAMAGED_RECORD]


def damaged_files(file: Path, start: int, end: int) -> Iterator[int]:
    """The file as it is with one byte flipped, for many bytes in turn; then it is as it was."""
    intact = file.read_bytes()
    for at in range(start, end, STEP):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 0x55]) + intact[at + 1 :])
        yield at
    file.write_bytes(intact)


async def lost_silently(folder: Path, file: Path, start: int, end: int) -> int:
    """At how many places a flipped byte makes confirmed messages disappear without an error."""
    lost = 0
    for _ in damaged_files(file, start, end):
        logs = logs_in(folder)
        try:
            log = await logs.open(INCARNATION, 0)
        except DamagedError:
            pass
        else:
            lost += sum(record.rows for record in await replayed(log)) < BATCHES
            await log.close()
        await logs.close()
    return lost


async def test_damage_below_the_synced_offset_is_an_error(tmp_path: Path) -> None:
    assert await lost_silently(tmp_path, *await write(tmp_path)) == 0


async def test_damage_treated_as_a_torn_tail_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = await write(tmp_path)
    # What stands behind the damage is not looked at: the highest synced offset is that of the records before it.
    monkeypatch.setattr(tail, "_synced_behind", lambda *_: 0)
    assert await lost_silently(tmp_path, *written) > 0
