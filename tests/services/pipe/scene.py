"""What the tests of the pipe share: a function whose outputs are known, what must be in the target, and cancelling."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from seqdedupe.client import Client, Message
from seqdedupe.client.cursor import Cursor
from seqdedupe.names import topic_name
from seqdedupe.services.activity import Activity
from seqdedupe.services.pipe import Output
from seqdedupe.services.pipe.outputs import Function, Given, index_of
from seqdedupe.services.pipe.pipe import Lane
from seqdedupe.testing import LAST_RESORT_SECONDS


def outputs_of(payload: bytes) -> list[bytes]:
    """None, one, or several, as a number's remainder says."""
    number = int(payload)
    count = (0, 1, 1, 3, 0, 2, 1)[number % 7]
    return [b"%d/%d" % (number, k) for k in range(count)]


def function(message: Message) -> list[Given] | bytes | None:
    """Gives them in each of the forms that there are."""
    outputs = outputs_of(message.payload or b"")
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0]
    return [Output(payload, message.key) for payload in outputs]


async def publish(client: Client, topic: str, first: int, count: int, rows: int = 7, keys: int = 0) -> None:
    """Numbers, in batches of this many."""
    async with client.producer(topic, "source") as producer:
        for start in range(first, first + count, rows):
            ids = list(range(start, min(start + rows, first + count)))
            given = [b"%d" % (i % keys) for i in ids] if keys else None
            await producer.send_batch([b"%d" % i for i in ids], ids, keys=given)


Found = list[tuple[int, bytes | None]]


async def found(client: Client, topic: str) -> Found:
    """For each message in the target: the index of its input, and the payload. Their numbers are checked."""
    async with client.reader(topic) as reader:
        messages = [message async for message in reader]
    for m in messages:
        assert m.sequence_id & 1023 == int((m.payload or b"").partition(b"/")[2])
    return [(index_of(m.sequence_id), m.payload) for m in messages]


def expected(count: int, first: int = 0) -> Found:
    """What it holds when the numbers from `first` on were piped, whose indexes are from 0 on."""
    return [(i - first, payload) for i in range(first, first + count) for payload in outputs_of(b"%d" % i)]


def lane(client: Client, source: str, target: str, called: Function = function, cursor: Cursor | None = None) -> Lane:
    return Lane(client, topic_name(source), topic_name(target), called, "pipe", cursor, Activity("pipe", "pipe"))


async def run_lane(one: Lane) -> None:
    """To the end of the source."""
    executor = ThreadPoolExecutor(1)
    try:
        await one.run(executor, follow=False)
    finally:
        executor.shutdown()


class _Counting:
    """Awaits some work, and cancels its task where that waits for the k-th time."""

    def __init__(self, work: Coroutine[Any, Any, None], k: int) -> None:
        self._work = work
        self._left = k

    def __await__(self) -> Generator[Any, Any, None]:
        steps, sent, failure = self._work, None, None
        while True:
            try:
                waits_for = steps.send(sent) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            self._left -= 1
            task = asyncio.current_task()
            if self._left == 0 and task is not None:
                task.cancel()
            sent = failure = None
            try:
                sent = yield waits_for
            except BaseException as e:  # noqa: BLE001 (it is for the work)
                failure = e


async def cancelled_at(k: int, work: Coroutine[Any, Any, None]) -> bool:
    """Whether it was cancelled where it waited for the k-th time, before it had ended by itself."""

    async def counted() -> None:
        await _Counting(work, k)

    task = asyncio.create_task(counted())
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


async def until(condition: Callable[[], Awaitable[bool]], timeout_seconds: float = LAST_RESORT_SECONDS) -> None:
    """Waits for what no event tells of: `condition` is asked again and again."""
    async with asyncio.timeout(timeout_seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


if __name__ == "__main__":  # a pipe as its own process, to be killed: ADDRESS SOURCE TARGET

    async def main() -> None:
        address, source, target = sys.argv[1:]
        async with Client(address) as client:
            from seqdedupe.services.pipe import Pipe

            await Pipe(client, source, target, function, name="pipe").run(follow=True)

    asyncio.run(main())
