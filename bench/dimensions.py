"""The table of docs/internals/performance.md: what happens in each direction in which a deployment grows.

Some four minutes.

`python -m bench.dimensions` prints it in Markdown; names of dimensions after it are those to measure.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import psutil

from bench import dirty_topics, followers, many_topics, setup
from bench.figure import percentiles_ms
from bench.publish import IN_FLIGHT, published_rows, rising
from broker_sidecar import kernels
from seqdedupe.testing import Sidecar

ROWS = 256
OPENS = 300
MOST_BATCHES = 2_000
MOST_BYTES = 100_000_000

Measure = Callable[[Path, int], str]
"""A point of a dimension, measured in a folder of its own: what the table's cell says."""


class Dimension(NamedTuple):
    """A direction, and what is measured at each point of it."""

    what: str
    points: tuple[int, ...]
    measure: Measure


def _rate(a_second: float) -> str:
    return f"{a_second / 1e6:.2f}M" if a_second >= 1e6 else f"{a_second / 1e3:.3g}k"


def _ms(seconds: list[float]) -> str:
    p50, p99 = (f"{took:.2f}" if took < 1 else f"{took:.3g}" for took in percentiles_ms(seconds).values())
    return f"{p50} / {p99} ms"


def _resident(sidecar: Sidecar) -> str:
    return f"{psutil.Process(sidecar.pid).memory_info().rss / 1e6:.0f} MB"


def names(folder: Path, count: int) -> str:
    from bench.start import fill

    asyncio.run(fill(folder / "data", 1, producers=count, tail=1))

    async def opens(address: str) -> list[float]:
        seconds = []
        async with grpc.aio.insecure_channel(address) as channel:
            for k in range(OPENS):
                began = time.perf_counter()
                await setup.open_names(channel, setup.TOPIC, [f"producer-{k % count:07d}"])
                seconds.append(time.perf_counter() - began)
        return seconds

    with Sidecar(folder) as sidecar:
        rates = [published_rows(sidecar.address, ROWS, MOST_BATCHES, IN_FLIGHT) for _ in range(3)]
        opened = setup.run(opens(sidecar.address))
        return f"{_rate(statistics.median(rates))}, {_ms(opened)}, {_resident(sidecar)}"


def topics(folder: Path, count: int) -> str:
    sidecar = Sidecar(folder)
    many_topics.start(sidecar)
    made = [f"topic-{i:05d}" for i in range(count)]
    setup.run(many_topics.make(sidecar.address, made, many_topics.AT_ONCE))
    sidecar.kill()
    seconds = many_topics.start(sidecar)
    cell = f"{seconds:.2g} s, {_resident(sidecar)}"
    sidecar.kill()
    return cell


def dirty(folder: Path, count: int) -> str:
    with Sidecar(folder, max_streams=2_000) as sidecar:
        return _ms(setup.run(dirty_topics.seconds_each(sidecar.address, count, run=0)))


def followed(folder: Path, count: int) -> str:
    with Sidecar(folder) as sidecar:
        setup.run(followers.publish_at_rate(sidecar.address, frames=1))
        with followers.following(sidecar.address, count) if count else ExitStack():
            return _ms(setup.run(followers.publish_at_rate(sidecar.address)))


def streams(folder: Path, count: int) -> str:
    async def all_of_them(address: str) -> tuple[float, list[float]]:
        began = time.perf_counter()
        one = [
            setup.publish(address, [f"p{k}"], rising(f"p{k}", ROWS), MOST_BATCHES // count, IN_FLIGHT)
            for k in range(count)
        ]
        each = [seconds for _, some in await asyncio.gather(*one) for seconds in some]
        return ROWS * len(each) / (time.perf_counter() - began), each

    with Sidecar(folder) as sidecar:
        published_rows(sidecar.address, ROWS, MOST_BATCHES, IN_FLIGHT)
        rate, each = setup.run(all_of_them(sidecar.address))
        return f"{_rate(rate)}, {_ms(each)}"


def _published(folder: Path, rows: int, payload_bytes: int) -> tuple[float, list[float]]:
    """Messages a second, and the seconds of each batch; what comes first warms up."""
    batches = min(MOST_BATCHES, MOST_BYTES // (rows * payload_bytes))
    make = rising("p", rows, b"x" * payload_bytes)
    with Sidecar(folder) as sidecar:
        setup.run(setup.publish(sidecar.address, ["p"], make, batches // 4, IN_FLIGHT, topic="first"))
        seconds, each = setup.run(setup.publish(sidecar.address, ["p"], make, batches, IN_FLIGHT))
        return rows * batches / seconds, each


def rows_a_frame(folder: Path, rows: int) -> str:
    rate, each = _published(folder, rows, 100)
    return f"{_rate(rate)}, {_ms(each)}"


def record_size(folder: Path, size: int) -> str:
    rate, each = _published(folder, 1, size)
    return f"{rate * size / 1e6:.3g} MB/s, {_ms(each)}"


def log_size(folder: Path, messages: int) -> str:
    from bench.start import fill

    asyncio.run(fill(folder / "data", ROWS, producers=1, tail=messages))
    sidecar = Sidecar(folder)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        sidecar.start()
        seconds.append(time.perf_counter() - began)
        sidecar.stop()
    return "{:.2g} s, {:.2g} s".format(*seconds)


DIMENSIONS = {
    "names": Dimension("messages/s, Open of one, memory", (1_000, 100_000, 1_000_000), names),
    "topics": Dimension("start after kill -9, memory", (100, 1_000, 10_000), topics),
    "dirty topics": Dimension("a publish, 1,000 messages/s in all", (1, 10, 100, 1_000), dirty),
    "followers": Dimension("a publish, 20,000 messages/s", (0, 1, 10, 100, 400), followed),
    "streams": Dimension("messages/s in all, a batch of 256", (1, 4, 16, 64), streams),
    "rows a frame": Dimension("messages/s, a frame of 100-byte messages", (1, 16, 256, 4_096, 65_536), rows_a_frame),
    "record size": Dimension("throughput, a message", (100, 1_000, 10_000, 100_000, 1_000_000), record_size),
    "log size": Dimension("start without a last snapshot, and with it", (1_000, 1_000_000, 4_000_000), log_size),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.dimensions", description=__doc__)
    parser.add_argument("dimensions", nargs="*", choices=[*DIMENSIONS, []], help="which; all if none is named")
    parser.add_argument("--folder", type=Path, help="where to put data: it should be on the disk to be measured")
    given = parser.parse_args()
    if kernels.prepare():
        # Or sidecars would begin with plain functions.
        kernels.compile_first()
    print("| dimension | measured (p50 / p99) | points |\n|---|---|---|", flush=True)
    for name in given.dimensions or DIMENSIONS:
        what, points, measure = DIMENSIONS[name]
        cells = []
        for point in points:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                cells.append(f"**{point:,}**: {measure(Path(folder), point)}")
        print(f"| {name} | {what} | {'; '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
