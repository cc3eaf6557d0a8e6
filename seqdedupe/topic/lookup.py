"""Topics by name that are more than one topic of this sidecar: partitioned ones, and those that others make.

A partition is a topic of its own, `name-partition-0` and on, with a log, snapshots and a recovery of its own. How many
there are stands in each one's record and beside its log, for good: which partition a message belongs to follows from
it. The records of all partitions change their state in one write. So after a crash start-up finds all of them made,
or all of them half made, or all of them being deleted, and finishes that for each by itself.

In a cluster others make and delete topics: it is asked before it is said for good that there is none.
"""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from seqdedupe.errors import error
from seqdedupe.limits import MAX_PARTITIONS
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.names import partition_name, topic_name, whole_of
from seqdedupe.store.topics import LogKind
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.policy import GapPolicy, Policy
from seqdedupe.topic.registry import Closed, Phase

T = TypeVar("T", bound=TopicBase)


def partitions_of(topics: Topics[T], whole: str) -> "list[T | Closed | None]":
    """The partitions of a partitioned topic, in order; None for one that is not there. Raises KeyError."""
    return [topics.registry.found(name) for name in topics.partitions.names(whole)]


async def create_partitioned(
    topics: Topics[T], name: str, partitions: int, policy: Policy, layout: Layout = AS_USUAL
) -> None:
    """Makes a partitioned topic; returns when all of its partitions serve. `layout`: see `Logs.create`.

    Raises INVALID_TOPIC_NAME, INVALID_REQUEST, TOPIC_EXISTS, TOO_MANY_TOPICS, DRAINING, LOG_REFUSED, STORE_UNAVAILABLE:
    then there is none.
    """
    whole = topic_name(name)
    _check_can_be(topics, whole, partitions, policy)
    while change := topics.registry.changes(whole):
        await asyncio.wait({change})
    names = [partition_name(whole, k) for k in range(partitions)]
    for one in (whole, *names):
        topics.check_takes_changes(one)
    _check_is_free(topics, whole)
    topics.check_room(partitions)
    topics.partitions.claim(whole, partitions)
    work = partial(_create, topics, whole, names, policy, layout)
    await topics.registry.change_whole(Phase.CREATING, whole, work)


def _check_can_be(topics: Topics[T], whole: str, partitions: int, policy: Policy) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise error("INVALID_REQUEST", f"partitions is {partitions}: it should be 1 to {MAX_PARTITIONS}, or 0 for none")
    if topics.kind.log is LogKind.BROKER:
        why = "the log is a broker's own, and so are its partitions: each is a topic for itself"
        raise error("INVALID_REQUEST", why, hint="Leave partitions out.")
    if whole_of(whole) is not None:
        what = f"{whole} has the name of a partition, and cannot have partitions itself"
        raise error("INVALID_TOPIC_NAME", what, hint="Choose another name.")
    partition_name(whole, partitions - 1)  # whether the longest is one
    check_gap_policy(whole, policy.gap)


def check_gap_policy(topic: str, gap: GapPolicy | None) -> None:
    """Raises INVALID_REQUEST if a partition has the policy to refuse gaps: a producer's IDs count over all partitions,
    so that in each there are some."""
    if gap is GapPolicy.REJECT:
        raise error(
            "INVALID_REQUEST",
            f"the gap policy of {topic} is REJECT: sequence IDs count over all partitions of a topic, so each has gaps",
            hint="Let partitioned topics allow gaps: `seqdedupe policy set PARTITION --gap allow`.",
        )


def _check_is_free(topics: Topics[T], whole: str) -> None:
    topics.partitions.check_is_free(whole)
    there = (name for name in topics.registry.names() if name == whole or whole_of(name) == whole)
    if taken := min(there, default=None):
        what = f"the topic {taken} is there already" + (
            "" if taken == whole else f", with the name of a partition of {whole}"
        )
        raise error("TOPIC_EXISTS", what, topic=taken)


async def _create(topics: Topics[T], whole: str, names: list[str], policy: Policy, layout: Layout) -> None:
    try:
        await topics.lives.make(names, policy, len(names), layout)
    except Exception:
        topics.partitions.release(whole)
        raise


async def delete_partitioned(topics: Topics[T], whole: str) -> None:
    """Deletes a partitioned topic, all partitions of it, for good. They take nothing more from now on.

    Partitions that are damaged because somebody has deleted the whole in the cluster are no hindrance. Raises
    LOG_DAMAGED, RECOVERING and what else a partition says that cannot be used; STORE_UNAVAILABLE: then all of it is
    still there. Whoever is cancelled here does not know: the deletion goes on.
    """
    await topics.waiting.use(*topics.partitions.names(whole))
    lost = await without_log(topics, topics.partitions.names(whole))
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


# -- Topics of a cluster that others make and delete: it is asked before it is said for good that there is none.


async def look_for(topics: Topics[T], name: str) -> str:
    """The full name of a topic; one that is not known here is looked for in the cluster.

    Raises INVALID_TOPIC_NAME, and why the cluster cannot be asked.
    """
    full = topic_name(name)
    is_known = topics.registry.found(full) is not None or full in topics.partitions
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


async def delete(topics: Topics[T], name: str, check: Callable[[str], None] = lambda full: None) -> None:
    """As `Topics.delete`; also of a topic that is damaged because somebody has deleted its log in the cluster. Raises
    why the cluster cannot be asked, too."""
    full = await look_for(topics, name)
    topic = topics.registry.found(full)
    is_lost = bool(await without_log(topics, [full])) and not topics.partitions_beside(full)
    if not is_lost or topics.registry.found(full) is not topic or topics.registry.phase(full) is Phase.DELETING:
        await topics.delete(full, check)
        return
    topics.check_takes_changes(full)
    await topics.registry.run(Phase.DELETING, full, partial(topics.remove, [full], full))


async def without_log(topics: Topics[T], names: Collection[str]) -> set[str]:
    """Those of the topics that are damaged because somebody has deleted their log in the cluster."""
    there = {name: topics.registry.found(name) for name in names}
    damaged = [name for name, topic in there.items() if topic is not None and topic.state is State.DAMAGED]
    if not damaged or not topics.kind.log.is_shared:
        return set()
    listed = {log.incarnation for log in await topics.kind.list()}
    records = [record for name in damaged if (record := topics.registry.record(name)) is not None]
    return {record.name for record in records if record.incarnation not in listed}
