"""Whether the model can do what the code did: a trace of the code's steps is followed in the model, step by step.

`Follower` raises `NotInTheModel` at the first event that the model does not allow there, or at which the model has
other numbers. tests/property/recorded.py writes the traces.

The trace is that of one topic and one sidecar, which is killed and starts again; of another sidecar it has the markers.
An append has several entries, which land, are lost and are confirmed together. The time of a snapshot is not in the
trace: a snapshot that is loaded must be one that the model could have taken.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from model.steps import BrokenPromise, Impossible, Kind, Mode, Protocol, Snapshot

LEFT_OUT = -1
"""The link of a frame without a link."""


class NotInTheModel(Exception):
    """The code did what the model does not do."""


class Row(NamedTuple):
    """A message of a frame. The link is that of the name's first message in the frame."""

    name: int
    epoch: int
    id: int
    link: int


class Numbers(NamedTuple):
    """The numbers of a name."""

    pushed: int
    persisted: int
    epoch: int
    durable: int


class Frame(NamedTuple):
    """A frame arrived. `refused` has the reason if it was refused at once."""

    number: int
    rows: tuple[Row, ...]
    refused: str


class Receipt(NamedTuple):
    """A frame got its receipt: a verdict for each message, in the words of the model."""

    number: int
    verdicts: tuple[str, ...]


class Appended(NamedTuple):
    """A record was passed to the log. Entries: name, ID, epoch; none if it changes no number of a producer."""

    kind: Kind
    entries: tuple[tuple[int, int, int], ...]


class Landed(NamedTuple):
    """The oldest record in flight is in the log."""


class Lost(NamedTuple):
    """The log failed: nothing that is in flight, and nothing that follows, will be in the log."""


class Confirmed(NamedTuple):
    """The receipt of the oldest record arrived."""


class Marked(NamedTuple):
    """A marker is in the log, of this sidecar or of another one."""

    term: int
    is_own: bool


class Served(NamedTuple):
    """The topic begins to serve, with these numbers."""

    term: int
    numbers: Mapping[int, Numbers]


class Left(NamedTuple):
    """The topic does not serve any more."""


class Killed(NamedTuple):
    """The process ended. The next one has loaded this snapshot, with persisted and durable by name."""

    next_index: int
    numbers: Mapping[int, tuple[int, int]]


class Dropped(NamedTuple):
    """Retention has dropped this many of the first records, including markers."""

    records: int


class Opened(NamedTuple):
    """An Open, new or resumed, was answered for a name."""

    name: int
    epoch: int
    persisted: int


class Fenced(NamedTuple):
    """The resume of a session was refused."""

    name: int
    epoch: int


Event = (
    Frame | Receipt | Appended | Landed | Lost | Confirmed | Marked | Served | Left | Killed | Dropped | Opened | Fenced
)

_SIDECAR, _OTHER = 0, 1
_OF_THE_RULE = {"FENCED", "LINK_REQUIRED", "PREDECESSOR_MISSING"}
"""The reasons for which the rule refuses a frame."""


