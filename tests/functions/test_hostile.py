"""Functions and inputs that would keep an instance from going on, or from ending."""

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.functions.runtime import TIMEOUT_SECONDS, Ended, Id, Message, details, inputs
from tests.functions.test_instance import Start, payloads, start

__all__ = ["start"]


@pytest.mark.parametrize("wrapped", ["Exits", "Surrogates", "LateForever", "SurrogateProperty", "SurrogateKey"])
def test_whatever_a_function_gives_or_raises_is_a_dead_letter(
    start: Start, shared_sidecar: Sidecar, topic: str, wrapped: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A log with half a character in it is more than what runs tests in parallel can pass on.
    caplog.set_level(logging.CRITICAL, "seqdedupe.functions")
    runtime = start(wrapped, dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)
    runtime.give(inputs(3))
    runtime.until_acknowledged(3)
    assert payloads(shared_sidecar, f"dead-{topic}") == [b"1"]
    assert payloads(shared_sidecar, topic) == [b"0", b"2"]
    assert not runtime.process.ended.is_set()


def test_an_input_that_fits_no_dead_letter_ends_the_process_and_is_not_acknowledged(start: Start, topic: str) -> None:
    runtime = start("Copy", dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)

    def give() -> None:
        with suppress(Ended):
            runtime.give([Message(bytes(6 * 1024 * 1024), Id(0))])

    giving = threading.Thread(target=give)
    giving.start()
    assert runtime.process.ended.wait(TIMEOUT_SECONDS)
    runtime.process.is_stopping = True
    giving.join()
    assert runtime.process.failed
    assert "MESSAGE_TOO_LARGE" in runtime.process.why
    assert runtime.entries == []


def test_a_callback_that_would_end_its_thread_is_a_failed_callback(start: Start, topic: str) -> None:
    runtime = start("CallsBackToExit")
    runtime.give(inputs(3))
    runtime.until_acknowledged(3)


def test_many_outputs_of_one_input(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start("Many", deployed=details(name=topic + "x" * 60))
    runtime.give([Message(b"%d" % n, Id(i)) for i, n in enumerate((10_000, 1, 12_000))])
    runtime.until_acknowledged(3)
    assert len(payloads(shared_sidecar, topic)) == 22_001


def test_a_process_ends_though_nobody_reads_its_output() -> None:
    """As where the worker has died: an exception out of `end` would be one out of `process`."""
    script = (
        "import sys; from seqdedupe.functions import InstanceProcess; sys.stdout.write('unread')\n"
        "try:\n    InstanceProcess().end('why', failed=True)\nfinally:\n    import os; os._exit(77)"
    )
    unread, output = os.pipe()
    os.close(unread)
    with os.fdopen(output, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=nobody,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            timeout=LAST_RESORT_SECONDS,
        )
    assert done.returncode == 1, done.stderr
