"""`seqdedupe doctor` on a directory of workers: all of them, each with its claim, and what a salvage of one keeps."""

import json
import shutil
from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.store.directories import SHARDS_FILE, of_worker, read_claim
from seqdedupe.testing import Sidecar
from tests.cli.test_doctor import MESSAGES, damage, doctor

WORKERS = 2
NAMES = ["persistent://public/default/t0", "persistent://public/default/t1", "persistent://public/default/t2"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two workers that each have topics, one batch a message. It stays as it is."""
    with Sidecar(tmp_path_factory.mktemp("workers"), workers=WORKERS) as sidecar:
        with Client(sidecar.address) as client:
            for topic in NAMES:
                with client.producer(topic, "shop") as producer:
                    for i in range(MESSAGES):
                        producer.send(b"message %d" % i)
                        producer.flush()
        assert sidecar.stop() == 0
    return sidecar.data


@pytest.fixture
def data(stopped: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(stopped, tmp_path / "data")


def test_all_workers_are_looked_at(data: Path) -> None:
    done = doctor(data, status=0)
    assert done.stdout.endswith(f"{data}, {WORKERS} workers, is whole\n")
    found = json.loads(doctor(data, "--json", status=0).stdout)
    assert found["whole"]
    there = [[topic["name"] for topic in worker["topics"]] for worker in found["workers"]]
    assert all(there), "each worker has a topic"
    assert sorted(name for names in there for name in names) == NAMES


def test_damage_at_one_worker_is_damage_of_the_directory(data: Path) -> None:
    file = damage(of_worker(data, 1))
    done = doctor(data, status=1)
    assert f"damage: {file}, byte " in done.stdout
    assert done.stdout.endswith(f"{data}, {WORKERS} workers, is NOT WHOLE\n")
    found = json.loads(doctor(data, "--json", status=1).stdout)
    assert [found["whole"], *(worker["whole"] for worker in found["workers"])] == [False, True, False]


def test_claims_that_do_not_fit_are_said(data: Path) -> None:
    """The control arm is the first test: with their own claims they are looked at."""
    claims = [of_worker(data, worker) / SHARDS_FILE for worker in range(WORKERS)]
    said = claims[1].read_bytes()
    claims[1].write_bytes(claims[0].read_bytes())
    assert "[SHARD_CLAIMED_TWICE]" in doctor(data, status=2).stderr
    claims[1].unlink()
    assert "[STORE_MISSING]" in doctor(data, status=2).stderr
    claims[1].write_bytes(said)
    doctor(data, status=0)


def test_a_topic_at_a_worker_that_has_not_its_shard_is_said(data: Path) -> None:
    """By itself each worker's directory is whole; exchanged, with their claims left where they were, neither is."""
    first, second = (of_worker(data, worker) for worker in range(WORKERS))
    for folder in ("store", "logs"):
        (first / folder).rename(data / "aside")
        (second / folder).rename(first / folder)
        (data / "aside").rename(second / folder)
    done = doctor(data, status=1)
    assert done.stdout.count("wrong: ") == len(NAMES)
    assert "the directory has the shards" in done.stdout


def test_a_salvage_has_the_claim_of_what_it_is_made_from(data: Path, tmp_path: Path) -> None:
    """Together it is refused, and says what to name. What is salvaged takes the place of the damaged worker."""
    refusal = doctor(data, "--salvage", tmp_path / "new", status=2)
    assert "[INVALID_CONFIGURATION]" in refusal.stderr
    assert str(of_worker(data, 0)) in refusal.stderr
    worker = of_worker(data, 1)
    damage(worker)
    doctor(worker, "--salvage", tmp_path / "new", status=1)
    claim = read_claim(worker)
    assert claim is not None
    assert read_claim(tmp_path / "new") == claim
    shutil.rmtree(worker)
    (tmp_path / "new").rename(worker)
    doctor(data, status=0)
