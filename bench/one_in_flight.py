"""One message in flight: p50 against a stream's ping-pong p50 + fdatasync p50."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import by_client, setup
from bench.echo import ECHO, SYNCED_ECHO
from bench.figure import Figure, Ratio, over, percentiles_ms, shown
from bench.publish import PAYLOAD, frame_bytes, rising
from seqdedupe.testing import Sidecar

MESSAGES = 1_500
SYNC = "append + fdatasync"

_names = itertools.count()


def _over_both(arm: str) -> Callable[[dict[str, float]], float]:
    return lambda measured: measured[arm] / (measured["ping-pong, p50"] + measured[f"{SYNC}, p50"])


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    one = frame_bytes(1)

    def published(address: str) -> dict[str, float]:
        name = f"p{next(_names)}"
        return percentiles_ms(setup.run(setup.publish(address, [name], rising(name, 1), MESSAGES, 1))[1])

    def by_the_client(address: str) -> dict[str, float]:
        return percentiles_ms(setup.run(by_client.one_in_flight(address, setup.TOPIC, PAYLOAD, MESSAGES)))

    def echoed(address: str, method: str) -> dict[str, float]:
        return percentiles_ms(setup.run(setup.echo(address, rising("p", 1), MESSAGES, 1, method))[1])

    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echo:
        yield Figure(
            arms={
                "published": lambda: published(sidecar.address),
                "by the client": lambda: by_the_client(sidecar.address),
                "ping-pong": lambda: echoed(echo, ECHO),
                "ping-pong that is synced in between": lambda: echoed(echo, SYNCED_ECHO),
                SYNC: lambda: percentiles_ms(setup.serial_append(folder, len(one), MESSAGES)),
            },
            ratios=[
                Ratio(
                    "published ÷ (ping-pong + fdatasync)",
                    _over_both("published, p50"),
                    at_most=1.6,
                    aim=1.4,
                ),
                Ratio(
                    "ping-pong that is synced in between ÷ the same",
                    _over_both("ping-pong that is synced in between, p50"),
                ),
                Ratio("by the client ÷ raw", over("by the client, p50", "published, p50")),
                shown(f"{SYNC}, p50"),
                shown(f"{SYNC}, p99"),
            ],
            notes=["arms in milliseconds"],
        )
