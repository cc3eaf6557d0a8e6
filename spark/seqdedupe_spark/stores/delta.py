"""A Delta Lake table: positions are application transactions, committed with the rows."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, write_deltalake
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from seqdedupe.errors import error
from seqdedupe_spark.stores.contract import (
    Advance,
    Beside,
    Binding,
    OutputStore,
    Stored,
    check_replacement,
)
from seqdedupe_spark.stores.delta_columns import (
    check_columns,
    check_features,
    check_keys,
    check_names,
    check_partitions,
    declared,
    to_table,
)
from seqdedupe_spark.stores.delta_disk import sync
from seqdedupe_spark.stores.delta_log import DeltaLog
from seqdedupe_spark.stores.delta_positions import (
    check_not_replaced,
    checked_version,
    job_transaction,
    properties,
    stored_in,
    topics_of,
    transactions,
)
from seqdedupe_spark.stores.kinds import check_schema, in_batch
from seqdedupe_spark.stores.object_store import options_of, plain, room_for_folders

_VIOLATED = re.compile(r"Invalid data found: (\d+) rows failed validation check")


class DeltaStore(OutputStore):
    """One Delta table with the positions of the jobs that write to it. The output table's name is its folder's.

    A property of the table, `seqdedupe.<job>/<topic>`, holds epoch and incarnation, application transactions the rest,
    see `delta_positions`. They are in the commit that adds the rows, and it is made on the very version of the table in
    which they were checked: Delta refuses it if a later version has changed the same ones, and merges those of other
    topics. Rows and positions stay one when the table is restored to an older version: `bind` stores the positions of
    that one, and until then nothing is written (POSITION_WENT_BACK). In a table that was replaced nothing is
    (OUTPUT_MISSING).

    `write` holds all rows of a transaction in memory. Columns that the rows do not have are null.

    On S3 (`s3://bucket/folder`) a commit is a conditional PUT: it needs a server that has those, and that nobody
    commits to the table in another way. `partition_by` are the columns that a table is partitioned by when it is made;
    with `merge_schema` one that is there gets the columns that it lacks.
    """

    keeps_watermarks = False
    keeps_dead_letters = False

    def __init__(self, uri: str, *, partition_by: Sequence[str] = (), merge_schema: bool = False) -> None:
        self._uri = uri
        self._options = options_of(uri)
        self._partition_by = list(partition_by)
        self._merge_schema = merge_schema

    def close(self) -> None:
        pass

    def bind(self, job: str, binding: Binding) -> Binding:
        # The table is the store: the name of its folder binds all jobs that write to it.
        self._check_name(binding.table)
        if binding.deduplicate:
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        with self._errors():
            if (found := self._find()) is not None:
                self._settle(found, job)
        return binding

    def _settle(self, found: DeltaTable, job: str) -> None:
        """Stores the positions of the version that somebody has restored: its rows are those that are there."""
        standing, is_settled = self._standing(found, job)
        self._sync(found, checked_version(found, job, topics_of(found, job)))
        if is_settled:
            return
        try:
            self._set(found, job, standing)
        except CommitFailedError:
            # Others may have done it at this moment.
            if not self._standing(self._found(), job)[1]:
                raise

    def has_table(self, table: str) -> bool:
        self._check_name(table)
        with self._errors():
            return self._find() is not None

    def prepare(self, table: str, schema: pa.Schema) -> None:
        self._check_name(table)
        check_schema(schema)
        check_names(table, schema)
        wanted = pa.schema([declared(field) for field in schema])
        with self._errors():
            found = self._find() or self._create(table, wanted)
        check_features(table, found)
        partitions, columns = found.metadata().partition_columns, _arrow_schema(found)
        if self._partition_by and sorted(self._partition_by) != sorted(partitions):
            by = f"partitioned by {', '.join(partitions)}" if partitions else "not partitioned"
            what = f"partitionBy is {','.join(self._partition_by)}, and the table {table} is there, {by}"
            raise error("INVALID_OUTPUT", what, hint="A table is partitioned when it is made: leave the option out.")
        check_partitions(table, partitions, columns)
        missing = [field for field in wanted if field.name not in columns.names]
        check_names(table, [*columns, *missing])
        if missing and self._merge_schema:
            check_columns(table, schema, pa.schema([*columns, *missing]))
            with self._errors():
                self._add_columns(found, missing)
        else:
            hint = "mergeSchema=true in the store's URL adds the columns that are missing." if missing else None
            check_columns(table, schema, columns, hint)

    def _create(self, table: str, columns: pa.Schema) -> DeltaTable:
        check_partitions(table, self._partition_by, columns)
        try:
            DeltaTable.create(
                self._uri, columns, mode="ignore", partition_by=self._partition_by, storage_options=self._options
            )
        except DeltaError:
            # Others may have made it at this moment.
            if self._find() is None:
                raise
        return self._found()

    def _add_columns(self, found: DeltaTable, missing: Sequence[pa.Field]) -> None:
        try:
            found.alter.add_columns([Field.from_arrow(field) for field in missing])
        except CommitFailedError:
            # Others may have added them at this moment.
            there = _arrow_schema(self._found())
            if not all(field in there for field in missing):
                raise

    def positions(self, job: str) -> dict[str, Stored]:
        with self._errors():
            return {} if (found := self._find()) is None else self._standing(found, job)[0]

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        return self.positions(job).get(topic), {}

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._errors():
            found = self._found()
            standing, is_settled = self._standing(found, job)
            if standing.get(topic) != expected:
                return False
            try:
                self._set(found, job, {topic: new} if is_settled else {**standing, topic: new})
            except CommitFailedError:
                if self._standing(self._found(), job)[0].get(topic) != expected:
                    return False
                raise
        return True

    def _set(self, found: DeltaTable, job: str, positions: dict[str, Stored]) -> None:
        checked = found.version()
        self._sync(found, checked_version(found, job, topics_of(found, job)))
        moves = [
            move for topic, stored in positions.items() for move in transactions(job, topic, stored.position, checked)
        ]
        found.alter.set_table_properties(
            properties(job, positions),
            raise_if_not_exists=False,
            commit_properties=CommitProperties(app_transactions=[job_transaction(job, checked), *moves]),
        )
        self._sync(found, checked)

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        self._check_name(table)
        if beside is not None:
            raise error("UNSUPPORTED_STORE", "a Delta table is one table: it cannot keep dead letters beside its rows")
        with self._errors():
            found = self._found()
            schema, partitions = _arrow_schema(found), found.metadata().partition_columns
        cast = []
        for number, batch in enumerate(batches):
            if len(batch):
                with in_batch(number):
                    check_columns(table, batch.schema, schema)
                    cast.append(to_table(batch, schema, partitions))
                    if self._options is not None:
                        check_keys(cast[-1], partitions, room_for_folders(self._uri))
        rows = pa.Table.from_batches(cast, schema)
        if any(advance.changed_watermarks() for advance in advances):
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        with self._errors():
            found.update_incremental()
            self._check(found, job, advances)
            if _arrow_schema(found) != schema:
                raise error("OUTPUT_UNAVAILABLE", f"the Delta table {self._uri} has got other columns meanwhile")
            checked, topics = found.version(), [advance.range.topic for advance in advances]
            self._sync(found, checked_version(found, job, topics))
            moves = [
                move
                for advance in advances
                for move in transactions(job, advance.range.topic, advance.range.end, checked)
            ]
            try:
                write_deltalake(found, rows, mode="append", commit_properties=CommitProperties(app_transactions=moves))
            except CommitFailedError:
                self._check(self._found(), job, advances)
                raise
            self._sync(found, checked)
        return len(rows)

    def _sync(self, found: DeltaTable, after: int | None) -> None:
        """Makes durable what is in the table, but for what was so already in an earlier version. A commit makes that so
        which is before it, and then itself: no position outlives the rows before it."""
        if self._options is None:
            last = found.version()
            sync(DeltaLog(self._uri, None), last - 1 if after is None else after, last)

    def _check(self, found: DeltaTable, job: str, advances: Sequence[Advance]) -> None:
        topics = [advance.range.topic for advance in advances]
        if self._restored(found, checked_version(found, job, topics)) is not None:
            raise error("POSITION_WENT_BACK", f"the Delta table {self._uri} was restored since job {job!r} was started")
        check_not_replaced(found, job, found)
        for advance, topic in zip(advances, topics, strict=True):
            advance.check(job, stored_in(found, job, topic))

    def _standing(self, found: DeltaTable, job: str) -> tuple[dict[str, Stored], bool]:
        """The positions that belong to the rows of this version, which are those of an older one if somebody has
        restored that; and whether they are stored as such."""
        topics = topics_of(found, job)
        checked = checked_version(found, job, topics)
        if (restored := self._restored(found, checked)) is not None:
            older = self._found(restored)
            check_not_replaced(found, job, older)
            return self._standing(older, job)[0], False
        check_not_replaced(found, job, found)
        stored = {topic: stored_in(found, job, topic) for topic in topics}
        positions = {topic: known for topic, known in stored.items() if known is not None}
        return positions, checked is not None or not positions

    def _restored(self, found: DeltaTable, checked: int | None) -> int | None:
        """The version that somebody has brought back since then."""
        return DeltaLog(self._uri, self._options).restored_version(checked, found.version())

    def _find(self) -> DeltaTable | None:
        # `DeltaTable.is_deltatable` would let no other thread of this process run while it waits for the server.
        try:
            return self._found()
        except TableNotFoundError:
            return None

    def _found(self, version: int | None = None) -> DeltaTable:
        return DeltaTable(self._uri, version, storage_options=self._options)

    def _check_name(self, table: str) -> None:
        name = PurePosixPath(self._uri).name
        if table != name:
            raise error(
                "INVALID_OUTPUT", f"the Delta table {self._uri} is named {name!r} after its folder, not {table!r}"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TableNotFoundError:
            raise error("INVALID_OUTPUT", f"there is no Delta table at {self._uri}") from None
        # A traceback, as Spark logs it, would show what `plain` leaves out.
        except (SchemaMismatchError, DeltaProtocolError) as e:
            raise error("INVALID_OUTPUT", f"the Delta table {self._uri} refuses: {plain(e)}") from None
        except (DeltaError, OSError) as e:
            # Which rows, with their values, it says too: they are no business of a log.
            if refusal := _VIOLATED.search(str(e)):
                what = f"the Delta table {self._uri} refuses {refusal[1]} rows: they violate its constraints"
                raise error("INVALID_OUTPUT", what) from None
            reason = "INVALID_OUTPUT" if "Unsupported table features" in str(e) else "OUTPUT_UNAVAILABLE"
            raise error(reason, f"the Delta table {self._uri} cannot be used: {plain(e)}") from None


def _arrow_schema(found: DeltaTable) -> pa.Schema:
    return pa.schema(found.schema().to_arrow())
