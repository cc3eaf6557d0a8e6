"""The page of all topics."""

from datetime import UTC, datetime

from broker_sidecar.history import INTERVALS
from broker_sidecar.web.chart import chart
from broker_sidecar.web.markup import Content, Markup, joined, tag
from broker_sidecar.web.server import Response
from broker_sidecar.web.shell import header, link_to, page, section, tile
from seqdedupe.figures import ORDERS, beyond_snapshot, merged, per_second, short, state_name
from seqdedupe.v1 import admin_pb2

TOPICS = 50
"""On a page."""

_MERGED = 4
"""So many intervals are one in the small charts of the list."""

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
"""Classes of the style sheet; of the other states it is `uneasy`."""


def overview(found: admin_pb2.GetStatisticsResponse, address: str, *, search: str, order: str, offset: int) -> Response:
    """The page of what was found so."""
    asked: dict[str, str | int] = {"q": search, "order": order if order != "rate" else "", "offset": offset}
    return page(
        f"seqdedupe {address}",
        header(found, address),
        _recovery(found),
        tiles(found.activity, found.interval_ms),
        section(
            "Topics",
            tag("div", _search(search, order), _orders(order, search), class_="tools"),
            _topics(found),
            _pages(found, asked),
        ),
        _refusals(found),
        _warnings(found),
    )


def state_shown(state: int) -> Markup:
    """A topic's state as a word."""
    name = state_name(state).replace("_", " ").capitalize()
    return tag("span", name, class_=f"state {_LOOKS.get(state, 'uneasy')}")  # type: ignore[call-overload]


def tiles(activity: admin_pb2.Activity, interval_ms: int) -> Markup:
    """What is taken and refused, of all topics or of one."""
    minutes = INTERVALS * interval_ms // 60_000
    return tag(
        "div",
        *(
            tile(
                label,
                short(per_second(values, interval_ms)),
                f"{what}/s",
                chart(values, INTERVALS, f"{label}: {sum(values):,} {what} in the last {minutes} minutes", kind),
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


def _search(search: str, order: str) -> Markup:
    return tag(
        "form",
        tag("input", type="search", name="q", value=search, placeholder="Topic name", aria_label="Topic name"),
        tag("input", type="hidden", name="order", value=order),
        tag("button", "Search"),
        action="/",
        role="search",
    )


def _recovery(found: admin_pb2.GetStatisticsResponse) -> Content:
    """How far a start has come; nothing when all topics serve."""
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
        tag("p", f"{serving:,} of {total:,} topics serve; {others}"),
        tag("p", f"{found.replay_left_messages:,} messages are still to be read")
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
        merged(activity.not_dup, _MERGED), INTERVALS // _MERGED, f"{sum(activity.not_dup):,} messages stored", "plain"
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
    """A topic's full name, of which the last part is what counts."""
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
    """What callers were told, by reason; nothing if that is nothing."""
    if not found.refusals:
        return None
    rows = (tag("div", tag("dt", one.reason), tag("dd", f"{one.count:,}")) for one in found.refusals)
    return section("Errors that callers were told in the last 10 min", tag("dl", *rows, class_="reasons"))


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
