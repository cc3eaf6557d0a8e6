"""Who may do what: rules, and what they say of one caller. Nothing is allowed unless a rule says so; a denial wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from seqdedupe.core.names import joined
from seqdedupe.core.patterns import Pattern
from seqdedupe.format.jit import Bytes, Int64s2, Uint8s
from seqdedupe.names import whole_of

SUBJECT = "sub"
"""In a pattern of topics or producers, `${sub}` is the caller's name, as it is."""

MAX_REMEMBERED = 4_096
"""Callers and topics of which is remembered which rules are about them."""

_WORK_AT_ONCE = 500_000
"""Bytes of names, multiplied by what patterns may have to do for each."""

_ANY = b"\xff"
"""Stands for any name: in no pattern and in no name, so that only a `*` matches it."""

_EVERY_TOPIC = b"persistent://" + b"/".join([_ANY] * 3)


class Action(Enum):
    """What somebody may do to a topic."""

    PUBLISH = "publish"
    READ = "read"
    CREATE = "create"
    OBSERVE = "observe"
    ADMINISTER = "administer"
    ATTACH = "attach"
    """To be the broker whose log the topic's is: all producer names of it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Allows or denies the actions to the subjects, on the topics: publishing under some producer names, moving some
    cursors."""

    name: str
    """As an operator finds it: what it is called, or its kind and place in the file."""
    denies: bool
    subjects: tuple[str, ...]
    actions: frozenset[Action]
    topics: tuple[str, ...]
    producers: tuple[str, ...] = ("*",)
    """It counts for publishing alone."""
    cursors: tuple[str, ...] = ("*",)
    """It counts for reading alone: those that may be moved by who may read."""

    def names(self, action: Action) -> tuple[str, ...]:
        """The patterns of names under which it is about this action."""
        match action:
            case Action.PUBLISH:
                return self.producers
            case Action.READ:
                return self.cursors
        return ("*",)

    def is_of_all_names(self, action: Action) -> bool:
        return not {"*", "**"}.isdisjoint(self.names(action))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether it is allowed, and the rule that says so. None: no rule allows it."""

    is_allowed: bool
    rule: Rule | None


class Granted:
    """What the rules say of one caller and action on one topic: those that match, denials first."""

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
        """So many bytes of names are judged in some milliseconds at most."""

    def under(self, name: bytes) -> Decision:
        """For one producer name, or one cursor."""
        for rule, patterns in self._rules:
            if any(pattern.matches(name) for pattern in patterns):
                return Decision(not rule.denies, rule)
        return Decision(False, None)

    def under_any(self) -> Decision:
        """Under some name, which is still to be judged."""
        for rule, _ in self._rules:
            if not rule.denies or rule.is_of_all_names(self._action):
                return Decision(not rule.denies, rule)
        return Decision(False, None)

    def are_allowed(self, raw: Bytes, spans: Int64s2) -> Uint8s:
        """1 for each of the names at these places of a buffer that it is allowed for."""
        if self._is_denied or self._are_all_allowed:
            return np.full(len(spans), not self._is_denied, np.uint8)
        denied, allowed = np.zeros(len(spans), np.uint8), np.zeros(len(spans), np.uint8)
        for denies, pattern in self._patterns:
            pattern.mark(raw, spans, denied if denies else allowed)
        allowed[denied != 0] = 0
        return allowed


class Rules:
    """All rules. They never change: others take their place."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        # In the order of the file, but denials first: the first one that matches decides.
        in_order = sorted(rules, key=lambda rule: not rule.denies)
        self._rules = [(rule, [Pattern(text) for text in rule.subjects]) for rule in in_order]
        self._granted: dict[tuple[str, Action, str], Granted] = {}

    def on(self, subject: str, action: Action, topic: str) -> Granted:
        """What they say of a topic, by its full name. A partition is judged as the topic that it belongs to."""
        key = subject, action, topic
        if (granted := self._granted.get(key)) is None:
            if len(self._granted) >= MAX_REMEMBERED:
                self._granted.clear()
            name = (whole_of(topic) or topic).encode()
            about = [rule for rule in self._about(subject, action) if _matches(rule.topics, name, subject)]
            granted = self._granted[key] = Granted(about, subject, action)
        return granted

    def decide(self, subject: str, action: Action, topic: str, name: str | None = None) -> Decision:
        """Whether it is allowed under this producer name, or for this cursor; None: under some name."""
        granted = self.on(subject, action, topic)
        return granted.under_any() if name is None else granted.under(name.encode())

    def allows(self, subject: str, action: Action, topics: Sequence[str]) -> NDArray[np.bool_]:
        """On which of these topics, by full names, it is allowed."""
        raw, spans = joined([(whole_of(topic) or topic).encode() for topic in topics])
        denied, allowed = np.zeros(len(spans), np.uint8), np.zeros(len(spans), np.uint8)
        for rule in self._about(subject, action):
            for pattern in _patterns(rule.topics, subject):
                pattern.mark(raw, spans, denied if rule.denies else allowed)
        return allowed > denied

    def decide_namespace(self, subject: str, action: Action, namespace: str) -> Decision:
        """Whether it is allowed on every topic that the namespace has or may have."""
        topics = f"persistent://{namespace}/".encode()
        return self._decide_all(subject, action, topics + _ANY, topics)

    def decide_everything(self, subject: str, action: Action) -> Decision:
        """Whether it is allowed on every topic that there may be."""
        return self._decide_all(subject, action, _EVERY_TOPIC, b"")

    def decide_anything(self, subject: str, action: Action) -> Decision:
        """Whether it is allowed on some topic that there may be."""
        for rule in self._about(subject, action):
            if not rule.denies or _matches(rule.topics, _EVERY_TOPIC, subject):
                return Decision(not rule.denies, rule)
        return Decision(False, None)

    def _decide_all(self, subject: str, action: Action, sample: bytes, prefix: bytes) -> Decision:
        """`sample` is matched by what matches all of these topics, and `prefix` is what they begin with."""
        for rule in self._about(subject, action):
            if rule.denies:
                # One of them is enough. What it begins with tells whether there can be one.
                begins = [pattern.prefix for pattern in _patterns(rule.topics, subject)]
                if any(one.startswith(prefix) or prefix.startswith(one) for one in begins):
                    return Decision(False, rule)
            elif _matches(rule.topics, sample, subject):
                return Decision(True, rule)
        return Decision(False, None)

    def _about(self, subject: str, action: Action) -> list[Rule]:
        name = subject.encode(errors="surrogatepass")
        return [
            rule
            for rule, subjects in self._rules
            if action in rule.actions and any(pattern.matches(name) for pattern in subjects)
        ]


def _patterns(topics: Sequence[str], subject: str) -> list[Pattern]:
    # A name with a `/` in it would make another tenant's or namespace's of the topic.
    words = {SUBJECT: subject}
    return [Pattern(text, words) for text in topics if "/" not in subject or "${" + SUBJECT + "}" not in text]


def _matches(topics: Sequence[str], name: bytes, subject: str) -> bool:
    return any(pattern.matches(name) for pattern in _patterns(topics, subject))
