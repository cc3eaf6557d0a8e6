"""Control records: what changes a topic's state other than by messages, as `Control` in batch.proto has it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seqdedupe import wire
from seqdedupe.batch import Binary
from seqdedupe.core.name_table import Names
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import DamagedError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS, TERM
from seqdedupe.format.jit import Int64s
from seqdedupe.format.records import body_of, file_offset_of
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.topic import policy as policy_module
from seqdedupe.topic.policy import DeduplicationRoute, Policy

STATED_A_RECORD = 8192
"""So many producers are stated again, or forgotten, at once. They always fit into a record."""

_BYTES_A_PRODUCER = 4 + 8 + 8
_ROOM_BYTES = 1024
"""For tags and lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class ProducerSessions:
    """Producers' sessions: started by Open, or stated again, with what is persisted, before retention drops them."""

    names: list[bytes]
    epochs: Int64s
    persisted: Int64s | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """Producers whose persisted IDs an operator has set: what earlier records say of them counts no more."""

    names: list[bytes]
    epochs: Int64s
    """From here on their sessions, which nobody has."""
    persisted: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Purge:
    """Producers that are forgotten: nothing that earlier records say of them counts any more. Of none it says, before
    retention drops the others, that some were."""

    names: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Import:
    """A part of imported watermarks: nothing of an import is in force before its last part."""

    names: list[bytes]
    persisted: Int64s
    part: int
    is_last: bool


class Imported(NamedTuple):
    """Watermarks that are imported: columns, and a table of the names, of which each row says the number."""

    names: Names
    numbers: Int64s
    persisted: Int64s

    def apply(self, producers: Producers, index: int) -> None:
        """They are in the log, before the message with this index. The names are the producers' from now on."""
        numbers = producers.take_in(self.names)[self.numbers]
        producers.confirm_sessions(numbers, np.zeros(len(numbers), np.int64), self.persisted, index)


