"""All topics of the process. This module opens topics from the store and the logs, and closes and deletes them. It does
not depend on the kind of log.

Begin with `Topics`. `OpeningQueue` contains the topics for which a start does not wait. `find` opens such a topic, and
also asks the cluster; `create_partitioned` creates all partitions of a topic. A topic's record states the stage of the
topic's life. The record is durable before the step that it states. Creation and deletion are separate tasks, which
continue if the caller is cancelled.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_PARTITIONS
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.names import namespace_of, partition_name, topic_name, whole_of
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord
from seqdedupe.tasks import again_until, retrieve, shielded
from seqdedupe.topic import listing
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import decode_policy, encode
from seqdedupe.topic.listing import Looking
from seqdedupe.topic.lives import Lives, TopicKind, TopicRecords
from seqdedupe.topic.policy import Applied, GapPolicy, Policy
from seqdedupe.topic.registry import Closed, Ownership, Phase, Registry

# -- The policies of namespaces: stored, and in force in every topic of the namespace.

MAX_NAMESPACE_POLICIES = 10_000


class Namespaces:
    """The policies of namespaces, combined with the sidecar's `defaults`. `changed` is called with the name of a
    namespace whose policy has changed."""

    def __init__(self, store: Store, defaults: Applied, changed: Callable[[str], None]) -> None:
        self._store = store
        self._defaults = defaults
        self._changed = changed
        self._policies: dict[str, Policy] = {}
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False
        self._background: set[asyncio.Task[None]] = set()

    def load(self) -> None:
        """Read the stored policies. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT, STORE_UNAVAILABLE."""
        self._policies = {name: decode_policy(body) for name, body in self._store.namespace_policies()}

    def policy(self, namespace: str) -> Policy:
        """Return the policy of this namespace."""
        return self._policies.get(namespace, Policy())

    def applied(self, namespace: str) -> Applied:
        """Return the values that topics of this namespace inherit."""
        return self._defaults.under(self.policy(namespace))

    async def change(self, namespace: str, change: Callable[[Policy], Policy]) -> None:
        """Replace the policy by the result of `change`. When this returns, the new policy is durable and in force.

        Raises the errors of `change`, INVALID_REQUEST if there are too many policies, DRAINING. After STORE_UNAVAILABLE
        the policy is unchanged. After a cancellation the outcome is unknown.
        """
        if self._is_closed:
            raise error("DRAINING", "the sidecar is shutting down")
        await asyncio.shield(self._in_background(self._change(namespace, change)))

    async def _change(self, namespace: str, change: Callable[[Policy], Policy]) -> None:
        async with self._one_at_a_time:
            policy = change(self.policy(namespace))
            if namespace not in self._policies and len(self._policies) >= MAX_NAMESPACE_POLICIES:
                raise error(
                    "INVALID_REQUEST",
                    f"{MAX_NAMESPACE_POLICIES} namespaces have a policy: no further namespace can have a policy",
                )
            try:
                await self._write(namespace, policy)
            except SeqdedupeError:
                # The store may already have the new policy. Without this step, the new policy would be in force after
                # the next start.
                self._in_background(again_until(lambda: self._is_durable(namespace)))
                raise
            self._policies.pop(namespace, None)
            if policy != Policy():
                self._policies[namespace] = policy
            self._changed(namespace)

    async def _write(self, namespace: str, policy: Policy) -> None:
        await self._store.put_namespace_policy(namespace, encode(policy) if policy != Policy() else None)

    async def _is_durable(self, namespace: str) -> bool:
        """Write the policy that is in force again. Return whether no further attempt is needed."""
        async with self._one_at_a_time:
            if self._is_closed:
                return True
            try:
                await self._write(namespace, self.policy(namespace))
            except SeqdedupeError:
                return False
            return True

    async def close(self) -> None:
        """Accept no further changes, and finish the current changes. Repeated writes end."""
        self._is_closed = True
        await asyncio.gather(*self._background, return_exceptions=True)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(retrieve)
        return task


logger = logging.getLogger("seqdedupe.topics")

_LEVELS = {State.DAMAGED: logging.ERROR, State.READ_ONLY: logging.WARNING, State.TERMINATED: logging.WARNING}
"""The log levels of topic states; INFO for all others."""

T = TypeVar("T", bound=TopicBase)


class Topics(Generic[T]):
    """The topics by full name, all of the same kind.

    `make_kind` receives the function that the kind must call for a topic's changes. `on_state` is called with the new
    state of a topic, or with None when a topic has been removed. `applied` contains the values that namespaces inherit.
    """

    def __init__(
        self,
        store: Store,
        make_kind: Callable[[Callable[[Any], None]], TopicKind[T]],
        *,
        max_topics: int,
        allow_auto_topic_creation: bool,
        on_state: Callable[[str, State | None], None],
        rebuild_store: bool = False,
        applied: Applied | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        self.store = store
        self.namespaces = Namespaces(store, applied or Applied(), self._inherit)
        self.ownership = ownership or Ownership()
        self.kind = make_kind(self._topic_changed)
        self.stored = TopicRecords(store, self.kind.delete, self.in_background)
        self._max_topics = max_topics
        self.allow_auto_topic_creation = allow_auto_topic_creation
        self.on_state = on_state
        self.rebuild_store = rebuild_store
        self.registry: Registry[T] = Registry()
        self.partitions = self.registry.partitions
        self.lives = Lives(store, self.kind, self.stored, self.registry, self._inherited, on_state, self._topic_changed)
        self._opened_at_start: list[T] = []
        self.waiting = OpeningQueue(self)
        """The topics that were not used since the start and are not open yet. They are also in `closed`."""
        self.looking = Looking(self._look_again)
        """Looks for topics that other sidecars create and delete in a cluster. Raises STORE_UNAVAILABLE, and the errors
        of `Logs.list`."""
        self.being_taken_over: set[str] = set()
        """The topics of the cluster that are becoming topics of the sidecars by a call here."""
        self.unlisted: SeqdedupeError | None = None
        """The reason why the list of topics is unknown; None if it is known."""
        self._background: set[asyncio.Task[None]] = set()
        self.is_draining = False

    # -- start and end -----------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Open every log. If a log cannot be opened, it is tried again, or its topic is DAMAGED. The other topics are
        opened.

        If there are very many logs, some are opened only when they are used (`waiting`). Logs in a cluster, which may
        not answer now, are opened by `recover_all`, and their topics are RECOVERING until then. Raises STORE_MISSING if
        a log has no record. Raises LOG_DAMAGED or LOG_UNREADABLE if that log does not contain its topic's name either,
        and the errors of `Logs.list`.
        """
        self.namespaces.load()
        records = self.store.topics()
        if other := next((record for record in records if record.log is not self.kind.log), None):
            raise error(
                "INVALID_CONFIGURATION",
                f"log = {self.kind.log.name.lower()!r}: the data directory has topics on the log "
                f"{other.log.name.lower()!r}, of which {other.name} is one",
                key="log",
            )
        if self.kind.log.is_shared:
            listing.cannot_list(self, records, error("RECOVERING", "the cluster was not asked yet"))
        else:
            await listing.open_all(self)

    async def open_at_start(self, record: TopicRecord) -> None:
        """Open a topic that has a record, or queue it. After a failure, try again."""
        why = self.partitions.learn(record) if record.partitions else None
        entry = self.registry.entry(record.name)
        if entry.record is not None:
            why = error("STORE_DAMAGED", f"the store has two records of the topic {record.name}")
        if why is not None:
            self.lives.close(Closed(record, why, State.DAMAGED))
            return
        entry.record = record
        if self.waiting.takes(record):
            return
        if not await self.lives.opened(record):
            self.in_background(self.lives.go_on_opening(record))
        elif topic := entry.topic:
            self._opened_at_start.append(topic)

    async def _look_again(self) -> None:
        await listing.look_again(self)
        await self.recover_all()

    async def remove_partitions(self, whole: str) -> None:
        """Delete all partitions of a topic that exist. See `Lives.remove`."""
        names = self.partitions.names(whole)
        await self.remove([name for name in names if self.registry.record(name) is not None], whole)
        self.partitions.release(whole)

    async def remove(self, names: list[str], asked: str) -> None:
        """Call `Lives.remove` for topics that are live, or closed and possibly being opened."""
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(self.registry.locked(name))
            await self.lives.remove(names, asked)

    def _topic_changed(self, topic: T) -> None:
        level = _LEVELS.get(topic.state, logging.INFO)
        logger.log(level, "topic %s is %s%s", topic.name, topic.state.name, f": {topic.why}" if topic.why else "")
        if self.registry.topic(topic.name) is topic:
            self.on_state(topic.name, topic.state)

    async def recover_all(self) -> None:
        """Recover every topic. A topic that cannot be recovered now is tried again in the background.

        Afterwards, waiting topics are opened and recovered one after the other.
        """
        if self.unlisted is not None and not await listing.have_opened(self):
            await again_until(lambda: listing.have_opened(self))
        opened, self._opened_at_start = self._opened_at_start, []
        await asyncio.gather(*(topic.recover() for topic in opened))
        if self.rebuild_store:
            # If all topics have snapshots, the next start does not have to rebuild them.
            await asyncio.gather(*(topic.keeper.snapshot_in_background() for topic in opened))
        self.in_background(self.waiting.open_all())

    async def drain(self) -> None:
        """Accept no more frames, settle all frames in flight, and make durable snapshots. Reading continues."""
        self.is_draining = True
        self.waiting.close()
        await self.namespaces.close()
        if under_way := [*self.registry.tasks(), *self.waiting.opening.values()]:
            await asyncio.wait(under_way)
        # The next start finishes work that is being retried.
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        topics = self.registry.open_topics()
        ends = await asyncio.gather(*(topic.drain() for topic in topics), return_exceptions=True)
        for topic, end in zip(topics, ends, strict=True):
            if end is not None:
                logger.error("topic %s did not end as it should", topic.name, exc_info=end)

    def _inherited(self, topic: str) -> Applied:
        return self.namespaces.applied(namespace_of(topic))

    def _inherit(self, namespace: str) -> None:
        """Pass a changed policy to the topics of a namespace. A topic that is being opened reads the new policy when it
        is open."""
        for topic in self.registry.open_topics():
            if namespace_of(topic.name) == namespace:
                topic.inherit(self.namespaces.applied(namespace))

    def in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work in the background, until the sidecar drains."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def check_takes_changes(self, full: str) -> None:
        """Raise NOT_OWNER, DRAINING, RECOVERING or STORE_UNAVAILABLE if no operation may begin on this name now."""
        self.ownership.check(full)
        if self.is_draining:
            raise error("DRAINING", "the sidecar is shutting down")
        self.check_listed()
        self.stored.check_written(full)

    def known_records(self) -> Iterator[TopicRecord]:
        """Return the records of all topics, including records that the store may not have yet."""
        return (entry.record for entry in self.registry if entry.record is not None)

    def check_listed(self) -> None:
        """Raise RECOVERING while the list of topics is unknown."""
        if self.unlisted is not None:
            raise self.unlisted

    # -- topics ------------------------------------------------------------------------------------------------

    def all(self) -> list[T | Closed]:
        """Return all topics by name, live or not. Raises RECOVERING while the list may be incomplete."""
        self.check_listed()
        every = self.found()
        return [every[name] for name in sorted(every)]

    def found(self) -> dict[str, T | Closed]:
        """Return the known topics by name. The list may still be incomplete."""
        return {entry.name: entry.found for entry in self.registry if entry.found is not None}

    def look_at(self, name: str) -> T | Closed:
        """Return a topic, even if it cannot be used.

        Raises INVALID_TOPIC_NAME, TOPIC_IS_PARTITIONED, TOPIC_NOT_FOUND, RECOVERING; NOT_OWNER if the topic belongs to
        the shards of another process.
        """
        full = topic_name(name)
        self.partitions.check_is_none(full)
        found = self.registry.found(full)
        if found is None:
            self.ownership.check(full)
            self.check_listed()
            raise self.ownership.missing(full)
        return found

    def partitions_beside(self, full: str) -> int:
        """Return the number of partitions of the topic to which this partition belongs; 0 if there is no partition of
        this name."""
        record = self.registry.record(full)
        return record.partitions if record is not None else 0

    def get(self, name: str) -> T:
        """Return the live topic. Raises the errors of `look_at`, and the reason why the topic cannot be opened."""
        found = self.look_at(name)
        if isinstance(found, Closed):
            raise found.error()
        return found

    def is_there(self, full: str) -> bool:
        """Return whether a topic with this full name exists, even if it cannot be used."""
        return self.registry.found(full) is not None

    async def get_or_create(self, name: str, layout: Layout = AS_USUAL) -> T:
        """Return the live topic. If the topic does not exist and `allow_auto_topic_creation` is set, create it with
        this layout."""
        full = topic_name(name)
        await self.waiting.use(full)
        if self.is_there(full) or full in self.partitions or not self.allow_auto_topic_creation:
            return self.get(full)
        return await self.create(full, layout=layout, exists_ok=True)

    async def create(
        self, name: str, *, policy: Policy | None = None, layout: Layout = AS_USUAL, exists_ok: bool = False
    ) -> T:
        """Create a topic. When this returns, the topic serves. `layout`: see `Logs.create`.

        Raises INVALID_TOPIC_NAME, TOPIC_EXISTS, TOO_MANY_TOPICS; LOG_DAMAGED if a topic of that name is damaged. After
        DRAINING, LOG_REFUSED or STORE_UNAVAILABLE there is no topic.
        """
        full = topic_name(name)
        await self.waiting.use(full)
        # The creation in progress may be the caller's own first attempt, and it may fail. A topic that is taken over is
        # found afterwards.
        while under_way := self.under_way(full, Phase.DELETING) or (
            None if exists_ok and full not in self.being_taken_over else self.under_way(full, Phase.CREATING)
        ):
            await asyncio.wait({under_way})
        self.check_takes_changes(full)
        if creation := self.under_way(full, Phase.CREATING):
            return cast(T, await asyncio.shield(creation))
        if self.is_there(full):
            topic = self.get(full)
            topic.check_not_damaged()
            if exists_ok:
                return topic
            raise error("TOPIC_EXISTS", f"the topic {full} is there already", topic=full)
        self.partitions.check_is_free(full)
        self.check_room()
        try:
            work = partial(self._create, full, policy or Policy(), layout)
            return await self.registry.run(Phase.CREATING, full, work)
        except InvalidRequestError as e:
            if e.reason != "TOPIC_EXISTS" or not self.kind.log.is_shared:
                raise
            # Another sidecar may have created the topic.
            await self.looking.once()
            if not exists_ok:
                raise
            self.partitions.check_is_none(full)
            if (made := self.registry.topic(full)) is None:
                raise
            return made

    def under_way(self, full: str, phase: Phase) -> "asyncio.Task[Any] | None":
        """Return the task of this phase on this topic alone, if there is one."""
        entry = self.registry.get(full)
        if entry is None or entry.phase is not phase or self.registry.changes(whole_of(full) or "") is not None:
            return None
        return entry.under_way

    def check_room(self, more: int = 1) -> None:
        """Raise TOO_MANY_TOPICS unless this number of further topics is allowed."""
        count = len(self.registry)
        if count + more > self._max_topics:
            why = f"the sidecar has {counted(count, 'topic')}: max_topics allows no more"
            raise error("TOO_MANY_TOPICS", why, max_topics=self._max_topics)

    async def _create(self, full: str, policy: Policy, layout: Layout) -> T:
        [topic] = await self.lives.make([full], policy, layout=layout)
        return topic

    async def delete(self, name: str, check: Callable[[str], None] = lambda full: None) -> None:
        """Delete a topic permanently. It accepts no messages after this. `check` is called in the same step of the
        event loop in which the deletion begins: if `check` raises an error, the topic is kept.

        Raises TOPIC_NOT_FOUND, LOG_DAMAGED. After STORE_UNAVAILABLE the topic still exists, and accepts messages again
        once the store confirms that. The deletion continues if the caller is cancelled.
        """
        full = topic_name(name)
        await self.waiting.use(full)
        while creation := self.under_way(full, Phase.CREATING):
            await asyncio.wait({creation})
        if deletion := self.under_way(full, Phase.DELETING):
            await asyncio.shield(deletion)
            return
        self.check_takes_changes(full)
        topic = self.get(full)
        if self.partitions_beside(full):
            whole = whole_of(full)
            raise error(
                "INVALID_REQUEST", f"{full} is a partition of {whole}", hint=f"Delete the partitioned topic {whole}."
            )
        self.registry.entry(full).check_may(Phase.DELETING)
        topic.check_not_damaged()
        check(full)
        await self.registry.run(Phase.DELETING, full, partial(self.lives.remove, [full], full))


