"""The pages for people: their requests and contents. They show state and change nothing. `seqdedupe/http_server.py`
serves them, and `/metrics` for Prometheus."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from http import HTTPStatus
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlencode

from google.protobuf.message import Message

from broker_sidecar.gate import ASK, Visitors, asks
from broker_sidecar.services.admin_service import ProducerCalls
from broker_sidecar.services.statistics import INTERVAL_SECONDS, INTERVALS, Statistics
from seqdedupe.command import printable
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.figures import counted, duration, merged, per_second, short
from seqdedupe.http_server import Request, Response, Route, on_loop
from seqdedupe.names import topic_name
from seqdedupe.topic_facts import ORDERS, beyond_snapshot, state_name
from seqdedupe.v1 import admin_pb2

# -- HTML and SVG elements. Only this section turns text into markup. It escapes all text.

_EMPTY = frozenset({"meta", "link", "input"})
"""HTML elements without an end tag."""


class Markup(str):
    """Text that is already markup, and is not escaped again."""

    __slots__ = ()


Content = Markup | str | int | None
"""The content of an element. None is omitted."""


def tag(name: str, /, *content: Content, **attributes: str | int | bool | None) -> Markup:
    """Return an element. Text is escaped. Characters that would change the writing direction are shown as escapes.

    In the name of an attribute, a trailing underscore is removed, and other underscores become hyphens. An attribute
    with None or False is omitted. An attribute with True has no value.
    """
    shown = "".join(
        f" {key.removesuffix('_').replace('_', '-')}" + ("" if value is True else f'="{_text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{shown}>" if name in _EMPTY else f"<{name}{shown}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """Concatenate the parts."""
    return Markup("".join(part if isinstance(part, Markup) else _text(part) for part in content if part is not None))


def _text(value: str | int) -> str:
    return escape(printable(str(value)))


# -- Small SVG charts of the last minutes. The newest values are on the right.

WIDTH = 200
HEIGHT = 40
"""The coordinates of a chart. The style sheet sets the displayed size."""

_ROOM = 2
"""The space above the highest value, so that the line is completely visible."""


def chart(values: Sequence[int], intervals: int, label: str, kind: str) -> Markup:
    """Return a chart: a line and the area below it. `intervals` is the number of values in the full width. `kind` is a
    class of the style sheet.

    `label` describes the chart for people who cannot see it.
    """
    attributes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none"}
    drawn = _drawn(values, intervals) if any(values) else ()
    ground = tag("line", x1=0, x2=WIDTH, y1=HEIGHT, y2=HEIGHT, class_="ground")
    return tag("svg", ground, *drawn, role="img", aria_label=label, class_=f"chart {kind}", **attributes)


def _drawn(values: Sequence[int], intervals: int) -> tuple[Markup, Markup]:
    highest = max(values)
    step = WIDTH / max(intervals - 1, 1)
    first = WIDTH - step * (len(values) - 1)
    points = [
        f"{first + k * step:.1f} {HEIGHT - value / highest * (HEIGHT - _ROOM):.1f}" for k, value in enumerate(values)
    ]
    line = "M" + "L".join(points)
    area = f"{line}L{WIDTH} {HEIGHT}L{first:.1f} {HEIGHT}Z"
    return tag("path", d=area, class_="area"), tag("path", d=line, class_="line")


# -- The parts that all pages share.

WITHOUT_SCRIPT_SECONDS = 10
"""The interval at which a browser without scripts reloads the page."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
"""The page loads nothing from other servers, has no inline script or style, and cannot be framed by other pages."""

NO_HEADERS: Mapping[str, str] = {}
"""No headers in addition to HEADERS."""


def link_to(path: str, **query: Any) -> str:
    """Return a path with a query string. Values that are empty or 0 are omitted."""
    asked = urlencode({key: value for key, value in query.items() if value})
    return f"{path}?{asked}" if asked else path


