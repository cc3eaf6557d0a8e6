"""What a topic needs from its log. `tests/log/conformance.py` is the suite that every log must pass.

1. *Append in order*, with the prefix property: if an append is stored, so is every append handed over before it by
   the same writer. After a refused append or one with an unknown outcome the log takes nothing until it is opened
   for writing again.
2. *Index and message ID*: messages are counted from 0 without gaps.
3. *Read forward* from an index, as stored records.
4. *Fence*: opening for writing shuts out every earlier writer, and writes a marker. What an earlier writer had under
   way stands before that marker or nowhere.
5. *An honest outcome* of every append: stored, refused, or unknown.

Everything is called from one event loop. Batches are canonically encoded (`batch.proto`); records are in the stored
form (`core.records`).
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.message_id import MessageId


class Failure(Enum):
    """Why nothing more is taken until the log is opened for writing again."""

    REFUSED = "refused"
    """Nothing of what is not settled as stored is in the log, or ever will be."""

    UNKNOWN = "unknown"
    """What is not settled as stored may be in the log: a prefix of it. Opening again and reading tells."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the oldest unsettled appends since the log was opened for writing."""

    stored: int
    """So many more of them are durable."""

    failure: Failure | None = None
    """Set once, and last: all that are left have failed."""

    why: str = ""
    """With a failure, one line for a person."""


class Log(Protocol):
    """One topic's log. Its methods raise `DamagedError` for what is damaged where they look."""

    incarnation: int

    @property
    def first_index(self) -> int:
        """The index of the first message left; that of the next one if none is."""

    @property
    def certain_index(self) -> int:
        """Everything below this index is durable as far as the log can tell without writing."""

    @property
    def size_bytes(self) -> int:
        """What the log takes, in bytes of the stored form."""

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> None:
        """Shuts earlier writers out and writes a marker with this term and token, durable on return.

        From now on `settle` is called, on the event loop and never from within `append`, for what is appended;
        never again for what an earlier opening left. Raises `UnavailableError` (LOG_REFUSED) if the log cannot be
        written now; it can be tried again.
        """

    def append(self, batch: bytes, rows: int, column_bytes: int) -> None:
        """Hands over a batch: its messages get the next indexes if it is stored. Returns at once.

        Only between `open_for_writing` and a failure; after a failure it may still be called until the caller has
        heard of it, and what is handed over then counts as failed with it.
        """

    def replay(self, from_index: int) -> AsyncIterator[bytes]:
        """All records from the one that holds this index on, markers too, up to the end there is now.

        At `first_index` that is everything, the markers before the first message as well.
        Chunks of whole records. For recovery: whether the end was cut short is checked, payloads are not. With the
        index of the next message it yields what markers stand behind the last one. Raises `PositionError`
        (POSITION_TRIMMED) if the index is no longer there, (POSITION_UNKNOWN) if it is above the next one.
        """

    async def read(self, from_index: int, stop_index: int, max_bytes: int) -> bytes | memoryview:
        """Records without markers, whole, with the messages from `from_index` to at the most `stop_index - 1`.

        The first record may begin before `from_index` and the last one end behind `stop_index`: the caller cuts.
        At least one record, and no more than `max_bytes` unless the first alone is larger. Checksums are checked.
        `first_index <= from_index < stop_index`, and `stop_index` is at most the next index. Raises `PositionError`
        (POSITION_TRIMMED), `DamagedError`.
        """

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        """The index of the first message below `stop_index` published at or after that time, or `stop_index`."""

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        """The index up to which about so many bytes stand from `from_index` on; above it unless that is the end."""

    def message_id(self, index: int) -> MessageId:
        """The message ID at an index."""

    def message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        """The message IDs at many indexes, as columns: ledgers, entries, batch indexes."""

    def trim(self, below_index: int) -> None:
        """Retention may go on: everything below this index is covered by a durable snapshot."""

    async def close(self) -> None:
        """Lets go of files and threads. What is in flight must have settled."""


class LogName(NamedTuple):
    """A log that is there."""

    incarnation: int

    topic: str | None
    """The full name of the topic whose log it is; None if the log does not say it (its creation was interrupted)."""


class Logs(Protocol):
    """All topics' logs of one kind."""

    async def create(self, incarnation: int, topic: str) -> None:
        """Makes an empty log, durable on return. One that is there stays as it is, made whole where creating it was
        interrupted. Raises `UnavailableError` (LOG_REFUSED).
        """

    async def open(self, incarnation: int, covered_index: int) -> Log:
        """Opens a log that is there, for reading. Everything below `covered_index` is known to have been stored."""

    async def list(self) -> list[LogName]:
        """The logs that are there, whole or not, by incarnation: creating or deleting one may have been interrupted.

        Complete or an error.
        """

    async def delete(self, incarnation: int) -> None:
        """Removes a log that is not open, if it is there, durably. Raises `UnavailableError` (LOG_REFUSED)."""

    async def close(self) -> None:
        """Lets go of threads and connections. The logs must have been closed."""
