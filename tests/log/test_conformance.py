"""Our logs, held against the suite."""

import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.log.contract import Log
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import LogConformance, LogHarness
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 1_700_000_000_000_000


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


class EmbeddedHarness(LogHarness):
    def __init__(self, folder: Path) -> None:
        self._logs = EmbeddedLogs(
            folder,
            clock_ms=lambda: self.now_ms,
            fatal=unexpected,
            segment_bytes=32 * 1024,
        )
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def open(self, covered_index: int = 0, place: bytes = b"") -> Log:
        await self._logs.create(INCARNATION, TOPIC, SECRET)
        return await self._logs.open(INCARNATION, covered_index, None, place)

    def refuse_writes(self, log: Log) -> None:
        # The kernel's own limit of a file's size; new segments are as small as the first one.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def allow_writes(self, log: Log) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    async def close(self) -> None:
        await self._logs.close()


class FaultyHarness(LogHarness):
    def __init__(self, *, packed: bool = False) -> None:
        self.takes_higher_terms_only = packed
        self._storage = Storage(INCARNATION, lambda: self.now_ms, packed=packed)

    async def open(self, covered_index: int = 0, place: bytes = b"") -> Log:
        higher_only = self.takes_higher_terms_only
        return FaultyLog(self._storage, automatic=True, retention=True, takes_higher_terms_only=higher_only)

    def refuse_writes(self, log: Log) -> None:
        assert isinstance(log, FaultyLog)
        log.refuse()
        log.refuse_opens(1)

    def allow_writes(self, log: Log) -> None:
        assert isinstance(log, FaultyLog)
        log.refuse_opens(0)


class TestEmbeddedLog(LogConformance):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[LogHarness]:
        harness = EmbeddedHarness(tmp_path / "logs")
        yield harness
        await harness.close()


class TestFaultyLog(LogConformance):
    @pytest.fixture(params=[False, True], ids=["plain", "packed"])
    def harness(self, request: pytest.FixtureRequest) -> LogHarness:
        return FaultyHarness(packed=request.param)
