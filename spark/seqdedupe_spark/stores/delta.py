"""A Delta Lake table: positions are application transactions, committed with the rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from seqdedupe.errors import error
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.stores.contract import (
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    OutputStore,
    Stored,
    check_format,
    check_replacement,
)
from seqdedupe_spark.stores.kinds import (
    BAD_VALUES,
    Column,
    Kind,
    bad_value,
    check_schema,
    check_table,
    first_bad,
    in_batch,
    kind_of,
    one_line,
)

_NO_MESSAGE = MessageId(-1, -1)
"""For no message ID: at a topic's start, or because it is not known. The ledgers of messages are not negative."""

_PROPERTY = "seqdedupe."

_FORMAT = "seqdedupe_format_version"
"""The property of the table that says how the others are to be read."""


class DeltaStore(OutputStore):
    """One Delta table with the positions of the jobs that write to it. The output table's name is its folder's.

    A property of the table, `seqdedupe.<job>/<topic>`, holds epoch and incarnation; application transactions hold the
    rest: `<job>/<topic>/<incarnation>` the index, those with `/ledger`, `/entry` and `/batch` after it the message ID,
    and the one with `/ownership` the ownership, as a signed number. They are in the commit that adds the rows, and it
    is made on the very version of the table in which they were checked: Delta refuses it if a later version has changed
    the same ones, and merges those of other topics.

    `write` holds all rows of a transaction in memory. Columns that the rows do not have are null.
    """

    keeps_watermarks = False
    keeps_dead_letters = False

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def close(self) -> None:
        pass

    def bind(self, job: str, binding: Binding) -> Binding:
        # The table is the store: the name of its folder binds all jobs that write to it.
        self._check_name(binding.table)
        if binding.deduplicate:
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        self.positions(job)
        return binding

    def has_table(self, table: str) -> bool:
        self._check_name(table)
        with self._errors():
            return bool(DeltaTable.is_deltatable(self._uri))

    def prepare(self, table: str, schema: pa.Schema) -> None:
        self._check_name(table)
        check_schema(schema)
        declared = pa.schema([pa.field(field.name, _declared(field)) for field in schema])
        with self._errors():
            try:
                DeltaTable.create(self._uri, declared, mode="ignore")
            except DeltaError:
                # Others may have made it at this moment.
                if not DeltaTable.is_deltatable(self._uri):
                    raise
            found = _arrow_schema(DeltaTable(self._uri))
        check_table(table, schema, _columns_of(found), lambda field, _: _fits(field, found.field(field.name)))

    def positions(self, job: str) -> dict[str, Stored]:
        with self._errors():
            if not DeltaTable.is_deltatable(self._uri):
                return {}
            found = DeltaTable(self._uri)
            prefix = _PROPERTY + _prefix(job, "")
            topics = [name[len(prefix) :] for name in found.metadata().configuration if name.startswith(prefix)]
            stored = {topic: self._stored(found, job, topic) for topic in topics}
        return {topic: known for topic, known in stored.items() if known is not None}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        return self.positions(job).get(topic), {}

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._errors():
            found = DeltaTable(self._uri)
            if self._stored(found, job, topic) != expected:
                return False
            try:
                found.alter.set_table_properties(
                    {
                        _PROPERTY + _prefix(job, topic): f"{new.epoch} {new.position.incarnation}",
                        _FORMAT: str(FORMAT_VERSION),
                    },
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(app_transactions=_transactions(job, topic, new.position)),
                )
            except CommitFailedError:
                if self._stored(DeltaTable(self._uri), job, topic) != expected:
                    return False
                raise
        return True

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
            found = DeltaTable(self._uri)
            schema = _arrow_schema(found)
        cast = []
        for number, batch in enumerate(batches):
            if len(batch):
                with in_batch(number):
                    cast.append(self._cast(table, batch, schema))
        rows = pa.Table.from_batches(cast, schema)
        if any(advance.changed_watermarks() for advance in advances):
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        moves = [move for advance in advances for move in _transactions(job, advance.range.topic, advance.range.end)]
        with self._errors():
            found.update_incremental()
            self._check(found, job, advances)
            try:
                write_deltalake(found, rows, mode="append", commit_properties=CommitProperties(app_transactions=moves))
            except CommitFailedError:
                self._check(DeltaTable(self._uri), job, advances)
                raise
        return len(rows)

    def _check(self, found: DeltaTable, job: str, advances: Sequence[Advance]) -> None:
        for advance in advances:
            advance.check(job, self._stored(found, job, advance.range.topic))

    def _stored(self, found: DeltaTable, job: str, topic: str) -> Stored | None:
        value = found.metadata().configuration.get(_PROPERTY + _prefix(job, topic))
        if value is None:
            return None
        check_format(int(found.metadata().configuration.get(_FORMAT, "1")), f"the Delta table {self._uri}")
        epoch, incarnation = map(int, value.split())
        *numbers, ownership = map(found.transaction_version, _applications(job, topic, incarnation))
        whole = [number for number in numbers if number is not None]
        if len(whole) != 1 + len(_NO_MESSAGE):
            raise error("INVALID_OUTPUT", f"the Delta table {self._uri} has lost the position of {topic}")
        message_id = None if MessageId(*whole[1:]) == _NO_MESSAGE else MessageId(*whole[1:])
        # Positions that were stored when they had no ownership have none here either.
        return Stored(Position(incarnation, message_id, whole[0], (ownership or 0) % 2**64), epoch)

    def _cast(self, table: str, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch with the table's columns."""
        check_schema(batch.schema)
        check_table(table, batch.schema, _columns_of(schema), lambda field, _: _fits(field, schema.field(field.name)))
        columns = []
        for field in schema:
            if field.name not in batch.schema.names:
                columns.append(pa.nulls(len(batch), field.type))
                continue
            given, cast = batch.column(field.name), partial(_cast, field.type)
            try:
                column = cast(given)
            except BAD_VALUES as e:
                raise bad_value(field.name, first_bad(cast, given), e) from e
            if column.null_count and not field.nullable:
                row = pc.index(column.is_null(), True).as_py()
                raise error("INVALID_OUTPUT", f"column {field.name!r} takes no null", row=row)
            columns.append(column)
        return pa.record_batch(columns, schema=schema)

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
        except TableNotFoundError as e:
            raise error("INVALID_OUTPUT", f"there is no Delta table at {self._uri}") from e
        except (SchemaMismatchError, DeltaProtocolError) as e:
            raise error("INVALID_OUTPUT", f"the Delta table {self._uri} refuses: {one_line(e)}") from e
        except (DeltaError, OSError) as e:
            raise error("OUTPUT_UNAVAILABLE", f"the Delta table {self._uri} cannot be used: {one_line(e)}") from e


def _cast(kind: pa.DataType, column: pa.Array) -> pa.Array:
    cast = column.cast(kind)
    cast.validate(full=True)
    return cast


def _prefix(job: str, topic: str) -> str:
    return f"{quote(job, safe='')}/{topic}"


def _applications(job: str, topic: str, incarnation: int) -> list[str]:
    """The application IDs whose versions are a position: index, ledger, entry, batch index, ownership."""
    name = f"{_prefix(job, topic)}/{incarnation}"
    return [name, f"{name}/ledger", f"{name}/entry", f"{name}/batch", f"{name}/ownership"]


def _transactions(job: str, topic: str, position: Position) -> list[Transaction]:
    # Versions are signed numbers.
    ownership = position.ownership - 2**64 if position.ownership >= 2**63 else position.ownership
    numbers = (position.index, *(position.message_id or _NO_MESSAGE), ownership)
    names = _applications(job, topic, position.incarnation)
    return [Transaction(name, number) for name, number in zip(names, numbers, strict=True)]


def _arrow_schema(found: DeltaTable) -> pa.Schema:
    return pa.schema(found.schema().to_arrow())


def _columns_of(schema: pa.Schema) -> dict[str, Column]:
    return {field.name: Column(str(field.type), not field.nullable) for field in schema}


def _fits(field: pa.Field, column: pa.Field) -> bool:
    kind, there = kind_of(field), kind_of(column)
    if kind is Kind.FLOAT and there is Kind.FLOAT:
        return bool(field.type.bit_width <= column.type.bit_width)
    return kind is there or (kind is Kind.INTEGER and there is Kind.DECIMAL)


_DECLARED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
}


def _declared(field: pa.Field) -> pa.DataType:
    """The type of a new column: Delta knows no unsigned numbers, and microseconds only."""
    kind = kind_of(field)
    if kind is Kind.TIMESTAMP:
        return pa.timestamp("us", "UTC")
    if kind is Kind.LOCAL_TIMESTAMP:
        return pa.timestamp("us")
    return _DECLARED.get(field.type, field.type)