class Follower:
    """The model after the events so far."""

    def __init__(self, names: int) -> None:
        self._model = Protocol(names, 2)
        self._side = self._model.sides[_SIDECAR]
        self._admitted: list[tuple[int, int, int]] = []
        """Of the frame that has just arrived, what must be appended."""
        self._verdicts: dict[int, tuple[str, ...]] = {}
        self._in_flight: list[int] = []
        """Of each record in flight, the number of entries."""
        self._unconfirmed: list[int] = []
        self._records: list[int] = []
        """Of each record in the log, the place after it."""
        self._dropped = 0
        nothing = (0,) * names
        self._prefixes = [Snapshot(0, 0, 0, nothing, nothing)]
        """By place, what is known of the log before it. A snapshot is one of these."""
        self._reader = Protocol(names, 1)
        self._reader.sides[_SIDECAR].mode = Mode.SERVING
        self._reader.held = self._model.held
        """It only reads, entry by entry, as a recovery does."""

    def follow(self, event: Event) -> None:
        """Take the steps of an event. Raises NotInTheModel."""
        try:
            self._follow(event)
        except (BrokenPromise, Impossible) as e:
            raise NotInTheModel(f"{event}: {e}") from e

    def _follow(self, event: Event) -> None:
        if self._admitted and not isinstance(event, Appended):
            raise Impossible(f"these messages were admitted and not appended: {self._admitted}")
        match event:
            case Frame():
                self._frame(event)
            case Receipt(number, verdicts):
                if (expected := self._verdicts.get(number)) != verdicts:
                    raise Impossible(f"the verdicts are {expected}")
            case Appended(kind, entries):
                self._appended(kind, entries)
            case Landed():
                self._landed()
            case Lost():
                if self._in_flight:
                    self._model.lose(_SIDECAR)
                self._in_flight.clear()
                self._side.is_broken = self._side.mode is Mode.SERVING
            case Confirmed():
                if not self._unconfirmed:
                    raise Impossible("no receipt is under way")
                for _ in range(self._unconfirmed.pop(0)):
                    if self._model.confirm(_SIDECAR) is None:
                        raise Impossible("another sidecar's marker is before it")
            case Marked(term, is_own):
                self._marked(term, is_own=is_own)
            case Served(term, numbers):
                self._served(term, numbers)
            case Left():
                self._side.is_broken = True
                self._model.settle(_SIDECAR)
            case Killed(index, numbers):
                self._killed(index, numbers)
            case Dropped(records):
                self._drop(records)
            case Opened(name, epoch, persisted):
                if self._side.mode is Mode.SERVING:
                    if (base := self._model.opened(_SIDECAR, name, epoch)) != persisted:
                        raise Impossible(f"persisted is {base}")
                elif not any(one.durable[name] >= epoch and one.persisted[name] == persisted for one in self._read()):
                    raise Impossible("nothing of what is read has this")
                else:
                    self._model.answered[name] = max(self._model.answered[name], epoch)
            case Fenced(name, epoch):
                if self._side.epoch[name] <= epoch and not any(one.durable[name] > epoch for one in self._read()):
                    raise Impossible(f"the epoch in force is {self._side.epoch[name]}")

    def _read(self) -> Iterator[Snapshot]:
        """Yield what a recovery may have read by now. Open is answered as soon as its record was read."""
        if self._side.mode is not Mode.SERVING:
            yield from (one for one in self._prefixes if one.place >= self._side.confirmed)

    def _frame(self, event: Frame) -> None:
        side = self._side
        if side.mode is not Mode.SERVING:
            if not event.refused or event.refused in _OF_THE_RULE:
                raise Impossible(f"the topic is {side.mode.name}")
            return
        firsts: dict[int, Row] = {}
        for row in event.rows:
            firsts.setdefault(row.name, row)
        reasons = {self._verdict(row) for row in firsts.values()} & _OF_THE_RULE
        if event.refused:
            # What the model does not have: the sidecar refuses for other reasons too.
            if event.refused in _OF_THE_RULE - reasons:
                raise Impossible(f"it is refused for {reasons or 'nothing'}")
            return
        if reasons:
            raise Impossible(f"it is not refused for {reasons}")
        verdicts = []
        last = {name: row.link for name, row in firsts.items()}
        for row in event.rows:
            link = side.persisted[row.name] if last[row.name] == LEFT_OUT else last[row.name]
            last[row.name] = row.id
            verdict = self._model.judge(_SIDECAR, row.name, row.epoch, row.id, link)
            verdicts.append(verdict)
            if verdict == "admit":
                self._admitted.append((row.name, row.id, row.epoch))
        self._verdicts[event.number] = tuple(verdicts)

    def _verdict(self, row: Row) -> str:
        side, link = self._side, row.link
        if link == LEFT_OUT:
            if side.epoch[row.name] == row.epoch and side.pushed[row.name] != side.persisted[row.name]:
                return "LINK_REQUIRED"
            link = side.persisted[row.name]
        return self._model.verdict(_SIDECAR, row.name, row.epoch, row.id, link)

    def _appended(self, kind: Kind, entries: tuple[tuple[int, int, int], ...]) -> None:
        model, side = self._model, self._side
        if kind is Kind.MESSAGE:
            if list(entries) != self._admitted:
                raise Impossible(f"these messages were admitted: {self._admitted}")
            self._admitted.clear()
        elif self._admitted:
            raise Impossible(f"these messages were admitted and not appended: {self._admitted}")
        for name, sequence_id, epoch in entries:
            match kind:
                case Kind.SESSION:
                    model.open(_SIDECAR, name, epoch)
                case Kind.STATEMENT:
                    if (sequence_id, epoch) != (side.persisted[name], side.durable[name]):
                        raise Impossible(f"in force are {side.persisted[name]} and {side.durable[name]}")
                    model.state(_SIDECAR, name)
        if not entries:
            model.append_bare(_SIDECAR)
        if not side.is_broken:
            self._in_flight.append(max(len(entries), 1))

    def _landed(self) -> None:
        if not self._in_flight:
            raise Impossible("nothing is in flight")
        entries = self._in_flight.pop(0)
        for _ in range(entries):
            if self._model.land(_SIDECAR).is_void:
                raise Impossible("it is not under the last owner's marker")
        self._records.append(len(self._model.log))
        if self._side.mode is Mode.SERVING:
            self._unconfirmed.append(entries)
        self._read_on()

    def _marked(self, term: int, *, is_own: bool) -> None:
        model, side = self._model, self._side
        if is_own and side.mode is Mode.READING:
            # It has read up to the marker before; then the log failed again, or another term was higher.
            model.read(_SIDECAR)
        if is_own and side.mode is Mode.SERVING:
            side.is_broken = True
            model.settle(_SIDECAR)
        if is_own and term > side.term:
            model.mark(_SIDECAR, term)
            self._unconfirmed.clear()
        else:
            # So is an attempt that repeats the term of a failed one: it takes nothing over, and another one follows.
            other = model.sides[_OTHER]
            other.mode, other.term = Mode.STANDBY, 0
            model.mark(_OTHER, term)
        self._records.append(len(model.log))
        self._read_on()

    def _served(self, term: int, numbers: Mapping[int, Numbers]) -> None:
        side = self._side
        if side.mode is not Mode.READING or term != side.term:
            raise Impossible(f"the model is {side.mode.name} in term {side.term}")
        if not self._model.read(_SIDECAR):
            raise Impossible("another sidecar owns the topic")
        columns = zip(side.pushed, side.persisted, side.epoch, side.durable, strict=True)
        for name, its in enumerate(columns):
            if (found := numbers.get(name, Numbers(0, 0, 0, 0))) != its:
                raise Impossible(f"name {name} has {found} instead of {its}")

    def _killed(self, index: int, numbers: Mapping[int, tuple[int, int]]) -> None:
        side, names = self._side, range(len(self._model.told))
        persisted = tuple(numbers.get(name, (0, 0))[0] for name in names)
        durable = tuple(numbers.get(name, (0, 0))[1] for name in names)
        for snapshot in reversed(self._prefixes):
            if snapshot[2:] == (index, persisted, durable) and snapshot.place >= self._model.first:
                side.store = snapshot
                self._model.kill(_SIDECAR)
                break
        else:
            if numbers or index != self._index_of_first():
                raise Impossible(f"no snapshot at index {index} has persisted {persisted} and durable {durable}")
            self._model.lose_store(_SIDECAR)
        self._unconfirmed.clear()
        self._in_flight.clear()
        side.flight = ()

    def _index_of_first(self) -> int:
        log, first = self._model.log, self._model.first
        entry = log[first] if first < len(log) else None
        return self._model.messages if entry is None else entry.next_index

    def _drop(self, records: int) -> None:
        self._dropped += records
        place = self._records[self._dropped - 1]
        # A snapshot covers it: `_killed` compares. During a recovery, what was read counts.
        one = self._model if self._side.mode is Mode.SERVING else self._reader
        one.cut(_SIDECAR, place)
        self._model.first = place

    def _read_on(self) -> None:
        self._reader.log = self._model.log
        while len(self._prefixes) <= len(self._model.log):
            self._reader.replay(0, len(self._prefixes))
            self._prefixes.append(self._reader.snapshot(0))
