"""The tables and triggers of an outbox. All of it may be run again, and on a table that Debezium's users have."""

from seqdedupe.errors import error
from seqdedupe.services.outbox.rows import ASIDE_TABLE, COLUMNS, ORDINAL_BITS, SEQUENCE_ID, TABLE, TOKEN_TABLE

CHANNEL = "seqdedupe_outbox"
"""What PostgreSQL notifies of when rows were inserted."""

RELAY_SETTING = "seqdedupe.outbox_relay"
"""A session that has it `on` is the relay's: it may delete."""

NUMBERS = "outbox_numbers"
"""The sequence in PostgreSQL from which rows take their numbers. It belongs to their column."""

DELETED = "deleted_up_to"
"""The column in PostgreSQL that says which number is the highest of a row that a relay has deleted."""

NUMBERING = "outbox_take_number"
"""The function of the trigger that numbers rows. In a table of an older version it is another one."""

ID_TYPES = ("uuid", "text", "varchar", "bpchar", "bytea")
"""What the column `id` may be in PostgreSQL: numbers would come again, with other rows, after a restore."""

POSTGRES_TRIGGERS = ("outbox_number", "outbox_notify", "outbox_guard", "outbox_guard_truncate")
SQLITE_TRIGGERS = ("outbox_guard_delete", "outbox_guard_update")

_ONLY_THE_RELAY = (
    "only the relay deletes from outbox: it would never see a row that the transaction which inserts it deletes, too"
)

# A row takes its number when it is inserted, and its transaction has an ID before that: the expression asks for it
# first. Otherwise a number could be out while no snapshot shows its transaction (`horizon` says what rests on that).
# Numbers that sessions cache would be taken in any order: hence CACHE 1. A number that is given stays, for that is a
# row of a dump, which may have been published under it.
#
# Numbers of an older version were made of transactions' IDs. The lock waits until all rows that have one are committed,
# and no other transaction gives one afterwards. The sequence goes on above them: those that have ended are below a
# snapshot's `xmax`, if that is taken now, and this transaction may have inserted rows itself.
#
# Whoever may insert a row may take a number: no service needs another right than INSERT.
#
# It is one statement. So it is done as a whole or not at all, however it is run: by `psql` without a transaction, which
# goes on after a statement that fails, and within the transaction of a migration. The token's table comes first,
# because a relay that deletes rows locks it first.
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

# Its name comes before that of the trigger that numbers: so it is fired first.
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

DATABASES = ("postgresql", "sqlite")
PAYLOADS = ("bytea", "jsonb", "json", "text")
"""What the payload's column may be in PostgreSQL."""


def ddl(database: str, *, payload: str = "bytea", lock_aggregates: bool = False) -> str:
    """The statements that make an outbox in a database of this kind, `postgresql` or `sqlite`, as a script.

    In PostgreSQL the column `payload` may be another one of `PAYLOADS`, if the table is not there yet. With
    `lock_aggregates` who inserts a row locks its aggregate until the transaction ends: then rows of an aggregate are
    in the order of the commits, too, if a transaction does not write or lock the aggregate itself before.

    Raises ConfigurationError (INVALID_CONFIGURATION) for another kind.
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