# -- Topics that a start does not wait for. The first use opens one; the others are opened one after the other.
#
# Opening a topic and taking over its log needs some syncs of the disk, even if the log is empty. So a sidecar with very
# many topics serves before all of them are open. Until a topic is open, the topic is RECOVERING, and it is unknown
# whether the topic is damaged. Every topic is opened in the end, because its policy must be carried out even if no
# client uses the topic.

OPENED_AT_START = 256
"""The number of topics that are opened before the sidecar serves."""

APART_SECONDS = 0.05
"""The pause before each unused topic is opened: disk and event loop are mainly for topics in use."""

USE_SECONDS = 2.0
"""The maximum time that a caller waits for a topic that is being opened. After this time the caller gets RECOVERING."""

USED_AT_ONCE = 32

WHY = "nobody has used it since the start: it is opened when somebody does, or in its turn"


class OpeningQueue:
    """The topics on a sidecar's embedded logs that are still to be opened after the first OPENED_AT_START."""

    def __init__(self, topics: Topics[Any]) -> None:
        self.unfinished: frozenset[int] = frozenset()
        """The incarnations that must be opened at the start, because of the state of their logs."""
        self.opening: dict[str, asyncio.Task[bool]] = {}
        """The topics that waited and are being opened. Their recovery follows."""
        self._topics = topics
        self._tried = 0
        self._waiting: dict[str, Closed] = {}
        self._begun: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """The number of waiting topics."""
        return len(self._waiting)

    def takes(self, record: TopicRecord) -> bool:
        """Queue a topic if it need not be opened at the start. Return whether the topic waits."""
        topics = self._topics
        self._tried += 1
        # While the store is rebuilt, it must soon have a record and a snapshot of every topic.
        if topics.kind.log is not LogKind.EMBEDDED or topics.rebuild_store or self._tried <= OPENED_AT_START:
            return False
        # A crash has left data of this log in the journal. The data must be moved to the log before other logs use the
        # journal.
        if record.incarnation in self.unfinished:
            return False
        self._waiting[record.name] = closed = Closed(record, error("RECOVERING", WHY))
        topics.registry.entry(record.name).found = closed
        topics.on_state(record.name, State.RECOVERING)
        return True

    def begin(self, name: str) -> "asyncio.Task[None] | None":
        """Begin to open the topic with this full name if it waits. Return the task, which ends after recovery, or
        None."""
        if closed := self._waiting.pop(name, None):
            closed.why = error("RECOVERING", "it is being opened")
            self._begun[name] = task = self._topics.in_background(self._open(closed.record))
            task.add_done_callback(lambda _: self._begun.pop(name))
        return self._begun.get(name)

    async def use(self, *names: str) -> None:
        """Wait until the topics with these full names are open and recovered, at most USE_SECONDS."""
        if begun := {task for name in names if (task := self.begin(name))}:
            # The tasks continue if this caller is cancelled.
            await asyncio.wait(begun, timeout=USE_SECONDS)

    async def _open(self, record: TopicRecord) -> None:
        topics = self._topics
        if topics.is_draining:
            return
        # A cancellation must not leave a reader of store and log behind.
        if not await shielded(self.opening, record.name, topics.lives.opened(record)):
            # In case of damage the topic is soon opened again. Callers wait only for the first attempt.
            await asyncio.wait({topics.in_background(topics.lives.go_on_opening(record))}, timeout=USE_SECONDS)
        elif topic := topics.registry.topic(record.name):
            await topic.recover()

    async def use_all(self) -> None:
        """Do the same as `use` for all waiting topics, and for all topics that are being opened."""
        while self._waiting:
            await self.use(*islice(self._waiting, USED_AT_ONCE))
        await self.use(*self._begun)

    async def open_all(self) -> None:
        """Open one topic after the other, until no topic waits."""
        if self._waiting:
            logger.info("%d topics are opened when somebody uses them, or one after the other", len(self._waiting))
        while self._waiting:
            await asyncio.sleep(APART_SECONDS)
            await self.use(*islice(self._waiting, 1))

    def close(self) -> None:
        """Forget the waiting topics. The next start opens them."""
        self._waiting.clear()


