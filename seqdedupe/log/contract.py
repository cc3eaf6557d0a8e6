"""The contract of a log: the requirements of a topic for its log, and of a sidecar for all its logs.

Every kind of log must pass the suite `tests/log/conformance.py`.

1. *Append in order*, with the prefix property: if an append is stored, all earlier appends of the same writer are also
   stored. After a refused append, or an append with an unknown outcome, the log accepts no appends until the log is
   opened for writing again.
2. *Index and message ID*: messages are counted from 0 without gaps. Each message also has a message ID, which rises
   with the index. Only some logs can compute the ID from the index. So an outcome contains the IDs of the stored
   messages, and the IDs of older messages are looked up.
3. *Read forward* from an index, as stored records.
4. *Fence*: opening for writing excludes every earlier writer, and writes a marker. An append that an earlier writer had
   in flight is stored before that marker, or never.
5. *An honest outcome* of every append: stored, refused, or unknown.

A log contains three kinds of entries. *Batches* contain messages. A *marker* begins an ownership. *Control records*
change the state of the topic in other ways. Markers and control records have no index, and readers of messages never
receive them.

All methods are called from one event loop. Batches are canonically encoded (`batch.proto`); records are in the stored
form (`format.records`). A read raises `UnavailableError` (LOG_UNREADABLE) while files cannot be read or the connection
fails. The read can be repeated. `DamagedError` means that stored data is permanently damaged.
"""

from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.layout import BASE_INDEX, ROWS
from seqdedupe.limits import FlushInterval, Retention
from seqdedupe.message_id import MessageId
from seqdedupe.v1.admin_pb2 import StockWatermarks

if TYPE_CHECKING:
    from seqdedupe.pulsar_wire.batches import SentEntry

# -- The entries of a log: the message IDs of their rows, the outcome of appends, and how entries are read.


class Run(NamedTuple):
    """The message IDs of consecutive rows.

    The first row has (`ledger_id`, `entry_id`, `batch_index`). If `batch_index` is -1, an entry is one message, and the
    entry ID counts up in the following rows. Otherwise the batch index counts up.
    """

    rows: int
    ledger_id: int
    entry_id: int
    batch_index: int = -1

    def message_id(self, row: int) -> MessageId:
        """Return the message ID of a row of the run."""
        if self.batch_index < 0:
            return MessageId(self.ledger_id, self.entry_id + row, -1)
        return MessageId(self.ledger_id, self.entry_id, self.batch_index + row)


Runs = tuple[Run, ...]
"""The message IDs of a stored entry's rows. Usually one run; more if a ledger rolled over within the batch; none for a
marker or a control record."""


def last_of(runs: Runs) -> MessageId:
    """Return the message ID of an entry's last row. The entry must have rows."""
    return runs[-1].message_id(runs[-1].rows - 1)


class LargerRecordError(Exception):
    """A record of `size` bytes does not fit into the reader's memory."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a record of {size} bytes")
        self.size = size


class Failure(Enum):
    """The reason why the log accepts no appends until it is opened for writing again."""

    REFUSED = "refused"
    """Appends that have not settled as stored are not in the log, and never will be."""

    UNKNOWN = "unknown"
    """The first of the unsettled appends may be in the log. Opening the log again and reading it shows which."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the oldest unsettled appends (batches and control records) since the log was opened."""

    runs: Sequence[Runs]
    """One element for each further append that is durable: the message IDs of its rows."""

    failure: Failure | None = None
    """The failure. Set only in the last outcome: all other appends have failed."""

    why: str = ""
    """With a failure, one line of text for a person."""

    written: Sequence[Runs] = ()
    """One element for each append that is newly written, in order, but not durable yet. It is kept unless the machine
    stops. Only its sender may be notified of it."""

    @property
    def stored(self) -> int:
        """The number of further appends that are durable."""
        return len(self.runs)


@dataclass(frozen=True, slots=True)
class Entries:
    """Stored entries of a log in their order, checked and contiguous."""

    raw: bytes
    """The records. The places in `table` are within this buffer."""

    table: Int64s
    """A place row (`format.layout`) for each entry: BASE_INDEX, ROWS (0 in a marker and in a control record),
    PUBLISH_TIME_MS, TERM (above 0 in a marker only), OWNERSHIP, and the places of a batch's columns.

    An entry without rows and term is a control record; `records.body_of` returns it. Payloads are not checked. The
    array is C-contiguous and must not be changed."""

    runs: Sequence[Runs]
    """For each entry, the message IDs of its rows."""

    @property
    def next_index(self) -> int:
        """The index after these entries."""
        return int(self.table[-1, BASE_INDEX] + self.table[-1, ROWS])


