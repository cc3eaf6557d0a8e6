"""Runs a pickled task in its own process, to be killed at will: `python -m tests.spark.run_task FILE`."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from seqdedupe_spark.range_task import RangeStep, RangeTask, TaskReport


def start(path: Path, task: RangeTask, steps: Sequence[RangeStep]) -> "subprocess.Popen[bytes]":
    """Starts the process."""
    path.write_bytes(pickle.dumps((task, steps)))
    return subprocess.Popen([sys.executable, "-m", __name__, str(path)])


def report(path: Path) -> TaskReport:
    """What the process has found, once it has ended."""
    found = pickle.loads(path.with_suffix(".report").read_bytes())
    assert isinstance(found, TaskReport)
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1])
    given, what = pickle.loads(file.read_bytes())
    file.with_suffix(".report").write_bytes(pickle.dumps(given.run(what)))
