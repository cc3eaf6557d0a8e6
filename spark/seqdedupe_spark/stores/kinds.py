"""The common part of all stores: kinds of Arrow types, the check whether a table fits a schema, and errors with the
number of the row that has the invalid value.

Begin with `check_table`, which decides whether a table accepts rows, and `converted`, which converts a column for the
table.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.types as t

from seqdedupe.errors import SeqdedupeError, error

T = TypeVar("T")


class Kind(Enum):
    """The kinds of Arrow types that a store distinguishes. A kind does not include the width of a type."""

    NULL = auto()
    BOOLEAN = auto()
    INTEGER = auto()
    FLOAT = auto()
    DECIMAL = auto()
    TEXT = auto()
    BINARY = auto()
    TIMESTAMP = auto()
    """A time with a time zone."""
    LOCAL_TIMESTAMP = auto()
    DATE = auto()
    JSON = auto()
    """A map, a list or a struct."""


_KINDS: tuple[tuple[Kind, Callable[[pa.DataType], bool]], ...] = (
    (Kind.NULL, t.is_null),
    (Kind.BOOLEAN, t.is_boolean),
    (Kind.INTEGER, t.is_integer),
    (Kind.FLOAT, t.is_floating),
    (Kind.DECIMAL, t.is_decimal),
    (Kind.TEXT, lambda kind: t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)),
    (
        Kind.BINARY,
        lambda kind: (
            t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind)
        ),
    ),
    (Kind.TIMESTAMP, lambda kind: t.is_timestamp(kind) and kind.tz is not None),
    (Kind.LOCAL_TIMESTAMP, t.is_timestamp),
    (Kind.DATE, t.is_date),
    (Kind.JSON, t.is_nested),
)


class Column(NamedTuple):
    """A column of an existing table."""

    type: Any
    """The name of the type in the database, or an object whose text is that name."""
    is_required: bool
    """Whether the column accepts no null and has no default."""


def kind_of(field: pa.Field) -> Kind:
    """Return the kind of a column. Raises INVALID_OUTPUT if no store accepts the column's type."""
    for kind, belongs in _KINDS:
        if belongs(field.type):
            return kind
    raise error("INVALID_OUTPUT", f"column {field.name!r}: no store accepts the type {field.type}")


def check_schema(schema: pa.Schema) -> None:
    """Raise INVALID_OUTPUT if no table can have these columns."""
    if not len(schema):
        raise error("INVALID_OUTPUT", "the rows have no columns")
    doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if doubled:
        raise error("INVALID_OUTPUT", f"the rows have columns of the same name: {', '.join(doubled)}")
    for field in schema:
        kind_of(field)


def check_table(
    table: str,
    schema: pa.Schema,
    columns: Mapping[str, Column],
    fits: Callable[[pa.Field, Any], bool],
    hint: str | None = None,
) -> None:
    """Raise INVALID_OUTPUT if the table does not accept rows of the schema. The error names all columns that do not
    fit."""
    problems = []
    for field in schema:
        column = columns.get(field.name)
        if column is None:
            problems.append(f"{field.name} ({field.type}) is missing")
        elif kind_of(field) is not Kind.NULL and not fits(field, column.type):
            problems.append(f"{field.name} is {column.type or 'untyped'}, which does not accept {field.type}")
    problems += [
        f"{name} accepts no null and has no default, but the rows do not have it"
        for name, column in columns.items()
        if column.is_required and name not in schema.names
    ]
    if problems:
        raise error("INVALID_OUTPUT", f"table {table} does not fit the rows: {'; '.join(problems)}", hint=hint)


BAD_VALUES = (pa.ArrowException, KeyError, TypeError, ValueError)
"""The exceptions that a conversion raises for a value that cannot be converted."""


def converted(name: str, convert: Callable[[pa.Array], T], column: pa.Array) -> T:
    """Return the converted column of this name. Raises INVALID_OUTPUT with the row of the first value that cannot be
    converted."""
    try:
        return convert(column)
    except BAD_VALUES as e:
        raise bad_value(name, _first_bad(convert, column), e) from e


def bad_value(name: str, row: int, cause: object) -> SeqdedupeError:
    """Return the error for a column with a value that cannot be written."""
    what = f"column {name!r} has a value that cannot be written: {one_line(cause)}"
    return error("INVALID_OUTPUT", what, row=row)


def _first_bad(convert: Callable[[pa.Array], object], column: pa.Array) -> int:
    """Return the row of the first value that cannot be converted. The column must have such a value."""
    first, count = 0, len(column)
    while count > 1:
        half = count // 2
        try:
            convert(column.slice(first, half))
        except BAD_VALUES:
            count = half
        else:
            first, count = first + half, count - half
    return first


def one_line(cause: object) -> str:
    """Return a database's message on one line."""
    return " ".join(str(cause).split())


@contextmanager
def in_batch(number: int) -> Iterator[None]:
    """Add the number of this batch to an error that has the number of a row."""
    try:
        yield
    except SeqdedupeError as e:
        if "row" in e.numbers:
            e.numbers["batch"] = str(number)
        raise
