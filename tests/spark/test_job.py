"""A job's rounds, planned from the stored positions. The tasks run here, one after the other, without Spark."""

import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.client.client import TopicEnds
from seqdedupe.errors import (
    ConfigurationError,
    DataLossError,
    FencedError,
    NotFoundError,
    PositionError,
    SeqdedupeError,
    UnavailableError,
)
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import planning, rounds
from seqdedupe_spark.planning import TopicListing
from seqdedupe_spark.range_task import RangeStep, TaskReport
from seqdedupe_spark.rounds import FIRST_START, JobConfig, Positions, ReaderJob, Round, positions_of, reset_position
from seqdedupe_spark.stores.contract import Stored
from seqdedupe_spark.stores.urls import from_url
from tests.spark.jobs import (
    JOB,
    OUTPUT,
    TABLE,
    Database,
    begin,
    each_once,
    postgres_database,
    publish,
    select,
    source,
    sqlite_database,
    task,
    whole,
)
from tests.spark.postgres import postgres_url as postgres_url

SEGMENT_BYTES = 128 * 1024 * 1024
"""A segment of the log: what retention drops whole."""

LARGE_BYTES = 2_000_000

SESSION: Any = SimpleNamespace(conf={"spark.master": "local[2]"})


@pytest.fixture
def address(shared_sidecar: Sidecar) -> str:
    return shared_sidecar.address


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


@pytest.fixture(autouse=True)
def tasks_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_tasks(
        _: object, run: Callable[[Sequence[RangeStep]], TaskReport], groups: Sequence[Sequence[RangeStep]]
    ) -> list[TaskReport]:
        return [run(group) for group in groups]

    monkeypatch.setattr(rounds, "run_tasks", run_tasks)


def config(address: str, database: Database, topic: str, **options: object) -> JobConfig:
    return JobConfig(JOB, source(address, **({"topics": topic} | options)), database.store, TABLE)


def job(address: str, database: Database, topic: str, **options: object) -> ReaderJob:
    return ReaderJob(SESSION, config(address, database, topic, **options), select)


def stored(database: Database) -> dict[str, Stored]:
    return positions_of(database.store, JOB)


def ends(address: str, topic: str) -> Position:
    with Client(address) as client:
        return client.ends(topic).last


def test_reads_all_there_is_in_rounds_and_goes_on_where_it_was(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 100)
    rounds: list[int] = []
    total = job(address, database, topic, maxOffsetsPerTrigger=30).run(on_round=lambda done: rounds.append(done.lag))
    assert (total.read, total.written) == (100, 100)
    assert rounds == [70, 40, 10, 0]
    publish(address, topic, 50, first=100)
    assert job(address, database, topic, maxOffsetsPerTrigger=7).run().read == 50
    each_once(database.indexes(full), 150)
    assert stored(database)[full].position == ends(address, topic)


def test_a_run_without_anything_new_changes_nothing(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 10)
    for expected in (10, 0, 0):
        assert job(address, database, topic).run().read == expected
    each_once(database.indexes(full), 10)


def test_an_empty_topic_gets_its_position(address: str, database: Database, topic: str) -> None:
    with Client(address) as client:
        client.admin.create_topic(topic)
    total = job(address, database, topic).run()
    assert (total.read, total.lag, list(total.standings)) == (0, 0, [topic_name(topic)])
    assert stored(database)[topic_name(topic)].position == ends(address, topic)


@pytest.mark.parametrize(("option", "value"), [("startingOffsets", "latest"), ("startingTime", "4102444800000")])
def test_the_first_start_is_resolved_once(
    address: str, database: Database, topic: str, option: str, value: str
) -> None:
    full = publish(address, topic, 20)
    assert job(address, database, topic, **{option: value}).run().read == 0
    publish(address, topic, 10, first=20)
    assert job(address, database, topic, **{option: value}).run().read == 10
    each_once(database.indexes(full), 10, 20)


