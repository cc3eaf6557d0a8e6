"""What the tests of jobs share: topics to read, a table to count in, stores that stop where a test wants them to."""

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from seqdedupe.client.blocking import Client
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.options import Options, parse
from seqdedupe_spark.range_task import JobOutput, RangeStep, RangeTask, Transform
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.stores.contract import Advance, Beside, Binding, OutputStore, Stored, StoreFactory
from seqdedupe_spark.stores.postgresql import PostgresStore
from seqdedupe_spark.stores.sql import SqliteStore
from seqdedupe_spark.stores.urls import from_url

JOB = "job"
TABLE = "rows"
OUTPUT = pa.schema({"topic": pa.string(), "index": pa.int64(), "value": pa.binary()})
"""The columns of the table that jobs write to in tests. It has no key, so that doubles show."""


def publish(address: str, topic: str, count: int, *, first: int = 0, producer: str = "p") -> str:
    """Publishes this many messages, `value i` with sequence ID i; the topic's full name."""
    with Client(address) as client, client.producer(topic, producer) as sender:
        for i in range(first, first + count):
            sender.send(f"value {i}".encode(), i)
        sender.flush()
    return topic_name(topic)


def select(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The transformation of most tests."""
    columns = [batch.column(name) for name in ("__topic", "__index", "value")]
    return pa.RecordBatch.from_arrays(columns, schema=OUTPUT)


def source(address: str, **options: object) -> Options:
    """The source options of a job."""
    names = {"service.url": address} | {name: str(value) for name, value in options.items()}
    return parse(names)


def whole(address: str, topic: str, start: int = 0, stop: int | None = None, epoch: int = 0) -> RangeStep:
    """The step over these messages of a topic; to its end without `stop`."""
    with Client(address) as client:
        last = client.ends(topic).last
    end = last if stop is None else Position.before(last.incarnation, stop)
    return RangeStep(TopicRange(topic_name(topic), Position.before(last.incarnation, start), end), epoch)


def task(address: str, store: StoreFactory, transform: Transform | None = select, **more: bool) -> RangeTask:
    """A job's task into TABLE."""
    schema = OUTPUT if transform else SCHEMA
    return RangeTask(JobOutput(store, JOB, TABLE, schema), address, SCHEMA, transform, more.get("deduplicate", False))


def begin(store: StoreFactory, steps: Sequence[RangeStep], schema: pa.Schema = OUTPUT) -> None:
    """Makes the tables, and stores the position that each step starts from."""
    with store() as opened:
        opened.prepare(TABLE, schema)
        for step in steps:
            assert opened.replace(JOB, step.range.topic, None, Stored(step.range.start, step.epoch))


@dataclass(frozen=True)
class Database:
    """Its own database for one test, looked at with the database's own client."""

    store: StoreFactory
    url: str
    query: Callable[[str], list[tuple[object, ...]]]

    def indexes(self, topic: str) -> list[int]:
        """The indexes of all rows of a topic, sorted; doubles stay."""
        rows = self.query(f"SELECT \"index\" FROM {TABLE} WHERE topic = '{topic}' ORDER BY 1")
        return [int(str(row[0])) for row in rows]

    def position(self, topic: str) -> Position:
        with self.store() as opened:
            return opened.positions(JOB)[topic].position


def sqlite_database(path: Path) -> Database:
    """In a file."""

    def query(text: str) -> list[tuple[object, ...]]:
        connection = sqlite3.connect(path)
        try:
            return connection.execute(text).fetchall()
        finally:
            connection.close()

    return Database(partial(SqliteStore, str(path)), f"sqlite:///{path}", query)


def postgres_database(url: str) -> Database:
    """On a server."""

    def query(text: str) -> list[tuple[object, ...]]:
        with psycopg.connect(url) as connection:
            return connection.execute(text.encode()).fetchall()

    return Database(partial(PostgresStore, url), url, query)


class DeltaDatabase(Database):
    """A table of Delta Lake."""

    def indexes(self, topic: str) -> list[int]:
        rows = DeltaTable(self.url.removeprefix("delta+")).to_pyarrow_table()
        return sorted(rows.filter(pc.equal(rows["topic"], topic))["index"].to_pylist())


def delta_database(folder: str) -> Database:
    """In a folder of a bucket."""
    url = f"delta+s3://{folder}/{TABLE}"
    return DeltaDatabase(from_url(url), url, lambda _: [])


def each_once(indexes: Sequence[int], count: int, first: int = 0) -> None:
    """Fails unless the rows are those of `count` messages, each once."""
    doubled = [index for index, times in Counter(indexes).items() if times > 1]
    assert not doubled, f"{len(doubled)} doubled, such as {doubled[:3]}"
    assert list(indexes) == list(range(first, first + count))


class Gate:
    """A place where processes stop: who passes leaves a file `reached`, and waits until there is a file `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def stop_here(self) -> None:
        (self.folder / "arriving").write_text(str(os.getpid()))
        (self.folder / "arriving").rename(self.folder / "reached")
        while not (self.folder / "open").exists():
            time.sleep(0.01)

    def stop_once(self) -> None:
        """Stops the first that comes, in any process."""
        try:
            (self.folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return
        self.stop_here()

    def wait(self, seconds: float = LAST_RESORT_SECONDS) -> int:
        """Until somebody has stopped; the ID of the process."""
        deadline = time.monotonic() + seconds
        while not (self.folder / "reached").exists():
            assert time.monotonic() < deadline, "nobody came"
            time.sleep(0.01)
        return int((self.folder / "reached").read_text())

    def open(self) -> None:
        (self.folder / "open").touch()


class GatedStore(OutputStore):
    """A store whose `write` stops at a gate: `before` the transaction, `in` it, or `after` it."""

    def __init__(self, inner: StoreFactory, gate: Gate, where: str) -> None:
        self._inner = inner()
        self._gate = gate
        self._where = where

    def close(self) -> None:
        self._inner.close()

    def bind(self, job: str, binding: Binding) -> Binding:
        return self._inner.bind(job, binding)

    def has_table(self, table: str) -> bool:
        return self._inner.has_table(table)

    def prepare(self, table: str, schema: pa.Schema) -> None:
        self._inner.prepare(table, schema)

    def positions(self, job: str) -> dict[str, Stored]:
        return self._inner.positions(job)

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        return self._inner.watermarks(job, topic)

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        return self._inner.replace(job, topic, expected, new)

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        def gated() -> Iterator[pa.RecordBatch]:
            yield from batches
            self._gate.stop_once()

        if self._where == "before":
            self._gate.stop_once()
        written = self._inner.write(job, table, gated() if self._where == "in" else batches, advances, beside)
        if self._where == "after":
            self._gate.stop_once()
        return written


class CarelessSqliteStore(SqliteStore):
    """SQLite without the compare, the control arm: it believes in the position that it was given."""

    def __init__(self, path: str, believed: Position) -> None:
        super().__init__(path)
        self._believed = Stored(believed, 0)

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        return self._believed, {}

    def _check(self, job: str, advance: Advance) -> None:
        """No matter what is stored, it goes on."""