class Records(NamedTuple):
    """Complete records of batches as they are stored, one after the other."""

    raw: bytes | memoryview
    runs: Sequence[Runs] | None = None
    """For each record, the message IDs of its rows. None if they follow from the index: the ledger is the incarnation,
    the entry is the index, the batch index is -1."""


class Location(NamedTuple):
    """The place of a message."""

    message_id: MessageId
    ownership: int
    """The first eight bytes of the token of the marker under which it was written, as an unsigned number."""


__all__ = [
    "ANY_BYTES",
    "REPLAY_STEP_ENTRIES",
    "DamageFound",
    "Entries",
    "Failure",
    "LargerRecordError",
    "Location",
    "Log",
    "LogName",
    "Logs",
    "Outcome",
    "Records",
    "Run",
    "Runs",
    "Skipped",
    "last_of",
]

REPLAY_STEP_ENTRIES = 8192
"""The maximum number of entries in one step of a replay. These entries are merged in one step of the event loop."""


ANY_BYTES = 2**63 - 1
"""No limit."""


class DamageFound(NamedTuple):
    """Damage found since the log was opened, in data that is still stored. The log may count only a limited number of
    damaged places."""

    places: int = 0
    messages: int = 0


class Skipped(NamedTuple):
    """Counts of the stored entries that reads and replays have skipped since the log was opened. Skipped entries are
    not part of the log."""

    void: int = 0
    """Entries of an owner that had lost the log."""
    repeats: int = 0
    """Copies of an earlier entry."""
    foreign: int = 0
    """Entries of other producers, after the log had an owner."""
    earlier: int = 0
    """Entries of other producers, before the log had an owner."""


