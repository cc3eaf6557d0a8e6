"""The commands by the name of a partitioned topic."""

import json
import os
from pathlib import Path
from typing import Any

from seqdedupe.client import ProducerConfig
from seqdedupe.client.blocking import Client
from seqdedupe.client.producer import PartitionedProducer
from seqdedupe.testing import Sidecar
from tests.cli.conftest import Run

ROWS = 3000
PUBLISH = ("--producer", "p", "--sequence-id-column", "id", "--key-column", "user", "--json")


def table(first: int, last: int, text: str = "text") -> bytes:
    """A file with records of twenty users."""
    rows = (b"%d,user-%d,%s %d\n" % (3 * i, i * 7 % 20, text.encode(), i) for i in range(first, last))
    return b"id,user,text\n" + b"".join(rows)


def ids_of(run: Run, topic: str) -> list[list[int]]:
    """The sequence IDs in each partition, as they stand there; the command for the whole finds the same."""
    parts: list[list[int]] = []
    for k in range(3):
        found = run("read", f"{topic}-partition-{k}", "--json").stdout.splitlines()
        parts.append([json.loads(line)["sequence_id"] for line in found])
    whole: list[list[int]] = [[], [], []]
    for line in map(json.loads, run("read", topic, "--json").stdout.splitlines()):
        whole[line["partition"]].append(line["sequence_id"])
        assert next(iter(line)) == "partition"
    assert whole == parts
    return parts


def test_a_topic_is_made_listed_shown_and_deleted(run: Run) -> None:
    made = run("topics", "create", "whole", "--partitions", "3").stdout.decode().splitlines()
    assert (
        made[2]
        == "partitions    3, persistent://public/default/whole-partition-0 and on: each can be shown by its name"
    )
    assert run("topics", "show", "whole").stdout.decode().splitlines()[:2] == made[:2]
    listed = [line.split()[0] for line in run("topics").stdout.decode().splitlines() if "/whole" in line]
    names = [f"persistent://public/default/whole{tail}" for tail in ("", *(f"-partition-{k}" for k in range(3)))]
    assert listed == names
    assert b"whole (3 partitions)" in run("topics").stdout
    part = json.loads(run("topics", "show", "whole-partition-1", "--json").stdout)
    assert (part["partition_of"], part["partitions"]) == (names[0], 0)
    assert b"partition of  persistent://public/default/whole\n" in run("topics", "show", "whole-partition-1").stdout
    whole = json.loads(run("topics", "show", "whole", "--json").stdout)
    assert (whole["partitions"], whole["messages"], whole["last"]) == (3, None, None)
    assert b"[TOPIC_IS_PARTITIONED]" in run("producers", "whole", status=1).stderr
    assert b"[INVALID_REQUEST]" in run("topics", "delete", "whole-partition-1", status=1).stderr
    run("topics", "delete", "whole")
    assert b"[TOPIC_NOT_FOUND]" in run("topics", "show", "whole-partition-1", status=1).stderr
    assert b"Invalid value" in run("topics", "create", "whole", "--partitions", "0", status=2).stderr


def test_a_file_is_published_once_and_read(run: Run, tmp_path: Path) -> None:
    run("topics", "create", "file", "--partitions", "3")
    (tmp_path / "a.csv").write_bytes(table(0, ROWS))
    done = json.loads(run("publish", "a.csv", "--topic", "file", *PUBLISH).stdout)
    assert (done["not_dup"], done["dup"], done["resumed_after"]) == (ROWS, 0, None)
    parts = ids_of(run, "file")
    assert sorted(i for ids in parts for i in ids) == list(range(0, 3 * ROWS, 3))
    assert all(ids and ids == sorted(ids) for ids in parts)
    # Again, and grown: what is there already is Dup, and no more than was in flight is sent again.
    (tmp_path / "a.csv").write_bytes(table(0, ROWS + 10))
    done = json.loads(run("publish", "a.csv", "--topic", "file", *PUBLISH).stdout)
    assert (done["read"], done["not_dup"]) == (ROWS + 10, 10)
    verify = ("publish", "a.csv", "--topic", "file", *PUBLISH, "--verify")
    compared = json.loads(run(*verify).stdout)
    assert (compared["same"], compared["missing"], compared["out_of_order"]) == (ROWS + 10, 0, 0)
    assert run("read", "file", "--where", "partition=2", "--json").stdout.count(b"\n") == len(ids_of(run, "file")[2])
    assert run("read", "file", "--limit", "5").stdout.count(b"\n") == 5
    # The next file of the same producer.
    (tmp_path / "b.csv").write_bytes(table(ROWS + 10, ROWS + 20))
    assert json.loads(run("publish", "b.csv", "--topic", "file", *PUBLISH).stdout)["not_dup"] == 10


