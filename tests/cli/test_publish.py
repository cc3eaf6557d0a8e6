"""`seqdedupe publish` as a process against a real sidecar."""

import gzip
import json
import os
import subprocess
from pathlib import Path

from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run, lines
from tests.conftest import StartSidecar

RECORDS = 20_000


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
    }
    assert run("read", "same").stdout == data
    assert run("read", "same", "--from", "3", "--limit", "1500").stdout == lines(1500)


def test_csv_with_columns(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,name\n5,"a\nb"\n7,\xff\n')
    run("publish", "a.csv", "--topic", "csv", "--producer", "p", "--sequence-id-column", "id", "--key-column", "name")
    first, second = map(json.loads, run("read", "csv", "--json").stdout.splitlines())
    assert (first["sequence_id"], first["key"], first["payload"]) == (5, "a\nb", '5,"a\nb"')
    assert (second["sequence_id"], second["key_base64"], second["payload_base64"]) == (7, "/w==", "Nyz/")
    # Later files of the same producer go on where this one ends, or are all published already.
    (tmp_path / "b.csv").write_bytes(b"id,name\n9,later\n")
    flags = ("--topic", "csv", "--producer", "p", "--sequence-id-column", "id", "--json")
    assert json.loads(run("publish", "b.csv", *flags).stdout)["not_dup"] == 1
    assert json.loads(run("publish", "a.csv", *flags).stdout)["not_dup"] == 0
    # A file that has left out the last ID published is another file.
    (tmp_path / "c.csv").write_bytes(b"id,name\n5,a\n10,b\n")
    assert b"[SOURCE_CHANGED]" in run("publish", "c.csv", *flags, status=1).stderr
    assert len(run("read", "csv", "--json").stdout.splitlines()) == 3


def test_killed_and_started_again_it_publishes_each_record_once(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "a").write_bytes(lines(RECORDS))
    os.mkfifo(tmp_path / "slow")
    command = [COMMAND, "publish", "slow", "--topic", "killed", "--producer", "p"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
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
        assert b"[SOURCE_CHANGED]" in run(*publish, status=1).stderr
    assert run("read", "changed").stdout == b"a\nb\nc\n"
    (tmp_path / "a").write_bytes(b"a\nb\nc\nd\n")
    run(*publish)
    assert run("read", "changed").stdout == b"a\nb\nc\nd\n"


def test_a_sidecar_that_is_killed_is_waited_for(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    sidecar = start_sidecar()
    os.mkfifo(tmp_path / "slow")
    command = [COMMAND, "publish", "slow", "--topic", "t", "--producer", "p", "--address", sidecar.address, "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
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
