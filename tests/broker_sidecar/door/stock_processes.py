"""Processes with a producer of a stock client, in Python, Java or Go: killed, started again, and judged in the end.

`killed_producer.py` says what each of them does.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pulsar_broker.distribution import Unavailable, home
from seqdedupe.message_id import MessageId
from seqdedupe.testing import Patience
from tests.tiers import GO

MORE = 50
"""Messages that are acknowledged between two faults, at least."""

MOST_BACK = 20

_HERE = Path(__file__).parent
_GO_SOURCE = _HERE.parents[1] / "pulsar" / "stock_go"


def go_program(folder: Path, package: str) -> Path:
    """Compile a program of `stock_go`. Raises Unavailable if Go or a module is not here: nothing is fetched."""
    program = folder / "go-program"
    environment = os.environ | {"GOFLAGS": "-mod=readonly", "GOPROXY": "off"}
    if (go := GO.where("go")) is None:
        raise Unavailable("there is no go")
    command = [go, "build", "-o", str(program), package]
    done = subprocess.run(command, cwd=_GO_SOURCE, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"go build ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return program


def command_of(client: str, folder: Path) -> list[str]:
    """Return the command that starts the program of `python`, `java` or `go`, compiled into the folder. Raises
    Unavailable.
    """
    if client == "java":
        path = f"{home()}/lib/*"
        subprocess.run(["javac", "-cp", path, "-d", str(folder), str(_HERE / "KilledProducer.java")], check=True)
        options = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlog4j2.level=OFF")
        return ["java", *options, "-cp", f"{folder}:{path}", "KilledProducer"]
    if client == "go":
        return [str(go_program(folder, "./killed"))]
    return [sys.executable, str(_HERE / "killed_producer.py")]


class Stored(NamedTuple):
    """A message that the topic has."""

    producer: str
    sequence_id: int
    place: MessageId


class Verdict(NamedTuple):
    """What is wrong with the messages of a producer."""

    lost: list[int]
    """Acknowledged, and not there."""
    doubled: list[int]
    displaced: list[int]
    """The client was told another place."""
    told_less: list[int]
    """The last IDs that the client was told when it opened, below one that was acknowledged before."""
    is_sequence: bool
    """The first copies are in order, and none is missing between them."""


RIGHT = Verdict([], [], [], [], True)


class StockProcess:
    """A producer with the client's name. Its lives continue one sequence of messages."""

    def __init__(self, client: str, command: Sequence[str], folder: Path, rng: random.Random, pause_ms: int) -> None:
        """Between two bursts it waits `pause_ms` at most. Its errors are printed to a file in the folder."""
        self.client = client
        self._command = command
        self._errors = folder / f"{client}.errors"
        self._rng = rng
        self._pause_ms = pause_ms
        self._url = self._topic = ""
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._known = 0
        self._is_done = False
        self.sent = 0
        """The last ID that the present life has sent."""
        self.acknowledged: dict[int, set[MessageId]] = {}
        """The places that the client was told, by sequence ID. Most receipts of batches have none."""
        self.told_less: list[int] = []
        self.failed: list[str] = []
        self.refused: Counter[str] = Counter()
        """Why the producer could not be opened at once."""

    def start(self, url: str, topic: str) -> None:
        self._url, self._topic = url, topic
        self._live(0)

    def start_again(self) -> None:
        """The program goes on from its last message, or from up to 20 messages before it."""
        self._live(self._rng.choice((0, self._rng.randint(1, MOST_BACK))))

    def _live(self, back: int) -> None:
        self._known = max(self.acknowledged, default=0)
        words = (self._url, self._topic, self.client, self._known, back, self._rng.randrange(2**31), self._pause_ms)
        with self._errors.open("a") as errors:
            self._process = subprocess.Popen(
                [*self._command, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            # A line that a kill has cut off was not told.
            if line.endswith("\n"):
                word, _, rest = line.rstrip("\n").partition(" ")
                self._take(word, rest)

    def _take(self, word: str, rest: str) -> None:
        if word == "receipt":
            number, *place = map(int, rest.split())
            places = self.acknowledged.setdefault(number, set())
            if min(place[:2]) >= 0:
                places.add(MessageId(*place))
        elif word == "sent":
            self.sent = int(rest.split()[1])
        elif word == "refused":
            self.refused[rest] += 1
        elif word == "opened":
            # Go's client does not say what it was told.
            if max(int(rest), 0) < self._known and self.client != "go":
                self.told_less.append(int(rest))
        elif word == "done":
            self._is_done = True
        else:
            self.failed.append(f"{word} {rest}")

    def wait_for_more(self, count: int = MORE) -> None:
        """Until this many further messages are acknowledged."""
        before = len(self.acknowledged)
        patience = Patience(f"receipts of {self.client}")
        while len(self.acknowledged) < before + count:
            patience.check(len(self.acknowledged), self.refused.total())
            assert not self.failed, self.failed[:3]
            assert self._process is not None
            assert self._process.poll() is None, self._errors.read_text()[-2000:]
            time.sleep(0.005)

    def kill(self) -> None:
        self._end(-9)

    def finish(self) -> None:
        """Until all that this life has sent is acknowledged."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        Patience(f"the last receipts of {self.client}").wait(self._process, lambda: len(self.acknowledged))
        self._end(0)
        assert not self.failed, self.failed[:3]
        assert self._is_done, self._errors.read_text()[-2000:]
        self._is_done = False

    def _end(self, expected: int) -> None:
        if self._process is None or self._reader is None:
            return
        with self._process as process:
            if expected:
                process.kill()
            self._reader.join()
        self._process = None

    def judge(self, stored: Iterable[Stored]) -> Verdict:
        """Judge all that the topic has of this producer."""
        own = [one for one in stored if one.producer == self.client]
        places: dict[int, list[MessageId]] = {}
        for one in own:
            places.setdefault(one.sequence_id, []).append(one.place)
        return Verdict(
            sorted(self.acknowledged.keys() - places.keys()),
            [number for number, found in places.items() if len(found) > 1],
            [number for number, told in self.acknowledged.items() if not _agree(told, places.get(number, ()))],
            list(self.told_less),
            list(places) == list(range(1, len(places) + 1)) and len(places) >= self.sent,
        )


def _agree(told: Iterable[MessageId], found: Sequence[MessageId]) -> bool:
    """A client numbers the messages of a batch itself, so only ledger and entry are what it was told."""
    return not found or all(place[:2] in [one[:2] for one in found] for place in told)
