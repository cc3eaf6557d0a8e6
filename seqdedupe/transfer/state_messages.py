"""Convert a topic's state to messages of AdminService, and read such messages.

Outgoing messages hold a topic's snapshot or its watermarks. An incoming snapshot comes from a client that saved it, or
from another sidecar. Begin with `saved`, which returns the state of a topic at one moment. `SavedParts` builds the same
state from incoming parts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from seqdedupe import wire
from seqdedupe.batch import INT64, Binary, names_of, values
from seqdedupe.core.name_table import Names
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED, STATED
from seqdedupe.errors import error
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import MAX_PLACE_BYTES, NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import decoded_producer_name, producer_name
from seqdedupe.store.parts import NOT_STATED
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import decode_policy, encode
from seqdedupe.topic.owner import MAX_TERM
from seqdedupe.topic.policy import MAX_CURSORS, Policy, cursors_of, fill_cursors
from seqdedupe.topic.sessions import highest_term
from seqdedupe.v1 import admin_pb2

# -- Outgoing messages.

SAVED_AT_ONCE = 3072
"""The number of producers in one part. Even with the longest names, a part has less than 1 MiB."""

Producers = tuple[list[bytes], Int64s, Int64s, Int64s]
"""The names of producers, and the persisted ID, durable epoch and `STATED` of each producer."""


def saved(topic: TopicBase) -> Loaded:
    """Return a snapshot of the topic at the time of this call. Raises RECOVERING or LOG_DAMAGED while the topic's state
    is not certain; DRAINING, TOPIC_NOT_FOUND."""
    _check_is_certain(topic)
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
    """Yield the producers of a snapshot, at most SAVED_AT_ONCE at a time."""
    for start in range(0, len(snapshot.names), SAVED_AT_ONCE):
        some = slice(start, start + SAVED_AT_ONCE)
        names = snapshot.names.some(start, SAVED_AT_ONCE)
        yield names, snapshot.persisted[some], snapshot.epochs[some], snapshot.stated[some]


EXPORTED_AT_ONCE = 4096
"""The number of producers in one part. With the longest names, a part has about 1 MiB."""

Watermarks = tuple[list[bytes], Int64s]
"""The names of producers, and the highest persisted sequence ID of each producer."""


def watermarks(topic: TopicBase) -> Iterator[Watermarks]:
    """Yield the watermarks at the time of this call, of all producers that have a watermark.

    Raises RECOVERING, LOG_DAMAGED or NOT_ATTACHED while the watermarks are not certain; DRAINING, TOPIC_NOT_FOUND.
    """
    _check_is_certain(topic)
    if isinstance(topic, AttachedTopic) and topic.state is not State.SERVING:
        raise error("NOT_ATTACHED", f"what the log of topic {topic.name} holds is not known: {topic.why}")
    names = topic.producers.names_from(0)
    persisted = topic.producers.numbers[: len(names), PERSISTED].copy()
    return _known(names, persisted)


def _known(names: list[bytes], persisted: Int64s) -> Iterator[Watermarks]:
    for start in range(0, len(names), EXPORTED_AT_ONCE):
        some = persisted[start : start + EXPORTED_AT_ONCE]
        known = np.flatnonzero(some >= 0)
        if len(known):
            yield [names[start + number] for number in known.tolist()], some[known]


def _check_is_certain(topic: TopicBase) -> None:
    if topic.state is not State.READ_ONLY:
        topic.check_serving()


def snapshot_answers(topic: TopicBase) -> Iterator[bytes]:
    """Yield the response messages of `ExportSnapshot`. Raises the errors of `saved`."""
    snapshot = saved(topic)
    yield _head(topic, snapshot).SerializeToString()
    for names, persisted, epochs, stated in parts(snapshot):
        answer = wire.ExportSnapshotResponse()
        _fill(answer.part, names, persisted=persisted, epochs=epochs, stated=stated)
        yield answer.SerializeToString()


def _head(topic: TopicBase, snapshot: Loaded) -> Any:
    """Return the first part of a snapshot, in the alias schema."""
    policy = admin_pb2.TopicPolicy()
    kept = decode_policy(snapshot.policy)
    kept.fill(policy)
    position = Position(topic.incarnation, snapshot.message_id, snapshot.next_index - 1, snapshot.ownership)
    head = admin_pb2.SnapshotHead(
        topic=topic.name,
        term=snapshot.term,
        position=position.to_proto(),
        policy=policy,
        broker_position=snapshot.opaque,
        producers=len(snapshot.names),
        has_forgotten=snapshot.has_forgotten,
    )
    fill_cursors(kept.cursors, head.cursors)
    answer = wire.ExportSnapshotResponse()
    answer.part.head.ParseFromString(head.SerializeToString())
    return answer


def watermark_answers(topic: TopicBase) -> Iterator[bytes]:
    """Yield the response messages of `ExportWatermarks`. Raises the errors of `watermarks`."""
    for names, persisted in watermarks(topic):
        answer = wire.ExportWatermarksResponse()
        _fill(answer, names, persisted=persisted)
        yield answer.SerializeToString()


def _fill(message: Any, names: list[bytes], **numbers: Int64s) -> None:
    """Set the column of names and the columns of numbers in a message."""
    column = Binary.of_all(names)
    message.producer_name_offsets, message.producer_names = column.offsets.tobytes(), column.data
    for name, each in numbers.items():
        setattr(message, name, each.tobytes())


# -- An incoming snapshot.


class SavedParts:
    """A snapshot that arrives in parts. The constructor and methods raise INVALID_REQUEST, INVALID_NAME or
    INVALID_POSITION for invalid parts."""

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
            what = f"the snapshot has no position that can be: {position}"
            raise error("INVALID_POSITION", what, hint="Export the snapshot again, and import it as it was exported.")
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
        """Add the next producers."""
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
        """Return the complete snapshot."""
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


class SnapshotReader:
    """A snapshot that arrives in parts of the alias schema. The methods raise INVALID_REQUEST, INVALID_NAME or
    INVALID_POSITION for invalid parts."""

    def __init__(self) -> None:
        self._head: admin_pb2.SnapshotHead | None = None

    def add(self, part: Any) -> None:
        """Add the next part."""
        if self._head is None:
            if not part.HasField("head"):
                raise error("INVALID_REQUEST", "the first message has the head of a snapshot")
            # The head has the same fields in the alias schema as in the real schema.
            self._head = admin_pb2.SnapshotHead.FromString(part.head.SerializeToString())
            self._parts = _begun(self._head)
        if part.producer_names or part.persisted:
            numbers = [values(getattr(part, column), INT64, column) for column in ("persisted", "epochs", "stated")]
            self._parts.add(names_of(part), *numbers)

    def finish(self) -> tuple[admin_pb2.SnapshotHead, Loaded]:
        """Return the head and the complete snapshot."""
        if self._head is None:
            raise error("INVALID_REQUEST", "nothing has come")
        return self._head, self._parts.finish()


def _begun(head: admin_pb2.SnapshotHead) -> SavedParts:
    """Return the snapshot that begins with this head, still without producers. Raises INVALID_REQUEST,
    INVALID_POSITION."""
    position = Position.from_proto(head.position)
    if len(head.cursors) > MAX_CURSORS:
        raise error("INVALID_REQUEST", f"the snapshot has {len(head.cursors)} cursors: more than a topic can have")
    policy = replace(Policy.of_request(head.policy), cursors=cursors_of(head.cursors))
    return SavedParts(
        head.term, position, policy, head.broker_position, head.producers, has_forgotten=head.has_forgotten
    )
