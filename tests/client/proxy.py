"""A TCP proxy before a sidecar, for faults on the way."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 65_536


class Proxy:
    """Passes bytes on between clients and `target` (`host:port`), until told otherwise. Lives on the test's loop."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._own_port = port
        self.leads_to(target)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
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
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._own_port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def leads_to(self, target: str) -> None:
        """New connections lead there."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)

    def cut(self) -> None:
        """Resets all connections. What is on the way is lost."""
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Nothing passes any more, in either direction, and nobody learns."""
        self._flows.clear()

    def go_on(self) -> None:
        """Ends a stall."""
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        self._writers.add(writer)
        try:
            if self.refuses:
                return
            self.connections += 1
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(there_writer)
            self._writers.add(there_writer)
            self.open_connections += 1
            await asyncio.gather(
                self._pass(reader, there_writer, False, writers), self._pass(there_reader, writer, True, writers)
            )
        except OSError:
            pass
        finally:
            self._writers.difference_update(writers)
            self.open_connections -= len(writers) - 1
            for one in writers:
                one.transport.abort()
            for one in writers:
                with suppress(OSError):
                    await one.wait_closed()
            self._tasks.discard(task)

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
