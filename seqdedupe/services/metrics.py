"""The HTTP server for `/metrics` and `/healthz`, for a process that runs services: `ServiceMetrics`. Needs
prometheus-client."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import InfoMetricFamily, Metric

from seqdedupe.address import SidecarAddress
from seqdedupe.command import json_text
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.http_server import Exposition, Request, Response, Route, WebServer
from seqdedupe.services.activity import Activity, Service, State

logger = logging.getLogger("seqdedupe.services")

LOOK_SECONDS = 5.0
"""The time between two measurements of the lag. Scrapes do not change it."""

MOST_OF_THE_TIME = 0.05
"""The maximum fraction of the time that measurements may take. If a measurement takes long, measurements become less
frequent."""

_KEY = "metrics_listen"


class ServiceMetrics:
    """Serves the metrics of these services. For each service a thread measures the lag every LOOK_SECONDS, and a scrape
    returns the last result. A scrape itself makes no call to a database or a sidecar.

    `listen` is `host:port`. With port 0 the system chooses a free port; `address` contains that port. The server does
    not encrypt, and does not authenticate clients. Raises INVALID_CONFIGURATION if `listen` is not an address, or if
    the server cannot listen there. Raises INSECURE_LISTEN if other machines can reach the address, unless that is
    allowed.
    """

    def __init__(self, listen: str, *services: Service, allow_insecure_listen: bool = False) -> None:
        address = _address(listen)
        if not address.is_local and not allow_insecure_listen:
            why = "nothing is encrypted there, and nobody is asked who they are"
            hint = "Listen on loopback, or allow it: --allow-insecure-listen, in Python allow_insecure_listen=True."
            raise error(
                "INSECURE_LISTEN", f"{_KEY} = {listen!r} can be reached from other machines, and {why}", hint=hint
            )
        self._services = services
        self._over = threading.Event()
        routes: dict[str, Route] = {"/metrics": Exposition(self._collect), "/healthz": self._health}
        self._web = WebServer(address, routes, _KEY)
        self.address = str(self._web.address)
        self._web.begin()
        for service in services:
            threading.Thread(target=self._look, args=(service,), name="seqdedupe-lag", daemon=True).start()

    def close(self) -> None:
        """Stop serving. This may be called several times."""
        self._over.set()
        self._web.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self, service: Service) -> None:
        activity = service.activity
        while not self._over.is_set():
            began = time.monotonic()
            # If the lag cannot be measured now, the last result stays valid. The age of its oldest message still grows.
            if activity.is_at_work:
                try:
                    activity.see(service.look_at_lag())
                except (SeqdedupeError, TimeoutError):
                    pass
                except Exception:
                    logger.warning("the lag of %s %s was not found out", activity.kind, activity.name, exc_info=True)
            took_seconds = time.monotonic() - began
            self._over.wait(max(LOOK_SECONDS, took_seconds / MOST_OF_THE_TIME))

    def _collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "seqdedupe_build", "The version. The value is always 1.", {"version": version("seqdedupe")}
        )
        yield from of_services([service.activity for service in self._services])

    def _health(self, _request: Request) -> Response:
        """Return the state of each service as JSON, with HTTP status 503 if a service has stopped."""
        found = [service.activity for service in self._services]
        told = [{"kind": a.kind, "name": a.name, "state": a.state.value, "reason": a.reason or None} for a in found]
        is_well = all(one["state"] != State.STOPPED.value for one in told)
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(f"{json_text(told)}\n".encode(), "application/json", status)


def _address(listen: str) -> SidecarAddress:
    with suppress(SeqdedupeError):
        address = SidecarAddress.parse(listen)
        if not address.path:
            return address
    raise error("INVALID_CONFIGURATION", f"{_KEY} is {listen!r}: it should be host:port", hint="Write 127.0.0.1:9470.")


_SERVICE = ("kind", "name")

_COUNTED = {
    "messages": ("seqdedupe_service_messages", "Messages that the service has processed."),
    "duplicates": ("seqdedupe_service_duplicates", "Messages skipped because the service had processed them before."),
    "set_aside": ("seqdedupe_service_set_aside_messages", "Parked messages, dead letters and rows set aside."),
}


def of_services(activities: Sequence[Activity]) -> Iterator[Metric]:
    """Yield the counters and states of services."""
    for name, (metric, about) in _COUNTED.items():
        counter = CounterMetricFamily(metric, about, labels=_SERVICE)
        for one in activities:
            counter.add_metric((one.kind, one.name), getattr(one, name))
        yield counter
    about = "Failures of the service for this reason, also of retries."
    failures = CounterMetricFamily("seqdedupe_service_failures", about, labels=(*_SERVICE, "reason"))
    about = "1 for the current state, 0 for the other states."
    states = GaugeMetricFamily("seqdedupe_service_state", about, labels=(*_SERVICE, "state", "reason"))
    about = "When the service last processed a message, or 0."
    success = GaugeMetricFamily("seqdedupe_service_last_success_timestamp_seconds", about, labels=_SERVICE)
    about = "Messages that the service has not processed."
    messages = GaugeMetricFamily("seqdedupe_service_lag_messages", about, labels=_SERVICE)
    about = "Age of the oldest unprocessed message, or 0."
    seconds = GaugeMetricFamily("seqdedupe_service_lag_seconds", about, labels=_SERVICE)
    for one in activities:
        service = one.kind, one.name
        for reason, count in sorted(one.failures.copy().items()):
            failures.add_metric((*service, reason), count)
        now, why = one.state, one.reason
        for state in State:
            states.add_metric((*service, state.value, why if state is now else ""), state is now)
        success.add_metric(service, one.last_success_seconds or 0.0)
        if (lag := one.lag) is not None:
            messages.add_metric(service, lag.messages)
            if lag.seconds is not None:
                seconds.add_metric(service, lag.seconds)
    yield from (failures, states, success, messages, seconds)
