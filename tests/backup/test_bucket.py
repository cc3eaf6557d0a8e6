"""Backups in an object store, a real one: what is uploaded, listed, kept and restored, and what a kill leaves there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError, DamagedError, UnavailableError
from seqdedupe.log.embedded.log_folder import SECRET_FILE
from seqdedupe.store.directories import MANIFEST_FILE
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.transfer.backup_places import CLAIM_FILE, BucketPlace, FolderPlace, place_at
from tests.backup.keeping import KILLED
from tests.backup.test_places import NAMES, place_with
from tests.backup.test_restoring import made
from tests.doctor.directories import opened
from tests.spark.s3 import Between, Requested
from tests.spark.s3 import between as between
from tests.spark.s3 import lake as lake
from tests.spark.s3 import s3 as s3

KEPT = 2
MOST_REQUESTS = 1_000
EVERY_REQUEST = 5
"""A kill at each request would take minutes: the process starts again each time."""
PARTS = 6
"""The kills of a backup are made in this number of tests."""


async def uploaded(tmp_path: Path, url: str, *names: str) -> BucketPlace:
    folder = await place_with(tmp_path, *names)
    bucket = BucketPlace(url)
    for name in names:
        bucket.upload(Path(folder.url, name), name)
    return bucket


def good(bucket: BucketPlace) -> list[str]:
    """All that are good by their sizes; each has to be good by its bytes."""
    found = [name for name in bucket.names() if not bucket.look(name, reads_all=False).problem]
    for name in found:
        bucket.check(name)
    return found


async def test_uploaded_listed_kept_and_restored(tmp_path: Path, lake: str) -> None:
    bucket = await uploaded(tmp_path, f"s3://{lake}/", *NAMES[:3])
    here = FolderPlace(tmp_path / "place")
    for name in NAMES[:3]:
        assert bucket.look(name, reads_all=True) == here.look(name, reads_all=True)
    assert bucket.keep(NAMES[2], KEPT).removed == NAMES[:1]
    assert bucket.names() == NAMES[1:3]
    bucket.restore(bucket.newest_good().name, tmp_path / "restored")
    async with opened(tmp_path / "restored") as there:
        assert [message.sequence_id for message in await there.messages("t")] == list(range(30))
    # Another prefix has nothing of this.
    other = BucketPlace(f"s3://{lake}/other")
    for look in (other.names, other.newest_good):
        with pytest.raises(DamagedError, match=r"other is not there.*BACKUP_DAMAGED"):
            look()


async def test_what_is_not_whole_is_none(tmp_path: Path, lake: str) -> None:
    bucket = await uploaded(tmp_path, f"s3://{lake}", *NAMES[:2])
    store, objects = bucket._store, bucket._objects
    paths = [one["path"] for chunk in objects.list(store, NAMES[1]) for one in chunk]
    assert f"{NAMES[1]}/{CLAIM_FILE}" in paths
    for path in paths:
        if path.endswith(CLAIM_FILE):
            continue
        raw = bytes(objects.get(store, path).bytes())
        objects.delete(store, path)
        assert good(bucket) == NAMES[:1]
        assert bucket.newest_good().name == NAMES[0]
        with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
            bucket.restore(NAMES[1], tmp_path / "restored")
        changed = bytes([raw[0] ^ 1]) + raw[1:] if raw else b"more"
        objects.put(store, path, changed)
        with pytest.raises(DamagedError, match="BACKUP_DAMAGED"):
            bucket.restore(NAMES[1], tmp_path / "restored")
        assert bucket.look(NAMES[1], reads_all=True).problem
        objects.put(store, path, raw)
    assert good(bucket) == NAMES[:2]


async def test_a_second_upload_of_a_name_touches_nothing(tmp_path: Path, lake: str) -> None:
    bucket = await uploaded(tmp_path, f"s3://{lake}", NAMES[0])
    other = await made(tmp_path, to="other")
    with pytest.raises(UnavailableError, match="BACKUP_FAILED"):
        bucket.upload(other, NAMES[0])
    bucket.check(NAMES[0])


async def test_what_is_changed_on_the_way_is_noticed(
    tmp_path: Path, between: Between, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object store has other bytes than the folder: the upload fails, before anything says that it is a backup."""
    backup = await made(tmp_path)
    bucket = BucketPlace(f"s3://{lake}")
    secret = next(path for path in backup.rglob(SECRET_FILE))
    put = bucket._put

    def put_another(folder: Path, name: str, path: str) -> None:
        put(folder, name, path)
        if path.endswith(secret.name):
            bucket._objects.put(bucket._store, f"{name}/{path}", b"x" * secret.stat().st_size)

    monkeypatch.setattr(bucket, "_put", put_another)
    with pytest.raises(DamagedError, match="read back"):
        bucket.upload(backup, NAMES[0])
    assert f"no file {MANIFEST_FILE}" in bucket.look(NAMES[0], reads_all=False).problem


