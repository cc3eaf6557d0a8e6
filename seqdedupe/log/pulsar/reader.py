"""A topic's entries in their order, as they were and as they come."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pulsar
import pulsar.asyncio

from seqdedupe.entry_properties import ENTRY
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.client import told
from seqdedupe.log.pulsar.entries import Entry, Message, content_bytes
from seqdedupe.log.pulsar.unwanted import opened
from seqdedupe.message_id import MessageId

READ_STEP_ENTRIES = 500
"""So many are taken at once at most: a few milliseconds of the event loop."""
READ_STEP_BYTES = 256 * 1024
"""After payloads of so many no more are taken at once."""
OPEN_TIMEOUTS_SECONDS = (2.0, 4.0)
"""Opening one while its topic is unloaded ends with the client's own time-out; another one is opened at once."""
_AT_ONCE_MS = 0
_LEDGER, _ENTRY, _BATCH_SIZE, _FIRST_CHUNK = 1, 2, 6, 7
"""Fields of Pulsar's `MessageIdData`."""
_FIXED_SIZES = {1: 8, 5: 4}
"""The sizes of fields of these wire types of protobuf."""


class Reader:
    """Reads from one place on, for as long as it is wanted. Everything is called on one event loop.

    What Pulsar has trimmed it leaves out in silence, and after a broker's crash it may give entries again: whoever
    reads checks numbers and indexes (`Terms`).
    """

    def __init__(self, reader: Any) -> None:
        """For `open_reader`."""
        self._reader = reader
        self._next: asyncio.Future[Any] | None = None

    async def read(self) -> list[Entry]:
        """The next entries, at least one, for which it waits. Nothing is lost if this is cancelled.

        Raises LOG_UNREADABLE: then a new reader is needed.
        """
        # A message that comes when nobody waits any more would be gone.
        if self._next is None:
            self._next = asyncio.ensure_future(self._reader.read_next())
        try:
            message = await asyncio.shield(self._next)
        except pulsar.asyncio.PulsarException as e:
            self._next = None
            raise _unreadable(self._reader.topic(), e) from e
        self._next = None
        entries = [_entry(message._message)]
        size_bytes = 0
        while len(entries) < READ_STEP_ENTRIES and size_bytes < READ_STEP_BYTES:
            size_bytes += content_bytes(entries[-1].message)
            # What is below the client's reader for event loops, which wakes the loop for every message.
            try:
                entries.append(_entry(self._reader._reader.read_next(_AT_ONCE_MS)))
            except pulsar.PulsarException:
                # None is there yet; whatever else it is, the next waiting tells.
                break
        if len(entries) > 1 and entries[1].message_id < entries[0].message_id:
            # Pulsar's client gives an entry to who waits also while it puts the one before into its queue, if that was
            # taken in when nobody waited yet.
            entries[:2] = entries[1], entries[0]
        return entries

    async def is_at_end(self) -> bool:
        """Whether nothing more is there now. Not while somebody waits in `read`. Raises LOG_UNREADABLE."""
        try:
            has_more = await self._reader.has_message_available()
        except pulsar.asyncio.PulsarException as e:
            raise _unreadable(self._reader.topic(), e) from e
        # What somebody waited for, who was cancelled, may have come.
        return not (has_more or (self._next is not None and self._next.done()))

    async def close(self) -> None:
        """Who waits in `read` gets LOG_UNREADABLE."""
        # Else it was closed by the broker, or will be when the connection ends.
        with suppress(pulsar.asyncio.PulsarException):
            await self._reader.close()
        waiting = self._next
        if waiting is not None:
            await asyncio.wait([waiting])
            # Looked at, should nobody be waiting in `read`.
            waiting.exception()


async def open_reader(client: pulsar.asyncio.Client, topic: str, start: MessageId | None, queue_entries: int) -> Reader:
    """A reader whose first entry is the one at `start`, or the first one that is left: where that was trimmed, or None.

    So many entries are fetched ahead, whatever their size. Raises LOG_UNREADABLE.
    """
    place = pulsar.MessageId.earliest if start is None else pulsar.MessageId(-1, *start)
    try:
        for timeout_seconds in OPEN_TIMEOUTS_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    return Reader(await _opened(client, topic, place, queue_entries))
        return Reader(await _opened(client, topic, place, queue_entries))
    except pulsar.asyncio.PulsarException as e:
        raise _unreadable(topic, e) from e


async def _opened(client: pulsar.asyncio.Client, topic: str, place: pulsar.MessageId, queue_entries: int) -> Any:
    opening = client.create_reader(topic, place, receiver_queue_size=queue_entries, start_message_id_inclusive=True)
    return await opened(opening, lambda reader: reader._reader.close_async(lambda _: None))


def _entry(native: Any) -> Entry:
    place = native.message_id()
    properties = native.properties()
    message = Message(
        None if native.has_null_value() else native.data(),
        properties,
        native.partition_key(),
        native.event_timestamp(),
    )
    message_id = MessageId(place.ledger_id(), place.entry_id(), place.batch_index())
    if ENTRY in properties:
        return Entry(message, message_id, native.publish_timestamp())
    producer_name = native.producer_name()
    sequence_id = _sequence_id(native, producer_name)
    of_id = fields_of(place.serialize())
    return Entry(
        message,
        message_id,
        native.publish_timestamp(),
        producer_name,
        sequence_id,
        _batch_size(of_id) if message_id.batch_index >= 0 else 0,
        _ordering_key(native),
        native.int_schema_version(),
        _first_chunk(of_id),
    )


def _ordering_key(native: Any) -> bytes:
    """The client takes bytes for text, and fails where they are none."""
    try:
        text: str = native.ordering_key()
    except UnicodeDecodeError as e:
        return e.object
    return text.encode()


def _batch_size(of_id: Mapping[int, int | bytes]) -> int:
    """How many messages the batch has that one is of, by its ID: the client shows it nowhere else."""
    size = of_id.get(_BATCH_SIZE)
    if not isinstance(size, int):
        raise error("INTERNAL", f"Pulsar's client does not say of how many messages a batch is: {of_id}")
    return size


def _first_chunk(of_id: Mapping[int, int | bytes]) -> MessageId | None:
    first = of_id.get(_FIRST_CHUNK)
    if not isinstance(first, bytes):
        return None
    place = fields_of(first)
    return MessageId(int(place.get(_LEDGER, 0)), int(place.get(_ENTRY, 0)))


def fields_of(raw: bytes) -> dict[int, int | bytes]:
    """The fields of a protobuf message by their numbers; of one that is repeated, the last. Raises ValueError or
    IndexError for what is none."""
    fields: dict[int, int | bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        tag = varint()
        if tag & 7 == 0:
            fields[tag >> 3] = varint()
            continue
        size = varint() if tag & 7 == 2 else _FIXED_SIZES[tag & 7]
        fields[tag >> 3] = raw[at : at + size]
        at += size
    if at > len(raw):
        raise ValueError("a field ends after its message")
    return fields


def _sequence_id(native: Any, producer_name: str) -> int:
    """-1 if the client does not show it: it has no call for that, and prints it."""
    head = f"Message(prod={producer_name}, seq="
    text = str(native)
    digits = text[len(head) :].partition(",")[0]
    return int(digits) if text.startswith(head) and digits.isdecimal() else -1


def _unreadable(topic: str, failure: pulsar.asyncio.PulsarException) -> SeqdedupeError:
    return error(
        "LOG_UNREADABLE",
        f"{topic} cannot be read: Pulsar's client says {told(failure)}",
        hint="See whether the Pulsar cluster serves, and whether the sidecar may read the topic; it is tried again.",
    )
