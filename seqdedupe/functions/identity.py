"""Inputs and outputs of a function: the identity of an input, which is the same at each delivery, and the metadata of
the outputs. `InputTopic`, at the end, asks a sidecar for the index of an input that does not contain its index."""

import asyncio
import base64
import binascii
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from seqdedupe.client.client import Client, TopicEnds
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.client.reader import Reader
from seqdedupe.entry_properties import (
    ENTRY,
    EVENT_TIME_MS,
    KEY_BASE64,
    KIND,
    PREFIX,
    SCHEMA_VERSION_OF,
    USER,
    EntryOwner,
    EntryPlace,
)
from seqdedupe.errors import InvalidRequestError, NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_EVENT_TIME_MS,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SEQUENCE_ID,
    MIN_EVENT_TIME_MS,
)
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.names import new_producer_name, source_name, topic_name
from seqdedupe.v1 import admin_pb2

# -- The outputs of the wrapped function, as they are published through the sidecar.

MAX_OUTPUT_BYTES = MAX_PAYLOAD_BYTES - 4096
"""The maximum size of an output. Every topic accepts an output of this size, also a Pulsar topic, where sidecar and
client add data."""
OVERHEAD_BYTES = 320
"""The maximum size of an output in addition to its payload, key and properties: the producer's name, IDs, tags and
lengths."""
PROPERTY_OVERHEAD_BYTES = 8

Callback = Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class FunctionOutput:
    """A message for a topic. `topic` is the topic's full name. `event_time_ms` is 0 if the message has no event
    time."""

    topic: str
    payload: bytes
    key: bytes | None
    event_time_ms: int
    properties: Mapping[str, str]
    callback: Callback | None = None

    size_bytes: int = field(init=False)
    """The maximum size of the output in a batch."""

    def __post_init__(self) -> None:
        # The size is computed once, because each new frame uses it.
        size = OVERHEAD_BYTES + len(self.payload) + len(self.key or b"")
        for name, value in self.properties.items():
            size += (len(name) + len(value)) * 4 + PROPERTY_OVERHEAD_BYTES
        object.__setattr__(self, "size_bytes", size)


def check_fits(outputs: list[FunctionOutput]) -> None:
    """Check that the outputs of an input for one topic fit into one frame. Raises MESSAGE_TOO_LARGE."""
    for output in outputs:
        if output.size_bytes > MAX_OUTPUT_BYTES:
            raise error(
                "MESSAGE_TOO_LARGE",
                f"an output with a payload of {len(output.payload)} bytes takes {output.size_bytes} bytes with its key "
                f"and properties: at most {MAX_OUTPUT_BYTES} are taken",
            )
    if (size := sum(output.size_bytes for output in outputs)) > MAX_BATCH_BYTES:
        raise error(
            "MESSAGE_TOO_LARGE",
            f"the outputs of one input for {outputs[0].topic} take {size} bytes: at most {MAX_BATCH_BYTES} are taken",
            hint="Make the function return fewer or smaller outputs for one input.",
        )


# -- The input: the metadata of a message, and the part of it that its outputs inherit.

T = TypeVar("T")

_TAKEN = ("properties", "partition_key", "event_timestamp")
"""The keys accepted in `message_conf`."""


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_REQUEST", f"the key or a property is not valid Unicode: {text[:80]!r}") from e


def _is_kept(time_ms: int) -> bool:
    return MIN_EVENT_TIME_MS <= time_ms <= MAX_EVENT_TIME_MS


