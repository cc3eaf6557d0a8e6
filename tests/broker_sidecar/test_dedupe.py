"""DedupeService: what a broker may say, and what comes of all that it may not."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from broker_sidecar import server
from broker_sidecar.config import Config
from broker_sidecar.server import MAX_REQUEST_BYTES
from broker_sidecar.services import dedupe_service
from broker_sidecar.services.dedupe_service import MAX_CHECKS, SMALL_BYTES
from seqdedupe import wire
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_NAME_BYTES, MAX_NAMES_AT_ONCE, MAX_POSITION_BYTES, MAX_SEQUENCE_ID
from seqdedupe.testing import Sidecar
from seqdedupe.topic.attached import BrokerAttachment
from seqdedupe.topic.sessions import NAMES_A_STEP
from seqdedupe.v1 import admin_pb2, dedupe_pb2
from tests.broker_sidecar.attaching import (
    Attaching,
    AttachRequest,
    Check,
    attached,
    check,
    numbers,
    register,
    replay,
    report,
)
from tests.broker_sidecar.calls import DUP, NOT_DUP, UNKNOWN, Client, refused

N, D, U = NOT_DUP, DUP, UNKNOWN

CPU_SECONDS = 4.0
"""What the sidecar may spend on one message; a quarter of it is far more than it should."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for brokers that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("dedupe"), log="broker") as sidecar:
        yield sidecar


@pytest.fixture
def broker(shared: Sidecar, topic: str) -> Iterator[Attaching]:
    """An attachment with the handles 0 (a) and 1 (b), of which 5 of a is in the log."""
    with attached(shared.address, topic, "a", "b") as attaching:
        assert attaching.judge((0, 5)) == [N]
        attaching.report(0, persisted=1, position=b"first")
        yield attaching


# -- what may be said -----------------------------------------------------------------------------------------------


def test_a_whole_life(shared: Sidecar, topic: str) -> None:
    with attached(shared.address, topic, "a") as one:
        assert (one.replay_after, one.trim_position) == (b"", b"")
        assert one.judge((0, 1), (0, 3, 7), (0, 2), (0, 3), (0, 8)) == [N, N, U, U, N]
        assert numbers(shared.address, topic, "a") == (8, -1)
        one.report(0, persisted=2, position=b"p1", failed=1)
        one.reset()
        assert one.judge((0, 1), (0, 7), (0, 8)) == [D, D, N]
        assert numbers(shared.address, topic, "a") == (8, 7)
        one.end()
    with attached(shared.address, topic, "a") as two:
        assert (two.replay_after, two.incarnation) == (b"p1", one.incarnation)
        assert two.token != one.token
        assert two.judge((0, 8)) == [N], "what was in flight is forgotten: the replay would have told"


def test_several_steps_in_one_message_are_done_in_the_order_of_the_fields(shared: Sidecar, topic: str) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.send(
            register=register("a", "b"),
            release=dedupe_pb2.Release(handles=[1]),
            replay=replay((0, 1, 4, b"p1")),
            end_replay=dedupe_pb2.EndReplay(last_position=b"p1"),
            checks=[check((0, 4), (0, 5), frame=7), check((1, 0), frame=8), check((0, 5), frame=9)],
        )
        answer = broker.answer()
        assert answer.ready.replayed == 1
        assert [(c.frame, list(c.verdicts), c.first_admission) for c in answer.checked] == [
            (7, [D, N], 0),
            (9, [U], -1),
        ]
        assert [(r.frame, r.reason) for r in answer.refusals] == [(8, "INVALID_REQUEST")]
        broker.send(report=report(0, failed=1), reset=dedupe_pb2.Reset(), checks=[check((0, 5))])
        assert [list(c.verdicts) for c in broker.answer().checked] == [[N]]


def test_what_passes_is_new_and_leaves_no_trace(broker: Attaching, shared: Sidecar, topic: str) -> None:
    broker.send(checks=[check((0, 5), (-7, -9, -20), (0, 6), passes=b"\x01\xff\x00")])
    [checked] = broker.answer().checked
    assert (list(checked.verdicts), checked.first_admission) == ([N, N, N], 1)
    broker.report(1, persisted=3, position=b"p4")
    assert broker.judge((0, 5)) == [D]
    assert numbers(shared.address, topic, "a") == (6, 6)
    assert numbers(shared.address, topic, "b") == (-1, -1)


