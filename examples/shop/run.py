"""The run: all services as processes, each of which is killed while it works and started again."""

import random
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from examples.shop.payments import TOPICS
from examples.shop.tables import BOOKINGS, ORDERS, connect, make_orders_database, make_payments_database
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Patience, Sidecar

PYTHON = sys.executable
POLL_SECONDS = 0.02
BROKEN = 1
"""Of all messages, so many are booked by nobody."""


LAST_KILL_AT = 0.9
"""The part of all orders that is placed, or booked, then."""


class Progress(NamedTuple):
    """How many orders there are, and how many of them are booked."""

    ordered: int
    booked: int


class Fault(NamedTuple):
    """Whom to kill, and when: the order service by what is ordered, all others by what is booked."""

    victim: str
    at: int

    def is_due(self, progress: Progress) -> bool:
        """Whether it has come so far."""
        return (progress.ordered if self.victim == "order service" else progress.booked) >= self.at


class Shop:
    """`with Shop(folder, orders_url, payments_url, count) as shop`: no process of it is left afterwards."""

    victims: tuple[str, ...] = ("order service", "relay", "payment service 1", "payment service 2", "sidecar")

    def __init__(self, folder: Path, orders_url: str, payments_url: str, count: int) -> None:
        self.sidecar = Sidecar(folder)
        self.kills: dict[str, int] = {}
        self._folder = folder
        self._count = count
        self._urls = orders_url, payments_url
        self._engines = connect(orders_url), connect(payments_url)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._progress = Progress(0, 0)
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for engine in self._engines:
            engine.dispose()
        self.sidecar.kill()

    def _command(self, name: str) -> list[str]:
        orders_url, payments_url = self._urls
        address = self.sidecar.address
        if name == "order service":
            return [PYTHON, "-m", "examples.shop.orders", orders_url, str(self._count)]
        if name == "relay":
            command = [str(Path(PYTHON).with_name("seqdedupe")), "outbox", "relay", "--database", orders_url]
            return [*command, "--topic", "shop-{aggregatetype}", "--producer", "shop", "--address", address]
        return [PYTHON, "-m", "examples.shop.payments", address, payments_url]

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _start(self, name: str) -> None:
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(self._command(name), stdin=subprocess.DEVNULL, stderr=log)

    def run(self, kills: int, seed: int = 0) -> None:
        """Until all is booked. Each process is killed so many times while it works; of the seed is when.

        Raises RuntimeError if one ends by itself.
        """
        orders_url, payments_url = self._urls
        make_orders_database(orders_url)
        make_payments_database(payments_url)
        self.sidecar.start()
        with Client(self.sidecar.address) as client:
            for topic in TOPICS:
                client.admin.create_topic(topic)
        # Of two payment services one works, and the other one takes over.
        for name in ("order service", "relay", "payment service 1", "payment service 2"):
            self._start(name)
        faults = self._faults(kills, random.Random(seed))
        self._began = time.monotonic()
        patience = Patience("booking all")
        while faults or self._progress.booked < self._count - BROKEN:
            self._look()
            patience.check(*self._progress, len(faults))
            for fault in [fault for fault in faults if fault.is_due(self._progress)]:
                faults.remove(fault)
                self._kill(fault.victim)
            time.sleep(POLL_SECONDS)

    def _faults(self, kills: int, dice: random.Random) -> list[Fault]:
        parts = [(victim, (kill + dice.random()) / kills) for victim in self.victims for kill in range(kills)]
        return [Fault(victim, int(self._count * part * LAST_KILL_AT)) for victim, part in parts]

    def _look(self) -> None:
        self._check()
        counts = []
        for engine, column in zip(self._engines, (ORDERS.c.number, BOOKINGS.c.place), strict=True):
            try:
                with engine.connect() as connection:
                    counts.append(int(connection.execute(select(func.count(column))).scalar_one()))
            except OperationalError:
                return  # busy: somebody puts the file in order after a kill
        self._progress = Progress(*counts)

    def _check(self) -> None:
        self.sidecar.check_running()
        for name, process in self._processes.items():
            if process.poll():
                said = self._log(name).read_text()[-2000:]
                raise RuntimeError(f"the {name} ended with {process.returncode}: \n{said}")

    def _kill(self, name: str) -> None:
        if name == "sidecar":
            self.sidecar.kill()
            self.sidecar.spawn()
        else:
            process = self._processes[name]
            process.kill()
            process.wait()
            self._start(name)
        self.kills[name] = self.kills.get(name, 0) + 1
        ordered, booked = self._progress
        said = f"{time.monotonic() - self._began:5.1f} s  {ordered:>6,} ordered  {booked:>6,} booked"
        print(f"{said}  killed the {name} (-9), and started it again", flush=True)
