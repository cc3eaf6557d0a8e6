"""Every call of every service, for every kind of caller: what it needs, and that nothing less will do."""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from broker_sidecar.security.permissions import CALLS, Effect, Need, On
from broker_sidecar.security.rules import Action
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, admin_pb2_grpc, dedupe_pb2, publish_pb2, publish_pb2_grpc, read_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, status
from tests.broker_sidecar.security.by_name import MODULE, call_as

MODULES = (publish_pb2, read_pb2, dedupe_pb2, admin_pb2, health_pb2, reflection_pb2)

ACTIONS = [action.value for action in Action]

NEEDS = {
    "Open": {"publish"},
    "Publish": {"publish"},
    "PublishStream": {"publish"},
    "Attach": {"attach"},
    "Read": {"read"},
    "ReadStream": {"read"},
    "Locate": {"read"},
    "GetLastMessageId": {"read"},
    "GetCursor": {"read"},
    "MoveCursor": {"read"},
    "ListCursors": {"observe"},
    "SetCursorHold": {"administer"},
    "DeleteCursor": {"administer"},
    "CreateTopic": {"create"},
    "GetTopic": {"observe", "publish", "read", "administer", "attach"},
    "ListTopics": {"observe"},
    "GetTopicPolicy": {"observe"},
    "GetNamespacePolicy": {"observe"},
    "ListProducers": {"observe"},
    "GetProducer": {"observe"},
    "GetMessageState": {"observe"},
    "ListInFlight": {"observe"},
    "ExportWatermarks": {"observe"},
    "ExportSnapshot": {"observe"},
    "ListSidecars": {"observe"},
    "GetShards": {"observe"},
    "GetStatistics": {"observe"},
    "Check": {"observe"},
    "Watch": {"observe"},
    "ServerReflectionInfo": {"observe"},
    "DeleteTopic": {"administer"},
    "SetTopicPolicy": {"administer"},
    "RemoveTopicPolicy": {"administer"},
    "SetNamespacePolicy": {"administer"},
    "RemoveNamespacePolicy": {"administer"},
    "ResetProducer": {"administer"},
    "Snapshot": {"administer"},
    "ImportWatermarks": {"administer"},
    "ImportWindow": {"administer"},
    "ImportSnapshot": {"administer"},
    "RebuildTopic": {"administer"},
    "ForgetSidecar": {"administer"},
    "Backup": {"administer"},
    "ConfirmBackup": {"administer"},
    "MoveTopic": {"administer"},
    "TakeTopic": {"administer"},
    "ReceiveTopic": {"administer"},
    "SettleMove": {"administer"},
    "GetVersion": set(ACTIONS),
}
"""Each of these actions alone is enough."""

OWN_NAMES_ALONE = {"publish", "read"}
"""What the caller `narrow` may do, under its own producer names and with its own cursors alone."""

TOPIC = "persistent://public/default/secret-"
"""And the name of the call: of one that makes it, or deletes it, no other one learns."""


def _methods() -> list[Any]:
    """All methods that a sidecar may serve, as the schemas describe them."""
    services = itertools.chain.from_iterable(module.DESCRIPTOR.services_by_name.values() for module in MODULES)
    return [method for service in services for method in service.methods]


METHODS = _methods()


def _path(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def test_every_call_has_a_rule_and_no_rule_is_of_nothing() -> None:
    assert {_path(method) for method in METHODS} == set(CALLS)
    assert {method.name for method in METHODS} == set(NEEDS)


def _need(method: Any) -> Need | None:
    need = CALLS[_path(method)]
    return need if isinstance(need, Need) else None


def test_what_is_wider_than_a_name_needs_a_right_on_all_of_it() -> None:
    rights = {
        Effect.OWN_NAMES: (On.TOPIC, {Action.PUBLISH}),
        Effect.OWN_CURSOR: (On.CURSOR, {Action.READ}),
        Effect.TOPIC: (On.TOPIC, {Action.CREATE, Action.ADMINISTER, Action.ATTACH}),
        Effect.NAMESPACE: (On.NAMESPACE, {Action.ADMINISTER}),
        Effect.SIDECAR: (On.EVERYTHING, {Action.ADMINISTER}),
    }
    for need in filter(None, map(_need, METHODS)):
        if need.effect is not Effect.NOTHING:
            on, actions = rights[need.effect]
            assert need.on is on
            assert set(need.actions) <= actions


def test_the_documentation_says_of_each_call_what_it_changes_and_needs() -> None:
    page = Path("docs/reference/rules.md").read_text()
    _, _, table = page.partition("| call | largest scope that the call changes |")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.split("\n\n")[0].splitlines()[2:]]
    told = {name: (effect, set(re.findall(r"`(\w+)`", needs))) for names, effect, needs in rows for name in
            re.findall(r"`([\w.]+)`", names)}  # fmt: skip
    expected = {}
    for method in METHODS:
        service, need = method.containing_service.name.removesuffix("Service"), _need(method)
        actions = {action.value for action in need.actions} if need is not None else set()
        effect = need.effect.value if need is not None else "nothing"
        expected[f"{service}.{method.name}"] = effect, actions
    assert told == expected


