"""Sessions over the wire: opening, fencing, resuming, and what is left of them after kill -9."""

from collections.abc import Callable, Iterator

import pytest

from seqdedupe.core.producers import Producers
from seqdedupe.limits import MAX_OPEN_NAMES
from seqdedupe.testing import Sidecar
from seqdedupe.topic.sessions import RANDOM_BYTES, Sessions
from seqdedupe.v1 import admin_pb2, publish_pb2
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch, refused, verdicts


def test_open_answers_nothing_for_a_new_name(client: Client, topic: str) -> None:
    opened = client.open(topic, "a", "b")
    term = client.topic(topic).term
    assert opened.term == term == 1
    [epoch] = set(opened.epochs)
    assert epoch >> 32 == term
    assert list(opened.persisted) == list(opened.persisted_indexes) == [-1, -1]
    assert [(i.ledger_id, i.entry_id, i.batch_index) for i in opened.persisted_message_ids] == [(-1, -1, -1)] * 2
    assert list(client.open(topic, "c").epochs) == [epoch + 1]


def test_open_answers_the_last_message_in_the_order_asked_for(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "a", "b")
    client.publish_unary(topic, batch([("a", 5), ("b", 7), ("a", 8)], epochs, {"a": -1, "b": -1}))
    opened = client.open(topic, "new", "b", "a")
    assert list(opened.persisted) == [-1, 7, 8]
    assert list(opened.persisted_indexes) == [-1, 1, 2]
    incarnation = client.topic(topic).incarnation
    ids = [(i.ledger_id, i.entry_id, i.batch_index) for i in opened.persisted_message_ids]
    assert ids == [(-1, -1, -1), (incarnation, 1, -1), (incarnation, 2, -1)]


def test_open_fences_the_session_before_it_and_no_other_name(client: Client, topic: str) -> None:
    first = client.epochs(topic, "a", "b")
    stream = client.stream(topic)
    stream.receipt(batch([("a", 0), ("b", 0)], first))
    second = client.epochs(topic, "a")
    refusal = stream.refusal(batch([("a", 1)], first))
    assert (refusal.reason, refusal.retry_delay_ms) == ("FENCED", -1)
    assert (refusal.producers[0].epoch, refusal.producers[0].current_epoch) == (first["a"], second["a"])
    assert verdicts(stream.receipt(batch([("b", 1)], first)), 1) == [NOT_DUP]
    assert verdicts(stream.receipt(batch([("a", 1)], second)), 1) == [NOT_DUP]
    # The fenced one cannot come back by resuming, only by a new session.
    answer = client.resume_refused(topic, "a", first["a"])
    assert (answer.reason, answer.current_epoch) == ("FENCED", second["a"])
    # One fenced name does not keep the others from resuming.
    both = client.open(topic, "a", "b", epochs=[first["a"], first["b"]])
    assert [(one.index, one.reason) for one in both.refusals] == [(0, "FENCED")]
    assert (list(both.epochs), list(both.persisted)) == ([0, first["b"]], [-1, 1])


def test_two_clients_with_one_name_do_not_fight_for_ever(client: Client, shared: Sidecar, topic: str) -> None:
    """Each opened once; the later one owns the name, however often the other one resumes."""
    other = Client(shared.address)
    loser = client.epochs(topic, "a")
    winner = other.epochs(topic, "a")
    ours, theirs = client.stream(topic), other.stream(topic)
    for i in range(20):
        assert ours.refusal(batch([("a", i)], loser)).reason == "FENCED"
        assert client.resume_refused(topic, "a", loser["a"]).reason == "FENCED"
        assert verdicts(theirs.receipt(batch([("a", i)], winner)), 1) == [NOT_DUP]
        assert list(other.open(topic, "a", epochs=[winner["a"]]).epochs) == [winner["a"]]
    assert client.rows(topic) == [("a", i) for i in range(20)]
    other.close()


def test_resume_keeps_the_epoch_and_answers_persisted(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "a", "b")
    client.publish_unary(topic, batch([("a", 3)], epochs, {"a": -1}))
    opened = client.open(topic, "b", "a", epochs=[epochs["b"], epochs["a"]])
    assert list(opened.epochs) == [epochs["b"], epochs["a"]]
    assert list(opened.persisted) == [-1, 3]


@pytest.mark.parametrize("epoch", [-1, 0, 1, 1 << 32, 2 << 32, 5 << 32, 2**63 - 1, -(2**63)])
def test_an_epoch_that_was_never_given_cannot_be_resumed(client: Client, topic: str, epoch: int) -> None:
    mine = client.epochs(topic, "a", "b")
    before = client.state(topic)
    answer = client.open(topic, "a", "b", epochs=[mine["a"], epoch])
    assert [(one.index, one.reason, one.current_epoch) for one in answer.refusals] == [(1, "INVALID_EPOCH", mine["b"])]
    assert list(answer.epochs) == [mine["a"], 0]
    assert client.state(topic) == before
    assert verdicts(client.publish_unary(topic, batch([("a", 0), ("b", 0)], mine)), 2) == [NOT_DUP] * 2


