"""`seqdedupe backup`, `verify` and `restore` as processes: what they print, and their exit statuses."""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.errors import InvalidRequestError
from seqdedupe.store.db import Store
from seqdedupe.testing import Sidecar
from seqdedupe.transfer.backup import LastBackup
from seqdedupe.transfer.backup_places import FolderPlace
from seqdedupe.v1 import admin_pb2
from tests.backup.test_places import DAY_US, put_in_future
from tests.broker_sidecar.metrics.scraping import scrape
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS
from tests.doctor.directories import segments


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    (tmp_path / "backups").mkdir()
    with Sidecar(tmp_path / "s", backup_directory=tmp_path / "backups", metrics_listen="127.0.0.1:0") as sidecar:
        with Client(sidecar.address) as client, client.producer("orders", "shop") as producer:
            for i in range(100):
                producer.send(b"payload %d" % i)
        yield sidecar


def attempt(sidecar: Sidecar, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | {"SEQDEDUPE_ADDRESS": sidecar.address},
    )


def run(sidecar: Sidecar, *arguments: object, status: int = 0) -> str:
    done = attempt(sidecar, *arguments)
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (status == 2 or (status == 1 and not done.stdout))
    return done.stdout or done.stderr


def test_made_checked_and_restored(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    assert run(sidecar, "backup", "one").startswith(f"{backups / 'one'}: 1 topic, ")
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
        assert said.endswith("nodir is not there [BACKUP_DAMAGED] Check the name and the place of the backup.\n")


def test_damage_has_a_status(sidecar: Sidecar, tmp_path: Path) -> None:
    file = segments(sidecar.data)[0]
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 0xFF
    file.write_bytes(raw)
    assert "damaged when the backup was made" in run(sidecar, "backup", "one", status=1)
    backup = tmp_path / "backups" / "one"
    assert run(sidecar, "verify", backup, status=1).endswith("is NOT WHOLE\n")
    [part] = json.loads(run(sidecar, "restore", backup, tmp_path / "r", "--json", status=1))["parts"]
    assert [fault["topic"] for fault in part["damaged"]] == ["persistent://public/default/orders"]
    (backup / "BACKUP").unlink()
    assert "BACKUP_DAMAGED" in run(sidecar, "verify", backup, status=1)
    assert "BACKUP_DAMAGED" in run(sidecar, "verify", tmp_path / "nothing", status=1)


def moment(sidecar: Sidecar) -> float:
    """What the metrics say about the last backup."""
    return scrape(sidecar).value("seqdedupe_backup_timestamp_seconds")


def wait_for_moment(sidecar: Sidecar, at_us: int) -> None:
    """Who scrapes again within half a second is shown the same."""
    while moment(sidecar) != at_us / 1e6:
        time.sleep(0.05)


def test_the_newest_are_kept_listed_and_restored(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    run(sidecar, "backup", "before-upgrade")
    made: list[str] = []
    for _ in range(3):
        last = made[-1] if made else ""
        # Names are of the second: two within one are refused, and that changes nothing.
        while (done := attempt(sidecar, "backup", "--keep", 2, "--json")).returncode:
            assert "DIRECTORY_NOT_EMPTY" in done.stderr
        said = json.loads(done.stdout)
        assert said["verified"]
        assert said["name"] > last
        made.append(said["name"])
    assert said["removed"] == [str(backups / made[0])]
    listed = json.loads(run(sidecar, "backup", "list", backups, "--json", "--verify"))
    assert [(one["name"], one["good"], one["topics"]) for one in listed["backups"]] == [
        (name, True, 1) for name in (*made[1:], "before-upgrade")
    ]
    assert run(sidecar, "restore", "--from", backups, tmp_path / "r" / "data").startswith(
        f"restored {backups / made[2]}\n"
    )
    assert "before-upgrade" in run(
        sidecar, "restore", "--from", backups, "--backup", "before-upgrade", tmp_path / "named"
    )
    with Sidecar(tmp_path / "r") as restored, Client(restored.address) as client:
        assert len(list(client.reader("orders"))) == 100
    for words in (("restore", tmp_path), ("restore", "--backup", "x", "a", "b"), ("backup", "x", "--keep", 1)):
        assert "See seqdedupe" in run(sidecar, *words, status=2)


def test_one_from_the_future_is_named(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    for name in ("20261101T020000Z", "20261102T020000Z"):
        run(sidecar, "backup", name)
    put_in_future(backups / name)
    assert "IN THE FUTURE" in run(sidecar, "backup", "list", backups).splitlines()[2]
    listed = json.loads(run(sidecar, "backup", "list", backups, "--json"))["backups"]
    assert [one["in_future"] for one in listed] == [False, True]
    done = attempt(sidecar, "restore", "--from", backups, tmp_path / "r")
    assert done.stdout.startswith(f"restored {backups / '20261101T020000Z'}\n")
    assert f"the moment of {backups / name} is in the future" in done.stderr
    done = attempt(sidecar, "backup", "--keep", 2)
    assert f"the moment of {backups / name} is in the future" in done.stderr
    assert (done.returncode, len(os.listdir(backups))) == (0, 4)


def test_what_is_damaged_is_listed_as_that_and_keeps_the_older_ones(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    first = json.loads(run(sidecar, "backup", "--keep", 1, "--json"))
    [part] = first["parts"]
    wait_for_moment(sidecar, part["made_at_us"])
    file = segments(sidecar.data)[0]
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 0xFF
    file.write_bytes(raw)
    while (done := attempt(sidecar, "backup", "--keep", 1, "--json")).stderr:
        assert "DIRECTORY_NOT_EMPTY" in done.stderr
    said = json.loads(done.stdout)
    assert (done.returncode, said["verified"], said["removed"]) == (1, False, [])
    assert moment(sidecar) == part["made_at_us"] / 1e6
    out = run(sidecar, "backup", "list", backups, status=1).splitlines()
    assert out[1].endswith("good")
    assert "NOT GOOD" in out[2]
    assert first["name"] in run(sidecar, "restore", "--from", backups, tmp_path / "r")


def test_the_moment_of_the_last_one_survives_a_restart_and_what_cannot_be_is_refused(
    sidecar: Sidecar, tmp_path: Path
) -> None:
    assert moment(sidecar) == 0
    [part] = json.loads(run(sidecar, "backup", "one", "--json"))["parts"]
    wait_for_moment(sidecar, part["made_at_us"])
    with Client(sidecar.address) as client:
        for at_us in (0, -1, 2**62):
            with pytest.raises(InvalidRequestError, match="in the past"):
                client.admin.confirm_backup([admin_pb2.BackupResponse(made_at_us=at_us)])
        # An older one changes nothing.
        client.admin.confirm_backup([admin_pb2.BackupResponse(made_at_us=1)])
    sidecar.kill()
    sidecar.start()
    assert moment(sidecar) == part["made_at_us"] / 1e6


def test_a_moment_in_the_future_keeps_no_alert_silent(sidecar: Sidecar) -> None:
    """The clock was a day ahead when the last backup was confirmed."""
    sidecar.kill()
    store = Store.open(sidecar.data / "store")
    try:
        asyncio.run(LastBackup(store).confirm(time.time_ns() // 1000 + DAY_US))
    finally:
        store.close()
    sidecar.start()
    assert moment(sidecar) == 0
    [part] = json.loads(run(sidecar, "backup", "one", "--json"))["parts"]
    wait_for_moment(sidecar, part["made_at_us"])


def test_one_command_at_a_time_and_only_where_the_folder_is(sidecar: Sidecar, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    with FolderPlace(backups).locked():
        assert "BACKUP_FAILED" in run(sidecar, "backup", "--keep", 1, status=1)
    assert moment(sidecar) == 0
    before = os.listdir(backups)
    for url in (backups, "s3://", "gs://bucket/prefix"):
        assert "INVALID_CONFIGURATION" in run(sidecar, "backup", "--to", url, status=2)
    assert os.listdir(backups) == before


def test_two_commands_at_once(sidecar: Sidecar, tmp_path: Path) -> None:
    """One is refused, or both are right; everything that is there is good."""
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda _: attempt(sidecar, "backup", "--keep", 2), range(2)))
    assert 0 in [one.returncode for one in done]
    for one in done:
        assert one.returncode == 0 or re.search("DIRECTORY_NOT_EMPTY|BACKUP_FAILED", one.stderr)
    listed = json.loads(run(sidecar, "backup", "list", tmp_path / "backups", "--verify", "--json"))["backups"]
    assert [one["good"] for one in listed] in ([True], [True, True])


def test_of_several_workers_the_whole_is_kept_and_listed(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    with Sidecar(tmp_path / "s", workers=2, backup_directory=backups) as sidecar:
        with Client(sidecar.address) as client:
            for topic in ("a", "b", "c", "d"):
                client.admin.create_topic(topic)
        name = json.loads(run(sidecar, "backup", "--keep", 1, "--json"))["name"]
        [found] = json.loads(run(sidecar, "backup", "list", backups, "--json"))["backups"]
        assert (found["name"], found["good"], found["topics"]) == (name, True, 4)
        run(sidecar, "restore", "--from", backups, tmp_path / "r" / "data")
        (backups / name / "worker-1" / "BACKUP").unlink()
        [found] = json.loads(run(sidecar, "backup", "list", backups, "--json", status=1))["backups"]
        assert "no file BACKUP" in found["problem"]
    with Sidecar(tmp_path / "r", workers=2) as restored, Client(restored.address) as client:
        assert len(list(client.admin.topics())) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_damage_in_a_shared_file_is_not_shared_again(tmp_path: Path, workers: int) -> None:
    """One byte of an older backup has changed; size and time of the file have not."""
    backups = tmp_path / "backups"
    backups.mkdir()
    with Sidecar(tmp_path / "s", workers=workers, backup_directory=backups) as sidecar:
        with Client(sidecar.address) as client:
            for topic in ("a", "b", "c", "d"):
                with client.producer(topic, "shop") as producer:
                    producer.send(bytes(100))
        run(sidecar, "backup", "one")
        [rotten, *_] = sorted((backups / "one").rglob("*.log"))
        times = rotten.stat().st_atime_ns, rotten.stat().st_mtime_ns
        raw = bytearray(rotten.read_bytes())
        raw[-5] ^= 1
        rotten.write_bytes(raw)
        os.utime(rotten, ns=times)
        done = attempt(sidecar, "backup", "two", "--json")
        assert (done.returncode, "older backup" in done.stderr) == (0, True)
        said = json.loads(done.stdout)
        assert said["verified"]
        assert sum(part["linked_bytes"] for part in said["parts"]) > 0
        run(sidecar, "backup", "three")
        found = FolderPlace(backups)
        assert {name: not found.look(name, reads_all=True).problem for name in found.names()} == {
            "one": False,
            "two": True,
            "three": True,
        }
        assert {path.name for path in backups.iterdir()} == {"one", "two", "three"}
        assert rotten.read_bytes() == raw
