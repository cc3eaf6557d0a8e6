"""How long a publish takes at 20,000 messages a second beside a reader of another, large topic, against none.

`python -m bench.bulk_reader ADDRESS` reads that topic again and again until it is killed.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from bench import setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.followers import publish_at_rate
from bench.publish import rising
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import read_pb2

LARGE_TOPIC = "large"
ROWS = 256
BATCHES = 64 * 1024 * 1024 // (ROWS * 120)


async def _read(address: str) -> None:
    request = read_pb2.ReadStreamRequest(topic=LARGE_TOPIC).SerializeToString()
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method: Any = channel.unary_stream("/seqdedupe.v1.ReadService/ReadStream")
        await method(request).read()
        print("reading", flush=True)
        while True:
            call = method(request)
            while await call.read() is not grpc.aio.EOF:
                pass


@contextmanager
def _reading(address: str) -> Iterator[None]:
    """A reader in a process of its own, which has begun."""
    command = [sys.executable, "-m", "bench.bulk_reader", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        make = rising("p", ROWS)
        setup.run(setup.publish(sidecar.address, ["p"], make, BATCHES, 64, topic=LARGE_TOPIC))

        def taking_ms(is_read: bool) -> Arm:
            def arm() -> dict[str, float]:
                with _reading(sidecar.address) if is_read else ExitStack():
                    return percentiles_ms(setup.run(publish_at_rate(sidecar.address)))

            return arm

        yield Figure(
            arms={"no reader": taking_ms(False), "a bulk reader": taking_ms(True)},
            ratios=[Ratio("a bulk reader ÷ none", over("a bulk reader, p50", "no reader, p50"))],
            rounds=5,
            notes=["arms in milliseconds from when a frame was due to its receipt"],
        )


if __name__ == "__main__":
    setup.run(_read(sys.argv[1]))
