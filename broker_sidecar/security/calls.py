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
    NAMESPACE = auto()
    """Every topic of the namespace that the request names."""
    EVERYTHING = auto()
    """Every topic."""
    ANYTHING = auto()
    """Some topic."""


@dataclass(frozen=True, slots=True)
class Need:
    """One of these actions, on this."""

    on: On
    actions: tuple[Action, ...]
    field: str = "topic"
    """Of the request, where it names what it is about."""


class Other(Enum):
    """Calls that need something else."""

    IS_KNOWN = auto()
    """Anybody who is known may make it."""
    IN_ITS_HANDLER = auto()
    """Its handler judges, by the first message of the stream or by the producer names."""


def _topic(*actions: Action, field: str = "topic") -> Need:
    return Need(On.TOPIC, actions, field)


_PUBLISH, _READ, _CREATE, _OBSERVE, _ADMINISTER = Action
_HEALTH = _topic(_OBSERVE, field="service")


def _of(service: str, **calls: Need | Other) -> dict[str, Need | Other]:
    return {f"/{service}/{name}": need for name, need in calls.items()}


CALLS: dict[str, Need | Other] = {
    **_of(
        "seqdedupe.v1.PublishService",
        Open=Other.IN_ITS_HANDLER,
        Publish=Other.IN_ITS_HANDLER,
        PublishStream=Other.IN_ITS_HANDLER,
    ),
    **_of(
        "seqdedupe.v1.ReadService",
        Read=_topic(_READ),
        ReadStream=_topic(_READ),
        Locate=_topic(_READ),
        GetLastMessageId=_topic(_READ),
        GetCursor=_topic(_READ),
        MoveCursor=_topic(_READ),
    ),
    **_of(
        "seqdedupe.v1.DedupeService",
        Attach=Other.IN_ITS_HANDLER,
        GetProducer=_topic(_OBSERVE),
    ),
    **_of(
        "seqdedupe.v1.AdminService",
        CreateTopic=_topic(_CREATE),
        DeleteTopic=_topic(_ADMINISTER),
        # All of them or none: half of the topics would look like all.
        ListTopics=Need(On.EVERYTHING, (_OBSERVE,)),
        # Whoever publishes, reads or imports asks for the number of partitions.
        GetTopic=_topic(_OBSERVE, _PUBLISH, _READ, _ADMINISTER),
        SetTopicPolicy=_topic(_ADMINISTER),
        GetTopicPolicy=_topic(_OBSERVE),
        RemoveTopicPolicy=_topic(_ADMINISTER),
        SetNamespacePolicy=Need(On.NAMESPACE, (_ADMINISTER,), "namespace"),
        GetNamespacePolicy=Need(On.NAMESPACE, (_OBSERVE,), "namespace"),
        RemoveNamespacePolicy=Need(On.NAMESPACE, (_ADMINISTER,), "namespace"),
        ListProducers=_topic(_OBSERVE),
        GetProducer=_topic(_OBSERVE),
        GetMessageState=_topic(_OBSERVE),
        ListInFlight=_topic(_OBSERVE),
        ResetProducer=_topic(_ADMINISTER),
        ListCursors=_topic(_OBSERVE),
        SetCursorHold=_topic(_ADMINISTER),
        DeleteCursor=_topic(_ADMINISTER),
        Snapshot=_topic(_ADMINISTER),
        ExportWatermarks=_topic(_OBSERVE),
        ImportWatermarks=Other.IN_ITS_HANDLER,
        ImportWindow=Other.IN_ITS_HANDLER,
        ExportSnapshot=_topic(_OBSERVE),
        ImportSnapshot=Other.IN_ITS_HANDLER,
        RebuildTopic=_topic(_ADMINISTER),
        ListSidecars=Need(On.EVERYTHING, (_OBSERVE,)),
        ForgetSidecar=Need(On.EVERYTHING, (_ADMINISTER,)),
        MoveTopic=_topic(_ADMINISTER),
        TakeTopic=_topic(_ADMINISTER),
        ReceiveTopic=Other.IN_ITS_HANDLER,
        SettleMove=_topic(_ADMINISTER),
        GetShards=Need(On.EVERYTHING, (_OBSERVE,)),
        Backup=Need(On.EVERYTHING, (_ADMINISTER,)),
        GetStatistics=Need(On.EVERYTHING, (_OBSERVE,)),
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
    return isinstance(need, Need) and {_CREATE, _ADMINISTER}.issuperset(need.actions)


CHANGES = frozenset(method for method, need in CALLS.items() if _is_change(need))
"""What operators do, beside the calls whose handlers judge: it stands in the audit trail."""
