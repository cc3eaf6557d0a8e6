"""`seqdedupe top`, once, again and again, and in a terminal."""

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from seqdedupe.cli import top_view
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run
from tests.processes import running

EVIL = "[red]\x1b]0;evil\x07\u202e"


def _publish(sidecar: Sidecar, topic: str, rows: int) -> None:
    with Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        for number in range(rows):
            producer.send(b"x", sequence_id=number)


def test_once_as_json(run: Run, shared_sidecar: Sidecar, topic: str) -> None:
    _publish(shared_sidecar, topic, 10)
    found = json.loads(run("top", "--once", "--json", "--search", topic).stdout)
    assert found["is_serving"]
    assert found["intervals"] > 0
    assert found["states"]["SERVING"] >= 1
    [one] = found["topics"]
    assert (one["name"].rpartition("/")[2], one["state"], one["why"]) == (topic, "SERVING", None)
    assert (one["producers"], one["beyond_snapshot"]) == (1, 10)


def test_again_and_again_as_json(environment: dict[str, str], shared_sidecar: Sidecar, topic: str) -> None:
    command = [COMMAND, "top", "--json", "--search", topic]
    with running(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["topics"] == []
        _publish(shared_sidecar, topic, 10)
        stored, until = 0, time.monotonic() + TIMEOUT_SECONDS
        while not stored:
            assert time.monotonic() < until
            stored = sum(one["stored"] for one in json.loads(process.stdout.readline())["topics"])
        assert stored == 10


def test_where_the_output_is_no_terminal_it_ends(run: Run, shared_sidecar: Sidecar, topic: str) -> None:
    _publish(shared_sidecar, topic, 3)
    shown = run("top", "--search", topic, COLUMNS="150").stdout.decode()
    assert "serving" in shown
    assert topic in shown
    assert "\x1b" not in shown


def test_in_a_terminal_until_q(environment: dict[str, str], shared_sidecar: Sidecar, topic: str) -> None:
    _publish(shared_sidecar, topic, 3)
    ours, theirs = pty.openpty()
    command = [COMMAND, "top", "--search", topic]
    terminal = environment | {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "30"}
    with running(command, env=terminal, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while topic.encode() not in shown:
            shown += os.read(ours, 65_536)
        os.write(ours, b"xq")
        try:
            while more := os.read(ours, 65_536):
                shown += more
        except OSError:  # the other end is closed
            pass
        assert process.wait(TIMEOUT_SECONDS) == 0
    os.close(ours)
    assert b"\x1b[?25h" in shown[-40:], "the cursor is shown again"


def test_without_rich_it_says_what_to_install(environment: dict[str, str]) -> None:
    hidden = "import sys; sys.modules['rich'] = None; import seqdedupe.cli.main as m"
    command = [sys.executable, "-c", f"{hidden}; sys.argv = ['seqdedupe', 'top', '--once']; m.main()"]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, env=environment)
    assert done.returncode == 2
    assert b"[INVALID_CONFIGURATION] Install the missing extra: pip install 'PATH[top]'" in done.stderr


def test_names_and_warnings_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    found = admin_pb2.GetStatisticsResponse(interval_ms=3000, topics_found=1)
    found.topics.add(topic=admin_pb2.Topic(name=EVIL, state=99))  # type: ignore[arg-type]
    found.warnings.add(level="ERROR", message=EVIL)
    found.refusals.add(reason=EVIL, count=1)
    top_view.show_once(found, EVIL)
    shown = capsys.readouterr().out
    assert not any(bad in shown for bad in "\x1b\x07\u202e")
    assert shown.count("[red]") == 4


def test_bars() -> None:
    assert top_view._bars([0] * 8 + [1] * 8 + [4] * 8).strip() == "▂█"
    assert top_view._bars([]) == " " * 25
    assert top_view._bars([7] * 200) == "█" * 25
