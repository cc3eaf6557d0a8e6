"""The state of topics and of the sidecar for people, as the messages of `AdminService.GetTopic` and `GetStatistics`.
The web page also shows these messages.

`RecentActivity` contains the events in the topics during the last minutes, by interval. It reads the topics' counters
once in each interval. So it costs nothing per message, and almost nothing for an idle topic. `Statistics` creates the
answer for the requested topics.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from broker_sidecar.rpc import refusals, unary
from broker_sidecar.telemetry import LastWarnings
from seqdedupe.errors import error
from seqdedupe.names import whole_of
from seqdedupe.topic.base import State, TopicBase, TopicCounters
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.registry import Closed
from seqdedupe.topic.topic import Topic
from seqdedupe.topic_facts import ENTRY_FORMATS
from seqdedupe.v1 import admin_pb2

# -- Topics and policies as messages of `admin.proto`.


def policy_to_proto(policy: Policy | Applied) -> admin_pb2.TopicPolicy:
    """Return a policy that is set, or the policy in force, as a message."""
    message = admin_pb2.TopicPolicy()
    policy.fill(message)
    return message


WORST_FIRST = (
    State.DAMAGED,
    State.RECOVERING,
    State.TERMINATED,
    State.STANDBY,
    State.READ_ONLY,
    State.DRAINING,
)

_SUMMED = (
    "log_bytes",
    "not_dup",
    "dup",
    "unknown",
    "refused",
    "resets",
    "purged",
    "resumed_after_purge",
    "damaged_places",
    "damaged_messages",
    "log_void",
    "log_repeats",
    "log_foreign",
    "log_earlier",
    "may_lose_messages",
    "not_durable_messages",
    "window_messages",
    "window_forgotten",
    "window_memory_bytes",
    "window_imported",
)
"""Fields for which a partitioned topic has the sum over its partitions."""


def partitioned_to_proto(whole: str, partitions: Sequence[TopicBase | Closed | None], unused: int) -> admin_pb2.Topic:
    """Return a partitioned topic in its current state. None stands for a missing partition."""
    message = admin_pb2.Topic(
        name=whole,
        partitions=len(partitions),
        unused_partitions=unused,
        state=State.SERVING.value,  # type: ignore[arg-type]
    )
    parts = [topic_to_proto(topic) for topic in partitions if topic is not None]
    for name in _SUMMED:
        setattr(message, name, sum(getattr(part, name) for part in parts))
    for name in ("deduplication_mode", "deduplication_route"):
        setattr(message, name, max((getattr(part, name) for part in parts), default=0))
    if with_policy := [part for part in parts if part.HasField("policy")]:
        # The partitions share a policy. If one was set separately, report the guarantees that hold in all of them.
        weakest = min(with_policy, key=lambda part: part.policy.deduplication_enabled)
        message.policy.CopyFrom(weakest.policy)
    message.window_first_publish_time_ms = max(
        (part.window_first_publish_time_ms for part in parts if part.window_forgotten), default=0
    )
    message.window_imported_missing = any(part.window_imported_missing for part in parts)
    message.may_lose_ms = max((part.may_lose_ms for part in parts), default=0)
    message.entry_format = max((part.entry_format for part in parts), default=0)  # type: ignore[assignment]
    for state in WORST_FIRST:
        if one := next((part for part in parts if part.state == state.value), None):
            message.state, message.why = one.state, f"{one.name}: {one.why}"
            break
    if missing := [k for k, topic in enumerate(partitions) if topic is None]:
        message.state = State.DAMAGED.value  # type: ignore[assignment]
        message.why = f"these partitions are missing: {', '.join(map(str, missing))}"
    return message


def topic_to_proto(topic: TopicBase | Closed, partitions: int = 0) -> admin_pb2.Topic:
    """Return a topic in its current state. `partitions` comes from the topic's record."""
    message = _topic_to_proto(topic)
    if partitions:
        message.partition_of = whole_of(message.name) or ""
    return message