def _rules(folder: Path) -> Path:
    rules = [
        f'[[allow]]\nname = "of {action}"\nsubjects = ["only-{action}"]\nactions = ["{action}"]\ntopics = ["*"]\n'
        + ('cursors = ["*"]\n' if action == "read" else "")
        for action in ACTIONS
    ]
    rules += [
        f'[[allow]]\nsubjects = ["narrow"]\nactions = ["{action}"]\ntopics = ["*"]\n{key} = ["${{sub}}"]\n'
        for action, key in (("publish", "producers"), ("read", "cursors"))
    ]
    rules += [
        f'[[allow]]\nsubjects = ["elsewhere"]\nactions = {ACTIONS}\ntopics = ["persistent://other/**", "secre*-"]\n',
        f'[[allow]]\nsubjects = ["but-one"]\nactions = {ACTIONS}\ntopics = ["**"]\n',
        f'[[deny]]\nsubjects = ["but-one"]\nactions = {ACTIONS}\ntopics = ["secret-*"]\n',
    ]
    rules.append(f'[[allow]]\nsubjects = ["partitioned"]\nactions = {ACTIONS}\ntopics = ["secret-whole"]\n')
    (folder / "rules.toml").write_text("\n".join(rules))
    return folder / "rules.toml"


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool, str], grpc.Channel]]:
    """A caller's connection to a sidecar for a broker, or to one with its own log."""
    folder = tmp_path_factory.mktemp("calls")
    rules = _rules(folder)
    with (
        Sidecar(folder / "own", module=MODULE, authentication="token", rules_file=rules) as own,
        Sidecar(folder / "broker", module=MODULE, authentication="token", rules_file=rules, log="broker") as broker,
    ):
        addresses = {False: own.address, True: broker.address}
        yield cache(lambda is_broker, name: call_as(addresses[is_broker], name))


def _request(method: Any, topic: str = "") -> bytes:
    """A request about this topic, or the method's own."""
    topic = topic or TOPIC + method.name
    request: Any = message_factory.GetMessageClass(method.input_type)()
    names = {field.name for field in request.DESCRIPTOR.fields}
    if method.name in ("GetCursor", "MoveCursor"):
        request.name = "somebody's"
    if method.name == "Attach":
        request.begin.topic = topic
    elif method.name == "ReceiveTopic":
        request.head.topic = topic
    elif method.name == "Open":
        request.topic, request.producer_names[:] = topic, ["p"]
    elif "topic" in names:
        request.topic = topic
    elif "namespace" in names:
        request.namespace = "public/default"
    elif "service" in names:
        request.service = topic
    return bytes(request.SerializeToString())


def _reason(channel: grpc.Channel, method: Any, topic: str = "") -> str:
    """Why the call is refused; empty if it is not."""
    request = _request(method, topic)
    kinds = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
    call: Any = getattr(channel, "_".join(kinds))(_path(method))
    try:
        answer = call(iter([request]) if method.client_streaming else request, timeout=TIMEOUT_SECONDS)
        if method.server_streaming:
            next(iter(answer), None)
            answer.cancel()
    except grpc.RpcError as e:
        return "" if e.code() is grpc.StatusCode.NOT_FOUND and method.name == "Check" else status(e).reason
    return ""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.containing_service.name}-{method.name}")
def test_a_call_is_for_those_who_may_and_for_nobody_else(
    method: Any, connect: Callable[[bool, str], grpc.Channel]
) -> None:
    def reason(name: str) -> str:
        return _reason(connect(method.containing_service.name == "DedupeService", name), method)

    is_of_broker = _path(method) == "/seqdedupe.v1.DedupeService/GetProducer"
    needs = {"observe", "attach"} if is_of_broker else NEEDS[method.name]
    allowed = {action for action in ACTIONS if reason(f"only-{action}") != "NOT_ALLOWED"}
    # Who may publish to a topic that is not there would make it.
    assert allowed == (needs if method.name not in ("Open", "Attach") else set())
    assert reason("") == "UNAUTHENTICATED"
    assert reason("operator") not in ("NOT_ALLOWED", "UNAUTHENTICATED")
    for name in ("somebody", "elsewhere", "but-one"):
        may = method.name == "GetVersion" or (method.name == "ServerReflectionInfo" and name != "somebody")
        assert (reason(name) != "NOT_ALLOWED") == may, name
    # Under its own names alone it may do what concerns nobody else.
    need = _need(method)
    concerns_others = need is not None and (need.on is On.CURSOR or need.effect is not Effect.NOTHING)
    may = method.name == "GetVersion" or (not concerns_others and bool(needs & OWN_NAMES_ALONE))
    if method.name not in ("Publish", "PublishStream"):  # which are judged by their frames
        assert (reason("narrow") != "NOT_ALLOWED") == may


def test_no_call_makes_a_topic_of_its_own_for_who_may_create_the_partitioned_one(
    connect: Callable[[bool, str], grpc.Channel],
) -> None:
    """Not even one that is named as if it were its partition."""
    caller, operator = connect(False, "partitioned"), admin_pb2_grpc.AdminServiceStub(connect(False, "operator"))
    name = f"{TOPIC}whole-partition-2"
    services = (publish_pb2, read_pb2, admin_pb2)
    methods = [one for one in METHODS if any(one.containing_service.file is module.DESCRIPTOR for module in services)]
    reasons = {method.name: _reason(caller, method, name) for method in methods}
    made = [topic.name for topic in operator.ListTopics(admin_pb2.ListTopicsRequest()).topics]
    assert name not in made
    assert (reasons["CreateTopic"], reasons["Open"]) == ("NOT_ALLOWED", "NOT_ALLOWED")
    # What the rule is for: the topic with its partitions, under any of which the caller publishes.
    create = admin_pb2.CreateTopicRequest(topic=f"{TOPIC}whole", partitions=4)
    admin_pb2_grpc.AdminServiceStub(caller).CreateTopic(create, timeout=TIMEOUT_SECONDS)
    publish = publish_pb2_grpc.PublishServiceStub(caller)
    assert publish.Open(publish_pb2.OpenRequest(topic=name, producer_names=["p"]), timeout=TIMEOUT_SECONDS).epochs
