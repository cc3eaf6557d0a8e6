"""The audit on Spark: many made-up topics at once against a plain loop, and real ones through a sidecar."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.batch import Binary
from seqdedupe.client.blocking import Client
from seqdedupe.client.client import TopicEnds
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import NotFoundError, PositionError, SeqdedupeError, error
from seqdedupe.log.contract import Outcome
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.message_id import MessageId, MessageIds, Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import audit_job
from seqdedupe_spark.audit_job import Target, TopicReport, audit, audit_targets, find_targets, selection_of
from seqdedupe_spark.dedupe import EXAMPLES
from seqdedupe_spark.options import Selection
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.session import run_command
from tests.batches import batch
from tests.spark.histories import NAMES, Told, cut, stored, truth

TOPICS = 40
BATCHES = 60


def random_history(rng: random.Random) -> list[Told]:
    """Producers that send, send again, come late and lose messages, each with its own inclination."""
    last = dict.fromkeys(NAMES, -1)
    again, late, loss = rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.05]), rng.choice([0, 0.05])
    history: list[Told] = []
    while len(history) < BATCHES:
        if history and rng.random() < again:
            history.append(rng.choice(history[-20:]))
            continue
        rows, links = [], {}
        for name in rng.sample(NAMES, rng.randint(1, len(NAMES))):
            links[name] = last[name]
            for _ in range(rng.randint(1, 5)):
                last[name] += rng.randint(1, 3)
                rows.append((name, last[name]))
        if rng.random() < loss:
            continue
        history.append(Told(rows, links))
        if rng.random() < late:
            history.insert(rng.randrange(len(history)), history.pop())
    return history


def given_id(index: int) -> MessageId:
    """For a message of a log that gives the IDs."""
    return MessageId(index // 7, index % 7)


def with_given_ids(batches: list[StoredBatch]) -> list[StoredBatch]:
    """As of a log whose ledgers have seven rows each."""
    return [
        replace(one, message_ids=MessageIds.of([(1, *given_id(one.base_index + row)) for row in range(len(one))]))
        for one in batches
    ]


def check(report: TopicReport, history: list[Told], first_index: int = 0, gives_ids: bool = False) -> None:
    id_at: Callable[[int], MessageId] = given_id if gives_ids else partial(MessageId, report.incarnation)
    expected = truth(history, first_index, links=report.links)
    assert report.end_index - report.first_index == sum(len(told.rows) for told in history)
    for finding, counts, places in (
        (report.doubled, expected.doubled, expected.doubled_at),
        (report.out_of_order, expected.out_of_order, expected.out_of_order_at),
        (report.missing, expected.missing, expected.missing_at),
    ):
        assert (finding.messages, finding.producers) == (counts.total(), len(counts))
        shown = [(example.message_id, example.producer) for example in finding.examples]
        every = [(str(id_at(place[0])), place[1]) for place in places]
        assert shown == every[:EXAMPLES]
    assert [example.first_message_id for example in report.doubled.examples] == [
        str(id_at(place[3])) for place in expected.doubled_at[:EXAMPLES]
    ]
    assert report.is_clean == (not (expected.doubled or expected.out_of_order or expected.missing))


@pytest.mark.parametrize("is_split", [True, False])
def test_many_topics_at_once(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, is_split: bool
) -> None:
    seed = request.config.getoption("randomly_seed", 1)
    print("seed", seed)
    rng = random.Random(seed)
    if is_split:
        monkeypatch.setattr(audit_job, "MIN_RANGE_MESSAGES", 1)
        monkeypatch.setattr(audit_job, "RANGES_PER_CORE", 3 * TOPICS)
    histories = {f"t{n}": random_history(rng) for n in range(TOPICS)} | {"empty": []}
    firsts = {topic: rng.choice([0, 1000]) for topic in histories}
    logs = {topic: stored(history, firsts[topic]) for topic, history in histories.items()}
    giving = {topic for topic in logs if rng.random() < 0.5} | {"t0"} - {"t1"}
    logs |= {topic: with_given_ids(logs[topic]) for topic in giving}

    def read(span: TopicRange) -> Iterator[StoredBatch]:
        return cut(logs[span.topic], span.first_index, span.stop_index)

    targets = []
    for topic, batches in logs.items():
        end = firsts[topic] + sum(map(len, batches))
        targets.append(Target(topic, TopicEnds(firsts[topic], Position.before(1, end)), rng.random() < 0.5))
    report = audit_targets(spark, targets, read)
    assert [one.topic for one in report.topics] == list(histories)
    by_sequence = [one for one in report.topics if isinstance(one, TopicReport)]
    for one in by_sequence:
        check(one, histories[one.topic], firsts[one.topic], one.topic in giving)
    assert {one.links for one in by_sequence} == {"all", "after_first", "none"}
    json.dumps(report.as_json())


CLEAN = [Told([("a", i), ("b", 2 * i)], {"a": i - 1, "b": max(2 * i - 2, -1)}) for i in range(20)]
WRONG = {
    "clean": CLEAN,
    "doubled": [*CLEAN, CLEAN[3]],
    "late": [*CLEAN[:3], *CLEAN[4:8], CLEAN[3], *CLEAN[8:]],
    "lost": [*CLEAN[:3], *CLEAN[4:]],
}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with topics that were made wrong behind its back."""
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as started:
        with Client(started.address) as client:
            created = {client.admin.create_topic(topic).last.incarnation: topic for topic in WRONG}
            client.admin.create_topic("empty")
        started.stop()
        asyncio.run(write_logs(started.data / "logs", {number: WRONG[topic] for number, topic in created.items()}))
        started.start()
        yield started


