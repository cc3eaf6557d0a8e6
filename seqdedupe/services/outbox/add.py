"""What a service does: a row into its outbox, in the transaction of whatever it tells of."""

import json
import uuid
from collections import Counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Executable, text
from sqlalchemy.exc import DataError, DBAPIError

from seqdedupe.databases.failures import codes_of, told
from seqdedupe.databases.tables import NO_AUTOCOMMIT
from seqdedupe.errors import error
from seqdedupe.services.outbox.rows import COLUMNS, TABLE

_INSERT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES (:id, :aggregatetype, :aggregateid, :type, {{}})"

_KINDS = text(
    "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
    f"WHERE attrelid = to_regclass('{TABLE}') AND attname IN ('id', 'payload')"
)
_JSON_KINDS = ("json", "jsonb")
_WRONG_TYPE = "42804"
"""PostgreSQL's SQLSTATE for a value of another type than its column."""

_kinds: WeakKeyDictionary[Engine, dict[str, str]] = WeakKeyDictionary()
"""Of the columns of `id` and payload in databases of PostgreSQL, as far as they were looked at."""

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

        `aggregateid` becomes the message's key. Text and JSON are UTF-8 where the column is bytes, and bytes are taken
        for UTF-8 where it is text or JSON. Raises INVALID_REQUEST, which inserts nothing, for an `id` or payload that
        is none or does not fit its column, NaN and keys that are one in JSON among that, and for text that is not valid
        Unicode; and NOT_TRANSACTIONAL on a connection that commits each statement. What else SQLAlchemy raises is the
        caller's, as is the transaction.
        """
        given: Id = uuid.uuid4() if id is None else id
        values: dict[str, Any] = {
            "id": str(given) if isinstance(given, uuid.UUID) else given,
            "aggregatetype": aggregatetype,
            "aggregateid": aggregateid,
            "type": type,
            "payload": _json(payload) if isinstance(payload, dict | list) else payload,
        }
        _check(values)
        # A session knows the connection's engine only when it is bound to one.
        connection: Any = self._connection
        bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
        _check_transaction(connection.connection() if callable(connection.connection) else connection)
        kinds = self._kinds(bind.engine) if bind.dialect.name == "postgresql" else {}
        values["id"] = _id_for(kinds.get("id"), values["id"])
        try:
            connection.execute(text(_INSERT.format(_payload_for(kinds.get("payload"), values))), values)
        except DBAPIError as e:
            if isinstance(e, DataError) or codes_of(e)[0] == _WRONG_TYPE:
                raise error("INVALID_REQUEST", f"the columns of {TABLE} do not take this row: {told(e)}") from e
            raise
        return given

    def _kinds(self, engine: Engine) -> dict[str, str]:
        if engine not in _kinds:
            found: dict[str, str] = dict(self._connection.execute(_KINDS).all())
            if not found:
                return {}  # there is no such table: the insert says so
            _kinds[engine] = found
        return _kinds[engine]


def _json(payload: dict[str, Any] | list[Any]) -> str:
    """Raises INVALID_REQUEST."""
    try:
        made = json.dumps(payload, ensure_ascii=False, allow_nan=False)
        json.loads(made, object_pairs_hook=_check_names)
    except (TypeError, ValueError, RecursionError) as e:
        raise error("INVALID_REQUEST", f"the payload of an outbox's row cannot be JSON: {e}") from e
    return made


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """Raises ValueError for a name that an object has twice: JSON has no other keys than text, so `1` is `"1"`."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        [(name, _)] = Counter(names).most_common(1)
        raise ValueError(f"two keys of an object would both be {json.dumps(name, ensure_ascii=False):.80}")


def _id_for(kind: str | None, value: str | bytes) -> str | bytes:
    """As the column takes it. Raises INVALID_REQUEST."""
    if kind == "bytea":
        return value.encode() if isinstance(value, str) else value
    if kind == "uuid":
        try:
            return str(uuid.UUID(value if isinstance(value, str) else ""))
        except ValueError as e:
            what = f"the id of an outbox's row is {value!r:.80}, and the column {TABLE}.id takes UUIDs alone"
            raise error("INVALID_REQUEST", what, hint=f"ALTER TABLE {TABLE} ALTER id TYPE text takes any text.") from e
    return value


def _payload_for(kind: str | None, values: dict[str, Any]) -> str:
    """How the payload stands in the statement. PostgreSQL would read text for a column of bytes as escapes, and write
    bytes into one of text as hexadecimal digits: so each has its cast. Raises INVALID_REQUEST."""
    value = values["payload"]
    if value is None or kind is None:
        return ":payload"
    if kind == "bytea":
        values["payload"] = value.encode() if isinstance(value, str) else value
        return "CAST(:payload AS bytea)"
    if isinstance(value, bytes):
        try:
            values["payload"] = value.decode()
        except UnicodeDecodeError as e:
            what = f"the payload of an outbox's row is not UTF-8, and the column {TABLE}.payload is {kind}: {e.reason}"
            raise error("INVALID_REQUEST", what) from e
    return f"CAST(CAST(:payload AS text) AS {kind})" if kind in _JSON_KINDS else "CAST(:payload AS text)"


def _check_transaction(connection: Connection) -> None:
    """Raises NOT_TRANSACTIONAL, before anything is inserted that would stay."""
    proxied = connection.connection
    for raw in (proxied.dbapi_connection, proxied.driver_connection):
        if _commits_each_statement(raw):
            connection.execute(text("SELECT 1"))  # what listens for the beginning of a transaction may begin one
            if _commits_each_statement(raw):
                what = (
                    f"the connection that Outbox got, to the {connection.dialect.name} database "
                    f"{connection.engine.url.database!r}, commits each statement: a row would stay, and be published, "
                    "if its transaction fails"
                )
                raise error("NOT_TRANSACTIONAL", what, hint=NO_AUTOCOMMIT)


def _commits_each_statement(raw: Any) -> bool:
    """Whether a driver's connection does, and has no transaction that somebody began by hand."""
    if hasattr(raw, "get_autocommit"):  # MariaDB's and MySQL's
        return bool(raw.get_autocommit())
    if hasattr(raw, "in_transaction"):  # SQLite's
        commits = raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        return commits and not raw.in_transaction
    if getattr(raw, "autocommit", None) is not True:
        return False
    return not getattr(getattr(raw, "info", None), "transaction_status", 0)


def _check(values: dict[str, Any]) -> None:
    """Raises INVALID_REQUEST."""
    if not isinstance(values["id"], str | bytes) or not values["id"]:
        what = f"the id of an outbox's row is {values['id']!r:.80}: it should be a UUID, text or bytes, and not empty"
        raise error("INVALID_REQUEST", what, hint="Leave it out to get a new one: an id must never come again.")
    if not isinstance(values["payload"], str | bytes | None):
        what = (
            f"the payload of an outbox's row is {values['payload']!r:.80}: it should be bytes, text, a dict or a list"
        )
        raise error("INVALID_REQUEST", what)
    for name in ("aggregatetype", "aggregateid", "type"):
        # PostgreSQL would keep the hexadecimal digits of the bytes, which are another key.
        if isinstance(values[name], bytes | bytearray | memoryview):
            what = f"the {name} of an outbox's row is {values[name]!r:.80}: it should be text"
            raise error("INVALID_REQUEST", what, hint="Decode it.")
    for name, value in values.items():
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_REQUEST", f"the {name} of an outbox's row is not valid Unicode: {e.reason}") from e
