"""Which topics there are, and which of them are opened when: at the start, when somebody uses one, where others make
and delete them, and again from another state.

Begin with `open_all` and `look_again`. `OpeningQueue` has those that a start does not wait for; `Looking` keeps looks
into a cluster apart. `renew` opens one topic again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import LogName
from seqdedupe.names import topic_name, whole_of
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.tasks import again_until, retrieve, shielded
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.registry import Closed, Phase

if TYPE_CHECKING:
    from seqdedupe.topic.directory import Topics

T = TypeVar("T", bound=TopicBase)

# -- Topics that a start does not wait for: each is opened when somebody uses it, and all of them one after the other.
#
# To open a topic and to take over its log takes some syncs of the disk, however little there is in it. So a sidecar
# with very many of them serves before it has opened them all. Until one is open nobody knows whether it is damaged,
# and it is RECOVERING. None waits for ever: what its policy says has to be done, used or not.

OPENED_AT_START = 256
"""So many topics are opened before the sidecar serves; more wait."""

APART_SECONDS = 0.05
"""Before each of those that nobody uses: most of the disk and of the event loop is for those who use others."""

USE_SECONDS = 2.0
"""So long whoever uses a topic that waits is kept waiting at most; then it is told RECOVERING, as ever."""

USED_AT_ONCE = 32

WHY = "nobody has used it since the start: it is opened when somebody does, or in its turn"


class OpeningQueue:
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
        """As `use`, of all that wait, and of those that somebody else has begun to open."""
        while self._waiting:
            await self.use(*islice(self._waiting, USED_AT_ONCE))
        await self.use(*self._begun)

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


# -- Looking into a cluster for what others have made: one look for all who ask, and not all the time.

LOOKS_APART_SECONDS = 0.1
"""From the end of a look to the beginning of the next one, which is for all who have asked meanwhile. At least as long
as the look took, so that who asks for what is not there costs a cluster half of the time at most."""


class Looking:
    """`look` never runs twice at once, and goes on when whoever asked for it is cancelled."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """It has not begun yet."""
        self._not_before = 0.0

    async def once(self) -> None:
        """Returns when a look has ended that began after this was called. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
            self._next.add_done_callback(retrieve)
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            await asyncio.sleep(self._not_before - now())
            # Whoever asks from now on may have asked too late for it.
            self._next, began = None, now()
            try:
                await self._look()
            finally:
                self._not_before = now() + max(LOOKS_APART_SECONDS, now() - began)


logger = logging.getLogger("seqdedupe.topics")


async def open_all(topics: "Topics[Any]") -> None:
    """Makes the store's records say what the logs say, and opens all topics. As `Topics.open_all`."""
    records, logs = topics.store.topics(), await topics.kind.list()
    if topics.kind.log.is_shared:
        await _leave_made_anew(topics, records, logs)
    known = {record.incarnation for record in records}
    for log in logs:
        if log.incarnation not in known:
            await _record(topics, log)
    if topics.kind.log.is_shared and (changed := _changed(logs, records)):
        await topics.store.put_topics(*changed)
        for record in changed:
            entry = topics.registry.entry(record.name)
            if entry.closed is not None:
                entry.found = None
                topics.on_state(record.name, None)
            topics.registry.tidy(record.name)
    topics.partitions.unused = _unused(logs)
    topics.waiting.unfinished = frozenset(log.incarnation for log in logs if log.is_unfinished)
    topics.unlisted = None
    await asyncio.gather(*(_open_together(topics, some) for some in _together(topics.store.topics())))


async def have_opened(topics: "Topics[Any]") -> bool:
    """Tries to open the logs of a cluster. Whether there is nothing left to try."""
    try:
        await open_all(topics)
    except SeqdedupeError as e:
        cannot_list(topics, topics.store.topics(), e)
        return False
    return True


