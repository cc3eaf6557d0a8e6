"""Stores that are wrong on purpose: the suite must notice each."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.stores import postgresql
from seqdedupe_spark.stores.contract import Advance, Beside, OutputStore, Stored, StoreFactory
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.postgresql import PostgresStore
from seqdedupe_spark.stores.sql import SqliteStore
from tests.spark.stores.conformance import INCARNATION, JOB, SCHEMA, TOPIC, StoreConformance, StoreHarness, at, over
from tests.spark.stores.harnesses import PostgresHarness, SqliteHarness

Batches = Iterator[pa.RecordBatch]


class DoesNotCompare(SqliteStore):
    def _check(self, job: str, advance: Advance) -> None:
        pass


class ComparesIndexesOnly(SqliteStore):
    def _check(self, job: str, advance: Advance) -> None:
        stored = self._stored(job, advance.range.topic)
        if stored is not None and stored.position.index == advance.range.start.index and stored.epoch == advance.epoch:
            return
        super()._check(job, advance)


class IgnoresTheEpoch(SqliteStore):
    def _check(self, job: str, advance: Advance) -> None:
        stored = self._stored(job, advance.range.topic)
        if stored is not None and stored.position == advance.range.start:
            return
        super()._check(job, advance)


class ComparesTheFirstOnly(SqliteStore):
    def _check(self, job: str, advance: Advance) -> None:
        if advance.range.topic == TOPIC:
            super()._check(job, advance)


class CommitsRowsFirst(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        rows = super().write(job, table, batches, [])
        super().write(job, table, iter([]), advances)
        return rows


class CommitsDeltaRowsFirst(DeltaStore):
    """Used where commits on S3 are lost."""

    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        rows = super().write(job, table, batches, [])
        super().write(job, table, iter([]), advances)
        return rows


class CommitsPositionsFirst(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        super().write(job, table, iter([]), advances)
        return super().write(job, table, batches, [])


class ForgetsRangesWithoutRows(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        some = [batch for batch in batches if len(batch)]
        return super().write(job, table, iter(some), advances) if some else 0


class WritesWhatCameBeforeAFailure(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        taken = []
        try:
            for batch in batches:
                taken.append(batch)  # noqa: PERF402
        finally:
            rows = super().write(job, table, iter(taken), advances)
        return rows


class ReadsInTheTransaction(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        taken = []
        with self._transaction():
            for batch in batches:
                taken.append(batch)  # noqa: PERF402
        return super().write(job, table, iter(taken), advances)


class AsksForWatermarksFirst(SqliteStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        early = [Advance(a.range, a.epoch, partial(dict, a.changed_watermarks())) for a in advances]
        return super().write(job, table, batches, early)


class ReplacesAnything(SqliteStore):
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        return super().replace(job, topic, self.positions(job).get(topic), new)


class StoresTheFirstPositionTwice(SqliteStore):
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        if expected is None:
            expected = self.positions(job).get(topic)
        return super().replace(job, topic, expected, new)


class KeepsWatermarksInAReset(SqliteStore):
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        _, watermarks = self.watermarks(job, topic)
        replaced = super().replace(job, topic, expected, new)
        if replaced:
            self._connection.executemany(
                "INSERT INTO seqdedupe_watermarks VALUES (?, ?, ?, ?)",
                [(job, topic, *watermark) for watermark in watermarks.items()],
            )
        return replaced


class LocksFirst(PostgresStore):
    """Takes the row's lock, and then reads."""

    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        connection = self._connection()
        connection.execute("SET lock_timeout = '500ms'")
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM seqdedupe_positions WHERE job = %s FOR UPDATE", (job,))
        return super().write(job, table, batches, advances)


class CommitsByItself(PostgresStore):
    """Sends the COMMIT when the position has moved."""

    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        def commit(connection: psycopg.Connection, statements: str, values: Sequence[object]) -> None:
            psycopg.ClientCursor(connection).execute(statements.encode(), values)
            connection.execute("COMMIT")

        postgresql._commit = commit
        return super().write(job, table, batches, advances)


