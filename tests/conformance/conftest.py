"""Sidecars that the cases share, also those that kill them: they start again at once, at the same address."""

from collections.abc import Iterator

import pytest

from seqdedupe.testing import Sidecar


@pytest.fixture(scope="module")
def for_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("for-brokers"), log="broker") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def for_producers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("for-producers")) as sidecar:
        yield sidecar
