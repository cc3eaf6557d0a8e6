"""Callers with narrow rights, who try to harm others by calls that concern a whole topic: a broker's log that is not
theirs, and cursors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from broker_sidecar.services.read_service import RECORD_BYTES
from broker_sidecar.shares import MAX_CURSORS_A_CALLER, MOVES_PER_SECOND, NO_LIMITS, CallerLimits, Use
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.headers import HEADER_BYTES
from seqdedupe.message_id import MessageId, Position
from seqdedupe.topic import control
from seqdedupe.topic.control import CursorChange
from seqdedupe.topic.policy import MAX_NOTE_BYTES, NamedCursor
from seqdedupe.v1 import batch_pb2, read_pb2
from tests.broker_sidecar.attaching import Attaching
from tests.broker_sidecar.calls import DUP, NOT_DUP, Refused, refused
from tests.broker_sidecar.security.by_name import Caller, Ruled, call_as

RULES = """
[[allow]]
subjects = ["broker"]
actions = ["attach", "create"]
topics = ["*"]

[[allow]]
subjects = ["shop"]
actions = ["publish", "create", "observe"]
topics = ["*"]

[[allow]]
subjects = ["mallory"]
actions = ["publish"]
topics = ["*"]
producers = ["${sub}"]

[[allow]]
subjects = ["mallory", "billing"]
actions = ["read"]
topics = ["*"]

[[allow]]
subjects = ["team"]
actions = ["read"]
topics = ["*"]
cursors = ["billing", "team-*"]

[[deny]]
subjects = ["team"]
actions = ["read"]
topics = ["*"]
cursors = ["team-x"]
"""

SHARE = """
[[share]]
subjects = ["team"]
cursors = 2
"""

HERE = batch_pb2.Position(incarnation=7, index=7, message_id=batch_pb2.MessageId(ledger_id=7, entry_id=7))


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ruled]:
    with Ruled(tmp_path_factory.mktemp("ruled"), RULES + SHARE) as sidecar:
        yield sidecar


@dataclass
class Callers:
    shop: Caller
    mallory: Caller
    billing: Caller
    team: Caller


@pytest.fixture
def callers(ruled: Ruled, topic: str) -> Iterator[Callers]:
    found = Callers(*(Caller(ruled.address, name) for name in ("shop", "mallory", "billing", "team")))
    found.shop.epochs(topic, "shop")
    yield found
    for caller in (found.shop, found.mallory, found.billing, found.team):
        caller.close()


def value(note: str = "") -> read_pb2.CursorValue:
    return read_pb2.CursorValue(position=HERE, note=note)


def move(caller: Caller, topic: str, name: str, note: str = "", expected: read_pb2.CursorValue | None = None) -> None:
    caller.reading.MoveCursor(read_pb2.MoveCursorRequest(topic=topic, name=name, expected=expected, new=value(note)))


def why_not(caller: Caller, topic: str, name: str, expected: read_pb2.CursorValue | None = None) -> Refused:
    return refused(lambda: move(caller, topic, name, "mallory was here", expected))


def kept(caller: Caller, topic: str, name: str) -> read_pb2.CursorValue:
    return caller.reading.GetCursor(read_pb2.GetCursorRequest(topic=topic, name=name)).kept


# -- a broker's log ------------------------------------------------------------------------------------------------


def test_nobody_attaches_a_topic_by_a_producer_name_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Anyone who could would say where the log ends, and copies of what stands after that would be new."""
    with Ruled(tmp_path_factory.mktemp("broker"), RULES, log="broker") as sidecar:
        broker = Attaching(call_as(sidecar.address, "broker"), "orders")
        broker.register("shop")
        broker.ready()
        assert broker.judge((0, 11)) == [NOT_DUP]
        # It is in the broker's log, and the report has not come yet.
        mallory = Attaching(call_as(sidecar.address, "mallory"))
        mallory.send(begin={"topic": "orders"})
        why = mallory.ended()
        assert (why.reason, why.numbers["action"]) == ("NOT_ALLOWED", "attach")
        # The broker holds its topic as before; and after a time without it learns of all that it has.
        assert broker.judge((0, 11)) != [NOT_DUP]
        broker.end()
        again = Attaching(call_as(sidecar.address, "broker"), "orders")
        assert again.replay_after == b""
        again.register("shop")
        again.replay((0, 11, 11, b"1"))
        again.ready(b"1")
        assert again.judge((0, 11), (0, 12)) == [DUP, NOT_DUP]
        again.end()


