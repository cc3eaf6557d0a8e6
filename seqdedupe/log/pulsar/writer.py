"""The exclusive producer of a topic: it accepts entries, and returns the places of the entries, in order and several at
a time."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seqdedupe import batch as batches
from seqdedupe.entry_properties import EntryOwner, EntryPlace
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Failure, Outcome, Run, Runs
from seqdedupe.log.pulsar.broker_wire import Brokers, ExclusiveProducer, open_producer
from seqdedupe.log.pulsar.content import FoundEntry
from seqdedupe.log.pulsar.entries import (
    NO_LIMIT,
    EncodedBatch,
    EntryFormat,
    EntrySettings,
    PulsarMessage,
    content_bytes,
    control_message,
    encoded_part,
    messages_of_part,
    packed_message,
    split_part,
    surely_taken_bytes,
)
from seqdedupe.log.pulsar.native import native_parts, passed_entry
from seqdedupe.log.pulsar.places import Places, Point, size_of
from seqdedupe.log.pulsar.terms import Receipts, TermStanding
from seqdedupe.log.pulsar.wholes import Schema
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import SentEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType

# -- Which appends of an owner are confirmed, judged by Pulsar's receipts. No I/O.


class Confirmed(NamedTuple):
    """Confirmed appends: their number, counted from the oldest append. They follow each other in one ledger."""

    entries: int
    first: MessageId


class Unsettled:
    """The appends of one opening that are not confirmed yet, in order.

    `Receipts` decides whether a receipt confirms its append. The receipt of the first append does not, nor does a
    receipt after a gap or in a new ledger. All later appends then wait until the topic was read up to that append.
    """

    def __init__(self) -> None:
        self._rule: Receipts | None = None
        self._receipts: deque[MessageId] = deque()

    def add(self, receipt: MessageId) -> None:
        """Add the receipt of the append after the last one that had a receipt."""
        self._receipts.append(receipt)

    def confirm(self) -> Confirmed | None:
        """Remove and return the appends that are confirmed now."""
        receipts, rule = self._receipts, self._rule
        if rule is None or not receipts:
            return None
        first, entries = receipts[0], 0
        while receipts and rule.confirms(receipts[0]):
            receipts.popleft()
            entries += 1
        return Confirmed(entries, first) if entries else None

    @property
    def doubtful(self) -> MessageId | None:
        """The receipt of the oldest append, if `confirm` has found that this receipt does not confirm the append;
        otherwise None."""
        return self._receipts[0] if self._receipts else None

    def was_read(self, message_id: MessageId) -> None:
        """Record that the topic was read up to the oldest append, which is valid and has this ID."""
        self._receipts.popleft()
        if self._rule is None:
            self._rule = Receipts(message_id)
        else:
            self._rule.was_read(message_id)


# -- From appends to entries of their topic, in the topic's format.

_WIDEST_NUMBER = 2**62
_WIDEST_OWNER = EntryOwner(_WIDEST_NUMBER, _WIDEST_NUMBER, 2**64 - 1)


class Record(NamedTuple):
    """One stored record: the rows of a batch, with one entry for each row, or one entry for all rows."""

    entries: Sequence[PulsarMessage]
    rows: int
    """The number of rows in each entry: one, or those of its batch, or none for a control record."""
    is_batch: bool


def records_of_batch(
    settings: EntrySettings,
    owner: EntryOwner,
    number: int,
    index: int,
    now_ms: int,
    part: EncodedBatch,
    limit_bytes: int,
    compression: CompressionType.ValueType = NONE,
    sent: SentEntry | None = None,
) -> list[Record]:
    """Return the records of a batch. The first entry has this number, and the first row has this index.

    Native entries have this compression. If a stock producer has sent the rows, the entries keep the producer's
    compression. They also keep the producer's payload, if the batch contains all rows of the payload. Raises
    MESSAGE_TOO_LARGE if a record does not fit into an entry of `limit_bytes`.
    """
    if settings.format is EntryFormat.PLAIN:
        rows = messages_of_part(owner, number, index, part.encoded, limit_bytes, settings.version)
        return [Record(list(rows), 1, is_batch=False)]
    is_native = settings.format is EntryFormat.NATIVE
    if is_native and sent is not None:
        passed = passed_entry(part, sent, EntryPlace(owner, number, index), now_ms, limit_bytes)
        if passed is not None:
            message = packed_message(owner, number, index, now_ms, part, NO_LIMIT)
            return [Record([message._replace(event_time_ms=now_ms, wire=passed)], part.rows, is_batch=True)]
        compression = sent.compression
    records: list[Record] = []
    for one in native_parts(part, limit_bytes) if is_native else split_part(part, limit_bytes):
        message = packed_message(owner, number + len(records), index, now_ms, one, limit_bytes)
        message = message._replace(event_time_ms=now_ms, compression=compression)
        records.append(Record([message], one.rows, is_batch=True))
        index += one.rows
    return records


def records_of_control(
    settings: EntrySettings, owner: EntryOwner, number: int, next_index: int, now_ms: int, body: bytes, limit_bytes: int
) -> list[Record]:
    """Return the record of a control record. Raises MESSAGE_TOO_LARGE."""
    message = control_message(owner, number, next_index, body, limit_bytes, settings.version)
    return [Record([message._replace(event_time_ms=now_ms)], 0, is_batch=False)]


def check_fits(settings: EntrySettings, batch: bytes, limit_bytes: int) -> None:
    """Raise MESSAGE_TOO_LARGE for a batch that a broker would refuse, no matter which sidecar owns the topic."""
    if len(batch) > surely_taken_bytes(limit_bytes):
        part = encoded_part(batches.decode(batch))
        records_of_batch(settings, _WIDEST_OWNER, _WIDEST_NUMBER, _WIDEST_NUMBER, 0, part, limit_bytes)


RESERVED = "\x1f"
"""A control character, which no name of a producer that publishes has. Pulsar's deduplication takes the true names in
native entries for those of its producers: none may be that of the sidecar's own."""
PRODUCER_NAMES = 8
"""The number of names that an instance has for the producers of a topic. A name is busy while its old producer has
sends pending."""
MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
SEND_TIMEOUT_SECONDS = 30.0
"""Without any answer for this time, the outcome of the appends in flight is unknown."""
COUNTER_BITS = 32
"""The counter bits of a sequence ID. An opening that exceeds them continues with the IDs of the next opening number.
That number belongs to a time one second later, and by then long past."""

