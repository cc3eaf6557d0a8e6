"""`/metrics`: counts and states of topics and of the process, in the Prometheus format."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import InfoMetricFamily, Metric

from broker_sidecar import rpc
from broker_sidecar.config import Config
from broker_sidecar.connections import TcpConnections
from broker_sidecar.data import Data
from broker_sidecar.rpc import Method, MethodCounts
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.services.read_service import Reading, ReadService
from broker_sidecar.services.statistics import replay_left_messages, snapshot_age_seconds
from broker_sidecar.streams import Streams
from seqdedupe.errors import REASONS
from seqdedupe.figures import Buckets, first_unread
from seqdedupe.format import jit
from seqdedupe.http_server import Exposition, on_loop
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import Admitted
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.backup import is_in_future

if TYPE_CHECKING:
    from broker_sidecar.door.door import Door

# -- All topics looked at together, for a scrape: sums of their counts, and their current states.
#
# A few topics have separate series, by name; the others share one. With a name for each of ten thousand topics, a
# scrape would have a hundred thousand lines, which block the interpreter for half a second. Sums over the series are
# still correct, and `seqdedupe topics` shows each topic.

MAX_NAMED = 100
"""The maximum number of topics with separate series. If there are more topics, the topics whose counts first rose above
zero have separate series."""

OTHER = "other"
"""The series of the other topics. No topic has this full name."""

AT_ONCE = 128
"""The number of topics looked at in one step of the event loop, within a millisecond or two."""

WAITING = "waiting"
"""The state of a topic that has not been opened since the start."""

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
    "keeper.snapshotter.taken",
    "keeper.snapshotter.failed",
)
"""A topic's numbers that only increase, by their attribute path."""

_counted = attrgetter(*COUNTED)
_NOTHING = (0,) * len(COUNTED)


@dataclass(slots=True)
class Now:
    """The state of the topics of one series. A value is the sum over the topics. For a name with `max`, the value is
    the maximum."""

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
    max_cursor_lag_messages: int = 0
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
    """The figures of all topics at one moment, by series. A series has a topic's name, or is OTHER."""

    now: dict[str, Now]
    counted: dict[str, list[float]]
    """The counts in the order of COUNTED, since this process began, or since the topic was created."""
    gone: list[float]
    """The counts of topics whose series have ended."""
    states: Counter[str]


class TopicsTally:
    """The counts of all topics since this process began, including topics that no longer exist."""

    def __init__(self, topics: Topics[Any]) -> None:
        self._topics = topics
        self._named: set[str] = set()
        self._sums: dict[str, list[float]] = {}
        self._gone = [0.0] * len(COUNTED)
        self._seen: dict[str, tuple[object, tuple[float, ...]]] = {}
        """By topic: its counters object, and the values that the last look has read."""

    async def look(self, readings: Iterable[Reading]) -> Looked:
        """Look at all topics, some in each step of the event loop. Only one look may run at a time."""
        topics = self._topics
        live = topics.registry.open_topics()
        states = Counter(dict.fromkeys(STATES, 0))
        states[WAITING] = len(topics.waiting)
        for closed in topics.registry.closed_topics():
            states[closed.state.name.lower()] += 1
        # They are also counted among the closed ones.
        states[State.RECOVERING.name.lower()] -= states[WAITING]
        are_few = len(topics.registry) <= MAX_NAMED
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
        """End the series of topics that no longer exist, so that other topics may have a series."""
        for name in self._named - self._topics.registry.names():
            self._named.discard(name)
            for k, gone in enumerate(self._sums.pop(name, ())):
                self._gone[k] += gone

    def _add(self, series: str, topic: TopicBase, counted: tuple[float, ...]) -> None:
        counters, before = self._seen.get(topic.name, (None, _NOTHING))
        if counters is not topic.counters:
            # The topic was opened again, or is a different topic of the same name, so its counts start at 0.
            before = _NOTHING
        # Set this at once: a look may be cancelled.
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
    distance = max(topic.confirmed_index - topic.keeper.snapshot_index, 0)
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
    if isinstance(topic, Topic):
        now.window_bytes += topic.ids.imported.memory_bytes
        now.window_imported += topic.policy.imported.ids if topic.policy.imported is not None else 0
        now.window_imported_missing += topic.ids.imported.is_missing
        for cursor in topic.policy.cursors:
            # A cursor of another incarnation or topic is before all messages of this topic.
            first_index = first_unread(cursor.position, topic.incarnation, topic.log.first_index)
            now.max_cursor_lag_messages = max(now.max_cursor_lag_messages, topic.readable_index - first_index)
    if isinstance(topic, Topic) and (frames := len(topic.flight)):
        now.in_flight_frames += frames
        now.in_flight_bytes += topic.flight.bytes
        now.not_durable_messages += topic.not_durable
        if isinstance(oldest := topic.flight.oldest, Admitted):
            since = asyncio.get_running_loop().time() - oldest.since_seconds
            now.max_in_flight_seconds = max(now.max_in_flight_seconds, since)


