"""A process whose event loop stands still ends, no matter what its threads do; one that was stopped as a whole goes
on."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.processes import running

LIMIT_SECONDS = 0.5
TIMEOUT_SECONDS = LAST_RESORT_SECONDS

SCRIPT = """
import asyncio, os, sys, threading, time
from broker_sidecar.telemetry import Watchdog

def fatal(why):
    print(why, file=sys.stderr, flush=True)
    os._exit(70)

asked = threading.Event()

def answer():
    # As the threads of Pulsar's client do.
    for line in sys.stdin:
        print("here", flush=True)
        asked.set()

async def main():
    if sys.argv[1] == "watched":
        Watchdog(fatal, float(sys.argv[2]))
    threading.Thread(target=answer, daemon=True).start()
    print("begun", flush=True)
    while sys.argv[3] == "moves" or not asked.is_set():
        await asyncio.sleep(0.01)
    time.sleep(1000)

asyncio.run(main())
"""

Process = subprocess.Popen[str]


@contextmanager
def begun(watched: str, loop: str) -> Iterator[Process]:
    command = [sys.executable, "-c", SCRIPT, watched, str(LIMIT_SECONDS), loop]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with running(command, text=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        yield process


def answers(process: Process) -> bool:
    """Whether a thread of it does."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline() == "here\n"


def test_a_loop_that_stands_still_ends_the_process_and_says_where_it_stood() -> None:
    """With the first answer it stands still; the threads of the one that nobody watches answer on."""
    with begun("alone", "stands") as control, begun("watched", "stands") as watched:
        assert answers(control)
        assert answers(watched)
        assert watched.wait(TIMEOUT_SECONDS) == 70
        assert watched.stderr
        told = watched.stderr.read()
        assert "event loop has stood still" in told
        assert "time.sleep" in told or "in main" in told
        # It stood still before the other one, and holds what it has.
        assert answers(control)
        assert control.poll() is None


def test_one_that_was_stopped_as_a_whole_goes_on() -> None:
    with begun("watched", "moves") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(3 * LIMIT_SECONDS)  # what is tested is that this time does not count
        process.send_signal(signal.SIGCONT)
        until = time.monotonic() + 2 * LIMIT_SECONDS
        while time.monotonic() < until:
            assert answers(process)
