"""A topic over the Pulsar log as a process has it, who publishes to it, and what a stock client finds there."""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pulsar
import pulsar.asyncio

from examples.pulsar.messages import Received, messages
from examples.pulsar.messages import Topic as Decoder
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.log.pulsar.broker_wire import Brokers, open_reader
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings, PulsarEntry
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.pulsar.line import Line
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, quiet

INCARNATION = 1_700_000_000_000_000
ROWS = 3
"""For a frame: a batch may be stored in part."""
FRAMES_IN_FLIGHT = 20
PAUSE_SECONDS = 0.02

_openings = itertools.count(1)


class Process:
    """One that has the topic, or wants it, over a client and its own store."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        entry_format: EntryFormat,
        folder: Path,
        name: str,
        line: Line | None = None,
        *,
        is_standby: bool = False,
    ) -> None:
        service_url = cluster.service_url if line is None else line.service_url
        self._store = Store.open(folder / name)
        self._topic_name = topic
        self._topic: Topic | None = None
        self._is_closed = False
        self._settings = EntrySettings(entry_format, "SEQUENCE_ID", 0, name)
        self._is_standby = is_standby
        self.shared = PulsarResources(
            name,
            name,
            lambda: time.time_ns() // 1_000_000,
            self._claim,
            cluster.admin,
            cluster.answers,
            Brokers(service_url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _claim(self, _: str, known: int) -> int:
        return next(number for number in _openings if number > known)

    async def log(self, topic: str | None = None, loaded: Loaded | None = None) -> PulsarLog:
        """The topic's log, or another one's."""
        covered_index, place = (loaded.next_index, loaded.opaque) if loaded is not None else (0, b"")
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                log = PulsarLog(self.shared, topic or self._topic_name, INCARNATION, self._settings, place)
                try:
                    await log.begin(covered_index)
                except UnavailableError:
                    # A broker that has just started takes its time.
                    await log.close()
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    return log

    async def start(self) -> Topic:
        """Wants the topic, and goes on wanting it."""
        snapshots = Snapshots(self._store, INCARNATION)
        loaded = snapshots.load()
        self._topic = topic = Topic(
            self._topic_name,
            await self.log(loaded=loaded),
            self._store,
            snapshots,
            loaded,
            applied=Applied(deduplication_snapshot_interval_seconds=0),
            random_bytes=os.urandom,
            is_standby=self._is_standby,
        )
        await topic.recover()
        return topic

    @property
    def topic(self) -> Topic:
        """Once it was wanted."""
        assert self._topic is not None
        return self._topic

    async def close(self) -> None:
        """Lets go of everything; what is closed already stays so."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._topic is not None:
            await self._topic.close("")
        self._store.close()


