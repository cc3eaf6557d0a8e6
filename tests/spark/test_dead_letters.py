"""Messages that cannot be written: in their own table, each once, in the transaction that moves over them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from sqlalchemy import NullPool, create_engine, text

from seqdedupe.client.blocking import Client
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.testing import Sidecar
from seqdedupe_spark import range_task, rounds
from seqdedupe_spark.range_task import RangeStep, RangeTask, TaskReport, Transform
from seqdedupe_spark.rounds import JobConfig, ReaderJob
from seqdedupe_spark.stores.urls import from_url
from tests.services.mariadb import mariadb_url as mariadb_url
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
from tests.spark.postgres import PostgresServer
from tests.spark.postgres import postgres_url as postgres_url

MESSAGES = 300
BAD = {7, 8, 150, 299}
SESSION: Any = SimpleNamespace(conf={"spark.master": "local[2]"})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        publish(sidecar.address, "full", MESSAGES)
        publish(sidecar.address, "other", MESSAGES)
        yield sidecar.address


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return sqlite_database(tmp_path / "out.db")
    return postgres_database(request.getfixturevalue("postgres_url"))


def burying(address: str, database: Database, transform: Transform, most: int = 10, **more: bool) -> RangeTask:
    return replace(task(address, database.store, transform, **more), max_dead_letters=most)


def prepared(database: Database, *steps: RangeStep) -> None:
    begin(database.store, steps)
    with database.store() as store:
        store.prepare(TABLE + range_task.DEAD_LETTER_SUFFIX, range_task.DEAD_LETTER_SCHEMA)


def letters(database: Database) -> list[tuple[object, ...]]:
    return database.query(
        'SELECT topic, "index", message_id, reason, error, value, job, incarnation '
        f'FROM {TABLE}{range_task.DEAD_LETTER_SUFFIX} ORDER BY topic, "index"'
    )


def failing(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Fails where one of its messages is bad, with a NUL and half a character in what it says."""
    if bad := BAD.intersection(batch.column("__index").to_pylist()):
        raise ValueError(f"what\0is \ud800 {sorted(bad)}?")
    return select(batch)


def refused(batch: pa.RecordBatch) -> pa.RecordBatch:
    """None, one or two rows of a message; the table takes no null, which the last row of a bad one has."""
    rows = []
    for row in select(batch).to_pylist():
        of_it = [row, row][: 2 if row["index"] in BAD else 1 + row["index"] % 2]
        rows += [*of_it[:-1], row | {"value": None}] if row["index"] in BAD else of_it
    return pa.RecordBatch.from_pylist(rows, OUTPUT)


def takes_no_null(database: Database) -> None:
    with database.store() as store:
        if database.url.startswith("sqlite"):
            connection = store._connection  # type: ignore[attr-defined]
            connection.execute(f"DROP TABLE {TABLE}")
            connection.execute(f'CREATE TABLE {TABLE} (topic TEXT, "index" INTEGER, value BLOB NOT NULL)')
        else:
            store._connection().execute(f"ALTER TABLE {TABLE} ALTER value SET NOT NULL")  # type: ignore[attr-defined]


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("transform", [failing, refused])
def test_what_cannot_be_written_is_put_aside_once(
    address: str, database: Database, transform: Transform, deduplicate: bool
) -> None:
    step = whole(address, "full")
    prepared(database, step)
    if transform is refused:
        takes_no_null(database)
    run = burying(address, database, transform, deduplicate=deduplicate).run
    report = run([step])
    assert report.failure is None
    assert (report.read, report.dead_letters) == (MESSAGES, len(BAD))
    good = [index for index in range(MESSAGES) if index not in BAD]
    if transform is refused:
        good = sorted(good + [index for index in good if index % 2])
    assert database.indexes(step.range.topic) == good
    assert report.written == len(good)
    found = letters(database)
    assert [(row[0], row[1]) for row in found] == [(step.range.topic, index) for index in sorted(BAD)]
    for topic, index, message_id, reason, why, value, job, incarnation in found:
        assert message_id == f"{step.range.incarnation}:{index}"
        assert (reason, job, incarnation) == ("INVALID_OUTPUT", JOB, step.range.incarnation)
        assert f"the message is {message_id}, index {index}, of {topic}" in str(why)
        assert ("what\\0is \\ud800 [" in str(why)) == (transform is failing)
        assert value == f"value {index}".encode()
    assert database.position(step.range.topic) == step.range.end
    # Tried again it has been done.
    assert run([step]) == TaskReport()
    assert letters(database) == found


