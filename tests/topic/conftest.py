"""A topic for a test, on a log that does what the test says."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.store.db import Store
from tests.topic.scene import Scene


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = Store.open(tmp_path / "store")
    scene = Scene(store)
    await scene.start()
    yield scene
    await scene.topic.close("")
    store.close()
