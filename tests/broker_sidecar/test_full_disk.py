"""A full disk: publishes are refused with a hint when to try again, reads go on, and room makes all go on by itself.

A file system that has become read-only is the same."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, batch_pb2, publish_pb2, read_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import Client, batch, payload_of, refused, verdicts
from tests.broker_sidecar.health import health_of

PAYLOAD_BYTES = 200_000
WAIT_SECONDS = LAST_RESORT_SECONDS

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def fill(disk: Path) -> Path:
    """Takes all the room there is; returns the file to remove."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for chunk in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(chunk))
            except OSError:
                continue
    return ballast


class Producer:
    """One producer that resends from its first message without a receipt."""

    def __init__(self, client: Client, topic: str, stored: int = 0) -> None:
        self._client, self._topic = client, topic
        self._epochs = client.epochs(topic, "p")
        self.stored = stored
        """This many messages have a receipt: IDs 0 up."""

    def payload(self, sequence_id: int) -> bytes:
        return payload_of("p", sequence_id)

    def send(self, count: int) -> publish_pb2.Refusal | None:
        """Pipelines frames of one large message each; the first refusal, if there was one."""
        stream = self._client.stream(self._topic)
        first = self.stored
        frames = [stream.send(self._batch(i)) for i in range(first, first + count)]
        refusal = None
        for frame in frames:
            answer = stream.answer(frame)
            if isinstance(answer, publish_pb2.Refusal):
                refusal = refusal or answer
            else:
                assert refusal is None, "a frame was taken after one that was refused"
                assert verdicts(answer, 1) in ([1], [2])
                self.stored += 1
        stream.end()
        return refusal

    def _batch(self, sequence_id: int) -> batch_pb2.Batch:
        return batch([("p", sequence_id)], self._epochs, keys=bytes(PAYLOAD_BYTES), key_offsets=[0, PAYLOAD_BYTES])


def wait_until_serving(client: Client, topic: str) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while client.topic(topic).state != admin_pb2.TOPIC_STATE_SERVING:
        assert time.monotonic() < until, "the topic did not come back by itself"
        time.sleep(0.02)


def health(client: Client, topic: str) -> int:
    request = health_pb2.HealthCheckRequest(service=f"persistent://public/default/{topic}")
    return health_of(client.channel).Check(request).status


SOON = with_constants.environment(
    **{"seqdedupe.log.embedded.writer.TRIAL_SECONDS": 0.05, "seqdedupe.tasks.LONGEST_DELAY_SECONDS": 0.05}
)
"""The log is tried again and again."""

NO_TRIAL = with_constants.environment(
    **{
        "seqdedupe.log.embedded.writer.SHARE_BYTES": 1,
        "seqdedupe.log.embedded.writer.LARGEST_BYTES": 0,
        "seqdedupe.log.embedded.writer.TRIAL_SECONDS": 0.0,
        "seqdedupe.topic.owner.LONGEST_REST_SECONDS": 0.0,
    }
)
"""Planted: one free byte is room enough."""


def wait_until_read_only(client: Client, topic: str) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while client.topic(topic).state != admin_pb2.TOPIC_STATE_READ_ONLY:
        assert time.monotonic() < until
        time.sleep(0.02)


def states_of(sidecar: Sidecar, topic: str) -> list[str]:
    """The states that a topic has had, as its log tells."""
    begins = f"topic persistent://public/default/{topic} is "
    told = [str(line["event"]).removeprefix(begins) for line in sidecar.log if str(line["event"]).startswith(begins)]
    return [state for state, _ in groupby(one.split(":")[0] for one in told)]


