"""What a topic needs from its log, and a sidecar from all its logs.

`tests/log/conformance.py` is the suite that every kind of log must pass.

1. *Append in order*, with the prefix property: if an append is stored, so is every append handed over before it by
   the same writer. After a refused append or one with an unknown outcome the log takes nothing until it is opened
   for writing again.
2. *Index and message ID*: messages are counted from 0 without gaps. Each has a message ID too, which rises with the
   index. Only some logs can compute one from the other: an outcome brings the IDs of what was stored, and those of
   older messages are looked up.
3. *Read forward* from an index, as stored records.
4. *Fence*: opening for writing shuts out every earlier writer, and writes a marker. What an earlier writer had under
   way stands before that marker or nowhere.
5. *An honest outcome* of every append: stored, refused, or unknown.

A log holds three kinds of entries: *batches* of messages; *markers*, with each of which an ownership begins; and
*control records*, which change the topic's state otherwise. The last two take no index, and readers of messages never
see them.

Everything is called from one event loop. Batches are canonically encoded (`batch.proto`); records are in the stored
form (`format.records`). A log whose files or connection fail for now raises `UnavailableError` where it is read
(LOG_UNREADABLE), which can be tried again; `DamagedError` says that what stands there is wrong, and always will be.
"""

from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.columns import BASE_INDEX, ROWS
from seqdedupe.limits import FlushInterval, Retention
from seqdedupe.message_id import MessageId

# -- The entries of a log: message IDs of their rows, what became of those that were appended, and how they are read.


class Run(NamedTuple):
    """The message IDs of rows that stand one after the other.

    The first row has (`ledger_id`, `entry_id`, `batch_index`). In the following rows the entry counts up where
    `batch_index` is -1 (an entry is one message), else the batch index does.
    """

    rows: int
    ledger_id: int
    entry_id: int
    batch_index: int = -1

    def message_id(self, row: int) -> MessageId:
        """That of a row of the run."""
        if self.batch_index < 0:
            return MessageId(self.ledger_id, self.entry_id + row, -1)
        return MessageId(self.ledger_id, self.entry_id, self.batch_index + row)


Runs = tuple[Run, ...]
"""The message IDs of a stored entry's rows: usually one run, more where a ledger rolled over within the batch, none
for a marker or a control record."""


def last_of(runs: Runs) -> MessageId:
    """The message ID of an entry's last row, where it has any."""
    return runs[-1].message_id(runs[-1].rows - 1)


class LargerRecordError(Exception):
    """A record is larger than whoever reads has room for: it has so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a record of {size} bytes")
        self.size = size


class Failure(Enum):
    """Why nothing more is taken until the log is opened for writing again."""

    REFUSED = "refused"
    """Nothing of what is not settled as stored is in the log, or ever will be."""

    UNKNOWN = "unknown"
    """What is not settled as stored may be in the log: a prefix of it. Opening again and reading tells."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the oldest unsettled appends, of batches and control records, since the log was opened."""

    runs: Sequence[Runs]
    """So many more of them are durable, and these are the message IDs of each one's rows."""

    failure: Failure | None = None
    """Set once, and last: all that are left have failed."""

    why: str = ""
    """With a failure, one line for a person."""

    written: Sequence[Runs] = ()
    """After those, so many of which it was not said before are written, in this order, and not durable yet. As long as
    the machine does not stop they are there; nobody but their senders may learn of them."""

    @property
    def stored(self) -> int:
        """How many more of the appends are durable."""
        return len(self.runs)


@dataclass(frozen=True, slots=True)
class Entries:
    """Stored entries of a log in their order, read, checked and contiguous."""

    raw: bytes
    """The records. What `table` says of places is within this buffer."""

    table: Int64s
    """A place row (`format.columns`) for each entry: BASE_INDEX, ROWS (0 in a marker and in a control record),
    PUBLISH_TIME_MS, TERM (above 0 in a marker only), OWNERSHIP, and where the columns of a batch stand. What has
    neither rows nor a term is a control record; `records.body_of` gives it. Payloads were not looked at.
    C-contiguous; nobody changes it."""

    runs: Sequence[Runs]
    """For each entry the message IDs of its rows."""

    @property
    def next_index(self) -> int:
        """The index after these entries."""
        return int(self.table[-1, BASE_INDEX] + self.table[-1, ROWS])


class Records(NamedTuple):
    """Records of batches as they are stored, one after the other, whole."""

    raw: bytes | memoryview
    runs: Sequence[Runs] | None = None
    """Of each record the message IDs of its rows; None where the index says them (ledger the incarnation, entry the
    index, batch index -1)."""


class Location(NamedTuple):
    """Where a message stands."""

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
"""So many entries are in one step of a replay at most: they are merged without a pause of the event loop."""


ANY_BYTES = 2**63 - 1
"""However many."""


class DamageFound(NamedTuple):
    """What was found damaged since the log was opened, of what is still there. The log may bound how much it counts."""

    places: int = 0
    messages: int = 0


