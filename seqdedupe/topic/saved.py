"""A topic's snapshot, as it is saved elsewhere and put back: what it holds, and whether it can be one."""

from collections.abc import Iterator

import numpy as np

from seqdedupe.core.name_table import Names
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED, STATED
from seqdedupe.errors import error
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import MAX_PLACE_BYTES, NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import decoded_producer_name, producer_name
from seqdedupe.store.parts import NOT_STATED
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import encode
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.recovery import MAX_TERM
from seqdedupe.topic.sessions import highest_term

SAVED_AT_ONCE = 3072
"""Producers; with the longest names they take less than 1 MiB."""

Producers = tuple[list[bytes], Int64s, Int64s, Int64s]
"""Names, and persisted ID, durable epoch and `STATED` of each."""


def saved(topic: TopicBase) -> Loaded:
    """The topic's snapshot as of this call. Raises RECOVERING, LOG_DAMAGED while it is not certain, DRAINING,
    TOPIC_NOT_FOUND."""
    if topic.state is not State.READ_ONLY:
        topic.check_serving()
    names = topic.producers.copied_names()
    rows = topic.producers.numbers[: len(names)]
    position = topic.last_position
    return Loaded(
        term=topic.term,
        next_index=position.index + 1,
        message_id=position.message_id,
        names=names,
        persisted=rows[:, PERSISTED].copy(),
        epochs=rows[:, DURABLE_EPOCH].copy(),
        stated=rows[:, STATED].copy(),
        ownership=position.ownership,
        policy=encode(topic.policy),
        opaque=topic.log_place(),
        has_forgotten=topic.producers.has_forgotten,
    )


def parts(snapshot: Loaded) -> Iterator[Producers]:
    """Its producers, some at once."""
    for start in range(0, len(snapshot.names), SAVED_AT_ONCE):
        some = slice(start, start + SAVED_AT_ONCE)
        names = snapshot.names.some(start, SAVED_AT_ONCE)
        yield names, snapshot.persisted[some], snapshot.epochs[some], snapshot.stated[some]


class SavedParts:
    """A snapshot that comes in parts. Raises INVALID_REQUEST, INVALID_NAME for what cannot be one."""

    def __init__(
        self,
        term: int,
        position: Position,
        policy: Policy,
        opaque: bytes,
        producers: int,
        *,
        has_forgotten: bool = False,
    ) -> None:
        if not 0 <= term < MAX_TERM:
            raise error("INVALID_REQUEST", f"term is {term}: it should be 0 to {MAX_TERM - 1}")
        if position.index < -1 or (position.index < 0 and position.message_id is not None):
            raise error("INVALID_POSITION", f"the snapshot has no position that can be: {position}")
        if len(opaque) > MAX_PLACE_BYTES:
            raise error("INVALID_REQUEST", f"broker_position has {len(opaque)} bytes: at most {MAX_PLACE_BYTES}")
        self._term = term
        self._position = position
        self._policy = encode(policy.check())
        self._opaque = opaque
        self._producers = producers
        self._has_forgotten = has_forgotten
        self._names = Names()
        self._columns: tuple[list[Int64s], ...] = ([], [], [])

    def add(self, names: list[bytes], persisted: Int64s, epochs: Int64s, stated: Int64s) -> None:
        """The next producers."""
        columns = (persisted, epochs, stated)
        if any(len(column) != len(names) for column in columns):
            raise error("INVALID_REQUEST", f"a column does not have a value for each of {len(names)} producers")
        for name in names:
            producer_name(decoded_producer_name(name))
        before = len(self._names)
        self._names.add_all(names)
        if len(self._names) != before + len(names):
            raise error("INVALID_REQUEST", "a producer comes twice")
        if (persisted < NO_SEQUENCE_ID).any() or (epochs < NO_EPOCH).any() or highest_term(epochs) > self._term:
            raise error("INVALID_REQUEST", "a producer has numbers that cannot be")
        if (stated < NOT_STATED).any() or (stated > self._position.index + 1).any():
            raise error("INVALID_REQUEST", "a producer is stated at an index that cannot be")
        for all_of_it, column in zip(self._columns, columns, strict=True):
            all_of_it.append(column)

    def finish(self) -> Loaded:
        """All of it."""
        if len(self._names) != self._producers:
            why = f"producers is {self._producers}, but {len(self._names)} have come"
            raise error("INVALID_REQUEST", why)
        nothing = np.zeros(0, np.int64)
        persisted, epochs, stated = (np.concatenate([nothing, *column]) for column in self._columns)
        return Loaded(
            self._term,
            self._position.index + 1,
            self._position.message_id,
            self._names,
            persisted,
            epochs,
            stated,
            self._position.ownership,
            self._policy,
            self._opaque,
            self._has_forgotten,
        )
