"""The tables and triggers of an outbox. All of it may be run again, and on a table that Debezium's users have."""

from seqdedupe.errors import error
from seqdedupe.services.outbox.rows import ASIDE_TABLE, ORDINAL_BITS, SEQUENCE_ID, TABLE, TOKEN_TABLE

CHANNEL = "seqdedupe_outbox"
"""What PostgreSQL notifies of when rows were inserted."""

RELAY_SETTING = "seqdedupe.outbox_relay"
"""A session that has it `on` is the relay's: it may delete."""

_ORDINAL_SETTING = "seqdedupe.outbox_ordinal"

POSTGRES_TRIGGERS = ("outbox_number", "outbox_notify", "outbox_guard", "outbox_guard_truncate")
SQLITE_TRIGGERS = ("outbox_guard_delete", "outbox_guard_update")

_ONLY_THE_RELAY = (
    "only the relay deletes from outbox: it would never see a row that the transaction which inserts it deletes, too"
)

# The transaction and the ordinal are stored at insert: ranks computed at reading would shift when a row goes. A number
# that is given stays, for that is a row of a dump, which may have been published under it.
POSTGRES = f"""\
CREATE TABLE IF NOT EXISTS {TABLE} (
    id uuid PRIMARY KEY,
    aggregatetype varchar(255) NOT NULL,
    aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL,
    payload bytea
);
ALTER TABLE {TABLE} ADD COLUMN IF NOT EXISTS {SEQUENCE_ID} bigint NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS {TABLE}_{SEQUENCE_ID} ON {TABLE} ({SEQUENCE_ID});

CREATE TABLE IF NOT EXISTS {TOKEN_TABLE} (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    token text NOT NULL,
    producer text,
    topic text
);
INSERT INTO {TOKEN_TABLE} (token) VALUES (left(md5(random()::text || clock_timestamp()::text), 16))
    ON CONFLICT DO NOTHING;

CREATE TABLE IF NOT EXISTS {ASIDE_TABLE} (
    LIKE {TABLE},
    reason text NOT NULL,
    set_aside_at timestamptz NOT NULL DEFAULT now()
);

CREATE OR REPLACE FUNCTION outbox_number() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    ordinal bigint;
BEGIN
    IF NEW.{SEQUENCE_ID} IS NULL THEN
        ordinal := coalesce(nullif(current_setting('{_ORDINAL_SETTING}', true), ''), '0')::bigint;
        IF ordinal >= {1 << ORDINAL_BITS} THEN
            RAISE EXCEPTION 'a transaction may insert at most {1 << ORDINAL_BITS} rows into outbox';
        END IF;
        NEW.{SEQUENCE_ID} := (pg_current_xact_id()::text::bigint << {ORDINAL_BITS}) | ordinal;
        PERFORM set_config('{_ORDINAL_SETTING}', (ordinal + 1)::text, true);
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER outbox_number BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION outbox_number();

CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('{CHANNEL}', '');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER outbox_notify AFTER INSERT ON {TABLE} FOR EACH STATEMENT EXECUTE FUNCTION outbox_notify();

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
"""

# There is one writer at a time, so numbers follow the order of commits. No session has settings that a trigger could
# look at; what the relay's transaction writes into the token's row, and takes back, nobody else ever sees.
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

_DDL = {"postgresql": POSTGRES, "sqlite": SQLITE}


def ddl(database: str) -> str:
    """The statements that make an outbox in a database of this kind, `postgresql` or `sqlite`, as a script.

    Raises ConfigurationError (INVALID_CONFIGURATION) for another kind.
    """
    if database not in _DDL:
        raise error(
            "INVALID_CONFIGURATION",
            f"there is no outbox relay for {database}",
            hint=f"Databases that an outbox may be in: {', '.join(_DDL)}.",
        )
    return _DDL[database]
