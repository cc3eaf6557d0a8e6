"""One window of deduplication IDs for all partitions of a topic, on a real sidecar. About 20 s, one process."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from seqdedupe import exports
from seqdedupe.cli.commands import cli
from seqdedupe.client import Client, Verdict, admin
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.exports import KnownId
from seqdedupe.figures import counted
from seqdedupe.names import partition_name, partition_of, topic_name
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2

IDS = [b"%04d" % k for k in range(600)]
PARTITIONS = 5


@pytest.fixture(autouse=True)
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two partitions, and the last one of one."""
    monkeypatch.setattr(admin, "AT_ONCE", 2)


@pytest.fixture
def window(tmp_path: Path) -> Path:
    exports.write_window(tmp_path / "window", [KnownId(one, 1_000 + k) for k, one in enumerate(IDS)])
    return tmp_path / "window"


@pytest.fixture
async def client(sidecar: Sidecar) -> AsyncIterator[Client]:
    async with Client(sidecar.address) as client:
        yield client


async def create(client: Client, topic: str, route: str = "id") -> list[str]:
    await client.admin.create_topic(
        topic, partitions=PARTITIONS, deduplication_mode="deduplication-id", deduplication_route=route
    )
    return [partition_name(topic_name(topic), k) for k in range(PARTITIONS)]


async def imported(client: Client, names: list[str]) -> list[int]:
    return [(await client.admin.topic(name)).window_imported for name in names]


def expected() -> list[int]:
    of_ids = [partition_of(one, b"", PARTITIONS) for one in IDS]
    return [of_ids.count(k) for k in range(PARTITIONS)]


async def check(client: Client, topic: str, new: bytes, **more: Any) -> None:
    """Copies of all are known, what is new is new."""
    async with client.publisher(topic) as publisher:
        result = await publisher.send_batch([b"x"] * (len(IDS) + 1), [*IDS, new], **more)
    assert result.verdicts.tolist() == [Verdict.DUP] * len(IDS) + [Verdict.NOT_DUP]
    assert result.imported.tolist() == [True] * len(IDS) + [False]


async def test_each_partition_gets_what_belongs_there(client: Client, topic: str, window: Path, tmp_path: Path) -> None:
    names = await create(client, topic)
    assert await client.admin.import_window(topic, window) == len(IDS)
    assert await imported(client, names) == expected()
    assert (await client.admin.topic(topic)).window_imported == len(IDS)
    await check(client, topic, b"new")
    assert await client.admin.import_window(topic, window) == len(IDS), "the same again"
    await check(client, topic, b"newer")
    exports.write_window(tmp_path / "other", [KnownId(b"x", 1)])
    with pytest.raises(InvalidRequestError, match="another one was"):
        await client.admin.import_window(topic, tmp_path / "other")


async def test_the_command_takes_the_name_of_the_whole(
    sidecar: Sidecar, client: Client, topic: str, window: Path
) -> None:
    await create(client, topic)
    # It runs its own loop.
    done = CliRunner().invoke(cli, ["import", topic, str(window), "--address", sidecar.address], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "a window of 600 deduplication IDs is in force\n")
    await check(client, topic, b"new")


@pytest.mark.parametrize("is_in", [False, True])
async def test_broken_off_at_any_partition_the_same_file_completes_it(
    client: Client, topic: str, window: Path, is_in: bool
) -> None:
    """Whether the last part that was sent is in force or not, which nobody knows."""
    counts = expected()
    for broken in range(PARTITIONS):
        name = f"{topic}-{broken}"
        names = await create(client, name)

        async def bring(one: str, part: Path, last: str = names[broken]) -> int:
            if one == last and not is_in:
                raise error("OUTCOME_UNKNOWN", "the wire broke")
            ids = await client.admin.import_window(one, part)
            if one == last:
                raise error("OUTCOME_UNKNOWN", "the wire broke")
            return ids

        with pytest.raises(SeqdedupeError) as raised:
            await admin.import_dealt_window(await client.admin.topic(name), window, client.admin.topic, bring)
        assert raised.value.reason == "OUTCOME_UNKNOWN"
        before = counted(broken, "partition")
        assert f"{names[broken]}: the wire broke (in force in {before} before it)" in str(raised.value)
        assert "import the same file again" in raised.value.hint
        is_there = broken + is_in
        assert await imported(client, names) == counts[:is_there] + [0] * (PARTITIONS - is_there)
        assert await client.admin.import_window(name, window) == len(IDS)
        assert await imported(client, names) == counts
        await check(client, name, b"new")


