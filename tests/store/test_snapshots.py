"""Deltas of a topic, written and loaded."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rocksdict import WriteBatch

from seqdedupe.errors import DamagedError, SeqdedupeError
from seqdedupe.message_id import MessageId
from seqdedupe.store.db import Store
from seqdedupe.store.parts import DELTA, NAMES, StoredDelta, StoredPosition, encode_names, part_key, seal
from seqdedupe.store.snapshots import Delta, Snapshots
from tests.store.model import INCARNATION, State, delta, load, save, state_of

NO, ONE, TWO = (np.zeros(rows, np.int64) for rows in range(3))


def put(store: Store, part: bytes, number: int, body: bytes, incarnation: int = INCARNATION) -> int:
    key = part_key(incarnation, part, number)
    batch = WriteBatch(raw_mode=True)
    batch.put(key, seal(key, body))
    return store.write(batch)


def remove(store: Store, part: bytes, number: int) -> int:
    batch = WriteBatch(raw_mode=True)
    batch.delete(part_key(INCARNATION, part, number))
    return store.write(batch)


def test_a_topic_without_snapshot_loads_as_none(store: Store) -> None:
    assert Snapshots(store, INCARNATION).load() is None


async def test_the_first_snapshot_may_say_start(folder: Path) -> None:
    store = Store.open(folder)
    start = Delta(3, 0, None, 0, [], np.zeros(0, np.int32), NO, NO, NO)
    await save(store, Snapshots(store, INCARNATION), start)
    loaded = Snapshots(store, INCARNATION).load()
    assert loaded is not None
    assert (loaded.term, loaded.next_index, loaded.message_id, loaded.names.some()) == (3, 0, None, [])
    store.close()
    assert load(folder) == State(term=3)


async def test_deltas_add_up(folder: Path) -> None:
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    longest = b"\xc3\xbc" * 127
    deltas = [
        delta(4, {0: (2**63 - 1, 2**62), 1: (0, 0)}, names=[b"a", b"b"]),
        delta(4, {}, first_name=2, names=[longest]),
        delta(9, {1: (8, 3), 2: (-1, 9)}, first_name=3, term=2),
    ]
    model = State()
    for change in deltas:
        await save(store, snapshots, change)
        model = model.after(change)
        assert state_of(Snapshots(store, INCARNATION).load()) == model
    store.close()
    assert load(folder) == model
    assert model.message_id == MessageId(INCARNATION, 8)
    assert model.persisted == {b"a": 2**63 - 1, b"b": 8, longest: -1}
    assert model.epochs == {b"a": 2**62, b"b": 3, longest: 9}


async def test_numbers_that_fall_stay_down(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset sets a producer to a lower number: in deltas, in pages, and in a delta after the pages."""
    monkeypatch.setattr("seqdedupe.store.snapshots.MAX_DELTAS", 1)
    snapshots = Snapshots(store, INCARNATION)
    for next_index, persisted in enumerate((7, 2**63 - 1, 3, -1, 5, 4), 1):
        change = delta(next_index, {0: (persisted, next_index)}, names=[b"a"] if next_index == 1 else [])
        await save(store, snapshots, replace(change, first_name=min(next_index - 1, 1)))
        for reader in (snapshots, Snapshots(store, INCARNATION)):
            state = state_of(reader.load())
            assert (state.persisted, state.epochs) == ({b"a": persisted}, {b"a": next_index})
        assert await snapshots.compact_if_due() == (next_index % 2 == 0)


async def test_more_names_than_a_record_holds(store: Store, small_pages: None) -> None:
    snapshots = Snapshots(store, INCARNATION)
    names = [b"%d" % number for number in range(11)]
    change = delta(1, {number: (number, 1) for number in range(11)}, names=names)
    await save(store, snapshots, change)
    assert state_of(snapshots.load()) == State().after(change)


