"""`seqdedupe.testing.Sidecar`, as its documentation shows it."""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"


def test_the_example() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    names["test_what_was_sent_survives_a_crash"]()


def test_a_folder_stays_and_a_temporary_one_goes(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "own") as sidecar, Client(sidecar.address) as client:
        client.admin.create_topic("t")
        address = sidecar.address
        assert sidecar.stop() == 0
        assert not sidecar.is_running
        host, _, port = address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        sidecar.start()
        assert sidecar.address == address
        assert [entry["event"] for entry in sidecar.log].count("serving") == 2
        assert len(client.admin.topics()) == 1
    assert sidecar.data.is_dir()
    assert not sidecar.is_running
    temporary = Sidecar()
    assert temporary.folder.is_dir()
    temporary.close()
    assert not temporary.folder.exists()


def test_a_sidecar_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="max_topics is 0"):
        Sidecar(tmp_path / "bad", max_topics=0).start()
    with Sidecar(tmp_path / "good", environment={"SEQDEDUPE_MAX_TOPICS": "1"}) as sidecar:
        sidecar.check_running()
        sidecar.signal(signal.SIGKILL)
        assert sidecar.wait() == -signal.SIGKILL
        with pytest.raises(RuntimeError, match="ended with -9"):
            sidecar.check_running()


def test_what_runs_is_not_started_again_and_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "first") as sidecar:
        pid = sidecar.pid
        for again in (sidecar.start, sidecar.spawn):
            with pytest.raises(RuntimeError, match="runs already"):
                again()
        assert (sidecar.pid, sidecar.is_running) == (pid, True)
    with pytest.raises(RuntimeError, match="--log-form"):
        Sidecar(tmp_path / "abbreviated", log_form="json").start()
