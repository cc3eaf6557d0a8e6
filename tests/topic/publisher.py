"""A client that does its duty, over all topics that there are; and what stands in a topic after all."""

import asyncio
import time
from collections.abc import Callable, Sequence

from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.readers import PAGE_BYTES, end_index, read_page
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.log.conformance import parsed

FRAME_ROWS = 3
MAX_FRAMES = 20
"""In flight."""


class Publisher:
    """Publishes the IDs from 0 on, to anyone who takes them, and sends again what it has no receipt for."""

    def __init__(self, name: str, topics: Callable[[], Sequence[Topic]]) -> None:
        self.name = name
        self.acknowledged = -1
        self.heard: list[SeqdedupeError] = []
        self.receipts = 0
        self.longest_gap_seconds = 0.0
        """Between two receipts."""
        self._topics = topics
        self._session_at: tuple[Topic, asyncio.Task[None]] | None = None
        self._last_receipt: float | None = None

    async def publish(self, up_to: int) -> None:
        """Returns when all below this ID are acknowledged."""
        while self.acknowledged < up_to - 1:
            for topic in self._topics():
                session = asyncio.ensure_future(self._session(topic, up_to))
                self._session_at = topic, session
                try:
                    await asyncio.wait([session])
                finally:
                    session.cancel()
                if not session.cancelled() and (e := session.exception()) is not None:
                    if not isinstance(e, SeqdedupeError):
                        raise e
                    self.heard.append(e)
            await asyncio.sleep(0.005)

    def leave(self, topic: Topic) -> None:
        """Nothing more is heard of this topic."""
        if self._session_at is not None and self._session_at[0] is topic:
            self._session_at[1].cancel()

    async def _session(self, topic: Topic, up_to: int) -> None:
        opened = await open_sessions(topic, [self.name], None)
        (link,) = opened.persisted
        assert link >= self.acknowledged, f"{self.name} has lost what was acknowledged after {link}"
        self.acknowledged = link
        answers: asyncio.Queue[FrameReceipt | Refusal] = asyncio.Queue()
        cache, in_flight = NumbersCache(), 0
        while self.acknowledged < up_to - 1:
            if link < up_to - 1 and in_flight < MAX_FRAMES:
                ids = range(link + 1, min(link + 1 + FRAME_ROWS, up_to))
                rows = [(self.name, one) for one in ids]
                frame = batch(rows, epochs={self.name: opened.epochs[0]}, links={self.name: link})
                topic.admit(frame.encode(), ids[-1], answers.put_nowait, cache)
                link, in_flight = ids[-1], in_flight + 1
                continue
            answer = await answers.get()
            in_flight -= 1
            if isinstance(answer, Refusal):
                raise answer.error
            self._receipt(answer.frame)

    def _receipt(self, last_id: int) -> None:
        self.acknowledged = last_id
        self.receipts += 1
        now = time.monotonic()
        if self._last_receipt is not None:
            self.longest_gap_seconds = max(self.longest_gap_seconds, now - self._last_receipt)
        self._last_receipt = now


async def stored(topic: Topic) -> dict[str, list[int]]:
    """The sequence IDs of each producer in the order in which they stand there."""
    found: dict[str, list[int]] = {}
    index, end = 0, end_index(topic)
    while index < end:
        page = await read_page(topic, index, end, PAGE_BYTES)
        for record in parsed(page.records):
            for row in range(record.rows):
                of = record.batch.producer_indexes[row] if record.batch.producer_indexes else 0
                start, end_of_name = record.batch.producer_name_offsets[of : of + 2]
                name = record.batch.producer_names[start:end_of_name].decode()
                found.setdefault(name, []).append(record.batch.sequence_ids[row])
        index = page.next_index
    return found