def _topic_to_proto(topic: TopicBase | Closed) -> admin_pb2.Topic:
    if isinstance(topic, Closed):
        return admin_pb2.Topic(
            name=topic.record.name,
            incarnation=topic.record.incarnation,
            state=topic.state.value,  # type: ignore[arg-type]
            why=f"{topic.told} {topic.why.hint}" if topic.state is State.DAMAGED else str(topic.why),
        )
    counters, damage, skipped = topic.counters, topic.damage_found, topic.skipped
    interval = topic.applied.flush_interval
    message = admin_pb2.Topic(
        name=topic.name,
        incarnation=topic.incarnation,
        term=topic.term,
        state=topic.state.value,  # type: ignore[arg-type]
        policy=policy_to_proto(topic.applied),
        set_policy=policy_to_proto(topic.policy),
        first_index=topic.first_index,
        last=topic.certain_position.to_proto(),
        producers=topic.producers.known_count(),
        log_bytes=topic.log_bytes,
        snapshot_index=topic.keeper.snapshot_index,
        not_dup=counters.not_dup,
        dup=counters.dup,
        unknown=counters.unknown,
        refused=counters.refused,
        why=topic.why,
        resets=counters.resets,
        purged=counters.purged,
        resumed_after_purge=counters.resumed_after_purge,
        damaged_places=damage.places,
        damaged_messages=damage.messages,
        log_void=skipped.void,
        log_repeats=skipped.repeats,
        log_foreign=skipped.foreign,
        log_earlier=skipped.earlier,
        entry_format=ENTRY_FORMATS[topic.entry_format],
        may_lose_messages=0 if interval.is_every_commit else interval.messages - 1,
        may_lose_ms=0 if interval.is_every_commit else interval.ms,
        not_durable_messages=topic.not_durable,
    )
    _fill_window(message, topic)
    return message


def _fill_window(message: admin_pb2.Topic, topic: TopicBase) -> None:
    """Set how the topic distinguishes messages, and how far back it can recognize duplicates."""
    window = topic.window
    if window is None:
        # For a topic without a snapshot, this is not known before its log is read.
        if topic.knows_its_end:
            message.deduplication_mode = admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID
        return
    message.deduplication_mode = admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    if topic.policy.route is not None:
        message.deduplication_route = topic.policy.route.value  # type: ignore[assignment]
    message.window_first_index = message.window_forgotten = window.first_index
    message.window_first_publish_time_ms = window.first_time_ms
    if window.first_index and not len(window):
        # Everything in the window is forgotten, and the time is not known: only messages from now on will be known.
        message.window_first_publish_time_ms = time.time_ns() // 1_000_000
    message.window_messages = len(window)
    message.window_memory_bytes = window.memory_bytes
    if topic.policy.imported is not None:
        message.window_imported = topic.policy.imported.ids
    if isinstance(topic, Topic):
        message.window_memory_bytes += topic.ids.imported.memory_bytes
        message.window_imported_missing = topic.ids.imported.is_missing
    message.window_messages_on_disk = window.on_disk


# -- Events of the last minutes in the topics, by interval.

INTERVAL_SECONDS = 3.0

INTERVALS = 200
"""The number of intervals that are kept: ten minutes."""

MAX_HISTORIES = 5_000
"""The maximum number of topics with a history, among the topics with recent events. Other topics have none. A history
takes 4 kB."""

TOPICS_AT_ONCE = 256
"""The number of topics whose counters are read in one step of the event loop."""

SERIES = ("not_dup", "dup", "unknown", "refused", "stored_bytes")
"""Fields of `Activity`, and counters of a topic."""

NOT_DUP, DUP, UNKNOWN, REFUSED = range(4)
"""Places in SERIES."""

_MOST = 2**32 - 1
_NOTHING = (0,) * len(SERIES)
_PLACES = INTERVALS + 1
"""One interval more than is shown: the interval that is being written."""

Counts = tuple[int, ...]
"""One count for each series."""

_counted: Callable[[TopicCounters], Counts] = attrgetter(*SERIES)


@dataclass(slots=True)
class Past:
    """The recent events in a topic, or in all topics."""

    ring: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((len(SERIES), _PLACES), np.uint32))
    last: Counts = _NOTHING
    """The counts of the last interval."""
    sums: Counts = _NOTHING
    """The sums over all intervals that are kept."""
    quiet_intervals: int = 0
    """The number of intervals since the last event."""

    def add(self, place: int, counts: Counts) -> None:
        """Add the counts of a completed interval. They replace the counts of the oldest interval."""
        gone = self.ring[:, place].tolist()
        self.last = tuple(min(count, _MOST) for count in counts)
        self.sums = tuple(s + n - g for s, n, g in zip(self.sums, self.last, gone, strict=True))
        self.ring[:, place] = self.last
        self.quiet_intervals = 0 if any(counts) else self.quiet_intervals + 1


