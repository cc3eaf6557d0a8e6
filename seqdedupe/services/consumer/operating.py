"""What people do with messages that were set aside."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Row, Table, delete, insert, select, update

from seqdedupe.errors import error
from seqdedupe.limits import MAX_PARTITIONS
from seqdedupe.services.consumer.database import CONSUMERS, DEAD_LETTERS, PARKED
from seqdedupe.services.consumer.set_aside import SetAside, has_content, key_hash
from seqdedupe.services.consumer.sharing import row_name


def set_aside(engine: Engine, name: str, limit: int) -> list[tuple[str, Row[Any]]]:
    """What a consumer has parked ("parked") and given up ("dead"), each by its place in the topic, at most so many of
    each; `row.consumer` is the consumer's name, or with its partition. Raises INVALID_OPTION if there is no such
    consumer."""
    with engine.begin() as connection:
        names = _names(connection, name)
        both = (("parked", PARKED), ("dead", DEAD_LETTERS))
        return [
            (kind, row) for one in names for kind, table in both for row in _rows(connection, table, one, limit=limit)
        ]


class Retried(NamedTuple):
    """What `retry` has come to."""

    now: int
    """So many messages are tried as soon as the consumer runs."""

    behind: list[int]
    """Those of the indexes that wait behind an earlier message of their key, and follow it."""

    leaving: list[int]
    """Those that are on their way to a topic of dead letters, and stay as they are."""


def retry(engine: Engine, name: str, indexes: Sequence[int]) -> Retried:
    """Lets the messages with these indexes (none: all that are parked) be tried now; dead letters too: they are parked
    again, before what is parked with their key, unless they are on their way to a topic. Raises INVALID_OPTION, and
    changes nothing, if one of them was not set aside, or without its content."""
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
            # Those that wait behind another one keep waiting: it is the order of their key.
            due = _having(PARKED, one, indexes) & PARKED.c.next_attempt_ms.is_not(None)
            now += connection.execute(update(PARKED).where(due).values(next_attempt_ms=0)).rowcount
        parked = _rows(connection, PARKED, names[0], indexes) if indexes else []
        return Retried(now, [row.message_index for row in parked if row.next_attempt_ms is None], leaving)


def drop(engine: Engine, name: str, indexes: Sequence[int]) -> int:
    """Takes the messages with these indexes out of both tables, for good: what waits behind them has its turn. Returns
    how many. Raises INVALID_OPTION, and changes nothing, if one of them was not set aside."""
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
    """The rows of a consumer: one, or one for each partition. An index means one partition's."""
    found = set(connection.execute(select(CONSUMERS.c.name)).scalars())
    if name in found:
        return [name]
    names = list(itertools.takewhile(found.__contains__, (row_name(name, k) for k in range(MAX_PARTITIONS))))
    if not names:
        raise error("INVALID_OPTION", f"there is no consumer {name!r} in this database", hint="Is the name mistyped?")
    if indexes:
        what = f"the consumer {name!r} has {len(names)} partitions, each with indexes of its own"
        raise error("INVALID_OPTION", what, hint=f"Name one of them: {names[0]}.")
    return names


def _lock(connection: Connection, name: str) -> str:
    """No transaction of the consumer has anything to do with this one. Returns its topic."""
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
    # Its attempts count anew.
    connection.execute(insert(PARKED).values(values | {"attempts": 0, "key_hash": hashed}))
    same = (DEAD_LETTERS.c.incarnation == row.incarnation) & (DEAD_LETTERS.c.message_index == row.message_index)
    connection.execute(delete(DEAD_LETTERS).where((DEAD_LETTERS.c.consumer == row.consumer) & same))
