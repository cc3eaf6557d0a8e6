"""A program that has its children write to a log until they are killed. Used by `test_crash.py`.

    python crash_writer.py FOLDER INCARNATION LIE

For each line on standard input, "seed microseconds", it forks a writer, kills it with -9 after that time of writing,
and prints how many messages the writer had reported as stored. With LIE = 1 the writer reports them when it hands
them over: what a test of crashes must notice.
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

from seqdedupe.log.contract import Outcome
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import encoded_batch
from tests.log.conformance import replayed

IN_FLIGHT = 32


def fatal(reason: str) -> None:
    os._exit(3)


async def write(folder: Path, incarnation: int, seed: int, lie: bool, report: int) -> None:
    """Appends batches of messages whose sequence IDs are their indexes, for ever."""
    randomly = random.Random(seed)
    logs = EmbeddedLogs(folder, clock_ms=lambda: time.time_ns() // 1_000_000, fatal=fatal, segment_bytes=200_000)
    log = await logs.open(incarnation, 0)
    next_index = 0
    for record in await replayed(log):
        next_index = record.base_index + record.rows
    in_flight = asyncio.Semaphore(IN_FLIGHT)
    ends: list[int] = []

    def settle(outcome: Outcome) -> None:
        for _ in range(outcome.stored):
            in_flight.release()
            end = ends.pop(0)
        if outcome.stored and not lie:
            os.write(report, b"%d\n" % end)

    await log.open_for_writing(seed, seed.to_bytes(16, "big"), settle)
    os.write(report, b"%d\n" % next_index)
    while True:
        await in_flight.acquire()
        rows = randomly.choice((1, 1, 2, 10, 300))
        log.append(*encoded_batch(next_index, rows, randomly.choice((0, 10, 1000))))
        next_index += rows
        ends.append(next_index)
        if lie:
            os.write(report, b"%d\n" % next_index)


def main() -> None:
    folder, incarnation, lie = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
    for line in sys.stdin:
        seed, microseconds = map(int, line.split())
        reports, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reports)
            asyncio.run(write(folder, incarnation, seed, lie, report))
        os.close(report)
        heard = os.read(reports, 65_536)
        time.sleep(microseconds / 1e6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reports, 65_536):
            heard += more
        os.close(reports)
        print(heard.split(b"\n")[-2].decode(), flush=True)


if __name__ == "__main__":
    main()
