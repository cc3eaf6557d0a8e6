"""`seqdedupe publish`: a file's records, each once, however often it is started."""

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click

from seqdedupe.cli.options import common, connect, print_json
from seqdedupe.cli.source import Record, Source
from seqdedupe.client import OutcomeUnknownError, PositionError, ProducerConfig, Verdict
from seqdedupe.client.blocking import Client, Producer, Receipt
from seqdedupe.errors import error

DELIVERY_TIMEOUT_SECONDS = 60.0
"""A sidecar that confirms nothing for so long is given up. Started again, the command resumes."""

_PROGRESS_RECORDS = 500


@click.command(short_help="Publish the records of a file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--topic", required=True, help="The topic.")
@click.option("--producer", "name", required=True, help="The producer name: one for each file.")
@click.option("--format", "form", type=click.Choice(["lines", "csv"]), help="Default: csv if the name ends so.")
@click.option("--sequence-id-column", metavar="NAME", help="CSV: the column with the sequence IDs; they must rise.")
@click.option("--key-column", metavar="NAME", help="CSV: the column with the messages' keys.")
@common
def publish(
    file: Path,
    topic: str,
    name: str,
    form: str | None,
    sequence_id_column: str | None,
    key_column: str | None,
    address: str,
    as_json: bool,
) -> None:
    """Publish the lines or CSV records of FILE, which may be gzip or a zip of one file, each exactly once.

    A payload is the record's text. The sequence ID is the record's number from 0, after a CSV header. Started again,
    it goes on after the last ID that the topic has of this producer, if the file still has the same record there.
    """
    is_csv = None if form is None else form == "csv"
    source = Source(file, is_csv=is_csv, sequence_id_column=sequence_id_column, key_column=key_column)
    config = ProducerConfig(delivery_timeout_seconds=DELIVERY_TIMEOUT_SECONDS)
    with source, connect(address) as client, client.producer(topic, name, config) as producer:
        run = _Publishing(client, producer, source, has_numbers=sequence_id_column is None)
        try:
            run.publish()
        except OutcomeUnknownError as e:
            hint = f"Is the sidecar at {address} still running? Started again, the command resumes."
            raise error(e.reason, e.message, hint=hint) from e
    if as_json:
        print_json(run.summary())
    else:
        click.echo(run.text())


class _Publishing:
    def __init__(self, client: Client, producer: Producer, source: Source, *, has_numbers: bool) -> None:
        self._client = client
        self._producer = producer
        self._source = source
        self._has_numbers = has_numbers
        self._resumed_after = producer.persisted_sequence_id
        self._read = 0
        self._verdicts = {Verdict.NOT_DUP: 0, Verdict.DUP: 0}
        self._receipts: deque[Receipt] = deque()

    def publish(self) -> None:
        """Returns when every record has its receipt. Raises SOURCE_CHANGED before anything is sent."""
        size = self._source.size_bytes
        shown = size > 0 and sys.stderr.isatty()
        with click.progressbar(length=size, label="Publishing", file=sys.stderr, hidden=not shown) as bar:
            for record in self._new_records():
                self._receipts.append(self._producer.send(record.payload, record.sequence_id, key=record.key))
                if self._read % _PROGRESS_RECORDS == 0:
                    self._count(only_done=True)
                    bar.update(self._source.read_bytes - bar.pos)
            self._producer.flush()
            self._count()
            bar.update(size - bar.pos)

    def _count(self, *, only_done: bool = False) -> None:
        while self._receipts and (not only_done or self._receipts[0].done()):
            self._verdicts[self._receipts.popleft().result().verdict] += 1

    def _new_records(self) -> Iterator[Record]:
        """The records behind the last one published, if the file still holds that one."""
        found = self._resumed_after < 0
        for record in self._source:
            self._read += 1
            if record.sequence_id > self._resumed_after:
                if not found and self._read > 1:
                    raise self._changed("is not there any more")
                found = True
                yield record
            elif record.sequence_id == self._resumed_after:
                self._compare(record)
                found = True
        if not found and self._has_numbers:
            raise self._changed(f"is not there: it has {self._read:,} records")

    def _compare(self, record: Record) -> None:
        """Raises SOURCE_CHANGED if the log, where that is still known, holds another payload for the record."""
        position = self._producer.persisted_position
        if position is None:
            return
        with self._client.reader(self._producer.topic, position.index) as reader:
            try:
                message = next(reader)
            except PositionError as e:
                if e.reason == "POSITION_TRIMMED":
                    return
                raise
        if (message.payload or b"") != record.payload:
            raise self._changed("is not the one that was published")

    def _changed(self, what: str) -> Exception:
        return error(
            "SOURCE_CHANGED",
            f"producer {self._producer.name!r} has published up to sequence ID {self._resumed_after}, and in this file "
            f"the record with that ID {what}; nothing was sent",
            sequence_id=self._resumed_after,
        )

    def summary(self) -> dict[str, object]:
        """The form is documented: keep it stable."""
        return {
            "topic": self._producer.topic,
            "producer_name": self._producer.name,
            "read": self._read,
            "not_dup": self._verdicts[Verdict.NOT_DUP],
            "dup": self._verdicts[Verdict.DUP],
            "resumed_after": None if self._resumed_after < 0 else self._resumed_after,
        }

    def text(self) -> str:
        resumed = f", resumed after sequence ID {self._resumed_after}" if self._resumed_after >= 0 else ""
        return (
            f"{self._read:,} records read{resumed}: {self._verdicts[Verdict.NOT_DUP]:,} NotDup, "
            f"{self._verdicts[Verdict.DUP]:,} Dup"
        )
