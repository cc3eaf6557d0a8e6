"""Compares the Go client with the Python client, on one sidecar, in interleaved pairs:

python clients/go/cmd/bench/pairs.py [PAIRS] [SECONDS]
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seqdedupe.batch import Binary
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar

ROWS, SIZE = 200, 100


async def python(address: str, topic: str, seconds: float) -> tuple[float, float]:
    """Messages per second, and the median latency in milliseconds."""
    payloads = Binary.of_all([bytes(SIZE)] * ROWS)
    async with Client(address) as client, client.producer(topic, "bench") as producer:
        began, sent = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            await producer.send_batch(payloads)
            sent += ROWS
        await producer.flush()
        rate = sent / (time.perf_counter() - began)
        times = []
        began = time.perf_counter()
        while (start := time.perf_counter()) - began < seconds / 2:
            await (await producer.send(bytes(SIZE)))
            times.append(time.perf_counter() - start)
        return rate, statistics.median(times) * 1000


def main(pairs: int, seconds: float) -> None:
    folder = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as place, Sidecar() as sidecar:
        program = f"{place}/bench"
        subprocess.run(["go", "build", "-o", program, "./cmd/bench"], cwd=folder, check=True)
        ratios, slower = [], []
        for k in range(pairs):
            of_python = asyncio.run(python(sidecar.address, f"python-{k}", seconds))
            command = [program, sidecar.address, f"go-{k}", str(seconds)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            of_go = [float(number) for number in printed.split()]
            ratios.append(of_go[0] / of_python[0])
            slower.append(of_go[1] / of_python[1])
            print(f"go {of_go[0]:,.0f}/s p50 {of_go[1]} ms; python {of_python[0]:,.0f}/s p50 {of_python[1]:.3f} ms")
        print(f"medians, go / python: rate {statistics.median(ratios):.2f}, p50 {statistics.median(slower):.2f}")


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["5"])[0]), float((sys.argv[2:3] or ["3"])[0]))
