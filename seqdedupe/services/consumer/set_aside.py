"""Messages that were set aside: the dead letters, and those that are tried again later."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update

from seqdedupe.batch import Batch, Binary, properties, single_producer
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.databases.failures import Fault, fault_of, told
from seqdedupe.limits import LINK_LEFT_OUT, NO_EPOCH
from seqdedupe.message_id import Position
from seqdedupe.message_ids import MessageIds
from seqdedupe.services.consumer.database import DEAD_LETTERS, PARKED

BEHIND = "waits behind an earlier message of its key"
"""What stands as the error of such a message."""

_MAX_ERROR_CHARACTERS = 2000

_NO_CONTENT = {"message_key": None, "deduplication_id": None, "payload": None, "properties": "null"}


def has_content(row: Row[Any]) -> bool:
    """Whether a dead letter has the message, and not its place alone."""
    return bool(row.properties != _NO_CONTENT["properties"])


def key_hash(key: bytes | None) -> str | None:
    """By which a key's messages find each other; None: there is no key, and no order."""
    return None if key is None else hashlib.sha256(key).hexdigest()


def content(message: Message, attempts: int, why: str) -> dict[str, Any]:
    """The values of `content_columns`."""
    return {
        "position": str(message.position),
        "message_key": message.key,
        "deduplication_id": message.deduplication_id,
        "payload": message.payload,
        "properties": json.dumps(message.properties),
        "producer_name": message.producer_name,
        "sequence_id": message.sequence_id,
        "event_time_ms": message.event_time_ms,
        "publish_time_ms": message.publish_time_ms,
        "attempts": attempts,
        "error": why,
    }


def message_of(row: Row[Any]) -> Message:
    """The message of a row with `content_columns`, as it was read from the topic."""
    position = Position.parse(row.position)
    names = properties([json.loads(row.properties)])
    batch: Batch = single_producer(
        row.producer_name.encode(),
        NO_EPOCH,
        LINK_LEFT_OUT,
        np.array([row.sequence_id], np.int64),
        Binary.of([row.payload]) if row.payload is not None else Binary(),
        event_times_ms=np.array([row.event_time_ms], np.int64),
        keys=Binary.of([row.message_key]),
        property_offsets=names[0],
        property_names=names[1],
        property_values=names[2],
    )
    if row.deduplication_id is not None:
        batch = replace(batch, deduplication_ids=Binary.of([row.deduplication_id]))
    message_id = position.message_id
    ids = None if message_id is None else MessageIds.of([(1, *message_id)])
    stored = StoredBatch(batch, position.index, row.publish_time_ms, position.incarnation, position.ownership, ids)
    return Message(stored, 0)


def why(failure: BaseException) -> str:
    """One line, without what databases take in no text: NUL, and what is not valid Unicode."""
    said = failure if fault_of(failure) is Fault.MESSAGE else told(failure)
    text = f"{type(failure).__name__}: {said}".replace("\x00", "").encode(errors="backslashreplace").decode()
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]


class SetAside:
    """Both tables, of one consumer. All that writes is called within a transaction that holds the consumer's row."""

    def __init__(self, consumer: str, topic: str, dead_letter_topic: str | None = None) -> None:
        self._of = {"consumer": consumer, "topic": topic}
        self._to = {"dead_letter_topic": dead_letter_topic}
        self._parked = PARKED.c.consumer == consumer

    def bury(self, connection: Connection, message: Message, attempts: int, error: str, now_ms: int) -> None:
        """To the dead letters, and from there to the topic of them if there is one."""
        row = self._row(message, attempts, error)
        connection.execute(insert(DEAD_LETTERS).values(**row, **self._to, given_up_ms=now_ms))

    def bury_without_content(
        self, connection: Connection, message: Message, attempts: int, error: str, refused: str, now_ms: int
    ) -> None:
        """To the dead letters, for people, where the database does not take the message itself: one that is larger than
        a statement may be, for instance. The topic has it."""
        said = f"{error}; the dead letter has no content, as the database refuses that: {refused}"
        row = self._row(message, attempts, said[:_MAX_ERROR_CHARACTERS]) | _NO_CONTENT
        connection.execute(insert(DEAD_LETTERS).values(**row, dead_letter_topic=None, given_up_ms=now_ms))

    def _row(self, message: Message, attempts: int, error: str) -> dict[str, Any]:
        place = {"incarnation": message.position.incarnation, "message_index": message.index}
        return self._of | place | content(message, attempts, error)

    def park(
        self,
        connection: Connection,
        messages: Sequence[Message],
        attempts: int,
        error: str,
        next_attempt_ms: int | None,
    ) -> None:
        """To be tried again: at a time, or (None) when what stands before it with its key is done with."""
        rows = [
            self._row(message, attempts, error)
            | {"key_hash": key_hash(message.key), "next_attempt_ms": next_attempt_ms}
            for message in messages
        ]
        if rows:
            connection.execute(insert(PARKED), rows)

    def keys_parked(self, connection: Connection, messages: Iterable[Message]) -> set[str]:
        """Which of the messages' keys have something parked, by their hashes."""
        hashes = {hashed for message in messages if (hashed := key_hash(message.key)) is not None}
        if not hashes:
            return set()
        wanted = select(PARKED.c.key_hash).where(self._parked & PARKED.c.key_hash.in_(hashes)).distinct()
        return set(connection.execute(wanted).scalars())

    def has_parked(self, engine: Engine) -> bool:
        """Whether there is any."""
        with engine.begin() as connection:
            return connection.execute(select(PARKED.c.consumer).where(self._parked).limit(1)).first() is not None

    def next_due(self, engine: Engine, now_ms: int) -> Row[Any] | None:
        """The one whose time came first, if it has come."""
        wanted = select(PARKED).where(self._parked & (PARKED.c.next_attempt_ms <= now_ms))
        with engine.begin() as connection:
            return connection.execute(
                wanted.order_by(PARKED.c.next_attempt_ms, PARKED.c.message_index).limit(1)
            ).first()

    def is_there(self, connection: Connection, row: Row[Any]) -> bool:
        """Whether a row that was seen before the transaction is still to be tried: a person may have dropped it."""
        wanted = select(PARKED.c.next_attempt_ms).where(self._is(row))
        return connection.execute(wanted).scalar_one_or_none() is not None

    def again(self, connection: Connection, row: Row[Any], error: str, next_attempt_ms: int) -> None:
        """It failed once more."""
        values = {"attempts": row.attempts + 1, "error": error, "next_attempt_ms": next_attempt_ms}
        connection.execute(update(PARKED).where(self._is(row)).values(**values))

    def let_go(self, connection: Connection, row: Row[Any]) -> None:
        """It is done with: out of the table, and the turn of the next one with its key."""
        connection.execute(delete(PARKED).where(self._is(row)))
        if row.key_hash is None:
            return
        same = self._parked & (PARKED.c.key_hash == row.key_hash)
        order = (PARKED.c.incarnation, PARKED.c.message_index)
        first = connection.execute(select(*order).where(same).order_by(*order).limit(1)).first()
        if first is not None:
            is_first = same & (PARKED.c.incarnation == first[0]) & (PARKED.c.message_index == first[1])
            connection.execute(
                update(PARKED).where(is_first).values(next_attempt_ms=func.coalesce(PARKED.c.next_attempt_ms, 0))
            )

    def _is(self, row: Row[Any]) -> Any:
        same_index = PARKED.c.message_index == row.message_index
        return self._parked & (PARKED.c.incarnation == row.incarnation) & same_index
