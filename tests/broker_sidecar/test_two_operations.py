"""Two operations on one topic name: what becomes of the second one while the first one is under way.

The table at the end has, for each pair, the answer to the second one: `waits` means that it came after the first one's;
any other came while the first one was held. The answer to the first one is there where it is not `ok`. After `->` it
says which topics there are in the end, `here`, where both were asked, and `there`, where topics come from and go to:
`old` is the incarnation that was here before both, `other` the one that was there, and `new` another one.

A topic cannot arrive from where it is being moved to. Dividing a data directory among workers is no operation of this
table: it is done before a start, while no process serves the directory.
"""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory
from tests.broker_sidecar import held_operations as ask
from tests.broker_sidecar.held_operations import Hold, Holds, Key, Operation, Place, Side, asked

RECORD = os.environ.get("RECORD_OPERATIONS")
"""A file to which the table is written instead of being compared."""
TOO_LONG_SECONDS = 60.0
"""What takes longer waits, no matter what the table says."""
RECORD_SECONDS = 3.0
"""The same, when there is no table yet."""

SECOND: dict[str, Operation] = {
    "create": ask.create,
    "open a producer": ask.open_producer,
    "delete": ask.delete,
    "import a snapshot": ask.import_snapshot,
    "rebuild": ask.rebuild,
    "move away": ask.move,
    "arrive": ask.arrive,
    "list": ask.list_all,
    "get": ask.get,
    "back up": ask.back_up,
    "create partitions": ask.create_partitions,
    "create a partition's name": ask.create_partition,
    "delete a partition's name": ask.delete_partition,
    "set a policy": ask.set_policy,
    "drain": ask.drain,
}

OR = " OR "
"""Between outcomes of which either may be: it depends on which of two answers is first on its way."""

NEED_A_TOPIC = ("delete", "import a snapshot", "rebuild", "move away", "get", "set a policy")


@dataclass(frozen=True)
class First:
    """An operation, what there is before it, and where it is held."""

    operation: Operation
    before: str
    point: Callable[[Place], Key]


def record(place: Place) -> Key:
    return "record", place.name


def record_of_partition(place: Place) -> Key:
    return "record", place.partition


FIRST: dict[str, First] = {
    "create": First(ask.create, "", record),
    "open a producer": First(ask.open_producer, "", record),
    "delete": First(ask.delete, "here", record),
    "delete: its log": First(ask.delete, "here", lambda place: ("delete", place.incarnation("old"))),
    "import a snapshot": First(ask.import_snapshot, "here", lambda place: ("snapshot", "")),
    "rebuild": First(ask.rebuild, "here", lambda place: ("open", place.incarnation("old"))),
    "move away: copying": First(ask.move, "here", lambda place: ("arrival", place.name)),
    "move away: leaving": First(ask.move, "here", lambda place: ("leave", place.incarnation("old"))),
    "move away: taken there": First(ask.move, "here", record),
    "arrive: coming": First(ask.arrive, "there", lambda place: ("arrival", place.name)),
    "arrive: taken": First(ask.arrive, "there", record),
    "back up": First(ask.back_up, "here", lambda place: ("backup", place.name)),
    "create partitions": First(ask.create_partitions, "", record_of_partition),
    "delete partitions": First(ask.delete, "partitions", record_of_partition),
    "create a partition's name": First(ask.create_partition, "", record_of_partition),
    "delete a partition's name": First(ask.delete_partition, "partition", record_of_partition),
    "set a policy": First(ask.set_policy, "here", lambda place: ("append", place.incarnation("old"))),
    "open after a start": First(ask.get, "here", lambda place: ("open", place.incarnation("old"))),
}


