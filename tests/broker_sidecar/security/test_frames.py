"""Producer names that a caller may not use: in Open, alone and hidden in a frame, and when the rules change. And other
topics in a stream's later messages."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import NOT_DUP, TIMEOUT_SECONDS, Refused, batch, refused, status, topic_bytes, verdicts
from tests.broker_sidecar.security.by_name import Caller, Ruled

RULES = """
[[allow]]
subjects = ["*"]
actions = ["create", "read", "observe"]
topics = ["*"]

[[allow]]
name = "own names"
subjects = ["*"]
actions = ["publish"]
topics = ["*"]
producers = ["${sub}", "${sub}-*"]
"""

DENIAL = """
[[deny]]
name = "no more of this"
subjects = ["ann"]
actions = ["publish"]
topics = ["*"]
producers = ["ann-2"]
"""


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ruled]:
    with Ruled(tmp_path_factory.mktemp("ruled"), RULES) as sidecar:
        yield sidecar


@pytest.fixture
def ann(ruled: Ruled) -> Iterator[Caller]:
    caller = Caller(ruled.address, "ann")
    yield caller
    caller.close()


@pytest.fixture
def bob(ruled: Ruled) -> Iterator[Caller]:
    caller = Caller(ruled.address, "bob")
    yield caller
    caller.close()


def test_open_answers_each_name_by_itself(ann: Caller, topic: str) -> None:
    answer = ann.open(topic, "bob", "ann", "ann-1", "bob-1")
    assert [(one.index, one.reason) for one in answer.refusals] == [(0, "NOT_ALLOWED"), (3, "NOT_ALLOWED")]
    assert [epoch > 0 for epoch in answer.epochs] == [False, True, True, False]
    assert list(answer.persisted) == [-1] * 4
    epochs = dict(zip(("ann", "ann-1"), answer.epochs[1:3], strict=True))
    receipt = ann.stream(topic).receipt(batch([("ann", 0), ("ann-1", 0)], epochs))
    assert verdicts(receipt, 2) == [NOT_DUP] * 2
    resumed = ann.open(topic, "bob", "ann", epochs=[epochs["ann"], epochs["ann"]])
    assert [(one.index, one.reason) for one in resumed.refusals] == [(0, "NOT_ALLOWED")]
    assert (list(resumed.epochs), list(resumed.persisted)) == ([0, epochs["ann"]], [-1, 0])


def test_open_of_nothing_but_others_names_is_refused_and_makes_no_topic(ann: Caller, topic: str) -> None:
    refusal = refused(lambda: ann.open(topic, "bob"))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")
    assert refusal.numbers["subject"] == "ann"
    assert refusal.numbers["producer_name"] == "bob"
    assert refused(lambda: ann.topic(topic)).reason == "TOPIC_NOT_FOUND"


def test_a_guessed_epoch_opens_nothing(ann: Caller, bob: Caller, topic: str) -> None:
    """The name owns the watermark: anyone who could publish the highest ID under it would silence its owner."""
    epochs = bob.epochs(topic, "bob")
    state = bob.state(topic)
    highest = batch([("bob", 2**63 - 1)], epochs, {"bob": -1})
    with_own = batch([("ann", 0), ("bob", 2**63 - 1)], epochs | ann.epochs(topic, "ann"), {"bob": -1})
    stream = ann.stream(topic)
    for content, names in ((highest, ["bob"]), (with_own, ["bob"])):
        refusal = stream.refusal(content)
        assert (refusal.reason, refusal.retry_delay_ms) == ("NOT_ALLOWED", -1)
        assert [one.producer_name for one in refusal.producers] == names
        # Nor are its numbers told.
        assert {(one.current_epoch, one.pushed, one.persisted) for one in refusal.producers} == {(0, -1, -1)}
    assert refused(lambda: ann.publish_unary(topic, highest)).reason == "NOT_ALLOWED"
    assert bob.producer(topic, "bob") == (-1, -1, epochs["bob"])
    assert verdicts(stream.receipt(batch([("ann", 0)], ann.epochs(topic, "ann"))), 1) == [NOT_DUP]
    assert verdicts(bob.stream(topic).receipt(batch([("bob", 0)], epochs)), 1) == [NOT_DUP]
    assert state[1] == -1


def test_frames_of_others_go_on_beside_one_that_is_refused(ann: Caller, bob: Caller, topic: str) -> None:
    epochs = ann.epochs(topic, "ann", "ann-1") | bob.epochs(topic, "bob")
    stream = ann.stream(topic)
    others = batch([("ann", 0), ("bob", 0)], epochs)
    frames = [stream.send(others if k % 2 else batch([("ann-1", k // 2)], epochs)) for k in range(20)]
    answers = [stream.answer(frame) for frame in frames]
    assert [hasattr(answer, "reason") for answer in answers] == [k % 2 == 1 for k in range(20)]
    assert ann.rows(topic) == [("ann-1", k) for k in range(10)]


def test_only_the_first_16_of_many_names_are_told(ann: Caller, bob: Caller, topic: str) -> None:
    names = [f"bob-{k}" for k in range(40)]
    epochs = bob.epochs(topic, *names) | ann.epochs(topic, "ann")
    refusal = ann.stream(topic).refusal(batch([("ann", 1), *((name, 1) for name in names)], epochs))
    assert [one.producer_name for one in refusal.producers] == names[:16]


def test_rules_that_change_count_for_open_streams(ruled: Ruled, ann: Caller, bob: Caller, topic: str) -> None:
    epochs = ann.epochs(topic, "ann-1", "ann-2")
    one, other = batch([("ann-1", 0)], epochs), batch([("ann-1", 1), ("ann-2", 0)], epochs)
    stream = ann.stream(topic)
    stream.receipt(one)
    stream.receipt(other)
    try:
        assert ruled.replace(RULES + DENIAL) == ""
        later = batch([("ann-1", 2), ("ann-2", 1)], epochs)
        # The same list of names as before: what was judged counts no more.
        refusal = stream.refusal(later)
        assert (refusal.reason, [p.producer_name for p in refusal.producers]) == ("NOT_ALLOWED", ["ann-2"])
        assert verdicts(stream.receipt(batch([("ann-1", 2)], epochs)), 1) == [NOT_DUP]
        assert "not valid" in ruled.replace(RULES + "[[alow]]\n")
        assert stream.refusal(batch([("ann-2", 1)], epochs)).reason == "NOT_ALLOWED"
    finally:
        assert ruled.replace(RULES) == ""
    assert verdicts(stream.receipt(batch([("ann-2", 1)], epochs)), 1) == [NOT_DUP]


def test_readers_end_when_they_may_not_read_any_more(ruled: Ruled, ann: Caller, bob: Caller, topic: str) -> None:
    ann.epochs(topic, "ann")
    request = read_pb2.ReadStreamRequest(topic=topic, follow=True)
    streams = [caller.reading.ReadStream(request, timeout=TIMEOUT_SECONDS) for caller in (ann, bob)]
    for stream in streams:
        next(stream)
    denial = '[[deny]]\nsubjects = ["ann"]\nactions = ["read"]\ntopics = ["*"]\n'
    try:
        assert ruled.replace(RULES + denial) == ""
        with pytest.raises(grpc.RpcError) as ended:
            next(streams[0])
        assert status(ended.value).reason == "NOT_ALLOWED"
        bob.stream(topic).receipt(batch([("bob", 0)], bob.epochs(topic, "bob")))
        assert next(streams[1]).records
    finally:
        assert ruled.replace(RULES) == ""


def test_what_makes_a_topic_needs_to_be_allowed_to(ruled: Ruled, ann: Caller, topic: str) -> None:
    try:
        ruled.replace(RULES.replace('"create", ', ""))
        refusal = refused(lambda: ann.open(topic, "ann"))
        assert (refusal.reason, refusal.numbers["action"]) == ("NOT_ALLOWED", "create")
    finally:
        ruled.replace(RULES)
    ann.open(topic, "ann")
    try:
        ruled.replace(RULES.replace('"create", ', ""))
        ann.open(topic, "ann-1")
    finally:
        ruled.replace(RULES)


def test_a_stream_says_that_it_has_taken_no_frame(ruled: Ruled, ann: Caller, topic: str) -> None:
    """A publisher, whose frames may be on their way, learns so that nothing is stored."""
    owner = Caller(ruled.address, "operator")
    by_id = admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    owner.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, deduplication_mode=by_id))
    owner.close()
    for name, reason in ((topic, "NOT_ALLOWED"), (f"{topic}-missing", "TOPIC_NOT_FOUND")):
        said = refused(ann.stream(name).end)
        assert (said.reason, said.numbers.get("frames_taken")) == (reason, "0")
    epochs = ann.epochs(f"{topic}-names", "ann")
    for frames, number in ((0, "0"), (1, None)):
        stream = ann.stream(f"{topic}-names")
        for k in range(frames):
            stream.receipt(batch([("ann", k)], epochs))
        stream.send_raw(topic_bytes("another"))
        said = refused(stream.end)
        assert (said.reason, said.numbers.get("frames_taken")) == ("INVALID_REQUEST", number)


def _publishing_on(caller: Caller, own: str, other: str) -> Refused:
    stream = caller.stream(own)
    stream.send_raw(topic_bytes(other))
    return refused(stream.end)


def _importing_into(caller: Caller, own: str, other: str) -> Refused:
    requests = [admin_pb2.ImportWatermarksRequest(topic=name) for name in (own, other)]
    return refused(lambda: caller.admin.ImportWatermarks(iter(requests), timeout=TIMEOUT_SECONDS))


@pytest.mark.parametrize("said", [_publishing_on, _importing_into])
def test_a_later_message_of_a_stream_does_not_tell_which_other_topics_there_are(
    ruled: Ruled, topic: str, said: Callable[[Caller, str, str], Refused]
) -> None:
    owner = Caller(ruled.address, "operator")
    others = [f"{topic}-{kind}" for kind in ("there", "missing", "parted")]
    for name, partitions in ((topic, 0), (others[0], 0), (others[2], 3)):
        owner.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name, partitions=partitions))
    answers = [said(owner, topic, other) for other in others]
    assert answers[0].reason == "INVALID_REQUEST"
    assert answers == answers[:1] * 3
    owner.close()