# -- Names of more than one topic of this sidecar: partitioned topics.
#
# A partition is a separate topic (`name-partition-0` and so on) with its own log, snapshots and recovery. The number of
# partitions is permanent, and is stored in each partition's record and next to each partition's log. The number
# determines to which partition a message belongs. The records of all partitions change their state in one write. So
# after a crash, a start finds all of them made, all of them half made, or all of them being deleted, and finishes that
# for each one.


def partitions_of(topics: Topics[T], whole: str) -> "list[T | Closed | None]":
    """Return the partitions of a partitioned topic, in order, with None for a missing partition. Raises KeyError."""
    return [topics.registry.found(name) for name in topics.partitions.names(whole)]


async def create_partitioned(
    topics: Topics[T], name: str, partitions: int, policy: Policy, layout: Layout = AS_USUAL
) -> None:
    """Create a partitioned topic. When this returns, all partitions serve. `layout`: see `Logs.create`.

    Raises INVALID_TOPIC_NAME, INVALID_REQUEST, TOPIC_EXISTS, TOO_MANY_TOPICS, DRAINING, LOG_REFUSED, STORE_UNAVAILABLE.
    After an error there is no topic.
    """
    whole = topic_name(name)
    _check_can_be(topics, whole, partitions, policy)
    while change := topics.registry.changes(whole):
        await asyncio.wait({change})
    names = [partition_name(whole, k) for k in range(partitions)]
    for one in (whole, *names):
        topics.check_takes_changes(one)
    topics.registry.check_is_free(whole)
    topics.check_room(partitions)
    topics.partitions.claim(whole, partitions)
    work = partial(_create, topics, whole, names, policy, layout)
    await topics.registry.change_whole(Phase.CREATING, whole, work)


