"""Sidecars without their network, in front of one cluster: their topics, their stores, and admin calls that fail."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from seqdedupe.entry_properties import BEGUN
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.log.pulsar.admin_url import JSON, AdminAnswer, AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.log import PulsarResources
from seqdedupe.log.pulsar.logs import PulsarLogs
from seqdedupe.store.db import Store
from seqdedupe.store.directories import StoreInstance
from seqdedupe.store.parts import LogKind
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, until

R = TypeVar("R")

MakeMember = Callable[..., "Member"]

_whose: ContextVar["Member | None"] = ContextVar("_whose", default=None)
_namespaces = itertools.count()


async def safe_namespace(cluster: Cluster) -> str:
    """Its own namespace, whose topics can be logs as they are."""
    full = f"public/safe-{next(_namespaces)}"
    policies = {
        "subscription_expiration_time_minutes": 0,
        "deduplicationEnabled": True,
        "deduplicationSnapshotIntervalSeconds": 0,
        "retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1},
    }
    await cluster.url.call("PUT", f"namespaces/{full}", policies)
    return full


def _task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> "asyncio.Task[Any]":
    """Makes a task, which is the member's whose task makes it."""
    task = asyncio.Task(work, loop=loop, **more)
    if (member := _whose.get()) is not None:
        member.tasks.add(task)
    return task


class Kill(BaseException):
    """The process ends here."""


class FaultyUrl(AdminUrl):
    """An admin URL of which a call that changes something is carried out, and not answered."""

    changes = 0
    fail_at = 0
    """The so-manieth change; 0: none."""
    kills = False
    """The process ends with it."""
    is_dead = False

    def fails(self, at: int, *, kills: bool = False) -> None:
        self.changes, self.fail_at, self.kills = 0, at, kills

    async def call(
        self, method: str, path: str, body: object = None, conflict: str = "LOG_REFUSED", media_type: str = JSON
    ) -> AdminAnswer:
        if self.is_dead:
            raise error("LOG_REFUSED", "the process has ended")
        answer = await super().call(method, path, body, conflict, media_type)
        # Where a subscription stands is moved whenever there is time. That a topic has begun is set by any opening.
        is_repeated = path.endswith("/resetcursor") or (isinstance(body, dict) and BEGUN in body)
        if method != "GET" and not is_repeated:
            self.changes += 1
            if self.changes == self.fail_at:
                if self.kills:
                    self.is_dead = True
                    raise Kill
                raise error("LOG_REFUSED", "a planned failure")
        return answer


class Member:
    """A sidecar: started again over the same folder, it has the data that it had."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        *,
        is_standby: bool = False,
        entry_format: EntryFormat = EntryFormat.PLAIN,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self.folder = folder
        self._is_standby = is_standby
        self._entry_format = entry_format
        self.address = folder.name
        self.is_running = False
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        """All that were begun by what was `run`."""

    async def start(self) -> None:
        asyncio.get_running_loop().set_task_factory(_task)  # type: ignore[arg-type]
        self.store = Store.open(self.folder)
        self.url = FaultyUrl(self._cluster.admin_url)
        instance = StoreInstance(self.store)
        self.store_name = instance.named("")
        shared = PulsarResources(
            self.store_name,
            self.address,
            lambda: time.time_ns() // 1_000_000,
            lambda _, known: instance.claim_opening(known),
            PulsarAdmin(self.url),
            self._cluster.answers,
            Brokers(self._cluster.service_url),
        )
        self.logs = PulsarLogs(shared, [self._namespace], self._entry_format, may_change_policies=False)
        self.is_running = True
        await self.run(self._start())

    async def _start(self) -> None:
        self.topics: Topics[Topic] = Topics(
            self.store,
            lambda told: PublishedTopics(
                self.store, self.logs, log=LogKind.PULSAR, on_state=told, stands_by=lambda _: self._is_standby
            ),
            max_topics=100,
            allow_auto_topic_creation=True,
            on_state=lambda name, state: None,
        )
        await self.topics.open_all()
        await self.topics.recover_all()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Does something as this process, which ends with it."""
        token = _whose.set(self)
        try:
            task = asyncio.create_task(work)
        finally:
            _whose.reset(token)
        return await task

    async def look(self) -> None:
        await self.run(self.topics.looking.once())

    async def stop(self) -> None:
        """In order."""
        await self.run(self.topics.drain())
        await self._end()

    async def kill(self) -> None:
        """Nothing of it goes on."""
        if not self.is_running:
            return
        self.url.is_dead = True
        # What ends may begin something else.
        while own := [task for task in self.tasks if not task.done()]:
            for task in own:
                task.cancel()
            await asyncio.wait(own)
        await self._end()

    async def _end(self) -> None:
        self.store.close()
        self.is_running = False

    async def take(self, name: str) -> Topic:
        """Asks for a topic until it is this one's."""

        def is_taken() -> bool:
            topic = self.topics.registry.topic(name)
            if topic is None:
                return False
            with suppress(UnavailableError):
                topic.check_serving()
            return topic.state is State.SERVING

        async with asyncio.timeout(LIMIT_SECONDS):
            await until(is_taken)
        return self.topics.get(name)

    async def publish(self, name: str, sequence_id: int, payload: bytes = b"payload") -> int:
        """The index of a message that is stored. Raises why it is not."""
        return (await self.ask(name, sequence_id, payload)).first_index

    async def persisted(self, name: str, *producers: str) -> list[int]:
        """The producers' watermarks."""
        return (await self.run(open_sessions(self.topics.get(name), list(producers), None))).persisted

    async def ask(self, name: str, sequence_id: int, payload: bytes = b"payload", producer: str = "p") -> FrameReceipt:
        """What is answered to a message. Raises why it is refused."""
        return await self.run(self._ask(self.topics.get(name), sequence_id, payload, producer))

    async def _ask(self, topic: Topic, sequence_id: int, payload: bytes, producer: str) -> FrameReceipt:
        opened = await open_sessions(topic, [producer], None)
        (link,) = opened.persisted
        epochs, links = {producer: opened.epochs[0]}, {producer: min(link, sequence_id - 1)}
        frame = batch([(producer, sequence_id)], epochs=epochs, links=links, payloads=[payload]).encode()
        answers: asyncio.Queue[FrameReceipt | Refusal] = asyncio.Queue()
        topic.admit(frame, 1, answers.put_nowait, NumbersCache(), lone=True)
        answer = await answers.get()
        if isinstance(answer, Refusal):
            raise answer.error
        return answer


async def reason_of(work: Coroutine[Any, Any, object]) -> str:
    """Why something was refused; empty if it was not."""
    try:
        await work
    except SeqdedupeError as e:
        return e.reason
    return ""
