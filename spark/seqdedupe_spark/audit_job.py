"""Checks whether a topic contains each message once: `python -m seqdedupe_spark.audit_job TOPIC …`

The audit reads each topic from the first stored message to the topic's end at the start of the audit. It reports
exactly:

- **doubled**: second copies of a (producer, sequence ID).
- **out of order**: messages without an earlier copy, but after a higher ID of their producer.
- **missing**: links that prove that a message is missing. Gaps in the IDs are legal and prove nothing. But each stored
  batch contains, for each producer, a link: the highest ID below the batch's first ID that the producer had sent
  before. The sidecar stores the batch only after the linked message or a later message. If the log contains no ID at or
  above the linked ID before the batch, a message is missing: the linked message, or a higher message that had moved the
  watermark past it. The report counts such links; for each of them at least one message is missing.

The audit does not prove that a message was sent at all. It does not prove that the last message of a producer is
stored, because no link names that message yet. It proves nothing where a link was omitted. If retention has trimmed the
start of a topic, links prove nothing about the time before a producer's first stored message. Then a second copy is
found only if the first copy is still stored, too. In a trimmed topic without deduplication, links prove nothing: a late
message may hide a higher message that was trimmed. If watermarks were imported into a topic, its first links name
messages that the topic never contained; the audit reports these.

A topic of deduplication IDs has neither producers nor links. For such a topic the audit reports doubled messages:
additional copies of an ID. This includes copies that were stored after the topic's window had forgotten the original.
"""

import base64
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import click
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.sidecar_options import sidecar_options, told_files
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import planning
from seqdedupe_spark.dedupe import (
    DOUBLED,
    ID_ROWS_SCHEMA,
    OUT_OF_ORDER,
    ROWS_SCHEMA,
    SUMMARY,
    IdJudgement,
    Judgement,
    TopicMerge,
    id_rows,
    judge,
    judge_ids,
    summarise,
    suspect_rows,
)
from seqdedupe_spark.options import Selection
from seqdedupe_spark.planning import Ends, earliest
from seqdedupe_spark.range_reader import read_stored
from seqdedupe_spark.ranges import TopicRange, split
from seqdedupe_spark.service import SidecarService, sidecar_at
from seqdedupe_spark.session import run_command, start_session, typed_failures

# -- The findings of an audit, for a person and for a machine.

KINDS = ("doubled", "out_of_order", "missing")


@dataclass(frozen=True)
class Example:
    """A message that is doubled, is out of order, or proves by its link that an earlier message is missing."""

    producer: str
    sequence_id: int
    message_id: str
    first_message_id: str | None = None
    """doubled: the message ID of the first copy."""
    higher_before: int | None = None
    """out of order: the higher sequence ID before this message."""
    link: int | None = None
    """missing: the linked sequence ID. The message with this ID is missing, or a message between it and
    `highest_before`."""
    highest_before: int | None = None
    """missing: the producer's highest sequence ID before this message; None if there is none."""

    def __str__(self) -> str:
        if self.first_message_id is not None:
            what = f"the first copy is {self.first_message_id}"
        elif self.higher_before is not None:
            what = f"comes after {self.higher_before}"
        else:
            before = "nothing" if self.highest_before is None else f"nothing above {self.highest_before}"
            what = f"was sent after {self.link}, but {before} stands before it"
        return f"{self.producer!r} {self.sequence_id} at {self.message_id}: {what}"


