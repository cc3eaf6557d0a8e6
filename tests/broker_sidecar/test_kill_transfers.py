"""kill -9 in the middle of an import or a rebuilding, at steps that are certain: all of it is there, or nothing."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import dying
from tests.broker_sidecar.attaching import attached
from tests.broker_sidecar.calls import DUP, NOT_DUP, TIMEOUT_SECONDS, Client, batch, offsets, verdicts

StartSidecar = Callable[..., Sidecar]

MARKS = {"a": 7, "b": 3}
FILLED = 40
"""Messages, several segments of them."""


class Dying:
    """A sidecar that dies at will, and a client of it."""

    def __init__(self, start_sidecar: StartSidecar, folder: Path, in_several_steps: bool, **keys: object) -> None:
        environment = dying.environment(folder, in_several_steps=in_several_steps)
        keys |= {"deduplication_entries_interval": 10**6, "deduplication_snapshot_interval_seconds": 0}
        self._folder = folder
        self.sidecar = start_sidecar(module=dying.MODULE, environment=environment, **keys)
        self.client = Client(self.sidecar.address)

    def die_in(self, step: str, count: int, call: Callable[[], object]) -> None:
        def cut_off() -> None:
            with pytest.raises(grpc.RpcError):
                call()

        dying.die_in(self.sidecar, self._folder, step, count, cut_off)

    def topic(self, name: str) -> admin_pb2.Topic:
        """The topic, as soon as it has become what it becomes after a start."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while True:
            topic = self.client.topic(name)
            if topic.state != admin_pb2.TOPIC_STATE_RECOVERING:
                return topic
            assert time.monotonic() < until
            time.sleep(0.01)

    def create(self, name: str) -> None:
        self.client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name))

    def import_marks(self, topic: str) -> None:
        """One producer a message, and so a record; then the end."""
        requests = [
            admin_pb2.ImportWatermarksRequest(
                topic=topic, producer_name_offsets=offsets([b"x"]), producer_names=name.encode(), persisted=[persisted]
            )
            for name, persisted in MARKS.items()
        ]
        requests.append(admin_pb2.ImportWatermarksRequest(producers=len(MARKS)))
        self.client.admin.ImportWatermarks(iter(requests), timeout=TIMEOUT_SECONDS)

    def saved(self, topic: str) -> list[admin_pb2.ImportSnapshotRequest]:
        answers = self.client.admin.ExportSnapshot(admin_pb2.ExportSnapshotRequest(topic=topic))
        return [admin_pb2.ImportSnapshotRequest(topic=topic, part=answer.part) for answer in answers]

    def import_snapshot(self, saved: list[admin_pb2.ImportSnapshotRequest]) -> admin_pb2.Topic:
        return self.client.admin.ImportSnapshot(iter(saved), timeout=TIMEOUT_SECONDS).topic

    def rebuild(self, topic: str) -> admin_pb2.Topic:
        return self.client.admin.RebuildTopic(admin_pb2.RebuildTopicRequest(topic=topic), timeout=TIMEOUT_SECONDS).topic

    def snapshot(self, topic: str) -> None:
        self.client.admin.Snapshot(admin_pb2.SnapshotRequest(topic=topic))

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def start_dying(start_sidecar: StartSidecar, tmp_path: Path) -> Iterator[Callable[..., Dying]]:
    started: list[Dying] = []

    def start(in_several_steps: bool = False, **keys: object) -> Dying:
        started.append(Dying(start_sidecar, tmp_path, in_several_steps, **keys))
        return started[-1]

    yield start
    for one in started:
        one.close()


# -- watermarks -----------------------------------------------------------------------------------------------------


def marks(at: Dying, topic: str) -> dict[str, int]:
    """What the topic says of the producers that are imported."""
    assert at.topic(topic).state == admin_pb2.TOPIC_STATE_SERVING
    found: dict[str, int] = {}
    for answer in at.client.admin.ExportWatermarks(admin_pb2.ExportWatermarksRequest(topic=topic)):
        ends = answer.producer_name_offsets
        names = [answer.producer_names[start:end].decode() for start, end in itertools.pairwise(ends)]
        found |= dict(zip(names, answer.persisted, strict=True))
    return found


def check_watermarks(at: Dying) -> None:
    """They count from the last record on."""
    for step, count, is_in in [("log sync", 1, False), ("log sync", 3, True)]:
        topic = f"marks-{is_in}"
        at.create(topic)
        at.die_in(step, count, lambda topic=topic: at.import_marks(topic))  # type: ignore[misc]
        assert marks(at, topic) == (MARKS if is_in else {})
        at.import_marks(topic)
        assert marks(at, topic) == MARKS
        epochs = at.client.epochs(topic, "a", "b", "c")
        rows = [("a", 7), ("a", 8), ("b", 3), ("b", 4), ("c", 0)]
        receipt = at.client.publish_unary(topic, batch(rows, epochs, {"a": 6, "b": 2, "c": -1}))
        assert verdicts(receipt, 5) == [DUP, NOT_DUP, DUP, NOT_DUP, NOT_DUP]


