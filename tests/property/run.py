"""Cases by hand: `python -m tests.kernels tests.property.run --cases 100000 --seed 1`; with `--windows` those of
deduplication IDs, with `--traces` those that are followed in the model. A failure prints its seed and its trace."""

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from seqdedupe.core import id_slots
from seqdedupe.store import parts, snapshots, windows
from seqdedupe.topic import window_runs
from tests.property import cases, recorded
from tests.property.actions import Case
from tests.property.cases import Step
from tests.property.disk import CrashableStore
from tests.property.windows import actions as of_windows

MEMORY = Path("/dev/shm")


@contextmanager
def many_cases() -> Iterator[CrashableStore]:
    """A store for many cases, each its own topic; snapshots are compacted after few deltas."""
    small: list[tuple[ModuleType, str, int]] = [
        (module, "PAGE_PRODUCERS", 2) for module in (parts, snapshots, snapshots)
    ]
    small += [(snapshots, "MAX_DELTAS", 3), (snapshots, "DELTAS_A_STEP", 2), (snapshots, "PAGES_A_FLUSH", 1)]
    small += [(window_runs, "MAX_RUNS", 2), (window_runs, "PAGES_A_PART", 1), (window_runs, "READ_AT_ONCE", 2)]
    small += [(windows, "PAGES_A_WRITE", 1), (windows, "PAGES_AT_ONCE", 2), (window_runs, "TIDIED_AT_ONCE", 3)]
    small += [(id_slots, "PIECE_BYTES", 60)]
    before = [(module, name, getattr(module, name)) for module, name, _ in small]
    logger = logging.getLogger("seqdedupe")
    level = logger.level
    folder = Path(tempfile.mkdtemp(prefix="seqdedupe-", dir=MEMORY if MEMORY.is_dir() else None))
    for module, name, value in small:
        setattr(module, name, value)
    # Planned faults are no news.
    logger.setLevel(logging.CRITICAL + 1)
    store = CrashableStore.open_crashable(folder)
    try:
        yield store
    finally:
        store.close()
        logger.setLevel(level)
        for module, name, value in before:
            setattr(module, name, value)
        shutil.rmtree(folder)


def run_steps(store: CrashableStore, seed: int, steps: list[Step], trace: list[str] | None = None) -> None:
    """Runs one case. Raises `Violation`."""
    Case(store, store.next_incarnation(1), seed, trace).run(steps)


class Arm(NamedTuple):
    """Cases of a kind: the steps of each seed, and what runs them."""

    steps_of: Callable[[int], list[Step]]
    run: Callable[[CrashableStore, int, list[Step], list[str] | None], None]
    option: str = ""


SEQUENCE_IDS = Arm(cases.steps_of, run_steps)
WINDOWS = Arm(of_windows.steps_of, of_windows.run_case, "--windows ")
TRACES = Arm(recorded.steps_of, recorded.run_and_follow, "--traces ")


def failure_of(store: CrashableStore, seed: int, steps: list[Step], arm: Arm = SEQUENCE_IDS) -> BaseException | None:
    try:
        arm.run(store, seed, steps, None)
    except Exception as e:  # noqa: BLE001 (whatever it is: the case has failed)
        return e
    return None


def shrunk(store: CrashableStore, seed: int, steps: list[Step], arm: Arm = SEQUENCE_IDS) -> list[Step]:
    """Fewer steps that still fail: pieces are omitted, smaller and smaller ones."""
    size = len(steps)
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if failure_of(store, seed, fewer, arm) is not None:
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def first_failure(
    store: CrashableStore, first_seed: int, cases: int, arm: Arm = SEQUENCE_IDS
) -> tuple[int, BaseException] | None:
    """The seed of the first case that fails, and how."""
    for seed in range(first_seed, first_seed + cases):
        failure = failure_of(store, seed, arm.steps_of(seed), arm)
        if failure is not None:
            return seed, failure
    return None


def report(store: CrashableStore, seed: int, arm: Arm = SEQUENCE_IDS) -> str:
    """What a person needs of a case that fails: seed, the fewest steps, what happened in them."""
    steps = shrunk(store, seed, arm.steps_of(seed), arm)
    trace: list[str] = []
    failure = "it does not fail any more"
    try:
        arm.run(store, seed, steps, trace)
    except Exception as e:  # noqa: BLE001 (whatever it is: the case has failed)
        failure = f"{type(e).__name__}: {e}"
    again = f"python -m tests.kernels tests.property.run {arm.option}--seed {seed} --cases 1"
    return "\n".join([f"seed {seed}, {len(steps)} steps ({again})", *trace, failure])


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs random cases and prints the first that fails.")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each next one has the next seed")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--windows", dest="arm", action="store_const", const=WINDOWS, help="cases of deduplication IDs")
    kind.add_argument("--traces", dest="arm", action="store_const", const=TRACES, help="cases followed in the model")
    parser.set_defaults(arm=SEQUENCE_IDS)
    options = parser.parse_args()
    arm: Arm = options.arm
    start = time.monotonic()
    with many_cases() as store:
        found = first_failure(store, options.seed, options.cases, arm)
        if found is not None:
            print(report(store, found[0], arm))
            return 1
    seconds = time.monotonic() - start
    print(f"{options.cases} cases from seed {options.seed}: none failed, {options.cases / seconds:.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