def sizes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("tries", [True, False], ids=["as it is", "planted: no trial"])
def test_a_little_room(
    start_sidecar: Callable[..., Sidecar], small_disk: Callable[[Path], None], tmp_path: Path, tries: bool
) -> None:
    """Markers fit and no batch does: topics stay READ_ONLY while producers keep trying, also over kill -9 and start."""
    data = tmp_path / "data"
    small_disk(data / "logs")
    environment = SOON if tries else NO_TRIAL
    sidecar = start_sidecar(data_directory=data, module=with_constants.MODULE, environment=environment)
    client = Client(sidecar.address)
    producers = {topic: Producer(client, topic) for topic in ("a", "b", "c")}
    for producer in producers.values():
        assert producer.send(3) is None
    ballast = fill(data / "logs")
    os.truncate(ballast, ballast.stat().st_size - PAYLOAD_BYTES // 2)
    for topic, producer in producers.items():
        assert producer.send(1) is not None
        if tries:
            wait_until_read_only(client, topic)
    before = sizes(data / "logs")
    for _ in range(30):
        for producer in producers.values():
            assert producer.send(1) is not None
    if not tries:
        assert len(states_of(sidecar, "a")) > 3
        assert sizes(data / "logs") != before
        client.close()
        return
    assert sizes(data / "logs") == before
    assert {tuple(states_of(sidecar, topic)) for topic in producers} == {("SERVING", "READ_ONLY")}
    sidecar.restart()
    for _ in range(10):
        for producer in producers.values():
            assert producer.send(1) is not None
    assert sizes(data / "logs") == before
    assert {states_of(sidecar, topic).count("SERVING") for topic in producers} == {1}
    ballast.unlink()
    for topic, producer in producers.items():
        wait_until_serving(client, topic)
        assert producer.send(3) is None
        assert client.rows(topic) == [("p", i) for i in range(producer.stored)]
    client.close()


def test_a_file_system_that_becomes_read_only(
    start_sidecar: Callable[..., Sidecar], small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    small_disk(data / "logs")
    constants = json.loads(SOON[with_constants.VARIABLE]) | {"seqdedupe.log.embedded.commit.IDLE_SECONDS": 0.1}
    environment = {with_constants.VARIABLE: json.dumps(constants)}
    sidecar = start_sidecar(data_directory=data, module=with_constants.MODULE, environment=environment)
    client = Client(sidecar.address)
    producer = Producer(client, "t")
    assert producer.send(3) is None
    remount(data / "logs", "ro")
    for _ in range(3):
        refusal = producer.send(1)
        assert refusal is not None
        assert refusal.reason == "LOG_REFUSED"
    wait_until_read_only(client, "t")
    remount(data / "logs", "rw")
    wait_until_serving(client, "t")
    assert producer.send(3) is None
    assert client.rows("t") == [("p", i) for i in range(producer.stored)]
    assert sidecar.errors == []
    client.close()


def remount(place: Path, how: str) -> None:
    """As soon as no file there is open for writing, if it becomes read-only."""
    until = time.monotonic() + WAIT_SECONDS
    while subprocess.run(["mount", "-o", f"remount,{how}", str(place)], capture_output=True, check=False).returncode:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_full_and_room_again(
    start_sidecar: Callable[..., Sidecar], small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    """The disk of the logs is full, that of the store is not; also over kill -9 and start."""
    data = tmp_path / "data"
    small_disk(data / "logs")
    sidecar = start_sidecar(data_directory=data, module=with_constants.MODULE, environment=SOON)
    client = Client(sidecar.address)
    client.open("other", "q")
    producer = Producer(client, "t")
    assert producer.send(20) is None
    ballast = fill(data / "logs")
    refusal = producer.send(10)
    assert refusal is not None
    assert refusal.reason == "LOG_REFUSED"
    assert refusal.retry_delay_ms > 0
    wait_until_read_only(client, "t")
    check_full(client, producer)
    assert health(client, "other") == SERVING

    sidecar.restart()
    check_full(client, producer, has_restarted=True)
    # A topic that cannot be made is not there: the answer says so and does not keep its caller waiting.
    assert refused(lambda: client.open("new", "p")).code.name == "UNAVAILABLE"
    assert refused(lambda: client.topic("new")).reason == "TOPIC_NOT_FOUND"

    ballast.unlink()
    wait_until_serving(client, "t")
    assert health(client, "t") == SERVING
    assert producer.send(5) is None
    assert client.rows("t") == [("p", i) for i in range(producer.stored)]
    sidecar.restart()
    assert client.rows("t") == [("p", i) for i in range(producer.stored)]
    assert list(client.open("t", "p").persisted) == [producer.stored - 1]
    assert {one.name for one in client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics} == {
        f"persistent://public/default/{name}" for name in ("t", "other")
    }
    client.close()


def check_full(client: Client, producer: Producer, *, has_restarted: bool = False) -> None:
    """The same answer on streams, unary and for new sessions; what is stored is read as ever.

    A sidecar that has started on a full disk cannot say where the topic ends: only what is certain is read.
    """
    for _ in range(3):
        again = producer.send(2)
        assert again is not None
        assert (again.reason, again.retry_delay_ms > 0) == ("LOG_REFUSED", True)
        answer = refused(lambda: client.open("t", "p"))
        assert (answer.reason, answer.code.name, answer.retry_delay_ms > 0) == ("LOG_REFUSED", "UNAVAILABLE", True)
        if has_restarted:
            check_certain(client, producer)
        else:
            assert client.rows("t") == [("p", i) for i in range(producer.stored)]
        assert client.topic("t").state == admin_pb2.TOPIC_STATE_READ_ONLY
        assert health(client, "t") == NOT_SERVING


def knows_its_end(client: Client) -> bool:
    return all(
        answer.end_index >= 0
        for answer in client.reading.ReadStream(read_pb2.ReadStreamRequest(topic="t", stop_index=0))
    )


def check_certain(client: Client, producer: Producer) -> None:
    """A prefix of what has a receipt is read; where the topic ends is RECOVERING."""
    certain = client.topic("t").last.index + 1
    assert 0 < certain <= producer.stored
    stop = read_pb2.ReadStreamRequest(topic="t", stop_index=certain)
    answers = list(client.reading.ReadStream(stop))
    assert sum(record.rows for answer in answers for record in answer.records) == certain
    assert {answer.end_index for answer in answers} == {-1}
    for call in (
        lambda: client.rows("t"),
        lambda: client.end_index("t"),
        lambda: client.reading.Read(read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(index=certain))),
        lambda: client.reading.Read(read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(latest=True))),
        lambda: client.reading.Locate(read_pb2.LocateRequest(topic="t", publish_time_ms=2**62)),
    ):
        answer = refused(call)
        assert (answer.reason, answer.retry_delay_ms > 0) == ("RECOVERING", True)


def test_the_whole_disk_is_full(
    start_sidecar: Callable[..., Sidecar], small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    """Store and logs: all goes on as above, also over kill -9 and start."""
    disk = tmp_path / "disk"
    small_disk(disk)
    keys = {"data_directory": disk / "data", "deduplication_entries_interval": 2}
    sidecar = start_sidecar(**keys, module=with_constants.MODULE, environment=SOON)
    client = Client(sidecar.address)
    producer = Producer(client, "t")
    assert producer.send(20) is None
    ballast = fill(disk)
    assert producer.send(5) is not None
    wait_until_read_only(client, "t")
    check_full(client, producer)
    for _ in range(3):
        assert refused(lambda: client.open("new", "p")).code.name == "UNAVAILABLE"
    ballast.unlink()
    wait_until_serving(client, "t")
    assert producer.send(5) is None
    until_made(client, "new")
    ballast = fill(disk)
    producer.send(5)
    sidecar.kill()
    fill(disk)
    sidecar.start()
    wait_until_read_only(client, "t")
    # Whether there was room for one marker, and the topic has served since the start, is up to the file system.
    check_full(client, producer, has_restarted=not knows_its_end(client))
    assert refused(lambda: client.open("newer", "p")).code.name == "UNAVAILABLE"
    assert any("only read" in str(line) for line in sidecar.log)
    assert not any("Traceback" in line for line in sidecar.errors)
    ballast.unlink()
    wait_until_serving(client, "t")
    assert client.rows("t") == [("p", i) for i in range(producer.stored)]
    until_made(client, "newer")
    assert list(client.open("t", "p").persisted) == [producer.stored - 1]
    producer = Producer(client, "t", producer.stored)
    assert producer.send(5) is None
    sidecar.restart()
    assert producer.send(5) is None
    assert client.rows("t") == [("p", i) for i in range(producer.stored)]
    # What was begun and could not be undone while the disk was full has left nothing behind.
    topics = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    assert set(incarnations(disk / "data" / "logs")) == {one.incarnation for one in topics}
    assert sorted(one.name.rpartition("/")[2] for one in topics) == ["new", "newer", "t"]
    client.close()


def until_made(client: Client, topic: str) -> None:
    """The store opens itself again when it is asked to."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            client.open(topic, "p")
        except grpc.RpcError as e:
            assert e.code() == grpc.StatusCode.UNAVAILABLE  # noqa: PT017
            assert time.monotonic() < until
            time.sleep(0.05)
        else:
            return
