"""The brokers of `examples/` as processes to be killed, and producers that resend until every message is stored."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import redis

from seqdedupe.testing import LAST_RESORT_SECONDS, reserved_port
from tests.tiers import REDIS

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = LAST_RESORT_SECONDS
WINDOW = 200
"""Messages that a producer sends without an answer."""

ANSWERS_LOST = 20
"""After a connection has ended a producer has forgotten this many answers: it resends what is stored for certain,
too."""

Stored = dict[str, list[tuple[int, bytes]]]
"""For each producer the sequence IDs and payloads in its log, in order."""


class BrokerProcess:
    """`python -m MODULE ARGUMENTS`, on a port that stays the same over restarts."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        # Reserved: while the broker is down, a producer that tries again could be given its port, and talk to itself.
        self._reserving = reserved_port()
        self.address = f"127.0.0.1:{self._reserving.getsockname()[1]}"
        self.lines: list[str] = []
        self.attached = threading.Semaphore(0)
        """Counts how often it has attached."""
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        self._serving.clear()
        self._process = process = subprocess.Popen(
            [*self._command, "--listen", self.address],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        assert self._serving.wait(START_SECONDS), self.lines

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                if line.startswith("serving: "):
                    self._serving.set()
                elif line.startswith("attached: "):
                    self.attached.release()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """It is killed, and its port is free for others."""
        self.kill()
        self._reserving.close()

    def wait(self) -> int:
        """Waits for its end; returns its status."""
        assert self._process is not None
        assert self._reader is not None
        status = self._process.wait(START_SECONDS)
        self._reader.join()
        return status


class Producer:
    """Sends messages 0 to `count` - 1 under a name, in order, until the broker says of each that it has it."""

    def __init__(self, address: str, name: str, count: int) -> None:
        self.move_to(address)
        self.name = name
        self.count = count
        self.answers: Counter[str] = Counter()
        self.done = 0
        """All below it are there."""
        self._moved = asyncio.Condition()

    def move_to(self, address: str) -> None:
        """Connects to this broker from now on."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def reached(self, count: int) -> None:
        """Returns when the broker has said of this many messages that it has them."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.done >= count)

    async def run(self) -> None:
        while self.done < self.count:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            sending = asyncio.ensure_future(self._send(writer, max(0, self.done - ANSWERS_LOST)))
            try:
                await self._receive(reader)
            except OSError:
                pass
            finally:
                sending.cancel()
                writer.close()
                await asyncio.gather(sending, return_exceptions=True)
            if self.done < self.count:
                await asyncio.sleep(0.01)

    async def _send(self, writer: asyncio.StreamWriter, first: int) -> None:
        writer.write(f"{self.name}\n".encode())
        for i in range(first, self.count):
            writer.write(b"%d %b\n" % (i, payload_of(self.name, i)))
            await writer.drain()
            await self.reached(i - WINDOW + 1)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while self.done < self.count and (line := await reader.readline()).endswith(b"\n"):
            number, answer = line.split()[:2]
            self.answers[answer.decode()] += 1
            if answer == b"again":
                return
            assert answer in (b"stored", b"dup"), line
            assert int(number) <= self.done, "answers come in order"
            self.done = max(self.done, int(number) + 1)
            async with self._moved:
                self._moved.notify_all()


def payload_of(name: str, sequence_id: int) -> bytes:
    return f"{name}/{sequence_id}".encode()


class RedisServer:
    """Its own server on a Unix socket, whose answers are on its disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/socket"

    def start(self) -> None:
        """Returns when it answers."""
        REDIS.check()
        settings = {"port": 0, "unixsocket": f"{self.folder}/socket", "dir": self.folder, "save": ""}
        settings |= {"appendonly": "yes", "appendfsync": "always"}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(["redis-server", *flags], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, (self.folder / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def each_once(producers: Iterable[Producer]) -> Stored:
    """What a log should hold."""
    return {one.name: [(i, payload_of(one.name, i)) for i in range(one.count)] for one in producers}
