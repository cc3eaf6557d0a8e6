"""What an operator asks and does about single messages and producers, over the wire; and kill -9 around resets."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker_sidecar.shares import MAX_HELD_BYTES
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import NOT_DUP, TIMEOUT_SECONDS, Client, batch, refused, verdicts
from tests.broker_sidecar.test_hostile import MIB, resident_bytes, sidecar_with
from tests.broker_sidecar.test_unread_pages import MORE

KILLS = 6
MESSAGES = 10
"""In the log, of 4 MiB each."""
LOOKS = 120
"""Calls at once that each look through a whole log."""


def message(client: Client, topic: str, name: str, sequence_id: int) -> admin_pb2.GetMessageStateResponse:
    request = admin_pb2.GetMessageStateRequest(topic=topic, producer_name=name, sequence_id=sequence_id)
    return client.admin.GetMessageState(request)


def reset(client: Client, topic: str, name: str, persisted: int) -> admin_pb2.ResetProducerResponse:
    request = admin_pb2.ResetProducerRequest(topic=topic, producer_name=name, persisted=persisted)
    return client.admin.ResetProducer(request, timeout=TIMEOUT_SECONDS)


def test_the_state_of_a_message(client: Client, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    epochs = client.epochs(topic, "p", "q")
    client.publish_unary(topic, batch([("q", 0), ("p", 3), ("p", 7)], epochs, {"p": -1}))
    stored = message(client, topic, "p", 7)
    assert stored.state == admin_pb2.MESSAGE_STATE_STORED
    assert (stored.position.index, stored.position.message_id.entry_id) == (2, 2)
    assert stored.position.incarnation == client.topic(topic).incarnation
    assert before_ms <= stored.publish_time_ms <= time.time_ns() // 1_000_000
    assert (stored.pushed, stored.persisted) == (7, 7)
    below = message(client, topic, "p", 5)
    assert below.state == admin_pb2.MESSAGE_STATE_BELOW_WATERMARK
    assert not below.HasField("position")
    for name, sequence_id, persisted in (("p", 8, 7), ("p", MAX_SEQUENCE_ID, 7), ("nobody", 0, -1)):
        found = message(client, topic, name, sequence_id)
        assert found.state == admin_pb2.MESSAGE_STATE_NOT_SEEN
        assert (found.pushed, found.persisted) == (persisted, persisted)
    in_flight = client.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic=topic))
    assert (in_flight.producers, len(in_flight.in_flight)) == (0, 0)


def peak_bytes(sidecar: Sidecar) -> int:
    """The most memory that the process has had so far."""
    [line] = [one for one in Path(f"/proc/{sidecar.pid}/status").read_text().splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_looks_into_the_log_take_turns_for_the_memory_of_readers(tmp_path: Path) -> None:
    with sidecar_with(tmp_path, {}, streams__TURN_SECONDS=TIMEOUT_SECONDS) as sidecar:
        client = Client(sidecar.address)
        epochs = client.epochs("t", "p")
        for k in range(MESSAGES):
            client.publish_unary("t", batch([("p", 10 * k)], epochs, {"p": 10 * k - 10 if k else -1}, [bytes(4 * MIB)]))
        message(client, "t", "p", 5)
        before = resident_bytes(sidecar)
        ask, locate = client.admin.GetMessageState, client.reading.Locate
        requests = [admin_pb2.GetMessageStateRequest(topic="t", producer_name="p", sequence_id=5)] * LOOKS
        now_ms = time.time_ns() // 1_000_000
        times = [read_pb2.LocateRequest(topic="t", publish_time_ms=now_ms - k) for k in range(LOOKS)]
        asked = [ask.future(request, timeout=TIMEOUT_SECONDS) for request in requests]
        located = [locate.future(request, timeout=TIMEOUT_SECONDS) for request in times]
        assert {one.result().state for one in asked} == {admin_pb2.MESSAGE_STATE_BELOW_WATERMARK}
        assert all(0 <= one.result().index <= MESSAGES for one in located)
        grown_by = peak_bytes(sidecar) - before
        print("grown by", grown_by // MIB)
        assert grown_by < MAX_HELD_BYTES + MORE
        client.close()


def test_a_name_that_was_used_up_can_be_used_again(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q")
    client.publish_unary(topic, batch([("p", 5), ("p", MAX_SEQUENCE_ID), ("q", 1)], epochs, {"p": -1, "q": -1}))
    done = reset(client, topic, "p", 5)
    assert done.persisted_before == MAX_SEQUENCE_ID
    assert (done.producer.pushed, done.producer.persisted) == (5, 5)
    assert done.producer.epoch > epochs["p"]
    # The old session is over, also for a resume, and the other producer's goes on.
    assert refused(lambda: client.publish_unary(topic, batch([("p", 6)], epochs, {"p": 5}))).reason == "FENCED"
    assert client.resume_refused(topic, "p", epochs["p"]).reason == "FENCED"
    client.publish_unary(topic, batch([("q", 2)], epochs))
    opened = client.open(topic, "p")
    assert list(opened.persisted) == [5]
    epochs["p"] = opened.epochs[0]
    receipt = client.publish_unary(topic, batch([("p", 5), ("p", 7), ("p", MAX_SEQUENCE_ID)], epochs, {"p": 4}))
    assert verdicts(receipt, 3) == [2, NOT_DUP, NOT_DUP]
    # No message from before answers for one of now.
    again = client.publish_unary(topic, batch([("p", 6), ("p", 7), ("p", MAX_SEQUENCE_ID)], epochs, {"p": 5}))
    assert verdicts(again, 3) == [2, 2, 2]
    assert (list(again.known_rows), list(again.known_indexes)) == ([1, 2], [4, 5])
    assert client.topic(topic).resets == 1
    assert client.rows(topic)[-2:] == [("p", 7), ("p", MAX_SEQUENCE_ID)]


def test_a_reset_that_is_repeated_is_the_same(client: Client, topic: str) -> None:
    client.publish_unary(topic, batch([("p", 5)], client.epochs(topic, "p"), {"p": -1}))
    assert reset(client, topic, "p", -1).persisted_before == 5
    assert reset(client, topic, "p", -1).persisted_before == -1
    assert list(client.open(topic, "p").persisted) == [-1]


BAD: dict[str, tuple[Callable[[Client, str], object], str]] = {
    "state of an ID below 0": (lambda c, t: message(c, t, "p", -1), "INVALID_SEQUENCE_ID"),
    "state of no name": (lambda c, t: message(c, t, "", 1), "INVALID_NAME"),
    "state of a long name": (lambda c, t: message(c, t, "x" * 256, 1), "INVALID_NAME"),
    "state in no topic": (lambda c, t: message(c, "there-is-none", "p", 1), "TOPIC_NOT_FOUND"),
    "state in a bad topic": (lambda c, t: message(c, "a b", "p", 1), "INVALID_TOPIC_NAME"),
    "in flight for less than nothing": (
        lambda c, t: c.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic=t, longer_than_ms=-1)),
        "INVALID_REQUEST",
    ),
    "in flight in no topic": (
        lambda c, t: c.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic="there-is-none")),
        "TOPIC_NOT_FOUND",
    ),
    "reset of nobody": (lambda c, t: reset(c, t, "nobody", -1), "PRODUCER_NOT_FOUND"),
    "reset of no name": (lambda c, t: reset(c, t, "", -1), "INVALID_NAME"),
    "reset in no topic": (lambda c, t: reset(c, "there-is-none", "p", -1), "TOPIC_NOT_FOUND"),
    "reset to more than was sent": (lambda c, t: reset(c, t, "p", 6), "INVALID_REQUEST"),
    "reset below none": (lambda c, t: reset(c, t, "p", -2), "INVALID_REQUEST"),
    **{
        f"{call} of what is no message": (
            lambda c, t, call=call: c.raw(f"/seqdedupe.v1.AdminService/{call}", b"\xff\xff"),  # type: ignore[misc]
            "MALFORMED_MESSAGE",
        )
        for call in ("GetMessageState", "ListInFlight", "ResetProducer")
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(client: Client, topic: str, case: str) -> None:
    epochs = client.epochs(topic, "p")
    client.publish_unary(topic, batch([("p", 5)], epochs, {"p": -1}))
    before = client.state(topic)
    call, reason = BAD[case]
    assert refused(lambda: call(client, topic)).reason == reason
    assert client.state(topic) == before
    client.publish_unary(topic, batch([("p", 6)], epochs))


def test_a_sidecar_of_brokers_topics_says_that_it_is_not_for_them(start_sidecar: Callable[..., Sidecar]) -> None:
    client = Client(start_sidecar(log="broker").address)
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t"), wait_for_ready=True)
    for call in (
        lambda: message(client, "t", "p", 1),
        lambda: reset(client, "t", "p", -1),
        lambda: client.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic="t")),
    ):
        refusal = refused(call)
        assert refusal.reason == "INVALID_REQUEST"
        assert "a log that the sidecar writes" in refusal.message
    client.close()


def test_resets_survive_kill_9(start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config) -> None:
    """What was answered is in force after kill -9, with the store, and with one that is made again."""
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    rng = random.Random(seed)
    # Nearly each batch has its own snapshot, so that resets are in some, and on the log's end after others.
    sidecar = start_sidecar(deduplication_entries_interval=3)
    client = Client(sidecar.address)
    last = -1
    for kill in range(KILLS):
        resets = 0
        for _ in range(rng.randint(3, 12)):
            epochs = client.epochs("t", "p")
            ids = range(last + 1, last + 1 + rng.randint(1, 5))
            receipt = client.publish_unary("t", batch([("p", i) for i in ids], epochs, {"p": last}))
            assert verdicts(receipt, len(ids)) == [NOT_DUP] * len(ids)
            last = ids[-1]
            if rng.random() < 0.5:
                before, last = last, rng.randint(-1, last)
                assert reset(client, "t", "p", last).persisted_before == before
                resets += 1
        assert client.topic("t").resets == resets
        under_way: set[int] = set()
        if kill % 2:
            target = rng.randint(-1, last)
            request = admin_pb2.ResetProducerRequest(topic="t", producer_name="p", persisted=target)
            call = client.admin.ResetProducer.future(request)
            time.sleep(rng.uniform(0, 0.01))
            sidecar.kill()
            if call.exception() is None:
                last = target
            else:
                under_way = {target}
        else:
            sidecar.kill()
        if kill % 3 == 2:
            shutil.rmtree(sidecar.data / "store")
            sidecar.keys["rebuild_store"] = True
        sidecar.start()
        sidecar.keys.pop("rebuild_store", None)
        request_of_now = admin_pb2.GetProducerRequest(topic="t", producer_name="p")
        now = client.admin.GetProducer(request_of_now, wait_for_ready=True, timeout=TIMEOUT_SECONDS).producer
        assert now.pushed == now.persisted
        assert now.persisted in {last} | under_way
        last = now.persisted
    client.close()
