"""Where a client goes: every step, without a network."""

import logging

import pytest

from seqdedupe.address import SidecarAddress
from seqdedupe.client import route as route_module
from seqdedupe.client.route import LONGEST_REFUSAL_SECONDS, MAX_REDIRECTS, MAX_RETURNS, Route, Sidecars
from seqdedupe.errors import OutcomeUnknownError, UnavailableError, error

LISTED = Sidecars.parse("a:1,b:1,c:1")
WITH_DOMAIN = Sidecars.parse("a:1,*.svc")
ELSEWHERE = ["NOT_OWNER", "UNREACHABLE", "OUTCOME_UNKNOWN", "DRAINING"]
LASTING = ["RECOVERING", "LOG_REFUSED", "LOG_UNREADABLE", "STORE_UNAVAILABLE", "TOO_MANY_STREAMS"]
LATER = ["RECOVERING", "LOG_REFUSED", "QUEUE_FULL", "TOO_MANY_STREAMS", "STREAM_IDLE", "OUT_OF_MEMORY"]


def why(reason: str = "NOT_OWNER", **numbers: str) -> UnavailableError:
    made = error(reason, "no")
    assert isinstance(made, UnavailableError)
    made.numbers.update(numbers)
    return made


def owner(address: str) -> UnavailableError:
    return why(owner_address=address)


def steps(route: Route, *said: UnavailableError) -> list[str]:
    """Whom it goes to after each of these; with a * after it, only after a pause."""
    return [f"{route.address}" if route.moves_on(one) else f"{route.address}*" for one in said]


@pytest.mark.parametrize("reason", ELSEWHERE)
def test_each_is_asked_once_and_then_it_waits(reason: str) -> None:
    route = Route(LISTED)
    assert str(route.address) == "a:1"
    assert steps(route, *[why(reason)] * 7) == ["b:1", "c:1", "a:1*", "b:1", "c:1", "a:1*", "b:1"]


@pytest.mark.parametrize("reason", LATER)
def test_what_passes_by_itself_is_waited_for_where_it_is(reason: str) -> None:
    route = Route(LISTED)
    assert steps(route, why(), why(reason), why(reason), why()) == ["b:1", "b:1*", "b:1*", "a:1"]


@pytest.mark.parametrize("reason", ELSEWHERE + LATER)
def test_one_sidecar_is_the_only_one_whatever_it_says(reason: str) -> None:
    route = Route(Sidecars.parse("a:1"))
    assert route.is_one
    assert steps(route, *[why(reason, owner_address="b:1")] * 3) == ["a:1*"] * 3
    assert route.passes is (reason == "RECOVERING")


def test_a_topic_has_an_order_of_its_own() -> None:
    orders = {
        tuple(steps(Route(LISTED, f"persistent://public/default/{number}"), *[why()] * 3)) for number in range(50)
    }
    assert len(orders) == 6


