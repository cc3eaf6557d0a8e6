"""Connections to a door, closed at a test's end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.broker_sidecar.door.wire import Wire


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