# -- The metrics, by name: how counts and states are shown to Prometheus.

_VERDICTS = ("not_dup", "dup", "unknown")

_COUNTED_BY_TOPIC = {
    "counters.stored_bytes": ("seqdedupe_stored_bytes", "Bytes of stored batches."),
    "counters.refused": (
        "seqdedupe_refused_frames",
        "Refused frames of clients, and refused checks of brokers.",
    ),
}

_COUNTED_IN_ALL = {
    "counters.log_failures": ("seqdedupe_log_failures", "Failures to append to a log."),
    "counters.recoveries": ("seqdedupe_recoveries", "Recoveries of topics."),
    "counters.replayed": ("seqdedupe_replayed_messages", "Messages that were read to recover topics."),
    "counters.recovery_seconds": ("seqdedupe_recovery_seconds", "Time that recoveries took, summed over topics."),
    "counters.resets": ("seqdedupe_producer_resets", "Producers whose sequence ID an operator has reset."),
    "counters.purged": (
        "seqdedupe_purged_producers",
        "Producers forgotten because of the inactivity policy.",
    ),
    "counters.resumed_after_purge": (
        "seqdedupe_resumed_after_purge",
        "Resumed sessions of forgotten producers. Messages that these sessions resend are stored again.",
    ),
    "keeper.snapshotter.taken": ("seqdedupe_snapshots", "Snapshots that became durable."),
    "keeper.snapshotter.failed": ("seqdedupe_snapshot_failures", "Snapshots that could not be stored."),
}

_NOW_BY_TOPIC = {
    "in_flight_frames": ("seqdedupe_in_flight_frames", "Frames whose append to the log has no outcome yet."),
    "in_flight_bytes": ("seqdedupe_in_flight_bytes", "Bytes of the frames in flight."),
    "max_in_flight_seconds": ("seqdedupe_in_flight_age_seconds", "Age of the oldest frame in flight."),
    "log_bytes": ("seqdedupe_log_bytes", "Bytes in the logs of open topics."),
    "producers": ("seqdedupe_producers", "Producers that open topics remember."),
    "window_messages": ("seqdedupe_window_messages", "Known deduplication IDs."),
    "window_messages_on_disk": ("seqdedupe_window_messages_on_disk", "Known deduplication IDs that are not in memory."),
    "window_forgotten": ("seqdedupe_window_forgotten_messages", "Messages whose deduplication IDs were forgotten."),
    "window_bytes": ("seqdedupe_window_bytes", "Memory of the windows of deduplication IDs."),
    "max_window_age_seconds": (
        "seqdedupe_window_age_seconds",
        "Age of the oldest known deduplication ID. `other`: the maximum.",
    ),
    "window_imported": ("seqdedupe_window_imported", "Imported deduplication IDs, until all have expired."),
    "window_imported_missing": (
        "seqdedupe_window_imported_missing",
        "Topics that accept no messages because the store has lost their imported IDs.",
    ),
    "max_snapshot_distance_messages": (
        "seqdedupe_snapshot_distance_messages",
        "Messages after a topic's last durable snapshot. `other`: the maximum.",
    ),
    "max_snapshot_age_seconds": (
        "seqdedupe_snapshot_age_seconds",
        "Age of the last durable snapshot (or the opening) of a topic with later messages. `other`: the maximum.",
    ),
    "max_reader_lag_messages": (
        "seqdedupe_reader_lag_messages",
        "Messages not sent yet to the slowest reader. `other`: the maximum.",
    ),
    "max_cursor_lag_messages": (
        "seqdedupe_cursor_lag_messages",
        "Messages after the cursor that is furthest behind, even without a connected reader. `other`: the maximum.",
    ),
}

