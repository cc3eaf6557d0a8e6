"""Kill -9 of a writing process, anywhere: rows and position agree, and the next one goes on."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from seqdedupe_spark.stores.contract import Stored
from tests.spark.stores.conformance import JOB, LIMIT_SECONDS, SCHEMA, TOPIC, StoreHarness, at, ns
from tests.spark.stores.database import COMMIT, MOVE, wait_for_the_end, waits
from tests.spark.stores.harnesses import PostgresHarness, SqliteHarness
from tests.spark.stores.writer import BATCHES, ROWS

RANGE = BATCHES * ROWS
ROOT = Path(__file__).parents[3]


class Writer:
    """The process; it is killed when the block ends."""

    def __init__(self, store: str, place: str = "nowhere") -> None:
        command = [sys.executable, "-m", "tests.spark.stores.writer", store, place]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the writer has ended"
        return line

    def stop(self) -> None:
        """It goes no further, but is not gone."""
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(LIMIT_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


def start(harness: StoreHarness) -> None:
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))


def committed(harness: StoreHarness) -> int:
    """The stored index; all rows up to it are there once, and no other."""
    with harness.factory() as store:
        stored, watermarks = store.watermarks(JOB, TOPIC)
    assert stored is not None
    index = stored.position.index
    assert ns(harness) == list(range(index + 1))
    assert watermarks == ({"a": index} if index >= 0 else {})
    return index


def kill_at(url: str, place: str) -> None:
    """Kills a writer when it is at that place for the first time."""
    with Writer(url, place) as writer:
        while writer.line() != "paused":
            pass


def kill_anywhere(url: str) -> None:
    with Writer(url) as writer:
        for _ in range(random.randint(2, 8)):
            writer.line()
        time.sleep(random.uniform(0, 0.01))


def test_sqlite(tmp_path: Path) -> None:
    harness = SqliteHarness(tmp_path)
    url = f"sqlite:///{harness.path}"
    start(harness)
    expected = -1
    for place, moves in {
        "rows": False,
        'INSERT INTO "flights"': False,
        "COMMIT": False,
        "after": True,
    }.items():
        kill_at(url, place)
        expected += RANGE * moves
        assert committed(harness) == expected, place
    kill_anywhere(url)
    assert committed(harness) > expected


def test_postgres(postgres_url: str) -> None:
    harness = PostgresHarness(postgres_url)
    start(harness)
    expected = -1
    for place, moves in {"rows": False, "watermarks": False, "after": True}.items():
        kill_at(postgres_url, place)
        wait_for_the_end(postgres_url)
        expected += RANGE * moves
        assert committed(harness) == expected, place
    kill_anywhere(postgres_url)
    wait_for_the_end(postgres_url)
    assert committed(harness) > expected


def test_postgres_in_the_commit(postgres_url: str) -> None:
    """The client is gone while the server commits: it commits all of it."""
    harness = PostgresHarness(postgres_url)
    start(harness)
    with waits(postgres_url, COMMIT) as waiting, Writer(postgres_url):
        waiting()
    wait_for_the_end(postgres_url)
    assert committed(harness) == RANGE - 1


@pytest.mark.parametrize(("store", "moves"), [("", True), ("CommitsByItself@@", False)])
def test_a_writer_that_is_stopped_holds_no_lock(postgres_url: str, store: str, moves: bool) -> None:
    harness = PostgresHarness(postgres_url)
    start(harness)
    with Writer(store + postgres_url) as writer:
        with waits(postgres_url, MOVE) as waiting:
            waiting()
            writer.stop()
        # The statement after which the position is locked ends, and nobody asks for the next one.
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SET lock_timeout = '500ms'")
            try:
                connection.execute("SELECT 1 FROM seqdedupe_positions FOR UPDATE")
                moved = True
            except psycopg.errors.LockNotAvailable:
                moved = False
        assert moved == moves
    wait_for_the_end(postgres_url)
    assert committed(harness) == (RANGE - 1 if moves else -1)


def test_a_store_that_commits_rows_first_is_caught(tmp_path: Path) -> None:
    harness = SqliteHarness(tmp_path)
    start(harness)
    for _ in range(2):
        kill_at(f"CommitsRowsFirst@@sqlite:///{harness.path}", "watermarks")
    assert len(ns(harness)) == 2 * RANGE
    with pytest.raises(AssertionError):
        committed(harness)