async def test_names_are_said_again_without_a_flush_between(store: Store) -> None:
    """A caller that was cancelled while it waited for the flush begins again where it knows to be durable."""
    snapshots = Snapshots(store, INCARNATION)
    snapshots.write_delta(delta(1, {0: (1, 1)}, names=[b"a"]))
    retry = delta(2, {0: (1, 1), 1: (2, 1)}, names=[b"a", b"b"])
    await save(store, snapshots, retry)
    assert state_of(snapshots.load()) == State().after(retry)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(delta(4, {}, first_name=1), id="index falls"),
        pytest.param(delta(5, {}, first_name=1, term=1), id="term falls"),
        pytest.param(delta(5, {}, first_name=2, term=2), id="names left out"),
        pytest.param(delta(5, {}, first_name=0, term=2), id="producers fall"),
        pytest.param(delta(5, {1: (1, 1)}, first_name=1, term=2), id="unknown producer"),
        pytest.param(delta(5, {-1: (1, 1)}, first_name=1, term=2), id="negative producer"),
        pytest.param(
            Delta(2, 5, None, 1, [], np.array([0]), ONE, ONE, TWO),
            id="columns of different lengths",
        ),
        pytest.param(
            Delta(2, 5, None, 1, [], np.array([0, 0], np.int32), TWO, TWO, TWO),
            id="a producer twice",
        ),
    ],
)
async def test_a_delta_that_cannot_follow_is_refused_and_changes_nothing(store: Store, wrong: Delta) -> None:
    snapshots = Snapshots(store, INCARNATION)
    first = delta(5, {0: (1, 1)}, names=[b"a"], term=2)
    await save(store, snapshots, first)
    with pytest.raises(SeqdedupeError):
        snapshots.write_delta(wrong)
    assert state_of(snapshots.load()) == State().after(first)
    good = delta(5, {0: (2, 1)}, first_name=1, term=2)
    await save(store, snapshots, good)
    assert state_of(Snapshots(store, INCARNATION).load()) == State().after(first).after(good)


def stored(next_index: int, producers: int, slots: list[int], *, term: int = 1) -> bytes:
    column = np.zeros(len(slots), np.int64)
    position = StoredPosition(term, next_index, producers, None)
    return StoredDelta(position, np.array(slots, np.int32), column, column, column).encode()


# Three deltas with two names each; then one thing is made wrong.
DAMAGE = {
    "a delta is gone": lambda store: remove(store, DELTA, 2),
    "the first delta is gone": lambda store: remove(store, DELTA, 1),
    "the last delta is gone, its names are not": lambda store: remove(store, DELTA, 3),
    "names are gone": lambda store: remove(store, NAMES, 2),
    "the last names are gone": lambda store: remove(store, NAMES, 4),
    "names nobody knows": lambda store: put(store, NAMES, 6, encode_names([b"x"])),
    "names twice": lambda store: put(store, NAMES, 3, encode_names([b"x"])),
    "a name of another producer": lambda store: put(store, NAMES, 2, encode_names([b"0", b"3"])),
    "a name twice in a record": lambda store: put(store, NAMES, 4, encode_names([b"4", b"4"])),
    "a record of no names": lambda store: put(store, NAMES, 6, encode_names([])),
    "name offsets that fall": lambda store: put(
        store, NAMES, 4, b"\2\0\0\0" + b"\0\0\0\0" + b"\3\0\0\0" + b"\2\0\0\0" + b"xy"
    ),
    "an index that falls": lambda store: put(store, DELTA, 4, stored(2, 6, [])),
    "a term that falls": lambda store: put(store, DELTA, 4, stored(9, 6, [], term=0)),
    "producers that fall": lambda store: put(store, DELTA, 4, stored(9, 5, [])),
    "more producers than names": lambda store: put(store, DELTA, 4, stored(9, 7, [])),
    "a producer number out of range": lambda store: put(store, DELTA, 4, stored(9, 6, [6])),
    "producer numbers that do not rise": lambda store: put(store, DELTA, 4, stored(9, 6, [2, 2])),
    "a delta that is too short": lambda store: put(store, DELTA, 4, stored(9, 6, [])[:-1]),
    "a delta that is too long": lambda store: put(store, DELTA, 4, stored(9, 6, [1]) + b"\0"),
    "the lowest delta number is 0": lambda store: put(store, DELTA, 0, stored(0, 0, [])),
}


@pytest.mark.parametrize("damage", [None, *DAMAGE])
async def test_damage_is_refused(store: Store, damage: str | None) -> None:
    snapshots = Snapshots(store, INCARNATION)
    model = State()
    for number in range(3):
        names = [b"%d" % (2 * number), b"%d" % (2 * number + 1)]
        change = delta(number + 1, {2 * number: (number, 1)}, first_name=2 * number, names=names)
        await save(store, snapshots, change)
        model = model.after(change)
    if damage is None:
        assert state_of(Snapshots(store, INCARNATION).load()) == model
        return
    DAMAGE[damage](store)
    with pytest.raises(DamagedError) as raised:
        Snapshots(store, INCARNATION).load()
    assert raised.value.reason == "STORE_DAMAGED"


async def test_topics_do_not_see_each_others_snapshots(store: Store) -> None:
    changes = {
        incarnation: delta(1, {0: (incarnation % 7, 1)}, names=[b"%d" % incarnation])
        for incarnation in (1, 2, 255, 256, 2**62)
    }
    for incarnation, change in changes.items():
        await save(store, Snapshots(store, incarnation), change)
    for incarnation, change in changes.items():
        assert state_of(Snapshots(store, incarnation).load()) == State().after(change)


