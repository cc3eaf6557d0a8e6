"""What a service does: a row into its outbox, in the transaction of whatever it tells of."""

import json
import uuid
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, Executable, text

from seqdedupe.errors import error
from seqdedupe.services.outbox.rows import COLUMNS, TABLE

_INSERT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES (:id, :aggregatetype, :aggregateid, :type, {{}})"

_KIND = text(
    "SELECT typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
    f"WHERE attrelid = to_regclass('{TABLE}') AND attname = 'payload'"
)
_JSON_KINDS = ("json", "jsonb")

_kinds: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()
"""Of the payload's column in databases of PostgreSQL, as far as it was looked at."""

Id = uuid.UUID | str | bytes


class Executing(Protocol):
    """A `Connection` or `Session` of SQLAlchemy."""

    def execute(self, statement: Executable, parameters: Any = None, /) -> Any: ...


class Outbox:
    """The outbox of a database, by a connection or session of SQLAlchemy: what `add` inserts is published if, and only
    if, its transaction commits.

    With an `AsyncConnection` or `AsyncSession`: `await session.run_sync(lambda session: Outbox(session).add(…))`.
    """

    def __init__(self, connection: Executing) -> None:
        self._connection = connection

    def add(
        self,
        aggregatetype: str,
        aggregateid: str | int,
        type: str,
        payload: bytes | str | dict[str, Any] | list[Any] | None,
        *,
        id: Id | None = None,
    ) -> Id:
        """Inserts a row; its `id`, a new UUID unless it is given. An `id` must never come a second time.

        `aggregateid` becomes the message's key. The payload is bytes for a column of bytes, as `seqdedupe outbox ddl`
        makes it; for one of text it is text, or bytes in UTF-8; for one of JSON either, or a dict or list. Raises
        INVALID_REQUEST, which inserts nothing, for an `id` that is none and text that is not valid Unicode, and what
        SQLAlchemy does, also for a payload that does not fit its column; the transaction is the caller's.
        """
        given: Id = uuid.uuid4() if id is None else id
        values: dict[str, Any] = {
            "id": str(given) if isinstance(given, uuid.UUID) else given,
            "aggregatetype": aggregatetype,
            "aggregateid": aggregateid,
            "type": type,
            "payload": json.dumps(payload, ensure_ascii=False) if isinstance(payload, dict | list) else payload,
        }
        _check(values)
        self._connection.execute(text(_INSERT.format(self._payload(values["payload"]))), values)
        return given

    def _payload(self, value: bytes | str | None) -> str:
        """How the payload stands in the statement. PostgreSQL would read text for a column of bytes as escapes, and
        write bytes into one of text as hexadecimal digits: so each has its cast."""
        # A session knows the connection's engine only when it is bound to one.
        connection: Any = self._connection
        bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
        if value is None or bind.dialect.name != "postgresql":
            return ":payload"
        kind = self._kind(bind.engine)
        placed = "CAST(:payload AS text)"
        if isinstance(value, bytes):
            placed = "CAST(:payload AS bytea)" if kind == "bytea" else "convert_from(CAST(:payload AS bytea), 'UTF8')"
        return f"CAST({placed} AS {kind})" if kind in _JSON_KINDS else placed

    def _kind(self, engine: Engine) -> str:
        if engine not in _kinds:
            kind = self._connection.execute(_KIND).scalar()
            if kind is None:
                return ""  # there is no such table, or column: the insert says so
            _kinds[engine] = kind
        return _kinds[engine]


def _check(values: dict[str, Any]) -> None:
    """Raises INVALID_REQUEST."""
    if not isinstance(values["id"], str | bytes) or not values["id"]:
        what = f"the id of an outbox's row is {values['id']!r:.80}: it should be a UUID, text or bytes, and not empty"
        raise error("INVALID_REQUEST", what, hint="Leave it out to get a new one: an id must never come again.")
    for name, value in values.items():
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_REQUEST", f"the {name} of an outbox's row is not valid Unicode: {e.reason}") from e
