"""The metrics, by name: what Prometheus is shown of what was counted and looked at."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from broker_sidecar.metrics.calls import Method
from broker_sidecar.metrics.topics import COUNTED, Looked
from seqdedupe.buckets import Buckets

_VERDICTS = ("not_dup", "dup", "unknown")

_COUNTED_BY_TOPIC = {
    "counters.stored_bytes": ("seqdedupe_stored_bytes", "Bytes of batches that were stored."),
    "counters.refused": ("seqdedupe_refused_frames", "Frames, and checks of brokers, that were refused."),
}

_COUNTED_IN_ALL = {
    "counters.log_failures": ("seqdedupe_log_failures", "Times that a log failed to take what it was given."),
    "counters.recoveries": ("seqdedupe_recoveries", "Times that a topic was recovered."),
    "counters.replayed": ("seqdedupe_replayed_messages", "Messages that were read to recover topics."),
    "counters.recovery_seconds": ("seqdedupe_recovery_seconds", "Time that recovering topics took, each by itself."),
    "counters.resets": ("seqdedupe_producer_resets", "Producers that an operator set back."),
    "counters.purged": ("seqdedupe_purged_producers", "Producers that were forgotten, as their topics' policies say."),
    "counters.resumed_after_purge": (
        "seqdedupe_resumed_after_purge",
        "Sessions resumed of producers that were forgotten: what they send again is new, stored or not.",
    ),
    "snapshotter.taken": ("seqdedupe_snapshots", "Snapshots of topics that became durable."),
    "snapshotter.failed": ("seqdedupe_snapshot_failures", "Snapshots of topics that could not be stored."),
}

_NOW_BY_TOPIC = {
    "in_flight_frames": ("seqdedupe_in_flight_frames", "Frames handed to the log, and not settled."),
    "in_flight_bytes": ("seqdedupe_in_flight_bytes", "Bytes handed to the log, and not settled."),
    "max_in_flight_seconds": ("seqdedupe_in_flight_age_seconds", "How long the oldest of them has been in flight."),
    "log_bytes": ("seqdedupe_log_bytes", "Size of the logs of open topics."),
    "producers": ("seqdedupe_producers", "Producer names that open topics hold."),
    "window_messages": ("seqdedupe_window_messages", "Deduplication IDs of stored messages that are known."),
    "window_messages_on_disk": ("seqdedupe_window_messages_on_disk", "Those of them that lie on disk, not in memory."),
    "window_forgotten": ("seqdedupe_window_forgotten_messages", "Messages whose deduplication IDs were forgotten."),
    "window_bytes": ("seqdedupe_window_bytes", "Memory that the windows of deduplication IDs take."),
    "max_window_age_seconds": (
        "seqdedupe_window_age_seconds",
        "How long ago the oldest message was published whose deduplication ID is known; the most of any.",
    ),
    "window_imported": ("seqdedupe_window_imported", "Deduplication IDs that were imported, until all have expired."),
    "window_imported_missing": (
        "seqdedupe_window_imported_missing",
        "Topics that take no messages, because what was imported into them is not in the store.",
    ),
    "max_snapshot_distance_messages": (
        "seqdedupe_snapshot_distance_messages",
        "Messages after the last durable snapshot of a topic, which a recovery would read; the most of any.",
    ),
    "max_snapshot_age_seconds": (
        "seqdedupe_snapshot_age_seconds",
        "Time since the last durable snapshot of a topic that has messages after it, or since it was opened; the most "
        "of any.",
    ),
    "max_reader_lag_messages": (
        "seqdedupe_reader_lag_messages",
        "Messages that a stream of a reader could have and has not been sent; the most of any.",
    ),
}

_NOW_IN_ALL = {
    "not_durable_messages": (
        "seqdedupe_not_durable_messages",
        "Messages that were acknowledged before they are durable, as their topics' flush policies allow.",
    ),
    "replay_left_messages": (
        "seqdedupe_replay_left_messages",
        "Messages known to be in the logs of topics that are recovering, and not read yet.",
    ),
    "damaged_places": ("seqdedupe_damaged_places", "Places at which a scrub has found damage in the logs."),
    "damaged_messages": ("seqdedupe_damaged_messages", "Messages in them, as far as that is known."),
}


def of_topics(looked: Looked) -> Iterator[Metric]:
    """What the topics count, and how they are."""
    place = {name: k for k, name in enumerate(COUNTED)}
    verdicts = CounterMetricFamily("seqdedupe_messages", "Messages judged, by verdict.", labels=("topic", "verdict"))
    for topic, sums in looked.counted.items():
        for verdict in _VERDICTS:
            verdicts.add_metric((topic, verdict), sums[place[f"counters.{verdict}"]])
    yield verdicts
    for name, (metric, about) in _COUNTED_BY_TOPIC.items():
        counter = CounterMetricFamily(metric, about, labels=("topic",))
        for topic, sums in looked.counted.items():
            counter.add_metric((topic,), sums[place[name]])
        yield counter
    for name, (metric, about) in _COUNTED_IN_ALL.items():
        yield counter_of(metric, about, sum(sums[place[name]] for sums in (looked.gone, *looked.counted.values())))
    for name, (metric, about) in _NOW_BY_TOPIC.items():
        gauge = GaugeMetricFamily(metric, about, labels=("topic",))
        for topic, now in looked.now.items():
            gauge.add_metric((topic,), getattr(now, name))
        yield gauge
    for name, (metric, about) in _NOW_IN_ALL.items():
        yield gauge_of(metric, about, sum(getattr(now, name) for now in looked.now.values()))
    states = GaugeMetricFamily("seqdedupe_topics", "Topics, by state.", labels=("state",))
    for state, count in looked.states.items():
        states.add_metric((state,), count)
    yield states


def of_calls(methods: Iterable[Method]) -> Iterator[Metric]:
    """What is counted of RPCs, under the names that they have everywhere."""
    labels = ("grpc_type", "grpc_service", "grpc_method")
    started = CounterMetricFamily("grpc_server_started", "RPCs begun.", labels=labels)
    handled = CounterMetricFamily("grpc_server_handled", "RPCs ended, by code.", labels=(*labels, "grpc_code"))
    received = CounterMetricFamily("grpc_server_msg_received", "Messages received in RPCs.", labels=labels)
    sent = CounterMetricFamily("grpc_server_msg_sent", "Messages sent in RPCs.", labels=labels)
    seconds = HistogramMetricFamily("grpc_server_handling_seconds", "How long RPCs took that ended.", labels=labels)
    for method in methods:
        values = (method.kind, method.service, method.name)
        started.add_metric(values, method.started)
        received.add_metric(values, method.received)
        sent.add_metric(values, method.sent)
        for code, count in list(method.handled.items()):
            handled.add_metric((*values, code), count)
        seconds.add_metric(values, *_cumulated(method.seconds))
    yield from (started, handled, received, sent, seconds)


def counter_of(name: str, about: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name, about, value=value)


def gauge_of(name: str, about: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, about, value=value)


def histogram_of(name: str, about: str, buckets: Buckets) -> Metric:
    """A histogram without labels."""
    found, total = _cumulated(buckets)
    return HistogramMetricFamily(name, about, found, total)


def by_label(metric: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    """A metric with one label and a value for each."""
    for label, value in values:
        metric.add_metric((label,), value)
    return metric


def _cumulated(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """Each bound with how many values do not exceed it, and the sum of all."""
    bounds = (*(str(float(bound)) for bound in buckets.bounds), "+Inf")
    return list(zip(bounds, accumulate(map(float, list(buckets.counts))), strict=True)), buckets.sum
