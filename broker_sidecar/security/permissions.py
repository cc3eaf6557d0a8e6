"""The permissions of callers. The rules in force are applied to every call and every frame."""

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
from seqdedupe.figures import counted
from seqdedupe.names import check_cursor_name, namespace_name, producer_name, topic_name
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import Allowing, NamesJudge
from seqdedupe.topic.topic import Topic

# -- The needs of each call, by its full name. A call that is not listed is refused to callers for whom rules count.

ALL_SHARDS = "shards"
"""The name for the health of all processes that have topics of the cluster."""
CONFIGURATION = "configuration"
"""The name for this check: whether the current versions of the files that an operator may replace are in force."""
HEALTH_OF_THE_WHOLE = ("", ALL_SHARDS, CONFIGURATION)
"""Names that health checks may ask for in addition to topics. No topic has such a full name. "" means this process."""


class On(Enum):
    """The object on which a caller needs a right."""

    TOPIC = auto()
    """The topic in the request."""
    CURSOR = auto()
    """The topic and the cursor (field `name`) in the request."""
    NAMESPACE = auto()
    """Every topic of the namespace in the request."""
    EVERYTHING = auto()
    """Every topic."""
    ANYTHING = auto()
    """At least one topic."""


class Effect(Enum):
    """The widest effect of a call. If a call affects more than single producer names, the caller needs a right on the
    whole object."""

    NOTHING = "nothing"
    OWN_NAMES = "own producer names"
    """The names under which the caller may publish: their sessions, watermarks and messages."""
    OWN_CURSOR = "own cursor"
    TOPIC = "topic"
    NAMESPACE = "namespace"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True)
class Need:
    """Require a right to one of these actions on this object."""

    on: On
    actions: tuple[Action, ...]
    field: str = "topic"
    """The field of the request that names the object."""
    effect: Effect = Effect.NOTHING
    is_judged_by_handler: bool = False
    """Whether the handler judges, by the first message of the stream or by the producer names."""


class Other(Enum):
    """Needs other than a right."""

    IS_KNOWN = auto()
    """Every authenticated caller may make the call. It changes nothing."""


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
        # All topics or none: a caller would mistake a part of the list for the whole list.
        ListTopics=_LOOKS_AT_ALL,
        # Clients that publish, read, attach or import ask for the number of partitions.
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
    """Return whether the call needs a right other than the rights to look, publish or read."""
    if isinstance(need, Other) or need.is_judged_by_handler:
        return False
    return {_CREATE, _ADMINISTER}.issuperset(need.actions)


CHANGES = frozenset(method for method, need in CALLS.items() if _is_change(need))
"""The operators' calls that the audit trail records, in addition to the calls that their handlers judge."""


NO_RULES = RulesFile()

Again: TypeAlias = Callable[[], object]
"""A function that judges again a call that was allowed. It raises NOT_ALLOWED."""

_NAMES_AT_ONCE = 1_000

MAX_NAMES_TOLD = 16
"""The most denied producers that an error names."""

_CHARACTERS_TOLD = 24
"""The most characters of each name if there are several."""

_allowed: ContextVar[list[Again]] = ContextVar("allowed")
_rule: ContextVar[str] = ContextVar("rule", default="")


@dataclass(frozen=True, slots=True)
class Denial:
    """A denied action, and the rule that denies the action. If the rule is None, no rule allows the action."""

    subject: Subject
    action: str
    """All actions if each of them would be enough: `observe or attach`."""
    topic: str
    """A full name, or a namespace, or `*`: all topics."""
    producer_names: Sequence[str]
    rule: Rule | None
    cursor: str = ""
    """The name of a cursor that does not belong to the caller."""


def allowed_so_far() -> list[Again]:
    """Return the rights granted in the current call, which are judged again when the rules change. Outside a call the
    list is empty."""
    return _allowed.get([])


def deciding_rule() -> str:
    """Return the name of the rule that has allowed the present call; empty if no rule was applied."""
    return _rule.get()


