"""Backups of a sidecar that runs: whole and of one moment, no matter what happens meanwhile; or refused, or gone."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from seqdedupe.client import Client as AsyncClient
from seqdedupe.client import DataLossError, PositionError
from seqdedupe.doctor.examine import examine
from seqdedupe.errors import DamagedError
from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.store import directories
from seqdedupe.testing import Sidecar
from seqdedupe.transfer.backup import check, parts_of, restore
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.backup_campaign import round_, settings
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch, payload_of, refused, status, verdicts
from tests.broker_sidecar.pausing import Pause, paused, wait_for

SERVING = admin_pb2.TOPIC_STATE_SERVING

StartSidecar = Callable[..., Sidecar]


class At:
    """A sidecar that makes backups in `backups`, and a client of it."""

    def __init__(self, sidecar: Sidecar, backups: Path) -> None:
        self.sidecar = sidecar
        self.backups = backups
        self.client = Client(sidecar.address)

    def begin(self, name: str) -> Any:
        return self.client.admin.Backup(admin_pb2.BackupRequest(name=name), timeout=TIMEOUT_SECONDS)

    def backup(self, name: str) -> admin_pb2.BackupResponse:
        last: admin_pb2.BackupResponse
        *_, last = self.begin(name)
        assert last.directory == str(self.backups / name)
        return last

    def create(self, topic: str, **values: Any) -> None:
        policy = admin_pb2.TopicPolicy(**values)
        self.client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, policy=policy))

    def fill(self, topic: str, first: int, count: int, epochs: dict[str, int] | None = None) -> dict[str, int]:
        """Messages of a kilobyte and more, each a batch: eight make a segment of `pausing`."""
        epochs = epochs or self.client.epochs(topic, "p")
        for i in range(first, first + count):
            rows = [("p", i)]
            self.client.publish_unary(topic, batch(rows, epochs, {"p": i - 1}, payloads=[payload(i)]))
        return epochs

    def snapshot(self, topic: str) -> None:
        self.client.admin.Snapshot(admin_pb2.SnapshotRequest(topic=topic))

    def close(self) -> None:
        self.client.close()


def payload(i: int) -> bytes:
    return payload_of("p", i) + bytes(1000)


def ids(client: Client, topic: str) -> list[int]:
    return [i for record in client.records(topic) for i in record.batch.sequence_ids]


@pytest.fixture
def start_at(start_sidecar: StartSidecar, tmp_path: Path) -> Iterator[Callable[..., At]]:
    started: list[At] = []

    def start(bug: str = "", **keys: Any) -> At:
        sidecar = start_sidecar(**settings(tmp_path, bug=bug) | keys)
        started.append(At(sidecar, tmp_path / "backups"))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def usual(start_sidecar: StartSidecar, tmp_path: Path) -> Iterator[At]:
    """As a user's sidecar is, which starts sooner."""
    (tmp_path / "backups").mkdir()
    at = At(start_sidecar(backup_directory=tmp_path / "backups"), tmp_path / "backups")
    yield at
    at.close()


@pytest.fixture
def at(start_at: Callable[..., At]) -> At:
    return start_at()


def restored(at: At, name: str, to: Path) -> Sidecar:
    """A sidecar on what a backup has, to be started."""
    restore(at.backups / name, to / "data")
    return Sidecar(to)


# -- what happens meanwhile -----------------------------------------------------------------------------------------


def test_at_random_moments_under_load(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    round_(tmp_path, 4, seed)


def meanwhile(at: At, pause: Pause, bug: str = "") -> admin_pb2.BackupResponse:
    """A backup of the moment with ten messages in "rolled" and "trimmed", and one in "deleted" and its like; each log
    becomes something else before it is copied."""
    at.create("trimmed")
    at.client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="parts", partitions=2))
    rolled, trimmed = at.fill("rolled", 0, 10), at.fill("trimmed", 0, 10)
    at.fill("deleted", 0, 1)
    at.snapshot("trimmed")
    call = at.begin("b")
    pause.wait()
    at.fill("rolled", 10, 20, rolled)
    at.fill("trimmed", 10, 20, trimmed)
    for topic in ("deleted", "parts"):
        at.client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=topic))
    at.fill("created", 0, 1)
    policy = admin_pb2.TopicPolicy(retention_size_in_mb=0)
    at.client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="trimmed", policy=policy))
    at.snapshot("rolled")
    at.snapshot("trimmed")
    if bug == "nothing kept":
        wait_for(lambda: at.client.topic("trimmed").first_index > 10)
    pause.go_on()
    made: list[admin_pb2.BackupResponse] = list(call)
    return made[-1]


