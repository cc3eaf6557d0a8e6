"""What a data directory holds, opened: what goes on beside serving."""

import asyncio
from pathlib import Path

import pytest

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe.core.moment import LOOKS
from seqdedupe.topic import clock
from tests.client.helpers import until


async def test_the_clock_is_looked_at_for_all_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing is ever forgotten by time; and a topic's clock is the process's, however new the topic is."""
    monkeypatch.setattr(clock, "LOOK_SECONDS", 0.001)
    data = Data(Config(data_directory=str(tmp_path)), lambda name, state: None)
    assert data.topics is not None
    await data.topics.open_all()
    early = await data.topics.create("early")
    for _ in range(2 * LOOKS):
        await asyncio.sleep(0.001)
    assert early.now().earliest_ms == 0, "nobody has looked yet"
    data.begin_looking()
    await until(lambda: early.now().earliest_ms > 0)
    late = await data.topics.create("late")
    assert late.now().earliest_ms > 0
    await data.topics.drain()
    await data.close()
