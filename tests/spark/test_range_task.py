"""A job's task, without Spark: no matter what happens to it, a range takes effect once."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.errors import DataLossError, FencedError, PositionError, SeqdedupeError, UnavailableError
from seqdedupe.message_id import Position
from seqdedupe.testing import Sidecar
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.range_task import RangeStep, TaskReport, Transform, output_schema, transformed
from seqdedupe_spark.stores.contract import Advance, Stored
from tests.spark import run_task
from tests.spark.jobs import (
    JOB,
    OUTPUT,
    TABLE,
    CarelessSqliteStore,
    Database,
    Gate,
    GatedStore,
    begin,
    each_once,
    postgres_database,
    publish,
    select,
    sqlite_database,
    task,
    whole,
)
from tests.spark.postgres import postgres_url as postgres_url

MESSAGES = 500


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar with the topic `full`, of this many messages."""
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        publish(sidecar.address, "full", MESSAGES)
        yield sidecar.address


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return sqlite_database(tmp_path / "out.db")
    return postgres_database(request.getfixturevalue("postgres_url"))


def succeeds(report: TaskReport) -> TaskReport:
    assert report.failure is None, report.failure
    return report


def test_writes_a_range_and_moves_the_position(address: str, database: Database) -> None:
    step = whole(address, "full", 100, 300)
    begin(database.store, [step])
    assert succeeds(task(address, database.store).run([step])) == TaskReport(read=200, written=200)
    each_once(database.indexes(step.range.topic), 200, 100)
    assert database.position(step.range.topic) == step.range.end


def test_a_position_of_another_history_is_not_read_on_from(address: str, sqlite: Database) -> None:
    """The position says the history that the task's last message is of, and the next range begins with it."""
    topic = "restored"
    publish(address, topic, 20)
    first = whole(address, topic)
    begin(sqlite.store, [first])
    succeeds(task(address, sqlite.store).run([first]))
    stored = sqlite.position(first.range.topic)
    assert stored.ownership
    publish(address, topic, 1, first=20)
    restored = stored._replace(ownership=stored.ownership ^ 1)
    with sqlite.store() as store:
        assert store.replace(JOB, first.range.topic, Stored(stored, 0), Stored(restored, 1))
    rest = RangeStep(replace(whole(address, topic).range, start=restored), 1)
    failure = task(address, sqlite.store).run([rest]).failure
    assert (type(failure), failure and failure.reason) == (PositionError, "POSITION_DIVERGED")
    assert sqlite.position(first.range.topic) == restored
    assert len(sqlite.indexes(first.range.topic)) == len(first.range)


def test_a_second_run_of_the_same_range_writes_nothing(address: str, database: Database) -> None:
    step = whole(address, "full", 0, 50)
    begin(database.store, [step])
    for expected in (TaskReport(50, 50), TaskReport()):
        assert succeeds(task(address, database.store).run([step])) == expected
    each_once(database.indexes(step.range.topic), 50)


def test_a_range_that_lies_before_the_position_is_done(address: str, sqlite: Database) -> None:
    first, longer = whole(address, "full", 0, 50), whole(address, "full", 0, 80)
    begin(sqlite.store, [longer])
    task(address, sqlite.store).run([longer])
    assert succeeds(task(address, sqlite.store).run([first])) == TaskReport()
    each_once(sqlite.indexes(first.range.topic), 80)


def test_rows_that_are_all_dropped_move_the_position_too(address: str, database: Database) -> None:
    step = whole(address, "full", 0, 40)
    begin(database.store, [step])
    for drop in (lambda batch: None, lambda batch: select(batch).slice(0, 0)):
        succeeds(task(address, database.store, drop).run([step]))
    assert database.indexes(step.range.topic) == []
    assert database.position(step.range.topic) == step.range.end