def page(
    title: str, *content: Content, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Return a page. Its script regularly replaces the content by the current content."""
    html = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            tag("link", rel="stylesheet", href="/page.css"),
            tag("link", rel="icon", href="/icon.svg", type="image/svg+xml"),
            tag("script", src="/page.js", defer=True),
            tag("noscript", tag("meta", http_equiv="refresh", content=WITHOUT_SCRIPT_SECONDS)),
        ),
        tag(
            "body",
            tag("main", *content, id="live", data_interval_ms=int(INTERVAL_SECONDS * 1000)),
            tag("p", id="stale", role="status", hidden=True),
        ),
        lang="en",
    )
    return Response(f"<!doctype html>{html}".encode(), "text/html; charset=utf-8", status, {**HEADERS, **headers})


def header(found: admin_pb2.GetStatisticsResponse, address: str) -> Markup:
    """Return the header of a page: the sidecar's address, state, version and uptime."""
    state = ("Serving", "good") if found.is_serving else ("Not serving", "bad")
    return tag(
        "header",
        tag("a", tag("strong", "seqdedupe"), " ", tag("span", address, class_="faint"), href="/", class_="home"),
        tag("span", state[0], class_=f"state {state[1]}"),
        tag("span", f"{found.version}, up {duration(found.uptime_seconds)}", class_="faint"),
    )


def failure(
    title: str, message: str, hint: str, status: HTTPStatus, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Return a page that shows an error instead of the requested page."""
    back = tag("p", tag("a", "All topics", href="/"))
    said = tag("section", tag("h1", title), tag("p", message), tag("p", hint, class_="faint"), back)
    return page(title, said, status=status, headers=headers)


def tile(label: str, value: str, unit: str, drawing: Markup, note: str = "") -> Markup:
    """Return a number with its chart."""
    return tag(
        "div",
        tag("h2", label),
        tag("p", tag("strong", value), " ", tag("span", unit, class_="faint"), class_="figure"),
        drawing,
        tag("p", note, class_="faint note") if note else None,
        class_="tile",
    )


def section(title: str, *content: Content) -> Markup:
    """Return a section of a page."""
    return tag("section", tag("h2", title), joined(*content))


# -- The page of all topics.

TOPICS = 50
"""The most topics on a page."""

_MERGED = 4
"""In the small charts of the list, this number of intervals is merged into one."""

_ORDER_LABELS = {
    "rate": "Rate",
    "name": "Name",
    "state": "State",
    "trouble": "Unknown and refused",
    "snapshot": "Not in a snapshot",
}

_LOOKS = {
    admin_pb2.TOPIC_STATE_SERVING: "good",
    admin_pb2.TOPIC_STATE_DAMAGED: "bad",
    admin_pb2.TOPIC_STATE_STANDBY: "calm",
}
"""The style sheet's classes for topic states. Other states have the class `uneasy`."""


def overview(found: admin_pb2.GetStatisticsResponse, address: str, *, search: str, order: str, offset: int) -> Response:
    """Return the page that lists the topics found."""
    asked: dict[str, str | int] = {"q": search, "order": order if order != "rate" else "", "offset": offset}
    return page(
        f"seqdedupe {address}",
        header(found, address),
        _recovery(found),
        tiles(found.activity, found.interval_ms),
        section(
            "Topics",
            tag(
                "div",
                search_form("/", "q", search, "Topic name", {"order": order}),
                _orders(order, search),
                class_="tools",
            ),
            _topics(found),
            _pages(found, asked),
        ),
        _refusals(found),
        _warnings(found),
    )


def state_shown(state: int) -> Markup:
    """Return a topic's state as a word."""
    name = state_name(state).replace("_", " ").capitalize()
    return tag("span", name, class_=f"state {_LOOKS.get(state, 'uneasy')}")  # type: ignore[call-overload]


def tiles(activity: admin_pb2.Activity, interval_ms: int) -> Markup:
    """Return the numbers of stored, duplicate, unknown and refused messages, for all topics or for one topic."""
    minutes = INTERVALS * interval_ms // 60_000
    return tag(
        "div",
        *(
            tile(
                label,
                short(per_second(values, interval_ms)),
                f"{what}/s",
                chart(
                    values,
                    INTERVALS,
                    f"{label}: {counted(sum(values), what.removesuffix('s'))} in the last {minutes} minutes",
                    kind,
                ),
                f"{short(sum(values))} in {minutes} min{note}",
            )
            for label, what, values, kind, note in (
                ("Stored", "messages", activity.not_dup, "plain", f", {_bytes(activity, interval_ms)}"),
                ("Duplicates", "messages", activity.dup, "calm", ""),
                ("Unknown", "messages", activity.unknown, "uneasy", ""),
                ("Refused", "frames", activity.refused, "bad", ""),
            )
        ),
        class_="tiles",
    )


def _bytes(activity: admin_pb2.Activity, interval_ms: int) -> str:
    return f"{short(per_second(activity.stored_bytes, interval_ms))}B/s"


def search_form(path: str, name: str, value: str, label: str, kept: Mapping[str, str]) -> Markup:
    """Return a form that requests `path` with the text that the visitor enters. The request also contains the values
    `kept`."""
    return tag(
        "form",
        tag("input", type="search", name=name, value=value, placeholder=label, aria_label=label),
        *(tag("input", type="hidden", name=other, value=text) for other, text in kept.items()),
        tag("button", "Search"),
        action=path,
        role="search",
    )


def _recovery(found: admin_pb2.GetStatisticsResponse) -> Content:
    """Return the progress of recovery; None if all topics serve."""
    counts = {one.state: one.topics for one in found.states}
    total, serving = sum(counts.values()), counts.get(admin_pb2.TOPIC_STATE_SERVING, 0)
    if serving == total:
        return None
    others = ", ".join(
        f"{count:,} {state_name(state).replace('_', ' ').lower()}"
        for state, count in counts.items()
        if state != admin_pb2.TOPIC_STATE_SERVING
    )
    return section(
        "Recovery" if admin_pb2.TOPIC_STATE_RECOVERING in counts else "States",
        tag("progress", value=serving, max=total, aria_label="Topics that serve"),
        tag("p", f"serving: {serving:,} of {counted(total, 'topic')}; {others}"),
        tag("p", f"still to be read: {counted(found.replay_left_messages, 'message')}")
        if found.replay_left_messages
        else None,
    )


def _orders(order: str, search: str) -> Markup:
    links = (
        tag(
            "a",
            label,
            href=link_to("/", q=search, order=name if name != "rate" else ""),
            aria_current="true" if name == order else None,
        )
        for name, label in _ORDER_LABELS.items()
        if name in ORDERS
    )
    return tag("nav", tag("span", "Order", class_="faint"), *links, class_="orders")


def _topics(found: admin_pb2.GetStatisticsResponse) -> Markup:
    if not found.topics:
        return tag("p", "There is no such topic." if sum(s.topics for s in found.states) else "There is no topic yet.")
    heads = (
        "Topic",
        "State",
        "Stored/s",
        "Last 10 min",
        "Dup/s",
        "Unknown",
        "Refused",
        "Not in a snapshot",
        "Producers",
    )
    return tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *(_row(one, found.interval_ms) for one in found.topics)),
        class_="topics",
    )


