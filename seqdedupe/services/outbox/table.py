"""The outbox in a service's database: the statements that create its tables and triggers, and `Outbox`, which adds
rows. The statements may be run again. They may also be run on the existing table of a Debezium user."""

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
from seqdedupe.services.outbox.store import ASIDE_TABLE, COLUMNS, ORDINAL_BITS, SEQUENCE_ID, TABLE, TOKEN_TABLE

CHANNEL = "seqdedupe_outbox"
"""The channel on which PostgreSQL notifies of inserted rows."""

RELAY_SETTING = "seqdedupe.outbox_relay"
"""The setting of a relay's database session. With `on`, the session may delete rows."""

NUMBERS = "outbox_numbers"
"""The sequence in PostgreSQL from which rows take their numbers. It is owned by the column of the numbers."""

DELETED = "deleted_up_to"
"""The column in PostgreSQL that contains the highest number of a row that a relay has deleted."""

NUMBERING = "outbox_take_number"
"""The function of the trigger that numbers rows. A table made by an older version has a different function."""

ID_TYPES = ("uuid", "text", "varchar", "bpchar", "bytea")
"""The types that the column `id` may have in PostgreSQL. Numeric types are excluded: after a restore, other rows would
get the same numbers again."""

POSTGRES_TRIGGERS = ("outbox_number", "outbox_notify", "outbox_guard", "outbox_guard_truncate")
SQLITE_TRIGGERS = ("outbox_guard_delete", "outbox_guard_update")

_ONLY_THE_RELAY = (
    "only the relay deletes from outbox: it would never see a row that the transaction which inserts it deletes, too"
)