AFTER = f"CREATE CONSTRAINT TRIGGER late AFTER INSERT ON {TABLE} DEFERRABLE"
AT_THE_END = "DEFERRABLE INITIALLY DEFERRED"
KNOWN = 'ADD FOREIGN KEY ("index") REFERENCES known'


@pytest.mark.parametrize(
    "statements",
    [
        (f"ALTER TABLE {TABLE} {KNOWN}",),
        (f"ALTER TABLE {TABLE} {KNOWN} {AT_THE_END}", "SELECT 'by the general store'"),
        (f"ALTER TABLE {TABLE} {KNOWN} {AT_THE_END}",),
        (f"{AFTER} INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION raises()",),
        (f"{AFTER} FOR EACH ROW EXECUTE FUNCTION cancels()",),
        (f"{AFTER} FOR EACH ROW EXECUTE FUNCTION terminates()",),
        (
            # A good row is refused until the one that it refers to, which comes after it, is there.
            f'ALTER TABLE {TABLE} ADD UNIQUE ("index"), {KNOWN}, ADD next bigint '
            'GENERATED ALWAYS AS (CASE "index" % 10 WHEN 0 THEN "index" + 1 END) STORED '
            f'REFERENCES {TABLE} ("index") {AT_THE_END}',
        ),
    ],
    ids=["key", "general", "deferred key", "deferred trigger", "canceled", "terminated", "forward"],
)
def test_what_the_database_refuses_without_a_line_is_found(
    address: str, postgres_url: str, statements: tuple[str, ...]
) -> None:
    database = postgres_database(postgres_url)
    if "general" in statements[-1]:
        database = replace(database, store=from_url(postgres_url.replace("://", "+psycopg://")))
    step = whole(address, "full")
    prepared(database, step)
    bad = ", ".join(map(str, BAD))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE known (id bigint PRIMARY KEY); INSERT INTO known SELECT i FROM generate_series(0, 299) AS i "
            f"WHERE i NOT IN ({bad})".encode()
        )
        for name, does in {
            "raises": "RAISE EXCEPTION 'not this one'",
            "cancels": "PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(60)",
            "terminates": "PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)",
        }.items():
            connection.execute(
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
                f'$$ BEGIN IF NEW."index" IN ({bad}) THEN {does}; END IF; RETURN NULL; END $$'.encode()
            )
        for statement in statements:
            connection.execute(statement.encode())
    failure = task(address, database.store).run([step]).failure
    assert failure is not None
    assert (failure.reason, failure.numbers["index"]) == ("INVALID_OUTPUT", "7")
    assert database.position(step.range.topic) == step.range.start
    report = burying(address, database, select).run([step])
    assert (report.failure, report.dead_letters, report.written) == (None, len(BAD), MESSAGES - len(BAD))
    assert {row[1] for row in letters(database)} == BAD
    assert not BAD.intersection(database.indexes(step.range.topic))
    assert database.position(step.range.topic) == step.range.end


def test_a_message_that_makes_the_server_fail_is_found(address: str) -> None:
    """PostgreSQL starts again whenever a backend dies, and is away meanwhile."""
    with Client(address) as client, client.producer("few", "p") as producer:
        for number in range(8):
            producer.send(b"v", number)
        producer.flush()
    server = PostgresServer(fsync="off", shared_buffers="16MB")
    server.start()
    try:
        database = postgres_database(server.url)
        step = whole(address, "few")
        prepared(database, step)
        with psycopg.connect(server.url) as connection:
            connection.execute(
                'CREATE FUNCTION dies() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW."index" = 5 THEN '
                "COPY (SELECT 1) TO PROGRAM 'kill -9 $PPID'; END IF; RETURN NULL; END $$"
            )
            connection.execute(f"{AFTER} FOR EACH ROW EXECUTE FUNCTION dies()".encode())
        report = burying(address, database, select).run([step])
        assert (report.failure, report.written, report.dead_letters) == (None, 7, 1)
        assert [(row[1], row[5]) for row in letters(database)] == [(5, None)]
    finally:
        server.stop()


