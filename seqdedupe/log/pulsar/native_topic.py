"""A topic of native entries over Pulsar's protocol: its exclusive producer, and its readers. Each has a connection of
its own: a reader that is not read must not hold up receipts.

Nothing is sent twice. What has no receipt when a producer ends has an unknown outcome, which reading the topic settles.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

from seqdedupe.entry_properties import ROWS
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.log.pulsar.entries import INVALID, PulsarEntry, PulsarMessage, content_bytes
from seqdedupe.log.pulsar.native import native_entry, wire_entry
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.pulsar_wire.connection import (
    MAX_OUTSTANDING,
    Connection,
    EntryProducer,
    StoredEntry,
    WirePlace,
    WireReader,
)
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, ServerError

logger = logging.getLogger("seqdedupe.log")

OPEN_SECONDS = 10.0
"""The time for which the opening of a reader, or the question for the topic's end, is tried again: a topic that is
unloaded refuses for a moment."""
PAUSE_SECONDS = 0.1
LARGE_BYTES = 128 * 1024
"""Compressing an entry above this size takes too long for the event loop."""
READ_STEP_ENTRIES = 100
READ_STEP_BYTES = 256 * 1024
"""A step takes no more entries after this number of payload bytes: a few milliseconds of the event loop."""

_FOREVER = ("PULSAR_FORBIDS", "TOPIC_NOT_FOUND", "INVALID_CONFIGURATION")

Answer = Callable[[int, SeqdedupeError | None, MessageId], None]
"""Takes the number of a sent entry, and its failure or its place."""


class Connects(Protocol):
    """Connects to the brokers of a cluster."""

    async def connection(self, topic: str) -> Connection:
        """Return a new connection to the topic's broker. Raises LOG_REFUSED, PULSAR_FORBIDS, TOPIC_NOT_FOUND."""


class NativeProducer:
    """The exclusive producer of a topic, for `writer.EntryWriter`. The answers are the receipts, in order; then, once,
    the failure that has ended the producer, with the number -1.

    Large entries are compressed by a thread, and those after them wait for it: entries keep their order.
    """

    max_in_flight = MAX_OUTSTANDING

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._producer: EntryProducer | None = None
        self._answer: Answer | None = None
        self._ended: SeqdedupeError | None = None
        self._waiting: deque[tuple[PulsarMessage, int]] = deque()
        self._encoding: asyncio.Task[None] | None = None

    @property
    def last_sequence_id(self) -> int:
        """What the broker's deduplication knows of the producer's name."""
        return self._producer.last_sequence_id if self._producer is not None else -1

    @property
    def is_connected(self) -> bool:
        return self._ended is None

    async def open(self, topic: str, properties: Mapping[str, str]) -> None:
        """Take the topic. Raises the errors of `Connection.producer`."""
        self._producer = await self._connection.producer(
            topic, self._receive, self._end, name=self._name, properties=properties
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
        return message.wire or wire_entry(message, self._name, number, message.compression)

    def _send(self, message: PulsarMessage, number: int, entry: WireEntry) -> None:
        if self._producer is not None:
            self._producer.send(number, entry, rows=int(message.properties.get(ROWS, 1)))

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

    @staticmethod
    def outcome(failure: SeqdedupeError | None, place: MessageId) -> MessageId | str:
        """Return the place of an answered entry, or why the producer has ended."""
        return place if failure is None else failure.message

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


async def open_native_producer(
    brokers: Connects, topic: str, name: str, properties: Mapping[str, str]
) -> NativeProducer | None:
    """Take the topic under this name, if no other producer has it; return None if the name is in use.

    Raises NOT_OWNER, PULSAR_FORBIDS, LOG_REFUSED. If this is cancelled, the producer is closed.
    """
    try:
        connection = await brokers.connection(topic)
        producer = NativeProducer(connection, name)
        try:
            await producer.open(topic, properties)
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


class NativeReader:
    """Reads from one place on, as `reader.EntryReader` does. If its connection ends, it goes on over another one, and
    may read entries again."""

    def __init__(self, open_at: Callable[[MessageId | None], Awaitable[WireReader]], topic: str) -> None:
        """Make the reader, for `open_native_reader`."""
        self._open_at = open_at
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
        """See `EntryReader.read`. An entry with an invalid field of ours has the property INVALID. Also raises
        NEWER_FORMAT."""
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
                entries.append(native_entry(place, stored.entry, stored.metadata))
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
            # Any failure shows in the next wait.
            with suppress(SeqdedupeError):
                self._next = self._reader.next_now() if self._reader is not None else None
        return entries

    async def is_at_end(self) -> bool:
        """See `EntryReader.is_at_end`."""
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
        """See `EntryReader.close`."""
        self._is_closed = True
        if self._reader is not None:
            await self._lose(self._reader)

    async def _opened(self, limit: asyncio.Timeout | None) -> WireReader:
        """Return the reader; open another one if it has ended. Tries again until the caller has no time left."""
        while self._reader is None:
            if self._is_closed:
                raise self._unreadable("its reader was closed")
            try:
                self._reader = await self._open_at(self._seen if self._seen != NOWHERE else self._start)
            except SeqdedupeError as e:
                if e.reason in _FOREVER or (limit is not None and self._is_late(limit)):
                    raise self._unreadable(e.message) from e
                await asyncio.sleep(PAUSE_SECONDS)
        return self._reader

    def _is_late(self, limit: asyncio.Timeout) -> bool:
        when = limit.when()
        return when is not None and asyncio.get_running_loop().time() + 2 * PAUSE_SECONDS > when

    async def _give_up(self, reader: WireReader, why: SeqdedupeError) -> None:
        """Prepare for another reader. Raises LOG_UNREADABLE if another one would fail too: at a malformed entry, or one
        that is larger than the broker's present limit."""
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


async def open_native_reader(brokers: Connects, topic: str, start: MessageId | None) -> NativeReader:
    """Return a reader whose first entry is the entry at `start`. If that entry was trimmed, or `start` is None, the
    reader begins with the first stored entry. Raises LOG_UNREADABLE."""

    async def open_at(place: MessageId | None) -> WireReader:
        connection = await brokers.connection(topic)
        try:
            name = f"reader-{os.urandom(5).hex()}"
            return await connection.reader(topic, name, None if place is None else WirePlace(*place[:2]))
        except BaseException:
            await connection.close()
            raise

    reader = NativeReader(open_at, topic)
    try:
        await reader.open(start)
    except TimeoutError as e:
        raise reader._silent() from e
    return reader