# A row takes its number when it is inserted. Its transaction must have an ID before that, so the expression first asks
# for the ID. Otherwise a number could be taken while no snapshot shows the row's transaction (`Horizon` relies on
# that). Numbers that sessions cache would be taken in any order, hence CACHE 1. A number that is given explicitly is
# kept. It is on a row of a dump, which may have been published under this number.
#
# Numbers of an older version were made from the IDs of transactions. The lock waits until all rows with such numbers
# are committed. Afterwards no other transaction assigns such a number, and the sequence continues above them. The IDs
# of ended transactions are below the `xmax` of a snapshot taken now, but this transaction may have inserted rows
# itself.
#
# Every role that may insert a row may take a number. So a service needs no permission except INSERT.
#
# All of this is one statement, so it is executed completely or not at all in every way to run it: by `psql` without a
# transaction, which continues after a statement that fails, and within the transaction of a migration. The token's
# table comes first, because a relay that deletes rows locks that table first.
POSTGRES = f"""\
DO $outbox$
DECLARE
    added text;
    wanted text;
    past bigint;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'run the statements of an outbox in READ COMMITTED';
    END IF;

    CREATE TABLE IF NOT EXISTS {TOKEN_TABLE} (
        only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
        token text NOT NULL,
        producer text,
        topic text
    );
    INSERT INTO {TOKEN_TABLE} (token) VALUES (left(md5(random()::text || clock_timestamp()::text), 16))
        ON CONFLICT DO NOTHING;
    ALTER TABLE {TOKEN_TABLE} ADD COLUMN IF NOT EXISTS {DELETED} bigint;

    CREATE TABLE IF NOT EXISTS {TABLE} (
        id uuid PRIMARY KEY,
        aggregatetype varchar(255) NOT NULL,
        aggregateid varchar(255) NOT NULL,
        type varchar(255) NOT NULL,
        payload {{payload}}
    );
    IF (SELECT relkind FROM pg_class WHERE oid = '{TABLE}'::regclass) <> 'r' THEN
        RAISE EXCEPTION '{TABLE} is no plain table' USING HINT = 'Rename it. Nothing was changed.';
    END IF;
    FOREACH wanted IN ARRAY ARRAY{list(COLUMNS)} LOOP
        IF NOT EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = '{TABLE}'::regclass AND attname = wanted AND NOT attisdropped
        ) THEN
            RAISE EXCEPTION 'the table {TABLE} has no column %', wanted
                USING HINT = 'Add it, or rename a table that is of something else. Nothing was changed.';
        END IF;
    END LOOP;
    IF NOT EXISTS (
        SELECT FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
        WHERE attrelid = '{TABLE}'::regclass AND attname = 'id' AND typname = ANY (ARRAY{list(ID_TYPES)})
    ) THEN
        RAISE EXCEPTION '{TABLE}.id is none of {", ".join(ID_TYPES)}'
            USING HINT = 'An id must never come again, and numbers do after a restore. Nothing was changed.';
    END IF;
    IF EXISTS (SELECT FROM {TABLE}) AND NOT EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = '{TABLE}'::regclass AND attname = '{SEQUENCE_ID}' AND NOT attisdropped
    ) THEN
        RAISE EXCEPTION 'the table {TABLE} has rows without {SEQUENCE_ID}, and nothing tells their order'
            USING HINT = 'Have them published by what published them until now, or delete them. Nothing was changed.';
    END IF;
    ALTER TABLE {TABLE} ADD COLUMN IF NOT EXISTS {SEQUENCE_ID} bigint NOT NULL;
    CREATE UNIQUE INDEX IF NOT EXISTS {TABLE}_{SEQUENCE_ID} ON {TABLE} ({SEQUENCE_ID});

    CREATE TABLE IF NOT EXISTS {ASIDE_TABLE} (
        LIKE {TABLE},
        reason text NOT NULL,
        set_aside_at timestamptz NOT NULL DEFAULT now()
    );
    FOR added IN
        SELECT format('ADD COLUMN %I %s', attname, format_type(atttypid, atttypmod)) FROM pg_attribute AS one
        WHERE attrelid = '{TABLE}'::regclass AND attnum > 0 AND NOT attisdropped AND NOT EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = '{ASIDE_TABLE}'::regclass AND attname = one.attname
        )
    LOOP
        EXECUTE 'ALTER TABLE {ASIDE_TABLE} ' || added;
    END LOOP;

    CREATE OR REPLACE FUNCTION {NUMBERING}() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.{SEQUENCE_ID} IS NULL THEN
            NEW.{SEQUENCE_ID} := nextval(
                CASE WHEN pg_current_xact_id() IS NOT NULL THEN format('%I.{NUMBERS}', TG_TABLE_SCHEMA)::regclass END
            );
        END IF;
        RETURN NEW;
    END $$;
    LOCK TABLE {TABLE} IN SHARE ROW EXCLUSIVE MODE;
    CREATE SEQUENCE IF NOT EXISTS {NUMBERS} CACHE 1;
    EXECUTE format(
        'ALTER SEQUENCE {NUMBERS} OWNER TO %s',
        (SELECT relowner::regrole FROM pg_class WHERE oid = '{TABLE}'::regclass)
    );
    ALTER SEQUENCE {NUMBERS} OWNED BY {TABLE}.{SEQUENCE_ID};
    GRANT USAGE ON SEQUENCE {NUMBERS} TO PUBLIC;
    past := greatest(
        pg_current_xact_id()::text::bigint + 1, pg_snapshot_xmax(pg_current_snapshot())::text::bigint
    );
    PERFORM setval('{NUMBERS}', greatest(nextval('{NUMBERS}'), past << {ORDINAL_BITS}));
    UPDATE {TOKEN_TABLE} SET {DELETED} = coalesce({DELETED}, pg_sequence_last_value('{NUMBERS}'));
    CREATE OR REPLACE TRIGGER outbox_number BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION {NUMBERING}();

    CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_notify('{CHANNEL}', '');
        RETURN NULL;
    END $$;
    CREATE OR REPLACE TRIGGER outbox_notify AFTER INSERT ON {TABLE}
        FOR EACH STATEMENT EXECUTE FUNCTION outbox_notify();

    CREATE OR REPLACE FUNCTION outbox_guard() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('{RELAY_SETTING}', true) IS DISTINCT FROM 'on' THEN
            RAISE EXCEPTION '{_ONLY_THE_RELAY}';
        END IF;
        RETURN NULL;
    END $$;
    CREATE OR REPLACE TRIGGER outbox_guard BEFORE DELETE OR UPDATE ON {TABLE}
        FOR EACH STATEMENT EXECUTE FUNCTION outbox_guard();
    CREATE OR REPLACE TRIGGER outbox_guard_truncate BEFORE TRUNCATE ON {TABLE}
        FOR EACH STATEMENT EXECUTE FUNCTION outbox_guard();
{{lock}}END $outbox$;
"""

# The trigger's name sorts before the name of the trigger that numbers rows, so it is fired first.
_POSTGRES_LOCK = f"""
    CREATE OR REPLACE FUNCTION outbox_lock() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(
            hashtextextended(NEW.aggregateid::text, hashtextextended(NEW.aggregatetype::text, TG_RELID::bigint))
        );
        RETURN NEW;
    END $$;
    CREATE OR REPLACE TRIGGER outbox_lock BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION outbox_lock();
"""

