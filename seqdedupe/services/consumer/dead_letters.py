"""Messages that were set aside: dead letters, and parked messages, which are tried again later. `SetAside` contains
both tables. After `SetAside` come the actions that a person can start, and the publishing of dead letters to a
topic."""

import asyncio
import concurrent.futures
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Engine, Row, Table, delete, func, insert, select, update

from seqdedupe.batch import Batch, Binary, properties, single_producer
from seqdedupe.client import Client, Publisher
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.client.route import OnWaiting
from seqdedupe.databases.failures import Fault, fault_of, told
from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.figures import counted
from seqdedupe.limits import LINK_LEFT_OUT, MAX_DEDUPLICATION_ID_BYTES, MAX_PARTITIONS, NO_EPOCH
from seqdedupe.message_id import MessageIds, Position
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.database import CONSUMERS, DEAD_LETTERS, PARKED, row_name
from seqdedupe.services.consumer.message_arrivals import Stop
from seqdedupe.v1 import admin_pb2

BEHIND = "waits behind an earlier message of its key"
"""The error text of a message that waits for an earlier message of its key."""

_MAX_ERROR_CHARACTERS = 2000

_NO_CONTENT = {"message_key": None, "deduplication_id": None, "payload": None, "properties": "null"}


def has_content(row: Row[Any]) -> bool:
    """Return whether a dead letter contains the complete message, and not only its index."""
    return bool(row.properties != _NO_CONTENT["properties"])


def key_hash(key: bytes | None) -> str | None:
    """Return the hash that identifies the messages of a key; None for a message without a key. Messages without keys
    have no order."""
    return None if key is None else hashlib.sha256(key).hexdigest()


def content(message: Message, attempts: int, why: str) -> dict[str, Any]:
    """Return the values for the columns of `content_columns`."""
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
    """Return the message in a row with `content_columns`, as the reader returned it."""
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
    """Return the text of the failure in one line, without characters that databases refuse: NUL, and invalid
    Unicode."""
    said = failure if fault_of(failure) is Fault.MESSAGE else told(failure)
    text = f"{type(failure).__name__}: {said}".replace("\x00", "").encode(errors="backslashreplace").decode()
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]


class SetAside:
    """Both tables of one consumer. Every write runs in a transaction that holds the lock on the consumer's row."""

    def __init__(self, consumer: str, topic: str, dead_letter_topic: str | None = None) -> None:
        self._of = {"consumer": consumer, "topic": topic}
        self._to = {"dead_letter_topic": dead_letter_topic}
        self._parked = PARKED.c.consumer == consumer

    def bury(self, connection: Connection, message: Message, attempts: int, error: str, now_ms: int) -> None:
        """Move the message to the dead letters. If there is a topic for dead letters, the letter is published there
        later."""
        row = self._row(message, attempts, error)
        connection.execute(insert(DEAD_LETTERS).values(**row, **self._to, given_up_ms=now_ms))

    def bury_without_content(
        self, connection: Connection, message: Message, attempts: int, error: str, refused: str, now_ms: int
    ) -> None:
        """Write a dead letter without the message's content. This is for a message that the database refuses, for
        instance because the message is larger than a statement may be. The topic still contains the message."""
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
        """Park messages to be tried again at this time. None: try them again after the earlier messages of their key
        are finished."""
        rows = [
            self._row(message, attempts, error)
            | {"key_hash": key_hash(message.key), "next_attempt_ms": next_attempt_ms}
            for message in messages
        ]
        if rows:
            connection.execute(insert(PARKED), rows)

    def keys_parked(self, connection: Connection, messages: Iterable[Message]) -> set[str]:
        """Return the hashes of the keys of these messages, but only of keys for which a message is parked."""
        hashes = {hashed for message in messages if (hashed := key_hash(message.key)) is not None}
        if not hashes:
            return set()
        wanted = select(PARKED.c.key_hash).where(self._parked & PARKED.c.key_hash.in_(hashes)).distinct()
        return set(connection.execute(wanted).scalars())

    def has_parked(self, engine: Engine) -> bool:
        """Whether any message is parked."""
        with engine.begin() as connection:
            return connection.execute(select(PARKED.c.consumer).where(self._parked).limit(1)).first() is not None

    def next_due(self, engine: Engine, now_ms: int) -> Row[Any] | None:
        """Return the row with the earliest time for the next attempt, if that time has passed."""
        wanted = select(PARKED).where(self._parked & (PARKED.c.next_attempt_ms <= now_ms))
        with engine.begin() as connection:
            return connection.execute(
                wanted.order_by(PARKED.c.next_attempt_ms, PARKED.c.message_index).limit(1)
            ).first()

    def is_there(self, connection: Connection, row: Row[Any]) -> bool:
        """Return whether a row that was seen before the transaction is still in the table. A person may have deleted
        it."""
        wanted = select(PARKED.c.next_attempt_ms).where(self._is(row))
        return connection.execute(wanted).scalar_one_or_none() is not None

    def again(self, connection: Connection, row: Row[Any], error: str, next_attempt_ms: int) -> None:
        """Record that one more attempt with the message has failed."""
        values = {"attempts": row.attempts + 1, "error": error, "next_attempt_ms": next_attempt_ms}
        connection.execute(update(PARKED).where(self._is(row)).values(**values))

    def let_go(self, connection: Connection, row: Row[Any]) -> None:
        """Delete the finished message from the table. Then the next message with the same key can be tried."""
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