def _check_can_be(topics: Topics[T], whole: str, partitions: int, policy: Policy) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise error("INVALID_REQUEST", f"partitions is {partitions}: it should be 1 to {MAX_PARTITIONS}, or 0 for none")
    if topics.kind.log is LogKind.BROKER:
        why = "the log is a broker's own, so the broker also has the partitions: each partition is a separate topic"
        raise error("INVALID_REQUEST", why, hint="Omit the partitions.")
    if whole_of(whole) is not None:
        what = f"{whole} has the name of a partition, and cannot have partitions itself"
        raise error("INVALID_TOPIC_NAME", what, hint="Choose another name.")
    partition_name(whole, partitions - 1)  # check the length of the longest name
    check_gap_policy(whole, policy.gap)


def check_gap_policy(topic: str, gap: GapPolicy | None) -> None:
    """Raise INVALID_REQUEST if the policy of a partition refuses gaps. A producer numbers its messages over all
    partitions, so each partition has gaps."""
    if gap is GapPolicy.REJECT:
        raise error(
            "INVALID_REQUEST",
            f"the gap policy of {topic} is REJECT: sequence IDs count over all partitions of a topic, so each has gaps",
            hint="Let partitioned topics allow gaps: `seqdedupe policy set PARTITION --gap allow`.",
        )


