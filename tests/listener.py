"""A TCP server on the test's event loop, for what stands in a sidecar's or a broker's place."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_TURNS = 3
"""Of the loop, until a connection that asyncio has accepted is one of ours."""


class Listener:
    """Serves each connection, and closes it when it is served. After its end no connection is left: neither one that
    is still served nor one that had only just come, which `asyncio.Server` leaves open."""

    def __init__(self, serve: Serve, port: int = 0) -> None:
        self._serve = serve
        self._wanted_port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._wanted_port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def cut(self) -> None:
        """Resets all connections. What is on the way is lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Raises what a connection's own code has raised."""
        # Nothing more is accepted, and what was is let in: asyncio loses a connection that comes to a closed server.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            await self._ended(writer)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    # No coroutine: the task of one may be cancelled before it has begun, and nobody would know of the connection.
    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._tasks.add(asyncio.ensure_future(self._run(reader, writer)))

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.close()
        await self._ended(writer)

    async def _ended(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await writer.wait_closed()
        self._writers.discard(writer)
