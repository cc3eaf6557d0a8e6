"""Fixtures of the tests over the wire: a sidecar shared by a module's tests, and a topic for each of them."""

from collections.abc import Iterator

import pytest

from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("shared")) as sidecar:
        yield sidecar


@pytest.fixture
def client(shared: Sidecar) -> Iterator[Client]:
    """A client of the shared sidecar."""
    client = Client(shared.address)
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test alone."""
    return "t" + "".join(c if c.isalnum() and c.isascii() else "-" for c in request.node.name)[:200]