# -- What people do with messages that were set aside.


def set_aside(engine: Engine, name: str, limit: int) -> list[tuple[str, Row[Any]]]:
    """Return (kind, row) for each message that a consumer has set aside. The kind is "parked" or "dead".

    The rows of one kind and partition are in the order of the topic, and at most `limit` are returned. `row.consumer`
    is the consumer's name; for a partitioned topic it includes the partition. Raises INVALID_OPTION if the consumer
    does not exist.
    """
    with engine.begin() as connection:
        names = _names(connection, name)
        both = (("parked", PARKED), ("dead", DEAD_LETTERS))
        return [
            (kind, row) for one in names for kind, table in both for row in _rows(connection, table, one, limit=limit)
        ]


class Retried(NamedTuple):
    """The result of `retry`."""

    now: int
    """The number of messages that the consumer tries as soon as it runs."""

    behind: list[int]
    """The indexes of messages that wait for an earlier message of their key, and are tried after that message."""

    leaving: list[int]
    """The indexes of dead letters that are waiting to be published to a topic. They do not change."""


def retry(engine: Engine, name: str, indexes: Sequence[int]) -> Retried:
    """Make the consumer try the messages with these indexes now. Without indexes, the consumer tries all parked
    messages.

    Dead letters are parked again, before the parked messages with the same key that come later in the topic. A dead
    letter that waits to be published to a topic does not change. Raises INVALID_OPTION, and changes nothing, if one of
    the messages was not set aside, or has no content.
    """
    now, leaving = 0, []
    with engine.begin() as connection:
        names = _names(connection, name, indexes)
        for one in names:
            _lock(connection, one)
            dead = _rows(connection, DEAD_LETTERS, one, indexes) if indexes else []
            _check_there(one, indexes, [*dead, *_rows(connection, PARKED, one, indexes)])
            _check_content(one, dead)
            for row in dead:
                if row.dead_letter_topic is None:
                    _park_again(connection, row)
                else:
                    leaving.append(row.message_index)
            # A message that waits for an earlier message of its key keeps waiting, because the order of the key must
            # not change.
            due = _having(PARKED, one, indexes) & PARKED.c.next_attempt_ms.is_not(None)
            now += connection.execute(update(PARKED).where(due).values(next_attempt_ms=0)).rowcount
        parked = _rows(connection, PARKED, names[0], indexes) if indexes else []
        return Retried(now, [row.message_index for row in parked if row.next_attempt_ms is None], leaving)


def drop(engine: Engine, name: str, indexes: Sequence[int]) -> int:
    """Delete the messages with these indexes from both tables permanently. The consumer can then try messages that
    waited for the deleted messages.

    Return the number of deleted messages. Raises INVALID_OPTION, and changes nothing, if one of the messages was not
    set aside.
    """
    with engine.begin() as connection:
        [one] = _names(connection, name, indexes)
        aside = SetAside(one, _lock(connection, one))
        parked = _rows(connection, PARKED, one, indexes)
        _check_there(one, indexes, [*parked, *_rows(connection, DEAD_LETTERS, one, indexes)])
        for row in parked:
            aside.let_go(connection, row)
        dead = connection.execute(delete(DEAD_LETTERS).where(_having(DEAD_LETTERS, one, indexes))).rowcount
        return len(parked) + dead


def _check_there(name: str, indexes: Sequence[int], found: Sequence[Row[Any]]) -> None:
    missing = sorted(set(indexes).difference(row.message_index for row in found))
    if missing:
        what = f"the consumer {name!r} has set aside no message with index {', '.join(map(str, missing))}"
        hint = "`seqdedupe consumer parked` lists what it has."
        raise error("INVALID_OPTION", what, hint=hint)


