"""Entries that a sidecar wrote for itself: markers and control records. Also the last entry of a topic that is no such
entry, as the answer to a client that asks for the last message ID.

A reader asks for this ID to find out whether a message is left. With the ID of an own entry, the reader would wait for
a message that the door never passes on. Only the broker knows the entries, so the door reads backwards from the end.

Kernels: import this module only after `kernels.prepare()`.
"""

import asyncio
import os
import re
import time
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from google.protobuf.message import Message

from seqdedupe.entry_properties import CONTROL, ENTRY, KIND, MARKER, EntryPlace
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.entries import is_of_sidecar
from seqdedupe.log.pulsar.native import native_entry, single_entry
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import rows_of
from seqdedupe.pulsar_wire.connection import MAX_MESSAGE_BYTES, TIMEOUT_SECONDS
from seqdedupe.pulsar_wire.frames import SEQDEDUPE_FIELD, WireEntry, entry_of, metadata_of, metadata_range
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    NONE,
    CommandFlow,
    CommandGetLastMessageId,
    CommandGetLastMessageIdResponse,
    CommandSubscribe,
    MessageIdData,
)
from seqdedupe.pulsar_wire.rows import COMPACTED_OUT
from seqdedupe.wire import varint

KNOWN_SECONDS = 10.0
"""The time for which a last message ID is used again. After this time Pulsar may have removed the message."""

_NOWHERE = MessageId(-1, -1)
_NATIVE = re.compile(re.escape(varint(SEQDEDUPE_FIELD << 3 | 2)) + rb"[\x80-\xff]*[\x00-\x7f].[^\x00]", re.DOTALL)
"""The beginning of our field of a native entry's metadata. Kind 0 is a batch."""
_SINGLE = re.compile(re.escape(KIND.encode()) + rb"\x12.(?:%b|%b)" % (MARKER.encode(), CONTROL.encode()), re.DOTALL)
"""The property of other entries."""


def is_own(content: memoryview) -> bool:
    """Return whether the content of a MESSAGE frame is a marker or a control record of a sidecar.

    The rules are those of a sidecar's own readers. The name of the entry's producer must also be a sidecar's, because
    every producer can write properties with our names. An entry that cannot be decoded is not a sidecar's.
    """
    try:
        begin, end = metadata_range(content)
        if _NATIVE.search(content, begin, end) is None and _SINGLE.search(content, begin, end) is None:
            return False
        entry = entry_of(content)
        metadata = metadata_of(entry)
        # A sidecar never compresses an own entry, and a small entry may be huge when decompressed.
        if metadata.compression != NONE or not is_of_sidecar(metadata.producer_name.decode(errors="replace")):
            return False
        decode = native_entry if metadata.HasField("seqdedupe") else single_entry
        properties = decode(_NOWHERE, entry, metadata).message.properties
        return properties.get(KIND) in (MARKER, CONTROL) and EntryPlace.parse(properties.get(ENTRY, "")) is not None
    except SeqdedupeError:
        return False


def rows_in(content: memoryview) -> tuple[int, bool]:
    """Return the number of messages in the content of a MESSAGE frame, and whether they are a batch."""
    try:
        begin, end = metadata_range(content)
        metadata = metadata_of(WireEntry(content[begin:end], b""))
    except SeqdedupeError:
        return 1, False
    return max(metadata.num_messages_in_batch, 1), metadata.HasField("num_messages_in_batch")


# -- The last entry of others.

NO_ENTRY = 2**64 - 1
"""The entry ID -1, which a broker states for a topic without entries."""


class SeenEntry(NamedTuple):
    """An entry that the door has read."""

    place: tuple[int, int]
    """Ledger ID and entry ID."""
    rows: int
    """The number of messages."""
    rows_left: int
    """The number of messages up to the last one that clients do not skip."""
    is_batch: bool
    is_own: bool


def seen_entry(place: tuple[int, int], content: memoryview, *, is_compacted: bool) -> SeenEntry:
    """Return what the content of a MESSAGE frame is. In a compacted read, clients skip messages that were compacted
    away. So `rows_left` ends with the last other message. An entry without such a message counts as own."""
    rows, is_batch = rows_in(content)
    left = rows
    if is_compacted and is_batch:
        with suppress(SeqdedupeError):
            entry = entry_of(content)
            flags = rows_of(entry, metadata_of(entry), MAX_MESSAGE_BYTES).flags
            left = max(np.flatnonzero((flags & COMPACTED_OUT) == 0).tolist(), default=-1) + 1
    return SeenEntry(place, rows, left, is_batch, not left or is_own(content))


class OwnReader(NamedTuple):
    """A reader of the door on the client's connection to a broker."""

    is_compacted: bool
    consumer_id: int
    entries: "asyncio.Queue[SeenEntry | None]"
    """None if the broker has closed the reader."""


class Link(Protocol):
    """The client's connection to the broker that serves the topic."""

    def say(self, field: str, message: Message) -> None:
        """Send a command."""

    async def request(self, field: str, message: Any) -> Any:
        """Send a request, and return the answer."""

    def reader(self, command: CommandSubscribe) -> AbstractAsyncContextManager[OwnReader]:
        """Open a reader, and close it at the end of the block."""