async def _create(topics: Topics[T], whole: str, names: list[str], policy: Policy, layout: Layout) -> None:
    try:
        await topics.lives.make(names, policy, len(names), layout)
    except Exception:
        topics.partitions.release(whole)
        raise


async def delete_partitioned(topics: Topics[T], whole: str) -> None:
    """Delete a partitioned topic with all its partitions permanently. The partitions accept no messages after this.

    If a partition is damaged because the topic was deleted in the cluster, the deletion still works. Raises
    LOG_DAMAGED, RECOVERING and other errors of a partition that cannot be used. After STORE_UNAVAILABLE all partitions
    still exist. The deletion continues if the caller is cancelled.
    """
    await topics.waiting.use(*topics.partitions.names(whole))
    lost = await listing.without_log(topics, topics.partitions.names(whole))
    while change := topics.registry.changes(whole):
        if not topics.registry.is_being_made(whole):
            await asyncio.shield(change)
            return
        await asyncio.wait({change})
    if whole not in topics.partitions:
        raise topics.ownership.missing(whole)
    for name in topics.partitions.names(whole):
        topics.check_takes_changes(name)
        if topics.registry.record(name) is not None and name not in lost:
            topics.get(name).check_not_damaged()
    await topics.registry.change_whole(Phase.DELETING, whole, partial(topics.remove_partitions, whole))