def cannot_list(topics: "Topics[Any]", records: Iterable[TopicRecord], why: SeqdedupeError) -> None:
    """It is not known which topics there are; those of which there are records cannot be used, and say why."""
    unlisted = error("RECOVERING", f"which topics there are is not known yet: {why}", hint=why.hint)
    if topics.unlisted is not None and str(unlisted) != str(topics.unlisted):
        logger.warning("%s", unlisted)
    topics.unlisted = unlisted
    for record in records:
        if record.state is TopicState.ACTIVE:
            topics.registry.entry(record.name).found = Closed(record, why)
            topics.on_state(record.name, State.RECOVERING)


async def look_again(topics: "Topics[Any]") -> None:
    """Opens the topics that others have made, also in place of others, and lets go of those that others delete. As
    `Topics.looking`."""
    before = topics.store.topics()
    # What is served here nobody else can delete.
    logs = await topics.kind.list(without=[one.name for one in topics.registry.open_topics() if one.is_serving])
    await _leave_made_anew(topics, before, logs)
    # What was known before may have been deleted here since the list was made.
    known = {record.incarnation for record in (*before, *topics.store.topics())}
    new = [
        await _record(topics, log)
        for log in logs
        if log.incarnation not in known and log.topic and not _is_taken(topics, log.topic)
    ]
    for records in _together(new):
        await _open_together(topics, records)
    for log in logs:
        if log.is_going and log.topic:
            await _let_go_of(topics, log.topic, log.incarnation)
    topics.partitions.unused = _unused(logs)


def _is_taken(topics: "Topics[Any]", name: str) -> bool:
    return topics.registry.record(name) is not None or topics.registry.phase(name) is Phase.CREATING


async def _record(topics: "Topics[Any]", log: LogName) -> TopicRecord:
    """Makes the record of a log of which the store knows nothing."""
    if log.why is not None:
        raise log.why
    name = log.topic or topic_name(f"rebuilt-{log.incarnation}")
    topics.ownership.check_found([name])
    # In a cluster others make logs too.
    if not (topics.rebuild_store or topics.kind.log.is_shared):
        raise error(
            "STORE_MISSING",
            f"there is a log of the topic {name}, of which the store knows nothing",
            topic=name,
            incarnation=log.incarnation,
        )
    if topics.kind.log.is_shared:
        logger.info("topic %s was found in the cluster: its log is read from its beginning", name)
    else:
        logger.warning("making the store's record of the topic %s anew, from all that is left in its log", name)
    state = TopicState.DELETING if log.is_going else TopicState.ACTIVE
    record = TopicRecord(name, log.incarnation, state, log=topics.kind.log, partitions=log.partitions)
    await topics.store.put_topics(record)
    return record


def _changed(logs: Iterable[LogName], records: Iterable[TopicRecord]) -> list[TopicRecord]:
    """Records of what others let go of, or of partitions that they use, whatever was to become of them here."""
    listed = {log.incarnation: log for log in logs}
    known = [(record, listed[record.incarnation]) for record in records if record.incarnation in listed]
    return [
        replace(record, state=TopicState.DELETING if log.is_going else TopicState.ACTIVE)
        for record, log in known
        if record.state is not TopicState.DELETING
        and (log.is_going or (log.partitions and record.state is TopicState.CREATING))
    ]


def _unused(logs: Iterable[LogName]) -> dict[str, int]:
    """How many partitions the cluster has added to a topic, where it has."""
    return {whole_of(log.topic) or "": log.unused_partitions for log in logs if log.topic and log.unused_partitions}


def _together(records: Iterable[TopicRecord]) -> list[list[TopicRecord]]:
    """Records by incarnation: those of a topic's partitions in one list, others each in one."""
    return [list(some) for _, some in groupby(records, lambda one: _asked(one.name, one.partitions))]


async def _open_together(topics: "Topics[Any]", records: list[TopicRecord]) -> None:
    """Finishes what was begun with a topic, or with all partitions of one, or opens them."""
    if deleting := [record for record in records if record.state is TopicState.DELETING]:
        await topics.stored.clean_up(*deleting)
    if creating := [record for record in records if record.state is TopicState.CREATING]:
        # Nobody was told that it is there.
        await topics.stored.undo(*creating)
    await asyncio.gather(*(topics.open_at_start(record) for record in records if record.state is TopicState.ACTIVE))


