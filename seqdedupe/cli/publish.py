"""`seqdedupe publish`: a file's records, each once, however often it is started."""

import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import get_args

import click

from seqdedupe.cli.json_lines import JsonPath
from seqdedupe.cli.options import common, connect_to, print_json, right_kind, tell_waiting
from seqdedupe.cli.publish_by_id import publish_by_id
from seqdedupe.cli.resume import RECORD_PROPERTY, Resume
from seqdedupe.cli.source import STANDARD_INPUT, Form, Source
from seqdedupe.cli.verify import verify
from seqdedupe.client import Verdict
from seqdedupe.client.blocking import Client, Producer, Receipt
from seqdedupe.command import echo, say
from seqdedupe.errors import DataLossError, NotFoundError, SeqdedupeError, error

_PROGRESS_RECORDS = 500
_FOLLOW_POLL_SECONDS = 0.2

_INTERRUPT_GRACE_SECONDS = 1.0
"""After Ctrl-C, receipts that are under way are waited for so long, to say what is durable."""

_GO_ON = "Started again, the command goes on after what is durable."


class _PathType(click.ParamType[JsonPath]):
    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> JsonPath:
        try:
            return JsonPath.parse(str(value))
        except ValueError:
            shown = f"{value!r} is not a path of names with dots and [indexes], as after.id or meta.keys[0]."
            raise click.BadParameter(shown, ctx, param) from None


@click.command(short_help="Publish the records of a file.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--topic", required=True, help="The topic.")
@click.option("--producer", "name", help="The producer name: one for each file. Not with deduplication IDs.")
@click.option("--format", "form", type=click.Choice(get_args(Form)), help="Default: what the name's end says.")
@click.option("--sequence-id-column", metavar="NAME", help="CSV: the column with the sequence IDs; they must rise.")
@click.option("--key-column", metavar="NAME", help="CSV: the column with the messages' keys.")
@click.option(
    "--sequence-id-path", metavar="PATH", type=_PathType(), help="JSON lines: the same, in the member after.id, say."
)
@click.option("--key-path", metavar="PATH", type=_PathType(), help="JSON lines: where the key is: meta.keys[0], say.")
@click.option(
    "--deduplication-id-column",
    metavar="NAME",
    help="CSV, to a topic of deduplication IDs: the column with each record's ID; in any order.",
)
@click.option(
    "--deduplication-id-path",
    metavar="PATH",
    type=_PathType(),
    help="JSON lines: the same, in the member event.id, say.",
)
@click.option("--final", is_flag=True, help="The file is complete: its last line counts without an end, too.")
@click.option("--follow", is_flag=True, help="The file grows: at its end wait for more.")
@click.option("--trust-source", is_flag=True, help="Go on also where the file cannot be compared with the topic.")
@click.option("--verify", "verifies", is_flag=True, help="Publish nothing: compare the file with what the topic holds.")
@common
def publish(
    file: Path,
    topic: str,
    name: str | None,
    form: Form | None,
    sequence_id_column: str | None,
    key_column: str | None,
    sequence_id_path: JsonPath | None,
    key_path: JsonPath | None,
    deduplication_id_column: str | None,
    deduplication_id_path: JsonPath | None,
    final: bool,
    follow: bool,
    trust_source: bool,
    verifies: bool,
    address: str,
    as_json: bool,
) -> None:
    """Publish the lines, CSV records or JSON lines of FILE (- is standard input), plain, gzip or a zip of one file.

    A payload is the record's text. The sequence ID is the record's number from 0, after a CSV header. Each record is
    published once: started again, the command goes on after the last ID that the topic has of this producer, if the
    file still has the same record there. A topic that is not there is made, where the sidecar allows that. To a topic
    of deduplication IDs no producer is named, and each record is published once by its own ID: started again, the
    command sends all of them, and those that are known are Dup.
    """
    by_id = deduplication_id_column is not None or deduplication_id_path is not None
    if by_id and (name, sequence_id_column, sequence_id_path, key_column, key_path) != (None,) * 5:
        raise click.UsageError("Deduplication IDs go with no producer, sequence IDs and keys.")
    if by_id and (follow or trust_source or verifies):
        raise click.UsageError("Deduplication IDs go with neither --follow, --trust-source nor --verify.")
    if deduplication_id_column is not None and deduplication_id_path is not None:
        raise click.UsageError("Columns are for CSV and paths for JSON lines: a file is one of them.")
    if by_id:
        with Source(
            file, form=form, key_column=deduplication_id_column, key_path=deduplication_id_path, final=final
        ) as source:
            source.check()
            _publish_by_id(source, topic, address, as_json=as_json)
        return
    if name is None:
        raise click.UsageError("Say --producer, or where the deduplication IDs are.")
    if follow and (final or file == STANDARD_INPUT):
        raise click.UsageError("--follow is for a file that grows: not for a final one, nor for standard input.")
    if verifies and (follow or trust_source):
        raise click.UsageError("--verify compares the file as it is: it goes with neither --follow nor --trust-source.")
    if (sequence_id_column, key_column) != (None, None) != (sequence_id_path, key_path):
        raise click.UsageError("Columns are for CSV and paths for JSON lines: a file is one of them.")
    with Source(
        file,
        form=form,
        sequence_id_column=sequence_id_column,
        key_column=key_column,
        sequence_id_path=sequence_id_path,
        key_path=key_path,
        final=final,
        follow=follow,
    ) as source:
        source.check()
        if verifies:
            _verify(source, topic, name, address, as_json=as_json)
            return
        waiting = partial(tell_waiting, topic, as_json)
        with connect_to(address, topic, makes=True, on_waiting=waiting if follow else None) as client:
            makes_topic = _is_missing(client, topic)
            with right_kind(client, topic, by_id=False), client.producer(topic, name, on_waiting=waiting) as producer:
                if makes_topic and follow and not as_json:  # which ends without a summary
                    say("seqdedupe", f"made the topic {producer.topic}")
                resume = Resume(client, producer, numbers_are_ids=source.numbers_are_ids, trust_source=trust_source)
                with_numbers = not source.numbers_are_ids
                run = _Publishing(producer, source, resume, with_numbers=with_numbers, makes_topic=makes_topic)
                run.publish()
        if as_json:
            print_json(run.summary())
        else:
            echo(run.text())
        if source.unfinished_line:
            raise source.incomplete()


