"""Policies over the wire: who inherits what, what survives, and deduplication that is switched while messages come."""

import contextlib
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import DUP, NOT_DUP, TIMEOUT_SECONDS, Client, batch, refused, verdicts

TOPIC = "persistent://shop/orders/t"
GAP_REJECT = admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT)


def set_topic(client: Client, **values: Any) -> admin_pb2.Topic:
    policy = admin_pb2.TopicPolicy(**values)
    return client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic=TOPIC, policy=policy)).topic


def set_namespace(client: Client, **values: Any) -> admin_pb2.SetNamespacePolicyResponse:
    policy = admin_pb2.TopicPolicy(**values)
    return client.admin.SetNamespacePolicy(admin_pb2.SetNamespacePolicyRequest(namespace="shop/orders", policy=policy))


def applied(client: Client, topic: str = TOPIC) -> admin_pb2.TopicPolicy:
    request = admin_pb2.GetTopicPolicyRequest(topic=topic)
    return client.admin.GetTopicPolicy(request, timeout=TIMEOUT_SECONDS, wait_for_ready=True).applied


def gap(client: Client, first: int) -> str | None:
    """The reason why a first message that leaves IDs out is refused."""
    epochs = client.epochs(TOPIC, "gap")
    persisted = client.producer(TOPIC, "gap")[1]
    frame = batch([("gap", first)], epochs, {"gap": persisted})
    return client.stream(TOPIC).refusal(frame).reason


def test_all_levels_are_in_force_at_once_and_survive_kill_9_and_a_lost_store(
    start_sidecar: Callable[..., Sidecar],
) -> None:
    sidecar = start_sidecar(default_retention_size_in_mb=70)
    client = Client(sidecar.address)
    client.publish_unary(TOPIC, batch([("gap", 0)], client.epochs(TOPIC, "gap")))
    set_namespace(client, gap=admin_pb2.GAP_POLICY_REJECT)
    assert gap(client, 2) == "GAP"
    answer = set_namespace(client, retention_size_in_mb=80, retention_time_in_minutes=60)
    assert (answer.policy.retention_size_in_mb, answer.applied.gap) == (80, admin_pb2.GAP_POLICY_REJECT)
    topic = set_topic(client, retention_size_in_mb=90)
    topic = set_topic(client, deduplication_entries_interval=5)
    set_ = admin_pb2.TopicPolicy(retention_size_in_mb=90, deduplication_entries_interval=5)
    assert topic.set_policy == set_
    expected = applied(client)
    assert topic.policy == expected == client.topic(TOPIC).policy
    assert (expected.retention_size_in_mb, expected.retention_time_in_minutes) == (90, 60)
    assert (expected.deduplication_entries_interval, expected.deduplication_enabled) == (5, True)
    assert len(expected.ListFields()) == len(expected.DESCRIPTOR.fields)
    client.open("elsewhere", "p")
    assert applied(client, "elsewhere").retention_size_in_mb == 70
    # A topic that comes later inherits too.
    client.open("persistent://shop/orders/later", "p")
    assert applied(client, "persistent://shop/orders/later").retention_size_in_mb == 80

    sidecar.restart()
    assert applied(client) == expected
    assert gap(client, 2) == "GAP"
    assert client.topic(TOPIC).set_policy == set_

    client.close()
    sidecar.kill()
    shutil.rmtree(sidecar.data / "store")
    sidecar.keys["rebuild_store"] = True
    sidecar.start()
    client = Client(sidecar.address)
    assert client.topic(TOPIC).set_policy == set_
    # Namespaces' policies are in the store alone.
    assert (applied(client).retention_size_in_mb, applied(client).retention_time_in_minutes) == (90, -1)
    removed = client.admin.RemoveTopicPolicy(
        admin_pb2.RemoveTopicPolicyRequest(topic=TOPIC, values=["retention_size_in_mb"])
    )
    assert removed.topic.set_policy == admin_pb2.TopicPolicy(deduplication_entries_interval=5)
    assert removed.topic.policy.retention_size_in_mb == 70
    set_namespace(client, gap=admin_pb2.GAP_POLICY_REJECT)
    assert gap(client, 2) == "GAP"
    set_topic(client, gap=admin_pb2.GAP_POLICY_ALLOW)
    epochs = client.epochs(TOPIC, "gap")
    assert verdicts(client.publish_unary(TOPIC, batch([("gap", 9)], epochs, {"gap": 0})), 1) == [NOT_DUP]
    client.close()