async def _let_go_of(topics: "Topics[Any]", name: str, incarnation: int) -> None:
    """Somebody else deletes a topic, or the topic of which this one is a partition."""
    known, registry = topics.registry.record(name), topics.registry
    if known is None or known.incarnation != incarnation:
        return
    whole = whole_of(name) if known.partitions else None
    if whole is None and registry.phase(name) is not Phase.DELETING:
        await registry.run(Phase.DELETING, name, partial(topics.remove, [name], name))
    elif whole is not None and registry.changes(whole) is None:
        await registry.change_whole(Phase.DELETING, whole, partial(topics.remove_partitions, whole))


async def _leave_made_anew(topics: "Topics[Any]", records: Iterable[TopicRecord], logs: Iterable[LogName]) -> None:
    """Others have deleted these topics and made them anew, perhaps with another number of partitions. `records` are
    older than the list: a log that was made meanwhile need not be in it."""
    there, taken = {log.incarnation for log in logs}, {_asked(log.topic, log.partitions) for log in logs if log.topic}
    gone = [
        record
        for record in records
        if record.state is TopicState.ACTIVE
        and record.incarnation not in there
        and _asked(record.name, record.partitions) in taken
    ]
    for asked in dict.fromkeys(_asked(record.name, record.partitions) for record in gone):
        old = [record for record in gone if _asked(record.name, record.partitions) == asked]
        if not any(_is_in_use(topics, record) for record in old):
            logger.warning("topic %s was deleted and made anew", asked)
            if old[0].partitions and asked in topics.partitions:
                topics.partitions.release(asked)
            await topics.lives.leave(old)


def _asked(name: str, partitions: int) -> str:
    """What a topic is to whoever asks for it, whole."""
    return (partitions and whole_of(name)) or name


def _is_in_use(topics: "Topics[Any]", record: TopicRecord) -> bool:
    """Whether it is served here, opened, made or deleted: then the next look sees what has become of it."""
    entry = topics.registry.get(record.name)
    if topics.registry.changes(_asked(record.name, record.partitions)) is not None:
        return True
    if entry is None:
        return False
    return (
        (entry.topic is not None and entry.topic.is_serving)
        or entry.openers > 0
        or entry.phase not in (Phase.SETTLED, Phase.MOVING)
        or (entry.record is not None and entry.record != record)
    )


# -- Opening a topic again: from a saved snapshot, which takes the place of the one in the store, or from its log
# alone.
#
# Begin with `renew`, which runs as a task of its own: whoever asked for it may give up waiting, it is finished all
# the same. `Fetching` does it by itself for a topic of which this sidecar has no state, and another one does.

Begun = asyncio.Task[None] | None
"""The topic's first attempt to recover; None if its log could not be opened yet."""


async def renew(topics: "Topics[T]", name: str, incarnation: int | None, loaded: Loaded | None) -> T | Closed:
    """Opens a topic again, from this snapshot of this incarnation, or (None) from its log alone.

    The snapshot takes the place of the one in the store, durably, and the topic has tried to recover, on return. Who
    uses the topic comes again. A broker's topic that the store does not know is made as what it was. Raises
    TOPIC_NOT_FOUND, TOPIC_IS_PARTITIONED, POSITION_OF_ANOTHER_INCARNATION, TOO_MANY_TOPICS, DRAINING, RECOVERING while
    it is being moved, and what `TopicKind.check_snapshot` raises: then nothing has changed, or, where the log's
    beginning was dropped meanwhile, the topic goes on from what it had; STORE_UNAVAILABLE: then it goes on from what
    the store has, the one snapshot or the other, or there is none.
    """
    full = topic_name(name)
    topics.check_takes_changes(full)
    topics.partitions.check_is_none(full)
    entry = topics.registry.get(full)
    if entry is not None:
        entry.check_may(Phase.RENEWING)
    record = None if entry is None else entry.record
    if record is None and topics.kind.log is LogKind.BROKER and incarnation is not None and loaded is not None:
        # The store was lost, and with it all that was known of the topic.
        return await _renewed(topics, full, partial(_make_anew, topics, _claimed(topics, full, incarnation), loaded))
    if record is None:
        raise error("TOPIC_NOT_FOUND", f"there is no topic {full}", topic=full)
    if incarnation not in (None, record.incarnation):
        raise error(
            "POSITION_OF_ANOTHER_INCARNATION",
            f"the snapshot is of the incarnation {incarnation}, and topic {full} is the incarnation "
            f"{record.incarnation}",
            hint="The topic was deleted and made anew since the snapshot was taken, or it is another topic's.",
        )
    return await _renewed(topics, full, partial(_renew, topics, record, loaded))


