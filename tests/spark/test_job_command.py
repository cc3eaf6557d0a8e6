"""`python -m seqdedupe_spark.reader_job`, as a person uses it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException

from seqdedupe.cli.commands import cli
from seqdedupe.client.blocking import Client
from seqdedupe.errors import INSTALL_HINT, SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import reader_job
from seqdedupe_spark.rounds import JobConfig, Positions
from seqdedupe_spark.session import run_command
from seqdedupe_spark.stores.urls import from_url
from tests.broker_sidecar.metrics.scraping import metrics_of
from tests.spark.jobs import JOB, OUTPUT, TABLE, Database, each_once, publish, source, sqlite_database
from tests.spark.run_job import QUICK

TRANSFORM = """
import pyarrow as pa
def select(batch):
    columns = [batch.column(name) for name in ("topic", "index", "value")]
    return pa.RecordBatch.from_arrays(columns, ["topic", "index", "value"])
"""


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


def start(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "seqdedupe_spark.reader_job", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command that needs no session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["reader_job", *arguments])
        runner = CliRunner()
        with runner.isolation() as (out, err, _):
            status = run_command(reader_job.cli, "seqdedupe_spark.reader_job")
            return status, out.getvalue().decode(), err.getvalue().decode()


def test_what_spark_raises_may_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def fail() -> None:
        raise PySparkException("")

    assert run_command(fail, "job", arguments=[]) == 1
    assert capsys.readouterr().err == "job: Spark: [SPARK_ERROR]\n"


@pytest.mark.parametrize("as_json", [True, False])
def test_what_spark_raises_has_a_reason_too(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    @click.command()
    @click.option("--json", is_flag=True)
    def fail(json: bool) -> None:
        raise PySparkException("\nThe session\nis lost")

    assert run_command(fail, "job", arguments=["--json"] if as_json else []) == 1
    told = capsys.readouterr().err
    if as_json:
        assert json.loads(told) == {"error": {"reason": "SPARK_ERROR", "message": "Spark: The session", "hint": ""}}
    else:
        assert told == "job: Spark: The session [SPARK_ERROR]\n"


def _batches(folder: Path, what: str) -> set[str]:
    """Which batches of a streaming query are planned (`offsets`), or over and counted (`commits`)."""
    return {path.name for path in (folder / "checkpoint").rglob(f"{what}/[0-9]*")}


def test_follows_as_a_streaming_query_until_it_is_told_to_stop(
    sidecar: Sidecar, database: Database, tmp_path: Path
) -> None:
    topic = publish(sidecar.address, "events", 100)
    (tmp_path / "mine.py").write_text(TRANSFORM)
    flags = ["--address", sidecar.address, "--topic", "events", "--store", "sqlite:///out.db", "--table", TABLE]
    flags += [
        "--plain-column-names",
        "--transform",
        "mine:select",
        "--checkpoint-location",
        str(tmp_path / "checkpoint"),
    ]
    flags += [
        "--max-offsets-per-trigger",
        "40",
        "--follow",
        "--trigger-seconds",
        "0.1",
        "--json",
        "--master",
        "local[2]",
        "--metrics-listen",
        "127.0.0.1:0",
    ]
    process = start(tmp_path, "run", "--job", JOB, *flags, **QUICK)
    assert process.stderr is not None
    address = json.loads(process.stderr.readline())["metrics"]["address"]
    for line in process.stderr:
        if "rows/s, lag" in line:
            break
    publish(sidecar.address, "events", 50, first=100)
    while len(database.indexes(topic)) < 150 or _batches(tmp_path, "offsets") != _batches(tmp_path, "commits"):
        assert process.poll() is None
        time.sleep(0.05)
    # Between two batches of the query the job goes on.
    labels = f'{{kind="job",name="{JOB}"}}'
    state = f'seqdedupe_service_state{{kind="job",name="{JOB}",reason="",state="running"}} 1.0'
    wanted = {f"seqdedupe_service_messages_total{labels} 150.0", f"seqdedupe_service_lag_messages{labels} 0.0", state}
    while not wanted <= set(metrics_of(address).splitlines()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LAST_RESORT_SECONDS)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert (found["read"], found["written"], found["lag"], list(found["topics"])) == (150, 150, 0, [topic])
    each_once(database.indexes(topic), 150)


def test_sigterm_ends_a_job_whose_sidecar_is_away(sidecar: Sidecar, tmp_path: Path) -> None:
    publish(sidecar.address, "events", 10)
    flags = ["--address", sidecar.address, "--topic", "events", "--store", "sqlite:///out.db", "--table", TABLE]
    flags += ["--follow", "--trigger-seconds", "0.1", "--json", "--master", "local[2]"]
    process = start(tmp_path, "run", "--job", JOB, *flags, **QUICK)
    assert process.stderr is not None
    for line in process.stderr:
        if "rows/s, lag" in line:
            sidecar.kill()
        if "waiting: no connection to the sidecar" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LAST_RESORT_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["written"] == 10


@pytest.fixture
def stored(sidecar: Sidecar, database: Database) -> str:
    """A topic of ten messages, and a position at its start; the store's URL."""
    publish(sidecar.address, "events", 10)
    config = JobConfig(JOB, source(sidecar.address, topic="events"), from_url(database.url), TABLE)
    with database.store() as store, Client(sidecar.address) as client:
        store.prepare(TABLE, OUTPUT)
        Positions(JOB, TABLE, config.source).look(client, store)
    return database.url


