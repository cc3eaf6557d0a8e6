"""Attachments that go wrong at every place: cut, taken over, lied to, told things twice or in the wrong order."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import dedupe_pb2 as pb
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.attach import DUP, NOT_DUP, UNKNOWN, ByHand, Cut, Log, check_of, replay_of

QUICK = with_constants.environment(seqdedupe__topic__attached__ADMISSION_TIMEOUT_SECONDS=1)


@pytest.fixture(scope="module")
def brokers_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for brokers, that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("brokers"), log="broker") as sidecar:
        yield sidecar


@pytest.fixture
def channel(brokers_sidecar: Sidecar) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(brokers_sidecar.address) as channel:
        yield channel


def publish(channel: grpc.Channel, topic: str, log: Log, ids: range, cut_after: int) -> None:
    """Attaches and publishes all that the log may lack, with a failure of the log under way, until it is cut.

    The log is written as soon as the verdict is there.
    """
    stream = ByHand(channel, topic, cut_after)
    stream.attach(log)
    admitted = 0
    for i in ids:
        [verdict] = stream.check(i)
        if verdict == DUP:
            continue
        assert verdict == NOT_DUP
        if i == ids[1]:
            # The log refuses it; what its producer resends comes after the reset.
            stream.report(admitted, failed=1)
            assert stream.check(i) == [UNKNOWN]
            stream.send(reset=pb.Reset())
            assert stream.check(i) == [NOT_DUP]
            admitted += 1
        stream.report(admitted, 1, log.append(i))
        admitted += 1
    stream.cancel()


WHOLE_RUN = 20
"""`publish` sends and receives one message less: cut after this many it is not cut, and every smaller number cuts
it."""


@pytest.mark.parametrize("cut_after", range(1, WHOLE_RUN + 1))
def test_cut_at_every_message(channel: grpc.Channel, topic: str, cut_after: int) -> None:
    log = Log()
    for i in range(3):
        log.append(i)
    try:
        publish(channel, topic, log, range(1, 6), cut_after)
        assert cut_after == WHOLE_RUN
    except Cut:
        assert cut_after < WHOLE_RUN
    # The producer resends all, on an attachment that is not cut.
    stream = ByHand(channel, topic)
    stream.attach(log)
    admitted = 0
    for i in range(8):
        [verdict] = stream.check(i)
        if verdict == NOT_DUP:
            stream.report(admitted, 1, log.append(i))
            admitted += 1
    assert [i for i, _ in log.entries] == list(range(8))
    stream.cancel()


@pytest.mark.parametrize("is_written", [True, False])
def test_cut_before_a_verdict_is_reported(channel: grpc.Channel, topic: str, is_written: bool) -> None:
    """Whether the broker came to write what was admitted is shown by its log alone."""
    log = Log()
    first = ByHand(channel, topic)
    first.attach(log)
    assert first.check(0, 1, 2) == [NOT_DUP] * 3
    if is_written:
        log.append(0)
        log.append(1)
    first.cancel()
    second = ByHand(channel, topic)
    second.attach(log)
    assert second.check(0, 1, 2) == ([DUP, DUP, NOT_DUP] if is_written else [NOT_DUP] * 3)
    second.cancel()


# -- reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(lambda s: [s.report(0, 2, b"x"), s.report(0, 2, b"x")], id="repeated"),
        pytest.param(lambda s: [s.report(1, 1, b"x"), s.report(0, 1, b"w")], id="reordered"),
        pytest.param(lambda s: [s.report(2, 1, b"x")], id="the ones before are lost"),
        pytest.param(lambda s: [s.report(0, 4, b"x")], id="more than there are"),
        pytest.param(lambda s: [s.report(0, 2**32 - 1, b"x", 2**32 - 1)], id="far more"),
        pytest.param(lambda s: [s.report(2**64 - 1, 1, b"x")], id="from nowhere"),
        pytest.param(lambda s: [s.report(0, failed=1), s.report(1, 1, b"x")], id="persisted after a failure"),
    ],
)
def test_a_report_out_of_order_ends_the_attachment(
    channel: grpc.Channel, topic: str, report: Callable[[ByHand], object]
) -> None:
    log = Log()
    stream = ByHand(channel, topic)
    stream.attach(log)
    assert stream.check(0, 1, 2) == [NOT_DUP] * 3
    report(stream)
    assert stream.ends() == "NOT_ATTACHED"


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(lambda s: s.report(0, 1), id="no position"),
        pytest.param(lambda s: s.report(0, 0, b"x"), id="a position of nothing"),
        pytest.param(lambda s: s.report(0, 1, b"x" * 256), id="a long position"),
        pytest.param(lambda s: s.send(reset=pb.Reset()), id="a reset while something is in flight"),
        pytest.param(lambda s: s.send(end_replay=pb.EndReplay()), id="the replay ends twice"),
        pytest.param(lambda s: s.send(replay=replay_of([(9, b"x", b"")])), id="a replay after its end"),
        pytest.param(lambda s: s.send(release=pb.Release(handles=[1])), id="a handle that is not"),
        pytest.param(lambda s: s.send(release=pb.Release(handles=[-1])), id="a handle below 0"),
        pytest.param(lambda s: s.send(release=pb.Release(handles=[2**31 - 1])), id="a handle far away"),
        pytest.param(lambda s: s.send(register=pb.Register(producer_name_offsets=[0])), id="no names"),
        pytest.param(
            lambda s: s.send(
                register=pb.Register(first_handle=1, producer_name_offsets=[0, 2, 1], producer_names=b"a")
            ),
            id="names with offsets that fall",
        ),
        pytest.param(
            lambda s: s.send(
                register=pb.Register(first_handle=5, producer_name_offsets=[0, 1], producer_names=b"a")
            ),
            id="handles with a hole",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_ends_the_attachment(
    channel: grpc.Channel, topic: str, report: Callable[[ByHand], object]
) -> None:
    stream = ByHand(channel, topic)
    stream.attach(Log())
    assert stream.check(0) == [NOT_DUP]
    report(stream)
    assert stream.ends() == "INVALID_REQUEST"
    # It changed nothing.
    again = ByHand(channel, topic)
    again.attach(Log())
    assert again.check(0) == [NOT_DUP]
    again.cancel()


def test_a_report_that_never_comes(start_sidecar: Callable[..., Sidecar], topic: str) -> None:
    sidecar = start_sidecar(log="broker", module=with_constants.MODULE, environment=QUICK)
    log = Log()
    with grpc.insecure_channel(sidecar.address) as channel:
        stream = ByHand(channel, topic)
        stream.attach(log)
        assert stream.check(0, 1) == [NOT_DUP] * 2
        stream.report(0, 1, log.append(0))
        assert stream.ends() == "NOT_ATTACHED"
        log.append(1)
        stream = ByHand(channel, topic)
        stream.attach(log)
        assert stream.check(0, 1, 2) == [DUP, DUP, NOT_DUP]
        stream.cancel()


def test_a_name_is_released_while_it_is_in_flight(channel: grpc.Channel, topic: str) -> None:
    """Its producer has gone before the log has taken what it sent."""
    log = Log()
    stream = ByHand(channel, topic)
    stream.attach(log)
    assert stream.check(0, 1) == [NOT_DUP] * 2
    stream.send(release=pb.Release(handles=[0]))
    log.append(0)
    stream.report(0, 2, log.append(1))
    stream.ask(2)
    [refusal] = stream.read().refusals
    assert refusal.reason == "INVALID_REQUEST"
    stream.send(register=pb.Register(first_handle=1, producer_name_offsets=[0, 1], producer_names=b"p"))
    check = check_of(9, [0, 1, 2])
    check.handles[:] = [1, 1, 1]
    stream.send(checks=[check])
    [checked] = stream.read().checked
    assert list(checked.verdicts) == [DUP, DUP, NOT_DUP]
    stream.cancel()


# -- who holds the topic ---------------------------------------------------------------------------------------


def test_a_second_attachment_ends_the_first(channel: grpc.Channel, topic: str) -> None:
    log = Log()
    first, second = ByHand(channel, topic), ByHand(channel, topic)
    first.attach(log)
    assert first.check(0) == [NOT_DUP]
    second.attach(log)
    # What the first one has in flight is not in the log, and will not be: its report does not count.
    first.report(0, 1, b"at 0")
    assert first.ends() == "NOT_ATTACHED"
    assert second.check(0) == [NOT_DUP]
    second.report(0, 1, log.append(0))
    assert second.check(0, 1) == [DUP, NOT_DUP]
    second.cancel()


def test_a_second_attachment_comes_while_the_first_replays(channel: grpc.Channel, topic: str) -> None:
    log = Log()
    for i in range(6):
        log.append(i)
    first, second = ByHand(channel, topic), ByHand(channel, topic)
    rows = log.after(first.begin())
    first.send(replay=replay_of(rows[:3]))
    assert second.begin() in (b"", log.entries[2][1])
    assert first.ends() == "NOT_ATTACHED"
    second.cancel()
    third = ByHand(channel, topic)
    third.attach(log)
    assert third.check(5, 6) == [DUP, NOT_DUP]
    third.cancel()


@pytest.mark.parametrize("lie", [0, 1, 2**64 - 1])
def test_an_old_or_wrong_token(channel: grpc.Channel, topic: str, lie: int) -> None:
    """Said on a stream that is well: the broker mixes up two of its attachments."""
    log = Log()
    old, new = ByHand(channel, topic), ByHand(channel, topic)
    old.attach(log)
    new.attach(log)
    assert new.check(0) == [NOT_DUP]
    new.send(token=old.token if lie == 1 else lie, report=pb.Report(persisted=1, position=b"at 0"))
    assert new.ends() == "NOT_ATTACHED"
    honest = ByHand(channel, topic)
    honest.attach(log)
    assert honest.check(0) == [NOT_DUP]
    honest.cancel()


def test_a_message_before_begin_or_a_second_begin(channel: grpc.Channel, topic: str) -> None:
    stream = ByHand(channel, topic)
    stream.ask(0)
    assert stream.ends() == "INVALID_REQUEST"
    stream = ByHand(channel, topic)
    stream.attach(Log())
    stream.send(begin=pb.Begin(topic=topic))
    assert stream.ends() == "INVALID_REQUEST"


def test_a_check_before_the_end_of_the_replay(channel: grpc.Channel, topic: str) -> None:
    stream = ByHand(channel, topic)
    stream.begin()
    stream.ask(0)
    [refusal] = stream.read().refusals
    assert refusal.reason == "NOT_ATTACHED"
    stream.send(end_replay=pb.EndReplay())
    assert stream.read().HasField("ready")
    assert stream.check(0) == [NOT_DUP]
    stream.cancel()


def test_why_a_producer_is_sent_back(channel: grpc.Channel, topic: str) -> None:
    """A broker that tells a producer to send one message again, and takes the next one, loses the first."""
    log = Log()
    stream = ByHand(channel, topic)
    stream.begin()
    stream.ask(5)
    assert len(stream.read().refusals) == 1
    stream.send(end_replay=pb.EndReplay())
    stream.read()
    assert stream.check(6) == [NOT_DUP]
    stream.report(0, 1, log.append(6))
    assert stream.check(5) == [DUP]
    assert 5 not in [i for i, _ in log.entries]
    stream.cancel()


# -- replay ----------------------------------------------------------------------------------------------------


def known(channel: grpc.Channel, topic: str) -> Log:
    """A log of six entries, of which the sidecar knows two."""
    log = Log()
    for i in range(2):
        log.append(i)
    stream = ByHand(channel, topic)
    stream.attach(log)
    stream.cancel()
    for i in range(2, 6):
        log.append(i)
    return log


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(lambda rows: rows[1:], id="too late"),
        pytest.param(lambda rows: [*rows[:1], *rows[2:]], id="one left out"),
        pytest.param(lambda rows: [rows[1], rows[0], *rows[2:]], id="in another order"),
        pytest.param(lambda rows: [*rows[:2], *rows[1:]], id="one twice"),
        pytest.param(lambda rows: rows[:-1], id="too short"),
        pytest.param(lambda rows: [(1, b"at 1", b"at 0"), *rows], id="too early"),
        pytest.param(lambda rows: [], id="nothing"),
        pytest.param(lambda rows: [(2, b"at 2", b""), *rows[1:]], id="as if it were the log's first"),
        pytest.param(lambda rows: [*rows, (6, b"at 6", b"at 5")], id="beyond the end"),
    ],
)
def test_a_replay_that_is_not_the_log(
    channel: grpc.Channel,
    topic: str,
    told: Callable[[list[tuple[int, bytes, bytes]]], list[tuple[int, bytes, bytes]]],
) -> None:
    log = known(channel, topic)
    stream = ByHand(channel, topic)
    rows = told(log.after(stream.begin()))
    if rows:
        stream.send(replay=replay_of(rows))
    stream.send(end_replay=pb.EndReplay(last_position=log.last))
    assert stream.ends() == "REPLAY_GAP"
    # No verdict was given. Who tells the truth is attached, but for an entry that is not in the log: it is known now.
    honest = ByHand(channel, topic)
    if rows and rows[-1][1] == b"at 6":
        assert honest.begin() == b"at 6"
        honest.send(end_replay=pb.EndReplay(last_position=log.last))
        assert honest.ends() == "REPLAY_GAP"
        return
    honest.attach(log)
    assert honest.check(*range(7)) == [DUP] * 6 + [NOT_DUP]
    honest.cancel()


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([b"\0", b"\1", b"\xff"], id="one byte"),
        pytest.param([b"a" * 255, b"a" * 254 + b"b", b"b" * 255], id="the longest"),
        pytest.param([b"\0\0", b"\0", b"\0\0\0", b"a\0", b"a\0\0"], id="zero bytes"),
        pytest.param([b"a", b"aa", b"aaa", b"ab", b"b"], id="equal prefixes"),
        pytest.param([b"z", b"y", b"x" * 200, b"w"], id="falling"),
        pytest.param([b"\xff\xfe", "ä".encode()[:1]], id="not UTF-8"),
    ],
)
def test_positions_of_any_shape(channel: grpc.Channel, topic: str, positions: list[bytes]) -> None:
    log = Log()
    for i, position in enumerate(positions[:-1]):
        log.append(i, position)
    stream = ByHand(channel, topic)
    stream.attach(log)
    last = len(positions) - 1
    assert stream.check(*range(last + 1)) == [DUP] * last + [NOT_DUP]
    stream.report(0, 1, log.append(last, positions[-1]))
    assert stream.check(last) == [DUP]
    stream.cancel()
    again = ByHand(channel, topic)
    assert again.begin() == positions[-1]
    again.send(end_replay=pb.EndReplay(last_position=log.last))
    assert again.read().HasField("ready")
    again.cancel()


@pytest.mark.parametrize("position", [b"", b"x" * 256])
def test_positions_that_are_none(channel: grpc.Channel, topic: str, position: bytes) -> None:
    stream = ByHand(channel, topic)
    stream.begin()
    stream.send(replay=replay_of([(0, b"a", b""), (1, position, b"a")]))
    assert stream.ends() == "INVALID_REQUEST"


def test_predecessors_that_are_cut_at_other_places(channel: grpc.Channel, topic: str) -> None:
    """The same bytes, and other positions: they are compared one by one."""
    stream = ByHand(channel, topic)
    stream.begin()
    stream.send(replay=replay_of([(0, b"a", b""), (1, b"bc", b"a"), (2, b"d", b"bc")]))
    stream.send(end_replay=pb.EndReplay(last_position=b"d"))
    assert stream.read().HasField("ready")
    stream.cancel()
    stream = ByHand(channel, topic + "-other")
    stream.begin()
    stream.send(replay=replay_of([(0, b"a", b""), (1, b"bc", b"ab"), (2, b"d", b"c")]))
    assert stream.ends() == "REPLAY_GAP"
