"""A pipe from one topic to another, with a function that gives the payload, against publishing the same batches alone.

Both by the client, 256 × 100 B a batch, 16 batches in flight.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import by_client, setup
from bench.figure import Figure, Ratio, over
from bench.publish import BATCHES, IN_FLIGHT, PAYLOAD, ROWS
from seqdedupe.batch import Binary
from seqdedupe.client import Client, Message
from seqdedupe.services.pipe import Function, Pipe
from seqdedupe.testing import Sidecar

SOURCE = "source"

_targets = itertools.count()


def same(message: Message) -> bytes | None:
    """The common function: it looks at the payload and gives one."""
    return message.payload


def none(message: Message) -> None:
    """A filter that lets nothing pass: what reading and calling take."""


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    payloads = Binary.of_all([PAYLOAD] * ROWS)
    with Sidecar(folder / "sidecar") as sidecar:

        def alone(topic: str) -> float:
            return setup.run(by_client.publish_batches(sidecar.address, topic, payloads, BATCHES, IN_FLIGHT))[0]

        async def pipe(function: Function) -> float:
            async with Client(sidecar.address) as client:
                one = Pipe(client, SOURCE, f"target-{next(_targets)}", function, name="bench")
                began = time.perf_counter()
                await one.run()
                return one.counts["inputs"] / (time.perf_counter() - began)

        alone(SOURCE)
        yield Figure(
            arms={
                "publishing alone": lambda: alone(f"target-{next(_targets)}"),
                "pipe": lambda: asyncio.run(pipe(same)),
                "pipe that lets nothing pass": lambda: asyncio.run(pipe(none)),
            },
            ratios=[Ratio("pipe ÷ publishing alone", over("pipe", "publishing alone"), at_least=0.5)],
            notes=["arms in messages a second"],
        )
