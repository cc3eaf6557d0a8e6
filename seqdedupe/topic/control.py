"""Control records: changes of a topic's state that are not messages, as `Control` in batch.proto defines them."""

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
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import BASE_INDEX, ROWS, TERM
from seqdedupe.format.records import body_of, file_offset_of
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.topic import policy as policy_module
from seqdedupe.topic.policy import DeduplicationRoute, Policy

STATED_A_RECORD = 8192
"""The number of producers whose state is written again, or which are forgotten, in one step. They always fit into a
record."""

_BYTES_A_PRODUCER = 4 + 8 + 8
_ROOM_BYTES = 1024
"""The room for tags and lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class ProducerSessions:
    """Sessions of producers, with the producers' persisted IDs. The record is written when Open starts sessions. The
    record is also written before retention drops an earlier record of sessions."""

    names: list[bytes]
    epochs: Int64s
    persisted: Int64s | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """Producers whose persisted IDs an operator has set. Earlier records of these producers are void."""

    names: list[bytes]
    epochs: Int64s
    """The epochs of their sessions from this record on. No client has these epochs."""
    persisted: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Purge:
    """Producers that are forgotten. Earlier records of these producers are void. A purge without names states that some
    producers were forgotten; it is written before retention drops the other purges."""

    names: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Import:
    """A part of imported watermarks. An import is not in force before its last part."""

    names: list[bytes]
    persisted: Int64s
    part: int
    is_last: bool


class Imported(NamedTuple):
    """Imported watermarks: columns, and a table of names. Each row has the number of its name in the table."""

    names: Names
    numbers: Int64s
    persisted: Int64s

    def apply(self, producers: Producers, index: int) -> None:
        """Put the watermarks in force. In the log, the watermarks are before the message with this index. The object
        `producers` takes ownership of the names."""
        numbers = producers.take_in(self.names)[self.numbers]
        producers.confirm_sessions(numbers, np.zeros(len(numbers), np.int64), self.persisted, index)


class ImportParts:
    """The parts of an incomplete import. Names are added to a table as they arrive, so that little work remains when
    the import is put in force."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the parts of an import that will not be completed."""
        self._names: Names | None = None
        self._columns: list[tuple[Int64s, Int64s]] = []

    def add(self, part: Import) -> Imported | None:
        """Add the next part of an import, in the order of the log. If the import is now complete, return the import.

        If the first part of an import is missing, the import is in force already. In this case, retention has written
        the contents of the import again before it dropped the first part.
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
    """The new data of one named cursor, or None if the cursor is removed. Other cursors do not change."""

    name: str
    kept: policy_module.NamedCursor | None

    def applied_to(self, policy: Policy) -> Policy:
        """Return the policy with this change. (A policy contains the cursors.)"""
        others = {one.name: one for one in policy.cursors if one.name != self.name}
        if self.kept is not None:
            others[self.name] = self.kept
        return replace(policy, cursors=tuple(others[name] for name in sorted(others)))


Change = ProducerSessions | Reset | Purge | Import | Policy | CursorChange


def parts(sessions: ProducerSessions) -> Iterator[ProducerSessions]:
    """Yield the sessions in parts that each fit into a record."""
    start = size = 0
    for i, name in enumerate(sessions.names):
        size += len(name) + _BYTES_A_PRODUCER
        if size > MAX_BATCH_BYTES - _ROOM_BYTES:
            yield _part(sessions, start, i)
            start, size = i, len(name) + _BYTES_A_PRODUCER
    yield _part(sessions, start, len(sessions.names))


def stated_again(producers: Producers, below_index: int) -> Iterator[ProducerSessions]:
    """Find the producers whose current state is in the log only below `below_index`. Yield the current state of these
    producers in parts. The state is read when a part is requested.

    Each part results from checking STATED_A_RECORD producers, so a part may have no names.
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
"""The field of `Control` for each kind of change."""


def encode(change: Change, *, term: int = 0, record_id: int = 0) -> bytes:
    """Return the body of a control record of this term. `record_id` makes the record different from all other records
    of the topic."""
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
    """Return the change in a control record, and the term of the record. Raises NEWER_FORMAT for an unknown kind,
    LOG_DAMAGED."""
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
    """Yield scanned records in runs. In each run, the caller first merges the batches, then the changes (change, term,
    index).

    Records that are merged by maximum may be merged in any order, so they form one run. A reset or a purge is a
    separate run. So is a policy, which limits the window of the records that follow. `place` is the log's place, for
    error messages. Raises the errors of `decode`, with the place of the record.
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
    """Apply a change that is in the log before the message with this index."""
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
    """Return the policy in a snapshot or in a namespace's record. Raises the errors of `decode`."""
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