# -- a topic whose log has lost its beginning -----------------------------------------------------------------------


class Trimmed:
    """The topic t: of "old" no message is left, of "p" the last ones."""

    def __init__(self, at: Dying) -> None:
        self.at = at
        policy = admin_pb2.TopicPolicy(retention_size_in_mb=0)
        at.client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t", policy=policy))
        self._epochs = at.client.epochs("t", "old", "p")
        at.client.publish_unary("t", batch([("old", 5)], self._epochs, {"old": -1}))
        self._last = -1
        for _ in range(FILLED):
            self.publish()
        at.snapshot("t")
        until = time.monotonic() + TIMEOUT_SECONDS
        while not at.client.topic("t").first_index:
            assert time.monotonic() < until
            time.sleep(0.01)

    def publish(self) -> None:
        """One more message of p."""
        self._last += 1
        frame = batch([("p", self._last)], self._epochs, payloads=[b"p/%d" % self._last + bytes(1000)])
        assert verdicts(self.at.client.publish_unary("t", frame), 1) == [NOT_DUP]

    def check(self) -> None:
        """It serves, and gives the verdicts that it would have given had nothing happened."""
        assert self.at.topic("t").state == admin_pb2.TOPIC_STATE_SERVING
        rows = [("old", 5), ("p", self._last)]
        again = self.at.client.publish_unary("t", batch(rows, self._epochs, {"old": -1}))
        assert list(again.verdicts) == [DUP, DUP]
        self.publish()
        first = self.at.client.topic("t").first_index
        assert [i for record in self.at.client.records("t") for i in record.batch.sequence_ids] == list(
            range(first - 1, self._last + 1)
        )


def check_snapshots(at: Dying, topic: Trimmed) -> None:
    """The imported one is there, and what came later is replayed."""
    saved = at.saved("t")
    topic.publish()
    at.snapshot("t")
    at.die_in("store sync", 1, lambda: at.import_snapshot(saved))
    assert at.topic("t").snapshot_index == saved[0].part.head.position.index + 1
    topic.check()


def check_rebuilding(at: Dying, topic: Trimmed) -> None:
    """The topic serves from what was there before, or says what to do: its log has lost its beginning."""
    topic.publish()
    at.die_in("store write", 2, lambda: at.rebuild("t"))
    found = at.topic("t")
    assert found.state == admin_pb2.TOPIC_STATE_DAMAGED
    assert "seqdedupe rebuild-topic" in found.why
    assert at.rebuild("t").state == admin_pb2.TOPIC_STATE_SERVING
    topic.check()


def test_all_of_it_or_nothing(start_dying: Callable[..., Dying]) -> None:
    at = start_dying()
    check_watermarks(at)
    topic = Trimmed(at)
    check_snapshots(at, topic)
    check_rebuilding(at, topic)


def test_control_where_parts_count_by_themselves_some_are_there(start_dying: Callable[..., Dying]) -> None:
    at = start_dying(in_several_steps=True)
    at.create("marks")
    at.die_in("log sync", 1, lambda: at.import_marks("marks"))
    assert marks(at, "marks") not in ({}, MARKS)


# -- a broker's own log ---------------------------------------------------------------------------------------------


LOG = [(i, b"at %d" % i) for i in range(4)]
"""Of a broker: a message of one producer each, and its position."""


def store(at: Dying, entries: int) -> None:
    """The broker attaches, replays what its log has of LOG, and stores up to so many entries."""
    with attached(at.sidecar.address, "t", "a") as broker:
        for admission, (sequence_id, position) in enumerate(LOG[replayed(broker.replay_after) : entries]):
            assert broker.judge((0, sequence_id)) == [NOT_DUP]
            broker.report(admission, persisted=1, position=position)
        broker.end()
    at.snapshot("t")


def replayed(position: bytes) -> int:
    """How many entries stand up to this position."""
    return [b"", *(at for _, at in LOG)].index(position)


@pytest.mark.parametrize("bug", [False, True])
def test_a_brokers_topic_is_what_its_store_says(start_dying: Callable[..., Dying], bug: bool) -> None:
    """Of what the broker was told that it may trim nothing but the snapshot knows. The control: where it is removed
    before another one is written, what is stored is new."""
    at = start_dying(in_several_steps=bug, log="broker")
    store(at, 2)
    saved = at.saved("t")
    at.die_in("store write", 2 if bug else 1, lambda: at.import_snapshot(saved))
    with attached(at.sidecar.address, "t", "a") as broker:
        assert replayed(broker.replay_after) == (0 if bug else 2)
        assert broker.judge((0, 0), (0, 1), (0, 2)) == ([NOT_DUP] * 3 if bug else [DUP, DUP, NOT_DUP])
    if bug:
        return
    at.client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="t"))
    # The snapshot is written, its topic is not.
    at.die_in("store write", 2, lambda: at.import_snapshot(saved))
    assert not at.client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    at.import_snapshot(saved)
    with attached(at.sidecar.address, "t", "a") as broker:
        assert broker.judge((0, 0), (0, 1), (0, 2)) == [DUP, DUP, NOT_DUP]
