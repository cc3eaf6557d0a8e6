"""Data of this version of the program, for later ones to be tried on: `python -m tests.data.make_release`.

What a sidecar leaves that was killed, with something of every format on the disk, packed, and what it said before.
"""

import json
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import pausing

RELEASES = Path(__file__).with_name("releases")
SEVERAL = [f"several-{k}" for k in range(4)]
"""Published to at once, so that there is a journal."""


def described(client: Client) -> dict[str, Any]:
    """What is the same whenever the data is opened: policies, producers, and all messages."""
    topics = [topic for topic in client.admin.topics() if not topic.partitions]
    return {
        "partitioned": {topic.name: topic.partitions for topic in client.admin.topics() if topic.partitions},
        "topics": {topic.name: _topic(client, topic) for topic in topics},
    }


def _topic(client: Client, topic: admin_pb2.Topic) -> dict[str, Any]:
    with client.reader(topic.name) as reader:
        messages = [
            [m.index, m.sequence_id, str(m.key), m.properties, m.event_time_ms, (m.payload or b"").hex()]
            for m in reader
        ]
    return {
        "incarnation": topic.incarnation,
        "state": admin_pb2.TopicState.Name(topic.state),
        "first_index": topic.first_index,
        "policy": json_format.MessageToDict(topic.set_policy),
        "producers": {one.name: one.persisted for one in client.admin.producers(topic.name)},
        "messages": messages,
    }


def fill(client: Client, folder: Path) -> None:
    """Something of every kind."""
    admin = client.admin
    admin.create_topic("plain")
    with client.producer("plain", "p") as producer, client.producer("plain", "q") as other:
        for i in range(0, 20, 2):
            producer.send(
                b"payload %d" % i, sequence_id=i, key=b"key", properties={"name": "value"}, event_time=1000 + i
            )
        other.send(b"other", sequence_id=2**40)
        producer.flush()
        other.flush()
        admin.snapshot("plain")
        producer.send(b"after the snapshot", sequence_id=100)
    admin.create_topic("reset", policy=admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT))
    with client.producer("reset", "p") as producer:
        for i in range(5):
            producer.send(b"%d" % i, sequence_id=i)
    admin.reset_producer("reset", "p", 2)
    admin.create_topic("trimmed", policy=admin_pb2.TopicPolicy(retention_size_in_mb=0))
    with client.producer("trimmed", "p") as producer:
        for i in range(30):
            producer.send(b"%d " % i + bytes(1000), sequence_id=i)
            producer.flush()
    admin.snapshot("trimmed")
    pausing.wait_for(lambda: admin.topic("trimmed").first_index > 0)
    admin.create_topic("parts", partitions=3)
    admin.create_topic("imported")
    admin.export_watermarks("plain", folder / "marks")
    admin.import_watermarks("imported", folder / "marks")
    admin.set_policy("public/default", admin_pb2.TopicPolicy(deduplication_entries_interval=500))
    admin.create_topic("deleted")
    admin.delete_topic("deleted")
    for topic in SEVERAL:
        admin.create_topic(topic)


def _publish_at_once(client: Client, journal: Path) -> None:
    """Until a round of the journal has several topics."""
    producers = [client.producer(topic, "p") for topic in SEVERAL]
    for producer in producers:
        producer.open()
    i = 0
    while not any(path.stat().st_size for path in journal.glob("*.journal")):
        for producer in producers:
            producer.send(b"%d" % i, sequence_id=i)
        i += 1
    for producer in producers:
        producer.flush()
        producer.close()


def _files(data: Path) -> Iterator[Path]:
    for path in sorted(data.rglob("*")):
        # RocksDB's own notes are of no use, and long.
        if path.is_file() and not path.name.startswith("LOG") and "kernels" not in path.parts:
            yield path


def make(to: Path) -> None:
    """Writes `to`.tar.xz and `to`.json."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sidecar = Sidecar(folder, module=pausing.MODULE, environment=pausing.environment(folder))
        with sidecar, Client(sidecar.address) as client:
            fill(client, folder)
            _publish_at_once(client, sidecar.data / "logs" / "journal")
            said = described(client)
            sidecar.kill()
            with tarfile.open(to.with_name(f"{to.name}.tar.xz"), "w:xz") as packed:
                for path in _files(sidecar.data):
                    packed.add(path, path.relative_to(sidecar.data))
    with to.with_name(f"{to.name}.json").open("w") as file:
        json.dump(said, file, indent=1, sort_keys=True)
        file.write("\n")


def unpack(release: str, to: Path) -> dict[str, Any]:
    """A release's data directory; what is to come of it."""
    with tarfile.open(RELEASES / f"{release}.tar.xz") as packed:
        packed.extractall(to, filter="data")
    said: dict[str, Any] = json.loads((RELEASES / f"{release}.json").read_text())
    return said


if __name__ == "__main__":
    made = RELEASES / version("seqdedupe")
    if made.with_name(f"{made.name}.json").exists():
        raise SystemExit(f"{made}.json is there: what a release has written is never changed")
    make(made)
    print(f"{made}.tar.xz")
