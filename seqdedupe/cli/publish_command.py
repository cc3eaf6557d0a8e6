"""`seqdedupe publish`: publish each record of a file once, no matter how often the command is started. Records are
recognized by sequence ID or by deduplication ID."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import cast, get_args

import click

from seqdedupe.cli.common import DATABASE_VARIABLE, common, connect_to, tell
from seqdedupe.cli.query_source import QuerySource
from seqdedupe.cli.record_source import STANDARD_INPUT, Form, JsonPath, RecordSource, SourceRecord
from seqdedupe.cli.topic_comparison import verify
from seqdedupe.client import Message, Persisted, PositionError, Verdict
from seqdedupe.client.blocking import Client, Producer, Publisher, Receipt
from seqdedupe.command import Seconds, print_json, say, tell_waiting
from seqdedupe.errors import (
    AccessDeniedError,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    SeqdedupeError,
    error,
)
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

# -- Continuing after an earlier run, only if the source is still the one that was published.

RECORD_PROPERTY = "seqdedupe.record"
"""The message property that contains the record's number in the source, if the sequence ID differs from this number."""

HASH_PROPERTY = "seqdedupe.hash"
"""The message property that contains the hash of the source's records up to this message. docs/reference/cli.md defines
the hash."""

_HASH_VERSION = "1-"
_HASH_BYTES = 8
_HASH_EVERY = 16
"""The first 16 records have the property HASH_PROPERTY, and then every 16th record. The property costs four times as
much time per message as the hash."""

_LOOK_BACK_MESSAGES = 1024
"""The command searches for the last hash in at least this number of messages, and until it has found 16 messages of the
producer. One of these 16 messages has a hash. Messages of other producers may be between them."""


NewRecord = tuple[SourceRecord, str | None]
"""A record to be published, and the value of HASH_PROPERTY if the record's message has this property."""


Source = RecordSource | QuerySource

_HINT_NOT_ALLOWED = (
    "The command reads the last message to compare it with the file. Ask the sidecar's operator for the "
    "right read, or use --trust-source."
)

_HINT_QUERY_CHANGED = (
    "For a different query or table, use a different producer name. After a restore of the database, new rows "
    "may have IDs of published rows, and this name would skip the new rows. Publish the new rows with a "
    "separate query and a different name. Select only columns that never "
    "change."
)


