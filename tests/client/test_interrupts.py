"""Interrupts (Ctrl-C) and the end of the interpreter in the client for threads."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from seqdedupe.client import builder
from seqdedupe.client.blocking import Client, Producer, ProducerConfig, Receipt
from seqdedupe.client.blocking import producer as blocking_producer
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

LONG_SECONDS = LAST_RESORT_SECONDS
STEPS_FROM_ONE_TO_THE_NEXT = 5
"""For the steps of a send, this many are passed over: the first is another one in each kind of send."""


class Interrupter:
    """Raises KeyboardInterrupt before the n-th step (bytecode) that is made in the producer or builder."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, frame: FrameType, event: str, arg: object) -> "Interrupter | None":
        if frame.f_code.co_filename not in (builder.__file__, blocking_producer.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def in_time(work: Callable[[], Any]) -> None:
    """In its own thread, so that a lock that nobody releases fails the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG_SECONDS)
    assert not thread.is_alive(), "it waits for ever"


def settle(producer: Producer, receipts: list[Receipt]) -> None:
    for call in (lambda: producer.send(b"after"), producer.close, producer.abort):
        with suppress(SeqdedupeError):
            call()
    for receipt in receipts:
        with suppress(SeqdedupeError):
            receipt.result()


@pytest.mark.parametrize("plain", [True, False])
def test_an_interrupt_at_any_step_of_a_send_neither_shifts_messages_nor_lets_anybody_wait(
    shared_sidecar: Sidecar, topic: str, plain: bool
) -> None:
    step, interrupted = 1 + plain, True
    with Client(shared_sidecar.address) as client:
        while interrupted:
            producer = client.producer(topic, "p", ProducerConfig(max_batch_rows=2))
            producer.open()
            receipts: list[Receipt] = []
            interrupter = Interrupter(step)
            try:
                sys.settrace(interrupter)
                for _ in range(2):
                    text = b"%d" % (producer.last_sequence_id + 1)
                    receipts.append(producer.send(text) if plain else producer.send(text, int(text), key=text))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            interrupted = interrupter.left <= 0
            in_time(lambda: settle(producer, receipts))  # noqa: B023
            step += STEPS_FROM_ONE_TO_THE_NEXT
        assert step > 100  # otherwise it was not traced
        for message in client.reader(topic):
            text = b"%d" % message.sequence_id
            assert message.payload in (text, b"after")
            assert message.key == (None if plain or message.payload == b"after" else text)


def test_a_call_at_the_end_of_the_interpreter_or_in_the_client_s_own_thread_is_refused(
    shared_sidecar: Sidecar, topic: str
) -> None:
    program = f"""
from seqdedupe.client.blocking import Client
class Owner:
    def __init__(self):
        self.producer = Client({shared_sidecar.address!r}).producer({topic!r}, "p")
        self.producer.open()
    def __del__(self):
        self.producer.close()
owner = Owner()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LONG_SECONDS)
    assert run.returncode == 0
    assert b"the interpreter has ended" in run.stderr

    refused: list[SeqdedupeError] = []

    class Owner:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            try:
                Client(shared_sidecar.address).ends(topic)
            except SeqdedupeError as e:
                refused.append(e)

    gc.disable()
    try:
        Owner()
        collected = threading.Event()
        event_loop().call_soon_threadsafe(gc.collect)
        event_loop().call_soon_threadsafe(collected.set)
        assert collected.wait(LONG_SECONDS)
    finally:
        gc.enable()
    assert [e.reason for e in refused] == ["INVALID_REQUEST"]