async def _renewed(topics: "Topics[T]", name: str, work: Callable[[], Coroutine[Any, Any, Begun]]) -> T | Closed:
    if begun := await topics.registry.run(Phase.RENEWING, name, work):
        await asyncio.wait({begun})
    return topics.look_at(name)


def _claimed(topics: "Topics[T]", name: str, incarnation: int) -> TopicRecord:
    """The record of a topic that is made anew. Name and incarnation are taken from now on."""
    topics.stored.check_is_free(incarnation, topics.known_records())
    topics.check_room()
    record = TopicRecord(name, incarnation, TopicState.ACTIVE, log=LogKind.BROKER)
    entry = topics.registry.entry(name)
    entry.record, entry.found = record, Closed(record, error("RECOVERING", "its snapshot is being imported"))
    topics.on_state(name, State.RECOVERING)
    return record


async def _make_anew(topics: "Topics[T]", record: TopicRecord, loaded: Loaded) -> Begun:
    """`renew` of a topic that the store knows nothing of."""
    try:
        await _put_snapshot(topics, record, loaded)
        await topics.store.put_topics(record)
    except Exception:
        await topics.stored.undo(record)
        topics.lives.forget(record.name)
        raise
    async with topics.registry.locked(record.name):
        return await _open_again(topics, record)


async def _renew(topics: "Topics[T]", record: TopicRecord, loaded: Loaded | None) -> Begun:
    """`renew`, up to where the topic begins to recover, which goes on beside this."""
    name = record.name
    async with topics.registry.locked(name) as entry:
        topic = entry.topic
        # Before the topic is closed: what is refused disturbs nobody.
        await topics.kind.check_snapshot(record, topic, loaded)
        _check_is_still(topics, record, topic)
        entry.found = Closed(record, error("RECOVERING", "it is being opened again"))
        topics.on_state(name, State.RECOVERING)
        try:
            if topic is not None:
                topic.has_successor = True
                await topic.close("it is being opened again")
                # Retention and snapshots went on until it was closed.
                await topics.kind.check_snapshot(record, topic, loaded)
            if loaded is None:
                topics.lives.rebuilt.add(record.incarnation)
            await _put_snapshot(topics, record, loaded)
        finally:
            begun = await _open_again(topics, record)
        return begun


async def _put_snapshot(topics: "Topics[T]", record: TopicRecord, loaded: Loaded | None) -> None:
    """This is the topic's snapshot from now on, or none is; durable on return. Raises STORE_UNAVAILABLE: then the one
    or the other is there."""
    snapshots = Snapshots(topics.store, record.incarnation)
    opening = snapshots.remove() if loaded is None else await snapshots.write_anew(loaded.whole())
    await topics.store.flush(opening)


def _check_is_still(topics: "Topics[T]", record: TopicRecord, topic: T | None) -> None:
    """Raises TOPIC_NOT_FOUND, DRAINING, STORE_UNAVAILABLE if the topic was deleted since it was looked at, also if
    another of its name is there, or may yet be."""
    name = record.name
    entry = topics.registry.entry(name)
    if entry.phase is Phase.DELETING or entry.record is not record or entry.topic is not topic:
        raise error("TOPIC_NOT_FOUND", f"topic {name} was deleted meanwhile", topic=name)
    topics.check_takes_changes(name)


