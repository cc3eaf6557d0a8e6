"""The program `StockProducer.java`: producers of Pulsar's Java client in a process, driven by commands."""

import queue
import subprocess
import threading
from pathlib import Path
from typing import Self

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.broker_sidecar.pausing import wait_for


class JavaFailed(Exception):
    """What the Java client raised, in its words."""


class JavaClient:
    """The process. `ask` does what the program's comment says. Receipts and errors are kept by producers' labels."""

    def __init__(self, home: Path, *options: str) -> None:
        source = Path(__file__).with_name("StockProducer.java")
        options = options or ("-XX:TieredStopAtLevel=1",)
        command = ["java", *options, "-Dlog4j2.level=OFF", "-cp", f"{home}/lib/*", str(source)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.forget()

    def forget(self) -> None:
        """The receipts and errors so far."""
        self.receipts: dict[str, list[tuple[int, str]]] = {}
        """Sequence IDs, and where the message is."""
        self.errors: dict[str, list[tuple[int, str]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word in ("receipt", "error"):
                label, number, what = rest.split(" ", 2)
                found = self.receipts if word == "receipt" else self.errors
                found.setdefault(label, []).append((int(number), what))
            elif word in ("done", "failed"):
                self._answers.put(line.rstrip("\n"))
        self._answers.put("failed the program has ended")

    def ask(self, *words: object) -> str:
        """The answer to a command. Raises JavaFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        word, _, rest = self._answers.get(timeout=LAST_RESORT_SECONDS).partition(" ")
        if word == "failed":
            raise JavaFailed(rest)
        return rest

    def connect(self, url: object, token: str = "-", authority: object = "-") -> None:
        self.ask("connect", url, token, authority)
        self.forget()

    def open(
        self, topic: str, name: str = "p", how: str = "gathered", compression: str = "NONE", label: str = "a"
    ) -> tuple[str, int]:
        """The producer's name and its last sequence ID."""
        got, last = self.ask("open", label, topic, name, how, compression).split(" ")
        return got, int(last)

    def ids(self, label: str = "a") -> list[int]:
        """Those with receipts."""
        return [number for number, _ in self.receipts.get(label, [])]

    def wait_for_more(self, count: int, label: str = "a") -> None:
        """Until this many more have receipts."""
        before = len(self.receipts.get(label, []))
        wait_for(lambda: len(self.receipts.get(label, [])) >= before + count)

    def kill(self) -> None:
        with self._process:
            self._process.kill()
            self._reader.join()
