"""The relay's steps under any order of commits, aborts, open transactions, restores, two relays, and kills at any step.

Every row that was committed is in the topic once. Costs: no process, about 2 seconds.
"""

from collections import Counter
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.errors import FencedError, SeqdedupeError
from seqdedupe.services.outbox.postgres_outbox import MOST_NOTES, Horizon
from tests.services.outbox.world import Relay, World

ACTIONS = (
    "begin",
    "write",
    "insert",
    "insert",
    "commit",
    "abort",
    "step",
    "step",
    "arrive",
    "delete",
    "kill",
    "other",
    "run",
)
DISASTERS = ("backup", "restore", "dump")
MOST_STEPS = 400

Script = list[tuple[str, int]]


def scripts(*more: str) -> st.SearchStrategy[Script]:
    """What happens, one after the other; the number says to which."""
    return st.lists(st.tuples(st.sampled_from([*ACTIONS, *more]), st.integers(0, 5)), min_size=1, max_size=60)


class Play:
    """Plays a script, and then lets everything end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.relays = [Relay(world), Relay(world)]
        self.one = 0

    def play(self, script: Script) -> None:
        for action, number in script:
            self._do(action, number)
        for transaction in list(self.world.database.open):
            self.world.database.commit(transaction)
        self.relays = [Relay(self.world)]
        self.one = 0
        self._run()
        assert self.relays[0].is_over, "it never ends"

    def _do(self, action: str, number: int) -> None:
        world, database = self.world, self.world.database
        open_ones = database.open
        transaction = open_ones[number % len(open_ones)] if open_ones else None
        match action:
            case "begin":
                database.begin()
            case "write" if transaction:
                database.write(transaction)
            case "insert" if transaction:
                world.insert(transaction)
            case "commit" if transaction:
                database.commit(transaction)
            case "abort" if transaction:
                database.end(transaction)
            case "step":
                for _ in range(number + 1):
                    self._relays(lambda relay: relay.step())
            case "arrive":
                self._relays(lambda relay: relay.arrive(number) if relay.flight else None)
            case "delete":
                self._relays(lambda relay: relay.delete())
            case "kill":
                for nth in range(number):  # the wire had some of it
                    self._relays(lambda relay: relay.arrive(number + nth) if relay.flight else None)  # noqa: B023
                self.relays[self.one] = Relay(world)
            case "other":
                self.one = 1 - self.one
            case "run":
                self._run()
            case "backup":
                world.take_backup()
            case "restore":
                world.restore()
            case "dump":
                world.restore_dump(has_sequence=number % 2 == 1)
            case "trim":
                world.topic.trimmed = min(world.topic.trimmed + number, len(world.topic.log))

    def _run(self) -> None:
        for _ in range(MOST_STEPS):
            self._relays(lambda relay: relay.step())
            if self.relays[self.one].is_over:
                return
            self._relays(lambda relay: relay.arrive() if relay.flight else None)

    def _relays(self, work: object) -> None:
        relay = self.relays[self.one]
        if relay.is_over:
            self.relays[self.one] = relay = Relay(self.world)
        try:
            work(relay)  # type: ignore[operator]
        except SeqdedupeError:
            # Fenced, or without its database: what it has in flight may arrive if nobody has fenced it.
            with suppress(SeqdedupeError):
                while relay.flight:
                    relay.arrive()
            self.relays[self.one] = Relay(self.world)


def amiss(world: World) -> str:
    """What is wrong with what the topic holds at the end; nothing, if nothing is."""
    found = Counter(message.id for message in world.topic.log)
    doubled = [one for one, times in found.items() if times > 1]
    aside = {row.id for row in world.database.aside}
    lost = world.database.committed - found.keys() - aside
    if doubled or lost:
        return f"doubled {doubled}, lost {sorted(lost)}"
    return f"left {world.database.rows}" if world.database.rows else ""


def ends_badly(script: Script, world: World) -> str:
    try:
        Play(world).play(script)
    except AssertionError as e:
        return str(e)
    return amiss(world)


def is_amiss_without_disasters(script: Script, world: World) -> bool:
    """Then no token is ever replaced either, the log is in the order of the numbers, and each aggregate's rows are in
    the order of its versions."""
    said = ends_badly(script, world)
    numbers = [message.number for message in world.topic.log]
    return bool(said) or world.tokens > 0 or numbers != sorted(numbers) or world.is_out_of_order()


@given(scripts())
def test_every_committed_row_is_published_once_and_in_order(script: Script) -> None:
    assert not is_amiss_without_disasters(script, World())


@given(scripts(*DISASTERS))
def test_whatever_is_restored_every_row_is_published_once(script: Script) -> None:
    assert not ends_badly(script, World())


@given(scripts(*DISASTERS, "trim"))
def test_what_retention_has_removed_is_set_aside_rather_than_guessed(script: Script) -> None:
    assert not ends_badly(script, World())


@given(scripts())
def test_a_partitioned_topic_has_each_row_once_and_each_partition_in_order(script: Script) -> None:
    """And no token is replaced because one partition has what comes after what another one lacks."""
    world = World(partitions=3)
    assert not ends_badly(script, world)
    assert world.tokens == 0
    assert not world.is_out_of_order()


@given(scripts("backup", "restore"))
def test_whatever_is_restored_a_partitioned_topic_has_each_row_once_and_in_order(script: Script) -> None:
    world = World(partitions=3)
    assert not ends_badly(script, world)
    assert not world.is_out_of_order()


@given(scripts(*DISASTERS, "trim"))
def test_whatever_happens_to_a_partitioned_topic_nothing_is_lost(script: Script) -> None:
    assert not ends_badly(script, World(partitions=3))


TWO_WRITERS: Script = [
    ("begin", 0), ("insert", 0), ("begin", 0), ("insert", 1), ("commit", 1), ("run", 0), ("commit", 0), ("run", 0),
]  # fmt: skip
"""The first to insert is the second to commit."""

RESTORED: Script = [
    ("backup", 0), ("begin", 0), ("insert", 0), ("commit", 0), ("run", 0),
    ("restore", 0), ("begin", 0), ("insert", 0), ("commit", 0),
]  # fmt: skip
"""Another row has the number of one that was published."""


_ONE = [("begin", 0), ("insert", 0), ("commit", 0)]
_NONE = [("begin", 0), ("insert", 0), ("abort", 0)]

RESTORED_PARTITIONS: Script = [
    ("backup", 0), *_ONE * 4, ("run", 0), ("restore", 0), *_NONE * 2, *_ONE, *_NONE * 2, *_ONE,
]  # fmt: skip
"""The first row of the new history is above what one partition has, and not above what its own one has."""


def test_what_one_partition_has_says_nothing_of_another_one() -> None:
    """The control arm goes by the lowest of all: then the later row of a key is published first."""
    for by_partition in (True, False):
        world = World(partitions=3, by_partition=by_partition)
        assert not ends_badly(RESTORED_PARTITIONS, world)
        assert world.is_out_of_order() is not by_partition


def test_two_writers() -> None:
    assert not is_amiss_without_disasters(TWO_WRITERS, World())


def test_a_relay_that_reads_beyond_open_transactions_is_caught() -> None:
    assert is_amiss_without_disasters(TWO_WRITERS, World(bounds=False))


def test_a_relay_that_goes_by_a_serial_number_loses_messages() -> None:
    """7 commits before 6, and a watermark swallows 6 for ever."""
    assert "lost ['id 1']" in ends_badly(TWO_WRITERS, World(bounds=False, compares=False))


EARLY_WRITER: Script = [
    ("begin", 0), ("write", 0), ("begin", 0), ("insert", 1), ("commit", 1), ("run", 0),
    *[("insert", 0)] * 3, ("commit", 0), ("run", 0),
]  # fmt: skip
"""The transaction that begins first changes an aggregate after another one has committed its change of it."""

PASSED_BY: Script = [
    ("begin", 0), ("insert", 0), ("begin", 0), ("insert", 1), ("step", 5), ("commit", 1), ("run", 0),
]  # fmt: skip
"""A relay looks at the sequence while two transactions have numbers, and the second one commits first."""

NUMBER_FIRST: Script = [
    ("begin", 0), ("insert", 0), ("begin", 0), ("insert", 1), ("commit", 1),
    ("step", 5), ("write", 0), ("run", 0),
]  # fmt: skip
"""A relay looks before the first transaction to insert has an ID."""

BETWEEN: Script = [
    ("step", 2), ("begin", 0), ("insert", 0), ("begin", 0), ("insert", 1), ("commit", 1), ("run", 0),
]  # fmt: skip
"""Transactions begin between a relay's two looks."""