def _row(one: admin_pb2.TopicStatistics, interval_ms: int) -> Markup:
    topic, activity = one.topic, one.activity
    beyond = beyond_snapshot(topic)
    unknown, refused = sum(activity.unknown), sum(activity.refused)
    drawing = chart(
        merged(activity.not_dup, _MERGED),
        INTERVALS // _MERGED,
        f"{counted(sum(activity.not_dup), 'message')} stored",
        "plain",
    )
    return tag(
        "tr",
        tag("td", tag("a", name_shown(topic.name), href=link_to("/topic", name=topic.name)), class_="name"),
        tag("td", state_shown(topic.state), class_="of-state"),
        _cell("Stored/s", short(per_second(activity.not_dup, interval_ms))),
        tag("td", drawing, class_="past"),
        _cell("Dup/s", short(per_second(activity.dup, interval_ms))),
        _cell("Unknown", short(unknown), "uneasy" if unknown else ""),
        _cell("Refused", short(refused), "bad" if refused else ""),
        _cell("Not in a snapshot", "?" if beyond is None else short(beyond)),
        _cell("Producers", "?" if beyond is None else short(topic.producers)),
    )


def name_shown(name: str) -> Markup:
    """Return a topic's full name, with emphasis on the last part."""
    first, _, last = name.rpartition("/")
    return joined(tag("span", f"{first}/", class_="faint"), tag("bdi", last))


def _cell(label: str, value: str, look: str = "") -> Markup:
    return tag("td", value, data_label=label, class_=f"number {look if value != '0' else 'faint'}".strip())


