"""What is measured, and what is known of one broker."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.broker import Broker, Mode, Server, Unavailable, get_clients


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Rounds are those that count: one before them warms up."""

    rounds: int
    seconds: float
    kills: int


@dataclass(frozen=True)
class Places:
    """Where what is needed is kept, and where data go: on the disk that is measured."""

    cache: Path
    data: Path


@dataclass
class Column:
    """One broker, and each figure's values by round."""

    broker: Broker
    not_available: str | None = None
    problems: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    killed: dict[str, int] | None = None

    def add(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)

    def fail(self, why: str) -> None:
        """It takes no further part in what failed."""
        self.problems.append(why)
        say(f"{self.broker.name}: {why}")

    def is_not_available(self, why: str) -> None:
        self.not_available = why
        say(f"{self.broker.name} is not available: {why}")

    @contextmanager
    def serving(self, places: Places, mode: Mode) -> Iterator[Server | None]:
        """A server with a folder of its own, or None if it does not start."""
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(dir=places.data, ignore_cleanup_errors=True)
            try:
                server = stack.enter_context(self.broker.serve(places.cache, Path(stack.enter_context(folder)), mode))
            except Unavailable as e:
                if self.figures:
                    self.fail(f"{mode}: {e}")
                else:
                    self.is_not_available(str(e))
                server = None
            yield server


def say(text: str) -> None:
    """What goes on, beside the table."""
    print(text, file=sys.stderr, flush=True)


def prepare(brokers: list[Broker], cache: Path) -> list[Column]:
    """Gets what each needs."""
    columns = [Column(broker) for broker in brokers]
    for column in columns:
        say(f"{column.broker.name} {column.broker.version}")
        try:
            column.broker.get(cache)
            if not column.broker.own_client:
                get_clients(cache)
        except Unavailable as e:
            column.is_not_available(str(e))
    return columns
