"""The rules, and their decisions for one caller. An action needs a rule that allows the action. A rule that denies the
action takes precedence."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_sidecar.shares import IN_ALL, NO_LIMITS, CallerLimits, CallerShare
from seqdedupe.core.name_table import Pattern, joined, words_in
from seqdedupe.errors import error
from seqdedupe.files import read_named
from seqdedupe.format.jit import Bytes, Int64s2, Uint8s
from seqdedupe.names import whole_of

SUBJECT = "sub"
"""In a pattern of topics or producers, `${sub}` is the caller's unchanged name."""

MAX_REMEMBERED = 4_096
"""The maximum number of combinations of caller, action and topic for which the applicable rules are cached."""

_WORK_AT_ONCE = 500_000
"""The maximum work in one step: bytes of names, multiplied by the work of the patterns for each byte."""

_ANY = b"\xff"
"""A placeholder for any name. It occurs in no pattern and in no name, so that only a `*` matches it."""

_EVERY_TOPIC = b"persistent://" + b"/".join([_ANY] * 3)


class Action(Enum):
    """An action of a caller on a topic."""

    PUBLISH = "publish"
    READ = "read"
    CREATE = "create"
    OBSERVE = "observe"
    ADMINISTER = "administer"
    ATTACH = "attach"
    """Attach as the broker that has the topic's log, with all its producer names."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that allows or denies the actions to the subjects, on the topics. It may be limited to some producer names
    for publishing, and to some cursors for reading."""

    name: str
    """The name by which an operator finds the rule: its `name`, or its kind and place in the file."""
    denies: bool
    subjects: tuple[str, ...]
    actions: frozenset[Action]
    topics: tuple[str, ...]
    producers: tuple[str, ...] = ("*",)
    """The producer names to which the rule applies. They matter only for publishing."""
    cursors: tuple[str, ...] = ("*",)
    """The cursors that readers may move. They matter only for reading."""

    def names(self, action: Action) -> tuple[str, ...]:
        """Return the patterns of names to which the rule applies for this action."""
        match action:
            case Action.PUBLISH:
                return self.producers
            case Action.READ:
                return self.cursors
        return ("*",)

    def is_of_all_names(self, action: Action) -> bool:
        return not {"*", "**"}.isdisjoint(self.names(action))


@dataclass(frozen=True, slots=True)
class RuleDecision:
    """Whether the action is allowed, and the deciding rule. If the rule is None, no rule allows the action."""

    is_allowed: bool
    rule: Rule | None


