"""Opening a topic again: from a saved snapshot, which takes the place of the one in the store, or from its log alone.

Begin with `renew`, which runs as a task of its own: whoever asked for it may give up waiting, it is finished all the
same. `Fetching` does it by itself for a topic of which this sidecar has no state, and another one does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord, TopicState
from seqdedupe.tasks import again_until
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.registry import Closed, Phase

T = TypeVar("T", bound=TopicBase)

Begun = asyncio.Task[None] | None
"""The topic's first attempt to recover; None if its log could not be opened yet."""


async def renew(topics: Topics[T], name: str, incarnation: int | None, loaded: Loaded | None) -> T | Closed:
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


async def _renewed(topics: Topics[T], name: str, work: Callable[[], Coroutine[Any, Any, Begun]]) -> T | Closed:
    if begun := await topics.registry.run(Phase.RENEWING, name, work):
        await asyncio.wait({begun})
    return topics.look_at(name)


def _claimed(topics: Topics[T], name: str, incarnation: int) -> TopicRecord:
    """The record of a topic that is made anew. Name and incarnation are taken from now on."""
    topics.stored.check_is_free(incarnation, topics.known_records())
    topics.check_room()
    record = TopicRecord(name, incarnation, TopicState.ACTIVE, log=LogKind.BROKER)
    entry = topics.registry.entry(name)
    entry.record, entry.found = record, Closed(record, error("RECOVERING", "its snapshot is being imported"))
    topics.on_state(name, State.RECOVERING)
    return record


async def _make_anew(topics: Topics[T], record: TopicRecord, loaded: Loaded) -> Begun:
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


async def _renew(topics: Topics[T], record: TopicRecord, loaded: Loaded | None) -> Begun:
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


async def _put_snapshot(topics: Topics[T], record: TopicRecord, loaded: Loaded | None) -> None:
    """This is the topic's snapshot from now on, or none is; durable on return. Raises STORE_UNAVAILABLE: then the one
    or the other is there."""
    snapshots = Snapshots(topics.store, record.incarnation)
    opening = snapshots.remove() if loaded is None else await snapshots.write_anew(loaded.whole())
    await topics.store.flush(opening)


def _check_is_still(topics: Topics[T], record: TopicRecord, topic: T | None) -> None:
    """Raises TOPIC_NOT_FOUND, DRAINING, STORE_UNAVAILABLE if the topic was deleted since it was looked at, also if
    another of its name is there, or may yet be."""
    name = record.name
    entry = topics.registry.entry(name)
    if entry.phase is Phase.DELETING or entry.record is not record or entry.topic is not topic:
        raise error("TOPIC_NOT_FOUND", f"topic {name} was deleted meanwhile", topic=name)
    topics.check_takes_changes(name)


async def _open_again(topics: Topics[T], record: TopicRecord) -> Begun:
    if await topics.lives.open(record) and (topic := topics.registry.topic(record.name)):
        return topics.in_background(_begin_again(topics, topic))
    topics.in_background(_go_on_opening(topics, record))
    return None


async def _go_on_opening(topics: Topics[T], record: TopicRecord) -> None:
    await again_until(lambda: topics.lives.opened(record))
    if topic := topics.registry.topic(record.name):
        await _begin_again(topics, topic)


async def _begin_again(topics: Topics[T], topic: T) -> None:
    await topic.recover()
    # So that the next start finds a snapshot in any case.
    if not await _is_saved(topics, topic):
        topics.in_background(again_until(lambda: _is_saved(topics, topic)))


async def _is_saved(topics: Topics[T], topic: T) -> bool:
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

logger = logging.getLogger("seqdedupe.topics")

FETCH_SECONDS = 2.0
"""Between two tries."""
AT_ONCE = 8
"""Snapshots that are fetched at the same time: a new sidecar may need those of all topics."""

OwnerOf = Callable[[str], Awaitable[str]]
"""The address of the other sidecar that owns a topic; empty if there is none. Raises why it is not known now."""

SnapshotOf = Callable[[str, str], Awaitable[tuple[int, Loaded]]]
"""Given an owner's address and a topic: the incarnation that the snapshot is of, and the snapshot, which came whole and
can be one. Raises why there is none."""


class Fetching:
    """For all topics that answer NO_STATE: never is one taken without its state. `run` goes on for ever."""

    def __init__(self, topics: Topics[Any], owner_of: OwnerOf, snapshot_of: SnapshotOf) -> None:
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
