"""The partitions of a topic are made several at once: all of them, or none."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import UnavailableError, error
from seqdedupe.store.parts import LogKind
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory, lives
from seqdedupe.topic.policy import Policy
from tests.topic.test_directory import Process

PARTITIONS = 6


class Held(Process):
    """A process that makes no log before this many have been begun; one of them fails."""

    at_least = 1
    fails = 0
    """The so-manieth; 0: none."""
    shared = False

    def kind(self, told: Callable[[Any], None]) -> Any:
        kind = super().kind(told)
        make = kind.make
        self.begun = self.most = self.now = 0
        enough = asyncio.Event()

        async def made(*arguments: Any) -> Any:
            self.begun += 1
            number = self.begun
            self.now += 1
            self.most = max(self.most, self.now)
            if self.begun >= self.at_least:
                enough.set()
            async with asyncio.timeout(LAST_RESORT_SECONDS):
                await enough.wait()
            try:
                if number == self.fails:
                    raise error("LOG_REFUSED", "a planned failure")
                return await make(*arguments)
            finally:
                self.now -= 1

        kind.make = made  # type: ignore[method-assign, assignment]
        if self.shared:
            kind.log = LogKind.PULSAR
        return kind


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Held]:
    process = Held(tmp_path / "store")
    yield process
    process.store.close()


async def test_partitions_are_made_at_once(process: Held) -> None:
    process.at_least = PARTITIONS
    await process.start()
    await directory.create_partitioned(process.topics, "w", PARTITIONS, Policy(deduplication_entries_interval=7))
    made = process.topics.registry.open_topics()
    assert [topic.policy.deduplication_entries_interval for topic in made] == [7] * PARTITIONS
    assert process.topics.partitions.names("persistent://public/default/w") == [topic.name for topic in made]
    assert sorted(topic.incarnation for topic in made) == [topic.incarnation for topic in made]


async def test_not_more_of_them_than_is_good(process: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MADE_AT_ONCE", 2)
    process.at_least = 2
    await process.start()
    await directory.create_partitioned(process.topics, "w", PARTITIONS, Policy())
    assert (process.begun, process.most) == (PARTITIONS, 2)


async def test_in_a_cluster_one_after_the_other(process: Held) -> None:
    process.shared = True
    await process.start()
    await directory.create_partitioned(process.topics, "w", PARTITIONS, Policy())
    assert (process.begun, process.most) == (PARTITIONS, 1)


@pytest.mark.parametrize("fails", [1, 2, PARTITIONS])
async def test_if_one_cannot_be_made_none_is(process: Held, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MADE_AT_ONCE", 2)
    process.fails = fails
    await process.start()
    with pytest.raises(UnavailableError, match="a planned failure"):
        await directory.create_partitioned(process.topics, "w", PARTITIONS, Policy())
    assert not process.topics.all()
    assert not process.storages
    assert not process.store.topics()
    assert process.begun <= fails + 1
    process.fails = 0
    await directory.create_partitioned(process.topics, "w", PARTITIONS, Policy())
    assert len(process.storages) == PARTITIONS
