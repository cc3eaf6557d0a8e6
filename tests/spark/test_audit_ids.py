"""The audit of topics of deduplication IDs: the judgement against a plain count, and topics of a sidecar."""

import json
import random
from collections import Counter
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seqdedupe.client.blocking import Client
from seqdedupe.message_id import MessageId
from seqdedupe.names import topic_name
from seqdedupe_spark.audit_job import IdTopicReport, TopicReport, audit, selection_of
from seqdedupe_spark.dedupe import EXAMPLES, ID_ROWS_SCHEMA, IdCopy, IdJudgement, judge_ids
from tests.spark.jobs import publish

Row = tuple[int, bytes, int]


def judged(rows: list[Row], cuts: list[int]) -> IdJudgement:
    """What is found in sorted rows that come in batches cut there."""
    columns = [[row[column] for row in rows] for column in range(3)]
    table = pa.table(columns, ID_ROWS_SCHEMA)
    bounds = sorted({0, len(rows), *cuts})
    return judge_ids(batch for a, b in pairwise(bounds) for batch in table.slice(a, b - a).to_batches())


@pytest.mark.parametrize("seed", range(60))
def test_the_judgement_is_that_of_a_plain_count(seed: int) -> None:
    chosen = random.Random(seed)
    known = [b"", b"a", b"a\0", b"\0", b"b" * 16, *(b"%d" % i for i in range(chosen.choice([3, 30, 300])))]
    log = [[chosen.choice(known) for _ in range(chosen.choice([0, 1, 50, 400]))] for _ in range(3)]
    rows = sorted((topic, one, index) for topic, its in enumerate(log) for index, one in enumerate(its))
    cuts = [chosen.randint(0, len(rows)) for _ in range(chosen.choice([0, 3, 50]))]
    # As from several of Spark's partitions, each with all copies of its IDs.
    found = IdJudgement()
    for part in range(2):
        found.merge(
            judged(
                [row for row in rows if row[1][-1:] < b"5"] if part else [r for r in rows if r[1][-1:] >= b"5"], cuts
            )
        )
    for topic, its in enumerate(log):
        first: dict[bytes, int] = {}
        copies = []
        for index, one in enumerate(its):
            if one in first:
                copies.append(IdCopy(index, first[one], one))
            first.setdefault(one, index)
        assert found.messages[topic] == len(copies)
        assert found.ids[topic] == len([one for one, count in Counter(its).items() if count > 1])
        assert found.examples.get(topic, []) == copies[:EXAMPLES]


def test_topics_of_both_modes_are_audited_together(spark: SparkSession, client: Client, topic: str) -> None:
    names = [f"{topic}-{kind}" for kind in ("1-sequence", "2-clean", "3-doubled", "4-empty")]
    publish(client.address, names[0], 5)
    for name in names[1:]:
        client.admin.create_topic(name, deduplication_mode="deduplication-id", deduplication_enabled=name != names[2])
    with client.publisher(names[1]) as publisher:
        for _ in range(2):
            publisher.send_batch([b"x"] * 20, [b"%d" % i for i in range(20)])
    with client.publisher(names[2]) as publisher:
        # Deduplication is off there: all are stored.
        for copies in ([b"a", b"b", b"c"], [b"a", b"b"], [b"a", b"\xff", b"\xff"]):
            publisher.send_batch([b"x"] * len(copies), copies)
    report = audit(spark, selection_of(names, None), client.address)
    assert [one.topic for one in report.topics] == list(map(topic_name, names))
    sequence, clean, doubled, empty = report.topics
    assert isinstance(sequence, TopicReport)
    assert isinstance(clean, IdTopicReport)
    assert isinstance(doubled, IdTopicReport)
    assert (clean.is_clean, clean.end_index, empty.is_clean, sequence.is_clean) == (True, 20, True, True)
    assert (doubled.doubled.messages, doubled.doubled.ids) == (4, 3)
    at = [str(MessageId.of(doubled.incarnation, index)) for index in range(8)]
    assert [(one.message_id, one.first_message_id, one.deduplication_id) for one in doubled.doubled.examples] == [
        (at[3], at[0], "a"),
        (at[4], at[1], "b"),
        (at[5], at[0], "a"),
        (at[7], at[6], None),
    ]
    as_json = json.loads(json.dumps(report.as_json()))
    assert [one["deduplication_mode"] for one in as_json["topics"]] == ["sequence-id"] + 3 * ["deduplication-id"]
    assert as_json["topics"][2]["doubled"]["ids"] == 3
    assert as_json["topics"][2]["doubled"]["examples"][3]["deduplication_id_base64"] == "/w=="
    lines = "\n".join(report.lines())
    assert f"'a' at {at[3]}: the first copy is {at[0]}" in lines
    assert "base64 /w== at" in lines
    assert lines.endswith("not clean: 1 of 4 topics")
