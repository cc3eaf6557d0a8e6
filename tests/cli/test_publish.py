"""`seqdedupe publish` as a process against a real sidecar."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import Binary, single_producer
from seqdedupe.cli.main import main
from seqdedupe.cli.publish_command import _Publication
from seqdedupe.client import ProducerConfig
from seqdedupe.client.blocking import Client, Producer, Receipt
from seqdedupe.client.pending import PendingBatch, ReceiptColumns
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.message_id import MessageId
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run, lines
from tests.conftest import StartSidecar
from tests.processes import running

RECORDS = 20_000
REMEMBERED = 65_536
"""A sidecar knows the place of this many of a topic's last messages."""


def test_a_file_published_and_read_is_the_same(run: Run, tmp_path: Path) -> None:
    data = b"one\n\n\xff\x00two\n" + lines(3000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(data))
    done = run("publish", "a.gz", "--topic", "same", "--producer", "p", "--json")
    assert json.loads(done.stdout) == {
        "topic": "persistent://public/default/same",
        "producer_name": "p",
        "read": 3003,
        "not_dup": 3003,
        "dup": 0,
        "resumed_after": None,
        "topic_made": True,
    }
    assert run("read", "same").stdout == data
    assert run("read", "same", "--from", "3", "--limit", "1500").stdout == lines(1500)