def test_each_topic_may_start_with_a_time_of_its_own(address: str, database: Database, topic: str) -> None:
    late, early = publish(address, f"{topic}-a", 5), publish(address, f"{topic}-b", 6)
    times = json.dumps({late: 4102444800000, early: 0})
    assert job(address, database, f"{late},{early}", startingTime=times).run().read == 6
    assert (database.indexes(late), database.indexes(early)) == ([], [*range(6)])


def test_a_place_that_the_topic_does_not_have_is_not_stored(address: str, database: Database, topic: str) -> None:
    """Stored, it would hold against the right one."""
    full = publish(address, topic, 5)
    incarnation = ends(address, topic).incarnation
    for place in (6, f"{incarnation}:5", f"{incarnation}@5", "12345:2"):
        with pytest.raises(ConfigurationError) as raised:
            job(address, database, topic, startingOffsets=json.dumps({topic: place})).run()
        assert raised.value.reason == "INVALID_OPTION"
    assert job(address, database, topic, startingOffsets=json.dumps({topic: f"{incarnation}:2"})).run().read == 2
    each_once(database.indexes(full), 2, first=3)


def test_a_topic_found_later_begins_at_its_earliest(address: str, database: Database, topic: str) -> None:
    publish(address, f"{topic}-a", 20)
    options = {"topicsPattern": f"{topic}-.*", "startingOffsets": "latest"}

    def run() -> int:
        given = replace(config(address, database, topic), source=source(address, **options))
        return ReaderJob(SESSION, given, select).run().read

    assert run() == 0
    later = publish(address, f"{topic}-b", 15)
    assert run() == 15
    each_once(database.indexes(later), 15)


def test_the_first_start_that_found_no_topic_was_one(address: str, database: Database, topic: str) -> None:
    options = {"topicsPattern": f"{topic}-.*", "startingOffsets": "latest"}
    given = replace(config(address, database, topic), source=source(address, **options))
    assert ReaderJob(SESSION, given, select).run().read == 0
    publish(address, f"{topic}-b", 15)
    assert ReaderJob(SESSION, given, select).run().read == 15


def test_a_first_start_that_was_cut_short_is_finished_as_it_was_meant(
    address: str, database: Database, topic: str
) -> None:
    first, second = publish(address, f"{topic}-a", 5), publish(address, f"{topic}-b", 5)
    with database.store() as store:
        store.prepare(TABLE, OUTPUT)
        store.replace(JOB, first, None, Stored(ends(address, first), 0))
    total = job(address, database, f"{topic}-a,{topic}-b", startingOffsets="latest").run()
    assert total.read == 0
    assert stored(database)[second].position == ends(address, second)