class Resume:
    """Finds the records to publish: the records that follow this producer's last message in the topic.

    The source must contain that last record, with the same text and the same number. The records up to the last record
    with a stored hash must be unchanged. If they have changed, records were changed, inserted or removed, and a run
    that continued would omit some records. If a source begins after the last record, it is the producer's next source,
    and the run publishes all of its records.

    In a partitioned topic, these rules apply to the last record in each partition. The run publishes all records after
    the first record that a partition may lack. Records that the topic already contains are Dup.
    """

    def __init__(self, client: Client, producer: Producer, source: Source, *, trust_source: bool) -> None:
        self.after = producer.persisted_sequence_id
        """The sequence ID up to which all records are published; -1 if no record is published."""
        self.records_read = 0
        self._last = {one.sequence_id: one for one in producer.persisted if one.sequence_id >= 0}
        self._hashes = dict[int, str]()
        """The hashes of the published messages to compare, by sequence ID."""
        self._client = client
        self._producer = producer
        self._source = source
        self._trust_source = trust_source
        self._is_verified = False
        self._why_not = ""

    def new_records(self) -> Iterator[NewRecord]:
        """Yield the records to be published.

        Raises SOURCE_CHANGED, SOURCE_UNVERIFIED, SOURCE_INCOMPLETE or NEWER_FORMAT before the first record is yielded.
        """
        left = {sequence_id: self._published(one) for sequence_id, one in self._last.items()}
        # Not more than a producer can have in flight, because the records after the last checked record are sent.
        held = list[NewRecord]()
        so_far = blake2b(digest_size=_HASH_BYTES)
        keeps_records = self._source.keeps_records
        for record in self._source:
            self.records_read += 1
            text = None
            if keeps_records:
                so_far.update(record.payload + b"\n")
                number = record.number
                if number < _HASH_EVERY or number % _HASH_EVERY == _HASH_EVERY - 1:
                    text = _HASH_VERSION + so_far.hexdigest()
            if left:
                self._check_off(record, text, left)
            if record.sequence_id > self.after:
                held.append((record, text))
                if not left:
                    self._check_verified()
                    yield from held
                    held.clear()
        if left:
            self._check_end(max(left))
        self._check_verified()
        yield from held

    def _check_off(self, record: SourceRecord, text: str | None, left: dict[int, Message | None]) -> None:
        """Compare the record and its hash with the messages published last. Remove the record's message and all earlier
        messages from `left`."""
        for sequence_id in [one for one in left if one < record.sequence_id]:
            if record.number and self._source.keeps_records:
                raise self._changed(sequence_id, "is no longer there")
            del left[sequence_id]
        if message := left.pop(record.sequence_id, None):
            self._compare(record, message)
        if self._hashes.pop(record.sequence_id, text) != text:
            raise error(
                "SOURCE_CHANGED",
                f"producer {self._producer.name!r} has published up to sequence ID {max(self._last)}, and in this "
                f"file the records up to sequence ID {record.sequence_id} are not those that were published; nothing "
                "was sent",
                sequence_id=record.sequence_id,
            )

    def _check_end(self, sequence_id: int) -> None:
        """Handle the end of a source before the last record published."""
        if isinstance(self._source, RecordSource) and self._source.unfinished_line:
            raise self._source.incomplete()
        if self._source.numbers_are_ids:
            raise self._changed(sequence_id, f"is not there: it has {counted(self.records_read, 'record')}")
        if self.records_read:
            self._why_not = "all of its records come before that one"

    def _compare(self, record: SourceRecord, message: Message) -> None:
        """Compare the record of the last published ID with the message."""
        number = message.properties.get(RECORD_PROPERTY)
        if number is not None and number != str(record.number):
            raise self._changed(
                record.sequence_id,
                f"is number {record.number}, and was number {number} when it was published: records were inserted or "
                "removed before it, or it came from another file",
            )
        if (message.payload or b"") != record.payload:
            raise self._changed(record.sequence_id, "is not the one that was published")
        if number is None and not self._source.numbers_are_ids and self._source.keeps_records:
            self._why_not = "the message does not say which record it was"
        else:
            self._is_verified = True

    def _published(self, one: Persisted) -> Message | None:
        """Return the last message published; None if the message can no longer be read. Also store the last hash found
        in the messages up to the returned message. Messages of older versions have no hash."""
        if one.position is None:
            self._why_not = "the sidecar no longer knows the position of that message"
            return None
        index = one.position.index
        last: Message | None = None
        stop, look_at, ours = index + 1, 1, 0
        try:
            first_index = self._client.ends(one.topic).first_index
            while stop > first_index and (ours < _HASH_EVERY or index - stop < _LOOK_BACK_MESSAGES):
                start = max(first_index, stop - look_at)
                text = None
                with self._client.reader(one.topic, start, stop_index=stop, skip_damaged=stop <= index) as reader:
                    for message in reader:
                        if message.index == index:
                            last = message
                        # A message with an ID above the last ID was stored before the producer was reset.
                        if message.producer_name == self._producer.name and message.sequence_id <= one.sequence_id:
                            ours += 1
                            if HASH_PROPERTY in message.properties:
                                text = message.sequence_id, message.properties[HASH_PROPERTY]
                if text is not None:
                    self._note_hash(*text)
                if text is not None or not self._source.keeps_records:
                    break
                stop, look_at = start, look_at * _HASH_EVERY
        except AccessDeniedError:
            if not self._trust_source:
                raise
            self._why_not = "the caller may not read the topic"
            return None
        except PositionError as e:
            if e.reason != "POSITION_TRIMMED":
                raise
        if last is None:
            self._why_not = "retention has removed that message"
        return last

    def _note_hash(self, sequence_id: int, text: str) -> None:
        if not text.startswith(_HASH_VERSION):
            what = f"the message with sequence ID {sequence_id} is of a newer version: its {HASH_PROPERTY} is {text!r}"
            raise error("NEWER_FORMAT", what)
        self._hashes[sequence_id] = text

    def _check_verified(self) -> None:
        """Raise SOURCE_UNVERIFIED if no message proves that the source is the source published before. A single message
        is enough as a proof."""
        if self._why_not and not self._is_verified and not self._trust_source:
            highest = max(self._last)
            raise error(
                "SOURCE_UNVERIFIED",
                f"producer {self._producer.name!r} has published up to sequence ID {highest}, and the command cannot "
                f"verify that this {self._source.noun} is the one that was published: {self._why_not}; nothing was "
                "sent",
                sequence_id=highest,
            )

    def _changed(self, sequence_id: int, what: str) -> SeqdedupeError:
        return error(
            "SOURCE_CHANGED",
            f"producer {self._producer.name!r} has published up to sequence ID {sequence_id}, and in this "
            f"{self._source.noun} the record with that ID {what}; nothing was sent",
            hint=None if self._source.keeps_records else _HINT_QUERY_CHANGED,
            sequence_id=sequence_id,
        )


