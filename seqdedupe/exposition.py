"""`/metrics`: metrics in the text format that Prometheus asks for, of a sidecar and of services. Needs
prometheus-client."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from seqdedupe.figures import Buckets
from seqdedupe.http_server import LOOP_SECONDS, Request, Response

FRESH_SECONDS = 0.5
"""Who asks again within so long is shown the same: however often it is asked, looking costs little."""


class Exposition(Collector):
    """The route: what `collect` gives, and the process's own metrics. Numbers of one answer may be some milliseconds
    apart."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._one_at_a_time = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        """By content type: when, and what."""

    def __call__(self, request: Request) -> Response:
        """What is asked for at `/metrics`. Raises TimeoutError if an event loop stands still."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        if not self._one_at_a_time.acquire(timeout=LOOP_SECONDS):
            raise TimeoutError
        try:
            made_at, body = self._made.get(content_type, (-FRESH_SECONDS, b""))
            if time.monotonic() - made_at >= FRESH_SECONDS:
                body = encode(self._registry)
                self._made[content_type] = time.monotonic(), body
        finally:
            self._one_at_a_time.release()
        return Response(body, content_type)

    def collect(self) -> Iterator[Metric]:
        """All but those of the process."""
        return self._collect()

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not look to know the names."""
        return []


def counter_of(name: str, about: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name, about, value=value)


def gauge_of(name: str, about: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, about, value=value)


def histogram_of(name: str, about: str, buckets: Buckets) -> Metric:
    """A histogram without labels."""
    found, total = cumulated(buckets)
    return HistogramMetricFamily(name, about, found, total)


def by_label(metric: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    """A metric with one label and a value for each."""
    for label, value in values:
        metric.add_metric((label,), value)
    return metric


def cumulated(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """Each bound with how many values do not exceed it, and the sum of all."""
    bounds = (*(str(float(bound)) for bound in buckets.bounds), "+Inf")
    return list(zip(bounds, accumulate(map(float, list(buckets.counts))), strict=True)), buckets.sum
