"""Client processes: `worker.py`, started with the interpreter that has the broker's library."""

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker

ANSWER_SECONDS = 120.0
"""A client process that takes so much longer than it should has failed."""


class Failed(Exception):
    """A measurement did not succeed: why."""


def spawn(broker: Broker, cache: Path, address: str, topic: str, action: str, **given: Any) -> "subprocess.Popen[str]":
    command = [str(broker.python(cache)), "-m", "bench.compare.worker", broker.module]
    return subprocess.Popen(
        [*command, address, topic, action, json.dumps(given)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome_of(broker: Broker, cache: Path, address: str, topic: str, action: str, **given: Any) -> dict[str, Any]:
    """What the process ends with. Raises Failed."""
    with spawn(broker, cache, address, topic, action, **given) as process:
        try:
            printed, errors = process.communicate(timeout=given.get("seconds", 0) + ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"{action} has not ended in time") from None
        finally:
            process.kill()
    return _outcome(action, printed, errors)


def _outcome(action: str, printed: str, errors: str) -> dict[str, Any]:
    last = (printed.strip().splitlines() or ["{}"])[-1]
    outcome: dict[str, Any] | None = json.loads(last).get("outcome")
    if outcome is None:
        raise Failed(f"{action}: {(errors.strip().splitlines() or ['it ended without a word'])[-1]}")
    return outcome


class Progress:
    """Follows what a client process prints."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, self._lines), (process.stderr, self._errors))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _follow(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)  # noqa: PERF402 - it is read by another thread meanwhile

    def _confirmed(self) -> int:
        return int(json.loads(self._lines[-1]).get("confirmed", 0)) if self._lines else 0

    def wait_for_more(self, messages: int) -> None:
        """Until so many more than now are confirmed. Raises Failed if that takes too long, or the process ends."""
        enough = self._confirmed() + messages
        limit = time.monotonic() + ANSWER_SECONDS
        while self._confirmed() < enough:
            if self._process.poll() is not None:
                self.outcome()
                raise Failed("the client ended before it was told to")
            if time.monotonic() > limit:
                raise Failed(f"no {messages} more messages were confirmed in {ANSWER_SECONDS:g} seconds")
            time.sleep(0.02)

    def outcome(self) -> dict[str, Any]:
        """What the process ends with. Raises Failed."""
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"not all was confirmed in {ANSWER_SECONDS:g} seconds") from None
        for thread in self._threads:
            thread.join()
        return _outcome("publish", "".join(self._lines), "".join(self._errors))
