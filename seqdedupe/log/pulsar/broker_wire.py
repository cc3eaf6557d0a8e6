"""The brokers of a cluster over Pulsar's protocol, without Pulsar's client. `Brokers` connects to them, and asks for
their limit. `open_producer` opens the exclusive producer of a topic, and `open_reader` opens a reader. Each uses a
separate connection, so that a reader whose entries are not read does not delay receipts.

No entry is sent twice. If an entry has no receipt when the producer ends, the entry's outcome is unknown until the
topic is read.
"""

import asyncio
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from seqdedupe.entry_properties import ROWS
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.log.pulsar.entries import (
    INVALID,
    MAX_ENTRY_BYTES,
    EntryFormat,
    PulsarEntry,
    PulsarMessage,
    content_bytes,
)
from seqdedupe.log.pulsar.native import native_entry, single_entry, single_wire_entry, stock_entry, wire_entry
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.pulsar_wire.connection import (
    MAX_OUTSTANDING,
    Connection,
    EntryProducer,
    StoredEntry,
    WirePlace,
    WireReader,
    connect,
    connect_to_owner,
)
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, MessageMetadata, Schema, ServerError

logger = logging.getLogger("seqdedupe.log")

OPEN_SECONDS = 10.0
"""The time for which the opening of a reader, or the question for the topic's end, is tried again: a topic that is
unloaded refuses for a moment."""
PAUSE_SECONDS = 0.1
MAX_SINGLE_OUTSTANDING = 1_000
"""The most entries of one message that have no receipt. A broker reads no more from a connection with this number."""
LARGE_BYTES = 128 * 1024
"""Compressing an entry above this size takes too long for the event loop."""
READ_STEP_ENTRIES = 100
READ_STEP_BYTES = 256 * 1024
"""A step takes no more entries after this number of payload bytes: a few milliseconds of the event loop."""

FRESH_SECONDS = 30.0
"""The time for which a limit is reused. The topics of a sidecar ask each minute, and a broker answers the same to
all."""

_FOREVER = ("PULSAR_FORBIDS", "TOPIC_NOT_FOUND", "INVALID_CONFIGURATION")

Decode = Callable[[MessageId, WireEntry, MessageMetadata], PulsarEntry]
"""Returns the entry at a place."""

Answer = Callable[[int, SeqdedupeError | None, MessageId], None]
"""Takes the number of a sent entry, and its failure or its place."""


