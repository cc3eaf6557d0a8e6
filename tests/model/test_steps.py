"""The model as a program has the same steps as the Promela model: both explore all states within bounds, and take each
labelled step equally often."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from model.check import FOLDER, MAX_DEPTH, SCENES
from model.steps import Append, Entry, Kind, Mode, Protocol
from tests import tiers

OPENS = 4
LETTERS = "AB"
NEW, OPENING, PUBLISHING, ENDED = range(4)
DEFAULTS = {
    "NAMES": 1,
    "SESSIONS": 1,
    "MESSAGES": 2,
    "SIDECARS": 1,
    "TERMS": 3,
    "LOG": 9,
    "FLIGHT": 2,
    "CRASHES": 1,
    "LOSSES": 1,
    "RETENTION": 0,
    "FORGETTING": 0,
}


class Session(NamedTuple):
    """A session of a producer, see producer.pml."""

    mode: int = NEW
    at: int = 0
    epoch: int = 0
    base: int = 0


class World(NamedTuple):
    """A state of everything: the protocol's and its environment's."""

    protocol: Protocol
    sessions: tuple[Session, ...]
    crashes: int = 0
    losses: int = 0
    statements: int = 0
    store_lost: bool = False

    def key(self) -> object:
        one = self.protocol
        sides = tuple(
            (
                *map(tuple, (side.pushed, side.persisted, side.epoch, side.durable)),
                *(side.store, side.mode, side.term, side.opens, side.confirmed, side.index),
                *(side.flight, side.is_broken, side.receipts),
            )
            for side in one.sides
        )
        observed = (tuple(one.held), tuple(one.told), tuple(one.answered), tuple(one.forgotten))
        log = (tuple(one.log), one.first, one.messages, one.owner_term, one.owner)
        return (log, sides, observed, *self[1:])


Step = tuple[str, World]


class Explorer:
    """All states of producer.pml within bounds, by the steps of `Protocol`."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self.bounds = {**DEFAULTS, **bounds}

    def name_of(self, session: int) -> int:
        return session % self.bounds["NAMES"]

    def explore(self) -> tuple[int, Counter[str]]:
        """Return the number of states, and how often each step was taken."""
        protocol = Protocol(self.bounds["NAMES"], self.bounds["SIDECARS"])
        protocol.mark(0, 1)
        protocol.read(0)
        protocol.open(0, 0, OPENS)
        protocol.land(0)
        protocol.confirm(0)
        protocol.opened(0, 0, OPENS)
        sessions = (Session(PUBLISHING, 0, OPENS), *[Session()] * (self.bounds["SESSIONS"] - 1))
        begin = World(protocol, sessions)
        seen, waiting, taken = {begin.key()}, [begin], Counter[str]()
        while waiting:
            for label, world in self.steps(waiting.pop()):
                taken[label] += 1
                if (key := world.key()) not in seen:
                    seen.add(key)
                    waiting.append(world)
        return len(seen), taken

    def steps(self, world: World) -> Iterator[Step]:
        for s in range(self.bounds["SESSIONS"]):
            yield from self._session(world, s)
        for k in range(self.bounds["SIDECARS"]):
            yield from self._writer(world, k)
            yield from self._owner(world, k)
            if self.bounds["RETENTION"]:
                yield from self._retention(world, k)

    def _session(self, world: World, s: int) -> Iterator[Step]:
        session, name = world.sessions[s], self.name_of(s)
        is_next = s < self.bounds["NAMES"] or world.sessions[s - self.bounds["NAMES"]].mode != NEW

        def after(protocol: Protocol, new: Session) -> World:
            return world._replace(protocol=protocol, sessions=(*world.sessions[:s], new, *world.sessions[s + 1 :]))

        for k, side in enumerate(world.protocol.sides):
            has_room = len(side.flight) < self.bounds["FLIGHT"]
            if session.mode == NEW and is_next and side.mode is Mode.SERVING and side.opens <= OPENS - 2 and has_room:
                epoch = side.term * OPENS + side.opens
                one = world.protocol.copy()
                one.open(k, name, epoch)
                yield f"{LETTERS[k]}.open(s{s + 1},epoch{epoch})", after(one, Session(OPENING, k, epoch))
            if session.mode >= PUBLISHING and side.mode is Mode.SERVING:
                for i in range(session.base + 1, self.bounds["MESSAGES"] + 1):
                    one = world.protocol.copy()
                    verdict = one.judge(k, name, session.epoch, i, i - 1)
                    if verdict in ("FENCED", "PREDECESSOR_MISSING"):
                        yield f"{LETTERS[k]}.refuse({i},s{s + 1},{verdict})", world._replace(protocol=one)
                    elif verdict != "admit":
                        yield f"{LETTERS[k]}.answer({i},s{s + 1},{verdict})", world._replace(protocol=one)
                    elif has_room:
                        yield f"{LETTERS[k]}.admit({i},s{s + 1})", world._replace(protocol=one)
        if session.mode == OPENING:
            k, side = session.at, world.protocol.sides[session.at]
            is_there = side.mode is Mode.SERVING and side.term == session.epoch // OPENS
            if not is_there:
                yield "", after(world.protocol, Session())
            elif side.durable[name] >= session.epoch:
                one = world.protocol.copy()
                base = one.opened(k, name, session.epoch)
                yield f"{LETTERS[k]}.opened(s{s + 1},{base})", after(one, session._replace(mode=PUBLISHING, base=base))
        has_all = world.protocol.told[name] == self.bounds["MESSAGES"]
        if self.bounds["FORGETTING"] and session.mode == PUBLISHING and has_all:
            yield f"end(s{s + 1})", after(world.protocol, session._replace(mode=ENDED))

    def _writer(self, world: World, k: int) -> Iterator[Step]:
        side, letter = world.protocol.sides[k], LETTERS[k]
        if side.flight and len(world.protocol.log) < self.bounds["LOG"]:
            one = world.protocol.copy()
            entry = one.land(k)
            yield f"{letter}.land({_shown(entry)}){':void' * entry.is_void}", world._replace(protocol=one)
        if side.flight and world.losses < self.bounds["LOSSES"]:
            one = world.protocol.copy()
            one.lose(k)
            yield f"{letter}.lose({_shown(side.flight[0])})", world._replace(protocol=one, losses=world.losses + 1)
        if side.mode is Mode.SERVING and side.receipts:
            one = world.protocol.copy()
            confirmed = one.confirm(k)
            label = "stepBack" if confirmed is None else f"confirm({_shown(confirmed)})"
            yield f"{letter}.{label}", world._replace(protocol=one)

    def _owner(self, world: World, k: int) -> Iterator[Step]:
        side, letter = world.protocol.sides[k], LETTERS[k]

        def stepped(step: Callable[[Protocol], object]) -> World:
            one = world.protocol.copy()
            step(one)
            return world._replace(protocol=one)

        may_mark = side.term < self.bounds["TERMS"]
        if side.mode is Mode.STANDBY and may_mark and len(world.protocol.log) < self.bounds["LOG"]:
            after = stepped(lambda one: one.mark(k, side.term + 1))
            is_void = after.protocol.log[-1].is_void  # type: ignore[union-attr]
            yield f"{letter}.mark({side.term + 1}){':void' * is_void}", after
        if side.mode is Mode.READING:
            after = stepped(lambda one: one.read(k))
            serves = after.protocol.sides[k].mode is Mode.SERVING
            yield f"{letter}.{f'serve({after.protocol.sides[k].persisted[0]})' if serves else 'outbid'}", after
        if side.mode is Mode.SERVING and side.is_uncertain and may_mark:
            yield f"{letter}.settle", stepped(lambda one: one.settle(k))
        if side.mode is Mode.SERVING and side.store.place < side.confirmed:
            after = stepped(lambda one: setattr(one.sides[k], "store", one.snapshot(k)))
            yield f"{letter}.store({side.persisted[0]},place{side.confirmed})", after
        is_idle = {world.sessions[0].mode, world.sessions[-1].mode} == {ENDED}
        is_known = side.mode is Mode.SERVING and side.durable[0] > 0 and not side.is_in_flight(0)
        if self.bounds["FORGETTING"] and is_known and is_idle and len(side.flight) < self.bounds["FLIGHT"]:
            yield f"{letter}.forget", stepped(lambda one: one.forget(k, 0))
        if world.crashes < self.bounds["CRASHES"]:
            yield f"{letter}.kill", stepped(lambda one: one.kill(k))._replace(crashes=world.crashes + 1)

    def _retention(self, world: World, k: int) -> Iterator[Step]:
        side, letter, statements = world.protocol.sides[k], LETTERS[k], world.statements
        has_room = len(side.flight) < self.bounds["FLIGHT"]
        if side.mode is Mode.SERVING and has_room and statements < 2 and side.durable[0] > 0:
            one = world.protocol.copy()
            one.state(k, 0)
            yield f"{letter}.state({side.persisted[0]})", world._replace(protocol=one, statements=statements + 1)
        place = side.store.place
        if side.mode is Mode.SERVING and place > world.protocol.first and world.protocol.is_stated(k, place, 0):
            one = world.protocol.copy()
            one.drop(k, place)
            yield f"{letter}.drop(place{place})", world._replace(protocol=one)
        if not world.store_lost:
            one = world.protocol.copy()
            one.lose_store(k)
            yield f"{letter}.loseStore", world._replace(protocol=one, store_lost=True)


