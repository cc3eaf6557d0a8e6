"""What a producer makes of answers that a real sidecar gives seldom: refusals, delays, streams that break."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from seqdedupe.v1 import publish_pb2
from tests.client_conformance.lines import PATIENCE_SECONDS, Command, Message, Program, numbered
from tests.client_conformance.scripted import DUP, INCARNATION, NEVER, NOT_DUP, UNKNOWN, Frames, Scripted

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
HIGHEST = 2**63 - 1

BREAKS = [
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
]
"""Without an `ErrorInfo`, none of them is final: a proxy's 404 comes to UNIMPLEMENTED, its 403 to PERMISSION_DENIED."""


def opened(scripted: Scripted, persisted: int = -1) -> None:
    """A producer with the name p is open on the topic t."""
    command = scripted.program.opens("t")
    scripted.opening("p").answer(persisted)
    assert int(command.ok()["last_sequence_id"]) == persisted


def sent(scripted: Scripted, *ids: int, maybe: tuple[int, ...] = ()) -> tuple[Command, Frames]:
    """These messages are on their way, and the sidecar has their frames."""
    command = scripted.program.send(ids).accepted()
    return command, scripted.take(ids, maybe)


def stored(scripted: Scripted, *ids: int) -> None:
    """These messages are sent, and have their receipts."""
    command, frames = sent(scripted, *ids)
    frames.store()
    assert [one for one, _, _ in command.receipts()] == list(ids)


def test_frames_are_as_the_contract_says(scripted: Scripted) -> None:
    """Numbers, epochs and links, which the script judges; and all that a message has."""
    opened(scripted, persisted=9)
    stored(scripted, 10, 11)
    message = Message(HIGHEST - 1, None, b"\xff\0key", (("a", "é"), ("b", "")), -(2**63))
    command = scripted.program.send([message, Message(HIGHEST, b"")]).accepted()
    frames = scripted.take([HIGHEST - 1, HIGHEST])
    batch = frames.frames[0].batch
    assert batch.producer_names == b"p"
    assert bytes(batch.keys) == b"\xff\0key"
    assert batch.event_times_ms[0] == -(2**63)
    assert (batch.property_names, batch.property_values.decode()) == (b"ab", "é")
    frames.store()
    assert command.receipts() == [(HIGHEST - 1, "NOT_DUP", 2), (HIGHEST, "NOT_DUP", 3)]
    assert command.ok()["receipts"][1]["message_id"] == [str(INCARNATION), "3", -1]
    scripted.program.call("flush", "p")
    scripted.program.call("close", "p")


def test_receipts_come_in_any_order_and_late(scripted: Scripted) -> None:
    opened(scripted)
    (first, early), (second, late) = sent(scripted, 1, 2), sent(scripted, 3)
    late.store()
    assert second.receipts() == [(3, "NOT_DUP", 0)]
    assert first.answer is None
    early.store()
    assert first.receipts() == [(1, "NOT_DUP", 1), (2, "NOT_DUP", 2)]


def test_a_dup_names_its_original_if_the_sidecar_knows_it(scripted: Scripted) -> None:
    opened(scripted, persisted=7)
    command = scripted.program.send([6, 7]).accepted()
    for frame in (frames := scripted.take([6, 7])).frames:
        places = [k for k, one in enumerate(frame.batch.sequence_ids) if one == 7]
        receipt = publish_pb2.Receipt(
            frame=frame.number,
            first_index=-1,
            verdicts=[DUP] * len(frame.batch.sequence_ids),
            known_rows=places,
            known_indexes=[40] * len(places),
            known_ledger_ids=[INCARNATION] * len(places),
            known_entry_ids=[40] * len(places),
        )
        frames.answer([receipt])
    assert command.receipts() == [(6, "DUP", -1), (7, "DUP", 40)]
    ids = [one["message_id"] for one in command.ok()["receipts"]]
    assert ids == [None, [str(INCARNATION), "40", -1]]


