"""What all pages for people have around them, and how they are answered."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from broker_sidecar.history import INTERVAL_SECONDS
from broker_sidecar.web.markup import Content, Markup, joined, tag
from broker_sidecar.web.server import Response
from seqdedupe.figures import duration
from seqdedupe.v1 import admin_pb2

WITHOUT_SCRIPT_SECONDS = 10
"""So often a browser without scripts loads the page again."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
"""Nothing is loaded from elsewhere, nothing within the page is a script or a style, and nobody frames it."""

NO_HEADERS: Mapping[str, str] = {}
"""Beside these."""


def link_to(path: str, **query: Any) -> str:
    """A path with what is asked for there; what is empty or 0 is left out."""
    asked = urlencode({key: value for key, value in query.items() if value})
    return f"{path}?{asked}" if asked else path


def page(
    title: str, *content: Content, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """A page. The script replaces the content by what it is a moment later."""
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
    """Which sidecar it is, and how it does."""
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
    """Why there is no page."""
    back = tag("p", tag("a", "All topics", href="/"))
    said = tag("section", tag("h1", title), tag("p", message), tag("p", hint, class_="faint"), back)
    return page(title, said, status=status, headers=headers)


def tile(label: str, value: str, unit: str, drawing: Markup, note: str = "") -> Markup:
    """A figure with its past."""
    return tag(
        "div",
        tag("h2", label),
        tag("p", tag("strong", value), " ", tag("span", unit, class_="faint"), class_="figure"),
        drawing,
        tag("p", note, class_="faint note") if note else None,
        class_="tile",
    )


def section(title: str, *content: Content) -> Markup:
    """A part of a page."""
    return tag("section", tag("h2", title), joined(*content))
