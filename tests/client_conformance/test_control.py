"""The control of the scenarios: a client with a planted fault is rejected, for that fault."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from tests.client_conformance import faults
from tests.client_conformance import test_scripted as scenarios
from tests.client_conformance.conftest import ROOT, python_program, serving
from tests.client_conformance.lines import Client, Program
from tests.client_conformance.scripted import Scripted


def _of_two(scenario: Callable[[list[Scripted]], None]) -> Callable[[Scripted], None]:
    def of_one(sidecar: Scripted) -> None:
        with scenarios.both(sidecar) as sidecars:
            scenario(sidecars)

    return of_one


REJECTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "resends-without-link": (
        partial(scenarios.test_a_stream_that_ends_is_begun_again, code=grpc.StatusCode.UNAVAILABLE),
        r"the batch of p with \[3\] has the link -1 instead of 2",
    ),
    "ignores-unknown": (
        scenarios.test_unknown_is_sent_again_until_it_is_decided,
        "was answered before its messages were decided",
    ),
    "gives-up-on-recovering": (
        partial(scenarios.test_a_refusal_with_a_delay_is_sent_again_after_it, reason="RECOVERING", delay_ms=700),
        "send p has failed",
    ),
    "drops-a-resend": (
        partial(scenarios.test_a_refusal_with_a_delay_is_sent_again_after_it, reason="QUEUE_FULL", delay_ms=0),
        "Open was called where there were due: the messages",
    ),
    "renumbers-a-resend": (
        partial(scenarios.test_a_stream_that_ends_is_begun_again, code=grpc.StatusCode.UNAVAILABLE),
        "messages .*1001",
    ),
    "opens-without-epochs": (
        partial(scenarios.test_a_stream_that_ends_is_begun_again, code=grpc.StatusCode.UNAVAILABLE),
        r"Open has the epochs \[\], and not",
    ),
    "goes-on-after-data-loss": (
        partial(
            scenarios.test_a_resume_that_cannot_be_right_ends_the_producer,
            resumed={"persisted": 1},
            reasons=["DATA_LOSS"],
        ),
        r"messages \[3\] were sent where nothing was due",
    ),
    "believes-what-is-forgotten": (
        partial(scenarios.test_a_log_that_is_shorter_than_before_is_data_loss, is_forgotten=True),
        r"messages \[3\] were sent where nothing was due",
    ),
    "ignores-delays": (
        partial(scenarios.test_a_refusal_with_a_delay_is_sent_again_after_it, reason="RECOVERING", delay_ms=700),
        "sent before the delay",
    ),
    "repeats-frame-numbers": (
        scenarios.test_receipts_come_in_any_order_and_late,
        "the frame number 7 is used twice",
    ),
    "accepts-without-limit": (
        scenarios.test_a_producer_accepts_no_more_than_it_may_have_in_flight,
        "bytes are accepted and have no receipt",
    ),
    "follows-any-address": (
        _of_two(scenarios.test_nobody_goes_where_the_addresses_do_not_say),
        "sent to an address that the client was not given",
    ),
    "stays-where-a-topic-recovers": (
        _of_two(partial(scenarios.test_who_serves_is_found_when_another_one_recovers_for_long, most_seconds=12)),
        "the client asks no other sidecar",
    ),
    "leaves-where-a-topic-recovers": (
        _of_two(partial(scenarios.test_who_serves_is_found_when_another_one_recovers_for_long, most_seconds=12)),
        "a recovery of seconds was not waited for",
    ),
    "heeds-lower-terms": (
        scenarios.test_an_answer_of_a_lower_term_is_ignored,
        "was answered before its messages were decided",
    ),
    "believes-a-late-refusal": (
        scenarios.test_what_a_publisher_has_sent_has_an_unknown_outcome_after_a_refusal,
        "should fail with OUTCOME_UNKNOWN",
    ),
    "reads-a-message-again": (
        partial(scenarios.test_a_reader_goes_on_where_it_was, code=grpc.StatusCode.OK),
        "a reader goes on after the last message that it has",
    ),
}


def _play(scenario: Callable[[Scripted], None], program: Program) -> None:
    with serving(program) as sidecar:
        scenario(sidecar)


def test_every_fault_is_rejected_by_a_scenario() -> None:
    assert [*REJECTS] == [*faults.FAULTS]


@pytest.mark.parametrize("fault", REJECTS)
def test_a_wrong_client_is_rejected(fault: str) -> None:
    scenario, why = REJECTS[fault]
    program = Program(Client(fault, python_program("--fault", fault), ROOT))
    try:
        with pytest.raises(AssertionError, match=why):
            _play(scenario, program)
    finally:
        program.kill()
