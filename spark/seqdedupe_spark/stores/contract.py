"""The contract between a reader job and its store: rows and positions in one transaction.

To write your own store, derive from `OutputStore`, implement its methods, and run the suite in
`tests/spark/stores/conformance.py` against it. A job gets a `StoreFactory`, which Spark pickles. Every process opens
the store separately.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import pyarrow as pa

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
    """The binding of a job from its first start on: its positions describe this table, read in this mode."""

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
    """Raise INVALID_OUTPUT if a store holds positions of an older format, NEWER_FORMAT if of a newer one."""
    if version > FORMAT_VERSION:
        raise error(
            "NEWER_FORMAT", f"the positions in {place} have format {version}, but this version uses {FORMAT_VERSION}"
        )
    if version < FORMAT_VERSION:
        raise error(
            "INVALID_OUTPUT",
            f"the positions in {place} have format {version}, but this version uses {FORMAT_VERSION}",
            hint="Run the version that wrote them, or start again in another database or table.",
        )


def check_replacement(topic: str, expected: Stored | None, new: Stored) -> None:
    """Raise INTERNAL if a position would move back. Within an incarnation only an operator's reset may move it back."""
    if expected is None or expected.epoch != new.epoch:
        return
    before, after = expected.position, new.position
    if before.incarnation == after.incarnation and after.index < before.index:
        raise error("INTERNAL", f"the position for {topic} would move back from {before} to {after}")


@dataclass(frozen=True)
class Advance:
    """The move of one topic's position over a range, planned in `epoch`.

    `changed_watermarks` returns the watermarks that the range has raised. It is called when the last row of the
    transaction has been taken.
    """

    range: TopicRange
    epoch: int
    changed_watermarks: Callable[[], Watermarks] = no_watermarks

    def __post_init__(self) -> None:
        """Raise INTERNAL if it would move back, or into another incarnation."""
        start, end = self.range.start, self.range.end
        if start.incarnation != end.incarnation or end.index < start.index:
            raise error("INTERNAL", f"the position for {self.range.topic} would move from {start} to {end}")

    def check(self, job: str, stored: Stored | None) -> None:
        """Raise POSITION_CHANGED unless `stored` is the start of the move. For stores that look before they write."""
        if stored != Stored(self.range.start, self.epoch):
            raise error("POSITION_CHANGED", f"the position of job {job!r} is no longer the start of {self.range}")


Take = Callable[[pa.RecordBatch], SeqdedupeError | None]
"""The function that puts rows into a table, and returns why the table does not take them."""


class Beside(NamedTuple):
    """Rows for another table of the same store, in the same transaction. `rows` is called when the last row of the
    transaction has been taken."""

    table: str
    rows: Callable[[], pa.RecordBatch]


class OutputStore(ABC):
    """A connection to the place of a job's rows and positions. It belongs to one thread; enter it to use it.

    Every method raises `UnavailableError` (OUTPUT_UNAVAILABLE) if the store cannot be reached, or is busy for longer
    than its time-out. Then nothing was written, or that cannot be known; another try is safe.
    """

    keeps_watermarks: bool = True
    """Whether it can hold the watermarks of a job that drops duplicates. If not, `watermarks` returns none. If there
    are any to store, `write` raises ConfigurationError (UNSUPPORTED_STORE), and writes nothing."""

    keeps_dead_letters: bool = True
    """Whether one transaction can write to two tables. If not, such a `write` raises UNSUPPORTED_STORE."""

    is_local: bool = False
    """Whether only processes of one machine can use it."""

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
        """Store the binding of the job unless one is stored. Return the stored one. Many may do it at once.

        Raises ConfigurationError (INVALID_OUTPUT) or DamagedError (NEWER_FORMAT) if the data in the store has another
        format, see `check_format`.
        """

    @abstractmethod
    def has_table(self, table: str) -> bool:
        """Whether the output table is there."""

    @abstractmethod
    def prepare(self, table: str, schema: pa.Schema) -> None:
        """Make the tables for positions and watermarks, and the output table from `schema`, if they are missing.

        Many may do it at once. Raises ConfigurationError (INVALID_OUTPUT), naming the columns, if the existing table
        does not take rows of this schema: a column is missing, or its type does not fit.
        """

    @abstractmethod
    def positions(self, job: str) -> dict[str, Stored]:
        """Return the stored state of each topic (full name) of the job."""

    @abstractmethod
    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        """Return the stored state of one topic, and all its watermarks, in one snapshot."""

    @abstractmethod
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        """Store `new` and drop the topic's watermarks, durably, if `expected` is stored (None: nothing).

        Return whether it was; otherwise nothing changes. Raises INTERNAL, and nothing changes, if it would move the
        position back, see `check_replacement`.
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
        """Write all rows, and those of `beside`, move every position to its range's end, and raise the watermarks: one
        durable transaction. Return the number of rows, without those of `beside`.

        Raises UnavailableError (POSITION_CHANGED), and writes nothing, unless for every advance the stored position is
        its range's start and the stored epoch its epoch, when the transaction commits. It raises the exceptions of
        `batches`, and writes nothing. An INVALID_OUTPUT that one row has caused has the row's place in the numbers
        `batch` and `row`, both from 0. The positions are written last before the commit, so a writer that stalls blocks
        no other.
        """

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        """Begin a transaction that is rolled back in the end, to find the row for which `write` was refused without a
        place.

        The block receives a function that puts rows into the table, and has every constraint checked. If the rows are
        refused, it returns INVALID_OUTPUT. Then none of them is there, but all rows taken before are. If the rows end
        the statement or the connection, it returns UnavailableError, and no row at all may be there. It raises an error
        that is the database's own fault.

        A store whose refusals always have a place need not implement it.
        """
        yield lambda _: None


StoreFactory = Callable[[], OutputStore]
"""The function that opens the store. It can be pickled."""
