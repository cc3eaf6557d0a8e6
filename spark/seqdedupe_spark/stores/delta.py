"""The store for a Delta Lake table. A position is stored as application transactions, which are committed together with
the rows."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.stores.contract import (
    BAD_VALUES,
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    Column,
    Kind,
    OutputStore,
    Stored,
    check_format,
    check_replacement,
    check_schema,
    check_table,
    converted,
    in_batch,
    kind_of,
)
from seqdedupe_spark.stores.delta_files import SCHEME, DeltaLog, plain

# -- The columns of a Delta table: types, the conversion of batches, and columns that partition the table.

MAX_PARTITION_TEXT_BYTES = 200
"""The most bytes of a text in a column that partitions the table, as encoded in the name of a folder. With the column's
name, the name of a folder has at most 255 bytes."""

MAX_PARTITION_NAME_BYTES = 255 - 1 - MAX_PARTITION_TEXT_BYTES
"""The most bytes in the name of such a column. A folder's name is the column's name, a `=`, and the text."""

MAX_KEY_BYTES = 1024
"""The most bytes in the key of an object on S3, including its folders."""

FILE_NAME_BYTES = 80
"""The bytes of a key that are reserved for the data file's own name, with room to spare."""

_NO_FOLDER = re.compile(r"[\x00-\x1f\x7f/]")
"""Characters that the name of such a column cannot have, because the name of the folder has it unchanged."""

_NULLS = ("", "__HIVE_DEFAULT_PARTITION__")
"""Texts that mean null in the name of a folder."""

_PARTITIONS = (Kind.BOOLEAN, Kind.INTEGER, Kind.TEXT, Kind.DATE, Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP)
"""The kinds of values that are unchanged when they are written to the name of a folder and read again."""

_UNSUPPORTED = frozenset(
    {
        "allowColumnDefaults",
        "clustering",
        "domainMetadata",
        "icebergCompatV1",
        "icebergCompatV2",
        "identityColumns",
        "inCommitTimestamp",
        "rowTracking",
        "typeWidening",
        "typeWidening-preview",
    }
)
"""The writer features of a table's protocol with which delta-rs cannot commit new rows."""

_MARKS = {
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "CURRENT_DEFAULT": "allowColumnDefaults",
}
"""The metadata keys that mark columns filled by the writer, and the features they stand for. They are needed for tables
whose protocol does not list features."""

_DECLARED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
}


def declared(field: pa.Field) -> pa.Field:
    """Return the column of a new table for this field. The column accepts null. Delta has no unsigned numbers, and
    stores times only in microseconds."""
    kind = kind_of(field)
    if kind is Kind.TIMESTAMP:
        return pa.field(field.name, pa.timestamp("us", "UTC"))
    if kind is Kind.LOCAL_TIMESTAMP:
        return pa.field(field.name, pa.timestamp("us"))
    return pa.field(field.name, _DECLARED.get(field.type, field.type))


def check_names(table: str, fields: Iterable[pa.Field]) -> None:
    """Raise INVALID_OUTPUT if a table cannot distinguish these columns, or the fields of a struct in them. Delta
    ignores case, and ends a name at a NUL."""
    known: dict[str, str] = {}
    for field in fields:
        if "\0" in field.name:
            raise error(
                "INVALID_OUTPUT", f"table {table} cannot have {field.name!r}: a name in Delta cannot have a NUL"
            )
        if (other := known.setdefault(field.name.lower(), field.name)) != field.name:
            what = f"table {table} cannot have both {other!r} and {field.name!r}: they are the same name for Delta"
            raise error("INVALID_OUTPUT", what, hint="Rename one of these columns in the transformation.")
        check_names(table, [field.type.field(k) for k in range(field.type.num_fields)])


def check_features(table: str, found: DeltaTable) -> None:
    """Raise INVALID_OUTPUT if a table has features that the writer does not support."""
    has = set(found.protocol().writer_features or ())
    fields = json.loads(found.schema().to_json())["fields"]
    names = {name for field in fields for name in field["metadata"]}
    lacking = sorted(has & _UNSUPPORTED | {feature for name, feature in _MARKS.items() if name in names})
    if lacking:
        what = f"table {table} has features that this writer does not support: {', '.join(lacking)}"
        raise error(
            "INVALID_OUTPUT", what, hint="Give the job a table without these features, or let the job create the table."
        )


