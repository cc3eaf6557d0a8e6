"""`/metrics`: metrics in the Prometheus text format, for a sidecar and for services. Needs prometheus-client."""

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
"""Requests within this time get the same answer, so that many requests cost little."""


class Exposition(Collector):
    """The route: the metrics of `collect`, and the process's own. Numbers may be some milliseconds apart."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._one_at_a_time = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        """By content type: the time, and the answer."""

    def __call__(self, request: Request) -> Response:
        """Return the answer for `/metrics`. Raises TimeoutError if an event loop is stuck."""
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
        """Return all metrics except those of the process."""
        return self._collect()

    def describe(self) -> list[Metric]:
        """Return nothing: so the registry does not collect just to learn the names."""
        return []


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
    """Return a metric with one label and a value for each."""
    for label, value in values:
        metric.add_metric((label,), value)
    return metric


def cumulated(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """Return each bound with the number of values that do not exceed it, and the sum of all values."""
    bounds = (*(str(float(bound)) for bound in buckets.bounds), "+Inf")
    return list(zip(bounds, accumulate(map(float, list(buckets.counts))), strict=True)), buckets.sum
