"""The server that stands in a sidecar's or a broker's place leaves no connection behind."""

import asyncio
import gc
import socket
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.listener import Listener

TURNS = range(6)
"""How often the event loop turns between a connection and the end of its server."""


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.read()
    finally:
        writer.close()


async def with_listener(turns: int) -> None:
    async with Listener(serve) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)):
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.close()


async def with_asyncio_alone(turns: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        for _ in range(turns):
            await asyncio.sleep(0)
        server.close()


def left_open(run: Coroutine[Any, Any, None]) -> int:
    """How many connections nobody has closed."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(run)
        gc.collect()
    return sum("transport" in str(warning.message) for warning in found)


@pytest.mark.parametrize("turns", TURNS)
def test_no_connection_is_left_however_late_it_came(turns: int) -> None:
    assert left_open(with_listener(turns)) == 0


def test_the_standard_server_leaves_some() -> None:
    assert any(left_open(with_asyncio_alone(turns)) for turns in TURNS)