@pytest.mark.parametrize(
    ("reason", "delay_ms"), [("RECOVERING", 700), ("QUEUE_FULL", 0), ("LOG_REFUSED", 0), ("SOMETHING_NEW", 200)]
)
def test_a_refusal_with_a_delay_is_sent_again_after_it(scripted: Scripted, reason: str, delay_ms: int) -> None:
    """Twice. Another frame, which only came too early, is refused with it."""
    opened(scripted)
    stored(scripted, 1)
    (first, frames), (second, later) = sent(scripted, 2, 3), sent(scripted, 4)
    for _ in range(2):
        refused_at = time.monotonic()
        frames.refuse(reason, delay_ms)
        later.refuse("PREDECESSOR_MISSING", 0)
        frames = scripted.take([2, 3, 4])
        assert frames.came_at - refused_at >= 0.9 * delay_ms / 1000, scripted.program.said("sent before the delay")
        later = Frames(scripted, [], 0.0)
    frames.store()
    assert [one for command in (first, second) for one in command.receipts()] == [
        (2, "NOT_DUP", 1),
        (3, "NOT_DUP", 2),
        (4, "NOT_DUP", 3),
    ]
    assert scripted.opens_seen == 1, scripted.program.said("a refused frame needs no resume")


@pytest.mark.parametrize("reason", ["INVALID_BATCH", "FENCED", "NOT_ALLOWED"])
def test_a_refusal_without_a_delay_is_final_for_it_and_what_is_later(scripted: Scripted, reason: str) -> None:
    opened(scripted)
    (first, early), (second, frames), (third, _) = sent(scripted, 1), sent(scripted, 2), sent(scripted, 3)
    frames.refuse(reason, NEVER)
    second.error(reason)
    third.error(reason)
    if reason != "FENCED":  # which is final for all of the producer
        early.store()
        assert first.receipts() == [(1, "NOT_DUP", 0)]
    first.is_expected_to_fail = True
    scripted.program.send([4]).error(reason)
    scripted.nothing_came()


def test_unknown_is_sent_again_until_it_is_decided(scripted: Scripted) -> None:
    opened(scripted)
    command, frames = sent(scripted, 1, 2, 3)
    command.is_undecided = True
    for _ in range(3):
        frames.unknown()
        frames = scripted.take([1, 2, 3])
    command.is_undecided = False
    frames.store(dup_up_to=2)
    assert [verdict for _, verdict, _ in command.receipts()] == ["DUP", "DUP", "NOT_DUP"]


def test_unknown_of_some_rows_keeps_the_verdicts_of_the_others(scripted: Scripted) -> None:
    opened(scripted)
    command = scripted.program.send([1, 2]).accepted()
    frames = scripted.take([1, 2])
    for frame in frames.frames:
        verdicts = [NOT_DUP if one == 1 else UNKNOWN for one in frame.batch.sequence_ids]
        frames.answer(
            [publish_pb2.Receipt(frame=frame.number, verdicts=verdicts, first_index=0 if NOT_DUP in verdicts else -1)]
        )
    scripted.next_index = 1
    scripted.take([2], maybe=[1]).store(dup_up_to=1)
    assert command.receipts() == [(1, "NOT_DUP", 0), (2, "NOT_DUP", 1)]


def test_a_missing_predecessor_that_was_stored_is_resumed(scripted: Scripted) -> None:
    """As after the topic has forgotten the name: its resume says so."""
    opened(scripted)
    stored(scripted, 1)
    command, frames = sent(scripted, 2)
    frames.refuse("PREDECESSOR_MISSING", 0)
    scripted.opening("p").answer(-1, is_forgotten=True)
    scripted.take([2]).store()
    assert command.receipts() == [(2, "NOT_DUP", 1)]


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_an_epoch_that_is_not_known_is_resumed_once(scripted: Scripted, is_forgotten: bool) -> None:
    opened(scripted)
    stored(scripted, 5)
    command, frames = sent(scripted, 6)
    frames.refuse("INVALID_EPOCH", NEVER)
    opening = scripted.opening("p")
    if is_forgotten:
        opening.answer(3, is_forgotten=True)  # an old frame has arrived late
        scripted.take([6]).store()
        assert command.receipts() == [(6, "NOT_DUP", 1)]
    else:
        opening.refuse_names("INVALID_EPOCH")
        command.error("INVALID_EPOCH", "DATA_LOSS")


