"""Topics of deduplication IDs, salvaged and rebuilt: what is there is known as before, what is lost is new. 5 s."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from seqdedupe.batch import Binary, without_producers
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.doctor.salvage import salvage
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.listing import renew
from seqdedupe.topic.policy import Policy
from tests.doctor.directories import Opened, opened, segments

TOPIC = "persistent://public/default/ids"
ROWS = 16
BATCHES = 16


def ids_of(k: int) -> list[bytes]:
    return [b"id %d-%d" % (k, row) for row in range(ROWS)]


async def send(data: Opened, k: int) -> list[int]:
    """The verdicts of a batch."""
    topic = data.topics.get(TOPIC)
    answers: list[FrameReceipt | Refusal] = []
    payloads = Binary.of_all([b"payload %d" % k] * ROWS)
    topic.admit(without_producers(Binary.of_all(ids_of(k)), payloads).encode(), 1, answers.append, NumbersCache())
    await topic.flight.all_of_now()
    (answer,) = answers
    assert isinstance(answer, FrameReceipt), answer
    return [NOT_DUP] * ROWS if answer.verdicts is None else answer.verdicts.tolist()


@asynccontextmanager
async def made(directory: Path) -> AsyncIterator[Opened]:
    """A topic with BATCHES in its log, half of them in a snapshot too."""
    async with opened(directory) as data:
        await data.topics.create(TOPIC, policy=Policy(by_deduplication_id=True))
        for k in range(BATCHES):
            assert set(await send(data, k)) == {NOT_DUP}
            if k == BATCHES // 2:
                await data.topics.get(TOPIC).keeper.snapshot()
        yield data


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
async def test_what_is_salvaged_is_known(tmp_path: Path, is_damaged: bool, has_snapshot: bool) -> None:
    async with made(tmp_path / "data") as data:
        if not has_snapshot:
            topic = data.topics.get(TOPIC)
            await data.topics.store.flush(Snapshots(data.topics.store, topic.incarnation).remove())
    if is_damaged:
        damaged = segments(tmp_path / "data")[1]
        raw = bytearray(damaged.read_bytes())
        raw[200] ^= 1
        damaged.write_bytes(raw)
    made_of = await asyncio.to_thread(salvage, tmp_path / "data", tmp_path / "new")
    assert made_of.topics[0].is_copied == (not is_damaged)
    assert any("count as new" in note for note in made_of.findings.topics[0].notes) == is_damaged
    async with opened(tmp_path / "new") as data:
        assert data.topics.get(TOPIC).policy.by_deduplication_id
        verdicts = [set(await send(data, k)) for k in range(BATCHES)]
        assert verdicts.count({NOT_DUP}) == is_damaged, "what is lost is taken again"
        assert verdicts.count({DUP}) == BATCHES - is_damaged
        assert set(await send(data, BATCHES)) == {NOT_DUP}
        await data.topics.get(TOPIC).keeper.snapshot()
    async with opened(tmp_path / "new") as data:
        assert {verdict for k in range(BATCHES + 1) for verdict in await send(data, k)} == {DUP}


async def test_a_topic_that_is_rebuilt_leaves_nothing_in_flight(tmp_path: Path) -> None:
    """Also where something was, and where the store has more of the window than the log is asked for."""
    async with made(tmp_path / "data") as data:
        topic = data.topics.get(TOPIC)
        answers: list[FrameReceipt | Refusal] = []
        frame = without_producers(Binary.of_all([b"in flight"]), Binary.of_all([b"x"])).encode()
        topic.admit(frame, 1, answers.append, NumbersCache())
        rebuilt = await renew(data.topics, TOPIC, topic.incarnation, None)
        assert rebuilt is data.topics.get(TOPIC)
        window = data.topics.get(TOPIC).window
        assert window is not None
        assert window.next_index == window.confirmed_index == data.topics.get(TOPIC).next_index
        assert len(answers) == 1
        assert {verdict for k in range(BATCHES) for verdict in await send(data, k)} == {DUP}
        again: list[FrameReceipt | Refusal] = []
        data.topics.get(TOPIC).admit(frame, 1, again.append, NumbersCache())
        await data.topics.get(TOPIC).flight.all_of_now()
        assert isinstance(again[0], FrameReceipt)
        await data.topics.get(TOPIC).keeper.snapshot()
    async with opened(tmp_path / "data") as data:
        assert {verdict for k in range(BATCHES) for verdict in await send(data, k)} == {DUP}