class RecentActivity:
    """The recent events in `topics`, from `begin` on."""

    def __init__(self, topics: Topics[Any]) -> None:
        self._topics = topics
        self._ended = 0
        """The number of completed intervals."""
        self._all = Past()
        self._pasts: dict[str, Past] = {}
        self._before: dict[str, Counts] = {}
        """The counters at the end of the last interval."""
        self._told: deque[Counter[str]] = deque(maxlen=_PLACES)
        """The counts of refusals by reason at the end of each interval, the oldest first."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the counters once in each interval from now on, until the topics are drained."""
        if self._task is None and not self._topics.is_draining:
            self.look()
            self._task = self._topics.in_background(self._run())

    def look(self) -> None:
        """Begin the first interval."""
        self._before = {topic.name: _counted(topic.counters) for topic in self._topics.registry.open_topics()}
        self._told.append(refusals.copy())

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock()
        while True:
            end = max(end + INTERVAL_SECONDS, clock())
            await asyncio.sleep(end - clock())
            await self.end_interval()

    async def end_interval(self) -> None:
        """End an interval, and begin the next one."""
        place = self._ended % _PLACES
        total = _NOTHING
        seen: dict[str, Counts] = {}
        for k, topic in enumerate(self._topics.registry.open_topics()):
            name = topic.name
            if k % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            now = seen[name] = _counted(topic.counters)
            # A topic that was opened meanwhile counts from 0.
            before = self._before.get(name, _NOTHING)
            past = self._pasts.get(name)
            counts = _NOTHING
            if now != before:
                # If a count is lower than before, the topic was opened again.
                counts = tuple(n - b if n >= b else n for n, b in zip(now, before, strict=True))
                total = tuple(t + c for t, c in zip(total, counts, strict=True))
                if past is None and len(self._pasts) < MAX_HISTORIES:
                    past = self._pasts[name] = Past()
            if past is not None:
                past.add(place, counts)
        self._all.add(place, total)
        self._before = seen
        self._told.append(refusals.copy())
        self._ended += 1
        for name in [
            name for name, past in self._pasts.items() if name not in seen or past.quiet_intervals > INTERVALS
        ]:
            del self._pasts[name]

    # -- the history for answers -------------------------------------------------------------------------------

    def past(self, name: str) -> Past | None:
        """Return the history of a topic by its full name; None if there were no events, or the topic has no history."""
        return self._pasts.get(name)

    def activity(self, past: Past | None = None) -> admin_pb2.Activity:
        """Return a history as a message; without an argument, the history of all topics."""
        shown = min(self._ended, INTERVALS)
        places = np.arange(self._ended - shown, self._ended) % _PLACES
        values = (past or self._all).ring[:, places].tolist()
        return admin_pb2.Activity(**dict(zip(SERIES, values, strict=True)))

    def refusals(self) -> list[admin_pb2.ReasonCount]:
        """Return the refusals of the last minutes by reason, the most frequent first."""
        since = refusals - self._told[0] if self._told else Counter[str]()
        return [admin_pb2.ReasonCount(reason=reason, count=count) for reason, count in since.most_common()]


# -- The answer, for the requested topics.

DEFAULT_TOPICS = 50
MAX_TOPICS = 500
"""The most topics in one answer."""

AnyTopic = TopicBase | Closed
Key = Callable[[AnyTopic, Past], tuple[Any, ...]]

_NO_PAST = Past()


def _rows(counts: Counts) -> int:
    return counts[NOT_DUP] + counts[DUP] + counts[UNKNOWN]


def _by_rate(_topic: AnyTopic, past: Past) -> tuple[Any, ...]:
    return -_rows(past.last), -_rows(past.sums)


def _by_state(topic: AnyTopic, _past: Past) -> tuple[Any, ...]:
    return (_STATES.index(topic.state),)


def _by_snapshot(topic: AnyTopic, _past: Past) -> tuple[Any, ...]:
    return (0 if isinstance(topic, Closed) else topic.keeper.snapshot_index - topic.confirmed_index,)


_STATES = (*WORST_FIRST, State.SERVING)

_ORDERS: dict[int, Key] = {
    admin_pb2.STATISTICS_ORDER_UNSPECIFIED: _by_rate,
    admin_pb2.STATISTICS_ORDER_RATE: _by_rate,
    admin_pb2.STATISTICS_ORDER_NAME: lambda _topic, _past: (),
    admin_pb2.STATISTICS_ORDER_STATE: _by_state,
    admin_pb2.STATISTICS_ORDER_TROUBLE: lambda _topic, past: (-past.sums[UNKNOWN] - past.sums[REFUSED],),
    admin_pb2.STATISTICS_ORDER_SNAPSHOT: _by_snapshot,
}