def test_ids_at_both_ends(broker: Attaching, shared: Sidecar, topic: str) -> None:
    assert broker.judge((1, 0), (1, MAX_SEQUENCE_ID), (1, MAX_SEQUENCE_ID)) == [N, N, U]
    broker.report(1, persisted=2, position=b"p3")
    assert broker.judge((1, MAX_SEQUENCE_ID), (1, 0, MAX_SEQUENCE_ID)) == [D, D]
    assert numbers(shared.address, topic, "b") == (MAX_SEQUENCE_ID, MAX_SEQUENCE_ID)


def test_a_name_that_is_registered_twice_has_two_handles_and_one_watermark(broker: Attaching) -> None:
    broker.register("a", "a", first=2)
    assert broker.judge((2, 5), (3, 6), (0, 6)) == [D, N, U]


def test_after_a_failure_everything_is_unknown_until_the_reset(broker: Attaching) -> None:
    assert broker.judge((0, 6), (0, 7), (1, 0)) == [N, N, N]
    broker.report(1, failed=1)
    assert broker.judge((0, 5), (0, 8), (1, 9)) == [U, U, U]
    broker.report(2, failed=2)
    assert broker.judge((0, 5)) == [U]
    broker.reset()
    assert broker.judge((0, 5), (0, 6), (1, 0)) == [D, N, N]


def test_with_deduplication_off_a_straddling_range_is_new_like_everything_else(
    broker: Attaching, shared: Sidecar, topic: str
) -> None:
    client = Client(shared.address)
    assert broker.refusal(check((0, 4, 9))).reason == "OVERLAP"
    client.admin.SetTopicPolicy(
        admin_pb2.SetTopicPolicyRequest(topic=topic, policy=admin_pb2.TopicPolicy(deduplication_enabled=False))
    )
    assert broker.judge((0, 4, 9), (0, 1)) == [N, N]
    client.admin.SetTopicPolicy(
        admin_pb2.SetTopicPolicyRequest(
            topic=topic,
            policy=admin_pb2.TopicPolicy(deduplication_enabled=True, overlap=admin_pb2.OVERLAP_POLICY_PULSAR),
        )
    )
    assert broker.judge((0, 4, 9), (0, 9), (0, 10)) == [D, U, N]
    client.close()


def test_where_gaps_are_refused_the_next_id_must_come(broker: Attaching, shared: Sidecar, topic: str) -> None:
    client = Client(shared.address)
    policy = admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT)
    client.admin.SetTopicPolicy(admin_pb2.SetTopicPolicyRequest(topic=topic, policy=policy))
    refusal = broker.refusal(check((0, 6, 8), (1, 77), (0, 10, 12)))
    assert (refusal.reason, refusal.row, refusal.retry_delay_ms) == ("GAP", 2, -1)
    assert (refusal.pushed, refusal.persisted, refusal.expected_sequence_id) == (5, 5, 9)
    assert numbers(shared.address, topic, "a") == (5, 5)
    assert numbers(shared.address, topic, "b") == (-1, -1)
    # A name of which nothing is known begins anywhere; what is sent again is no gap, nor what passes.
    broker.send(checks=[check((1, 77), (0, 6, 8), (0, 3), (0, 99), (0, 9), (1, 77), passes=b"\0\0\0\1\0\0")])
    assert [list(checked.verdicts) for checked in broker.answer().checked] == [[N, N, D, N, N, U]]
    # After a failure there is no verdict, and no gap either; then the ID after the last one that is stored comes next.
    broker.report(1, persisted=2, position=b"p8", failed=2)
    assert broker.judge((0, 12)) == [U]
    broker.reset()
    assert broker.refusal(check((0, 10))).expected_sequence_id == 9
    assert broker.judge((0, 9)) == [N]
    client.admin.RemoveTopicPolicy(admin_pb2.RemoveTopicPolicyRequest(topic=topic, values=["gap"]))
    assert not broker.refusal(check((0, -1))).HasField("expected_sequence_id")
    assert broker.judge((0, 11)) == [N]
    client.close()


def test_a_newer_attachment_ends_the_older_one_whose_reports_change_nothing(shared: Sidecar, topic: str) -> None:
    with attached(shared.address, topic, "a") as old, attached(shared.address, topic, "a") as new:
        why = old.ended()
        assert (why.reason, why.code) == ("NOT_ATTACHED", grpc.StatusCode.UNAVAILABLE)
        assert new.judge((0, 3)) == [N]
        new.token = old.token
        new.report(0, persisted=1, position=b"x")
        assert new.ended().reason == "NOT_ATTACHED"
    with attached(shared.address, topic, "a") as third:
        assert third.replay_after == b""
        assert third.judge((0, 3)) == [N]


# -- a check that is refused ----------------------------------------------------------------------------------------

FULL = check((0, 6), (1, 0))