class InputSource:
    """The input of a function. Outputs inherit the input's metadata unless they set their own. Raises NEWER_FORMAT.

    Key, event time and properties are the values that the input's producer set, even if a sidecar stored them in a
    different form.
    """

    def __init__(self, context: Any) -> None:
        self.unreadable: UnicodeDecodeError | None = None
        """The reason why metadata of the input is missing here. Pulsar accepts keys and properties that are not text,
        but its client cannot return them."""
        self.topic = str(context.get_current_message_topic_name())
        given: Mapping[str, str] = self._read(context.get_message_properties, {})
        self.place = EntryPlace.parse(given.get(ENTRY, ""), self.topic)
        """The place of the input in a topic that a sidecar writes; None if no sidecar has written the input."""
        has_nothing_else = len(given) == 1 and not context.message.data()
        self.kind = given.get(KIND, "") if self.place is not None or has_nothing_else else ""
        """The kind of entry, according to the sidecar that wrote the entry. A native entry of such a kind has no
        payload and no other property."""
        self.key: bytes | None = self._read(context.get_message_key, "").encode() or None
        self.event_time_ms = int(context.get_message_eventtime() or 0)
        self.properties = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
        if self.place is not None:
            self._restore(given)

    def restore_from(self, message: Message) -> None:
        """Copy the place and the metadata from the sidecar's copy of the message, because a native entry does not
        contain its place."""
        owner = EntryOwner(message.position.incarnation, 0, message.position.ownership)
        self.place, self.unreadable = EntryPlace(owner, 0, message.index), None
        self.key, self.event_time_ms = message.key, message.event_time_ms
        # The schema version belongs to the input topic. A consumer of an output would look for this version in the
        # output's topic.
        self.properties = {name: value for name, value in message.properties.items() if name != SCHEMA_VERSION_OF}

    def _read(self, read: Callable[[], T | None], otherwise: T) -> T:
        try:
            return read() or otherwise
        except UnicodeDecodeError as e:
            self.unreadable = e
            return otherwise

    def _restore(self, given: Mapping[str, str]) -> None:
        """Restore the metadata that Pulsar could not store unchanged."""
        for name, value in given.items():
            if name.startswith(USER):
                self.properties[name.removeprefix(USER)] = value
        try:
            if KEY_BASE64 in given:
                self.key = base64.b64decode(given[KEY_BASE64], validate=True)
            self.event_time_ms = int(given.get(EVENT_TIME_MS, self.event_time_ms))
        except (binascii.Error, ValueError) as e:
            raise error("INVALID_FUNCTION", f"a message of {self.topic} is not as a sidecar writes it: {e}") from e

    def output(
        self, topic: str, payload: bytes, conf: Mapping[str, Any] | None = None, callback: Callback | None = None
    ) -> FunctionOutput:
        """Return the output, with the metadata in `message_conf`. Raises INVALID_REQUEST for metadata that cannot be
        stored."""
        conf = conf or {}
        if unknown := sorted(set(conf) - set(_TAKEN)):
            raise error(
                "INVALID_REQUEST",
                f"message_conf has {', '.join(unknown)}, which cannot be kept: {', '.join(_TAKEN)} are possible",
            )
        properties = conf.get("properties", self.properties)
        if not all(isinstance(part, str) for item in properties.items() for part in item):
            raise error("INVALID_REQUEST", "names and values of properties are text")
        key = _encoded(str(conf["partition_key"] or "")) or None if "partition_key" in conf else self.key
        time_ms = int(conf.get("event_timestamp", self.event_time_ms))
        if not _is_kept(time_ms):
            raise error("INVALID_REQUEST", f"the event time {time_ms} ms is beyond what can be kept")
        for text in (*properties, *properties.values()):
            _encoded(text)
        return FunctionOutput(topic_name(str(topic)), payload, key, time_ms, dict(properties), callback)

    def dead_letter(self, topic: str, payload: bytes, told: Mapping[str, str]) -> FunctionOutput:
        """Return the input itself as an output. The properties `told` are added to the input's properties. An event
        time that cannot be stored is omitted."""
        time_ms = self.event_time_ms if _is_kept(self.event_time_ms) else 0
        return FunctionOutput(topic_name(topic), payload, self.key, time_ms, {**self.properties, **told})


BATCH_INDEX_BITS = 20
"""The low bits of a sequence ID, which contain the index within a batched entry. The higher bits contain the entry
ID."""

MAX_ENTRY_ID = MAX_SEQUENCE_ID >> BATCH_INDEX_BITS

DEAD_LETTER = "dead-letter"

_LARGEST_NUMBER = 10**19 - 1
_MOST_OUTPUTS = 10**5 - 1
"""Placeholders for a ledger and an output number that are not known yet. No real values make a longer name."""