@dataclass
class Finding:
    """The result for one kind: the number of messages (for missing: at least this number), and of producers."""

    messages: int = 0
    producers: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class TopicReport:
    """A topic of sequence IDs, from its first stored message at `first_index` to before `end_index`.

    `links` states which links can prove that a message is missing: "all", "after_first" (all links after the producer's
    first stored message), or "none". `unlinked` counts the batches of a producer whose link was omitted: they prove
    nothing about earlier messages.
    """

    topic: str
    incarnation: int
    first_index: int
    end_index: int
    producers: int
    links: str
    unlinked: int
    doubled: Finding
    out_of_order: Finding
    missing: Finding
    deduplication_mode: str = "sequence-id"

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, kind).messages for kind in KINDS)

    def lines(self) -> Iterator[str]:
        """Yield the report for a person."""
        count = self.end_index - self.first_index
        held = f", indexes {self.first_index:,} to {self.end_index - 1:,}" if count else ""
        yield f"{self.topic}: {counted(count, 'message')} of {counted(self.producers, 'producer')}{held}"
        yield f"  {'':<14}{'MESSAGES':>12}{'PRODUCERS':>12}"
        for kind in KINDS:
            finding: Finding = getattr(self, kind)
            yield f"  {kind.replace('_', ' '):<14}{finding.messages:>12,}{finding.producers:>12,}"
            for example in finding.examples:
                yield f"    {example}"
        if self.links == "none":
            yield "  Missing messages cannot be found: the start is trimmed, and deduplication is off."
        elif self.links == "after_first":
            yield "  The start is trimmed: what is missing before a producer's first stored message cannot be found."
        if self.unlinked:
            unlinked = counted(self.unlinked, "batch has", "batches have")
            yield f"  {unlinked} no link: what is missing before cannot be found."


@dataclass(frozen=True)
class IdExample:
    """An additional copy of a message in a topic of deduplication IDs. The ID is text if it is UTF-8."""

    message_id: str
    first_message_id: str
    deduplication_id_base64: str
    deduplication_id: str | None = None

    def __str__(self) -> str:
        shown = (
            f"base64 {self.deduplication_id_base64}" if self.deduplication_id is None else repr(self.deduplication_id)
        )
        return f"{shown} at {self.message_id}: the first copy is {self.first_message_id}"


@dataclass
class IdFinding:
    """The number of additional copies, and of their IDs."""

    messages: int = 0
    ids: int = 0
    examples: list[IdExample] = field(default_factory=list)


@dataclass
class IdTopicReport:
    """A topic of deduplication IDs, from its first stored message at `first_index` to before `end_index`."""

    topic: str
    incarnation: int
    first_index: int
    end_index: int
    doubled: IdFinding
    deduplication_mode: str = "deduplication-id"

    @property
    def is_clean(self) -> bool:
        return not self.doubled.messages

    def lines(self) -> Iterator[str]:
        """Yield the report for a person."""
        count = self.end_index - self.first_index
        held = f", indexes {self.first_index:,} to {self.end_index - 1:,}" if count else ""
        yield f"{self.topic}: {counted(count, 'message')} with deduplication IDs{held}"
        yield f"  {'':<14}{'MESSAGES':>12}{'IDS':>12}"
        yield f"  {'doubled':<14}{self.doubled.messages:>12,}{self.doubled.ids:>12,}"
        for example in self.doubled.examples:
            yield f"    {example}"


