"""The runner: measures the figures named, or all, and prints ratio, spread and machine."""

import argparse
import importlib
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from bench.figure import Figure, Ratio, interval_of_median, values_of
from broker_sidecar import kernels

FIGURES = (
    "publish",
    "publish_by_id",
    "large_batches",
    "large_payloads",
    "syncs",
    "one_in_flight",
    "flush_policy",
    "dirty_topics",
    "workers",
    "security",
    "metrics",
    "single_messages",
    "steady",
    "half_old",
    "many_names",
    "rules",
    "flood",
    "many_topics",
    "reading",
    "followers",
    "bulk_reader",
    "decisions",
    "window",
    "window_on_disk",
    "snapshot_pause",
    "start",
    "opening",
    "move",
    "tag",
    "doctor",
    "backup",
    "memory",
    "memory_limit",
    "stalled_disk",
    "attached",
    "pipe",
    "functions",
    "consumer",
    "outbox",
    "pulsar_publish",
    "pulsar_native",
    "pulsar_door",
    "pulsar_recovery",
    "pulsar_take_over",
    "pulsar_sidecars",
    "pulsar_takeover",
    "pulsar_topics",
    "pulsar_spark",
    "spark_source",
    "spark_postgres",
    "spark_dedupe",
    "sink",
    "import_client",
)


def measure(figure: Figure, rounds: int | None) -> dict[str, list[float]]:
    """Each arm's measurements, round by round; the first round does not count."""
    measured: dict[str, list[float]] = {}
    for number in range((rounds or figure.rounds) + 1):
        for arm, measures in figure.arms.items():
            for name, value in values_of(arm, measures()).items():
                if number:
                    measured.setdefault(name, []).append(value)
    return measured


def show(ratio: Ratio, measured: dict[str, list[float]]) -> bool:
    """Prints a ratio's line; whether it is reached."""
    rounds = [dict(zip(measured, values, strict=True)) for values in zip(*measured.values(), strict=True)]
    values = [ratio.value(one) for one in rounds]
    middle = statistics.median(values)
    verdict = f"  {ratio.goal}  {'reached' if ratio.is_reached(middle) else 'NOT REACHED'}" if ratio.goal else ""
    low, high = interval_of_median(values)
    spread = f"{min(values):.3g}–{max(values):.3g}, 90 %: {low:.3g}–{high:.3g}"
    print(f"  {ratio.name:<58} {middle:8.3g} {ratio.unit:<3} ({spread}){verdict}", flush=True)
    return ratio.is_reached(middle)


def _about(module: ModuleType) -> str:
    return str(module.__doc__).strip().splitlines()[0]


def main() -> int:
    """Runs; exits 0 whatever is reached, because a figure is to be read, not to be a gate."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="which; all if none is named")
    parser.add_argument("--rounds", type=int, help="measure so often instead of what the figure says")
    parser.add_argument("--folder", type=Path, help="where to put data: it should be on the disk to be measured")
    parser.add_argument("--list", action="store_true", help="say what each figure is, and measure none")
    given = parser.parse_args()
    if given.list:
        for name in FIGURES:
            print(f"{name:<16} {_about(importlib.import_module(f'bench.{name}'))}")
        return 0
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"load average at the start {os.getloadavg()[0]:.2f}")
    print("medians over rounds, (least–most, 90 % interval of the median)")
    if kernels.prepare():
        # Or sidecars would begin with plain functions.
        kernels.compile_first()
    missed = 0
    for name in given.figures or FIGURES:
        module = importlib.import_module(f"bench.{name}")
        print(f"{name}: {_about(module)}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, module.figure(Path(folder)) as figure:
            measured = measure(figure, given.rounds)
            for arm, values in measured.items():
                print(f"    {arm:<56} {statistics.median(values):12.5g}")
            missed += sum(not show(ratio, measured) for ratio in figure.ratios)
            for note in figure.notes:
                print(f"    {note}")
        print(f"    ({time.monotonic() - began:.0f} s)")
    print(f"{missed} not reached" if missed else "all reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
