"""Markers, control records and packed batches as entries of a Pulsar topic; rows that are an entry each are in `plain`.

No I/O, and nothing of Pulsar's client: `Message` is what it is given, `Entry` what it gives.
"""

import base64
import binascii
from enum import Enum
from typing import NamedTuple

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import Batch
from seqdedupe.entry_properties import (
    ADDRESS,
    BATCH,
    CONTROL,
    CONTROL_BASE64,
    ENTRY,
    FORMAT,
    KIND,
    MARKER,
    MODE,
    PARTITIONS,
    ROWS,
    SCHEMA_VERSION,
    TOKEN,
    VERSION,
    Owner,
    Place,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.columns import COLUMNS_END, PLACES
from seqdedupe.format.headers import BATCH_TAG, HEADER_BYTES, TOKEN_BYTES, header, ownership_of
from seqdedupe.format.layout import layout_columns
from seqdedupe.format.tag import NO_KEY
from seqdedupe.message_id import MessageId

MAX_ENTRY_BYTES = 5 * 1024 * 1024
"""The `maxMessageSize` of a broker, as it is delivered: of payload, key, properties and all that the client adds.
What a broker and a topic really take, `limits` finds out."""
_CLIENT_BYTES = 1024
"""What the client adds to an entry at most: the name of its producer, IDs, times."""
_PROPERTY_BYTES = 16
"""What it adds to a property."""
_SLACK_BYTES = 16 * 1024
"""More than our own properties have, if the producer's name is left out."""

NOWHERE = MessageId(-1, -1)
"""Of no entry, and before them all: what a receipt says that proves nothing."""


class Message(NamedTuple):
    """A Pulsar message: what it is handed over as, and what is read of it however often it was sent."""

    payload: bytes | None
    """None is Pulsar's null value."""
    properties: dict[str, str]
    key: str = ""
    """The partition key; empty is none."""
    event_time_ms: int = 0
    """0 is none."""


class Entry(NamedTuple):
    """A message as a topic holds it."""

    message: Message
    message_id: MessageId
    publish_time_ms: int
    """By the clock of the client that sent it."""
    producer_name: str = ""
    """As Pulsar has it. Nobody asks for this and what follows where the entry is ours."""
    sequence_id: int = -1
    """As Pulsar has it; -1 where the client does not show it."""
    of_batch: int = 0
    """How many messages Pulsar's entry has, if it is a batch that its client made."""
    ordering_key: bytes = b""
    """Empty is none."""
    schema_version: int = -1
    """That of the schema which the message was made by; -1 is none."""
    first_chunk: MessageId | None = None
    """The entry in which a message of several entries begins; it ends in that of `message_id`."""


class EntryFormat(Enum):
    """How messages stand in the topic. Chosen when it is created, for good."""

    PLAIN = "plain"
    """Each is an entry, which every consumer can read."""
    PACKED = "packed"
    """A batch is an entry."""


class Settings(NamedTuple):
    """What every marker says of its topic and its owner."""

    format: EntryFormat
    mode: str
    """The deduplication mode: SEQUENCE_ID."""
    partitions: int
    """How many the topic was created with, of which this is one; 0 if it is not partitioned."""
    address: str
    """Where the owner can be reached."""
    version: int = VERSION
    """Of the format."""


class Marker(NamedTuple):
    """The start of an ownership."""

    term: int
    token: bytes
    settings: Settings


class Part(NamedTuple):
    """A batch in its canonical encoding."""

    encoded: bytes
    rows: int
    column_bytes: int


def marker(incarnation: int, term: int, token: bytes, settings: Settings, known_index: int = -1) -> Message:
    """The entry with which an ownership begins. Its number is 0. Its index is that of the next message as far as its
    writer knows the topic: the true one is not below it."""
    return Message(
        b"" if settings.version < SCHEMA_VERSION else None,
        {
            ENTRY: str(Place(Owner(incarnation, term, ownership_of(token)), 0, known_index, settings.version)),
            KIND: MARKER,
            TOKEN: token.hex(),
            FORMAT: settings.format.value,
            MODE: settings.mode,
            PARTITIONS: str(settings.partitions),
            ADDRESS: settings.address,
        },
    )


def control(
    owner: Owner,
    number: int,
    next_index: int,
    body: bytes,
    limit_bytes: int = MAX_ENTRY_BYTES,
    version: int = VERSION,
) -> Message:
    """The entry of a control record, an encoded `Control`. Raises MESSAGE_TOO_LARGE."""
    properties = {ENTRY: str(Place(owner, number, next_index, version)), KIND: CONTROL}
    if version < SCHEMA_VERSION:
        return checked(Message(body, properties), limit_bytes)
    properties[CONTROL_BASE64] = base64.b64encode(body).decode()
    return checked(Message(None, properties), limit_bytes)


def control_body(message: Message) -> bytes:
    """The encoded `Control` of a control record, in whichever version. Raises LOG_DAMAGED."""
    encoded = message.properties.get(CONTROL_BASE64)
    if encoded is None and message.payload is not None:
        return message.payload
    try:
        return base64.b64decode(message.properties[CONTROL_BASE64], validate=True)
    except (KeyError, binascii.Error, ValueError) as e:
        raise damaged(f"the control record {message.properties[ENTRY]} does not say what it should: {e}") from e


def content_bytes(message: Message) -> int:
    """The size of a message's payload, or of what stands in a property in its place."""
    return len(message.payload or message.properties.get(CONTROL_BASE64, ""))


def packed(
    owner: Owner, number: int, index: int, publish_time_ms: int, part: Part, limit_bytes: int = MAX_ENTRY_BYTES
) -> Message:
    """The entry of a batch: a stored record, whose first message has this index. Raises MESSAGE_TOO_LARGE."""
    record = header(
        part.encoded,
        BATCH_TAG,
        rows=part.rows,
        column_bytes=part.column_bytes,
        incarnation=owner.incarnation,
        file_offset=0,
        base_index=index,
        publish_time_ms=publish_time_ms,
        synced_offset=0,
        ownership=owner.ownership,
        key=NO_KEY,
    )
    properties = {
        ENTRY: str(Place(owner, number, index)),
        KIND: BATCH,
        ROWS: str(part.rows),
    }
    return checked(Message(record + part.encoded, properties), limit_bytes)


def split(part: Part, limit_bytes: int = MAX_ENTRY_BYTES) -> list[Part]:
    """The same rows in batches that fit into an entry each, if they are not too large by themselves."""
    if HEADER_BYTES + len(part.encoded) + 2 * _CLIENT_BYTES <= limit_bytes or part.rows == 1:
        return [part]
    whole = batches.decode(part.encoded)
    middle = part.rows // 2
    halves = (whole.take(np.arange(middle)), whole.take(np.arange(middle, part.rows)))
    return [small for half in halves for small in split(encoded(half), limit_bytes)]


def encoded(batch: Batch) -> Part:
    """The batch as it is stored."""
    raw = batch.encode()
    places = np.zeros(PLACES, np.int64)
    layout_columns(np.frombuffer(raw, np.uint8), 0, len(raw), places)
    return Part(raw, len(batch), int(places[COLUMNS_END]))


def surely_taken_bytes(limit_bytes: int) -> int:
    """A payload and a key, or all rows of a batch, of so many bytes are taken, whatever our own properties say."""
    return max(0, limit_bytes // 5 - _SLACK_BYTES)


def checked(message: Message, limit_bytes: int = MAX_ENTRY_BYTES) -> Message:
    """The message, if a broker takes it. Raises MESSAGE_TOO_LARGE."""
    size = len(message.payload or b"") + len(message.key.encode()) + _CLIENT_BYTES
    for name, value in message.properties.items():
        size += len(name.encode()) + len(value.encode()) + _PROPERTY_BYTES
    if size > limit_bytes:
        raise error(
            "MESSAGE_TOO_LARGE",
            f"an entry of the Pulsar topic takes {size} bytes with key and properties: its brokers and policies allow "
            f"{limit_bytes}",
        )
    return message


def read_marker(message: Message, owner: Owner) -> Marker:
    """What a marker of this owner says. Raises LOG_DAMAGED, NEWER_FORMAT."""
    properties = message.properties
    try:
        token = bytes.fromhex(properties[TOKEN])
        entry_format, partitions = EntryFormat(properties[FORMAT]), int(properties[PARTITIONS])
        version = int(properties[ENTRY].partition(":")[0])
        settings = Settings(entry_format, properties[MODE], partitions, properties[ADDRESS], version)
    except (KeyError, ValueError) as e:
        raise damaged(f"the marker of term {owner.term} does not say {e}") from e
    if len(token) != TOKEN_BYTES or ownership_of(token) != owner.ownership:
        raise damaged(f"the marker of term {owner.term} does not fit its owner")
    return Marker(owner.term, token, settings)


def damaged(what: str) -> SeqdedupeError:
    """The error of an entry that is not what was written."""
    return error(
        "LOG_DAMAGED",
        f"the Pulsar topic is damaged: {what}",
        hint="Nothing was changed, and other topics serve. Has something else written into the topic as if it were the "
        "sidecar? Look at the entry with Pulsar's own tools, and read the topic from a replica if there is one.",
    )