@pytest.mark.parametrize("code", BREAKS, ids=lambda code: code.name)
def test_a_stream_that_ends_is_begun_again(scripted: Scripted, code: grpc.StatusCode) -> None:
    """With nothing said, with a half of the receipts, and with all stored but nothing heard."""
    opened(scripted)
    (first, frames), (second, _) = sent(scripted, 1, 2), sent(scripted, 3)
    frames.stream.end(code)
    scripted.opening("p").answer(-1)
    scripted.take_some([1, 2, 3]).stream.end(code)
    scripted.opening("p").answer(2)  # that many had arrived
    scripted.next_index = 2
    scripted.finish([1, 2, 3], dup_up_to=2)
    assert [verdict for _, verdict, _ in first.receipts() + second.receipts()] == ["DUP", "DUP", "NOT_DUP"]
    (first, frames), (second, later) = sent(scripted, 4), sent(scripted, 5, 6)
    frames.store()
    first.ok()
    later.stream.end(code)
    scripted.opening("p").answer(4)
    scripted.finish([5, 6])
    assert second.receipts() == [(5, "NOT_DUP", 4), (6, "NOT_DUP", 5)]


def test_streams_that_end_before_their_first_message(scripted: Scripted) -> None:
    opened(scripted)
    stored(scripted, 1)
    command, frames = sent(scripted, 2)
    scripted.opens_with, scripted.breaks_streams = 1, 3
    frames.stream.end(UNAVAILABLE)
    scripted.take([2]).store()
    assert command.receipts() == [(2, "NOT_DUP", 1)]
    assert scripted.breaks_streams == 0


def test_open_is_tried_again_while_the_topic_recovers(scripted: Scripted) -> None:
    """A new session, and one that is resumed."""
    command = scripted.program.opens("t")
    for _ in range(2):
        refused_at = time.monotonic()
        scripted.opening("p").fail(UNAVAILABLE, "RECOVERING", 300)
        opening = scripted.opening("p")
        assert opening.came_at - refused_at >= 0.27, scripted.program.said("opened before the delay")
        opening.fail(UNAVAILABLE)  # as of a connection that breaks
    scripted.opening("p").answer(7)
    assert int(command.ok()["last_sequence_id"]) == 7
    command, frames = sent(scripted, 8)
    frames.stream.end(UNAVAILABLE)
    for _ in range(3):
        scripted.opening("p").fail(UNAVAILABLE, "RECOVERING", 10)
    scripted.opening("p").answer(7)
    scripted.take([8]).store()
    assert command.receipts() == [(8, "NOT_DUP", 0)]


@pytest.mark.parametrize(
    ("code", "reason"),
    [(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"), (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NAME")],
)
def test_open_fails_where_it_cannot_succeed(scripted: Scripted, code: grpc.StatusCode, reason: str) -> None:
    command = scripted.program.opens("t")
    scripted.opening("p").fail(code, reason)
    command.error(reason)


@pytest.mark.parametrize(
    ("resumed", "reasons"),
    [
        ({"persisted": 1}, ["DATA_LOSS"]),
        ({"persisted": 2, "incarnation": INCARNATION + 1}, ["DATA_LOSS"]),
        ({"persisted": 2, "term": 0}, ["DATA_LOSS"]),
        ({"persisted": 4}, ["FENCED"]),
    ],
    ids=["a receipt is gone", "another incarnation", "a lower term", "a stranger's message"],
)
def test_a_resume_that_cannot_be_right_ends_the_producer(
    scripted: Scripted, resumed: dict[str, Any], reasons: list[str]
) -> None:
    opened(scripted)
    stored(scripted, 1, 2)
    command, frames = sent(scripted, 3)
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").answer(**resumed)
    scripted.fails(command, *reasons)
    scripted.program.send([9]).error(*reasons)
    scripted.nothing_came()