def test_the_lag_of_a_job_that_does_not_run(sidecar: Sidecar, stored: str) -> None:
    lag = ["lag", "--job", JOB, "--store", stored, "--address", sidecar.address]
    status, out, _ = run(*lag, "--json")
    found = json.loads(out)
    assert (status, found["messages"], found["topics"][0]["messages"]) == (0, 10, 10)
    assert found["seconds"] > 0
    assert run(*lag, "--max-messages", "10")[0] == 0
    assert run(*lag, "--max-messages", "9")[0] == 1
    assert run("reset", *lag[1:], "--topic", "events", "--to", "latest")[0] == 0
    status, out, _ = run(*lag, "--max-messages", "0", "--max-seconds", "0")
    assert (status, out.splitlines()[1].split()[1:]) == (0, ["9", "0", "0"])


def test_positions_and_reset(sidecar: Sidecar, stored: str) -> None:
    at = ["--job", JOB, "--store", stored]
    status, before, _ = run("positions", *at, "--json")
    shown = json.loads(before)
    assert (status, shown["topic"], shown["epoch"]) == (0, "persistent://public/default/events", 0)
    reset = ["reset", *at, "--topic", "events", "--address", sidecar.address]
    status, out, _ = run(*reset, "--to", "latest", "--json")
    assert status == 0
    assert json.loads(out)["before"] == {"position": shown["position"], "epoch": 0}
    assert "@9#" in json.loads(out)["after"]["position"]
    status, out, _ = run(*reset, "--to", "earliest")
    assert (status, "@-1, epoch 2 (before: " in out) == (0, True)
    assert out.startswith("persistent://public/default/events: ")
    other = ["reset", "--job", "other", "--store", stored, "--topic", "events", "--address", sidecar.address]
    status, out, err = run(*other, "--to", "latest")
    assert (status, out, "job other has no positions in this store" in err) == (1, "", True)
    assert run("positions", "--job", "other", "--store", stored)[0] == 1, "nothing was stored"
    status, out, _ = run("positions", *at)
    assert (status, "epoch 2" in out) == (0, True)


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ([], 2, "Missing option"),
        (["--transaction", "row"], 2, "'--transaction'"),
        (["--trigger-seconds", "-1"], 2, "'--trigger-seconds'"),
        (["--wrong"], 2, "--wrong"),
        (["--job", "j", "--store", "mysql://x", "--table", "t", "--topic", "t"], 1, "store"),
        (["--job", "j", "--store", "sqlite:///x.db", "--table", "t"], 1, "topic"),
        (["--job", "j", "--store", "sqlite:///x.db", "--table", "t", "--topic", "a", "--topics", "b"], 1, "topics"),
        (
            ["--job", "j", "--store", "sqlite:///x.db", "--table", "t", "--topic", "a", "--starting-time", "x"],
            1,
            "Time",
        ),
        (["--job", "j", "--store", "sqlite:///x.db", "--table", "t", "--topic", "a", "--transform", "no:f"], 1, "no:f"),
        (["--job", "j", "--store", "sqlite:///x.db", "--table", "t", "--topic", "a", "--transform", "os:f"], 1, "os:f"),
        (
            ["--job", "j", "--store", "sqlite:///x.db", "--table", "t", "--topic", "a", "--transform", "os:sep"],
            1,
            "sep",
        ),
    ],
)
def test_wrong_options_are_one_line(flags: list[str], status: int, said: str) -> None:
    code, out, err = run("run", *flags)
    assert (code, out, err.count("\n")) == (status, "", 1)
    assert said in err


