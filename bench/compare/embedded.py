"""seqdedupe: the embedded log, by the Python client."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from bench.by_client import Timed
from bench.compare.broker import Broker, Mode, Server, free_port, listens
from bench.compare.load import BATCH_MESSAGES, PAUSE_SECONDS, PRODUCER, Load, payload
from seqdedupe.client import Binary, Client


@contextmanager
def _serve(_: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    address = f"127.0.0.1:{free_port()}"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "broker_sidecar",
        "--data-directory",
        folder / "data",
        "--listen",
        address,
        "--authentication",
        "none",
    ]
    with Server(address, folder, command, lambda: listens(address)).running() as server:
        yield server


BROKER = Broker(
    name="seqdedupe",
    module="embedded",
    version=version("seqdedupe"),
    client="seqdedupe.client",
    modes={Mode.SYNCED: "always"},
    deduplication="always",
    get=lambda _: None,
    serve=_serve,
    own_client=True,
    takes_batches=True,
)


async def publish(address: str, topic: str, load: Load) -> None:
    async with Client(address) as client, client.producer(topic, PRODUCER) as producer:
        load.confirmed = lambda: producer.counters.not_dup + producer.counters.dup
        for number in load:
            if number is None:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                await producer.send(payload(number), number)
        await producer.flush()
        load.finish()


async def ready(address: str, topic: str, load: Load) -> None:
    payloads = Binary.of_all([payload(number) for number in range(BATCH_MESSAGES)])
    async with Client(address) as client, client.producer(topic, PRODUCER) as producer:
        for _ in load.batches():
            await producer.send_batch(payloads)
        await producer.flush()
        load.finish()


async def steady(address: str, topic: str, load: Load) -> None:
    async with Client(address) as client, client.producer(topic, PRODUCER) as producer:
        timed = Timed(load.confirm)
        for number in load:
            if number is None:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                timed.add(await producer.send(payload(number), number), number)
        await timed.all()
        load.finish()


async def one_in_flight(address: str, topic: str, load: Load) -> list[float]:
    seconds = []
    async with Client(address) as client, client.producer(topic, PRODUCER) as producer:
        for number in load:
            began = time.perf_counter()
            await (await producer.send(payload(number or 0), number))
            seconds.append(time.perf_counter() - began)
    return seconds


async def read(address: str, topic: str) -> tuple[list[bytes], float]:
    began = time.perf_counter()
    async with Client(address) as client, client.reader(topic) as reader:
        messages = [message.payload or b"" async for message in reader]
    return messages, time.perf_counter() - began