class ImportParts:
    """The parts of an import that is not complete yet. Names enter a table as they come, so that little is left to do
    where they all are in force at once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """What has come will not be completed."""
        self._names: Names | None = None
        self._columns: list[tuple[Int64s, Int64s]] = []

    def add(self, part: Import) -> Imported | None:
        """The next part in the log. The import, if that completes it.

        An import that lacks its first part is in force already: retention has said it again before it dropped that.
        """
        if part.part == 0:
            self._names, self._columns = Names(), []
        if self._names is None or part.part != len(self._columns):
            self.clear()
            return None
        self._columns.append((self._names.add_all(part.names), part.persisted))
        if not part.is_last:
            return None
        complete = Imported(self._names, *map(np.concatenate, zip(*self._columns, strict=True)))
        self.clear()
        return complete


@dataclass(frozen=True, slots=True)
class CursorChange:
    """A named cursor keeps something else, or (None) is gone. The others stay as they are."""

    name: str
    kept: policy_module.NamedCursor | None

    def applied_to(self, policy: Policy) -> Policy:
        """The policy with it: cursors are kept there."""
        others = {one.name: one for one in policy.cursors if one.name != self.name}
        if self.kept is not None:
            others[self.name] = self.kept
        return replace(policy, cursors=tuple(others[name] for name in sorted(others)))


Change = ProducerSessions | Reset | Purge | Import | Policy | CursorChange


def parts(sessions: ProducerSessions) -> Iterator[ProducerSessions]:
    """As many as it takes for each to fit into a record."""
    start = size = 0
    for i, name in enumerate(sessions.names):
        size += len(name) + _BYTES_A_PRODUCER
        if size > MAX_BATCH_BYTES - _ROOM_BYTES:
            yield _part(sessions, start, i)
            start, size = i, len(name) + _BYTES_A_PRODUCER
    yield _part(sessions, start, len(sessions.names))


def stated_again(producers: Producers, below_index: int) -> Iterator[ProducerSessions]:
    """What is in force of the producers that the log states only below this index, as it is when each is asked for.

    Each is of so many producers that are looked at: there may be no names in it.
    """
    generation, first = producers.generation, 0
    while first < len(producers):
        below = producers.stated_below(below_index, first, first + STATED_A_RECORD)
        rows = producers.numbers[below]
        yield ProducerSessions(producers.names_of(below), rows[:, DURABLE_EPOCH].copy(), rows[:, PERSISTED].copy())
        first += STATED_A_RECORD
        if generation != producers.generation:
            generation, first = producers.generation, 0


def _part(sessions: ProducerSessions, start: int, end: int) -> ProducerSessions:
    persisted = None if sessions.persisted is None else sessions.persisted[start:end]
    return ProducerSessions(sessions.names[start:end], sessions.epochs[start:end], persisted)


_FIELDS: dict[type[Change], str] = {ProducerSessions: "sessions", Reset: "reset", Purge: "purge", Import: "imported"}
"""Of `Control`, by what each changes."""


def encode(change: Change, *, term: int = 0, record_id: int = 0) -> bytes:
    """The body of a control record, written in this term. With `record_id` it is unlike all others of the topic."""
    control = wire.Control(id=record_id, term=term)
    if isinstance(change, Policy):
        policy = control.policy_of_deduplication_ids if change.by_deduplication_id else control.policy
        change.fill(policy)
        if change.route is not None:
            policy.deduplication_route = change.route.value
        policy_module.fill_cursors(change.cursors, policy.cursors)
        if change.imported is not None:
            change.imported.fill(policy.imported_window)
        policy.SetInParent()
    elif isinstance(change, CursorChange):
        control.cursor.name = change.name
        if change.kept is not None:
            policy_module.fill_cursor(change.kept, control.cursor)
    else:
        columns = getattr(control, _FIELDS[type(change)])
        names = Binary.of_all(change.names)
        columns.producer_name_offsets, columns.producer_names = names.offsets.tobytes(), names.data
        if isinstance(change, Import):
            columns.part, columns.is_last = change.part, change.is_last
        elif not isinstance(change, Purge):
            columns.epochs = change.epochs.astype(np.int64).tobytes()
        if not isinstance(change, Purge) and change.persisted is not None:
            columns.persisted = change.persisted.astype(np.int64).tobytes()
    body: bytes = control.SerializeToString()
    return body


def _policy(stored: Any) -> Policy:
    route = DeduplicationRoute(stored.deduplication_route) if stored.deduplication_route else None
    imported = policy_module.imported_window_of(stored.imported_window) if stored.HasField("imported_window") else None
    return replace(Policy.of(stored), route=route, cursors=policy_module.cursors_of(stored.cursors), imported=imported)


def decode(body: bytes) -> tuple[Change, int]:
    """What a control record changes, and its term. Raises NEWER_FORMAT for a kind that is not known, LOG_DAMAGED."""
    try:
        control = wire.Control.FromString(body)
        match control.WhichOneof("kind"):
            case "policy":
                return _policy(control.policy), control.term
            case "policy_of_deduplication_ids":
                return replace(_policy(control.policy_of_deduplication_ids), by_deduplication_id=True), control.term
            case "sessions":
                return _sessions(control.sessions), control.term
            case "reset":
                return _reset(control.reset), control.term
            case "purge":
                return Purge(_names(control.purge)), control.term
            case "imported":
                return _import(control.imported), control.term
            case "cursor":
                kept = policy_module.cursors_of([control.cursor])[0] if control.cursor.HasField("position") else None
                return CursorChange(control.cursor.name, kept), control.term
    except (DecodeError, ValueError) as e:
        raise error("LOG_DAMAGED", f"a control record is damaged: {e}") from e
    raise error("NEWER_FORMAT", "the log has a control record of a kind that this version does not know")


def runs(chunk: bytes, table: Int64s, place: str) -> Iterator[tuple[Int64s, list[tuple[Change, int, int]]]]:
    """Scanned records as runs: first the batches of each are to be merged, then its changes (change, term, index).

    All that merges by maximum may come in any order, so that there is one run of it. A reset is a run of its own, and a
    policy, which says how far the window of what comes after it reaches. `place` is that of the log, for a person.
    Raises as `decode`, with where the record stands.
    """
    first = 0
    changes: list[tuple[Change, int, int]] = []
    for k in np.flatnonzero((table[:, ROWS] == 0) & (table[:, TERM] == 0)).tolist():
        try:
            change, term = decode(body_of(chunk, table[k]))
        except DamagedError as e:
            index, offset = int(table[k, BASE_INDEX]), file_offset_of(chunk, table[k])
            where = f"the log {place}, at byte {offset} of a segment, before the message with index {index}"
            raise error(e.reason, f"{where}: {e.message}", index=index, offset=offset) from e
        if isinstance(change, Reset | Purge | Policy):
            yield table[first:k], changes
            first, changes = k, []
            yield table[:0], [(change, term, int(table[k, BASE_INDEX]))]
        else:
            changes.append((change, term, int(table[k, BASE_INDEX])))
    yield table[first:], changes


def apply(
    change: ProducerSessions | Reset | Purge | Import, parts: ImportParts, producers: Producers, index: int
) -> None:
    """The change is in the log, before the message with this index."""
    if isinstance(change, Purge):
        numbers = producers.find_all(change.names)
        producers.purge(numbers[numbers >= 0], index)
        return
    if isinstance(change, Import):
        if (complete := parts.add(change)) is not None:
            complete.apply(producers, index)
        return
    numbers = producers.add_all(change.names)
    if isinstance(change, Reset):
        producers.reset(numbers, change.epochs, change.persisted, index)
    else:
        producers.confirm_sessions(numbers, change.epochs, change.persisted, index)


def decode_policy(body: bytes) -> Policy:
    """The policy that a snapshot or a namespace's record keeps. Raises as `decode`."""
    policy, _ = decode(body)
    if not isinstance(policy, Policy):
        raise error("STORE_DAMAGED", "a record has something else for its policy")
    return policy


def _sessions(columns: Any) -> ProducerSessions:
    names = _names(columns)
    persisted = _int64s(columns.persisted, names) if columns.persisted else None
    return ProducerSessions(names, _int64s(columns.epochs, names), persisted)


def _reset(columns: Any) -> Reset:
    names = _names(columns)
    return Reset(names, _int64s(columns.epochs, names), _int64s(columns.persisted, names))


def _import(columns: Any) -> Import:
    names = _names(columns)
    return Import(names, _int64s(columns.persisted, names), columns.part, columns.is_last)


def _names(columns: Any) -> list[bytes]:
    names = Binary(np.frombuffer(columns.producer_name_offsets, "<i4"), columns.producer_names)
    if not names.cuts_into(len(names.offsets) - 1):
        raise ValueError("the columns of names do not fit together")
    return names.values()


def _int64s(column: bytes, names: list[bytes]) -> Int64s:
    values = np.frombuffer(column, "<i8")
    if len(values) != len(names):
        raise ValueError(f"a column has {len(values)} values for {len(names)} names")
    return values
