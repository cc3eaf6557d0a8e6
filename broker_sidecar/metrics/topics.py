"""All topics looked at together, for a scrape: sums of what they count, and how they are at the moment.

A few topics have series of their own, by name; the others share one. With a name for each of ten thousand topics a
scrape would be a hundred thousand lines, whose making takes the interpreter for half a second. Sums over the series are
right all the same, and `seqdedupe topics` knows which topic it is.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from broker_sidecar.read import Reading
from broker_sidecar.topics import replay_left_messages, snapshot_age_seconds
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.flight import Admitted
from seqdedupe.topic.logged import LoggedTopic
from seqdedupe.topic.state import State

MAX_NAMED = 100
"""So many topics have series of their own: all if there are no more, else those that something was counted of first."""

OTHER = "other"
"""The others. No topic has such a full name."""

AT_ONCE = 128
"""So many are looked at in one step of the event loop, within a millisecond or two."""

WAITING = "waiting"
"""Of a topic that has not been opened since the start."""

STATES = (*(state.name.lower() for state in State), WAITING)

COUNTED = (
    "counters.not_dup",
    "counters.dup",
    "counters.unknown",
    "counters.stored_bytes",
    "counters.refused",
    "counters.log_failures",
    "counters.recoveries",
    "counters.replayed",
    "counters.recovery_seconds",
    "counters.resets",
    "counters.purged",
    "counters.resumed_after_purge",
    "snapshotter.taken",
    "snapshotter.failed",
)
"""Numbers of a topic that rise only, by where they stand."""

_counted = attrgetter(*COUNTED)
_NOTHING = (0,) * len(COUNTED)


@dataclass(slots=True)
class Now:
    """How the topics of one series are: sums, and of what says max the largest."""

    in_flight_frames: int = 0
    in_flight_bytes: int = 0
    max_in_flight_seconds: float = 0.0
    not_durable_messages: int = 0
    log_bytes: int = 0
    producers: int = 0
    replay_left_messages: int = 0
    max_snapshot_distance_messages: int = 0
    max_snapshot_age_seconds: float = 0.0
    max_reader_lag_messages: int = 0
    damaged_places: int = 0
    damaged_messages: int = 0
    window_messages: int = 0
    window_messages_on_disk: int = 0
    window_forgotten: int = 0
    window_bytes: int = 0
    max_window_age_seconds: float = 0.0
    window_imported: int = 0
    window_imported_missing: int = 0


@dataclass(slots=True)
class Looked:
    """What a look came to. By series: a topic's name, or OTHER."""

    now: dict[str, Now]
    counted: dict[str, list[float]]
    """In the order of COUNTED, since this process began, or since there has been such a topic."""
    gone: list[float]
    """What topics counted whose series have ended."""
    states: Counter[str]


class TopicsTally:
    """What the topics have counted since this process began, whichever of them are still there."""

    def __init__(self, topics: Topics[Any]) -> None:
        self._topics = topics
        self._named: set[str] = set()
        self._sums: dict[str, list[float]] = {}
        self._gone = [0.0] * len(COUNTED)
        self._seen: dict[str, tuple[object, tuple[float, ...]]] = {}
        """By topic, its counters, and what they said."""

    async def look(self, readings: Iterable[Reading]) -> Looked:
        """Looks at all, some in each step of the event loop. One at a time."""
        topics = self._topics
        live = list(topics.live.values())
        states = Counter(dict.fromkeys(STATES, 0))
        states[WAITING] = len(topics.waiting)
        for closed in topics.closed.values():
            states[closed.state.name.lower()] += 1
        # They are among those that are closed.
        states[State.RECOVERING.name.lower()] -= states[WAITING]
        are_few = len(live) + len(topics.closed) <= MAX_NAMED
        now: dict[str, Now] = {}
        for at in range(0, len(live), AT_ONCE):
            for topic in live[at : at + AT_ONCE]:
                states[topic.state.name.lower()] += 1
                counted = _counted(topic)
                series = self._series(topic.name, are_few or counted != _NOTHING)
                self._add(series, topic, counted)
                _look_at(topic, now.setdefault(series, Now()))
            await asyncio.sleep(0)
        self._seen = {topic.name: self._seen[topic.name] for topic in live}
        self._end_series()
        for reading in readings:
            one = now.setdefault(self._series(reading.topic.name, False), Now())
            one.max_reader_lag_messages = max(one.max_reader_lag_messages, reading.lag)
        now.setdefault(OTHER, Now())
        self._sums.setdefault(OTHER, [0.0] * len(COUNTED))
        counted_by_series = {series: list(sums) for series, sums in self._sums.items()}
        return Looked(now, counted_by_series, list(self._gone), states)

    def _series(self, topic: str, is_wanted: bool) -> str:
        if topic in self._named:
            return topic
        if is_wanted and len(self._named) < MAX_NAMED:
            self._named.add(topic)
            return topic
        return OTHER

    def _end_series(self) -> None:
        """Those of topics that are gone: another one may have one instead."""
        for name in self._named - self._topics.live.keys() - self._topics.closed.keys():
            self._named.discard(name)
            for k, gone in enumerate(self._sums.pop(name, ())):
                self._gone[k] += gone

    def _add(self, series: str, topic: TopicBase, counted: tuple[float, ...]) -> None:
        counters, before = self._seen.get(topic.name, (None, _NOTHING))
        if counters is not topic.counters:
            # It was opened again, or is another one, and counts from 0.
            before = _NOTHING
        # At once: a look may be given up.
        self._seen[topic.name] = topic.counters, counted
        if counted != before:
            sums = self._sums.setdefault(series, [0.0] * len(COUNTED))
            for k, (new, old) in enumerate(zip(counted, before, strict=True)):
                sums[k] += new - old


def _look_at(topic: TopicBase, now: Now) -> None:
    damage = topic.damage_found
    now.log_bytes += topic.log_bytes
    now.producers += len(topic.producers)
    now.damaged_places += damage.places
    now.damaged_messages += damage.messages
    distance = max(topic.confirmed_index - topic.snapshot_index, 0)
    now.max_snapshot_distance_messages = max(now.max_snapshot_distance_messages, distance)
    now.max_snapshot_age_seconds = max(now.max_snapshot_age_seconds, snapshot_age_seconds(topic))
    now.replay_left_messages += replay_left_messages(topic)
    if (window := topic.window) is not None:
        now.window_messages += len(window)
        now.window_messages_on_disk += window.on_disk
        now.window_forgotten += window.first_index
        now.window_bytes += window.memory_bytes
        age_seconds = time.time() - window.first_time_ms / 1000 if len(window) else 0.0
        now.max_window_age_seconds = max(now.max_window_age_seconds, age_seconds)
    if isinstance(topic, LoggedTopic):
        now.window_bytes += topic.imported.memory_bytes
        now.window_imported += topic.policy.imported.ids if topic.policy.imported is not None else 0
        now.window_imported_missing += topic.imported.is_missing
    if isinstance(topic, LoggedTopic) and (frames := len(topic.flight)):
        now.in_flight_frames += frames
        now.in_flight_bytes += topic.flight.bytes
        now.not_durable_messages += topic.not_durable
        if isinstance(oldest := topic.flight.oldest, Admitted):
            since = asyncio.get_running_loop().time() - oldest.since_seconds
            now.max_in_flight_seconds = max(now.max_in_flight_seconds, since)