@pytest.mark.parametrize(
    ("stored", "kind", "reason"),
    [
        (lambda start: Stored(start._replace(index=start.index + 1), 1), UnavailableError, "POSITION_CHANGED"),
        (lambda start: Stored(start._replace(incarnation=7), 1), UnavailableError, "POSITION_CHANGED"),
        (lambda start: Stored(start._replace(index=start.index - 1), 1), DataLossError, "POSITION_WENT_BACK"),
        (lambda start: Stored(start, 0), DataLossError, "POSITION_WENT_BACK"),
        (lambda start: None, DataLossError, "POSITION_WENT_BACK"),
        (lambda start: Stored(start, 2), FencedError, "POSITION_RESET"),
    ],
    ids=["ahead", "another incarnation", "before", "older epoch", "nothing", "newer epoch"],
)
def test_a_range_that_does_not_start_at_the_position_is_refused(
    address: str,
    sqlite: Database,
    stored: Callable[[Position], Stored | None],
    kind: type[SeqdedupeError],
    reason: str,
) -> None:
    step = whole(address, "full", 10, 20, epoch=1)
    begin(sqlite.store, [])
    if there := stored(step.range.start):
        with sqlite.store() as store:
            assert store.replace(JOB, step.range.topic, None, there)
    failure = task(address, sqlite.store).run([step]).failure
    assert isinstance(failure, kind)
    assert failure.reason == reason
    assert sqlite.indexes(step.range.topic) == []


def test_several_ranges_are_one_transaction(address: str, database: Database) -> None:
    publish(address, "second", 30)
    steps = [whole(address, "full", 0, 20), whole(address, "second")]
    begin(database.store, steps)
    assert succeeds(task(address, database.store).run(steps)) == TaskReport(50, 50)
    assert succeeds(task(address, database.store).run(steps)) == TaskReport()
    for step, count in zip(steps, (20, 30), strict=True):
        each_once(database.indexes(step.range.topic), count)


def test_several_ranges_of_which_one_was_taken_are_refused(address: str, database: Database) -> None:
    publish(address, "third", 30)
    steps = [whole(address, "full", 0, 20), whole(address, "third")]
    begin(database.store, steps)
    succeeds(task(address, database.store).run(steps[1:]))
    failure = task(address, database.store).run(steps).failure
    assert failure is not None
    assert failure.reason == "POSITION_CHANGED"
    assert database.indexes(steps[0].range.topic) == []


def test_a_transformation_that_fails_writes_nothing_and_says_where(address: str, sqlite: Database) -> None:
    step = whole(address, "full")
    begin(sqlite.store, [step])

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise KeyError("price")

    failure = task(address, sqlite.store, fail).run([step]).failure
    assert failure is not None
    assert failure.reason == "INVALID_OUTPUT"
    assert "KeyError: 'price'" in str(failure)
    assert "test_range_task.py:" in str(failure)
    assert sqlite.position(step.range.topic) == step.range.start


