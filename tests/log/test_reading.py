"""Reading a log whose files cannot be read for a while, or give something else once."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.log.embedded import segment
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner, parsed, replayed

INCARNATION = 77


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    def fatal(reason: str) -> None:
        raise AssertionError(reason)

    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 1_000, fatal=fatal)
    await made.create(INCARNATION, TOPIC, SECRET)
    log = await made.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(10):
        owner.append(i, 1, 100)
    await owner.until_stored(10)
    await log.close()
    yield made
    await made.close()


class Reads:
    """`os.pread` that fails, or flips a byte, this many times. Nothing is found in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: int = 0) -> None:
        self.bad = 0
        self._really = os.pread
        self._error = error
        monkeypatch.setattr(os, "pread", self)
        monkeypatch.setattr("seqdedupe.log.embedded.segment.Segment.read.__defaults__", (self,))
        defaults = {**(segment.read_piece.__kwdefaults__ or {}), "read": self}
        monkeypatch.setattr("seqdedupe.log.embedded.segment.read_piece.__kwdefaults__", defaults)

        def preadv(*_: Any) -> int:
            raise BlockingIOError(errno.EAGAIN, "it would have to wait for the disk")

        monkeypatch.setattr(os, "preadv", preadv)

    def __call__(self, file: int, size: int, offset: int) -> bytes:
        raw = self._really(file, size, offset)
        if self.bad:
            self.bad -= 1
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            return raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
        return raw


async def use(log: Any, call: str) -> None:
    match call:
        case "replay":
            assert len(await replayed(log)) == 11
        case "read":
            assert parsed(await log.read(0, 10, 1))[0].rows == 1
        case "locate":
            assert (await log.locate(0)).message_id.entry_id == 0
        case "locate_bytes":
            assert await log.locate_bytes(0, 1, 10) == 1


CALLS = ["replay", "read", "locate", "locate_bytes"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
async def test_an_error_of_the_system_says_nothing_of_what_stands_there(
    logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    log = await logs.open(INCARNATION, 10)
    with monkeypatch.context() as patch:
        reads = Reads(patch, error=number)
        reads.bad = 1
        with pytest.raises(UnavailableError) as failed:
            await use(log, call)
        assert failed.value.reason == "LOG_UNREADABLE"
        assert reads.bad == 0
        await use(log, call)
    await log.close()


@pytest.mark.parametrize("call", CALLS)
async def test_damage_is_looked_at_twice(logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    log = await logs.open(INCARNATION, 10)
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        reads.bad = 1
        await use(log, call)
        assert reads.bad == 0
        reads.bad = 1_000
        with pytest.raises(DamagedError):
            await log.replay(0).__anext__()
    await log.close()


async def test_opening_looks_twice_too(logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, reason in ((0, ""), (errno.EIO, "LOG_UNREADABLE")):
        with monkeypatch.context() as patch:
            reads = Reads(patch, error=number)
            reads.bad = 1
            if reason:
                with pytest.raises(UnavailableError) as failed:
                    await logs.open(INCARNATION, 10)
                assert failed.value.reason == reason
            else:
                await (await logs.open(INCARNATION, 10)).close()
            assert reads.bad == 0
    with monkeypatch.context() as patch:
        Reads(patch).bad = 1_000
        with pytest.raises(DamagedError):
            await logs.open(INCARNATION, 10)
