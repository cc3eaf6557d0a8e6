"""What is not damage, whether store and log belong together, and that looking changes nothing."""

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.findings import Findings, StoreState, TopicFindings
from seqdedupe.doctor.salvage import salvage
from seqdedupe.errors import REASONS, ConfigurationError
from seqdedupe.files import UNFINISHED
from seqdedupe.format.headers import VERSION_AT
from seqdedupe.log.embedded import log_folder
from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import control
from seqdedupe.topic.operations import reset_producer
from seqdedupe.topic.policy import GapPolicy, Policy
from tests.doctor.directories import Opened, fingerprint, opened, segments

TOPIC = "persistent://public/default/t"
ROWS = 4


async def publish(data: Opened, batches: int, name: str = "p") -> None:
    for _ in range(batches):
        first = await data.last_sent(TOPIC, name) + 1
        rows = [(name, first + k) for k in range(ROWS)]
        await data.publish(TOPIC, rows, [b"payload %d" % k * 20 for _, k in rows])


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """One topic: a snapshot in the middle, several segments, and a last one that was never covered."""
    async with opened(tmp_path / "data") as data:
        await publish(data, 10)
        await data.topics.get(TOPIC).keeper.snapshot()
        await publish(data, 10)
    return tmp_path / "data"


def looked_at(directory: Path) -> Findings:
    """What is found; nothing is changed by that."""
    before = fingerprint(directory)
    found = examine(directory)
    assert fingerprint(directory) == before
    return found


def only(found: Findings) -> TopicFindings:
    (topic,) = found.topics
    return topic


async def test_a_torn_end_is_named_and_is_no_damage_and_is_left_alone(directory: Path) -> None:
    last = segments(directory)[-1]
    size = last.stat().st_size
    # What was being written when the power went: the group that nobody learned of.
    with last.open("r+b") as file:
        file.truncate(size - 20)
    topic = only(looked_at(directory))
    assert topic.is_whole
    assert topic.torn_end is not None
    assert topic.torn_end.file == last
    assert topic.torn_end.offset + topic.torn_end.size_bytes == size - 20
    assert topic.messages == topic.next_index == 20 * ROWS - ROWS
    # The same in an earlier file is damage.
    first = segments(directory)[0]
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 20)
    topic = only(looked_at(directory))
    (damage,) = topic.damage
    assert damage.file == first
    assert damage.next_index == int(segments(directory)[1].stem)


@pytest.mark.parametrize("from_end", [1, 800], ids=["payload", "columns"])
async def test_a_changed_bit_in_the_last_record_is_no_torn_end(directory: Path, from_end: int) -> None:
    """No later record says that the record was synced, and no snapshot covers it."""
    last = segments(directory)[-1]
    raw = bytearray(last.read_bytes())
    raw[-from_end] ^= 1
    last.write_bytes(raw)
    topic = only(looked_at(directory))
    (damage,) = topic.damage
    assert topic.torn_end is None
    assert damage.file == last
    assert damage.first_index == 19 * ROWS


async def test_a_damaged_payload_is_named_and_not_held(directory: Path) -> None:
    """Its columns say whose messages are gone; the record, and all that was read with it, is released."""
    first = segments(directory)[0]
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    topic = only(looked_at(directory))
    (damage,) = topic.damage
    assert damage.record is None
    (missing,) = topic.missing
    assert missing.messages == (damage.next_index or 0) - damage.first_index == ROWS


async def test_it_knows_what_retention_has_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path, retention_size_in_mb=0) as data:
        await publish(data, 3, "old")
        await publish(data, 30)
        topic = data.topics.get(TOPIC)
        await topic.keeper.snapshot()
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while topic.log.first_index < 3 * ROWS:  # noqa: ASYNC110 (retention goes on beside the snapshot)
                await asyncio.sleep(0.01)
        await publish(data, 2)
    found = looked_at(tmp_path)
    assert found.is_whole
    assert only(found).first_index >= 3 * ROWS
    assert only(found).producers == 2
    shutil.rmtree(tmp_path / "store")
    assert only(looked_at(tmp_path)).producers == 2


async def test_a_store_that_is_lost(directory: Path) -> None:
    shutil.rmtree(directory / "store")
    found = looked_at(directory)
    assert found.store is StoreState.MISSING
    assert not found.is_whole
    assert "--rebuild-store" in found.cures[0]
    assert only(found).is_whole
    assert only(found).name == TOPIC
    async with opened(directory, rebuild_store=True):
        pass
    assert looked_at(directory).is_whole


async def test_a_damaged_store(directory: Path) -> None:
    for path in (directory / "store").glob("*.sst"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 4] ^= 1
        path.write_bytes(raw)
    found = looked_at(directory)
    assert found.store is StoreState.DAMAGED
    assert "damaged" in found.store_why
    assert str(directory / "store" / path.name) in found.store_why
    assert tempfile.gettempdir() + "/seqdedupe-store" not in found.store_why
    assert only(found).is_whole


