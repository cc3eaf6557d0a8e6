"""Sidecars with several workers, of which each has a door."""

import os
import signal
import socket
from contextlib import ExitStack

from seqdedupe.address import SidecarAddress
from seqdedupe.testing import Sidecar, reserved_port
from tests.broker_sidecar.pausing import wait_for

WORKERS = 3


def doors_of(sidecar: Sidecar, workers: int = WORKERS) -> list[SidecarAddress]:
    """The addresses of the doors, by worker: the ports of a sidecar whose first port is given, or any ports."""
    first = SidecarAddress.parse(str(sidecar.keys["pulsar_listen"]))
    return [first._replace(port=first.port + worker) for worker in range(workers)]


def first_of_free_ports(count: int) -> int:
    """The first of some neighbouring ports that nobody has."""
    while True:
        with ExitStack() as held:
            port = held.enter_context(reserved_port()).getsockname()[1]
            try:
                for other in range(port + 1, port + count):
                    held.enter_context(socket.create_server(("127.0.0.1", other)))
            except (OSError, OverflowError):
                continue
            return int(port)


def kill_worker(sidecar: Sidecar, worker: int, *, comes_back: bool = True) -> None:
    """kill -9, until the worker has ended, or until it serves again."""

    def ended() -> int:
        return sum(entry["event"] == "worker ended" for entry in sidecar.log)

    before = ended()
    os.kill(sidecar.worker_pids[worker], signal.SIGKILL)
    wait_for(lambda: ended() > before)
    if comes_back:
        sidecar.wait_until_serving()
