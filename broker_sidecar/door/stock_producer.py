"""A stock producer: the producer's entries are converted to frames of the topic, and verdicts are converted to
receipts.

The door is the client that `PublishService` describes (publish.proto): the door opens a session for the producer's
name, sets the links, and numbers the frames. The door keeps no messages: the stock client keeps each message until the
receipt arrives.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from broker_sidecar.door.entry_batches import (
    ProducerSession,
    batches_of,
    decoded_bytes,
    is_followed,
    is_large,
    rows_to_store,
    sent_form,
)
from broker_sidecar.rpc import refusals
from broker_sidecar.services.publish_service import FRAME_BYTES
from broker_sidecar.streams import Stream, unasked
from seqdedupe.batch import Batch
from seqdedupe.core.rule import UNKNOWN
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import SentEntry
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandSend, MessageMetadata
from seqdedupe.topic.frame import Allowing, FrameReceipt, Refusal
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("broker_sidecar.door")

ENTRY_BYTES = 512
"""The memory of an entry that waits for its answer. The entry may wait behind an earlier entry in flight, even if no
message of its own is in flight."""

OF_ONE_MESSAGE = frozenset(
    {"INVALID_BATCH", "INVALID_REQUEST", "INVALID_SEQUENCE_ID", "MALFORMED_MESSAGE", "MESSAGE_TOO_LARGE"}
)
"""The reasons for which only one entry is refused, and the producer continues."""

_PASSES = frozenset({"INVALID_EPOCH", "PREDECESSOR_MISSING"})
"""Refusals that end when the producer is opened again."""

UNKNOWN_ID = MessageId(-1, -1, -1)

counted: Counter[str] = Counter()
"""The number of `producers` that were opened, and of `receipts`, since this process began."""


@dataclass(slots=True)
class PendingEntry:
    """An entry that the client has sent, and that has no receipt yet."""

    sequence_id: int
    highest_sequence_id: int
    rows: int = 0
    frames: int = 0
    """The frames without an answer."""
    batches: int = 0
    """The batches that the topic has judged or will judge."""
    is_admitted: bool = False
    message_id: MessageId = UNKNOWN_ID
    """The message ID for the receipt of the entry. UNKNOWN_ID if clients would compute wrong IDs of the entry's
    messages from this ID."""
    refused: SeqdedupeError | None = None
    is_silent: bool = False
    """Whether the entry gets no answer. The answer to a later entry then ends the producer."""


class StockProducer:
    """A producer of one connection, with a session in its topic.

    `answer` is called for each entry, in the order in which the client sent the entries. `on_end` is called once if the
    producer ends without a request of the client. The client must then open the producer again, and resend the messages
    without a receipt.
    """

    def __init__(
        self,
        topic: Topic,
        session: ProducerSession,
        persisted: int,
        stream: Stream,
        allowing: Allowing | None,
        answer: Callable[[PendingEntry], None],
        on_end: Callable[[SeqdedupeError], None],
        *,
        goes_on: bool,
        schema_version: bytes,
    ) -> None:
        """`goes_on` is true if the client continues to send entries after a refused entry. Otherwise `answer` ends the
        producer, and no entry after the refused entry may be stored. `schema_version` is the version of the producer's
        schema in the topic; empty if the producer has no schema."""
        self.topic = topic
        self.session = session
        self._last = persisted
        """The highest sequence ID that this session has sent, or that the topic had when it began."""
        self._stream = stream
        self._answer = answer
        self._on_end = on_end
        self._cache = topic.connect(self.fail)
        self._cache.allowing = allowing
        self._goes_on = goes_on
        self._schema_version = schema_version
        self._schema = topic.log.schema
        self._has_refused = False
        self._chunk_refused: SeqdedupeError | None = None
        """The reason why a chunked message is refused. Further chunks of this message will follow."""
        self._pending: deque[PendingEntry] = deque()
        self._number = 0
        self._settled = asyncio.Event()
        self.is_closed = False
        counted["producers"] += 1

    async def send(self, command: CommandSend, entry: WireEntry) -> None:
        """Publish an entry, in these steps:

        1. The rows of the entry are read. An entry that cannot be accepted is answered in its turn.
        2. The batches of the entry wait for room, one after the other. Meanwhile no more data is read from the client.
        3. The topic judges each batch. The answer is sent when the last batch has settled.

        Raises MALFORMED_MESSAGE if the entry's metadata are not valid Pulsar metadata.
        """
        if self._has_refused and not self._goes_on:
            return
        metadata = metadata_of(entry)
        share, size = self._stream.share, decoded_bytes(entry, metadata)
        await share.wait_for(ENTRY_BYTES + size)
        if self.is_closed:
            return
        if self._schema_version and self._schema is not None and self.topic.log.schema != self._schema:
            self.fail(error("LOG_REFUSED", f"topic {self.topic.name} now has another schema"))
            return
        pending = PendingEntry(command.sequence_id, command.highest_sequence_id)
        self._pending.append(pending)
        share.take(ENTRY_BYTES)
        share.has_read(size)
        try:
            await self._take(pending, entry, metadata)
        finally:
            share.has_read(0)

    async def _take(self, pending: PendingEntry, entry: WireEntry, metadata: MessageMetadata) -> None:
        try:
            if self._chunk_refused is not None and not is_followed(metadata):
                raise self._chunk_refused
            if is_large(entry, metadata):
                pending.rows, batches, sent = await asyncio.to_thread(self._batches, entry, metadata)
            else:
                pending.rows, batches, sent = self._batches(entry, metadata)  # 1
        except SeqdedupeError as e:
            batches, sent = [], None
            # The Go client waits forever if its producer ends before the client has sent the last chunk of a message.
            pending.is_silent = is_followed(metadata) and not self._goes_on
            if pending.is_silent:
                self._chunk_refused = without_traceback(e)
            else:
                pending.refused = without_traceback(e)
        for batch in batches:
            await self._admit(pending, batch.encode(), sent)  # 2, 3
            if self.is_closed:
                return
            if pending.refused is not None:
                break
            self._last = max(self._last, int(batch.sequence_ids[-1]))
        self._has_refused |= pending.refused is not None
        pending.is_admitted = True
        self._answer_all()

    def _batches(self, entry: WireEntry, metadata: MessageMetadata) -> tuple[int, list[Batch], SentEntry | None]:
        """Return the number of rows of an entry, the batches of these rows, and for a log of native entries the entry's
        form."""
        entry_format = self.topic.log.entry_format
        labels = entry_format == "native"
        version = None if labels else self._schema_version
        rows = rows_to_store(entry, metadata, version, delays=entry_format in ("plain", "native"))
        if not len(rows):
            return 0, [], None
        kept = metadata.schema_version if labels else b""
        judged = self.topic.applied.deduplication_enabled
        deliver_at = metadata.deliver_at_time
        batches = list(batches_of(rows, self.session, self._last, deliver_at, kept, deduplicates=judged))
        return len(rows), batches, sent_form(entry, metadata, rows, batches) if labels else None

    async def _admit(self, pending: PendingEntry, batch: bytes, sent: SentEntry | None) -> None:
        size = FRAME_BYTES + len(batch) + (len(sent.payload) if sent is not None else 0)
        share = self._stream.share
        limit = share.use.limits.bytes_in_flight
        # Waiting entries, including this entry, hold a little memory. So the caller's share never becomes empty, and an
        # entry larger than the share would wait forever. The limit prevents this.
        await share.wait_for(size if limit is None else min(size, limit // 2))
        await self.topic.flight.wait_for_room()
        if not self.is_closed:
            self._stream.moves()
            self._pass(pending, batch, sent, size)

    def _pass(self, pending: PendingEntry, batch: bytes, sent: SentEntry | None, size: int) -> None:
        """Pass a batch to the topic. Until the batch is answered, it uses `size` bytes of the stream's share."""
        # The rows and the payload are not kept for a second attempt, because a second attempt is rare.
        again = sent._replace(payload=b"", rows=None) if sent is not None else None
        self._stream.share.take(size)
        self._stream.frames_in_flight += 1
        pending.frames += 1
        pending.batches += 1
        self._number += 1

        def reply(answer: FrameReceipt | Refusal) -> None:
            try:
                take_answer(answer)
            except Exception as e:
                # Without an answer the client would wait forever.
                logger.exception("the door could not take an answer")
                self.fail(error("OUTCOME_UNKNOWN", f"the door could not take an answer: {type(e).__name__}"))

        def take_answer(answer: FrameReceipt | Refusal) -> None:
            verdicts = answer.verdicts if isinstance(answer, FrameReceipt) else None
            is_unknown = verdicts is not None and bool((verdicts == UNKNOWN).any())
            self._stream.frames_in_flight -= 1
            pending.frames -= 1
            if not is_unknown:
                self._stream.share.give_back(size)
            if isinstance(answer, Refusal):
                refusals[answer.error.reason] += 1
                self._refused(pending, answer.error)
            elif is_unknown:
                # A row whose copy is in flight was not appended. The outcome of the copy decides.
                pending.frames += 1
                unasked(self._again(pending, batch, again, size))
            else:
                self._learn(pending, answer)
            self._answer_all()

        self.topic.admit(batch, self._number, reply, self._cache, sent=sent)

    async def _again(self, pending: PendingEntry, batch: bytes, sent: SentEntry | None, size: int) -> None:
        try:
            await self.topic.all_settled()
        finally:
            self._stream.share.give_back(size)
        pending.frames -= 1
        if not self.is_closed:
            # This does not wait for room. Otherwise the answer to a later entry could find this entry settled during
            # the wait.
            self._pass(pending, batch, sent, FRAME_BYTES + len(batch))

    def _refused(self, pending: PendingEntry, e: SeqdedupeError) -> None:
        if e.reason in OF_ONE_MESSAGE and pending.batches == 1:
            pending.refused = without_traceback(e)
        else:
            # A part of the entry may be stored.
            self.fail(e)

    def _learn(self, pending: PendingEntry, receipt: FrameReceipt) -> None:
        """Record the message ID for the receipt of an entry, if the receipt can have one.

        The client numbers the messages of its batch within the ID in the receipt. Most logs store each message as an
        entry, so the client would compute wrong IDs from an ID for a batch. Pulsar's brokers also return no ID for an
        old entry.
        """
        if receipt.runs:
            run = receipt.runs[0]
            if pending.rows == 1 or (run.rows == pending.rows and run.batch_index == 0):
                pending.message_id = run.message_id(0)
        elif pending.rows == 1 and receipt.known_rows.size:
            columns = self.topic.log.known_message_ids(receipt.known_indexes[:1])
            pending.message_id = MessageId(*(int(column[0]) for column in columns))

    def _answer_all(self) -> None:
        """Answer the oldest entries that are settled, in order. Clients interpret a receipt out of order as a lost
        message."""
        while not self.is_closed and self._pending:
            oldest = self._pending[0]
            if oldest.frames or not oldest.is_admitted:
                return
            self._stream.share.give_back(ENTRY_BYTES)
            self._pending.popleft()
            if not oldest.is_silent:
                counted["receipts"] += oldest.refused is None
                self._answer(oldest)
        self._settled.set()

    async def settle(self) -> None:
        """Return when every entry has its answer, or the producer has ended."""
        while self._pending and not self.is_closed:
            self._settled.clear()
            await self._settled.wait()

    def fail(self, e: SeqdedupeError) -> None:
        """End the producer, because no further entry of the producer can be stored in the present session."""
        if not self.is_closed:
            self.close()
            self._on_end(e)

    def close(self) -> None:
        """End the producer. Entries without a receipt may or may not be stored, and get no receipt any more."""
        if not self.is_closed:
            self.is_closed = True
            self._stream.share.give_back(ENTRY_BYTES * len(self._pending))
            self._pending.clear()
            self._settled.set()
            self.topic.disconnect(self._cache)


def is_final(e: SeqdedupeError) -> bool:
    """Return whether a producer that ended with this error cannot be opened again."""
    return e.retry_delay_ms < 0 and e.reason not in _PASSES


def without_traceback(e: SeqdedupeError) -> SeqdedupeError:
    """Return an error without its traceback, so that the error can be kept. The traceback would keep the entry, of up
    to 5 MiB, in memory."""
    e.__traceback__ = e.__cause__ = e.__context__ = None
    return e
