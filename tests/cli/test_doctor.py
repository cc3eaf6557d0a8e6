"""`seqdedupe doctor` as a process: what it prints, its exit statuses, and what a kill leaves of a salvage."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS
from tests.doctor.directories import fingerprint, segments

MESSAGES = 200


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    """Stopped, with two topics and one batch a message."""
    sidecar = Sidecar(tmp_path / "sidecar")
    with sidecar, Client(sidecar.address) as client:
        for topic in ("orders", "others"):
            with client.producer(topic, "shop") as producer:
                for i in range(0, MESSAGES, 2):
                    producer.send(b"first of two %d" % i, sequence_id=i)
                    producer.send(b"second of two %d" % i, sequence_id=i + 1)
                    producer.flush()
        assert sidecar.stop() == 0
    return sidecar


def doctor(*arguments: object, status: int) -> "subprocess.CompletedProcess[str]":
    command = [COMMAND, "doctor", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def damage(data: Path) -> Path:
    """In the middle of the first topic's log."""
    file = segments(data)[0]
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 512] = bytes(512)
    file.write_bytes(raw)
    return file


def test_it_says_what_is_whole_and_what_is_not(sidecar: Sidecar) -> None:
    before = fingerprint(sidecar.data)
    done = doctor(sidecar.data, status=0)
    assert f"persistent://public/default/orders: whole\n  {MESSAGES} messages" in done.stdout
    assert done.stdout.endswith("is whole\n")
    assert done.stderr == ""
    found = json.loads(doctor(sidecar.data, "--json", status=0).stdout)
    assert found["whole"]
    assert [topic["messages"] for topic in found["topics"]] == [MESSAGES, MESSAGES]
    assert fingerprint(sidecar.data) == before
    file = damage(sidecar.data)
    done = doctor(sidecar.data, status=1)
    assert f"damage: {file}, byte " in done.stdout
    assert "missing: producer 'shop', sequence IDs " in done.stdout
    assert "what to do: " in done.stdout
    assert done.stdout.endswith("is NOT WHOLE\n")
    found = json.loads(doctor("--json", sidecar.data, status=1).stdout)
    orders, others = found["topics"]
    assert not orders["whole"]
    assert others["whole"]
    assert sum(gone["messages"] for gone in orders["damage"]) == MESSAGES - orders["messages"] > 0
    assert all(gone["messages"] == gone["next_index"] - gone["first_index"] for gone in orders["damage"])


def test_what_cannot_be_looked_at_is_not_called_damaged(sidecar: Sidecar, tmp_path: Path) -> None:
    assert "[DIRECTORY_IN_USE]" not in doctor(sidecar.data, status=0).stderr
    sidecar.start()
    assert "[DIRECTORY_IN_USE]" in doctor(sidecar.data, status=2).stderr
    reason = json.loads(doctor(sidecar.data, "--json", status=2).stderr)["error"]["reason"]
    assert reason == "DIRECTORY_IN_USE"
    sidecar.kill()
    assert "[INVALID_CONFIGURATION]" in doctor(tmp_path, status=2).stderr
    assert "not exist" in doctor(tmp_path / "nothing", status=2).stderr
    assert "[DIRECTORY_NOT_EMPTY]" in doctor(sidecar.data, "--salvage", tmp_path, status=2).stderr


def test_what_is_salvaged_is_read_and_published_to(sidecar: Sidecar, tmp_path: Path) -> None:
    damage(sidecar.data)
    new = tmp_path / "new"
    made = json.loads(doctor(sidecar.data, "--salvage", new, "--json", status=1).stdout)
    assert json.loads((new / "salvage.json").read_text()) == made
    left = made["findings"]["topics"][0]["messages"]
    assert 0 < left < MESSAGES
    with Sidecar(tmp_path / "other", data_directory=new) as salvaged, Client(salvaged.address) as client:
        before = [(message.sequence_id, message.index) for message in client.reader("orders")]
        assert [index for _, index in before] == list(range(left))
        with client.producer("orders", "shop") as producer:
            assert producer.persisted_sequence_id == MESSAGES - 1
            for sequence_id in range(MESSAGES + 1):
                producer.send(b"again", sequence_id=sequence_id)
            producer.flush()
        # What is there is not doubled; what is missing is not sent again, and the report says so.
        assert [message.sequence_id for message in client.reader("orders")] == [i for i, _ in before] + [MESSAGES]
        gone = sorted(set(range(MESSAGES)) - {sequence_id for sequence_id, _ in before})
        reported = {
            sequence_id
            for missing in made["findings"]["topics"][0]["missing"]
            for sequence_id in range(missing["first_sequence_id"], missing["last_sequence_id"] + 1)
        }
        assert reported == set(gone)
        assert salvaged.stop() == 0
    doctor(new, status=0)


DIES = """# may start warm
import os, sys
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
from seqdedupe.doctor.salvage import salvage
really = Path.rename
left = int(sys.argv[3])
def rename(self, to):
    global left
    left -= 1
    if not left:
        os._exit(9)
    return really(self, to)
Path.rename = rename
salvage(Path(sys.argv[1]), Path(sys.argv[2]))
"""
"""A salvage that ends at its first or second rename: the store gets its name, or the directory does."""


@pytest.mark.parametrize("rename", [1, 2])
def test_a_salvage_that_was_killed_has_left_nothing_by_its_name(sidecar: Sidecar, tmp_path: Path, rename: int) -> None:
    new = tmp_path / "new"
    command = [sys.executable, "-c", DIES, str(sidecar.data), str(new), str(rename)]
    assert subprocess.run(command, timeout=TIMEOUT_SECONDS).returncode == 9
    assert not new.exists()
    done = doctor(sidecar.data, "--salvage", new, status=2)
    assert "[DIRECTORY_NOT_EMPTY]" in done.stderr
    assert "an unfinished command has left it" in done.stderr
    shutil.rmtree(tmp_path / "new.unfinished")
    doctor(sidecar.data, "--salvage", new, status=0)