class Granted:
    """The rules that apply to one caller and action on one topic, denials first."""

    def __init__(self, rules: Sequence[Rule], subject: str, action: Action) -> None:
        words = {SUBJECT: subject}
        self._action = action
        self._rules = [(rule, [Pattern(text, words) for text in rule.names(action)]) for rule in rules]
        self._is_denied = any(rule.denies and rule.is_of_all_names(action) for rule in rules)
        are_all = any(rule.is_of_all_names(action) for rule in rules)
        self._are_all_allowed = are_all and not any(rule.denies for rule in rules)
        patterns = {(rule.denies, pattern) for rule in rules for pattern in rule.names(action)}
        self._patterns = [(denies, Pattern(text, words)) for denies, text in sorted(patterns)]
        self.bytes_at_once = max(1, _WORK_AT_ONCE // max(1, sum(pattern.work for _, pattern in self._patterns)))
        """The number of bytes of names that are judged within a few milliseconds."""

    def under(self, name: bytes) -> RuleDecision:
        """Decide for one producer name, or one cursor."""
        for rule, patterns in self._rules:
            if any(pattern.matches(name) for pattern in patterns):
                return RuleDecision(not rule.denies, rule)
        return RuleDecision(False, None)

    def under_any(self) -> RuleDecision:
        """Decide whether the action is allowed for at least one producer name or cursor. The caller must later judge
        the actual name."""
        for rule, _ in self._rules:
            if not rule.denies or rule.is_of_all_names(self._action):
                return RuleDecision(not rule.denies, rule)
        return RuleDecision(False, None)

    def are_allowed(self, raw: Bytes, spans: Int64s2) -> Uint8s:
        """Return 1 for each allowed name and 0 for each other name. `spans` are the places of the names in `raw`."""
        if self._is_denied or self._are_all_allowed:
            return np.full(len(spans), not self._is_denied, np.uint8)
        denied, allowed = np.zeros(len(spans), np.uint8), np.zeros(len(spans), np.uint8)
        for denies, pattern in self._patterns:
            pattern.mark(raw, spans, denied if denies else allowed)
        allowed[denied != 0] = 0
        return allowed


class Rules:
    """All rules of a file. The rules of this object never change, but a different `Rules` object may replace it."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        # In the order of the file, but denials first. The first rule that matches decides.
        in_order = sorted(rules, key=lambda rule: not rule.denies)
        self._rules = [(rule, [Pattern(text) for text in rule.subjects]) for rule in in_order]
        self._granted: dict[tuple[str, Action, str], Granted] = {}

    def on(self, subject: str, action: Action, topic: str) -> Granted:
        """Return the rules for a topic. `topic` is a full name. Rules apply to all names that `_judged_as` returns for
        it."""
        key = subject, action, topic
        if (granted := self._granted.get(key)) is None:
            if len(self._granted) >= MAX_REMEMBERED:
                self._granted.clear()
            about = [
                rule
                for rule in self._about(subject, action)
                if any(_matches(rule.topics, name.encode(), subject) for name in _judged_as(topic, action, rule.denies))
            ]
            granted = self._granted[key] = Granted(about, subject, action)
        return granted

    def decide(self, subject: str, action: Action, topic: str, name: str | None = None) -> RuleDecision:
        """Decide for this producer name, or for this cursor. If the name is None, decide whether the action is allowed
        for at least one name."""
        granted = self.on(subject, action, topic)
        return granted.under_any() if name is None else granted.under(name.encode())

    def may_have_created(self, subject: str, topics: Sequence[str]) -> NDArray[np.bool_]:
        """Return, for each of these topics (full names), whether the subject may create the topic, alone or as a
        partition."""
        denied, allowed = np.zeros(len(topics), np.uint8), np.zeros(len(topics), np.uint8)
        for names in (topics, [whole_of(topic) or topic for topic in topics]):
            raw, spans = joined([name.encode() for name in names])
            for rule in self._about(subject, Action.CREATE):
                for pattern in _patterns(rule.topics, subject):
                    pattern.mark(raw, spans, denied if rule.denies else allowed)
        return allowed > denied

    def decide_namespace(self, subject: str, action: Action, namespace: str) -> RuleDecision:
        """Decide for every present and possible topic of the namespace."""
        topics = f"persistent://{namespace}/".encode()
        return self._decide_all(subject, action, topics + _ANY, topics)

    def decide_everything(self, subject: str, action: Action) -> RuleDecision:
        """Decide for every possible topic."""
        return self._decide_all(subject, action, _EVERY_TOPIC, b"")

    def decide_anything(self, subject: str, action: Action) -> RuleDecision:
        """Decide for at least one possible topic."""
        for rule in self._about(subject, action):
            if not rule.denies or _matches(rule.topics, _EVERY_TOPIC, subject):
                return RuleDecision(not rule.denies, rule)
        return RuleDecision(False, None)

    def _decide_all(self, subject: str, action: Action, sample: bytes, prefix: bytes) -> RuleDecision:
        """Decide for all topics of a set together. The names of these topics begin with `prefix`. A pattern that
        matches `sample` matches all of these topics."""
        for rule in self._about(subject, action):
            if rule.denies:
                # One denied topic is enough. The beginning of the pattern shows whether there can be one.
                begins = [pattern.prefix for pattern in _patterns(rule.topics, subject)]
                if any(one.startswith(prefix) or prefix.startswith(one) for one in begins):
                    return RuleDecision(False, rule)
            elif _matches(rule.topics, sample, subject):
                return RuleDecision(True, rule)
        return RuleDecision(False, None)

    def _about(self, subject: str, action: Action) -> list[Rule]:
        name = subject.encode(errors="surrogatepass")
        return [
            rule
            for rule, subjects in self._rules
            if action in rule.actions and any(pattern.matches(name) for pattern in subjects)
        ]


def _judged_as(topic: str, action: Action, denies: bool) -> tuple[str, ...]:
    """Return the names under which a rule may match a topic. For a partition, rules for its partitioned topic apply.

    A separate topic can have a partition's name too. Only a rule that matches exactly this name allows its creation.
    Otherwise a caller with permission to create one topic could create any number of topics. A rule that denies the
    partitioned topic also denies the creation of this topic.
    """
    whole = whole_of(topic)
    if whole is None:
        return (topic,)
    if action is not Action.CREATE:
        return (whole,)
    return (topic, whole) if denies else (topic,)


def _patterns(topics: Sequence[str], subject: str) -> list[Pattern]:
    # A name with a `/` would change the tenant or the namespace in the topic's name.
    words = {SUBJECT: subject}
    return [Pattern(text, words) for text in topics if "/" not in subject or "${" + SUBJECT + "}" not in text]


def _matches(topics: Sequence[str], name: bytes, subject: str) -> bool:
    return any(pattern.matches(name) for pattern in _patterns(topics, subject))


# -- Rules and shares in a TOML file. The file is read completely or not at all: docs/reference/rules.md.

_ALL = "all"
_OF_RULES = ("name", "subjects", "actions", "topics", "producers", "cursors")
_OF_NAMES = {"producers": Action.PUBLISH, "cursors": Action.READ}
"""Keys of rules that apply only to this action."""
_OWN_NAMES = ("${sub}", "${sub}/*")
_LIMITS = tuple(one.name for one in fields(CallerLimits))
_KEYS = {"allow": _OF_RULES, "deny": _OF_RULES, "share": ("name", "subjects", *_LIMITS)}

_EVERYTHING = ("*", "**")
_SHORT_TOPIC = re.compile(r"(?:[\w.:=\-*]|\$\{\w+\})+", re.ASCII)
_FULL_TOPIC = re.compile(r"persistent://(?:[\w.:=\-*/]|\$\{\w+\})+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RulesFile:
    """The contents of a file."""

    rules: Rules = field(default_factory=Rules)
    shares: tuple[CallerShare, ...] = ()
    in_all: CallerLimits = NO_LIMITS


class _Wrong(Exception):
    """An invalid part of the file, and its place."""


@contextmanager
def _within(where: str) -> Iterator[None]:
    try:
        yield
    except _Wrong as e:
        raise _Wrong(f"{where}: {e}") from e


def read_rules(path: Path) -> RulesFile:
    """Return the rules and shares in a file. Raises INVALID_CONFIGURATION, with the line and the rule."""
    try:
        text = read_named(path).decode()
        tables = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as e:
        # Some errors are not the parser's own, such as a number with too many digits.
        why = e.strerror if isinstance(e, OSError) else e
        raise error("INVALID_CONFIGURATION", f"the rules file {path} cannot be read: {why}", key="rules_file") from e
    try:
        return _read(tables, text.splitlines())
    except _Wrong as e:
        what = f"the rules file {path} is not valid: {e}"
        raise error(
            "INVALID_CONFIGURATION", what, hint="docs/reference/rules.md lists all keys.", key="rules_file"
        ) from e


def _read(tables: Mapping[str, Any], lines: Sequence[str]) -> RulesFile:
    for kind in tables:
        if kind not in (*_KEYS, _ALL):
            raise _Wrong(f"{kind!r} is no table of a rules file: there are [[allow]], [[deny]], [[share]] and [{_ALL}]")
    rules = [_rule(kind, *one) for kind in ("allow", "deny") for one in _each(tables, kind, lines)]
    shares = [_share(*one) for one in _each(tables, "share", lines)]
    return RulesFile(Rules(rules), tuple(shares), _in_all(tables))


def _each(tables: Mapping[str, Any], kind: str, lines: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables of a kind, each table with its place in the file. If a table has no name, its place serves as
    the name."""
    found = tables.get(kind, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise _Wrong(f"{kind} should be tables: write [[{kind}]] above each")
    # The parser does not report a table's line. So look for its head, unless text of several lines looks like one.
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
                raise _Wrong(f"{key} is for rules whose only action is {action.value}: split this rule")
        every = ("*",)
        return Rule(
            _name(table, where),
            kind == "deny",
            _patterns_of(table, "subjects"),
            actions,
            tuple(_topic(text, actions) for text in _patterns_of(table, "topics", SUBJECT)),
            _patterns_of(table, "producers", SUBJECT) if "producers" in table else every,
            # By default, a reader may move only its own cursors.
            _patterns_of(table, "cursors", SUBJECT) if "cursors" in table else every if kind == "deny" else _OWN_NAMES,
        )


def _share(table: Mapping[str, Any], where: str) -> CallerShare:
    with _within(where):
        _check_keys(table, _KEYS["share"])
        return CallerShare(_name(table, where), _patterns_of(table, "subjects"), _limits(table))


def _in_all(tables: Mapping[str, Any]) -> CallerLimits:
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
            raise _Wrong(f"{key!r} is no key of this table" + (f": do you mean {near[0]}?" if near else ""))


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
            raise _Wrong(f"actions has {text!r}: the actions are {', '.join(known)}")
    return frozenset(map(Action, texts))


def _patterns_of(table: Mapping[str, Any], key: str, *words: str) -> tuple[str, ...]:
    for text in (texts := _texts(table, key)):
        for word in words_in(text):
            if word not in words:
                there = f"this key knows only ${{{words[0]}}}" if words else "this key knows no such words"
                raise _Wrong(f"{key} has {text!r}, where ${{{word}}} is not known: {there}")
    return tuple(texts)


def _topic(text: str, actions: frozenset[Action]) -> str:
    """Return a pattern of full topic names, for a rule with these actions."""
    if text in _EVERYTHING:
        return text
    full = f"persistent://public/default/{text}" if _SHORT_TOPIC.fullmatch(text) else text
    if not _FULL_TOPIC.fullmatch(full):
        raise _Wrong(
            f"topics has {text!r}, which no topic can match: full names are persistent://tenant/namespace/name, and a "
            "short one stands for persistent://public/default/name"
        )
    if (whole := whole_of(full)) and actions != {Action.CREATE}:
        why = (
            f"rules are for whole topics: name {whole} (only a rule with the single action create may name a partition)"
        )
        raise _Wrong(f"topics has {text!r}: {why}")
    return full


def _limits(table: Mapping[str, Any]) -> CallerLimits:
    found = {key: value for key, value in table.items() if key in _LIMITS}
    for key, value in found.items():
        if type(value) is not int or value < 1:
            raise _Wrong(f"{key} is {value!r}: a whole number from 1 up is needed; without this key there is no limit")
    if not found and table:
        raise _Wrong(f"it limits nothing: its keys are {', '.join(_LIMITS)}")
    return CallerLimits(**found)
