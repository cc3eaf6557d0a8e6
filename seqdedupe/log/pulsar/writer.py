"""The exclusive producer of a topic: takes entries, and returns their places, in order and in bulk."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import _pulsar
import pulsar
import pulsar.asyncio

from seqdedupe import batch as batches
from seqdedupe.entry_properties import DELIVER_AT, EntryOwner, EntryPlace, deliver_at
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Failure, Outcome, Run, Runs
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
from seqdedupe.log.pulsar.native_topic import Connects, NativeProducer, open_native_producer
from seqdedupe.log.pulsar.places import Places, Point, size_of
from seqdedupe.log.pulsar.pulsar_client import keep_state, name_of, opened, told
from seqdedupe.log.pulsar.terms import Receipts, TermStanding
from seqdedupe.log.pulsar.wholes import Schema
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import SentEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType

# -- Which appends of an owner are confirmed, judged by Pulsar's receipts. No I/O.


class Confirmed(NamedTuple):
    """The number of the oldest appends that are confirmed. They follow each other in one ledger."""

    entries: int
    first: MessageId


class Unsettled:
    """The appends of one opening that are not confirmed yet, in order.

    A receipt confirms its append only if `Receipts` says so. It does not at the first append, and after a gap, a new
    ledger or a receipt without a place. Then all later appends wait until the topic was read up to that append.
    """

    def __init__(self) -> None:
        self._rule: Receipts | None = None
        self._receipts: deque[MessageId] = deque()
        self._read_ahead = 0

    def add(self, receipt: MessageId) -> None:
        """Add the receipt of the append after the last one that had a receipt."""
        if self._read_ahead:
            self._read_ahead -= 1
        else:
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
        """After `confirm`: the receipt of the oldest append, which proves nothing; None if there is none."""
        return self._receipts[0] if self._receipts else None

    def was_read(self, message_ids: Sequence[MessageId]) -> None:
        """Record that the topic was read: this number of the oldest appends are valid and have these IDs. Some may have
        no receipt."""
        for _ in message_ids:
            if self._receipts:
                self._receipts.popleft()
            else:
                self._read_ahead += 1
        last = message_ids[-1]
        if self._rule is None:
            self._rule = Receipts(last)
        else:
            self._rule.was_read(last)


# -- From appends to entries of their topic, in the topic's format.

_WIDEST_NUMBER = 2**62
_WIDEST_OWNER = EntryOwner(_WIDEST_NUMBER, _WIDEST_NUMBER, 2**64 - 1)


class Record(NamedTuple):
    """One stored record: the rows of a batch with an entry each, or one entry for all of them."""

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
    """Return the records of a batch. Its first entry has this number, its first row this index.

    Native entries have this compression. If a stock producer has sent the rows, they keep its form: its compression,
    and its payload if all of its rows are in the batch. Raises MESSAGE_TOO_LARGE if a record does not fit into an entry
    of `limit_bytes`.
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
    """Raise MESSAGE_TOO_LARGE for a batch that a broker would refuse, for any owner of the topic."""
    if len(batch) > surely_taken_bytes(limit_bytes):
        part = encoded_part(batches.decode(batch))
        records_of_batch(settings, _WIDEST_OWNER, _WIDEST_NUMBER, _WIDEST_NUMBER, 0, part, limit_bytes)


RESERVED = "\x1f"
"""A control character, which no name of a producer that publishes has. Pulsar's deduplication takes the true names in
native entries for those of its producers: none may be that of the sidecar's own."""
PRODUCER_NAMES = 8
"""The number of names that an instance has for the producers of a topic. A name is busy while its old producer has
sends pending."""
MAX_IN_FLIGHT_ENTRIES = 5_000
MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
SEND_TIMEOUT_SECONDS = 30.0
"""Without any answer for this time, the outcome of the appends in flight is unknown."""
BUSY_ENTRIES = 64
BUSY_PAUSE_SECONDS = 0.001
"""With BUSY_ENTRIES in flight, answers are taken at this interval; otherwise each one wakes the event loop."""
COUNTER_BITS = 32
"""The counter bits of a sequence ID. An opening that exceeds them continues with the IDs of the next opening number.
That number belongs to a time one second later, and by then long past."""

_OK = pulsar.Result.Ok.value
"""Comparing the client's own results takes four times as long."""
_FORBIDDEN = (pulsar.Result.AuthenticationError, pulsar.Result.AuthorizationError)