class Log(Protocol):
    """The log of one topic. Methods raise `DamagedError` if the data that they read is damaged."""

    incarnation: int

    replays_what_is_certain: bool
    """Whether everything that `replay` yields is durable, even before the log is opened for writing. Then recovery
    replays first, and after its marker replays only what was added since. A standby may show such messages before the
    log's owner knows that they are stored."""

    @property
    def place(self) -> str:
        """The location of the log for a person, for example its folder."""

    @property
    def entry_format(self) -> str:
        """The permanent layout of the log's entries. Empty if this kind of log has only one layout."""

    @property
    def schema(self) -> "TopicSchema | None":
        """The schema with which the log has labelled messages since the log was last opened for writing. None: messages
        have no schema."""

    @property
    def first_index(self) -> int:
        """The index of the first stored message; the next index if no message is stored."""

    @property
    def certain_index(self) -> int:
        """Everything below this index is durable, as far as the log can determine this without writing.

        While the log is open for writing and has not failed, these are all messages that settled as stored. Before the
        opening, the log may contain more messages of an earlier process. These messages can be read, but might not
        survive a power cut. Do not return them to readers until this process has opened the log for writing.
        """

    @property
    def size_bytes(self) -> int:
        """The size of the log in bytes of the stored form."""

    @property
    def damage_found(self) -> DamageFound:
        """Damage found by the background scrub. Damage found by readers is not counted."""

    @property
    def skipped(self) -> Skipped:
        """The counts of the entries that reads and replays have skipped."""

    @property
    def earlier(self) -> Mapping[str, int]:
        """The highest sequence ID, if known after a replay from the beginning, of each producer that published before
        the log had an owner."""

    def check(self, batch: bytes) -> None:
        """Check that `append` can accept a batch. This is called before the batch is judged.

        Raises MESSAGE_TOO_LARGE.
        """

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> int:
        """Exclude all earlier writers, and write a marker with this term and token. When this returns, the marker is
        durable.

        Return 0. In some logs only a higher term takes ownership. If such a log already contains an equal or higher
        term, return that term. The new marker is then void, no replay shows the marker, and the log must be opened with
        a higher term.

        After this, `settle` is called for appends, on the event loop and never within a call of `append`. `settle` is
        never called again for appends of an earlier opening. Raises `UnavailableError` (LOG_REFUSED) if the log cannot
        be written now; the call can be repeated. After a cancellation it is unknown whether the marker was written.
        """

    def append(self, batch: bytes, rows: int, column_bytes: int, sent: "SentEntry | None" = None) -> None:
        """Pass a batch to the log, and return at once. If the batch is stored, its messages get the next indexes.
        `sent` is the form in which a stock Pulsar producer has sent the batch. A log that stores the same form may
        store `sent` unchanged.

        Allowed between `open_for_writing` and a failure. Batches that are passed after the failure, before the caller
        is notified of the failure, fail too.
        """

    def append_control(self, body: bytes) -> None:
        """Pass a control record to the log. Control records and batches have one common order. Otherwise the same as
        `append`.

        `body` is an encoded `Control` of at most MAX_BATCH_BYTES. A log with a lower limit raises MESSAGE_TOO_LARGE,
        and stores nothing.
        """

    def flush_every(self, interval: FlushInterval) -> None:
        """Allow batches to settle when they are written, and to become durable later, within this interval.

        Control records and markers always settle when they are durable. In a log that only settles durable appends,
        this call has no effect.
        """

    def flush(self) -> None:
        """Make all appends durable as soon as they are written, without waiting for the interval."""

    def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        """Yield all entries from the entry with the message `from_index` to the present end.

        If `from_index` is `first_index`, the markers before the first message are included. The first entry may begin
        before `from_index`, because a batch is stored as a whole. A step has at most REPLAY_STEP_ENTRIES entries, which
        are checked for damage and gaps; payloads are not checked. If `from_index` is the next index, only the markers
        and control records after the last message are yielded. Raises `PositionError`: POSITION_TRIMMED if the index is
        no longer stored, POSITION_AFTER_END if the index is above the next index.
        """

    async def wait_for_more(self) -> None:
        """Wait until a log of another owner may have entries that no replay has yielded.

        In a log that no other process can write, this never returns. Raises `UnavailableError` (LOG_UNREADABLE).
        """

    async def wait_until_free(self) -> None:
        """Wait until no other process seems to own the log. The caller should then open the log for writing. The return
        proves nothing.

        In a log that no other process can write, this returns at once. If the log fails, this continues to wait. After
        a cancellation nothing waits any more.
        """

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        """Return whole records of batches with the messages from `from_index` to at most `stop_index - 1`.

        The first record may begin before `from_index`, and the last record may end after `stop_index`: the caller cuts
        the records. There is at least one record. All records together have at most `max_bytes`, unless the first
        record alone is larger. Checksums are checked. `first_index <= from_index < stop_index` must hold, and
        `stop_index` is at most the next index.

        Raises `LargerRecordError` if the first record has more than `most_bytes`, if possible before its payloads are
        read; `PositionError` (POSITION_TRIMMED); `DamagedError`.
        """

    async def next_readable(self, from_index: int) -> int:
        """Return the index of the first message at or after `from_index` that `read` can return. Skip damaged or
        unreadable data.

        If there is no such message, return the next index. Raises `PositionError` (POSITION_TRIMMED), NEWER_FORMAT.
        """

    async def locate(self, index: int) -> Location:
        """Return the place of the message with this index. This may need a read.

        Raises `PositionError`: POSITION_TRIMMED below `first_index`, POSITION_AFTER_END if the message does not exist
        yet.
        """

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        """Return the message IDs at many indexes, as columns: ledgers, entries, batch indexes.

        Only IDs that are known without a read are returned. For other messages all columns are -1.
        """

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        """Return the index of the first message below `stop_index` published at or after that time, or `stop_index`.

        A damaged message is treated as published at the time of the next readable message.
        """

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        """Return the index up to which the messages from `from_index` on have a stored size of about `size_bytes`.

        The index is above `from_index`, unless `from_index` is the end of the log.
        """

    def place_at(self, next_index: int) -> bytes:
        """Return the place that a snapshot of all messages below this settled index must store for the log.

        With this place, `Logs.open` begins at the index, and finds earlier messages. The place is empty if the log
        needs no place.
        """

    async def snapshot_is_durable(self, place: bytes) -> None:
        """Tell the log that the snapshot with this place is durable. The log keeps the entries that a recovery from
        this snapshot needs, and may drop earlier entries.

        If the log cannot record this, the call raises the reason, and the log also keeps the earlier entries.
        """

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        """Return the first index that this retention would keep now. If the log has its own retention, the log's own
        retention decides.

        This call drops no messages. The log may begin a new segment, so that later calls can drop more messages. A
        durable snapshot covers everything below `covered_index`. The last of the covered messages stays, so the result
        is below `covered_index`, or is `first_index`. `trim` may also drop control records directly at the resulting
        index. So first write again all statements up to this index that are still in force.
        """

    async def trim(self, below_index: int) -> None:
        """Drop everything below this index, which `may_trim_to` returned. When this returns, the removal is durable.

        Data that cannot be dropped now (because of a failing disk) remains until the next call. The remaining messages
        have no gap. `first_index` is then the index of the first remaining message.
        """

    async def let_go(self) -> None:
        """Give up the write access to the log, so that another owner can open the log for writing. Appends in flight
        may be stored or not, and do not settle."""

    async def close(self) -> None:
        """Close files and threads. All appends must have settled."""


