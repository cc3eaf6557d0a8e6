"""The pages for people: what is asked for, from whom it is asked, and what is shown then."""

import asyncio
from http import HTTPStatus
from importlib.resources import files

from broker_sidecar.admin import AdminService
from broker_sidecar.statistics import Statistics
from broker_sidecar.web.overview import TOPICS, overview
from broker_sidecar.web.server import Request, Response, Route, on_loop
from broker_sidecar.web.shell import failure
from broker_sidecar.web.topic import topic_page
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


class Pages:
    """Routes `/` and `/topic`, and the files that they need. `address` is what the sidecar is called."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, statistics: Statistics, admin: AdminService, address: str
    ) -> None:
        self._loop = loop
        self._statistics = statistics
        self._admin = admin
        self._address = address

    def routes(self) -> dict[str, Route]:
        folder = files("broker_sidecar.web")
        static = {path: Response((folder / path[1:]).read_bytes(), kind) for path, kind in _FILES.items()}
        shown = {path: lambda _request, response=response: response for path, response in static.items()}
        return {"/": self._guarded(self._overview), "/topic": self._guarded(self._topic), **shown}

    def _guarded(self, route: Route) -> Route:
        def answer(request: Request) -> Response:
            try:
                return route(request)
            except SeqdedupeError as e:
                status = HTTPStatus.NOT_FOUND if isinstance(e, NotFoundError) else HTTPStatus.BAD_REQUEST
                return failure("This cannot be shown", str(e), e.hint, status)

        return answer

    def _overview(self, request: Request) -> Response:
        search, order = request.query.get("q", ""), request.query.get("order", "rate")
        if order not in ORDERS:
            raise error("INVALID_REQUEST", f"there is no order {order!r}: there are {', '.join(ORDERS)}")
        asked = admin_pb2.GetStatisticsRequest(
            search=search, order=ORDERS[order], offset=_number(request, "offset", 2**31 - 1), limit=TOPICS
        )
        found = on_loop(self._loop, lambda: self._statistics.answer(asked))
        return overview(found, self._address, search=search, order=order, offset=asked.offset)

    def _topic(self, request: Request) -> Response:
        full, wanted = topic_name(request.query.get("name", "")), request.query.get("producer", "")
        after = _number(request, "after", 2**63 - 1)
        found = on_loop(self._loop, lambda: self._statistics.answer(admin_pb2.GetStatisticsRequest(topic=full)))
        producers: admin_pb2.ListProducersResponse | str
        try:
            producers = on_loop(self._loop, lambda: self._producers(full, after, wanted))
        except SeqdedupeError as e:
            producers = str(e)
        return topic_page(found, producers, self._address, wanted=wanted, is_first=not after)

    async def _producers(self, topic: str, after: int, wanted: str) -> admin_pb2.ListProducersResponse:
        if wanted:
            asked = admin_pb2.GetProducerRequest(topic=topic, producer_name=wanted)
            return admin_pb2.ListProducersResponse(producers=[(await self._admin.producer(asked)).producer])
        return await self._admin.producers(admin_pb2.ListProducersRequest(topic=topic, offset=after, limit=PRODUCERS))


def _number(request: Request, name: str, most: int) -> int:
    """A number in the query, 0 if it is not there. Raises INVALID_REQUEST."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise error("INVALID_REQUEST", f"{name} is {text!r}: it should be a number that a link of the page has")
    return int(text)
