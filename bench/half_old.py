"""Batches of 256 rows of which half are old, within the ring of recent messages and beyond it, against all new."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import numpy as np

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import BATCHES, IN_FLIGHT, PAYLOAD, ROWS, published_rows
from seqdedupe.batch import Batch, Binary, single_producer
from seqdedupe.core.recent import RECENT_MESSAGES
from seqdedupe.testing import Sidecar

HALF = ROWS // 2
WITHIN = 2 * IN_FLIGHT
"""So many batches before it, half of a batch was new: it has settled by then."""
BEYOND = 3 * RECENT_MESSAGES // 2 // HALF

_names = itertools.count()


def half_old(name: str, back: int) -> setup.MakeBatch:
    """Each batch sends the second half of the one so many before it again; the first ones have no old half."""
    payloads = {rows: Binary.of_all([PAYLOAD] * rows) for rows in (HALF, ROWS)}

    def make(k: int, epochs: np.ndarray) -> Batch:
        new = np.arange(k * HALF, (k + 1) * HALF)
        ids = new if k < back else np.concatenate([new - back * HALF, new])
        # The link: the highest ID sent below the first one, which is the one before it.
        return single_producer(name.encode(), int(epochs[0]), int(ids[0]) - 1, ids, payloads[len(ids)])

    return make


async def _seconds(address: str, back: int) -> float:
    name = f"half-{next(_names)}"
    make = half_old(name, back)
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        stream = await setup.opened(channel, [name])
        await stream.publish(make, back, IN_FLIGHT)
        return (await stream.publish(lambda k, epochs: make(back + k, epochs), BATCHES, IN_FLIGHT))[0]


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    def half(address: str, back: int) -> float:
        return ROWS * BATCHES / setup.run(_seconds(address, back))

    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={
                "half old": lambda: half(sidecar.address, WITHIN),
                "half old, beyond the ring": lambda: half(sidecar.address, BEYOND),
                "all new": lambda: published_rows(sidecar.address, ROWS, BATCHES, IN_FLIGHT),
            },
            ratios=[
                Ratio("half old ÷ all new", over("half old", "all new"), at_least=0.6),
                Ratio(
                    "half old, beyond the ring ÷ all new", over("half old, beyond the ring", "all new"), at_least=0.6
                ),
            ],
            notes=["arms in rows sent a second"],
        )
