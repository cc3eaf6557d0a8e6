"""The demo's check finds what it is there to find."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pytest

from demo.check import Tally, check, check_rows
from demo.flights import ORIGINS, TOTAL, departures

FLIGHTS = 500


@dataclass
class Sent:
    """A message as the demo publishes it."""

    producer_name: str
    sequence_id: int
    payload: bytes | None
    key: bytes | None
    event_time: datetime | None


def _topic() -> list[Sent]:
    return [
        Sent(
            origin,
            number,
            json.dumps(record).encode(),
            record["tailnum"].encode(),
            datetime.fromisoformat(record["time_hour"]),
        )
        for origin in ORIGINS
        for number, record in departures(origin, FLIGHTS)
    ]


def _totals(topic: list[Sent]) -> dict[str, int]:
    tallies = check(topic, FLIGHTS).values()
    names = ("found", "missing", "doubled", "wrong", "disordered")
    return {name: sum(getattr(tally, name) for tally in tallies) for name in names}


GOOD = {"found": FLIGHTS, "missing": 0, "doubled": 0, "wrong": 0, "disordered": 0}


def test_the_file_is_all_there() -> None:
    assert sum(sum(1 for _ in departures(origin, TOTAL)) for origin in ORIGINS) == TOTAL


def test_a_good_topic_is_good() -> None:
    assert _totals(_topic()) == GOOD
    assert sum(tally.fields for tally in check(_topic(), FLIGHTS).values()) == FLIGHTS * 19


def _payload_with(payload: bytes | None, **changes: str) -> bytes:
    return json.dumps(json.loads(payload or b"") | changes).encode()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda topic: topic.pop(7), {"found": FLIGHTS - 1, "missing": 1}),
        (lambda topic: topic.insert(8, topic[7]), {"found": FLIGHTS + 1, "doubled": 1, "disordered": 1}),
        (lambda topic: topic.insert(7, topic.pop(8)), {"disordered": 1}),
        (lambda topic: _change(topic, payload=None), {"wrong": 19}),
        (lambda topic: _change(topic, payload=_payload_with(topic[7].payload, dest="XXX")), {"wrong": 1}),
        (lambda topic: _change(topic, payload=_payload_with(topic[7].payload, more="")), {"wrong": 1}),
        (lambda topic: _change(topic, key=None), {"wrong": 1}),
        (lambda topic: _change(topic, event_time=None), {"wrong": 1}),
        (lambda topic: _change(topic, sequence_id=FLIGHTS), {"wrong": 1, "missing": 1}),
        (lambda topic: _change(topic, producer_name="XXX"), {"wrong": 1}),
    ],
)
def test_what_is_wrong_is_found(spoil: Callable[[list[Sent]], object], found: dict[str, int]) -> None:
    topic = _topic()
    spoil(topic)
    assert _totals(topic) == GOOD | found


def _change(topic: list[Sent], **changes: Any) -> None:
    topic[7] = replace(topic[7], **changes)


def test_a_producer_that_has_nothing_found_is_missing_all() -> None:
    topic = [message for message in _topic() if message.producer_name != "JFK"]
    tally = check(topic, FLIGHTS)["JFK"]
    assert tally == Tally(missing=FLIGHTS - len(topic))


def _table() -> list[tuple[str, ...]]:
    return [
        (origin, str(number), *record.values()) for origin in ORIGINS for number, record in departures(origin, FLIGHTS)
    ]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda table: None, {}),
        (lambda table: table.pop(7), {"found": FLIGHTS - 1, "missing": 1}),
        (lambda table: table.insert(8, table[7]), {"found": FLIGHTS + 1, "doubled": 1, "disordered": 1}),
        (lambda table: table.__setitem__(7, (*table[7][:-1], "")), {"wrong": 1}),
        (lambda table: table.__setitem__(7, ("XXX", *table[7][1:])), {"wrong": 1}),
    ],
)
def test_what_is_wrong_in_the_table_is_found(
    spoil: Callable[[list[tuple[str, ...]]], object], found: dict[str, int]
) -> None:
    table = _table()
    spoil(table)
    tallies = check_rows(table, FLIGHTS).values()
    assert {name: sum(getattr(tally, name) for tally in tallies) for name in GOOD} == GOOD | found