# -- cursors -------------------------------------------------------------------------------------------------------


def test_a_reader_moves_its_own_cursors_and_nobody_elses(callers: Callers, topic: str) -> None:
    billing, mallory, team = callers.billing, callers.mallory, callers.team
    move(billing, topic, "billing", "own")
    move(billing, topic, "billing/2")
    for name, expected in (("billing", value("own")), ("billing", None), ("new", None), ("mallory2", None)):
        why = why_not(mallory, topic, name, expected)
        assert (why.reason, why.numbers["cursor"]) == ("NOT_ALLOWED", name)
    look = read_pb2.GetCursorRequest(topic=topic, name="billing")
    assert refused(lambda: mallory.reading.GetCursor(look)).reason == "NOT_ALLOWED"
    assert kept(billing, topic, "billing") == value("own")
    # A rule may say more, and a denial wins.
    move(team, topic, "billing", "team", value("own"))
    move(team, topic, "team-1")
    assert why_not(team, topic, "team-x").reason == "NOT_ALLOWED"
    # What says nothing of reading keeps nobody from it.
    assert team.reading.GetLastMessageId(read_pb2.GetLastMessageIdRequest(topic=topic)).first_index == 0
    for name in ("", "x" * 256, "a\nb"):
        assert why_not(mallory, topic, name).reason == "INVALID_NAME"


def test_a_reader_takes_a_few_cursors_and_leaves_the_others(callers: Callers, topic: str) -> None:
    mallory, billing, team = callers.mallory, callers.billing, callers.team
    for k in range(MAX_CURSORS_A_CALLER):
        move(mallory, topic, f"mallory/{k}")
    why = why_not(mallory, topic, "mallory/one-more")
    assert (why.reason, why.numbers) == ("SHARE_EXCEEDED", why.numbers | {"share": "cursors", "limit": "8"})
    # Those that are there may be moved, and others make theirs.
    move(mallory, topic, "mallory/0", "on", value())
    move(billing, topic, "billing")
    # A share says how many: all that it may move count.
    move(team, topic, "team-1")
    assert why_not(team, topic, "team-2").numbers["limit"] == "2"


def test_cursors_that_come_together_are_not_more_than_a_reader_may_have(callers: Callers, topic: str) -> None:
    with ThreadPoolExecutor(12) as threads:
        moves = [threads.submit(move, callers.mallory, topic, f"mallory/{k}") for k in range(12)]
        failed = [one.exception() for one in moves if one.exception() is not None]
    assert len(failed) == 12 - MAX_CURSORS_A_CALLER


# -- how fast they move --------------------------------------------------------------------------------------------

HOUR_SECONDS = 3600.0
MOST_BYTES = 10_000_000
NAME = "n" * 255
LARGEST = (2**63 - 1, 2**63 - 1, 2**31 - 1)


def record_bytes(name: str, note: str, ids: tuple[int, int, int]) -> int:
    """What a moved cursor takes in the log."""
    position = Position(ids[0], MessageId(*ids), ids[1], 2**64 - 1)
    change = CursorChange(name, NamedCursor(name, position, note, 2**31 - 1))
    return HEADER_BYTES + len(control.encode(change, term=2**62, record_id=2**64 - 1))


def counted_bytes(name: str, note: str, ids: tuple[int, int, int]) -> int:
    """What counts for it."""
    new = read_pb2.CursorValue(position=Position(ids[0], MessageId(*ids), ids[1], 2**64 - 1).to_proto(), note=note)
    return RECORD_BYTES + len(name) + new.ByteSize()


