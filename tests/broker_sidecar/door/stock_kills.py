"""Producers of stock clients, and kills of the clients, of sidecars with doors, and of brokers: what the log holds.

    python -m tests.kernels tests.broker_sidecar.door.stock_kills --kills 100 --seed 1
    python -m tests.kernels tests.broker_sidecar.door.stock_kills --clients python,java,go --log pulsar --kills 100

With `--log pulsar`, two sidecars serve the topic, and it is unloaded too. The control comes first: the same clients at
a broker that deduplicates lose messages.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pulsar

from pulsar_broker.distribution import Unavailable, home
from pulsar_broker.standalone import Broker, free_port
from seqdedupe.client.blocking import Client
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.message_id import MessageId
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.door.several import WORKERS, first_of_free_ports, kill_worker
from tests.broker_sidecar.door.stock_processes import RIGHT, StockProcess, Stored, Verdict, command_of
from tests.broker_sidecar.test_workers import topics_of
from tests.pulsar.owners import Cluster, quiet

A_ROUND = 20
"""This many kills are of one load."""

PAUSE_MS = 20
SLOW_PAUSE_MS = 60
"""Before a broker, which stores each message as an entry."""

ANY = ("kill_client",) * 6 + ("kill_sidecar",) * 4 + ("kill_client_and_sidecar",) * 2
ANY_OF_CLUSTER = (*ANY, *("kill_owner_for_long",) * 3, "kill_all_sidecars", "kill_broker", *("unload",) * 3)
"""Faults, as often as they are chosen."""

ENTRY_FORMATS = ("plain", "packed", "native")

Commands = dict[str, list[str]]
"""The commands of the clients' programs."""


class Result(NamedTuple):
    """What a round has shown."""

    faults: Counter[str]
    acknowledged: Counter[str]
    """Messages, by client."""
    verdicts: dict[str, Verdict]
    refused: Counter[str]

    @property
    def kills(self) -> int:
        return self.faults.total() - self.faults["unload"]


class Faults:
    """What can happen. Each method returns when it has happened; all goes on after that."""

    def __init__(
        self,
        rng: random.Random,
        processes: Sequence[StockProcess],
        sidecars: Sequence[Sidecar],
        topic: str,
        broker: Broker | None = None,
    ) -> None:
        self._rng = rng
        self._processes = processes
        self._next = itertools.cycle(processes)
        self._sidecars = sidecars
        self._topic = topic
        self._broker = broker
        self.counted: Counter[str] = Counter()
        """By what was killed."""

    def happen(self, name: str) -> None:
        """At a random moment."""
        time.sleep(self._rng.uniform(0, 0.02))
        getattr(self, name)()
        self.go_on()

    def go_on(self) -> None:
        for process in self._processes:
            process.wait_for_more()

    def _kill_client(self) -> StockProcess:
        client = next(self._next)
        client.kill()
        self.counted[client.client] += 1
        return client

    def _kill_sidecar(self) -> Sidecar:
        sidecar = self._rng.choice(self._sidecars)
        sidecar.kill()
        self.counted["sidecar"] += 1
        return sidecar

    def kill_client(self) -> None:
        self._kill_client().start_again()

    def kill_sidecar(self) -> None:
        self._kill_sidecar().start()

    def kill_client_and_sidecar(self) -> None:
        """The client is back first."""
        client, sidecar = self._kill_client(), self._kill_sidecar()
        client.start_again()
        sidecar.start()

    def kill_owner_for_long(self) -> None:
        """Until all have gone on at the other sidecar. This kills the one that all are connected to."""
        for sidecar in self._sidecars:
            sidecar.kill()
            self.counted["sidecar"] += 1
            self.go_on()
            sidecar.start()

    def kill_all_sidecars(self) -> None:
        for sidecar in self._sidecars:
            sidecar.kill()
            self.counted["sidecar"] += 1
        for sidecar in self._sidecars:
            sidecar.start()

    def kill_broker(self) -> None:
        assert self._broker is not None
        self._broker.kill()
        self.counted["broker"] += 1
        self._broker.start()

    def kill_worker(self) -> None:
        [sidecar] = self._sidecars
        kill_worker(sidecar, self._rng.randrange(WORKERS))
        self.counted["worker"] += 1

    def unload(self) -> None:
        assert self._broker is not None
        asyncio.run(PulsarAdmin(AdminUrl(self._broker.admin_url)).unload(self._topic))
        self.counted["unload"] += 1


