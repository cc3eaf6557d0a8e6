"""The sidecar's state for people: the answer of `AdminService.GetStatistics`, which the web page shows too.

`RecentActivity` contains the events in the topics during the last minutes, by interval. It reads the topics' counters
once in each interval. So it costs nothing per message, and almost nothing for an idle topic. `Statistics` creates the
answer for the requested topics.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from broker_sidecar.proto_messages import WORST_FIRST, topic_to_proto
from broker_sidecar.rpc import refusals, unary
from broker_sidecar.telemetry import LastWarnings
from seqdedupe.errors import error
from seqdedupe.topic.base import State, TopicBase, TopicCounters
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.registry import Closed
from seqdedupe.v1 import admin_pb2

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
        """Add the counts of a completed interval, in the place of the oldest one."""
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
