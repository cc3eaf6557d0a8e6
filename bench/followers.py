"""How long a publish takes at 20,000 messages a second while nobody, 10 and 100 readers follow the topic.

`python -m bench.followers ADDRESS COUNT raw` follows it so often until it is killed, on a connection each; with
`client` instead of `raw` by the product's readers, which decode what they get.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from bench import by_client, setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.publish import rising
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import read_pb2

MESSAGES_PER_SECOND = 20_000
ROWS = 20
"""A frame each millisecond, as a client with its usual linger sends them."""

FRAMES = 3_000
FOLLOWERS = (0, 10, 100)

_names = itertools.count()


async def publish_at_rate(address: str, frames: int = FRAMES) -> list[float]:
    """Publishes at the rate; the seconds for each frame from when it was due to its receipt."""
    name = f"p{next(_names)}"
    make = rising(name, ROWS)
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        call, epochs = await setup.opened(channel, [name])
        first = time.perf_counter() + 0.1
        due = [first + k * ROWS / MESSAGES_PER_SECOND for k in range(frames)]
        seconds: list[float] = []

        async def receive() -> None:
            while len(seconds) < frames:
                answers = setup.receipts(await call.read())
                now = time.perf_counter()
                seconds.extend(now - at for at in due[len(seconds) :][:answers])

        receiving = asyncio.ensure_future(receive())
        for k, at in enumerate(due):
            if (early := at - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            await call.write(setup.frame(make(k, epochs)))
        await receiving
        return seconds


async def _follow(address: str, count: int) -> None:
    """Follows the topic from its end on, on so many connections; says when all are being served."""
    request = read_pb2.ReadStreamRequest(topic=setup.TOPIC, follow=True)
    request.start.latest = True
    options = [*setup.LARGE, ("grpc.use_local_subchannel_pool", 1)]
    methods: list[Any] = [
        grpc.aio.insecure_channel(address, options).unary_stream("/seqdedupe.v1.ReadService/ReadStream")
        for _ in range(count)
    ]
    calls = [method(request.SerializeToString()) for method in methods]
    for call in calls:
        await call.read()
    _say_following()

    async def read(call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    await asyncio.gather(*(read(call) for call in calls))


def _say_following() -> None:
    print("following", flush=True)


@contextmanager
def following(address: str, count: int, how: str = "raw") -> Iterator[None]:
    """So many readers follow the topic, in a process of their own."""
    command = [sys.executable, "-m", "bench.followers", address, str(count), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "following"
            yield
        finally:
            process.kill()


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    def taking_ms(count: int, address: str, how: str = "raw") -> Arm:
        def arm() -> dict[str, float]:
            with following(address, count, how) if count else ExitStack():
                return percentiles_ms(setup.run(publish_at_rate(address)))

        return arm

    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={f"{count} followers": taking_ms(count, sidecar.address) for count in FOLLOWERS}
            | {"10 by the client": taking_ms(10, sidecar.address, "client")},
            ratios=[
                Ratio("10 followers ÷ none, p50", over("10 followers, p50", "0 followers, p50"), at_most=1.5),
                Ratio("100 followers ÷ none, p50", over("100 followers, p50", "0 followers, p50"), at_most=4),
                Ratio("10 by the client ÷ none, p50", over("10 by the client, p50", "0 followers, p50")),
                Ratio("10 followers ÷ none, p99", over("10 followers, p99", "0 followers, p99")),
                Ratio("100 followers ÷ none, p99", over("100 followers, p99", "0 followers, p99")),
            ],
            rounds=5,
            notes=["arms in milliseconds from when a frame was due to its receipt"],
        )


if __name__ == "__main__":
    if sys.argv[3] == "client":
        setup.run(by_client.follow(sys.argv[1], setup.TOPIC, int(sys.argv[2]), _say_following))
    else:
        setup.run(_follow(sys.argv[1], int(sys.argv[2])))