@pytest.mark.parametrize(
    ("script", "amiss"),
    [
        (EARLY_WRITER, {"by_transaction": True}),
        (PASSED_BY, {"by_xmax": True}),
        (NUMBER_FIRST, {"asks_first": False}),
        (BETWEEN, {"numbers_first": False}),
    ],
)
def test_what_the_order_rests_on(script: Script, amiss: dict[str, bool]) -> None:
    """Each control arm takes one thing away: then rows of an aggregate are out of order, or a number is passed by."""
    assert not is_amiss_without_disasters(script, World())
    assert is_amiss_without_disasters(script, World(**amiss))


def test_what_is_noted_has_a_bound() -> None:
    """While one transaction holds everything: all that was noted can be read when it has ended."""
    horizon = Horizon()
    for number in range(1, 3 * MOST_NOTES):
        assert not horizon.note(number, 100 + number, oldest_running=100)
    assert len(horizon._notes) == MOST_NOTES
    assert not horizon.note(number, 100 + number, oldest_running=100)
    assert horizon.note(number, 100 + number, oldest_running=100 + number)
    assert (horizon.bound, horizon.is_at(number), len(horizon._notes)) == (number, True, 0)


@given(scripts())
def test_rows_that_an_older_version_numbered_are_published_once(script: Script) -> None:
    """Until its table has a sequence."""
    world = World(by_transaction=True)
    assert not ends_badly(script, world)
    assert world.tokens == 0


def test_a_relay_that_goes_by_numbers_loses_messages_after_a_restore() -> None:
    assert not ends_badly(RESTORED, World())
    assert "lost ['id 2']" in ends_badly(RESTORED, World(compares=False))


@pytest.mark.parametrize("fences", [True, False])
def test_a_relay_of_a_lost_history_is_fenced(fences: bool) -> None:
    """It has a token that the database does not know any more, and a batch under way under it."""
    world = World(fences=fences)
    play = Play(world)
    for action, number in RESTORED:
        play._do(action, number)
    world.take_backup()
    lost = play.relays[0] = Relay(world)
    for _ in range(MOST_STEPS):
        if lost.flight:
            break
        lost.step()
    assert world.tokens == 1
    world.restore()
    survivor = Relay(world)
    for _ in range(MOST_STEPS):
        if not survivor.is_over:
            survivor.step()
    assert survivor.is_over
    with pytest.raises(FencedError) if fences else nullcontext():
        lost.arrive()
    assert amiss(world) == ("" if fences else "doubled ['id 2'], lost []")
