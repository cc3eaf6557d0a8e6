"""The run: three producer processes publish while the sidecar and one of them are killed."""

import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo import producer
from demo.board import Board
from demo.flights import ORIGINS
from seqdedupe.address import SidecarAddress
from seqdedupe.testing import Patience, Sidecar

KILL_SIDECAR_AT = (0.2, 0.45, 0.75)
KILL_PRODUCER_AT = (0.3,)
"""Parts of all flights that are durable when it is done."""

PRODUCER_TO_KILL = "JFK"
POLL_SECONDS = 0.01
LINE_SECONDS = 0.2
LINE_SECONDS_TO_FILE = 2.0


class Run:
    """`with Run(folder, flights) as run`: no process of it is left afterwards. `keys` are the sidecar's."""

    def __init__(self, folder: Path, flights: int, **keys: Any) -> None:
        self.sidecar = Sidecar(folder, **keys)
        self.board = Board()
        self.sidecar_kills = 0
        self.producer_kills = 0
        self._flights = flights
        self._producers: dict[str, SpawnProcess] = {}
        self._began = 0.0
        self._line_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._producers.values():
            process.kill()
            process.join()
        self.sidecar.kill()

    def start_sidecar(self) -> None:
        self.sidecar.start()

    def publish(self) -> None:
        """Publishes all flights; returns when every one is acknowledged. Raises RuntimeError if that fails."""
        self._began = time.monotonic()
        patience = Patience("publishing")
        faults: list[tuple[float, Callable[[], None]]] = [
            *((part, self._kill_sidecar) for part in KILL_SIDECAR_AT),
            *((part, self._kill_producer) for part in KILL_PRODUCER_AT),
        ]
        faults.sort(key=lambda fault: fault[0])
        for origin in ORIGINS:
            self._start_producer(origin)
        while any(process.is_alive() for process in self._producers.values()):
            self._check()
            patience.check(self._done(), self.board.total("sent"), len(faults))
            # Only in mid-flow: with messages that were sent and have no receipt.
            if faults and self._done() >= faults[0][0] * self._flights and self.board.total("in_flight"):
                faults.pop(0)[1]()
            self._show_progress()
            time.sleep(POLL_SECONDS)
        self._check()
        self._show_progress(last=True)
        if faults:
            raise RuntimeError(f"all was published before {len(faults)} of the kills: publish more flights")

    def _start_producer(self, origin: str) -> None:
        address = SidecarAddress.parse(self.sidecar.address)
        arguments = (address.host, address.port, origin, self._flights, self.board)
        # A process of its own, that shares nothing but the board.
        process = get_context("spawn").Process(target=producer.run, args=arguments, daemon=True)
        # It inherits that Ctrl-C is ignored: this process decides when it ends.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, handler)
        self._producers[origin] = process

    def _check(self) -> None:
        for origin, process in self._producers.items():
            if process.exitcode:
                raise RuntimeError(f"the producer of {origin} ended with {process.exitcode}")
        self.sidecar.check_running()

    def _kill_sidecar(self) -> None:
        in_flight = self.board.total("in_flight")
        self.sidecar.kill()
        self.sidecar.spawn()
        self.sidecar_kills += 1
        self.say(f"killed the sidecar (-9) with {in_flight:,} messages in flight, and started it again")

    def _kill_producer(self) -> None:
        process = self._producers[PRODUCER_TO_KILL]
        in_flight = self.board.get(PRODUCER_TO_KILL, "in_flight")
        process.kill()
        process.join()
        self._start_producer(PRODUCER_TO_KILL)
        self.producer_kills += 1
        self.say(f"killed the producer of {PRODUCER_TO_KILL} (-9) with {in_flight:,} in flight, and started it again")

    def _done(self) -> int:
        return self.board.total("done")

    def say(self, event: str) -> None:
        """Prints a line about what has happened."""
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        print(f"{clear}{time.monotonic() - self._began:5.1f} s  {event}", flush=True)

    def _show_progress(self, *, last: bool = False) -> None:
        now = time.monotonic()
        terminal = sys.stdout.isatty()
        if not last and now - self._line_at < (LINE_SECONDS if terminal else LINE_SECONDS_TO_FILE):
            return
        self._line_at = now
        total = self.board.total
        line = (
            f"{now - self._began:5.1f} s  {self._done() / self._flights:4.0%}  {self._done():>7,} durable  "
            f"{total('dup'):,} Dup  {total('unknown'):,} Unknown  {total('lost_answers')} losses of answers"
        )
        print(f"\r\033[K{line}" if terminal else line, end="\n" if last or not terminal else "", flush=True)