def check_columns(table: str, schema: pa.Schema, there: pa.Schema, hint: str | None = None) -> None:
    """Raise INVALID_OUTPUT if the table does not accept rows of the schema. The error names all columns that do not
    fit."""
    check_schema(schema)
    columns = {field.name: Column(str(field.type), not field.nullable) for field in there}
    check_table(table, schema, columns, lambda field, _: _fits(field, there.field(field.name)), hint)


def check_partitions(table: str, names: Sequence[str], columns: pa.Schema) -> None:
    """Raise INVALID_OUTPUT unless these columns can partition a table with `columns`."""
    for name in names:
        if _NO_FOLDER.search(name):
            why = f"{name[:80]!r} has control characters or slashes, which no folder's name may have"
            what = f"table {table} cannot be partitioned so: {why}"
            raise error("INVALID_OUTPUT", what, hint="Give the column another name, or remove it from partitionBy.")
    what = f"table {table} cannot be partitioned by {', '.join(names)}"
    if len({name.lower() for name in names}) < len(names):
        raise error("INVALID_OUTPUT", f"{what}: one column occurs twice")
    for name in names:
        if name not in columns.names:
            raise error("INVALID_OUTPUT", f"{what}: the rows have no column {name!r}")
        field = columns.field(name)
        if kind_of(field) not in _PARTITIONS:
            why = f"{name} is {field.type}, but it must be a boolean, an integer, a text, a date or a time"
            raise error("INVALID_OUTPUT", f"{what}: {why}")
        if len(name.encode()) > MAX_PARTITION_NAME_BYTES:
            why = f"{name[:80]!r} has more than {MAX_PARTITION_NAME_BYTES} bytes as the name of a folder"
            raise error("INVALID_OUTPUT", f"{what}: {why}")
    if len(names) == len(columns):
        raise error("INVALID_OUTPUT", f"{what}: at least one column must not partition it")


def to_table(batch: pa.RecordBatch, there: pa.Schema, partitions: Sequence[str]) -> pa.RecordBatch:
    """Return the batch converted to the table's columns. Columns that the batch does not have are null. Raises
    INVALID_OUTPUT, with the number of the row."""
    columns = []
    for field in there:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(len(batch), field.type))
            continue
        column = converted(field.name, partial(_cast, field.type), batch.column(field.name))
        if column.null_count and not field.nullable:
            row = pc.index(column.is_null(), True).as_py()
            raise error("INVALID_OUTPUT", f"column {field.name!r} takes no null", row=row)
        if field.name in partitions and kind_of(field) is Kind.TEXT:
            _check_names_a_folder(field.name, column)
        columns.append(column)
    return pa.record_batch(columns, schema=there)


def _check_names_a_folder(name: str, column: pa.Array) -> None:
    for text in column.unique().to_pylist():
        if text is None or (text not in _NULLS and len(quote(text, safe="")) <= MAX_PARTITION_TEXT_BYTES):
            continue
        row = pc.index(column, pa.scalar(text, column.type)).as_py()
        why = "would be null" if text in _NULLS else f"has more than {MAX_PARTITION_TEXT_BYTES} bytes"
        what = f"column {name!r} partitions the table, and as the name of a folder {text[:80]!r} {why}"
        raise error("INVALID_OUTPUT", what, row=row)


def room_for_folders(uri: str) -> int:
    """Return how many bytes of a data file's key the partitions' folders may use."""
    _, _, folder = uri.removeprefix(SCHEME).partition("/")
    return MAX_KEY_BYTES - FILE_NAME_BYTES - len(folder) - len("//")


def check_keys(batch: pa.RecordBatch, partitions: Sequence[str], room_bytes: int) -> None:
    """Raise INVALID_OUTPUT if the folders of a row together have more than `room_bytes`. The error has the number of
    the first such row."""
    most = sum(len(name.encode()) + len("=/") + MAX_PARTITION_TEXT_BYTES for name in partitions)
    if most <= room_bytes:
        return
    columns = [batch.column(name).cast(pa.string()).to_pylist() for name in partitions]
    for row, values in enumerate(zip(*columns, strict=True)):
        folders = "/".join(
            f"{name}={quote(value or _NULLS[1], safe='')}" for name, value in zip(partitions, values, strict=True)
        )
        if len(folders.encode()) > room_bytes:
            what = f"the folders of {', '.join(partitions)} have more than {room_bytes} bytes together"
            raise error("INVALID_OUTPUT", f"{what}: a key on S3 cannot be that long", row=row)


def _cast(kind: pa.DataType, column: pa.Array) -> pa.Array:
    cast = column.cast(kind)
    cast.validate(full=True)
    return cast


