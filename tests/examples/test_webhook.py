"""The webhook application: what it answers, and that each event is stored once. About 20 s, five processes.

`tests.examples.webhooks` is the same at any size.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from examples.webhook import app as webhook
from seqdedupe.client import Client
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.examples.webhooks import post, run


async def test_each_event_is_stored_once_through_kills(tmp_path: Path) -> None:
    campaign, killed = await run(tmp_path, events=400, kills=3, seed=3, workers=2)
    assert killed > 0
    assert campaign.delivered == 402


async def test_control_without_deduplication_copies_are_stored(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        await run(tmp_path, events=200, kills=0, seed=3, workers=2, deduplicates=False)


@pytest.fixture
async def port(shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """That of the application in this process."""
    monkeypatch.setattr(webhook, "ADDRESS", shared_sidecar.address)
    monkeypatch.setattr(webhook, "TOPIC", topic)
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode="deduplication-id")
    server = uvicorn.Server(uvicorn.Config(webhook.app, port=0, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not server.started:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def answer(port: int, webhook_id: str, body: bytes = b"{}") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(post(reader, writer, webhook_id, body), LAST_RESORT_SECONDS)
    finally:
        writer.close()


async def test_a_copy_is_answered_as_its_original(port: int) -> None:
    first = await answer(port, "evt_1", b"one")
    copies = await asyncio.gather(*(answer(port, "evt_1", b"again") for _ in range(5)))
    assert first[0] == 200
    assert first[1].startswith(b'{"index":0,"message_id":"')
    assert set(copies) == {first}
    assert (await answer(port, "evt_2"))[1].startswith(b'{"index":1,')


async def test_what_will_never_be_stored_is_told_so(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await answer(port, ""))[0] == 400
    assert (await answer(port, "x" * 256))[0] == 400
    monkeypatch.setattr(webhook, "MAX_BODY_BYTES", 10)
    assert (await answer(port, "a", b"x" * 11))[0] == 413
    assert (await answer(port, "x" * 255, b"x" * 10))[0] == 200


async def test_what_may_be_mended_is_sent_away(port: int, shared_sidecar: Sidecar, topic: str) -> None:
    """Senders give an event up that is answered with 400."""
    async with Client(shared_sidecar.address) as client:
        await client.admin.delete_topic(topic)
    assert [(await answer(port, "a"))[0] for _ in range(2)] == [503, 503]


async def test_what_has_to_wait_is_sent_away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    monkeypatch.setattr(webhook, "MAX_WAITING", 0)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nwebhook-id: a\r\nContent-Length: 0\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LAST_RESORT_SECONDS)
    writer.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 2\r\n" in head
    monkeypatch.undo()


async def test_what_the_sidecar_does_not_answer_is_sent_away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(webhook, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(webhook.app.state.publisher, "send", never)
    status, body = await answer(port, "a")
    assert (status, b"has not answered" in body) == (503, True)
    monkeypatch.undo()
    assert (await answer(port, "a"))[0] == 200
    assert webhook.app.state.waiting == 0
