"""`seqdedupe backup --to` and `restore --from` with an object store, as processes."""

import json
from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.test_backup import attempt, run
from tests.cli.test_backup import sidecar as sidecar
from tests.spark.s3 import lake as lake
from tests.spark.s3 import s3 as s3


def test_copied_kept_listed_and_restored(sidecar: Sidecar, lake: str, tmp_path: Path) -> None:
    url, made = f"s3://{lake}/orders", []
    for _ in range(2):
        while (done := attempt(sidecar, "backup", "--keep", 1, "--to", url, "--json")).returncode:
            assert "DIRECTORY_NOT_EMPTY" in done.stderr
        said = json.loads(done.stdout)
        made.append(said["name"])
        assert said["copied_to"] == [f"{url}/{made[-1]}"]
    assert said["removed"] == [f"{tmp_path / 'backups'}/{made[0]}", f"{url}/{made[0]}"]
    [found] = json.loads(run(sidecar, "backup", "list", url, "--verify", "--json"))["backups"]
    assert (found["name"], found["good"], found["topics"]) == (made[1], True, 1)
    assert run(sidecar, "restore", "--from", url, tmp_path / "r" / "data").startswith(f"restored {url}/{made[1]}\n")
    with Sidecar(tmp_path / "r") as restored, Client(restored.address) as client:
        assert len(list(client.reader("orders"))) == 100


def test_an_object_store_that_fails_leaves_what_there_was(
    sidecar: Sidecar, lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(run(sidecar, "backup", "--keep", 1, "--to", f"s3://{lake}", "--json"))["name"]
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        while "DIRECTORY_NOT_EMPTY" in (done := attempt(sidecar, "backup", "--keep", 1, "--to", f"s3://{lake}")).stderr:
            pass
        assert (done.returncode, "OBJECT_STORE_UNAVAILABLE" in done.stderr) == (1, True)
    listed = json.loads(run(sidecar, "backup", "list", tmp_path / "backups", "--json"))["backups"]
    assert [one["good"] for one in listed] == [True, True]
    [found] = json.loads(run(sidecar, "backup", "list", f"s3://{lake}", "--json"))["backups"]
    assert (found["name"], found["good"]) == (before, True)
