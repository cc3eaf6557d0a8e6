"""Backups at random moments under load, each restored and compared with what was acknowledged; a campaign of them.

`python -m tests.kernels tests.broker_sidecar.backup_campaign --backups 100 --seed 1`
"""

import argparse
import itertools
import random
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from seqdedupe.client.blocking import Client as Operator
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.transfer.backup import restore
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import pausing
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch, names_of, record_rows, verdicts
from tests.broker_sidecar.load import Publisher

EVERY_SECONDS = 0.15
"""Between two backups, at most."""
A_ROUND = 10
"""This many are of one load."""


def settings(folder: Path, **more: str) -> dict[str, Any]:
    """For a sidecar whose backups can be stopped half-way, with snapshots all the time."""
    backups = folder / "backups"
    backups.mkdir(exist_ok=True)
    return {
        "module": pausing.MODULE,
        "environment": pausing.environment(folder, **more),
        "backup_directory": backups,
        "deduplication_entries_interval": 20,
    }


class Churn(threading.Thread):
    """Makes topics and deletes them again."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._stopping = threading.Event()

    def run(self) -> None:
        client = Client(self._address)
        for number in itertools.count():
            if self._stopping.wait(0.02):
                break
            partitions = 2 * (number % 2)
            client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=f"churn-{number}", partitions=partitions))
            if number >= 3:
                client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=f"churn-{number - 3}"))
        client.close()

    def finish(self) -> None:
        self._stopping.set()
        self.join(LAST_RESORT_SECONDS)
        assert not self.is_alive()


class Load:
    """Publishers on a topic that keeps all, on one that keeps hardly anything, and on one that syncs seldom."""

    def __init__(self, sidecar: Sidecar, seed: int) -> None:
        self.topics = {"kept": ["k-1", "k-2", "k-3"], "trimmed": ["t-1", "t-2"], "late": ["l-1"]}
        client = Client(sidecar.address)
        policies = {
            "kept": admin_pb2.TopicPolicy(),
            "trimmed": admin_pb2.TopicPolicy(retention_size_in_mb=0),
            "late": admin_pb2.TopicPolicy(log_flush_interval_messages=1000, log_flush_interval_ms=50),
        }
        for topic, policy in policies.items():
            client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, policy=policy))
        client.close()
        self.publishers = {
            topic: Publisher(sidecar.address, topic, names, seed + k)
            for k, (topic, names) in enumerate(self.topics.items())
        }
        self.churn = Churn(sidecar.address)
        for thread in (*self.publishers.values(), self.churn):
            thread.start()

    def acknowledged(self) -> dict[str, dict[str, int]]:
        """How many of the IDs of each producer have a receipt, at least."""
        return {topic: dict(publisher._done) for topic, publisher in self.publishers.items()}

    def finish(self) -> None:
        self.churn.finish()
        for publisher in self.publishers.values():
            publisher.finish()


def stored(client: Client, topic: str) -> dict[str, list[int]]:
    """The IDs in the log by producer, in order; the links prove that none is missing between them."""
    found: dict[str, list[int]] = defaultdict(list)
    next_index = None
    for record in client.records(topic):
        assert next_index in (None, record.base_index)
        next_index = record.base_index + record.rows
        links = dict(zip(names_of(record.batch), record.batch.previous_sequence_ids, strict=True))
        for name, link in links.items():
            assert not found[name] or link == found[name][-1]
        for name, sequence_id in record_rows(record):
            found[name].append(sequence_id)
    return found


def check(
    client: Client, topic: str, sent: dict[str, list[int]], acknowledged: dict[str, int], *, all_of_it: bool
) -> None:
    """A restored topic has what was acknowledged before its backup began, each once, in order; its verdicts are
    right for what it has and for what it lacks."""
    found = stored(client, topic)
    opened = client.open(topic, *sent)
    epochs = dict(zip(sent, opened.epochs, strict=True))
    for (name, ids), persisted in zip(sent.items(), opened.persisted, strict=True):
        end = ids.index(persisted) + 1 if persisted >= 0 else 0
        assert end >= acknowledged[name], (topic, name)
        assert found[name] == ids[end - len(found[name]) : end], (topic, name)
        assert not all_of_it or len(found[name]) == end
        if end:
            again = client.publish_unary(topic, batch([(name, persisted)], epochs, {name: -1}))
            assert verdicts(again, 1) == [DUP]
        new = client.publish_unary(topic, batch([(name, persisted + 1)], epochs, {name: persisted}))
        assert verdicts(new, 1) == [NOT_DUP]


def check_restored(backup: Path, to: Path, load: Load, acknowledged: dict[str, dict[str, int]]) -> None:
    """A backup is whole, a sidecar starts on it, and everything is as `check` says."""
    manifests = restore(backup, to / "data")
    assert not any(one.damaged or one.left_out for one in manifests)
    with Sidecar(to) as sidecar:
        client = Client(sidecar.address)
        listed = client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics
        assert {one.state for one in listed} == {admin_pb2.TOPIC_STATE_SERVING}, listed
        for topic, publisher in load.publishers.items():
            sent = {name: list(ids) for name, ids in publisher.ids.items()}
            check(client, topic, sent, acknowledged[topic], all_of_it=topic != "trimmed")
        client.close()
    shutil.rmtree(to)


def round_(folder: Path, backups: int, seed: int) -> None:
    """This many backups at random moments of one load, each restored and compared when it has ended."""
    rng = random.Random(seed)
    acknowledged = []
    with Sidecar(folder / "sidecar", **settings(folder)) as sidecar, Operator(sidecar.address) as operator:
        load = Load(sidecar, seed)
        pausing.wait_for(lambda: all(sum(publisher.verdicts) for publisher in load.publishers.values()))
        for number in range(backups):
            time.sleep(rng.uniform(0, EVERY_SECONDS))
            acknowledged.append(load.acknowledged())
            operator.admin.backup(f"{number}")
        load.finish()
        assert operator.admin.topic("trimmed").first_index > 0
    for number in range(backups):
        check_restored(folder / "backups" / f"{number}", folder / "restored", load, acknowledged[number])
        print(f"{number}: whole", flush=True)


def campaign(backups: int, seed: int) -> None:
    """Round after round, until this many backups were restored."""
    for number in range(0, backups, A_ROUND):
        with tempfile.TemporaryDirectory() as folder:
            round_(Path(folder), min(A_ROUND, backups - number), seed + number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backups", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    campaign(told.backups, told.seed)