def test_two_that_start_at_once_agree_on_where(
    address: str, database: Database, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = publish(address, topic, 10)
    slow = job(address, database, topic, startingOffsets="latest")
    resolve = Positions._start

    def start_late(self: Any, *given: Any) -> Any:
        # The other one resolves "latest" and runs first; then there is more, and then this one inserts its own.
        monkeypatch.setattr(Positions, "_start", resolve)
        assert job(address, database, topic, startingOffsets="latest").run().read == 0
        publish(address, topic, 5, first=10)
        return resolve(self, *given)

    monkeypatch.setattr(Positions, "_start", start_late)
    assert slow.run().read == 0
    assert slow.run().read == 5
    each_once(database.indexes(full), 5, 10)


def test_a_reset_ends_a_run_and_the_next_goes_on_from_there(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 20)
    running = job(address, database, topic)
    running.run()
    before, after = reset_position(database.store, JOB, topic, f"{ends(address, full).incarnation}:9", address)
    assert (before, after.epoch) == (Stored(ends(address, topic), 0), 1)
    with pytest.raises(FencedError) as raised:
        running.run()
    assert raised.value.reason == "POSITION_RESET"
    assert job(address, database, topic).run().read == 10
    assert stored(database)[full] == Stored(ends(address, topic), 1)
    assert sorted(database.indexes(full)) == sorted([*range(20), *range(10, 20)])


def test_a_reset_to_a_message_id_stores_in_which_history_it_is(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 20)
    job(address, database, topic).run()
    with Client(address) as client:
        whole = client.position_at(topic, 9)
    assert whole.ownership
    for place in (str(whole.message_id), f"{whole.incarnation}@9", str(whole)):
        _, after = reset_position(database.store, JOB, topic, place, address)
        assert after.position == whole == stored(database)[full].position
    before = stored(database)
    with pytest.raises(PositionError) as raised:
        reset_position(database.store, JOB, topic, str(whole._replace(ownership=whole.ownership ^ 1)), address)
    assert raised.value.reason == "POSITION_DIVERGED"
    assert stored(database) == before


@pytest.mark.parametrize(("place", "expected"), [("earliest", 20), ("latest", 0), ("0", 20), ("13", 7), ("20", 0)])
def test_a_reset_to_an_end_or_an_index(address: str, database: Database, topic: str, place: str, expected: int) -> None:
    publish(address, topic, 20)
    job(address, database, topic).run()
    reset_position(database.store, JOB, topic, place, address)
    assert job(address, database, topic).run().read == expected


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("soon", "INVALID_OPTION"),
        ("1:1", "POSITION_OF_ANOTHER_INCARNATION"),
        ("1:2:3:4", "INVALID_OPTION"),
        ("6", "POSITION_AFTER_END"),
        (str(2**63), "INVALID_OPTION"),
    ],
)
def test_a_reset_to_a_wrong_place_changes_nothing(
    address: str, database: Database, topic: str, place: str, reason: str
) -> None:
    publish(address, topic, 5)
    job(address, database, topic).run()
    before = stored(database)
    with pytest.raises(SeqdedupeError) as raised:
        reset_position(database.store, JOB, topic, place, address)
    assert raised.value.reason == reason
    assert stored(database) == before


def _execute(database: Database, statements: str) -> None:
    connection = sqlite3.connect(database.url.removeprefix("sqlite:///"))
    connection.executescript(statements)
    connection.close()


def _copy(source_path: Path, target: Path) -> None:
    """A backup."""
    with sqlite3.connect(source_path) as one, sqlite3.connect(target) as other:
        one.backup(other)
    one.close()
    other.close()


def test_a_database_restored_from_a_backup_fails_loudly_and_a_new_start_repairs(
    address: str, database: Database, topic: str, tmp_path: Path
) -> None:
    full = publish(address, topic, 20)
    running = job(address, database, topic, maxOffsetsPerTrigger=10)
    running.run_round()
    _copy(tmp_path / "out.db", tmp_path / "backup.db")
    running.run_round()
    _copy(tmp_path / "backup.db", tmp_path / "out.db")
    publish(address, topic, 5, first=20)
    with pytest.raises(DataLossError) as raised:
        running.run_round()
    assert raised.value.reason == "POSITION_WENT_BACK"
    assert database.indexes(full) == list(range(10))
    assert job(address, database, topic).run().read == 15
    each_once(database.indexes(full), 25)


def test_a_database_without_the_position_fails_loudly(address: str, database: Database, topic: str) -> None:
    publish(address, topic, 20)
    running = job(address, database, topic)
    running.run()
    _execute(database, "DELETE FROM seqdedupe_positions")
    with pytest.raises(DataLossError) as raised:
        running.run_round()
    assert raised.value.reason == "POSITION_WENT_BACK"