@pytest.mark.parametrize("part", [DELTA, NAMES])
async def test_a_record_of_another_topic_is_refused(store: Store, part: bytes) -> None:
    """As if a record had been copied from one key to another."""
    await save(store, Snapshots(store, 1), delta(1, {0: (5, 1)}, names=[b"a"]))
    await save(store, Snapshots(store, 2), delta(1, {0: (6, 1)}, names=[b"b"]))
    number = 1 if part == DELTA else 0
    key, other = part_key(1, part, number), part_key(2, part, number)
    (value,) = [value for _, value in store.scan(other, other + b"\0")]
    batch = WriteBatch(raw_mode=True)
    batch.put(key, value)
    store.write(batch)
    with pytest.raises(DamagedError):
        Snapshots(store, 1).load()


ANEW = delta(9, {0: (5, 1), 2: (7, 3), 10: (8, 4)}, names=[b"new%d" % number for number in range(11)])
"""For the others nothing is known."""


async def test_other_numbers_take_the_place_of_all_that_is_stored(
    folder: Path, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    old = delta(5, {number: (number, 1) for number in range(14)}, names=[b"old%d" % number for number in range(14)])
    await save(store, snapshots, old)
    await store.flush(await snapshots.write_anew(ANEW))
    # It is what a compaction leaves.
    monkeypatch.setattr("seqdedupe.store.snapshots.MAX_DELTAS", 0)
    assert not await snapshots.compact_if_due()
    assert state_of(Snapshots(store, INCARNATION).load()) == State().after(ANEW)
    model = State().after(ANEW)
    for next_index in (9, 12):
        change = delta(next_index, {1: (3, 2), 11: (4, 1)}, first_name=11, names=[b"newer"])
        await save(store, snapshots, change)
        model = model.after(change)
        assert state_of(Snapshots(store, INCARNATION).load()) == model
    assert await snapshots.compact_if_due()
    store.close()
    assert load(folder) == model


async def test_a_topic_without_producers_takes_the_place_of_all_that_is_stored(store: Store) -> None:
    snapshots = Snapshots(store, INCARNATION)
    await save(store, snapshots, delta(5, {0: (1, 1)}, names=[b"old"]))
    await store.flush(await snapshots.write_anew(delta(9, {})))
    assert state_of(Snapshots(store, INCARNATION).load()) == State().after(delta(9, {}))


async def test_what_takes_the_place_of_all_is_made_off_the_event_loop(
    store: Store, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(*arguments: object) -> bytes:
        threads.append(threading.get_ident())
        return seal(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("seqdedupe.store.snapshots.seal", noted)
    snapshots = Snapshots(store, INCARNATION)
    await store.flush(await snapshots.write_anew(ANEW))
    loaded = snapshots.load()
    assert loaded is not None
    await store.flush(await snapshots.write_anew(loaded.whole()))
    assert state_of(snapshots.load()) == State().after(ANEW)
    assert len(threads) > 8
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("was_known", [True, False])
async def test_what_takes_the_place_of_all_does_not_care_what_is_there(store: Store, was_known: bool) -> None:
    """It may be damaged, or go further; and what was written afterwards follows on it."""
    snapshots = Snapshots(store, INCARNATION)
    await save(store, snapshots, delta(25, {0: (1, 1)}, names=[b"old"], term=4))
    put(store, DELTA, 7, b"no delta")
    with pytest.raises(DamagedError):
        Snapshots(store, INCARNATION).load()
    snapshots = snapshots if was_known else Snapshots(store, INCARNATION)
    await store.flush(await snapshots.write_anew(ANEW))
    after = delta(12, {1: (3, 2)}, first_name=11)
    await save(store, snapshots, after)
    assert state_of(Snapshots(store, INCARNATION).load()) == State().after(ANEW).after(after)
    await store.flush(snapshots.remove())
    assert Snapshots(store, INCARNATION).load() is None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(replace(ANEW, first_name=1), id="names left out"),
        pytest.param(replace(ANEW, names=[b"new"]), id="unknown producer"),
    ],
)
async def test_what_cannot_take_the_place_of_all_is_refused(store: Store, wrong: Delta) -> None:
    snapshots = Snapshots(store, INCARNATION)
    old = delta(5, {0: (1, 1)}, names=[b"old"])
    await save(store, snapshots, old)
    with pytest.raises(SeqdedupeError, match="INTERNAL"):
        await snapshots.write_anew(wrong)
    assert state_of(snapshots.load()) == State().after(old)