# -- `seqdedupe publish` to a topic of deduplication IDs: each record once, by its own ID.

ROWS = 1000
BYTES = 1024 * 1024
"""The number of bytes that are sent together. Together with one more record, whose payload may have 5 MiB, they still
fit into a batch."""


def publish_by_id(publisher: Publisher, source: RecordSource) -> dict[str, object]:
    """Publish all records of a source to a topic of deduplication IDs. The key of a record is the message's ID. Return
    the result.

    Raises INVALID_DEDUPLICATION_ID for a record without an ID. The records before this record are published. When the
    file is published again, these records are Dup.
    """
    counts = {Verdict.NOT_DUP: 0, Verdict.DUP: 0}
    imported = 0
    for some in _batches(source):
        ids = [record.key or b"" for record in some]
        result = publisher.send_batch([record.payload for record in some], ids)
        for verdict in counts:
            counts[verdict] += int((result.verdicts == verdict).sum())
        imported += int(result.imported.sum())
    return {
        "topic": publisher.topic,
        "read": sum(counts.values()),
        "not_dup": counts[Verdict.NOT_DUP],
        "dup": counts[Verdict.DUP],
        "imported": imported,
    }


def _batches(source: RecordSource) -> Iterator[list[SourceRecord]]:
    some: list[SourceRecord] = []
    size_bytes = 0
    for record in source:
        if not 1 <= len(record.key or b"") <= MAX_DEDUPLICATION_ID_BYTES:
            if some:
                yield some
            what = f"record {record.number} has a deduplication ID of {len(record.key or b'')} bytes"
            why = f"{what}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}; the records before it are published"
            raise error(
                "INVALID_DEDUPLICATION_ID",
                why,
                hint="Correct the ID, and publish the file again. No record is published twice.",
            )
        some.append(record)
        size_bytes += len(record.payload)
        if len(some) == ROWS or size_bytes >= BYTES:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


_PROGRESS_RECORDS = 500
_FOLLOW_POLL_SECONDS = 0.2

_INTERRUPT_GRACE_SECONDS = 1.0
"""The time after Ctrl-C during which the command waits for receipts, so that it can report which messages are durable.
"""

_GO_ON = "Start the command again. The command continues after the last durable record."


class _PathType(click.ParamType[JsonPath]):
    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> JsonPath:
        try:
            return JsonPath.parse(str(value))
        except ValueError:
            shown = f"{value!r} is not a path of names and [indexes] with dots, such as after.id or meta.keys[0]."
            raise click.BadParameter(shown, ctx, param) from None