async def test_a_store_of_another_time(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "earlier")
    async with opened(directory) as data:
        await publish(data, 10)
        await data.topics.get(TOPIC).keeper.snapshot()
    shutil.copytree(directory, tmp_path / "later")
    # An older log under a newer store: what the snapshot covers is not there.
    shutil.rmtree(directory / "logs")
    shutil.copytree(tmp_path / "earlier" / "logs", directory / "logs")
    topic = only(looked_at(directory))
    assert not topic.is_whole
    assert topic.damage[-1].first_index == 20 * ROWS
    assert topic.damage[-1].next_index == 30 * ROWS
    (missing,) = topic.missing
    assert (missing.first_sequence_id, missing.last_sequence_id) == (20 * ROWS, 30 * ROWS - 1)
    # Both histories have grown: the same indexes, other messages.
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "earlier", directory)
    async with opened(directory) as data:
        await publish(data, 12, "another")
        await data.topics.get(TOPIC).keeper.snapshot()
    shutil.rmtree(directory / "store")
    shutil.copytree(tmp_path / "later" / "store", directory / "store")
    topic = only(looked_at(directory))
    assert any("another history" in why for why in topic.disagreements)
    assert any("'another'" in why for why in topic.disagreements)
    # An older store under a newer log is what a crash leaves: the log says the rest.
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "later", directory)
    shutil.rmtree(directory / "store")
    shutil.copytree(tmp_path / "earlier" / "store", directory / "store")
    assert looked_at(directory).is_whole


async def test_a_log_without_record_and_a_record_without_log(directory: Path) -> None:
    (folder,) = (directory / "logs").iterdir()
    shutil.copytree(folder, folder.with_name("17"))
    shutil.rmtree(folder)
    without_record, without_log = looked_at(directory).topics
    assert without_record.incarnation == 17
    assert any("no record of it" in why for why in without_record.disagreements)
    assert any("no log" in why for why in without_log.disagreements)
    assert "leaves this one out" in without_log.cures[0]


async def test_a_log_without_its_secret(directory: Path) -> None:
    (folder,) = (directory / "logs").iterdir()
    (folder / "secret").unlink()
    topic = only(looked_at(directory))
    # The store has it, and the next start writes it again.
    assert topic.is_whole
    assert topic.messages == 20 * ROWS
    assert any("secret" in note for note in topic.notes)
    shutil.rmtree(directory / "store")
    topic = only(looked_at(directory))
    assert not topic.is_whole
    assert topic.messages == 0


@pytest.mark.parametrize("has_secret", [True, False])
async def test_a_log_of_an_earlier_format_is_called_that_and_not_damaged(directory: Path, has_secret: bool) -> None:
    """As opening it would: the first version had no secret."""
    segment = segments(directory)[0]
    raw = bytearray(segment.read_bytes())
    raw[VERSION_AT : VERSION_AT + 4] = (1).to_bytes(4, "little")
    segment.write_bytes(raw)
    shutil.rmtree(directory / "store")
    if not has_secret:
        (segment.parent / "secret").unlink()
    topic = only(looked_at(directory))
    assert any("earlier format version" in why for why in topic.disagreements)
    assert topic.cures == [REASONS["OLDER_FORMAT"].hint]