def test_a_message_that_the_transformation_fails_on_is_named(address: str, sqlite: Database) -> None:
    step = whole(address, "full")
    begin(sqlite.store, [step])

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        if b"value 77" in batch.column("value").to_pylist():
            raise ValueError("what is this?")
        return select(batch)

    failure = task(address, sqlite.store, fail).run([step]).failure
    assert failure is not None
    message_id = f"{step.range.incarnation}:77"
    assert f"the message is {message_id}, index 77, of {step.range.topic}" in str(failure)
    assert failure.numbers == {"topic": step.range.topic, "index": "77", "message_id": message_id}
    assert sqlite.position(step.range.topic) == step.range.start


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_message_that_the_database_refuses_is_named(address: str, sqlite: Database, deduplicate: bool) -> None:
    """For a transformation that makes none, one or two rows of a message."""
    step = whole(address, "full")
    begin(sqlite.store, [step])
    with sqlite.store() as store:
        store._connection.execute(f"CREATE UNIQUE INDEX one ON {TABLE} (value)")  # type: ignore[attr-defined]

    def several(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = []
        for row in select(batch).to_pylist():
            value = b"0 of value 20" if row["index"] == 31 else b"0 of " + row["value"]
            rows += [row | {"value": value}, row | {"value": b"1 of " + row["value"]}][: row["index"] % 3]
        return pa.RecordBatch.from_pylist(rows, OUTPUT)

    failure = task(address, sqlite.store, several, deduplicate=deduplicate).run([step]).failure
    assert failure is not None
    assert (failure.reason, failure.numbers["index"]) == ("INVALID_OUTPUT", "31")
    assert "UNIQUE constraint failed" in str(failure)


@pytest.mark.parametrize("wrong", [lambda batch: "rows", lambda batch: batch])
def test_a_transformation_that_returns_something_else_is_refused(
    address: str, sqlite: Database, wrong: Transform
) -> None:
    step = whole(address, "full", 0, 10)
    begin(sqlite.store, [step])
    failure = task(address, sqlite.store, wrong).run([step]).failure
    assert failure is not None
    assert failure.reason == "INVALID_OUTPUT"


def test_the_columns_are_learned_from_a_batch_without_rows() -> None:
    assert output_schema(None, SCHEMA) == SCHEMA
    assert output_schema(select, SCHEMA).names == ["topic", "index", "value"]
    with pytest.raises(SeqdedupeError, match="an empty batch"):
        output_schema(lambda batch: None, SCHEMA)


def test_an_error_of_ours_passes_a_transformation_as_it_is() -> None:
    def refuse(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transformed(refuse, pa.RecordBatch.from_pylist([], SCHEMA))


def test_duplicates_in_the_topic_are_dropped_over_rounds(address: str, database: Database) -> None:
    topic = f"doubled-{database.url[:6]}"
    with Client(address) as client:
        client.admin.create_topic(topic, deduplication_enabled=False)
    for _ in range(3):
        publish(address, topic, 40)
    steps = [whole(address, topic, start, stop) for start, stop in ((0, 30), (30, 70), (70, 120))]
    begin(database.store, steps[:1])
    reports = [succeeds(task(address, database.store, deduplicate=True).run([step])) for step in steps]
    assert [(report.written, report.duplicates) for report in reports] == [(30, 0), (10, 30), (0, 50)]
    assert [report.read for report in reports] == [30, 40, 50]
    each_once(database.indexes(steps[0].range.topic), 40)


def test_a_batch_that_is_a_duplicate_in_part_keeps_its_new_rows(address: str, sqlite: Database) -> None:
    step = whole(address, "full", 0, 100)
    begin(sqlite.store, [step])
    with sqlite.store() as store:
        watermarked = replace(step.range, end=whole(address, "full", 0, 1).range.end)
        store.write(JOB, "rows", iter(()), [Advance(watermarked, 0, lambda: {"p": 59})])
    rest = whole(address, "full", 1, 100)
    report = succeeds(task(address, sqlite.store, deduplicate=True).run([rest]))
    assert (report.written, report.duplicates) == (40, 59)
    each_once(sqlite.indexes(rest.range.topic), 40, 60)


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_killed_at_any_moment_and_tried_again(address: str, database: Database, tmp_path: Path, where: str) -> None:
    step = whole(address, "full")
    begin(database.store, [step])
    gate = Gate(tmp_path / "gate")
    gated = task(address, partial(GatedStore, database.store, gate, where))
    with run_task.start(tmp_path / "task", gated, [step]) as process:
        gate.wait()
        process.send_signal(signal.SIGKILL)
    assert database.indexes(step.range.topic) == (list(range(MESSAGES)) if where == "after" else [])
    expected = TaskReport() if where == "after" else TaskReport(MESSAGES, MESSAGES)
    assert succeeds(gated.run([step])) == expected
    each_once(database.indexes(step.range.topic), MESSAGES)


def test_without_the_compare_the_same_kill_doubles_the_rows(address: str, sqlite: Database, tmp_path: Path) -> None:
    step = whole(address, "full")
    begin(sqlite.store, [step])
    gate = Gate(tmp_path / "gate")
    careless = partial(CarelessSqliteStore, str(tmp_path / "out.db"), step.range.start)
    gated = task(address, partial(GatedStore, careless, gate, "after"))
    with run_task.start(tmp_path / "task", gated, [step]) as process:
        gate.wait()
        process.send_signal(signal.SIGKILL)
    succeeds(gated.run([step]))
    assert len(sqlite.indexes(step.range.topic)) == 2 * MESSAGES


@pytest.mark.parametrize("where", ["before", "in"])
def test_a_stalled_zombie_blocks_nobody_and_wakes_to_write_nothing(
    address: str, database: Database, tmp_path: Path, where: str
) -> None:
    step = whole(address, "full")
    begin(database.store, [step])
    gate = Gate(tmp_path / "gate")
    gated = task(address, partial(GatedStore, database.store, gate, where))
    with run_task.start(tmp_path / "task", gated, [step]) as zombie:
        gate.wait()
        # The successor cuts its rounds otherwise.
        for start, stop in ((0, 200), (200, None)):
            succeeds(task(address, database.store).run([whole(address, "full", start, stop)]))
        gate.open()
        assert zombie.wait() == 0
    failure = run_task.report(tmp_path / "task").failure
    assert failure is not None
    assert failure.reason == "POSITION_CHANGED"
    each_once(database.indexes(step.range.topic), MESSAGES)


def test_a_zombie_of_before_a_reset_writes_nothing(address: str, database: Database, tmp_path: Path) -> None:
    step = whole(address, "full", 0, 50)
    begin(database.store, [step])
    gate = Gate(tmp_path / "gate")
    gated = task(address, partial(GatedStore, database.store, gate, "before"))
    with run_task.start(tmp_path / "task", gated, [step]) as zombie:
        gate.wait()
        with database.store() as store:
            old = Stored(step.range.start, 0)
            assert store.replace(JOB, step.range.topic, old, old._replace(epoch=1))
        gate.open()
        assert zombie.wait() == 0
    failure = run_task.report(tmp_path / "task").failure
    assert failure is not None
    assert failure.reason == "POSITION_CHANGED"
    assert database.indexes(step.range.topic) == []


def test_two_at_the_same_time_write_once(address: str, database: Database, tmp_path: Path) -> None:
    step = whole(address, "full")
    begin(database.store, [step])
    gate = Gate(tmp_path / "gate")
    gated = partial(GatedStore, database.store, gate, "in")
    with run_task.start(tmp_path / "one", task(address, gated), [step]) as one:
        gate.wait()
        succeeds(task(address, database.store).run([step]))
        gate.open()
        assert one.wait() == 0
    each_once(database.indexes(step.range.topic), MESSAGES)


def test_a_database_that_goes_away_is_worth_another_try(address: str, postgres_url: str) -> None:
    database = postgres_database(postgres_url)
    step = whole(address, "full", 0, 10)
    begin(database.store, [step])

    def cut(batch: pa.RecordBatch) -> pa.RecordBatch:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        return select(batch)

    failure = task(address, database.store, cut).run([step]).failure
    assert isinstance(failure, UnavailableError)
    succeeds(task(address, database.store).run([step]))
    each_once(database.indexes(step.range.topic), 10)


def test_rows_can_be_dropped_and_made(address: str, sqlite: Database) -> None:
    step = whole(address, "full", 0, 100)
    begin(sqlite.store, [step])

    def odd_twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = select(batch)
        odd = rows.filter(pc.equal(pc.bit_wise_and(rows.column("index"), 1), 1))
        return odd.take(pa.array([row for row in range(len(odd)) for _ in (0, 1)]))

    assert succeeds(task(address, sqlite.store, odd_twice).run([step])).written == 100
    assert sqlite.indexes(step.range.topic) == sorted([*range(1, 100, 2)] * 2)
