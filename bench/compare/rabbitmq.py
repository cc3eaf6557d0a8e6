"""RabbitMQ Streams: Debian's package and its Erlang, unpacked and not installed, rstream, a named producer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker, Mode, Server, Unavailable, free_port, listens, run
from bench.compare.load import PRODUCER, Load, payload
from bench.compare.resending import ANSWER_SECONDS, Window
from bench.compare.resending import publish as publish_resending

SERIES = "3.10"
BATCH = 256
END_SECONDS = 2.0
"""A reader that gets nothing for so long is at the end: a client of this series cannot ask where that is."""


def _root(cache: Path) -> Path:
    return cache / "rabbitmq"


def _get(cache: Path) -> None:
    done = _root(cache) / "complete"
    if done.exists():
        return
    packages = cache / "rabbitmq-packages"
    (packages / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::Cache::Archives={packages}", "-o", "Debug::NoLocking=1"]
    run("apt-get", "install", "-y", "--no-install-recommends", "--download-only", *options, "rabbitmq-server")
    for package in packages.glob("*.deb"):
        run("dpkg-deb", "-x", package, _root(cache))
    erlang = _root(cache) / "usr" / "lib" / "erlang"
    if not (erlang / "bin" / "erl").exists():
        raise Unavailable("Erlang is installed on this machine already, so that its package was not downloaded")
    # Debian's scripts name the folder that Erlang is installed in.
    for script in (*erlang.glob("bin/*"), *erlang.glob("erts-*/bin/*")):
        data = script.read_bytes()
        if data.startswith(b"#!"):
            script.write_bytes(data.replace(b"=/usr/lib/erlang", b"=" + bytes(erlang)))
    done.touch()


@contextmanager
def _serve(cache: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    erlang = _root(cache) / "usr" / "lib" / "erlang"
    scripts = next((_root(cache) / "usr" / "lib" / "rabbitmq" / "lib").glob("*/sbin"))
    names, amqp, stream = free_port(), free_port(), free_port()
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{amqp}\nstream.listeners.tcp.1 = 127.0.0.1:{stream}\n"
        f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {stream}\n"
    )
    (folder / "enabled_plugins").write_text("[rabbitmq_stream].\n")
    environment = {
        "PATH": f"{erlang / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RUNNING_UNDER_SYSTEMD": "true",
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_NODENAME": "bench@localhost",
    }
    epmd: list[str | Path] = [next(erlang.glob("erts-*/bin/epmd")), "-address", "127.0.0.1", "-port", str(names)]
    address = f"127.0.0.1:{stream}"
    with (
        Server(f"127.0.0.1:{names}", folder, epmd, lambda: listens(f"127.0.0.1:{names}")).running(),
        Server(
            address, folder, [scripts / "rabbitmq-server"], lambda: listens(address), **environment
        ).running() as server,
    ):
        yield server


BROKER = Broker(
    name="RabbitMQ Streams",
    module="rabbitmq",
    version=f"{SERIES} (Debian's)",
    client="rstream",
    modes={Mode.PAGE_CACHE: "always: streams have no synced setting"},
    deduplication="named producer with publishing IDs",
    get=_get,
    serve=_serve,
)


def _options(address: str) -> dict[str, Any]:
    host, port = address.rsplit(":", 1)
    return {"host": host, "port": int(port), "username": "guest", "password": "guest"}


class _Sender:
    """Sends batches of 256 messages: rstream's own `send` puts out what it has gathered only every half second."""

    def __init__(self, producer: Any, topic: str, window: Window) -> None:
        self._producer = producer
        self._topic = topic
        self._window = window
        self._gathered: list[Any] = []

    async def send(self, number: int, data: bytes) -> None:
        from rstream import RawMessage

        self._gathered.append(RawMessage(data, publishing_id=number))
        if len(self._gathered) >= BATCH:
            await self.flush()

    async def flush(self) -> None:
        if self._gathered:
            batch, self._gathered = self._gathered, []
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._producer.send_batch(
                    self._topic, batch, publisher_name=PRODUCER, on_publish_confirm=self._confirmed
                )

    def _confirmed(self, status: Any) -> None:
        if status.is_confirmed:
            self._window.confirm(status.message_id)
        else:
            self._window.breaks(f"refused with {status.response_code}")


@asynccontextmanager
async def _connected(address: str, topic: str, window: Window | None = None) -> AsyncIterator[Any]:
    from rstream import Producer
    from rstream.recovery import BackOffRecoveryStrategy

    def broke(_: object) -> None:
        if window is not None:
            window.breaks("disconnected")

    producer = Producer(
        **_options(address), on_close_handler=broke, recovery_strategy=BackOffRecoveryStrategy(enable=False)
    )
    async with producer:
        await producer.create_stream(topic, exists_ok=True)
        yield producer


async def publish(address: str, topic: str, load: Load, window: Window | None = None) -> None:
    from rstream.exceptions import ClientError, ServerError

    window = window or Window()

    @asynccontextmanager
    async def connect() -> AsyncIterator[_Sender]:
        async with _connected(address, topic, window) as producer:
            yield _Sender(producer, topic, window)

    await publish_resending(load, window, connect, (ServerError, ClientError, RuntimeError))


async def steady(address: str, topic: str, load: Load) -> None:
    await publish(address, topic, load, Window(load.confirm))


async def one_in_flight(address: str, topic: str, load: Load) -> list[float]:
    from rstream import RawMessage

    seconds = []
    async with _connected(address, topic) as producer:
        for number in load:
            message = RawMessage(payload(number or 0), publishing_id=number)
            began = time.perf_counter()
            await producer.send_wait(topic, message, publisher_name=PRODUCER)
            seconds.append(time.perf_counter() - began)
    return seconds


async def read(address: str, topic: str) -> tuple[list[bytes], float]:
    from rstream import Consumer

    messages: list[bytes] = []
    came = asyncio.Event()
    last = began = time.perf_counter()

    def take(message: bytes, _: object) -> None:
        nonlocal last
        messages.append(message)
        last = time.perf_counter()
        came.set()

    async with Consumer(**_options(address)) as consumer:
        await consumer.subscribe(topic, take)
        with contextlib.suppress(TimeoutError):
            while True:
                came.clear()
                await asyncio.wait_for(came.wait(), END_SECONDS)
    return messages, last - began