def _fits(field: pa.Field, column: pa.Field) -> bool:
    kind, there = kind_of(field), kind_of(column)
    if kind is Kind.NULL:
        return True
    if kind is Kind.FLOAT and there is Kind.FLOAT:
        return bool(field.type.bit_width <= column.type.bit_width)
    if kind is Kind.JSON:
        return _nests_alike(field.type, column.type)
    if kind is Kind.INTEGER and there is Kind.DECIMAL:
        return _takes_integers(field.type, column.type)
    return kind is there


def _nests_alike(given: pa.DataType, there: pa.DataType) -> bool:
    """Whether the map, list or struct type `there` has all fields of `given`. A missing field would be dropped."""
    shapes = (t.is_struct, t.is_map, lambda one: not t.is_struct(one) and not t.is_map(one) and t.is_nested(one))
    if not any(is_such(given) and is_such(there) for is_such in shapes):
        return False
    inner = [given.field(k) for k in range(given.num_fields)]
    if not t.is_struct(given):
        return all(_fits(one, there.field(k)) for k, one in enumerate(inner))
    names = [there.field(k).name for k in range(there.num_fields)]
    return all(one.name in names and _fits(one, there.field(names.index(one.name))) for one in inner)


def _takes_integers(given: pa.DataType, there: pa.DataType) -> bool:
    """Whether Arrow casts integers of this type to the decimal type. Arrow does so only if the decimal type can hold
    all values of the integer type."""
    try:
        pa.array([0], given).cast(there)
    except BAD_VALUES:
        return False
    return True


# -- How a Delta table stores the positions of jobs: partly in the table's properties, partly in application
# transactions.
#
# RESTORE resets rows and properties to an older version, but does not change transactions. So every commit of a job has
# one more transaction: the version of the table up to which the job has looked for a RESTORE. After a later RESTORE,
# the positions of the restored version are valid.

_NO_MESSAGE = MessageId(-1, -1)
"""The value for a missing message ID, at the start of a topic or if the ID is unknown. The ledger of a real message ID
is never negative."""

_PROPERTY = "seqdedupe."

_FORMAT = "seqdedupe_format_version"
"""The table's property with the format version of the other properties."""


def properties(job: str, positions: dict[str, Stored]) -> dict[str, str]:
    """Return the table's properties for these positions of a job, and the property that marks the job as begun."""
    known = {
        _of_topic(job, topic): f"{stored.epoch} {stored.position.incarnation}" for topic, stored in positions.items()
    }
    return {**known, _of_job(job): "begun", _FORMAT: str(FORMAT_VERSION)}


def job_transaction(job: str, checked: int) -> Transaction:
    """Return the transaction that records that the job has begun, and that the table is checked up to the version
    `checked`."""
    return Transaction(quote(job, safe=""), checked)


def transactions(job: str, topic: str, position: Position, checked: int) -> list[Transaction]:
    """Return the transactions for a position, and for the version up to which the table is checked."""
    # The version of a transaction is a signed number.
    ownership = position.ownership - 2**64 if position.ownership >= 2**63 else position.ownership
    numbers = (position.index, *(position.message_id or _NO_MESSAGE), ownership, checked)
    names = _applications(job, topic, position.incarnation)
    return [Transaction(name, number) for name, number in zip(names, numbers, strict=True)]


def checked_version(found: DeltaTable, job: str, topics: Iterable[str]) -> int | None:
    """Return the version up to which the job's commits have checked the table. The transactions of these topics contain
    the version. Return None if the job has not begun, or its commits do not record this version."""
    said = [found.transaction_version(quote(job, safe=""))]
    for topic in topics:
        if (value := found.metadata().configuration.get(_of_topic(job, topic))) is not None:
            *_, name = _applications(job, topic, int(value.split()[1]))
            said.append(found.transaction_version(name))
    return max((version for version in said if version is not None), default=None)


def topics_of(found: DeltaTable, job: str) -> list[str]:
    """Return the topics that have a position of the job."""
    prefix = _of_topic(job, "")
    return [name[len(prefix) :] for name in found.metadata().configuration if name.startswith(prefix)]


def check_not_replaced(found: DeltaTable, job: str, stands: DeltaTable) -> None:
    """Raise OUTPUT_MISSING if the table was replaced: the job had positions in the version `stands`, and `found` lacks
    the job's properties. A replacement loses properties, but keeps transactions."""
    if _of_job(job) in found.metadata().configuration:
        return
    if _of_job(job) in stands.metadata().configuration or stands.transaction_version(quote(job, safe="")) is not None:
        what = f"the Delta table {found.table_uri} was replaced by another since job {job!r} wrote to it"
        hint = (
            "RESTORE the version before that, and start the job again. To keep the new table, give the job another "
            "name: it begins from the start. To change a table's layout, overwrite its rows instead of replacing it."
        )
        raise error("OUTPUT_MISSING", f"{what}, and its positions are lost", hint=hint)


