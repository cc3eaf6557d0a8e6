"""The columns of a Delta table: the types that it has, batches cast to them, and columns that partition it."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t
from deltalake import DeltaTable

from seqdedupe.errors import error
from seqdedupe_spark.stores.kinds import (
    BAD_VALUES,
    Column,
    Kind,
    bad_value,
    check_schema,
    check_table,
    first_bad,
    kind_of,
)

MAX_PARTITION_TEXT_BYTES = 200
"""Of a text in a column that partitions the table, as the name of its folder spells it: names have 255 with the
column's."""

MAX_PARTITION_NAME_BYTES = 255 - 1 - MAX_PARTITION_TEXT_BYTES
"""Of such a column's own name, which stands before the text and a `=`."""

_NO_FOLDER = re.compile(r"[\x00-\x1f\x7f/]")
"""What such a name cannot have: folders are named after it as it is."""

_NULLS = ("", "__HIVE_DEFAULT_PARTITION__")
"""Texts that stand for null there."""

_PARTITIONS = (Kind.BOOLEAN, Kind.INTEGER, Kind.TEXT, Kind.DATE, Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP)
"""What is read from the names of folders as it was written."""

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
"""Of what a table's protocol can ask of who adds rows: with these delta-rs commits nothing."""

_MARKS = {
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "CURRENT_DEFAULT": "allowColumnDefaults",
}
"""The metadata of columns that are filled by the writer, in tables whose protocol does not list features."""

_DECLARED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
}


def declared(field: pa.Field) -> pa.Field:
    """A new column, which can be null: Delta knows no unsigned numbers, and microseconds only."""
    kind = kind_of(field)
    if kind is Kind.TIMESTAMP:
        return pa.field(field.name, pa.timestamp("us", "UTC"))
    if kind is Kind.LOCAL_TIMESTAMP:
        return pa.field(field.name, pa.timestamp("us"))
    return pa.field(field.name, _DECLARED.get(field.type, field.type))


def check_names(table: str, fields: Iterable[pa.Field]) -> None:
    """Raises INVALID_OUTPUT if a table cannot tell these columns apart, or the fields of one of their structs: Delta
    takes upper and lower case for the same, and ends a name at a NUL."""
    known: dict[str, str] = {}
    for field in fields:
        if "\0" in field.name:
            raise error("INVALID_OUTPUT", f"table {table} cannot have {field.name!r}: Delta has no name with a NUL")
        if (other := known.setdefault(field.name.lower(), field.name)) != field.name:
            what = f"table {table} cannot have both {other!r} and {field.name!r}: to Delta they are the same name"
            raise error("INVALID_OUTPUT", what, hint="Give one of them another name in the transformation.")
        check_names(table, [field.type.field(k) for k in range(field.type.num_fields)])


def check_features(table: str, found: DeltaTable) -> None:
    """Raises INVALID_OUTPUT if a table has what the writer does not support."""
    has = set(found.protocol().writer_features or ())
    fields = json.loads(found.schema().to_json())["fields"]
    names = {name for field in fields for name in field["metadata"]}
    lacking = sorted(has & _UNSUPPORTED | {feature for name, feature in _MARKS.items() if name in names})
    if lacking:
        what = f"table {table} has features that this writer does not support: {', '.join(lacking)}"
        raise error("INVALID_OUTPUT", what, hint="Give the job a table without them, or one that it makes itself.")


def check_columns(table: str, schema: pa.Schema, there: pa.Schema, hint: str | None = None) -> None:
    """Raises INVALID_OUTPUT, naming all columns that are the reason, if the table does not take rows of the schema."""
    check_schema(schema)
    columns = {field.name: Column(str(field.type), not field.nullable) for field in there}
    check_table(table, schema, columns, lambda field, _: _fits(field, there.field(field.name)), hint)


def check_partitions(table: str, names: Sequence[str], columns: pa.Schema) -> None:
    """Raises INVALID_OUTPUT unless these can be the columns that partition a table which has those."""
    for name in names:
        if _NO_FOLDER.search(name):
            why = f"no name of a folder has control characters or slashes, and {name[:80]!r} has"
            what = f"table {table} cannot be partitioned so: {why}"
            raise error("INVALID_OUTPUT", what, hint="Give the column another name, or leave it out of partitionBy.")
    what = f"table {table} cannot be partitioned by {', '.join(names)}"
    if len({name.lower() for name in names}) < len(names):
        raise error("INVALID_OUTPUT", f"{what}: one of them is there twice")
    for name in names:
        if name not in columns.names:
            raise error("INVALID_OUTPUT", f"{what}: the rows have no column {name!r}")
        field = columns.field(name)
        if kind_of(field) not in _PARTITIONS:
            why = f"{name} is {field.type}, and folders are named after booleans, integers, texts, dates and times"
            raise error("INVALID_OUTPUT", f"{what}: {why}")
        if len(name.encode()) > MAX_PARTITION_NAME_BYTES:
            why = f"{name[:80]!r} has more than {MAX_PARTITION_NAME_BYTES} bytes as the name of a folder"
            raise error("INVALID_OUTPUT", f"{what}: {why}")
    if len(names) == len(columns):
        raise error("INVALID_OUTPUT", f"{what}: one column has to be left for the files")


def to_table(batch: pa.RecordBatch, there: pa.Schema, partitions: Sequence[str]) -> pa.RecordBatch:
    """The batch with the table's columns; those that it does not have are null. Raises INVALID_OUTPUT that names the
    row."""
    columns = []
    for field in there:
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


def check_keys(batch: pa.RecordBatch, partitions: Sequence[str], room_bytes: int) -> None:
    """Raises INVALID_OUTPUT that names the first row whose folders, all together, have more bytes."""
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
            raise error("INVALID_OUTPUT", f"{what}: a key on S3 has no room for that", row=row)


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
    """Whether a map, list or struct has room for all that is in the other: a field that it lacks would be dropped."""
    shapes = (t.is_struct, t.is_map, lambda one: not t.is_struct(one) and not t.is_map(one) and t.is_nested(one))
    if not any(is_such(given) and is_such(there) for is_such in shapes):
        return False
    inner = [given.field(k) for k in range(given.num_fields)]
    if not t.is_struct(given):
        return all(_fits(one, there.field(k)) for k, one in enumerate(inner))
    names = [there.field(k).name for k in range(there.num_fields)]
    return all(one.name in names and _fits(one, there.field(names.index(one.name))) for one in inner)


def _takes_integers(given: pa.DataType, there: pa.DataType) -> bool:
    """Arrow casts integers to a decimal only if it has room for all that their type has."""
    try:
        pa.array([0], given).cast(there)
    except BAD_VALUES:
        return False
    return True
