"""`read --from`, `--to` and `--tail`: from, up to and after times, indexes and positions."""

import json
import re
import subprocess
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from seqdedupe.cli.read_command import PublishTime
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run
from tests.processes import running

MESSAGES = 40


def published(sidecar: Sidecar, topic: str, partitions: int = 0) -> None:
    """Publish messages, each with a later publish time than the one before it."""
    with Client(sidecar.address) as client:
        if partitions:
            client.admin.create_topic(topic, partitions=partitions)
        with client.producer(topic, "p") as producer:
            last_ms = 0
            for i in range(MESSAGES):
                while time.time_ns() // 1_000_000 <= last_ms:
                    pass
                producer.send(b"%d" % i, key=str(i))
                producer.flush()
                last_ms = time.time_ns() // 1_000_000


def found(run: Run, topic: str, *options: str) -> list[dict[str, object]]:
    """What `read` prints."""
    return [json.loads(line) for line in run("read", topic, "--json", *options).stdout.splitlines()]


def as_text(publish_time_ms: object) -> str:
    assert isinstance(publish_time_ms, int)
    return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=publish_time_ms)).isoformat()


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01t00:00:01.25z", 1250),
        ("1970-01-01 01:00:00+01:00", 0),
        ("1969-12-31T23:59:59-00:30", 1_799_000),
        ("1970-01-01T00:00:00.0001Z", 1),
        ("1969-12-31T23:59:59.9999Z", 0),
    ],
)
def test_a_time_is_the_first_millisecond_not_before_it(text: str, milliseconds: int) -> None:
    assert PublishTime.parse(text) == PublishTime(milliseconds)


@pytest.mark.parametrize("text", ["5", "15", "m", "1h30m", "0m", "-5m", "2026-11-29", "20261129T080000Z", "noon"])
def test_other_text_is_no_time(text: str) -> None:
    assert PublishTime.parse(text) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-11-29T08:00:00", "has no zone"),
        ("2026-13-29T08:00:00Z", "is not a time: month"),
        ("2026-11-29T08:00:00+25:00", "is not a time"),
    ],
)
def test_a_wrong_time_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PublishTime.parse(text)


def test_each_message_is_before_or_after_a_place(run: Run, shared_sidecar: Sidecar) -> None:
    """`--to` and `--from` the same place print each message once, together."""
    published(shared_sidecar, "halves")
    everything = found(run, "halves")
    assert len(everything) == MESSAGES
    times = [line["publish_time_ms"] for line in everything]
    assert all(isinstance(a, int) and isinstance(b, int) and a < b for a, b in pairwise(times))
    some = everything[7]
    for place, count in (
        ("7", 7),
        (str(some["message_id"]), 8),
        (as_text(some["publish_time_ms"]), 7),
        ("1970-01-01T00:00:00Z", 0),
        ("9999-01-01T00:00:00Z", MESSAGES),
        ("10000d", 0),
        ("0", 0),
        (str(MESSAGES), MESSAGES),
    ):
        before, after = (found(run, "halves", option, place) for option in ("--to", "--from"))
        assert before + after == everything, place
        assert len(before) == count, place
    assert found(run, "halves", "--from", "5", "--to", as_text(times[9])) == everything[5:9]
    assert found(run, "halves", "--from", as_text(times[9]), "--to", "5") == []
    assert found(run, "halves", "--from", "5", "--to", "5") == []