@pytest.mark.parametrize("reason", ["FENCED", "INVALID_EPOCH"])
def test_a_resume_that_is_refused_ends_the_producer(scripted: Scripted, reason: str) -> None:
    opened(scripted)
    command, frames = sent(scripted, 3)
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").refuse_names(reason)
    scripted.fails(command, *([reason] if reason == "FENCED" else [reason, "DATA_LOSS"]))
    scripted.nothing_came()


def test_another_incarnation_in_an_answer_is_data_loss(scripted: Scripted) -> None:
    opened(scripted)
    command, frames = sent(scripted, 1)
    frames.store(incarnation=INCARNATION + 1)
    command.error("DATA_LOSS")


@pytest.mark.parametrize(
    ("code", "reason"),
    [(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"), (grpc.StatusCode.DATA_LOSS, "LOG_DAMAGED")],
)
def test_a_status_with_a_reason_and_no_delay_is_final(scripted: Scripted, code: grpc.StatusCode, reason: str) -> None:
    opened(scripted)
    command, frames = sent(scripted, 1)
    frames.stream.end(code, reason)
    command.error(reason, "DATA_LOSS")


def test_an_answer_of_a_lower_term_is_ignored(scripted: Scripted) -> None:
    """Also a refusal. What they were for is sent again."""
    scripted.term = 7
    opened(scripted)
    command, frames = sent(scripted, 1)
    command.is_undecided = True
    scripted.opens_with = -1  # a client may as well leave the stream
    frames.store(term=6)
    frames = scripted.take([1])
    frames.refuse("FENCED", NEVER, term=6)
    frames = scripted.take([1])
    command.is_undecided = False
    frames.store()
    assert command.receipts() == [(1, "NOT_DUP", 1)]


@pytest.mark.parametrize("columns", [{}, {"durable_index": None}], ids=["", "by an earlier version"])
def test_a_session_that_was_forgotten_begins_anew(scripted: Scripted, columns: dict[str, Any]) -> None:
    opened(scripted)
    stored(scripted, 1, 2)
    command, frames = sent(scripted, 3)
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").answer(-1, is_forgotten=True, **columns)
    scripted.take([3]).store()
    assert command.receipts() == [(3, "NOT_DUP", 2)]


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_log_that_is_shorter_than_before_is_data_loss(scripted: Scripted, is_forgotten: bool) -> None:
    """An older copy that never knew the name says that it has forgotten the name."""
    opened(scripted)
    stored(scripted, 1, 2)
    command, frames = sent(scripted, 3)
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").answer(-1 if is_forgotten else 2, is_forgotten=is_forgotten, durable_index=0)
    scripted.fails(command, "DATA_LOSS")
    scripted.program.send([9]).error("DATA_LOSS")
    scripted.nothing_came()


def test_a_loss_from_before_the_name_was_forgotten_is_found(scripted: Scripted) -> None:
    """The older copy has one of two messages with receipts, and has not forgotten the name yet."""
    opened(scripted)
    stored(scripted, 1, 2)
    command, frames = sent(scripted, 3)
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").answer(-1, is_forgotten=True)
    scripted.take([3]).stream.end(UNAVAILABLE)
    scripted.opening("p").answer(1, durable_index=1)
    scripted.fails(command, "DATA_LOSS")


def test_what_is_not_durable_is_kept(scripted: Scripted) -> None:
    """A client that does not ask for early receipts has nothing to keep."""
    opened(scripted)
    command, frames = sent(scripted, 1, 2)
    frames.store(is_early=frames.stream.has_early_receipts)
    command.ok()
    flush = scripted.program.begin("flush", "p")
    if frames.stream.has_early_receipts:
        assert flush.answer is None
        frames.stream.end(UNAVAILABLE)
        scripted.opening("p").answer(1)
        scripted.take([2], maybe=[1]).store(dup_up_to=1)
    flush.ok()


def test_an_idle_stream_is_ended_and_another_begins_when_needed(scripted: Scripted) -> None:
    opened(scripted)
    command, frames = sent(scripted, 1)
    frames.store()
    command.ok()
    scripted.opens_with = 1
    frames.stream.end(UNAVAILABLE, "STREAM_IDLE", 0)
    stored(scripted, 2)


def test_an_empty_answer_is_a_proxys(scripted: Scripted) -> None:
    opened(scripted)
    stored(scripted, 1)
    command, frames = sent(scripted, 2)
    scripted.is_proxy = True
    frames.stream.end(UNAVAILABLE)
    scripted.opening("p").outcome.put(publish_pb2.OpenResponse())
    opening = scripted.opening("p")
    scripted.is_proxy = False
    opening.answer(1)
    scripted.take([2]).store()
    assert command.receipts() == [(2, "NOT_DUP", 1)]


def test_no_receipt_in_time_is_an_unknown_outcome(scripted: Scripted) -> None:
    command = scripted.program.opens("t", delivery_timeout_ms=500)
    scripted.opening("p").answer()
    command.ok()
    command, _ = sent(scripted, 1)
    command.error("OUTCOME_UNKNOWN")
    scripted.program.send([2]).error("OUTCOME_UNKNOWN")
    scripted.nothing_came()


def test_a_producer_accepts_no_more_than_it_may_have_in_flight(scripted: Scripted) -> None:
    size, limit, slack, sends = 20_000, 200_000, 150_000, 40
    command = scripted.program.opens("t", max_in_flight_bytes=limit)
    scripted.opening("p").answer()
    command.ok()
    commands = [scripted.program.send([Message(k, b"x" * size)]) for k in range(sends)]
    left = list(range(sends))
    while left:
        frames = scripted.take_some(left)
        scripted.program.call("hello")
        over = (sum(one.is_accepted for one in commands) - (sends - len(left))) * size
        assert over <= limit + slack, scripted.program.said(f"{over} bytes are accepted and have no receipt")
        frames.store()
        left = left[len(frames.ids) :]
    assert all(command.receipts() for command in commands)


def test_a_refusal_of_one_producer_does_not_end_another(scripted: Scripted) -> None:
    """They may share a stream, and frames. What was refused together may be sent again alone."""
    program = scripted.program
    for name in "pq":
        command = program.opens("t", name)
        scripted.opening(name).answer()
        command.ok()
    of_p, of_q = program.send([1, 2], "p"), program.send([1], "q")
    of_p.is_expected_to_fail = True
    scripted.play(lambda frames: frames.refuse("FENCED", NEVER, name="p"), of_p, of_q)
    of_p.error("FENCED")
    assert [verdict for _, verdict, _ in of_q.receipts()] == ["NOT_DUP"]
    assert scripted.opens_seen == 2


# -- Several sidecars.


def in_order(*sidecars: Scripted) -> list[Scripted]:
    """The sidecars as a client tries them (publish.proto)."""

    def weight(sidecar: Scripted) -> bytes:
        return hashlib.sha256(f"persistent://public/default/t\n{sidecar.address}".encode()).digest()[:8]

    return sorted(sidecars, key=weight, reverse=True)


@contextmanager
def both(scripted: Scripted) -> Iterator[list[Scripted]]:
    """This sidecar and another one, with one log, in the topic's order."""
    scripted.program.needs("redirects")
    other = Scripted(scripted.program)
    other.shares_with(scripted)
    try:
        scripted.program.connect(scripted.address, other.address)
        yield in_order(scripted, other)
        other.check()
    finally:
        other.close()


@pytest.fixture
def two(scripted: Scripted) -> Iterator[list[Scripted]]:
    with both(scripted) as sidecars:
        yield sidecars


def test_the_owner_is_followed_with_the_epochs(two: list[Scripted]) -> None:
    first, second = two
    command = first.program.opens("t")
    first.opening("p").fail(UNAVAILABLE, "NOT_OWNER", 0, owner_address=second.address)
    second.opening("p").answer()
    command.ok()
    stored(second, 1)
    command, frames = sent(second, 2)
    frames.refuse("NOT_OWNER", 0, owner_address=first.address)
    first.term = 2
    first.next_index = first.durable_index = 1
    first.opening("p").answer(1)
    first.take([2]).store()
    assert command.receipts() == [(2, "NOT_DUP", 1)]


class Trap(Scripted):
    """A sidecar to which no client must go while it is to go to this other one."""

    def __init__(self, other: Scripted) -> None:
        super().__init__(other.program)
        self._other = other

    def open(self, request: publish_pb2.OpenRequest, context: Any) -> publish_pb2.OpenResponse:
        self._other.is_wrong("credentials were sent to an address that the client was not given")
        return super().open(request, context)


def test_nobody_goes_where_the_addresses_do_not_say(two: list[Scripted]) -> None:
    first, second = two
    trap = Trap(second)
    try:
        command = first.program.opens("t")
        first.opening("p").fail(UNAVAILABLE, "NOT_OWNER", 0, owner_address=trap.address)
        second.opening("p").answer()
        command.ok()
    finally:
        trap.close()


def test_a_sidecar_that_is_away_is_passed_over(two: list[Scripted]) -> None:
    first, second = two
    first.close()
    command = second.program.opens("t")
    second.opening("p").answer()
    command.ok()
    stored(second, 1)


@pytest.mark.parametrize("most_seconds", [PATIENCE_SECONDS])
def test_who_serves_is_found_when_another_one_recovers_for_long(two: list[Scripted], most_seconds: float) -> None:
    """After about ten seconds. If no other sidecar serves the topic, the client waits where it was."""
    first, second = two
    opened(first)
    command, frames = sent(first, 1)
    began = time.monotonic()
    frames.refuse("RECOVERING", 1000)

    def is_found() -> bool:
        assert time.monotonic() < began + most_seconds, first.program.said("the client asks no other sidecar")
        return second.opens_seen > 0

    first.play(lambda frames: frames.refuse("RECOVERING", 1000), until=is_found)
    assert time.monotonic() > began + 5, first.program.said("a recovery of seconds was not waited for")
    second.opening("p").fail(UNAVAILABLE, "NOT_OWNER", 0, owner_address=first.address)
    for _ in range(2):
        first.opening("p").fail(UNAVAILABLE, "RECOVERING", 10)
    first.opening("p").fail(UNAVAILABLE, "NOT_OWNER", 0, owner_address=second.address)
    second.opening("p").answer()
    second.take([1]).store()
    assert command.receipts() == [(1, "NOT_DUP", 0)]


# -- Deduplication IDs.


def publishing(scripted: Scripted) -> Program:
    """The program, with a publisher `i` to the topic. Skips the scenario if the client has none."""
    scripted.program.needs("publisher")
    scripted.program.call("open_publisher", "i", topic="t")
    return scripted.program


def test_a_publisher_sends_again_what_has_no_receipt(scripted: Scripted) -> None:
    """After Unknown, a refusal, and a stream that ends."""
    program = publishing(scripted)
    command = program.send([Message(b"\xff\0", b"a"), Message(b"b", b"b")], "i").accepted()
    scripted.ids_taken(2).unknown()
    scripted.ids_taken(2).refuse("RECOVERING", 10)
    scripted.ids_taken(2).stream.end(grpc.StatusCode.UNIMPLEMENTED)
    scripted.ids_taken(2).store()
    receipts = command.receipts()
    assert [one[:2] for one in receipts] == [(b"\xff\0", "NOT_DUP"), (b"b", "NOT_DUP")]
    assert sorted(index for _, _, index in receipts) == [0, 1]
    assert scripted.opens_seen == 0, program.said("a publisher has no sessions")


def test_a_publisher_that_meets_another_incarnation_reports_the_loss(scripted: Scripted) -> None:
    program = publishing(scripted)
    command = program.send([Message(b"a")], "i").accepted()
    scripted.ids_taken(1).store()
    command.ok()
    command = program.send([Message(b"b")], "i").accepted()
    scripted.ids_taken(1).store(incarnation=INCARNATION + 1)
    command.error("DATA_LOSS")


def test_what_a_publisher_has_sent_has_an_unknown_outcome_after_a_refusal(scripted: Scripted) -> None:
    """Of the stream, or of a later frame with the same messages. A refusal of the only frame proves that it has stored
    nothing."""
    program = publishing(scripted)
    command = program.send([Message(b"a")], "i").accepted()
    scripted.ids_taken(1).refuse("NOT_ALLOWED", NEVER)
    command.error("NOT_ALLOWED")
    command = program.send([Message(b"b")], "i").accepted()
    scripted.ids_taken(1).stream.end(UNAVAILABLE)
    scripted.ids_taken(1).refuse("NOT_ALLOWED", NEVER)
    command.error("OUTCOME_UNKNOWN")
    command = program.send([Message(b"c")], "i").accepted()
    scripted.ids_taken(1).stream.end(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    command.error("OUTCOME_UNKNOWN")


def test_a_refusal_by_who_is_the_owner_no_more_proves_nothing(scripted: Scripted) -> None:
    """What was in flight when the owner changed may be stored."""
    program = publishing(scripted)
    command = program.send([Message(b"a")], "i").accepted()
    command.is_expected_to_fail = True
    scripted.ids_taken(1).refuse("NOT_OWNER", 0)
    scripted.play(lambda frames: frames.refuse("NOT_ALLOWED", NEVER), command)
    command.error("OUTCOME_UNKNOWN")


def test_the_only_sidecar_is_believed_whatever_its_term(scripted: Scripted) -> None:
    """After a crash it may know only a term of before, until it has recovered the topic."""
    program = publishing(scripted)
    scripted.term = 7
    command = program.send([Message(b"a")], "i").accepted()
    scripted.ids_taken(1).store()
    command.ok()
    command = program.send([Message(b"b")], "i").accepted()
    scripted.ids_taken(1).refuse("LOG_DAMAGED", NEVER, term=6)
    command.error("LOG_DAMAGED")


def test_what_was_sent_on_a_stream_that_took_no_frame_is_refused(scripted: Scripted) -> None:
    program = publishing(scripted)
    command = program.send([Message(b"a")], "i").accepted()
    scripted.ids_taken(1).stream.end(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED", frames_taken="0")
    command.error("NOT_ALLOWED")


def test_a_former_owner_refuses_nothing_for_good(two: list[Scripted]) -> None:
    """A publisher sends again, to the sidecar with the highest term."""
    first, second = two
    program = publishing(first)
    first.term = second.term = 7
    command = program.send([Message(b"a")], "i").accepted()
    first.ids_taken(1).store()
    command.ok()
    command = program.send([Message(b"b")], "i").accepted()
    first.ids_taken(1).refuse("NOT_OWNER", 0, owner_address=second.address)
    second.ids_taken(1).refuse("NOT_ALLOWED", NEVER, term=6)
    first.ids_taken(1).store()
    command.ok()


# -- Readers.


@pytest.mark.parametrize("code", BREAKS, ids=lambda code: code.name)
def test_a_reader_goes_on_where_it_was(scripted: Scripted, code: grpc.StatusCode) -> None:
    """After a stream that ends after some messages, one that ends before any, and while the topic recovers."""
    program = scripted.program
    program.call("open_reader", "r", topic="t", start={"index": "3"}, follow=True)
    command = program.begin("read", "r", count=5)
    reading = scripted.reading()
    assert reading.first_index == 3, program.said("a reader starts where it is told")
    reading.page(3, [b"3", b"4"])
    reading.page(5, [b"5"])
    reading.end(code)
    scripted.reading().end(code)
    scripted.reading().end(UNAVAILABLE, "RECOVERING", 50)
    reading = scripted.reading()
    assert reading.first_index == 6, program.said("a reader goes on after the last message that it has")
    reading.page(6, [b"6", b"7"])
    assert command.messages() == numbered(range(3, 8))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.OUT_OF_RANGE, "POSITION_TRIMMED"),
        (grpc.StatusCode.DATA_LOSS, "LOG_DAMAGED"),
        (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"),
    ],
)
def test_a_reader_ends_where_it_cannot_go_on(scripted: Scripted, code: grpc.StatusCode, reason: str) -> None:
    program = scripted.program
    program.call("open_reader", "r", topic="t", start={"index": "0"}, follow=True)
    command = program.begin("read", "r", count=2)
    reading = scripted.reading()
    reading.page(0, [b"0"])
    reading.end(code, reason)
    command.error(reason)