@dataclass
class AuditReport:
    """The findings of an audit, topic by topic."""

    topics: list[TopicReport | IdTopicReport]

    @property
    def is_clean(self) -> bool:
        """Whether no topic has a finding."""
        return all(topic.is_clean for topic in self.topics)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON, in the form of `docs/guides/spark-audit.md`."""
        return {"clean": self.is_clean, "topics": [_without_none(asdict(topic)) for topic in self.topics]}

    def lines(self) -> Iterator[str]:
        """Yield the report for a person."""
        for topic in self.topics:
            yield from topic.lines()
        wrong = sum(not topic.is_clean for topic in self.topics)
        yield (
            f"not clean: {wrong} of {counted(len(self.topics), 'topic')}"
            if wrong
            else f"clean: {counted(len(self.topics), 'topic')}"
        )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


MIN_RANGE_MESSAGES = 50_000
"""The approximate minimum number of messages in the range of a task."""

RANGES_PER_CORE = 2
"""The maximum number of ranges for each of the tasks that Spark runs at the same time, plus one range for each
topic."""

CLEAN = 0
FOUND_SOMETHING = 1
COULD_NOT_BE_DONE = 2
"""The exit statuses."""

Read = Callable[[TopicRange], Iterable[StoredBatch]]
J = TypeVar("J")


@dataclass(frozen=True)
class Target:
    """A topic to audit, from `ends.first_index` to `ends.last`."""

    topic: str
    ends: Ends
    deduplication_enabled: bool
    is_by_id: bool = False
    """Whether the topic is a topic of deduplication IDs."""

    @property
    def links(self) -> str:
        """What the links of the topic can prove, see `TopicReport`."""
        if self.ends.first_index == 0:
            return "all"
        return "after_first" if self.deduplication_enabled else "none"

    def merge(self) -> TopicMerge:
        return TopicMerge(links_prove=self.links != "none", first_links_prove=self.links == "all")


def audit(spark: SparkSession, selection: Selection, service: str | SidecarService) -> AuditReport:
    """Audit the existing topics, exactly and up to their current ends.

    Every message is read once, and the ranges with late messages are read a second time. Spark sorts the IDs of a topic
    of deduplication IDs, and the doubled and late messages, on disk if necessary. The driver needs about 400 bytes of
    memory for each producer. While the results arrive, it also needs 100 bytes for each range with messages of a
    producer (`spark.driver.maxResultSize` limits this), and 100 bytes for each link that proves a missing message.

    Raises NotFoundError, UnavailableError, and PositionError if a topic is trimmed, or deleted and recreated, during
    the audit.
    """
    return audit_targets(spark, find_targets(selection, service), partial(read_stored, service))


def find_targets(selection: Selection, service: str | SidecarService) -> list[Target]:
    """Return the existing topics, with their current ends. Raises NotFoundError, UnavailableError."""
    with sidecar_at(service).connect() as client:
        listing = planning.TopicListing(client)
        return [_target(client, listing, topic) for topic in listing.select(selection)]


def _target(client: Client, listing: planning.TopicListing, topic: str) -> Target:
    ends = listing.ends(topic) or planning.patiently(lambda: client.ends(topic))
    is_by_id = listing.is_by_id(topic)
    if is_by_id is None:
        # The topic was recovering when it was listed.
        mode = client.admin.topic(topic).deduplication_mode
        is_by_id = mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    return Target(topic, ends, listing.deduplication_enabled(topic), is_by_id)


def audit_targets(spark: SparkSession, targets: Sequence[Target], read: Read) -> AuditReport:
    """Do the same as `audit` for given targets. The function `read` returns the batches of a range, and must be
    picklable for Spark."""
    by_id = [target for target in targets if target.is_by_id]
    reports: list[TopicReport | IdTopicReport] = [*_by_sequence(spark, targets, read), *_by_id(spark, by_id, read)]
    found = {one.topic: one for one in reports}
    return AuditReport([found[target.topic] for target in targets])


def _by_sequence(spark: SparkSession, all_targets: Sequence[Target], read: Read) -> list[TopicReport]:
    """Return the reports of the topics of sequence IDs."""
    targets = [target for target in all_targets if not target.is_by_id]
    ranges = _plan(spark, targets)
    merges = {target.topic: target.merge() for target in targets}
    for one, summary in zip(ranges, _summaries(spark, ranges, read), strict=True):
        merges[one.topic].add(summary)
    judgement = _judge(spark, targets, ranges, merges, read)
    return [_report(n, target, merges[target.topic], judgement, read) for n, target in enumerate(targets)]


def _by_id(spark: SparkSession, targets: Sequence[Target], read: Read) -> list[IdTopicReport]:
    """Return the reports of the topics of deduplication IDs."""
    numbers = {target.topic: number for number, target in enumerate(targets)}
    works = [(numbers[one.topic], one) for one in _plan(spark, targets)]
    judgement = IdJudgement()

    def look(topic: int, one: TopicRange) -> Iterator[pa.RecordBatch]:
        return id_rows(topic, read(one))

    if works:
        rows = _on_workers(spark, works, look, ID_ROWS_SCHEMA)
        for one in _judged(rows, ("topic", "id"), judge_ids):
            judgement.merge(one)
    return [_id_report(number, target, judgement, read) for number, target in enumerate(targets)]


def _plan(spark: SparkSession, targets: Sequence[Target]) -> list[TopicRange]:
    """Return ranges in the order of the targets. The ranges of a target are in the order of its messages."""
    whole = [TopicRange(target.topic, earliest(target.ends), target.ends.last) for target in targets]
    whole = [one for one in whole if len(one)]
    at_most = RANGES_PER_CORE * spark.sparkContext.defaultParallelism
    return split(whole, max(min(sum(map(len, whole)) // MIN_RANGE_MESSAGES, at_most), 1)) if whole else []


def _summaries(spark: SparkSession, ranges: Sequence[TopicRange], read: Read) -> Iterator[pa.Table]:
    """Yield the summary of each range, by `summarise`."""

    def look(number: int, one: TopicRange) -> Iterator[pa.RecordBatch]:
        yield summarise(number, read(one))

    if not ranges:
        return
    with typed_failures():
        table = _on_workers(spark, list(enumerate(ranges)), look, SUMMARY).toArrow()
    cuts = np.searchsorted(table["range"].to_numpy(), np.arange(len(ranges) + 1))
    for first, stop in pairwise(cuts.tolist()):
        yield table.slice(first, stop - first)


def _judge(
    spark: SparkSession,
    targets: Sequence[Target],
    ranges: Sequence[TopicRange],
    merges: dict[str, TopicMerge],
    read: Read,
) -> Judgement:
    """Judge the late messages of all topics. If there are none, Spark has nothing to do."""
    numbers = {target.topic: number for number, target in enumerate(targets)}
    suspects = (each for target in targets for each in merges[target.topic].suspects())
    works = [(numbers[one.topic], one, found) for one, found in zip(ranges, suspects, strict=True) if found is not None]
    judgement = Judgement()
    if not works:
        return judgement

    def look_again(topic: int, one: TopicRange, found: Any) -> Iterator[pa.RecordBatch]:
        return suspect_rows(topic, read(one), found)

    rows = _on_workers(spark, works, look_again, ROWS_SCHEMA)
    for one in _judged(rows, ("topic", "producer", "sequence_id"), judge):
        judgement.merge(one)
    return judgement


def _judged(rows: DataFrame, key: tuple[str, ...], judge: Callable[[Iterator[pa.RecordBatch]], J]) -> Iterator[J]:
    """Yield the results of `judge` for the rows of each of Spark's partitions. Rows with the same key are in the same
    partition, in the topic's order."""

    def decide(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"judgement": [pickle.dumps(judge(batches))]})

    together = rows.repartition(*key).sortWithinPartitions(*key, "index")
    with typed_failures():
        for row in together.mapInArrow(decide, "judgement binary").collect():
            yield pickle.loads(row[0])


