"""What several test files of the client do."""

import asyncio
from collections.abc import Callable

from seqdedupe.client import Client, Message, Receipt
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar


async def read_all(sidecar: Sidecar, topic: str) -> list[Message]:
    async with Client(sidecar.address) as client, client.reader(topic) as reader:
        return [message async for message in reader]


async def ids_in_log(sidecar: Sidecar, topic: str) -> list[int]:
    return [message.sequence_id for message in await read_all(sidecar, topic)]


async def until(condition: Callable[[], bool], timeout_seconds: float = LAST_RESORT_SECONDS) -> None:
    """Waits for what no event tells of."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def wait_for(receipt: Receipt) -> None:
    await receipt


async def until_stored(client: Client, topic: str, messages: int) -> None:
    """Waits until the topic has this many messages."""
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while (await client.admin.topic(topic)).last.index + 1 < messages:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
