"""The broker that the other tests rest on: it says where it is or why it is not, and leaves nothing of itself."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pulsar_broker import distribution
from pulsar_broker.distribution import Unavailable
from pulsar_broker.standalone import Broker, is_healthy
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.processes import running

LIMIT_SECONDS = LAST_RESORT_SECONDS


@pytest.mark.usefixtures("pulsar_home")
def test_by_hand_it_says_where_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pulsar_broker"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    repository = distribution.FOLDER.parent
    with running(command, stdout=subprocess.PIPE, text=True, cwd=repository, env=environment) as process:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(3))
        admin_url = re.search(r"admin URL +(http://\S+)", printed)
        assert admin_url is not None, printed
        assert re.search(r"service URL +pulsar://127\.0\.0\.1:\d+\n", printed)
        assert is_healthy(admin_url[1])
        assert any(tmp_path.glob("seqdedupe-pulsar-*"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
        assert not is_healthy(admin_url[1])
    assert not any(tmp_path.glob("seqdedupe-pulsar-*"))


def test_one_that_cannot_start_says_why_and_leaves_nothing(
    pulsar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Unavailable, match="ended with"), Broker(pulsar_home, brokerServicePort="none"):
        pass
    assert not any(tmp_path.iterdir())


def test_without_a_distribution_or_java_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSAR_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="no Pulsar distribution in PULSAR_HOME"):
        distribution.home()
    monkeypatch.delenv("PULSAR_HOME")

    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="needs Java 17 or newer"):
        distribution.get(tmp_path)

    old.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\" 2024-01-16' >&2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no mvn"):
        distribution.get(tmp_path)


def test_a_fetch_that_fails_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text("#!/bin/sh\necho 'no such artifact'\nexit 1\n")
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", f"{maven.parent}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="mvn ended with 1: no such artifact"):
        distribution.get(tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []
