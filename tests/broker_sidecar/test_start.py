"""Starts that must be refused: in use, damaged, incomplete, newer. A clear line, status 1, and nothing is changed."""

import errno
import hashlib
import os
import pwd
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import google_crc32c
import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar.data_directory import ended_by, prepare
from seqdedupe.errors import EXIT_FAILED, EXIT_WRONG, REASONS, ConfigurationError, SeqdedupeError, error
from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch, refused
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.pausing import wait_for

ROWS = 40


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sidecar that was killed: two topics, one with a snapshot in the middle of its messages."""
    sidecar = Sidecar(tmp_path_factory.mktemp("used"))
    sidecar.start()
    client = Client(sidecar.address)
    for topic in ("t", "u"):
        epochs = client.epochs(topic, "p")
        for i in range(ROWS):
            client.publish_unary(topic, batch([("p", i)], epochs))
            if i == ROWS // 2:
                client.admin.Snapshot(admin_pb2.SnapshotRequest(topic=topic))
    client.close()
    sidecar.kill()
    return sidecar.folder


@pytest.fixture
def copied(used: Path, tmp_path: Path) -> Iterator[Sidecar]:
    """A sidecar on a copy of it."""
    shutil.copytree(used / "data", tmp_path / "data")
    sidecar = Sidecar(tmp_path)
    yield sidecar
    sidecar.kill()


@pytest.mark.parametrize("part", ["store", "logs", ""])
def test_a_start_on_a_read_only_disk_says_so_and_is_not_tried_again(
    copied: Sidecar, tmp_path: Path, part: str, read_only: Callable[[Path], None]
) -> None:
    place = copied.data / part
    read_only(place)
    copied.spawn()
    assert copied.wait() == EXIT_WRONG
    [line] = copied.errors
    where = f"{place}: " if part else ""
    said = f"data_directory = '{copied.data}' cannot be used: {where}Read-only file system [INVALID_CONFIGURATION]"
    assert line == f"seqdedupe: {said} Mount the file system for writing, or choose a directory on another one."


def test_a_store_with_a_file_that_is_read_only(copied: Sidecar, read_only: Callable[[Path], None]) -> None:
    read_only(copied.data / "store" / "DURABLE")
    copied.spawn()
    assert copied.wait() == EXIT_FAILED
    [line] = copied.errors
    assert "Read-only file system" in line
    assert line.endswith("[STORE_UNAVAILABLE] Mount the file system for writing: it is read-only.")


def test_a_hint_of_a_sidecar_that_has_ended_does_not_say_that_it_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: list[SeqdedupeError | OSError] = [
        error("STORE_UNAVAILABLE", "the disk fails"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ]
    for failure in failures:
        assert ended_by(failure, tmp_path) == EXIT_FAILED
        line = capsys.readouterr().err
        assert "[STORE_UNAVAILABLE] Fix the problem that the message names, and start the sidecar again." in line
    assert ended_by(error("STORE_UNAVAILABLE", "the disk fails", hint="Do this."), tmp_path) == EXIT_FAILED
    assert capsys.readouterr().err.endswith("[STORE_UNAVAILABLE] Do this.\n")


def refused_start(sidecar: Sidecar) -> str:
    """Starts it; it must end with status 1 and one line: what is wrong, and what to do. Returns that."""
    before = contents(sidecar.data / "logs")
    sidecar.errors.clear()
    sidecar.spawn()
    assert sidecar.wait() == 1
    assert not [entry for entry in sidecar.log if entry["event"] == "serving"]
    [line] = sidecar.errors
    assert line.startswith("seqdedupe: ")
    reason = line.partition("[")[2].partition("]")[0]
    assert line.endswith(REASONS[reason].hint)
    assert contents(sidecar.data / "logs") == before
    return line


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def segment_of(sidecar: Sidecar, which: int = 0) -> Path:
    """The segment file of one of the topics, by age."""
    folders = sorted((sidecar.data / "logs").iterdir())
    [segment] = folders[which].glob("*.log")
    return segment


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def newer_store(sidecar: Sidecar) -> None:
    """The format version in the store's own file, one higher, with a right checksum."""
    path = sidecar.data / "store" / "DURABLE"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 16, struct.unpack_from("<I", data, 16)[0] + 1)
    data[-4:] = google_crc32c.value(bytes(data[:-4])).to_bytes(4, "little")
    path.write_bytes(data)


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


