"""What there is to read: topics, where they start and end, what was lost, and ranges within limits."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from seqdedupe.client import blocking
from seqdedupe.client.client import TopicEnds
from seqdedupe.client.connection import Backoff
from seqdedupe.errors import NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe_spark.options import NO_LIMITS, Limits, Place, Selection, Time
from seqdedupe_spark.ranges import NOT_PARTITIONED, Range, partition_of

PATIENCE_SECONDS = 30.0
"""A sidecar that cannot be reached, or recovers, is asked again for so long."""

_DEFAULT_NAMESPACE = topic_name("_").removesuffix("_")

T = TypeVar("T")


@dataclass(frozen=True)
class Loss:
    """Why a topic cannot be read on after a position.

    `next` is the position after which to go on with what is left; None if the topic is gone.
    """

    topic: str
    next: Position | None
    reason: str
    message: str

    def error(self) -> SeqdedupeError:
        """To be raised where nothing may be lost."""
        return error(self.reason, self.message, topic=self.topic)


def patiently(call: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Calls until there is an answer. Raises UnavailableError if there is none for so long."""
    backoff = Backoff(0.02, 1.0)
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except UnavailableError as e:
            delay = max(backoff.next_seconds(), e.retry_delay_ms / 1000)
            if time.monotonic() + delay > until:
                raise
            time.sleep(delay)


def topics(client: blocking.Client, selection: Selection, known: Iterable[str] = ()) -> list[str]:
    """The full names of the topics there are; those of the partitions for a name that has no topic of its own.

    A pattern matches whole names, full or short, with or without `-partition-3`; it may match none. Topics that are
    `known` count as there. Raises NotFoundError, naming the option, where a named topic is missing.
    """
    there = {topic.name for topic in patiently(client.admin.topics)} | set(known)
    if selection.pattern is not None:
        return _in_order(name for name in there if _matches(selection.pattern, name))
    partitions: dict[str, list[str]] = {}
    for name in there:
        if partition_of(name) != NOT_PARTITIONED:
            partitions.setdefault(_whole(name), []).append(name)
    found: list[str] = []
    for name in selection.names:
        if name not in there and name not in partitions:
            raise error("TOPIC_NOT_FOUND", f"{selection.option}: the sidecar has no topic {name}", topic=name)
        found += [name] if name in there else partitions[name]
    return _in_order(found)


def _whole(name: str) -> str:
    """The name of the partitioned topic of a partition."""
    return name.rpartition("-partition-")[0]


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=lambda name: (_whole(name), partition_of(name), name))


def _matches(pattern: str, name: str) -> bool:
    names = [name] if partition_of(name) == NOT_PARTITIONED else [name, _whole(name)]
    names += [full.removeprefix(_DEFAULT_NAMESPACE) for full in names]
    return any(re.fullmatch(pattern, one) for one in names)


def earliest(topic_ends: TopicEnds) -> Position:
    """The position before the first message that is left."""
    return Position.before(topic_ends.last.incarnation, topic_ends.first_index)


def resolve(client: blocking.Client, names: Iterable[str], place: Place, option: str) -> dict[str, Position]:
    """The positions of a place in these topics.

    Raises ConfigurationError (INVALID_OPTION) unless a mapping has exactly these topics, NotFoundError for one that is
    not there.
    """
    names = list(names)
    if isinstance(place, Mapping) and (wrong := place.keys() ^ set(names)):
        what = "lacks topic" if wrong & set(names) else "has a topic that is not read:"
        raise error("INVALID_OPTION", f"{option} {what} {min(wrong & set(names) or wrong)}")
    return {name: _resolve(client, name, place) for name in names}


def _resolve(client: blocking.Client, name: str, place: Place) -> Position:
    where = place[name] if isinstance(place, Mapping) else place
    if isinstance(where, Position):
        return where
    if isinstance(where, Time):
        milliseconds = where.milliseconds
        return Position.before(*patiently(lambda: client.locate_time(name, milliseconds)))
    found = patiently(lambda: client.ends(name))
    return found.last if where == "latest" else earliest(found)


def ends(client: blocking.Client, topic: str) -> TopicEnds | None:
    """What the topic holds now; None if it was deleted. Raises UnavailableError after PATIENCE_SECONDS."""
    try:
        return patiently(lambda: client.ends(topic))
    except NotFoundError:
        return None


