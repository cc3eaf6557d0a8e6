"""The contract between a reader job and its store, which writes rows and positions in one transaction. The common code
of all stores follows.

To write your own store, derive from `OutputStore`, implement its methods, and run the suite in
`tests/spark/stores/conformance.py` against it. A job gets a `StoreFactory`, which Spark pickles. Every process opens
the store separately.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import pyarrow as pa
import pyarrow.types as t

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe_spark.ranges import TopicRange


class Stored(NamedTuple):
    """The stored state of one topic of a job."""

    position: Position
    epoch: int
    """The number of resets by an operator. A run that was planned before a reset can no longer commit."""


Watermarks = Mapping[str, int]
"""The highest sequence ID of each producer up to a position, for jobs that drop duplicates themselves."""


def no_watermarks() -> Watermarks:
    """Return the watermarks of a job that drops no duplicates."""
    return {}


class Binding(NamedTuple):
    """The permanent binding of a job since its first start: the job's positions belong to this table, and to this mode
    of reading."""

    table: str
    deduplicate: bool

    def check(self, job: str, stored: "Binding") -> None:
        """Raise JOB_CHANGED unless this is the stored binding."""
        if self.table != stored.table:
            raise error("JOB_CHANGED", f"job {job!r} writes to table {stored.table!r}, not to {self.table!r}")
        if self.deduplicate != stored.deduplicate:
            mode = "with" if stored.deduplicate else "without"
            raise error("JOB_CHANGED", f"job {job!r} was started {mode} --deduplicate, which cannot be changed")


def check_name(what: str, name: str) -> None:
    """Raise INVALID_OPTION for the name of a job or table that no store can hold."""
    if not name:
        raise error("INVALID_OPTION", f"{what}: a {what} needs a name")
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_OPTION", f"{what}: the name {name[:80]!r} is not UTF-8") from e


FORMAT_VERSION = 2
"""The format of the data that stores keep in addition to the rows. Version 1 did not have a job's table."""


def check_format(version: int, place: str) -> None:
    """Raise INVALID_OUTPUT if a store contains positions of an older format, and NEWER_FORMAT for a newer format."""
    if version > FORMAT_VERSION:
        raise error(
            "NEWER_FORMAT", f"the positions in {place} have format {version}, but this version uses {FORMAT_VERSION}"
        )
    if version < FORMAT_VERSION:
        raise error(
            "INVALID_OUTPUT",
            f"the positions in {place} have format {version}, but this version uses {FORMAT_VERSION}",
            hint="Run the version that wrote the positions, or start again in another database or table.",
        )


def check_replacement(topic: str, expected: Stored | None, new: Stored) -> None:
    """Raise INTERNAL if a position would move back. Within an incarnation only an operator's reset may move a position
    back."""
    if expected is None or expected.epoch != new.epoch:
        return
    before, after = expected.position, new.position
    if before.incarnation == after.incarnation and after.index < before.index:
        raise error("INTERNAL", f"the position for {topic} would move back from {before} to {after}")


@dataclass(frozen=True)
class Advance:
    """The move of one topic's position from the start to the end of a range. The range was planned in `epoch`.

    `changed_watermarks` returns the watermarks that the range has raised. It is called after the last row of the
    transaction was read.
    """

    range: TopicRange
    epoch: int
    changed_watermarks: Callable[[], Watermarks] = no_watermarks

    def __post_init__(self) -> None:
        """Raise INTERNAL if the position would move back, or into another incarnation."""
        start, end = self.range.start, self.range.end
        if start.incarnation != end.incarnation or end.index < start.index:
            raise error("INTERNAL", f"the position for {self.range.topic} would move from {start} to {end}")

    def check(self, job: str, stored: Stored | None) -> None:
        """Raise POSITION_CHANGED unless `stored` is the start of the move. This is for stores that check before they
        write."""
        if stored != Stored(self.range.start, self.epoch):
            raise error("POSITION_CHANGED", f"the position of job {job!r} is no longer the start of {self.range}")


