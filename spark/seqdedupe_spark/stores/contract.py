"""What a reader job needs of the place where it writes: rows and positions in one transaction.

To write a store of one's own, derive from `OutputStore`, fill in its methods, and run the suite in
`tests/spark/stores/conformance.py` against it. A job is given a `StoreFactory`, which Spark pickles; every process
opens the store for itself.
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
    """What a store holds of one topic of a job."""

    position: Position
    epoch: int
    """How often an operator has reset it, from 0. A run that was planned before a reset can no longer commit."""


Watermarks = Mapping[str, int]
"""The highest sequence ID of each producer up to a position, for jobs that drop duplicates themselves."""


def no_watermarks() -> Watermarks:
    """Of a job that drops none."""
    return {}


class Binding(NamedTuple):
    """What a job is bound to from its first start on: its positions say what stands in this table, read so."""

    table: str
    deduplicate: bool

    def check(self, job: str, stored: "Binding") -> None:
        """Raises JOB_CHANGED unless this is what is stored."""
        if self.table != stored.table:
            raise error("JOB_CHANGED", f"job {job!r} writes to table {stored.table!r}, not to {self.table!r}")
        if self.deduplicate != stored.deduplicate:
            mode = "with" if stored.deduplicate else "without"
            raise error("JOB_CHANGED", f"job {job!r} was begun {mode} --deduplicate, which cannot be changed")


def check_name(what: str, name: str) -> None:
    """Raises INVALID_OPTION for the name of a job or table that no store can hold."""
    if not name:
        raise error("INVALID_OPTION", f"{what}: a {what} needs a name")
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_OPTION", f"{what}: the name {name[:80]!r} is not UTF-8") from e


FORMAT_VERSION = 2
"""Of what stores keep beside the rows. Version 1 did not say which table a job writes to."""


def check_format(version: int, place: str) -> None:
    """Raises INVALID_OUTPUT if a store holds positions of an older format, NEWER_FORMAT if of a newer one."""
    if version > FORMAT_VERSION:
        raise error(
            "NEWER_FORMAT", f"the positions in {place} are of format {version}, this version has {FORMAT_VERSION}"
        )
    if version < FORMAT_VERSION:
        raise error(
            "INVALID_OUTPUT",
            f"the positions in {place} are of format {version}, this version has {FORMAT_VERSION}",
            hint="Let the version that wrote them go on with them, or begin anew in another database or table.",
        )


def check_replacement(topic: str, expected: Stored | None, new: Stored) -> None:
    """Raises INTERNAL if a position would move back: within an incarnation only an operator's reset may do that."""
    if expected is None or expected.epoch != new.epoch:
        return
    before, after = expected.position, new.position
    if before.incarnation == after.incarnation and after.index < before.index:
        raise error("INTERNAL", f"the position for {topic} would move back from {before} to {after}")


@dataclass(frozen=True)
class Advance:
    """The move of one topic's position over a range, planned in `epoch`.

    `changed_watermarks` is called when the last row of the transaction has been taken: the watermarks that the range
    has raised.
    """

    range: TopicRange
    epoch: int
    changed_watermarks: Callable[[], Watermarks] = no_watermarks

    def __post_init__(self) -> None:
        """Raises INTERNAL if it would move back, or into another incarnation."""
        start, end = self.range.start, self.range.end
        if start.incarnation != end.incarnation or end.index < start.index:
            raise error("INTERNAL", f"the position for {self.range.topic} would move from {start} to {end}")

    def check(self, job: str, stored: Stored | None) -> None:
        """For stores that look before they write. Raises POSITION_CHANGED unless this is what it was planned from."""
        if stored != Stored(self.range.start, self.epoch):
            raise error("POSITION_CHANGED", f"the position of job {job!r} is no longer the start of {self.range}")


Take = Callable[[pa.RecordBatch], SeqdedupeError | None]
"""Puts rows into a table; returns why it does not take them."""


class Beside(NamedTuple):
    """Rows for another table of the same store, in the same transaction. `rows` is called when the last row of the
    transaction has been taken."""

    table: str
    rows: Callable[[], pa.RecordBatch]


class OutputStore(ABC):
    """A connection to where a job's rows and positions are kept. It belongs to one thread; enter it to use it.

    Every method raises `UnavailableError` (OUTPUT_UNAVAILABLE) if the store cannot be reached or is busy for longer
    than its time-out: nothing was written, or that cannot be known, and trying again is safe.
    """

    keeps_watermarks: bool = True
    """Whether it can hold the watermarks of a job that drops duplicates. If not, `watermarks` answers none of them, and
    `write` raises ConfigurationError (UNSUPPORTED_STORE), and writes nothing, if there are any to be stored."""

    keeps_dead_letters: bool = True
    """Whether one transaction can write to two tables. If not, `write` raises UNSUPPORTED_STORE if it is to."""

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
        """Lets go of the connection; what is not committed is rolled back."""

    @abstractmethod
    def bind(self, job: str, binding: Binding) -> Binding:
        """Stores what the job is bound to unless that is stored already; what is stored then. Many may do it at once.

        Raises ConfigurationError (INVALID_OUTPUT) or DamagedError (NEWER_FORMAT) if what the store holds is of another
        format, see `check_format`.
        """

    @abstractmethod
    def has_table(self, table: str) -> bool:
        """Whether the output table is there."""

    @abstractmethod
    def prepare(self, table: str, schema: pa.Schema) -> None:
        """Makes the tables for positions and watermarks, and the output table from `schema`, where they are missing.

        Many may do it at once. Raises ConfigurationError (INVALID_OUTPUT), naming the columns, if the table that is
        there does not take rows of this schema: a column is missing, or its type does not fit.
        """

    @abstractmethod
    def positions(self, job: str) -> dict[str, Stored]:
        """What is stored for each topic (full name) of the job."""

    @abstractmethod
    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        """What is stored for one topic, and all its watermarks, in one snapshot."""

    @abstractmethod
    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        """Stores `new` and drops the topic's watermarks, durably, if `expected` is what is stored (None: nothing).

        Returns whether it was; otherwise nothing changes. Raises INTERNAL, and nothing changes, if it would move the
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
        """Writes all rows, and those `beside`, then moves every position to its range's end and raises the watermarks:
        one durable transaction. Returns how many rows, without those beside.

        Raises UnavailableError (POSITION_CHANGED), and nothing of it is written, unless for every advance the stored
        position is its range's start and the stored epoch its epoch, when the transaction commits. What `batches`
        raises, it raises, and nothing is written. INVALID_OUTPUT that one row is the cause of has its place in the
        numbers `batch` and `row`, both from 0. The positions are the last to be written before the commit, so that
        a writer that stalls holds up no other.
        """

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        """A transaction that is rolled back in the end, for finding the row that `write` was refused for without a
        place. What the block receives puts rows into the table, and has every constraint checked. If they are refused,
        it returns INVALID_OUTPUT: then none of them is there, and all that were taken before are. If they end the
        statement or the connection, it returns UnavailableError, and none of all may be there. It raises what is the
        database's own fault.

        A store whose refusals always have a place need not fill it in.
        """
        yield lambda _: None


StoreFactory = Callable[[], OutputStore]
"""Opens the store; can be pickled."""
