"""A file whose record at the last place is the same, and which is another file: the hash of all records tells."""

import hashlib
import json
from pathlib import Path

import pytest

from seqdedupe.cli import publish_command
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import Run

END = b"-- end of the day --\n"
COUNTS = (1, 15, 16, 17, 100)


def log_of(day: str, count: int) -> bytes:
    """A day's log, whose last record is the same on each day."""
    return b"".join(b"%s %d\n" % (day.encode(), number) for number in range(count)) + END


def publish(topic: str) -> tuple[str, ...]:
    return ("publish", "a.log", "--topic", topic, "--producer", "p")


@pytest.mark.parametrize("count", COUNTS)
def test_a_rotated_file_is_refused(run: Run, tmp_path: Path, count: int) -> None:
    topic = f"rotated-{count}"
    (tmp_path / "a.log").write_bytes(log_of("monday", count))
    run(*publish(topic))
    (tmp_path / "a.log").write_bytes(log_of("tuesday", count) + b"more\n")
    for trust in ((), ("--trust-source",)):
        error = run(*publish(topic), *trust, status=1).stderr
        assert b"are not those that were published; nothing was sent [SOURCE_CHANGED]" in error
    assert run("read", topic).stdout == log_of("monday", count)
    # Control: the file that was published goes on.
    (tmp_path / "a.log").write_bytes(log_of("monday", count) + b"more\n")
    assert b": 1 NotDup" in run(*publish(topic)).stdout


def test_of_messages_without_a_hash_the_last_record_alone_is_compared(
    run: Run, tmp_path: Path, shared_sidecar: Sidecar
) -> None:
    """Those of older versions; the control arm, too: without the hash the records of another file are omitted."""
    with Client(shared_sidecar.address) as client, client.producer("older", "p") as producer:
        for line in log_of("monday", 100).splitlines():
            producer.send(line)
    (tmp_path / "a.log").write_bytes(log_of("tuesday", 100) + b"more\n")
    assert b"resumed after sequence ID 100: 1 NotDup" in run(*publish("older")).stdout
    # What was published now has a hash, of the file that it came from.
    (tmp_path / "a.log").write_bytes(log_of("tuesday", 100) + b"more\n" * 20)
    run(*publish("older"))
    (tmp_path / "a.log").write_bytes(log_of("sunday", 100) + b"more\n" * 20)
    assert b"[SOURCE_CHANGED]" in run(*publish("older"), status=1).stderr


def test_the_hash_is_found_among_messages_of_others(run: Run, tmp_path: Path, shared_sidecar: Sidecar) -> None:
    (tmp_path / "a.log").write_bytes(log_of("monday", 80))
    with (
        Client(shared_sidecar.address) as client,
        client.producer("between", "other") as other,
        client.producer("between", "p") as producer,
    ):
        lines = log_of("monday", 80).splitlines()
        for number, line in enumerate(lines):
            so_far = b"".join(one + b"\n" for one in lines[: number + 1])
            text = "1-" + hashlib.blake2b(so_far, digest_size=8).hexdigest()
            # As the command would do it, if it were slow.
            producer.send(line, properties={publish_command.HASH_PROPERTY: text} if number == 63 else None)
            producer.flush()
            for _ in range(20 if number < 63 else 80):  # the hash is more than 1,024 messages before the last record
                other.send(b"x")
            other.flush()
    run(*publish("between"))
    (tmp_path / "a.log").write_bytes(log_of("tuesday", 80))
    assert (
        b"the records up to sequence ID 63 are not those that were published"
        in run(*publish("between"), status=1).stderr
    )


def test_the_hash_is_that_of_the_files_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(log_of("monday", 40))
    run(*publish("bytes"))
    found = {
        message["sequence_id"]: message["properties"]["seqdedupe.hash"]
        for message in map(json.loads, run("read", "bytes", "--json").stdout.splitlines())
        if message["properties"]
    }
    assert list(found) == [*range(16), 31]
    lines = log_of("monday", 40).splitlines(keepends=True)
    for number, text in found.items():
        assert text == "1-" + hashlib.blake2b(b"".join(lines[: number + 1]), digest_size=8).hexdigest()


def test_a_hash_of_a_newer_version_is_not_understood(run: Run, tmp_path: Path, shared_sidecar: Sidecar) -> None:
    with Client(shared_sidecar.address) as client, client.producer("newer", "p") as producer:
        producer.send(b"a", properties={"seqdedupe.hash": "2-00"})
    (tmp_path / "a.log").write_bytes(b"a\nb\n")
    assert b"[NEWER_FORMAT]" in run(*publish("newer"), status=1).stderr


def test_a_next_file_of_the_same_producer_has_a_hash_of_its_own(run: Run, tmp_path: Path) -> None:
    flags = ("--topic", "next", "--producer", "p", "--sequence-id-column", "id")
    for first in (0, 100, 200):
        rows = [b"%d,x\n" % (first + number) for number in range(40)]
        (tmp_path / "a.csv").write_bytes(b"id,text\n" + b"".join(rows))
        assert b": 40 NotDup" in run("publish", "a.csv", *flags).stdout
        (tmp_path / "a.csv").write_bytes(b"id,text\n" + b"".join(rows) + b"%d,y\n" % (first + 50))
        assert b": 1 NotDup" in run("publish", "a.csv", *flags).stdout
    (tmp_path / "a.csv").write_bytes(b"id,text\n" + rows[0].replace(b"x", b"z") + b"".join(rows[1:]) + b"250,y\n")
    assert b"[SOURCE_CHANGED]" in run("publish", "a.csv", *flags, status=1).stderr
