"""What the code does, the model can do: traces of random cases of the code are followed in the model.

`make campaign` follows more. Traces that were damaged on purpose, and traces of code with planted bugs, are rejected.
"""

from collections.abc import Callable, Iterator

import pytest

from model.steps import Kind
from model.trace import (
    Appended,
    Confirmed,
    Dropped,
    Event,
    Fenced,
    Frame,
    Killed,
    Landed,
    Left,
    Marked,
    NotInTheModel,
    Numbers,
    Opened,
    Receipt,
    Served,
)
from tests.property import planted
from tests.property.disk import CrashableStore
from tests.property.recorded import follow, recorded
from tests.property.run import many_cases

CASES = 100
MOST_CASES = 60


@pytest.fixture(scope="module")
def store() -> Iterator[CrashableStore]:
    with many_cases() as store:
        yield store


@pytest.fixture(scope="module")
def traces(store: CrashableStore) -> list[list[Event]]:
    return [recorded(store, seed) for seed in range(CASES)]


def test_the_model_can_do_what_the_code_did(traces: list[list[Event]]) -> None:
    for events in traces:
        follow(events)


def test_the_traces_have_everything(traces: list[list[Event]]) -> None:
    kinds = {type(event) for events in traces for event in events}
    assert len(kinds) == 13
    records = {event.kind for events in traces for event in events if isinstance(event, Appended)}
    assert records == {Kind.MESSAGE, Kind.SESSION, Kind.STATEMENT, Kind.BARE}
    refusals = {event.refused for events in traces for event in events if isinstance(event, Frame)}
    assert refusals >= {"", "FENCED", "PREDECESSOR_MISSING", "LINK_REQUIRED", "RECOVERING"}
    assert {verdict for events in traces for event in events if isinstance(event, Receipt) for verdict in event[1]} == {
        "admit",
        "Dup",
        "Unknown",
    }


# -- Damage: each changes a trace at a place, or returns None where there is nothing to change.

Damage = Callable[[list[Event], int], list[Event] | None]


def _without(events: list[Event], at: int) -> list[Event]:
    return events[:at] + events[at + 1 :]


def _with(events: list[Event], at: int, event: Event) -> list[Event]:
    return [*events[:at], event, *events[at + 1 :]]


def verdict_of_another(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Receipt) or event.verdicts[0] == "Dup":
        return None
    return _with(events, at, event._replace(verdicts=("Dup", *event.verdicts[1:])))


def admitted_and_not_appended(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    return _without(events, at) if isinstance(event, Appended) and event.kind is Kind.MESSAGE else None


def appended_twice(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    is_message = isinstance(event, Appended) and event.kind is Kind.MESSAGE
    return [*events[:at], event, *events[at:]] if is_message else None


def taken_without_its_predecessor(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Frame) or event.refused != "PREDECESSOR_MISSING":
        return None
    return _with(events, at, event._replace(refused=""))


def taken_from_a_fenced_session(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Frame) or event.refused != "FENCED":
        return None
    return _with(events, at, event._replace(refused=""))


def open_answered_before_its_record_is_durable(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Appended) or event.kind is not Kind.SESSION:
        return None
    name, _, epoch = event.entries[0]
    return [*events[: at + 1], Opened(name, epoch, 0), *events[at + 1 :]]


def open_answers_less(events: list[Event], at: int) -> list[Event] | None:
    """Not during a recovery, in which Open may answer what has been read."""
    event = events[at]
    states = [one for one in events[:at] if isinstance(one, Served | Left | Killed)]
    if not isinstance(event, Opened) or not event.persisted or not isinstance(states[-1], Served):
        return None
    return _with(events, at, event._replace(persisted=event.persisted - 1))


def snapshot_of_more_than_its_position(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Killed) or not event.numbers:
        return None
    numbers = {name: (persisted + 1, durable) for name, (persisted, durable) in event.numbers.items()}
    return _with(events, at, event._replace(numbers=numbers))


def recovery_forgets_a_message(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Served) or not any(its.persisted for its in event.numbers.values()):
        return None
    less = {
        name: Numbers(max(its.pushed - 1, 0), max(its.persisted - 1, 0), its.epoch, its.durable)
        for name, its in event.numbers.items()
    }
    return _with(events, at, event._replace(numbers=less))


def serves_under_a_lower_term(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    is_own = isinstance(event, Marked) and event.is_own and isinstance(events[at + 1], Served)
    if not is_own or not isinstance(event, Marked):
        return None
    return [*events[:at], Marked(event.term + 1, is_own=False), *events[at:]]


def confirmed_without_a_receipt(events: list[Event], at: int) -> list[Event] | None:
    if not isinstance(events[at], Landed) or not isinstance(events[at + 1], Confirmed):
        return None
    return _without(events, at)


def dropped_before_it_is_stated(events: list[Event], at: int) -> list[Event] | None:
    if not isinstance(events[at], Dropped):
        return None
    records = sum(isinstance(event, Landed | Marked) for event in events[:at])
    before = sum(event.records for event in events[:at] if isinstance(event, Dropped))
    return _with(events, at, Dropped(records - before))


def session_fenced_by_nobody(events: list[Event], at: int) -> list[Event] | None:
    event = events[at]
    if not isinstance(event, Opened):
        return None
    return [*events[: at + 1], Fenced(event.name, event.epoch), *events[at + 1 :]]


DAMAGES: list[Damage] = [
    verdict_of_another,
    admitted_and_not_appended,
    appended_twice,
    taken_without_its_predecessor,
    taken_from_a_fenced_session,
    open_answered_before_its_record_is_durable,
    open_answers_less,
    snapshot_of_more_than_its_position,
    recovery_forgets_a_message,
    serves_under_a_lower_term,
    confirmed_without_a_receipt,
    dropped_before_it_is_stated,
    session_fenced_by_nobody,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_control_a_damaged_trace_is_rejected(damage: Damage, traces: list[list[Event]]) -> None:
    """Wherever it is damaged in this way; and nowhere else it is rejected."""
    rejected = 0
    for events in traces:
        for at in range(len(events) - 1):
            if (damaged := damage(events, at)) is not None:
                with pytest.raises(NotInTheModel):
                    follow(damaged)
                rejected += 1
                break
    assert rejected > 5


BUGS = (
    planted.snapshot_of_pushed,
    planted.retention_forgets_what_is_in_force,
    planted.link_check_left_out,
    planted.link_is_the_id_sent_before,
    planted.frame_admitted_in_part,
    planted.position_of_the_last_admitted_message,
    planted.pushed_not_reset,
    planted.failure_does_not_take_what_is_behind,
    planted.append_accepted_after_a_refused_one,
    planted.replay_from_one_too_late,
    planted.no_marker_before_reading,
    planted.stale_epoch_accepted,
    planted.open_answered_before_its_epoch_is_durable,
    planted.control_records_after_the_last_message_not_replayed,
    planted.failed_snapshot_forgotten,
    planted.frame_judged_as_a_whole,
    planted.second_recovery_beside_the_first,
    planted.landed_frames_answered_as_refused,
)
"""Each breaks a rule of the model. The others break what the model does not have, or need more cases."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_control_the_trace_of_a_planted_bug_is_rejected(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, store: CrashableStore
) -> None:
    bug(monkeypatch)
    for seed in range(MOST_CASES):
        try:
            follow(recorded(store, seed))
        except NotInTheModel:
            return
    pytest.fail(f"{bug.__name__} is not found in {MOST_CASES} traces")