NAMES: dict[str, list[str]] = {
    "none": [],
    "empty": ["a", ""],
    "too long": ["a" * 256],
    "too long in UTF-8": ["é" * 128],
    "twice": ["a", "b", "a"],
}


@pytest.mark.parametrize("case", NAMES)
def test_open_refuses_bad_names_and_opens_none(client: Client, topic: str, case: str) -> None:
    client.open(topic, "there")
    before = client.state(topic)
    assert refused(lambda: client.open(topic, *NAMES[case])).reason == "INVALID_NAME"
    assert client.state(topic) == before


def test_open_refuses_bytes_that_are_not_utf8(client: Client, topic: str) -> None:
    client.open(topic, "there")
    before = client.state(topic)
    good = publish_pb2.OpenRequest(topic=topic, producer_names=["ab"]).SerializeToString()
    bad = good.replace(b"\x02ab", b"\x02\xff\xfe")
    answer = refused(lambda: client.raw("/seqdedupe.v1.PublishService/Open", bad))
    assert answer.reason == "MALFORMED_MESSAGE"
    bad_topic = good.replace(topic.encode(), b"\xff" * len(topic))
    assert refused(lambda: client.raw("/seqdedupe.v1.PublishService/Open", bad_topic)).reason == "MALFORMED_MESSAGE"
    assert client.state(topic) == before
    # The control: the very same bytes, but for those two.
    assert client.raw("/seqdedupe.v1.PublishService/Open", good)


def test_epochs_must_be_as_many_as_names(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "a", "b")
    assert refused(lambda: client.open(topic, "a", "b", epochs=[epochs["a"]])).reason == "INVALID_REQUEST"


def test_as_many_names_as_allowed_and_one_more(client: Client, topic: str) -> None:
    names = [f"producer-{i}" for i in range(MAX_OPEN_NAMES + 1)]
    answer = refused(lambda: client.open(topic, *names))
    assert answer.reason == "INVALID_NAME"
    assert str(MAX_OPEN_NAMES) in answer.message
    assert refused(lambda: client.topic(topic)).reason == "TOPIC_NOT_FOUND"  # it was not even made
    opened = client.open(topic, *names[:-1])
    assert len(opened.epochs) == len(opened.persisted_message_ids) == MAX_OPEN_NAMES
    assert client.topic(topic).producers == MAX_OPEN_NAMES
    listed = []
    page = admin_pb2.ListProducersRequest(topic=topic)
    while True:
        answered = client.admin.ListProducers(page)
        listed += [one.name for one in answered.producers]
        page.offset = answered.next_offset
        if not page.offset:
            break
    assert listed == names[:-1]


@pytest.mark.parametrize(
    ("names", "epochs", "reason"),
    [
        (["a", "a"], [], "INVALID_NAME"),
        ([""], [], "INVALID_NAME"),
        (["a\n"], [], "INVALID_NAME"),
        ([], [], "INVALID_NAME"),
        (["a"], [1, 2], "TOPIC_NOT_FOUND"),
        (["a"], [(1 << 32) + 1], "TOPIC_NOT_FOUND"),
    ],
)
def test_an_open_that_is_refused_makes_no_topic(
    client: Client, topic: str, names: list[str], epochs: list[int], reason: str
) -> None:
    """A session that is resumed is none of a topic that is not there: it does not undo the topic's deletion."""
    assert refused(lambda: client.open(topic, *names, epochs=epochs)).reason == reason
    assert refused(lambda: client.topic(topic)).reason == "TOPIC_NOT_FOUND"
    client.open(topic, "a")
    assert client.topic(topic).producers == 1


def test_a_deleted_and_remade_topic_is_another_incarnation(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "a")
    client.publish_unary(topic, batch([("a", 0)], epochs))
    before = client.topic(topic).incarnation
    stream = client.stream(topic)
    stream.receipt(batch([("a", 1)], epochs))
    client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=topic))
    assert stream.refusal(batch([("a", 2)], epochs)).reason == "TOPIC_NOT_FOUND"
    assert refused(lambda: client.topic(topic)).reason == "TOPIC_NOT_FOUND"
    opened = client.open(topic, "a")
    assert opened.incarnation > before
    assert list(opened.persisted) == [-1]
    assert client.rows(topic) == []


# -- over kill -9 ------------------------------------------------------------------------------------------------


