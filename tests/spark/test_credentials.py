"""The data source and the jobs with a sidecar that wants to know who calls, and where the token shows: nowhere."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.client import Credentials
from seqdedupe.client.blocking import Client
from seqdedupe.errors import ConfigurationError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import audit_job, bootstrap_job
from seqdedupe_spark.options import parse
from seqdedupe_spark.service import SidecarService as Shown
from seqdedupe_spark.session import run_command
from tests.certificates import Authority, guarded_sidecar
from tests.spark.jobs import JOB, TABLE
from tests.spark.run_job import QUICK

COUNT = 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Sidecar]:
    with guarded_sidecar(tmp_path_factory.mktemp("guarded"), authority) as sidecar:
        shows = Credentials(token_file=sidecar.token_file, tls_ca_file=authority.ca_file)
        with Client(sidecar.address, shows) as client, client.producer("t", "p") as producer:
            for _ in range(COUNT):
                producer.send(b"value")
        yield sidecar


@pytest.fixture
def given(guarded: Sidecar, authority: Authority) -> dict[str, str]:
    return {
        "service.url": guarded.address,
        "topic": "t",
        "authParams": guarded.token_file.as_uri(),
        "tlsTrustCertsFilePath": str(authority.ca_file),
    }


def test_options_name_files() -> None:
    named = {
        "authParams": "file:///to%20ken",
        "tlsTrustCertsFilePath": "/ca",
        "tlsCertificateFilePath": "/own",
        "tlsKeyFilePath": "/key",
    }
    assert parse({"topic": "t", "service.url": "a:1,b:2"} | named).service == Shown(
        "a:1,b:2", "/to ken", "/ca", "/own", "/key"
    )
    assert parse({"topic": "t", "service.url": "a:1"}).service == "a:1"
    cluster = {"topic": "t", "service.url": "pulsar://a", "admin.url": "http://a"}
    for name, value in named.items():
        with pytest.raises(ConfigurationError, match=f"{name} is for a sidecar"):
            parse(cluster | {name: value})


@pytest.mark.parametrize("params", ["token:s3cr3t", "s3cr3t", "file://s3cr3t/a", "data:s3cr3t", "s3cr3t@file:///a"])
def test_a_token_is_no_value_of_an_option(params: str) -> None:
    with pytest.raises(ConfigurationError, match="it should be the URL of a token file") as e:
        parse({"topic": "t", "authParams": params})
    assert "SEQDEDUPE_TOKEN_FILE" in e.value.hint
    assert "s3cr3t" not in str(e.value) + e.value.hint


def test_a_query_reads_and_its_plan_has_no_token(
    spark: SparkSession, guarded: Sidecar, given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    frame = spark.read.format("seqdedupe").options(**given).load()
    assert frame.count() == COUNT
    frame.explain("extended")
    token = guarded.token_file.read_text().strip()
    assert token not in capsys.readouterr().out
    assert token not in json.dumps(frame.schema.jsonValue())
    with pytest.raises(Exception, match="UNAUTHENTICATED"):
        spark.read.format("seqdedupe").options(**(given | {"authParams": ""})).load().count()


@pytest.mark.parametrize("job", ["audit", "bootstrap"])
def test_the_audit_and_the_bootstrap_take_the_files(
    spark: SparkSession,
    guarded: Sidecar,
    authority: Authority,
    job: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = {"audit": audit_job, "bootstrap": bootstrap_job}[job]
    monkeypatch.setattr(module, "start_session", lambda name: spark)
    what = ["t"] if job == "audit" else [str(tmp_path / "out"), "--topic", "t"]
    files = ["--token-file", str(guarded.token_file), "--tls-ca-file", str(authority.ca_file)]
    arguments = [*what, "--address", guarded.address]
    assert run_command(module.main, job, arguments=[*arguments, *files]) == 0
    assert run_command(module.main, job, arguments=[*arguments, *files[2:]]) == 1


def test_a_job_leaves_the_token_nowhere(guarded: Sidecar, authority: Authority, tmp_path: Path) -> None:
    """It is in the environment itself, which Spark's event log has too."""
    token = guarded.token_file.read_text().strip()
    conf, events = tmp_path / "conf", tmp_path / "events"
    conf.mkdir()
    events.mkdir()
    (conf / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.dir {events.as_uri()}\n"
        f"spark.executorEnv.SEQDEDUPE_TOKEN {token}\n"
    )
    flags = ["--address", guarded.address, "--topic", "t", "--store", "sqlite:///out.db", "--table", TABLE]
    flags += ["--checkpoint-location", str(tmp_path / "checkpoint"), "--master", "local[2]"]
    flags += ["--tls-ca-file", str(authority.ca_file), "--plain-column-names"]
    environment = {"SPARK_CONF_DIR": str(conf), "SEQDEDUPE_TOKEN": token}
    done = subprocess.run(
        [sys.executable, "-m", "seqdedupe_spark.reader_job", "run", "--job", JOB, *flags],
        cwd=tmp_path,
        env=os.environ | QUICK | environment,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert token not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != conf]
    assert {path.relative_to(tmp_path).parts[0] for path in written} >= {"events", "checkpoint", "out.db"}
    assert [path for path in written if token.encode() in path.read_bytes()] == []