_NOW_IN_ALL = {
    "not_durable_messages": (
        "seqdedupe_not_durable_messages",
        "Acknowledged messages that are not durable yet, under a flush policy.",
    ),
    "replay_left_messages": (
        "seqdedupe_replay_left_messages",
        "Messages that recovering topics still have to read.",
    ),
    "damaged_places": ("seqdedupe_damaged_places", "Damaged places in the logs, found by the scrub."),
    "damaged_messages": ("seqdedupe_damaged_messages", "Messages in damaged places, if the sidecar can count them."),
}


def of_topics(looked: Looked) -> Iterator[Metric]:
    """Yield the counts and the states of the topics."""
    place = {name: k for k, name in enumerate(COUNTED)}
    verdicts = CounterMetricFamily(
        "seqdedupe_messages", "Messages that received this verdict.", labels=("topic", "verdict")
    )
    for topic, sums in looked.counted.items():
        for verdict in _VERDICTS:
            verdicts.add_metric((topic, verdict), sums[place[f"counters.{verdict}"]])
    yield verdicts
    for name, (metric, about) in _COUNTED_BY_TOPIC.items():
        counter = CounterMetricFamily(metric, about, labels=("topic",))
        yield by_label(counter, ((topic, sums[place[name]]) for topic, sums in looked.counted.items()))
    for name, (metric, about) in _COUNTED_IN_ALL.items():
        yield counter_of(metric, about, sum(sums[place[name]] for sums in (looked.gone, *looked.counted.values())))
    for name, (metric, about) in _NOW_BY_TOPIC.items():
        gauge = GaugeMetricFamily(metric, about, labels=("topic",))
        yield by_label(gauge, ((topic, getattr(now, name)) for topic, now in looked.now.items()))
    for name, (metric, about) in _NOW_IN_ALL.items():
        yield gauge_of(metric, about, sum(getattr(now, name) for now in looked.now.values()))
    states = GaugeMetricFamily("seqdedupe_topics", "Topics in this state.", labels=("state",))
    yield by_label(states, looked.states.items())


def of_calls(methods: Iterable[Method]) -> Iterator[Metric]:
    """Yield the counts of RPCs, under their usual names."""
    labels = ("grpc_type", "grpc_service", "grpc_method")
    started = CounterMetricFamily("grpc_server_started", "RPCs begun.", labels=labels)
    handled = CounterMetricFamily("grpc_server_handled", "RPCs ended, by code.", labels=(*labels, "grpc_code"))
    received = CounterMetricFamily("grpc_server_msg_received", "Messages received in RPCs.", labels=labels)
    sent = CounterMetricFamily("grpc_server_msg_sent", "Messages sent in RPCs.", labels=labels)
    seconds = HistogramMetricFamily("grpc_server_handling_seconds", "Time that RPCs took.", labels=labels)
    for method in methods:
        values = (method.kind, method.service, method.name)
        started.add_metric(values, method.started)
        received.add_metric(values, method.received)
        sent.add_metric(values, method.sent)
        for code, count in list(method.handled.items()):
            handled.add_metric((*values, code), count)
        seconds.add_metric(values, *cumulated(method.seconds))
    yield from (started, handled, received, sent, seconds)


# -- The delay of the event loop.