# SQLite allows one writer at a time, so numbers follow the order of commits. SQLite's sessions have no settings that a
# trigger could read. Instead, the relay's transaction writes into the token's row, and undoes this change before the
# commit. No other connection ever sees the change.
SQLITE = f"""\
CREATE TABLE IF NOT EXISTS {TABLE} (
    {SEQUENCE_ID} INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    aggregatetype TEXT NOT NULL,
    aggregateid TEXT NOT NULL,
    type TEXT NOT NULL,
    payload BLOB
);
CREATE TABLE IF NOT EXISTS {TOKEN_TABLE} (
    only_one INTEGER PRIMARY KEY DEFAULT 1 CHECK (only_one = 1),
    token TEXT NOT NULL,
    producer TEXT,
    topic TEXT,
    relay_deletes INTEGER NOT NULL DEFAULT 0
);
INSERT OR IGNORE INTO {TOKEN_TABLE} (only_one, token) VALUES (1, lower(hex(randomblob(8))));
CREATE TABLE IF NOT EXISTS {ASIDE_TABLE} (
    {SEQUENCE_ID} INTEGER NOT NULL,
    id, aggregatetype, aggregateid, type, payload,
    reason TEXT NOT NULL,
    set_aside_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TRIGGER IF NOT EXISTS outbox_guard_delete BEFORE DELETE ON {TABLE}
WHEN (SELECT relay_deletes FROM {TOKEN_TABLE}) = 0
BEGIN
    SELECT RAISE(ABORT, '{_ONLY_THE_RELAY}');
END;
CREATE TRIGGER IF NOT EXISTS outbox_guard_update BEFORE UPDATE ON {TABLE}
BEGIN
    SELECT RAISE(ABORT, 'a row of outbox is never changed');
END;
"""

DATABASES = ("postgresql", "sqlite")
PAYLOADS = ("bytea", "jsonb", "json", "text")
"""The types that the column `payload` may have in PostgreSQL."""


def ddl(database: str, *, payload: str = "bytea", lock_aggregates: bool = False) -> str:
    """Return the statements that create an outbox in a database of this kind, `postgresql` or `sqlite`, as a script.

    In PostgreSQL the column `payload` may have another type of `PAYLOADS`, if the table does not exist yet. With
    `lock_aggregates`, each insert of a row locks the row's aggregate until the transaction ends. Then the rows of an
    aggregate are in the order of the commits, even if the transaction itself did not write or lock the aggregate
    before.

    Raises ConfigurationError (INVALID_CONFIGURATION) for any other kind of database.
    """
    if database not in DATABASES:
        raise error(
            "INVALID_CONFIGURATION",
            f"there is no outbox relay for {database}",
            hint=f"Databases that an outbox may be in: {', '.join(DATABASES)}.",
        )
    if payload not in PAYLOADS:
        what = f"the column payload cannot be {payload}"
        raise error("INVALID_CONFIGURATION", what, hint=f"It may be {', '.join(PAYLOADS)}.")
    if database == "postgresql":
        return POSTGRES.format(payload=payload, lock=_POSTGRES_LOCK if lock_aggregates else "")
    if payload != PAYLOADS[0] or lock_aggregates:
        what = "an outbox in SQLite has neither a kind of payload nor locks: any payload fits, and one writes at a time"
        raise error("INVALID_CONFIGURATION", what)
    return SQLITE


# -- The work of a service: it adds a row to its outbox, in the transaction of the event that the row reports.

_INSERT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES (:id, :aggregatetype, :aggregateid, :type, {{}})"

_KINDS = text(
    "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
    f"WHERE attrelid = to_regclass('{TABLE}') AND attname IN ('id', 'payload')"
)
_JSON_KINDS = ("json", "jsonb")
_WRONG_TYPE = "42804"
"""PostgreSQL's SQLSTATE for a value whose type differs from its column's type."""

_kinds: WeakKeyDictionary[Engine, dict[str, str]] = WeakKeyDictionary()
"""The types of the columns `id` and `payload` in PostgreSQL databases, as far as they were looked up."""

Id = uuid.UUID | str | bytes


class Executing(Protocol):
    """A `Connection` or `Session` of SQLAlchemy."""

    def execute(self, statement: Executable, parameters: Any = None, /) -> Any: ...


