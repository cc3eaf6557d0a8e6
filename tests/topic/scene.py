"""A topic on a log that does what the test says."""

import asyncio

from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import MessageState, message_state, open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5


class Scene:
    """A topic on a log that does what the test says, with a clock that the test moves."""

    def __init__(self, store: Store) -> None:
        self.storage = Storage(INCARNATION)
        self.store = store
        self.now_seconds = 1000.0
        self.epochs: dict[str, int] = {}

    async def start(self, *, retention: bool = False) -> None:
        snapshots = Snapshots(self.store, INCARNATION)
        self.log = FaultyLog(self.storage, retention=retention)
        self.topic = Topic(
            "t", self.log, self.store, snapshots, snapshots.load(), applied=Applied(), random_bytes=bytes
        )
        self.topic.now_seconds = lambda: self.now_seconds
        await self.topic.recover()

    async def open(self, *names: str) -> None:
        opening = asyncio.ensure_future(open_sessions(self.topic, list(names), None))
        await asyncio.sleep(0)
        self.log.settle()
        self.epochs.update(zip(names, (await opening).epochs, strict=True))

    def send(self, *rows: tuple[str, int], link: int = -1) -> list[FrameReceipt | Refusal]:
        answers: list[FrameReceipt | Refusal] = []
        links = dict.fromkeys((name for name, _ in rows), link)
        encoded = batch(list(rows), epochs={name: self.epochs[name] for name in links}, links=links).encode()
        self.topic.admit(encoded, 1, answers.append, NumbersCache())
        return answers

    async def state(self, name: str, sequence_id: int) -> MessageState:
        return (await message_state(self.topic, name, sequence_id)).state
