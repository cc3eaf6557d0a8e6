CREATE TABLE IF NOT EXISTS outbox (
    id uuid PRIMARY KEY,
    aggregatetype varchar(255) NOT NULL,
    aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL,
    payload bytea
);
ALTER TABLE outbox ADD COLUMN IF NOT EXISTS sequence_id bigint NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS outbox_sequence_id ON outbox (sequence_id);

CREATE TABLE IF NOT EXISTS outbox_token (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    token text NOT NULL,
    producer text,
    topic text
);
INSERT INTO outbox_token (token) VALUES (left(md5(random()::text || clock_timestamp()::text), 16))
    ON CONFLICT DO NOTHING;

CREATE TABLE IF NOT EXISTS outbox_aside (
    LIKE outbox,
    reason text NOT NULL,
    set_aside_at timestamptz NOT NULL DEFAULT now()
);

CREATE OR REPLACE FUNCTION outbox_number() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    ordinal bigint;
BEGIN
    IF NEW.sequence_id IS NULL THEN
        ordinal := coalesce(nullif(current_setting('seqdedupe.outbox_ordinal', true), ''), '0')::bigint;
        IF ordinal >= 16777216 THEN
            RAISE EXCEPTION 'a transaction may insert at most 16777216 rows into outbox';
        END IF;
        NEW.sequence_id := (pg_current_xact_id()::text::bigint << 24) | ordinal;
        PERFORM set_config('seqdedupe.outbox_ordinal', (ordinal + 1)::text, true);
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER outbox_number BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_number();

CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('seqdedupe_outbox', '');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER outbox_notify AFTER INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_notify();

CREATE OR REPLACE FUNCTION outbox_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('seqdedupe.outbox_relay', true) IS DISTINCT FROM 'on' THEN
        RAISE EXCEPTION 'only the relay deletes from outbox: it would never see a row that the transaction which inserts it deletes, too';
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER outbox_guard BEFORE DELETE OR UPDATE ON outbox
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_guard();
CREATE OR REPLACE TRIGGER outbox_guard_truncate BEFORE TRUNCATE ON outbox
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_guard();