def test_the_last_messages(run: Run, shared_sidecar: Sidecar, environment: dict[str, str]) -> None:
    published(shared_sidecar, "last")
    everything = found(run, "last")
    assert found(run, "last", "--tail", "3") == everything[-3:]
    assert found(run, "last", "--tail", "1000") == everything
    assert found(run, "last", "--tail", "4", "--where", f"sequence_id={MESSAGES - 5}") == []
    run("topics", "create", "empty")
    assert found(run, "empty", "--tail", "3") == []
    command = [COMMAND, "read", "last", "--tail", "1", "--follow", "--limit", "2"]
    with running(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"%d\n" % (MESSAGES - 1)
        with Client(shared_sidecar.address) as client, client.producer("last", "p") as producer:
            producer.send(b"next")
        assert process.stdout.readline() == b"next\n"
        assert process.wait(TIMEOUT_SECONDS) == 0


def test_partitions_are_cut_each_at_its_own_place(run: Run, shared_sidecar: Sidecar) -> None:
    published(shared_sidecar, "parts", partitions=3)
    everything = sorted(found(run, "parts"), key=lambda line: str(line["publish_time_ms"]))
    some = as_text(everything[15]["publish_time_ms"])
    before, after = (found(run, "parts", option, some) for option in ("--to", "--from"))
    assert {line["payload"] for line in before} == {str(i) for i in range(15)}
    assert {line["payload"] for line in after} == {str(i) for i in range(15, MESSAGES)}
    with Client(shared_sidecar.address) as client, client.partitioned_reader("parts") as reader:
        for _ in range(11):
            next(reader)
        position = str(reader.position)
    before, after = (found(run, "parts", option, position) for option in ("--to", "--from"))
    assert len(before) == 11
    assert sorted(str(line["message_id"]) for line in before + after) == sorted(
        str(line["message_id"]) for line in everything
    )
    last = found(run, "parts", "--tail", "2")
    assert len(last) == 6
    for k in range(3):
        assert [line for line in last if line["partition"] == k] == [
            line for line in everything if line["partition"] == k
        ][-2:]
    for place in ("0", "5:1", "partitions-1:5@1,5@1"):
        assert b"[INVALID_POSITION]" in run("read", "parts", "--to", place, status=1).stderr


def test_a_time_that_has_not_come_is_waited_for(run: Run, shared_sidecar: Sidecar, environment: dict[str, str]) -> None:
    """What is published before it is not printed, though the reader begins at the end that there is."""
    run("topics", "create", "later")
    with Client(shared_sidecar.address) as client, client.producer("later", "p") as producer:
        due_ms = time.time_ns() // 1_000_000 + 3000
        command = [COMMAND, "read", "later", "--from", as_text(due_ms), "--follow", "--limit", "1", "--json"]
        with running(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while process.poll() is None:
                producer.send(b"x")
                producer.flush()
            assert json.loads(process.stdout.read())["publish_time_ms"] >= due_ms
    first = found(run, "later", "--limit", "1")[0]["publish_time_ms"]
    assert isinstance(first, int)
    assert first < due_ms  # or else nothing was passed over


def test_places_that_are_not_there_are_errors(run: Run, shared_sidecar: Sidecar) -> None:
    published(shared_sidecar, "short")
    assert b"[POSITION_AFTER_END]" in run("read", "short", "--to", str(MESSAGES + 1), status=1).stderr
    assert b"[POSITION_OF_ANOTHER_INCARNATION]" in run("read", "short", "--to", "5:1", status=1).stderr
    assert b"[INVALID_POSITION]" in run("read", "short", "--to", "partitions-1:5@1,5@1", status=1).stderr


def test_what_retention_has_dropped_is_said(tmp_path: Path, run: Run) -> None:
    with Sidecar(tmp_path / "data", default_retention_size_in_mb=1) as sidecar:
        with Client(sidecar.address) as client:
            with client.producer("t", "p") as producer:
                # A segment and a little more; the last one alone, because a segment is left between two writes.
                for _ in range(34):
                    producer.send_batch([bytes(2_000_000)] * 2)
                producer.flush()
                producer.send_batch([bytes(2_000_000)])
            while not client.ends("t").first_index:
                client.admin.snapshot("t")
            first_index = client.ends("t").first_index
        address = {"SEQDEDUPE_ADDRESS": sidecar.address}
        assert b"[POSITION_TRIMMED]" in run("read", "t", "--to", "0", status=1, **address).stderr
        assert run("read", "t", "--to", str(first_index), **address).stdout == b""
        assert run("read", "t", "--to", "1d", **address).stdout == b""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tail", "1", "--from", "0"), "--tail and --from exclude each other"),
        (("--tail", "1", "--to", "5"), "--tail and --to exclude each other"),
        (("--tail", "0"), "Invalid value for '--tail'"),
        (("--to", "5", "--follow"), "--to and --follow exclude each other"),
        (("--to", "5", "--from", "latest"), "--to and --from latest exclude each other"),
        (("--to", "latest"), "'latest' is not an index"),
        (("--from", "5", "--to", "4"), "--to is before --from"),
        (("--from", "7:5", "--to", "5"), "--to is before --from"),
        (("--from", "1h", "--to", "2h"), "--to is before --from"),
        (("--from", "2026-11-29T08:00:00"), "has no zone"),
        (("--from", "yesterday"), "'yesterday' is not earliest, latest, an index"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(run: Run, options: tuple[str, ...], said: str) -> None:
    assert said in run("read", "t", *options, status=2, SEQDEDUPE_ADDRESS="127.0.0.1:1").stderr.decode()
