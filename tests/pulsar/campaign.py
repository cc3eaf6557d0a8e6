"""Random faults beneath loaded topics in both formats.

`python -m tests.kernels tests.pulsar.campaign --faults 100 --seed 1`
"""

import argparse
import asyncio
import logging
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from seqdedupe.log.pulsar import writer
from seqdedupe.log.pulsar.entries import EntryFormat
from tests.pulsar.faults import SEND_TIMEOUT_SECONDS, Faults, Load, check_all
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster
from tests.pulsar.publishers import Process

FAULTS_A_TOPIC = 20


async def attack(broker: Broker, dice: random.Random, faults: int, name: str, folder: Path) -> int:
    """Topics in both formats, and this many faults; how many messages were published."""
    cluster = Cluster(broker.service_url, broker.admin_url)
    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(Line(broker))
        loads = {}
        for entry_format in EntryFormat:
            topic = f"persistent://public/default/{name}-{entry_format.value}"
            await cluster.create(topic)
            process = Process(cluster, topic, entry_format, folder, f"{name}-{entry_format.value}", line)
            loads[topic] = await stack.enter_async_context(Load(process))
            await loads[topic].begin()
        for _ in range(faults):
            for load in loads.values():
                await load.goes_on()
            topic = dice.choice(list(loads))
            at_hand = Faults(broker, cluster, topic, line, loads[topic])
            fault = dice.choice(at_hand.all())
            print(f"  {topic.rpartition('/')[2]} {fault.__name__}", flush=True)
            await fault()
        for entry_format, (topic, load) in zip(EntryFormat, loads.items(), strict=True):
            await load.goes_on()
            await load.end()
            other = Process(cluster, topic, entry_format, folder, f"{name}-{entry_format.value}-other")
            await check_all(cluster, topic, load, other, entry_format)
        return sum(load.publisher.acknowledged + 1 for load in loads.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Ends with an error where something was lost or doubled, or hangs.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Planned faults are no news.
    logging.getLogger("seqdedupe").setLevel(logging.CRITICAL + 1)
    writer.SEND_TIMEOUT_SECONDS = SEND_TIMEOUT_SECONDS
    dice, messages = random.Random(options.seed), 0
    with Broker(get()) as broker, tempfile.TemporaryDirectory() as folder:
        for first in range(0, options.faults, FAULTS_A_TOPIC):
            faults = min(FAULTS_A_TOPIC, options.faults - first)
            messages += asyncio.run(attack(broker, dice, faults, f"attacked-{first}", Path(folder)))
    print(f"{options.faults} faults from seed {options.seed}: {messages} messages, none lost, none doubled")


if __name__ == "__main__":
    main()
