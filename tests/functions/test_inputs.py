"""What the sidecar says of inputs from a topic of native entries: their indexes, and which are void."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seqdedupe.client.client import Client, TopicEnds
from seqdedupe.client.message import Message as Stored
from seqdedupe.client.message import StoredBatch
from seqdedupe.entry_properties import SCHEMA_VERSION_OF
from seqdedupe.errors import PositionError, SeqdedupeError, error
from seqdedupe.functions import pipeline
from seqdedupe.functions.identity import InputSource, InputTopic
from seqdedupe.message_id import MessageId, MessageIds, Position
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import admin_pb2
from tests.batches import batch
from tests.functions.runtime import TOPIC, Context, Id, Message, Runtime, written

INCARNATION = 99
ROWS = 10
NATIVE, PLAIN = admin_pb2.ENTRY_FORMAT_NATIVE, admin_pb2.ENTRY_FORMAT_PLAIN


def entry(number: int, *, first_index: int = 0, ledger_id: int = 7, entry_id: int | None = None) -> StoredBatch:
    """The so-manieth batch, of ten messages: every second entry is void, or has no messages."""
    rows = [("p", ROWS * number + row) for row in range(ROWS)]
    ids = MessageIds.of([(ROWS, ledger_id, 2 * number if entry_id is None else entry_id, 0)])
    return StoredBatch(batch(rows), first_index + ROWS * number, 0, INCARNATION, 5, ids)


class Sidecar:
    """As `Client`: a topic with these batches, and what is published later."""

    def __init__(self, batches: Sequence[StoredBatch], entry_format: admin_pb2.EntryFormat.ValueType = NATIVE) -> None:
        self.batches = list(batches)
        self.admin = self
        self.entry_format = entry_format
        self.unavailable = 0
        """The number of calls that fail."""
        self.recovering = 0
        """The number of calls that find the topic recovering."""
        self.begun: list[int] = []
        """The indexes at which readers have begun."""
        self._more = asyncio.Event()

    def publish(self, one: StoredBatch) -> None:
        self.batches.append(one)
        self._more.set()

    async def topic(self, topic: str) -> SimpleNamespace:
        if self.unavailable:
            self.unavailable -= 1
            raise error("UNREACHABLE", "no sidecar answers")
        return SimpleNamespace(entry_format=0 if self.recovering else self.entry_format)

    async def ends(self, topic: str) -> TopicEnds:
        if self.recovering:
            self.recovering -= 1
            raise error("RECOVERING", "where the topic ends is not known yet")
        if not self.batches:
            return TopicEnds(0, Position.before(INCARNATION, 0))
        return TopicEnds(self.batches[0].base_index, self.batches[-1].position(ROWS - 1))

    async def position_at(self, topic: str, index: int) -> Position:
        first_index = self.batches[0].base_index
        stored = self.batches[(index - first_index) // ROWS]
        return stored.position(index - stored.base_index)

    def reader(self, topic: str, start: int, **_: Any) -> "Sidecar.Reader":
        self.begun.append(start)
        return Sidecar.Reader(self, start)

    class Reader:
        def __init__(self, sidecar: "Sidecar", start: int) -> None:
            self._sidecar, self._next = sidecar, start

        async def next_batch(self) -> StoredBatch:
            while True:
                for stored in self._sidecar.batches:
                    if self._next < stored.base_index + ROWS:
                        rest = stored.rest(self._next - stored.base_index)
                        self._next = stored.base_index + ROWS
                        return rest
                self._sidecar._more.clear()
                await self._sidecar._more.wait()

        async def close(self) -> None:
            pass


def read(sidecar: Sidecar) -> InputTopic:
    return InputTopic(cast(Client, sidecar), TOPIC)


async def index_of(topic: InputTopic, message_id: MessageId) -> int | None:
    if not topic.covers(message_id):
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await topic.read_up_to(message_id)
    found = topic.message(message_id)
    return None if found is None else found.index


async def test_messages_have_their_indexes_and_void_entries_none() -> None:
    topic = read(Sidecar([entry(number) for number in range(5)]))
    ids = [MessageId(7, one, row) for one in range(9) for row in range(ROWS)]
    expected = [None if one.entry_id % 2 else one.entry_id // 2 * ROWS + one.batch_index for one in ids]
    assert [await index_of(topic, one) for one in ids] == expected


@pytest.mark.parametrize("entry_id", [0, 6, 7, 40, 197])
async def test_it_begins_anywhere_and_goes_back_when_messages_come_again(entry_id: int) -> None:
    sidecar = Sidecar([entry(number) for number in range(100)])
    topic = read(sidecar)
    for one in (MessageId(7, entry_id, 3), MessageId(7, entry_id, 4), MessageId(7, 198, 0), MessageId(7, 2, 1)):
        is_void = one.entry_id % 2
        assert await index_of(topic, one) == (None if is_void else one.entry_id // 2 * ROWS + one.batch_index)
    assert sidecar.begun[-1] == ROWS + 1


async def test_what_the_sidecar_has_not_confirmed_is_waited_for() -> None:
    """A void entry at the end too: until a later message is there, it may be one that counts."""
    sidecar = Sidecar([])
    topic = read(sidecar)
    asking = asyncio.ensure_future(index_of(topic, MessageId(7, 1, 0)))
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not sidecar.begun:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
        sidecar.publish(entry(0))
        while topic.message(MessageId(7, 0, 9)) is None:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
    assert not asking.done()
    sidecar.publish(entry(1))
    assert await asking is None
    assert await index_of(topic, MessageId(7, 2, 9)) == 19


async def test_what_was_removed_is_no_void_entry() -> None:
    sidecar = Sidecar([entry(number, first_index=1000) for number in range(3)])
    assert await index_of(read(sidecar), MessageId(7, 0, 0)) == 1000
    with pytest.raises(PositionError, match="POSITION_TRIMMED") as refused:
        await index_of(read(sidecar), MessageId(6, 5, 0))
    assert f"--messageId 7:0 {TOPIC}" in refused.value.hint


async def test_a_sidecar_that_does_not_answer_is_waited_for() -> None:
    sidecar = Sidecar([entry(0)])
    sidecar.unavailable = 2
    topic = read(sidecar)
    assert await index_of(topic, MessageId(7, 0, 0)) == 0
    assert topic.trouble is None


async def test_a_topic_that_recovers_and_does_not_know_its_format_is_waited_for() -> None:
    sidecar = Sidecar([entry(0)])
    sidecar.recovering = 2
    assert await index_of(read(sidecar), MessageId(7, 0, 0)) == 0


async def test_a_topic_of_another_format_has_no_indexes_here() -> None:
    with pytest.raises(SeqdedupeError, match="written by no sidecar"):
        await index_of(read(Sidecar([entry(0)], PLAIN)), MessageId(7, 0, 0))


def runtime(monkeypatch: pytest.MonkeyPatch, identity: str) -> Runtime:
    sidecar = Sidecar([entry(number) for number in range(3)])
    monkeypatch.setattr(pipeline, "InputTopic", lambda _, topic: read(sidecar))
    return Runtime("127.0.0.1:1", "tests.functions.examples.Odd", identity=identity)


def of_kind(kind: str, entry_id: int) -> Message:
    return Message(b"", Id(entry_id, 0), properties={"seqdedupe.kind": kind})


def test_native_entries_without_messages_and_void_ones_are_acknowledged_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    started = runtime(monkeypatch, "index")
    started.give([of_kind("marker", 0), Message(b"0", Id(0, 0)), Message(b"void", Id(1, 0)), of_kind("control", 3)])
    started.until_acknowledged(4)
    assert started.instance is not None
    assert started.instance.counts["void"] == 1
    started.instance.close()


def test_a_place_that_a_message_among_native_entries_claims_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all messages up to its index would count as duplicates."""
    started = runtime(monkeypatch, "index")
    forged = Message(b"8", Id(1, 0), properties=written(1_000_000, incarnation=INCARNATION))
    started.give([Message(b"0", Id(0, 0)), forged, Message(b"2", Id(2, 0))])
    started.until_acknowledged(3)
    assert started.instance is not None
    assert started.instance.counts["void"] == 1
    started.instance.close()


def test_native_entries_by_their_message_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, void entries would have outputs."""
    started = runtime(monkeypatch, "message_id")
    with pytest.raises(SeqdedupeError, match="native entries") as refused:
        started.give([of_kind("marker", 0)])
    assert (refused.value.reason, "identity" in refused.value.hint) == ("INVALID_FUNCTION", True)
    assert started.instance is not None
    started.instance.close()


def test_an_output_has_the_properties_of_its_input_without_the_version_of_its_schema() -> None:
    """Which consumers of the output would look for in the output's topic."""
    given = Context(Runtime("127.0.0.1:1", "tests.functions.examples.Copy"))
    given.message = Message(b"p", Id(0, 0), properties={"a": "b"})
    source = InputSource(given)
    told = {"a": "b", SCHEMA_VERSION_OF: "0000000000000000"}
    ids = MessageIds.of([(1, 7, 0, 0)])
    source.restore_from(Stored(StoredBatch(batch([("p", 0)], row_properties=[told]), 0, 0, INCARNATION, 5, ids), 0))
    assert source.output("out", b"p").properties == {"a": "b"}
    assert source.dead_letter("out", b"p", {}).properties == {"a": "b"}
