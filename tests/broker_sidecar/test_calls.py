"""Every call of every service, found by reflection as grpcurl does: it works, it stands random bytes, it is listed."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from seqdedupe.v1 import admin_pb2, batch_pb2, read_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch, refused, status, verdicts
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.reflected import Reflected

OURS = ("seqdedupe.v1.PublishService", "seqdedupe.v1.ReadService", "seqdedupe.v1.AdminService")
OTHERS = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")

SERVING: int = health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

OF_CLUSTERS = {"ListSidecars", "ForgetSidecar", "TakeTopic", "GetShards"}
"""Calls for which there has to be one, or shards."""
OF_TWO = {"MoveTopic", "ReceiveTopic", "SettleMove"}
"""Calls for which it takes another sidecar."""


@pytest.fixture
def reflected(client: Client) -> Reflected:
    return Reflected(client.channel)


def methods(reflected: Reflected) -> Iterator[Any]:
    for name in OURS:
        yield from reflected.service(name).methods


def test_reflection_lists_every_service(reflected: Reflected) -> None:
    assert reflected.services() == sorted(OURS + OTHERS)


def test_every_unary_call_works_from_json_through_reflection(reflected: Reflected, topic: str) -> None:
    """What grpcurl does with a JSON request. Every unary method is called once; a new one must be added here."""
    position: dict[str, Any] = {}
    requests: dict[str, Any] = {
        "CreateTopic": lambda: {"topic": topic},
        "Open": lambda: {"topic": topic, "producerNames": ["p"]},
        "Publish": lambda: {
            "topic": topic,
            "batch": {
                "producerNameOffsets": [0, 1],
                "producerNames": "cA==",
                "epochs": position["epochs"],
                "previousSequenceIds": ["-1"],
                "sequenceIds": ["0", "1"],
                "payloadOffsets": [0, 1, 2],
                "payloads": "eHk=",
            },
        },
        "GetLastMessageId": lambda: {"topic": topic},
        "MoveCursor": lambda: {"topic": topic, "name": "c", "new": {"position": position["last"]}},
        "GetCursor": lambda: {"topic": topic, "name": "c"},
        "ListCursors": lambda: {"topic": topic},
        "SetCursorHold": lambda: {"topic": topic, "name": "c", "holdRetentionInMb": 1},
        "DeleteCursor": lambda: {"topic": topic, "name": "c"},
        "Read": lambda: {"topic": topic},
        "Locate": lambda: {"topic": topic, "byteBudget": {"fromIndex": "0", "bytes": "1"}},
        "GetTopic": lambda: {"topic": topic},
        "ListTopics": dict,
        "SetTopicPolicy": lambda: {"topic": topic, "policy": {"deduplicationEnabled": True}},
        "GetTopicPolicy": lambda: {"topic": topic},
        "RemoveTopicPolicy": lambda: {"topic": topic},
        "SetNamespacePolicy": lambda: {"namespace": "called/here", "policy": {"gap": "GAP_POLICY_ALLOW"}},
        "GetNamespacePolicy": lambda: {"namespace": "called/here"},
        "RemoveNamespacePolicy": lambda: {"namespace": "called/here", "values": ["gap"]},
        "ListProducers": lambda: {"topic": topic},
        "GetMessageState": lambda: {"topic": topic, "producerName": "p", "sequenceId": "1"},
        "ListInFlight": lambda: {"topic": topic},
        "GetProducer": lambda: {"topic": topic, "producerName": "p"},
        "ResetProducer": lambda: {"topic": topic, "producerName": "p", "persisted": "0"},
        "Snapshot": lambda: {"topic": topic},
        "RebuildTopic": lambda: {"topic": topic},
        "GetStatistics": lambda: {"topic": topic},
        "GetVersion": dict,
        "ConfirmBackup": lambda: {"madeAtUs": "1"},
        "DeleteTopic": lambda: {"topic": topic},
    }
    by_name = {method.name: method for method in methods(reflected)}
    transfers = {"ExportWatermarks", "ImportWatermarks", "ImportWindow", "ExportSnapshot", "ImportSnapshot"}
    streams = {"PublishStream", "ReadStream", "Backup", *transfers}
    assert set(by_name) == set(requests) | streams | OF_CLUSTERS | OF_TWO
    answers: dict[str, Any] = {}
    for name, request in requests.items():
        answers[name] = reflected.call(by_name[name], request())
        if name == "Open":
            position["epochs"] = answers[name]["epochs"]
        if name == "GetLastMessageId":
            position["last"] = answers[name]["last"]
    assert "firstMessageId" in answers["Publish"]["receipt"]
    assert answers["Read"]["records"][0]["batch"]["payloads"] == "eHk="
    assert answers["Locate"]["index"] == "2"
    assert answers["GetLastMessageId"]["last"]["index"] == "1"
    assert answers["GetCursor"]["kept"]["position"] == position["last"]
    assert [one["name"] for one in answers["ListCursors"]["cursors"]] == ["c"]
    assert answers["GetProducer"]["producer"]["persisted"] == "1"
    assert answers["Snapshot"]["position"]["index"] == "1"
    assert answers["GetTopic"]["topic"]["state"] == "TOPIC_STATE_SERVING"
    assert f"persistent://public/default/{topic}" in [one["name"] for one in answers["ListTopics"]["topics"]]
    assert answers["GetVersion"]["maxBatchBytes"] == str(MAX_BATCH_BYTES)
    assert answers["GetVersion"]["maxBatchRows"] == str(MAX_BATCH_ROWS)


def test_a_sidecar_that_is_the_only_one_answers_what_is_asked_of_clusters(client: Client, topic: str) -> None:
    client.epochs(topic, "p")
    for name in sorted(OF_CLUSTERS):
        request = getattr(admin_pb2, f"{name}Request")()
        if "topic" in request.DESCRIPTOR.fields_by_name:
            request.topic = topic
        answer = refused(lambda: getattr(client.admin, name)(request))  # noqa: B023
        assert (answer.reason, "cluster" in answer.message) == ("INVALID_REQUEST", True)


def test_random_bytes_to_every_call(client: Client, reflected: Reflected, topic: str) -> None:
    """A status with a reason for everything that is no request; never a defect's, and nothing changes."""
    rng = random.Random(4711)
    epochs = client.epochs(topic, "p")
    bystander = client.stream(topic)
    bystander.receipt(batch([("p", 0)], epochs))
    before = client.state(topic)
    reasons: set[str] = set()
    all_methods = list(methods(reflected))
    for method in all_methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            call: Any = client.channel.stream_stream(path)
        elif method.server_streaming:
            call = client.channel.unary_stream(path)
        else:
            call = client.channel.unary_unary(path)
        for _ in range(25):
            junk = rng.randbytes(rng.choice([1, 2, 5, 20, 200, 5000]))
            try:
                answer = call(iter([junk]) if method.client_streaming else junk, timeout=TIMEOUT_SECONDS)
                if method.client_streaming or method.server_streaming:
                    list(answer)
            except grpc.RpcError as e:
                reasons.add(status(e).reason)
    assert "MALFORMED_MESSAGE" in reasons
    assert not reasons & {"INTERNAL"}, reasons
    assert client.state(topic) == before
    assert verdicts(bystander.receipt(batch([("p", 1)], epochs)), 1) == [1]
    bystander.end()