def find_loss(topic: str, position: Position, found: TopicEnds | None) -> Loss | None:
    """Why a topic with these ends cannot be read on after a position; None if it can."""
    if found is None:
        message = f"{topic} was deleted; what it held after index {position.index} is gone"
        return Loss(topic, None, "TOPIC_NOT_FOUND", message)
    first, last = found
    if last.incarnation != position.incarnation:
        message = (
            f"{topic} was made anew: its incarnation is {last.incarnation}, the position is of {position.incarnation}; "
            f"what it held after index {position.index} is gone, and it begins with index {first} now"
        )
        return Loss(topic, earliest(found), "POSITION_UNKNOWN", message)
    if last.index < position.index:
        message = f"{topic} ends with index {last.index}: it lacks indexes {last.index + 1} to {position.index}"
        return Loss(topic, last, "POSITION_UNKNOWN", message)
    if position.index + 1 < first:
        gone = first - position.index - 1
        message = f"{topic} has lost {gone} messages to retention: indexes {position.index + 1} to {first - 1}"
        return Loss(topic, earliest(found), "POSITION_TRIMMED", message)
    return None


def look(client: blocking.Client, topic: str, position: Position) -> Position | Loss:
    """The topic's last position; or why it cannot be read on after this one."""
    found = ends(client, topic)
    return find_loss(topic, position, found) or found.last  # type: ignore[union-attr]  # deleted is a loss


def plan(client: blocking.Client, starts: Mapping[str, Position], limits: Limits = NO_LIMITS) -> list[Range]:
    """What there is to read after each start, within the limits; no range for a topic that has nothing new.

    Raises PositionError or NotFoundError where `look` finds a loss, UnavailableError after PATIENCE_SECONDS.
    """
    ranges = []
    for topic, start in starts.items():
        end = look(client, topic, start)
        if isinstance(end, Loss):
            raise end.error()
        ranges.append(Range(topic, start, end))
    return within(client, ranges, limits)


def within(client: blocking.Client, ranges: Iterable[Range], limits: Limits) -> list[Range]:
    """The beginnings of those ranges that are not empty, within the limits.

    A limit is shared in proportion to the messages there are. Each range keeps one message at least, even if that is
    more than the limit. That of bytes is kept to about.
    """
    ranges = [one for one in ranges if len(one)]
    there = counts = [len(one) for one in ranges]
    if limits.messages is not None:
        counts = [min(pair) for pair in zip(there, shares(there, limits.messages), strict=True)]
    if limits.size_bytes is not None:
        budgets = shares(there, limits.size_bytes)
        counts = [
            min(count, _messages_in(client, one, budget))
            for one, count, budget in zip(ranges, counts, budgets, strict=True)
        ]
    return [_cut(one, 0, count) for one, count in zip(ranges, counts, strict=True)]


def _messages_in(client: blocking.Client, range: Range, size_bytes: int) -> int:
    located = patiently(lambda: client.locate_bytes(range.topic, range.first_index, size_bytes))
    return max(located.index - range.first_index, 1)


def shares(there: list[int], limit: int) -> list[int]:
    """The limit shared out in proportion to what is there, at least one each."""
    rest, more = max(limit - len(there), 0), max(sum(there) - len(there), 1)
    return [1 + rest * (one - 1) // more for one in there]


def split(ranges: list[Range], parts: int) -> list[Range]:
    """The same messages in at least so many ranges, if there are so many messages; each range is cut evenly."""
    messages = sum(len(one) for one in ranges)
    return [
        _cut(one, len(one) * i // pieces, len(one) * (i + 1) // pieces)
        for one in ranges
        if (pieces := min(-(-len(one) * parts // messages), len(one)))
        for i in range(pieces)
    ]


def _cut(whole: Range, first: int, stop: int) -> Range:
    """Its messages from the `first`-th to before the `stop`-th."""
    start = Position.before(whole.incarnation, whole.first_index + first) if first else whole.start
    end = Position.before(whole.incarnation, whole.first_index + stop) if stop < len(whole) else whole.end
    return Range(whole.topic, start, end)