ClaimOpening = Callable[[int], Awaitable[int]]
"""Takes an opening number that Pulsar knows. Returns a number above it and above all that it ever returned; it is
durable."""


class SettledEntry(NamedTuple):
    """The knowledge about the oldest unsettled appends."""

    confirmed: Confirmed | None
    """The further appends that are stored and valid."""
    doubtful: MessageId | None = None
    """The receipt of the next append, if it proves nothing. The caller must read the topic up to it and call
    `was_read`. Until then nothing more is confirmed. (-1, -1) means no place: Pulsar's deduplication has seen the entry
    before, which may be stored or have failed."""
    failure: str | None = None
    """Set once, and last: why the outcome of all others is unknown. Opening again and reading tells."""


class ClientProducer:
    """A producer of Pulsar's client. It sends all entries in flight again when it reconnects. So Pulsar's own
    deduplication must be in force for the topic."""

    max_in_flight = 2**31

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    @property
    def is_connected(self) -> bool:
        return bool(self._producer.is_connected())

    def send(self, message: PulsarMessage, number: int, answer: Callable[[int, Any, Any], None]) -> None:
        """Send an entry. `answer` is called once, on a thread of the client or here."""
        # The layer below the client's producer for event loops, which wakes the loop for every message.
        self._producer._producer.send_async(built(message, number), partial(answer, number))

    @staticmethod
    def outcome(result: Any, message_id: Any) -> MessageId | str:
        """Return the place of an answered entry, or why it failed."""
        if result.value != _OK:
            return f"Pulsar's client says {name_of(result)}"
        return MessageId(message_id.ledger_id(), message_id.entry_id())

    async def close(self) -> None:
        """Release the topic. If a broker does not answer, this waits for the client's operation time-out."""
        try:
            await self._producer.close()
        except pulsar.asyncio.PulsarException:
            # The broker has closed the producer, or will when the connection ends.
            return