@pytest.mark.parametrize(("name", "note"), [("c", ""), ("c", "y" * MAX_NOTE_BYTES), (NAME, "y" * MAX_NOTE_BYTES)])
def test_an_hour_of_moves_is_less_than_10_mb_of_a_quiet_topics_log(name: str, note: str) -> None:
    use, now, written, moves = Use("mallory", NO_LIMITS), 1000.0, 0, 0
    size, counted = record_bytes(name, note, LARGEST), counted_bytes(name, note, LARGEST)
    assert size <= counted
    while now < 1000.0 + HOUR_SECONDS:
        now += use.move("orders", counted, now)
        written, moves = written + size, moves + 1
    assert written < MOST_BYTES
    assert moves <= MOVES_PER_SECOND * (HOUR_SECONDS + 1) + 1
    # The control: one move after the other without it, at a disk's millisecond each.
    assert size * HOUR_SECONDS * 1000 > MOST_BYTES


def test_each_topic_and_caller_has_ten_moves_a_second() -> None:
    use = Use("ann", NO_LIMITS)
    assert [use.move("a", 100, 50.0) for _ in range(11)] == pytest.approx([0.0] * 11)
    assert use.move("a", 100, 50.0) == pytest.approx(0.1)
    assert use.move("b", 100, 50.0) == 0.0
    assert Use("bob", NO_LIMITS).move("a", 100, 50.0) == 0.0
    # What would wait for too long is refused, and learns when to come again.
    refusals: list[SeqdedupeError] = []
    while not refusals:
        try:
            waits = use.move("a", 100, 50.0)
        except SeqdedupeError as e:
            refusals.append(e)
        else:
            assert waits <= 5.0
    assert refusals[0].reason == "SHARE_EXCEEDED"
    assert refusals[0].numbers == {"share": "cursor_moves", "limit": "10"}
    assert refusals[0].retry_delay_ms > 5000
    assert use.move("a", 100, 50.0 + refusals[0].retry_delay_ms / 1000) <= 5.0


def test_who_moves_cursors_of_many_topics_is_not_remembered_for_ever() -> None:
    use = Use("ann", CallerLimits())
    for k in range(5000):
        use.move(f"topic-{k}", 100, float(k))
    assert len(use._moves_paid_until) <= 1001


def test_moves_count_for_a_callers_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    share = '[[share]]\nsubjects = ["billing"]\nbytes_per_second = 1_000\n'
    with Ruled(tmp_path_factory.mktemp("slow"), RULES + share) as sidecar:
        shop, billing = Caller(sidecar.address, "shop"), Caller(sidecar.address, "billing")
        shop.epochs("orders", "shop")
        with ThreadPoolExecutor(5) as threads:
            moves = [threads.submit(move, billing, "orders", f"billing/{k}", "y" * 1000) for k in range(5)]
            failed = [one.exception() for one in moves]
        reasons = {refused_by(one).numbers["share"] for one in failed if one is not None}
        assert reasons == {"bytes_per_second"}
        shop.close()
        billing.close()


def test_opening_names_counts_for_a_callers_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The log gets a record of the names: who may publish little must not fill it by opening again and again."""
    share = '[[share]]\nsubjects = ["shop"]\nbytes_per_second = 1_000\n'
    with Ruled(tmp_path_factory.mktemp("opening"), RULES + share) as sidecar:
        shop = Caller(sidecar.address, "shop")
        names = [f"shop-{k:0200}" for k in range(100)]
        shop.open("orders", *names)
        why = refused(lambda: shop.open("orders", *names))
        assert (why.reason, why.numbers["share"]) == ("SHARE_EXCEEDED", "bytes_per_second")
        assert why.retry_delay_ms > 0
        shop.close()


def refused_by(failure: BaseException) -> Refused:
    def fail() -> None:
        raise failure

    return refused(fail)