def test_csv_with_columns(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,name\n5,"a\nb"\n7,\xff\n')
    run("publish", "a.csv", "--topic", "csv", "--producer", "p", "--sequence-id-column", "id", "--key-column", "name")
    first, second = map(json.loads, run("read", "csv", "--json").stdout.splitlines())
    assert (first["sequence_id"], first["key"], first["payload"]) == (5, "a\nb", '5,"a\nb"')
    assert (second["sequence_id"], second["key_base64"], second["payload_base64"]) == (7, "/w==", "Nyz/")
    # Later files of the same producer go on where this one ends.
    (tmp_path / "b.csv").write_bytes(b"id,name\n9,later\n")
    flags = ("--topic", "csv", "--producer", "p", "--sequence-id-column", "id", "--json")
    assert json.loads(run("publish", "b.csv", *flags).stdout)["not_dup"] == 1
    assert json.loads(run("publish", "b.csv", *flags).stdout)["not_dup"] == 0
    # One that ends before the last ID published may have records that never were.
    assert b"[SOURCE_UNVERIFIED]" in run("publish", "a.csv", *flags[:-1], status=1).stderr
    assert json.loads(run("publish", "a.csv", *flags, "--trust-source").stdout)["not_dup"] == 0
    # A file that has omitted the last ID published is another file.
    (tmp_path / "c.csv").write_bytes(b"id,name\n5,a\n10,b\n")
    assert b"[SOURCE_CHANGED]" in run("publish", "c.csv", *flags[:-1], status=1).stderr
    assert len(run("read", "csv", "--json").stdout.splitlines()) == 3


def test_killed_and_started_again_it_publishes_each_record_once(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "a").write_bytes(lines(RECORDS))
    os.mkfifo(tmp_path / "slow")
    command = [COMMAND, "publish", "slow", "--topic", "killed", "--producer", "p"]
    with running(command, cwd=tmp_path, env=environment) as process:
        # The pipe holds 64 KiB: when this much is written, the first part has been read.
        with (tmp_path / "slow").open("wb") as pipe:
            pipe.write(lines(RECORDS // 2))
        process.kill()
    stored = len(run("read", "killed").stdout.splitlines())
    done = json.loads(run("publish", "a", "--topic", "killed", "--producer", "p", "--json").stdout)
    assert stored < RECORDS
    assert done["resumed_after"] == (stored - 1 if stored else None)
    assert done["not_dup"] == RECORDS - stored
    assert run("read", "killed").stdout == lines(RECORDS)


def test_another_file_is_refused_and_the_same_one_grown_is_not(run: Run, tmp_path: Path) -> None:
    publish = ("publish", "a", "--topic", "changed", "--producer", "p")
    (tmp_path / "a").write_bytes(b"a\nb\nc\n")
    run(*publish)
    for other in (b"a\nb\nC\nd\n", b"a\nb\n", b""):
        (tmp_path / "a").write_bytes(other)
        error = run(*publish, status=1).stderr
        assert b"[SOURCE_CHANGED]" in error
        assert b"the topic would store the old records twice" in error
    assert run("read", "changed").stdout == b"a\nb\nc\n"
    (tmp_path / "a").write_bytes(b"a\nb\nc\nd\n")
    run(*publish)
    assert run("read", "changed").stdout == b"a\nb\nc\nd\n"


def test_who_follows_the_hint_about_a_corrected_file_stores_its_new_records_once(run: Run, tmp_path: Path) -> None:
    publish = ("publish", "a", "--topic", "corrected", "--producer", "p")
    (tmp_path / "a").write_bytes(b"a\nb\nc\n")
    run(*publish)
    (tmp_path / "a").write_bytes(b"a\nB\nC\nd\n")
    hint = run(*publish, status=1).stderr
    assert b"`--verify` lists the differences" in hint
    listed = run(*publish, "--verify", status=1).stdout
    assert listed.count(b"with another payload") == 2
    assert b"put only the new records into a separate file, and publish this separate file" in hint
    (tmp_path / "new").write_bytes(b"d\n")
    for _ in range(2):
        run("publish", "new", "--topic", "corrected", "--producer", "p-corrected")
    assert run("read", "corrected").stdout == b"a\nb\nc\nd\n"


def test_a_sidecar_that_is_killed_is_waited_for(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    sidecar = start_sidecar()
    os.mkfifo(tmp_path / "slow")
    command = [COMMAND, "publish", "slow", "--topic", "t", "--producer", "p", "--address", sidecar.address, "--json"]
    with running(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        with (tmp_path / "slow").open("wb") as pipe:
            pipe.write(lines(RECORDS))
            pipe.flush()
            sidecar.restart()
            pipe.write(b"the last\n")
        assert process.stdout is not None
        done = json.loads(process.stdout.read())
        assert process.wait(TIMEOUT_SECONDS) == 0
    assert done["read"] == done["not_dup"] + done["dup"] == RECORDS + 1
    command = [COMMAND, "read", "t", "--address", sidecar.address]
    found = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_SECONDS).stdout
    assert found == lines(RECORDS) + b"the last\n"


BY_ID = ("--producer", "p", "--sequence-id-column", "id")


def ids_in(run: Run, topic: str) -> list[int]:
    return [json.loads(line)["sequence_id"] for line in run("read", topic, "--json").stdout.splitlines()]


def csv_of(*ids: int) -> bytes:
    return b"id\n" + b"".join(b"%d\n" % sequence_id for sequence_id in ids)


def test_the_order_of_a_file_is_looked_at_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    publish = ("publish", "a.csv", "--topic", "order", *BY_ID)
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7, 6))
    error = run(*publish, status=1).stderr
    assert b"line 4, has sequence ID 6 after 7" in error
    assert b"[NOT_ASCENDING] Sort the file by its sequence IDs" in error
    assert run("topics", "--json").stdout.count(b"default/order") == 0
    # The hint is followed, and no row is lost.
    (tmp_path / "a.csv").write_bytes(csv_of(5, 6, 7))
    run(*publish)
    assert ids_in(run, "order") == [5, 6, 7]


def test_a_record_that_is_too_large_is_found_before_anything_is_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(3) + b"x" * (MAX_PAYLOAD_BYTES + 1) + b"\n" + lines(3))
    flags = ("--topic", "large", "--producer", "p")
    stderr = run("publish", "a", *flags, status=1).stderr
    assert b"a, line 4, is longer than a payload may be" in stderr
    assert b"; nothing was sent [MESSAGE_TOO_LARGE]" in stderr
    assert b"/large" not in run("topics").stdout
    # Control: without that record all is published.
    (tmp_path / "a").write_bytes(lines(6))
    run("publish", "a", *flags)
    assert run("read", "large").stdout == lines(6)


def test_a_stream_is_refused_at_the_row_and_what_is_sorted_afterwards_is_another_file(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    stream = subprocess.run(
        [COMMAND, "publish", "-", "--topic", "stream", "--format", "csv", *BY_ID],
        input=csv_of(5, 7, 6), capture_output=True, env=environment, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert stream.returncode == 1
    assert b"standard input, line 4, has sequence ID 6 after 7" in stream.stderr
    assert b"; 2 of the 2 records sent are durable, up to sequence ID 7 [NOT_ASCENDING] Under this" in stream.stderr
    assert b"Sort" not in stream.stderr
    publish = ("publish", "a.csv", "--topic", "stream", *BY_ID)
    for other in ((5, 6, 7), (7,), (3, 5, 7), (5, 6, 7, 8)):
        (tmp_path / "a.csv").write_bytes(csv_of(*other))
        for trust in ((), ("--trust-source",)):  # which is for what cannot be known
            error = run(*publish, *trust, status=1).stderr
            assert b"before it, or it came from another file; nothing was sent [SOURCE_CHANGED]" in error
    assert ids_in(run, "stream") == [5, 7]
    # Control: the file as it was published goes on.
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7, 8))
    run(*publish)
    assert ids_in(run, "stream") == [5, 7, 8]
    last = json.loads(run("read", "stream", "--json").stdout.splitlines()[-1])
    assert last["properties"]["seqdedupe.record"] == "2"


def test_the_last_message_is_known_after_any_number_of_others(
    run: Run, tmp_path: Path, shared_sidecar: Sidecar
) -> None:
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7))
    publish = ("publish", "a.csv", "--topic", "busy", *BY_ID)
    run(*publish)
    with Client(shared_sidecar.address) as client, client.producer("busy", "other") as other:
        other.send_batch([b""] * REMEMBERED)
    (tmp_path / "a.csv").write_bytes(csv_of(5, 6, 7, 9))
    assert b"[SOURCE_CHANGED]" in run(*publish, status=1).stderr
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7, 9))
    assert json.loads(run(*publish, "--json").stdout)["not_dup"] == 1


