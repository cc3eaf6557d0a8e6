"""All flights of the demo through functions.

`python -m tests.kernels tests.pulsar.functions_campaign --flights 50000 --seed 1`

Four deployments: every two of one topic or four partitions, one or two instances, and one or three results for a flight
come together in one of them.
"""

import argparse
import asyncio
import logging
import random
import tempfile
import time
from functools import partial
from pathlib import Path

from demo.flights import TOTAL
from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from tests.pulsar.functions import Case, Fault, Work, wheel_in

KILLS = 12
OTHERS = 2
"""Times each other fault."""


def cases(flights: int) -> list[Case]:
    return [
        Case(flights=flights),
        Case(flights=flights, instances=2, has_several=True),
        Case(flights=flights, partitions=4, has_several=True),
        Case(flights=flights, partitions=4, instances=2),
    ]


async def attack(home: Path, broker: Broker, folder: Path, name: str, case: Case, dice: random.Random) -> None:
    """One deployment, and its faults in any order. Raises SystemExit if a result is not there once and in its place."""
    began = time.monotonic()
    async with Work(home, broker, folder, wheel_in(folder), name, case) as work:
        faults = [work.kill] * KILLS + OTHERS * [
            *(work.doubt, work.lose_receipts, work.unload_input, work.unload_output),
            *(work.terminate, work.kill_sidecar, work.kill_broker),
        ]
        dice.shuffle(faults)
        await work.through([partial(_say_and_do, fault) for fault in faults])
        seconds = time.monotonic() - began
        wrong = await asyncio.to_thread(work.differences)
    print(f"{case}: {seconds:.0f} s", flush=True)
    if wrong:
        raise SystemExit(f"results: {dict(wrong)}")


async def _say_and_do(fault: Fault) -> None:
    print(f"  {fault.__name__}", flush=True)
    await fault()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ends with an error if a result is not there once and in its place.")
    parser.add_argument("--flights", type=int, default=TOTAL)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Planned faults are no news.
    logging.getLogger("seqdedupe").setLevel(logging.CRITICAL + 1)
    dice, home = random.Random(options.seed), get()
    for number, case in enumerate(cases(options.flights)):
        with Broker(home) as broker, tempfile.TemporaryDirectory() as folder:
            asyncio.run(attack(home, broker, Path(folder), f"flights-{number}", case, dice))
    print(f"{options.flights} flights from seed {options.seed}, four times: each result once, in order")


if __name__ == "__main__":
    main()
