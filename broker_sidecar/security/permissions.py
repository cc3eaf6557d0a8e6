"""What callers may do now: the rules that are in force, asked for every call and every frame."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from numpy.typing import NDArray

from broker_sidecar.rpc import parse_small
from broker_sidecar.security.rules import Action, Rule, RuleDecision, Rules, RulesFile
from broker_sidecar.security.subject import Subject, caller
from broker_sidecar.shares import DISK_SECONDS, MAX_CURSORS_A_CALLER, CallerShares
from seqdedupe.core.name_table import joined
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import check_cursor_name, namespace_name, producer_name, topic_name
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import Allowing, NamesJudge
from seqdedupe.topic.topic import Topic

# -- What each call needs, by the call's full name. One that is not listed is refused to all for whom rules count.

ALL_SHARDS = "shards"
"""The health of all processes that have topics of the cluster."""
CONFIGURATION = "configuration"
"""Whether the files that an operator may replace are in force as they are now."""
HEALTH_OF_THE_WHOLE = ("", ALL_SHARDS, CONFIGURATION)
"""What health may be asked of beside topics; no topic has such a full name. "" is this process."""


class On(Enum):
    """What a caller has to be allowed something on."""

    TOPIC = auto()
    """The topic that the request names."""
    CURSOR = auto()
    """The topic and the cursor, under its `name`, that the request names."""
    NAMESPACE = auto()
    """Every topic of the namespace that the request names."""
    EVERYTHING = auto()
    """Every topic."""
    ANYTHING = auto()
    """Some topic."""


class Effect(Enum):
    """The widest that a call may change. What is wider than a name needs a right on all of it."""

    NOTHING = "nothing"
    OWN_NAMES = "own producer names"
    """Under which the caller may publish: their sessions, watermarks and messages."""
    OWN_CURSOR = "own cursor"
    TOPIC = "topic"
    NAMESPACE = "namespace"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True)
class Need:
    """One of these actions, on this."""

    on: On
    actions: tuple[Action, ...]
    field: str = "topic"
    """Of the request, where it names what it is about."""
    effect: Effect = Effect.NOTHING
    is_judged_by_handler: bool = False
    """By the first message of the stream, or by the producer names."""


class Other(Enum):
    """Calls that need something else."""

    IS_KNOWN = auto()
    """Anybody who is known may make it. It changes nothing."""


def _looks(*actions: Action, field: str = "topic") -> Need:
    return Need(On.TOPIC, actions, field)


def _changes(action: Action, effect: Effect = Effect.TOPIC, *, by_handler: bool = False) -> Need:
    return Need(On.TOPIC, (action,), effect=effect, is_judged_by_handler=by_handler)


_PUBLISH, _READ, _CREATE, _OBSERVE, _ADMINISTER, _ATTACH = Action
_HEALTH = _looks(_OBSERVE, field="service")
_PUBLISHES = _changes(_PUBLISH, Effect.OWN_NAMES, by_handler=True)
_LOOKS_AT_ALL = Need(On.EVERYTHING, (_OBSERVE,))
_CHANGES_NAMESPACE = Need(On.NAMESPACE, (_ADMINISTER,), "namespace", Effect.NAMESPACE)
_CHANGES_ALL = Need(On.EVERYTHING, (_ADMINISTER,), effect=Effect.SIDECAR)


def _of(service: str, **calls: Need | Other) -> dict[str, Need | Other]:
    return {f"/{service}/{name}": need for name, need in calls.items()}


CALLS: dict[str, Need | Other] = {
    **_of(
        "seqdedupe.v1.PublishService",
        Open=_PUBLISHES,
        Publish=_PUBLISHES,
        PublishStream=_PUBLISHES,
    ),
    **_of(
        "seqdedupe.v1.ReadService",
        Read=_looks(_READ),
        ReadStream=_looks(_READ),
        Locate=_looks(_READ),
        GetLastMessageId=_looks(_READ),
        GetCursor=Need(On.CURSOR, (_READ,)),
        MoveCursor=Need(On.CURSOR, (_READ,), effect=Effect.OWN_CURSOR),
    ),
    **_of(
        "seqdedupe.v1.DedupeService",
        Attach=_changes(_ATTACH, by_handler=True),
        GetProducer=_looks(_OBSERVE, _ATTACH),
    ),
    **_of(
        "seqdedupe.v1.AdminService",
        CreateTopic=_changes(_CREATE),
        DeleteTopic=_changes(_ADMINISTER),
        # All of them or none: half of the topics would look like all.
        ListTopics=_LOOKS_AT_ALL,
        # Whoever publishes, reads, attaches or imports asks for the number of partitions.
        GetTopic=_looks(_OBSERVE, _PUBLISH, _READ, _ADMINISTER, _ATTACH),
        SetTopicPolicy=_changes(_ADMINISTER),
        GetTopicPolicy=_looks(_OBSERVE),
        RemoveTopicPolicy=_changes(_ADMINISTER),
        SetNamespacePolicy=_CHANGES_NAMESPACE,
        GetNamespacePolicy=Need(On.NAMESPACE, (_OBSERVE,), "namespace"),
        RemoveNamespacePolicy=_CHANGES_NAMESPACE,
        ListProducers=_looks(_OBSERVE),
        GetProducer=_looks(_OBSERVE),
        GetMessageState=_looks(_OBSERVE),
        ListInFlight=_looks(_OBSERVE),
        ResetProducer=_changes(_ADMINISTER),
        ListCursors=_looks(_OBSERVE),
        SetCursorHold=_changes(_ADMINISTER),
        DeleteCursor=_changes(_ADMINISTER),
        Snapshot=_changes(_ADMINISTER),
        ExportWatermarks=_looks(_OBSERVE),
        ImportWatermarks=_changes(_ADMINISTER, by_handler=True),
        ImportWindow=_changes(_ADMINISTER, by_handler=True),
        ExportSnapshot=_looks(_OBSERVE),
        ImportSnapshot=_changes(_ADMINISTER, by_handler=True),
        RebuildTopic=_changes(_ADMINISTER),
        ListSidecars=_LOOKS_AT_ALL,
        ForgetSidecar=_CHANGES_ALL,
        MoveTopic=_changes(_ADMINISTER),
        TakeTopic=_changes(_ADMINISTER),
        ReceiveTopic=_changes(_ADMINISTER, by_handler=True),
        SettleMove=_changes(_ADMINISTER),
        GetShards=_LOOKS_AT_ALL,
        Backup=_CHANGES_ALL,
        ConfirmBackup=_CHANGES_ALL,
        GetStatistics=_LOOKS_AT_ALL,
        GetVersion=Other.IS_KNOWN,
    ),
    **_of(
        "grpc.health.v1.Health",
        Check=_HEALTH,
        Watch=_HEALTH,
    ),
    **_of(
        "grpc.reflection.v1alpha.ServerReflection",
        ServerReflectionInfo=Need(On.ANYTHING, (_OBSERVE,)),
    ),
}


def _is_change(need: Need | Other) -> bool:
    """Whether nobody may make the call who does no more than look, publish or read."""
    if isinstance(need, Other) or need.is_judged_by_handler:
        return False
    return {_CREATE, _ADMINISTER}.issuperset(need.actions)


CHANGES = frozenset(method for method, need in CALLS.items() if _is_change(need))
"""What operators do, beside the calls whose handlers judge: it stands in the audit trail."""


NO_RULES = RulesFile()

Again: TypeAlias = Callable[[], object]
"""Judges once more what was allowed; raises NOT_ALLOWED."""

_NAMES_AT_ONCE = 1_000

MAX_NAMES_TOLD = 16
"""Of producers that are denied."""

_CHARACTERS_TOLD = 24
"""Of each name where there are several."""

_allowed: ContextVar[list[Again]] = ContextVar("allowed")
_rule: ContextVar[str] = ContextVar("rule", default="")


@dataclass(frozen=True, slots=True)
class Denial:
    """What was not allowed, and the rule that says so; None: no rule allows it."""

    subject: Subject
    action: Action
    topic: str
    """By its full name, or a namespace, or `*`: all topics."""
    producer_names: Sequence[str]
    rule: Rule | None
    cursor: str = ""
    """The name of one that is not the caller's."""