class Statistics:
    """The statistics of this process's topics. `warnings` has the logged warnings."""

    def __init__(self, topics: Topics[Any], is_serving: Callable[[], bool], warnings: LastWarnings) -> None:
        self._topics = topics
        self.is_serving = is_serving
        self._warnings = warnings
        self._began = time.monotonic()
        self.history = RecentActivity(topics)

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        return {"GetStatistics": unary(admin_pb2.GetStatisticsRequest, self.get_statistics)}

    @property
    def uptime_seconds(self) -> int:
        return int(time.monotonic() - self._began)

    async def get_statistics(self, request: admin_pb2.GetStatisticsRequest) -> admin_pb2.GetStatisticsResponse:
        """Return the statistics. Raises INVALID_REQUEST, TOPIC_NOT_FOUND, as `Topics.look_at`."""
        self.history.begin()
        _check(request)
        # Works also while it is unknown whether there are more topics.
        every: dict[str, AnyTopic] = self._topics.found()
        names = self._names(request, every)
        page = names[request.offset : request.offset + (request.limit or DEFAULT_TOPICS)]
        states = Counter(topic.state for topic in every.values())
        return admin_pb2.GetStatisticsResponse(
            version=version("seqdedupe"),
            uptime_seconds=self.uptime_seconds,
            is_serving=self.is_serving(),
            now_ms=time.time_ns() // 1_000_000,
            interval_ms=int(INTERVAL_SECONDS * 1000),
            activity=self.history.activity(),
            states=[
                admin_pb2.StateCount(state=state.value, topics=states[state])  # type: ignore[arg-type]
                for state in _STATES
                if states[state]
            ],
            topics=[self._topic(name, every[name]) for name in page],
            topics_found=len(names),
            warnings=self._warnings.newest_first(),
            refusals=self.history.refusals(),
            replay_left_messages=sum(replay_left_messages(topic) for topic in every.values()),
        )

    def _names(self, request: admin_pb2.GetStatisticsRequest, every: dict[str, AnyTopic]) -> list[str]:
        """Return the names of the requested topics, in the requested order."""
        if request.topic:
            topic = self._topics.look_at(request.topic)
            return [topic.record.name if isinstance(topic, Closed) else topic.name]
        wanted = request.search.casefold()
        key, pasts = _ORDERS[request.order], self.history
        keyed = [
            (*key(topic, pasts.past(name) or _NO_PAST), name)
            for name, topic in every.items()
            if wanted in name.casefold()
        ]
        return [name for *_, name in sorted(keyed)]

    def _topic(self, name: str, topic: AnyTopic) -> admin_pb2.TopicStatistics:
        past = self.history.past(name)
        return admin_pb2.TopicStatistics(
            topic=topic_to_proto(topic, self._topics.partitions_beside(name)),
            activity=self.history.activity(past) if past is not None else None,
            replay_left_messages=replay_left_messages(topic),
            snapshot_age_ms=int(snapshot_age_seconds(topic) * 1000),
        )


def _check(request: admin_pb2.GetStatisticsRequest) -> None:
    if request.offset < 0:
        raise error("INVALID_REQUEST", f"offset is {request.offset}: it should be 0 or more")
    if not 0 <= request.limit <= MAX_TOPICS:
        raise error("INVALID_REQUEST", f"limit is {request.limit}: it should be 0 to {MAX_TOPICS}")
    if request.order not in _ORDERS:
        raise error("INVALID_REQUEST", f"order is {request.order}, which this version does not know")


def replay_left_messages(topic: TopicBase | Closed) -> int:
    """Return the number of messages that are known to be in the log and that recovery has not read yet."""
    return 0 if isinstance(topic, Closed) or topic.knows_its_end else topic.readable_index - topic.confirmed_index


def snapshot_age_seconds(topic: TopicBase | Closed) -> float:
    """Return the time since the last durable snapshot, or since the topic was opened; 0 if the snapshot covers all
    messages."""
    if isinstance(topic, Closed) or topic.confirmed_index <= topic.keeper.snapshot_index:
        return 0.0
    return asyncio.get_running_loop().time() - topic.keeper.snapshotter.durable_at
