"""A program that has its children write to logs until they are killed. Used by `test_crash.py`.

    python -m tests.kernels tests.log.crash_writer FOLDER INCARNATIONS LIE

For each line on standard input, "seed microseconds", it forks a writer, kills it with -9 after that time of writing,
and prints how many messages of each log the writer had reported as stored. With LIE = 1 the writer reports them when it
hands them over: what a test of crashes must notice.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from seqdedupe.log.contract import Outcome
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import encoded_batch
from tests.log.conformance import replayed

IN_FLIGHT = 32


def fatal(reason: str) -> None:
    os._exit(3)


class Written:
    """One of the logs, and what was reported of it."""

    def __init__(self, number: int, log: EmbeddedLog, next_index: int, report: Callable[[bytes], int]) -> None:
        self.number = number
        self.log = log
        self.next_index = next_index
        self.ends: deque[int] = deque()
        self._report = report

    def say(self, end: int) -> None:
        self._report(b"%d %d\n" % (self.number, end))


async def write(folder: Path, incarnations: list[int], seed: int, lie: bool, report: int) -> None:
    """Appends batches of messages whose sequence IDs are their indexes, for ever."""
    randomly = random.Random(seed)
    logs = EmbeddedLogs(folder, clock_ms=lambda: time.time_ns() // 1_000_000, fatal=fatal, segment_bytes=200_000)
    in_flight = asyncio.Semaphore(IN_FLIGHT)

    def settle_of(one: Written) -> Callable[[Outcome], None]:
        def settle(outcome: Outcome) -> None:
            for _ in range(outcome.stored):
                in_flight.release()
                end = one.ends.popleft()
            if outcome.stored and not lie:
                one.say(end)

        return settle

    made = []
    for number, incarnation in enumerate(incarnations):
        log = await logs.open(incarnation, 0)
        next_index = 0
        for record in await replayed(log):
            next_index = record.base_index + record.rows
        made.append(Written(number, log, next_index, lambda said: os.write(report, said)))
    token = seed.to_bytes(16, "big")
    await asyncio.gather(*(one.log.open_for_writing(seed, token, settle_of(one)) for one in made))
    os.write(report, b"".join(b"%d %d\n" % (one.number, one.next_index) for one in made))
    while True:
        await in_flight.acquire()
        one = randomly.choice(made)
        rows = randomly.choice((1, 1, 2, 10, 300))
        one.log.append(*encoded_batch(one.next_index, rows, randomly.choice((0, 10, 1000))))
        one.next_index += rows
        one.ends.append(one.next_index)
        if lie:
            one.say(one.next_index)


def main() -> None:
    folder, lie = Path(sys.argv[1]), sys.argv[3] == "1"
    incarnations = [int(one) for one in sys.argv[2].split(",")]
    for line in sys.stdin:
        seed, microseconds = map(int, line.split())
        reports, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reports)
            asyncio.run(write(folder, incarnations, seed, lie, report))
        os.close(report)
        heard = os.read(reports, 65_536)
        time.sleep(microseconds / 1e6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reports, 65_536):
            heard += more
        os.close(reports)
        ends = [0] * len(incarnations)
        for said in heard.split(b"\n")[:-1]:
            number, end = map(int, said.split())
            ends[number] = end
        print(*ends, flush=True)


if __name__ == "__main__":
    main()
