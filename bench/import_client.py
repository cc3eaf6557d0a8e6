"""CPU time of a program that imports the client, beside one that imports what it needs; and of one that publishes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio, over
from seqdedupe.testing import Sidecar

NEEDED = "import grpc.aio, numpy, google.protobuf"
GENERATED = "import grpc.aio, numpy, google.protobuf.descriptor_pb2, google.protobuf.message_factory"
"""What generated code imports too: no client of gRPC is without it."""
CLIENT = "import seqdedupe.client"
ROUNDS = 15

FIRST_MESSAGE = """
import asyncio, time
import seqdedupe.client
async def main():
    name = f"p-{{time.time_ns()}}"
    async with seqdedupe.client.Client({address!r}) as client, client.producer("t", name) as producer:
        began = time.perf_counter()
        await (await producer.send(b"first", sequence_id=0))
        first = time.perf_counter()
        await (await producer.send(b"second", sequence_id=1))
        print(first - began, time.perf_counter() - first)
asyncio.run(main())
"""


def cpu_seconds(program: str) -> float:
    """Of a process of Python that runs this program, from its start to its end."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise subprocess.CalledProcessError(status, program)
    return used.ru_utime + used.ru_stime


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder) as sidecar:

        def first_message() -> dict[str, float]:
            program = FIRST_MESSAGE.format(address=sidecar.address)
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            first, second = map(float, done.stdout.split())
            return {"first": first, "second": second}

        yield Figure(
            arms={
                "what it needs": lambda: cpu_seconds(NEEDED),
                "with generated code": lambda: cpu_seconds(GENERATED),
                "client": lambda: cpu_seconds(CLIENT),
                "message": first_message,
            },
            ratios=[
                Ratio("client ÷ what it needs", over("client", "what it needs"), at_most=1.3, aim=1.15),
                Ratio("client ÷ what any client with generated code needs", over("client", "with generated code")),
                Ratio("first message", lambda m: m["message, first"] * 1000, unit="ms"),
                Ratio("second message", lambda m: m["message, second"] * 1000, unit="ms"),
            ],
            rounds=ROUNDS,
            notes=["arms in seconds; the first two and the client's of CPU"],
        )