KILLS = 3


def test_what_was_answered_survives_kill_9_at_any_moment(start_sidecar: Callable[..., Sidecar]) -> None:
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    client.open(TOPIC, "p")
    answered = {"topic": -1, "namespace": -1}
    for kill in range(KILLS):
        begun = threading.Event()

        def change(sent: int = 1000 * kill, begun: threading.Event = begun) -> None:
            mine = Client(sidecar.address)
            with contextlib.suppress(grpc.RpcError):
                while True:
                    sent += 1
                    answered["topic"] = set_topic(mine, retention_size_in_mb=sent).set_policy.retention_size_in_mb
                    namespace = set_namespace(mine, retention_time_in_minutes=sent).policy
                    answered["namespace"] = namespace.retention_time_in_minutes
                    if sent % 1000 > 5:
                        begun.set()
            mine.close()

        thread = threading.Thread(target=change)
        thread.start()
        assert begun.wait(LAST_RESORT_SECONDS)
        sidecar.kill()
        thread.join(LAST_RESORT_SECONDS)
        assert not thread.is_alive()
        sidecar.start()
        found = applied(client)
        # One more than was answered may have been under way.
        assert found.retention_size_in_mb - answered["topic"] in (0, 1)
        assert found.retention_time_in_minutes - answered["namespace"] in (0, 1)
    client.close()


def test_a_refused_gap_says_which_id_was_expected(client: Client) -> None:
    client.open(TOPIC, "p")
    set_topic(client, gap=admin_pb2.GAP_POLICY_REJECT)
    epochs = client.epochs(TOPIC, "p", "q")
    stream = client.stream(TOPIC)
    stream.receipt(batch([("p", 4), ("q", 1)], epochs, {"p": -1, "q": -1}))
    before = client.state(TOPIC)
    refusal = stream.refusal(batch([("p", 5), ("q", 3), ("p", 7)], epochs, {"p": 4, "q": 1}))
    assert (refusal.reason, refusal.retry_delay_ms) == ("GAP", -1)
    found = [(p.producer_name, p.expected_sequence_id, p.pushed) for p in refusal.producers]
    assert found == [("p", 6, 4), ("q", 2, 1)]
    unary = refused(lambda: client.publish_unary(TOPIC, batch([("p", 6)], epochs, {"p": 4})))
    assert (unary.reason, unary.numbers["expected_sequence_id"], unary.retry_delay_ms) == ("GAP", "5", -1)
    # After a refusal what follows is no gap but out of order.
    assert stream.refusal(batch([("p", 8)], epochs, {"p": 7})).reason == "PREDECESSOR_MISSING"
    assert client.state(TOPIC)[:2] == before[:2]
    assert list(stream.receipt(batch([("p", 4), ("p", 5)], epochs, {"p": -1})).verdicts) == [DUP, NOT_DUP]
    client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=TOPIC))


BAD_VALUES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a gap policy that is none": {"gap": 0},
    "a gap policy that nobody knows": {"gap": 77},
    "an overlap policy that nobody knows": {"overlap": -1},
    "an interval of nothing": {"deduplication_entries_interval": 0},
    "seconds below 0": {"deduplication_snapshot_interval_seconds": -1},
    "a size below no limit": {"retention_size_in_mb": -2},
    "a time below no limit": {"retention_time_in_minutes": -(2**31)},
    "an inactivity timeout below 0": {"deduplication_producer_inactivity_timeout_minutes": -1},
}


