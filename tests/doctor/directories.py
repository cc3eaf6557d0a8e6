"""Data directories for the doctor: made and read by the topics themselves, with small segments, without a process."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import NO_LIMIT, Applied
from seqdedupe.topic.readers import read_on
from seqdedupe.topic.topic import Topic
from tests.batches import Row, batch
from tests.log.conformance import parsed

SEGMENT_BYTES = 6_000


class Message(NamedTuple):
    """As it was acknowledged."""

    producer: str
    sequence_id: int
    payload: bytes


def _fatal(why: str) -> None:
    raise AssertionError(why)


@dataclass
class Opened:
    """A data directory with its topics, as a sidecar has them."""

    topics: Topics[Topic]
    clock_ms: int = 1_000_000
    epochs: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    async def publish(self, topic: str, rows: list[Row], payloads: list[bytes]) -> None:
        """One batch of new messages."""
        names = list(dict.fromkeys(name for name, _ in rows))
        links = {name: await self.last_sent(topic, name) for name in names}
        live = self.topics.get(topic)
        answers: list[FrameReceipt | Refusal] = []
        made = batch(
            rows,
            epochs={name: self.epochs[topic, name] for name in names},
            links=links,
            payloads=payloads,
        )
        live.admit(made.encode(), 1, answers.append, NumbersCache())
        await live.flight.all_of_now()
        assert isinstance(answers[0], FrameReceipt), answers
        assert answers[0].verdicts is None or not any(answers[0].verdicts != 1)
        for name, sequence_id in rows:
            self.sent[topic, name] = sequence_id

    async def last_sent(self, topic: str, name: str) -> int:
        """The highest ID that was sent here or that Open answered; opens topic and name if need be."""
        if (topic, name) not in self.sent:
            live = await self.topics.get_or_create(topic)
            opened = await open_sessions(live, [name], None)
            self.epochs[topic, name], self.sent[topic, name] = opened.epochs[0], opened.persisted[0]
        return self.sent[topic, name]

    async def messages(self, topic: str) -> list[Message]:
        """All that readers get."""
        live = self.topics.get(topic)
        found = []
        async for page in read_on(live, live.log.first_index, live.confirmed_index):
            for record in parsed(page.records):
                names = [
                    record.batch.producer_names[start:end].decode()
                    for start, end in zip(
                        record.batch.producer_name_offsets, record.batch.producer_name_offsets[1:], strict=False
                    )
                ]
                offsets = record.batch.payload_offsets
                for row, sequence_id in enumerate(record.batch.sequence_ids):
                    name = names[record.batch.producer_indexes[row] if len(names) > 1 else 0]
                    found.append(Message(name, sequence_id, record.batch.payloads[offsets[row] : offsets[row + 1]]))
        return found

    async def persisted(self, topic: str, name: str) -> int:
        """What an Open answers."""
        return (await open_sessions(self.topics.get(topic), [name], None)).persisted[0]


@asynccontextmanager
async def opened(
    directory: Path, *, retention_size_in_mb: int = NO_LIMIT, rebuild_store: bool = False
) -> AsyncIterator[Opened]:
    """A data directory for the length of a block; then it is as after kill -9, as far as snapshots are concerned."""
    made: list[Opened] = []
    store = Store.open(directory / "store")
    logs = EmbeddedLogs(
        directory / "logs",
        clock_ms=lambda: made[0].clock_ms,
        fatal=_fatal,
        segment_bytes=SEGMENT_BYTES,
    )
    topics: Topics[Topic] = Topics(
        store,
        lambda told: PublishedTopics(store, logs, on_state=told, rebuild_store=rebuild_store),
        max_topics=100,
        allow_auto_topic_creation=True,
        on_state=lambda name, state: None,
        rebuild_store=rebuild_store,
        applied=Applied(
            deduplication_entries_interval=2**31 - 1,
            deduplication_snapshot_interval_seconds=0,
            retention_size_in_mb=retention_size_in_mb,
        ),
    )
    made.append(Opened(topics))
    try:
        await topics.open_all()
        await topics.recover_all()
        yield made[0]
    finally:
        await asyncio.gather(*(topic.close("") for topic in topics.all() if isinstance(topic, Topic)))
        await logs.close()
        store.close()


def segments(directory: Path, topic: int = 0) -> list[Path]:
    """The files of a topic's log, by the order of the topics' creation."""
    folder = sorted((directory / "logs").iterdir())[topic]
    return sorted(folder.glob("*.log"))


def fingerprint(directory: Path) -> dict[str, tuple[int, str]]:
    """For every file and folder: when it was changed, and what is in it."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted([directory, *directory.rglob("*")])
    }
