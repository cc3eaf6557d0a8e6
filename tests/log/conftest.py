"""Fixtures of the embedded log's tests: logs that are closed at the end, and why a process should have ended."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.log.embedded import writer
from seqdedupe.log.embedded.logs import EmbeddedLogs

MakeLogs = Callable[..., EmbeddedLogs]


@pytest.fixture(autouse=True)
def trials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that has refused may be opened again at once."""
    monkeypatch.setattr(writer, "TRIAL_SECONDS", 0.0)


@pytest.fixture
def fatal() -> list[str]:
    """Why the process should have ended."""
    return []


@pytest.fixture
async def make_logs(tmp_path: Path, fatal: list[str]) -> AsyncIterator[MakeLogs]:
    """Makes logs in `tmp_path / "logs"`, or another folder; all are closed when the test ends."""
    made: list[EmbeddedLogs] = []

    def make(folder: Path | None = None, **keys: Any) -> EmbeddedLogs:
        keys = {"clock_ms": lambda: 1_000, "fatal": fatal.append} | keys
        made.append(EmbeddedLogs(folder or tmp_path / "logs", **keys))
        return made[-1]

    yield make
    for logs in made:
        await logs.close()
