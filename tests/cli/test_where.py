"""`seqdedupe read --where`."""

import json
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.cli.main import main
from seqdedupe.cli.read_command import Condition
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run
from tests.processes import running

EVIL = "\x1b]0;t\x07=\u202e"
EVIL_NAME = "p=\u202e"


@pytest.fixture(scope="module")
def topic(shared_sidecar: Sidecar) -> str:
    with Client(shared_sidecar.address) as client:
        with client.producer("where", "a") as producer:
            producer.send(b"0", key="k", event_time=5, properties={"kind": "new", "n.m": "1"})
            producer.send(b"1", 10, key=b"", properties={"kind": ""})
            producer.send(b"\xff", 11, key=b"\xff")
            producer.send(None, 12)
        with client.producer("where", EVIL_NAME) as producer:
            producer.send(EVIL.encode(), 10, key="k", properties={"kind": EVIL})
    return "where"


def indexes(run: Run, topic: str, *conditions: str, more: tuple[str, ...] = ()) -> list[int]:
    arguments = [part for condition in conditions for part in ("--where", condition)]
    lines = run("read", topic, "--json", *arguments, *more).stdout.splitlines()
    return [json.loads(line)["index"] for line in lines]


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ((), [0, 1, 2, 3, 4]),
        (("index=3",), [3]),
        (("producer_name=a",), [0, 1, 2, 3]),
        (("sequence_id=10",), [1, 4]),
        (("sequence_id=10", "producer_name=a"), [1]),
        (("sequence_id=10", "sequence_id=11"), []),
        (("sequence_id=010",), []),
        (("event_time_ms=5",), [0]),
        (("event_time_ms=0",), []),
        (("event_time_ms=None",), []),
        (("key=k",), [0, 4]),
        (("key=",), [1]),
        (("key=K",), []),
        (("key_base64=/w==",), [2]),
        (("payload=0",), [0]),
        (("payload=",), []),
        (("payload_base64=/w==",), [2]),
        (("property.kind=new",), [0]),
        (("property.kind=",), [1]),
        (("property.n.m=1",), [0]),
        ((f"property.kind={EVIL}", f"producer_name={EVIL_NAME}", f"payload={EVIL}"), [4]),
    ],
)
def test_all_that_is_said_must_hold(
    shared_sidecar: Sidecar, topic: str, conditions: tuple[str, ...], found: list[int]
) -> None:
    parsed = [Condition.parse(condition) for condition in conditions]
    with Client(shared_sidecar.address) as client, client.reader(topic) as reader:
        assert [message.index for message in reader if all(condition.holds(message) for condition in parsed)] == found


def test_what_is_printed_can_be_asked_for(run: Run, topic: str) -> None:
    """Every name of the output is a column, and every value of it finds its message."""
    for line in run("read", topic, "--json").stdout.splitlines():
        shown = json.loads(line)
        columns = {f"property.{name}": value for name, value in shown.pop("properties").items()} | shown
        conditions = [f"{name}={value}" for name, value in columns.items() if value is not None]
        assert indexes(run, topic, *conditions) == [shown["index"]]


def test_limits_and_starts_are_those_of_read(run: Run, topic: str) -> None:
    assert indexes(run, topic, "producer_name=a", more=("--limit", "2")) == [0, 1]
    assert indexes(run, topic, "producer_name=a", more=("--from", "2", "--limit", "2")) == [2, 3]
    assert indexes(run, topic, "key=k", more=("--limit", "9")) == [0, 4]
    assert indexes(run, topic, "key=k", "sequence_id=10", more=("--follow", "--limit", "1")) == [4]
    assert indexes(run, topic, "key=k", "sequence_id=11") == []
    assert run("read", topic, "--where", "key=k", "--limit", "1").stdout == b"0\n"


def test_following_waits_for_a_message_that_fits(run: Run, environment: dict[str, str]) -> None:
    run("topics", "create", "awaited")
    command = [COMMAND, "read", "awaited", "--from", "latest", "--follow", "--where", "key=wanted"]
    with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        follow_until_interrupted(process, environment["SEQDEDUPE_ADDRESS"])


def follow_until_interrupted(process: "subprocess.Popen[bytes]", address: str) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as output, Client(address) as client, client.producer("awaited", "b") as producer:
        output.register(process.stdout, selectors.EVENT_READ)
        while process.poll() is None and not output.select(0.05):
            producer.send(b"other", key="other")
            producer.send(b"this", key="wanted")
            producer.flush()
    assert process.stdout.readline() == b"this\n"
    process.send_signal(signal.SIGINT)
    assert set(process.stdout.read().splitlines()) <= {b"this"}
    assert process.wait(TIMEOUT_SECONDS) == 130
    assert process.stderr.read().strip() == b""


@pytest.mark.parametrize(
    "condition", ["", "key", "=x", "producer=a", "KEY=a", "properties=a", "property.=a", "kind=new", EVIL]
)
def test_an_unknown_column_is_told_the_known_ones(
    condition: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["seqdedupe", "read", "t", "--where", condition])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "\x1b" not in error
    known = "they are partition, index, message_id, producer_name, sequence_id, deduplication_id, "
    assert (known in error and "property.NAME" in error) or f"{condition!r} is not COLUMN=VALUE" in error


def test_errors_are_those_of_read(run: Run, tmp_path: Path, topic: str) -> None:
    assert b"[TOPIC_NOT_FOUND]" in run("read", "nowhere", "--where", "key=k", status=1).stderr
    assert b"[POSITION_AFTER_END]" in run("read", topic, "--from", "99999", "--where", "key=k", status=1).stderr