async def write_logs(folder: Path, histories: dict[int, list[Told]]) -> None:
    """Appends these batches to topics' logs, where nobody judges them."""
    logs = EmbeddedLogs(folder, clock_ms=lambda: 1_000, fatal=pytest.fail)
    for incarnation, history in histories.items():
        left = len(history)
        done = asyncio.Event()

        def settle(outcome: Outcome, done: asyncio.Event = done) -> None:
            nonlocal left
            left -= outcome.stored
            if not left:
                done.set()

        log = await logs.open(incarnation, 0)
        await log.open_for_writing(2, bytes(16), settle)
        for told in history:
            one = batch(told.rows, links=told.links)
            log.append(one.encode(), len(one), len(replace(one, payloads=Binary()).encode()))
        await asyncio.wait_for(done.wait(), LAST_RESORT_SECONDS)
    await logs.close()


def test_topics_of_a_sidecar(spark: SparkSession, sidecar: Sidecar) -> None:
    report = audit(spark, Selection("topics", tuple(map(topic_name, [*WRONG, "empty"]))), sidecar.address)
    by_name = {one.topic.rpartition("/")[2]: one for one in report.topics if isinstance(one, TopicReport)}
    for topic, history in (WRONG | {"empty": []}).items():
        check(by_name[topic], history)
    assert {topic for topic, one in by_name.items() if one.is_clean} == {"clean", "empty"}
    assert not report.is_clean
    text = "\n".join(report.lines())
    assert "'a' 3 at" in text
    assert "the first copy is" in text
    assert "'a' 4 at" in text
    assert "was sent after 3, but nothing above 2 stands before it" in text
    assert text.endswith("not clean: 3 of 5 topics")
    # A link names the message that was lost; what comes late is late, and links to it prove nothing any more.
    assert by_name["lost"].missing.messages == by_name["late"].missing.messages == 2


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["clean", "empty"], 0, "clean: 2 topics"),
        (["--topics-pattern", "clean|late"], 1, "not clean: 1 of 2 topics"),
        (["doubled", "--json"], 1, '"doubled": {"messages": 2, "producers": 2, "examples": [{"producer": "a", '),
        (["nowhere"], 2, "there is no topic persistent://public/default/nowhere [TOPIC_NOT_FOUND]"),
        (["--topics-pattern", "("], 2, "--topics-pattern: '(' is not a regular expression"),
        (["a b"], 2, "INVALID_TOPIC_NAME"),
        ([], 2, "Name topics, or give --topics-pattern."),
        (["clean", "--topics-pattern", "x"], 2, "Name topics, or give --topics-pattern."),
    ],
)
def test_the_command(
    spark: SparkSession,
    sidecar: Sidecar,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(audit_job, "start_session", lambda name: spark)
    monkeypatch.setattr("sys.argv", ["audit", *arguments, "--address", sidecar.address])
    assert run_command(audit_job.main, "audit", failed=audit_job.COULD_NOT_BE_DONE) == status
    out, err = capsys.readouterr()
    assert said in (err if status == 2 else out)
    assert (len(err.splitlines()) == 1) == (status == 2)


def test_an_error_in_a_task_is_the_same_error_here(spark: SparkSession) -> None:
    def read(span: TopicRange) -> Iterator[StoredBatch]:
        raise error("POSITION_TRIMMED", f"{span} is gone")

    target = Target("t", TopicEnds(0, Position.before(1, 5)), True)
    with pytest.raises(PositionError, match=r"t \[0, 5\) is gone") as caught:
        audit_targets(spark, [target], read)
    assert isinstance(caught.value, SeqdedupeError)


def test_a_topic_that_is_not_there_is_an_error_before_spark_is_needed(sidecar: Sidecar) -> None:
    with pytest.raises(NotFoundError):
        find_targets(selection_of(["clean", "nowhere"], None), sidecar.address)