def _is_missing(client: Client, topic: str) -> bool:
    """Whether the topic will be made. No: also where the sidecar does not tell."""
    try:
        client.ends(topic)
    except SeqdedupeError as e:
        return e.reason == "TOPIC_NOT_FOUND"
    return False


def _publish_by_id(source: Source, topic: str, address: str, *, as_json: bool) -> None:
    waiting = partial(tell_waiting, topic, as_json)
    with (
        connect_to(address, topic, makes=True) as client,
        right_kind(client, topic, by_id=True),
        client.publisher(topic, on_waiting=waiting) as publisher,
    ):
        summary = publish_by_id(publisher, source)
    if as_json:
        print_json(summary)
    else:
        imported = f", {summary['imported']:,} of them imported" if summary["imported"] else ""
        echo(f"{summary['read']:,} records read: {summary['not_dup']:,} NotDup, {summary['dup']:,} Dup{imported}")
    if source.unfinished_line:
        raise source.incomplete()


def _verify(source: Source, topic: str, name: str, address: str, *, as_json: bool) -> None:
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


class _Publishing:
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
        """Returns when every record has its receipt. An error says what is durable all the same."""
        try:
            self._send_all()
        except KeyboardInterrupt as e:
            over_at = time.monotonic() + _INTERRUPT_GRACE_SECONDS
            with suppress(SeqdedupeError):
                for receipt in self._receipts:  # in order, for those of an interrupted send have failed
                    receipt.until_durable(max(0.0, over_at - time.monotonic()))
            raise error("INTERRUPTED", f"interrupted; {self._durable()}", hint=_GO_ON) from e
        except SeqdedupeError as e:
            raise self._with_durable(e) from e

    def _send_all(self) -> None:
        size = self._source.size_bytes
        shown = size > 0 and sys.stderr.isatty()
        with click.progressbar(length=size, label="Publishing", file=sys.stderr, hidden=not shown) as bar:
            for record in self._resume.new_records(self._source):
                properties = {RECORD_PROPERTY: str(record.number)} if self._with_numbers else None
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
        """Of all, which it waits for, or of those that are over by now. Raises what one of them failed with."""
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
        return f"{durable:,} of the {durable + len(self._receipts):,} records sent {are_durable}{up_to}"

    def _with_durable(self, failure: SeqdedupeError) -> SeqdedupeError:
        """The failure with what is durable, unless nothing was sent; the command can be started again."""
        if not self._receipts and not any(self._verdicts.values()):
            return failure
        with suppress(SeqdedupeError):
            self._producer.flush()  # if it was the source that failed
        message, hint = failure.message, failure.hint
        if isinstance(failure, DataLossError | NotFoundError):  # what was durable may be gone
            message = f"{message}; {self._durable('had receipts')}"
            return type(failure)(failure.reason, message, hint, failure.retry_delay_ms, failure.numbers)
        if failure.reason == "OUTCOME_UNKNOWN":  # which says by itself what is durable
            hint = f"{failure.hint} {_GO_ON}" if "last_refusal" in failure.numbers else _GO_ON
        else:
            message = f"{message}; {self._durable()}"
        numbers = failure.numbers | {"durable_sequence_id": str(self._producer.durable_sequence_id)}
        return type(failure)(failure.reason, message, hint, failure.retry_delay_ms, numbers)

    def summary(self) -> dict[str, object]:
        """The form is documented: keep it stable."""
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
        records = "record" if self._resume.records_read == 1 else "records"
        made = f"; made the topic {self._producer.topic}" if self._makes_topic else ""
        return (
            f"{self._resume.records_read:,} {records} read{resumed}: {self._verdicts[Verdict.NOT_DUP]:,} NotDup, "
            f"{self._verdicts[Verdict.DUP]:,} Dup{made}"
        )
