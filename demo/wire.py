"""A bad network: a proxy on a producer's way to the sidecar, with little bandwidth, that loses answers on command."""

import asyncio
from types import TracebackType
from typing import Self

CUT_AFTER_SECONDS = 0.1
"""The connection breaks so long after the first answer that was lost."""

READS_PER_SECOND = 50
MAX_READ_BYTES = 64 * 1024


class Wire:
    """`async with Wire(host, port, bytes_per_second) as wire`: `wire.address` leads to that port."""

    def __init__(self, host: str, port: int, bytes_per_second: float) -> None:
        self.address = ""
        self.losses = 0
        """How often answers were lost."""
        self._target = (host, port)
        self._bytes_per_second = bytes_per_second
        self._losing = False
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def lose_answers(self) -> None:
        """From now on no answer reaches the producer, though all that it sends arrives; then the connection breaks."""
        self._losing = True

    def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(client, to_client))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            sidecar, to_sidecar = await asyncio.open_connection(*self._target)
        except OSError:  # it is down
            to_client.transport.abort()
            return
        self._losing = False
        ways = [
            asyncio.create_task(self._carry(client, to_sidecar)),
            asyncio.create_task(self._carry_back(sidecar, to_client)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_client.transport.abort()
            to_sidecar.transport.abort()

    async def _carry(self, client: asyncio.StreamReader, to_sidecar: asyncio.StreamWriter) -> None:
        read_bytes = min(MAX_READ_BYTES, max(1, int(self._bytes_per_second / READS_PER_SECOND)))
        while data := await client.read(read_bytes):
            to_sidecar.write(data)
            await to_sidecar.drain()
            await asyncio.sleep(len(data) / self._bytes_per_second)

    async def _carry_back(self, sidecar: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while data := await sidecar.read(MAX_READ_BYTES):
            if self._losing:
                self.losses += 1
                await asyncio.sleep(CUT_AFTER_SECONDS)
                return
            to_client.write(data)
            await to_client.drain()
