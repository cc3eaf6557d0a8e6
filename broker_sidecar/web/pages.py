"""The pages for people: what is asked for, and what is shown then."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.resources import files
from typing import TypeVar

from google.protobuf.message import Message

from broker_sidecar.admin import AdminService
from broker_sidecar.statistics import Statistics
from broker_sidecar.web.overview import TOPICS, overview
from broker_sidecar.web.server import Request, Response, Route, on_loop
from broker_sidecar.web.shell import failure
from broker_sidecar.web.topic import topic_page
from broker_sidecar.web.visitors import ASK, Visitors, asks
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.figures import ORDERS
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

PRODUCERS = 100
"""On a page."""

_FILES = {
    "/page.css": "text/css; charset=utf-8",
    "/page.js": "text/javascript; charset=utf-8",
    "/icon.svg": "image/svg+xml",
}
"""They tell nothing: whoever comes gets them."""

_STATUSES = {
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "TOKEN_EXPIRED": HTTPStatus.UNAUTHORIZED,
    "NOT_ALLOWED": HTTPStatus.FORBIDDEN,
}

_NOT_HERE = "A token would travel here without TLS, so this page does not ask for one."
_FORWARD = "Forward a port of your machine to it, as `ssh -L` and `kubectl port-forward` do, and look at that."

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Pages:
    """Routes `/` and `/topic`, and the files that they need. `address` is what the sidecar is called. To be made on
    the event loop."""

    def __init__(self, statistics: Statistics, admin: AdminService, visitors: Visitors, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._statistics = statistics
        self._admin = admin
        self._visitors = visitors
        self._address = address

    def routes(self) -> dict[str, Route]:
        folder = files("broker_sidecar.web")
        static = {path: Response((folder / path[1:]).read_bytes(), kind) for path, kind in _FILES.items()}
        shown: dict[str, Route] = {path: lambda _, response=response: response for path, response in static.items()}  # type: ignore[misc]
        return {"/": _told(self._overview), "/topic": _told(self._topic), **shown}

    def _call(self, visitor: Request, name: str, handle: Callable[[M], Awaitable[R]], request: M) -> R:
        return on_loop(self._loop, lambda: self._visitors.call(visitor, name, handle, request))

    def _ask(self, visitor: Request, asked: admin_pb2.GetStatisticsRequest) -> admin_pb2.GetStatisticsResponse:
        return self._call(visitor, "GetStatistics", self._statistics.answer, asked)

    def _overview(self, request: Request) -> Response:
        search, order = request.query.get("q", ""), request.query.get("order", "rate")
        if order not in ORDERS:
            raise error("INVALID_REQUEST", f"there is no order {order!r}: there are {', '.join(ORDERS)}")
        offset = _number(request, "offset", 2**31 - 1)
        asked = admin_pb2.GetStatisticsRequest(search=search, order=ORDERS[order], offset=offset, limit=TOPICS)
        found = self._ask(request, asked)
        return overview(found, self._address, search=search, order=order, offset=offset)

    def _topic(self, request: Request) -> Response:
        full, wanted = topic_name(request.query.get("name", "")), request.query.get("producer", "")
        after = _number(request, "after", 2**63 - 1)
        found = self._ask(request, admin_pb2.GetStatisticsRequest(topic=full))
        producers: admin_pb2.ListProducersResponse | str
        try:
            producers = self._producers(request, full, after, wanted)
        except SeqdedupeError as e:
            producers = str(e)
        return topic_page(found, producers, self._address, wanted=wanted, is_first=not after)

    def _producers(self, visitor: Request, topic: str, after: int, wanted: str) -> admin_pb2.ListProducersResponse:
        if wanted:
            one = admin_pb2.GetProducerRequest(topic=topic, producer_name=wanted)
            found = self._call(visitor, "GetProducer", self._admin.producer, one)
            return admin_pb2.ListProducersResponse(producers=[found.producer])
        some = admin_pb2.ListProducersRequest(topic=topic, offset=after, limit=PRODUCERS)
        return self._call(visitor, "ListProducers", self._admin.producers, some)


def _told(route: Route) -> Route:
    """The route, which tells errors as pages."""

    def answer(request: Request) -> Response:
        try:
            return route(request)
        except SeqdedupeError as e:
            not_found = HTTPStatus.NOT_FOUND if isinstance(e, NotFoundError) else HTTPStatus.BAD_REQUEST
            status = _STATUSES.get(e.reason, not_found)
            if status != HTTPStatus.UNAUTHORIZED:
                return failure("This cannot be shown", str(e), e.hint, status)
            if not asks(request):
                return failure("Not from here", _NOT_HERE, _FORWARD, HTTPStatus.FORBIDDEN)
            return failure("Who is it?", str(e), e.hint, status, ASK)

    return answer


def _number(request: Request, name: str, most: int) -> int:
    """A number in the query, 0 if it is not there. Raises INVALID_REQUEST."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise error("INVALID_REQUEST", f"{name} is {text!r}: it should be a number that a link of the page has")
    return int(text)
