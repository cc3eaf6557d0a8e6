"""What each call needs, by the call's full name. One that is not listed is refused to all for whom rules count."""

from dataclasses import dataclass
from enum import Enum, auto

from broker_sidecar.security.rules import Action

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
