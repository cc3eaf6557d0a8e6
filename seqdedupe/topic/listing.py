"""Determines which topics exist, and when a topic is opened: at the start, after a change by another sidecar, or again
from another state.

Begin with `open_all` and `look_again`. `Looking` limits the number of requests to a cluster. `take_over` adds one of
the cluster's topics. `renew` opens one topic again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from seqdedupe.names import topic_name, whole_of
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.tasks import again_until, retrieve
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.registry import Closed, Phase

if TYPE_CHECKING:
    from seqdedupe.topic.directory import Topics

T = TypeVar("T", bound=TopicBase)

# -- Look-ups in a cluster for topics of other sidecars: one for all callers, with pauses.

LOOKS_APART_SECONDS = 0.1
"""The minimum pause between two look-ups. All callers that arrive meanwhile share the next look-up. The pause is at
least as long as the last look-up. So callers that ask for missing topics load a cluster at most half of the time."""


class Looking:
    """Runs `look`, one call at a time. A call continues if its caller is cancelled."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """The next call of `look`, if it has not begun yet."""
        self._not_before = 0.0

    async def once(self) -> None:
        """Wait for a call of `look` that begins after this call. Raises the errors of `look`."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
            self._next.add_done_callback(retrieve)
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            await asyncio.sleep(self._not_before - now())
            # Later callers need another call: this one may miss the topics that they ask for.
            self._next, began = None, now()
            try:
                await self._look()
            finally:
                self._not_before = now() + max(LOOKS_APART_SECONDS, now() - began)


logger = logging.getLogger("seqdedupe.topics")


async def open_all(topics: "Topics[Any]") -> None:
    """Bring the store's records up to date with the logs, and open all topics. See `Topics.open_all`."""
    records, logs = topics.store.topics(), await topics.kind.list()
    if topics.kind.log.is_shared:
        await _close_recreated(topics, records, logs)
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
    """Try to open the logs of a cluster. Return whether that succeeded."""
    try:
        await open_all(topics)
    except SeqdedupeError as e:
        cannot_list(topics, topics.store.topics(), e)
        return False
    return True


def cannot_list(topics: "Topics[Any]", records: Iterable[TopicRecord], why: SeqdedupeError) -> None:
    """Record that the list of topics is unknown. Topics with records cannot be used, and return this reason."""
    unlisted = error("RECOVERING", f"which topics there are is not known yet: {why}", hint=why.hint)
    if topics.unlisted is not None and str(unlisted) != str(topics.unlisted):
        logger.warning("%s", unlisted)
    topics.unlisted = unlisted
    for record in records:
        if record.state is TopicState.ACTIVE:
            topics.registry.entry(record.name).found = Closed(record, why)
            topics.on_state(record.name, State.RECOVERING)


async def look_again(topics: "Topics[Any]") -> None:
    """Open the topics that other sidecars have created or recreated, and release the topics that other sidecars are
    deleting. See `Topics.looking`."""
    before = topics.store.topics()
    # No other sidecar can delete a topic that is served here.
    logs = await topics.kind.list(without=[one.name for one in topics.registry.open_topics() if one.is_serving])
    await _close_recreated(topics, before, logs)
    # A topic that was known before may have been deleted here since the list was created.
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
    """Create the record of a log that the store does not know."""
    if log.why is not None:
        raise log.why
    name = log.topic or topic_name(f"rebuilt-{log.incarnation}")
    topics.ownership.check_found([name])
    # In a cluster other sidecars create logs, too.
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
        logger.warning("making the store's record of the topic %s again, from all that is left in its log", name)
    state = TopicState.DELETING if log.is_going else TopicState.ACTIVE
    record = TopicRecord(name, log.incarnation, state, log=topics.kind.log, partitions=log.partitions)
    await topics.store.put_topics(record)
    return record


def _changed(logs: Iterable[LogName], records: Iterable[TopicRecord]) -> list[TopicRecord]:
    """Return the changed records of topics that other sidecars are deleting, and of unfinished partitions that other
    sidecars use."""
    listed = {log.incarnation: log for log in logs}
    known = [(record, listed[record.incarnation]) for record in records if record.incarnation in listed]
    return [
        replace(record, state=TopicState.DELETING if log.is_going else TopicState.ACTIVE)
        for record, log in known
        if record.state is not TopicState.DELETING
        and (log.is_going or (log.partitions and record.state is TopicState.CREATING))
    ]


