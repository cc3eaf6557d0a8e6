"""Inputs of a topic with native entries: Pulsar delivers them, and the topic's sidecar says what they are.

Pulsar's client shows neither the index of such a message nor whether its entry is void. The sidecar returns every valid
message with its index and with Pulsar's message ID, in the same order. So the topic is read there too.
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


class InputTopic:
    """A topic or partition with native entries, as its sidecar has it. Begin with `read_up_to`, on one event loop."""

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
        """Return the message with an ID that is covered; None if no valid message has this ID: its entry is void, or no
        sidecar has written it."""
        stored = self._stored
        if stored is None:
            return None
        row = bisect_left(range(len(stored)), message_id, key=stored.message_id)
        return Message(stored, row) if stored.message_id(row) == message_id else None

    async def read_up_to(self, message_id: MessageId) -> None:
        """Read until the ID is covered: the sidecar has returned this message, or a later one. Waits without a time
        limit.

        Raises INVALID_FUNCTION if the sidecar has no such topic with native entries; POSITION_TRIMMED if it does not
        know the message any more; the errors of a reader. Raises NOT_A_SIDECAR only if no sidecar has answered yet.
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
        """Read from the first message on whose ID is not lower."""
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
        """Return the index of the first message whose ID is not lower; the next index if there is none yet."""
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
            # Which messages were before is not known any more.
            is_stored = low <= ends.last.index
            first_id = await self._id_of(low) if is_stored else ends.last.message_id
            if first_id is None or (first_id != message_id if is_stored else first_id >= message_id):
                why = f"the sidecar's messages of {self._topic} begin with index {low}: it does not know {message_id}"
                raise error("POSITION_TRIMMED", why, first_index=low)
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