class LogName(NamedTuple):
    """A log that exists."""

    incarnation: int

    topic: str | None
    """The full name of the log's topic; None if the log does not have it (its creation was interrupted)."""

    partitions: int = 0
    """If the topic is a partition: the number of partitions of its partitioned topic; otherwise 0."""

    is_going: bool = False
    """In a cluster: the topic is being deleted, and every sidecar that has it open must close it."""

    unused_partitions: int = 0
    """For a partition: the number of partitions that the cluster has added to the topic, which nobody uses."""

    is_unfinished: bool = False
    """A crash has left data that opening the log will put into it."""

    why: SeqdedupeError | None = None
    """Why `topic` is None although the log has a name: its file is damaged, or cannot be read now."""


class Layout(NamedTuple):
    """The layout of the entries of a new log, for logs that have several layouts."""

    entry_format: str = ""
    """Empty: the default."""
    schema: str = ""
    """The schema with which consumers of a Pulsar topic decode messages, in the form that Pulsar's admin URL accepts.
    Empty: no schema."""
    watermarks: StockWatermarks | None = None
    """What a job has read of a topic that is taken over; None: the log reads all entries."""


AS_USUAL = Layout()


class TopicSchema(NamedTuple):
    """A version of the schema of a Pulsar topic."""

    type: str
    """The schema type with its name in Pulsar's admin URL: `AVRO`, `STRING`, ..."""
    definition: str
    version: int


class Logs(Protocol):
    """All topics' logs of one kind."""

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        """Make an empty log. When this returns, the log is durable. An existing log is unchanged, but an interrupted
        creation is completed.

        `partitions` (see `LogName`) and `layout` are permanent. `secret` has SECRET_BYTES random bytes (`format.tag`)
        that identify the records of this incarnation.
        Raises `UnavailableError` (LOG_REFUSED).
        """

    async def take_over(
        self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout = AS_USUAL
    ) -> None:
        """Make a topic of the cluster, or each of the topic's partitions, a log. Stored entries stay, and are before
        the log's first entry.

        `incarnations` is a function that returns consecutive new incarnations. This function may raise an error;
        nothing was changed then. One call to the cluster makes the log visible to all sidecars. A failure after this
        call does not undo the take-over. Raises INVALID_REQUEST, TOPIC_NOT_FOUND, TOPIC_EXISTS, TOPIC_IN_USE;
        `UnavailableError` (LOG_REFUSED). After LOG_REFUSED it is unknown whether the topic was taken over; the call can
        be repeated.
        """

    async def announce(self, whole: str) -> None:
        """Announce that all partitions of a new partitioned topic exist. Other sidecars may use them after this.

        Raises `UnavailableError` (LOG_REFUSED). After this error the caller must delete the partitions, and other
        sidecars close them.
        """

    async def open(self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b"") -> Log:
        """Open an existing log for reading. Everything below `covered_index` is known to have been stored.

        `place` comes from the snapshot up to `covered_index`. With `place`, the log need not be read from its first
        entry. `secret` comes from the store's record; if `secret` is None, the log must contain the secret. Raises
        LOG_DAMAGED, NEWER_FORMAT, OLDER_FORMAT; LOG_UNREADABLE if the log cannot be read now.
        """

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """Return all logs by incarnation, including logs whose creation or deletion was interrupted.

        If other sidecars share the logs, partitions of a topic that is not announced are not listed. If examining each
        log is expensive, logs of the topics in `without` may be omitted. The list is complete, or an error is raised:
        LOG_UNREADABLE; LOG_DAMAGED if a log has an invalid name.
        """

    async def delete(self, *incarnations: int) -> None:
        """Remove these logs durably; ignore logs that do not exist. No log may be open. Pass all partitions of a topic
        in one call.

        Raises `UnavailableError` (LOG_REFUSED).
        """

    async def close(self) -> None:
        """Close threads and connections. The logs must have been closed."""