def _unused(logs: Iterable[LogName]) -> dict[str, int]:
    """Return, for each topic, the number of partitions that the cluster has added. Topics without added partitions are
    omitted."""
    return {whole_of(log.topic) or "": log.unused_partitions for log in logs if log.topic and log.unused_partitions}


def _together(records: Iterable[TopicRecord]) -> list[list[TopicRecord]]:
    """Group the records into lists. The partitions of one topic form one list. Every other topic forms a list alone."""
    return [list(some) for _, some in groupby(records, lambda one: _asked(one.name, one.partitions))]


async def _open_together(topics: "Topics[Any]", records: list[TopicRecord]) -> None:
    """Finish an interrupted creation or deletion of a topic with all its partitions, or open it."""
    if deleting := [record for record in records if record.state is TopicState.DELETING]:
        await topics.stored.clean_up(*deleting)
    if creating := [record for record in records if record.state is TopicState.CREATING]:
        # The creation of the topic was never confirmed to a caller.
        await topics.stored.undo(*creating)
    await asyncio.gather(*(topics.open_at_start(record) for record in records if record.state is TopicState.ACTIVE))


async def _let_go_of(topics: "Topics[Any]", name: str, incarnation: int) -> None:
    """Remove a topic that another sidecar is deleting, alone or with its partitioned topic."""
    known, registry = topics.registry.record(name), topics.registry
    if known is None or known.incarnation != incarnation:
        return
    whole = whole_of(name) if known.partitions else None
    if whole is None and registry.phase(name) is not Phase.DELETING:
        await registry.run(Phase.DELETING, name, partial(topics.remove, [name], name))
    elif whole is not None and registry.changes(whole) is None:
        await registry.change_whole(Phase.DELETING, whole, partial(topics.remove_partitions, whole))


async def _close_recreated(topics: "Topics[Any]", records: Iterable[TopicRecord], logs: Iterable[LogName]) -> None:
    """Close topics that another sidecar has deleted and recreated, possibly with a different number of partitions.

    Read `records` before `logs`. Otherwise a topic created between these two reads has a record, but no log in the
    list.
    """
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
            logger.warning("topic %s was deleted and created again", asked)
            if old[0].partitions and asked in topics.partitions:
                topics.partitions.release(asked)
            await topics.lives.leave(old)


def _asked(name: str, partitions: int) -> str:
    """Return the name by which callers use a topic. For a partition this is the name of its partitioned topic."""
    return (partitions and whole_of(name)) or name


def _is_in_use(topics: "Topics[Any]", record: TopicRecord) -> bool:
    """Return whether the topic is being served, opened, created or deleted here. Then the next look-up handles the
    topic."""
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


# -- Topics of a cluster that no sidecar made, or whose logs others have deleted.


async def take_over(
    topics: "Topics[Any]", name: str, layout: Layout = AS_USUAL, check: Callable[[int], None] = lambda count: None
) -> None:
    """Turn a topic of the cluster that no sidecar created into a topic of the sidecars. When this returns, this sidecar
    knows the topic, and serves the topic unless a problem prevents this. `check` is called with the number of
    partitions (1: not partitioned) before anything is changed.

    After the cluster lists the topic as a topic of the sidecars, a later failure does not undo this. Sidecars then find
    the topic like a topic that another sidecar has created. Raises the errors of `check` and of `Logs.take_over`,
    TOO_MANY_TOPICS, DRAINING.
    """
    full = topic_name(name)
    while under_way := topics.under_way(full, Phase.CREATING) or topics.registry.changes(full):
        await asyncio.wait({under_way})
    topics.check_takes_changes(full)
    topics.registry.check_is_free(full)

    def incarnations(count: int) -> list[int]:
        check(count)
        topics.check_room(count)
        now_us = time.time_ns() // 1000
        return [topics.store.next_incarnation(now_us) for _ in range(count)]

    async def work() -> None:
        try:
            await topics.kind.take_over(full, incarnations, layout)
        finally:
            topics.being_taken_over.discard(full)

    topics.being_taken_over.add(full)
    try:
        await topics.registry.run(Phase.CREATING, full, work)
    except InvalidRequestError as e:
        if e.reason == "TOPIC_EXISTS" and topics.kind.log.is_shared:
            await topics.looking.once()
        raise
    await topics.looking.once()
    await topics.waiting.use(*(topics.partitions.names(full) if full in topics.partitions else [full]))