async def last_of_others(link: Link, like: CommandSubscribe, last: MessageIdData) -> MessageIdData:
    """Return the ID of the last entry up to `last` that is not a sidecar's own, in the form of a broker's answer. If
    there is none, the entry ID is -1, as in an empty topic.

    `like` is the client's consumer of the topic. Raises LOG_REFUSED, and the broker's refusals.
    """
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            found = await _found(link, like, (last.ledgerId, last.entryId))
    except TimeoutError as e:
        why = f"the last message of {like.topic} was not found within {TIMEOUT_SECONDS:.0f} s"
        raise error("LOG_REFUSED", why) from e
    answer = MessageIdData()
    answer.CopyFrom(last)
    if found is None:
        answer.entryId, answer.batch_index = NO_ENTRY, -1
    elif found.place != (last.ledgerId, last.entryId):
        answer.ledgerId, answer.entryId = found.place
        answer.batch_index = found.rows_left - 1 if found.is_batch else -1
    elif found.is_batch:
        answer.batch_index = found.rows_left - 1
    return answer


class LastOfOthers:
    """The answers to a consumer's questions for the last message ID, without entries that are a sidecar's own."""

    def __init__(self, like: CommandSubscribe) -> None:
        """`like` has the topic and the subscription of the consumer."""
        self._like = like
        self._turn = asyncio.Lock()
        self._asked = 0
        self._outcome: CommandGetLastMessageIdResponse | SeqdedupeError | None = None
        self._known: tuple[MessageIdData, MessageIdData] | None = None
        """The last message ID according to the broker, and the ID that the client received instead."""
        self._known_at = 0.0

    async def ask(self, link: Link, consumer_id: int) -> CommandGetLastMessageIdResponse:
        """Return an answer that is as new as this question. Questions that come while another one is asked share the
        next answer. Raises LOG_REFUSED, and the broker's refusals."""
        came = self._asked
        async with self._turn:
            if self._asked == came:
                self._asked += 1
                try:
                    self._outcome = await self._answer(link, consumer_id)
                except SeqdedupeError as e:
                    self._outcome = e
            outcome = self._outcome
        if isinstance(outcome, SeqdedupeError):
            raise outcome
        answer = CommandGetLastMessageIdResponse()
        if outcome is not None:
            answer.CopyFrom(outcome)
        return answer

    async def _answer(self, link: Link, consumer_id: int) -> CommandGetLastMessageIdResponse:
        asked = CommandGetLastMessageId(consumer_id=consumer_id)
        answer: CommandGetLastMessageIdResponse = await link.request("getLastMessageId", asked)
        if answer.last_message_id.entryId != NO_ENTRY:
            now, known = time.monotonic(), self._known
            if known is None or known[0] != answer.last_message_id or now - self._known_at >= KNOWN_SECONDS:
                last = MessageIdData()
                last.CopyFrom(answer.last_message_id)
                self._known = known = last, await last_of_others(link, self._like, last)
                self._known_at = now
            answer.last_message_id.CopyFrom(known[1])
            if answer.HasField("consumer_mark_delete_position"):
                answer.consumer_mark_delete_position.CopyFrom(consumed_up_to(answer))
        return answer


def consumed_up_to(answer: CommandGetLastMessageIdResponse) -> MessageIdData:
    """Return the consumer's mark-delete position as it would be without own entries after the last message. Clients
    compare it with the last message ID to find out whether a message is left."""
    mark, last = answer.consumer_mark_delete_position, answer.last_message_id
    if last.entryId == NO_ENTRY or mark.ledgerId < last.ledgerId:
        return mark
    if mark.ledgerId == last.ledgerId and (mark.entryId == NO_ENTRY or mark.entryId <= last.entryId):
        return mark
    return MessageIdData(ledgerId=last.ledgerId, entryId=last.entryId)


async def _found(link: Link, like: CommandSubscribe, last: tuple[int, int]) -> SeenEntry | None:
    (ledger, entry), count = last, 1
    while True:
        first = max(0, entry + 1 - count)
        found, before = await _read(link, like, (ledger, first), (ledger, entry), count)
        if found is not None:
            return found
        if first > 0:
            entry = first - 1
        elif before is None or before[1] == NO_ENTRY or before >= (ledger, first):
            return None
        else:
            ledger, entry = before
        count *= 2


async def _read(
    link: Link, like: CommandSubscribe, first: tuple[int, int], last: tuple[int, int], count: int
) -> tuple[SeenEntry | None, tuple[int, int] | None]:
    """Read the entries from `first` to `last`. Return the last entry that is not a sidecar's own. If there is none,
    also return the place before `first`, which may be in an earlier ledger."""
    command = CommandSubscribe(
        topic=like.topic,
        # Brokers may require a prefix for a role's subscriptions.
        subscription=f"{like.subscription}-last-{os.urandom(5).hex()}",
        subType=CommandSubscribe.Exclusive,
        durable=False,
        start_message_id=MessageIdData(ledgerId=first[0], entryId=first[1]),
        initialPosition=CommandSubscribe.Earliest,
        read_compacted=like.read_compacted,
        force_topic_creation=False,
    )
    found: SeenEntry | None = None
    async with link.reader(command) as reader:
        link.say("flow", CommandFlow(consumer_id=reader.consumer_id, messagePermits=count))
        while True:
            seen = await reader.entries.get()
            if seen is None:
                raise error("LOG_REFUSED", f"a broker has closed {like.topic} while its last message was looked for")
            if not seen.is_own:
                found = seen
            if seen.place >= last:
                break
            link.say("flow", CommandFlow(consumer_id=reader.consumer_id, messagePermits=seen.rows))
        if found is not None:
            return found, None
        asked = CommandGetLastMessageId(consumer_id=reader.consumer_id)
        answer: CommandGetLastMessageIdResponse = await link.request("getLastMessageId", asked)
        before = answer.consumer_mark_delete_position
        return None, (before.ledgerId, before.entryId) if answer.HasField("consumer_mark_delete_position") else None