async def test_a_sector_that_the_disk_cannot_read_is_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = segments(directory)[0]
    really = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        if Path(os.readlink(f"/proc/self/fd/{file}")) == bad and offset <= 1024 < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return really(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    topic = only(looked_at(directory))
    assert topic.damage
    assert all(damage.file == bad for damage in topic.damage)
    assert 0 < topic.messages < 20 * ROWS


@pytest.fixture
def store_in_use(directory: Path) -> Iterator[Store]:
    store = Store.open(directory / "store")
    yield store
    store.close()


async def test_what_a_sidecar_uses_is_not_looked_at(directory: Path, store_in_use: Store, tmp_path: Path) -> None:
    works: list[Callable[[], object]] = [lambda: examine(directory), lambda: salvage(directory, tmp_path / "new")]
    for work in works:
        with pytest.raises(ConfigurationError) as refused:
            await asyncio.to_thread(work)
        assert refused.value.reason == "DIRECTORY_IN_USE"
    assert os.listdir(tmp_path) == ["data"]


async def test_while_it_is_looked_at_no_sidecar_uses_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def try_to_open(examined: Any) -> None:
        with pytest.raises(ConfigurationError) as refused:
            Store.open(directory / "store")
        reasons.append(refused.value.reason)

    examine(directory, try_to_open)
    assert reasons == ["DIRECTORY_IN_USE"]
    Store.open(directory / "store").close()


@pytest.mark.parametrize("what", ["file", "not empty", "within", "unfinished"])
async def test_salvage_refuses_what_is_there(directory: Path, tmp_path: Path, what: str) -> None:
    to = tmp_path / "new"
    if what == "file":
        to.write_bytes(b"")
    elif what == "not empty":
        (to / "mine").mkdir(parents=True)
    elif what == "within":
        to = directory / "new"
    else:
        (tmp_path / f"new{UNFINISHED}").mkdir()
    before = fingerprint(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        await asyncio.to_thread(salvage, directory, to)
    assert refused.value.reason == "DIRECTORY_NOT_EMPTY"
    assert fingerprint(tmp_path) == before
    shutil.rmtree(tmp_path / f"new{UNFINISHED}", ignore_errors=True)
    (tmp_path / "empty").mkdir()
    await asyncio.to_thread(salvage, directory, tmp_path / "empty")


async def test_what_is_copied_keeps_positions_and_policies(directory: Path, tmp_path: Path) -> None:
    policy, other = Policy(gap=GapPolicy.REJECT), Policy(deduplication_entries_interval=17)
    async with opened(directory) as data:
        position = data.topics.get(TOPIC).last_position
        await data.topics.get(TOPIC).set_policy(policy)
        await data.topics.namespaces.change("public/default", lambda before: other)
    made = await asyncio.to_thread(salvage, directory, tmp_path / "new")
    assert [topic.is_copied for topic in made.topics] == [True]
    async with opened(tmp_path / "new") as data:
        assert data.topics.get(TOPIC).last_position == position
        assert data.topics.get(TOPIC).policy == policy
        assert data.topics.namespaces.policy("public/default") == other
        assert await data.persisted(TOPIC, "p") == 20 * ROWS - 1


@pytest.mark.parametrize("is_whole", [True, False])
async def test_one_that_was_leaving_is_copied_or_left_out(directory: Path, tmp_path: Path, is_whole: bool) -> None:
    """As another incarnation it would serve next to the one that the other sidecar may have."""
    last = segments(directory)[-1]
    log_folder.leave(last.parent, log_folder.To("elsewhere:6660", "00"))
    if not is_whole:
        first = segments(directory)[0]
        raw = bytearray(first.read_bytes())
        raw[200] ^= 1
        first.write_bytes(raw)
    made = await asyncio.to_thread(salvage, directory, tmp_path / "new")
    assert [topic.is_copied for topic in made.topics] == [True] * is_whole
    assert made.left_out == ([] if is_whole else [TOPIC])
    async with opened(tmp_path / "new") as data:
        assert [one.record.name for one in data.topics.registry.closed_topics()] == [TOPIC] * is_whole
        assert not data.topics.registry.open_topics()


@pytest.mark.parametrize("snapshot", ["never", "before the reset", "after the reset"])
async def test_a_producer_that_was_reset_goes_on_from_where_it_was_set(tmp_path: Path, snapshot: str) -> None:
    async with opened(tmp_path / "data") as data:
        await publish(data, 8)
        await data.publish(TOPIC, [("p", 2**62)], [b"a mistake"])
        topic = data.topics.get(TOPIC)
        if snapshot == "before the reset":
            await topic.keeper.snapshot()
        assert await reset_producer(topic, "p", 8 * ROWS - 1) == 2**62
        del data.sent[TOPIC, "p"]
        await publish(data, 8)
        if snapshot == "after the reset":
            await topic.keeper.snapshot()
        last = data.sent[TOPIC, "p"]
    assert only(looked_at(tmp_path / "data")).is_whole
    # One record in the middle is gone, so that the topic is written again.
    damaged = segments(tmp_path / "data")[1]
    raw = bytearray(damaged.read_bytes())
    raw[200] ^= 1
    damaged.write_bytes(raw)
    await asyncio.to_thread(salvage, tmp_path / "data", tmp_path / "new")
    async with opened(tmp_path / "new") as data:
        assert await data.persisted(TOPIC, "p") == last == 16 * ROWS - 1


@pytest.mark.parametrize("snapshot", ["never", "before", "after"])
async def test_a_producer_that_was_forgotten_stays_so(tmp_path: Path, snapshot: str) -> None:
    """One of them comes back with IDs from the beginning."""
    async with opened(tmp_path / "data") as data:
        await publish(data, 8)
        await data.publish(TOPIC, [("gone", 5), ("again", 5)], [b"gone", b"again"])
        topic = data.topics.get(TOPIC)
        if snapshot == "before":
            await topic.keeper.snapshot()
        await topic.append_change(control.Purge([b"gone", b"again"]))
        del data.sent[TOPIC, "again"]
        await data.publish(TOPIC, [("again", 2)], [b"from the beginning"])
        await publish(data, 8)
        if snapshot == "after":
            await topic.keeper.snapshot()
    found = only(looked_at(tmp_path / "data"))
    assert (found.is_whole, found.producers) == (True, 2)
    # One record in the middle is gone, so that the topic is written again.
    damaged = segments(tmp_path / "data")[1]
    raw = bytearray(damaged.read_bytes())
    raw[200] ^= 1
    damaged.write_bytes(raw)
    await asyncio.to_thread(salvage, tmp_path / "data", tmp_path / "new")
    async with opened(tmp_path / "new") as data:
        producers = data.topics.get(TOPIC).producers
        assert producers.has_forgotten
        assert not producers.is_known(producers.add(b"gone"))
        assert await data.persisted(TOPIC, "again") == 2
        assert await data.persisted(TOPIC, "gone") == -1
        assert await data.persisted(TOPIC, "p") == 16 * ROWS - 1