async def _open_again(topics: "Topics[T]", record: TopicRecord) -> Begun:
    if await topics.lives.open(record) and (topic := topics.registry.topic(record.name)):
        return topics.in_background(_begin_again(topics, topic))
    topics.in_background(_go_on_opening(topics, record))
    return None


async def _go_on_opening(topics: "Topics[T]", record: TopicRecord) -> None:
    await again_until(lambda: topics.lives.opened(record))
    if topic := topics.registry.topic(record.name):
        await _begin_again(topics, topic)


async def _begin_again(topics: "Topics[T]", topic: T) -> None:
    await topic.recover()
    # So that the next start finds a snapshot in any case.
    if not await _is_saved(topics, topic):
        topics.in_background(again_until(lambda: _is_saved(topics, topic)))


async def _is_saved(topics: "Topics[T]", topic: T) -> bool:
    """Tries to take a snapshot. Whether there is nothing left to try: it is durable, or never will be."""
    if topic.state in (State.DRAINING, State.DAMAGED):
        return True
    if topic.state is State.STANDBY and topic.incarnation not in topics.lives.rebuilt:
        # What it was opened from is durable, and what comes later is the owner's to say.
        return True
    try:
        await topic.keeper.snapshot()
    except SeqdedupeError:
        return False
    topics.lives.rebuilt.discard(topic.incarnation)
    return True


# -- A topic of which this sidecar has no state, and another one does: its owner's snapshot is fetched and imported.


FETCH_SECONDS = 2.0
"""Between two tries."""
AT_ONCE = 4
"""Snapshots that are fetched at the same time: a new sidecar may need those of all topics. An owner gives a caller no
more at once, and the others would wait there."""

OwnerOf = Callable[[str], Awaitable[str]]
"""The address of the other sidecar that owns a topic; empty if there is none. Raises why it is not known now."""

SnapshotOf = Callable[[str, str], Awaitable[tuple[int, Loaded]]]
"""Given an owner's address and a topic: the incarnation that the snapshot is of, and the snapshot, which came whole and
can be one. Raises why there is none."""


class Fetching:
    """For all topics that answer NO_STATE: never is one taken without its state. `run` goes on for ever."""

    def __init__(self, topics: "Topics[Any]", owner_of: OwnerOf, snapshot_of: SnapshotOf) -> None:
        self._topics = topics
        self._owner_of = owner_of
        self._snapshot_of = snapshot_of
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Looks for such topics, and tries again for those that it could not help."""
        while True:
            await asyncio.sleep(FETCH_SECONDS)
            every = self._topics.found().values()
            await asyncio.gather(*(self._fetch(topic) for topic in every if _has_no_state(topic)))

    async def _fetch(self, topic: Closed | TopicBase) -> None:
        name = topic.record.name if isinstance(topic, Closed) else topic.name
        owner = ""
        async with self._at_once:
            try:
                if owner := await self._owner_of(name):
                    incarnation, loaded = await self._snapshot_of(owner, name)
                    await renew(self._topics, name, incarnation, loaded)
                    logger.warning("topic %s: the snapshot of its owner at %s was fetched and imported", name, owner)
                    return
                note = "nobody owns it now whose snapshot could be fetched"
            except SeqdedupeError as e:
                note = f"its owner's snapshot could not be fetched: {e.message}"
            except Exception as e:
                # Whatever it is: the other topics are fetched all the same, and this one is tried again.
                logger.error("the snapshot of topic %s could not be fetched", name, exc_info=e)
                note = f"its owner's snapshot could not be fetched: {type(e).__name__}: {e}"
        if isinstance(topic, Closed):
            if topic.note != note:
                logger.warning("topic %s has no state here: %s", name, note)
            topic.owner_address, topic.note = owner, note


def _has_no_state(topic: Closed | TopicBase) -> bool:
    why = topic.why if isinstance(topic, Closed) else topic.damage
    return topic.state is State.DAMAGED and isinstance(why, SeqdedupeError) and why.reason == "NO_STATE"
