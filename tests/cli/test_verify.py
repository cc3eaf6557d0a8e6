"""`seqdedupe publish --verify` against a real sidecar, and the merge by itself."""

import gzip
import json
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import NO_INT64S, Batch, Binary
from seqdedupe.cli.record_source import SourceRecord
from seqdedupe.cli.topic_comparison import Comparison
from seqdedupe.client import Message, StoredBatch
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run, lines

KINDS = ("payload_differs", "key_differs", "missing", "not_in_file", "out_of_order")


def report(run: Run, *arguments: str, status: int = 1) -> dict[str, Any]:
    done = run("publish", *arguments, "--verify", "--json", status=status)
    if status:
        assert json.loads(done.stderr)["error"]["reason"] == "SOURCE_DIFFERS"
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["records"] == found["same"] + found["payload_differs"] + found["key_differs"] + found["missing"]
    assert found["messages"] == found["records"] - found["missing"] + found["not_in_file"] + found["out_of_order"]
    return found


def differences(found: dict[str, Any]) -> list[tuple[str, int, int | None, int | None]]:
    return [(d["kind"], d["sequence_id"], d["index"], d["line"]) for d in found["differences"]]


FILES = {
    "a.gz": (gzip.compress(b"one\n\n\xff\n"), ()),
    "a.csv": (b'id,k\n\n5,"a\nb"\n7,\xff\n', ("--sequence-id-column", "id", "--key-column", "k")),
    "a.jsonl": (b'{"id": 5, "k": "a"}\n\n{"id": 7, "k": null}\n', ("--sequence-id-path", "id", "--key-path", "k")),
}


@pytest.mark.parametrize("name", FILES)
def test_what_was_published_is_the_same_and_nothing_is_published(run: Run, tmp_path: Path, name: str) -> None:
    data, options = FILES[name]
    (tmp_path / name).write_bytes(data)
    publish = (name, "--topic", f"same-{name}", "--producer", "p", *options)
    run("topics", "create", f"same-{name}")
    before = report(run, *publish)
    said = run("publish", *publish, "--verify", status=1).stderr
    assert b"The topic has no messages of this producer. Check the names" in said
    assert before["missing"] == before["records"] > 0
    assert run("read", f"same-{name}").stdout == b""
    run("publish", *publish)
    stored = run("producers", f"same-{name}", "--json").stdout
    found = report(run, *publish, status=0)
    assert found["same"] == found["records"] == found["messages"] == before["records"]
    assert found["differences"] == []
    assert run("producers", f"same-{name}", "--json").stdout == stored  # nobody was fenced
    assert run("publish", *publish, "--verify").stdout.endswith(b" the same\n")


def test_each_kind_of_difference_is_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,k\n1,a\n2,b\n4,d\n6,f\n9,z\n")
    columns = ("--sequence-id-column", "id", "--key-column", "k")
    publish = ("a.csv", "--topic", "kinds", "--producer", "p", *columns)
    run("publish", *publish)
    (tmp_path / "a.csv").write_bytes(b'id,k\n1,a\n2,"b"\n3,c\n6,F\n9,z\n10,new\n')
    found = report(run, *publish)
    assert differences(found) == [
        ("payload_differs", 2, 1, 3),
        ("missing", 3, None, 4),
        ("not_in_file", 4, 2, None),
        ("payload_differs", 6, 3, 5),
        ("missing", 10, None, 7),
    ]
    assert [found[kind] for kind in KINDS] == [2, 0, 2, 1, 0]
    assert run("publish", *publish, "--verify", status=1).stdout.decode().splitlines() == [
        "6 records, 5 messages of this producer: 2 the same",
        "DIFFERENCE            SEQUENCE ID  INDEX  LINE",
        "with another payload            2      1     3",
        "with another payload            6      3     5",
        "missing in the topic            3      -     4",
        "missing in the topic           10      -     7",
        "not in the file                 4      2     -",
    ]


def test_a_key_that_was_not_asked_for_differs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,k\n1,a\n")
    publish = ("a.csv", "--topic", "keys", "--producer", "p", "--sequence-id-column", "id")
    run("publish", *publish, "--key-column", "k")
    assert differences(report(run, *publish)) == [("key_differs", 1, 0, 2)]


def test_ten_of_each_kind_are_shown_and_all_are_counted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(3000))
    publish = ("a", "--topic", "many", "--producer", "p")
    run("publish", *publish)
    (tmp_path / "a").write_bytes(lines(1000).replace(b"record", b"other"))
    found = report(run, *publish)
    assert (found["payload_differs"], found["not_in_file"], len(found["differences"])) == (1000, 2000, 20)
    text = run("publish", *publish, "--verify", status=1).stdout.decode().splitlines()
    assert text[-2:] == ["and 990 more with another payload", "and 1,990 more not in the file"]
    assert len(text) == 1 + 1 + 20 + 2