def test_without_the_last_message_the_source_has_to_be_trusted(
    run: Run, tmp_path: Path, start_sidecar: StartSidecar
) -> None:
    sidecar = start_sidecar(default_retention_size_in_mb=1)
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7))
    (tmp_path / "b").write_bytes(lines(2))
    at = ("--address", sidecar.address)
    by_id = ("publish", "a.csv", "--topic", "forgotten", *BY_ID, *at)
    by_number = ("publish", "b", "--topic", "forgotten", "--producer", "q", *at)
    run(*by_id)
    run(*by_number)
    with Client(sidecar.address) as client:
        with client.producer("forgotten", "other") as other:
            # A segment and a little more; the last one alone, because a segment is left between two writes.
            for _ in range(34):
                other.send_batch([bytes(2_000_000)] * 2)
            other.flush()
            other.send_batch([bytes(2_000_000)])
        while not client.admin.topic("forgotten").first_index:
            client.admin.snapshot("forgotten")
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7, 9))
    (tmp_path / "b").write_bytes(lines(3))
    for publish in (by_id, by_number):
        error = run(*publish, status=1).stderr
        assert b"nothing was sent [SOURCE_UNVERIFIED]" in error
        assert b"--trust-source" in error
        assert json.loads(run(*publish, "--trust-source", "--json").stdout)["not_dup"] == 1
        assert json.loads(run(*publish, "--json").stdout)["not_dup"] == 0


def test_messages_of_another_program_do_not_say_which_record_they_were(
    run: Run, tmp_path: Path, shared_sidecar: Sidecar
) -> None:
    with Client(shared_sidecar.address) as client, client.producer("foreign", "p") as producer:
        producer.send(b"7", 7)
    (tmp_path / "a.csv").write_bytes(csv_of(5, 7, 9))
    publish = ("publish", "a.csv", "--topic", "foreign", *BY_ID)
    assert b"[SOURCE_UNVERIFIED]" in run(*publish, status=1).stderr
    assert json.loads(run(*publish, "--trust-source", "--json").stdout)["not_dup"] == 1