def test_the_owner_comes_before_the_list() -> None:
    assert steps(Route(LISTED), owner("c:1"), why(), why()) == ["c:1", "b:1", "a:1*"]
    assert steps(Route(LISTED), owner("C:01"), why("UNREACHABLE")) == ["c:1", "b:1"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that passes for a route."""
    now = [5.0]
    monkeypatch.setattr(route_module, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("reason", LASTING)
def test_others_are_asked_once_when_one_has_recovered_for_long(reason: str, clock: list[float]) -> None:
    """Again and again, and from wherever it waits, which need not be the first in the list."""
    route = Route(LISTED, first=LISTED.addresses[1])
    for _ in range(3):
        assert steps(route, why(reason)) == ["b:1*"]
        clock[0] += LONGEST_REFUSAL_SECONDS - 1
        assert steps(route, why(reason)) == ["b:1*"]
        assert not route.has_lasted(why(reason))
        clock[0] += 1
        assert route.has_lasted(why(reason))
        assert steps(route, why(reason), owner("b:1"), why(reason)) == ["a:1", "c:1", "b:1*"]
    assert route.passes


def test_who_serves_is_found_although_another_one_recovers(clock: list[float]) -> None:
    """Also at an address that only another sidecar knows. Then the time begins again."""
    route = Route(Sidecars.parse("a:1,b:1,*.svc"))
    steps(route, why("RECOVERING"))
    clock[0] += LONGEST_REFUSAL_SECONDS
    assert steps(route, why("RECOVERING"), owner("c.svc:1")) == ["b:1", "c.svc:1"]
    route.goes_well()
    assert steps(route, why("RECOVERING")) == ["c.svc:1*"]
    assert not route.has_lasted(why("RECOVERING"))


def test_refused_frames_count_as_calls_do(clock: list[float]) -> None:
    route = Route(LISTED)
    assert not route.has_lasted(why("RECOVERING"))
    clock[0] += LONGEST_REFUSAL_SECONDS
    assert steps(route, why("RECOVERING")) == ["b:1"]
    route.goes_well()
    assert not route.has_lasted(why("RECOVERING"))
    route.goes_well()
    clock[0] += LONGEST_REFUSAL_SECONDS
    assert not route.has_lasted(why("RECOVERING"))


@pytest.mark.parametrize("reason", sorted({*LATER} - {*LASTING}))
def test_a_busy_owner_is_waited_for_however_long_it_takes(reason: str, clock: list[float]) -> None:
    route = Route(LISTED)
    for _ in range(3):
        assert steps(route, why(reason)) == ["a:1*"]
        clock[0] += LONGEST_REFUSAL_SECONDS
        assert not route.has_lasted(why(reason))


def test_two_that_name_each_other_are_asked_again_before_a_third_one_is() -> None:
    """A topic moves between them, and the third one may be frozen; but not for ever."""
    route = Route(LISTED)
    both = [owner("b:1"), owner("a:1")]
    for _ in range(2):
        assert steps(route, *both * MAX_RETURNS) == ["b:1", "a:1*"] * MAX_RETURNS
        assert steps(route, *both, why()) == ["b:1", "c:1", "a:1*"]
        assert steps(route, *both, owner("b:1")) == ["b:1", "c:1", "a:1*"]
        route.goes_well()


def test_one_that_was_asked_and_is_down_is_not_gone_back_to() -> None:
    assert steps(Route(LISTED), why("UNREACHABLE"), owner("a:1")) == ["b:1", "c:1"]


def test_a_dead_owner_that_others_still_name_is_not_asked_again_in_the_round() -> None:
    route = Route(LISTED)
    assert steps(route, why("UNREACHABLE"), owner("a:1"), owner("a:1")) == ["b:1", "c:1", "a:1*"]
    assert route.passes
    assert not Route(LISTED).passes


def test_a_chain_of_owners_ends() -> None:
    """Each names one that nobody has heard of, in a domain that is allowed."""
    route = Route(WITH_DOMAIN)
    gone = steps(route, *(owner(f"s{number}.svc:1") for number in range(2 * MAX_REDIRECTS + 2)))
    chain = [*(f"s{number}.svc:1" for number in range(MAX_REDIRECTS)), "a:1*"]
    assert gone[: MAX_REDIRECTS + 1] == chain
    assert sum(address.endswith("*") for address in gone) == 2


def test_a_sidecar_that_names_itself_is_not_asked_at_once() -> None:
    assert steps(Route(LISTED), owner("a:1"), owner("b:1"), owner("c:1")) == ["b:1", "c:1", "a:1*"]


@pytest.mark.parametrize("named", ["evil.org:1", "nonsense", "evil.org#.svc:1", "", "d:1"])
def test_who_is_not_allowed_is_not_gone_to(named: str, caplog: pytest.LogCaptureFixture) -> None:
    route = Route(Sidecars.parse("a:1,b:1,*.svc"), "")
    with caplog.at_level(logging.WARNING, "seqdedupe.client"):
        assert steps(route, *[owner(named)] * 4) == ["b:1", "a:1*", "b:1", "a:1*"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if named else 0)
    assert all(repr(named) in line for line in said)


def test_the_log_line_is_one_line_and_short(caplog: pytest.LogCaptureFixture) -> None:
    Route(LISTED, "t").moves_on(owner("x\nseqdedupe: all is well" + "y" * 10_000))
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


def test_an_owner_is_believed_only_where_somebody_says_not_owner() -> None:
    assert steps(Route(LISTED), why("UNREACHABLE", owner_address="c:1")) == ["b:1"]


def test_when_it_goes_well_all_may_be_asked_again() -> None:
    route = Route(LISTED)
    assert steps(route, why(), why()) == ["b:1", "c:1"]
    route.goes_well()
    assert steps(route, why(), why(), why()) == ["a:1", "b:1", "a:1*"]


def test_where_a_topic_was_found_comes_first() -> None:
    route = Route(LISTED, first=LISTED.addresses[2])
    assert str(route.address) == "c:1"
    assert steps(route, why(), why(), why()) == ["a:1", "b:1", "a:1*"]


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_topic_is_replaced_only_when_the_last_owner_says_so_too(is_listed: bool) -> None:
    """It may be in a domain: a former owner behind the only listed address is not all there is."""
    route = Route(Sidecars.parse("a:1,b.svc:1" if is_listed else "a:1,*.svc"), first=SidecarAddress.parse("a:1"))
    route.moves_on(owner("b.svc:1"))
    assert not route.check_term(5, 0)
    for _ in range(2):
        steps(route, why("UNREACHABLE"), why("UNREACHABLE"))
        while str(route.address) != "a:1":
            route.moves_on(why("UNREACHABLE"))
        with pytest.raises(UnavailableError, match="term 4, lower than 5") as former:
            route.check_term(4, 5)
        assert steps(route, former.value) == ["b.svc:1"]
    assert route.check_term(4, 5)
    assert not route.check_term(5, 5)


def test_the_only_sidecar_can_tell_of_a_replaced_topic() -> None:
    route = Route(Sidecars.parse("a:1"))
    assert not route.check_term(5, 0)
    assert route.check_term(4, 5)


@pytest.mark.parametrize("said", ["TOPIC_NOT_FOUND", "NO_STATE"])
def test_a_topic_is_unknown_when_all_say_so(said: str) -> None:
    """One need not have heard yet of what was made at another, nor have its state."""
    unknown = error(said, "there is nothing of topic t")
    assert Route(Sidecars.parse("a:1")).doubted(unknown) is unknown
    route = Route(LISTED)
    for reason in ("UNREACHABLE", said):
        for _ in range(2):
            doubted = route.doubted(unknown)
            assert isinstance(doubted, UnavailableError)
            assert doubted.reason == "NOT_OWNER"
            assert route.moves_on(doubted)
        assert str(route.address) == "c:1"
        if reason == "UNREACHABLE":
            assert not route.moves_on(why(reason))
    assert route.doubted(unknown) is unknown
    other = error("TOPIC_IS_PARTITIONED", "it has 3")
    assert route.doubted(other) is other


def test_what_is_told_names_all_that_were_asked() -> None:
    route = Route(LISTED)
    first = error("UNREACHABLE", "no connection to the sidecar at a:1: refused")
    assert isinstance(first, UnavailableError)
    route.moves_on(first)
    assert route.told() is first
    route.moves_on(error("OUTCOME_UNKNOWN", "broke", hint="do", n=7))  # type: ignore[arg-type]
    told = route.told()
    assert isinstance(told, OutcomeUnknownError)
    assert told.message == "no connection to the sidecar at a:1: refused; b:1: broke"
    assert (told.reason, told.hint, told.numbers) == ("OUTCOME_UNKNOWN", "do", {"n": "7"})
    route.moves_on(why())
    route.moves_on(why())
    assert route.told().message == "b:1: broke; c:1: no; a:1: no"
    route.goes_well()
    route.moves_on(why())
    assert route.told().message == "no"


def test_an_idle_client_waits_for_a_short_recovery_as_before(clock: list[float]) -> None:
    """The error of an hour ago says nothing about the one of now."""
    route = Route(LISTED)
    assert not route.has_lasted(why("RECOVERING"))
    clock[0] += 3600
    assert not route.has_lasted(why("RECOVERING"))
    assert steps(route, why("RECOVERING")) == ["a:1*"]
    clock[0] += LONGEST_REFUSAL_SECONDS
    assert route.has_lasted(why("RECOVERING"))
