"""The names of topics, and the operation in progress on each name. One entry per name decides whether another operation
may begin.

Begin with `RegistryEntry`. `Registry` contains all entries, and knows which topics are partitioned.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.names import partition_name, whole_of
from seqdedupe.store.parts import TopicRecord
from seqdedupe.tasks import retrieve
from seqdedupe.topic.base import State, TopicBase, damaged_topic

# -- A topic that exists and cannot be opened.


@dataclass(slots=True)
class Closed:
    """A topic whose log or snapshot could not be opened. Either the topic is tried again, or it is DAMAGED."""

    record: TopicRecord
    why: SeqdedupeError
    state: State = State.RECOVERING
    owner_address: str = ""
    """While this sidecar has NO_STATE for the topic: the address of the sidecar that owns and serves the topic."""
    note: str = ""
    """The result of the last attempt to fetch the topic's state."""

    @property
    def told(self) -> SeqdedupeError:
        """The reason, with the note."""
        return error(self.why.reason, f"{self.why.message}; {self.note}") if self.note else self.why

    def error(self) -> SeqdedupeError:
        """Return the error for callers of the topic."""
        if self.why.reason == "NOT_OWNER":
            why, owner = f"topic {self.record.name}: {self.why.message}", self.why.numbers.get("owner_address", "")
            return error("NOT_OWNER", why, hint=self.why.hint, owner_address=owner)
        if self.owner_address:
            why = f"the sidecar at {self.owner_address} owns topic {self.record.name}, of which this one has no state"
            return error("NOT_OWNER", why, owner_address=self.owner_address)
        if self.state is State.DAMAGED:
            return damaged_topic(self.record.name, self.told)
        return error("RECOVERING", f"topic {self.record.name} cannot be opened now: {self.why.message}")


# -- The owner of a topic, if topics are divided among processes by their names.


class Ownership:
    """The ownership rules of a process that owns all topics, or whose log decides which topics it owns."""

    def check(self, topic: str) -> None:
        """Raise NOT_OWNER if a topic of this full name belongs to another process."""

    def check_found(self, topics: Iterable[str]) -> None:
        """Raise SHARD_CLAIMED_TWICE if a topic in the data directory belongs to another process."""

    def missing(self, topic: str) -> SeqdedupeError:
        """Return the error for a topic that belongs to this process and does not exist."""
        return error("TOPIC_NOT_FOUND", f"there is no topic {topic}", topic=topic)


T = TypeVar("T", bound=TopicBase)
R = TypeVar("R")


class Phase(Enum):
    """The operation in progress on a name. A drawing in `RegistryEntry` shows the order of the phases."""

    SETTLED = 1
    """No operation is in progress. Either there is a topic (served, or tried again), or there is none."""
    CREATING = 2
    """The topic is being created, or arrives from another sidecar."""
    RENEWING = 3
    """The topic is being opened again, from an imported snapshot or from its log alone."""
    MOVING = 4
    """The topic is moving to another sidecar."""
    DELETING = 5


_MADE_OR_DELETED = "TOPIC_EXISTS", "a topic {name} is being made or deleted"
_MOVED = "RECOVERING", "topic {name} is being moved to another sidecar"
_OPENED_AGAIN = "RECOVERING", "topic {name} is being opened again"
_NOT_THERE = "TOPIC_NOT_FOUND", "there is no topic {name}"
_CANNOT_MOVE = "MOVE_FAILED", "topic {name} is being moved, opened again or deleted already"

_REFUSED = {
    (Phase.CREATING, Phase.CREATING): _MADE_OR_DELETED,
    (Phase.RENEWING, Phase.CREATING): _MADE_OR_DELETED,
    (Phase.DELETING, Phase.CREATING): _MADE_OR_DELETED,
    (Phase.CREATING, Phase.RENEWING): _NOT_THERE,
    (Phase.RENEWING, Phase.RENEWING): _OPENED_AGAIN,
    (Phase.MOVING, Phase.RENEWING): _MOVED,
    (Phase.DELETING, Phase.RENEWING): _NOT_THERE,
    (Phase.CREATING, Phase.MOVING): _CANNOT_MOVE,
    (Phase.RENEWING, Phase.MOVING): _CANNOT_MOVE,
    (Phase.MOVING, Phase.MOVING): _CANNOT_MOVE,
    (Phase.DELETING, Phase.MOVING): _CANNOT_MOVE,
    (Phase.CREATING, Phase.DELETING): _MADE_OR_DELETED,
    (Phase.MOVING, Phase.DELETING): _MOVED,
    (Phase.DELETING, Phase.DELETING): _NOT_THERE,
}
"""The error if the second phase begins while the first phase is in progress. All other pairs are allowed."""


