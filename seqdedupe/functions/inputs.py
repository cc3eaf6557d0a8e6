"""Inputs of a topic with native entries. Pulsar delivers the inputs, and the topic's sidecar identifies them.

Pulsar's client shows neither the index of such a message nor whether the message's entry is void. The sidecar returns
every valid message with its index and with Pulsar's message ID, in the same order. So the wrapper also reads the topic
from the sidecar.
"""

import asyncio
import logging
from bisect import bisect_left
from contextlib import suppress

from seqdedupe.client.client import Client, TopicEnds
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.client.reader import Reader
from seqdedupe.errors import NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.functions.identity import no_index
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.v1 import admin_pb2

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