class Skipped(NamedTuple):
    """Entries that stand in the log, and are no part of it, as far as they were met since it was opened."""

    void: int = 0
    """Of an owner that had lost the log."""
    repeats: int = 0
    """The same as one before."""
    foreign: int = 0
    """Somebody else's, after the log had an owner."""
    earlier: int = 0
    """And before."""


class Log(Protocol):
    """One topic's log. Its methods raise `DamagedError` for what is damaged where they look."""

    incarnation: int

    replays_what_is_certain: bool
    """Whether all that `replay` gives is durable, also before the log is opened for writing. Then recovery replays it
    first, and after its marker only what came meanwhile."""

    @property
    def place(self) -> str:
        """Where it is, for a person who has to look at it: its folder, say."""

    @property
    def entry_format(self) -> str:
        """How its entries are laid out, for good, where there is a choice; empty where there is none."""

    @property
    def first_index(self) -> int:
        """The index of the first message left; that of the next one if none is."""

    @property
    def certain_index(self) -> int:
        """Everything below this index is durable as far as the log can tell without writing.

        While it is open for writing, and did not fail, that is all that was settled as stored. Before, a process that
        ended may have left more, which can be read although it would not survive a power cut: it must not be shown
        to anybody until this process has opened the log for writing.
        """

    @property
    def size_bytes(self) -> int:
        """What the log takes, in bytes of the stored form."""

    @property
    def damage_found(self) -> DamageFound:
        """What was found by a scrub in the background. What readers meet is not counted."""

    @property
    def skipped(self) -> Skipped:
        """What it has left out."""

    @property
    def earlier(self) -> Mapping[str, int]:
        """After a replay from its beginning: the highest sequence ID of each producer that published into it before it
        had an owner, as far as it shows them."""

    def check(self, batch: bytes) -> None:
        """Whether `append` can take a batch, by what its rows are: asked before anything is decided about it.

        Raises MESSAGE_TOO_LARGE.
        """

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> int:
        """Shuts earlier writers out and writes a marker with this term and token, durable on return.

        Answers 0, or in a log where only a higher term takes ownership, the term that stands there and is not lower:
        then the marker counts for nothing, no replay shows it, and the log has to be opened again with a higher one.

        From now on `settle` is called, on the event loop and never from within an append, for what is appended;
        never again for what an earlier opening left. Raises `UnavailableError` (LOG_REFUSED) if the log cannot be
        written now; it can be tried again. Whoever is cancelled here does not know whether the marker was written.
        """

    def append(self, batch: bytes, rows: int, column_bytes: int) -> None:
        """Hands over a batch: its messages get the next indexes if it is stored. Returns at once.

        Only between `open_for_writing` and a failure; after a failure it may still be called until the caller has
        heard of it, and what is handed over then counts as failed with it.
        """

    def append_control(self, body: bytes) -> None:
        """Hands over a control record, in one order with the batches. Otherwise as `append`.

        `body` is an encoded `Control` of at most MAX_BATCH_BYTES. A log that cannot hold so much raises
        MESSAGE_TOO_LARGE, and has taken nothing.
        """

    def flush_every(self, interval: FlushInterval) -> None:
        """Batches may be told of as written, and made durable later, within this interval from now on; control records
        and markers never wait. Nothing changes where durable is all that a log knows."""

    def flush(self) -> None:
        """What was handed over is made durable as soon as it is written, whatever the interval."""

    def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        """All entries from the one that holds this index on, up to the end there is now.

        At `first_index` that is everything, the markers before the first message as well. The first entry may begin
        before `from_index`: a batch is stored whole. At most REPLAY_STEP_ENTRIES a step, scanned and checked for
        damage and gaps. For recovery: payloads are not checked. With the index of the next message it yields what
        markers and control records stand after the last one. Raises `PositionError` (POSITION_TRIMMED) if the index
        is no longer there, (POSITION_AFTER_END) if it is above the next one.
        """

    async def wait_for_more(self) -> None:
        """For a log that another owner has: returns when something may stand there that no replay has given yet.

        Never, where nobody else can write. Raises `UnavailableError` (LOG_UNREADABLE).
        """

    async def wait_until_free(self) -> None:
        """Returns when nobody else seems to own the log, so that it is worth opening it for writing: an alarm, which
        proves nothing. At once, where nobody else can write.

        It outlasts failures of what it asks. Whoever is cancelled here does not wait any more, for certain.
        """

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        """Records of batches, whole, with the messages from `from_index` to at the most `stop_index - 1`.

        The first record may begin before `from_index` and the last one end after `stop_index`: the caller cuts.
        At least one record, and no more than `max_bytes` unless the first alone is larger. Checksums are checked.
        Raises `LargerRecordError` if that one has more than `most_bytes`: as far as it can be told before, none of its
        payloads has been read.
        `first_index <= from_index < stop_index`, and `stop_index` is at most the next index. Raises `PositionError`
        (POSITION_TRIMMED), `DamagedError`.
        """

    async def next_readable(self, from_index: int) -> int:
        """The index of the first message from this one on that `read` can give: past what is damaged, or stands where
        the disk cannot be read.

        That of the next message if there is none. Raises `PositionError` (POSITION_TRIMMED), NEWER_FORMAT.
        """

    async def locate(self, index: int) -> Location:
        """Where the message with this index stands. It may take a read.

        Raises `PositionError` (POSITION_TRIMMED) below `first_index`, (POSITION_AFTER_END) if there is none yet.
        """

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        """The message IDs at many indexes, as columns: ledgers, entries, batch indexes.

        At once: those that are known without a read, and -1 in all columns for the others.
        """

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        """The index of the first message below `stop_index` published at or after that time, or `stop_index`.

        Damaged messages count as published when what stands after them was.
        """

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        """The index up to which about so many bytes stand from `from_index` on; above it unless that is the end."""

    def place_at(self, next_index: int) -> bytes:
        """What a snapshot has to hold that covers all below this index, which is settled, so that `Logs.open` begins
        there, and finds what stands before it. Empty where the log needs nothing."""

    async def snapshot_is_durable(self, place: bytes) -> None:
        """The snapshot with this place is: a log that has to be told keeps what recovery needs with it, and need not
        keep more. Raises why it could not be told: then more is kept.
        """

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        """The first index that would be left if this retention went on now, or if the log has one of its own, is left
        by that; drops nothing. It may have the log go on in a new segment, so that it can drop more later.

        Everything below `covered_index` is covered by a durable snapshot. The last message of those stays, so the
        answer is below `covered_index`, or `first_index`. A control record that stands at that index (no message is
        between) may go too: what is said there or before, and is still in force, has to be said again first.
        """

    async def trim(self, below_index: int) -> None:
        """Retention drops what stands below this index, which `may_trim_to` answered; durable on return.

        What cannot be dropped now (a failing disk) stays until it is asked again, without a gap: `first_index` says
        how far it came.
        """

    async def let_go(self) -> None:
        """Ends an opening for writing, so that somebody else can open the log, where others can. What is in flight may
        be stored or not, and nobody is told."""

    async def close(self) -> None:
        """Lets go of files and threads. What is in flight must have settled."""


