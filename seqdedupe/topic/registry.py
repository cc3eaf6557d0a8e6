"""The names of topics, and what is under way with each: one entry a name, which says whether more may begin.

Begin with `RegistryEntry`. `Registry` has all of them, and which topics are partitioned.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import partition_name, whole_of
from seqdedupe.store.parts import TopicRecord
from seqdedupe.tasks import retrieve
from seqdedupe.topic.base import State, TopicBase, damaged_topic

# -- A topic that is there and cannot be opened.


@dataclass(slots=True)
class Closed:
    """A topic whose log or snapshot could not be opened: it will be tried again, or is DAMAGED."""

    record: TopicRecord
    why: SeqdedupeError
    state: State = State.RECOVERING
    owner_address: str = ""
    """Of the sidecar that owns it and serves, while this one has NO_STATE."""
    note: str = ""
    """What was tried, and is tried again."""

    @property
    def told(self) -> SeqdedupeError:
        """Why, with what was tried."""
        return error(self.why.reason, f"{self.why.message}; {self.note}") if self.note else self.why

    def error(self) -> SeqdedupeError:
        """What whoever asks for the topic is told."""
        if self.why.reason == "NOT_OWNER":
            why, owner = f"topic {self.record.name}: {self.why.message}", self.why.numbers.get("owner_address", "")
            return error("NOT_OWNER", why, hint=self.why.hint, owner_address=owner)
        if self.owner_address:
            why = f"the sidecar at {self.owner_address} owns topic {self.record.name}, of which this one has no state"
            return error("NOT_OWNER", why, owner_address=self.owner_address)
        if self.state is State.DAMAGED:
            return damaged_topic(self.record.name, self.told)
        return error("RECOVERING", f"topic {self.record.name} cannot be opened now: {self.why.message}")


# -- Whose a topic is, where topics are spread over processes by their names.


class Ownership:
    """Of a process that has all topics there are, or is told by its log which ones."""

    def check(self, topic: str) -> None:
        """Raises NOT_OWNER if a topic of this full name is another process's."""

    def check_found(self, topics: Iterable[str]) -> None:
        """Raises SHARD_CLAIMED_TWICE if a topic that was found in the data directory is another process's."""

    def missing(self, topic: str) -> SeqdedupeError:
        """What is said of a topic that is not here, though it is of this process."""
        return error("TOPIC_NOT_FOUND", f"there is no topic {topic}", topic=topic)


T = TypeVar("T", bound=TopicBase)
R = TypeVar("R")


class Phase(Enum):
    """What is under way with a name. `RegistryEntry` draws how they follow each other."""

    SETTLED = 1
    """Nothing: there is a topic, which is served or tried again, or none."""
    CREATING = 2
    """It is being made, or arrives from another sidecar."""
    RENEWING = 3
    """It is being opened again, from a snapshot that is imported or from its log alone."""
    MOVING = 4
    """It is being given to another sidecar."""
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
"""What whoever wants to begin the second is told while the first is under way; all else may begin."""