def _pages(found: admin_pb2.GetStatisticsResponse, asked: dict[str, str | int]) -> Content:
    offset, count = int(asked["offset"]), found.topics_found
    if count <= TOPICS and not offset:
        return None
    before, after = max(offset - TOPICS, 0), offset + TOPICS
    return tag(
        "nav",
        tag("a", "Previous", href=link_to("/", **asked | {"offset": before}), rel="prev") if offset else None,
        tag("span", f"{offset + 1:,} to {offset + len(found.topics):,} of {count:,}", class_="faint"),
        tag("a", "Next", href=link_to("/", **asked | {"offset": after}), rel="next") if after < count else None,
        class_="pages",
    )


def _refusals(found: admin_pb2.GetStatisticsResponse) -> Content:
    """Return the numbers of errors that callers received, by reason; None if there are no errors."""
    if not found.refusals:
        return None
    rows = (tag("div", tag("dt", one.reason), tag("dd", f"{one.count:,}")) for one in found.refusals)
    return section("Errors that callers received in the last 10 min", tag("dl", *rows, class_="reasons"))


def _warnings(found: admin_pb2.GetStatisticsResponse) -> Markup:
    if not found.warnings:
        return section("Warnings", tag("p", "None since the start.", class_="faint"))
    return section(
        "Warnings",
        tag(
            "ol",
            *(
                tag(
                    "li",
                    tag("time", _at(one.time_ms), class_="faint"),
                    tag(
                        "span", one.level.capitalize(), class_=f"state {'uneasy' if one.level == 'WARNING' else 'bad'}"
                    ),
                    tag("span", one.message),
                )
                for one in found.warnings
            ),
            class_="warnings",
        ),
    )


def _at(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- The page of one topic.

_TERM_SHIFT = 32
"""An epoch consists of the term, shifted by this number of bits, and the number of the session in the term."""


def topic_page(
    found: admin_pb2.GetStatisticsResponse,
    producers: admin_pb2.ListProducersResponse | str,
    address: str,
    *,
    wanted: str,
    is_first: bool,
) -> Response:
    """Return the HTML page about the single topic in `found`.

    `producers` is one page of the list of the topic's producers; `is_first` is true for the first page of the list. If
    the producers cannot be shown, `producers` is the reason as text. `wanted` is the producer name that the visitor
    searched for.
    """
    [one] = found.topics
    return page(
        f"{one.topic.name} · seqdedupe {address}",
        header(found, address),
        tag("p", tag("a", "All topics", href="/"), class_="back"),
        tag("h1", name_shown(one.topic.name), " ", state_shown(one.topic.state)),
        tag("p", one.topic.why, class_="why") if one.topic.why else None,
        tiles(one.activity, found.interval_ms),
        section("Log", _facts(one)),
        section(
            "Producers",
            search_form("/topic", "producer", wanted, "Producer name, in full", {"name": one.topic.name}),
            _producers(producers, one.topic.name, is_first, wanted),
        ),
    )


def _facts(one: admin_pb2.TopicStatistics) -> Markup:
    topic, beyond = one.topic, beyond_snapshot(one.topic)
    age = f", the oldest for at most {duration(one.snapshot_age_ms // 1000)}" if one.snapshot_age_ms else ""
    facts: dict[str, str] = {}
    if beyond is not None:
        count = topic.last.index + 1 - topic.first_index
        facts |= {
            "Messages": f"{count:,}" + (f", indexes {topic.first_index:,} to {topic.last.index:,}" if count else ""),
            "Snapshot": f"up to index {topic.snapshot_index:,}; {counted(beyond, 'message')} after it{age}",
            "Size": f"{topic.log_bytes:,} bytes",
            "Producers": f"{topic.producers:,}",
            "Term": f"{topic.term:,}",
            "Deduplication": "on" if topic.policy.deduplication_enabled else "off",
            "Since it was opened": f"{topic.not_dup:,} stored, {topic.dup:,} Dup, {topic.unknown:,} Unknown, "
            f"{counted(topic.refused, 'frame')} refused",
        }
    facts["Incarnation"] = str(topic.incarnation)
    if one.replay_left_messages:
        facts["To be read before it serves"] = counted(one.replay_left_messages, "message")
    if topic.damaged_places:
        facts["Damage"] = f"{counted(topic.damaged_places, 'place')}, {counted(topic.damaged_messages, 'message')}"
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()))