ClaimOpening = Callable[[int], Awaitable[int]]
"""Takes an opening number that Pulsar knows. Returns a number above it and above all that it ever returned; it is
durable."""


class SettledEntry(NamedTuple):
    """The knowledge about the oldest unsettled appends."""

    confirmed: Confirmed | None
    """The further appends that are stored and valid."""
    doubtful: MessageId | None = None
    """The receipt of the next append, if it proves nothing. The caller must read the topic up to it and call
    `was_read`. Until then nothing more is confirmed."""
    failure: str | None = None
    """Set once, and last: why the outcome of all others is unknown. Opening again and reading tells."""


class EntryWriter:
    """One opening of a topic for writing. All methods are called on one event loop.

    Sequence IDs rise over all openings of a name. This class does not decide what other writers may have done. If a
    receipt directly follows the last confirmed receipt, other writers wrote nothing between the two entries.
    """

    def __init__(
        self,
        producer: ExclusiveProducer,
        producer_name: str,
        name_number: int,
        opening: int,
        settle: Callable[[SettledEntry], None],
    ) -> None:
        """Make the writer, for `open_writer`."""
        self.producer_name = producer_name
        self.name_number = name_number
        self.opening = opening
        self._producer = producer
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._next_id = opening << COUNTER_BITS
        self._waiting: deque[PulsarMessage] = deque()
        self._sent_bytes: deque[int] = deque()
        self._in_flight_bytes = 0
        self._unsettled = Unsettled()
        self._doubtful: MessageId | None = None
        self._ended = False
        self._answers: deque[tuple[int, SeqdedupeError | None, MessageId]] = deque()
        self._is_woken = False
        self._next_answer = self._next_id
        self._last_answer_time = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def append(self, messages: Sequence[PulsarMessage]) -> None:
        """Pass entries to the producer, and return at once. Entries above the in-flight limits wait in this object.

        After a failure nothing more is sent: later entries have failed with the others.
        """
        if self._ended:
            return
        self._waiting.extend(messages)
        self._send()

    def was_read(self, message_id: MessageId) -> None:
        """Record that the topic was read and judged up to the doubtful append, which is valid and has this ID.

        The caller settles this append; `settle` continues with the later appends.
        """
        self._unsettled.was_read(message_id)
        self._doubtful = None
        self._wake()

    async def close(self) -> None:
        """Release the topic; `settle` is not called any more. Appends in flight may be stored or not.

        If a broker does not answer, this waits for the time-out of the producer.
        """
        self._end()
        await self._producer.close()

    def _send(self) -> None:
        most_entries = self._producer.max_in_flight
        while self._waiting and len(self._sent_bytes) < most_entries and self._in_flight_bytes < MAX_IN_FLIGHT_BYTES:
            message = self._waiting.popleft()
            number = self._next_id
            if not self._sent_bytes:
                self._last_answer_time = self._loop.time()
                if self._timer is None:
                    self._timer = self._loop.call_later(SEND_TIMEOUT_SECONDS, self._check_time)
            size = content_bytes(message)
            self._sent_bytes.append(size)
            self._in_flight_bytes += size
            self._next_id += 1
            self._producer.send(message, number, self._answer)

    def _answer(self, number: int, failure: SeqdedupeError | None, place: MessageId) -> None:
        # This may run within `send`.
        self._answers.append((number, failure, place))
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and not self._ended:
            self._is_woken = True
            self._loop.call_soon(self._take_answers)

    def _take_answers(self) -> None:
        self._is_woken = False
        if self._ended:
            return
        failure = None
        if self._answers:
            self._last_answer_time = self._loop.time()
        while self._answers and failure is None:
            number, why, place = self._answers.popleft()
            if why is not None:
                failure = why.message
            elif number != self._next_answer:
                failure = f"Pulsar answered {number} where {self._next_answer} was due"
            else:
                self._next_answer += 1
                self._in_flight_bytes -= self._sent_bytes.popleft()
                self._unsettled.add(place)
        self._report(failure)
        if not self._ended:
            self._send()

    def _report(self, failure: str | None) -> None:
        confirmed = doubtful = None
        if self._doubtful is None:
            confirmed = self._unsettled.confirm()
            self._doubtful = doubtful = self._unsettled.doubtful
        if failure is not None:
            self._end()
        if confirmed is not None or doubtful is not None or failure is not None:
            self._settle(SettledEntry(confirmed, doubtful, failure))

    def _check_time(self) -> None:
        self._timer = None
        if self._ended or not self._sent_bytes:
            return
        left = self._last_answer_time + SEND_TIMEOUT_SECONDS - self._loop.time()
        if left > 0 or self._answers:
            self._timer = self._loop.call_later(max(left, 0.0), self._check_time)
        else:
            self._report(f"Pulsar has not answered for {SEND_TIMEOUT_SECONDS:.0f} s")

    def _end(self) -> None:
        self._ended = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def open_writer(
    brokers: Brokers,
    topic: str,
    instance_name: str,
    first_name_number: int,
    claim_opening: ClaimOpening,
    properties: Mapping[str, str],
    settle: Callable[[SettledEntry], None],
    entry_format: EntryFormat,
    schema: Schema | None = None,
) -> EntryWriter:
    """Become the exclusive writer of the topic, if no other writer has the topic. `schema` is the topic's schema (None:
    no schema).

    Producers are named `seqdedupe-<instance_name>-<name number>`, from the first number on, which should be the number
    after the previous opening's number. With native entries the name has a control character, so no other producer can
    have this name. `properties` is visible in the topic's statistics. `settle` is called on the event loop, never from
    within `append` or `was_read`.

    Raises NOT_OWNER if there is another writer; PULSAR_FORBIDS; LOG_REFUSED for temporary failures. If this is
    cancelled while the producer is being made, the producer is closed.
    """
    busy: SeqdedupeError | None = None
    prefix = f"seqdedupe-{instance_name}-{RESERVED if entry_format is EntryFormat.NATIVE else ''}"
    of_wire = schema.of_wire() if schema is not None else None
    for step in range(PRODUCER_NAMES):
        name_number = (first_name_number + step) % PRODUCER_NAMES
        name = f"{prefix}{name_number}"
        producer = await open_producer(brokers, topic, name, properties, entry_format, of_wire)
        if producer is None:
            busy = error("NOT_OWNER", f"another writer holds {topic}, under the name {name!r}")
            continue
        try:
            opening = await claim_opening(max(producer.last_sequence_id, 0) >> COUNTER_BITS)
        except BaseException:
            await producer.close()
            raise
        return EntryWriter(producer, name, name_number, opening, settle)
    raise busy or error("INTERNAL", "an instance has no producer names")


