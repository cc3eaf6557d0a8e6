"""Topics that a start does not wait for: each is opened when somebody uses it, and all of them one after the other.

To open a topic and to take over its log takes some syncs of the disk, however little there is in it. So a sidecar with
very many of them serves before it has opened them all. Until one is open nobody knows whether it is damaged, and it is
RECOVERING. None waits for ever: what its policy says has to be done, used or not.
"""

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

from seqdedupe.errors import error
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.base import State
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.tasks import shielded

if TYPE_CHECKING:
    from seqdedupe.topic.directory import Topics

logger = logging.getLogger("seqdedupe.topics")

OPENED_AT_START = 256
"""So many topics are opened before the sidecar serves; more wait."""

APART_SECONDS = 0.05
"""Before each of those that nobody uses: most of the disk and of the event loop is for those who use others."""

USE_SECONDS = 2.0
"""So long whoever uses a topic that waits is kept waiting at most; then it is told RECOVERING, as ever."""

USED_AT_ONCE = 32

WHY = "nobody has used it since the start: it is opened when somebody does, or in its turn"


class Waiting:
    """Those of the topics of a sidecar's own log that are left when OPENED_AT_START have been tried."""

    def __init__(self, topics: "Topics[Any]") -> None:
        self.unfinished: frozenset[int] = frozenset()
        """Incarnations that do not wait, as their logs say."""
        self.opening: dict[str, asyncio.Task[bool]] = {}
        """Some that waited, and are being opened: the rest is recovery."""
        self._topics = topics
        self._tried = 0
        self._waiting: dict[str, Closed] = {}
        self._begun: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def takes(self, record: TopicRecord) -> bool:
        """Whether a topic that is to be opened at the start waits from now on."""
        topics = self._topics
        self._tried += 1
        # A store that is made anew has to hold something of all of them soon.
        if topics.kind.log is not LogKind.EMBEDDED or topics.rebuild_store or self._tried <= OPENED_AT_START:
            return False
        # What a crash has left of it would be written to a file of its own before others may use the journal.
        if record.incarnation in self.unfinished:
            return False
        self._waiting[record.name] = closed = Closed(record, error("RECOVERING", WHY))
        topics.registry.entry(record.name).found = closed
        topics.on_state(record.name, State.RECOVERING)
        return True

    def begin(self, name: str) -> "asyncio.Task[None] | None":
        """Begins to open the topic of this full name if it waits. What goes on until it has been recovered, if so."""
        if closed := self._waiting.pop(name, None):
            closed.why = error("RECOVERING", "it is being opened")
            self._begun[name] = task = self._topics.in_background(self._open(closed.record))
            task.add_done_callback(lambda _: self._begun.pop(name))
        return self._begun.get(name)

    async def use(self, *names: str) -> None:
        """Returns when the topics of these full names wait no more: they are open and recovered, or that takes long."""
        if begun := {task for name in names if (task := self.begin(name))}:
            # Whoever gives up here gives up alone.
            await asyncio.wait(begun, timeout=USE_SECONDS)

    async def _open(self, record: TopicRecord) -> None:
        topics = self._topics
        if topics.is_draining:
            return
        # What reads store and log is not left behind where this is cancelled.
        if not await shielded(self.opening, record.name, topics.lives.opened(record)):
            # It looks again soon, in case of damage. Nobody waits for more.
            await asyncio.wait({topics.in_background(topics.lives.go_on_opening(record))}, timeout=USE_SECONDS)
        elif topic := topics.registry.topic(record.name):
            await topic.recover()

    async def use_all(self) -> None:
        """As `use`, of all that wait."""
        while self._waiting:
            await self.use(*islice(self._waiting, USED_AT_ONCE))

    async def open_all(self) -> None:
        """Opens one after the other, until none waits."""
        if self._waiting:
            logger.info("%d topics are opened when somebody uses them, or one after the other", len(self._waiting))
        while self._waiting:
            await asyncio.sleep(APART_SECONDS)
            await self.use(*islice(self._waiting, 1))

    def close(self) -> None:
        """What still waits is opened at the next start."""
        self._waiting.clear()
