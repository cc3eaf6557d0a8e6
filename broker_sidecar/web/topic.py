"""The page of one topic."""

from broker_sidecar.web.markup import Markup, tag
from broker_sidecar.web.overview import name_shown, state_shown, tiles
from broker_sidecar.web.server import Response
from broker_sidecar.web.shell import header, link_to, page, section
from seqdedupe.figures import beyond_snapshot, duration
from seqdedupe.v1 import admin_pb2

_TERM_SHIFT = 32
"""An epoch is the term and the number of the session in it."""


def topic_page(
    found: admin_pb2.GetStatisticsResponse,
    producers: admin_pb2.ListProducersResponse | str,
    address: str,
    *,
    wanted: str,
    is_first: bool,
) -> Response:
    """The page of the one topic that was found. `producers` are a page of them, the first one or not, or why there are
    none; `wanted` is the name of the one that is looked for."""
    [one] = found.topics
    return page(
        f"{one.topic.name} · seqdedupe {address}",
        header(found, address),
        tag("p", tag("a", "All topics", href="/"), class_="back"),
        tag("h1", name_shown(one.topic.name), " ", state_shown(one.topic.state)),
        tag("p", one.topic.why, class_="why") if one.topic.why else None,
        tiles(one.activity, found.interval_ms),
        section("Log", _facts(one)),
        section("Producers", _search(one.topic.name, wanted), _producers(producers, one.topic.name, is_first, wanted)),
    )


def _facts(one: admin_pb2.TopicStatistics) -> Markup:
    topic, beyond = one.topic, beyond_snapshot(one.topic)
    age = f", the oldest for {duration(one.snapshot_age_ms // 1000)} at most" if one.snapshot_age_ms else ""
    facts: dict[str, str] = {}
    if beyond is not None:
        count = topic.last.index + 1 - topic.first_index
        facts |= {
            "Messages": f"{count:,}" + (f", indexes {topic.first_index:,} to {topic.last.index:,}" if count else ""),
            "Snapshot": f"up to index {topic.snapshot_index:,}; {beyond:,} messages after it{age}",
            "Size": f"{topic.log_bytes:,} bytes",
            "Producers": f"{topic.producers:,}",
            "Term": f"{topic.term:,}",
            "Deduplication": "on" if topic.policy.deduplication_enabled else "off",
            "Since it was opened": f"{topic.not_dup:,} stored, {topic.dup:,} Dup, {topic.unknown:,} Unknown, "
            f"{topic.refused:,} frames refused",
        }
    facts["Incarnation"] = str(topic.incarnation)
    if one.replay_left_messages:
        facts["To be read before it serves"] = f"{one.replay_left_messages:,} messages"
    if topic.damaged_places:
        facts["Damage"] = f"{topic.damaged_places:,} places, {topic.damaged_messages:,} messages"
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()))


def _search(topic: str, wanted: str) -> Markup:
    return tag(
        "form",
        tag("input", type="search", name="producer", value=wanted, placeholder="Producer name, in full",
            aria_label="Producer name, in full"),
        tag("input", type="hidden", name="name", value=topic),
        tag("button", "Search"),
        action="/topic",
        role="search",
    )  # fmt: skip


def _producers(found: admin_pb2.ListProducersResponse | str, topic: str, is_first: bool, wanted: str) -> Markup | str:
    if isinstance(found, str):
        return tag("p", found)
    if not found.producers:
        return tag("p", "None yet.", class_="faint")
    heads = ("Producer", "Persisted", "Pushed", "Session")
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *map(_row, found.producers)),
        class_="producers",
    )
    first = tag("a", "First page", href=link_to("/topic", name=topic)) if not is_first or wanted else None
    after = found.next_offset
    following = tag("a", "Next", href=link_to("/topic", name=topic, after=after), rel="next") if after else None
    return tag("div", table, tag("nav", first, following, class_="pages") if first or following else None)


def _row(one: admin_pb2.Producer) -> Markup:
    term, session = one.epoch >> _TERM_SHIFT, one.epoch & (1 << _TERM_SHIFT) - 1
    return tag(
        "tr",
        tag("td", tag("bdi", one.name), class_="name"),
        tag("td", _id(one.persisted), data_label="Persisted", class_="number"),
        tag("td", _id(one.pushed), data_label="Pushed", class_="number"),
        tag("td", f"{term}.{session}" if one.epoch else "none", data_label="Session", class_="number"),
    )


def _id(number: int) -> str:
    """A sequence ID; −1 is that of a producer of which there is nothing."""
    return "–" if number == -1 else f"{number:,}"