class CommitsEachBatch(PostgresStore):
    def write(
        self, job: str, table: str, batches: Batches, advances: Sequence[Advance], beside: Beside | None = None
    ) -> int:
        def committed() -> Batches:
            for batch in batches:
                yield batch
                self._connection().execute("COMMIT")

        return super().write(job, table, committed(), advances)


class Planted(StoreHarness):
    """A store in the place of a harness."""

    def __init__(self, harness: StoreHarness, factory: StoreFactory) -> None:
        self._harness = harness
        self._factory = factory

    @property
    def factory(self) -> StoreFactory:
        return self._factory

    def rows(self) -> list[dict[str, Any]]:
        return self._harness.rows()


def run(test: Callable[..., None], harness: StoreHarness, *arguments: object) -> None:
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        test(StoreConformance(), harness, store, *arguments)


S = StoreConformance
OTHER_INCARNATION = Advance(TopicRange(TOPIC, at(1, INCARNATION + 1), at(2, INCARNATION + 1)), 0)
CASES: list[tuple[type[OutputStore], Callable[..., None], tuple[object, ...]]] = [
    (DoesNotCompare, S.test_another_start_is_refused, (over(-1, 2),)),
    (DoesNotCompare, S.test_of_two_that_write_a_range_one_does, ()),
    (DoesNotCompare, S.test_a_writer_that_stalls_holds_up_no_other, ()),
    (ComparesIndexesOnly, S.test_another_start_is_refused, (OTHER_INCARNATION,)),
    (IgnoresTheEpoch, S.test_another_start_is_refused, (over(1, 2, epoch=1),)),
    (IgnoresTheEpoch, S.test_a_reset_in_the_middle_of_a_write_refuses_it, ()),
    (ComparesTheFirstOnly, S.test_several_positions_move_together_or_not_at_all, ()),
    (CommitsRowsFirst, S.test_another_start_is_refused, (over(-1, 2),)),
    (CommitsPositionsFirst, S.test_a_failure_of_the_input_writes_nothing_and_comes_out_as_it_is, ()),
    (ForgetsRangesWithoutRows, S.test_a_range_with_no_rows_moves_the_position, ()),
    (WritesWhatCameBeforeAFailure, S.test_a_failure_of_the_input_writes_nothing_and_comes_out_as_it_is, ()),
    (ReadsInTheTransaction, S.test_a_writer_that_stalls_holds_up_no_other, ()),
    (AsksForWatermarksFirst, S.test_watermarks_are_asked_for_after_the_last_row, ()),
    (ReplacesAnything, S.test_a_position_is_replaced_only_by_who_knows_it, ()),
    (StoresTheFirstPositionTwice, S.test_a_position_is_replaced_only_by_who_knows_it, ()),
    (KeepsWatermarksInAReset, S.test_watermarks_are_raised_with_the_position, ()),
    (LocksFirst, S.test_a_writer_that_stalls_holds_up_no_other, ()),
    (CommitsEachBatch, S.test_another_start_is_refused, (over(-1, 2),)),
]


@pytest.mark.parametrize(("store", "test", "arguments"), CASES, ids=lambda it: getattr(it, "__name__", ""))
def test_the_suite_notices(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    store: type[OutputStore],
    test: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    if issubclass(store, PostgresStore):
        url = request.getfixturevalue("postgres_url")
        right: StoreHarness = PostgresHarness(url)
        planted = Planted(right, partial(store, url))
    else:
        assert issubclass(store, SqliteStore)
        right = SqliteHarness(tmp_path)
        planted = Planted(right, partial(store, right.path, busy_timeout_seconds=0.5))
    with pytest.raises((AssertionError, SeqdedupeError, psycopg.Error, pytest.fail.Exception)):
        run(test, planted, *arguments)
