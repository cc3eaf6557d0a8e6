"""One message in flight: p50 against a stream's ping-pong p50 + fdatasync p50."""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import setup
from bench.echo import ECHO, SYNCED_ECHO
from bench.figure import Figure, Ratio
from bench.publish import frame_bytes, rising
from tests.sidecar import Sidecar

MESSAGES = 1_500

_names = itertools.count()


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    one = frame_bytes(1)

    def published(address: str) -> float:
        name = f"p{next(_names)}"
        _, seconds = setup.run(setup.publish(address, [name], rising(name, 1), MESSAGES, 1))
        return statistics.median(seconds) * 1000

    def echoed(address: str, method: str) -> float:
        return statistics.median(setup.run(setup.echo(address, one, MESSAGES, 1, method))[1]) * 1000

    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echo:
        yield Figure(
            arms={
                "published": lambda: published(sidecar.address),
                "ping-pong": lambda: echoed(echo, ECHO),
                "ping-pong that is synced in between": lambda: echoed(echo, SYNCED_ECHO),
                "append + fdatasync": lambda: statistics.median(setup.serial_append(folder, len(one), MESSAGES)) * 1000,
            },
            ratios=[
                Ratio(
                    "published ÷ (ping-pong + fdatasync)",
                    lambda m: m["published"] / (m["ping-pong"] + m["append + fdatasync"]),
                    at_most=1.6,
                    aim=1.4,
                ),
                Ratio(
                    "ping-pong that is synced in between ÷ the same",
                    lambda m: m["ping-pong that is synced in between"] / (m["ping-pong"] + m["append + fdatasync"]),
                ),
            ],
            notes=["arms in milliseconds, p50"],
        )