def test_random_bytes_to_health_and_reflection_do_not_harm(client: Client) -> None:
    rng = random.Random(1)
    for _ in range(20):
        with pytest.raises(grpc.RpcError):
            client.raw("/grpc.health.v1.Health/Check", b"\xff" + rng.randbytes(30))
    assert health_of(client.channel).Check(health_pb2.HealthCheckRequest()).status == SERVING


def test_a_call_that_does_not_exist(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as e:
        client.raw("/seqdedupe.v1.AdminService/Nothing", b"")
    assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED


# -- health ------------------------------------------------------------------------------------------------------


def test_health_of_the_whole_and_of_every_topic(client: Client, topic: str) -> None:
    stub = health_of(client.channel)
    full = f"persistent://public/default/{topic}"
    assert stub.Check(health_pb2.HealthCheckRequest(service="")).status == SERVING
    for name, reason in ((full, "TOPIC_NOT_FOUND"), (topic, "TOPIC_NOT_FOUND"), ("no topic", "INVALID_TOPIC_NAME")):
        assert refused(lambda: stub.Check(health_pb2.HealthCheckRequest(service=name))).reason == reason  # noqa: B023
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=full), timeout=TIMEOUT_SECONDS)
    assert next(watch).status == SERVICE_UNKNOWN
    by_short_name = stub.Watch(health_pb2.HealthCheckRequest(service=topic), timeout=TIMEOUT_SECONDS)
    assert next(by_short_name).status == SERVICE_UNKNOWN
    client.open(topic, "p")
    seen: list[int] = []
    while not seen or seen[-1] != SERVING:
        seen.append(next(watch).status)
    assert stub.Check(health_pb2.HealthCheckRequest(service=full)).status == SERVING
    assert stub.Check(health_pb2.HealthCheckRequest(service=topic)).status == SERVING
    while next(by_short_name).status != SERVING:
        pass
    by_short_name.cancel()
    client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=topic))
    while seen[-1] != SERVICE_UNKNOWN:
        seen.append(next(watch).status)
    watch.cancel()
    assert stub.Check(health_pb2.HealthCheckRequest(service="")).status == SERVING