def allowed_so_far() -> list[Again]:
    """What was allowed in the call that is being handled, to be judged again when the rules change. Of no call,
    nothing."""
    return _allowed.get([])


def deciding_rule() -> str:
    """The name of the rule that has allowed the call that is being handled; empty where none was asked."""
    return _rule.get()


class Permissions:
    """The rules and shares in force. `on_denied` is told whatever is not allowed."""

    def __init__(self, file: RulesFile = NO_RULES, on_denied: Callable[[Denial], None] = lambda denial: None) -> None:
        self._rules = file.rules
        self.shares = CallerShares(file.shares, file.in_all)
        self._on_denied = on_denied
        self._allowing: WeakValueDictionary[tuple[str, int], _Allowing] = WeakValueDictionary()
        self.on_replaced: list[Callable[[], None]] = []
        """Whoever holds something that was allowed is told."""

    def replace(self, file: RulesFile) -> None:
        """These rules and shares are in force from now on, for open streams too."""
        self._rules = file.rules
        self.shares.replace(file.shares, file.in_all)
        for allowing in list(self._allowing.values()):
            allowing.judge_again(self.names_judge(allowing.subject, allowing.topic))
        for tell in self.on_replaced:
            tell()

    # -- calls -------------------------------------------------------------------------------------------------

    def check_call(self, method: str, request: Any) -> None:
        """Judges a call by what the table says that it needs. Raises NOT_ALLOWED, and what is wrong with the name."""
        _allowed.set([])
        _rule.set("")
        need = CALLS.get(method)
        if isinstance(need, Other) or caller().is_unrestricted:
            return
        if need is None:
            raise self._denied(caller(), Action.ADMINISTER, "*", None)
        if need.is_judged_by_handler:
            return
        if need.on in (On.TOPIC, On.CURSOR, On.NAMESPACE):
            parsed = parse_small(request_class(method), request)
            name = getattr(parsed, need.field)
            if need.field == "service" and name in HEALTH_OF_THE_WHOLE:
                return
            self.check(need, namespace_name(name) if need.on is On.NAMESPACE else topic_name(name))
            if need.on is On.CURSOR:
                self._check_cursor(topic_name(name), parsed.name)
        else:
            self.check(need, "*")

    def check_topic(self, action: Action, topic: str) -> None:
        """Judges a call of which its handler knows the topic, by its full name. Raises NOT_ALLOWED."""
        self.check(Need(On.TOPIC, (action,)), topic)

    def check(self, need: Need, name: str) -> None:
        """Raises NOT_ALLOWED. What is allowed is remembered for as long as the call lasts."""
        if not (subject := caller()).is_unrestricted:
            _rule.set(self._judge(subject, need, name))
            allowed_so_far().append(lambda: self._judge(subject, need, name))

    def _judge(self, subject: Subject, need: Need, name: str) -> str:
        """The name of the rule that allows one of the actions. Raises NOT_ALLOWED."""
        decisions = [self._decide(subject.name, action, need.on, name) for action in need.actions]
        for decision in decisions:
            if decision.is_allowed and decision.rule is not None:
                return decision.rule.name
        raise self._denied(subject, need.actions[0], name, decisions[0].rule)

    def _decide(self, subject: str, action: Action, on: On, name: str) -> RuleDecision:
        if not subject:
            return RuleDecision(False, None)
        match on:
            case On.TOPIC | On.CURSOR:
                return self._rules.decide(subject, action, name)
            case On.NAMESPACE:
                return self._rules.decide_namespace(subject, action, name)
            case On.EVERYTHING:
                return self._rules.decide_everything(subject, action)
        return self._rules.decide_anything(subject, action)

    def check_creates(self, topic: str, there: Iterable[str], more: int = 1) -> None:
        """Raises NOT_ALLOWED if the caller may not create the topic; SHARE_EXCEEDED if it would have created too many
        with so `more`, had it created all that are `there` and that it might."""
        self.check_topic(Action.CREATE, topic)
        subject = caller()
        use = self.shares.of(subject.name)
        if use.limits.topics is not None:
            # One that is being made already is made once.
            names = [name for name in there if name != topic]
            use.check("topics", int(np.count_nonzero(self._may_have_created(subject, names))) + more)

    def check_disk(self, topics: Topics[Topic]) -> None:
        """Raises SHARE_EXCEEDED if the logs of those of the topics that the caller might have created hold more bytes
        than they may. They are looked at once in `DISK_SECONDS` at most."""
        use = self.shares.of(caller().name)
        if use.limits.bytes_on_disk is None:
            return
        if (now_seconds := time.monotonic()) >= use.disk_counted_at + DISK_SECONDS:
            by_topic = {topic.name: topic.log_bytes for topic in topics.registry.open_topics()}
            mine = self._may_have_created(caller(), list(by_topic))
            use.disk_bytes = int(np.fromiter(by_topic.values(), np.int64, len(by_topic))[mine].sum())
            use.disk_counted_at = now_seconds
        use.check("bytes_on_disk", use.disk_bytes)

    def _may_have_created(self, subject: Subject, topics: Sequence[str]) -> NDArray[np.bool_]:
        if subject.is_unrestricted:
            return np.ones(len(topics), np.bool_)
        return self._rules.may_have_created(subject.name, topics)

    # -- producer names ----------------------------------------------------------------------------------------

    async def denied_names(self, topic: str, names: Sequence[str]) -> tuple[list[int], SeqdedupeError | None]:
        """The places of those of these names as which the caller may not publish to the topic, and the one error for
        all of them. However many names and patterns there are, others are served meanwhile.

        Raises INVALID_NAME for one that no producer can have: what is denied is told and written down.
        """
        subject = caller()
        if subject.is_unrestricted:
            return [], None
        rules: Rules | None = None
        while rules is not self._rules:
            rules, places = self._rules, list[int]()
            granted = rules.on(subject.name, Action.PUBLISH, topic)
            first = 0
            while first < len(names):
                some: list[bytes] = []
                size = 0
                while first + len(some) < len(names) and size < granted.bytes_at_once and len(some) < _NAMES_AT_ONCE:
                    some.append(producer_name(names[first + len(some)]))
                    size += len(some[-1])
                places += (first + np.flatnonzero(granted.are_allowed(*joined(some)) == 0)).tolist()
                first += len(some)
                if first < len(names):
                    await asyncio.sleep(0)
        return places, self.deny_names(subject, topic, [names[place] for place in places]) if places else None

    def check_publishes_unnamed(self, topic: str) -> None:
        """Raises NOT_ALLOWED if the caller may publish to the topic under some producer names alone: in a topic of
        deduplication IDs messages have none."""
        subject = caller()
        if not subject.is_unrestricted and not self.names_judge(subject.name, topic)(*joined([b""]))[0]:
            raise self.deny_names(subject, topic, [""])

    def allowing(self, topic: str, producers: Producers) -> Allowing | None:
        """As which of a topic's producers the caller may publish; None: as all, whatever the rules say."""
        subject = caller()
        if subject.is_unrestricted:
            return None
        # While it is there its producers are, and no others are at that address.
        key = subject.name, id(producers)
        if (found := self._allowing.get(key)) is None:
            found = self._allowing[key] = _Allowing(self, subject.name, topic, producers)
        return found

    def check_new_names(
        self, topic: str, producers: Producers, names: Sequence[bytes], *, are_all_its: bool = False
    ) -> None:
        """Raises SHARE_EXCEEDED if the topic would know too many names with those of these that are new to it.

        With `are_all_its` all names of the topic are the caller's, whatever the rules for publishing say.
        """
        use = self.shares.of(caller().name)
        if use.limits.producer_names is None and self.shares.in_all.limits.producer_names is None:
            return
        if new := int(np.count_nonzero(producers.find_all(list(names)) < 0)):
            self.shares.in_all.check("producer_names", producers.known_count() + new)
            if use.limits.producer_names is not None:
                its = producers.known_count() if are_all_its else self._count_names(topic, producers)
                use.check("producer_names", its + new)

    async def judge_known_names(self, topic: str, producers: Producers) -> Allowing | None:
        """What `check_new_names` counts: each name that the topic knows is judged, if it has not been, some at once.

        It is forgotten when nobody holds what this returns.
        """
        allowing = self.allowing(topic, producers)
        if allowing is not None and self.shares.of(caller().name).limits.producer_names is not None:
            for first in range(0, len(producers), _NAMES_AT_ONCE):
                allowing.forbidden(np.arange(first, min(first + _NAMES_AT_ONCE, len(producers))))
                await asyncio.sleep(0)
        return allowing

    def _count_names(self, topic: str, producers: Producers) -> int:
        """As how many of the topic's producers the caller may publish."""
        if (allowing := self.allowing(topic, producers)) is None:
            return producers.known_count()
        return len(producers) - len(allowing.forbidden(np.arange(len(producers))))

    # -- cursors -----------------------------------------------------------------------------------------------

    def _check_cursor(self, topic: str, name: str) -> None:
        """Raises NOT_ALLOWED if the cursor is not the caller's; INVALID_NAME for a name that none can have."""
        subject = caller()
        check_cursor_name(name)
        decision = self._rules.decide(subject.name, Action.READ, topic, name)
        if not decision.is_allowed:
            raise self._denied(subject, Action.READ, topic, decision.rule, cursor=name)

    def check_new_cursor(self, topic: str, there: Sequence[str]) -> None:
        """Raises SHARE_EXCEEDED if the topic, which has these cursors, would have too many of the caller's with one
        more."""
        subject = caller()
        use = self.shares.of(subject.name)
        if subject.is_unrestricted:
            use.check("cursors", len(there) + 1)
        else:
            names = joined([name.encode() for name in there])
            is_its = self._rules.on(subject.name, Action.READ, topic).are_allowed(*names)
            use.check("cursors", int(np.count_nonzero(is_its)) + 1, otherwise=MAX_CURSORS_A_CALLER)

    def names_judge(self, subject: str, topic: str) -> NamesJudge:
        """Judges names under which somebody would publish to the topic."""
        return self._rules.on(subject, Action.PUBLISH, topic).are_allowed

    def deny_names(self, subject: Subject, topic: str, names: list[str]) -> SeqdedupeError:
        """The error for these names; it names the first ones."""
        rule = self._rules.decide(subject.name, Action.PUBLISH, topic, names[0]).rule
        return self._denied(subject, Action.PUBLISH, topic, rule, names)

    def _denied(
        self,
        subject: Subject,
        action: Action,
        topic: str,
        rule: Rule | None,
        names: Sequence[str] = (),
        cursor: str = "",
    ) -> SeqdedupeError:
        self._on_denied(Denial(subject, action, topic, names, rule, cursor))
        where = "every topic" if topic == "*" else topic
        under = f" by cursor {cursor!r}" if cursor else ""
        if names:
            more = f" and {len(names) - MAX_NAMES_TOLD} others" if len(names) > MAX_NAMES_TOLD else ""
            # Of one name all is told; of many, as much as a status of gRPC has room for.
            told = [name[:_CHARACTERS_TOLD] for name in names[:MAX_NAMES_TOLD]] if len(names) > 1 else names
            under = f" as producer {', '.join(map(repr, told))}{more}"
        numbers: dict[str, Any] = {"subject": subject.name, "action": action.value, "topic": topic}
        if cursor:
            numbers["cursor"] = cursor
        if names:
            numbers["producer_name"] = names[0]
        return error("NOT_ALLOWED", f"{subject.name!r} may not {action.value} {where}{under}", **numbers)


class _Allowing(Allowing):
    """That of one caller, on one topic. What is denied is of a call that is being handled."""

    def __init__(self, permissions: Permissions, subject: str, topic: str, producers: Producers) -> None:
        self.subject = subject
        self.topic = topic
        super().__init__(
            producers,
            permissions.names_judge(subject, topic),
            lambda names: permissions.deny_names(caller(), topic, names),
        )


@cache
def request_class(method: str) -> Any:
    """The class of a call's requests."""
    service, _, call = method.removeprefix("/").rpartition("/")
    described: Any = descriptor_pool.Default().FindServiceByName(service)
    return message_factory.GetMessageClass(described.methods_by_name[call].input_type)