@contextmanager
def _right_kind(client: Client, topic: str, *, by_id: bool) -> Iterator[None]:
    """If the block raises an error because the topic uses the other kind of ID, add the correct options to the
    error."""
    try:
        yield
    except InvalidRequestError as e:
        found = None
        with suppress(SeqdedupeError):
            found = client.admin.topic(topic).deduplication_mode
        if by_id and found == admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID:
            what, hint = "sequence IDs", "Give --producer, and no deduplication IDs."
        elif not by_id and found == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
            what = "deduplication IDs"
            hint = "Give --deduplication-id-column or --deduplication-id-path, and no producer."
        else:
            raise
        raise error(e.reason, f"{topic_name(topic)} is a topic of {what}", hint=hint) from e


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("--topic", required=True, help="The topic.")
@click.option(
    "--producer", "name", help="The producer name. Use a different name for each file. Not with deduplication IDs."
)
@click.option(
    "--format", "form", type=click.Choice(get_args(Form)), help="The format. Default: derived from the file's suffix."
)
@click.option(
    "--as",
    "payload",
    type=click.Choice(["text", "json"]),
    help="CSV: the payload is the record's text (the default), or a JSON object with the header's names. Parquet is "
    "always JSON.",
)
@click.option(
    "--sequence-id-column", metavar="NAME", help="CSV, Parquet: the column with the sequence IDs, which must increase."
)
@click.option("--key-column", metavar="NAME", help="CSV, Parquet: the column with the keys.")
@click.option(
    "--sequence-id-path",
    metavar="PATH",
    type=_PathType(),
    help="JSON lines: the path of the sequence IDs, such as after.id.",
)
@click.option(
    "--key-path", metavar="PATH", type=_PathType(), help="JSON lines: the path of the keys, such as meta.keys[0]."
)
@click.option(
    "--deduplication-id-column",
    metavar="NAME",
    help="CSV, Parquet: the column with the deduplication IDs, in any order. Replaces --producer.",
)
@click.option(
    "--deduplication-id-path",
    metavar="PATH",
    type=_PathType(),
    help="JSON lines: the path of the deduplication IDs, such as event.id.",
)
@click.option("--query", metavar="SQL", help="Instead of FILE: a query whose rows are published as JSON objects.")
@click.option(
    "--database",
    envvar=DATABASE_VARIABLE,
    show_envvar=True,
    metavar="URL",
    help="The database of --query, as an SQLAlchemy URL: postgresql://user@host/database or sqlite:///path.",
)
@click.option(
    "--settled-after",
    type=Seconds(),
    metavar="SECONDS",
    help="With --query: each transaction commits within SECONDS after it takes its sequence ID. Rows of later commits "
    "are lost.",
)
@click.option("--final", is_flag=True, help="The file is complete. Publish its last line even if it has no newline.")
@click.option("--follow", is_flag=True, help="The file grows. Wait for more records at its end.")
@click.option("--trust-source", is_flag=True, help="Continue even if the file cannot be compared with the topic.")
@click.option("--verify", "verifies", is_flag=True, help="Compare the file with the topic. Publish nothing.")
@common
def publish(
    file: Path | None,
    topic: str,
    name: str | None,
    form: Form | None,
    payload: str | None,
    sequence_id_column: str | None,
    key_column: str | None,
    sequence_id_path: JsonPath | None,
    key_path: JsonPath | None,
    deduplication_id_column: str | None,
    deduplication_id_path: JsonPath | None,
    query: str | None,
    database: str | None,
    settled_after: float | None,
    final: bool,
    follow: bool,
    trust_source: bool,
    verifies: bool,
    address: str,
    as_json: bool,
) -> None:
    """Publish each record of FILE exactly once: lines, CSV records, JSON lines or Parquet rows.

    FILE is a plain file, a gzip file, or a zip of one file; - is standard input. The payload is the record's text, or
    JSON. The sequence ID is the record's number, counted from 0 without a CSV header. If you start the command again,
    it continues after this producer's last ID in the topic, provided that the file still has the same record with this
    ID. The command creates a missing topic if the sidecar allows this.

    With a topic of deduplication IDs, give no producer. If the command is started again, it sends all records; known
    records are Dup.

    With --query, the command publishes rows of a database in the order of --sequence-id-column. It publishes a row only
    when no transaction can add an earlier row any more.
    """
    if query is not None:
        others = (file, form, payload, sequence_id_path, key_path, deduplication_id_column, deduplication_id_path)
        if others != (None,) * 7 or final or follow or verifies:
            raise click.UsageError("--query allows only --sequence-id-column, --key-column and --trust-source.")
        if database is None or name is None or sequence_id_column is None:
            raise click.UsageError("--query needs --database, --producer and --sequence-id-column.")
        with QuerySource(
            database,
            query,
            sequence_id_column=sequence_id_column,
            key_column=key_column,
            settled_after_seconds=settled_after,
            on_waiting=partial(tell_waiting, topic, as_json),
        ) as rows:
            rows.check()
            _publish_in_order(rows, topic, name, address, trust_source=trust_source, as_json=as_json)
        return
    if settled_after is not None:
        raise click.UsageError("--settled-after goes with --query.")
    if file is None:
        raise click.UsageError("Give a FILE, or --query and --database.")
    by_id = deduplication_id_column is not None or deduplication_id_path is not None
    if by_id and (name, sequence_id_column, sequence_id_path, key_column, key_path) != (None,) * 5:
        raise click.UsageError("Deduplication IDs exclude --producer, sequence IDs and keys.")
    if by_id and (follow or trust_source or verifies):
        raise click.UsageError("Deduplication IDs exclude --follow, --trust-source and --verify.")
    if deduplication_id_column is not None and deduplication_id_path is not None:
        raise click.UsageError("Give columns (CSV and Parquet) or paths (JSON lines), not both.")
    if by_id:
        with RecordSource(
            file,
            form=form,
            key_column=deduplication_id_column,
            key_path=deduplication_id_path,
            as_json=payload == "json",
            final=final,
        ) as source:
            source.check()
            _publish_by_id(source, topic, address, as_json=as_json)
        return
    if name is None:
        raise click.UsageError("Give --producer, or the place of the deduplication IDs.")
    if follow and (final or file == STANDARD_INPUT):
        raise click.UsageError("--follow excludes --final and standard input.")
    if verifies and (follow or trust_source):
        raise click.UsageError("--verify excludes --follow and --trust-source.")
    if (sequence_id_column, key_column) != (None, None) != (sequence_id_path, key_path):
        raise click.UsageError("Give columns (CSV and Parquet) or paths (JSON lines), not both.")
    with RecordSource(
        file,
        form=form,
        sequence_id_column=sequence_id_column,
        key_column=key_column,
        sequence_id_path=sequence_id_path,
        key_path=key_path,
        as_json=payload == "json",
        final=final,
        follow=follow,
    ) as source:
        source.check()
        if verifies:
            _verify(source, topic, name, address, as_json=as_json)
            return
        _publish_in_order(source, topic, name, address, follow=follow, trust_source=trust_source, as_json=as_json)
        if source.unfinished_line:
            raise source.incomplete()