async def test_control_parts_that_are_not_the_same_again_are_refused(
    client: Client, topic: str, window: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(client, topic)
    await client.admin.import_window(topic, window)
    monkeypatch.setattr(exports, "WINDOW_BLOCK_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match="another one was"):
        await client.admin.import_window(topic, window)


async def test_a_partition_with_messages_is_found_before_anything_is_in_force(
    client: Client, topic: str, window: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "AT_ONCE", PARTITIONS)
    names = await create(client, topic)
    async with client.publisher(topic) as publisher:
        await publisher.send(b"x", deduplication_id=next(one for one in IDS if partition_of(one, b"", PARTITIONS) == 3))
    with pytest.raises(InvalidRequestError, match="partition-3: it has messages") as raised:
        await client.admin.import_window(topic, window)
    assert raised.value.reason == "TOPIC_IN_USE"
    assert await imported(client, names) == [0] * PARTITIONS


async def test_a_partition_to_which_no_id_belongs_is_left_alone(client: Client, topic: str, tmp_path: Path) -> None:
    names = await create(client, topic)
    exports.write_window(tmp_path / "window", [KnownId(IDS[0], 1)])
    for _ in range(2):
        assert await client.admin.import_window(topic, tmp_path / "window") == 1
        async with client.publisher(topic) as publisher:
            result = await publisher.send_batch([b"x"] * len(IDS), IDS)
        assert result.imported.tolist() == [True] + [False] * (len(IDS) - 1)
    here = partition_of(IDS[0], b"", PARTITIONS)
    assert await imported(client, names) == [int(k == here) for k in range(PARTITIONS)]


async def test_by_key_the_whole_file_goes_into_each(client: Client, topic: str, window: Path) -> None:
    names = await create(client, topic, "key")
    with pytest.raises(InvalidRequestError, match="find their partitions by their keys") as raised:
        await client.admin.import_window(topic, window)
    assert raised.value.reason == "INVALID_REQUEST"
    assert f"seqdedupe import {names[0]} FILE" in raised.value.hint
    assert await imported(client, names) == [0] * PARTITIONS
    for name in names:
        assert await client.admin.import_window(name, window) == len(IDS)
    await check(client, topic, b"new", keys=[b"%d" % k for k in range(len(IDS) + 1)])


async def test_into_a_topic_of_sequence_ids_nothing_goes(client: Client, topic: str, window: Path) -> None:
    await client.admin.create_topic(topic, partitions=PARTITIONS)
    with pytest.raises(InvalidRequestError, match="is one of sequence IDs"):
        await client.admin.import_window(topic, window)


async def test_while_it_is_not_known_whether_ids_lead_to_partitions_it_waits(client: Client, window: Path) -> None:
    """As long as its partitions have not read their logs."""
    recovering = admin_pb2.Topic(name=topic_name("t"), partitions=PARTITIONS)
    with pytest.raises(UnavailableError) as raised:
        await admin.import_dealt_window(recovering, window, client.admin.topic, client.admin.import_window)
    assert raised.value.reason == "RECOVERING"


async def test_control_ids_that_go_elsewhere_are_missed(
    client: Client, topic: str, window: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(client, topic)
    monkeypatch.setattr(admin, "partition_of", lambda one, name, partitions: partition_of(one + b"!", name, partitions))
    await client.admin.import_window(topic, window)
    with pytest.raises(AssertionError):
        await check(client, topic, b"new")
