"""kill -9 in the middle of an import or a rebuilding, at steps that are certain: all of it is there, or nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.attaching import attached
from tests.broker_sidecar.calls import DUP, NOT_DUP
from tests.broker_sidecar.kill_transfers import MARKS, Dying, Trimmed, check_marks, check_rebuilt, marks, settings

StartSidecar = Callable[..., Sidecar]


@pytest.fixture
def start_dying(start_sidecar: StartSidecar, tmp_path: Path) -> Iterator[Callable[..., Dying]]:
    started: list[Dying] = []

    def start(in_several_steps: bool = False, **keys: object) -> Dying:
        sidecar = start_sidecar(**settings(tmp_path, in_several_steps=in_several_steps), **keys)
        started.append(Dying(sidecar, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


def check_watermarks(at: Dying) -> None:
    """They count from the last record on."""
    for step, count, is_in in [("log sync", 1, False), ("log sync", 3, True)]:
        topic = f"marks-{is_in}"
        at.create(topic)
        assert at.died_in(step, count, lambda topic=topic: at.import_marks(topic))  # type: ignore[misc]
        assert marks(at, topic) == (MARKS if is_in else {})
        check_marks(at, topic)


def check_snapshots(at: Dying, topic: Trimmed) -> None:
    """The imported one is there, and what came later is replayed."""
    saved = at.saved("t")
    topic.publish()
    at.snapshot("t")
    assert at.died_in("store sync", 1, lambda: at.import_snapshot(saved))
    assert at.topic("t").snapshot_index == saved[0].part.head.position.index + 1
    topic.check()


def check_rebuilding(at: Dying, topic: Trimmed) -> None:
    """Without a snapshot a topic whose log has lost its beginning says what to do."""
    topic.publish()
    assert at.died_in("store write", 2, lambda: at.rebuild("t"))
    assert at.topic("t").state == admin_pb2.TOPIC_STATE_DAMAGED
    check_rebuilt(at, topic)


def test_all_of_it_or_nothing(start_dying: Callable[..., Dying]) -> None:
    at = start_dying()
    check_watermarks(at)
    topic = Trimmed(at)
    check_snapshots(at, topic)
    check_rebuilding(at, topic)


def test_control_where_parts_count_by_themselves_some_are_there(start_dying: Callable[..., Dying]) -> None:
    at = start_dying(in_several_steps=True)
    at.create("marks")
    assert at.died_in("log sync", 1, lambda: at.import_marks("marks"))
    assert marks(at, "marks") not in ({}, MARKS)


# -- a broker's own log ---------------------------------------------------------------------------------------------


LOG = [(i, b"at %d" % i) for i in range(4)]
"""For a broker: a message of one producer each, and its position."""


def store(at: Dying, entries: int) -> None:
    """The broker attaches, replays what its log has of LOG, and stores up to this many entries."""
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
    """For what the broker learned that it may trim nothing but the snapshot knows. The control: where it is removed
    before another one is written, what is stored is new."""
    at = start_dying(in_several_steps=bug, log="broker")
    store(at, 2)
    saved = at.saved("t")
    assert at.died_in("store write", 2 if bug else 1, lambda: at.import_snapshot(saved))
    with attached(at.sidecar.address, "t", "a") as broker:
        assert replayed(broker.replay_after) == (0 if bug else 2)
        assert broker.judge((0, 0), (0, 1), (0, 2)) == ([NOT_DUP] * 3 if bug else [DUP, DUP, NOT_DUP])
    if bug:
        return
    at.client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="t"))
    # The snapshot is written, its topic is not.
    assert at.died_in("store write", 2, lambda: at.import_snapshot(saved))
    assert not at.client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
    at.import_snapshot(saved)
    with attached(at.sidecar.address, "t", "a") as broker:
        assert broker.judge((0, 0), (0, 1), (0, 2)) == [DUP, DUP, NOT_DUP]