async def without_log(topics: "Topics[Any]", names: Collection[str]) -> set[str]:
    """Return the topics that are damaged because their log was deleted in the cluster."""
    there = {name: topics.registry.found(name) for name in names}
    damaged = [name for name, topic in there.items() if topic is not None and topic.state is State.DAMAGED]
    if not damaged or not topics.kind.log.is_shared:
        return set()
    listed = {log.incarnation for log in await topics.kind.list()}
    records = [record for name in damaged if (record := topics.registry.record(name)) is not None]
    return {record.name for record in records if record.incarnation not in listed}


# -- Opening a topic again: from a saved snapshot, which replaces the one in the store, or from its log alone.
#
# Begin with `renew`. Its work is a separate task that goes on if the caller is cancelled. `Fetching` does this
# automatically for a topic whose state this sidecar lacks and another sidecar has.

Begun = asyncio.Task[None] | None
"""The topic's first attempt to recover; None if the log could not be opened yet."""


async def renew(topics: "Topics[T]", name: str, incarnation: int | None, loaded: Loaded | None) -> T | Closed:
    """Open a topic again, from this snapshot of this incarnation, or (None) from its log alone.

    When this returns, the snapshot has durably replaced the snapshot in the store, and the topic has tried to recover.
    The clients of the topic must connect again. A broker's topic that the store does not know is recreated.

    Raises TOPIC_NOT_FOUND, TOPIC_IS_PARTITIONED, POSITION_OF_ANOTHER_INCARNATION, TOO_MANY_TOPICS, DRAINING, RECOVERING
    while the topic is being moved, and the errors of `TopicKind.check_snapshot`. After these errors nothing has
    changed. Or, if the beginning of the log was dropped meanwhile, the topic continues from its own state. After
    STORE_UNAVAILABLE the topic continues from the store: from the old snapshot, the new snapshot, or none.
    """
    full = topic_name(name)
    topics.check_takes_changes(full)
    topics.partitions.check_is_none(full)
    entry = topics.registry.get(full)
    if entry is not None:
        entry.check_may(Phase.RENEWING)
    record = None if entry is None else entry.record
    if record is None and topics.kind.log is LogKind.BROKER and incarnation is not None and loaded is not None:
        # The store was lost, including its record of the topic.
        return await _renewed(topics, full, partial(_make_anew, topics, _claimed(topics, full, incarnation), loaded))
    if record is None:
        raise error("TOPIC_NOT_FOUND", f"there is no topic {full}", topic=full)
    if incarnation not in (None, record.incarnation):
        raise error(
            "POSITION_OF_ANOTHER_INCARNATION",
            f"the snapshot is of the incarnation {incarnation}, and topic {full} is the incarnation "
            f"{record.incarnation}",
            hint="After the snapshot was taken, the topic was deleted and created again. Or the snapshot belongs to "
            "another topic.",
        )
    return await _renewed(topics, full, partial(_renew, topics, record, loaded))


async def _renewed(topics: "Topics[T]", name: str, work: Callable[[], Coroutine[Any, Any, Begun]]) -> T | Closed:
    if begun := await topics.registry.run(Phase.RENEWING, name, work):
        await asyncio.wait({begun})
    return topics.look_at(name)


def _claimed(topics: "Topics[T]", name: str, incarnation: int) -> TopicRecord:
    """Return the record of a topic that is recreated, and reserve its name and incarnation."""
    topics.stored.check_is_free(incarnation, topics.known_records())
    topics.check_room()
    record = TopicRecord(name, incarnation, TopicState.ACTIVE, log=LogKind.BROKER)
    entry = topics.registry.entry(name)
    entry.record, entry.found = record, Closed(record, error("RECOVERING", "its snapshot is being imported"))
    topics.on_state(name, State.RECOVERING)
    return record


