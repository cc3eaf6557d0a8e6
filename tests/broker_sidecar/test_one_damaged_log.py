"""One file of one log is damaged or cannot be read: the other topics serve, and this one as soon as it can."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.client import DamagedError, SeqdedupeError
from seqdedupe.client.blocking import Client
from seqdedupe.doctor.examine import NAME_AGAIN, examine
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.test_start import contents

SEGMENT = f"{0:020d}.log"


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[0] ^= 0x80
    path.write_bytes(raw)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def unreadable(path: Path) -> None:
    """Reading it is an error of the system."""
    path.rename(path.with_name(f"{path.name}.kept"))
    path.mkdir()


def readable(path: Path) -> None:
    path.rmdir()
    path.with_name(f"{path.name}.kept").rename(path)


DAMAGED: dict[str, Callable[[Path], None]] = {
    "flipped": flipped,
    "zeroed": zeroed,
    "emptied": emptied,
    "missing": Path.unlink,
    "unreadable": unreadable,
}
UNREADABLE = ["secret", SEGMENT, "moved", "leaving"]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sidecar that was killed, with a topic for each fault."""
    with Sidecar(tmp_path_factory.mktemp("used")) as sidecar, Client(sidecar.address) as client:
        for name in (*DAMAGED, *UNREADABLE, "whole"):
            with client.producer(name, "p") as producer:
                producer.send(name.encode()).result()
        admin = calls.Client(sidecar.address)
        admin.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="parts", partitions=2))
        admin.close()
        sidecar.kill()
    return sidecar.folder


@pytest.fixture
def copied(used: Path, tmp_path: Path) -> Iterator[Sidecar]:
    shutil.copytree(used / "data", tmp_path / "data")
    sidecar = Sidecar(tmp_path)
    yield sidecar
    sidecar.kill()


def folders(sidecar: Sidecar) -> dict[str, Path]:
    """For the logs, by the last part of their topic's name."""
    said = {path.parent: path.read_text().split("\n")[0] for path in (sidecar.data / "logs").glob("*/topic")}
    return {name.rpartition("/")[2]: folder for folder, name in said.items()}


def payload_of(sidecar: Sidecar, topic: str) -> bytes:
    with Client(sidecar.address) as client, client.reader(topic) as reader:
        return bytes(next(iter(reader)).payload or b"")


def test_the_others_serve(copied: Sidecar) -> None:
    logs = folders(copied)
    said = {name: (folder / "topic").read_bytes() for name, folder in logs.items()}
    for name, damage in DAMAGED.items():
        damage(logs[name] / "topic")
    zeroed(logs["parts-partition-1"] / "topic")
    for name in UNREADABLE:
        path = logs[name] / name if name != SEGMENT else logs[name] / SEGMENT
        if not path.exists():
            path.touch()
        unreadable(path)
    copied.start()
    for name in ("whole", *DAMAGED):
        assert payload_of(copied, name) == name.encode()
    client = calls.Client(copied.address)
    for name in UNREADABLE:
        topic = client.topic(name)
        assert topic.state == admin_pb2.TOPIC_STATE_RECOVERING
        assert "[LOG_UNREADABLE]" in topic.why
    for name in UNREADABLE:
        readable(logs[name] / name)
        if name in ("moved", "leaving"):
            (logs[name] / name).unlink()
        while client.topic(name).state != admin_pb2.TOPIC_STATE_SERVING:
            copied.check_running()
            time.sleep(0.05)
        assert payload_of(copied, name) == name.encode()
    client.close()
    # What the store knows is written again, where the disk has said that something else stands there.
    for name in {*DAMAGED, "parts-partition-1"} - {"unreadable"}:
        assert (logs[name] / "topic").read_bytes() == said[name]


@pytest.mark.parametrize("damage", [flipped, zeroed, unreadable])
def test_where_nobody_knows_the_name_the_log_is_set_aside(copied: Sidecar, damage: Callable[[Path], None]) -> None:
    (copied.data / "store").rename(copied.folder / "store")
    logs = folders(copied)
    damage(logs["whole"] / "topic")
    copied.keys["rebuild_store"] = True
    before = contents(copied.data / "logs")
    copied.spawn()
    assert copied.wait() == 1
    assert contents(copied.data / "logs") == before
    [line] = copied.errors
    assert f"{logs['whole'] / 'topic'}" in line
    assert "other topics still work" not in line
    command = line[line.index("mv ") :]
    subprocess.run(command, shell=True, check=True)
    copied.start()
    assert payload_of(copied, "flipped") == b"flipped"
    with pytest.raises(SeqdedupeError) as missing:
        payload_of(copied, "whole")
    assert missing.value.reason == "TOPIC_NOT_FOUND"
    assert not isinstance(missing.value, DamagedError)


def test_the_doctor_looks_at_the_others(copied: Sidecar) -> None:
    logs = folders(copied)
    for name in ("topic", "secret", SEGMENT):
        unreadable(logs[{"topic": "unreadable"}.get(name, name)] / name)
    found = {topic.name.rpartition("/")[2]: topic for topic in examine(copied.data).topics}
    assert found["whole"].is_whole
    assert found["whole"].messages == 1
    flipped(logs["flipped"] / "topic")
    [cure] = next(topic for topic in examine(copied.data).topics if topic.name.endswith("/flipped")).cures
    assert cure == NAME_AGAIN
    assert {name for name, topic in found.items() if not topic.is_whole} == {"unreadable", "secret", SEGMENT}