def test_who_is_ended_by_the_failure_of_another_one_is_not_blamed() -> None:
    """A server that fails ends connections that were made after the statement that it fails of."""
    rows = pa.record_batch({"n": range(16)})
    others = {"are ended": False}

    def take(some: pa.RecordBatch) -> SeqdedupeError | None:
        is_bad = 15 in some.column("n").to_pylist()
        was_ended, others["are ended"] = others["are ended"], is_bad
        return error("OUTPUT_UNAVAILABLE", "the connection was lost") if is_bad or was_ended else None

    found = range_task.find_refused(take, [rows.slice(0, 4), rows.slice(4, 0), rows.slice(4)], ended=True)
    assert found is not None
    assert (found.reason, found.numbers["batch"], found.numbers["row"]) == ("INVALID_OUTPUT", "2", "11")


def test_of_a_table_that_takes_nothing_no_message_is_blamed(
    address: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_task, "MAX_SUSPECTS", MESSAGES - 1)
    database = postgres_database(postgres_url)
    step = whole(address, "full")
    prepared(database, step)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE known (id bigint PRIMARY KEY)")
        connection.execute(f"ALTER TABLE {TABLE} {KNOWN}".encode())
    failure = burying(address, database, select, most=2 * MESSAGES).run([step]).failure
    assert failure is not None
    assert "index" not in failure.numbers
    assert "foreign key" in failure.message