class RegistryEntry(Generic[T]):
    """The state of one name. Its phase changes only here.

    ```
                                  ┌──▶ RENEWING ──┐  which may turn into DELETING: the
      CREATING ──▶ SETTLED ───────┼──▶ MOVING   ──┼──▶ SETTLED   task that renews notices, and ends
                                  └──▶ DELETING ──┘
    ```

    A caller that may wait for the operation in progress does so first (`under_way`). A topic that was moved to another
    sidecar may be moved back (CREATING) before the task that moved the topic away has ended.
    """

    __slots__ = ("_lock", "found", "name", "openers", "phase", "record", "under_way")

    def __init__(self, name: str) -> None:
        self.name = name
        self.record: TopicRecord | None = None
        """The record of the topic; None if there is none, or not yet."""
        self.found: T | Closed | None = None
        """The topic, or the reason why the topic cannot be used now."""
        self.phase = Phase.SETTLED
        self.under_way: asyncio.Task[Any] | None = None
        """The task of the phase, if callers may wait for the task."""
        self.openers = 0
        """The number of tasks that open the topic or wait for the lock: see `Registry.locked`."""
        self._lock: asyncio.Lock | None = None

    @property
    def lock(self) -> asyncio.Lock:
        """The lock of the task that opens the topic."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    @property
    def topic(self) -> T | None:
        """The open topic, if any."""
        return None if isinstance(self.found, Closed) else self.found

    @property
    def closed(self) -> Closed | None:
        """The reason why the topic is not open, if there is one."""
        return self.found if isinstance(self.found, Closed) else None

    def check_may(self, phase: Phase) -> None:
        """Raise an error if the phase cannot begin now, because another phase is in progress."""
        if refused := _REFUSED.get((self.phase, phase)):
            reason, why = refused
            raise error(reason, why.format(name=self.name), topic=self.name)

    def change_to(self, phase: Phase) -> None:
        """Begin a phase. Raises the errors of `check_may`."""
        self.check_may(phase)
        self.phase = phase

    def ended(self, phase: Phase) -> None:
        """End a phase, unless another phase has begun since."""
        if self.phase is phase:
            self.phase, self.under_way = Phase.SETTLED, None


class Registry(Generic[T]):
    """The entries of all known names, and the partitioned topics."""

    def __init__(self) -> None:
        self._entries: dict[str, RegistryEntry[T]] = {}
        self._changing: dict[str, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.partitions = Partitions()

    def __len__(self) -> int:
        """The number of topics that exist or are being created. Each partition is counted; partitioned topics are
        not."""
        return len(self._entries)

    def __iter__(self) -> Iterator[RegistryEntry[T]]:
        return iter(list(self._entries.values()))

    def names(self) -> set[str]:
        """Return the names of all topics that exist or are being created. The names of partitions are included. The
        names of partitioned topics are omitted."""
        return set(self._entries)

    def get(self, name: str) -> RegistryEntry[T] | None:
        """Return the entry of a name, if any."""
        return self._entries.get(name)

    def entry(self, name: str) -> RegistryEntry[T]:
        """Return the entry of a name. If there is none, create it."""
        if (entry := self._entries.get(name)) is None:
            entry = self._entries[name] = RegistryEntry(name)
        return entry

    def found(self, name: str) -> T | Closed | None:
        """Return the topic of this name, or the reason why it cannot be used now; None if there is no topic."""
        entry = self._entries.get(name)
        return None if entry is None else entry.found

    def topic(self, name: str) -> T | None:
        """Return the topic of this name if it is open."""
        entry = self._entries.get(name)
        return None if entry is None else entry.topic

    def record(self, name: str) -> TopicRecord | None:
        """Return the record of the topic of this name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.record

    def phase(self, name: str) -> Phase:
        """Return the phase of a name."""
        entry = self._entries.get(name)
        return Phase.SETTLED if entry is None else entry.phase

    def open_topics(self) -> list[T]:
        """Return the open topics."""
        return [entry.topic for entry in self._entries.values() if entry.topic is not None]

    def closed_topics(self) -> list[Closed]:
        """Return the topics that cannot be used, with the reasons."""
        return [entry.closed for entry in self._entries.values() if entry.closed is not None]

    def tidy(self, *names: str) -> None:
        """Remove the entries of these names if they are empty."""
        for name in names:
            entry = self._entries.get(name)
            if (
                entry is not None
                and entry.record is None
                and entry.found is None
                and entry.phase is Phase.SETTLED
                and not entry.openers
            ):
                del self._entries[name]

    def check_is_free(self, whole: str) -> None:
        """Raise TOPIC_EXISTS or INVALID_TOPIC_NAME unless a topic of this name, with or without partitions, can be
        created."""
        self.partitions.check_is_free(whole)
        there = (name for name in self.names() if name == whole or whole_of(name) == whole)
        if taken := min(there, default=None):
            what = f"the topic {taken} is there already" + (
                "" if taken == whole else f", with the name of a partition of {whole}"
            )
            raise error("TOPIC_EXISTS", what, topic=taken)

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[RegistryEntry[T]]:
        """Prevent other tasks from opening the topic of this name."""
        entry = self.entry(name)
        entry.openers += 1
        try:
            async with entry.lock:
                yield entry
        finally:
            entry.openers -= 1
            self.tidy(name)

    # -- operations in progress --------------------------------------------------------------------------------

    async def run(self, phase: Phase, name: str, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run work on a name, in this phase and in a separate task. The task continues if the caller is cancelled.

        Raises the errors of `RegistryEntry.check_may` and of the work.
        """
        return await asyncio.shield(self._begin(phase, [name], work))

    async def change_whole(self, phase: Phase, whole: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the same as `run` with all partitions of a partitioned topic. No other change of this topic may be in
        progress."""

        async def run() -> None:
            try:
                await work()
            finally:
                del self._changing[whole]

        self._changing[whole] = task = self._begin(phase, self.partitions.names(whole), run)
        await asyncio.shield(task)

    def _begin(
        self, phase: Phase, names: Sequence[str], work: Callable[[], Coroutine[Any, Any, R]]
    ) -> "asyncio.Task[R]":
        entries = [self.entry(name) for name in names]
        try:
            for entry in entries:
                entry.check_may(phase)
        except SeqdedupeError:
            self.tidy(*names)
            raise

        async def run() -> R:
            try:
                return await work()
            finally:
                for entry in entries:
                    if entry.under_way is task:
                        entry.ended(phase)
                self.tidy(*names)

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)
        for entry in entries:
            entry.change_to(phase)
            entry.under_way = task
        return task

    def is_being_made(self, whole: str) -> bool:
        """Return whether this is a partitioned topic that is being created. Callers do not see the topic before it is
        complete."""
        return whole in self._changing and self.phase(partition_name(whole, 0)) is Phase.CREATING

    def changes(self, whole: str) -> asyncio.Task[Any] | None:
        """Return the task that changes a partitioned topic as a whole, if any."""
        return self._changing.get(whole)

    def tasks(self, phase: Phase | None = None) -> list[asyncio.Task[Any]]:
        """Return the tasks in progress: all tasks, or the tasks of one phase. The process must not end before these
        tasks have ended."""
        if phase is None:
            return list(self._tasks)
        return [entry.under_way for entry in self if entry.phase is phase and entry.under_way is not None]