class Publisher:
    """One producer: rising IDs from 0, and all again from the first one without a receipt."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acknowledged = -1
        """All up to this one are."""
        self.places: dict[int, MessageId] = {}
        """For those that were acknowledged as new."""
        self.refusals: Counter[str] = Counter()
        self.count = 0
        self._sent = 0

    async def publish(self, topic: Topic, count: int) -> None:
        """Until the IDs below `count` are acknowledged, however long it takes."""
        self.count = count
        while self.acknowledged + 1 < self.count:
            try:
                await self._session(topic)
            except SeqdedupeError as e:
                self.refusals[e.reason] += 1
                await asyncio.sleep(PAUSE_SECONDS)

    def finish(self) -> None:
        """Nothing new is sent any more."""
        self.count = self._sent

    async def _session(self, topic: Topic) -> None:
        """A new session, in which nothing is sent again."""
        opened = await open_sessions(topic, [self.name], None)
        assert opened.persisted[0] >= self.acknowledged, "what was acknowledged is lost"
        self.acknowledged = opened.persisted[0]
        session = _Session(self, topic, opened.epochs[0])
        first = self.acknowledged + 1
        while first < self.count:
            ids = range(first, min(first + ROWS, self.count))
            await session.send(ids)
            first = ids.stop
            self._sent = max(self._sent, first)
        await session.answered(0)


class _Session:
    def __init__(self, publisher: Publisher, topic: Topic, epoch: int) -> None:
        self._publisher = publisher
        self._topic = topic
        self._epoch = epoch
        self._in_flight = 0
        self._failure: SeqdedupeError | None = None
        self._heard = asyncio.Event()

    async def send(self, ids: range) -> None:
        """Raises why an earlier frame was refused, when all in flight have their answers."""
        await self.answered(FRAMES_IN_FLIGHT if self._failure is None else 0)
        if self._failure is not None:
            raise self._failure
        name = self._publisher.name
        rows = [(name, sequence_id) for sequence_id in ids]
        encoded = batch(rows, epochs={name: self._epoch}, links={name: ids.start - 1}).encode()
        self._in_flight += 1
        self._topic.admit(encoded, 1, lambda answer: self._hear(ids, answer), NumbersCache())
        await asyncio.sleep(0)

    async def answered(self, left: int) -> None:
        """When no more than this many have no answer."""
        while self._in_flight > left:
            self._heard.clear()
            await self._heard.wait()
        if not left and self._failure is not None:
            raise self._failure

    def _hear(self, ids: range, answer: FrameReceipt | Refusal) -> None:
        self._in_flight -= 1
        self._heard.set()
        if isinstance(answer, Refusal):
            self._failure = self._failure or answer.error
            return
        assert self._failure is None, "something is acknowledged behind a refusal"
        assert answer.verdicts is None or UNKNOWN not in answer.verdicts.tolist(), "it was sent once in this session"
        new = iter([run.message_id(row) for run in answer.runs for row in range(run.rows)])
        for row, sequence_id in enumerate(ids):
            if answer.verdicts is None or answer.verdicts[row] == NOT_DUP:
                self._publisher.places[sequence_id] = next(new)
        self._publisher.acknowledged = ids.stop - 1


class Standing(NamedTuple):
    """A message that counts, and where it stands."""

    message_id: MessageId
    message: Received


class Found(NamedTuple):
    """What a stock client finds in a topic."""

    standing: list[Standing]
    """By the documented rules."""
    payloads: list[bytes]
    """For all entries without `seqdedupe.kind`, no matter who wrote them."""
    void: int
    """Entries with messages that do not count."""


async def found_by_a_stock_client(cluster: Cluster, topic: str) -> Found:
    """In a topic of native entries it cannot tell what counts. There the same rules are applied to what is on the wire;
    of all messages in it the stock client must have each, once."""
    found = await asyncio.to_thread(_found, cluster.service_url, topic)
    if not found.payloads or found.standing or found.void:
        return found
    payloads = found.payloads
    found, decoder, there = Found([], payloads, 0), Decoder(), list[bytes | None]()
    for entry in await native_entries(cluster, topic):
        message, (ledger_id, entry_id, _) = entry.message, entry.message_id
        rows: list[Received] = []
        if message.properties.get("seqdedupe.kind") == "batch":
            rows = list(messages(message.payload, message.properties, "", 0))
            there += [row.payload for row in rows]
        if not decoder.counts(message.properties, ledger_id, entry_id):
            found = found._replace(void=found.void + bool(rows))
            continue
        found.standing.extend(Standing(MessageId(ledger_id, entry_id, k), row) for k, row in enumerate(rows))
    assert payloads == there
    return found


async def native_entries(cluster: Cluster, topic: str) -> list[PulsarEntry]:
    """All entries, decoded."""
    reader = await open_reader(Brokers(cluster.service_url), topic, None, EntryFormat.NATIVE)
    entries: list[PulsarEntry] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await reader.is_at_end():
            last = entries[-1].message_id if entries else NOWHERE
            entries += [entry for entry in await reader.read() if entry.message_id > last]
    await reader.close()
    return entries


def _found(service_url: str, topic: str) -> Found:
    client = pulsar.Client(service_url, logger=quiet())
    try:
        reader = client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=5_000)
        found, decoder = Found([], [], 0), Decoder()
        while reader.has_message_available():
            found = _with(found, decoder, reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000)))
        return found
    finally:
        client.close()


def _with(found: Found, decoder: Decoder, entry: Any) -> Found:
    properties = entry.properties()
    kind = properties.get("seqdedupe.kind")
    if kind is None:
        found.payloads.append(entry.data())
    elif "seqdedupe.entry" not in properties:
        # The decoder refuses a topic of native entries.
        return found
    place = entry.message_id()
    if not decoder.counts(properties, place.ledger_id(), place.entry_id()):
        return found._replace(void=found.void + (kind in (None, "batch") and "seqdedupe.entry" in properties))
    of_entry = messages(entry.data(), properties, entry.partition_key(), entry.event_timestamp())
    for row, message in enumerate(of_entry):
        row = row if kind == "batch" else -1
        found.standing.append(Standing(MessageId(place.ledger_id(), place.entry_id(), row), message))
    return found


def check(found: Found, publishers: Sequence[Publisher]) -> None:
    """All that was acknowledged stands there once, in order, where it was said to stand; indexes have no holes."""
    assert [one.message.index for one in found.standing] == list(range(len(found.standing)))
    for publisher in publishers:
        own = [one for one in found.standing if one.message.producer == publisher.name]
        assert [one.message.sequence_id for one in own] == list(range(publisher.acknowledged + 1))
        for message_id, message in own:
            assert message.payload == f"{publisher.name}-{message.sequence_id}".encode()
            assert publisher.places.get(message.sequence_id, message_id) == message_id


def lost(found: Found, publishers: Sequence[Publisher]) -> Iterator[tuple[str, int]]:
    """What was acknowledged and does not count."""
    there = {(one.message.producer, one.message.sequence_id) for one in found.standing}
    for publisher in publishers:
        yield from ((publisher.name, i) for i in range(publisher.acknowledged + 1) if (publisher.name, i) not in there)


async def send_again(topic: Topic, publisher: Publisher) -> None:
    """All that was acknowledged, from the first ID on: each is a duplicate, and nothing is stored."""
    name, count, before = publisher.name, publisher.acknowledged + 1, topic.confirmed_index
    opened = await open_sessions(topic, [name], None)
    answers: list[FrameReceipt | Refusal] = []
    rows = [(name, sequence_id) for sequence_id in range(count)]
    encoded = batch(rows, epochs={name: opened.epochs[0]}).encode()
    topic.admit(encoded, 1, answers.append, NumbersCache())
    (answer,) = answers
    assert isinstance(answer, FrameReceipt)
    assert answer.verdicts is not None
    assert set(answer.verdicts.tolist()) == {DUP}
    assert topic.next_index == topic.confirmed_index == before