# -- One opening of a topic for writing: appends become entries, and confirmed entries settle their appends.


@dataclass(slots=True)
class _SentEntry:
    """A record with entries that are not confirmed."""

    sizes_bytes: list[int]
    """The sizes of the entries that are not confirmed."""
    rows: int
    is_batch: bool
    publish_time_ms: int
    ends_append: bool
    is_whole: bool = True
    """Whether none of its entries is confirmed."""


class PendingAppends:
    """The appends that an owner has in flight, from the owner's marker on. `settle` receives the outcomes, until a
    failure."""

    def __init__(
        self,
        owner: EntryOwner,
        writer: EntryWriter,
        places: Places,
        settle: Callable[[Outcome], None],
        max_entry_bytes: int,
    ) -> None:
        self.owner = owner
        self.max_entry_bytes = max_entry_bytes
        """The highest limit of its broker and its policies since the opening began."""
        self.writer = writer
        self.failed = False
        self._settle = settle
        self._places = places
        self._sent: deque[_SentEntry] = deque()
        self._runs: list[Run] = []
        """The runs of the oldest append, as far as it is confirmed."""
        self._confirmed: list[Runs] = []
        self.next_number = 1
        self.next_index = places.end.next_index
        """The index of the next append, if all appends before it are stored."""
        self.settled = places.end
        """The appends before this point are confirmed as a whole."""

    def append(self, records: Sequence[Record], publish_time_ms: int) -> None:
        """Hand over the entries of one append."""
        left = len(records)
        for entries, rows, is_batch in records:
            left -= 1
            sizes = [size_of(message) for message in entries]
            self._sent.append(_SentEntry(sizes, rows, is_batch, publish_time_ms, ends_append=not left))
            self.writer.append(entries)
            self.next_number += len(entries)
            self.next_index += len(entries) * rows

    def confirm(self, confirmed: Confirmed, now_ms: int) -> None:
        """Record that receipts confirm this number of the oldest entries. `tell` must follow."""
        left, (ledger_id, entry_id) = confirmed.entries, confirmed.first[:2]
        while left:
            sent, end = self._sent[0], self._places.end
            entries = min(left, len(sent.sizes_bytes))
            left -= entries
            entry_id += entries
            _, number, index, _ = end.standing
            to = end.after(
                TermStanding(self.owner, number + entries, index + entries * sent.rows),
                MessageId(ledger_id, entry_id - 1),
                sent.publish_time_ms,
                now_ms,
                sum(sent.sizes_bytes[:entries]),
            )
            runs = self._places.advance(to, begins_record=sent.is_whole, is_batch=sent.is_batch)
            self._take(entries, runs, to)

    def found(self, several: Sequence[FoundEntry]) -> None:
        """Record that the oldest entries were read. `tell` must follow."""
        for one in several:
            self._take(1, one.runs, one.after)

    def tell(self) -> None:
        """Settle the appends that are confirmed as a whole."""
        confirmed, self._confirmed = self._confirmed, []
        if confirmed:
            self._settle(Outcome(confirmed))

    def fail(self, why: str) -> None:
        """Report that the outcome of the rest is unknown. Nothing more is taken."""
        if not self.failed:
            self.failed = True
            self._settle(Outcome([], Failure.UNKNOWN, why))

    def _take(self, entries: int, runs: Runs, after: Point) -> None:
        """Confirm this number of entries of the oldest record. If they are the last of its append, the append is
        confirmed."""
        for run in runs:
            last = self._runs[-1] if self._runs else None
            if last and run.batch_index < 0 and last.message_id(last.rows) == run.message_id(0):
                self._runs[-1] = last._replace(rows=last.rows + run.rows)
            else:
                self._runs.append(run)
        sent = self._sent[0]
        del sent.sizes_bytes[:entries]
        sent.is_whole = False
        if sent.sizes_bytes:
            return
        self._sent.popleft()
        if sent.ends_append:
            self._confirmed.append(tuple(self._runs))
            self._runs = []
            self.settled = after