def test_it_is_of_one_moment(at: At, tmp_path: Path) -> None:
    with paused(tmp_path) as pause:
        last = meanwhile(at, pause)
    assert (last.topics, list(last.damaged), list(last.left_out)) == (2, [], [])
    # Retention goes on by itself.
    wait_for(lambda: at.client.topic("trimmed").first_index > 10)
    assert examine(at.backups / "b").is_whole
    with restored(at, "b", tmp_path / "r") as sidecar:
        client = Client(sidecar.address)
        topics = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
        assert [(one.name.rpartition("/")[2], one.state) for one in topics] == [
            ("rolled", SERVING),
            ("trimmed", SERVING),
        ]
        for topic in ("rolled", "trimmed"):
            assert ids(client, topic) == list(range(10))
            epochs = client.epochs(topic, "p")
            again = client.publish_unary(topic, batch([("p", 9), ("p", 10)], epochs, {"p": 8}))
            assert verdicts(again, 2) == [2, 1]
        client.close()


def test_a_topic_that_is_being_deleted_is_whole_or_missing(start_at: Callable[..., At], tmp_path: Path) -> None:
    """Where the deletion began before the copy, the copy may lack files that nobody misses."""
    at = start_at("half deleted")
    at.fill("deleted", 0, 1)
    with paused(tmp_path) as pause:
        call = at.begin("b")
        pause.wait()
        delete = at.client.admin.DeleteTopic.future(admin_pb2.DeleteTopicRequest(topic="deleted"))
        pause.go_on()
        *_, last = call
    delete.result(TIMEOUT_SECONDS)
    assert (list(last.damaged), list(last.left_out)) == ([], [])
    assert examine(at.backups / "b").is_whole
    with restored(at, "b", tmp_path / "r") as sidecar:
        client = Client(sidecar.address)
        topics = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
        assert [one.state for one in topics] == [SERVING] * last.topics
        for one in topics:
            assert ids(client, one.name) == [0]
        client.close()


@pytest.mark.parametrize("bug", ["nothing kept", "logs first"])
def test_control_without_its_order_it_is_not_whole(start_at: Callable[..., At], tmp_path: Path, bug: str) -> None:
    """Where retention goes on a log has a hole, and where the store is read after the logs it knows more than they."""
    at = start_at(bug)
    with paused(tmp_path) as pause:
        last = meanwhile(at, pause, bug)
    if bug == "nothing kept":
        assert [fault.topic.rpartition("/")[2] for fault in last.left_out] == ["trimmed"]
    assert not examine(at.backups / "b").is_whole


def test_control_files_copied_while_it_runs_are_no_backup(at: At, tmp_path: Path) -> None:
    epochs = at.fill("t", 0, 10)
    copy = tmp_path / "copy" / "data"
    shutil.copytree(at.sidecar.data / "logs", copy / "logs")
    at.fill("t", 10, 10, epochs)
    at.snapshot("t")
    shutil.copytree(at.sidecar.data / "store", copy / "store")
    assert not examine(copy).is_whole


# -- broken off -----------------------------------------------------------------------------------------------------


def test_killed_half_way_it_is_no_backup(at: At, tmp_path: Path) -> None:
    at.fill("t", 0, 10)
    with paused(tmp_path) as pause:
        call = at.begin("b")
        pause.wait()
        at.sidecar.kill()
        with pytest.raises(grpc.RpcError):
            list(call)
    [unfinished] = at.backups.iterdir()
    assert unfinished.name == "b.unfinished"
    with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
        check(unfinished)
    at.sidecar.start()
    at.backup("b")
    assert [path.name for path in at.backups.iterdir()] == ["b"]
    check(at.backups / "b")


def test_given_up_nothing_is_left_of_it(at: At, tmp_path: Path) -> None:
    at.fill("t", 0, 10)
    with paused(tmp_path) as pause:
        call = at.begin("b")
        pause.wait()
        call.cancel()
        pause.go_on()
        wait_for(lambda: not any(at.backups.iterdir()))
    at.backup("b")


def test_a_sidecar_that_drains_gives_it_up(at: At, tmp_path: Path) -> None:
    at.fill("t", 0, 10)
    with paused(tmp_path) as pause:
        call = at.begin("b")
        pause.wait()
        at.sidecar.signal(15)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert status(caught.value).reason == "DRAINING"
        pause.go_on()
        assert at.sidecar.wait() == 0
    assert not (at.backups / "b").exists()