def _producers(found: admin_pb2.ListProducersResponse | str, topic: str, is_first: bool, wanted: str) -> Markup | str:
    if isinstance(found, str):
        return tag("p", found)
    if not found.producers:
        return tag("p", "None yet.", class_="faint")
    heads = ("Producer", "Persisted", "Pushed", "Session")
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *map(_producer_row, found.producers)),
        class_="producers",
    )
    first = tag("a", "First page", href=link_to("/topic", name=topic)) if not is_first or wanted else None
    after = found.next_offset
    following = tag("a", "Next", href=link_to("/topic", name=topic, after=after), rel="next") if after else None
    return tag("div", table, tag("nav", first, following, class_="pages") if first or following else None)


def _producer_row(one: admin_pb2.Producer) -> Markup:
    term, session = one.epoch >> _TERM_SHIFT, one.epoch & (1 << _TERM_SHIFT) - 1
    return tag(
        "tr",
        tag("td", tag("bdi", one.name), class_="name"),
        tag("td", _id(one.persisted), data_label="Persisted", class_="number"),
        tag("td", _id(one.pushed), data_label="Pushed", class_="number"),
        tag("td", f"{term}.{session}" if one.epoch else "none", data_label="Session", class_="number"),
    )


def _id(number: int) -> str:
    """Return a sequence ID as text. −1 means that the producer has no sequence ID yet."""
    return "–" if number == -1 else f"{number:,}"


PRODUCERS = 100
"""The most producers on a page."""

_FILES = {
    "/page.css": "text/css; charset=utf-8",
    "/page.js": "text/javascript; charset=utf-8",
    "/icon.svg": "image/svg+xml",
}
"""Files without private data, which every visitor may load."""

_STATUSES = {
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "TOKEN_EXPIRED": HTTPStatus.UNAUTHORIZED,
    "NOT_ALLOWED": HTTPStatus.FORBIDDEN,
}

_NOT_HERE = "This page does not ask for a token, because the token would travel without TLS."
_FORWARD = "Forward a local port to it, for example with `ssh -L` or `kubectl port-forward`, and open the page there."

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Pages:
    """The routes `/` and `/topic`, and the files that these pages need. `address` is the sidecar's displayed name.
    `Pages` must be created on the event loop."""

    def __init__(self, statistics: Statistics, producers: ProducerCalls, visitors: Visitors, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._statistics = statistics
        self._calls = producers
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
        return self._call(visitor, "GetStatistics", self._statistics.get_statistics, asked)

    def _overview(self, request: Request) -> Response:
        search, order = request.query.get("q", ""), request.query.get("order", "rate")
        if order not in ORDERS:
            raise error("INVALID_REQUEST", f"there is no order {order!r}: the orders are {', '.join(ORDERS)}")
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
            found = self._call(visitor, "GetProducer", self._calls.get_producer, one)
            return admin_pb2.ListProducersResponse(producers=[found.producer])
        some = admin_pb2.ListProducersRequest(topic=topic, offset=after, limit=PRODUCERS)
        return self._call(visitor, "ListProducers", self._calls.list_producers, some)


def _told(route: Route) -> Route:
    """Return the route, changed to show errors as pages."""

    def answer(request: Request) -> Response:
        try:
            return route(request)
        except SeqdedupeError as e:
            not_found = HTTPStatus.NOT_FOUND if isinstance(e, NotFoundError) else HTTPStatus.BAD_REQUEST
            status = _STATUSES.get(e.reason, not_found)
            if status != HTTPStatus.UNAUTHORIZED:
                return failure("This cannot be shown", str(e), e.hint, status)
            if not asks(request):
                return failure("Not available from here", _NOT_HERE, _FORWARD, HTTPStatus.FORBIDDEN)
            return failure("A token is needed", str(e), e.hint, status, ASK)

    return answer


def _number(request: Request, name: str, most: int) -> int:
    """Return a number from the query; 0 if it is missing. Raises INVALID_REQUEST."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise error("INVALID_REQUEST", f"{name} is {text!r}: it should be a number from a link of the page")
    return int(text)
