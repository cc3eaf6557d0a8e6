"""What a data directory holds, opened: what goes on while it serves."""

import asyncio
from pathlib import Path

import pytest

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe.core.id_window import Moment
from seqdedupe.limits import Retention
from seqdedupe.topic import clock
from seqdedupe.topic.clock import LOOKS
from seqdedupe.topic.frame import NumbersCache
from seqdedupe.topic.operations import open_sessions
from tests.batches import batch
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
    assert early.ids.now().earliest_ms == 0, "nobody has looked yet"
    data.begin_looking()
    await until(lambda: early.ids.now().earliest_ms > 0)
    late = await data.topics.create("late")
    assert late.ids.now().earliest_ms > 0
    await data.topics.drain()
    await data.close()


@pytest.mark.parametrize("looks", [True, False])
async def test_retention_by_time_goes_on_where_no_messages_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """After the last message, and its snapshot, nothing happens on the topic. In the control arm nobody looks."""
    monkeypatch.setattr("broker_sidecar.data.RETENTION_SECONDS", 0.001 if looks else 1e6)
    now_ms = 1_700_000_000_000
    monkeypatch.setattr("seqdedupe.log.embedded.logs.wall_ms", lambda: now_ms)
    for module in ("reader", "log"):
        monkeypatch.setattr(f"seqdedupe.log.embedded.{module}.steady_ms", lambda: now_ms - 1_600_000_000_000)
    data = Data(Config(data_directory=str(tmp_path), default_retention_time_in_minutes=60), lambda name, state: None)
    assert data.topics is not None
    monkeypatch.setattr(data._clock, "now", lambda: Moment(now_ms, now_ms))
    await data.topics.open_all()
    topic = await data.topics.create("quiet")
    data.begin_looking()
    epoch = (await open_sessions(topic, ["p"], None)).epochs[0]
    for i in range(3):
        encoded = batch([("p", i)], epochs={"p": epoch}, links={"p": i - 1}).encode()
        topic.admit(encoded, 1, lambda answer: None, NumbersCache())
        await topic.all_settled()
        await topic.keeper.snapshot()
        now_ms += 20 * 60_000
        asked = await topic.log.may_trim_to(topic.keeper.snapshot_index, Retention(age_ms=3_600_000))
        assert asked == topic.log.first_index == 0
    assert topic.next_index == 3
    now_ms += 10 * 60_000
    if looks:
        await until(lambda: topic.log.first_index == 1)
        now_ms += 1000 * 60 * 60_000
        await until(lambda: topic.log.first_index == 2)
    else:
        await asyncio.sleep(0.1)
    assert topic.log.first_index == (2 if looks else 0)
    await data.topics.drain()
    await data.close()