def test_a_store_that_refuses_says_why(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match=r"NoSuchBucket.*OBJECT_STORE_UNAVAILABLE"):
        BucketPlace("s3://nosuchbucket/prefix").names()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UnavailableError, match=r"SignatureDoesNotMatch.*OBJECT_STORE_UNAVAILABLE"):
        BucketPlace(f"s3://{lake}").names()


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@b/p", "s3://KEY:SE/CRET@b/p", "gs://SECRET@b/p", "S3://KEY:SECRET@b"])
def test_a_url_with_a_user_is_refused_and_not_quoted(url: str) -> None:
    for place in (place_at, BucketPlace):
        with pytest.raises(ConfigurationError, match="INVALID_CONFIGURATION") as refused:
            place(url)
        assert not re.search("KEY|SECRET|CRET@", str(refused.value))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "url",
    [
        "http://u:word@127.0.0.1:9",
        "http://word@h",
        "http://h:word",
        "http://h:65536",
        "http://[::1",
        "word",
        "",
        " http://h",
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(ConfigurationError, match=f"{name} .*INVALID_CONFIGURATION") as refused:
        BucketPlace("s3://bucket/prefix")
    assert "word" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9000", "https://s3.example.org", "HTTP://[::1]:9/a/", "http://h_1:9/"]
)
def test_an_endpoint_that_can_be_is_taken(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    BucketPlace("s3://bucket/prefix@1:2")


@pytest.mark.parametrize("name", ["../a/x", "a//b", "."])
def test_a_name_that_leads_elsewhere_is_refused(lake: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="INVALID_CONFIGURATION"):
        BucketPlace(f"s3://{lake}/p").restore(name, tmp_path / "restored")


# -- Killed at its requests.


class Killer:
    """Kills a process of `keeping` before one of its requests reaches the object store."""

    def __init__(self, between: Between) -> None:
        self._between = between
        self.requests = 0

    def run(self, folder: Path, new: str, url: str, at: int, bug: str = "-") -> int:
        """Its exit status; 0 is never."""
        self.requests = 0
        arguments = [folder, new, KEPT, url, 0, bug]
        command = [sys.executable, "-m", "tests.kernels", "tests.backup.keeping", *map(str, arguments)]
        environment = os.environ | {"AWS_ENDPOINT_URL": self._between.url, "AWS_SKIP_SIGNATURE": "true"}
        process = subprocess.Popen(command, env=environment)

        def before(_: Requested) -> None:
            self.requests += 1
            if self.requests == at:
                process.send_signal(signal.SIGKILL)
                process.wait()

        self._between.before = before
        status = process.wait(LAST_RESORT_SECONDS)
        assert status in (0, KILLED)
        return status


def wrong_after(before: list[str], new: str, bucket: BucketPlace) -> str:
    now = set(good(bucket))
    if not (set(before[-KEPT:]) <= now or {*before[1 - KEPT :], new} <= now):
        return "neither the old set nor the new one is there"
    return ""


@pytest.mark.parametrize("part", range(PARTS))
async def test_killed_at_its_requests(tmp_path: Path, between: Between, lake: str, part: int) -> None:
    bucket = await uploaded(tmp_path, f"s3://{lake}", *NAMES[:KEPT])
    backup = await made(tmp_path)
    place, killer, kills = tmp_path / "new", Killer(between), 0
    place.mkdir()
    for at in range(1 + part * EVERY_REQUEST, MOST_REQUESTS, PARTS * EVERY_REQUEST):
        new = f"20270101T{at:06}Z"
        backup.rename(place / new)
        before = good(bucket)
        status = killer.run(place, new, bucket.url, at)
        assert wrong_after(before, new, bucket) == "", at
        backup = (place / new).rename(backup)
        if status == 0:
            break
        kills += 1
    else:
        raise AssertionError("it was killed at each request")
    assert kills > 1
    assert bucket.names()[-1] == new
    assert len(good(bucket)) == len(bucket.names()) == KEPT


async def test_control_who_removes_first_is_caught(tmp_path: Path, between: Between, lake: str) -> None:
    bucket = await uploaded(tmp_path, f"s3://{lake}", *NAMES[:KEPT])
    backup = await made(tmp_path, to=f"new/{NAMES[4]}")
    found = ""
    for at in range(EVERY_REQUEST, MOST_REQUESTS, EVERY_REQUEST):
        status = Killer(between).run(backup.parent, NAMES[4], bucket.url, at, "removes_first")
        if status == 0 or (found := wrong_after(NAMES[:KEPT], NAMES[4], bucket)):
            break
    assert found == "neither the old set nor the new one is there"
