"""A data directory has one process, no matter what is moved away in it meanwhile."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe import files
from seqdedupe.client.blocking import Client
from seqdedupe.doctor.examine import examine
from seqdedupe.errors import EXIT_FAILED, ConfigurationError
from seqdedupe.files import DIRECTORY_LOCK, Lock, kept_unused, locked_directory
from seqdedupe.store.directories import of_worker
from seqdedupe.testing import Sidecar


def publish(sidecar: Sidecar, ids: range) -> None:
    with Client(sidecar.address) as client, client.producer("t", "p") as producer:
        for sequence_id in ids:
            producer.send(b"%d" % sequence_id, sequence_id=sequence_id).result()


def payloads(sidecar: Sidecar) -> list[bytes]:
    with Client(sidecar.address) as client, client.reader("t") as reader:
        return [bytes(message.payload or b"") for message in reader]


@pytest.mark.parametrize("moved", ["store", "logs"])
def test_a_sidecar_that_hangs_keeps_its_directory_when_a_part_is_moved_away(tmp_path: Path, moved: str) -> None:
    with Sidecar(tmp_path) as first:
        publish(first, range(5))
        first.signal(signal.SIGSTOP)
        second = Sidecar(tmp_path, rebuild_store=True)
        (first.data / moved).rename(first.data / f"{moved}.broken")
        second.spawn()
        try:
            assert second.wait() == EXIT_FAILED
        finally:
            second.kill()
        [line] = second.errors
        assert "[DIRECTORY_IN_USE]" in line
        assert f"process {first.pid} on " in line
        assert re.search(r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", line)
        assert not (first.data / moved).exists()
        (first.data / f"{moved}.broken").rename(first.data / moved)
        first.signal(signal.SIGCONT)
        publish(first, range(5, 10))
        assert payloads(first) == [b"%d" % i for i in range(10)]


@pytest.mark.parametrize("how", ["removed", "replaced", "directory moved"])
def test_a_sidecar_ends_when_its_lock_is_not_at_its_place(tmp_path: Path, how: str) -> None:
    with Sidecar(tmp_path) as sidecar:
        publish(sidecar, range(3))
        lock = sidecar.data / DIRECTORY_LOCK
        if how == "directory moved":
            sidecar.data.rename(tmp_path / "elsewhere")
        else:
            lock.unlink()
        if how == "replaced":
            lock.touch()
        assert sidecar.wait() not in (0, EXIT_FAILED)
        assert any(str(lock) in entry["event"] for entry in sidecar.log if entry["level"] == "critical")
        if how == "directory moved":
            (tmp_path / "elsewhere").rename(sidecar.data)
        sidecar.start()
        assert payloads(sidecar) == [b"0", b"1", b"2"]


def test_workers_lock_their_directories_and_the_parent_the_one_above(tmp_path: Path) -> None:
    with Sidecar(tmp_path, workers=2) as sidecar:
        for folder, pid in ((sidecar.data, sidecar.pid), (of_worker(sidecar.data, 1), sidecar.worker_pids[1])):
            with pytest.raises(ConfigurationError, match=f"process {pid} on ") as refused, locked_directory(folder):
                pass
            assert refused.value.reason == "DIRECTORY_IN_USE"
        (sidecar.data / DIRECTORY_LOCK).unlink()
        # Its workers drain.
        assert sidecar.wait() == EXIT_FAILED


def test_a_directory_that_is_examined_is_not_started_on(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        publish(sidecar, range(3))
        assert sidecar.stop() == 0
    refused: list[str] = []
    shutil.move(sidecar.data / "store", tmp_path / "store")

    def start(_: object) -> None:
        sidecar.spawn()
        assert sidecar.wait() == EXIT_FAILED
        refused.extend(sidecar.errors)

    sidecar.keys["rebuild_store"] = True
    before = sorted(os.listdir(sidecar.data))
    examine(sidecar.data, start)
    assert sorted(os.listdir(sidecar.data)) == before
    [line] = refused
    assert f"process {os.getpid()}, which examines it, has it [DIRECTORY_IN_USE]" in line


def test_a_lock_outlives_no_process_and_can_be_removed_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys, os\nfrom pathlib import Path\nfrom seqdedupe.files import Lock\nLock.take(Path(sys.argv[1]))\n"
    subprocess.run([sys.executable, "-c", f"{code}os._exit(0)", str(path)], check=True)
    lock = Lock.take(path)
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "):
        Lock.take(path)
    lock.remove()
    assert not path.exists()
    Lock.take(path).close()


def test_a_lock_whose_owner_has_written_nothing_is_known_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk has no room for a name."""
    path = tmp_path / DIRECTORY_LOCK
    code = (
        "import sys\nfrom pathlib import Path\nfrom seqdedupe.files import Lock\nlock = Lock.take(Path(sys.argv[1]))\n"
    )
    code += "print(flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        path.write_text("")
        for user in (locked_directory, kept_unused):
            with pytest.raises(ConfigurationError, match=f"in use: process {owner.pid} has it"), user(tmp_path):
                pass
        monkeypatch.setattr(files, "_SYSTEM_LOCKS", tmp_path / "not there")
        unknown = "another process, whose number the system does not say here, has it"
        with pytest.raises(ConfigurationError, match=unknown), locked_directory(tmp_path):
            pass
        owner.communicate()
    with locked_directory(tmp_path):
        pass