class Outbox:
    """The outbox of a database, used over a connection or session of SQLAlchemy. A row that `add` inserts is published
    if, and only if, its transaction commits.

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
        """Insert a row and return its `id`, by default a new UUID. Every `id` must be used only once.

        `aggregateid` becomes the message's key. If the column is bytes, text and JSON are stored as UTF-8. If the
        column is text or JSON, bytes are interpreted as UTF-8. Raises INVALID_REQUEST, and inserts nothing, in these
        cases:

        - The `id` or the payload is invalid, or does not fit its column.
        - A text is not valid Unicode.
        - The payload contains NaN, or an object with two keys that are the same in JSON.

        Raises NOT_TRANSACTIONAL on a connection that commits each statement. The caller handles all other exceptions of
        SQLAlchemy, and the transaction.
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
        # A session knows the engine of a connection only if the session is bound to an engine.
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
                return {}  # the table does not exist: the insert will report this
            _kinds[engine] = found
        return _kinds[engine]


def _json(payload: dict[str, Any] | list[Any]) -> str:
    """Return the payload as JSON. Raises INVALID_REQUEST."""
    try:
        made = json.dumps(payload, ensure_ascii=False, allow_nan=False)
        json.loads(made, object_pairs_hook=_check_names)
    except (TypeError, ValueError, RecursionError) as e:
        raise error("INVALID_REQUEST", f"the payload of an outbox's row cannot be JSON: {e}") from e
    return made


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if an object has the same name twice. JSON's keys are texts, so `1` is the same name as
    `"1"`."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        [(name, _)] = Counter(names).most_common(1)
        raise ValueError(f"two keys of an object would both be {json.dumps(name, ensure_ascii=False):.80}")


def _id_for(kind: str | None, value: str | bytes) -> str | bytes:
    """Return the `id` in a form that the column accepts. Raises INVALID_REQUEST."""
    if kind == "bytea":
        return value.encode() if isinstance(value, str) else value
    if kind == "uuid":
        try:
            return str(uuid.UUID(value if isinstance(value, str) else ""))
        except ValueError as e:
            what = f"the id of an outbox's row is {value!r:.80}, and the column {TABLE}.id takes UUIDs alone"
            raise error(
                "INVALID_REQUEST", what, hint=f"ALTER TABLE {TABLE} ALTER id TYPE text accepts any text."
            ) from e
    return value


def _payload_for(kind: str | None, values: dict[str, Any]) -> str:
    """Return the payload's expression in the statement. Without a cast, PostgreSQL would interpret text for a column of
    bytes as escape sequences, and would write bytes into a column of text as hexadecimal digits. Raises
    INVALID_REQUEST."""
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
    """Raise NOT_TRANSACTIONAL before a row is inserted that a rollback would not remove."""
    proxied = connection.connection
    for raw in (proxied.dbapi_connection, proxied.driver_connection):
        if _commits_each_statement(raw):
            connection.execute(text("SELECT 1"))  # a listener for the beginning of a transaction may begin one
            if _commits_each_statement(raw):
                what = (
                    f"the connection that Outbox got, to the {connection.dialect.name} database "
                    f"{connection.engine.url.database!r}, commits each statement: a row would stay, and be published, "
                    "if its transaction fails"
                )
                raise error("NOT_TRANSACTIONAL", what, hint=NO_AUTOCOMMIT)


def _commits_each_statement(raw: Any) -> bool:
    """Return whether a driver's connection commits each statement, and no transaction was begun manually."""
    if hasattr(raw, "get_autocommit"):  # MariaDB and MySQL
        return bool(raw.get_autocommit())
    if hasattr(raw, "in_transaction"):  # SQLite
        commits = raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        return commits and not raw.in_transaction
    if getattr(raw, "autocommit", None) is not True:
        return False
    return not getattr(getattr(raw, "info", None), "transaction_status", 0)


def _check(values: dict[str, Any]) -> None:
    """Raise INVALID_REQUEST for invalid values."""
    if not isinstance(values["id"], str | bytes) or not values["id"]:
        what = f"the id of an outbox's row is {values['id']!r:.80}: it should be a UUID, text or bytes, and not empty"
        raise error("INVALID_REQUEST", what, hint="Leave it out to get a new one: an id must never come again.")
    if not isinstance(values["payload"], str | bytes | None):
        what = (
            f"the payload of an outbox's row is {values['payload']!r:.80}: it should be bytes, text, a dict or a list"
        )
        raise error("INVALID_REQUEST", what)
    for name in ("aggregatetype", "aggregateid", "type"):
        # PostgreSQL would store the hexadecimal digits of the bytes, which are a different key.
        if isinstance(values[name], bytes | bytearray | memoryview):
            what = f"the {name} of an outbox's row is {values[name]!r:.80}: it should be text"
            raise error("INVALID_REQUEST", what, hint="Decode it.")
    for name, value in values.items():
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_REQUEST", f"the {name} of an outbox's row is not valid Unicode: {e.reason}") from e