def attack(faults: Faults, plan: Iterator[str] | Sequence[str], kills: int) -> None:
    """The faults of the plan, until this many processes were killed or the plan ends."""
    faults.go_on()
    for name in plan:
        if faults.counted.total() - faults.counted["unload"] >= kills:
            return
        faults.happen(name)


def forever(rng: random.Random, names: Sequence[str]) -> Iterator[str]:
    while True:
        yield rng.choice(names)


def processes_of(commands: Commands, folder: Path, rng: random.Random, pause_ms: int) -> list[StockProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    return [StockProcess(client, command, folder, rng, pause_ms) for client, command in commands.items()]


def result_of(faults: Faults, processes: Sequence[StockProcess], stored: Sequence[Stored]) -> Result:
    acknowledged = Counter({process.client: len(process.acknowledged) for process in processes})
    verdicts = {process.client: process.judge(stored) for process in processes}
    return Result(faults.counted, acknowledged, verdicts, sum((one.refused for one in processes), Counter[str]()))


def stored_in(addresses: str, topic: str) -> list[Stored]:
    """All messages of a topic of a sidecar."""
    with Client(addresses) as client, client.reader(topic) as reader:
        stored = []
        for message in reader:
            assert message.producer_name is not None
            assert message.payload == f"{message.producer_name}/{message.sequence_id}".encode()
            stored.append(Stored(message.producer_name, message.sequence_id, message.message_id))
        return stored


def round_at_sidecar(
    folder: Path,
    commands: Commands,
    seed: int,
    plan: Sequence[str] = (),
    kills: int = A_ROUND,
    *,
    deduplicates: bool = True,
) -> Result:
    """One sidecar with its own log. Without a plan, the faults are random."""
    rng = random.Random(seed)
    address = f"127.0.0.1:{free_port()}"
    processes = processes_of(commands, folder, rng, PAUSE_MS)
    with Sidecar(folder / "sidecar", pulsar_listen=address, deduplication_entries_interval=50) as sidecar:
        with Client(sidecar.address) as client:
            client.admin.create_topic("stock", deduplication_enabled=deduplicates)
        faults = Faults(rng, processes, [sidecar], "stock")
        run(faults, processes, f"pulsar://{address}", "stock", plan or forever(rng, ANY), kills)
        stored = stored_in(sidecar.address, "stock")
        check_log([sidecar])
    return result_of(faults, processes, stored)


def round_at_workers(folder: Path, commands: Commands, seed: int, plan: Sequence[str]) -> Result:
    """Workers of one sidecar. The clients know the door of the first, and the last has the topic."""
    rng = random.Random(seed)
    address = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    [topic] = topics_of(WORKERS - 1, WORKERS, 1)
    processes = processes_of(commands, folder, rng, PAUSE_MS)
    with Sidecar(folder / "sidecar", workers=WORKERS, pulsar_listen=address) as sidecar:
        faults = Faults(rng, processes, [sidecar], topic)
        run(faults, processes, f"pulsar://{address}", topic, plan, A_ROUND)
        stored = stored_in(sidecar.address, topic)
        check_log([sidecar])
    return result_of(faults, processes, stored)


def run(
    faults: Faults,
    processes: Sequence[StockProcess],
    url: str,
    topic: str,
    plan: Iterator[str] | Sequence[str],
    kills: int,
) -> None:
    """Load and faults, until all that was sent is acknowledged."""
    try:
        for process in processes:
            process.start(url, topic)
        attack(faults, plan, kills)
        for process in processes:
            process.finish()
    finally:
        for process in processes:
            process.kill()


def check_log(sidecars: Sequence[Sidecar]) -> None:
    """No sidecar has logged a defect."""
    found = [entry for sidecar in sidecars for entry in sidecar.log if "exception" in entry]
    assert not found, found[:2]


def round_at_two_sidecars(
    folder: Path,
    commands: Commands,
    seed: int,
    broker: Broker,
    plan: Sequence[str] = (),
    kills: int = A_ROUND,
) -> Result:
    """Two sidecars in front of a broker, which send clients to each other's doors. Either may own the topic."""
    rng = random.Random(seed)
    namespace = f"public/kills-{folder.name}-{seed}"
    topic = f"persistent://{namespace}/stock"
    policies = {"subscription_expiration_time_minutes": 0}
    asyncio.run(AdminUrl(broker.admin_url).call("PUT", f"namespaces/{namespace}", policies))
    processes = processes_of(commands, folder, rng, SLOW_PAUSE_MS)
    doors = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    standby = rng.random() < 0.5
    sidecars = [
        Sidecar(
            folder / f"sidecar-{k}",
            pulsar_listen=door,
            pulsar_namespaces=namespace,
            instance_name=f"sidecar-{k}",
            standby=standby,
            deduplication_entries_interval=50,
            **broker.sidecar_keys,
        )
        for k, door in enumerate(doors)
    ]
    addresses = ",".join(sidecar.address for sidecar in sidecars)
    try:
        for sidecar in sidecars:
            sidecar.keys["peers"] = addresses
            sidecar.start()
        with Client(addresses) as client:
            client.admin.create_topic(topic, entry_format=rng.choice(ENTRY_FORMATS))
        faults = Faults(rng, processes, sidecars, topic, broker)
        run(faults, processes, f"pulsar://{','.join(doors)}", topic, plan or forever(rng, ANY_OF_CLUSTER), kills)
        stored = stored_in(addresses, topic)
        check_log(sidecars)
    finally:
        for sidecar in sidecars:
            sidecar.kill()
    return result_of(faults, processes, stored)


def round_at_broker(folder: Path, commands: Commands, seed: int, broker: Broker, kills: int) -> Result:
    """The control: the clients alone are killed, at a broker that deduplicates."""
    rng = random.Random(seed)
    topic = f"persistent://public/default/control-{folder.parent.name}-{folder.name}-{seed}"
    asyncio.run(Cluster(broker.service_url, broker.admin_url).create(topic))
    processes = processes_of(commands, folder, rng, SLOW_PAUSE_MS)
    faults = Faults(rng, processes, [], topic, broker)
    run(faults, processes, broker.service_url, topic, ["kill_client"] * kills, kills)
    client = pulsar.Client(broker.service_url, logger=quiet())
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    stored = []
    while reader.has_message_available():
        message = reader.read_next()
        place = message.message_id()
        name, _, number = message.data().decode().partition("/")
        stored.append(Stored(name, int(number), MessageId(place.ledger_id(), place.entry_id(), place.batch_index())))
    client.close()
    return result_of(faults, processes, stored)


def campaign(commands: Commands, kills: int, seed: int, *, at_broker: bool) -> None:
    """Round after round, until this many processes were killed. Raises AssertionError if a verdict is not right."""
    faults, acknowledged, refused = Counter[str](), Counter[str](), Counter[str]()
    done = 0
    for number in itertools.count():
        if done >= kills:
            break
        with tempfile.TemporaryDirectory() as name:
            folder, some = Path(name), min(A_ROUND, kills - done)
            if at_broker:
                with Broker(home()) as broker:
                    if not number:
                        control(commands, folder / "control", seed, broker)
                    found = round_at_two_sidecars(folder / "round", commands, seed + number, broker, (), some)
            else:
                found = round_at_sidecar(folder, commands, seed + number, (), some)
        done += found.kills
        faults += found.faults
        acknowledged += found.acknowledged
        refused += found.refused
        wrong = {client: verdict for client, verdict in found.verdicts.items() if verdict != RIGHT}
        assert not wrong, f"round {number} from seed {seed}: {wrong}"
        print(f"{done} kills: {dict(faults)}; acknowledged: {dict(acknowledged)}", flush=True)
    for why, count in refused.most_common(10):
        print(f"{count} times not opened at once: {why}")


def control(commands: Commands, folder: Path, seed: int, broker: Broker) -> None:
    """Print what the clients lose at a broker. Raises AssertionError if they lose nothing."""
    found = round_at_broker(folder, commands, seed, broker, 10 * len(commands))
    for client, verdict in found.verdicts.items():
        print(f"the control: {client} lost {len(verdict.lost)} of {found.acknowledged[client]} messages", flush=True)
        assert verdict.lost, "the control shows nothing"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", default="python", help="of python, java and go, with commas between")
    parser.add_argument("--log", choices=("embedded", "pulsar"), default="embedded")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as programs:
        try:
            commands = {client: command_of(client, Path(programs)) for client in options.clients.split(",")}
        except Unavailable as e:
            sys.exit(f"A client is missing: {e}")
        campaign(commands, options.kills, options.seed, at_broker=options.log == "pulsar")


if __name__ == "__main__":
    main()