class RegistryEntry(Generic[T]):
    """What is known of one name, and the one place where its phase changes.

    ```
                                  ┌──▶ RENEWING ──┐  which may turn into DELETING: whoever
      CREATING ──▶ SETTLED ───────┼──▶ MOVING   ──┼──▶ SETTLED   renews finds out, and gives up
                                  └──▶ DELETING ──┘
    ```

    Who may wait for what is under way does so before (`under_way`). A topic that was moved away may come back, which is
    CREATING, while whoever moved it still finds out that it has left.
    """

    __slots__ = ("_lock", "found", "name", "openers", "phase", "record", "under_way")

    def __init__(self, name: str) -> None:
        self.name = name
        self.record: TopicRecord | None = None
        """That of the topic; None where there is none, or not yet."""
        self.found: T | Closed | None = None
        """The topic, or why it cannot be used now."""
        self.phase = Phase.SETTLED
        self.under_way: asyncio.Task[Any] | None = None
        """What the phase is about, where somebody may wait for it."""
        self.openers = 0
        """How many open the topic, or wait until another one has: see `Registry.locked`."""
        self._lock: asyncio.Lock | None = None

    @property
    def lock(self) -> asyncio.Lock:
        """Held by the one that opens it."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    @property
    def topic(self) -> T | None:
        """The topic that is open."""
        return None if isinstance(self.found, Closed) else self.found

    @property
    def closed(self) -> Closed | None:
        """Why it is not open."""
        return self.found if isinstance(self.found, Closed) else None

    def check_may(self, phase: Phase) -> None:
        """Raises why this cannot begin now: something else is under way with the name."""
        if refused := _REFUSED.get((self.phase, phase)):
            reason, why = refused
            raise error(reason, why.format(name=self.name), topic=self.name)

    def change_to(self, phase: Phase) -> None:
        """This is under way from now on. Raises as `check_may`."""
        self.check_may(phase)
        self.phase = phase

    def ended(self, phase: Phase) -> None:
        """That is over, unless something else has begun by now."""
        if self.phase is phase:
            self.phase, self.under_way = Phase.SETTLED, None


class Registry(Generic[T]):
    """The entries of all names of which anything is known, and which partitioned topics there are."""

    def __init__(self) -> None:
        self._entries: dict[str, RegistryEntry[T]] = {}
        self._changing: dict[str, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.partitions = Partitions()

    def __len__(self) -> int:
        """How many topics there are or are being made; partitions, not what they are of."""
        return len(self._entries)

    def __iter__(self) -> Iterator[RegistryEntry[T]]:
        return iter(list(self._entries.values()))

    def names(self) -> set[str]:
        """Of all topics that are there or are being made; partitions, not what they are of."""
        return set(self._entries)

    def get(self, name: str) -> RegistryEntry[T] | None:
        """What is known of a name."""
        return self._entries.get(name)

    def entry(self, name: str) -> RegistryEntry[T]:
        """What is known of a name, to change it."""
        if (entry := self._entries.get(name)) is None:
            entry = self._entries[name] = RegistryEntry(name)
        return entry

    def found(self, name: str) -> T | Closed | None:
        """The topic of this name, or why it cannot be used now; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.found

    def topic(self, name: str) -> T | None:
        """The topic of this name, if it is open."""
        entry = self._entries.get(name)
        return None if entry is None else entry.topic

    def record(self, name: str) -> TopicRecord | None:
        """The record of the topic of this name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.record

    def phase(self, name: str) -> Phase:
        """What is under way with a name."""
        entry = self._entries.get(name)
        return Phase.SETTLED if entry is None else entry.phase

    def open_topics(self) -> list[T]:
        """Those that are open."""
        return [entry.topic for entry in self._entries.values() if entry.topic is not None]

    def closed_topics(self) -> list[Closed]:
        """Those that cannot be used, and why."""
        return [entry.closed for entry in self._entries.values() if entry.closed is not None]

    def tidy(self, *names: str) -> None:
        """Entries of which nothing is known any more are gone."""
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

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[RegistryEntry[T]]:
        """Nobody else opens the topic of this name meanwhile."""
        entry = self.entry(name)
        entry.openers += 1
        try:
            async with entry.lock:
                yield entry
        finally:
            entry.openers -= 1
            self.tidy(name)

    # -- what is under way -------------------------------------------------------------------------------------

    async def run(self, phase: Phase, name: str, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Runs something with a name, which changes to the phase, in a task of its own: it goes on when the caller is
        cancelled. Raises as `RegistryEntry.check_may`, and what it raises."""
        return await asyncio.shield(self._begin(phase, [name], work))

    async def change_whole(self, phase: Phase, whole: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """As `run`, of a partitioned topic, with all of its partitions. Nothing else is under way with it."""

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
        """Whether this is a partitioned topic that is being made: nobody is shown it before it is there as a whole."""
        return whole in self._changing and self.phase(partition_name(whole, 0)) is Phase.CREATING

    def changes(self, whole: str) -> asyncio.Task[Any] | None:
        """What is under way with a partitioned topic as a whole."""
        return self._changing.get(whole)

    def tasks(self, phase: Phase | None = None) -> list[asyncio.Task[Any]]:
        """What is under way, all of it or in this phase; it has to end before the process may."""
        if phase is None:
            return list(self._tasks)
        return [entry.under_way for entry in self if entry.phase is phase and entry.under_way is not None]


class Partitions:
    """Partitioned topics by full name, and how many partitions each has."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.unused: dict[str, int] = {}
        """How many a cluster has added later, where it has: nobody uses them."""

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def names(self, whole: str) -> list[str]:
        """The full names of a topic's partitions, in order. Raises KeyError."""
        return [partition_name(whole, k) for k in range(self._counts[whole])]

    def claim(self, whole: str, partitions: int) -> None:
        """There is a partitioned topic of this name from now on."""
        self._counts[whole] = partitions

    def release(self, whole: str) -> None:
        """There is none any more."""
        del self._counts[whole]

    def learn(self, record: TopicRecord) -> SeqdedupeError | None:
        """What a stored record says of the partitioned topic of which it is a partition; why that cannot be."""
        whole = whole_of(record.name)
        known = self._counts.setdefault(whole, record.partitions) if whole is not None else 0
        if whole is not None and known == record.partitions and record.name in self.names(whole):
            return None
        why = f"the record of {record.name} says that it is one of {record.partitions} partitions"
        return error("STORE_DAMAGED", why if whole is None else f"{why}, and another one of {whole} says {known}")

    def check_is_none(self, name: str) -> None:
        """Raises TOPIC_IS_PARTITIONED for the name of a partitioned topic: it has no log of its own."""
        if name in self._counts:
            count = self._counts[name]
            message = f"the topic {name} is partitioned: its messages are in {partition_name(name, 0)} and on, {count}"
            raise error("TOPIC_IS_PARTITIONED", f"{message} in all", topic=name, partitions=count)

    def check_is_free(self, name: str) -> None:
        """Raises TOPIC_EXISTS, INVALID_TOPIC_NAME if a topic of this name would be taken for a partitioned one, or for
        a partition of one."""
        if name in self._counts:
            count = self._counts[name]
            raise error("TOPIC_EXISTS", f"the topic {name} is there already, with {count} partitions", topic=name)
        whole = whole_of(name)
        if whole is not None and whole in self._counts:
            raise error(
                "INVALID_TOPIC_NAME",
                f"{name} would be taken for a partition of {whole}, which has {self._counts[whole]} for good",
                hint="Choose another name.",
            )