def crash(address: str, topic: str, count: int) -> None:
    """The records of a file up to this one are sent, and those to one partition do not come there from the half on."""
    config = ProducerConfig(max_batch_rows=10)
    rows = table(0, count).splitlines()[1:]
    with Client(address) as client:
        producer = client.producer(topic, "p", config)
        producer.open()
        assert isinstance(producer._sends, PartitionedProducer)
        parts: list[Any] = producer._sends.parts
        for i, row in enumerate(rows):
            if i == count // 2:
                producer.flush()
                parts[1].session.next_frame = lambda: None
            user = row.split(b",")[1]
            producer.send(row, 3 * i, key=user, properties={"seqdedupe.record": str(i)})
        for k in (0, 2):
            for pending in parts[k].session.queue.entries:
                while not pending.settled:
                    parts[k].seal()
        producer.abort()


def test_what_a_crash_has_left_out_is_published(shared_sidecar: Sidecar, run: Run, tmp_path: Path) -> None:
    run("topics", "create", "crash", "--partitions", "3")
    crash(shared_sidecar.address, "crash", 200)
    before = ids_of(run, "crash")
    missing = {3 * i for i in range(200)} - {i for ids in before for i in ids}
    assert min(missing) < max(before[0])
    # Another file is refused, by any partition's last record, before anything is sent.
    for other in (table(0, 400, "other"), table(0, 400).replace(b"text 95\n", b"text 95\n286,user-1,x\n", 1)):
        (tmp_path / "a.csv").write_bytes(other)
        assert b'"SOURCE_CHANGED"' in run("publish", "a.csv", "--topic", "crash", *PUBLISH, status=1).stderr
    (tmp_path / "a.csv").write_bytes(table(0, 60))
    assert b'"SOURCE_UNVERIFIED"' in run("publish", "a.csv", "--topic", "crash", *PUBLISH, status=1).stderr
    assert ids_of(run, "crash") == before
    (tmp_path / "a.csv").write_bytes(table(0, 400))
    done = json.loads(run("publish", "a.csv", "--topic", "crash", *PUBLISH).stdout)
    assert done["not_dup"] == len(missing) + 200
    assert 0 < done["resumed_after"] < min(missing)
    assert sorted(i for ids in ids_of(run, "crash") for i in ids) == [3 * i for i in range(400)]


def test_places_of_the_other_kind_are_refused(run: Run, shared_sidecar: Sidecar) -> None:
    run("topics", "create", "places", "--partitions", "2")
    run("topics", "create", "plain")
    for start in ("0", "5:1", "5@1"):
        assert b"[INVALID_POSITION]" in run("read", "places", "--from", start, status=1).stderr
    assert b"[INVALID_POSITION]" in run("read", "plain", "--from", "partitions-1:5@1,5@1", status=1).stderr
    with Client(shared_sidecar.address) as client:
        with client.producer("places", "p") as producer:
            for i in range(10):
                producer.send(b"%d" % i, key=os.urandom(4))
        with client.partitioned_reader("places") as reader:
            for _ in range(6):
                next(reader)
            position = str(reader.position)
    assert run("read", "places", "--from", position).stdout.count(b"\n") == 4
    assert run("read", "places", "--from", "latest").stdout == b""


def test_bench_begins_after_all_that_is_there(run: Run) -> None:
    run("topics", "create", "bench", "--partitions", "3")
    for _ in range(2):
        run("bench", "bench", "--messages", "500", "--names", "4", "--json")
    shown = json.loads(run("topics", "show", "bench", "--json").stdout)
    assert (shown["not_dup"], shown["dup"]) == (1000, 0)