class Permissions:
    """The rules and shares in force. `on_denied` is called for each denial."""

    def __init__(self, file: RulesFile = NO_RULES, on_denied: Callable[[Denial], None] = lambda denial: None) -> None:
        self._rules = file.rules
        self.shares = CallerShares(file.shares, file.in_all)
        self._on_denied = on_denied
        self._allowing: WeakValueDictionary[tuple[str, int], _Allowing] = WeakValueDictionary()
        self.on_replaced: list[Callable[[], None]] = []
        """Called after a replacement of the rules, for holders of granted rights."""

    def replace(self, file: RulesFile) -> None:
        """Put these rules and shares in force, also for open streams."""
        self._rules = file.rules
        self.shares.replace(file.shares, file.in_all)
        for allowing in list(self._allowing.values()):
            allowing.judge_again(self.names_judge(allowing.subject, allowing.topic))
        for tell in self.on_replaced:
            tell()

    # -- calls -------------------------------------------------------------------------------------------------

    def check_call(self, method: str, request: Any) -> None:
        """Judge a call by its needs in the table. Raises NOT_ALLOWED, or the error of an invalid name."""
        _allowed.set([])
        _rule.set("")
        need = CALLS.get(method)
        if isinstance(need, Other) or caller().is_unrestricted:
            return
        if need is None:
            raise self._denied(caller(), (Action.ADMINISTER,), "*", None)
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
        """Judge a call whose handler knows the topic's full name. Raises NOT_ALLOWED."""
        self.check(Need(On.TOPIC, (action,)), topic)

    def check(self, need: Need, name: str) -> None:
        """Raise NOT_ALLOWED if the caller does not have the right. A granted right is remembered until the call
        ends."""
        if not (subject := caller()).is_unrestricted:
            _rule.set(self._judge(subject, need, name))
            allowed_so_far().append(lambda: self._judge(subject, need, name))

    def _judge(self, subject: Subject, need: Need, name: str) -> str:
        """Return the name of the rule that allows one of the actions. Raises NOT_ALLOWED."""
        decisions = [self._decide(subject.name, action, need.on, name) for action in need.actions]
        for decision in decisions:
            if decision.is_allowed and decision.rule is not None:
                return decision.rule.name
        rule = next((decision.rule for decision in decisions if decision.rule is not None), None)
        raise self._denied(subject, need.actions, name, rule)

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
        """Raise NOT_ALLOWED if the caller may not create the topic, and SHARE_EXCEEDED if the caller would have too
        many topics.

        The count includes `more` new topics, and the topics in `there` that the rules would allow the caller to create.
        """
        self.check_topic(Action.CREATE, topic)
        subject = caller()
        use = self.shares.of(subject.name)
        if use.limits.topics is not None:
            # If the topic is being made already, it is counted once.
            names = [name for name in there if name != topic]
            use.check("topics", int(np.count_nonzero(self._may_have_created(subject, names))) + more)

    def check_disk(self, topics: Topics[Topic]) -> None:
        """Raise SHARE_EXCEEDED if the logs of the caller's topics have more bytes than the caller's share.

        The caller's topics are all topics that the caller might have created. Their sizes are measured at most once in
        `DISK_SECONDS`.
        """
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
        """Find the names under which the caller may not publish to the topic. Return the places of these names, and one
        error for all of them.

        Even with many names and patterns, this does not block other calls. Raises INVALID_NAME for a name that no
        producer can have, because denied names are reported and recorded.
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
        """Raise NOT_ALLOWED if the caller may publish to the topic only under certain producer names. In a topic with
        deduplication IDs, messages have no producer names."""
        subject = caller()
        if not subject.is_unrestricted and not self.names_judge(subject.name, topic)(*joined([b""]))[0]:
            raise self.deny_names(subject, topic, [""])

    def allowing(self, topic: str, producers: Producers) -> Allowing | None:
        """Return an object that decides under which producer names of a topic the caller may publish; None if no rules
        apply to the caller."""
        subject = caller()
        if subject.is_unrestricted:
            return None
            # The entry keeps its producers alive, so no other object can have this address.
        key = subject.name, id(producers)
        if (found := self._allowing.get(key)) is None:
            found = self._allowing[key] = _Allowing(self, subject.name, topic, producers)
        return found

    def check_new_names(
        self, topic: str, producers: Producers, names: Sequence[bytes], *, are_all_its: bool = False
    ) -> None:
        """Raise SHARE_EXCEEDED if the topic would know too many names, including the new names in `names`.

        With `are_all_its`, all names of the topic count as the caller's, independent of the rules for publishing.
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
        """Judge all producer names that the topic knows, so that `check_new_names` can count them. Names that are
        already judged are skipped. Other calls run between groups of names.

        The caller must keep the returned object: the results are lost when it is freed.
        """
        allowing = self.allowing(topic, producers)
        if allowing is not None and self.shares.of(caller().name).limits.producer_names is not None:
            for first in range(0, len(producers), _NAMES_AT_ONCE):
                allowing.forbidden(np.arange(first, min(first + _NAMES_AT_ONCE, len(producers))))
                await asyncio.sleep(0)
        return allowing

    def _count_names(self, topic: str, producers: Producers) -> int:
        """Return the number of the topic's producers as which the caller may publish."""
        if (allowing := self.allowing(topic, producers)) is None:
            return producers.known_count()
        return len(producers) - len(allowing.forbidden(np.arange(len(producers))))

    # -- cursors -----------------------------------------------------------------------------------------------

    def _check_cursor(self, topic: str, name: str) -> None:
        """Raise NOT_ALLOWED if the cursor does not belong to the caller; INVALID_NAME if no cursor can have this
        name."""
        subject = caller()
        check_cursor_name(name)
        decision = self._rules.decide(subject.name, Action.READ, topic, name)
        if not decision.is_allowed:
            raise self._denied(subject, (Action.READ,), topic, decision.rule, cursor=name)

    def check_new_cursor(self, topic: str, there: Sequence[str]) -> None:
        """Raise SHARE_EXCEEDED if the caller would have too many cursors with one more. `there` contains the topic's
        cursors."""
        subject = caller()
        use = self.shares.of(subject.name)
        if subject.is_unrestricted:
            use.check("cursors", len(there) + 1)
        else:
            names = joined([name.encode() for name in there])
            is_its = self._rules.on(subject.name, Action.READ, topic).are_allowed(*names)
            use.check("cursors", int(np.count_nonzero(is_its)) + 1, otherwise=MAX_CURSORS_A_CALLER)

    def names_judge(self, subject: str, topic: str) -> NamesJudge:
        """Return the function that judges names under which the subject would publish to the topic."""
        return self._rules.on(subject, Action.PUBLISH, topic).are_allowed

    def deny_names(self, subject: Subject, topic: str, names: list[str]) -> SeqdedupeError:
        """Return the error for these names. The error contains the first of the names."""
        rule = self._rules.decide(subject.name, Action.PUBLISH, topic, names[0]).rule
        return self._denied(subject, (Action.PUBLISH,), topic, rule, names)

    def _denied(
        self,
        subject: Subject,
        actions: Sequence[Action],
        topic: str,
        rule: Rule | None,
        names: Sequence[str] = (),
        cursor: str = "",
    ) -> SeqdedupeError:
        *others, last = (action.value for action in actions)
        wanted = f"{', '.join(others)} or {last}" if others else last
        self._on_denied(Denial(subject, wanted, topic, names, rule, cursor))
        where = "every topic" if topic == "*" else topic
        under = f" by cursor {cursor!r}" if cursor else ""
        if names:
            more = f" and {counted(len(names) - MAX_NAMES_TOLD, 'other')}" if len(names) > MAX_NAMES_TOLD else ""
            # A single name is shown in full. Several names are cut to the size of a gRPC status.
            told = [name[:_CHARACTERS_TOLD] for name in names[:MAX_NAMES_TOLD]] if len(names) > 1 else names
            under = f" as producer {', '.join(map(repr, told))}{more}"
        numbers: dict[str, Any] = {"subject": subject.name, "action": wanted, "topic": topic}
        if cursor:
            numbers["cursor"] = cursor
        if names:
            numbers["producer_name"] = names[0]
        return error("NOT_ALLOWED", f"{subject.name!r} may not {wanted} {where}{under}", **numbers)


class _Allowing(Allowing):
    """The rights of one caller on one topic. A denial belongs to the call that is being handled."""

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
    """Return the class of a call's requests."""
    service, _, call = method.removeprefix("/").rpartition("/")
    described: Any = descriptor_pool.Default().FindServiceByName(service)
    return message_factory.GetMessageClass(described.methods_by_name[call].input_type)