class LogName(NamedTuple):
    """A log that is there."""

    incarnation: int

    topic: str | None
    """The full name of the topic whose log it is; None if the log does not say it (its creation was interrupted)."""

    partitions: int = 0
    """How many the partitioned topic has of which it is one; 0 if it is none."""

    is_going: bool = False
    """In a cluster: the topic is being deleted, by whomever, and whoever has it open has to let go of it."""

    unused_partitions: int = 0
    """Of a partition: so many the cluster has added to the topic, which nobody uses."""

    is_unfinished: bool = False
    """A crash has left what its opening will put into it."""

    why: SeqdedupeError | None = None
    """Why the topic is None although the log has once said it: its file is damaged, or cannot be read now."""


class Layout(NamedTuple):
    """How the entries of a new log are laid out, where there is a choice."""

    entry_format: str = ""
    """Empty: as usual."""
    schema: str = ""
    """What consumers of a Pulsar topic decode its messages by, as Pulsar's admin URL takes it; empty: nothing."""


AS_USUAL = Layout()


class Logs(Protocol):
    """All topics' logs of one kind."""

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        """Makes an empty log, durable on return. One that is there stays as it is, made whole where creating it was
        interrupted.

        `partitions` stands there for good, see `LogName`, and so does `layout`.
        `secret` is SECRET_BYTES of random bytes (`format.tag`) which make this incarnation's records its own.
        Raises `UnavailableError` (LOG_REFUSED).
        """

    async def announce(self, whole: str) -> None:
        """All partitions of a new partitioned topic are made, and whoever shares the logs may use them from now on.

        Raises `UnavailableError` (LOG_REFUSED): then they are to be deleted, and others let go of them.
        """

    async def open(self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b"") -> Log:
        """Opens a log that is there, for reading. Everything below `covered_index` is known to have been stored.

        `place` is that of the snapshot that covers it; then the log is not read from its first entry on.

        `secret` is that of the store's record, None if it has none: then the log's own must be there. Raises
        LOG_DAMAGED, NEWER_FORMAT, OLDER_FORMAT; LOG_UNREADABLE if it cannot be looked at now.
        """

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """The logs that are there, whole or not, by incarnation: creating or deleting one may have been interrupted.
        Where others share them, no partition of a topic that is not announced.
        Those of the topics `without` may be left out, where it costs something to look at each.

        Complete or an error: LOG_UNREADABLE, LOG_DAMAGED if a log says a name that is none.
        """

    async def delete(self, *incarnations: int) -> None:
        """Removes logs that are not open, those that are there, durably. All partitions of a topic are given at once.

        Raises `UnavailableError` (LOG_REFUSED).
        """

    async def close(self) -> None:
        """Lets go of threads and connections. The logs must have been closed."""
