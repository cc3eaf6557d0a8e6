"""Two sidecars in the tests' own process, each with its own log, so that steps of a move can be made to fail."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from broker_sidecar.config import Config
from broker_sidecar.server import SidecarServer
from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.base import State

TOPIC = "persistent://public/default/moved"
LIMIT_SECONDS = LAST_RESORT_SECONDS
SEGMENT_BYTES = 8192
_CONNECTIONS = 1000


class One:
    """One of the two."""

    def __init__(self, folder: Path, address: str, other: str, **keys: Any) -> None:
        self.config = replace(
            Config(),
            data_directory=str(folder),
            listen=address,
            authentication="none",
            allow_auto_topic_creation=False,
            peers=other,
            deduplication_entries_interval=50,
            **keys,
        )
        self.folder = folder
        self.address = address
        self.client = Client(address)

    async def start(self) -> None:
        self.sidecar = SidecarServer(self.config, connections=_CONNECTIONS)
        await self.sidecar.listen()
        await self.sidecar.recover()

    async def stop(self) -> None:
        await self.sidecar.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def topics(self) -> Any:
        return self.sidecar._data.topics

    @property
    def arriving(self) -> Any:
        return self.sidecar._admin._arrivals

    @property
    def leaving(self) -> Any:
        return self.sidecar._data.leaving

    def serves(self, name: str = TOPIC) -> bool:
        topic = self.topics.registry.topic(name)
        if topic is None or topic.state is not State.SERVING:
            return False
        with suppress(SeqdedupeError):
            topic.check_serving()
            return True
        return False

    def log_folder(self, incarnation: int) -> Path:
        return self.folder / "logs" / str(incarnation)

    def segments(self, incarnation: int) -> list[str]:
        return sorted(path.name for path in self.log_folder(incarnation).glob("*.log"))


class Pair:
    """`old` has the topic at first."""

    def __init__(self, folder: Path, sockets: Path, **keys: Any) -> None:
        here, there = f"unix:{sockets}/old", f"unix:{sockets}/new"
        self.old = One(folder / "old", here, there, **keys)
        self.new = One(folder / "new", there, here, **keys)
        self.both = f"{here},{there}"

    async def the_owner(self) -> One:
        """Who serves the topic, as soon as one does; never both."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                found = [one for one in (self.old, self.new) if one.serves()]
                assert len(found) < 2, "both serve it"
                if found:
                    return found[0]
                await asyncio.sleep(0.005)

    async def stored(self, one: One) -> list[int]:
        """The IDs of all messages."""
        async with one.client.reader(TOPIC) as reader:
            return [message.sequence_id async for message in reader]

    async def publish(self, one: One, count: int, name: str = "p") -> None:
        """This many more."""
        async with one.client.producer(TOPIC, name) as producer:
            for receipt in [await producer.send(b"%d" % k * 40) for k in range(count)]:
                await receipt


def answers_late(one: One, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The answers to whether a topic that it moved away is known elsewhere come late: an event that tells that there is
    one, and one that lets it hear."""
    answered, heard = asyncio.Event(), asyncio.Event()
    ask = one.leaving.others.ask

    async def late(address: str, name: str, request: Any, seconds: float) -> Any:
        answer = await ask(address, name, request, seconds)
        if request.is_known:
            answered.set()
            await heard.wait()
        return answer

    monkeypatch.setattr(one.leaving.others, "ask", late)
    return answered, heard


@asynccontextmanager
async def pair(folder: Path, **keys: Any) -> AsyncIterator[Pair]:
    """Both serve, and have small segments."""
    sockets = Path(tempfile.mkdtemp(prefix="seqdedupe-"))
    small = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)
    made = Pair(folder, sockets, **keys)
    with patch.object(EmbeddedLogs, "__init__", small):
        try:
            for one in (made.old, made.new):
                await one.start()
            yield made
        finally:
            for one in (made.old, made.new):
                await one.client.close()
                await one.stop()
            shutil.rmtree(sockets)