class EntryWriter:
    """One opening of a topic for writing. All methods are called on one event loop.

    Sequence IDs rise over all openings of a name. This class decides nothing about what other writers
    may have done. A receipt that follows the last confirmed one proves that they wrote nothing between.
    """

    def __init__(
        self,
        producer: ClientProducer | NativeProducer,
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
        # Threads of the client fill this; the event loop empties it.
        self._answers: deque[tuple[int, Any, Any]] = deque()
        self._is_woken = False
        self._next_answer = self._next_id
        self._last_answer_time = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the producer is connected now. A producer that lost the topic to another writer never is again."""
        return self._producer.is_connected

    def append(self, messages: Sequence[PulsarMessage]) -> None:
        """Hand over entries. Returns at once; entries above the limits in flight wait here.

        After a failure nothing more is sent: later entries have failed with the others.
        """
        if self._ended:
            return
        self._waiting.extend(messages)
        self._send()

    def was_read(self, message_ids: Sequence[MessageId]) -> None:
        """Record that the topic was read and judged: this number of the oldest unsettled appends are valid and have
        these IDs.

        The caller settles them accordingly; `settle` continues with the appends after them.
        """
        self._unsettled.was_read(message_ids)
        self._doubtful = None
        self._wake()

    async def close(self) -> None:
        """Release the topic; `settle` is not called any more. Appends in flight may be stored or not.

        If a broker does not answer, this waits for the time-out of the producer.
        """
        self._end()
        await self._producer.close()

    def _send(self) -> None:
        most_entries = min(MAX_IN_FLIGHT_ENTRIES, self._producer.max_in_flight)
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

    def _answer(self, number: int, result: Any, message_id: Any) -> None:
        # This runs on a thread of the client, on the event loop, or within `send`.
        keep_state()
        self._answers.append((number, result, message_id))
        if not self._is_woken:
            self._wake()

    def _wake(self) -> None:
        if self._is_woken or self._ended:
            return
        self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._take_answers)
        except RuntimeError:
            # The loop is closed: no caller waits for answers any more.
            self._ended = True

    def _take_answers(self) -> None:
        self._is_woken = False
        if self._ended:
            return
        failure = None
        if self._answers:
            self._last_answer_time = self._loop.time()
            if len(self._sent_bytes) >= BUSY_ENTRIES:
                # Waking the loop costs more than many answers.
                self._is_woken = True
                self._loop.call_later(BUSY_PAUSE_SECONDS, self._take_answers)
        while self._answers and failure is None:
            number, *answer = self._answers.popleft()
            outcome = self._producer.outcome(*answer)
            if isinstance(outcome, str):
                failure = outcome
            elif number != self._next_answer:
                failure = f"Pulsar answered {number} where {self._next_answer} was due"
            else:
                self._next_answer += 1
                self._in_flight_bytes -= self._sent_bytes.popleft()
                self._unsettled.add(outcome)
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
    client: pulsar.asyncio.Client,
    topic: str,
    instance_name: str,
    first_name_number: int,
    claim_opening: ClaimOpening,
    properties: Mapping[str, str],
    settle: Callable[[SettledEntry], None],
    schema: Schema | None = None,
    *,
    brokers: Connects | None = None,
) -> EntryWriter:
    """Take the topic, if no other writer has it. `schema` is the topic's schema; None if it has none. With `brokers`,
    its entries are native, and it has no schema.

    Producers are named `seqdedupe-<instance_name>-<name number>`, from the first number on. With native entries no
    other producer can have the name: it has a control character. That should be the number
    after the previous opening's. `properties` is visible to others in the topic's statistics. `settle` is called on the
    event loop, never from within `append` or `was_read`.

    Raises NOT_OWNER if there is another writer; PULSAR_FORBIDS; LOG_REFUSED for all that may pass. If this is
    cancelled, and the producer is still made, it is closed.
    """
    busy: SeqdedupeError | None = None
    for step in range(PRODUCER_NAMES):
        name_number = (first_name_number + step) % PRODUCER_NAMES
        name = f"seqdedupe-{instance_name}-{RESERVED if brokers is not None else ''}{name_number}"
        producer: ClientProducer | NativeProducer
        if brokers is not None:
            native = await open_native_producer(brokers, topic, name, properties)
            if native is None:
                busy = error("NOT_OWNER", f"another writer holds {topic}, under the name {name!r}")
                continue
            producer, last_sequence_id = native, native.last_sequence_id
        else:
            try:
                of_client = await _opened(client, topic, name, properties, schema)
            except pulsar.asyncio.PulsarException as e:
                if e.error() != pulsar.Result.ProducerBusy:
                    raise _refused(topic, e) from e
                busy = _refused(topic, e)
                continue
            producer, last_sequence_id = ClientProducer(of_client), of_client.last_sequence_id()
        try:
            opening = await claim_opening(max(last_sequence_id, 0) >> COUNTER_BITS)
        except BaseException:
            await producer.close()
            raise
        return EntryWriter(producer, name, name_number, opening, settle)
    raise busy or error("INTERNAL", "an instance has no producer names")


async def _opened(
    client: pulsar.asyncio.Client, topic: str, name: str, properties: Mapping[str, str], schema: Schema | None
) -> Any:
    opening = client.create_producer(
        topic,
        producer_name=name,
        schema=schema.of_client() if schema is not None else None,
        properties=dict(properties),
        # Never with fencing: if two producers fence each other at the same time, both get in.
        access_mode=pulsar.ProducerAccessMode.Exclusive,
        # In a batch Pulsar's deduplication knows the first sequence ID only.
        batching_enabled=False,
        max_pending_messages=MAX_IN_FLIGHT_ENTRIES,
        block_if_queue_full=False,
        # The client's own time-out begins again with every connection.
        send_timeout_millis=0,
    )
    return await opened(opening, lambda producer: producer._producer.close_async(lambda _: None))


def built(message: PulsarMessage, sequence_id: int) -> Any:
    """Return the message as Pulsar's client sends it."""
    builder = _pulsar.MessageBuilder()
    if message.payload is None:
        builder.set_null_value()
    else:
        builder.content(message.payload)
    builder.properties(message.properties)
    if message.key:
        builder.partition_key(message.key)
    if message.event_time_ms:
        builder.event_timestamp(message.event_time_ms)
    if time_ms := deliver_at(message.properties.get(DELIVER_AT, "")):
        builder.deliver_at(time_ms)
    builder.sequence_id(sequence_id)
    return builder.build()


def _refused(topic: str, failure: pulsar.asyncio.PulsarException) -> SeqdedupeError:
    result = failure.error()
    if result in (pulsar.Result.ProducerFenced, pulsar.Result.ProducerBusy):
        return error("NOT_OWNER", f"another writer holds {topic} ({result.name})")
    if result in _FORBIDDEN:
        return error("PULSAR_FORBIDS", f"writing to {topic}: {told(failure)}")
    return error("LOG_REFUSED", f"{topic} cannot be opened for writing: Pulsar's client says {told(failure)}")


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
    """The appends that an owner has in flight, from its marker on. `settle` receives their outcomes, until a
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
