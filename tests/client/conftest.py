"""Fixtures of the client's tests."""

import itertools
from collections.abc import Iterator

import pytest

from tests.sidecar import Sidecar

_topics = itertools.count()


@pytest.fixture(scope="session")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for all tests that do not harm it; each uses a topic of its own."""
    with Sidecar(tmp_path_factory.mktemp("shared-sidecar")) as sidecar:
        yield sidecar


@pytest.fixture
def topic() -> str:
    """The name of a topic that nobody else uses."""
    return f"topic-{next(_topics)}"
