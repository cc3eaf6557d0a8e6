"""Inputs and outputs of a function: the identity of an input, which is the same at each delivery, and the metadata of
the outputs."""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from seqdedupe.client.message import Message
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
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_EVENT_TIME_MS,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SEQUENCE_ID,
    MIN_EVENT_TIME_MS,
)
from seqdedupe.names import new_producer_name, source_name, topic_name

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