def test_a_name_that_is_not_utf_8_is_one_line(sidecar: Sidecar, stored: str) -> None:
    wrong, events = os.fsdecode(b"caf\xe9"), ["--topic", "events", "--address", sidecar.address]
    for what, flags in (
        ("job", ["run", "--job", wrong, "--table", TABLE, *events]),
        ("table", ["run", "--job", JOB, "--table", wrong, *events]),
        ("job", ["positions", "--job", wrong]),
        ("job", ["reset", "--job", wrong, "--to", "latest", *events]),
    ):
        status, out, err = run(*flags, "--store", stored)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert f"{what}: the name 'caf\\udce9' is not UTF-8 [INVALID_OPTION]" in err


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    flags = ["--job", JOB, "--store", "sqlite:///out.db", "--table", TABLE, "--topic", "events"]
    process = start(tmp_path, "run", *flags, PATH="/nowhere", JAVA_HOME="/nowhere")
    out, err = process.communicate()
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "openjdk-17-jre-headless" in err


def test_positions_where_there_are_none(stored: str, tmp_path: Path) -> None:
    for flags in ([], ["--json"]):
        status, out, err = run("positions", "--job", "other", "--store", stored, *flags)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert "job other has no positions in this store" in err
    another = tmp_path / "another.db"
    at = ["positions", "--job", JOB, "--store", f"sqlite:///{another}"]
    status, out, err = run(*at)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"there is no SQLite file {another} [INVALID_OPTION]" in err
    assert not another.exists(), "to look for something makes nothing"
    another.touch()
    status, out, err = run(*at)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "it holds no positions of a job" in err


def test_the_help_names_the_jobs_of_their_own() -> None:
    status, out, _ = run("--help")
    assert (status, "seqdedupe job audit" in out, "seqdedupe job bootstrap" in out) == (0, True, True)


def test_sigterm_before_the_sidecar_was_reached(tmp_path: Path) -> None:
    flags = ["--address", "127.0.0.1:9", "--topic", "events", "--store", "sqlite:///out.db", "--table", TABLE]
    process = start(tmp_path, "run", "--job", JOB, *flags, "--json", "--master", "local[2]", **QUICK)
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting: no connection to the sidecar" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LAST_RESORT_SECONDS)
    assert process.returncode == 1, err
    assert (json.loads(out)["lag"], json.loads(out)["read"]) == (None, 0)


def test_the_short_form_takes_the_same_arguments(database: Database, tmp_path: Path) -> None:
    database.store().close()
    found = CliRunner().invoke(cli, ["job", "positions", "--job", "j", "--store", f"sqlite:///{tmp_path}/none.db"])
    assert (found.exit_code, "seqdedupe job: " in found.stderr) == (1, True)
    found = CliRunner().invoke(cli, ["job", "audit"])
    assert (found.exit_code, "See seqdedupe job audit --help." in found.stderr) == (2, True)


@pytest.mark.parametrize("command", ["run", "audit", "bootstrap"])
def test_the_short_form_says_what_to_install(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("seqdedupe_spark", "pyspark")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    failure = CliRunner().invoke(cli, ["job", command]).exception
    assert isinstance(failure, SeqdedupeError)
    assert (failure.reason, failure.hint) == ("INVALID_CONFIGURATION", INSTALL_HINT.format("spark"))