@pytest.mark.parametrize("name", ["a", "a.gz", "a.csv"])
def test_a_last_line_without_its_end_waits_for_it(run: Run, tmp_path: Path, name: str) -> None:
    def write(data: bytes) -> None:
        data = b"head\n" + data if name == "a.csv" else data
        (tmp_path / name).write_bytes(gzip.compress(data) if name == "a.gz" else data)

    publish = ("publish", name, "--topic", f"unfinished-{name}", "--producer", "p")
    write(b"one\nfour")
    for _ in range(2):
        done = subprocess.run(
            [COMMAND, *publish], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_SECONDS,
            env=os.environ | {"SEQDEDUPE_ADDRESS": _address(run)},
        )  # fmt: skip
        assert done.returncode == 1
        assert b"1 record read" in done.stdout
        assert b"the last one, does not end with a newline; it was not published [SOURCE_INCOMPLETE]" in done.stderr
    write(b"one\nfourteen\nfifteen")
    run(*publish, "--final")
    assert run("read", f"unfinished-{name}").stdout == b"one\nfourteen\nfifteen\n"
    # What was the end is half a line now: the record there is another one.
    write(b"one\nfourteen\nfifteen hundred\n")
    assert b"[SOURCE_CHANGED]" in run(*publish, status=1).stderr


def _address(run: Run) -> str:
    """For the sidecar that the command runs against."""
    return run("version").stdout.decode().partition("serving at ")[2].split(" ")[0]


