"""A sidecar that ends, as by kill -9, before or after a step of moving a topic that a file names; with small segments.

In the file: a step of STEPS, `before` or `after`, and at which call of it, counted from when the file is there. Also
planted bugs, which the file named PLANTED says.
"""

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

from broker_sidecar import kernels

MODULE = "tests.broker_sidecar.dying_moving"
SEGMENT_BYTES = 8192
FILE = "SEQDEDUPE_TEST_DIES_AT"
PLANTED = ".planted"

STEPS = (
    "broker_sidecar.cluster.departures.Giving._answer",
    "broker_sidecar.cluster.departures.Departures._let_go",
    "seqdedupe.log.embedded.log_folder.leave",
    "seqdedupe.log.embedded.log_folder.has_left",
    "seqdedupe.log.embedded.log_folder.stays",
    "seqdedupe.log.embedded.log_folder.remove_messages",
    "seqdedupe.log.embedded.log_folder.is_known",
    "broker_sidecar.services.arrival_calls._check_is_free",
    "broker_sidecar.services.arrival_calls.Coming.read",
    "broker_sidecar.services.arrival_calls._keep_from_who_had_it",
    "broker_sidecar.services.arrival_calls._take",
    "seqdedupe.log.embedded.log_folder.Arrival.begin",
    "seqdedupe.log.embedded.log_folder.Arrival.finish",
    "seqdedupe.transfer.stored_records.IncomingSnapshot.add",
    "seqdedupe.transfer.stored_records.IncomingSnapshot.finish",
    "seqdedupe.store.db.Store.put_topics",
    "seqdedupe.topic.lives.PublishedTopics.delete",
    "seqdedupe.topic.lives.Lives._begins",
)


def say(file: Path, step: str, when: str, count: int = 1) -> None:
    """The sidecar with this file dies there."""
    new = file.with_suffix(".new")
    new.write_text(f"{step} {when} {count}")
    new.rename(file)


def _passes(file: Path, step: str, when: str) -> None:
    try:
        wanted, moment, count = file.read_text().split()
    except FileNotFoundError:
        return
    if (wanted, moment) != (step, when):
        return
    if int(count) == 1:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    say(file, step, when, int(count) - 1)


def _plant(file: Path, step: str) -> None:
    owner: Any
    place, _, name = step.rpartition(".")
    try:
        owner = importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, kind = place.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    function: Callable[..., Any] = getattr(owner, name)

    async def waiting(*arguments: Any, **named: Any) -> Any:
        _passes(file, step, "before")
        found = await function(*arguments, **named)
        _passes(file, step, "after")
        return found

    def plain(*arguments: Any, **named: Any) -> Any:
        _passes(file, step, "before")
        found = function(*arguments, **named)
        _passes(file, step, "after")
        return found

    setattr(owner, name, waiting if inspect.iscoroutinefunction(function) else plain)


def _plant_bug(bug: str) -> None:
    from broker_sidecar.cluster import departures
    from seqdedupe.log.embedded import log_folder

    if bug == "nothing says that it leaves":
        # Both serve: a start does not know that the other one may have it.
        log_folder.leave = lambda folder, to: None
    elif bug == "lets go first":

        async def settled(self: departures.Departures, record: Any, to: log_folder.To) -> None:
            log_folder.has_left(self._logs.folder_of(record.incarnation))

        departures.Departures._settle = settled  # type: ignore[method-assign]


def main() -> int:
    """As the sidecar's."""
    kernels.prepare()
    from broker_sidecar.__main__ import main
    from seqdedupe.log.embedded.logs import EmbeddedLogs
    from seqdedupe.transfer import stored_records

    EmbeddedLogs.__init__ = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)  # type: ignore[assignment]
    # Each record of the snapshot is written by itself.
    stored_records.BATCH_BYTES = 0
    # What begins so is a key of the configuration.
    file = Path(os.environ.pop(FILE))
    for step in STEPS:
        _plant(file, step)
    bug = file.with_suffix(PLANTED)
    if bug.exists():
        _plant_bug(bug.read_text())
    return main()


if __name__ == "__main__":
    sys.exit(main())
