"""Plans the ranges that a batch reads: selects the topics, finds their starts and ends, detects lost data, and applies
the limits of a batch."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.client.connection import Backoff
from seqdedupe.errors import (
    INSTALL_HINT,
    DamagedError,
    NotFoundError,
    PositionError,
    SeqdedupeError,
    UnavailableError,
    error,
)
from seqdedupe.figures import counted
from seqdedupe.message_id import Position
from seqdedupe.names import namespace_of, partition_name, topic_name
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import cluster, stock
from seqdedupe_spark.options import NO_LIMITS, Place, PlaceInTopic, ReadLimits, Selection, Time
from seqdedupe_spark.ranges import NOT_PARTITIONED, TopicRange, cut, partition_of, shares
from seqdedupe_spark.service import PulsarCluster, Service, sidecar_at
from seqdedupe_spark.stock import StockEnds

# -- The reasons why a topic cannot be read on after a position.

Ends = TopicEnds | StockEnds
"""The ends of a topic: of a topic with indexes, or of a topic that no sidecar writes."""

_GO_ON = "To continue with what is left, set failOnDataLoss to false (a reader job: --no-fail-on-data-loss)."


@dataclass(frozen=True)
class Loss:
    """The reason why reading a topic cannot continue after a position.

    `next` is the position after which reading can continue with the messages that are still stored. `next` is None if
    the topic does not exist, or if the topic ends before the position. In the second case reading would have to go
    back, because later the topic will have other messages at the same indexes.
    """

    topic: str
    next: Position | None
    reason: str
    message: str

    @property
    def may_be_accepted(self) -> bool:
        """Whether `failOnDataLoss=false` allows reading to continue. This option never allows a position to move
        back."""
        return self.next is not None or self.reason == "TOPIC_NOT_FOUND"

    def error(self) -> SeqdedupeError:
        """Return the error to raise if data loss is not accepted."""
        return error(self.reason, self.message, hint=_GO_ON if self.may_be_accepted else None, topic=self.topic)


def earliest(topic_ends: Ends) -> Position:
    """Return the position before the first message that is still stored."""
    return Position.before(topic_ends.last.incarnation, topic_ends.first_index)


def find_loss(topic: str, position: Position, found: Ends | None) -> Loss | None:
    """Return the reason why reading a topic with these ends cannot continue after a position; None if it can."""
    if found is None:
        message = f"{topic} was deleted: its messages after index {position.index} are gone"
        return Loss(topic, None, "TOPIC_NOT_FOUND", message)
    if isinstance(found, StockEnds):
        return _find_loss_of_entries(topic, position, found)
    first, last = found
    if last.incarnation != position.incarnation:
        message = (
            f"{topic} was recreated: its incarnation is {last.incarnation}, and the position is of "
            f"{position.incarnation}. The old messages after index {position.index} are gone, and the topic begins "
            f"with index {first} now"
        )
        return Loss(topic, earliest(found), "POSITION_OF_ANOTHER_INCARNATION", message)
    if last.index < position.index:
        message = f"{topic} ends with index {last.index}: it lacks indexes {last.index + 1} to {position.index}"
        return Loss(topic, None, "POSITION_AFTER_END", message)
    if last.index == position.index and not last.is_same(position):
        message = f"{topic} ends with {last} now, which is not the message of the position {position}"
        return Loss(topic, None, "POSITION_DIVERGED", message)
    if position.index + 1 < first:
        gone = first - position.index - 1
        message = (
            f"{topic} has lost {counted(gone, 'message')} to retention: indexes {position.index + 1} to {first - 1}"
        )
        return Loss(topic, earliest(found), "POSITION_TRIMMED", message)
    return None


def _find_loss_of_entries(topic: str, position: Position, found: StockEnds) -> Loss | None:
    """Do the same for a topic that no sidecar writes."""
    if position.incarnation != stock.STOCK:
        message = (
            f"no sidecar writes {topic} now, but the position {position} is of a topic that a sidecar wrote: "
            f"its messages after index {position.index} are gone"
        )
        return Loss(topic, earliest(found), "POSITION_OF_ANOTHER_INCARNATION", message)
    if found.last.index < position.index:
        message = f"{topic} ends with {found.last} now, before the position {position}"
        return Loss(topic, None, "POSITION_AFTER_END", message)
    if found.entries_up_to(position) is None:
        message = (
            f"{topic} was read up to {stock.entry_before(position)}, and begins with ledger {found.first_ledger} now: "
            "messages between them may be gone. Retention has removed them, or the topic was recreated"
        )
        return Loss(topic, earliest(found), "POSITION_TRIMMED", message)
    return None


# -- Waiting for a sidecar that is away, and the clients for planning.

PATIENCE_SECONDS = 30.0
"""If a sidecar cannot be reached, it is asked again for this time. For a sidecar that is recovering there is no
limit."""

SUBSCRIPTION_PREFIX = "seqdedupe-job-"
"""The prefix of a job's name in the name of its durable subscription."""