class InputIdentity(NamedTuple):
    """The place of an input in the order of inputs. The sequence IDs of inputs with the same `source` rise in this
    order."""

    source: str
    sequence_id: int

    def producer_name(self, k: int) -> str:
        """Return the producer name under which the k-th output for a topic is published."""
        return f"{self.source}/{k}"

    def of_dead_letter(self) -> "InputIdentity":
        """Return the identity of the input's dead letter. Outputs and dead letters always have different names."""
        return InputIdentity(f"{self.source}/{DEAD_LETTER}", self.sequence_id)


def check_names(function: str, topic: str) -> None:
    """Raise INVALID_FUNCTION if the producer names of this function's outputs for inputs of this topic could become too
    long."""
    longest = f"{function}/{topic}/{_LARGEST_NUMBER}/{DEAD_LETTER}/{_MOST_OUTPUTS}"
    try:
        new_producer_name(longest)
    except InvalidRequestError as e:
        raise error(
            "INVALID_FUNCTION",
            f"outputs cannot be named after the function {function} and its input {topic}: {e.message}",
            hint=f"Shorten the function's name or the topic's: they have {MAX_NAME_BYTES} bytes together, less "
            f"{len(longest) - len(function) - len(topic)} for numbers.",
        ) from e


def by_message_id(function: str, topic: str, ledger_id: int, entry_id: int, batch_index: int) -> InputIdentity:
    """Return the identity based on Pulsar's message ID. `topic` is the full name of a topic or partition; `batch_index`
    is -1 if there is none.

    The ledger is part of the name, because a recreated topic has other ledgers, and ledger IDs rise within a topic.
    Raises INVALID_SEQUENCE_ID if the entry ID or the batch index is too large for a unique sequence ID.
    """
    if not 0 <= entry_id <= MAX_ENTRY_ID or batch_index >= 1 << BATCH_INDEX_BITS:
        raise error(
            "INVALID_SEQUENCE_ID",
            f"the message {ledger_id}:{entry_id}:{batch_index} of {topic} has no sequence ID: entries up to "
            f"{MAX_ENTRY_ID} and batches of {1 << BATCH_INDEX_BITS} messages are possible",
            hint="Let a sidecar write the topic, and use identity = 'index'. Or publish smaller batches.",
        )
    return InputIdentity(source_name(function, topic, ledger_id), entry_id << BATCH_INDEX_BITS | max(batch_index, 0))


def by_index(function: str, topic: str, place: EntryPlace | None) -> InputIdentity:
    """Return the identity based on the index that a sidecar assigned. Raises INVALID_FUNCTION if no sidecar wrote the
    message."""
    if place is None or place.index < 0:
        raise no_index(topic)
    return InputIdentity(source_name(function, topic, place.owner.incarnation), place.index)


def no_index(topic: str) -> SeqdedupeError:
    """Return the error for a message that no sidecar wrote."""
    return error(
        "INVALID_FUNCTION",
        f"identity is 'index', but a message of {topic} was written by no sidecar: it has no index",
        hint="Use identity = 'message_id' for topics that no sidecar writes. If the topic has native entries, "
        "sidecar_address must name its sidecars.",
    )


# -- Inputs of a topic with native entries. Pulsar delivers the inputs, and the topic's sidecar identifies them.
#
# Pulsar's client shows neither the index of such a message nor whether the message's entry is void. The sidecar returns
# every valid message with its index and with Pulsar's message ID, in the same order. So the wrapper also reads the
# topic from the sidecar.

logger = logging.getLogger("seqdedupe.functions")

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 2.0


def _accept_loss(topic: str, first_index: int, first_id: MessageId | None) -> str:
    hint = f"The function may not have processed all messages before index {first_index}, which were removed."
    if first_id is None:
        return hint
    return (
        f"{hint} To accept the loss, move the function's subscription to the first message: pulsar-admin topics "
        "reset-cursor --subscription TENANT/NAMESPACE/FUNCTION --messageId "
        f"{first_id.ledger_id}:{first_id.entry_id} {topic}"
    )