# -- administration ----------------------------------------------------------------------------------------------


def test_bad_administration(client: Client, topic: str) -> None:
    admin = client.admin
    admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic))
    client.open(topic, "p")
    before = client.state(topic)
    cases: dict[str, Any] = {
        "TOPIC_EXISTS": lambda: admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic)),
        "INVALID_TOPIC_NAME": lambda: admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="a b")),
        "TOPIC_NOT_FOUND": lambda: admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="not-there")),
        "PRODUCER_NOT_FOUND": lambda: admin.GetProducer(
            admin_pb2.GetProducerRequest(topic=topic, producer_name="nobody")
        ),
        "INVALID_NAME": lambda: admin.GetProducer(admin_pb2.GetProducerRequest(topic=topic, producer_name="")),
        "INVALID_REQUEST": lambda: admin.ListProducers(admin_pb2.ListProducersRequest(topic=topic, offset=-1)),
    }
    for reason, call in cases.items():
        assert refused(call).reason == reason
    answer = admin.ListProducers(admin_pb2.ListProducersRequest(topic=topic, offset=2**62))
    assert ([one.name for one in answer.producers], answer.next_offset) == (["p"], 0)
    assert refused(lambda: admin.ListTopics(admin_pb2.ListTopicsRequest(after="a b"))).reason == "INVALID_TOPIC_NAME"
    assert client.state(topic) == before


def test_create_with_deduplication_off(client: Client, topic: str) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_enabled=False)
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, policy=policy))
    epochs = client.epochs(topic, "p")
    for _ in range(2):
        assert verdicts(client.publish_unary(topic, batch([("p", 0)], epochs)), 1) == [1]
    assert client.rows(topic) == [("p", 0)] * 2


def test_counters_of_a_topic(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0), ("p", 1)], epochs))
    stream.receipt(batch([("p", 1), ("p", 2)], epochs))
    stream.refusal(batch([("p", 9)], epochs))
    now = client.topic(topic)
    assert (now.not_dup, now.dup, now.unknown, now.refused) == (3, 1, 0, 1)
    assert now.log_bytes > 0
    assert now.producers == 1


# -- positions ---------------------------------------------------------------------------------------------------