def changed(**columns: Any) -> Check:
    other = Check()
    other.CopyFrom(FULL)
    for name, values in columns.items():
        other.ClearField(name)  # type: ignore[arg-type]
        if values:
            other.MergeFrom(Check(**{name: values}))
    return other


BAD_CHECKS: list[tuple[str, Check | bytes, str, int]] = [
    ("no rows", Check(frame=1), "INVALID_REQUEST", -1),
    ("no handles", changed(handles=[]), "INVALID_REQUEST", -1),
    ("a handle too few", changed(handles=[0]), "INVALID_REQUEST", -1),
    ("a handle too many", changed(handles=[0, 1, 1]), "INVALID_REQUEST", -1),
    ("an ID too few", changed(sequence_ids=[6]), "INVALID_REQUEST", -1),
    ("a highest ID too few", changed(highest_sequence_ids=[6]), "INVALID_REQUEST", -1),
    ("a highest ID too many", changed(highest_sequence_ids=[6, 6, 6]), "INVALID_REQUEST", -1),
    ("passes too short", changed(passes=b"\0"), "INVALID_REQUEST", -1),
    ("passes too long", changed(passes=b"\0\0\0"), "INVALID_REQUEST", -1),
    ("a handle of nobody", changed(handles=[0, 2]), "INVALID_REQUEST", 1),
    ("a handle below 0", changed(handles=[-1, 0]), "INVALID_REQUEST", 0),
    ("the highest handle", changed(handles=[0, 2**31 - 1]), "INVALID_REQUEST", 1),
    ("an ID below 0", changed(sequence_ids=[6, -1]), "INVALID_SEQUENCE_ID", 1),
    ("the lowest ID", changed(sequence_ids=[-(2**63), 0]), "INVALID_SEQUENCE_ID", 0),
    ("a falling range", changed(highest_sequence_ids=[6, -1]), "INVALID_SEQUENCE_ID", 1),
    ("a range that falls by one", changed(highest_sequence_ids=[5, 0]), "INVALID_SEQUENCE_ID", 0),
    ("a range that straddles", changed(sequence_ids=[5, 0]), "OVERLAP", 0),
    ("too many rows", check(*[(0, i + 6) for i in range(MAX_BATCH_ROWS + 1)]), "INVALID_REQUEST", -1),
    ("far too many rows", check(*[(0, i + 6) for i in range(MAX_BATCH_ROWS + 2)]), "INVALID_REQUEST", -1),
]


@pytest.mark.parametrize(("content", "reason", "row"), [c[1:] for c in BAD_CHECKS], ids=[c[0] for c in BAD_CHECKS])
def test_a_bad_check_is_refused_in_the_stream_and_admits_nothing(
    broker: Attaching, shared: Sidecar, topic: str, content: Check | bytes, reason: str, row: int
) -> None:
    refusal = broker.refusal(content)
    assert (refusal.frame, refusal.reason, refusal.row) == (1, reason, row), refusal
    assert refusal.message
    assert refusal.retry_delay_ms == -1
    assert (refusal.pushed, refusal.persisted) == ((5, 5) if reason == "OVERLAP" else (-1, -1))
    assert numbers(shared.address, topic, "a") == (5, 5)
    assert numbers(shared.address, topic, "b") == (-1, -1)
    broker.send(checks=[FULL])
    [checked] = broker.answer().checked
    assert (list(checked.verdicts), checked.first_admission) == ([N, N], 1)


def test_a_check_of_the_most_rows(broker: Attaching) -> None:
    assert broker.judge(*[(0, i + 6) for i in range(MAX_BATCH_ROWS)]) == [N] * MAX_BATCH_ROWS


def test_checks_before_the_replay_has_ended_are_refused(shared: Sidecar, topic: str) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.register("a")
        refusal = broker.refusal(check((0, 0)))
        assert (refusal.reason, refusal.retry_delay_ms) == ("NOT_ATTACHED", 100)
        assert broker.ready() == 0
        assert broker.judge((0, 0)) == [N]


def test_a_released_handle_is_not_used_again(broker: Attaching, shared: Sidecar, topic: str) -> None:
    assert broker.judge((0, 9)) == [N]
    broker.send(release=dedupe_pb2.Release(handles=[0, 0]))
    assert broker.refusal(check((0, 10))).row == 0
    broker.report(1, persisted=1, position=b"p2")
    broker.register("a", first=2)
    assert broker.judge((2, 9), (2, 10)) == [D, N], "what was in flight when it was released has settled"
    broker.send(release=dedupe_pb2.Release(handles=[0]))
    assert broker.ended().reason == "INVALID_REQUEST"


# -- what ends the attachment ---------------------------------------------------------------------------------------