def test_a_record_within_whose_quotes_a_file_ends_is_not_published(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id\n1\n"2\n')
    done = subprocess.run(
        [COMMAND, "publish", "a.csv", "--topic", "quotes", "--producer", "p", "--address", _address(run)],
        cwd=tmp_path, capture_output=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (
        b"a.csv, line 3, where the last record begins: its quotes are still open at the end of the file" in done.stderr
    )
    assert run("read", "quotes").stdout == b"1\n"


@contextmanager
def following(environment: dict[str, str], folder: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [COMMAND, "publish", *arguments, "--follow"]
    with running(command, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def read_following(environment: dict[str, str], topic: str, messages: int) -> bytes:
    """The first messages, as soon as they are there."""
    command = [COMMAND, "read", topic, "--follow", "--limit", str(messages)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIMEOUT_SECONDS).stdout


def test_a_file_that_grows_is_followed_until_ctrl_c(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    run("topics", "create", "growing")
    publish = ("growing.txt", "--topic", "growing", "--producer", "p")
    with (tmp_path / "growing.txt").open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        with following(environment, tmp_path, *publish) as process:
            assert read_following(environment, "growing", 1) == b"one\n"
            file.write(b"o\nthree\nfou")
            assert read_following(environment, "growing", 3) == b"one\ntwo\nthree\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_SECONDS) == 130
            assert process.stderr is not None
            error = process.stderr.read()
        assert error.endswith(
            b"seqdedupe: interrupted; 3 of the 3 records sent are durable, up to sequence ID 2 [INTERRUPTED] Start "
            b"the command again. The command continues after the last durable record.\n"
        )
        file.write(b"r\n")
        run("publish", *publish)
        assert run("read", "growing").stdout == b"one\ntwo\nthree\nfour\n"


def cut(file: Path) -> None:
    file.write_bytes(b"")


def replace(file: Path) -> None:
    file.with_suffix(".new").write_bytes(csv_of(1, 2, 3, 4))
    file.with_suffix(".new").rename(file)


def append_a_lower_id(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"6\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            cut,
            b"was cut or rewritten while it was read; 2 of the 2 records sent are durable, up to sequence ID 7 "
            b"[SOURCE_CHANGED] Start the command again with the unchanged file. If the file was moved, give ",
        ),
        (replace, b"was replaced, moved or removed while it was read; 2 of the 2 records sent are durable"),
        (append_a_lower_id, b"sequence ID 6 after 7: they should rise; 2 of the 2 records sent are durable"),
    ],
)
def test_what_is_wrong_with_a_followed_file_ends_it(
    run: Run, tmp_path: Path, environment: dict[str, str], spoil: Callable[[Path], None], said: bytes
) -> None:
    topic = f"followed-{spoil.__name__}"
    run("topics", "create", topic)
    file = tmp_path / "a.csv"
    file.write_bytes(csv_of(5, 7))
    with following(environment, tmp_path, "a.csv", "--topic", topic, *BY_ID) as process:
        read_following(environment, topic, 2)
        spoil(file)
        assert process.stderr is not None
        assert said in process.stderr.read()
        assert process.wait(TIMEOUT_SECONDS) == 1


def test_where_the_topic_was_deleted_nothing_is_called_durable(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    run("topics", "create", "deleted")
    run("topics", "create", "deleted2")
    file = tmp_path / "a"
    file.write_bytes(b"1\n2\n")
    with following(environment, tmp_path, "a", "--topic", "deleted", "--producer", "p") as process:
        read_following(environment, "deleted", 2)
        run("topics", "delete", "deleted")
        with file.open("ab") as end:
            end.write(b"3\n")
        assert process.stderr is not None
        error = process.stderr.read()
    assert b"; 2 of the 3 records sent had receipts, up to sequence ID 1 [TOPIC_NOT_FOUND]" in error
    assert b"durable" not in error
    assert b"Do you mean" not in error


def test_an_error_says_what_is_durable_and_json_errors_are_json(
    run: Run, tmp_path: Path, start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sidecar = start_sidecar()
    os.mkfifo(tmp_path / "slow")
    original, producers = Client.producer, list[Producer]()

    def producer(client: Client, topic: str, name: str, **options: Any) -> Producer:
        config = ProducerConfig(delivery_timeout_seconds=1.0)
        producers.append(original(client, topic, name, config, **options))
        return producers[0]

    monkeypatch.setattr(Client, "producer", producer)
    arguments = ["publish", str(tmp_path / "slow"), "--topic", "t", "--producer", "p", "--address", sidecar.address]
    monkeypatch.setattr(sys, "argv", ["seqdedupe", *arguments, "--json"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def write() -> None:
        with (tmp_path / "slow").open("wb", buffering=0) as pipe:
            pipe.write(b"one\n")
            while not producers or producers[0].durable_sequence_id < 0:
                time.sleep(0.01)
            sidecar.kill()
            pipe.write(b"two\n")

    with Client(sidecar.address) as client:
        client.admin.create_topic("t")
    writing = threading.Thread(target=write)
    writing.start()
    with pytest.raises(SystemExit) as ended:
        main()
    writing.join()
    assert ended.value.code == 1
    out, line = capsys.readouterr()
    assert out == ""
    error = json.loads(line)["error"]
    assert error["reason"] == "OUTCOME_UNKNOWN"
    assert error["message"].startswith("no receipt within 1 seconds: no connection to the sidecar at")
    assert "everything up to sequence ID 0 is durable, 1 message has no receipt" in error["message"]
    assert "Connection refused" in error["message"]
    assert error["hint"].startswith("Nothing listens there")
    assert error["hint"].endswith("Start the command again. The command continues after the last durable record.")
    assert error["numbers"]["durable_sequence_id"] == "0"
    assert error["numbers"]["last_refusal"] == "UNREACHABLE"


def test_what_had_an_early_receipt_and_was_lost_is_not_counted_as_durable() -> None:
    """The control arm is the first of the two, which was durable before the producer ended."""
    batches = []
    for sequence_id in range(2):
        batches.append(PendingBatch())
        ids = np.array([sequence_id], np.int64)
        batches[-1].seal(single_producer(b"p", 0, -1, ids, Binary.of_all([b"x"])), 100)
        batches[-1].record(ReceiptColumns.all_stored(sequence_id, MessageId(5, sequence_id), sequence_id + 1))
    producer: Any = SimpleNamespace(durable_sequence_id=0)
    source: Any = SimpleNamespace()
    resume: Any = None
    publishing = _Publication(producer, source, resume, with_numbers=False, makes_topic=False)
    publishing._receipts.extend(Receipt(pending, 0) for pending in batches)
    assert publishing._durable() == "0 of the 2 records sent are durable"
    batches[0].become_durable()
    batches[1].fail(error("OUTCOME_UNKNOWN", "given up"))
    assert publishing._durable() == "1 of the 2 records sent are durable, up to sequence ID 0"
    with pytest.raises(SeqdedupeError, match="given up"):
        publishing._wait_for_more()
