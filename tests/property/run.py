"""Cases by hand: `python -m tests.kernels tests.property.run --cases 100000 --seed 1`.

A failure prints its seed and its trace."""

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from seqdedupe.store import compaction, parts, snapshots
from tests.property.actions import Case
from tests.property.cases import Step, steps_of
from tests.property.disk import CrashableStore

MEMORY = Path("/dev/shm")


@contextmanager
def many_cases() -> Iterator[CrashableStore]:
    """A store for many cases, each a topic of its own; snapshots are compacted after few deltas."""
    small: list[tuple[ModuleType, str, int]] = [
        (module, "PAGE_PRODUCERS", 2) for module in (parts, snapshots, compaction)
    ]
    small += [(snapshots, "MAX_DELTAS", 3), (compaction, "DELTAS_A_STEP", 2), (compaction, "PAGES_A_FLUSH", 1)]
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


def failure_of(store: CrashableStore, seed: int, steps: list[Step]) -> BaseException | None:
    try:
        run_steps(store, seed, steps)
    except Exception as e:  # noqa: BLE001 (whatever it is: the case has failed)
        return e
    return None


def shrunk(store: CrashableStore, seed: int, steps: list[Step]) -> list[Step]:
    """Fewer steps that still fail: pieces are left out, smaller and smaller ones."""
    size = len(steps)
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if failure_of(store, seed, fewer) is not None:
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def first_failure(store: CrashableStore, first_seed: int, cases: int) -> tuple[int, BaseException] | None:
    """The seed of the first case that fails, and how."""
    for seed in range(first_seed, first_seed + cases):
        failure = failure_of(store, seed, steps_of(seed))
        if failure is not None:
            return seed, failure
    return None


def report(store: CrashableStore, seed: int) -> str:
    """What a person needs of a case that fails: seed, the fewest steps, what happened in them."""
    steps = shrunk(store, seed, steps_of(seed))
    trace: list[str] = []
    failure = "it does not fail any more"
    try:
        run_steps(store, seed, steps, trace)
    except Exception as e:  # noqa: BLE001 (whatever it is: the case has failed)
        failure = f"{type(e).__name__}: {e}"
    again = f"python -m tests.kernels tests.property.run --seed {seed} --cases 1"
    return "\n".join([f"seed {seed}, {len(steps)} steps ({again})", *trace, failure])


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs random cases and prints the first that fails.")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each next one has the next seed")
    options = parser.parse_args()
    start = time.monotonic()
    with many_cases() as store:
        found = first_failure(store, options.seed, options.cases)
        if found is not None:
            print(report(store, found[0]))
            return 1
    seconds = time.monotonic() - start
    print(f"{options.cases} cases from seed {options.seed}: none failed, {options.cases / seconds:.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
