"""How rows go into PostgreSQL: which of its types take which Arrow types, and a batch as binary COPY."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection

from seqdedupe.errors import error
from seqdedupe_spark.stores.kinds import (
    BAD_VALUES,
    Column,
    Kind,
    bad_value,
    first_bad,
    json_texts,
    kind_of,
    one_line,
    quoted,
)

_TYPES: dict[Kind, tuple[str, ...]] = {
    Kind.BOOLEAN: ("boolean",),
    Kind.INTEGER: ("bigint", "integer", "smallint", "numeric"),
    Kind.FLOAT: ("double precision", "real"),
    Kind.DECIMAL: ("numeric",),
    Kind.TEXT: ("text", "character varying", "character", "json", "jsonb"),
    Kind.BINARY: ("bytea",),
    Kind.TIMESTAMP: ("timestamp with time zone",),
    Kind.LOCAL_TIMESTAMP: ("timestamp without time zone",),
    Kind.DATE: ("date",),
    Kind.JSON: ("jsonb", "json", "text", "character varying"),
    Kind.NULL: ("text",),
}
"""Which types take a kind; the first is what a new table gets."""

_NARROW = {
    pa.int8(): "smallint",
    pa.uint8(): "smallint",
    pa.int16(): "smallint",
    pa.uint16(): "integer",
    pa.int32(): "integer",
    pa.uint64(): "numeric",
    pa.float16(): "real",
    pa.float32(): "real",
}
"""What a new table gets instead."""

_EPOCH_DAYS = 10_957
"""PostgreSQL's first day, 2000-01-01, in days after that of Arrow."""

_EPOCH_MICROSECONDS = _EPOCH_DAYS * 86_400_000_000

# For a type: what Arrow casts to, with a look at each value; and the type that has the same bytes in COPY. Times go as
# the numbers that they are there, so no row costs a datetime.
_CASTS: dict[str, tuple[pa.DataType | None, str]] = {
    "boolean": (None, "bool"),
    "smallint": (pa.int16(), "int2"),
    "integer": (pa.int32(), "int4"),
    "bigint": (pa.int64(), "int8"),
    "numeric": (None, "numeric"),
    "real": (pa.float32(), "float4"),
    "double precision": (pa.float64(), "float8"),
    "bytea": (None, "bytea"),
    "timestamp with time zone": (pa.timestamp("us", "UTC"), "int8"),
    "timestamp without time zone": (pa.timestamp("us"), "int8"),
    "date": (pa.date32(), "int4"),
}


def copy_in(connection: Connection, parts: Sequence[str], batch: pa.RecordBatch, columns: Mapping[str, Column]) -> None:
    """Sends the rows, in one COPY. Raises INVALID_OUTPUT for a value that its column cannot take."""
    cells, types = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        base = _base(columns[field.name].type)
        try:
            values, wire = _cells(field, column, base)
        except BAD_VALUES as e:
            raise bad_value(field.name, first_bad(lambda part: _cells(field, part, base), column), e) from e  # noqa: B023
        if kind_of(field) is Kind.TEXT and (row := _first_nul(column)) is not None:
            raise bad_value(field.name, row, "it has a NUL character, which PostgreSQL text does not")
        cells.append(values)
        types.append(wire)
    names = ", ".join(map(quoted, batch.schema.names))
    statement = f"COPY {quoted(*parts)} ({names}) FROM STDIN (FORMAT BINARY)"
    with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        copy.set_types(types)
        for number, cells_of_row in enumerate(zip(*cells, strict=True)):
            try:
                copy.write_row(cells_of_row)
            except psycopg.Error as e:
                if e.sqlstate is not None:
                    raise
                raise error("INVALID_OUTPUT", f"a value cannot be written: {one_line(e)}", row=number) from e


def _first_nul(column: pa.Array) -> int | None:
    found = pc.index(pc.fill_null(pc.match_substring(column, "\0"), False), True).as_py()
    return found if found >= 0 else None


def _cells(field: pa.Field, column: pa.Array, base: str) -> tuple[list[Any], str]:
    """The values for a column of that type, and the type that they are to be sent as."""
    if kind_of(field) is Kind.JSON:
        values, wire = json_texts(column), "text"
    else:
        target, wire = _CASTS.get(base, (None, "text"))
        if target is not None:
            column = column.cast(target)
        if pa.types.is_timestamp(column.type):
            column = pc.subtract_checked(column.cast(pa.int64()), _EPOCH_MICROSECONDS)
        elif pa.types.is_date(column.type):
            column = pc.subtract_checked(column.cast(pa.int32()), _EPOCH_DAYS)
        values = column.to_pylist()
    if base == "jsonb":
        # The version of its form, which stands before the text.
        values = [value if value is None else "\1" + value for value in values]
    return values, wire


def _base(declared: str) -> str:
    """The type without its precision or length."""
    return re.sub(r"\([\d,-]+\)", "", declared)


def fits(field: pa.Field, declared: str) -> bool:
    """Whether a column of that type takes the field's values, as far as they are in its range."""
    if declared.startswith("real"):
        return bool(pa.types.is_floating(field.type) and field.type.bit_width <= 32)
    return _base(declared) in _TYPES[kind_of(field)]


def declared_type(field: pa.Field) -> str:
    """The type of a new column."""
    return _NARROW.get(field.type, _TYPES[kind_of(field)][0])