@pytest.mark.parametrize("restored", [True, False])
def test_a_topic_that_loses_its_end_while_the_job_runs_fails_loudly(
    database: Database, tmp_path: Path, restored: bool
) -> None:
    """Its position is still one of the topic; the end up to which it was to read is not. The control arm restarts with
    the data that it had."""
    with Sidecar(tmp_path) as sidecar:
        full = publish(sidecar.address, "t", 20)
        sidecar.kill()
        copy = Path(shutil.copytree(sidecar.data, tmp_path / "copy"))
        sidecar.start()
        publish(sidecar.address, "t", 20, first=20)
        running = job(sidecar.address, database, "t", maxOffsetsPerTrigger=10)

        def restart(_: Round) -> None:
            sidecar.kill()
            if restored and copy.exists():
                shutil.rmtree(sidecar.data)
                copy.rename(sidecar.data)
            sidecar.start()

        if restored:
            with pytest.raises(PositionError) as raised:
                running.run(on_round=restart)
            assert raised.value.reason == "POSITION_AFTER_END"
        else:
            assert running.run(on_round=restart).read == 40
        each_once(database.indexes(full), 10 if restored else 40)


def test_a_run_that_stopped_within_a_topic_does_not_read_on_in_another_history(
    database: Database, tmp_path: Path
) -> None:
    """A round's limit has cut its range. Then the topic is restored to an older copy, and grows past the position. The
    control arm knows the position by its index alone: it reads on, and misses what has come at the indexes before."""
    with Sidecar(tmp_path) as sidecar:
        full = publish(sidecar.address, "t", 20)
        sidecar.kill()
        copy = shutil.copytree(sidecar.data, tmp_path / "copy")
        sidecar.start()
        publish(sidecar.address, "t", 60, first=20)
        job(sidecar.address, database, "t", maxOffsetsPerTrigger=50).run_round()
        cut = database.position(full)
        sidecar.kill()
        shutil.rmtree(sidecar.data)
        copy.rename(sidecar.data)
        sidecar.start()
        publish(sidecar.address, "t", 70, producer="another")
        with pytest.raises(PositionError) as raised:
            job(sidecar.address, database, "t").run()
        assert raised.value.reason == "POSITION_DIVERGED"
        each_once(database.indexes(full), 50)
        with database.store() as store:
            by_index = Stored(Position.before(cut.incarnation, cut.index + 1), 0)
            assert store.replace(JOB, full, Stored(cut, 0), by_index)
        assert job(sidecar.address, database, "t").run().read == 40


def _make_anew(address: str, topic: str, count: int) -> None:
    with Client(address) as client:
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic)
    publish(address, topic, count)


def test_a_topic_made_anew_is_an_error(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 20)
    running = job(address, database, topic)
    running.run()
    before = stored(database)
    _make_anew(address, topic, 30)
    for each in (running, job(address, database, topic)):
        with pytest.raises(PositionError) as raised:
            each.run()
        assert raised.value.reason == "POSITION_OF_ANOTHER_INCARNATION"
    assert stored(database) == before
    each_once(database.indexes(full), 20)


