"""A Delta table on a disk, and the power: what a commit has written is on the disk, or is missed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from seqdedupe_spark.stores import delta
from seqdedupe_spark.stores.contract import OutputStore, Stored
from seqdedupe_spark.stores.delta_files import DeltaLog
from tests.spark.stores.conformance import JOB, SCHEMA, TOPIC, at, ns, numbers, over, refused
from tests.spark.stores.harnesses import DeltaHarness
from tests.spark.stores.test_delta_restored import BINDING, go_on


@pytest.fixture
def harness(tmp_path: Path) -> DeltaHarness:
    return DeltaHarness(tmp_path)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that were made durable, in that order."""
    done: list[Path] = []
    real = os.fsync

    def fsync(file: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    return done


@pytest.fixture
def store(harness: DeltaHarness, synced: list[Path]) -> Iterator[OutputStore]:
    DeltaTable.create(harness.uri, SCHEMA, partition_by=["text"])
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        yield store


def parts(harness: DeltaHarness) -> set[Path]:
    """All there is of a table: files, and the folders that they are in."""
    return {Path(harness.uri), Path(harness.uri).parent, *Path(harness.uri).rglob("*")}


@pytest.mark.parametrize("syncs", [True, False])
def test_all_of_a_commit_is_durable_when_it_is_said(
    harness: DeltaHarness, store: OutputStore, synced: list[Path], monkeypatch: pytest.MonkeyPatch, syncs: bool
) -> None:
    if not syncs:
        monkeypatch.setattr(DeltaLog, "sync", lambda *_: None)
    before = parts(harness)
    synced.clear()
    store.write(JOB, harness.table, iter([numbers(0, 1)]), [over(-1, 1)])
    new = parts(harness) - before
    assert len([path for path in new if path.suffix == ".parquet"]) == 2
    lacking = {*new, *(path.parent for path in new)} - set(synced)
    assert not lacking if syncs else lacking
    if syncs:
        # No version is on the disk before its rows.
        log = synced.index(next(path for path in new if path.suffix == ".json"))
        assert all(synced.index(path) < log for path in new if path.suffix == ".parquet")


def test_the_table_and_the_first_position_are_durable(
    harness: DeltaHarness, store: OutputStore, synced: list[Path]
) -> None:
    assert parts(harness) <= set(synced)


@pytest.mark.parametrize("syncs", [True, False])
def test_what_another_has_left_is_made_durable_before_the_next_commit(
    harness: DeltaHarness, store: OutputStore, synced: list[Path], monkeypatch: pytest.MonkeyPatch, syncs: bool
) -> None:
    """As one that is killed when its commit has happened: on its position the next one builds."""
    before = parts(harness)
    with monkeypatch.context() as killed:
        killed.setattr(DeltaLog, "sync", lambda *_: None)
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    write_deltalake(harness.uri, numbers(100), mode="append")
    left = {path for path in parts(harness) - before if path.is_file()}
    synced.clear()
    seen: list[set[Path]] = []

    def commit(*arguments: Any, **options: Any) -> None:
        seen.append(left - set(synced))
        write_deltalake(*arguments, **options)

    monkeypatch.setattr(delta, "write_deltalake", commit)
    if not syncs:
        monkeypatch.setattr(DeltaLog, "sync", lambda *_: None)
    store.write(JOB, harness.table, iter([numbers(1)]), [over(0, 1)])
    assert len(left) == 4
    assert seen == [set() if syncs else left]


def is_gone(path: Path) -> None:
    path.unlink()


def is_empty(path: Path) -> None:
    os.truncate(path, 0)


def is_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [is_gone, is_empty, is_short])
@pytest.mark.parametrize("then", ["started", "written to"])
def test_a_version_whose_rows_a_power_cut_has_taken_is_missed(
    harness: DeltaHarness, store: OutputStore, damage: Callable[[Path], None], then: str
) -> None:
    store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    before, version = parts(harness), DeltaTable(harness.uri).version()
    store.write(JOB, harness.table, iter([numbers(1)]), [over(0, 1)])
    (rows,) = (path for path in parts(harness) - before if path.suffix == ".parquet")
    damage(rows)
    with refused("INVALID_OUTPUT", "incomplete") as caught:
        if then == "started":
            store.bind(JOB, BINDING)
        else:
            store.write(JOB, harness.table, iter([numbers(2)]), [over(1, 2)])
    assert f"to version {version}," in caught.value.hint
    DeltaTable(harness.uri).restore(version)
    go_on(harness, 2)
    assert ns(harness) == [0, 1, 2]


def test_files_that_others_have_taken_out_are_not_missed(harness: DeltaHarness, store: OutputStore) -> None:
    for n in range(3):
        store.write(JOB, harness.table, iter([numbers(n)]), [over(n - 1, n)])
    whole = DeltaTable(harness.uri)
    whole.optimize.compact()
    write_deltalake(harness.uri, whole.to_pyarrow_table(), mode="overwrite")
    DeltaTable(harness.uri).vacuum(0, dry_run=False, enforce_retention_duration=False)
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [0, 20])
def test_a_version_that_is_not_whole_itself(harness: DeltaHarness, store: OutputStore, left: int) -> None:
    """It is as if it were not there, or an error."""
    store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    log = Path(harness.uri, "_delta_log", f"{DeltaTable(harness.uri).version():020}.json")
    os.truncate(log, left)
    if left:
        with pytest.raises(Exception, match=r"INVALID_OUTPUT|OUTPUT_UNAVAILABLE"):
            store.bind(JOB, BINDING)
        log.unlink()
    go_on(harness, 1)
    assert ns(harness) == [0, 1]
