"""Topics of a cluster that others make and delete: it is asked before it is said for good that there is none."""

from collections.abc import Collection
from functools import partial
from typing import TypeVar

from seqdedupe.names import topic_name
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.registry import Phase

T = TypeVar("T", bound=TopicBase)


async def look_for(topics: Topics[T], name: str) -> str:
    """The full name of a topic; one that is not known here is looked for in the cluster.

    Raises INVALID_TOPIC_NAME, and why the cluster cannot be asked.
    """
    full = topic_name(name)
    is_known = _there(topics, full) is not None or full in topics.partitions
    if topics.kind.log.is_shared and not is_known and not topics.is_draining:
        topics.check_listed()
        await topics.looking.once()
    return full


async def find(topics: Topics[T], name: str) -> T:
    """The live topic, looked for, and opened if nobody has used it yet. Raises as `look_for` and `Topics.get`."""
    full = await look_for(topics, name)
    await topics.waiting.use(full)
    return topics.get(full)


async def find_or_create(topics: Topics[T], name: str) -> T:
    """The live topic, made if it is not there and `allow_auto_topic_creation` says so."""
    # Who cannot make it, because another one has, looks for it.
    return await (topics.get_or_create(name) if topics.allow_auto_topic_creation else find(topics, name))


async def delete(topics: Topics[T], name: str) -> None:
    """As `Topics.delete`; also of a topic that is damaged because somebody has deleted its log in the cluster. Raises
    why the cluster cannot be asked, too."""
    full = await look_for(topics, name)
    topic = _there(topics, full)
    is_lost = bool(await lost(topics, [full])) and not topics.partitions_beside(full)
    if not is_lost or _there(topics, full) is not topic or topics.registry.phase(full) is Phase.DELETING:
        await topics.delete(full)
        return
    topics.check_takes_changes(full)
    await topics.registry.run(Phase.DELETING, full, partial(topics.remove, [full], full))


async def lost(topics: Topics[T], names: Collection[str]) -> set[str]:
    """Those of the topics that are damaged because somebody has deleted their log in the cluster."""
    there = {name: _there(topics, name) for name in names}
    damaged = [name for name, topic in there.items() if topic is not None and topic.state is State.DAMAGED]
    if not damaged or not topics.kind.log.is_shared:
        return set()
    listed = {log.incarnation for log in await topics.kind.list()}
    records = [record for name in damaged if (record := topics.registry.record(name)) is not None]
    return {record.name for record in records if record.incarnation not in listed}


def _there(topics: Topics[T], full: str) -> T | Closed | None:
    entry = topics.registry.get(full)
    return None if entry is None else entry.found
