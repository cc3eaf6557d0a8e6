"""The relay: what is in the outbox goes to a topic, each row once, those of an aggregate in the order of commits."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from seqdedupe.client import Client, Credentials
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.connection import NOT_A_SIDECAR
from seqdedupe.client.sidecars import Addresses
from seqdedupe.databases.failures import refuses_entry
from seqdedupe.errors import FencedError, UnavailableError
from seqdedupe.names import producer_name, topic_name
from seqdedupe.services.outbox import steps
from seqdedupe.services.outbox.finding import token_name
from seqdedupe.services.outbox.rows import Route
from seqdedupe.services.outbox.store import Lag, Store, open_store
from seqdedupe.services.outbox.work import Counters, Work
from seqdedupe.services.standing_by import Stillness

STANDBY_SECONDS = 5.0
"""A relay that was fenced takes over when the oldest row has not gone for so long."""

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0

_KIND = "{aggregatetype}"

_log = logging.getLogger("seqdedupe.outbox")

T = TypeVar("T")


class Relay:
    """Publishes what is in an outbox, in the order of its numbers, and deletes it: each row once, exactly if its
    transaction committed, whatever is killed. It belongs to one event loop.

    `database` is a URL of SQLAlchemy's. The topic may say `{aggregatetype}`, in whose place a row's own is put. The
    producer names are `name`/token. Any number of relays may run for one outbox, under the same name: one works, the
    others stand by until the oldest row has not gone for `standby_seconds`.

    `report` is told, in a line, what a person should know: by default it is a warning of the logger `seqdedupe.outbox`.
    """

    def __init__(
        self,
        client: Client,
        database: str,
        topic: str,
        name: str,
        *,
        standby_seconds: float = STANDBY_SECONDS,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Raises InvalidRequestError for a topic or name that is none, ConfigurationError for a URL that is none."""
        self.counters = Counters()
        self._client = client
        self._topic = topic if _KIND in topic else topic_name(topic)
        self._route: Route | None = None
        if _KIND in topic:
            self._route = lambda kind: topic_name(topic.replace(_KIND, kind))
            self._route("any")
        producer_name(token_name(name, "0" * 16))
        self._name = name
        self._store: Store = open_store(database)
        self._standby_seconds = standby_seconds
        self._has_begun = False  # a sidecar has answered
        self._report = report or _log.warning

    async def run(self, *, follow: bool = True) -> None:
        """Relays for ever; without `follow` until all that could be read is published and deleted.

        Raises ConfigurationError (INVALID_OUTBOX, OUTBOX_CHANGED) for an outbox that it cannot work with, DataLossError
        if the topic has lost what it acknowledged, NotFoundError if there is no topic, UnavailableError if, when it
        begins, what answers is not a sidecar, there is no such database, or it does not let the user in. Without
        `follow` also FencedError if another relay took over, and any UnavailableError; else it stands by or tries again
        (for a database, also when it begins).
        """
        try:
            await self._open_at_last(lambda e: not follow or refuses_entry(e.__cause__))
            while True:
                try:
                    await self._relay(follow=follow)
                except FencedError as e:
                    self.counters.times_fenced += 1
                    if not follow:
                        raise
                    self._report(f"another relay works: {e.message}; standing by")
                    await self._stand_by()
                except UnavailableError as e:
                    if not follow or (e.reason == NOT_A_SIDECAR and not self._has_begun):
                        raise
                    self._report(f"trying again: {e}")
                    await asyncio.sleep(_RETRY_SECONDS)
                    await self._open_at_last()
                else:
                    return
        finally:
            await self._blocking(self._store.close)

    async def lag(self) -> Lag:
        """How far behind the relay is, while it runs."""
        return await self._blocking(self._store.lag)

    def _open(self) -> None:
        self._store.open()
        self._store.bind(self._name, self._topic)

    async def _open_at_last(self, is_final: Callable[[UnavailableError], bool] = lambda _: False) -> None:
        """Waits for the database. Opened again, what was read by connections that are gone is deleted by nobody."""
        while True:
            try:
                await self._blocking(self._open)
            except UnavailableError as e:
                if is_final(e):
                    raise
                self._report(f"trying again: {e}")
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _stand_by(self) -> None:
        """Until the oldest row has not gone for long."""
        stillness = Stillness(self._standby_seconds)
        while True:
            try:
                oldest = await self._blocking(self._store.oldest)
            except UnavailableError as e:
                self._report(f"trying again: {e}")
                await asyncio.sleep(_RETRY_SECONDS)
                await self._open_at_last()
                continue
            if stillness.has_lasted(oldest) and oldest is not None:
                return
            await asyncio.sleep(min(_LOOK_SECONDS, self._standby_seconds))

    async def _relay(self, *, follow: bool) -> None:
        work = Work(self._client, self._store, self._name, self.counters, self._report)
        try:
            await work.drive(steps.relay(self._topic, self._route, follow=follow), None if self._route else self._topic)
        finally:
            self._has_begun |= work.has_opened

    @staticmethod
    async def _blocking(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(work, *arguments)


def run_relay(
    address: Addresses,
    database: str,
    topic: str,
    name: str,
    *,
    follow: bool = True,
    credentials: Credentials | None = None,
    report: Callable[[str], None] | None = None,
) -> Counters:
    """`Relay.run` for threads, with a client of its own: blocks until it ends. Answers what it has done."""

    async def work() -> Counters:
        async with Client(address, credentials) as client:
            one = Relay(client, database, topic, name, report=report)
            await one.run(follow=follow)
            return one.counters

    return run(work)
