"""Where to start or stop in topics: text from a user, checked."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard, TypeVar

from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, topic_name
from seqdedupe_spark import stock

TURNED_ROUND = "Let startingOffsets or startingTime name a place before that of endingOffsets or endingTime."
"""What to do where reading would start after its end."""

_MAX_INT64 = 2**63 - 1

_PARTITION = re.compile(r"\d{1,9}", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True)
class Time:
    """The place of a publish time in a topic: before the first message published then or later, or at the end that it
    has when that is asked for."""

    milliseconds: int


End = Literal["earliest", "latest"]
PlaceInTopic = Position | int | End | Time
"""A number is the index of the first message to be read, or of the first one that is not."""
Place = End | Time | Mapping[str, PlaceInTopic]
"""Where to start or stop in each topic; topics in the mapping have full names."""


def offsets(text: str, words: tuple[End, ...]) -> Place:
    """One of the words, or JSON with a place for every topic. Raises ValueError, INVALID_POSITION."""
    forms = f'{" or ".join(words)}, or JSON, as {{"topic": "message ID"}} or {{"topic": index}}'
    return _word(text, words) or _by_topic(text, forms, lambda name, value: _offset(name, value, words))


def times(text: str) -> Place:
    """Milliseconds since 1970, or JSON with such a number for every topic. Raises ValueError."""
    if re.fullmatch(r"[-+\w.]+", text):
        return Time(number(text, 0))
    return _by_topic(text, 'milliseconds since 1970, or JSON, as {"topic": milliseconds}', _time)


def check_order(starting: Place | None, ending: Place | None) -> None:
    """Raises INVALID_OPTION where a time is after that of the end. Of other places the topics tell."""
    for name in {*_names(starting), *_names(ending)} or {""}:
        first, last = _in_topic(starting, name), _in_topic(ending, name)
        if isinstance(first, Time) and isinstance(last, Time) and first.milliseconds > last.milliseconds:
            what = f"startingTime {first.milliseconds} is after endingTime {last.milliseconds}"
            raise error("INVALID_OPTION", what + (f" in {name}" if name else ""), hint=TURNED_ROUND)


def _names(place: Place | None) -> Iterable[str]:
    return place if isinstance(place, Mapping) else ()


def _in_topic(place: Place | None, name: str) -> PlaceInTopic | None:
    return place.get(name) if isinstance(place, Mapping) else place


def number(text: str, least: int) -> int:
    """Raises ValueError."""
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not least <= int(text) <= _MAX_INT64:
        raise ValueError(f"it should be a whole number from {least} to 2^63 - 1")
    return int(text)


def _word(text: str, words: tuple[End, ...]) -> End | None:
    return next((word for word in words if word == text.lower()), None)


def _by_topic(text: str, forms: str, place: Callable[[str, object], T]) -> dict[str, T]:
    """JSON that has a place for every topic, or a mapping of its partitions' numbers to theirs, as Kafka's connector
    takes it. Topics come back with their full names."""
    try:
        given = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it should be {forms}") from e
    if not isinstance(given, tuple) or not given:
        raise ValueError(f"it should be {forms}")
    places: dict[str, T] = {}
    for topic, value in given:
        name = topic_name(topic)
        of_partitions = value if isinstance(value, tuple) else ()
        parts = [(_partition(name, number), one) for number, one in of_partitions]
        for part, one in parts or [(name, value)]:
            if part in places:
                raise ValueError(f"{part} is in it twice")
            places[part] = place(part, one)
    return places


def _partition(topic: str, number: str) -> str:
    if not _PARTITION.fullmatch(number):
        raise ValueError(f"{number[:80]!r} is not the number of a partition of {topic}")
    return partition_name(topic, int(number))


def _offset(name: str, value: object, words: tuple[End, ...]) -> PlaceInTopic:
    if isinstance(value, str):
        return _word(value, words) or stock.parse(value)
    if _is_number(value):
        return value
    # An index that was counted wrongly must not become Kafka's -1, the end: nobody would see that messages are missing.
    hint = '; Kafka\'s -1 is "latest" here, its -2 "earliest"' if value in (-1, -2) else ""
    raise ValueError(f"that of {name} is neither an index from 0 up nor a text{hint}")


def _time(name: str, value: object) -> Time:
    if not _is_number(value):
        raise ValueError(f"that of {name} is not a number of milliseconds from 0 up")
    return Time(value)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT64
