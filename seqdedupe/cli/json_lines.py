"""A line of JSON, and what stands in it at a path: `after.id`, `meta.keys[0]`."""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from seqdedupe.limits import MAX_SEQUENCE_ID

_STEP = re.compile(r"(?:^|(?!^)\.)([^.\[\]]+)|\[([0-9]{1,9})\]")
_MOST_NAMES_SHOWN = 5
_MOST_SHOWN = 40
_MOST_DIGITS = 640
"""Python may refuse to convert more. Such a number is taken as a float: it is no sequence ID and no key."""

_REPEATED = object()
"""In place of the value of a member that an object has more than once: which one counts is not defined."""


class BadLineError(Exception):
    """What is wrong with a line, to follow its place: 'is not JSON: …', 'has no member …'."""


def parse(line: bytes) -> Any:
    """The value of a line. Raises BadLineError."""
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as e:
        raise BadLineError(f"is not JSON: byte {e.start + 1} is not UTF-8") from e
    except json.JSONDecodeError as e:
        raise BadLineError(f"is not JSON: {e.msg[0].lower()}{e.msg[1:]} (character {e.pos + 1})") from e
    except RecursionError as e:
        raise BadLineError("is JSON that is nested too deep") from e


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                members[name] = _REPEATED
            seen.add(name)
    return members


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise BadLineError(f"is not JSON: it has {name}, which JSON does not know")


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_int=_integer, parse_constant=_refuse_constant)


@dataclass(frozen=True)
class JsonPath:
    """Where a value stands: members of objects by name, elements of arrays by their index from 0."""

    text: str
    steps: tuple[str | int, ...]

    @staticmethod
    def parse(text: str) -> "JsonPath":
        """Raises ValueError for text that is no path."""
        steps = list[str | int]()
        end = 0
        while step := _STEP.match(text, end):
            steps.append(step[1] if step[1] is not None else int(step[2]))
            end = step.end()
        if not steps or end < len(text):
            raise ValueError(text)
        return JsonPath(text, tuple(steps))

    def sequence_id(self, value: Any) -> int:
        """The sequence ID at this place. Raises BadLineError unless it is an integer of JSON, 0 to 2^63 - 1."""
        found = self._find(value)
        if type(found) is not int or not 0 <= found <= MAX_SEQUENCE_ID:
            raise BadLineError(
                f"has the sequence ID {_shown(found)} in {self.text!r}: it should be a whole number from 0 to 2^63 - 1"
            )
        return found

    def key(self, value: Any) -> bytes | None:
        """The key at this place: a string, or an integer's digits; null is none. Raises BadLineError."""
        found = self._find(value)
        if found is None:
            return None
        if type(found) is not int and not isinstance(found, str):
            raise BadLineError(f"has the key {_shown(found)} in {self.text!r}: it should be a string or an integer")
        try:
            return str(found).encode()
        except UnicodeEncodeError as e:
            raise BadLineError(f"has a key in {self.text!r} that is no text: half of a surrogate pair is in it") from e

    def _find(self, value: Any) -> Any:
        parent = "it"
        for place, step in enumerate(self.steps):
            if isinstance(step, str):
                is_there = isinstance(value, dict) and step in value
            else:
                is_there = isinstance(value, list) and step < len(value)
            if not is_there:
                raise BadLineError(f"has no {self.text!r}: {parent} {_content(value)}")
            value = value[step]
            parent = repr(_path_text(self.steps[: place + 1]))
            if value is _REPEATED:
                raise BadLineError(f"has {parent} more than once")
        return value


def _path_text(steps: tuple[str | int, ...]) -> str:
    return "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps).removeprefix(".")


def _content(value: Any) -> str:
    """What a value has, or else is."""
    if isinstance(value, dict) and value:
        names = [name[:_MOST_SHOWN] for name, _ in zip(value, range(_MOST_NAMES_SHOWN), strict=False)]
        return "has " + ", ".join(names) + (", …" if len(value) > len(names) else "")
    if isinstance(value, list):
        return f"has {len(value):,} {'element' if len(value) == 1 else 'elements'}"
    return f"is {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return ("an" if value else "an empty") + (" object" if isinstance(value, dict) else " array")
    if isinstance(value, str):
        return json.dumps(value[:_MOST_SHOWN], ensure_ascii=False)
    return json.dumps(value)[:_MOST_SHOWN]
