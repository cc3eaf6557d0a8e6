"""kill -9 of all that services are made of, many times: `python -m tests.services.kill_campaign --kills 100`.

Rounds, each with another seed, until there were this many kills: the shop of `examples/shop` in SQLite and in
PostgreSQL, whose server is killed too; processes that share the partitions of a topic; pipes. The suite has a small
share of each.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import psycopg

from examples.shop.__main__ import verdict
from examples.shop.check import compare, sums
from examples.shop.run import Shop
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.services.pipe.test_kill import kill_pipes
from tests.services.restorable import Restorable
from tests.services.test_sharing import kill_sharers, publishing

ORDERS = 600
KILLS_EACH = 2
"""In a round, of each process."""


class ShopInPostgres(Shop):
    """One whose database is killed, too. What ends because of that is started again, as a supervisor does."""

    victims = (*Shop.victims, "database")

    def __init__(self, folder: Path, url: str, count: int, server: Restorable) -> None:
        super().__init__(folder, url, url, count)
        self._server = server

    def _kill(self, name: str) -> None:
        if name != "database":
            super()._kill(name)
            return
        self._server.kill()
        self._server.start()
        self.kills[name] = self.kills.get(name, 0) + 1

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll():
                self._start(name)


def shop(seed: int, server: Restorable | None) -> Counter[str]:
    """Who was killed how often. Raises AssertionError if the two databases do not say the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if server is None:
            urls = f"sqlite:///{folder / 'orders.db'}", f"sqlite:///{folder / 'payments.db'}"
            one = Shop(folder, *urls, ORDERS)
        else:
            urls = (url := _new_database(server, f"shop_{seed}")), url
            one = ShopInPostgres(folder, url, ORDERS, server)
        with one:
            began = time.monotonic()
            one.run(KILLS_EACH, seed)
            lines = compare(*urls, one.sidecar.address)
        assert verdict(lines, *sums(*urls), ORDERS, time.monotonic() - began) == 0
        return Counter(one.kills)


def _new_database(server: Restorable, name: str) -> str:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return server.url.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")


def main() -> None:
    """Ends with an error if anything was lost, doubled or out of order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    told = parser.parse_args()
    dice = random.Random(told.seed)
    server = Restorable(fsync="off")
    server.start()
    killed: Counter[str] = Counter()
    try:
        while killed.total() < told.kills:
            seed = dice.randrange(2**31)
            print(f"seed {seed}, {killed.total()} kills so far", flush=True)
            killed += shop(seed, None)
            killed += shop(seed, server)
            with Sidecar() as sidecar, Client(sidecar.address) as client:
                for kind in ("sqlite", "postgresql"):
                    with tempfile.TemporaryDirectory() as folder:
                        url = f"sqlite:///{folder}/database"
                        if kind == "postgresql":
                            url = _new_database(server, f"sharing_{seed}")
                        publish = publishing(client, kind)
                        kill_sharers(url, sidecar, kind, publish, KILLS_EACH, random.Random(seed))
                        killed["consumer of partitions"] += KILLS_EACH
                kill_pipes(sidecar, 2 * KILLS_EACH)
                killed["pipe"] += 2 * KILLS_EACH
    finally:
        server.stop()
    print(f"{killed.total()} kills: " + ", ".join(f"{count} of a {name}" for name, count in sorted(killed.items())))


if __name__ == "__main__":
    main()