# -- Finding a topic.
#
# In a cluster, other sidecars make and delete topics. So the cluster is asked before the answer is that the topic does
# not exist.


async def look_for(topics: Topics[T], name: str) -> str:
    """Return the full name of a topic. If the topic is unknown here, ask the cluster.

    Raises INVALID_TOPIC_NAME, and the reason if the cluster cannot be asked.
    """
    full = topic_name(name)
    is_known = topics.registry.found(full) is not None or full in topics.partitions
    if not is_known and topics.kind.log.is_shared and not topics.is_draining:
        topics.check_listed()
        await topics.looking.once()
    return full


async def find(topics: Topics[T], name: str) -> T:
    """Find the live topic, and open it if this is its first use. Raises the errors of `look_for` and `Topics.get`."""
    full = await look_for(topics, name)
    await topics.waiting.use(full)
    return topics.get(full)


async def find_or_create(topics: Topics[T], name: str, layout: Layout = AS_USUAL) -> T:
    """Return the live topic. If the topic does not exist and `allow_auto_topic_creation` is set, create it with this
    layout."""
    # If another sidecar has created the topic, `get_or_create` finds it.
    return await (topics.get_or_create(name, layout) if topics.allow_auto_topic_creation else find(topics, name))


async def delete(topics: Topics[T], name: str, check: Callable[[str], None] = lambda full: None) -> None:
    """Do the same as `Topics.delete`. Also delete a topic that is damaged because its log was deleted in the cluster.

    Also raises the reason if the cluster cannot be asked.
    """
    full = await look_for(topics, name)
    topic = topics.registry.found(full)
    is_lost = bool(await listing.without_log(topics, [full])) and not topics.partitions_beside(full)
    if not is_lost or topics.registry.found(full) is not topic or topics.registry.phase(full) is Phase.DELETING:
        await topics.delete(full, check)
        return
    topics.check_takes_changes(full)
    await topics.registry.run(Phase.DELETING, full, partial(topics.remove, [full], full))