def _publish_in_order(
    source: Source, topic: str, name: str, address: str, *, follow: bool = False, trust_source: bool, as_json: bool
) -> None:
    waiting = partial(tell_waiting, topic, as_json)
    with connect_to(address, topic, makes=True, on_waiting=waiting if follow else None) as client:
        makes_topic = _is_missing(client, topic, trust_source=trust_source)
        with _right_kind(client, topic, by_id=False), client.producer(topic, name, on_waiting=waiting) as producer:
            if makes_topic and follow and not as_json:  # which ends without a summary
                say("seqdedupe", f"made the topic {producer.topic}")
            resume = Resume(client, producer, source, trust_source=trust_source)
            if isinstance(source, QuerySource):
                source.after = resume.after
            with_numbers = source.keeps_records and not source.numbers_are_ids
            run = _Publication(producer, source, resume, with_numbers=with_numbers, makes_topic=makes_topic)
            run.publish()
    tell(as_json, run.summary(), run.text())


def _is_missing(client: Client, topic: str, *, trust_source: bool) -> bool:
    """Return whether the topic does not exist yet and will be created. Also return false if the sidecar does not
    answer.

    Raises NOT_ALLOWED if the caller may not read the topic, unless the source is trusted. Otherwise the first run would
    publish, and the second run could not continue.
    """
    try:
        client.ends(topic)
    except SeqdedupeError as e:
        if e.reason == "NOT_ALLOWED" and not trust_source:
            raise type(e)(e.reason, e.message, _HINT_NOT_ALLOWED, e.retry_delay_ms, e.numbers) from e
        return e.reason == "TOPIC_NOT_FOUND"
    return False


def _publish_by_id(source: RecordSource, topic: str, address: str, *, as_json: bool) -> None:
    waiting = partial(tell_waiting, topic, as_json)
    with (
        connect_to(address, topic, makes=True) as client,
        _right_kind(client, topic, by_id=True),
        client.publisher(topic, on_waiting=waiting) as publisher,
    ):
        summary = publish_by_id(publisher, source)
    read = cast(int, summary["read"])
    imported = f", {summary['imported']:,} of them imported" if summary["imported"] else ""
    text = f"{counted(read, 'record')} read: {summary['not_dup']:,} NotDup, {summary['dup']:,} Dup{imported}"
    tell(as_json, summary, text)
    if source.unfinished_line:
        raise source.incomplete()


def _verify(source: RecordSource, topic: str, name: str, address: str, *, as_json: bool) -> None:
    with connect_to(address, topic) as client:
        comparison = verify(client, topic, name, source)
    if as_json:
        print_json(comparison.summary())
    else:
        comparison.print_text()
    if source.unfinished_line:
        raise source.incomplete("compared")
    if failure := comparison.failure():
        raise failure


