"""Stores for tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.store import parts, snapshots
from seqdedupe.store.db import Store

SMALL_PAGE = 4
SMALL_MAX_DELTAS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = Store.open(folder)
    yield store
    store.close()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few producers, compacted after few deltas."""
    for module in (parts, snapshots, snapshots):
        monkeypatch.setattr(module, "PAGE_PRODUCERS", SMALL_PAGE)
    monkeypatch.setattr(snapshots, "MAX_DELTAS", SMALL_MAX_DELTAS)
    monkeypatch.setattr(snapshots, "DELTAS_A_STEP", 2)
    monkeypatch.setattr(snapshots, "PAGES_A_FLUSH", 2)