SAY_SECONDS = 60.0
"""The time between two log lines about a wait. The first line is logged after a twelfth of this time."""

_said: dict[str, float] = {}
"""By reason: the time of the last such log line in this process. While a sidecar is unavailable, many waits follow each
other."""

_NAMESPACE = re.compile(r"persistent://([\w.=\-]+/[\w.=\-]+)/")
"""The beginning of a pattern for full names."""

_DEFAULT_NAMESPACE = topic_name("_").removesuffix("_")

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Admin(Protocol):
    def topics(self) -> list[admin_pb2.Topic]: ...


class PlanningClient(Protocol):
    """The calls of planning: a sidecar's `blocking.Client`, or `cluster.cluster_client.ClusterClient`."""

    @property
    def admin(self) -> _Admin: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def ends(self, topic: str) -> Ends: ...
    def locate_time(self, topic: str, publish_time_ms: int) -> Located: ...
    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located: ...
    def position_at(self, topic: str, index: int) -> Position: ...


@runtime_checkable
class Holder(Protocol):
    """A client of a cluster that uses the subscription of a job."""

    def subscribe(self, topic: str) -> None: ...
    def keep_from(self, topic: str, position: Position) -> None: ...


class WaitingLine:
    """Logs the reason of a wait, at intervals."""

    def __init__(self) -> None:
        self._began: float | None = None

    def say(self, what: SeqdedupeError) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        # A wait that is soon over is not worth a line.
        if now - self._began >= SAY_SECONDS / 12 and now - _said.get(what.reason, -math.inf) >= SAY_SECONDS:
            _said[what.reason] = now
            _log.warning("waiting: %s", what)


def patiently(
    call: Callable[[], T], seconds: float = PATIENCE_SECONDS, should_stop: Callable[[], bool] = lambda: False
) -> T:
    """Repeat the call until it returns. Raises UnavailableError if it does not succeed within this time. While a topic
    recovers, the time does not count. If `should_stop` returns true, raise the last error."""
    backoff, waiting = Backoff(0.02, 1.0), WaitingLine()
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except UnavailableError as e:
            delay = max(backoff.next_seconds(), e.retry_delay_ms / 1000)
            if e.reason == "RECOVERING":
                until = time.monotonic() + seconds
            if time.monotonic() + delay > until or should_stop():
                raise
            waiting.say(e)
            time.sleep(delay)


def of_job(service: Service, job: str) -> Service:
    """Return the service for a job. In a cluster the job has a separate subscription."""
    return replace(service, subscription=SUBSCRIPTION_PREFIX + job) if isinstance(service, PulsarCluster) else service