def test_other_producers_messages_are_not_looked_at(run: Run, tmp_path: Path, shared_sidecar: Sidecar) -> None:
    (tmp_path / "a").write_bytes(lines(5))
    publish = ("--topic", "mixed", "--producer")
    run("publish", "a", *publish, "p")
    with Client(shared_sidecar.address) as client, client.producer("mixed", "other") as other:
        other.send_batch([b"x"] * 7)
    assert report(run, "a", *publish, "p", status=0)["messages"] == 5
    assert report(run, "a", *publish, "nobody")["missing"] == 5


def test_what_the_topic_holds_twice_is_out_of_order(run: Run, tmp_path: Path, shared_sidecar: Sidecar) -> None:
    run("topics", "create", "twice", "--no-deduplication")
    with Client(shared_sidecar.address) as client:
        for payload in (b"a", b"changed"):
            with client.producer("twice", "p") as producer:
                producer.send(payload, 0)
    (tmp_path / "a").write_bytes(b"a\n")
    assert differences(report(run, "a", "--topic", "twice", "--producer", "p")) == [("out_of_order", 0, 1, None)]


def test_a_last_line_without_its_end_is_not_compared(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "a").write_bytes(b"one\ntwo")
    publish = ("publish", "a", "--topic", "half", "--producer", "p")
    run(*publish, "--final")
    done = subprocess.run(
        [COMMAND, *publish, "--verify"], cwd=tmp_path, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 1
    assert b"1 record, 2 messages of this producer: 1 the same\n" in done.stdout
    assert b"line 2, the last one, does not end with a newline; it was not compared [SOURCE_INCOMPLETE]" in done.stderr
    assert report(run, *publish[1:], "--final", status=0)["same"] == 2


def test_standard_input_is_compared_too(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "a").write_bytes(lines(3))
    where = ("--topic", "pipe", "--producer", "p")
    run("publish", "a", *where)
    done = subprocess.run(
        [COMMAND, "publish", "-", *where, "--verify"],
        input=lines(3), env=environment, capture_output=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"3 records, 3 messages of this producer: 3 the same\n")


def test_bad_input_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id\n5\n4\n")
    run("topics", "create", "bad")
    where = ("publish", "a.csv", "--producer", "p", "--verify", "--topic")
    assert b"[NOT_ASCENDING]" in run(*where, "bad", "--sequence-id-column", "id", status=1).stderr
    assert b"[TOPIC_NOT_FOUND]" in run(*where, "nowhere", status=1).stderr
    assert b"[INVALID_TOPIC_NAME]" in run(*where, "a b", status=1).stderr
    assert b"[INVALID_NAME]" in run("publish", "a.csv", "--producer", "", "--topic", "bad", "--verify", status=1).stderr
    for option in ("--follow", "--trust-source"):
        assert b"--verify excludes" in run(*where, "bad", option, status=2).stderr
    both = ("--key-column", "id", "--key-path", "id")
    assert b"Give columns (CSV and Parquet) or paths" in run(*where, "bad", *both, status=2).stderr


def _messages(count: int, size_bytes: int) -> Iterator[Message]:
    for index in range(count):
        batch = Batch(
            producer_names=Binary.of([b"p"]),
            epochs=np.ones(1, np.int64),
            previous_sequence_ids=NO_INT64S,
            sequence_ids=np.array([index], np.int64),
            payloads=Binary.of([bytes(size_bytes)]),
        )
        yield Message(StoredBatch(batch, index, 0, 1), 0)


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_does_not_grow_with_the_file(kept: int) -> None:
    """The control arm keeps the messages, and is seen to."""
    count, size_bytes, most_bytes = 2_000, 10_000, 1_000_000
    held = list[Message]()

    def messages() -> Iterator[Message]:
        for message in _messages(count, size_bytes):
            if kept:
                held.append(message)
            yield message

    comparison = Comparison("t", "p")
    # Every other record is one of which the topic has nothing.
    records = (SourceRecord(i, 2 * i, bytes(size_bytes), None, i + 1) for i in range(count))
    tracemalloc.start()
    comparison.compare(records, messages())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (comparison.same, comparison.counts["missing"], comparison.counts["not_in_file"]) == (1000, 1000, 1000)
    assert (peak > most_bytes) == bool(kept)