def test_a_topic_made_anew_is_read_from_its_start_if_loss_is_accepted(
    address: str, database: Database, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    full = publish(address, topic, 20)
    running = job(address, database, topic, failOnDataLoss="false")
    running.run()
    _make_anew(address, topic, 30)
    assert running.run_round().read == 30
    assert "was recreated" in caplog.text
    assert database.indexes(full) == sorted([*range(20), *range(30)])
    assert stored(database)[full].position == ends(address, topic)
    assert running.run_round().read == 0


def test_what_may_be_accepted_says_how(address: str, database: Database, topic: str) -> None:
    """The reasons' own hints are those of other readers: that the name is mistyped, to start again."""
    publish(address, topic, 5)
    job(address, database, topic).run()
    with Client(address) as client:
        client.admin.delete_topic(topic)
        with pytest.raises(NotFoundError) as deleted:
            job(address, database, topic).run()
        client.admin.create_topic(topic)
    with pytest.raises(PositionError) as anew:
        job(address, database, topic).run()
    for raised in (deleted, anew):
        assert "--no-fail-on-data-loss" in raised.value.hint


def test_a_topic_deleted_is_an_error_or_a_single_warning(
    address: str, database: Database, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(address, f"{topic}-a", 5)
    publish(address, f"{topic}-b", 5)
    options = {"topicsPattern": f"{topic}-.*"}
    given = replace(config(address, database, topic), source=source(address, **options))
    ReaderJob(SESSION, given, select).run()
    with Client(address) as client:
        client.admin.delete_topic(f"{topic}-b")
    publish(address, f"{topic}-a", 5, first=5)
    with pytest.raises(NotFoundError):
        ReaderJob(SESSION, given, select).run()
    accepting = replace(given, source=replace(given.source, fail_on_data_loss=False))
    running = ReaderJob(SESSION, accepting, select)
    assert running.run_round().read == 5
    running.run_round()
    assert caplog.text.count("was deleted") == 1


def test_a_stored_topic_that_is_no_more_selected_is_left_alone(address: str, database: Database, topic: str) -> None:
    publish(address, f"{topic}-a", 5)
    publish(address, f"{topic}-b", 5)
    job(address, database, f"{topic}-a,{topic}-b").run()
    publish(address, f"{topic}-b", 5, first=5)
    assert job(address, database, f"{topic}-a").run().read == 0


def test_all_partitions_of_a_topic_are_read(address: str, database: Database, topic: str) -> None:
    names = [publish(address, f"{topic}-partition-{k}", 10) for k in range(3)]
    assert job(address, database, topic).run().read == 30
    for name in names:
        each_once(database.indexes(name), 10)


def test_partitions_are_read_on_when_a_topic_of_their_name_comes(address: str, database: Database, topic: str) -> None:
    parts = [publish(address, f"{topic}-partition-{k}", 2) for k in range(2)]
    assert job(address, database, topic).run().read == 4
    publish(address, topic, 1)
    for name in parts:
        publish(address, name, 3, first=2)
    parts.append(publish(address, f"{topic}-partition-2", 5))
    job(address, database, topic).run()
    each_once(database.indexes(topic_name(topic)), 1)
    for name in parts:
        each_once(database.indexes(name), 5)


def test_one_transaction_for_all_topics(address: str, database: Database, topic: str) -> None:
    names = [publish(address, f"{topic}-{k}", 10) for k in range(3)]
    given = replace(config(address, database, ",".join(names)), transaction="batch")
    assert ReaderJob(SESSION, given, select).run().read == 30
    for name in names:
        each_once(database.indexes(name), 10)


def test_what_trying_again_can_cure_is_tried_again(
    address: str, database: Database, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = publish(address, topic, 20)
    run = ReaderJob.run_round
    failures = [UnavailableError("OUTPUT_UNAVAILABLE", "down", "", 0, {}) for _ in range(3)]

    def run_round(self: ReaderJob) -> Round:
        if failures:
            raise failures.pop()
        return run(self)

    monkeypatch.setattr(ReaderJob, "run_round", run_round)
    assert job(address, database, topic).run().read == 20
    each_once(database.indexes(full), 20)


def test_what_fails_for_too_long_ends_the_run(
    address: str, database: Database, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(address, topic, 5)
    monkeypatch.setattr(rounds, "GIVE_UP_SECONDS", 0.2)
    failure = UnavailableError("OUTPUT_UNAVAILABLE", "down", "", 0, {})
    tries: list[int] = []

    def run_round(self: ReaderJob) -> Round:
        tries.append(1)
        raise failure

    monkeypatch.setattr(ReaderJob, "run_round", run_round)
    with pytest.raises(UnavailableError):
        job(address, database, topic).run()
    assert len(tries) > 1


def test_a_job_that_follows_waits_for_its_database_however_long(
    address: str,
    postgres_url: str,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The driver does, in all steps of a round; a run that does not follow ends with the cause."""
    full = publish(address, topic, 5)
    monkeypatch.setattr(rounds, "GIVE_UP_SECONDS", 0.1)
    monkeypatch.setattr(planning, "SAY_SECONDS", 0.0)
    folder = postgres_url.rpartition("host=")[2]
    away = postgres_database(postgres_url.replace(folder, str(tmp_path)))
    with pytest.raises(UnavailableError, match="cannot be reached"):
        job(address, away, topic).run()
    caplog.clear()
    running = job(address, away, topic)
    thread = threading.Thread(target=running.run, kwargs={"follow": True})
    thread.start()
    try:
        _until(lambda: caplog.text.count("waiting: ") >= 3)
        assert "cannot be reached" in caplog.text
        (tmp_path / ".s.PGSQL.5432").symlink_to(Path(folder) / ".s.PGSQL.5432")
        _until(lambda: running.total.read == 5)
    finally:
        running.stop()
        thread.join(LAST_RESORT_SECONDS)
    each_once(postgres_database(postgres_url).indexes(full), 5)


def test_a_job_ends_at_once_if_its_database_does_not_let_it_in(address: str, postgres_url: str, topic: str) -> None:
    publish(address, topic, 5)
    name = postgres_url.rpartition("/test_")[2]
    wrong = {
        "no such database": postgres_database(postgres_url.replace(f"/test_{name}", f"/none_{name}")),
        "does not let this user in": postgres_database(postgres_url.replace("postgres@", "nobody@")),
    }
    for cause, database in wrong.items():
        general = replace(database, store=from_url(database.url.replace("://", "+psycopg://")))
        for one in (database, general):
            with pytest.raises(UnavailableError, match=cause):
                job(address, one, topic).run(follow=True)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LAST_RESORT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_topic_that_fails_does_not_keep_the_others_back(address: str, database: Database, topic: str) -> None:
    good, bad = publish(address, f"{topic}-a", 10), publish(address, f"{topic}-b", 10)

    def choosy(batch: Any) -> Any:
        if bad in batch.column("__topic").to_pylist():
            raise ValueError("no")
        return select(batch)

    running = ReaderJob(SESSION, config(address, database, f"{topic}-a,{topic}-b"), choosy)
    with pytest.raises(ConfigurationError):
        running.run()
    each_once(database.indexes(good), 10)
    assert database.indexes(bad) == []
    assert running.total.written == 10


def test_following_reads_what_comes_until_it_is_stopped(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 10)
    running = job(address, database, topic)

    def more(done: Round) -> None:
        if running.total.read < 30:
            publish(address, topic, 10, first=running.total.read)
        else:
            running.stop()

    assert running.run(follow=True, trigger_seconds=0.01, on_round=more).read == 30
    each_once(database.indexes(full), 30)


def test_trimmed_messages_are_an_error_or_skipped(
    start_sidecar: Callable[..., Sidecar], database: Database, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = start_sidecar(default_retention_size_in_mb=1).address
    with Client(address) as client:
        with client.producer(topic, "p") as producer:
            for i in range(SEGMENT_BYTES // LARGE_BYTES + 3):
                producer.send(bytes(LARGE_BYTES), i)
                producer.flush()
        given = replace(config(address, database, topic, maxOffsetsPerTrigger=5), deduplicate=True)
        assert ReaderJob(SESSION, given, without_value).run_round().read == 5
        client.admin.snapshot(topic)
        until = time.monotonic() + LAST_RESORT_SECONDS
        while not (first := client.ends(topic).first_index):
            assert time.monotonic() < until
            time.sleep(0.01)
        count = client.ends(topic).last.index + 1
    with pytest.raises(PositionError) as raised:
        ReaderJob(SESSION, given, without_value).run()
    assert raised.value.reason == "POSITION_TRIMMED"
    accepting = replace(given, source=replace(given.source, fail_on_data_loss=False))
    assert ReaderJob(SESSION, accepting, without_value).run().read == count - first
    assert f"lost {first - 5} messages" in caplog.text
    full = topic_name(topic)
    assert database.indexes(full) == [*range(5), *range(first, count)]
    with database.store() as store:
        # What it knew of the producers before is not forgotten.
        assert store.watermarks(JOB, full)[1] == {"p": count - 1}


def without_value(batch: pa.RecordBatch) -> pa.RecordBatch:
    values = pa.nulls(len(batch), pa.binary())
    return pa.RecordBatch.from_arrays([batch.column("__topic"), batch.column("__index"), values], schema=OUTPUT)


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://x", "local-cluster[2,1,1024]", ""])
def test_a_local_store_is_refused_on_a_cluster(address: str, database: Database, topic: str, master: str) -> None:
    publish(address, topic, 1)
    session: Any = SimpleNamespace(conf={"spark.master": master})
    with pytest.raises(ConfigurationError) as raised:
        ReaderJob(session, config(address, database, topic), select).run()
    assert raised.value.reason == "UNSUPPORTED_STORE"


def test_missing_topics_and_wrong_tables_are_named(address: str, database: Database, topic: str) -> None:
    with pytest.raises(NotFoundError, match=topic):
        job(address, database, topic).run()
    publish(address, topic, 1)
    _execute(database, f"DROP TABLE {TABLE}; CREATE TABLE {TABLE} (topic TEXT)")
    with pytest.raises(ConfigurationError, match="index"):
        job(address, database, topic).run()
    with pytest.raises(ConfigurationError, match="job"):
        ReaderJob(SESSION, replace(config(address, database, topic), job=""), select).run()


def test_a_sidecar_that_is_not_there_is_waited_for_and_named(
    database: Database, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "GIVE_UP_SECONDS", 0.5)
    monkeypatch.setattr(planning, "SAY_SECONDS", 0.0)
    monkeypatch.setattr(planning.patiently, "__defaults__", (3.0, lambda: False))
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"):
        job("127.0.0.1:9", database, topic).run()
    assert "waiting: no connection to the sidecar at 127.0.0.1:9" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:9"])
def test_a_job_that_waits_for_its_sidecar_stops_when_it_is_told_to(address: str, database: Database) -> None:
    waiting = job(address, database, "t")
    threading.Timer(0.3, waiting.stop).start()
    assert waiting.run(follow=True).read == 0


def test_a_task_whose_sidecar_is_away_ends(
    start_sidecar: Callable[..., Sidecar], database: Database, topic: str
) -> None:
    sidecar = start_sidecar()
    publish(sidecar.address, topic, 10)
    running = job(sidecar.address, database, topic, readTimeoutSeconds=1)

    def away(*_: object) -> list[TaskReport]:
        sidecar.kill()
        running.stop()
        return real(*_)

    real: Callable[..., list[TaskReport]] = vars(rounds)["run_tasks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_tasks", away)
        assert running.run(follow=True).read == 0


@pytest.mark.parametrize("option", ["table", "deduplicate"])
def test_a_job_goes_on_as_it_was_begun_only(address: str, database: Database, topic: str, option: str) -> None:
    full = publish(address, topic, 5)
    given = config(address, database, topic)
    ReaderJob(SESSION, given, select).run()
    changed = replace(given, table="others") if option == "table" else replace(given, deduplicate=True)
    publish(address, topic, 5, first=5)
    with pytest.raises(ConfigurationError) as raised:
        ReaderJob(SESSION, changed, select).run()
    assert raised.value.reason == "JOB_CHANGED"
    assert ReaderJob(SESSION, given, select).run().read == 5
    each_once(database.indexes(full), 10)


def test_a_table_that_does_not_fit_binds_nobody(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 5)
    _execute(database, "CREATE TABLE others (topic TEXT)")
    given = config(address, database, topic)
    with pytest.raises(ConfigurationError) as raised:
        ReaderJob(SESSION, replace(given, table="others"), select).run()
    assert raised.value.reason == "INVALID_OUTPUT"
    assert ReaderJob(SESSION, given, select).run().read == 5
    each_once(database.indexes(full), 5)
    with pytest.raises(ConfigurationError) as raised:
        ReaderJob(SESSION, replace(given, table="anew"), select).run()
    assert raised.value.reason == "JOB_CHANGED"
    assert not database.query("SELECT 1 FROM sqlite_master WHERE name = 'anew'"), "nothing was made"


def test_a_table_that_is_gone_is_an_error(address: str, database: Database, topic: str) -> None:
    full = publish(address, topic, 5)
    job(address, database, topic).run()
    _execute(database, f"DROP TABLE {TABLE}")
    with pytest.raises(ConfigurationError) as raised:
        job(address, database, topic).run()
    assert raised.value.reason == "OUTPUT_MISSING"
    another = replace(config(address, database, topic), job="another")
    assert ReaderJob(SESSION, another, select).run().read == 5
    each_once(database.indexes(full), 5)


def test_positions_of_the_first_format_are_refused(address: str, database: Database, topic: str) -> None:
    publish(address, topic, 5)
    _execute(database, "CREATE TABLE seqdedupe_positions (job TEXT, topic TEXT, epoch INTEGER, message_id TEXT)")
    with pytest.raises(ConfigurationError, match="have format 1, but this version uses 2"):
        job(address, database, topic).run()


def test_an_end_that_is_answered_too_low_does_not_double_the_table(
    address: str, database: Database, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a sidecar that answers with its snapshot's end while it recovers."""
    full = publish(address, topic, 20)
    accepting = {"failOnDataLoss": "false"}
    job(address, database, topic, **accepting).run()
    before = stored(database)
    low = Position.before(ends(address, topic).incarnation, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "GIVE_UP_SECONDS", 0.2)
        patch.setattr(Client, "ends", lambda *_: TopicEnds(0, low))
        patch.setattr(TopicListing, "ends", lambda *_: TopicEnds(0, low))
        for _ in range(2):
            with pytest.raises(PositionError, match="lacks indexes 7 to 19"):
                job(address, database, topic, **accepting).run()
            assert stored(database) == before
    publish(address, topic, 5, first=20)
    assert job(address, database, topic, **accepting).run().read == 5
    each_once(database.indexes(full), 25)


def test_the_marker_of_the_first_start_is_not_shown(address: str, database: Database, topic: str) -> None:
    publish(address, topic, 1)
    job(address, database, topic).run()
    with database.store() as store:
        assert FIRST_START in store.positions(JOB)
    assert list(stored(database)) == [topic_name(topic)]


def test_a_topic_of_deduplication_ids_is_read_and_not_deduplicated(
    address: str, database: Database, topic: str
) -> None:
    with Client(address) as client:
        client.admin.create_topic(topic, deduplication_mode="deduplication-id")
        with client.publisher(topic) as publisher:
            publisher.send_batch([b"%d" % i for i in range(30)], [f"id-{i}" for i in range(30)])
    given = config(address, database, topic, maxOffsetsPerTrigger=7)
    refused = ReaderJob(SESSION, replace(given, deduplicate=True), select)
    with pytest.raises(ConfigurationError, match=f"deduplicate: {topic_name(topic)} has deduplication IDs") as raised:
        refused.run()
    assert "unique key" in raised.value.hint
    # The refused run has bound the job to nothing.
    assert ReaderJob(SESSION, given, select).run().written == 30
    each_once(database.indexes(topic_name(topic)), 30)


def test_a_task_that_is_to_deduplicate_ids_commits_nothing(address: str, database: Database, topic: str) -> None:
    """For a topic that was still recovering when the job looked at it."""
    with Client(address) as client:
        client.admin.create_topic(topic, deduplication_mode="deduplication-id")
        with client.publisher(topic) as publisher:
            publisher.send(b"one")
    step = whole(address, topic)
    begin(database.store, [step])
    failure = task(address, database.store, deduplicate=True).run([step]).failure
    assert failure is not None
    assert failure.reason == "INVALID_OPTION"
    assert database.indexes(step.range.topic) == []
    assert database.position(step.range.topic) == step.range.start