def open_client(service: Service, selection: Selection, *, may_lose: bool = False) -> PlanningClient:
    """Return a client for planning the selection. With `may_lose`, topics that no sidecar writes may be read without a
    subscription.

    Raises INVALID_CONFIGURATION if packages for reading from brokers are missing.
    """
    if not isinstance(service, PulsarCluster):
        return sidecar_at(service).connect()
    try:
        cluster.prepare()
        from seqdedupe_spark.cluster.cluster_client import ClusterClient
    except ImportError as e:
        raise error(
            "INVALID_CONFIGURATION",
            f"a package for reading from Pulsar's brokers is missing: {e}",
            hint=f"{INSTALL_HINT.format('sidecar,pulsar,spark')} Executors need it too.",
        ) from e
    pattern = selection.pattern
    if pattern is None:
        names = selection.names
        return ClusterClient(
            service,
            {namespace_of(name) for name in names},
            lambda name: name in names or _whole(name) in names,
            skips=False,
            may_lose=may_lose,
        )
    found = _NAMESPACE.match(pattern)
    namespace = found[1] if found else namespace_of(topic_name("_"))
    return ClusterClient(service, [namespace], lambda name: _matches(pattern, name), skips=True, may_lose=may_lose)


class TopicListing:
    """The topics of a sidecar and their ends at one moment, read with one call for every 1,000 topics.

    Only the owner of a topic knows the topic's end, and only after recovery. For topics that the sidecar does not serve
    yet, and for topics that do not fit a position, the listing makes separate calls, and waits.
    """

    def __init__(self, client: PlanningClient, should_stop: Callable[[], bool] = lambda: False) -> None:
        """List the topics. Raises UnavailableError after PATIENCE_SECONDS."""
        self._client = client
        self._should_stop = should_stop
        listed = self._patiently(client.admin.topics)
        self._topics = {topic.name: topic for topic in listed if not topic.partitions}
        self._counts = {topic.name: topic.partitions for topic in listed if topic.partitions}
        self._stock: dict[str, StockEnds] = {}
        """The stored entries of topics that no sidecar writes, as of the last request."""

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, should_stop=self._should_stop)

    def select(self, selection: Selection, known: Iterable[str] = ()) -> list[str]:
        """Return the full names of the selected topics. If no topic has a selected name, the name stands for the
        partitions of a partitioned topic.

        A pattern is compared with whole names, full or short, with or without `-partition-3`. A pattern that matches no
        topic is valid. Topics in `known` are already being read, and count as existing. If a name stood for partitions
        in `known`, the name still stands for these partitions, even if a topic with that name was created since. Raises
        NotFoundError if a named topic, or a partition of a named topic, is missing.
        """
        known = set(known)
        there = self._topics.keys() | known
        self._check_whole(selection, there)
        if selection.pattern is not None:
            return _in_order(name for name in there if _matches(selection.pattern, name))
        partitions = _partitions(there)
        found: list[str] = []
        for name in selection.names:
            parts = partitions.get(name, [])
            if name in there:
                found.append(name)
            elif not parts:
                raise error("TOPIC_NOT_FOUND", f"there is no topic {name}", topic=name)
            if name not in there or known.intersection(parts).difference(selection.names):
                found += parts
        return _in_order(found)

    def _check_whole(self, selection: Selection, there: Iterable[str]) -> None:
        """Raise NotFoundError if a partition of a selected topic is missing."""
        for name, count in self._counts.items():
            if name in selection.names or (selection.pattern is not None and _matches(selection.pattern, name)):
                parts = {partition_name(name, k) for k in range(count)}
                if missing := parts.difference(there):
                    why = f"the topic {name} has {counted(count, 'partition')}, but {min(missing)} does not exist"
                    raise error("TOPIC_NOT_FOUND", why, topic=name)

    def ends(self, topic: str) -> Ends | None:
        """Return the ends of the topic; None if the topic does not exist. Raises UnavailableError."""
        if topic in self._stock:
            return self._stock[topic]
        found = self._topics.get(topic)
        if found is not None and found.state == admin_pb2.TOPIC_STATE_SERVING:
            return TopicEnds(found.first_index, Position.from_proto(found.last))
        return self.ends_now(topic)

    def deduplication_enabled(self, topic: str) -> bool:
        """Return the policy of a topic that is listed."""
        return self._topics[topic].policy.deduplication_enabled

    def is_by_id(self, topic: str) -> bool | None:
        """Return whether the topic is a topic of deduplication IDs; None if that is not known yet."""
        found = self._topics.get(topic)
        if found is None or found.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED:
            return None
        return found.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID

    def ends_now(self, topic: str) -> Ends | None:
        """Return the current ends of the topic, with a new request."""
        self._stock.pop(topic, None)
        try:
            found = self._patiently(lambda: self._client.ends(topic))
        except NotFoundError:
            return None
        if isinstance(found, StockEnds):
            self._stock[topic] = found
        return found

    def hold(self, topic: str, position: Position | None = None) -> bool:
        """Make the job's subscription keep the messages of a topic that no sidecar writes: all messages, or the entry
        of a position and all later entries. Return whether the subscription was missing. If it was missing, messages
        may have been lost since the topic was listed."""
        client = self._client
        if not isinstance(client, Holder) or not isinstance(found := self.ends(topic), StockEnds):
            return False
        is_new = found.let_go is None
        if is_new:
            self._patiently(lambda: client.subscribe(topic))
            self.ends_now(topic)
        elif position is not None:
            self._patiently(lambda: client.keep_from(topic, position))
        return is_new

    def find_loss(self, topic: str, position: Position) -> Loss | None:
        """Return the reason why reading the topic cannot continue after this position; None if it can."""
        # The process that moved the position may have seen a later end than this listing.
        if find_loss(topic, position, self.ends(topic)) is None:
            return None
        found = self.ends_now(topic)
        if isinstance(found, TopicEnds) and topic in self._topics:
            self._topics[topic].first_index = found.first_index
            self._topics[topic].last.CopyFrom(found.last.to_proto())
        return find_loss(topic, position, found)

    def look(self, topic: str, position: Position) -> Position | Loss:
        """Return the topic's last position, or the reason why reading cannot continue after this position."""
        loss = self.find_loss(topic, position)
        return loss or self.ends(topic).last  # type: ignore[union-attr]  # deleted is a loss

    def resolve(self, names: Iterable[str], place: Place, option: str) -> dict[str, Position]:
        """Convert a place to a position in each of these topics.

        In a mapping, the name of a partitioned topic stands for all partitions of the topic that the mapping does not
        name. Raises ConfigurationError (INVALID_OPTION) unless the mapping contains exactly these topics, NotFoundError
        for a topic that does not exist, PositionError for an index after a topic's end.
        """
        names = list(names)
        if isinstance(place, Mapping):
            place = self._spread(names, place, option)
        found = {name: self._resolve(name, place[name] if isinstance(place, Mapping) else place) for name in names}
        for name, position in found.items():
            if option == "endingOffsets" and position.incarnation == stock.STOCK and stock.rows_read(position):
                what = f"{option}: in {name}, {position.message_id} is one of several messages of an entry"
                raise error("INVALID_OPTION", f"{what}, and entries are read whole: give ledger:entry")
        return found

    def _spread(self, names: list[str], places: Mapping[str, PlaceInTopic], option: str) -> Mapping[str, PlaceInTopic]:
        partitions = _partitions(names)
        spread = {part: place for whole, place in places.items() for part in partitions.get(whole, ())}
        spread |= {name: place for name, place in places.items() if name in names or name not in partitions}
        if wrong := spread.keys() ^ set(names):
            if any(isinstance(place, Time) for place in places.values()):
                option = option.replace("Offsets", "Time")
            what = "lacks topic" if wrong & set(names) else "has a topic that is not read:"
            raise error("INVALID_OPTION", f"{option} {what} {min(wrong & set(names) or wrong)}")
        return spread

    def _resolve(self, name: str, where: PlaceInTopic) -> Position:
        if isinstance(where, Position):
            if isinstance(self._client, Holder) and isinstance(self.ends(name), StockEnds):
                return stock.given(where)
            if where.incarnation == stock.STOCK:
                raise error(
                    "INVALID_OPTION",
                    f"{where} is a place in a topic that no sidecar writes, but a sidecar writes {name}",
                )
            return where
        if isinstance(where, Time):
            milliseconds = where.milliseconds
            return Position.before(*self._patiently(lambda: self._client.locate_time(name, milliseconds)))
        found = self.ends(name) or self._patiently(lambda: self._client.ends(name))
        if isinstance(where, int):
            if isinstance(found, StockEnds):
                raise error("INVALID_OPTION", f"no sidecar writes {name}, so it has no indexes: give a message ID")
            return Position.before(found.last.incarnation, where)
        return found.last if where == "latest" else earliest(found)

    def plan(self, starts: Mapping[str, Position], limits: ReadLimits = NO_LIMITS) -> list[TopicRange]:
        """Return the ranges to read after each start, within the limits. A topic without new messages has no range.

        Raises PositionError or NotFoundError if `look` finds a loss, and UnavailableError after PATIENCE_SECONDS.
        """
        ranges = []
        for topic, start in starts.items():
            end = self.look(topic, start)
            if isinstance(end, Loss):
                raise end.error()
            ranges.append(self.range(topic, start, end))
        return self.within(ranges, limits)

    def range(self, topic: str, start: Position, end: Position) -> TopicRange:
        """Return the range between two positions that were checked before."""
        found = self._stock.get(topic)
        return TopicRange(topic, start, end, None if found is None else found.count(start, end))

    def within(self, ranges: Iterable[TopicRange], limits: ReadLimits) -> list[TopicRange]:
        """Return the first parts of the ranges that are not empty, within the limits.

        A limit is divided in proportion to the number of messages. Each range keeps at least one message, even if the
        total then exceeds the limit. The limit in bytes is approximate.
        """
        ranges = [one for one in ranges if len(one)]
        there = counts = [len(one) for one in ranges]
        if limits.messages is not None:
            counts = [min(pair) for pair in zip(there, shares(there, limits.messages), strict=True)]
        if limits.size_bytes is not None and self._log_bytes(ranges) > limits.size_bytes:
            budgets = shares(there, limits.size_bytes)
            counts = [
                min(count, self._messages_in(one, budget))
                for one, count, budget in zip(ranges, counts, budgets, strict=True)
            ]
        return [one if count == len(one) else self._cut(one, count) for one, count in zip(ranges, counts, strict=True)]

    def _cut(self, one: TopicRange, count: int) -> TopicRange:
        """Return the first `count` messages, or entries, of the range."""
        found = self._stock.get(one.topic)
        if found is None:
            return self._with_known_end(cut(one, 0, count))
        return TopicRange(one.topic, one.start, found.advanced(one.start, count), count)

    def _with_known_end(self, one: TopicRange) -> TopicRange:
        """Return a cut range with a complete end position. A position with only an index would be valid in any history
        of the topic."""
        try:
            end = self._patiently(lambda: self._client.position_at(one.topic, one.end.index))
        except (DamagedError, NotFoundError, PositionError):
            # The reader of the range gets the error, and the ranges of other topics are read.
            return one
        return TopicRange(one.topic, one.start, end) if end.incarnation == one.incarnation else one

    def _log_bytes(self, ranges: Iterable[TopicRange]) -> float:
        """Return the total size of the topics on disk. A topic that is not listed may have any size."""
        return sum(self._topics[one.topic].log_bytes if one.topic in self._topics else math.inf for one in ranges)

    def _messages_in(self, one: TopicRange, size_bytes: int) -> int:
        if len(one) == 1:
            return 1
        if found := self._stock.get(one.topic):
            return found.entries_in(one.start, size_bytes)
        located = self._patiently(lambda: self._client.locate_bytes(one.topic, one.first_index, size_bytes))
        return max(located.index - one.first_index, 1)


def _partitions(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that are partitions, by the name of the whole topic."""
    partitions: dict[str, list[str]] = {}
    for name in names:
        if partition_of(name) != NOT_PARTITIONED:
            partitions.setdefault(_whole(name), []).append(name)
    return partitions


def _whole(name: str) -> str:
    """Return the name of the partitioned topic of a partition."""
    return name.rpartition("-partition-")[0]


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=lambda name: (_whole(name), partition_of(name), name))


def _matches(pattern: str, name: str) -> bool:
    names = [name] if partition_of(name) == NOT_PARTITIONED else [name, _whole(name)]
    names += [full.removeprefix(_DEFAULT_NAMESPACE) for full in names]
    return any(re.fullmatch(pattern, one) for one in names)
