"""Whether another sidecar gives any answer, which decides whether its topics may be taken from it."""

import asyncio
import signal

import grpc
import grpc.aio
import pytest

from broker_sidecar import neighbours
from broker_sidecar.neighbours import answers
from pulsar_broker.standalone import free_port
from seqdedupe.testing import Sidecar

STOPPED_SECONDS = 0.5


async def test_one_that_serves_answers(shared_sidecar: Sidecar) -> None:
    assert await answers(shared_sidecar.address)


async def test_one_that_is_stopped_as_a_whole_does_not(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are taken all the same."""
    sidecar.signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "ANSWER_SECONDS", STOPPED_SECONDS)
        assert not await answers(sidecar.address)
    sidecar.signal(signal.SIGCONT)
    assert await _will_answer(sidecar.address)


async def _will_answer(address: str) -> bool:
    """One that was stopped takes its time."""
    async with asyncio.timeout(60):
        while not await answers(address):
            pass
    return True


async def test_nobody_does_not() -> None:
    assert not await answers(f"127.0.0.1:{free_port()}")


async def test_who_refuses_the_question_answers() -> None:
    """A server without health: its event loop moves."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await answers(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
