"""Rules and shares as they stand in a file of TOML, read as a whole or not at all. docs/rules.md has the keys."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from broker_sidecar.security.rules import SUBJECT, Action, Rule, Rules
from broker_sidecar.security.shares import IN_ALL, NO_LIMITS, Limits, Share
from seqdedupe.core.patterns import words_in
from seqdedupe.errors import error
from seqdedupe.names import whole_of

_ALL = "all"
_OF_RULES = ("name", "subjects", "actions", "topics", "producers", "cursors")
_OF_NAMES = {"producers": Action.PUBLISH, "cursors": Action.READ}
"""Keys of rules that have this action alone."""
_OWN_NAMES = ("${sub}", "${sub}/*")
_LIMITS = tuple(one.name for one in fields(Limits))
_KEYS = {"allow": _OF_RULES, "deny": _OF_RULES, "share": ("name", "subjects", *_LIMITS)}

_EVERYTHING = ("*", "**")
_SHORT_TOPIC = re.compile(r"(?:[\w.:=\-*]|\$\{\w+\})+", re.ASCII)
_FULL_TOPIC = re.compile(r"persistent://(?:[\w.:=\-*/]|\$\{\w+\})+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RulesFile:
    """What a file says."""

    rules: Rules = field(default_factory=Rules)
    shares: tuple[Share, ...] = ()
    in_all: Limits = NO_LIMITS


class _Wrong(Exception):
    """What is wrong, and where."""


@contextmanager
def _within(where: str) -> Iterator[None]:
    try:
        yield
    except _Wrong as e:
        raise _Wrong(f"{where}: {e}") from e


def read(path: Path) -> RulesFile:
    """The rules and shares in a file. Raises INVALID_CONFIGURATION, which names the line and the rule."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as e:
        # A number of too many digits is none of the parser's own errors.
        why = e.strerror if isinstance(e, OSError) else e
        raise error("INVALID_CONFIGURATION", f"the rules file {path} cannot be read: {why}", key="rules_file") from e
    try:
        return _read(tables, text.splitlines())
    except _Wrong as e:
        what = f"the rules file {path} is not valid: {e}"
        raise error("INVALID_CONFIGURATION", what, hint="docs/rules.md has all keys.", key="rules_file") from e


def _read(tables: Mapping[str, Any], lines: Sequence[str]) -> RulesFile:
    for kind in tables:
        if kind not in (*_KEYS, _ALL):
            raise _Wrong(f"{kind!r} is no table of it: there are [[allow]], [[deny]], [[share]] and [{_ALL}]")
    rules = [_rule(kind, *one) for kind in ("allow", "deny") for one in _each(tables, kind, lines)]
    shares = [_share(*one) for one in _each(tables, "share", lines)]
    return RulesFile(Rules(rules), tuple(shares), _in_all(tables))


def _each(tables: Mapping[str, Any], kind: str, lines: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The tables of a kind, each with where it stands: so it is called, unless it says so itself."""
    found = tables.get(kind, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise _Wrong(f"{kind} should be written [[{kind}]], once for each")
    # The parser does not say where a table stands; its head does, unless text of several lines looks like one.
    heads = [number for number, line in enumerate(lines, 1) if re.match(rf"\s*\[\[\s*{kind}\s*\]\]", line)]
    for place, table in enumerate(found, 1):
        line = f" (line {heads[place - 1]})" if len(heads) == len(found) else ""
        yield table, f"{kind} {place}{line}"


def _rule(kind: str, table: Mapping[str, Any], where: str) -> Rule:
    with _within(where):
        _check_keys(table, _OF_RULES)
        actions = _actions(table)
        for key, action in _OF_NAMES.items():
            if key in table and actions != {action}:
                raise _Wrong(f"{key} is for rules whose actions are {action.value} alone: make two of it")
        every = ("*",)
        return Rule(
            _name(table, where),
            kind == "deny",
            _patterns(table, "subjects"),
            actions,
            tuple(_topic(text) for text in _patterns(table, "topics", SUBJECT)),
            _patterns(table, "producers", SUBJECT) if "producers" in table else every,
            # Who may read is to move nobody else's, unless the rule says so.
            _patterns(table, "cursors", SUBJECT) if "cursors" in table else every if kind == "deny" else _OWN_NAMES,
        )


def _share(table: Mapping[str, Any], where: str) -> Share:
    with _within(where):
        _check_keys(table, _KEYS["share"])
        return Share(_name(table, where), _patterns(table, "subjects"), _limits(table))


def _in_all(tables: Mapping[str, Any]) -> Limits:
    with _within(f"[{_ALL}]"):
        table = tables.get(_ALL, {})
        if not isinstance(table, dict):
            raise _Wrong("it should be one table")
        _check_keys(table, IN_ALL)
        return _limits(table)


def _check_keys(table: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise _Wrong(f"{key!r} is no key of it" + (f": do you mean {near[0]}?" if near else ""))


def _name(table: Mapping[str, Any], otherwise: str) -> str:
    name = table.get("name", otherwise)
    if not isinstance(name, str) or not name:
        raise _Wrong(f"name is {name!r}: text is needed")
    return name


def _texts(table: Mapping[str, Any], key: str) -> list[str]:
    texts = table.get(key)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _Wrong(f'{key} is {texts!r}: a list of texts is needed, as {key} = ["…"]')
    return texts


def _actions(table: Mapping[str, Any]) -> frozenset[Action]:
    known = [action.value for action in Action]
    for text in (texts := _texts(table, "actions")):
        if text not in known:
            raise _Wrong(f"actions has {text!r}: there are {', '.join(known)}")
    return frozenset(map(Action, texts))


def _patterns(table: Mapping[str, Any], key: str, *words: str) -> tuple[str, ...]:
    for text in (texts := _texts(table, key)):
        for word in words_in(text):
            if word not in words:
                there = f"there is ${{{words[0]}}}" if words else "there nothing is put in"
                raise _Wrong(f"{key} has {text!r}, where ${{{word}}} is not known: {there}")
    return tuple(texts)


def _topic(text: str) -> str:
    """A pattern of topics, of full names."""
    if text in _EVERYTHING:
        return text
    full = f"persistent://public/default/{text}" if _SHORT_TOPIC.fullmatch(text) else text
    if not _FULL_TOPIC.fullmatch(full):
        raise _Wrong(
            f"topics has {text!r}, which no topic can match: full names are persistent://tenant/namespace/name, and a "
            "short one stands for persistent://public/default/name"
        )
    if whole := whole_of(full):
        raise _Wrong(f"topics has {text!r}: partitions belong to their topic, so name that: {whole}")
    return full


def _limits(table: Mapping[str, Any]) -> Limits:
    found = {key: value for key, value in table.items() if key in _LIMITS}
    for key, value in found.items():
        if type(value) is not int or value < 1:
            raise _Wrong(f"{key} is {value!r}: a whole number from 1 up is needed; left out, there is no limit")
    if not found and table:
        raise _Wrong(f"it limits nothing: there are {', '.join(_LIMITS)}")
    return Limits(**found)