class InputTopic:
    """A topic or partition with native entries, read from its sidecar. Begin with `read_up_to`, on one event loop."""

    def __init__(self, client: Client, topic: str) -> None:
        self.trouble: SeqdedupeError | None = None
        """The reason why the sidecar cannot be read now; None if no such reason is known."""
        self._client = client
        self._topic = topic
        self._reader: Reader | None = None
        self._stored: StoredBatch | None = None
        """The batch that was read last."""
        self._after = NOWHERE
        """No valid message is between this ID and the batch that was read last."""

    def covers(self, message_id: MessageId) -> bool:
        """Return whether `message` knows what has this ID."""
        return self._after < message_id <= self._last_id

    def message(self, message_id: MessageId) -> Message | None:
        """Return the message with this ID. Before this call, `read_up_to` must have covered the ID. Return None if no
        valid message has this ID: the entry is void, or no sidecar has written the entry."""
        stored = self._stored
        if stored is None:
            return None
        row = bisect_left(range(len(stored)), message_id, key=stored.message_id)
        return Message(stored, row) if stored.message_id(row) == message_id else None

    async def read_up_to(self, message_id: MessageId) -> None:
        """Read until the ID is covered: the sidecar has returned this message or a later message. Wait without a time
        limit.

        Raises INVALID_FUNCTION if the sidecar has no such topic with native entries; POSITION_TRIMMED if the sidecar no
        longer has the message; the errors of a reader. Raises NOT_A_SIDECAR only if no sidecar has answered yet.
        """
        if self._reader is None or message_id <= self._after:
            await self._begin_at(message_id)
        while not self.covers(message_id):
            stored = await self._reader.next_batch() if self._reader is not None else None
            if stored is None:
                raise error("INTERNAL", f"the reader of {self._topic} was closed")
            if self._stored is not None:
                self._after = self._last_id
            self._stored, self.trouble = stored, None

    @property
    def _last_id(self) -> MessageId:
        return NOWHERE if self._stored is None else self._stored.message_id(len(self._stored) - 1)

    async def _begin_at(self, message_id: MessageId) -> None:
        """Start reading at the first message whose ID is not lower than this ID."""
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        while True:
            try:
                index = await self._index_at(message_id)
                break
            except UnavailableError as e:
                if e.reason == NOT_A_SIDECAR and self._reader is None:
                    raise
                self._waits(e)
                await asyncio.sleep(max(backoff.next_seconds(), e.retry_delay_ms / 1000))
        await self.close()
        self._reader = self._client.reader(self._topic, index, follow=True, on_waiting=self._waits)
        self._stored, self._after = None, message_id._replace(batch_index=message_id.batch_index - 1)

    async def _index_at(self, message_id: MessageId) -> int:
        """Return the index of the first message whose ID is not lower than this ID; the next index if no such message
        exists yet."""
        ends: TopicEnds | None = None
        entry_format = admin_pb2.ENTRY_FORMAT_UNSPECIFIED
        with suppress(NotFoundError):
            # This first: a topic that recovers may not know its format yet.
            ends = await self._client.ends(self._topic)
            entry_format = (await self._client.admin.topic(self._topic)).entry_format
        if ends is None or entry_format != admin_pb2.ENTRY_FORMAT_NATIVE:
            raise no_index(self._topic)
        low, stop = ends.first_index, ends.last.index + 1
        while low < stop:
            middle = (low + stop) // 2
            if await self._id_of(middle) < message_id:
                low = middle + 1
            else:
                stop = middle
        if low == ends.first_index > 0:
            # It is no longer known which messages were before this one.
            is_stored = low <= ends.last.index
            first_id = await self._id_of(low) if is_stored else ends.last.message_id
            if first_id is None or (first_id != message_id if is_stored else first_id >= message_id):
                why = f"the sidecar's messages of {self._topic} begin with index {low}: it does not know {message_id}"
                raise error("POSITION_TRIMMED", why, hint=_accept_loss(self._topic, low, first_id), first_index=low)
        return low

    async def _id_of(self, index: int) -> MessageId:
        position = await self._client.position_at(self._topic, index)
        if position.message_id is None:
            raise error("INTERNAL", f"message {index} of {self._topic} has no message ID")
        return position.message_id

    def _waits(self, why: UnavailableError) -> None:
        if self.trouble is None:
            logger.warning("waiting to read %s: %s %s", self._topic, why, why.hint)
        self.trouble = why

    async def close(self) -> None:
        """End the reader."""
        if self._reader is not None:
            await self._reader.close()
