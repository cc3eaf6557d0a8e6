"""That names were ever forgotten is known for good: without the policy, after a restart, from the log alone."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import FrameReceipt, Refusal
from seqdedupe.topic.policy import Applied
from seqdedupe.transfer.topic_state import saved
from tests.log.faulty import Storage
from tests.topic.test_inactivity import INCARNATION, Scene


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def other_store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "other-store")
    yield store
    store.close()


@pytest.fixture
async def scene(store: Store, other_store: Store) -> AsyncIterator[Scene]:
    scene = Scene(store, Storage(INCARNATION))
    await scene.start()
    yield scene
    await scene.topic.close("")


@pytest.mark.parametrize("known_from", ["the log", "a snapshot", "a snapshot of all", "a saved snapshot"])
async def test_a_topic_that_forgot_says_so_after_a_restart_without_the_policy(
    scene: Scene, other_store: Store, known_from: str
) -> None:
    scene.keep_rows()
    await scene.publish("gone", "again", "stays")
    older = dict(scene.epochs)
    await scene.open("again")
    await scene.topic.keeper.snapshot()
    await scene.send(("stays", 8), link=7, cache=scene.topic.connect())
    await scene.pass_timeout()
    assert scene.known() == {"stays": 8}
    scene.applied = Applied()
    if known_from == "a snapshot":
        await scene.topic.keeper.snapshot()
    elif known_from == "a snapshot of all":
        scene.topic.keeper.snapshotter.renumbered()
        await scene.topic.keeper.snapshot()
    elif known_from == "a saved snapshot":
        opening = await Snapshots(other_store, INCARNATION).write_anew(saved(scene.topic).whole())
        await other_store.flush(opening)
    if known_from in ("the log", "a saved snapshot"):
        scene.store = other_store
    await scene.restart()
    opened = await scene.resume("gone", "stays")
    assert (opened.persisted, opened.forgotten) == ([-1, 8], [0])
    # An earlier session goes on first: the newer one would take its messages for its own.
    newer, scene.epochs = scene.epochs, older
    assert (await scene.resume("again")).forgotten == [0]
    scene.epochs = newer
    [why] = (await scene.resume("again")).refusals.values()
    assert why.reason == "FENCED"


async def test_a_topic_that_never_forgot_says_nothing_of_it_whatever_its_policy(scene: Scene) -> None:
    """What is gone is lost data then, and the client says so."""
    await scene.open("a")
    assert (await scene.resume("a")).forgotten == []


@pytest.mark.parametrize("dies", [False, True])
async def test_a_resume_is_told_until_its_session_is_over_though_a_first_frame_came_late(
    scene: Scene, dies: bool
) -> None:
    """The answer that told it was lost, and a copy of the session's first frame came before the next resume. With the
    process ends what it knows of that: the limit that the documentation names."""
    await scene.publish("a")
    await scene.pass_timeout()
    assert (await scene.resume("a")).forgotten == [0]
    # Everything that is no first frame misses what it follows.
    refusal = await scene.send(("a", 8), link=7)
    assert isinstance(refusal, Refusal)
    assert refusal.error.reason == "PREDECESSOR_MISSING"
    assert isinstance(await scene.send(("a", 0)), FrameReceipt)
    if dies:
        await scene.restart()
    opened = await scene.resume("a")
    assert (opened.persisted, opened.forgotten) == ([0], [] if dies else [0])
    await scene.open("a")
    assert (await scene.resume("a")).forgotten == []
