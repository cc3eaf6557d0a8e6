"""A topic that its owner gives up in order, and another sidecar takes because it is asked to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from seqdedupe.errors import NotFoundError, UnavailableError
from seqdedupe.topic import owner as owning
from seqdedupe.topic.base import State
from seqdedupe.topic.topic import Topic
from tests.topic.publisher import stored
from tests.topic.test_standby import LIMIT_SECONDS, Sidecar, Two, not_owner, until

FOR_GOOD_SECONDS = 100_000.0


@pytest.fixture(params=[True, False], ids=["standbys", "asked"])
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Two]:
    two = Two(tmp_path, are_standbys=request.param)
    await two.start()
    yield two
    await two.close()


async def taken_by(sidecar: Sidecar) -> None:
    """As the sidecar that has given a topic up asks another one to take it."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while sidecar.topic.state is not State.SERVING:
            with suppress(UnavailableError):
                await sidecar.topic.owner.take()


def takes_nothing_now(topic: Topic) -> bool:
    try:
        topic.check_serving()
    except UnavailableError as e:
        return e.reason == "RECOVERING"
    return False


async def test_a_topic_that_is_moved_under_load_to_and_fro_holds_each_message_once(two: Two) -> None:
    for owner, other in (two.one, two.other), (two.other, two.one), (two.one, two.other):
        before = two.publisher.acknowledged
        at_work = asyncio.ensure_future(two.publisher.publish(before + 300))
        await until(lambda before=before: two.publisher.acknowledged > before + 20)  # type: ignore[misc]
        owner.log.automatic = False
        await asyncio.sleep(0)
        await until(lambda owner=owner: owner.log.in_flight >= 10)  # type: ignore[misc]
        moving = asyncio.ensure_future(owner.topic.owner.hand_over(other.log.address, FOR_GOOD_SECONDS))
        await until(lambda owner=owner: takes_nothing_now(owner.topic))  # type: ignore[misc]
        in_flight = owner.log.in_flight
        assert in_flight >= 10
        owner.log.automatic = True
        owner.log.settle()
        await moving
        with not_owner(other.log.address):
            owner.topic.check_serving()
        assert not len(owner.topic.flight)
        assert owner.topic.keeper.snapshot_index > before
        await taken_by(other)
        assert other.topic.term > owner.topic.term
        await at_work
    # All that was in flight had settled: nobody had to find anything out.
    assert {e.reason for e in two.publisher.heard} <= {"NOT_OWNER", "RECOVERING"}
    assert await stored(two.other.topic) == {"p": list(range(two.publisher.acknowledged + 1))}


async def test_what_does_not_settle_is_found_out_by_the_new_owner(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "SETTLE_SECONDS", 0.05)
    at_work = await two.with_frames_in_flight()
    # Four of those in flight are stored, of which nobody learns.
    two.one.log.store(4)
    await two.one.topic.owner.hand_over("", FOR_GOOD_SECONDS)
    assert not len(two.one.topic.flight)
    await taken_by(two.other)
    await at_work
    assert await stored(two.other.topic) == {"p": list(range(1000))}


async def test_who_has_given_a_topic_up_keeps_away_until_it_is_wanted_there(two: Two) -> None:
    await two.publisher.publish(10)
    tried = two.one.log.opened
    await two.other.close()
    await two.one.topic.owner.hand_over("", FOR_GOOD_SECONDS)
    for _ in range(1000):
        with pytest.raises(UnavailableError, match="NOT_OWNER"):
            two.one.topic.check_serving()
        await asyncio.sleep(0)
    assert two.one.log.opened == tried
    # Nobody has taken it: at once again, also if it was wanted before it began to wait.
    two.one.topic.owner.wanted.set()
    await two.one.until(State.SERVING)
    await two.publisher.publish(20)


async def test_who_is_to_take_a_topic_that_somebody_owns_says_who_does(two: Two) -> None:
    with pytest.raises(UnavailableError, match="NOT_OWNER") as caught:
        await two.other.topic.owner.take()
    assert caught.value.numbers["owner_address"] == "one:6680"
    await two.one.topic.owner.take()
    assert two.one.topic.state is State.SERVING


async def test_a_topic_that_its_owner_has_just_lost_is_not_given_up(two: Two) -> None:
    two.one.log.opening_allowed.clear()
    two.one.log.unknown()
    with pytest.raises(UnavailableError, match="RECOVERING"):
        await two.one.topic.owner.hand_over("", FOR_GOOD_SECONDS)
    two.one.log.opening_allowed.set()
    await two.one.until(State.SERVING)
    await two.publisher.publish(10)


@pytest.mark.parametrize("two", [True], indirect=True)
async def test_who_was_wanted_while_it_took_a_topic_gives_it_up_all_the_same(two: Two) -> None:
    one, other = two.one, two.other
    other.log.opening_allowed.clear()
    tried = other.log.opened
    await one.topic.owner.hand_over("", FOR_GOOD_SECONDS)
    # It has begun by itself before it is asked to.
    await until(lambda: other.log.opened > tried)
    taking = asyncio.ensure_future(other.topic.owner.take())
    await until(other.topic.owner.wanted.is_set)
    other.log.opening_allowed.set()
    await taking
    one.log.opening_allowed.clear()
    tried = other.log.opened
    await other.topic.owner.hand_over(one.log.address, FOR_GOOD_SECONDS)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert other.log.opened == tried
    one.log.opening_allowed.set()
    await taken_by(one)
    assert other.topic.state is State.STANDBY


async def test_a_topic_that_is_deleted_while_it_is_given_up_is_given_to_nobody(two: Two) -> None:
    at_work = await two.with_frames_in_flight()
    moving = asyncio.ensure_future(two.one.topic.owner.hand_over(two.other.log.address, FOR_GOOD_SECONDS))
    await until(lambda: takes_nothing_now(two.one.topic))
    await two.one.topic.delete()
    with pytest.raises(NotFoundError):
        await moving
    assert not two.one.ended
    at_work.cancel()


@pytest.mark.parametrize(
    "e", [OSError("the broker does not answer"), asyncio.CancelledError()], ids=["error", "cancelled"]
)
async def test_a_log_that_cannot_be_let_go_of_is_taken_again(
    two: Two, monkeypatch: pytest.MonkeyPatch, e: BaseException
) -> None:
    one = two.one
    await two.publisher.publish(10)
    let_go = one.log.let_go

    async def fails() -> None:
        # As where it breaks in the middle: the log is not owned any more.
        await let_go()
        raise e

    with monkeypatch.context() as m:
        m.setattr(one.log, "let_go", fails)
        with pytest.raises(type(e)):
            await one.topic.owner.hand_over("", FOR_GOOD_SECONDS)
    publishing = asyncio.ensure_future(two.publisher.publish(20))
    async with asyncio.timeout(LIMIT_SECONDS):
        await publishing
    assert await stored(one.topic if one.topic.state is State.SERVING else two.other.topic) == {"p": list(range(20))}
