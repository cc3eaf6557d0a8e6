"""What a consumer has acknowledged, against a set of indexes; and what it sends when it begins again meanwhile."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from broker_sidecar import kernels
from broker_sidecar.door.subscriptions import MAX_RANGES, Acknowledged, Subscriptions
from seqdedupe.errors import error


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_set_says(seed: int) -> None:
    rng = random.Random(seed)
    found, model = Acknowledged(3), set(range(3))
    for _ in range(200):
        if rng.random() < 0.1:
            stop = rng.randrange(80)
            found.add_all_below(stop)
            model |= set(range(stop))
        else:
            first = rng.randrange(80)
            stop = first + rng.choice((0, 1, 1, 1, 5))
            found.add(first, stop)
            model |= set(range(first, stop))
        assert found.next_index == next(i for i in range(200) if i not in model)
        for index in range(90):
            is_open = found.first_open(index)
            assert is_open == next(i for i in range(index, 200) if i not in model)
            if is_open == index:
                assert found.open_until(index) == min((i for i in model if i > index), default=found.open_until(200))


def test_ranges_that_are_too_many_come_again() -> None:
    found = Acknowledged(0)
    for index in range(1, 2 * MAX_RANGES + 10, 2):
        found.add(index, index + 1)
    assert found.first_open(1) == 2
    assert found.first_open(2 * MAX_RANGES + 5) == 2 * MAX_RANGES + 5
    found.add(0, 1)
    assert found.next_index == 2
    assert not found.has_reached_forgotten()
    for index in range(2, 2 * MAX_RANGES + 1, 2):
        found.add(index, index + 1)
    assert found.next_index == 2 * MAX_RANGES + 1
    assert found.has_reached_forgotten()
    # They come again: no reason to send them once more.
    assert not found.has_reached_forgotten()


def test_a_seek_that_has_not_taken_place() -> None:
    """The control: the client was told that it had."""
    kernels.prepare()
    from broker_sidecar.door import stock_consumer
    from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandSubscribe

    command = CommandSubscribe(topic="t", subscription="s", consumer_id=1, durable=True)
    reach: Any = SimpleNamespace(subscriptions=Subscriptions())
    consumer = stock_consumer.StockConsumer(command, "t", SimpleNamespace(), reach)  # type: ignore[arg-type]
    consumer.topic = SimpleNamespace()  # type: ignore[assignment]
    moved = error("CURSOR_MOVED", "by another process")
    consumer.seek(3)
    asyncio.run(consumer._leave(moved))
    assert consumer.gone.is_set()
    assert consumer.failed is moved


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_is_silent_because_it_reads_nothing(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """The control: nothing was read from it, so its connection stayed, and its subscriptions with it."""
    kernels.prepare()
    from broker_sidecar.door import pulsar_connection

    monkeypatch.setattr(pulsar_connection, "KEEP_ALIVE_SECONDS", 0.0)
    unread_bytes, asked, ended = [5], [0], []

    def ask() -> None:
        asked[0] += 1
        if asked[0] > 2:
            raise EOFError

    def unread() -> int:
        unread_bytes[0] -= reads
        return unread_bytes[0]

    connection: Any = SimpleNamespace(
        _is_draining=True, _is_reading=False, _ask=ask, _unread_bytes=unread, abort=lambda: ended.append(True)
    )
    with pytest.raises(EOFError):
        asyncio.run(pulsar_connection.PulsarConnection._keep_alive(connection))
    assert bool(ended) is not reads


@pytest.mark.parametrize("begins_again", ["while it waits for memory", "while it reads"])
def test_a_consumer_that_begins_again_meanwhile(monkeypatch: pytest.MonkeyPatch, begins_again: str) -> None:
    """The control: it went on where it had been, and what is not acknowledged came only after the next time."""
    kernels.prepare()
    from broker_sidecar.door import stock_consumer
    from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandSubscribe
    from seqdedupe.topic.readers import Page

    command = CommandSubscribe(topic="t", subscription="s", consumer_id=1)
    consumer = stock_consumer.StockConsumer(command, "t", SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    topic: Any = SimpleNamespace(log=SimpleNamespace(first_index=0), readable_index=10, state=None)
    consumer.topic = topic
    consumer.give_permits(1_000)
    consumer._here = 7
    sent: list[int] = []

    def once(when: str) -> None:
        if when == begins_again and not consumer._rounds:
            consumer.begin_again(None)

    async def reserve(size: int, _: int) -> int:
        once("while it waits for memory")
        return size

    async def read_page(_: object, here: int, stop: int, *__: object, **___: object) -> Page:
        # Nothing is read whose outcome is not confirmed.
        assert stop <= topic.readable_index
        once("while it reads")
        sent.append(here)
        return Page(b"", here)

    async def send(_: object, __: object, rounds: int, ___: object) -> None:
        if rounds == consumer._rounds:
            raise asyncio.CancelledError
        sent.pop()

    monkeypatch.setattr(stock_consumer, "read_page", read_page)
    monkeypatch.setattr(consumer, "_send", send)
    stream: Any = SimpleNamespace(reserve=reserve, release=lambda: None, share=SimpleNamespace(free_part=1.0))

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await consumer._deliver(topic, stream)

    asyncio.run(run())
    assert sent == [0]
