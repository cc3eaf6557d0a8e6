"""How the sidecar does, for people who look at it: what `AdminService.GetStatistics` answers, and the page shows."""

import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from broker_sidecar.history import DUP, INTERVAL_SECONDS, NOT_DUP, REFUSED, UNKNOWN, Counts, History, Past
from broker_sidecar.last_warnings import LastWarnings
from broker_sidecar.topics import WORST_FIRST, replay_left_messages, snapshot_age_seconds, topic_to_proto
from seqdedupe.errors import error
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.registry import Closed
from seqdedupe.v1 import admin_pb2

DEFAULT_TOPICS = 50
MAX_TOPICS = 500
"""In one answer."""

AnyTopic = TopicBase | Closed
Key = Callable[[AnyTopic, Past], tuple[Any, ...]]

_NO_PAST = Past()


def _rows(counts: Counts) -> int:
    return counts[NOT_DUP] + counts[DUP] + counts[UNKNOWN]


def _by_state(topic: AnyTopic, _past: Past) -> tuple[Any, ...]:
    return (_STATES.index(topic.state),)


def _by_snapshot(topic: AnyTopic, _past: Past) -> tuple[Any, ...]:
    return (0 if isinstance(topic, Closed) else topic.keeper.snapshot_index - topic.confirmed_index,)


_STATES = (*WORST_FIRST, State.SERVING)

_ORDERS: dict[int, Key] = {
    admin_pb2.STATISTICS_ORDER_RATE: lambda _topic, past: (-_rows(past.last), -_rows(past.sums)),
    admin_pb2.STATISTICS_ORDER_NAME: lambda _topic, _past: (),
    admin_pb2.STATISTICS_ORDER_STATE: _by_state,
    admin_pb2.STATISTICS_ORDER_TROUBLE: lambda _topic, past: (-past.sums[UNKNOWN] - past.sums[REFUSED],),
    admin_pb2.STATISTICS_ORDER_SNAPSHOT: _by_snapshot,
}
_ORDERS[admin_pb2.STATISTICS_ORDER_UNSPECIFIED] = _ORDERS[admin_pb2.STATISTICS_ORDER_RATE]


class Statistics:
    """Those of this process's topics. `warnings` has what was logged."""

    def __init__(self, topics: Topics[Any], is_serving: Callable[[], bool], warnings: LastWarnings) -> None:
        self._topics = topics
        self._is_serving = is_serving
        self._warnings = warnings
        self._began = time.monotonic()
        self.history = History(topics)

    @property
    def uptime_seconds(self) -> int:
        return int(time.monotonic() - self._began)

    async def answer(self, request: admin_pb2.GetStatisticsRequest) -> admin_pb2.GetStatisticsResponse:
        """Raises INVALID_REQUEST, TOPIC_NOT_FOUND, as `Topics.look_at`."""
        self.history.begin()
        _check(request)
        # Also while it is not known whether there are more.
        every: dict[str, AnyTopic] = self._topics.found()
        names = self._names(request, every)
        page = names[request.offset : request.offset + (request.limit or DEFAULT_TOPICS)]
        states = Counter(topic.state for topic in every.values())
        return admin_pb2.GetStatisticsResponse(
            version=version("seqdedupe"),
            uptime_seconds=self.uptime_seconds,
            is_serving=self._is_serving(),
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
        """Of the topics that are asked for, in their order."""
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