@asynccontextmanager
async def sides(folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    """Two sidecars, which serve; the test ends them."""
    sockets = Path(tempfile.mkdtemp(prefix="seqdedupe-"))
    here, there = f"unix:{sockets}/here", f"unix:{sockets}/there"
    both = Side(folder / "here", here, there), Side(folder / "there", there, here)
    try:
        for side in both:
            await side.start()
        yield both
    finally:
        shutil.rmtree(sockets)


async def made(first: First, second: str, here: Side, there: Side) -> Place:
    """Its own name for each pair of operations, and what there is of it before both."""
    place = Place(here, there)
    is_exported = ask.import_snapshot in (first.operation, SECOND[second])
    await place.make(first.before, is_there=second == "arrive", is_exported=is_exported)
    return place


async def begun(holds: Holds, first: First, place: Place) -> tuple[Hold, "asyncio.Task[str]"]:
    """The first operation, held."""
    hold = holds.arm(first.point(place))
    doing = asyncio.create_task(asked(first.operation, place))
    reached = asyncio.ensure_future(hold.reached.wait())
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        await asyncio.wait({doing, reached}, return_when=asyncio.FIRST_COMPLETED)
    assert reached.done(), f"it is not held, but answered {doing.result()}"
    return hold, doing


async def met(hold: Hold, doing: "asyncio.Task[str]", second: str, place: Place, expected: str) -> str:
    """What becomes of the second operation, while the first one is held and afterwards; and of the first one."""
    asking = asyncio.create_task(asked(SECOND[second], place))
    if expected.startswith("waits"):
        # What does not wait has ended before the same operation that was begun later and meets nothing.
        await elsewhere(second, place)
    else:
        await asyncio.wait({asking}, timeout=RECORD_SECONDS if RECORD else TOO_LONG_SECONDS)
    waits = "" if asking.done() else "waits, "
    hold.let_go()
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        answer = await asking
        if second == "drain":
            await place.here.start()
        await doing
    said = "" if doing.result() == "ok" else f"; the first: {doing.result()}"
    return f"{waits}{answer}{said}"


async def elsewhere(second: str, place: Place) -> None:
    """The operation where nothing else is under way."""
    if second == "back up":
        await asked(ask.back_up, Place(place.there, place.here))
    elif second == "drain":
        third = Side(place.here.folder.with_name("third"), f"{place.here.address}-third", place.there.address)
        await third.start()
        await third.stop()
    else:
        before = "here" if second in NEED_A_TOPIC else ""
        other = await made(First(SECOND[second], before, record), second, place.here, place.there)
        assert await asked(SECOND[second], other) in ("ok", "gets old", "TOPIC_NOT_FOUND")


async def with_its_end(outcome: str, place: Place, expected: str) -> str:
    """The outcome, and which topics there are in the end. What goes on after an answer is waited for."""
    for _ in range(20 if RECORD else 1000):
        if (found := f"{outcome} -> {await place.end()}") in expected.split(OR):
            return expected
        await asyncio.sleep(0.01)
    return found


async def stopped(*both: Side) -> None:
    for side in both:
        await side.stop()
        side.check_agrees()


def check(name: str, found: dict[str, str]) -> None:
    """Compare with the table, or write what is to be its part of it."""
    if RECORD:
        with open(RECORD, "a") as file:
            file.write(f"    {json.dumps(name)}: {{\n")
            file.writelines(f"        {json.dumps(second)}: {json.dumps(what)},\n" for second, what in found.items())
            file.write("    },\n")
    else:
        assert found == TABLE[name]


@pytest.mark.parametrize("name", FIRST)
async def test_while_one_is_under_way(name: str, tmp_path: Path) -> None:
    first, found = FIRST[name], {}
    with pytest.MonkeyPatch.context() as patch:
        holds = Holds(patch)
        async with sides(tmp_path) as (here, there):
            seconds = [second for second in SECOND if second != "arrive" or first.operation is not ask.move]
            places = {second: await made(first, second, here, there) for second in seconds}
            if first.operation is ask.get:
                all_wait(patch)
            for second, place in places.items():
                if first.operation is ask.get and second in ("create", "create partitions"):
                    # Everything waits, also what a backup has opened.
                    await here.stop()
                    await here.start()
                expected = TABLE.get(name, {}).get(second, "")
                outcome = await met(*await begun(holds, first, place), second, place, expected)
                found[second] = await with_its_end(outcome, place, expected)
                await place.remove()
            await stopped(here, there)
    check(name, found)


async def test_while_it_drains(tmp_path: Path) -> None:
    first = First(ask.drain, "here", lambda place: ("close", place.incarnation("old")))
    outcomes, found = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        holds = Holds(patch)
        async with sides(tmp_path) as (here, there):
            seconds = [second for second in SECOND if second != "drain"]
            places = {second: await made(first, second, here, there) for second in seconds}
            hold, draining = await begun(holds, first, await made(first, "create", here, there))
            for second, place in places.items():
                outcomes[second] = await asked(SECOND[second], place)
            hold.let_go()
            assert await draining == "ok"
            await here.start()
            for second, place in places.items():
                expected = TABLE.get("drain", {}).get(second, "")
                found[second] = await with_its_end(outcomes[second], place, expected)
                await place.remove()
            await stopped(here, there)
    check("drain", found)


def all_wait(patch: pytest.MonkeyPatch) -> None:
    """No topic is opened by a start, or in its turn; who uses one waits until it is open."""
    patch.setattr(directory, "OPENED_AT_START", 0)
    patch.setattr(directory, "APART_SECONDS", LAST_RESORT_SECONDS)
    patch.setattr(directory, "USE_SECONDS", LAST_RESORT_SECONDS)


TABLE: dict[str, dict[str, str]] = {
    # First operation: second operation: what becomes of the second -> which topics there are in the end.
    "create": {
        "create": "waits, TOPIC_EXISTS -> new",
        "open a producer": "waits, ok -> new",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_NOT_FOUND -> new",
        "rebuild": "TOPIC_NOT_FOUND -> new",
        "move away": "TOPIC_NOT_FOUND -> new",
        "arrive": "MOVE_FAILED: a topic T is being made or deleted -> new, there other",
        "list": "lists none -> new",
        "get": "TOPIC_NOT_FOUND -> new",
        "back up": "has none -> new",
        "create partitions": "TOPIC_EXISTS -> new",
        "create a partition's name": "ok -> new + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> new",
        "set a policy": "TOPIC_NOT_FOUND -> new",
        "drain": "waits, ok -> new",
    },
    "open a producer": {
        "create": "waits, TOPIC_EXISTS -> new",
        "open a producer": "waits, ok -> new",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_NOT_FOUND -> new",
        "rebuild": "TOPIC_NOT_FOUND -> new",
        "move away": "TOPIC_NOT_FOUND -> new",
        "arrive": "MOVE_FAILED: a topic T is being made or deleted -> new, there other",
        "list": "lists none -> new",
        "get": "TOPIC_NOT_FOUND -> new",
        "back up": "has none -> new",
        "create partitions": "TOPIC_EXISTS -> new",
        "create a partition's name": "ok -> new + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> new",
        "set a policy": "TOPIC_NOT_FOUND -> new",
        "drain": "waits, ok -> new",
    },
    "delete": {
        "create": "waits, ok -> new",
        "open a producer": "DRAINING -> none",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_NOT_FOUND -> none",
        "rebuild": "TOPIC_NOT_FOUND -> none",
        "move away": "DRAINING -> none",
        "arrive": "MOVE_FAILED: topic T exists already -> none, there other",
        "list": "lists old -> none",
        "get": "gets old -> none",
        "back up": "has old -> none",
        # A topic without partitions is created after the deletion; so with one's deletion and a topic without them.
        "create partitions": "TOPIC_EXISTS -> none",
        "create a partition's name": "ok -> partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> none",
        "set a policy": "DRAINING -> none",
        "drain": "waits, ok -> none",
    },
    "delete: its log": {
        "create": "waits, ok -> new",
        "open a producer": "waits, ok -> new",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_NOT_FOUND -> none",
        "rebuild": "TOPIC_NOT_FOUND -> none",
        "move away": "TOPIC_NOT_FOUND -> none",
        "arrive": "MOVE_FAILED: a topic T is being made or deleted -> none, there other",
        "list": "lists none -> none",
        "get": "TOPIC_NOT_FOUND -> none",
        "back up": "has none -> none",
        "create partitions": "TOPIC_EXISTS -> none",
        "create a partition's name": "ok -> partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> none",
        "set a policy": "TOPIC_NOT_FOUND -> none",
        "drain": "waits, ok -> none",
    },
    "import a snapshot": {
        "create": "RECOVERING -> old",
        "open a producer": "RECOVERING -> old",
        "delete": "RECOVERING -> old",
        "import a snapshot": "RECOVERING -> old",
        "rebuild": "RECOVERING -> old",
        "move away": "RECOVERING -> old",
        "arrive": "MOVE_FAILED: topic T exists already -> old, there other",
        "list": "lists old recovering -> old",
        "get": "gets old recovering -> old",
        "back up": "waits, has old -> old",
        "create partitions": "TOPIC_EXISTS -> old",
        "create a partition's name": "ok -> old + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old",
        "set a policy": "RECOVERING -> old",
        "drain": "waits, ok -> old OR waits, ok; the first: DRAINING -> old",
    },
    "rebuild": {
        "create": "RECOVERING -> old",
        "open a producer": "RECOVERING -> old",
        "delete": "RECOVERING -> old",
        "import a snapshot": "RECOVERING -> old",
        "rebuild": "RECOVERING -> old",
        "move away": "RECOVERING -> old",
        "arrive": "MOVE_FAILED: topic T exists already -> old, there other",
        "list": "lists old recovering -> old",
        "get": "gets old recovering -> old",
        "back up": "waits, has old -> old",
        "create partitions": "TOPIC_EXISTS -> old",
        "create a partition's name": "ok -> old + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old",
        "set a policy": "RECOVERING -> old",
        "drain": "waits, ok -> old",
    },
    "move away: copying": {
        "create": "TOPIC_EXISTS -> old standby, there old",
        "open a producer": "ok -> old standby, there old",
        "delete": "RECOVERING -> old standby, there old",
        "import a snapshot": "RECOVERING -> old standby, there old",
        "rebuild": "RECOVERING -> old standby, there old",
        "move away": "MOVE_FAILED: topic T is being moved, opened again or deleted already -> old standby, there old",
        "list": "lists old -> old standby, there old",
        "get": "gets old -> old standby, there old",
        "back up": "has old -> old standby, there old",
        "create partitions": "TOPIC_EXISTS -> old standby, there old",
        "create a partition's name": "ok -> old standby + partition new, there old",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old standby, there old",
        "set a policy": "ok -> old standby, there old",
        "drain": "ok; the first: DRAINING -> old",
    },
    "move away: leaving": {
        "create": "TOPIC_EXISTS -> old standby, there old",
        "open a producer": "RECOVERING -> old standby, there old",
        "delete": "RECOVERING -> old standby, there old",
        "import a snapshot": "RECOVERING -> old standby, there old",
        "rebuild": "RECOVERING -> old standby, there old",
        "move away": "RECOVERING -> old standby, there old",
        "list": "lists old -> old standby, there old",
        "get": "gets old -> old standby, there old",
        "back up": "has old -> old standby, there old",
        "create partitions": "TOPIC_EXISTS -> old standby, there old",
        "create a partition's name": "ok -> old standby + partition new, there old",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old standby, there old",
        "set a policy": "RECOVERING -> old standby, there old",
        "drain": "ok; the first: DRAINING -> old",
    },
    "move away: taken there": {
        "create": "TOPIC_EXISTS -> old standby, there old",
        "open a producer": "RECOVERING -> old standby, there old",
        "delete": "RECOVERING -> old standby, there old",
        "import a snapshot": "RECOVERING -> old standby, there old",
        "rebuild": "RECOVERING -> old standby, there old",
        "move away": "RECOVERING -> old standby, there old",
        "list": "lists old -> old standby, there old",
        "get": "gets old -> old standby, there old",
        "back up": "has old -> old standby, there old",
        "create partitions": "TOPIC_EXISTS -> old standby, there old",
        "create a partition's name": "ok -> old standby + partition new, there old",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old standby, there old",
        "set a policy": "RECOVERING -> old standby, there old",
        "drain": "ok; the first: DRAINING -> old standby, there old",
    },
    "arrive: coming": {
        "create": "ok; the first: MOVE_FAILED: topic T: the sidecar at here does not have it, "
        "and this sidecar takes it again -> new, there other",
        "open a producer": "ok; the first: MOVE_FAILED: topic T: the sidecar at here does not have it, "
        "and this sidecar takes it again -> new, there other",
        "delete": "TOPIC_NOT_FOUND -> other, there other standby",
        "import a snapshot": "TOPIC_NOT_FOUND -> other, there other standby",
        "rebuild": "TOPIC_NOT_FOUND -> other, there other standby",
        "move away": "TOPIC_NOT_FOUND -> other, there other standby",
        "arrive": "MOVE_FAILED: topic T is being moved, opened again or deleted already -> other, there other standby",
        "list": "lists none -> other, there other standby",
        "get": "TOPIC_NOT_FOUND -> other, there other standby",
        "back up": "has none -> other, there other standby",
        "create partitions": "ok; the first: MOVE_FAILED: topic T: the sidecar at here does not have it, "
        "and this sidecar takes it again -> 2 partitions new, there other",
        "create a partition's name": "ok -> other + partition new, there other standby",
        "delete a partition's name": "TOPIC_NOT_FOUND -> other, there other standby",
        "set a policy": "TOPIC_NOT_FOUND -> other, there other standby",
        "drain": "ok; the first: MOVE_FAILED: the sidecar is shutting down -> none, there other",
    },
    "arrive: taken": {
        "create": "waits, TOPIC_EXISTS -> other, there other standby",
        "open a producer": "waits, ok -> other, there other standby",
        "delete": "waits, RECOVERING -> other, there other standby",
        "import a snapshot": "TOPIC_NOT_FOUND -> other, there other standby",
        "rebuild": "TOPIC_NOT_FOUND -> other, there other standby",
        "move away": "TOPIC_NOT_FOUND -> other, there other standby",
        "arrive": "RECOVERING -> other, there other standby",
        "list": "lists none -> other, there other standby",
        "get": "TOPIC_NOT_FOUND -> other, there other standby",
        "back up": "has none -> other, there other standby",
        "create partitions": "TOPIC_EXISTS -> other, there other standby",
        "create a partition's name": "ok -> other + partition new, there other standby",
        "delete a partition's name": "TOPIC_NOT_FOUND -> other, there other standby",
        "set a policy": "TOPIC_NOT_FOUND -> other, there other standby",
        "drain": "waits, ok -> other, there other standby",
    },
    "back up": {
        "create": "TOPIC_EXISTS; the first: has old -> old",
        "open a producer": "ok; the first: has old -> old",
        "delete": "ok; the first: has none -> none",
        "import a snapshot": "ok; the first: has old -> old",
        "rebuild": "ok; the first: has old -> old",
        # Neither sidecar may have it in a backup: it says that it was omitted.
        "move away": "ok; the first: has old left out -> old standby, there old",
        "arrive": "MOVE_FAILED: topic T exists already; the first: has old -> old, there other",
        "list": "lists old; the first: has old -> old",
        "get": "gets old; the first: has old -> old",
        "back up": "waits, has old; the first: has old -> old",
        "create partitions": "TOPIC_EXISTS; the first: has old -> old",
        "create a partition's name": "ok; the first: has old -> old + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND; the first: has old -> old",
        "set a policy": "ok; the first: has old -> old",
        "drain": "ok; the first: DRAINING -> old",
    },
    "create partitions": {
        "create": "TOPIC_EXISTS -> 2 partitions new",
        "open a producer": "TOPIC_IS_PARTITIONED -> 2 partitions new",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_IS_PARTITIONED -> 2 partitions new",
        "rebuild": "TOPIC_IS_PARTITIONED -> 2 partitions new",
        "move away": "TOPIC_IS_PARTITIONED -> 2 partitions new",
        "arrive": "MOVE_FAILED: the topic T is there already, with 2 partitions -> 2 partitions new, there other",
        "list": "lists none -> 2 partitions new",
        "get": "TOPIC_NOT_FOUND -> 2 partitions new",
        "back up": "has none -> 2 partitions new",
        "create partitions": "waits, TOPIC_EXISTS -> 2 partitions new",
        "create a partition's name": "INVALID_TOPIC_NAME -> 2 partitions new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> 2 partitions new",
        "set a policy": "TOPIC_IS_PARTITIONED -> 2 partitions new",
        "drain": "waits, ok -> 2 partitions new",
    },
    "delete partitions": {
        "create": "TOPIC_EXISTS -> none",
        "open a producer": "TOPIC_IS_PARTITIONED -> none",
        "delete": "waits, ok -> none",
        "import a snapshot": "TOPIC_IS_PARTITIONED -> none",
        "rebuild": "TOPIC_IS_PARTITIONED -> none",
        "move away": "TOPIC_IS_PARTITIONED -> none",
        "arrive": "MOVE_FAILED: the topic T is there already, with 2 partitions -> none, there other",
        "list": "lists 2 partitions old -> none",
        "get": "gets 2 partitions -> none",
        "back up": "has old -> none",
        "create partitions": "waits, ok -> 2 partitions new",
        "create a partition's name": "TOPIC_EXISTS -> none",
        "delete a partition's name": "INVALID_REQUEST -> none",
        "set a policy": "TOPIC_IS_PARTITIONED -> none",
        "drain": "waits, ok -> none",
    },
    "create a partition's name": {
        "create": "ok -> new + partition new",
        "open a producer": "ok -> new + partition new",
        "delete": "TOPIC_NOT_FOUND -> partition new",
        "import a snapshot": "TOPIC_NOT_FOUND -> partition new",
        "rebuild": "TOPIC_NOT_FOUND -> partition new",
        "move away": "TOPIC_NOT_FOUND -> partition new",
        "arrive": "ok -> other + partition new, there other standby",
        "list": "lists none -> partition new",
        "get": "TOPIC_NOT_FOUND -> partition new",
        "back up": "has none -> partition new",
        "create partitions": "TOPIC_EXISTS -> partition new",
        "create a partition's name": "waits, TOPIC_EXISTS -> partition new",
        "delete a partition's name": "waits, ok -> none",
        "set a policy": "TOPIC_NOT_FOUND -> partition new",
        "drain": "waits, ok -> partition new",
    },
    "delete a partition's name": {
        "create": "ok -> new",
        "open a producer": "ok -> new",
        "delete": "TOPIC_NOT_FOUND -> none",
        "import a snapshot": "TOPIC_NOT_FOUND -> none",
        "rebuild": "TOPIC_NOT_FOUND -> none",
        "move away": "TOPIC_NOT_FOUND -> none",
        "arrive": "ok -> other, there other standby",
        "list": "lists partition old -> none",
        "get": "TOPIC_NOT_FOUND -> none",
        "back up": "has old -> none",
        "create partitions": "TOPIC_EXISTS -> none",
        "create a partition's name": "waits, ok -> partition new",
        "delete a partition's name": "waits, ok -> none",
        "set a policy": "TOPIC_NOT_FOUND -> none",
        "drain": "waits, ok -> none",
    },
    "set a policy": {
        "create": "TOPIC_EXISTS -> old",
        "open a producer": "waits, ok -> old",
        "delete": "ok; the first: OUTCOME_UNKNOWN -> none",
        "import a snapshot": "ok; the first: OUTCOME_UNKNOWN -> old",
        "rebuild": "ok; the first: OUTCOME_UNKNOWN -> old",
        "move away": "waits, ok -> old standby, there old",
        "arrive": "MOVE_FAILED: topic T exists already -> old, there other",
        "list": "lists old -> old",
        "get": "gets old -> old",
        "back up": "has old -> old",
        "create partitions": "TOPIC_EXISTS -> old",
        "create a partition's name": "ok -> old + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND -> old",
        "set a policy": "waits, ok -> old",
        "drain": "waits, ok -> old",
    },
    "drain": {
        "create": "DRAINING -> old",
        "open a producer": "DRAINING -> old",
        "delete": "DRAINING -> old",
        "import a snapshot": "DRAINING -> old",
        "rebuild": "DRAINING -> old",
        "move away": "DRAINING -> old",
        "arrive": "MOVE_FAILED: the sidecar is shutting down -> old, there other",
        "list": "lists old draining -> old",
        "get": "gets old draining -> old",
        "back up": "DRAINING -> old",
        "create partitions": "DRAINING -> old",
        "create a partition's name": "DRAINING -> old",
        "delete a partition's name": "DRAINING -> old",
        "set a policy": "DRAINING -> old",
    },
    "open after a start": {
        "create": "waits, TOPIC_EXISTS; the first: gets old -> old",
        "open a producer": "waits, ok; the first: gets old -> old",
        "delete": "waits, ok; the first: gets old -> none",
        "import a snapshot": "waits, ok; the first: gets old recovering -> old",
        "rebuild": "waits, ok; the first: gets old recovering -> old",
        "move away": "waits, ok; the first: gets old -> old standby, there old",
        "arrive": "MOVE_FAILED: topic T exists already; the first: gets old -> old, there other",
        "list": "lists old recovering; the first: gets old -> old",
        "get": "waits, gets old; the first: gets old -> old",
        "back up": "waits, has old; the first: gets old -> old",
        "create partitions": "TOPIC_EXISTS; the first: gets old -> old",
        "create a partition's name": "ok; the first: gets old -> old + partition new",
        "delete a partition's name": "TOPIC_NOT_FOUND; the first: gets old -> old",
        "set a policy": "waits, ok; the first: gets old -> old",
        "drain": "waits, ok; the first: gets old recovering -> old recovering",
    },
}
