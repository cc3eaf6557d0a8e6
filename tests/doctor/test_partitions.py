"""Partitions in a data directory: how many there are is known without the store, and none is missing unseen."""

import asyncio
import shutil
from pathlib import Path

import pytest

from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.salvage import salvage
from seqdedupe.errors import DamagedError
from seqdedupe.log.contract import LogName
from seqdedupe.log.embedded.log_folder import TOPIC_FILE
from seqdedupe.log.embedded.logs import said_by
from seqdedupe.topic import directory as directory_module
from seqdedupe.topic.policy import Policy
from tests.doctor.directories import Opened, opened

WHOLE = "persistent://public/default/w"
PARTS = [f"{WHOLE}-partition-{k}" for k in range(3)]


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """One topic of three partitions, with a message in each."""
    async with opened(tmp_path / "data") as data:
        await directory_module.create_partitioned(data.topics, WHOLE, 3, Policy())
        for k, name in enumerate(PARTS):
            await data.publish(name, [("p", k)], [b"payload %d" % k])
    return tmp_path / "data"


def folder(directory: Path, partition: int) -> Path:
    """That of a partition's log: they are made in order."""
    return sorted((directory / "logs").iterdir())[partition]


async def check_whole(data: Opened) -> None:
    assert data.topics.partitions.names(WHOLE) == PARTS
    for k, name in enumerate(PARTS):
        assert [m.payload for m in await data.messages(name)] == [b"payload %d" % k]
    assert {record.partitions for record in data.topics.store.topics()} == {3}


async def test_without_the_store_the_logs_say_it(directory: Path) -> None:
    assert said_by(folder(directory, 1)) == (PARTS[1], 3)
    shutil.rmtree(directory / "store")
    assert [topic.partitions for topic in examine(directory).topics] == [3, 3, 3]
    async with opened(directory, rebuild_store=True) as data:
        await check_whole(data)
    found = examine(directory)
    assert found.is_whole
    assert [topic.to_json()["partitions"] for topic in found.topics] == [3, 3, 3]


@pytest.mark.parametrize(
    "said", [PARTS[1], f"{PARTS[1]}\n3 partitions", f"{PARTS[1]}\n3", f"{PARTS[1]}\n0 partitions\n", f"{PARTS[1]}\n\n"]
)
async def test_a_log_that_says_something_else_is_no_other_topic(directory: Path, said: str) -> None:
    """Cut anywhere, or written by hand: it is found, and only a name alone is a topic without partitions."""
    (folder(directory, 1) / TOPIC_FILE).write_text(said)
    found = examine(directory)
    assert [topic.is_whole for topic in found.topics] == [True, False, True]
    if said == PARTS[1]:
        assert said_by(folder(directory, 1)) == (PARTS[1], 0)
        assert "one of 3 partitions" in found.topics[1].disagreements[0]
    else:
        with pytest.raises(DamagedError, match="does not say the name of a topic"):
            said_by(folder(directory, 1))


async def test_a_partition_that_is_missing_is_named(directory: Path) -> None:
    shutil.rmtree(folder(directory, 1))
    shutil.rmtree(directory / "store")
    async with opened(directory, rebuild_store=True) as data:
        there = directory_module.partitions_of(data.topics, WHOLE)
        assert [topic is None for topic in there] == [False, True, False]
    found = examine(directory)
    assert not found.is_whole
    assert all("these are not there: 1" in topic.disagreements[0] for topic in found.topics)


@pytest.mark.parametrize("damaged", [False, True], ids=["copied", "written-anew"])
async def test_salvage_keeps_how_many_there_are(directory: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        [segment] = folder(directory, 2).glob("*.log")
        raw = segment.read_bytes()
        place = raw.index(b"payload 2")
        segment.write_bytes(raw[:place] + b"PAYLOAD" + raw[place + 7 :])
    await asyncio.to_thread(salvage, directory, tmp_path / "new")
    assert {topic.partitions for topic in examine(tmp_path / "new").topics} == {3}
    async with opened(tmp_path / "new") as data:
        assert data.topics.partitions.names(WHOLE) == PARTS
        assert len(await data.messages(PARTS[2])) == (not damaged)
        logs = await data.topics.kind.list()
        assert sorted((log.topic, log.partitions) for log in logs) == [(name, 3) for name in PARTS]
    assert LogName(1, WHOLE).partitions == 0