def _on_workers(
    spark: SparkSession,
    works: Sequence[tuple[Any, ...]],
    do: Callable[..., Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """Run `do` for each item of `works` on Spark's workers. Return the yielded rows in the order of the items. A task
    receives only its own items."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for work in batch.column(0).to_pylist():
                yield from do(*pickle.loads(work))

    types = {pa.int32(): "int", pa.int64(): "bigint", pa.binary(): "binary"}
    columns = ", ".join(f"`{column.name}` {types[column.type]}" for column in schema)
    pickled = pa.table({"work": pa.array([pickle.dumps(work) for work in works], pa.binary())})
    return spark.createDataFrame(pickled).mapInArrow(run, columns)


def _report(number: int, target: Target, merge: TopicMerge, judgement: Judgement, read: Read) -> TopicReport:
    names = merge.producers.names()
    ends = target.ends
    message_id = partial(_message_id, target, read)

    def late(kind: str) -> Finding:
        counts = [count for (one, topic, _), count in judgement.counts.items() if (one, topic) == (kind, number)]
        finding = Finding(sum(counts), len(counts))
        for one in judgement.examples.get((kind, number), []):
            where = {"first_message_id": message_id(one.other)} if kind == DOUBLED else {"higher_before": one.other}
            name = names[one.producer].decode()
            finding.examples.append(Example(name, one.sequence_id, message_id(one.index), **where))
        return finding

    holes = [
        Example(
            hole.producer.decode(),
            hole.sequence_id,
            message_id(hole.index),
            link=hole.link,
            highest_before=hole.before if hole.before >= 0 else None,
        )
        for hole in merge.holes
    ]
    return TopicReport(
        topic=target.topic,
        incarnation=ends.last.incarnation,
        first_index=ends.first_index,
        end_index=ends.last.index + 1,
        producers=len(names),
        links=target.links,
        unlinked=merge.unlinked,
        doubled=late(DOUBLED),
        out_of_order=late(OUT_OF_ORDER),
        missing=Finding(merge.missing, len(merge.incomplete), holes),
    )


def _id_report(number: int, target: Target, judgement: IdJudgement, read: Read) -> IdTopicReport:
    message_id = partial(_message_id, target, read)
    examples = [
        IdExample(message_id(one.index), message_id(one.first_index), *_shown(one.deduplication_id))
        for one in judgement.examples.get(number, [])
    ]
    return IdTopicReport(
        topic=target.topic,
        incarnation=target.ends.last.incarnation,
        first_index=target.ends.first_index,
        end_index=target.ends.last.index + 1,
        doubled=IdFinding(judgement.messages[number], judgement.ids[number], examples),
    )


def _message_id(target: Target, read: Read, index: int) -> str:
    """Return the message ID of a message. The message must be read, because in some logs its ID does not follow from
    the index."""
    before, after = (Position.before(target.ends.last.incarnation, one) for one in (index, index + 1))
    [stored] = read(TopicRange(target.topic, before, after))
    return str(stored.message_id(0))


def _shown(deduplication_id: bytes) -> tuple[str, str | None]:
    """Return the ID in base64, and as text if it is UTF-8."""
    try:
        text = deduplication_id.decode()
    except UnicodeDecodeError:
        text = None
    return base64.b64encode(deduplication_id).decode(), text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("topics", nargs=-1)
@click.option("--topics-pattern", metavar="REGEX", help="Audit the topics whose whole full or short names match.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/guides/spark-audit.md describes it.")
@sidecar_options
def main(topics: tuple[str, ...], topics_pattern: str | None, as_json: bool, address: str) -> int:
    """Report messages of TOPICS that are doubled, out of order or missing. The exit status is 0 if there are no such
    messages, 1 if there are some, 2 if the audit failed."""
    if bool(topics) == bool(topics_pattern):
        raise click.UsageError("Name topics, or give --topics-pattern.")
    sidecar = SidecarService(address, **told_files())
    targets = find_targets(selection_of(topics, topics_pattern), sidecar)
    report = audit_targets(start_session("seqdedupe audit"), targets, partial(read_stored, sidecar))
    if as_json:
        click.echo(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        click.echo("\n".join(report.lines()))
    return CLEAN if report.is_clean else FOUND_SOMETHING


def selection_of(topics: Sequence[str], pattern: str | None) -> Selection:
    """Return the topics with these names, or the topics that match the pattern. Raises INVALID_OPTION,
    INVALID_TOPIC_NAME."""
    if pattern is None:
        return Selection("TOPICS", tuple(topic_name(topic) for topic in topics))
    try:
        re.compile(pattern)
    except re.error as e:
        raise error("INVALID_OPTION", f"--topics-pattern: {pattern!r} is not a regular expression: {e}") from e
    return Selection("--topics-pattern", pattern=pattern)


def run_main(arguments: Sequence[str] | None = None, name: str = "seqdedupe_spark.audit_job") -> int:
    """Run the command, by default with this process's arguments. Return the exit status."""
    return run_command(main, name, arguments=arguments, failed=COULD_NOT_BE_DONE)


if __name__ == "__main__":
    sys.exit(run_main())
