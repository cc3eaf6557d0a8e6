"""A topic's snapshot as it goes from sidecar to sidecar, and to whoever saves it: messages with a part of it each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from broker_sidecar.proto_messages import INT64, names_of, policy_of, values
from broker_sidecar.rpc import columns, parse
from seqdedupe import wire
from seqdedupe.batch import Binary
from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.policy import MAX_CURSORS, cursors_of, fill_cursors
from seqdedupe.topic.saved import SavedParts, parts, saved
from seqdedupe.v1 import admin_pb2


def answers_of(topic: TopicBase) -> Iterator[bytes]:
    """Each a message of `ExportSnapshot`. Raises as `saved`."""
    snapshot = saved(topic)
    yield _head(topic, snapshot).SerializeToString()
    for names, persisted, epochs, stated in parts(snapshot):
        column = Binary.of_all(names)
        answer = wire.ExportSnapshotResponse()
        answer.part.producer_name_offsets, answer.part.producer_names = column.offsets.tobytes(), column.data
        answer.part.persisted, answer.part.epochs = persisted.tobytes(), epochs.tobytes()
        answer.part.stated = stated.tobytes()
        yield answer.SerializeToString()


def part_of_answer(data: bytes) -> Any:
    """The part in a message of `ExportSnapshot`, of the alias schema. Raises INVALID_REQUEST, MALFORMED_MESSAGE."""
    return columns(wire.ExportSnapshotResponse, admin_pb2.ExportSnapshotResponse, data).part


class Taking:
    """A snapshot that comes in parts of the alias schema. Raises INVALID_REQUEST, INVALID_NAME, INVALID_POSITION for
    what cannot be one."""

    def __init__(self) -> None:
        self._head: admin_pb2.SnapshotHead | None = None

    def add(self, part: Any) -> None:
        """The next one."""
        if self._head is None:
            if not part.HasField("head"):
                raise error("INVALID_REQUEST", "the first message has the head of a snapshot")
            self._head = parse(admin_pb2.SnapshotHead, part.head.SerializeToString())
            self._taken = _parts_of(self._head)
        if part.producer_names or part.persisted:
            numbers = [values(getattr(part, column), INT64, column) for column in ("persisted", "epochs", "stated")]
            self._taken.add(names_of(part), *numbers)

    def finish(self) -> tuple[admin_pb2.SnapshotHead, Loaded]:
        """All of it."""
        if self._head is None:
            raise error("INVALID_REQUEST", "nothing has come")
        return self._head, self._taken.finish()


def _head(topic: TopicBase, snapshot: Loaded) -> Any:
    """The first part of a snapshot, of the alias schema."""
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


def _parts_of(head: admin_pb2.SnapshotHead) -> SavedParts:
    """Raises INVALID_REQUEST, INVALID_POSITION."""
    position = Position.from_proto(head.position)
    if len(head.cursors) > MAX_CURSORS:
        raise error("INVALID_REQUEST", f"the snapshot has {len(head.cursors)} cursors: more than a topic can have")
    policy = replace(policy_of(head.policy), cursors=cursors_of(head.cursors))
    return SavedParts(
        head.term, position, policy, head.broker_position, head.producers, has_forgotten=head.has_forgotten
    )
