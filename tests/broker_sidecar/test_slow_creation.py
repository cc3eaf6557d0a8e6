"""A topic that takes long to be made, because its disk is slow."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.services.admin_service import in_time
from seqdedupe.errors import InvalidRequestError, UnavailableError
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.policy import Policy


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_creation_that_takes_long_is_said_to_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """It goes on. Anyone who asks again while it does waits for it again, and then hears that the topic is there."""
    data = Data(Config(data_directory=str(tmp_path)), lambda name, state: None)
    topics = data.topics
    assert topics is not None
    await topics.open_all()
    fsync, may_go_on = os.fsync, threading.Event()

    def sync(file: int) -> None:
        assert may_go_on.wait(LAST_RESORT_SECONDS)
        fsync(file)

    async def ask() -> None:
        if partitions:
            await in_time("t", directory.create_partitioned(topics, "t", partitions, Policy()))
        else:
            await in_time("t", topics.create("t"))

    with monkeypatch.context() as patch:
        patch.setattr("broker_sidecar.services.admin_service.CREATION_SECONDS", 0.05)
        patch.setattr(os, "fsync", sync)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="RECOVERING") as caught:
                await ask()
            assert caught.value.retry_delay_ms == 1_000
    may_go_on.set()
    with pytest.raises(InvalidRequestError, match="TOPIC_EXISTS"):
        await ask()
    assert [topic.state for topic in topics.all()] == [State.SERVING] * max(1, partitions)
    assert not asyncio.all_tasks() & {*topics.registry.tasks()}
    await topics.drain()
    await data.close()
