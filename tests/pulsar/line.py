"""A line between a client and a broker that can be held up and cut."""

import asyncio
from contextlib import suppress
from typing import Self

from pulsar_broker.standalone import Broker
from tests.listener import Listener

_CHUNK_BYTES = 64 * 1024


class Line:
    """Clients of `service_url` reach the broker over it. It is on the test's event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker_port = int(broker.service_url.rpartition(":")[2])
        self._broker_url = broker.service_url.encode()
        self._answers = asyncio.Event()
        self._answers.set()
        self._requests = asyncio.Event()
        self._requests.set()
        self._is_down = False
        self._last_words: bytes | None = None
        self._clients = Listener(self._connected)
        self._writers: set[asyncio.StreamWriter] = set()
        """To the broker."""

    @property
    def service_url(self) -> str:
        return f"pulsar://127.0.0.1:{self._clients.port}"

    async def __aenter__(self) -> Self:
        await self._clients.__aenter__()
        # The broker's own address is replaced in what it answers, where the length must stay.
        assert len(self.service_url) == len(self._broker_url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.close()

    def hold_answers(self) -> None:
        """What the broker says does not arrive any more; what the client says does."""
        self._answers.clear()

    def hold_answers_after(self, text: bytes) -> None:
        """As `hold_answers`, from when a client says this."""
        self._last_words = text

    def hold_requests(self) -> None:
        """What clients say does not arrive any more, until `let_requests_through`; what the broker says does."""
        self._requests.clear()

    def let_requests_through(self) -> None:
        self._requests.set()

    def let_answers_through(self) -> None:
        self._answers.set()

    def cut(self, *, and_stay_down: bool = False) -> None:
        """Ends all connections; what was held up is gone."""
        self._is_down = and_stay_down
        self._clients.cut()
        for writer in self._writers:
            writer.transport.abort()
        self._answers.set()
        self._requests.set()

    def mend(self) -> None:
        """New connections are taken again."""
        self._is_down = False

    async def _connected(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        if self._is_down:
            return
        broker_in, broker_out = await asyncio.open_connection("127.0.0.1", self._broker_port)
        self._writers.add(broker_out)
        try:
            await asyncio.gather(self._pump(client_in, broker_out, False), self._pump(broker_in, client_out, True))
        finally:
            self._writers.discard(broker_out)
            broker_out.transport.abort()
            with suppress(OSError):
                await broker_out.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, are_answers: bool) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                if are_answers:
                    await self._answers.wait()
                    data = data.replace(self._broker_url, self.service_url.encode())
                else:
                    await self._requests.wait()
                    if self._last_words is not None and self._last_words in data:
                        self._last_words = None
                        self.hold_answers()
                if target.transport.is_closing():
                    break
                target.write(data)
                await target.drain()
        target.transport.abort()
