"""One message in flight beside a client that sends all that its share allows: the 99th percentile against alone."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.callers import Ruled, ruled
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms, shown
from seqdedupe.batch import Binary
from seqdedupe.client import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import NotFoundError

RULES = """
[[allow]]
subjects = ["shop", "flood"]
actions = ["publish", "create"]
topics = ["*"]

[[share]]
subjects = ["flood"]
bytes_per_second = 10_000_000
"""

MESSAGES = 1_000
PAYLOAD = b"x" * 100
ROWS = 256
FLOODED_MESSAGES = 200_000
"""By then it has used up what it may send at once after a pause."""

_names = itertools.count()


def _flood(address: str, token: str) -> None:
    """Sends for ever, as fast as it may."""

    async def run() -> None:
        payloads = Binary.of_all([PAYLOAD] * ROWS)
        async with (
            Client(address, credentials=Credentials(token=token)) as client,
            client.producer("f", "f") as producer,
        ):
            while True:
                await producer.send_batch(payloads)

    asyncio.run(run())


async def _behave(address: str, token: str) -> list[float]:
    """One message after the other; the seconds that each took."""
    seconds = []
    name = f"p{next(_names)}"
    async with Client(address, credentials=Credentials(token=token)) as client, client.producer("t", name) as producer:
        for _ in range(MESSAGES):
            began = time.perf_counter()
            await (await producer.send(PAYLOAD))
            seconds.append(time.perf_counter() - began)
    return seconds


async def _until_it_floods(served: Ruled) -> None:
    credentials = Credentials(token_file=served.sidecar.token_file)
    async with Client(served.sidecar.address, credentials=credentials) as client:
        first = await _last_index(client)
        while await _last_index(client) < first + FLOODED_MESSAGES:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.1)


async def _last_index(client: Client) -> int:
    try:
        return (await client.ends("f")).last.index
    except NotFoundError:
        return -1


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with ruled(folder / "sidecar", RULES) as served:
        address = served.sidecar.address

        def alone() -> dict[str, float]:
            return percentiles_ms(asyncio.run(_behave(address, served.token_of("shop"))))

        def beside() -> dict[str, float]:
            # A process of its own, as it would be: it takes nothing from this one's loop.
            flood = multiprocessing.get_context("spawn").Process(
                target=_flood, args=(address, served.token_of("flood"))
            )
            flood.start()
            try:
                asyncio.run(_until_it_floods(served))
                return percentiles_ms(asyncio.run(_behave(address, served.token_of("shop"))))
            finally:
                flood.kill()
                flood.join()

        arms: dict[str, Arm] = {"alone": alone, "beside": beside}
        yield Figure(
            arms,
            ratios=[
                Ratio("p99 beside one that floods ÷ alone", over("beside, p99", "alone, p99"), at_most=3),
                Ratio("p50 beside one that floods ÷ alone", over("beside, p50", "alone, p50")),
                shown("beside, p99"),
            ],
            notes=["arms in milliseconds a message"],
        )
