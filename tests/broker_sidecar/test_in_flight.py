"""On a disk that stalls, what streams hold is bounded, and what is counted is no less than what it takes."""

import asyncio
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker_sidecar import streams
from broker_sidecar.rpc import Context
from broker_sidecar.security.authentication import anybody
from broker_sidecar.services.publish_service import FRAME_BYTES, _FrameStream
from broker_sidecar.shares import MAX_SHARE_BYTES, NO_LIMITS, Budget, CallerLimits, CallerShares, Share
from broker_sidecar.streams import Stream
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import window_runs
from tests.batches import batch
from tests.topic.test_by_id import frame
from tests.topic.test_originals import Process
from tests.topic.test_window_runs import SmallPlace

STREAMS = 20
MIB = 1024 * 1024
LIMIT_SECONDS = LAST_RESORT_SECONDS


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path)
    await process.start()
    await process.open(*(f"p{k}" for k in range(STREAMS)))
    yield process
    await process.stop()


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No sync ends before this is set."""
    goes_on = threading.Event()
    really = os.fdatasync

    def sync(file: int) -> None:
        assert goes_on.wait(LIMIT_SECONDS)
        really(file)

    monkeypatch.setattr(os, "fdatasync", sync)
    yield goes_on
    goes_on.set()


def stream_of(budget: Budget) -> Stream:
    context = cast(Context, SimpleNamespace(peer=lambda: "somewhere"))
    return Stream(context, budget, anybody(context), CallerShares((), NO_LIMITS))


class Sender:
    """Publishes batches of one small message on its own stream, as long as there is room."""

    def __init__(self, process: Process, budget: Budget, name: str) -> None:
        self.publishing = _FrameStream(process.topic, stream_of(budget))
        self._process, self._name = process, name
        self.frames = 0
        self.batch_bytes = 0

    def send(self) -> bool:
        """Whether there was room."""
        k = self.frames
        encoded = batch([(self._name, k)], epochs=self._process.epochs, links={self._name: k - 1}).encode()
        if not self.publishing.has_room(len(encoded)):
            return False
        self.publishing.admit(k, encoded)
        self.frames += 1
        self.batch_bytes += len(encoded)
        return True

    @property
    def held_bytes(self) -> int:
        return self.publishing.stream.share.held_bytes


async def test_a_frame_in_flight_takes_no_more_than_is_counted(process: Process, stalled: threading.Event) -> None:
    sender = Sender(process, Budget(lambda _: None, 128 * MIB), "p0")
    # What is made once.
    for _ in range(100):
        assert sender.send()
    counted = sender.held_bytes
    tracemalloc.start()
    try:
        for _ in range(1_000):
            assert sender.send()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sender.held_bytes - counted
    assert taken <= counted
    # The batches alone are a small part of it: were they all that counts, a limit would be passed several times over.
    assert sender.batch_bytes * 3 < counted
    assert counted < 4 * taken
    stalled.set()
    await process.topic.flight.all_of_now()
    assert len(sender.publishing.unsent) == sender.frames


@pytest.mark.parametrize("limit_bytes", [1 * MIB, 4 * MIB])
async def test_all_streams_together_hold_no_more_than_the_limit(
    process: Process, stalled: threading.Event, limit_bytes: int
) -> None:
    """And each of them as much as the others."""
    budget = Budget(lambda _: None, limit_bytes)
    senders = [Sender(process, budget, f"p{k}") for k in range(STREAMS)]
    while sum(sender.send() for sender in senders):
        pass
    held = [sender.held_bytes for sender in senders]
    assert sum(held) == budget.held_bytes <= limit_bytes < MAX_SHARE_BYTES
    assert min(held) > limit_bytes / (2 * STREAMS)
    assert max(held) - min(held) <= 2 * FRAME_BYTES
    stalled.set()
    await process.topic.flight.all_of_now()
    answers = sum(map(len, (one for sender in senders for one in sender.publishing.unsent)))
    assert budget.held_bytes == answers
    assert all(sender.send() for sender in senders)
    await process.topic.flight.all_of_now()


async def test_what_was_read_keeps_others_from_being_read_and_nobody_from_being_admitted() -> None:
    budget = Budget(lambda _: None, 4 * MIB)
    reader, other = stream_of(budget).share, stream_of(budget).share
    reader.has_read(3 * MIB)
    assert not other.fits(2 * MIB, to_read=True)
    assert other.fits(2 * MIB)
    assert reader.fits(3 * MIB)
    waiting = asyncio.ensure_future(other.wait_for(2 * MIB, to_read=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.has_read(MIB)
    await waiting
    reader.has_read(0)
    assert budget.read_bytes == 0


async def test_what_waits_to_be_admitted_counts_as_read(process: Process) -> None:
    """With all that came in the same message, and no longer than it waits."""
    budget = Budget(lambda _: None, 4 * MIB)
    publishing = _FrameStream(process.topic, stream_of(budget))
    frames = [batch([("p0", k)], epochs=process.epochs, links={"p0": k - 1}).encode() for k in range(3)]
    share = publishing.stream.share
    share.take(4 * MIB)
    taking = asyncio.ensure_future(publishing.take_all(list(enumerate(frames))))
    await asyncio.sleep(0)
    assert budget.read_bytes == sum(map(len, frames))
    share.give_back(4 * MIB)
    assert await taking == max(map(len, frames))
    assert budget.read_bytes == 0
    await process.topic.flight.all_of_now()
    assert len(publishing.unsent) == len(frames)


async def test_what_was_sent_is_not_kept_until_there_is_more_to_send(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = asyncio.Event()

    class Response(bytes):
        def __del__(self) -> None:
            gone.set()

    async def write(_: bytes) -> None:
        pass

    publishing = _FrameStream(process.topic, stream_of(Budget(lambda _: None, MIB)))
    monkeypatch.setattr(publishing.stream, "write", write)
    monkeypatch.setattr(publishing, "take_unsent", lambda: (Response(publishing.unsent.popleft()), 0))
    publishing.unsent.append(b"receipt")
    publishing.news.set()
    writer = asyncio.ensure_future(publishing.send_all())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not writer.done()
    assert gone.is_set()
    writer.cancel()


async def test_a_frame_that_waited_for_room_is_looked_up_again_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of its topic are others by then."""
    store = Store.open(tmp_path / "store")
    place = SmallPlace(store, 10**9)
    await place.start()
    await place.store_each(b"a")
    await place.to_a_run()
    threads: list[threading.Thread] = []
    real = windows.read_pages

    def read_pages(*arguments: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return real(*arguments)

    monkeypatch.setattr(window_runs, "read_pages", read_pages)
    publishing = _FrameStream(place.topic, stream_of(Budget(lambda _: None, MIB)))
    share = publishing.stream.share
    share.take(MIB)
    taking = asyncio.ensure_future(publishing.take(1, frame(b"a")))
    while share._found is None:  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(0.001)
    await place.store_each(b"b")
    await place.to_a_run()
    assert not publishing.unsent
    share.give_back(MIB)
    await taking
    assert len(publishing.unsent) == 1
    assert place.stored() == [b"a", b"b"]
    assert threads
    assert threading.main_thread() not in threads
    await place.topic.close("")
    store.close()


class Memory:
    """What readers share, next to publishers."""

    def __init__(self) -> None:
        self.all = Budget(lambda _: None, 12 * MIB)
        self.reading = Budget(lambda _: None, 6 * MIB, within=self.all)
        self._shares = CallerShares((), NO_LIMITS)

    def share(self, caller: str, budget: Budget | None = None) -> Share:
        return Share(budget or self.reading, self._shares.of(caller))


async def reserving(share: Share, size: int) -> asyncio.Task[None]:
    task = asyncio.ensure_future(share.reserve(size))
    await asyncio.sleep(0)
    return task


async def test_readers_leave_half_to_publishers_and_each_caller_half_to_others() -> None:
    memory = Memory()
    first = [memory.share("a") for _ in range(4)]
    waiting = [await reserving(share, MIB) for share in first]
    assert [task.done() for task in waiting] == [True, True, True, False]
    await memory.share("b").reserve(MIB)
    assert memory.share("a", memory.all).fits(6 * MIB)
    for share, size in ((first[0], MIB), (first[1], MIB)):
        share.give_back(size)
    await asyncio.sleep(0)
    assert waiting[3].done()


async def test_publishers_never_keep_everybody_from_reading() -> None:
    memory = Memory()
    memory.share("publisher", memory.all).take(12 * MIB)
    await memory.share("a").reserve(MIB)
    waiting = await reserving(memory.share("b"), MIB)
    assert not waiting.done()
    waiting.cancel()


async def test_memory_goes_to_who_holds_least_and_to_who_has_shown_that_it_reads() -> None:
    memory = Memory()
    held = memory.share("somebody")
    held.take(4 * MIB)
    memory.share("much").take(2 * MIB)
    much, little, reads = (memory.share(caller) for caller in ("much", "little", "little"))
    reads.has_been_read = True
    waiting = [await reserving(share, MIB) for share in (much, little, reads)]
    steps = ((MIB, held, [2]), (2 * MIB, held, [1, 2]), (MIB, held, [1, 2]), (MIB, reads, [0, 1, 2]))
    for size, share, goes_on in steps:
        share.give_back(size)
        await asyncio.sleep(0)
        assert [k for k, task in enumerate(waiting) if task.done()] == goes_on


async def test_who_leaves_while_it_is_given_memory_gives_it_back() -> None:
    memory = Memory()
    share, other = memory.share("a"), memory.share("a")
    await share.reserve(5 * MIB)
    waiting = await reserving(other, 4 * MIB)
    assert not waiting.done()
    share.give_back(5 * MIB)
    assert other.held_bytes == 4 * MIB
    waiting.cancel()
    await asyncio.wait({waiting})
    assert memory.reading.held_bytes == memory.all.held_bytes == 0


def stream_for(memory: Memory, caller: str, limit_bytes: int | None = None) -> Stream:
    stream = stream_of(memory.reading)
    stream.share = memory.share(caller)
    stream.use = stream.share.use
    stream.use.limits = CallerLimits(bytes_in_flight=limit_bytes)
    return stream


async def test_a_call_whose_turn_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that go on and on come first; a share may be used up for as long."""
    monkeypatch.setattr(streams, "TURN_SECONDS", 0.1)
    for limit_bytes, reason in ((None, "QUEUE_FULL"), (4 * MIB, "SHARE_EXCEEDED")):
        memory = Memory()
        reader = memory.share("a")
        reader.has_been_read = True
        reader.take(3 * MIB)
        call = stream_for(memory, "a", limit_bytes)
        with pytest.raises(SeqdedupeError) as refused:
            async with asyncio.timeout(LAST_RESORT_SECONDS):
                await call.reserve_in_turn()
        assert refused.value.reason == reason
        assert refused.value.retry_delay_ms > 0
        assert call.share.held_bytes == 0
        reader.give_back(3 * MIB)
        assert await call.reserve_in_turn() == MIB
        call.release()
        assert memory.reading.held_bytes == memory.all.held_bytes == 0


async def test_a_call_reserves_no_more_than_half_of_its_caller_s_share() -> None:
    memory = Memory()
    calls = [stream_for(memory, "a", MIB) for _ in range(2)]
    for call in calls:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            assert await call.reserve_in_turn() == MIB // 4
    assert calls[0].use.held_bytes == MIB