class Brokers:
    """The brokers of a cluster: `service_url` has one host or several, `pulsar://one:6650,two:6650`.

    A separate connection asks for the brokers' limit of an entry, and does nothing else.
    """

    def __init__(
        self, service_url: str, token: Callable[[], str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Set the brokers. `token` is as in `AdminUrl`."""
        self._service_url = service_url
        self._token = token
        self._tls = tls
        self._asking = asyncio.Lock()
        self._answer = MAX_ENTRY_BYTES
        self._asked_at = -FRESH_SECONDS

    async def max_entry_bytes(self) -> int:
        """Return the maximum size that a broker accepts, as the broker states it. The answer is cached for a short
        time.

        Raises LOG_UNREADABLE, PULSAR_FORBIDS.
        """
        async with self._asking:
            if time.monotonic() - self._asked_at >= FRESH_SECONDS:
                self._answer = await self._first_answer()
                self._asked_at = time.monotonic()
            return self._answer

    async def connection(self, topic: str) -> Connection:
        """Return a new connection to the topic's broker. Raises LOG_REFUSED, PULSAR_FORBIDS, TOPIC_NOT_FOUND, and the
        errors of the token."""
        return await connect_to_owner(self._service_url, topic, token=self._token, tls=self._tls)

    async def _first_answer(self) -> int:
        """Return the answer of the first host that gives one."""
        try:
            connection = await connect(self._service_url, token=self._token, tls=self._tls)
        except SeqdedupeError as e:
            if e.reason == "PULSAR_FORBIDS":
                raise
            raise error("LOG_UNREADABLE", f"Pulsar does not say how large an entry may be: {e.message}") from e
        await connection.close()
        return connection.max_message_bytes


class ExclusiveProducer:
    """The exclusive producer of a topic, for `writer.EntryWriter`. The answers are the receipts, in order. The last
    answer is the failure that ended the producer, with the number -1.

    A thread compresses large entries. Later entries wait for the thread, so that entries keep their order.
    """

    def __init__(self, connection: Connection, name: str, entry_format: EntryFormat) -> None:
        self._connection = connection
        self._name = name
        self._is_native = entry_format is EntryFormat.NATIVE
        self.max_in_flight = MAX_SINGLE_OUTSTANDING if entry_format is EntryFormat.PLAIN else MAX_OUTSTANDING
        """The most entries without a receipt."""
        self._producer: EntryProducer | None = None
        self._answer: Answer | None = None
        self._ended: SeqdedupeError | None = None
        self._waiting: deque[tuple[PulsarMessage, int]] = deque()
        self._encoding: asyncio.Task[None] | None = None

    @property
    def last_sequence_id(self) -> int:
        """What the broker's deduplication knows of the producer's name."""
        return self._producer.last_sequence_id if self._producer is not None else -1

    async def open(self, topic: str, properties: Mapping[str, str], schema: Schema | None) -> None:
        """Take the topic. Raises the errors of `Connection.producer`."""
        self._producer = await self._connection.producer(
            topic,
            self._receive,
            self._end,
            name=self._name,
            properties=properties,
            schema=schema,
            max_outstanding=self.max_in_flight,
        )

    def send(self, message: PulsarMessage, number: int, answer: Answer) -> None:
        """Send an entry, at most once."""
        self._answer = answer
        if self._producer is None or self._ended is not None:
            answer(-1, self._ended, NOWHERE)
            return
        if self._waiting or _is_large(message):
            self._waiting.append((message, number))
            if len(self._waiting) == 1:
                self._encoding = asyncio.get_running_loop().create_task(self._send_waiting())
            return
        try:
            self._send(message, number, self._entry(message, number))
        except SeqdedupeError as e:
            self._end(e, ())

    def _entry(self, message: PulsarMessage, number: int) -> WireEntry:
        if self._is_native:
            return message.wire or wire_entry(message, self._name, number, message.compression)
        version = self._producer.schema_version if self._producer is not None else b""
        return single_wire_entry(message, self._name, number, time.time_ns() // 1_000_000, version)

    def _send(self, message: PulsarMessage, number: int, entry: WireEntry) -> None:
        if self._producer is not None:
            rows = int(message.properties.get(ROWS, 1)) if self._is_native else 1
            self._producer.send(number, entry, rows=rows)

    async def _send_waiting(self) -> None:
        """Send the waiting entries in order."""
        try:
            while self._waiting:
                message, number = self._waiting[0]
                if _is_large(message):
                    entry = await asyncio.to_thread(self._entry, message, number)
                else:
                    entry = self._entry(message, number)
                self._send(message, number, entry)
                self._waiting.popleft()
        except SeqdedupeError as e:
            self._end(e, ())
        except Exception as e:
            logger.exception("an entry could not be encoded")
            self._end(error("INTERNAL", f"an entry could not be encoded: {type(e).__name__}"), ())

    def _receive(self, number: int, place: WirePlace) -> None:
        if self._answer is not None:
            self._answer(number, None, MessageId(*place))

    def _end(self, why: SeqdedupeError, _: tuple[int, ...]) -> None:
        if self._ended is None:
            self._ended = why
            if self._answer is not None:
                self._answer(-1, why, NOWHERE)

    async def close(self) -> None:
        """Release the topic. If the broker does not answer, this waits for the connection's time-out."""
        self._answer = None
        if self._encoding is not None:
            self._encoding.cancel()
        try:
            with suppress(SeqdedupeError):
                if self._producer is not None:
                    await self._producer.close()
        finally:
            # Also if this is cancelled: otherwise nobody closes the connection, which answers the broker's pings.
            await self._connection.close()


def _is_large(message: PulsarMessage) -> bool:
    """Return whether encoding the entry takes long."""
    return message.wire is None and message.compression != NONE and content_bytes(message) > LARGE_BYTES


async def open_producer(
    brokers: Brokers,
    topic: str,
    name: str,
    properties: Mapping[str, str],
    entry_format: EntryFormat,
    schema: Schema | None = None,
) -> ExclusiveProducer | None:
    """Open an exclusive producer with this name, if the topic has no other producer. Return None if the name is in use.
    A topic with a schema needs a producer with this schema.

    Raises NOT_OWNER, PULSAR_FORBIDS, LOG_REFUSED. If this is cancelled, the producer is closed.
    """
    try:
        connection = await brokers.connection(topic)
        producer = ExclusiveProducer(connection, name, entry_format)
        try:
            await producer.open(topic, properties, schema)
        except BaseException:
            await connection.close()
            raise
    except SeqdedupeError as e:
        if e.reason == "NOT_OWNER":
            if e.numbers.get("server_error") == str(ServerError.ProducerBusy):
                return None
            raise error("NOT_OWNER", f"another writer holds {topic} ({e.message})") from e
        if e.reason == "PULSAR_FORBIDS":
            raise error("PULSAR_FORBIDS", f"writing to {topic}: {e.message}") from e
        raise error("LOG_REFUSED", f"{topic} cannot be opened for writing: {e.message}") from e
    return producer


class TopicReader:
    """Reads from one place on, until it is closed. All methods are called on one event loop. If the connection ends,
    the reader continues over a new connection.

    Entries that Pulsar has trimmed are skipped silently. After a broken connection or a broker's crash, entries may be
    read again. So the caller must check numbers and indexes (`Terms`).
    """

    def __init__(
        self, open_at: Callable[[MessageId | None], Awaitable[WireReader]], topic: str, decode: Decode
    ) -> None:
        """Make the reader, for `open_reader`."""
        self._open_at = open_at
        self._decode = decode
        self._topic = topic
        self._start: MessageId | None = None
        self._reader: WireReader | None = None
        self._seen = NOWHERE
        """The newest entry that was read."""
        self._next: StoredEntry | None = None
        """An entry that has come, and was not read yet."""
        self._is_closed = False

    async def open(self, start: MessageId | None) -> None:
        """Open it at an entry, that one included. Raises LOG_UNREADABLE."""
        self._start = start
        async with asyncio.timeout(OPEN_SECONDS) as limit:
            await self._opened(limit)

    async def read(self) -> list[PulsarEntry]:
        """Return the next entries, at least one. Wait for the first entry. If this is cancelled, no entry is lost.

        An invalid entry of a sidecar has the property INVALID. Raises LOG_UNREADABLE, NEWER_FORMAT.
        """
        while self._next is None:
            reader = await self._opened(None)
            try:
                self._next = await reader.next()
            except SeqdedupeError as e:
                await self._give_up(reader, e)
        entries: list[PulsarEntry] = []
        size_bytes = 0
        while self._next is not None and len(entries) < READ_STEP_ENTRIES and size_bytes < READ_STEP_BYTES:
            stored = self._next
            place = MessageId(*stored.place)
            try:
                entries.append(self._decode(place, stored.entry, stored.metadata))
            except DamagedError as e:
                if e.reason == "LOG_DAMAGED":
                    # Before the first marker, anybody may have written it: only the entries before it tell.
                    entries.append(PulsarEntry(PulsarMessage(b"", {INVALID: e.message}), place, 0))
                elif not entries:
                    raise
                else:
                    # What is before it can be read.
                    break
            self._seen, self._next = max(self._seen, place), None
            size_bytes += content_bytes(entries[-1].message)
            try:
                self._next = self._reader.next_now() if self._reader is not None else None
            except SeqdedupeError:
                # It shows in the next wait.
                break
        return entries

    async def is_at_end(self) -> bool:
        """Return whether there are no more entries now. Do not call this while a caller waits in `read`. Raises
        LOG_UNREADABLE."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._is_at_end()
        except TimeoutError as e:
            raise self._silent() from e

    async def _is_at_end(self) -> bool:
        while True:
            reader = await self._opened(None)
            try:
                (last, before), seen = await reader.last(), self._seen
            except SeqdedupeError as e:
                await self._give_up(reader, e)
                continue
            if self._next is not None:
                return False
            if last.entry_id < 0:
                return True
            place = MessageId(*last)
            # Before it has read anything: what was trimmed does not come.
            return seen >= place if seen != NOWHERE else before is not None and MessageId(*before) >= place

    async def close(self) -> None:
        """Close the reader. A caller that waits in `read` gets LOG_UNREADABLE."""
        self._is_closed = True
        if self._reader is not None:
            await self._lose(self._reader)

    async def _opened(self, limit: asyncio.Timeout | None) -> WireReader:
        """Return the reader. If the reader has ended, open a new reader, and try again until the caller has no time
        left."""
        while self._reader is None:
            if self._is_closed:
                raise self._unreadable("its reader was closed")
            try:
                reader = await self._open_at(self._seen if self._seen != NOWHERE else self._start)
            except SeqdedupeError as e:
                if e.reason in _FOREVER or (limit is not None and self._is_late(limit)):
                    raise self._unreadable(e.message) from e
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            await self._use(reader)
        return self._reader

    async def _use(self, reader: WireReader) -> None:
        """Take a reader that has opened. If this was closed meanwhile, nobody else closes the reader."""
        self._reader = reader
        if self._is_closed:
            await self._lose(reader)

    def _is_late(self, limit: asyncio.Timeout) -> bool:
        when = limit.when()
        return when is not None and asyncio.get_running_loop().time() + 2 * PAUSE_SECONDS > when

    async def _give_up(self, reader: WireReader, why: SeqdedupeError) -> None:
        """Prepare for a new reader. Raises LOG_UNREADABLE if a new reader would fail too: at a malformed entry, or at
        an entry that is larger than the broker's present limit."""
        await self._lose(reader)
        if why.reason not in ("LOG_REFUSED", "LOG_UNREADABLE"):
            raise self._unreadable(why.message)
        await asyncio.sleep(PAUSE_SECONDS)

    async def _lose(self, reader: WireReader) -> None:
        if self._reader is reader:
            self._reader = None
        await reader.connection.close()

    def _silent(self) -> SeqdedupeError:
        return self._unreadable(f"no broker has answered for {OPEN_SECONDS:.0f} s")

    def _unreadable(self, why: str) -> SeqdedupeError:
        return error(
            "LOG_UNREADABLE",
            f"{self._topic} cannot be read: {why}",
            hint="See whether the Pulsar cluster serves, and the sidecar may read the topic. It is tried again.",
        )


async def open_reader(
    brokers: Brokers, topic: str, start: MessageId | None, entry_format: EntryFormat | None
) -> TopicReader:
    """Return a reader of a topic of this format; None: no sidecar writes the topic. Its first entry is the entry at
    `start`. If that entry was trimmed, or `start` is None, the reader begins with the first stored entry. Raises
    LOG_UNREADABLE."""

    async def open_at(place: MessageId | None) -> WireReader:
        connection = await brokers.connection(topic)
        try:
            name = f"reader-{os.urandom(5).hex()}"
            return await connection.reader(topic, name, None if place is None else WirePlace(*place[:2]))
        except BaseException:
            await connection.close()
            raise

    decode = {None: stock_entry, EntryFormat.NATIVE: native_entry}.get(entry_format, single_entry)
    reader = TopicReader(open_at, topic, decode)
    try:
        await reader.open(start)
    except TimeoutError as e:
        raise reader._silent() from e
    return reader
