"""Fixtures that every test may use: real sidecars, as processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sidecar import Sidecar

StartSidecar = Callable[..., Sidecar]


@pytest.fixture
def start_sidecar(tmp_path: Path) -> Iterator[StartSidecar]:
    """Starts sidecars, each with a data directory of its own; they are gone when the test ends."""
    started: list[Sidecar] = []

    def start(**keys: object) -> Sidecar:
        sidecar = Sidecar(tmp_path / f"sidecar-{len(started)}", **keys)
        started.append(sidecar)
        sidecar.start()
        return sidecar

    yield start
    for sidecar in started:
        sidecar.kill()


@pytest.fixture
def sidecar(start_sidecar: StartSidecar) -> Sidecar:
    """A sidecar that serves."""
    return start_sidecar()
