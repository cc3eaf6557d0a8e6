"""A TCP proxy before a sidecar, for faults on the way."""

import asyncio
from contextlib import suppress
from typing import Self

from tests.listener import Listener

_CHUNK_BYTES = 65_536


class Proxy:
    """Passes bytes on between clients and `target` (`host:port`), until told otherwise. Lives on the test's loop."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._clients = Listener(self._serve, port)
        self.leads_to(target)
        self._writers: set[asyncio.StreamWriter] = set()
        """To the sidecar."""
        self._flows = asyncio.Event()
        self._flows.set()
        self.swallows_answers = False
        """From now on nothing that the sidecar says reaches its clients."""
        self.refuses = False
        """New connections are closed at once."""
        self.connections = 0
        self.open_connections = 0
        """For clients, to the sidecar, now."""
        self.passed_answers = 0
        """Pieces of what the sidecar has said."""
        self.swallowed_bytes = 0

    async def __aenter__(self) -> Self:
        await self._clients.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._clients.port}"

    def leads_to(self, target: str) -> None:
        """New connections lead there."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)

    def cut(self) -> None:
        """Resets all connections. What is on the way is lost."""
        self._clients.cut()
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Nothing passes any more, in either direction, and nobody learns."""
        self._flows.clear()

    def go_on(self) -> None:
        """Ends a stall."""
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            return
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers.add(there_writer)
        self.open_connections += 1
        both = [writer, there_writer]
        try:
            await asyncio.gather(
                self._pass(reader, there_writer, False, both), self._pass(there_reader, writer, True, both)
            )
        finally:
            self._writers.discard(there_writer)
            self.open_connections -= 1
            for one in both:
                one.transport.abort()
            with suppress(OSError):
                await there_writer.wait_closed()

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        is_answer: bool,
        both: list[asyncio.StreamWriter],
    ) -> None:
        try:
            while data := await source.read(_CHUNK_BYTES):
                await self._flows.wait()
                if is_answer and self.swallows_answers:
                    self.swallowed_bytes += len(data)
                    continue
                self.passed_answers += is_answer
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            for writer in both:
                writer.transport.abort()