@pytest.mark.parametrize("values", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_change_nothing(client: Client, values: dict[str, Any]) -> None:
    client.open(TOPIC, "p")
    before, log_bytes = applied(client), client.topic(TOPIC).log_bytes
    assert refused(lambda: set_topic(client, **values)).reason == "INVALID_REQUEST"
    assert refused(lambda: set_namespace(client, **values)).reason == "INVALID_REQUEST"
    if values:
        create = admin_pb2.CreateTopicRequest(topic="bad", policy=admin_pb2.TopicPolicy(**values))
        assert refused(lambda: client.admin.CreateTopic(create)).reason == "INVALID_REQUEST"
        assert refused(lambda: client.topic("bad")).reason == "TOPIC_NOT_FOUND"
    assert (applied(client), client.topic(TOPIC).log_bytes) == (before, log_bytes)


def test_bad_names(client: Client) -> None:
    client.open(TOPIC, "p")
    for name in ("", "shop", "shop/", "/orders", "a/b/c", "shop/ö", "shop/or ders", "s/" + 255 * "n", "a/b\n"):
        get = admin_pb2.GetNamespacePolicyRequest(namespace=name)
        put = admin_pb2.SetNamespacePolicyRequest(namespace=name, policy=GAP_REJECT)
        remove = admin_pb2.RemoveNamespacePolicyRequest(namespace=name)
        for call in (
            partial(client.admin.GetNamespacePolicy, get),
            partial(client.admin.SetNamespacePolicy, put),
            partial(client.admin.RemoveNamespacePolicy, remove),
        ):
            assert refused(call).reason == "INVALID_NAMESPACE", name
    for values in (["nix"], ["gap", ""], ["Gap"]):
        topic = admin_pb2.RemoveTopicPolicyRequest(topic=TOPIC, values=values)
        assert refused(partial(client.admin.RemoveTopicPolicy, topic)).reason == "INVALID_REQUEST"
        namespace = admin_pb2.RemoveNamespacePolicyRequest(namespace="shop/orders", values=values)
        assert refused(partial(client.admin.RemoveNamespacePolicy, namespace)).reason == "INVALID_REQUEST"
    missing = admin_pb2.GetTopicPolicyRequest(topic="nobody")
    assert refused(lambda: client.admin.GetTopicPolicy(missing)).reason == "TOPIC_NOT_FOUND"


ROUNDS = 60


def test_switched_off_and_on_under_traffic_no_message_passes_unseen(client: Client, topic: str) -> None:
    """Every frame is sent twice. Off, copies are stored; from the moment at which on is answered, none is.

    Everything that was stored while it was off is known when it is on again.
    """
    name = f"persistent://public/default/{topic}"
    epochs = client.epochs(name, "p")
    stop = threading.Event()
    sent: list[int] = []
    failures: list[object] = []

    def traffic() -> None:
        stream = client.stream(name)
        sequence_id = 0
        while not stop.is_set():
            frame = batch([("p", sequence_id), ("p", sequence_id + 1)], epochs)
            try:
                stream.receipt(frame)
                stream.receipt(frame)
            except AssertionError as e:
                failures.append(e)
                return
            sequence_id += 2
            sent.append(sequence_id)
        stream.end()

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        other = Client(client.address)
        for i in range(ROUNDS):
            at = len(sent)
            policy = admin_pb2.TopicPolicy(deduplication_enabled=bool(i % 2))
            other.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic=name, policy=policy))
            if i % 2:
                # All that was sent before, and stored while it was off or on, is known from this moment on.
                last = sent[-1]
                again = batch([("p", row) for row in range(max(0, last - 4), last)], epochs)
                assert set(other.publish_unary(name, again).verdicts) == {DUP}
            while len(sent) < at + 2 and thread.is_alive():
                stop.wait(0.001)
        other.close()
    finally:
        stop.set()
        thread.join(LAST_RESORT_SECONDS)
    assert not failures, failures
    rows = [sequence_id for _, sequence_id in client.rows(name)]
    assert set(rows) == set(range(sent[-1]))
    # The control: while it was off copies were stored.
    assert len(rows) > len(set(rows))
    # The last switch was to on: nothing after it is there twice.
    tail = rows[-4:]
    assert len(set(tail)) == len(tail)