@pytest.fixture
def killable(start_sidecar: Callable[..., Sidecar]) -> Iterator[tuple[Sidecar, Client]]:
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    yield sidecar, client
    client.close()


def test_sessions_policy_and_verdicts_survive_kill_9(killable: tuple[Sidecar, Client]) -> None:
    sidecar, client = killable
    first = client.epochs("t", "a", "silent")
    second = client.epochs("t", "a")
    client.publish_unary("t", batch([("a", 0), ("a", 4)], second))
    policy = admin_pb2.TopicPolicy(deduplication_enabled=False)
    client.open("off", "a")
    client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic="off", policy=policy))
    terms = {"t": client.topic("t").term, "off": client.topic("off").term}
    incarnation = client.topic("t").incarnation

    sidecar.restart()

    # A resume is answered with what was there; the answer's term is a higher one, the incarnation the same.
    opened = client.open("t", "a", "silent", epochs=[second["a"], first["silent"]])
    assert list(opened.epochs) == [second["a"], first["silent"]]
    assert list(opened.persisted) == [4, -1]
    assert list(opened.persisted_indexes) == [1, -1]
    assert opened.persisted_message_ids[0].entry_id == 1
    assert (opened.incarnation, opened.term > terms["t"]) == (incarnation, True)
    # A zombie of before is fenced, by frames and by Open.
    assert refused(lambda: client.publish_unary("t", batch([("a", 5)], first, {"a": 4}))).reason == "FENCED"
    assert client.resume_refused("t", "a", first["a"]).reason == "FENCED"
    receipt = client.publish_unary("t", batch([("a", 4), ("a", 5)], second, {"a": 0}))
    assert list(receipt.verdicts) == [DUP, NOT_DUP]
    # The original's place is known again: replay has refilled the ring.
    assert list(receipt.known_indexes) == [1]
    assert client.rows("t") == [("a", 0), ("a", 4), ("a", 5)]
    # An epoch of the new term is above all of the old one.
    assert client.open("t", "silent").epochs[0] > second["a"]
    assert client.topic("off").policy.deduplication_enabled is False
    assert client.topic("off").term > terms["off"]


def test_snapshot_is_where_recovery_starts(killable: tuple[Sidecar, Client]) -> None:
    sidecar, client = killable
    epochs = client.epochs("t", "a")
    client.publish_unary("t", batch([("a", i) for i in range(10)], epochs))
    position = client.admin.Snapshot(admin_pb2.SnapshotRequest(topic="t")).position
    assert (position.index, position.message_id.entry_id) == (9, 9)
    client.publish_unary("t", batch([("a", i) for i in range(10, 14)], epochs))
    assert client.topic("t").snapshot_index == 10
    sidecar.restart()
    replayed = [entry["event"] for entry in sidecar.log if "messages read" in entry["event"]]
    assert "4 messages read, up to index 14" in replayed[-1]
    assert list(client.open("t", "a", epochs=list(epochs.values())).persisted) == [13]
    assert list(client.publish_unary("t", batch([("a", 3)], epochs)).verdicts) == [DUP]


def test_a_new_name_has_no_control_characters_and_an_old_one_may(client: Client, topic: str) -> None:
    """They would be printed on somebody's terminal. Names that are in a log already keep what they have."""
    for name in ("a\nb", "\x1b[2J", "tab\t", "\x7f", "c1\x9b"):
        answer = refused(lambda name=name: client.open(topic, "fine", name))  # type: ignore[misc]
        assert answer.reason == "INVALID_NAME"
    assert client.open(topic, "ünïcödé 名前").persisted == [-1]
    producers = Producers()
    sessions = Sessions(producers)
    sessions.begin_term(1, bytes(RANDOM_BYTES))
    producers.add(b"a\nb")
    assert sessions.open(["a\nb"], None).names == [b"a\nb"]


@pytest.mark.parametrize("has_forgotten", [False, True])
def test_an_epoch_of_another_history_is_not_taken_for_a_newer_one(has_forgotten: bool) -> None:
    """For a log of which an older copy was restored: its terms were used before, and sessions of then may come."""
    producers = Producers()
    producers.has_forgotten = has_forgotten
    sessions = Sessions(producers)
    sessions.begin_term(1, bytes(RANDOM_BYTES))
    [known] = sessions.open(["p"], None).epochs.tolist()
    sessions.begin_term(3, bytes(RANDOM_BYTES))
    of_others = 2 << 32 | 1
    [why] = sessions.open(["p"], [of_others]).refusals.values()
    # Where names are forgotten a newer session may have gone on under it meanwhile.
    assert why.reason == ("FENCED" if has_forgotten else "INVALID_EPOCH")
    assert not sessions.open(["p"], [known]).refusals
    # For a name that nobody has, any may have been forgotten.
    assert not sessions.open(["unknown"], [of_others]).refusals
