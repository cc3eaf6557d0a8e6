"""Windows of deduplication IDs that are imported into a real sidecar: killed, restored, moved, its store lost. 20 s."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe import exports
from seqdedupe.client import Verdict
from seqdedupe.client.blocking import Client
from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.salvage import salvage
from seqdedupe.errors import InvalidRequestError, OutcomeUnknownError, SeqdedupeError
from seqdedupe.exports import KnownId
from seqdedupe.testing import Sidecar
from seqdedupe.transfer.backup import restore
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.kill_transfers import Dying, settings
from tests.broker_sidecar.moving_pair import TOPIC, pair

StartSidecar = Callable[..., Sidecar]

IDS = 3000
IMPORTED = admin_pb2.MESSAGE_STATE_IMPORTED


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "window"
    now_ms = time.time_ns() // 1_000_000
    exports.write_window(path, (KnownId(b"old %06d" % k, now_ms - k) for k in range(IDS)))
    return path


def create(client: Client, topic: str) -> None:
    client.admin.create_topic(topic, deduplication_mode="deduplication-id")


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(SeqdedupeError) as raised:
        call()
    return raised.value.reason


def check(client: Client, topic: str, *, new: bytes) -> None:
    """Copies of what was imported are known, and what is new is new, once."""
    with client.publisher(topic) as publisher:
        old = [b"old %06d" % k for k in range(IDS)]
        result = publisher.send_batch([b"x"] * (IDS + 2), [*old, new, new])
        assert result.verdicts.tolist() == [Verdict.DUP] * IDS + [Verdict.NOT_DUP, Verdict.DUP]
        assert result.imported.tolist() == [True] * IDS + [False] * 2
        assert result.indexes[IDS] == result.indexes[IDS + 1] >= 0
        assert (result.indexes[:IDS] == -1).all()
        one = publisher.send(b"x", deduplication_id=old[7])
        assert (one.verdict, one.is_imported, one.index, one.message_id) == (Verdict.DUP, True, -1, None)


def test_a_topic_that_takes_over_knows_what_was_before(
    start_sidecar: StartSidecar, window: Path, tmp_path: Path
) -> None:
    (tmp_path / "backups").mkdir()
    sidecar = start_sidecar(backup_directory=tmp_path / "backups")
    with Client(sidecar.address) as client:
        create(client, "t")
        client.admin.create_topic("by-sequence")
        assert refusal(lambda: client.admin.import_window("by-sequence", window)) == "INVALID_REQUEST"
        assert refusal(lambda: client.admin.import_window("nowhere", window)) == "TOPIC_NOT_FOUND"
        assert client.admin.import_window("t", window) == IDS
        check(client, "t", new=b"first")
        assert client.admin.import_window("t", window) == IDS, "the same again"
        other = tmp_path / "other"
        exports.write_window(other, [KnownId(b"x", 1)])
        assert refusal(lambda: client.admin.import_window("t", other)) == "TOPIC_IN_USE"
        create(client, "used")
        check_used(client, window)
        client.admin.backup("one")
        found = client.admin.topic("t")
        assert (found.window_imported, found.window_imported_missing, found.window_messages) == (IDS, False, 1)
        sidecar.restart()
        check(client, "t", new=b"second")
        client.admin.rebuild_topic("t")
        check(client, "t", new=b"third")
        client.admin.delete_topic("t")
        create(client, "t")
        with client.publisher("t") as publisher:
            assert publisher.send(b"x", deduplication_id=b"old 000001").verdict is Verdict.NOT_DUP, "another topic"
    restore(tmp_path / "backups" / "one", tmp_path / "restored" / "data")
    with Sidecar(tmp_path / "restored") as restored, Client(restored.address) as client:
        check(client, "t", new=b"second")


def check_used(client: Client, window: Path) -> None:
    with client.publisher("used") as publisher:
        publisher.send(b"x", deduplication_id=b"x")
    assert refusal(lambda: client.admin.import_window("used", window)) == "TOPIC_IN_USE"


@pytest.fixture
def at(start_sidecar: StartSidecar, tmp_path: Path) -> Iterator[Dying]:
    dying = Dying(start_sidecar(**settings(tmp_path)), tmp_path)
    yield dying
    dying.close()


STEPS = [
    ("log sync", 3, True),  # the store has two, of its own file
    ("store write", 2, False),
    ("store write", 4, False),
    ("store sync", 1, False),
    ("log sync", 2, False),
]


def test_kill_9_in_an_import_leaves_all_or_nothing(at: Dying, window: Path) -> None:
    checksum, *blocks = exports.read_window(window)

    def bring(topic: str) -> None:
        requests = [admin_pb2.ImportWindowRequest(topic=topic, checksum=checksum)]
        requests += [admin_pb2.ImportWindowRequest(block=block) for block in blocks]
        at.client.admin.ImportWindow(iter([*requests, admin_pb2.ImportWindowRequest(ids=IDS)]))

    with Client(at.sidecar.address) as client:
        for step, count, is_in in STEPS:
            topic = f"{step}-{count}".replace(" ", "-")
            create(client, topic)
            assert at.died_in(step, count, lambda topic=topic: bring(topic)), (step, count)  # type: ignore[misc]
            assert at.topic(topic).state == admin_pb2.TOPIC_STATE_SERVING
            assert at.topic(topic).window_imported == (IDS if is_in else 0), (step, count)
            state = client.admin.message_state(topic, deduplication_id=b"old 000001").state
            assert (state == IMPORTED) == is_in
            assert client.admin.import_window(topic, window) == IDS
            check(client, topic, new=b"new")


def test_with_the_store_lost_nothing_is_taken_until_it_is_imported_again(
    start_sidecar: StartSidecar, window: Path, tmp_path: Path
) -> None:
    sidecar = start_sidecar()
    with Client(sidecar.address) as client:
        create(client, "t")
        client.admin.import_window("t", window)
        check(client, "t", new=b"first")
        sidecar.stop()
        found = examine(sidecar.data)
        (topic,) = found.topics
        assert (found.is_whole, topic.imported_ids, topic.imported_why) == (True, IDS, "")
        shutil.rmtree(sidecar.data / "store")
        sidecar.keys["rebuild_store"] = True
        sidecar.start()
        assert client.admin.topic("t").window_imported_missing
        with client.publisher("t", delivery_timeout_seconds=2) as publisher, pytest.raises(OutcomeUnknownError) as told:
            publisher.send(b"x", deduplication_id=b"never seen")
        assert "imported" in str(told.value)
        assert "Import the same file again" in told.value.hint
        other = tmp_path / "other"
        exports.write_window(other, [KnownId(b"x", 1)])
        with pytest.raises(InvalidRequestError, match=windows_checksum(window)):
            client.admin.import_window("t", other)
        sidecar.stop()
        del sidecar.keys["rebuild_store"]
        found = examine(sidecar.data)
        assert not found.is_whole
        assert found.topics[0].imported_why
        assert found.topics[0].has_whole_log
        sidecar.start()
        assert client.admin.topic("t").window_imported_missing, "also without being told to rebuild"
        assert client.admin.import_window("t", window) == IDS
        check(client, "t", new=b"second")
        sidecar.stop()
    salvage(sidecar.data, tmp_path / "salvaged" / "data")
    with Sidecar(tmp_path / "salvaged") as salvaged, Client(salvaged.address) as client:
        check(client, "t", new=b"third")


def windows_checksum(path: Path) -> str:
    return next(exports.read_window(path)).hex()


async def test_it_goes_with_a_topic_that_is_moved(window: Path, tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        old, new = two.old.client, two.new.client
        await old.admin.create_topic(TOPIC, deduplication_mode="deduplication-id")
        await old.admin.import_window(TOPIC, window)
        await old.admin.move_topic(TOPIC, two.new.address)
        assert (await new.admin.topic(TOPIC)).window_imported == IDS
        async with new.publisher(TOPIC) as publisher:
            result = await publisher.send_batch([b"x"] * 3, [b"old 000001", b"old 002999", b"new"])
            assert result.verdicts.tolist() == [Verdict.DUP, Verdict.DUP, Verdict.NOT_DUP]
        await two.new.restart()
        async with new.publisher(TOPIC) as publisher:
            assert (await publisher.send(b"x", deduplication_id=b"old 000002")).is_imported
