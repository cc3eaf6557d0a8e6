"""Topics whose numbers are imported or made again while their sidecar dies; and a campaign of random steps for that."""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import dying
from tests.broker_sidecar.calls import DUP, NOT_DUP, TIMEOUT_SECONDS, Client, batch, offsets, verdicts

MARKS = {"a": 7, "b": 3}
FILLED = 40
"""Messages, several segments of them."""


def settings(folder: Path, *, in_several_steps: bool = False) -> dict[str, Any]:
    """For a sidecar that dies at will, and takes no snapshot by itself."""
    return {
        "module": dying.MODULE,
        "environment": dying.environment(folder, in_several_steps=in_several_steps),
        "deduplication_entries_interval": 10**6,
        "deduplication_snapshot_interval_seconds": 0,
    }


class Dying:
    """A sidecar that dies at will, and a client of it."""

    def __init__(self, sidecar: Sidecar, folder: Path) -> None:
        self._folder = folder
        self.sidecar = sidecar
        self.client = Client(sidecar.address)

    def died_in(self, step: str, count: int, call: Callable[[], object]) -> bool:
        return dying.died_in(self.sidecar, self._folder, step, count, call)

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


def marks(at: Dying, topic: str) -> dict[str, int]:
    """What the topic says of the producers that are imported."""
    assert at.topic(topic).state == admin_pb2.TOPIC_STATE_SERVING
    found: dict[str, int] = {}
    for answer in at.client.admin.ExportWatermarks(admin_pb2.ExportWatermarksRequest(topic=topic)):
        ends = answer.producer_name_offsets
        names = [answer.producer_names[start:end].decode() for start, end in itertools.pairwise(ends)]
        found |= dict(zip(names, answer.persisted, strict=True))
    return found


def check_marks(at: Dying, topic: str) -> None:
    """The import is repeated, and then each verdict is right."""
    at.import_marks(topic)
    assert marks(at, topic) == MARKS
    epochs = at.client.epochs(topic, "a", "b", "c")
    rows = [("a", 7), ("a", 8), ("b", 3), ("b", 4), ("c", 0)]
    receipt = at.client.publish_unary(topic, batch(rows, epochs, {"a": 6, "b": 2, "c": -1}))
    assert verdicts(receipt, 5) == [DUP, NOT_DUP, DUP, NOT_DUP, NOT_DUP]


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
        # From here on nothing is dropped while it is read.
        kept = admin_pb2.TopicPolicy(retention_size_in_mb=-1)
        at.client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="t", policy=kept))

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


def check_rebuilt(at: Dying, topic: Trimmed) -> None:
    """The topic serves, or says what to do: its log has lost its beginning."""
    found = at.topic("t")
    if found.state == admin_pb2.TOPIC_STATE_DAMAGED:
        assert "seqdedupe rebuild-topic" in found.why
        assert at.rebuild("t").state == admin_pb2.TOPIC_STATE_SERVING
    topic.check()


def campaign(kills: int, seed: int) -> None:
    """This many times a call in which the sidecar may die at some step."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder), **settings(Path(folder))) as sidecar:
        at = Dying(sidecar, Path(folder))
        topic = Trimmed(at)
        for kill in range(kills):
            what = rng.choice(["marks", "snapshot", "rebuild"])
            steps = ["log write", "log sync"] + ["store write", "store sync"] * (what != "marks")
            step, count = rng.choice(steps), rng.randint(1, 3)
            topic.publish()
            if rng.random() < 0.5:
                at.snapshot("t")
            saved = at.saved("t")
            topic.publish()
            if what == "marks":
                at.create(f"marks-{kill}")
                died = at.died_in(step, count, lambda kill=kill: at.import_marks(f"marks-{kill}"))  # type: ignore[misc]
                assert marks(at, f"marks-{kill}") in ({}, MARKS)
                check_marks(at, f"marks-{kill}")
                topic.check()
            elif what == "snapshot":
                died = at.died_in(step, count, lambda saved=saved: at.import_snapshot(saved))  # type: ignore[misc]
                topic.check()
            else:
                died = at.died_in(step, count, lambda: at.rebuild("t"))
                check_rebuilt(at, topic)
            print(f"{kill}: {what}, {step} {count}: {'died' if died else 'was not reached'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    campaign(told.kills, told.seed)
