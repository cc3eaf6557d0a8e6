"""What each caller may use of a sidecar: what is more is refused or waits, and others notice nothing."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker_sidecar.shares import NO_LIMITS, OF_NOBODY, CallerLimits, CallerShare, CallerShares, Use
from broker_sidecar.streams import UNKNOWN_PART
from seqdedupe.errors import UnavailableError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, batch_pb2, publish_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import NOT_DUP, TIMEOUT_SECONDS, Stream, batch, refused, status, verdicts
from tests.broker_sidecar.security.by_name import Caller, Ruled
from tests.broker_sidecar.security.showing import bearer, token_of, wait_until

RULES = """
[[allow]]
subjects = ["*"]
actions = ["publish", "create", "read", "observe", "administer"]
topics = ["${sub}-*"]
"""

SHARES = """
[[share]]
subjects = ["streams"]
streams = 2

[[share]]
subjects = ["connections"]
connections = 1

[[share]]
subjects = ["fast"]
bytes_per_second = 200_000

[[share]]
subjects = ["flying"]
bytes_in_flight = 30_000

[[share]]
subjects = ["names"]
producer_names = 3

[[share]]
subjects = ["topics", "at-once"]
topics = 2

[[share]]
subjects = ["disk"]
bytes_on_disk = 1_000_000
"""


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ruled]:
    with Ruled(tmp_path_factory.mktemp("shares"), RULES + SHARES) as sidecar:
        yield sidecar


def test_a_rate_lets_a_second_s_worth_pass_at_once_and_then_as_much_as_it_says() -> None:
    use = Use("a", CallerLimits(bytes_per_second=100))
    use.spend(100, 1000.0)
    assert use.rest_seconds(1000.0) == 0
    use.spend(50, 1000.0)
    assert use.rest_seconds(1000.0) == pytest.approx(0.5)
    assert use.rest_seconds(1000.5) == 0
    # However long it was silent, no more than a second's worth.
    use.spend(300, 5000.0)
    assert use.rest_seconds(5000.0) == pytest.approx(2.0)
    use.limits = NO_LIMITS
    assert use.rest_seconds(5000.0) == 0


def test_one_thing_may_always_be_in_flight() -> None:
    use = Use("a", CallerLimits(bytes_in_flight=10))
    assert use.fits(1000)
    use.held_bytes = 5
    assert use.fits(5)
    assert not use.fits(6)


def test_the_first_share_that_is_about_a_caller_counts_and_new_ones_count_at_once() -> None:
    shares = CallerShares(
        [CallerShare("1", ("a*",), CallerLimits(streams=1)), CallerShare("2", ("*",), CallerLimits(streams=2))],
        NO_LIMITS,
    )
    assert [shares.of(name).limits.streams for name in ("ab", "b")] == [1, 2]
    shares.replace([CallerShare("3", ("*",), CallerLimits(streams=3))], CallerLimits(bytes_per_second=10))
    assert [shares.of(name).limits.streams for name in ("ab", "b")] == [3, 3]
    shares.check_rate(shares.of("b"), 100, 50.0)
    with pytest.raises(UnavailableError) as raised:
        shares.check_rate(shares.of("ab"), 1, 50.0)
    assert raised.value.reason == "SHARE_EXCEEDED"
    assert raised.value.retry_delay_ms > 8_000


def test_more_streams_than_its_share_are_refused_and_others_have_theirs(ruled: Ruled) -> None:
    caller, other = Caller(ruled.address, "streams"), Caller(ruled.address, "other")
    epochs = caller.epochs("streams-1", "p")
    streams = [caller.stream("streams-1") for _ in range(2)]
    for k, stream in enumerate(streams):
        stream.receipt(batch([("p", k)], epochs))
    with pytest.raises(grpc.RpcError) as ended:
        caller.stream("streams-1").receipt(batch([("p", 2)], epochs))
    refusal = status(ended.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SHARE_EXCEEDED")
    assert (refusal.numbers["share"], refusal.numbers["limit"]) == ("streams", "2")
    assert refusal.retry_delay_ms == 1000
    theirs = other.epochs("other-1", "p")
    for k in range(4):
        other.stream("other-1").receipt(batch([("p", k)], theirs))
    streams[0].end()
    caller.stream("streams-1").receipt(batch([("p", 2)], epochs))
    caller.close()
    other.close()


def test_more_connections_than_its_share_are_refused(ruled: Ruled) -> None:
    first, second = (Caller(ruled.address, "connections") for _ in range(2))
    epochs = first.epochs("connections-1", "p")
    stream = first.stream("connections-1")
    stream.receipt(batch([("p", 0)], epochs))
    with pytest.raises(grpc.RpcError) as ended:
        second.stream("connections-1").receipt(batch([("p", 1)], epochs))
    assert status(ended.value).numbers["share"] == "connections"
    first.stream("connections-1").receipt(batch([("p", 1)], epochs))
    first.close()
    second.close()


def test_a_stream_that_sends_too_fast_is_read_later_and_loses_nothing(ruled: Ruled) -> None:
    caller = Caller(ruled.address, "fast")
    epochs = caller.epochs("fast-1", "p")
    stream = caller.stream("fast-1")
    payload = b"x" * 50_000
    began = time.monotonic()
    frames = [stream.send(batch([("p", k)], epochs, payloads=[payload])) for k in range(10)]
    for frame in frames:
        assert not hasattr(stream.answer(frame), "reason")
    # 500,000 bytes, of which one second's worth may come at once.
    assert time.monotonic() - began > 1
    refusal = refused(lambda: [caller.publish_unary("fast-1", batch([("p", 10 + k)], epochs)) for k in range(10_000)])
    assert (refusal.reason, refusal.numbers["share"]) == ("SHARE_EXCEEDED", "bytes_per_second")
    assert refusal.retry_delay_ms > 0
    assert ruled.replace(RULES) == ""
    try:
        number = caller.producer("fast-1", "p")[1] + 1
        assert verdicts(caller.publish_unary("fast-1", batch([("p", number)], epochs)), 1) == [NOT_DUP]
    finally:
        ruled.replace(RULES + SHARES)
    caller.close()


def test_what_is_in_flight_is_bounded_and_everything_gets_through(ruled: Ruled) -> None:
    caller = Caller(ruled.address, "flying")
    epochs = caller.epochs("flying-1", "p")
    stream = caller.stream("flying-1")
    frames = [stream.send(batch([("p", k)], epochs, payloads=[b"x" * 20_000])) for k in range(50)]
    assert not any(hasattr(stream.answer(frame), "reason") for frame in frames)
    caller.close()


def test_more_producer_names_than_its_share_are_refused(ruled: Ruled) -> None:
    caller = Caller(ruled.address, "names")
    caller.open("names-1", "a", "b")
    refusal = refused(lambda: caller.open("names-1", "b", "c", "d"))
    assert (refusal.reason, refusal.numbers["share"], refusal.numbers["limit"]) == (
        "SHARE_EXCEEDED",
        "producer_names",
        "3",
    )
    caller.open("names-1", "b", "c")
    # In each topic.
    epochs = caller.open("names-2", "a", "b", "c").epochs
    # To resume under names that nobody has opened makes them known, too.
    resume = publish_pb2.OpenRequest(topic="names-2", producer_names=["d", "e"], epochs=epochs[:2])
    assert refused(lambda: caller.publish.Open(resume)).numbers["share"] == "producer_names"
    known = publish_pb2.OpenRequest(topic="names-2", producer_names=["a"], epochs=epochs[:1])
    assert caller.publish.Open(known).epochs == epochs[:1]
    caller.close()


def test_more_topics_than_its_share_are_refused(ruled: Ruled) -> None:
    caller, operator = Caller(ruled.address, "topics"), Caller(ruled.address, "operator")
    operator.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="topics-1"))
    caller.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="topics-2"))
    assert refused(lambda: caller.open("topics-3", "p")).numbers["share"] == "topics"
    create = admin_pb2.CreateTopicRequest(topic="topics-4", partitions=2)
    assert refused(lambda: caller.admin.CreateTopic(create)).reason == "SHARE_EXCEEDED"
    caller.open("topics-1", "p")
    operator.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="topics-1"))
    caller.open("topics-3", "p")
    caller.close()
    operator.close()


def test_who_has_filled_its_part_of_the_disk_publishes_nothing_more_until_there_is_room(ruled: Ruled) -> None:
    caller, other = Caller(ruled.address, "disk"), Caller(ruled.address, "other")
    epochs, empty = caller.epochs("disk-1", "p"), caller.epochs("disk-2", "p")
    caller.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="disk-0"))
    theirs = other.epochs("other-disk", "p")
    stream = caller.stream("disk-1")
    payload = b"x" * 100_000

    def fill() -> None:
        for k in range(10_000):
            stream.receipt(batch([("p", k)], epochs, payloads=[payload]))

    refusal = refused(fill)
    assert (refusal.reason, refusal.numbers["share"]) == ("SHARE_EXCEEDED", "bytes_on_disk")
    assert refusal.retry_delay_ms > 0
    stored = caller.producer("disk-1", "p")[1]
    assert stored >= 9
    # However it publishes, and to any of its topics; others do as before.
    small = batch([("p", stored + 1)], epochs)
    assert refused(lambda: caller.publish_unary("disk-1", small)).reason == "SHARE_EXCEEDED"
    assert refused(lambda: caller.publish_unary("disk-2", batch([("p", 0)], empty))).reason == "SHARE_EXCEEDED"
    assert verdicts(other.publish_unary("other-disk", batch([("p", 0)], theirs)), 1) == [NOT_DUP]
    # Nor does it open or reset producers, which the log gets a record of. What the log says already is resumed.
    full = caller.topic("disk-1").log_bytes
    names = [f"p{k}" for k in range(2_000)]
    calls: list[Callable[[], object]] = [
        lambda: caller.open("disk-1", *names),
        lambda: caller.open("disk-1", "p"),
        lambda: caller.open("disk-3", "p"),
        lambda: caller.open("disk-1", "q", epochs=[epochs["p"]]),
        lambda: _reset(caller, "disk-1", "p"),
        lambda: _import(caller, "disk-0", "p"),
    ]
    assert [refused(call).numbers["share"] for call in calls] == ["bytes_on_disk"] * len(calls)
    assert refused(lambda: caller.topic("disk-3")).reason == "TOPIC_NOT_FOUND"
    assert list(caller.open("disk-1", "p", epochs=[epochs["p"]]).epochs) == [epochs["p"]]
    assert caller.topic("disk-1").log_bytes < full + 1_000
    operator = Caller(ruled.address, "operator")
    operator.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="disk-1"))
    wait_until(lambda: _publishes(caller, batch([("p", 0)], empty)))
    for one in (caller, other, operator):
        one.close()


def _reset(caller: Caller, topic: str, name: str) -> object:
    return caller.admin.ResetProducer(admin_pb2.ResetProducerRequest(topic=topic, producer_name=name, persisted=-1))


def _import(caller: Caller, topic: str, name: str) -> object:
    names = name.encode()
    parts = [
        admin_pb2.ImportWatermarksRequest(
            topic=topic, producer_names=names, producer_name_offsets=[0, len(names)], persisted=[5]
        ),
        admin_pb2.ImportWatermarksRequest(producers=1),
    ]
    return caller.admin.ImportWatermarks(iter(parts))


def _publishes(caller: Caller, data: batch_pb2.Batch) -> bool:
    try:
        caller.publish_unary("disk-2", data)
    except grpc.RpcError:
        return False
    return True


def test_topics_that_are_asked_for_at_once_count_while_they_are_made(ruled: Ruled) -> None:
    caller = Caller(ruled.address, "at-once")
    names = [f"at-once-{k}" for k in range(10)]
    asked = [caller.admin.CreateTopic.future(admin_pb2.CreateTopicRequest(topic=name)) for name in names]
    shares = [status(e).numbers["share"] for call in asked if (e := call.exception(TIMEOUT_SECONDS)) is not None]
    assert shares == ["topics"] * 8
    caller.close()


def test_who_is_not_known_leaves_the_streams_to_others(tmp_path: Path) -> None:
    request, most = health_pb2.HealthCheckRequest(), OF_NOBODY.streams or 0
    with Sidecar(tmp_path, authentication="token", max_streams=2 * most) as sidecar:
        watching: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(sidecar.address))
        known = watching.Watch(request, metadata=bearer(token_of(sidecar)))
        next(known)
        channels = [grpc.insecure_channel(sidecar.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
        stubs: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        others = [stubs[k % 4].Watch(request) for k in range(3 * most)]
        # The rest is refused, or makes way for another one of theirs.
        wait_until(lambda: sum(call.is_active() for call in others) <= most)
        assert known.is_active()
        assert {status(call).reason for call in others if not call.is_active()} <= {"SHARE_EXCEEDED", "STREAM_IDLE"}
        next(watching.Watch(request, metadata=bearer(token_of(sidecar))))
        for channel in channels:
            channel.close()


ALL_MAY = """
[[allow]]
subjects = ["*"]
actions = ["create", "publish", "read", "observe"]
topics = ["*"]
"""
PLACES = 8


def _opened(ruled: Ruled, name: str, count: int) -> list[Stream]:
    """Streams that are served, each over its own connection."""
    streams = []
    for k in range(count):
        caller = Caller(ruled.address, name)
        epochs = caller.epochs("t", f"{name}-{k}")
        stream = caller.stream("t")
        stream.receipt(batch([(f"{name}-{k}", caller.producer("t", f"{name}-{k}")[1] + 1)], epochs))
        streams.append(stream)
    return streams


def _is_served(stream: Stream) -> bool:
    return bool(stream.call.is_active())


def test_a_caller_with_more_than_half_of_all_streams_gives_way_to_others(tmp_path: Path) -> None:
    """None of them is ever silent here: it takes all of them in use."""
    environment = with_constants.environment(streams__IDLE_SECONDS=1e9)
    with Ruled(tmp_path, ALL_MAY, environment=environment, max_streams=PLACES) as ruled:
        greedy = _opened(ruled, "ann", PLACES)
        assert all(map(_is_served, greedy))
        assert refused(lambda: _opened(ruled, "ann", 1)).reason == "TOO_MANY_STREAMS"
        others = _opened(ruled, "bob", PLACES // 2)
        wait_until(lambda: sum(map(_is_served, greedy)) == PLACES // 2)
        assert {status(one.call).reason for one in greedy if not _is_served(one)} == {"STREAM_IDLE"}
        for name in ("ann", "bob", "cid"):
            assert refused(partial(_opened, ruled, name, 1)).reason == "TOO_MANY_STREAMS"
        assert all(map(_is_served, others))
        assert sum(map(_is_served, greedy)) == PLACES // 2


def test_who_is_not_known_takes_no_stream_that_is_in_use(tmp_path: Path) -> None:
    environment = with_constants.environment(streams__IDLE_SECONDS=1e9)
    with Ruled(tmp_path, ALL_MAY, environment=environment, max_streams=PLACES) as ruled:
        known = _opened(ruled, "ann", PLACES)
        watched: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(ruled.address))
        answer = refused(lambda: next(watched.Watch(health_pb2.HealthCheckRequest())))
        assert answer.reason == "TOO_MANY_STREAMS"
        assert all(map(_is_served, known))


def test_who_is_not_known_takes_no_place_of_who_is_and_has_a_few(tmp_path: Path) -> None:
    """The known caller's streams are silent from the first moment."""
    request = health_pb2.HealthCheckRequest()
    environment = with_constants.environment(streams__IDLE_SECONDS=0.0)
    with Ruled(tmp_path, ALL_MAY, environment=environment, max_streams=2 * UNKNOWN_PART) as ruled:
        places = 2 * UNKNOWN_PART - 2
        known = _opened(ruled, "ann", places)
        watched: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(ruled.address))
        others = []
        for _ in range(6):
            others.append(watched.Watch(request))
            next(others[-1])
        # Two have places; each of the others takes one of theirs.
        wait_until(lambda: sum(call.is_active() for call in others) == 2)
        assert {status(call).reason for call in others if not call.is_active()} == {"STREAM_IDLE"}
        assert all(map(_is_served, known))
        # One more of the known ones takes a known one's place.
        _opened(ruled, "ann", 1)
        wait_until(lambda: sum(map(_is_served, known)) == places - 1)
        assert sum(call.is_active() for call in others) == 2


def test_who_is_known_takes_what_unknown_ones_have_beyond_their_places(tmp_path: Path) -> None:
    """In use or not: none is ever silent here."""
    request = health_pb2.HealthCheckRequest()
    environment = with_constants.environment(streams__IDLE_SECONDS=1e9)
    with Ruled(tmp_path, ALL_MAY, environment=environment, max_streams=UNKNOWN_PART) as ruled:
        known = _opened(ruled, "ann", UNKNOWN_PART - 4)
        watched: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(ruled.address))
        others = [watched.Watch(request) for _ in range(4)]
        for call in others:
            next(call)
        known += _opened(ruled, "ann", 3)
        wait_until(lambda: sum(call.is_active() for call in others) == 1)
        assert refused(lambda: _opened(ruled, "ann", 1)).reason == "TOO_MANY_STREAMS"
        assert all(map(_is_served, known))
        assert sum(call.is_active() for call in others) == 1