Take = Callable[[pa.RecordBatch], SeqdedupeError | None]
"""A function that inserts rows into a table. If the table refuses the rows, the function returns the reason."""


class Beside(NamedTuple):
    """Rows for another table of the same store, in the same transaction. `rows` is called when the last row of the
    transaction has been read."""

    table: str
    rows: Callable[[], pa.RecordBatch]


class OutputStore(ABC):
    """A connection to the place of a job's rows and positions. It belongs to one thread, and is used as a context
    manager.

    Every method raises `UnavailableError` (OUTPUT_UNAVAILABLE) if the store cannot be reached, or is busy for longer
    than its time-out. Then either nothing was written, or the outcome is unknown; repeating the call is safe.
    """

    keeps_watermarks: bool = True
    """Whether the store can store the watermarks of a job that drops duplicates. If not, `watermarks` returns none. If
    there are watermarks to store, `write` raises ConfigurationError (UNSUPPORTED_STORE), and writes nothing."""

    keeps_dead_letters: bool = True
    """Whether one transaction can write to two tables. If not, such a `write` raises UNSUPPORTED_STORE."""

    is_local: bool = False
    """Whether only processes of one machine can use the store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Uncommitted writes are rolled back."""

    @abstractmethod
    def bind(self, job: str, binding: Binding) -> Binding:
        """Store the binding of the job unless a binding is stored already. Return the stored binding. Several processes
        may call this at the same time.

        Raises ConfigurationError (INVALID_OUTPUT) or DamagedError (NEWER_FORMAT) if the data in the store has a
        different format, see `check_format`.
        """

    @abstractmethod
    def has_table(self, table: str) -> bool:
        """Return whether the output table exists."""

    @abstractmethod
    def prepare(self, table: str, schema: pa.Schema) -> None:
        """Create the tables for positions and watermarks, and the output table from `schema`, if they do not exist.

        Several processes may call this at the same time. Raises ConfigurationError (INVALID_OUTPUT), which names the
        columns, if the existing table does not accept rows of this schema: a column is missing, or its type does not
        fit.
        """

    @abstractmethod
    def positions(self, job: str) -> dict[str, Stored]:
        """Return the stored state of each topic (full name) of the job."""

    @abstractmethod
    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        """Return the stored state of one topic, and all its watermarks, in one snapshot."""

    @abstractmethod
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        """If `expected` is stored (None: nothing is stored), durably store `new` and drop the topic's watermarks.

        Return whether this was done; otherwise nothing changes. Raises INTERNAL, and changes nothing, if the position
        would move back, see `check_replacement`.
        """

    @abstractmethod
    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        """In one durable transaction, write all rows and the rows of `beside`, move every position to the end of its
        range, and raise the watermarks. Return the number of rows, without the rows of `beside`.

        When the transaction commits, the stored position of every advance must be the start of its range, and the
        stored epoch must be the advance's epoch. Otherwise this raises UnavailableError (POSITION_CHANGED), and writes
        nothing. If `batches` raises an exception, this raises the same exception, and writes nothing. An INVALID_OUTPUT
        that one row has caused contains the place of the row in the numbers `batch` and `row`, both from 0. The
        positions are written last before the commit, so a writer that stalls does not block others.
        """

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        """Begin a transaction that is always rolled back. It serves to find the row for which `write` was refused
        without a place.

        The block receives a function that inserts rows into the table, and checks every constraint. If the rows are
        refused, the function returns INVALID_OUTPUT. Then none of these rows is in the table, but all rows inserted
        before are. If the rows end the statement or the connection, the function returns UnavailableError, and possibly
        no row is in the table. The function raises errors for which the database is at fault.

        A store whose refusals always contain a place need not implement this method.
        """
        yield lambda _: None


StoreFactory = Callable[[], OutputStore]
"""The function that opens the store. It can be pickled."""


# -- The common part of all stores: kinds of Arrow types, the check whether a table fits a schema, and errors that name
# the row of an invalid value. `check_table` decides whether a table accepts rows. `converted` converts a column for the
# table.

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