TWO: dict[str, Any] = {"producer_name_offsets": [0, 1, 2], "producer_names": b"cd"}

BAD_STEPS: list[tuple[str, dict[str, Any] | bytes, str]] = [
    ("not protobuf", b"\xff\xff\xff", "MALFORMED_MESSAGE"),
    ("begin again", {"begin": dedupe_pb2.Begin(topic="other")}, "INVALID_REQUEST"),
    ("the replay ended twice", {"end_replay": dedupe_pb2.EndReplay(last_position=b"first")}, "INVALID_REQUEST"),
    ("an entry after the replay", {"replay": replay((0, 6, 6, b"x"), after=b"first")}, "INVALID_REQUEST"),
    ("a handle left out", {"register": dedupe_pb2.Register(first_handle=3, **TWO)}, "INVALID_REQUEST"),
    ("a handle given already", {"register": dedupe_pb2.Register(first_handle=1, **TWO)}, "INVALID_REQUEST"),
    ("no names", {"register": dedupe_pb2.Register(first_handle=2)}, "INVALID_REQUEST"),
    ("one offset", {"register": dedupe_pb2.Register(first_handle=2, producer_name_offsets=[0])}, "INVALID_REQUEST"),
    ("an empty name", {"register": register("", first=2)}, "INVALID_NAME"),
    ("a long name", {"register": register("é" * (MAX_NAME_BYTES // 2 + 1), first=2)}, "INVALID_NAME"),
    ("a NUL in a name", {"register": register("c", "a\0", first=2)}, "INVALID_NAME"),
    ("an escape in a name", {"register": register("\x1b[2J", first=2)}, "INVALID_NAME"),
    ("a C1 control in a name", {"register": register("a\x85b", first=2)}, "INVALID_NAME"),
    (
        "not UTF-8",
        {"register": dedupe_pb2.Register(first_handle=2, producer_name_offsets=[0, 2], producer_names=b"\xc3\x28")},
        "INVALID_NAME",
    ),
    *(
        (
            f"name offsets {offsets}",
            {"register": dedupe_pb2.Register(first_handle=2, producer_name_offsets=offsets, producer_names=b"cd")},
            "INVALID_REQUEST",
        )
        for offsets in ([1, 2], [0, 1], [0, 3], [0, -1, 2], [0, 2, 1, 2])
    ),
    (
        "too many names",
        {"register": register(*map(str, range(MAX_NAMES_AT_ONCE + 1)), first=2)},
        "INVALID_REQUEST",
    ),
    ("too many released", {"release": dedupe_pb2.Release(handles=[0] * (MAX_BATCH_ROWS + 2))}, "INVALID_REQUEST"),
    ("a handle of nobody released", {"release": dedupe_pb2.Release(handles=[2])}, "INVALID_REQUEST"),
    ("a handle below 0 released", {"release": dedupe_pb2.Release(handles=[-1])}, "INVALID_REQUEST"),
    ("more reported than is in flight", {"report": report(1, 1, b"x")}, "NOT_ATTACHED"),
    ("more failed than is in flight", {"report": report(1, failed=2**32 - 1)}, "NOT_ATTACHED"),
    ("reported again", {"report": report(0, 1, b"first")}, "NOT_ATTACHED"),
    ("reported ahead", {"report": report(2, 1, b"x")}, "NOT_ATTACHED"),
    ("the highest admission", {"report": report(2**64 - 1, failed=1)}, "NOT_ATTACHED"),
    ("persisted nowhere", {"report": report(1, 1)}, "INVALID_REQUEST"),
    ("a position of nothing", {"report": report(1, 0, b"x")}, "INVALID_REQUEST"),
    ("a long position", {"report": report(1, 1, b"x" * (MAX_POSITION_BYTES + 1))}, "INVALID_REQUEST"),
    ("too many checks", {"checks": [check((0, 9))] * (MAX_CHECKS + 1)}, "INVALID_REQUEST"),
]


@pytest.mark.parametrize(("steps", "reason"), [s[1:] for s in BAD_STEPS], ids=[s[0] for s in BAD_STEPS])
def test_a_bad_step_ends_the_attachment_and_changes_nothing(
    broker: Attaching, shared: Sidecar, topic: str, steps: dict[str, Any] | bytes, reason: str
) -> None:
    if isinstance(steps, bytes):
        broker.send_raw(steps)
    else:
        broker.send(**steps)
    assert broker.ended().reason == reason
    with attached(shared.address, topic, "a", "b") as again:
        assert again.replay_after == b"first"
        assert again.judge((0, 5), (0, 6), (1, 0)) == [D, N, N]
    assert Client(shared.address).topic(topic).producers == 2


@pytest.mark.parametrize("token", [0, 1, 2**64 - 1])
def test_a_strange_token_ends_the_attachment(broker: Attaching, token: int) -> None:
    own, broker.token = broker.token, token
    assert own != token
    broker.send(checks=[check((0, 6))])
    assert broker.ended().reason == "NOT_ATTACHED"


def test_a_reset_while_something_is_in_flight_ends_the_attachment(broker: Attaching) -> None:
    assert broker.judge((0, 6), (0, 7)) == [N, N]
    broker.report(1, failed=1)
    broker.reset()
    assert broker.ended().reason == "INVALID_REQUEST"


def test_persisted_after_failed_ends_the_attachment(broker: Attaching, shared: Sidecar, topic: str) -> None:
    assert broker.judge((0, 6), (0, 7)) == [N, N]
    broker.report(1, failed=1)
    broker.report(2, persisted=1, position=b"hole")
    assert broker.ended().reason == "NOT_ATTACHED"
    with attached(shared.address, topic, "a") as again:
        assert again.replay_after == b"first"


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (AttachRequest(), "INVALID_REQUEST"),
        (AttachRequest(token=1, begin=dedupe_pb2.Begin(topic="t")), "INVALID_REQUEST"),
        (AttachRequest(begin=dedupe_pb2.Begin(topic="t"), register=register("a")), "INVALID_REQUEST"),
        (AttachRequest(checks=[check((0, 1))]), "INVALID_REQUEST"),
        (AttachRequest(begin=dedupe_pb2.Begin()), "INVALID_TOPIC_NAME"),
        (AttachRequest(begin=dedupe_pb2.Begin(topic="a\0b")), "INVALID_TOPIC_NAME"),
        (b"\x0b\xff", "MALFORMED_MESSAGE"),
    ],
)
def test_a_stream_begins_with_begin(shared: Sidecar, first: AttachRequest | bytes, reason: str) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        stream = Attaching(channel)
        stream.send_raw(first if isinstance(first, bytes) else first.SerializeToString())
        assert stream.ended().reason == reason


# -- replay ---------------------------------------------------------------------------------------------------------

GOOD = replay((0, 1, 1, b"p1"), (0, 2, 5, b"p2"))


def replaced(**columns: Any) -> dedupe_pb2.Replay:
    other = dedupe_pb2.Replay()
    other.CopyFrom(GOOD)
    for name, values in columns.items():
        other.ClearField(name)  # type: ignore[arg-type]
        other.MergeFrom(dedupe_pb2.Replay(**{name: values}))
    return other


BAD_REPLAYS: list[tuple[str, dedupe_pb2.Replay, str]] = [
    ("nothing", dedupe_pb2.Replay(), "INVALID_REQUEST"),
    ("a handle of nobody", replaced(handles=[0, 1]), "INVALID_REQUEST"),
    ("an ID below 0", replaced(sequence_ids=[-1, 2]), "INVALID_SEQUENCE_ID"),
    ("a falling range", replaced(highest_sequence_ids=[1, 1]), "INVALID_SEQUENCE_ID"),
    ("passes too short", replaced(passes=b"\1"), "INVALID_REQUEST"),
    ("a handle too many", replaced(handles=[0, 0, 0]), "INVALID_REQUEST"),
    ("a highest ID too few", replaced(highest_sequence_ids=[1]), "INVALID_REQUEST"),
    ("positions too long", replaced(positions=b"p1p2p"), "INVALID_REQUEST"),
    ("previous positions too long", replaced(previous_positions=b"p1p"), "INVALID_REQUEST"),
    ("no positions", replaced(position_offsets=[], positions=b""), "INVALID_REQUEST"),
    ("an empty position", replaced(position_offsets=[0, 0, 4]), "INVALID_REQUEST"),
    ("a position too few", replaced(position_offsets=[0, 4]), "INVALID_REQUEST"),
    ("offsets that fall", replaced(position_offsets=[0, 5, 4]), "INVALID_REQUEST"),
    ("offsets below 0", replaced(position_offsets=[0, -2, 4]), "INVALID_REQUEST"),
    ("offsets that start late", replaced(position_offsets=[1, 2, 4]), "INVALID_REQUEST"),
    ("offsets past the end", replaced(position_offsets=[0, 2, 5]), "INVALID_REQUEST"),
    ("previous offsets past the end", replaced(previous_position_offsets=[0, 0, 3]), "INVALID_REQUEST"),
    ("a previous position too many", replaced(previous_position_offsets=[0, 0, 2, 2]), "INVALID_REQUEST"),
    ("a long position", replay((0, 1, 1, b"x" * (MAX_POSITION_BYTES + 1))), "INVALID_REQUEST"),
    ("an entry before the first", replay((0, 1, 1, b"p1"), after=b"p0"), "REPLAY_GAP"),
    ("another predecessor", replaced(previous_positions=b"p0"), "REPLAY_GAP"),
    ("no predecessor", replaced(previous_position_offsets=[0, 0, 0], previous_positions=b""), "REPLAY_GAP"),
    ("cut elsewhere", replaced(previous_position_offsets=[0, 1, 2]), "REPLAY_GAP"),
]


@pytest.mark.parametrize(("entries", "reason"), [r[1:] for r in BAD_REPLAYS], ids=[r[0] for r in BAD_REPLAYS])
def test_a_bad_replay_ends_the_attachment_and_changes_nothing(
    shared: Sidecar, topic: str, entries: dedupe_pb2.Replay, reason: str
) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.register("a")
        broker.send(replay=entries)
        assert broker.ended().reason == reason
        again = Attaching(channel, topic)
        assert again.replay_after == b""
        again.register("a")
        again.send(replay=GOOD)
        assert again.ready(b"p2") == 2
        assert again.judge((0, 5), (0, 6)) == [D, N]


def test_a_replay_goes_on_after_what_is_known(shared: Sidecar, topic: str) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        first = Attaching(channel, topic)
        first.register("a")
        first.send(replay=GOOD)
        first.end()
        second = Attaching(channel, topic)
        assert second.replay_after == b"p2", "what was replayed is in the log, whoever tells of it"
        second.register("a")
        second.replay((0, 6, 6, b"p3"), after=b"p2")
        second.replay((0, 7, 9, b"p4"), after=b"p3")
        assert second.ready(b"p4") == 2
        assert second.judge((0, 9), (0, 10)) == [D, N]


@pytest.mark.parametrize("last", [b"", b"p1", b"p3", b"p2\0"])
def test_the_replay_ends_with_the_logs_last_entry(shared: Sidecar, topic: str, last: bytes) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.register("a")
        broker.send(replay=GOOD, end_replay=dedupe_pb2.EndReplay(last_position=last))
        why = broker.ended()
        assert (why.reason, why.code) == ("REPLAY_GAP", grpc.StatusCode.FAILED_PRECONDITION)


def test_what_passes_is_replayed_without_a_trace(shared: Sidecar, topic: str) -> None:
    entries = replay((-5, -1, -2, b"p1"), (0, 3, 3, b"p2"), (0, 9, 9, b"p3"))
    entries.passes = b"\1\0\1"
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.register("a")
        broker.send(replay=entries)
        assert broker.ready(b"p3") == 3
        assert numbers(shared.address, topic, "a") == (3, 3)


# -- unusual encodings ----------------------------------------------------------------------------------------------

CHECK_ROWS = check((0, 6, 9), (1, 0), (1, 3, 8), (0, 12), frame=77)
Pieces = list[tuple[int, bytes]]


def packed(number: int, values: bytes) -> bytes:
    return (
        b"".join(bytes(part) for part in wire.length_delimited(number, values)) or wire.varint(number << 3 | 2) + b"\0"
    )


def columns_of(message: Check) -> Pieces:
    """Field number and content of a check's columns."""
    alias = wire.alias(dedupe_pb2.Check).FromString(message.SerializeToString())
    return [(2, alias.handles), (3, alias.sequence_ids), (4, alias.highest_sequence_ids)]


def item_bytes(number: int) -> int:
    return 4 if number == 2 else 8


def halves(columns: Pieces) -> bytes:
    return b"".join(
        packed(number, column[: 2 * item_bytes(number)]) + packed(number, column[2 * item_bytes(number) :])
        for number, column in columns
    )


def unpacked(columns: Pieces) -> bytes:
    out = b""
    for number, column in columns:
        size = item_bytes(number)
        tag = wire.varint(number << 3 | (5 if size == 4 else 1))
        out += b"".join(tag + column[at : at + size] for at in range(0, len(column), size))
    return out


def highest_unpacked(columns: Pieces) -> bytes:
    return b"".join(packed(*one) for one in columns[:2]) + unpacked(columns[2:])


def empty_last(columns: Pieces) -> bytes:
    return b"".join(packed(*one) + packed(one[0], b"") for one in columns)


def interleaved(columns: Pieces) -> bytes:
    pieces = [
        [packed(number, column[at : at + size]) for at in range(0, len(column), size)]
        for number, column in columns
        for size in [item_bytes(number)]
    ]
    return b"".join(itertools.chain(*zip(*pieces, strict=True)))


def unknown_fields(columns: Pieces) -> bytes:
    return b"".join(packed(*one) + packed(1000, b"new") for one in columns)


def long_lengths(columns: Pieces) -> bytes:
    return b"".join(
        wire.varint(number << 3 | 2) + bytes([len(column) | 0x80, 0x80, 0]) + column for number, column in columns
    )


UNUSUAL: list[Callable[[Pieces], bytes]] = [
    halves,
    unpacked,
    highest_unpacked,
    empty_last,
    interleaved,
    unknown_fields,
    long_lengths,
]


@pytest.mark.parametrize("encode", UNUSUAL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("twice", [False, True])
def test_legal_but_unusual_encodings_mean_the_same(
    broker: Attaching, shared: Sidecar, topic: str, encode: Callable[[Pieces], bytes], twice: bool
) -> None:
    frame = b"\x09" + (77).to_bytes(8, "little")
    data = encode(columns_of(CHECK_ROWS))
    meant = Check.FromString(frame + data)
    meant.DiscardUnknownFields()
    assert meant == CHECK_ROWS
    whole = b"\x09" + broker.token.to_bytes(8, "little") + packed(9, frame + data)
    if twice:
        whole += packed(9, b"\x09" + (78).to_bytes(8, "little") + data)
    broker.send_raw(whole)
    answers = [(c.frame, list(c.verdicts)) for c in broker.answer().checked]
    # 3 to 8 of b has only IDs that b did not push when it comes first.
    assert answers == [(77, [N, N, N, N]), (78, [U, U, U, U])][: 1 + twice]
    broker.report(1, persisted=4, position=b"p5")
    assert broker.judge((0, 12), (1, 8), (0, 13), (1, 9)) == [D, D, N, N]
    assert numbers(shared.address, topic, "a") == (13, 12)


def test_a_replay_in_pieces_means_the_same(shared: Sidecar, topic: str) -> None:
    """protobuf merges a message field that comes twice: columns are appended, bytes replaced."""
    with grpc.insecure_channel(shared.address) as channel:
        broker = Attaching(channel, topic)
        broker.register("a")
        pieces = dedupe_pb2.Replay(handles=[0], sequence_ids=[1], highest_sequence_ids=[1])
        rest = dedupe_pb2.Replay()
        rest.CopyFrom(GOOD)
        rest.ClearField("handles")
        rest.ClearField("sequence_ids")
        rest.ClearField("highest_sequence_ids")
        rest.MergeFrom(dedupe_pb2.Replay(handles=[0], sequence_ids=[2], highest_sequence_ids=[5]))
        broker.send_raw(broker.message(replay=pieces) + broker.message(replay=rest))
        assert broker.ready(b"p2") == 2
        assert numbers(shared.address, topic, "a") == (5, 5)


def test_release_in_pieces_releases_all(broker: Attaching) -> None:
    broker.send_raw(broker.message() + packed(4, packed(1, b"\0" * 4) + packed(1, b"\1\0\0\0")))
    assert broker.refusal(check((0, 6))).row == 0
    assert broker.refusal(check((1, 6))).row == 0


# -- huge messages --------------------------------------------------------------------------------------------------

ALMOST = MAX_REQUEST_BYTES - 64

HUGE: list[tuple[str, Callable[[], bytes], str]] = [
    ("empty checks", lambda: b"\x4a\x00" * (ALMOST // 2), "INVALID_REQUEST"),
    ("unknown fields", lambda: b"\x98\x06\x01" * (ALMOST // 3), "INVALID_REQUEST"),
    ("empty registers", lambda: b"\x1a\x00" * (ALMOST // 2), "INVALID_REQUEST"),
    ("groups", lambda: b"\x0b" * ALMOST, "INVALID_REQUEST"),
    ("names", lambda: packed(3, packed(2, b"\0" * (ALMOST - 16))), "INVALID_REQUEST"),
    ("unpacked handles to release", lambda: packed(4, b"\x0d\0\0\0\0" * (ALMOST // 5 - 8)), "INVALID_REQUEST"),
    ("handles to release", lambda: packed(4, packed(1, b"\0" * ((ALMOST - 32) // 4 * 4))), "INVALID_REQUEST"),
    ("positions", lambda: packed(5, packed(6, b"x" * (ALMOST - 16))), "INVALID_REQUEST"),
]


def cpu_seconds(sidecar: Sidecar) -> float:
    used = psutil.Process(sidecar.pid).cpu_times()
    return used.user + used.system


@pytest.mark.parametrize(("make", "reason"), [h[1:] for h in HUGE], ids=[h[0] for h in HUGE])
def test_a_huge_message_costs_little_and_ends_its_attachment_only(
    broker: Attaching, shared: Sidecar, topic: str, make: Callable[[], bytes], reason: str
) -> None:
    with attached(shared.address, f"{topic}-other", "a") as other:
        before, held = cpu_seconds(shared), psutil.Process(shared.pid).memory_info().rss
        broker.send_raw(broker.message() + make())
        assert broker.ended().reason == reason
        assert cpu_seconds(shared) - before < CPU_SECONDS
        assert psutil.Process(shared.pid).memory_info().rss - held < 16 * MAX_REQUEST_BYTES
        assert other.judge((0, 0)) == [N]


def test_huge_checks_are_refused_or_judged(broker: Attaching, shared: Sidecar) -> None:
    before = cpu_seconds(shared)
    most = check(*[(0, 6)] * MAX_BATCH_ROWS)
    broker.send(checks=[most] * 12)
    answer = broker.answer()
    assert sum(len(checked.verdicts) for checked in answer.checked) == 12 * MAX_BATCH_ROWS
    too_many = Check(handles=[0] * 1_300_000, sequence_ids=[6] * 1_300_000)
    assert broker.refusal(too_many).reason == "INVALID_REQUEST"
    assert cpu_seconds(shared) - before < CPU_SECONDS


def test_small_messages_are_not_counted(broker: Attaching) -> None:
    """The other arm: up to a size that harms nobody fields are parsed without being counted first."""
    broker.send_raw(broker.message() + b"\x98\x06\x01" * (SMALL_BYTES // 3 - 10))
    assert broker.judge((0, 6)) == [N]


# -- GetProducer ----------------------------------------------------------------------------------------------------


def test_get_producer(broker: Attaching, shared: Sidecar, topic: str) -> None:
    assert numbers(shared.address, topic, "a") == (5, 5)
    for asked, name, reason in [
        (topic, "nobody", "PRODUCER_NOT_FOUND"),
        (topic, "", "INVALID_NAME"),
        (topic, "x" * 256, "INVALID_NAME"),
        ("no-topic-of-this-name", "a", "TOPIC_NOT_FOUND"),
        ("", "a", "INVALID_TOPIC_NAME"),
    ]:
        assert refused(lambda t=asked, n=name: numbers(shared.address, t, n)).reason == reason  # type: ignore[misc]
    broker.end()
    why = refused(lambda: numbers(shared.address, topic, "a"))
    assert (why.reason, why.retry_delay_ms) == ("NOT_ATTACHED", 100)


# -- next to others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names_a_step", [NAMES_A_STEP, MAX_NAMES_AT_ONCE], ids=["as it is", "planted: all at once"])
async def test_others_get_their_turn_while_names_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_a_step: int
) -> None:
    """Between any two steps the event loop takes a turn in between; what another call does in it is counted."""
    turns = 0
    seen: dict[str, list[tuple[int, int]]] = {"check_names": [], "register": []}

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def watch(name: str) -> None:
        work = getattr(BrokerAttachment, name)

        def watched(self: BrokerAttachment, *arguments: Any) -> None:
            seen[name].append((len(arguments[-1]), turns))
            work(self, *arguments)

        monkeypatch.setattr(BrokerAttachment, name, watched)

    names = [f"n{k}" for k in range(5 * NAMES_A_STEP + 1)]
    monkeypatch.setattr(dedupe_service, "NAMES_A_STEP", names_a_step)
    address = f"unix:{tmp_path}/socket"
    config = Config(data_directory=str(tmp_path), listen=address, authentication="none", log="broker")
    served = server.SidecarServer(config, connections=10)
    await served.listen()
    await served.recover()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.stream_stream(
                "/seqdedupe.v1.DedupeService/Attach",
                AttachRequest.SerializeToString,
                dedupe_pb2.AttachResponse.FromString,
            )()
            await call.write(AttachRequest(begin=dedupe_pb2.Begin(topic="t")))
            token = (await call.read()).attached.token
            for name in seen:
                watch(name)
            ticking = asyncio.ensure_future(another())
            await call.write(AttachRequest(token=token, register=register(*names), end_replay=dedupe_pb2.EndReplay()))
            while not (await call.read()).HasField("ready"):
                pass
            ticking.cancel()
            call.cancel()
    finally:
        await served.stop()
    registered = seen["register"]
    assert sum(count for count, _ in registered) == len(names)
    steps_apart = all(after > before for (_, before), (_, after) in itertools.pairwise(registered))
    is_in_steps = steps_apart and max(count for count, _ in (*registered, *seen["check_names"])) <= NAMES_A_STEP
    assert is_in_steps is (names_a_step == NAMES_A_STEP)