def stored_in(found: DeltaTable, job: str, topic: str) -> Stored | None:
    """Return the position stored in this version, without checking for a RESTORE. Raises INVALID_OUTPUT or
    NEWER_FORMAT."""
    names = found.metadata().configuration
    value = names.get(_of_topic(job, topic))
    if value is None:
        return None
    check_format(int(names.get(_FORMAT, "1")), f"the Delta table {found.table_uri}")
    epoch, incarnation = map(int, value.split())
    *numbers, ownership = map(found.transaction_version, _applications(job, topic, incarnation)[:-1])
    whole = [number for number in numbers if number is not None]
    if len(whole) != 1 + len(_NO_MESSAGE):
        raise error("INVALID_OUTPUT", f"the Delta table {found.table_uri} has lost the position of {topic}")
    message_id = None if MessageId(*whole[1:]) == _NO_MESSAGE else MessageId(*whole[1:])
    # A position that was stored without ownership is returned with ownership 0.
    return Stored(Position(incarnation, message_id, whole[0], (ownership or 0) % 2**64), epoch)


def _of_job(job: str) -> str:
    return _PROPERTY + quote(job, safe="")


def _of_topic(job: str, topic: str) -> str:
    return f"{_of_job(job)}/{topic}"


def _applications(job: str, topic: str, incarnation: int) -> list[str]:
    """Return the application IDs for a position. Their versions are: index, ledger, entry, batch index, ownership, and
    the version up to which the table is checked."""
    name = f"{quote(job, safe='')}/{topic}/{incarnation}"
    return [name, *(f"{name}/{part}" for part in ("ledger", "entry", "batch", "ownership", "checked"))]


_VIOLATED = re.compile(r"Invalid data found: (\d+) rows failed validation check")