class Partitions:
    """Partitioned topics by full name, each with its number of partitions."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.unused: dict[str, int] = {}
        """The number of partitions that a cluster has added later, and that nobody uses."""

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def names(self, whole: str) -> list[str]:
        """Return the full names of a topic's partitions, in order. Raises KeyError."""
        return [partition_name(whole, k) for k in range(self._counts[whole])]

    def claim(self, whole: str, partitions: int) -> None:
        """Add a partitioned topic."""
        self._counts[whole] = partitions

    def release(self, whole: str) -> None:
        """Remove a partitioned topic."""
        del self._counts[whole]

    def learn(self, record: TopicRecord) -> SeqdedupeError | None:
        """Add the partitioned topic of a stored partition. Return an error if the record is inconsistent."""
        whole = whole_of(record.name)
        known = self._counts.setdefault(whole, record.partitions) if whole is not None else 0
        if whole is not None and known == record.partitions and record.name in self.names(whole):
            return None
        why = f"the record of {record.name} says that it is one of {record.partitions} partitions"
        return error("STORE_DAMAGED", why if whole is None else f"{why}, and another one of {whole} says {known}")

    def check_is_none(self, name: str) -> None:
        """Raise TOPIC_IS_PARTITIONED for the name of a partitioned topic: only its partitions have logs."""
        if name in self._counts:
            count = self._counts[name]
            message = f"the topic {name} is partitioned: its messages are in {partition_name(name, 0)} and on, {count}"
            raise error("TOPIC_IS_PARTITIONED", f"{message} in all", topic=name, partitions=count)

    def check_is_free(self, name: str) -> None:
        """Raise TOPIC_EXISTS if the name belongs to a partitioned topic, or INVALID_TOPIC_NAME if it could be the name
        of a partition."""
        if name in self._counts:
            count = self._counts[name]
            raise error(
                "TOPIC_EXISTS", f"the topic {name} is there already, with {counted(count, 'partition')}", topic=name
            )
        whole = whole_of(name)
        if whole is not None and whole in self._counts:
            raise error(
                "INVALID_TOPIC_NAME",
                f"{name} would be taken for a partition of {whole}, which has {self._counts[whole]} for good",
                hint="Choose another name.",
            )