LOOK_SECONDS = 0.1
DELAY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopDelay:
    """Measures the delay of the running event loop every LOOK_SECONDS, from the creation of this object until
    `close`."""

    def __init__(self) -> None:
        self.seconds = Buckets(DELAY_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._wait()

    def _wait(self) -> None:
        self._due = self._loop.time() + LOOK_SECONDS
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.seconds.add(max(0.0, self._loop.time() - self._due))
        self._wait()

    def close(self) -> None:
        self._timer.cancel()


@dataclass(frozen=True)
class Sources:
    """The objects that have the counts."""

    config: Config
    data: Data
    streams: Streams
    connections: TcpConnections
    calls: MethodCounts
    reading: ReadService | None
    """None if a broker's own log holds the messages."""
    door: "Door | None"
    """None if `pulsar_listen` is not set."""
    is_configuration_in_force: Callable[[], bool]
    """Whether the current versions of the files that an operator may replace are in force."""
    authentication: Authentication


class Metrics:
    """The metrics of a sidecar. Create this object on the event loop. `route` is the route of `/metrics`."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._loop = asyncio.get_running_loop()
        self._loop_delay = LoopDelay()
        self._tally = TopicsTally(sources.data.all_topics)
        self.route = Exposition(self._collect)

    def close(self) -> None:
        self._loop_delay.close()

    def _collect(self) -> Iterator[Metric]:
        """Yield all metrics of the sidecar. The metrics of the process are collected elsewhere."""
        yield InfoMetricFamily(
            "seqdedupe_build",
            "The version. The value is always 1.",
            {"version": version("seqdedupe"), "log": self._from.config.log},
        )
        yield gauge_of(
            "seqdedupe_configuration_in_force",
            "1 if the sidecar uses the current content of all replaceable files, else 0.",
            self._from.is_configuration_in_force(),
        )
        yield gauge_of(
            "seqdedupe_kernels_compiled",
            "1 if all kernels are compiled. If the value is 0, the sidecar is slow.",
            not jit.plain_kernels(),
        )
        yield from of_topics(on_loop(self._loop, self._look))
        yield from of_calls(list(self._from.calls.methods.values()))
        refusals = CounterMetricFamily("seqdedupe_refusals", "Errors that callers received.", labels=("reason",))
        # Include reasons that no caller has received yet: Prometheus sees no increase in a series that did not exist
        # before. Also include any reason that this sidecar has passed on from another one.
        told = (reason for reason in REASONS if reason not in rpc.NOT_OF_SIDECARS or rpc.refusals[reason])
        yield by_label(refusals, ((reason, rpc.refusals[reason]) for reason in told))
        yield from self._of_credentials()
        yield from self._of_clients()
        yield from self._of_readers()
        yield from self._of_a_cluster()
        yield from self._of_the_machine()

    async def _look(self) -> Looked:
        reading = self._from.reading
        return await self._tally.look(list(reading.readings) if reading is not None else ())

    def _of_credentials(self) -> Iterator[Metric]:
        labels = ("credential", "subject")
        about = "When a credential in use expires."
        expiry = GaugeMetricFamily("seqdedupe_credential_expiry_timestamp_seconds", about, labels=labels)
        about = "Time from the start of the credential's validity to its expiry. +Inf for a token without a start time."
        lifetime = GaugeMetricFamily("seqdedupe_credential_lifetime_seconds", about, labels=labels)
        for kind, subject, validity in self._from.authentication.credentials():
            expiry.add_metric((kind, subject), validity.ends_seconds)
            lifetime.add_metric((kind, subject), validity.ends_seconds - validity.starts_seconds)
        yield from (expiry, lifetime)
        about = "Calls refused because the subject's token had expired."
        calls = CounterMetricFamily("seqdedupe_expired_token_calls", about, labels=("subject",))
        yield by_label(calls, list(self._from.authentication.expired.calls.items()))

    def _of_clients(self) -> Iterator[Metric]:
        streams = self._from.streams
        yield gauge_of("seqdedupe_streams", "Open streams.", len(streams))
        yield gauge_of("seqdedupe_streams_limit", "The limit of open streams.", streams.limit)
        ended = CounterMetricFamily(
            "seqdedupe_evicted_streams",
            "Streams that the sidecar ended to make room for other streams.",
            labels=("why",),
        )
        yield by_label(ended, (("idle", streams.gave_way), ("unread", streams.unread)))
        connections = self._from.connections
        open_now = GaugeMetricFamily("seqdedupe_connections", "Open TCP connections.", labels=("caller",))
        yield by_label(open_now, zip(("known", "unknown"), connections.count(), strict=True))
        about = "TCP connections that the sidecar has ended."
        ended = CounterMetricFamily("seqdedupe_ended_connections", about, labels=("why",))
        yield by_label(ended, connections.ended.items())
        if (door := self._from.door) is not None:
            yield gauge_of("seqdedupe_door_connections", "Open connections of the door.", door.connections)
            yield gauge_of("seqdedupe_door_producers", "Producers at the door.", door.producers)
            about = "Producers opened at the door, also repeatedly."
            yield counter_of("seqdedupe_door_opened_producers", about, door.opened_producers)
            about = "Entries (batches or single messages) with a receipt of the door."
            yield counter_of("seqdedupe_door_receipts", about, door.receipts)
            yield gauge_of("seqdedupe_door_consumers", "Consumers and readers at the door.", door.consumers)
        budget = streams.budget
        yield gauge_of("seqdedupe_budget_bytes", "Memory held for clients: frames, answers, pages.", budget.held_bytes)
        yield gauge_of("seqdedupe_budget_limit_bytes", "The limit of memory held for clients.", budget.limit_bytes)

    def _of_readers(self) -> Iterator[Metric]:
        if (reading := self._from.reading) is None:
            return
        yield gauge_of("seqdedupe_readers", "Open streams of readers.", len(reading.readings))
        yield counter_of("seqdedupe_sent_messages", "Messages sent to readers.", reading.sent_messages)
        yield counter_of("seqdedupe_sent_bytes", "Bytes of messages sent to readers.", reading.sent_bytes)

    def _of_a_cluster(self) -> Iterator[Metric]:
        cluster = self._from.data.cluster
        looks = cluster.shared.looks if cluster is not None else None
        yield gauge_of(
            "seqdedupe_pulsar_unsafe_topics",
            "Topics that accept no messages because of unsafe policies in Pulsar.",
            len(looks.unsafe) if looks is not None else 0,
        )
        yield gauge_of(
            "seqdedupe_pulsar_policies_seen_timestamp_seconds",
            "When the sidecar last read a Pulsar topic's policies: the earliest time of all topics, or 0.",
            min(list(looks.seen_at.values()), default=0.0) if looks is not None else 0.0,
        )

    def _of_the_machine(self) -> Iterator[Metric]:
        yield gauge_of(
            "seqdedupe_clock_ahead_seconds",
            "How far the clock was ahead of the last trusted time at the start. 0 if less than a day.",
            self._from.data.clock_ahead_ms / 1000,
        )
        if self._from.config.backup_directory:
            yield gauge_of(
                "seqdedupe_backup_timestamp_seconds",
                "When the newest verified backup was made, or 0.",
                # A moment in the future would keep the alert about old backups silent.
                0 if is_in_future(at_us := self._from.data.last_backup.made_at_us) else at_us / 1e6,
            )
        yield histogram_of(
            "seqdedupe_event_loop_delay_seconds",
            "Time by which the event loop ran a timer too late.",
            self._loop_delay.seconds,
        )
        if (committer := self._from.data.committer) is not None:
            yield histogram_of(
                "seqdedupe_sync_seconds", "Time to sync the writes of a commit round.", committer.sync_seconds
            )
            yield histogram_of("seqdedupe_commit_group_batches", "Batches in a commit round.", committer.group_batches)
        disk = os.statvfs(self._from.config.data_directory)
        sizes = (("free", disk.f_bavail * disk.f_frsize), ("all", disk.f_blocks * disk.f_frsize))
        about = "Size and free space of the data directory's file system."
        yield by_label(GaugeMetricFamily("seqdedupe_disk_bytes", about, labels=("part",)), sizes)


# -- Samples.


def counter_of(name: str, about: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(name, about, value=value)


def gauge_of(name: str, about: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, about, value=value)


def histogram_of(name: str, about: str, buckets: Buckets) -> Metric:
    """Return a histogram without labels."""
    found, total = cumulated(buckets)
    return HistogramMetricFamily(name, about, found, total)


def by_label(metric: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    """Return a metric with one label, and with one value for each value of the label."""
    for label, value in values:
        metric.add_metric((label,), value)
    return metric


def cumulated(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """Return each bound with the number of values that do not exceed it, and the sum of all values."""
    bounds = (*(str(float(bound)) for bound in buckets.bounds), "+Inf")
    return list(zip(bounds, accumulate(map(float, list(buckets.counts))), strict=True)), buckets.sum
