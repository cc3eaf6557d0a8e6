"""What a data directory says of itself, and what is refused rather than made again."""

import shutil
from pathlib import Path

import pytest

from broker_sidecar.config import Config
from broker_sidecar.workers import count_of, make
from seqdedupe.errors import ConfigurationError, DamagedError, InvalidRequestError
from seqdedupe.names import ALL_SHARDS, SHARDS, from_text, murmur3_32, shard_of, shards_of_worker, to_text
from seqdedupe.store.directories import (
    MAX_WORKERS,
    SHARDS_FILE,
    WORKERS_FILE,
    Claim,
    Split,
    check_once,
    check_workers,
    of_worker,
    parts_of,
    read_claim,
    read_split,
    write,
)

CLAIM = Claim("c-1", frozenset({0, 1, 2, 5, 63}))


def test_the_shard_of_a_topic_is_for_good() -> None:
    """A later version has to find the same one."""
    assert [shard_of(f"persistent://public/default/{name}") for name in ("a", "orders", "t0")] == [14, 53, 45]
    assert shard_of("persistent://a/b/c") == murmur3_32(b"persistent://a/b/c") % 64


def test_partitions_are_where_the_whole_is() -> None:
    whole = "persistent://public/default/t"
    assert {shard_of(f"{whole}-partition-{k}") for k in range(100)} == {shard_of(whole)}


@pytest.mark.parametrize("workers", range(1, MAX_WORKERS + 1))
def test_each_shard_has_one_worker_and_each_worker_a_shard(workers: int) -> None:
    sets = [shards_of_worker(worker, workers) for worker in range(workers)]
    assert sum(map(len, sets)) == SHARDS
    assert frozenset().union(*sets) == ALL_SHARDS
    assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_shards_as_text() -> None:
    assert to_text(CLAIM.shards) == "0-2,5,63"
    assert from_text("63, 0-2,5") == CLAIM.shards


@pytest.mark.parametrize("text", ["", "64", "5-2", "-1", "1-", "a", "1,,2", "1-2-3", "\u0661", "000"])
def test_what_are_no_shards(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        from_text(text)


def test_the_files_byte_by_byte(tmp_path: Path) -> None:
    write(tmp_path, CLAIM)
    assert (tmp_path / SHARDS_FILE).read_bytes() == (
        b"seqdedupe-shards 1\ncluster c-1\nshards 0-2,5,63 of 64\ncrc32c 40737160\n"
    )
    write(tmp_path, Split("c-1", 4))
    assert (tmp_path / WORKERS_FILE).read_bytes() == b"seqdedupe-workers 1\ncluster c-1\nworkers 4\ncrc32c 7696f45d\n"
    assert read_claim(tmp_path) == CLAIM
    assert read_split(tmp_path) == Split("c-1", 4)
    write(tmp_path, Split("c-1", 4, 2))
    assert read_split(tmp_path) == Split("c-1", 4, 2)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, CLAIM)
    write(tmp_path, Split("c-1", 4))
    for file, read in ((tmp_path / SHARDS_FILE, read_claim), (tmp_path / WORKERS_FILE, read_split)):
        whole = file.read_bytes()
        changed = [whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :] for k in range(len(whole))]
        for data in [*changed, *(whole[:k] for k in range(len(whole))), whole + b"\n"]:
            file.write_bytes(data)
            with pytest.raises(DamagedError):
                read(tmp_path)
        file.write_bytes(whole.replace(b" 1\n", b" 2\n", 1))
        with pytest.raises(DamagedError, match="NEWER_FORMAT"):
            read(tmp_path)
        file.write_bytes(whole)
        assert read(tmp_path) is not None


def test_two_claims_to_a_shard() -> None:
    check_once({"a": CLAIM, "b": Claim("c-1", frozenset({3}))})
    with pytest.raises(ConfigurationError, match="SHARD_CLAIMED_TWICE"):
        check_once({"a": CLAIM, "b": Claim("c-1", frozenset({3, 63}))})
    with pytest.raises(ConfigurationError, match="INVALID_CONFIGURATION"):
        check_once({"a": CLAIM, "b": Claim("c-2", frozenset({3}))})


def test_a_directory_is_split_once(tmp_path: Path) -> None:
    split = make(tmp_path, 4)
    assert make(tmp_path, 4) == split == Split(split.cluster_id, 4)
    check_workers(tmp_path, split)
    assert parts_of(tmp_path) == [of_worker(tmp_path, worker) for worker in range(4)]
    assert parts_of(of_worker(tmp_path, 0)) == [of_worker(tmp_path, 0)]


def test_a_split_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    write(tmp_path, Split("c-1", 0, 4))
    of_worker(tmp_path, 0).mkdir()
    write(of_worker(tmp_path, 0), Claim("c-1", shards_of_worker(0, 4)))
    with pytest.raises(ConfigurationError, match="on its way"):
        parts_of(tmp_path)
    assert count_of(Config(data_directory=str(tmp_path))) == 4
    assert make(tmp_path, 4) == Split("c-1", 4)


@pytest.mark.parametrize("lost", [WORKERS_FILE, "worker-0", "worker-3", f"worker-2/{SHARDS_FILE}"])
def test_what_is_lost_is_never_made_anew(tmp_path: Path, lost: str) -> None:
    make(tmp_path, 4)
    path = tmp_path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DamagedError, match="STORE_MISSING"):
        make(tmp_path, 4)
    with pytest.raises(DamagedError, match="STORE_MISSING"):
        parts_of(tmp_path)


@pytest.mark.parametrize("name", ["worker-1", "worker-4", "worker-copy"])
def test_a_copy_of_a_workers_directory_is_a_second_claim(tmp_path: Path, name: str) -> None:
    """The control arm is `test_a_directory_is_split_once`."""
    make(tmp_path, 4)
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    shutil.copytree(of_worker(tmp_path, 0), tmp_path / name)
    with pytest.raises(ConfigurationError, match="SHARD_CLAIMED_TWICE"):
        make(tmp_path, 4)


@pytest.mark.parametrize(("there", "asked", "runs"), [(0, 0, 1), (0, 1, 1), (0, 4, 4), (4, 0, 4), (4, 4, 4), (1, 0, 1)])
def test_how_many_run(tmp_path: Path, there: int, asked: int, runs: int) -> None:
    if there == 1:
        (tmp_path / "logs").mkdir()
    elif there:
        make(tmp_path, there)
    assert count_of(Config(data_directory=str(tmp_path), workers=asked)) == runs


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_a_directory_on_its_way_gets_there_first(tmp_path: Path, asked: int) -> None:
    """Neither the whole starts with another number, nor a worker by itself; the control arm is the one that it is on
    its way to."""
    make(tmp_path, 4)
    worker = Config(data_directory=str(of_worker(tmp_path, 0)))
    assert count_of(worker) == 1
    write(tmp_path, Split("c-1", 4, 3))
    assert count_of(Config(data_directory=str(tmp_path))) == 3
    assert count_of(Config(data_directory=str(tmp_path), workers=3)) == 3
    with pytest.raises(ConfigurationError, match="being changed to 3"):
        count_of(Config(data_directory=str(tmp_path), workers=asked))
    with pytest.raises(ConfigurationError, match="on its way from 4 workers to 3"):
        count_of(worker)


def test_only_the_sidecars_own_log_has_workers(tmp_path: Path) -> None:
    make(tmp_path, 2)
    with pytest.raises(ConfigurationError, match="embedded logs"):
        count_of(Config(data_directory=str(tmp_path), log="broker"))
