"""`seqdedupe backup`, `verify` and `restore` as processes: what they print, and their exit statuses."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS
from tests.doctor.directories import segments


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    (tmp_path / "backups").mkdir()
    with Sidecar(tmp_path / "s", backup_directory=tmp_path / "backups") as sidecar:
        with Client(sidecar.address) as client, client.producer("orders", "shop") as producer:
            for i in range(100):
                producer.send(b"payload %d" % i)
        yield sidecar


def run(sidecar: Sidecar, *arguments: object, status: int = 0) -> str:
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | {"SEQDEDUPE_ADDRESS": sidecar.address},
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (status == 2 or (status == 1 and not done.stdout))
    return done.stdout or done.stderr


def test_made_checked_and_restored(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    assert run(sidecar, "backup", "one").startswith(f"{backups / 'one'}: 1 topics, ")
    [part] = json.loads(run(sidecar, "backup", "two", "--json"))["parts"]
    assert part["directory"] == str(backups / "two")
    assert part["linked_bytes"] > 0
    assert run(sidecar, "verify", backups / "two").endswith("two is whole\n")
    checked = json.loads(run(sidecar, "verify", backups / "two", "--json"))
    assert (checked["whole"], checked["parts"][0]["findings"]["whole"]) == (True, True)
    assert "as of" in run(sidecar, "restore", backups / "two", tmp_path / "r" / "data")
    assert "DIRECTORY_NOT_EMPTY" in run(sidecar, "restore", backups / "two", tmp_path / "r" / "data", status=1)
    assert "DIRECTORY_NOT_EMPTY" in run(sidecar, "backup", "two", status=1)
    with Sidecar(tmp_path / "r") as restored, Client(restored.address) as client:
        assert len(list(client.reader("orders"))) == 100


def test_a_backup_that_is_not_there(sidecar: Sidecar, tmp_path: Path) -> None:
    for command in (("verify", tmp_path / "nodir"), ("restore", tmp_path / "nodir", tmp_path / "to")):
        said = run(sidecar, *command, status=1)
        assert said.endswith("nodir is not there [BACKUP_DAMAGED] Is that the backup's name, and place?\n")


def test_damage_has_a_status(sidecar: Sidecar, tmp_path: Path) -> None:
    file = segments(sidecar.data)[0]
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 0xFF
    file.write_bytes(raw)
    assert "damaged, as where it was taken" in run(sidecar, "backup", "one", status=1)
    backup = tmp_path / "backups" / "one"
    assert run(sidecar, "verify", backup, status=1).endswith("is NOT WHOLE\n")
    [part] = json.loads(run(sidecar, "restore", backup, tmp_path / "r", "--json", status=1))["parts"]
    assert [fault["topic"] for fault in part["damaged"]] == ["persistent://public/default/orders"]
    (backup / "BACKUP").unlink()
    assert "BACKUP_DAMAGED" in run(sidecar, "verify", backup, status=1)
    assert "BACKUP_DAMAGED" in run(sidecar, "verify", tmp_path / "nothing", status=1)
