"""What a service does: a row into its outbox, in the transaction of whatever it tells of."""

import json
import uuid
from typing import Any, Protocol

from sqlalchemy import Executable, text

from seqdedupe.services.outbox.rows import COLUMNS, TABLE

_INSERT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES (:id, :aggregatetype, :aggregateid, :type, {{}})"

# A cast to the payload's own kind makes PostgreSQL refuse text for a column of bytes, which it would read as escapes.
_BYTES = text(_INSERT.format(":payload"))
_TEXT = text(_INSERT.format("CAST(:payload AS text)"))
_JSON = text(_INSERT.format("CAST(:payload AS jsonb)"))

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

        `aggregateid` becomes the message's key. The payload has to fit its column: bytes in the table that
        `seqdedupe outbox ddl` makes, text or JSON (a dict or list) where the column is of that kind. Raises what
        SQLAlchemy does; the transaction is the caller's.
        """
        given: Id = uuid.uuid4() if id is None else id
        statement = _BYTES
        value: object = payload
        if isinstance(payload, str):
            statement = _TEXT
        elif isinstance(payload, dict | list):
            statement, value = _JSON, json.dumps(payload, ensure_ascii=False)
            if self._is_sqlite():
                statement = _TEXT
        self._connection.execute(
            statement,
            {
                "id": str(given) if isinstance(given, uuid.UUID) else given,
                "aggregatetype": aggregatetype,
                "aggregateid": aggregateid,
                "type": type,
                "payload": value,
            },
        )
        return given

    def _is_sqlite(self) -> bool:
        # A session knows the connection's engine only when it is bound to one.
        connection: Any = self._connection
        bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
        return bool(bind.dialect.name == "sqlite")