def test_a_message_that_ends_the_connection_to_mariadb(address: str, mariadb_url: str) -> None:
    """It is larger than the server takes; the others are written."""
    with Client(address) as client, client.producer("large", "p") as producer:
        for number in range(20):
            producer.send(b"v" * (3 * 2**20 if number == 7 else 3), number)
        producer.flush()

    def query(statement: str) -> list[tuple[object, ...]]:
        with create_engine(mariadb_url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
            found = connection.execute(text(statement.replace('"', "`").replace(f" {TABLE} ", f" `{TABLE}` ")))
            return [tuple(row) for row in found] if found.returns_rows else []

    database = Database(from_url(mariadb_url), mariadb_url, query)
    step = whole(address, "large")
    prepared(database, step)
    [(most,)] = query("SELECT @@GLOBAL.max_allowed_packet")
    query("SET GLOBAL max_allowed_packet = 2097152")
    try:
        report = burying(address, database, select).run([step])
    finally:
        query(f"SET GLOBAL max_allowed_packet = {most}")
    assert (report.failure, report.written, report.dead_letters) == (None, 19, 1)
    assert 7 not in database.indexes(step.range.topic)
    [(_, index, _, reason, why, value, *_)] = letters(database)
    # What the message holds would end the connection again.
    assert (index, reason, value) == (7, "INVALID_OUTPUT", None)
    assert "max_allowed_packet" in str(why)
    assert database.position(step.range.topic) == step.range.end


@pytest.mark.parametrize("are_kept", [True, False])
def test_of_rows_in_another_order_none_is_blamed(address: str, tmp_path: Path, are_kept: bool) -> None:
    """No matter which message it was, another one is not put aside in its place."""
    database = sqlite_database(tmp_path / "out.db")
    step = whole(address, "full")
    prepared(database, step)
    takes_no_null(database)

    def turned(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = refused(batch)
        return rows.take(pa.array(range(len(rows))[::-1], pa.int64()))

    one = burying(address, database, turned) if are_kept else task(address, database.store, turned)
    failure = one.run([step]).failure
    assert failure is not None
    assert failure.reason == "INVALID_OUTPUT"
    assert "from this message alone, in the order of the messages" in failure.message
    assert "index" not in failure.numbers
    assert not letters(database)
    assert not database.indexes(step.range.topic)
    assert database.position(step.range.topic) == step.range.start


def test_columns_that_vary_from_call_to_call_blame_nobody_else(address: str, tmp_path: Path) -> None:
    database = sqlite_database(tmp_path / "out.db")
    step = whole(address, "full")
    prepared(database, step)
    takes_no_null(database)
    calls = count()

    def stamped(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = refused(batch)
        call = pa.array([f"call {next(calls)}"] * len(rows))
        return rows.set_column(0, "topic", call)

    assert burying(address, database, stamped).run([step]).dead_letters == len(BAD)
    assert {row[1] for row in letters(database)} == BAD


def test_too_many_are_an_error_and_nothing_is_written(address: str, database: Database) -> None:
    step = whole(address, "full")
    prepared(database, step)
    for transform in (failing, refused):
        if transform is refused:
            takes_no_null(database)
        failure = burying(address, database, transform, most=len(BAD) - 1).run([step]).failure
        assert failure is not None
        assert failure.reason == "INVALID_OUTPUT"
        assert "index 299" in str(failure)
        assert not database.indexes(step.range.topic)
        assert not letters(database)
        assert database.position(step.range.topic) == step.range.start


def test_what_another_run_was_faster_with_is_not_doubled(address: str, database: Database) -> None:
    step = whole(address, "full")
    prepared(database, step)
    others: list[TaskReport] = []

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not others:
            others.append(burying(address, database, failing).run([step]))
        return failing(batch)

    failure = burying(address, database, slow).run([step]).failure
    assert failure is not None
    assert failure.reason == "POSITION_CHANGED"
    assert others[0].dead_letters == len(letters(database)) == len(BAD)


def test_topics_with_the_same_messages_are_told_apart(address: str, database: Database) -> None:
    steps = [whole(address, "full"), whole(address, "other")]
    prepared(database, *steps)
    takes_no_null(database)

    def some(batch: pa.RecordBatch) -> pa.RecordBatch:
        return refused(batch) if batch.column("__topic")[0].as_py().endswith("full") else select(batch)

    report = burying(address, database, some).run(steps)
    assert report.failure is None
    assert {row[0] for row in letters(database)} == {steps[0].range.topic}
    each_once(database.indexes(steps[1].range.topic), MESSAGES)


def test_a_job_puts_them_aside_round_after_round(
    address: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "run_tasks", lambda _, run, groups: [run(group) for group in groups])
    given = source(address, topic="full", maxOffsetsPerTrigger=60)
    config = JobConfig(JOB, given, database.store, TABLE, max_dead_letters=2)
    job = ReaderJob(SESSION, config, failing)
    total = job.run()
    assert (total.read, total.written, total.dead_letters) == (MESSAGES, MESSAGES - len(BAD), len(BAD))
    assert len(letters(database)) == len(BAD)


def test_a_delta_table_keeps_none(address: str, tmp_path: Path) -> None:
    given = source(address, topic="full")
    config = JobConfig(JOB, given, from_url(f"delta://{tmp_path}/{TABLE}"), TABLE, max_dead_letters=2)
    with pytest.raises(ConfigurationError, match="UNSUPPORTED_STORE"):
        ReaderJob(SESSION, config, failing).run()


def test_without_the_option_the_first_one_ends_it(address: str, database: Database) -> None:
    step = whole(address, "full")
    prepared(database, step)
    failure = task(address, database.store, failing).run([step]).failure
    assert failure is not None
    assert failure.numbers["index"] == "7"
    assert letters(database) == []


def test_topics_without_a_message_need_none(address: str, database: Database) -> None:
    with Client(address) as client:
        client.admin.create_topic(f"empty-{database.url[:6]}")
    step = whole(address, f"empty-{database.url[:6]}")
    prepared(database, step)
    assert burying(address, database, failing).run([step]) == TaskReport()