def _check_content(name: str, dead: Sequence[Row[Any]]) -> None:
    empty = [row.message_index for row in dead if not has_content(row)]
    if empty:
        what = f"the consumer {name!r} has the dead letters {', '.join(map(str, empty))} without their content"
        hint = f"Their database did not take it. The topic has it: seqdedupe read {dead[0].topic}"
        raise error("INVALID_OPTION", what, hint=hint)


def _names(connection: Connection, name: str, indexes: Sequence[int] = ()) -> list[str]:
    """Return the names of a consumer's rows: one name, or one name for each partition. If indexes are given, the
    consumer must have exactly one row."""
    found = set(connection.execute(select(CONSUMERS.c.name)).scalars())
    if name in found:
        return [name]
    names = list(itertools.takewhile(found.__contains__, (row_name(name, k) for k in range(MAX_PARTITIONS))))
    if not names:
        raise error(
            "INVALID_OPTION", f"there is no consumer {name!r} in this database", hint="Check the consumer's name."
        )
    if indexes:
        what = f"the consumer {name!r} has {counted(len(names), 'partition')}, each with separate indexes"
        raise error("INVALID_OPTION", what, hint=f"Name one of the partitions: {names[0]}.")
    return names


def _lock(connection: Connection, name: str) -> str:
    """Lock the consumer's row, so that no transaction of the consumer runs at the same time. Return the consumer's
    topic."""
    connection.execute(update(CONSUMERS).where(CONSUMERS.c.name == name).values(beat=CONSUMERS.c.beat + 1))
    return str(connection.execute(select(CONSUMERS.c.topic).where(CONSUMERS.c.name == name)).scalar_one())


def _having(table: Table, name: str, indexes: Sequence[int]) -> Any:
    mine = table.c.consumer == name
    return mine & table.c.message_index.in_(indexes) if indexes else mine


def _rows(
    connection: Connection, table: Table, name: str, indexes: Sequence[int] = (), limit: int | None = None
) -> Sequence[Row[Any]]:
    order = (table.c.incarnation, table.c.message_index)
    return connection.execute(select(table).where(_having(table, name, indexes)).order_by(*order).limit(limit)).all()


def _park_again(connection: Connection, row: Row[Any]) -> None:
    values = {column: value for column, value in row._mapping.items() if column in PARKED.c}
    hashed = key_hash(row.message_key)
    if hashed is not None:
        same_key = (PARKED.c.consumer == row.consumer) & (PARKED.c.key_hash == hashed)
        before = connection.execute(
            select(PARKED.c.message_index).where(
                same_key & (PARKED.c.incarnation == row.incarnation) & (PARKED.c.message_index < row.message_index)
            )
        ).first()
        if before is None:
            connection.execute(update(PARKED).where(same_key).values(next_attempt_ms=None))
        values |= {"next_attempt_ms": None if before else 0}
    else:
        values |= {"next_attempt_ms": 0}
    # The count of attempts restarts.
    connection.execute(insert(PARKED).values(values | {"attempts": 0, "key_hash": hashed}))
    same = (DEAD_LETTERS.c.incarnation == row.incarnation) & (DEAD_LETTERS.c.message_index == row.message_index)
    connection.execute(delete(DEAD_LETTERS).where((DEAD_LETTERS.c.consumer == row.consumer) & same))


# -- Dead letters on their way to a topic: the consumer's own outbox.

logger = logging.getLogger("seqdedupe.services")

PUBLISHED_TOGETHER = 100
_POLL_SECONDS = 0.02


def deduplication_id(consumer: str, topic: str, incarnation: int, index: int, identity: str | None) -> str:
    """Return the deduplication ID of a dead letter. The ID is the same at each attempt to publish the dead letter. The
    ID names the message and the consumer that gave the message up. An ID that would be too long is replaced by its
    SHA-256.

    Without the identity, consumers with the same name in two databases would have the same IDs. A consumer with a row
    of format 1 has no identity, because the dead letters of this consumer may be in the topic already.
    """
    text = f"{consumer}/{topic}/{incarnation}/{index}" + (f"/{identity}" if identity else "")
    return text if len(text.encode()) <= MAX_DEDUPLICATION_ID_BYTES else hashlib.sha256(text.encode()).hexdigest()


async def check_topic(client: Client, topic: str) -> None:
    """Raise INVALID_OPTION for a topic of sequence IDs, or a topic that requires a key in every message. Raises
    NotFoundError.

    Dead letters are published in any order, so a watermark would drop late letters as duplicates. A dead letter may
    have no key.
    """
    found = await client.admin.topic(topic)
    if found.deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY:
        why = f"{topic} selects partitions by key, but a dead letter may have no key"
        raise error("INVALID_OPTION", why, hint="Create a topic with the route `id`, or without partitions.")
    if found.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"{topic} is not a topic of deduplication IDs, and dead letters have no order",
            hint="Create such a topic: seqdedupe topics create --deduplication-mode deduplication-id TOPIC",
        )