def _shown(one: Entry | Append) -> str:
    return f"{one.kind.name},{one.epoch if one.kind is Kind.SESSION else one.id}"


def spins(scene: str, bounds: Mapping[str, int], folder: Path) -> tuple[int, Counter[str]]:
    """The same, by Spin's search. It prints the label of each step that it takes."""
    tiers.SPIN.check()

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout

    for file in FOLDER.glob("*.pml"):
        # Spin's search prints numbers only.
        (folder / file.name).write_text(file.read_text().replace("(%e,", "(%d,"))
    call("spin", *[f"-D{name}={value}" for name, value in bounds.items()], "-a", "producer.pml")
    call("gcc", "-O1", "-w", "-DSAFETY", "-DNOREDUCE", "-DPRINTF", "-o", "pan", "pan.c")
    report = call("./pan", f"-m{MAX_DEPTH}", "-E")
    states = re.search(r"^ *(\d+) states, stored", report, re.MULTILINE)
    assert states is not None, report[-2000:]
    assert "errors: 0" in report

    def named(line: str) -> str:
        return re.sub(r"(land|lose|confirm)\((\d)", lambda found: f"{found[1]}({SPINS_KINDS[int(found[2])].name}", line)

    steps = Counter(map(named, re.findall(r"^(?:[AB]\.|end\()\S+$", report, re.MULTILINE)))
    # Two states and the first marker are from before the first step.
    return int(states[1]) - 1, steps - Counter(["A.mark(1)"])


SPINS_KINDS = (Kind.BARE, Kind.FORGET, Kind.STATEMENT, Kind.SESSION, Kind.MARKER, Kind.MESSAGE)

SMALL: dict[str, dict[str, int]] = {
    "two owners": {"LOG": 5},
    "pipelining": {"LOG": 6},
    "forgetting": {"LOG": 7},
    "two sessions": {"LOG": 5},
    "two names": {"LOG": 6},
    "retention": {"LOG": 6},
}


@pytest.mark.parametrize("scene", SMALL)
def test_the_program_takes_the_steps_of_the_model(scene: str, tmp_path: Path) -> None:
    compare(scene, SMALL[scene], tmp_path)


@pytest.mark.parametrize("scene", SMALL)
def test_it_does_so_within_the_bounds_of_the_page(scene: str, tmp_path: Path) -> None:
    compare(scene, {}, tmp_path)


def compare(scene: str, smaller: Mapping[str, int], tmp_path: Path) -> None:
    [of_scene] = [one for one in SCENES if one.name == scene]
    bounds = {**of_scene.small, **smaller}
    expected_states, expected = spins(scene, bounds, tmp_path)
    states, taken = Explorer(bounds).explore()
    del taken[""]
    assert taken == expected
    assert states == expected_states