def test_a_full_disk_refuses_it_and_disturbs_nobody(
    start_at: Callable[..., At], small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    """The disk is another one than that of the data, too."""
    disk = tmp_path / "disk"
    small_disk(disk)
    at = start_at(backup_directory=disk)
    at.backups = disk
    epochs = at.fill("t", 0, 10)
    at.backup("first")
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        fill_up(ballast)
    at.fill("t", 10, 10, epochs)
    answer = refused(lambda: list(at.begin("b")))
    assert answer.reason == "BACKUP_FAILED"
    wait_for(lambda: {path.name for path in disk.iterdir()} == {"first", "ballast"})
    ballast.unlink()
    at.fill("t", 20, 1, epochs)
    assert at.backup("b").linked_bytes > 0
    check(disk / "b")


def test_a_folder_that_does_not_answer_holds_up_nobody_else(start_at: Callable[..., At], tmp_path: Path) -> None:
    at = start_at("slow folder")
    with paused(tmp_path) as pause:
        call = at.begin("b")
        pause.wait()
        at.fill("t", 0, 3)
        assert ids(at.client, "t") == [0, 1, 2]
        pause.go_on()
        assert [*call][-1].topics == 1


def fill_up(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


# -- where to -------------------------------------------------------------------------------------------------------


def test_names_lead_nowhere_else(usual: At, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (usual.backups / "link").symlink_to(tmp_path / "elsewhere")
    (usual.backups / "dangling").symlink_to(tmp_path / "nowhere")
    (usual.backups / "file").touch()
    for name in (
        "",
        ".",
        "..",
        "../elsewhere",
        "/tmp/b",
        "a/b",
        "a\\b",
        "-b",
        ".b",
        "b\0",
        "b\n",
        "ü",
        "b" * 101,
        "b.unfinished",
        "b.removing",
    ):
        assert refused(lambda: list(usual.begin(name))).reason == "INVALID_REQUEST", name  # noqa: B023
    for name in ("link", "dangling", "file"):
        assert refused(lambda: list(usual.begin(name))).reason == "DIRECTORY_NOT_EMPTY", name  # noqa: B023
    usual.backup("b" * 100)
    assert refused(lambda: list(usual.begin("b" * 100))).reason == "DIRECTORY_NOT_EMPTY"
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("folder", ["", "missing"])
def test_without_a_folder_for_them_there_are_none(start_sidecar: StartSidecar, tmp_path: Path, folder: str) -> None:
    """It is not made: what is not mounted would be on another disk."""
    sidecar = start_sidecar(backup_directory=tmp_path / folder if folder else "")
    client = Client(sidecar.address)
    answer = refused(lambda: list(client.admin.Backup(admin_pb2.BackupRequest(name="b"))))
    assert (answer.reason, "backup_directory" in answer.numbers["hint"]) == ("INVALID_REQUEST", True)
    client.close()
    # Serving does not need it, so it is no reason not to start.
    warned = [entry for entry in sidecar.log if "backup_directory" in entry["event"]]
    assert len(warned) == (1 if folder else 0)


def test_no_sidecar_starts_on_a_backup(usual: At, tmp_path: Path) -> None:
    """It would append to files that other backups share."""
    usual.fill("t", 0, 1)
    usual.backup("b")
    with pytest.raises(RuntimeError, match="is a backup"):
        Sidecar(tmp_path / "other", data_directory=usual.backups / "b").start()
    check(usual.backups / "b")


# -- one after the other ----------------------------------------------------------------------------------------------


def test_what_an_earlier_one_has_is_shared_and_each_is_whole(at: At, tmp_path: Path) -> None:
    epochs = at.fill("t", 0, 40)
    at.fill("idle", 0, 1)
    assert at.backup("one").linked_bytes == 0
    at.fill("t", 40, 8, epochs)
    second = at.backup("two")
    [incarnation, idle] = incarnations(at.backups / "two" / "logs")
    first_files = sorted((at.backups / "one" / "logs" / str(incarnation)).glob("*.log"))
    sealed = [at.backups / "two" / path.relative_to(at.backups / "one") for path in first_files[:-1]]
    assert len(sealed) >= 4
    [quiet] = (at.backups / "two" / "logs" / str(idle)).glob("*.log")
    assert second.linked_bytes == sum(path.stat().st_size for path in (*sealed, quiet))
    assert [path.stat().st_nlink for path in (*sealed, quiet)] == [2] * (len(sealed) + 1)
    shutil.rmtree(at.backups / "one")
    check(at.backups / "two")
    assert examine(at.backups / "two").is_whole
    # What is restored is written to, and shares nothing; and what comes of it is known again.
    restore(at.backups / "two", tmp_path / "r" / "data")
    assert {path.stat().st_nlink for path in (tmp_path / "r" / "data").rglob("*") if path.is_file()} == {1}
    with Sidecar(tmp_path / "r", backup_directory=at.backups) as sidecar:
        there = At(sidecar, at.backups)
        # For "idle" too: until it is used it is as it was.
        assert there.backup("three").linked_bytes >= sum(path.stat().st_size for path in sealed)
        there.close()
    check(at.backups / "two")


def test_another_history_of_the_same_length_is_not_taken_for_this_one(at: At, tmp_path: Path) -> None:
    at.fill("t", 0, 2)
    at.backup("before")
    at.fill("t", 2, 30)
    at.backup("after")
    restore(at.backups / "before", tmp_path / "r" / "data")
    with Sidecar(tmp_path / "r", **settings(tmp_path)) as sidecar:
        there = At(sidecar, at.backups)
        there.fill("t", 2, 30)
        assert ids(there.client, "t") == list(range(32))
        there.backup("other")
        there.close()
    mine, other = (sorted((at.backups / name / "logs").rglob("*.log")) for name in ("after", "other"))
    assert [path.name for path in mine][1:2] == [path.name for path in other][1:2]
    assert mine[1].read_bytes() != other[1].read_bytes()
    for name in ("after", "other"):
        assert examine(at.backups / name).is_whole


# -- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def test_damage_where_it_is_taken_is_said_and_the_rest_is_whole(at: At, tmp_path: Path) -> None:
    at.fill("t", 0, 20)
    at.fill("gone", 0, 20)
    at.fill("others", 0, 20)
    t, gone, _ = incarnations(at.sidecar.data / "logs")
    damage(min((at.sidecar.data / "logs" / str(t)).glob("*.log")), 500)
    at.sidecar.stop()
    for path in (at.sidecar.data / "logs" / str(gone)).glob("*.log"):
        damage(path, 0)
    at.sidecar.start()
    wait_for(lambda: at.client.topic("gone").state == admin_pb2.TOPIC_STATE_DAMAGED)
    last = at.backup("b")
    assert [fault.topic.rpartition("/")[2] for fault in last.damaged] == ["t"]
    assert [fault.topic.rpartition("/")[2] for fault in last.left_out] == ["gone"]
    assert "byte" in last.damaged[0].what
    said = check(at.backups / "b")
    assert ([one.topic for one in said.damaged], [one.topic for one in said.left_out]) == (
        [last.damaged[0].topic],
        [last.left_out[0].topic],
    )
    with restored(at, "b", tmp_path / "r") as sidecar:
        client = Client(sidecar.address)
        assert ids(client, "others") == list(range(20))
        wait_for(lambda: client.topic("gone").state == admin_pb2.TOPIC_STATE_DAMAGED)
        assert client.topic("t").state == SERVING
        # Its name stays taken: made again it would let everything through again.
        with pytest.raises(grpc.RpcError):
            client.epochs("gone", "p")
        client.close()


# -- workers ----------------------------------------------------------------------------------------------------------


def test_each_worker_makes_its_part(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    names = [f"t{number}" for number in range(8)]

    async def publish_and_back_up() -> None:
        async with AsyncClient(sidecar.address) as client:
            for name in names:
                async with client.producer(name, "p") as producer:
                    await (await producer.send(b"x"))
            made = await client.admin.backup("b")
            assert sorted(one.directory for one in made) == [str(backups / "b" / f"worker-{k}") for k in range(2)]
            assert sum(one.topics for one in made) == len(names)

    with Sidecar(tmp_path / "s", workers=2, backup_directory=backups) as sidecar:
        asyncio.run(publish_and_back_up())
        # A client goes only where it was sent.
        one = sidecar.address.split(",")[0]
        with pytest.raises(Exception, match="NOT_OWNER"):
            asyncio.run(_back_up_at(one))
    restore(backups / "b", tmp_path / "r" / "data")
    with Sidecar(tmp_path / "r", workers=2) as sidecar:
        assert asyncio.run(_topics(sidecar.address)) == {f"persistent://public/default/{name}" for name in names}
    with pytest.raises(RuntimeError, match="is a backup"):
        Sidecar(tmp_path / "x", workers=3, data_directory=backups / "b").start()
    shutil.rmtree(backups / "b" / "worker-1")
    with pytest.raises(DamagedError, match="worker-1"):
        parts_of(backups / "b")


async def _back_up_at(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.admin.backup("c")


async def _topics(address: str) -> set[str]:
    async with AsyncClient(address) as client:
        return {topic.name for topic in await client.admin.topics()}


# -- other histories --------------------------------------------------------------------------------------------------


async def test_clients_of_another_history_notice_it(usual: At, tmp_path: Path) -> None:
    """An older backup below newer clients, and then the newer one below those of the history that began meanwhile."""
    sidecar, data = usual.sidecar, usual.sidecar.data

    async def replaced_by(name: str) -> None:
        await asyncio.to_thread(sidecar.kill)
        await asyncio.to_thread(shutil.rmtree, data)
        await asyncio.to_thread(restore, usual.backups / name, data)
        await asyncio.to_thread(sidecar.start)

    async with AsyncClient(sidecar.address) as client:
        first = client.producer("t", "p")
        await first.open()
        for i in range(10):
            await (await first.send(b"first %d" % i))
            if i in (4, 9):
                await asyncio.to_thread(usual.backup, f"after-{i}")
        after_9 = await _position(client, 9)
        await replaced_by("after-4")
        with pytest.raises(DataLossError):
            await (await first.send(b"lost"))
        with pytest.raises(PositionError, match="POSITION_AFTER_END"):
            await _read_on(client, after_9)
        second = client.producer("t", "p")
        await second.open()
        assert second.persisted_sequence_id == 4
        for i in range(5, 12):
            await (await second.send(b"second %d" % i))
        with pytest.raises(PositionError, match="POSITION_DIVERGED"):
            await _read_on(client, after_9)
        others_8, others_11 = await _position(client, 8), await _position(client, 11)
        await replaced_by("after-9")
        with pytest.raises(DataLossError):
            await (await second.send(b"lost"))
        with pytest.raises(PositionError, match="POSITION_AFTER_END"):
            await _read_on(client, others_11)
        with pytest.raises(PositionError, match="POSITION_DIVERGED"):
            await _read_on(client, others_8)
        assert await _read_on(client, after_9) == []
        for producer in (first, second):
            with pytest.raises(DataLossError):
                await producer.close()


def test_no_session_has_the_epoch_of_one_of_the_lost_history(usual: At) -> None:
    """The first start on a backup has the term that the start after it had. Who opened its name then, and has lost
    nothing since, does not get the name of who opened it now."""
    usual.fill("t", 0, 1)
    usual.backup("b")
    usual.sidecar.restart()
    zombie, term = usual.client.epochs("t", "p", "new"), usual.client.topic("t").term
    usual.sidecar.kill()
    shutil.rmtree(usual.sidecar.data)
    restore(usual.backups / "b", usual.sidecar.data)
    usual.sidecar.start()
    epochs = usual.client.epochs("t", "p", "new")
    assert usual.client.topic("t").term == term
    for name, epoch in zombie.items():
        assert epoch != epochs[name]
        assert usual.client.resume_refused("t", name, epoch).reason in ("FENCED", "INVALID_EPOCH")
        with pytest.raises(grpc.RpcError):
            usual.client.publish_unary("t", batch([(name, 1)], zombie, {name: -1}))
    usual.fill("t", 1, 1, epochs)


async def _position(client: AsyncClient, index: int) -> Any:
    async with client.reader("t", start=index) as reader:
        async for message in reader:
            return message.position
    raise AssertionError("there is no such message")


async def _read_on(client: AsyncClient, position: Any) -> list[bytes]:
    async with client.reader("t", start=position) as reader:
        return [message.payload or b"" async for message in reader]


def test_what_is_in_a_backup_only_its_owner_may_read(usual: At, tmp_path: Path) -> None:
    (usual.sidecar.data / "token").write_text("secret")
    usual.fill("t", 0, 1)
    usual.backup("b")
    restore(usual.backups / "b", tmp_path / "r")
    for folder in (usual.backups / "b", tmp_path / "r"):
        assert (folder / "token").read_text() == "secret"
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert not (tmp_path / "r" / directories.MANIFEST_FILE).exists()
    assert os.listdir(tmp_path / "r" / "logs") == os.listdir(usual.sidecar.data / "logs")