def test_where_reading_can_start(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    rows = [("p", i) for i in range(6)]
    client.publish_unary(topic, batch(rows[:4], epochs))
    client.publish_unary(topic, batch(rows[4:], epochs))
    last = client.topic(topic).last
    third = batch_pb2.Position(
        incarnation=last.incarnation,
        message_id=batch_pb2.MessageId(ledger_id=last.incarnation, entry_id=2, batch_index=-1),
        index=2,
    )
    for start, expected in (
        ({}, rows),
        ({"earliest": True}, rows),
        ({"latest": True}, []),
        ({"index": 0}, rows),
        ({"index": 3}, rows[3:]),
        ({"index": 6}, []),
        ({"after": third}, rows[3:]),
        ({"after": last}, []),
        ({"after": {"incarnation": last.incarnation, "index": -1}}, rows),
    ):
        assert client.rows(topic, **start) == expected, start
        page = client.reading.Read(read_pb2.ReadRequest(topic=topic, start=read_pb2.ReadStart(**start)))
        assert (page.end_index, page.incarnation) == (6, last.incarnation)
        assert sum(record.rows for record in page.records) == len(expected)
        assert page.next_index == 6


def bad_positions(incarnation: int) -> dict[str, tuple[str, dict[str, Any]]]:
    def at(index: int, **other: Any) -> dict[str, Any]:
        entry = {"ledger_id": incarnation, "entry_id": index, "batch_index": -1} | other.pop("message_id", {})
        return {"after": {"incarnation": incarnation, "index": index, "message_id": entry} | other}

    return {
        "another incarnation": ("POSITION_OF_ANOTHER_INCARNATION", at(1, incarnation=incarnation - 1)),
        "incarnation 0": ("POSITION_OF_ANOTHER_INCARNATION", at(1, incarnation=0)),
        "after the end": ("POSITION_AFTER_END", at(6)),
        "far after the end": ("POSITION_AFTER_END", at(2**63 - 1)),
        "another message's ID": ("POSITION_DIVERGED", at(1, message_id={"entry_id": 2})),
        "another ledger": ("POSITION_DIVERGED", at(1, message_id={"ledger_id": 5})),
        "a batch index": ("POSITION_DIVERGED", at(1, message_id={"batch_index": 0})),
        "index below -1": ("INVALID_POSITION", at(-2)),
        "start with message ID": ("INVALID_POSITION", at(-1)),
        "index -1": ("INVALID_POSITION", {"index": -1}),
        "lowest index": ("INVALID_POSITION", {"index": -(2**63)}),
        "index after the end": ("POSITION_AFTER_END", {"index": 7}),
        "highest index": ("POSITION_AFTER_END", {"index": 2**63 - 1}),
    }


def test_a_position_without_its_message_id(client: Client, topic: str) -> None:
    """Where that is not known; the incarnation and the index are checked as ever."""
    client.publish_unary(topic, batch([("p", i) for i in range(6)], client.epochs(topic, "p")))
    incarnation = client.topic(topic).incarnation
    assert client.rows(topic, after={"incarnation": incarnation, "index": 3}) == [("p", 4), ("p", 5)]
    after = {"incarnation": incarnation - 1, "index": 3}
    assert refused(lambda: client.rows(topic, after=after)).reason == "POSITION_OF_ANOTHER_INCARNATION"


@pytest.mark.parametrize("case", bad_positions(0))
def test_positions_that_cannot_be_read_on_from(client: Client, topic: str, case: str) -> None:
    epochs = client.epochs(topic, "p")
    client.publish_unary(topic, batch([("p", i) for i in range(6)], epochs))
    reason, start = bad_positions(client.topic(topic).incarnation)[case]
    request = read_pb2.ReadRequest(topic=topic, start=read_pb2.ReadStart(**start))
    for answer in (refused(lambda: client.reading.Read(request)), refused(lambda: client.rows(topic, **start))):
        assert answer.reason == reason, answer
        assert answer.retry_delay_ms == -1
    assert len(client.rows(topic)) == 6


def test_bad_ends_budgets_and_times(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    client.publish_unary(topic, batch([("p", i) for i in range(6)], epochs))
    reading = client.reading
    for stop in (-1, -(2**63)):
        request = read_pb2.ReadRequest(topic=topic, stop_index=stop)
        assert refused(partial(reading.Read, request)).reason == "INVALID_POSITION"
    assert refused(lambda: reading.Locate(read_pb2.LocateRequest(topic=topic))).reason == "INVALID_REQUEST"
    for budget, reason in (
        (read_pb2.ByteBudget(bytes=0), "INVALID_REQUEST"),
        (read_pb2.ByteBudget(bytes=-(2**63)), "INVALID_REQUEST"),
        (read_pb2.ByteBudget(bytes=1, from_index=-1), "INVALID_POSITION"),
        (read_pb2.ByteBudget(bytes=1, from_index=7), "POSITION_AFTER_END"),
    ):
        locate = read_pb2.LocateRequest(topic=topic, byte_budget=budget)
        assert refused(partial(reading.Locate, locate)).reason == reason
    for by, index in (
        ({"publish_time_ms": -(2**63)}, 0),
        ({"publish_time_ms": 2**63 - 1}, 6),
        ({"byte_budget": {"from_index": 6, "bytes": 1}}, 6),
        ({"byte_budget": {"from_index": 2, "bytes": 2**63 - 1}}, 6),
    ):
        assert reading.Locate(read_pb2.LocateRequest(topic=topic, **by)).index == index


def test_batches_are_cut_at_both_ends(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q")
    rows = [(name, i) for i in range(5) for name in ("p", "q")]
    client.publish_unary(topic, batch(rows, epochs))
    for first in range(10):
        for stop in range(first + 1, 11):
            start = read_pb2.ReadStart(index=first)
            page = client.reading.Read(read_pb2.ReadRequest(topic=topic, start=start, stop_index=stop))
            [record] = page.records
            assert (record.base_index, record.rows, page.next_index) == (first, stop - first, stop)
            names = record.batch.producer_names.decode()
            owners = record.batch.producer_indexes or [0] * record.rows
            assert [(names[p], i) for p, i in zip(owners, record.batch.sequence_ids, strict=True)] == rows[first:stop]