class _Publication:
    def __init__(
        self, producer: Producer, source: Source, resume: Resume, *, with_numbers: bool, makes_topic: bool
    ) -> None:
        self._producer = producer
        self._source = source
        self._resume = resume
        self._with_numbers = with_numbers
        self._makes_topic = makes_topic
        self._verdicts = {Verdict.NOT_DUP: 0, Verdict.DUP: 0}
        self._receipts: deque[Receipt] = deque()
        source.before_waiting = self._wait_for_more

    def publish(self) -> None:
        """Return when every record has its receipt. An error also reports up to which message all messages are
        durable."""
        try:
            self._send_all()
        except KeyboardInterrupt as e:
            over_at = time.monotonic() + _INTERRUPT_GRACE_SECONDS
            with suppress(SeqdedupeError):
                for receipt in self._receipts:  # in order, since the receipts of an interrupted send have failed
                    receipt.until_durable(max(0.0, over_at - time.monotonic()))
            raise error("INTERRUPTED", f"interrupted; {self._durable()}", hint=_GO_ON) from e
        except SeqdedupeError as e:
            raise self._with_durable(e) from e

    def _send_all(self) -> None:
        size = self._source.size_bytes
        shown = size > 0 and sys.stderr.isatty()
        with click.progressbar(length=size, label="Publishing", file=sys.stderr, hidden=not shown) as bar:
            for record, text in self._resume.new_records():
                properties = {RECORD_PROPERTY: str(record.number)} if self._with_numbers else {}
                if text is not None:
                    properties[HASH_PROPERTY] = text
                self._receipts.append(
                    self._producer.send(record.payload, record.sequence_id, key=record.key, properties=properties)
                )
                if len(self._receipts) % _PROGRESS_RECORDS == 0:
                    self._count(only_durable=True)
                    bar.update(self._source.read_bytes - bar.pos)
            self._producer.flush()
            self._count()
            bar.update(size - bar.pos)

    def _count(self, *, only_durable: bool = False) -> None:
        """Count the verdicts of the receipts. Either wait for all receipts first, or count only the receipts that have
        arrived. Raises the failure of a message."""
        while self._receipts and (not only_durable or self._receipts[0].is_over()):
            self._verdicts[self._receipts[0].until_durable().verdict] += 1
            self._receipts.popleft()

    def _wait_for_more(self) -> None:
        self._count(only_durable=True)
        time.sleep(_FOLLOW_POLL_SECONDS)

    def _durable(self, are_durable: str = "are durable") -> str:
        with suppress(SeqdedupeError):
            self._count(only_durable=True)
        durable = sum(self._verdicts.values())
        up_to = f", up to sequence ID {self._producer.durable_sequence_id}" if durable else ""
        return f"{durable:,} of the {counted(durable + len(self._receipts), 'record')} sent {are_durable}{up_to}"

    def _with_durable(self, failure: SeqdedupeError) -> SeqdedupeError:
        """Return the failure. If messages were sent, add the last durable ID, and that the command can be started
        again."""
        if not self._receipts and not any(self._verdicts.values()):
            return failure
        with suppress(SeqdedupeError):
            self._producer.flush()  # if the source has failed
        message, hint = failure.message, failure.hint
        if isinstance(failure, DataLossError | NotFoundError):  # what was durable may be gone
            message = f"{message}; {self._durable('had receipts')}"
            return type(failure)(failure.reason, message, hint, failure.retry_delay_ms, failure.numbers)
        if failure.reason == "OUTCOME_UNKNOWN":  # which already says what is durable
            hint = f"{failure.hint} {_GO_ON}" if "last_refusal" in failure.numbers else _GO_ON
        else:
            message = f"{message}; {self._durable()}"
        numbers = failure.numbers | {"durable_sequence_id": str(self._producer.durable_sequence_id)}
        return type(failure)(failure.reason, message, hint, failure.retry_delay_ms, numbers)

    def summary(self) -> dict[str, object]:
        """Return the result. The form is documented: keep it stable."""
        return {
            "topic": self._producer.topic,
            "producer_name": self._producer.name,
            "read": self._resume.records_read,
            "not_dup": self._verdicts[Verdict.NOT_DUP],
            "dup": self._verdicts[Verdict.DUP],
            "resumed_after": None if self._resume.after < 0 else self._resume.after,
            "topic_made": self._makes_topic,
        }

    def text(self) -> str:
        resumed = f", resumed after sequence ID {self._resume.after}" if self._resume.after >= 0 else ""
        made = f"; made the topic {self._producer.topic}" if self._makes_topic else ""
        return (
            f"{counted(self._resume.records_read, 'record')} read{resumed}: "
            f"{self._verdicts[Verdict.NOT_DUP]:,} NotDup, {self._verdicts[Verdict.DUP]:,} Dup{made}"
        )
