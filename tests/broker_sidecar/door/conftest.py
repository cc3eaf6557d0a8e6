"""A sidecar with a door, shared by a module's tests; and connections to doors, closed at a test's end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from seqdedupe.testing import Sidecar
from tests.broker_sidecar.door.wire import Wire


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with a door, that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("door"), pulsar_listen="127.0.0.1:0") as sidecar:
        yield sidecar


@pytest.fixture
def open_wire() -> Iterator[Callable[..., Wire]]:
    """Does what `Wire` does."""
    wires: list[Wire] = []

    def opened(*how: Any, **more: Any) -> Wire:
        wires.append(Wire(*how, **more))
        return wires[-1]

    yield opened
    for wire in wires:
        wire.close()
