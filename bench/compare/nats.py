"""NATS JetStream: nats-server from the Go module proxy, nats-py, deduplication by Nats-Msg-Id."""

import asyncio
import time
from asyncio import Future
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker, Mode, Server, free_port, listens, run
from bench.compare.load import Load, payload
from bench.compare.resending import MOST_UNCONFIRMED, Window
from bench.compare.resending import publish as publish_resending

VERSION = "2.15.2"


def _get(cache: Path) -> None:
    if not (cache / f"nats-{VERSION}" / "nats-server").exists():
        run("go", "install", f"github.com/nats-io/nats-server/v2@v{VERSION}", GOBIN=str(cache / f"nats-{VERSION}"))


@contextmanager
def _serve(cache: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    sync = "sync_interval: always" if mode is Mode.SYNCED else ""
    configuration = folder / "nats.conf"
    configuration.write_text(
        f'listen: "{address}"\njetstream {{ store_dir: "{folder / "data"}"\n max_file_store: 100G\n {sync} }}\n'
    )
    command: list[str | Path] = [cache / f"nats-{VERSION}" / "nats-server", "-c", configuration]
    with Server(address, folder, command, lambda: listens(address)).running() as server:
        yield server


BROKER = Broker(
    name="NATS JetStream",
    module="nats",
    version=VERSION,
    client="nats-py",
    modes={Mode.SYNCED: "`sync_interval: always`", Mode.PAGE_CACHE: "its default, `sync_interval` of 2 minutes"},
    deduplication="`Nats-Msg-Id`, within its window of 2 minutes",
    get=_get,
    serve=_serve,
)


class _Sender:
    def __init__(self, stream: Any, topic: str, window: Window) -> None:
        self._stream = stream
        self._topic = topic
        self._window = window

    async def send(self, number: int, data: bytes) -> None:
        future = await self._stream.publish_async(self._topic, data, headers={"Nats-Msg-Id": str(number)})
        future.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, done: "Future[Any]") -> None:
        if done.cancelled() or (failure := done.exception()) is not None:
            self._window.breaks(f"not confirmed: {None if done.cancelled() else failure}")
        else:
            self._window.confirm(number)

    async def flush(self) -> None:
        # Lets the client's own task write what it has gathered.
        await asyncio.sleep(0)


@asynccontextmanager
async def _connected(address: str, topic: str, window: Window | None = None) -> AsyncIterator[Any]:
    import nats

    async def broke(*_: object) -> None:
        if window is not None:
            window.breaks("disconnected")

    connection = await nats.connect(f"nats://{address}", allow_reconnect=False, disconnected_cb=broke, closed_cb=broke)
    try:
        stream = connection.jetstream(publish_async_max_pending=2 * MOST_UNCONFIRMED)
        await stream.add_stream(name=topic, subjects=[topic])
        yield stream
    finally:
        await connection.close()


async def publish(address: str, topic: str, load: Load, window: Window | None = None) -> None:
    import nats

    window = window or Window()

    @asynccontextmanager
    async def connect() -> AsyncIterator[_Sender]:
        async with _connected(address, topic, window) as stream:
            yield _Sender(stream, topic, window)

    await publish_resending(load, window, connect, (nats.errors.Error,))


async def steady(address: str, topic: str, load: Load) -> None:
    await publish(address, topic, load, Window(load.confirm))


async def one_in_flight(address: str, topic: str, load: Load) -> list[float]:
    seconds = []
    async with _connected(address, topic) as stream:
        for number in load:
            began = time.perf_counter()
            await stream.publish(topic, payload(number or 0), headers={"Nats-Msg-Id": str(number)})
            seconds.append(time.perf_counter() - began)
    return seconds


async def read(address: str, topic: str) -> tuple[list[bytes], float]:
    messages: list[bytes] = []
    began = time.perf_counter()
    async with _connected(address, topic) as stream:
        count = (await stream.stream_info(topic)).state.messages
        reader = await stream.subscribe(topic, ordered_consumer=True, pending_bytes_limit=-1, pending_msgs_limit=-1)
        while len(messages) < count:
            messages.append((await reader.next_msg(timeout=30)).data)
    return messages, time.perf_counter() - began