DAMAGE: dict[str, tuple[str, Callable[[Sidecar], object]]] = {
    "the store's own file": ("STORE_DAMAGED", lambda s: flip(s.data / "store" / "DURABLE", 20)),
    "no CURRENT in the store": ("STORE_DAMAGED", lambda s: (s.data / "store" / "CURRENT").unlink()),
    "no write-ahead log in the store": ("STORE_DAMAGED", lambda s: newest(s.data / "store", "*.log").unlink()),
    "a byte in the store's write-ahead log": (
        "STORE_DAMAGED",
        lambda s: flip(newest(s.data / "store", "*.log"), newest(s.data / "store", "*.log").stat().st_size // 2),
    ),
    "a newer store": ("NEWER_FORMAT", newer_store),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_and_nothing_is_changed(copied: Sidecar, case: str) -> None:
    reason, damage = DAMAGE[case]
    damage(copied)
    said = refused_start(copied)
    assert f"[{reason}]" in said, said


ONE_TOPIC: dict[str, Callable[[Sidecar], object]] = {
    "a byte in the middle of the log": lambda s: flip(segment_of(s), segment_of(s).stat().st_size // 2),
    "the first byte of the log": lambda s: flip(segment_of(s), 0),
    "the log's end, up to what the snapshot covers": lambda s: segment_of(s).write_bytes(
        segment_of(s).read_bytes()[:1000]
    ),
    "an empty log": lambda s: segment_of(s).write_bytes(b""),
    "no segment file": lambda s: segment_of(s).unlink(),
    "no folder": lambda s: shutil.rmtree(segment_of(s).parent),
}


@pytest.mark.parametrize("case", ONE_TOPIC)
def test_one_damaged_topic_does_not_keep_the_others_down(copied: Sidecar, case: str) -> None:
    ONE_TOPIC[case](copied)
    folder = min(log for log in (copied.data / "logs").iterdir()) if case != "no folder" else None
    before = contents(folder) if folder else {}
    copied.start()
    client = Client(copied.address)
    until = time.monotonic() + LAST_RESORT_SECONDS
    while client.topic("t").state != admin_pb2.TOPIC_STATE_DAMAGED:
        assert time.monotonic() < until
    assert "[LOG_DAMAGED]" in client.topic("t").why
    create = admin_pb2.CreateTopicRequest(topic="t")
    delete = admin_pb2.DeleteTopicRequest(topic="t")
    for call in (
        lambda: client.open("t", "p"),
        lambda: client.admin.CreateTopic(create),
        lambda: client.admin.DeleteTopic(delete),
        lambda: client.rows("t"),
        lambda: client.end_index("t"),
    ):
        answer = refused(call)
        assert (answer.reason, answer.retry_delay_ms) == ("LOG_DAMAGED", -1), answer
    health = health_of(client.channel)
    name = "persistent://public/default/t"
    status = health_pb2.HealthCheckResponse
    assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == status.NOT_SERVING
    assert health.Check(health_pb2.HealthCheckRequest(service="")).status == status.SERVING
    listed = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    assert {one.name.rpartition("/")[2]: one.state for one in listed} == {
        "t": admin_pb2.TOPIC_STATE_DAMAGED,
        "u": admin_pb2.TOPIC_STATE_SERVING,
    }
    epochs = client.epochs("u", "p")
    assert list(client.publish_unary("u", batch([("p", ROWS)], epochs)).verdicts) == []
    assert client.rows("u") == [("p", i) for i in range(ROWS + 1)]
    client.close()
    assert copied.stop() == 0
    assert folder is None or contents(folder) == before


def test_a_changed_bit_in_an_acknowledged_last_record_is_damage(copied: Sidecar) -> None:
    """No snapshot covers the record, and no later record says that it was synced. Only its receipt does."""
    copied.start()
    client = Client(copied.address)
    client.publish_unary("t", batch([("p", ROWS)], client.epochs("t", "p")))
    client.close()
    copied.kill()
    flip(segment_of(copied), -1)
    before = contents(segment_of(copied).parent)
    copied.start()
    client = Client(copied.address)
    wait_for(lambda: client.topic("t").state == admin_pb2.TOPIC_STATE_DAMAGED)
    assert "no crash leaves a record like this" in client.topic("t").why
    client.close()
    assert copied.stop() == 0
    assert contents(segment_of(copied).parent) == before


def test_the_control_undamaged_it_starts(copied: Sidecar) -> None:
    """A torn tail, as a crash leaves one, is no damage either."""
    with segment_of(copied).open("ab") as file:
        file.write(b"\x0a\xff\xff torn")
    copied.start()
    client = Client(copied.address)
    assert client.rows("t") == client.rows("u") == [("p", i) for i in range(ROWS)]
    assert any("torn tail" in entry["event"] for entry in copied.log)
    client.close()


def test_a_lost_store_is_refused_and_rebuilt_on_request(copied: Sidecar) -> None:
    """The log alone brings back the topics by name, their producers, verdicts, sessions and policies."""
    copied.start()
    client = Client(copied.address)
    zombie = client.producer("u", "p")[2]
    client.open("u", "p", "silent")
    silent = client.producer("u", "silent")[2]
    off = admin_pb2.TopicPolicy(deduplication_enabled=False)
    client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="u", policy=off))
    client.close()
    copied.kill()
    copied.log.clear()
    client_before = incarnations(copied.data / "logs")
    shutil.rmtree(copied.data / "store")
    said = refused_start(copied)
    assert "STORE_MISSING" in said
    assert "--rebuild-store" in said
    # Still so at the next start: nothing was made up meanwhile.
    assert "STORE_MISSING" in refused_start(copied)
    copied.keys["rebuild_store"] = True
    copied.start()
    client = Client(copied.address)
    topics = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    assert [topic.name for topic in topics] == [f"persistent://public/default/{name}" for name in ("t", "u")]
    assert [topic.incarnation for topic in topics] == client_before
    assert client.rows("t") == [("p", i) for i in range(ROWS)]
    assert client.resume_refused("u", "p", zombie).reason == "FENCED"
    assert refused(lambda: client.publish_unary("u", batch([("p", ROWS)], {"p": zombie}))).reason == "FENCED"
    assert list(client.open("u", "silent", epochs=[silent]).epochs) == [silent]
    assert client.topic("u").policy.deduplication_enabled is False
    epoch = client.producer("t", "p")[2]
    again = batch([("p", ROWS - 1), ("p", ROWS)], {"p": epoch})
    assert list(client.publish_unary("t", again).verdicts) == [DUP, NOT_DUP]
    # A topic made from now on is another incarnation than all that are in the logs.
    client.open("new", "p")
    assert client.topic("new").incarnation > max(client_before)
    copied.kill()
    del copied.keys["rebuild_store"]
    copied.start()
    assert client.rows("t") == [("p", i) for i in range(ROWS + 1)]
    client.close()


def test_a_second_sidecar_on_the_same_directory(copied: Sidecar) -> None:
    copied.start()
    client = Client(copied.address)
    epoch = {"p": client.producer("t", "p")[2]}
    second = Sidecar(copied.folder)
    second.spawn()
    assert second.wait() == 1
    assert "[DIRECTORY_IN_USE]" in second.errors[0]
    assert len(second.errors) == 1
    # The first one has not noticed.
    assert list(client.publish_unary("t", batch([("p", ROWS)], epoch)).verdicts) == []
    copied.kill()
    second.start()
    second_client = Client(second.address)
    assert second_client.rows("t") == [("p", i) for i in range(ROWS + 1)]
    second_client.close()
    client.close()
    second.kill()


def test_an_address_in_use_and_a_directory_that_cannot_be(copied: Sidecar, tmp_path: Path) -> None:
    copied.start()
    other = Sidecar(tmp_path / "other")
    other.address = copied.address
    other.spawn()
    assert other.wait() == 1
    [line] = other.errors  # found before gRPC listens, which would have its say, and before anything is opened
    assert not (other.data / "store").exists()
    assert line.startswith(f"seqdedupe: listen = {copied.address!r}: cannot listen there: Address already in")
    assert "Stop the process that listens there" in line
    elsewhere = Sidecar(tmp_path / "elsewhere", listen="192.0.2.1:1", allow_insecure_listen=True)
    elsewhere.spawn()
    assert elsewhere.wait() == 1
    assert "Cannot assign requested address" in elsewhere.errors[-1]
    file = tmp_path / "file"
    file.write_text("")
    for listen, said in (
        (f"unix:{file}", "what is there is no socket"),
        (f"unix:{tmp_path}/missing/sock", f"there is no folder '{tmp_path}/missing'"),
        ("no-such-host.invalid:1", "the host name 'no-such-host.invalid' does not resolve"),
    ):
        wrong = Sidecar(tmp_path / "wrong", listen=listen, allow_insecure_listen=True)
        wrong.spawn()
        assert wrong.wait() == 1
        assert f"cannot listen there: {said} [CANNOT_LISTEN]" in wrong.errors[-1]
    third = Sidecar(tmp_path / "third", data_directory=file / "data")
    third.spawn()
    assert third.wait() == EXIT_WRONG
    assert third.errors[0].startswith(f"seqdedupe: data_directory = '{file}/data' cannot be used: Not a directory")
    assert "a part of the path is a file" in third.errors[0]


def test_a_disk_that_is_full_at_the_start(small_disk: Callable[[Path], None], tmp_path: Path) -> None:
    """The system names no file: the line says of which directory it is, and what to do."""
    small_disk(tmp_path / "data")
    sidecar = Sidecar(tmp_path, authentication="token")
    sidecar.start()
    sidecar.kill()
    sidecar.token_file.unlink()
    with suppress(OSError), (tmp_path / "data" / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    sidecar.spawn()
    assert sidecar.wait() == 1
    said = f"data_directory = '{sidecar.data}' cannot be used: No space left on device [STORE_UNAVAILABLE]"
    assert sidecar.errors[-1] == f"seqdedupe: {said} Free space on the disk."


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_data_directory_of_another_user(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        os.seteuid(65_534)
        try:
            with pytest.raises(ConfigurationError) as owned:
                prepare(Path(folder))
            with pytest.raises(ConfigurationError) as hidden:
                prepare(tmp_path / "data")
        finally:
            os.seteuid(0)
    assert "it belongs to root, and this process runs as" in owned.value.message
    assert "Permission denied" in hidden.value.message
    assert "chown" in owned.value.hint
    assert "chown" in hidden.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_root_leaves_nothing_in_a_directory_of_another_user(tmp_path: Path) -> None:
    service = 65_534
    sidecar = Sidecar(tmp_path)
    sidecar.data.mkdir()
    os.chown(sidecar.data, service, service)
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    assert os.listdir(sidecar.data) == []
    [line] = sidecar.errors
    assert f"belongs to {pwd.getpwuid(service).pw_name}, and this process runs as root [INVALID_CONFIGURATION]" in line
    assert line.endswith(f"chown -R root {sidecar.data}")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_directory_that_root_has_given_to_a_group_is_nobodys_until_something_is_in_it() -> None:
    service = 65_534
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 0, service)
        Path(folder).chmod(0o2775)
        (Path(folder) / "lost+found").mkdir()
        os.setegid(service)
        os.seteuid(service)
        try:
            prepare(Path(folder))
        finally:
            os.seteuid(0)
            os.setegid(0)
        (Path(folder) / "store").mkdir()
        os.setegid(service)
        os.seteuid(service)
        try:
            with pytest.raises(ConfigurationError, match="store belongs to root") as refused:
                prepare(Path(folder))
        finally:
            os.seteuid(0)
            os.setegid(0)
    assert f"chown -R {pwd.getpwuid(service).pw_name} {folder}" in refused.value.hint


def test_a_new_topic_is_said_to_serve_once(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        client = Client(sidecar.address)
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t"))
        client.close()
        sidecar.stop()
    said = [entry["event"] for entry in sidecar.log]
    assert said.count("topic persistent://public/default/t is SERVING") == 1


def test_a_lost_journal_is_damage_until_it_is_given_up(copied: Sidecar) -> None:
    store = Store.open(copied.data / "store")
    # As a sidecar leaves it that is killed while it has one.
    store.tell_journal(True)
    store.close()
    shutil.rmtree(copied.data / "logs" / "journal", ignore_errors=True)
    copied.start()
    client = Client(copied.address)
    until = time.monotonic() + LAST_RESORT_SECONDS
    for name in ("t", "u"):
        while client.topic(name).state != admin_pb2.TOPIC_STATE_DAMAGED:
            assert time.monotonic() < until
        assert "journal is missing" in client.topic(name).why
    copied.kill()
    copied.keys["give_up_journal"] = True
    copied.start()
    assert client.rows("t") == client.rows("u") == [("p", i) for i in range(ROWS)]
    client.close()
    assert copied.stop() == 0
    # An end in order leaves nothing in it.
    store = Store.open(copied.data / "store")
    assert not store.has_journal
    store.close()
    del copied.keys["give_up_journal"]
    copied.start()
    client = Client(copied.address)
    assert client.rows("t") == [("p", i) for i in range(ROWS)]
    client.close()


def test_only_a_log_on_pulsar_needs_the_package_for_it() -> None:
    program = "from broker_sidecar import kernels\nkernels.prepare()\nimport broker_sidecar.server, sys\n"
    found = subprocess.run([sys.executable, "-c", f"{program}sys.exit('pulsar' in sys.modules)"], check=False)
    assert found.returncode == 0
