"""Compares the clients for Java and Python on one sidecar, in interleaved pairs: ready batches of 200 messages of 100
bytes, 16 in flight, and the median with one message in flight.

    mvn test-compile dependency:build-classpath -Dmdep.outputFile=target/classpath
    ../../.venv/bin/python throughput.py
"""

import asyncio
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from bench import by_client  # noqa: E402
from seqdedupe.batch import Binary  # noqa: E402
from seqdedupe.testing import Sidecar  # noqa: E402

PAIRS, WARM_UPS, BATCHES, SINGLES = 7, 3, 2_000, 400


def python(address: str) -> tuple[float, float]:
    payloads = Binary.of_all([b"x" * 100] * 200)
    rate, _ = asyncio.run(by_client.publish_batches(address, "throughput", payloads, BATCHES, 16))
    each = asyncio.run(by_client.one_in_flight(address, "throughput", b"x" * 100, SINGLES))
    return rate, 1000 * statistics.median(each)


def main() -> None:
    classpath = f"target/classes:target/test-classes:{(HERE / 'target/classpath').read_text().strip()}"
    with Sidecar() as sidecar:
        command = [
            "java",
            "-cp",
            classpath,
            "dev.seqdedupe.client.Throughput",
            sidecar.address,
            str(BATCHES),
            str(SINGLES),
        ]
        with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as java:
            assert java.stdin is not None  # noqa: S101
            assert java.stdout is not None  # noqa: S101

            def measured(name: str) -> tuple[float, float]:
                java.stdin.write(name + "\n")
                java.stdin.flush()
                rate, median_ms = map(float, java.stdout.readline().split())
                return rate, median_ms

            for k in range(WARM_UPS):
                measured(f"warm-{k}")
            python(sidecar.address)
            pairs = [(measured(f"java-{k}"), python(sidecar.address)) for k in range(PAIRS)]
            java.stdin.close()
    for of_java, of_python in pairs:
        print("java {:9,.0f}/s {:.3f} ms".format(*of_java), "python {:9,.0f}/s {:.3f} ms".format(*of_python))
    print(f"ready batches, java ÷ python: {statistics.median(j[0] / p[0] for j, p in pairs):.2f}")
    print(f"one in flight, java ÷ python: {statistics.median(j[1] / p[1] for j, p in pairs):.2f}")


if __name__ == "__main__":
    main()