class DeadLetterPublisher:
    """Publishes dead letters to their topic while the consumer works, and deletes the letters that are in the topic.

    Several processes may do this at the same time: deduplication stores each dead letter in the topic only once.
    """

    def __init__(
        self, client: Client, engine: Engine, consumers: Sequence[str], stop: Stop, on_waiting: OnWaiting | None
    ) -> None:
        self._client = client
        self._engine = engine
        self._mine = DEAD_LETTERS.c.consumer.in_(consumers) & DEAD_LETTERS.c.dead_letter_topic.is_not(None)
        self._stop = stop
        self._on_waiting = on_waiting
        self._looked_at = float("-inf")
        self._publishing: concurrent.futures.Future[list[bool]] | None = None
        self._rows: Sequence[Row[Any]] = ()

    def keep_up(self) -> None:
        """Publish dead letters that exist now, at intervals and without waiting. Raises Away, and the errors that end a
        publisher."""
        if time.monotonic() - self._looked_at >= database.KEEP_UP_SECONDS:
            self._looked_at = time.monotonic()
            self._step()

    def finish(self) -> None:
        """Publish until there are no more dead letters. Raises Stopped, and the errors of `keep_up`."""
        while self._step():
            self._stop.pause(_POLL_SECONDS)

    def close(self) -> None:
        """Stop. A letter in flight may or may not be in the topic; the next process finds out."""
        if self._publishing is not None:
            self._publishing.cancel()

    def _step(self) -> bool:
        """Publish the next letters. Return whether there are any."""
        if self._publishing is not None:
            if not self._publishing.done():
                return True
            publishing, self._publishing = self._publishing, None
            self._settle(publishing.result())
        wanted = select(DEAD_LETTERS).where(self._mine).order_by(DEAD_LETTERS.c.given_up_ms)
        with database.reaching(), self._engine.begin() as connection:
            found = connection.execute(wanted.limit(PUBLISHED_TOGETHER)).all()
            identities = database.identities_of(connection, {row.consumer for row in found})
        if not found:
            return False
        self._rows = [row for row in found if row.dead_letter_topic == found[0].dead_letter_topic]
        begun = self._publish(found[0].dead_letter_topic, self._rows, identities)
        self._publishing = asyncio.run_coroutine_threadsafe(begun, event_loop())
        return True

    def _settle(self, are_there: Sequence[bool]) -> None:
        with database.reaching(), self._engine.begin() as connection:
            for row, is_there in zip(self._rows, are_there, strict=True):
                same = (DEAD_LETTERS.c.incarnation == row.incarnation) & (
                    DEAD_LETTERS.c.message_index == row.message_index
                )
                this = (DEAD_LETTERS.c.consumer == row.consumer) & same
                if is_there:
                    connection.execute(delete(DEAD_LETTERS).where(this))
                else:  # the letter stays in the table, for a person to handle
                    connection.execute(update(DEAD_LETTERS).where(this).values(dead_letter_topic=None))

    async def _publish(self, topic: str, rows: Sequence[Row[Any]], identities: Mapping[str, str]) -> list[bool]:
        """Publish these rows. Return for each row whether the topic contains the row durably. False means that the
        topic does not accept the row."""
        async with self._client.publisher(
            topic, on_waiting=self._on_waiting, delivery_timeout_seconds=None
        ) as publisher:
            return await asyncio.gather(*(_send(publisher, row, identities.get(row.consumer)) for row in rows))


async def _send(publisher: Publisher, row: Row[Any], identity: str | None) -> bool:
    of_message = {
        "REAL_TOPIC": row.topic,
        "REAL_SUBSCRIPTION": row.consumer,
        "ORIGIN_MESSAGE_ID": str(Position.parse(row.position).message_id or ""),
        "EXCEPTION_MESSAGE": row.error,
    }
    try:
        await publisher.send(
            row.payload,
            deduplication_id=deduplication_id(row.consumer, row.topic, row.incarnation, row.message_index, identity),
            key=row.message_key,
            event_time=row.event_time_ms or None,
            properties=json.loads(row.properties) | of_message,
        )
    except InvalidRequestError as e:
        # The letter is too large, or the topic has changed. Raising an exception here would end the consumer at each
        # start.
        said = "the dead letter of index %d of %s stays in its table: its topic %s does not take it: %s"
        logger.error(said, row.message_index, row.topic, row.dead_letter_topic, e)
        return False
    return True
