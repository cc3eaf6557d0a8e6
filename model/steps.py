"""The steps of producer.pml as a program: what the model does in a state, for a given step.

`trace.py` lets it follow what the code did. It has the same steps as producer.pml: tests/model/test_steps.py explores
all states of small bounds with both, and compares them. Without bounds it has any number of names, messages, terms and
entries. Readers, restored logs and liveness are only in the Promela model.

Names, sidecars and places are numbers from 0. Sequence IDs and epochs are numbers from 1; 0 is none.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class BrokenPromise(Exception):
    """A promise does not hold."""


class Impossible(Exception):
    """The model cannot take this step in this state."""


class Kind(IntEnum):
    """The kinds of entries, see producer.pml. A BARE entry changes no number of a producer: the Promela model has
    none."""

    MESSAGE = 1
    MARKER = 2
    SESSION = 3
    STATEMENT = 4
    FORGET = 5
    BARE = 6


class Mode(IntEnum):
    """What a sidecar does, see producer.pml."""

    STANDBY = 0
    READING = 1
    SERVING = 2


class Append(NamedTuple):
    """An append in flight."""

    term: int
    kind: Kind
    name: int = 0
    id: int = 0
    epoch: int = 0


class Entry(NamedTuple):
    """An entry of the log. `who` is the sidecar that appended it, `next_index` that of the next message."""

    kind: Kind
    term: int
    who: int
    is_void: bool
    name: int
    id: int
    epoch: int
    next_index: int


class Snapshot(NamedTuple):
    """What a store has. Columns by name."""

    place: int
    term: int
    next_index: int
    persisted: tuple[int, ...]
    durable: tuple[int, ...]


@dataclass(slots=True)
class Sidecar:
    """What a crash of a sidecar loses, its appends, and its store, which a crash leaves."""

    pushed: list[int]
    persisted: list[int]
    epoch: list[int]
    durable: list[int]
    store: Snapshot
    mode: Mode = Mode.STANDBY
    term: int = 0
    opens: int = 0
    confirmed: int = 0
    index: int = 0
    flight: tuple[Append, ...] = ()
    is_broken: bool = False
    receipts: int = 0

    def is_in_flight(self, name: int) -> bool:
        """Whether the log has not confirmed a message or a session of this name."""
        return self.pushed[name] > self.persisted[name] or self.epoch[name] > self.durable[name]

    @property
    def is_uncertain(self) -> bool:
        """Whether the sidecar may have to find out what the log holds."""
        return self.is_broken or any(map(self.is_in_flight, range(len(self.pushed))))

    def copy(self) -> "Sidecar":
        return Sidecar(
            self.pushed[:],
            self.persisted[:],
            self.epoch[:],
            self.durable[:],
            self.store,
            self.mode,
            self.term,
            self.opens,
            self.confirmed,
            self.index,
            self.flight,
            self.is_broken,
            self.receipts,
        )


class Protocol:
    """A state of the model, and its steps. Each step changes the state, or raises `Impossible` and changes nothing; it
    raises `BrokenPromise` if a promise does not hold after it.

    `held`, `told`, `answered` and `forgotten` only observe, see producer.pml.
    """

    def __init__(self, names: int, sidecars: int) -> None:
        nothing = (0,) * names
        self.log: list[Entry | None] = []
        """None: retention has dropped the entry."""
        self.first = 0
        self.messages = 0
        self.owner_term = self.owner = 0
        self.sides = [
            Sidecar([0] * names, [0] * names, [0] * names, [0] * names, Snapshot(0, 0, 0, nothing, nothing))
            for _ in range(sidecars)
        ]
        self.held: list[frozenset[int]] = [frozenset()] * names
        self.told = [0] * names
        self.answered = [0] * names
        self.forgotten = [False] * names

    def copy(self) -> "Protocol":
        """Return the same state, which changes on its own."""
        one = Protocol.__new__(Protocol)
        one.log = self.log[:]
        one.first, one.messages, one.owner_term, one.owner = self.first, self.messages, self.owner_term, self.owner
        one.sides = [side.copy() for side in self.sides]
        one.held, one.told, one.answered = self.held[:], self.told[:], self.answered[:]
        one.forgotten = self.forgotten[:]
        return one

    # -- The log.

    def land(self, k: int) -> Entry:
        """The oldest append of a sidecar lands, in time or late."""
        side = self.sides[k]
        if not side.flight:
            raise Impossible("nothing is in flight")
        append, *rest = side.flight
        side.flight = tuple(rest)
        if side.mode is Mode.SERVING and append.term == side.term:
            side.receipts += 1
        return self._land(k, append)

    def lose(self, k: int) -> None:
        """The oldest append is lost, and with it all later ones of this opening."""
        side = self.sides[k]
        if not side.flight:
            raise Impossible("nothing is in flight")
        side.flight = ()
        side.is_broken = side.mode is Mode.SERVING

    def _entry(self, at: int) -> Entry:
        entry = self.log[at]
        if entry is None:
            raise BrokenPromise("retention: the log begins after what is to be read")
        return entry

    def _land(self, k: int, append: Append) -> Entry:
        term, kind, name, sequence_id, epoch = append
        takes_over = kind is Kind.MARKER and term > self.owner_term
        if takes_over:
            self.owner_term, self.owner = term, k
        is_void = not takes_over and (kind is Kind.MARKER or (term, k) != (self.owner_term, self.owner))
        entry = Entry(kind, term, k, is_void, name, sequence_id, epoch, self.messages)
        self.log.append(entry)
        if is_void:
            return entry
        if kind is Kind.MESSAGE:
            if sequence_id in self.held[name]:
                raise BrokenPromise("at most once: the log holds a message twice")
            if epoch < self.answered[name]:
                raise BrokenPromise("fencing: an older session adds a message after a newer Open was answered")
            self.held[name] |= {sequence_id}
            self.messages += 1
        elif kind is Kind.FORGET:
            self.told[name], self.forgotten[name] = 0, True
        return entry

    def _append(self, k: int, kind: Kind, name: int = 0, sequence_id: int = 0, epoch: int = 0) -> None:
        side = self.sides[k]
        if not side.is_broken:
            side.flight += (Append(side.term, kind, name, sequence_id, epoch),)

    # -- What a sidecar does with what it reads, or gets receipts for.

    def _merge(self, k: int, entry: Entry) -> None:
        side, name = self.sides[k], entry.name
        if entry.kind is Kind.MESSAGE:
            if entry.next_index != side.index:
                raise BrokenPromise("positions: an index names two messages")
            side.index += 1
        if entry.kind in (Kind.MARKER, Kind.BARE):
            return
        if entry.kind is Kind.FORGET:
            side.persisted[name] = side.pushed[name] = side.epoch[name] = side.durable[name] = 0
            return
        side.persisted[name] = max(side.persisted[name], entry.id)
        side.pushed[name] = max(side.pushed[name], side.persisted[name])
        side.durable[name] = max(side.durable[name], entry.epoch)
        side.epoch[name] = max(side.epoch[name], side.durable[name])

    def replay(self, k: int, end: int) -> None:
        """Read from the last merged entry up to this place, and merge what is valid. In the model, this is a part of
        other steps."""
        side = self.sides[k]
        for at in range(side.confirmed, end):
            entry = self._entry(at)
            if not entry.is_void:
                self._merge(k, entry)
            side.term = max(side.term, entry.term)
        side.confirmed = max(end, side.confirmed)

    def _fail_in_flight(self, k: int) -> None:
        side = self.sides[k]
        side.pushed, side.epoch = side.persisted[:], side.durable[:]

    def confirm(self, k: int) -> Entry | None:
        """A receipt arrives. Return the entry that is confirmed; None if another sidecar's marker is before it: then
        this sidecar is no longer the owner."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or not side.receipts:
            raise Impossible("no receipt is under way")
        side.receipts -= 1
        at = side.confirmed
        is_foreign = False
        while True:
            entry = self._entry(at)
            if entry.kind is not Kind.MARKER and (entry.who, entry.term) == (k, side.term):
                break
            is_foreign |= entry.kind is Kind.MARKER and not entry.is_void
            at += 1
        if is_foreign:
            self._fail_in_flight(k)
            side.mode, side.receipts, side.opens = Mode.STANDBY, 0, 0
            return None
        self._merge(k, entry)
        side.confirmed = at + 1
        if entry.kind is Kind.MESSAGE:
            self._tell(entry.name, entry.id, "receipt: the log does not hold the message")
        return entry

    def _tell(self, name: int, sequence_id: int, promise: str) -> None:
        if sequence_id not in self.held[name]:
            raise BrokenPromise(promise)
        if not self.forgotten[name]:
            self.told[name] = max(self.told[name], sequence_id)
        else:
            self.told[name] = 0

    # -- Sessions and frames.

    def open(self, k: int, name: int, epoch: int) -> None:
        """A session of this epoch begins. It is in force from now on."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING:
            raise Impossible("the sidecar does not serve")
        if epoch <= side.epoch[name]:
            raise Impossible(f"the epoch {epoch} is not above {side.epoch[name]}")
        side.opens += 1
        side.epoch[name] = epoch
        self._append(k, Kind.SESSION, name, 0, epoch)

    def opened(self, k: int, name: int, epoch: int) -> int:
        """Open of this session is answered. Return the name's persisted ID."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or side.durable[name] < epoch:
            raise Impossible("the session is not durable")
        base = side.persisted[name]
        if base and base not in self.held[name]:
            raise BrokenPromise("Open: its answer covers a message that the log does not hold")
        self.told[name] = max(self.told[name], base)
        self.answered[name] = max(self.answered[name], epoch)
        return base

    def verdict(self, k: int, name: int, epoch: int, sequence_id: int, link: int) -> str:
        """Return what becomes of a message: FENCED, PREDECESSOR_MISSING, Dup, Unknown, or admit. Changes nothing."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING:
            raise Impossible("the sidecar does not serve")
        if side.epoch[name] != epoch:
            return "FENCED"
        if sequence_id > side.pushed[name] and link > side.pushed[name]:
            return "PREDECESSOR_MISSING"
        if sequence_id <= side.persisted[name]:
            return "Dup"
        return "Unknown" if sequence_id <= side.pushed[name] else "admit"

    def judge(self, k: int, name: int, epoch: int, sequence_id: int, link: int) -> str:
        """A message arrives. Return its `verdict`."""
        verdict = self.verdict(k, name, epoch, sequence_id, link)
        if verdict == "Dup":
            self._tell(name, sequence_id, "Dup: the log does not hold the message")
        elif verdict == "admit":
            self.sides[k].pushed[name] = sequence_id
            self._append(k, Kind.MESSAGE, name, sequence_id, epoch)
        return verdict

    # -- Owners.

    def mark(self, k: int, term: int) -> None:
        """Open the log for writing, and write a marker of this term."""
        side = self.sides[k]
        if side.mode is not Mode.STANDBY:
            raise Impossible(f"the sidecar is {side.mode.name}")
        if term <= side.term:
            raise Impossible(f"the term {term} is not above {side.term}")
        side.term = term
        side.is_broken, side.receipts = False, 0
        self._land(k, Append(term, Kind.MARKER))
        side.mode = Mode.READING

    def read(self, k: int) -> bool:
        """Read up to the own marker. Return whether the sidecar serves now: no other marker outbids its own."""
        side = self.sides[k]
        if side.mode is not Mode.READING:
            raise Impossible(f"the sidecar is {side.mode.name}")
        at = len(self.log) - 1
        while (entry := self.log[at]) is None or (entry.kind, entry.who, entry.term) != (Kind.MARKER, k, side.term):
            at -= 1
        self.replay(k, at + 1)
        if entry.is_void:
            side.mode = Mode.STANDBY
            return False
        self._fail_in_flight(k)
        side.mode, side.opens = Mode.SERVING, 0
        if (self.owner, self.owner_term) == (k, side.term) and any(
            persisted < told for persisted, told in zip(side.persisted, self.told, strict=True)
        ):
            raise BrokenPromise("recovery: a message that was acknowledged counts as new")
        return True

    def settle(self, k: int) -> None:
        """An outcome is unknown, or the log has refused: the log is to be opened again."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or not side.is_uncertain:
            raise Impossible("nothing is uncertain")
        self._fail_in_flight(k)
        side.mode, side.receipts, side.opens, side.is_broken = Mode.STANDBY, 0, 0, False

    def snapshot(self, k: int) -> Snapshot:
        """What a snapshot has now: numbers and place."""
        side = self.sides[k]
        return Snapshot(side.confirmed, side.term, side.index, tuple(side.persisted), tuple(side.durable))

    def kill(self, k: int) -> None:
        """Kill -9, and the next start from the store."""
        side, store = self.sides[k], self.sides[k].store
        if store.place < self.first:
            raise BrokenPromise("retention: the log begins after the snapshot")
        side.mode, side.opens, side.is_broken, side.receipts = Mode.STANDBY, 0, False, 0
        side.term, side.confirmed, side.index = store.term, store.place, store.next_index
        side.persisted, side.pushed = list(store.persisted), list(store.persisted)
        side.durable, side.epoch = list(store.durable), list(store.durable)

    # -- Retention and forgetting.

    def state(self, k: int, name: int) -> None:
        """State again what is in force of a name."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or not side.durable[name]:
            raise Impossible("nothing is in force")
        self._append(k, Kind.STATEMENT, name, side.persisted[name], side.durable[name])

    def append_bare(self, k: int) -> None:
        """Append a record that changes no number of a producer."""
        if self.sides[k].mode is not Mode.SERVING:
            raise Impossible("the sidecar does not serve")
        self._append(k, Kind.BARE)

    def forget(self, k: int, name: int) -> None:
        """Forget a name that nobody uses."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or not side.durable[name] or side.is_in_flight(name):
            raise Impossible("the name is in flight, or not known")
        self._append(k, Kind.FORGET, name)

    def is_stated(self, k: int, place: int, name: int) -> bool:
        """Whether confirmed entries from this place on state what is in force of the name."""
        side = self.sides[k]
        kept = [entry for entry in self.log[place : side.confirmed] if entry is not None and not entry.is_void]
        stated = [entry for entry in kept if entry.kind not in (Kind.MARKER, Kind.BARE) and entry.name == name]
        ids, epochs = {entry.id for entry in stated}, {entry.epoch for entry in stated}
        return side.persisted[name] in ids and side.durable[name] in epochs

    def drop(self, k: int, place: int) -> None:
        """Drop the entries before this place. The log after it states what is in force; a snapshot covers it."""
        side = self.sides[k]
        if side.mode is not Mode.SERVING or not self.first < place <= side.store.place:
            raise Impossible("the snapshot does not cover it")
        self.cut(k, place)

    def cut(self, k: int, place: int) -> None:
        """Drop these entries, as far as what the log states is concerned."""
        for name, durable in enumerate(self.sides[k].durable):
            if durable and not self.is_stated(k, place, name):
                raise Impossible(f"the log does not state again what is in force of name {name}")
        self.log[self.first : place] = [None] * (place - self.first)
        self.first = place

    def lose_store(self, k: int) -> None:
        """The store is lost, and rebuilt from what the log still has."""
        side, nothing = self.sides[k], (0,) * len(self.told)
        entry = self.log[self.first] if self.first < len(self.log) else None
        index = self.messages if entry is None else entry.next_index
        side.store = Snapshot(self.first, 0, index, nothing, nothing)
        self.kill(k)