async def _make_anew(topics: "Topics[T]", record: TopicRecord, loaded: Loaded) -> Begun:
    """Do the work of `renew` for a topic that the store does not know."""
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
    """Do the work of `renew` up to the beginning of recovery. Recovery then runs in the background."""
    name = record.name
    async with topics.registry.locked(name) as entry:
        topic = entry.topic
        # Do this before the topic is closed, so that a refusal does not affect clients of the topic.
        await topics.kind.check_snapshot(record, topic, loaded)
        _check_is_still(topics, record, topic)
        entry.found = Closed(record, error("RECOVERING", "it is being opened again"))
        topics.on_state(name, State.RECOVERING)
        try:
            if topic is not None:
                topic.has_successor = True
                await topic.close("it is being opened again")
                # Retention and snapshots continued until the topic was closed.
                await topics.kind.check_snapshot(record, topic, loaded)
            if loaded is None:
                topics.lives.rebuilt.add(record.incarnation)
            await _put_snapshot(topics, record, loaded)
        finally:
            begun = await _open_again(topics, record)
        return begun


async def _put_snapshot(topics: "Topics[T]", record: TopicRecord, loaded: Loaded | None) -> None:
    """Replace the topic's snapshot, or remove it (None). When this returns, the change is durable.

    After STORE_UNAVAILABLE the store contains the old or the new snapshot.
    """
    snapshots = Snapshots(topics.store, record.incarnation)
    opening = snapshots.remove() if loaded is None else await snapshots.write_anew(loaded.whole())
    await topics.store.flush(opening)


def _check_is_still(topics: "Topics[T]", record: TopicRecord, topic: T | None) -> None:
    """Raise TOPIC_NOT_FOUND, DRAINING or STORE_UNAVAILABLE if the topic was deleted meanwhile.

    This applies even if another topic has or will have the same name.
    """
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
    # The next start must find a snapshot.
    if not await _is_saved(topics, topic):
        topics.in_background(again_until(lambda: _is_saved(topics, topic)))


async def _is_saved(topics: "Topics[T]", topic: T) -> bool:
    """Try to take a snapshot. Return False if the snapshot must be tried again."""
    if topic.state in (State.DRAINING, State.DAMAGED):
        return True
    if topic.state is State.STANDBY and topic.incarnation not in topics.lives.rebuilt:
        # The topic's own state is durable, and the owner takes later snapshots.
        return True
    try:
        await topic.keeper.snapshot()
    except SeqdedupeError:
        return False
    topics.lives.rebuilt.discard(topic.incarnation)
    return True


# -- A topic whose state another sidecar has, but not this one: the owner's snapshot is fetched and imported.


FETCH_SECONDS = 2.0
"""The pause between two attempts."""
AT_ONCE = 4
"""The number of snapshots that are fetched at the same time. A new sidecar may need the snapshots of all topics, and an
owner sends at most this number to one caller at the same time."""

OwnerOf = Callable[[str], Awaitable[str]]
"""Returns the address of the other sidecar that owns a topic, or an empty text if there is no owner. Raises the reason
if the owner is unknown."""

SnapshotOf = Callable[[str, str], Awaitable[tuple[int, Loaded]]]
"""Requests a topic's snapshot from the owner at an address. Returns the incarnation of the snapshot, and the complete,
checked snapshot. Raises the reason if there is no snapshot."""


class Fetching:
    """Fetches snapshots for all topics that answer NO_STATE, because a sidecar cannot own a topic without the topic's
    state. `run` never ends."""

    def __init__(self, topics: "Topics[Any]", owner_of: OwnerOf, snapshot_of: SnapshotOf) -> None:
        self._topics = topics
        self._owner_of = owner_of
        self._snapshot_of = snapshot_of
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Look for topics with NO_STATE, and try again for the topics that still have no state."""
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
                # After any error, the other topics are still fetched, and this topic is tried again.
                logger.error("the snapshot of topic %s could not be fetched", name, exc_info=e)
                note = f"its owner's snapshot could not be fetched: {type(e).__name__}: {e}"
        if isinstance(topic, Closed):
            if topic.note != note:
                logger.warning("topic %s has no state here: %s", name, note)
            topic.owner_address, topic.note = owner, note


def _has_no_state(topic: Closed | TopicBase) -> bool:
    why = topic.why if isinstance(topic, Closed) else topic.damage
    return topic.state is State.DAMAGED and isinstance(why, SeqdedupeError) and why.reason == "NO_STATE"