class DeltaStore(OutputStore):
    """One Delta table, with the positions of the jobs that write to it. The output table has the name of its folder.

    A property of the table, `seqdedupe.<job>/<topic>`, holds epoch and incarnation. Application transactions hold the
    rest of a position: see `properties` and `transactions`. The commit that adds rows also has the transactions for the
    new positions. It is based on the version of the table in which the old positions were checked. Delta refuses the
    commit if a later version has changed the same positions, and merges it with commits for other topics.

    Rows and positions also agree after the table is restored to an older version. `bind` stores the positions of that
    version. Until then, `write` raises POSITION_WENT_BACK and writes nothing. In a table that was replaced, `write`
    raises OUTPUT_MISSING and writes nothing.

    `write` holds all rows of a transaction in memory. Columns that the rows do not have are null.

    On S3 (`s3://bucket/folder`), a commit is a conditional PUT. The server must support conditional PUTs, and no
    process may commit to the table in another way. A new table is partitioned by the columns `partition_by`. With
    `merge_schema`, missing columns are added to an existing table.
    """

    keeps_watermarks = False
    keeps_dead_letters = False

    def __init__(self, uri: str, *, partition_by: Sequence[str] = (), merge_schema: bool = False) -> None:
        self._uri = uri
        self._log = DeltaLog(uri)
        self._partition_by = list(partition_by)
        self._merge_schema = merge_schema

    def close(self) -> None:
        pass

    def bind(self, job: str, binding: Binding) -> Binding:
        # The job's table is not stored, because this store has only one table: every job must use the name of its
        # folder.
        self._check_name(binding.table)
        if binding.deduplicate:
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        with self._errors():
            if (found := self._find()) is not None:
                self._settle(found, job)
        return binding

    def _settle(self, found: DeltaTable, job: str) -> None:
        """After a RESTORE, store the positions of the restored version, since the table has the rows of that
        version."""
        standing, is_settled = self._standing(found, job)
        self._sync(found, checked_version(found, job, topics_of(found, job)))
        if is_settled:
            return
        try:
            self._set(found, job, standing)
        except CommitFailedError:
            # Another process may just have stored these positions.
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
            what = f"partitionBy is {','.join(self._partition_by)}, but the table {table} exists, {by}"
            raise error("INVALID_OUTPUT", what, hint="Partitions are chosen when a table is created: omit the option.")
        check_partitions(table, partitions, columns)
        missing = [field for field in wanted if field.name not in columns.names]
        check_names(table, [*columns, *missing])
        if missing and self._merge_schema:
            check_columns(table, schema, pa.schema([*columns, *missing]))
            with self._errors():
                self._add_columns(found, missing)
        else:
            hint = "mergeSchema=true in the store's URL adds the missing columns." if missing else None
            check_columns(table, schema, columns, hint)

    def _create(self, table: str, columns: pa.Schema) -> DeltaTable:
        check_partitions(table, self._partition_by, columns)
        try:
            DeltaTable.create(
                self._uri, columns, mode="ignore", partition_by=self._partition_by, storage_options=self._log.options
            )
        except DeltaError:
            # Another process may just have created the table.
            if self._find() is None:
                raise
        return self._found()

    def _add_columns(self, found: DeltaTable, missing: Sequence[pa.Field]) -> None:
        try:
            found.alter.add_columns([Field.from_arrow(field) for field in missing])
        except CommitFailedError:
            # Another process may just have added these columns.
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
            raise error(
                "UNSUPPORTED_STORE",
                "a Delta table is a single table: it cannot keep dead letters in addition to its rows",
            )
        with self._errors():
            found = self._found()
            schema, partitions = _arrow_schema(found), found.metadata().partition_columns
        cast = []
        for number, batch in enumerate(batches):
            if len(batch):
                with in_batch(number):
                    check_columns(table, batch.schema, schema)
                    cast.append(to_table(batch, schema, partitions))
                    if self._log.options is not None:
                        check_keys(cast[-1], partitions, room_for_folders(self._uri))
        rows = pa.Table.from_batches(cast, schema)
        if any(advance.changed_watermarks() for advance in advances):
            raise error("UNSUPPORTED_STORE", "a Delta table cannot keep the watermarks of a job that drops duplicates")
        with self._errors():
            found.update_incremental()
            self._check(found, job, advances)
            if _arrow_schema(found) != schema:
                raise error("OUTPUT_UNAVAILABLE", f"the columns of the Delta table {self._uri} have changed meanwhile")
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
        """On a disk, make the versions of the table after the version `after` durable. If `after` is None, make only
        the last version durable.

        A commit calls this method before and after the commit itself. So after a crash of the machine, no position
        exists without the rows before it.
        """
        if self._log.options is None:
            last = found.version()
            self._log.sync(last - 1 if after is None else after, last)

    def _check(self, found: DeltaTable, job: str, advances: Sequence[Advance]) -> None:
        topics = [advance.range.topic for advance in advances]
        if self._restored(found, checked_version(found, job, topics)) is not None:
            raise error("POSITION_WENT_BACK", f"the Delta table {self._uri} was restored since job {job!r} was started")
        check_not_replaced(found, job, found)
        for advance, topic in zip(advances, topics, strict=True):
            advance.check(job, stored_in(found, job, topic))

    def _standing(self, found: DeltaTable, job: str) -> tuple[dict[str, Stored], bool]:
        """Return the positions that belong to the rows of this version, and whether exactly these positions are stored.
        After a RESTORE, they are the positions of the restored version, and are not stored yet."""
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
        """Return the version to which the table was restored after the version `checked`; None if there was no
        RESTORE."""
        return self._log.restored_version(checked, found.version())

    def _find(self) -> DeltaTable | None:
        # `DeltaTable.is_deltatable` is not used: while it waits for the server, no other thread of this process can
        # run.
        try:
            return self._found()
        except TableNotFoundError:
            return None

    def _found(self, version: int | None = None) -> DeltaTable:
        return DeltaTable(self._uri, version, storage_options=self._log.options)

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
        # `from None`, because Spark logs the traceback, which would show what `plain` omits.
        except (SchemaMismatchError, DeltaProtocolError) as e:
            raise error("INVALID_OUTPUT", f"the Delta table {self._uri} refuses: {plain(e)}") from None
        except (DeltaError, OSError) as e:
            # The message also has the values of the rows, which must not be logged.
            if refusal := _VIOLATED.search(str(e)):
                rows = counted(int(refusal[1]), "row")
                what = f"the Delta table {self._uri} refuses {rows}: its constraints are violated"
                raise error("INVALID_OUTPUT", what) from None
            reason = "INVALID_OUTPUT" if "Unsupported table features" in str(e) else "OUTPUT_UNAVAILABLE"
            raise error(reason, f"the Delta table {self._uri} cannot be used: {plain(e)}") from None


def _arrow_schema(found: DeltaTable) -> pa.Schema:
    return pa.schema(found.schema().to_arrow())
