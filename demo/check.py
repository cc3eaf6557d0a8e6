"""The check: every message of the topic, and every row of the table, against the CSV file, read here in another way."""

import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Protocol

from demo.flights import ORIGINS, archive


class Message(Protocol):
    """What is looked at of a message."""

    @property
    def payload(self) -> bytes | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def event_time(self) -> datetime | None: ...
    @property
    def producer_name(self) -> str: ...
    @property
    def sequence_id(self) -> int: ...


Differences = Callable[[dict[str, str]], int]
"""How many fields differ from those of a flight."""


@dataclass
class Tally:
    """One producer's flights: `fields` were compared, `wrong` ones differ, `disordered` flights came too late."""

    found: int = 0
    missing: int = 0
    doubled: int = 0
    fields: int = 0
    wrong: int = 0
    disordered: int = 0
    last: int = field(default=-1, repr=False)


def check(messages: Iterable[Message], flights: int) -> dict[str, Tally]:
    """Compares the messages with the first `flights` of the file: each once, each field, each producer's in order."""
    found = ((message.producer_name, message.sequence_id, partial(_differences, message)) for message in messages)
    return _tally(found, flights)


def check_rows(rows: Iterable[Sequence[str]], flights: int) -> dict[str, Tally]:
    """The same for rows of producer, number, and the file's fields in its order."""
    return _tally(((row[0], int(row[1]), partial(_differences_of_row, row)) for row in rows), flights)


def _tally(found: Iterable[tuple[str, int, Differences]], flights: int) -> dict[str, Tally]:
    header, lines = _lines(flights)
    tallies = {origin: Tally() for origin in ORIGINS}
    copies = bytearray(len(lines))
    for producer, number, differences in found:
        tally = tallies.setdefault(producer, Tally())
        tally.found += 1
        if not 0 <= number < len(lines):
            tally.wrong += 1
            continue
        tally.doubled += copies[number] > 0
        copies[number] = min(copies[number] + 1, 255)
        tally.disordered += number <= tally.last
        tally.last = max(tally.last, number)
        tally.fields += len(header)
        tally.wrong += differences(dict(zip(header, lines[number].split(","), strict=True)))
    origin = header.index("origin")
    for number, seen in enumerate(copies):
        if not seen:
            tallies[lines[number].split(",")[origin]].missing += 1
    return tallies


def _lines(flights: int) -> tuple[list[str], list[str]]:
    with zipfile.ZipFile(archive()) as opened:
        text = opened.read("flights.csv").decode()
    if '"' in text:
        raise ValueError("the file quotes fields: splitting its lines at commas is not enough")
    lines = iter(text.splitlines())
    return next(lines).split(","), list(islice(lines, flights))


def _differences(message: Message, expected: dict[str, str]) -> int:
    """How many fields of the payload, the key, the event time and the producer's name differ from the file."""
    found = json.loads(message.payload or b"{}")
    same = [
        *(found.get(name) == value for name, value in expected.items()),
        *(name in expected for name in found),
        message.key == expected["tailnum"].encode(),
        message.event_time == datetime.fromisoformat(expected["time_hour"]),
        message.producer_name == expected["origin"],
    ]
    return same.count(False)


def _differences_of_row(row: Sequence[str], expected: dict[str, str]) -> int:
    """How many fields of the row, and the producer's name, differ from the file."""
    same = [mine == theirs for mine, theirs in zip(row[2:], expected.values(), strict=True)]
    return [*same, row[0] == expected["origin"]].count(False)
