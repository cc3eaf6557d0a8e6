"""Delta tables on S3: writers that race, answers that are lost, a process that is killed; and where its keys show."""

import contextlib
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from seqdedupe.errors import ConfigurationError, SeqdedupeError, UnavailableError
from seqdedupe_spark.stores.contract import Stored
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.delta_files import plain
from seqdedupe_spark.stores.urls import from_url
from tests.spark.s3 import KEY, Between, Requested, S3Server, adds_rows
from tests.spark.stores.conformance import JOB, LIMIT_SECONDS, SCHEMA, TOPIC, at, ns, numbers, over
from tests.spark.stores.harnesses import DeltaHarness
from tests.spark.stores.test_kill import RANGE, Writer, start
from tests.spark.stores.test_planted import CommitsDeltaRowsFirst


@pytest.fixture
def harness(lake: str) -> DeltaHarness:
    harness = DeltaHarness(f"s3://{lake}")
    start(harness)
    return harness


def position(harness: DeltaHarness) -> int:
    with harness.factory() as store:
        return store.positions(JOB)[TOPIC].position.index


@pytest.mark.parametrize(("kind", "rows"), [(DeltaStore, [0]), (CommitsDeltaRowsFirst, [0, 0])])
def test_the_answers_to_a_commit_are_lost(
    harness: DeltaHarness,
    between: Between,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[DeltaStore],
    rows: list[int],
) -> None:
    """Nobody who has sent it knows whether it has happened: the position says so."""
    lost: set[str] = set()

    def loses(requested: Requested) -> bool:
        if adds_rows(requested) and not lost:
            lost.add(requested[1])
        return requested[0] == "PUT" and requested[1] in lost

    between.loses = loses
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
    store = kind(harness.uri)
    with pytest.raises(UnavailableError):
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    assert lost
    if store.positions(JOB)[TOPIC] == Stored(at(-1), 0):
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    assert (ns(harness), position(harness)) == (rows, 0)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_commit_that_comes_late_is_refused(
    harness: DeltaHarness, between: Between, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """Behind another one with the same version. A server without conditional PUTs replaces it: the control arm."""
    arrived, go = threading.Event(), threading.Event()

    def before(requested: Requested) -> None:
        if adds_rows(requested) and not arrived.is_set():
            arrived.set()
            assert go.wait(LIMIT_SECONDS)

    between.before = before
    between.forgets_conditions = forgets
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    advances = [over(-1, 1)]
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(DeltaStore(harness.uri).write, JOB, harness.table, iter([numbers(0, 1)]), advances)
        assert arrived.wait(LIMIT_SECONDS)
        DeltaStore(harness.uri).write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
        go.set()
        failure = late.exception(LIMIT_SECONDS)
    if forgets:
        assert failure is None
        assert (ns(harness), position(harness)) == ([0, 1], 1)
    else:
        assert isinstance(failure, SeqdedupeError)
        assert failure.reason == "POSITION_CHANGED"
        assert (ns(harness), position(harness)) == ([0], 0)


@pytest.mark.parametrize("wrong", ["", "CommitsDeltaRowsFirst@@"])
def test_a_writer_is_killed_in_its_commit(
    harness: DeltaHarness, between: Between, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """When the server has it, and the writer does not know."""
    arrived, go = threading.Event(), threading.Event()

    def reach(requested: Requested) -> bool:
        if adds_rows(requested):
            arrived.set()
            assert go.wait(LIMIT_SECONDS)
        return False

    between.loses = reach
    with monkeypatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", between.url)
        with Writer(f"{wrong}delta+{harness.uri}"):
            assert arrived.wait(LIMIT_SECONDS)
    go.set()
    assert ns(harness) == list(range(RANGE))
    assert position(harness) == (-1 if wrong else RANGE - 1)


def test_four_topics_are_written_at_once(harness: DeltaHarness) -> None:
    """Each position with its rows, in versions that only one of them gets."""
    topics = [f"{TOPIC}-{n}" for n in range(4)]

    def write(number: int) -> None:
        store, topic = DeltaStore(harness.uri), topics[number]
        while topic not in store.positions(JOB):
            with contextlib.suppress(UnavailableError):
                store.replace(JOB, topic, None, Stored(at(-1), 0))
        for n in range(3):
            while store.positions(JOB)[topic].position.index < n:
                with contextlib.suppress(UnavailableError):
                    store.write(JOB, harness.table, iter([numbers(10 * number + n)]), [over(n - 1, n, topic)])

    with ThreadPoolExecutor(len(topics)) as pool:
        assert list(pool.map(write, range(len(topics)))) == [None] * len(topics)
    assert ns(harness) == sorted(10 * number + n for number in range(4) for n in range(3))


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_S3_LOCKING_PROVIDER", "dynamodb"), ("AWS_COPY_IF_NOT_EXISTS", "header: a: b")]
)
def test_another_way_to_commit_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = from_url("delta+s3://lake/flights")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=name):
        factory()
    DeltaStore("/lake/flights")


def test_keys_are_in_no_error_and_in_nothing_that_travels(
    harness: DeltaHarness, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    travels = pickle.dumps(from_url(f"delta+{harness.uri}"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with harness.factory() as store, pytest.raises(UnavailableError, match="SignatureDoesNotMatch") as caught:
        store.positions(JOB)
    said = "".join(traceback.format_exception(caught.value)).encode()
    for secret in (KEY, s3.secret, "another-secret"):
        assert secret.encode() not in said + travels
    # As some servers answer.
    answer = (
        f"403 Forbidden\n \x1b[31m↳\x1b[0m <Error><Code>NotYours</Code><AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>"
    )
    assert plain(answer) == "403 Forbidden NotYours"
    assert plain(f"403 Forbidden <!DOCTYPE html><p>Credential={KEY}</p>") == "403 Forbidden"
    assert plain("GET http://user:password@host:8333/lake failed") == "GET http://host:8333/lake failed"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f"Credential={KEY} Signature=x", ""),
        (f'{{"message": "no: {KEY}",\n "key": "{KEY}"}}', ""),
        (f"<Refused><Code>NotYours</Code>\n{KEY}</Refused>", " NotYours"),
        (f"no\n\n{KEY}: 404 Not Found: {KEY}", ""),
        ("", ""),
    ],
)
def test_of_an_answer_in_any_form_an_error_has_the_code_alone(body: str, code: str) -> None:
    status = "Error performing PUT http://host:8333/lake in 1ms - Server returned non-2xx status code"
    arrow = "\n \x1b[31m↳\x1b[0m "
    nested = arrow.join(["Generic S3 error", status, "403 Forbidden", body]) + "\n"
    assert plain(nested) == f"Generic S3 error {status} 403 Forbidden{code}"
    assert plain(f"{status}: 403 Forbidden: {body}") == f"{status}: 403 Forbidden{code}"
    assert plain(f"Server returned error response: {body}") == f"Server returned error response{code}"


def test_a_server_that_is_away_is_said(harness: DeltaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with harness.factory() as store, pytest.raises(SeqdedupeError, match="OUTPUT_UNAVAILABLE"):
        store.positions(JOB)


def test_a_large_file_goes_in_parts(harness: DeltaHarness, between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Requested] = []
    between.before = requests.append
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
    # Random, so that nothing packs it.
    texts = [Random(n).randbytes(300_000).hex() for n in range(40)]
    rows = pa.record_batch({"n": list(range(40)), "text": texts}, SCHEMA)
    DeltaStore(harness.uri).write(JOB, harness.table, iter([rows]), [over(-1, 39)])
    assert [path for method, path, _ in requests if "partNumber=2" in path]
    assert ns(harness) == list(range(40))
    assert DeltaTable(harness.uri).to_pyarrow_table().sort_by("n")["text"].to_pylist() == texts


def test_folders_that_a_key_has_no_room_for(lake: str) -> None:
    """As long as each may be, there are too many of them: trying again would not help."""
    names = [letter * 50 for letter in "abcdef"]
    schema = pa.schema([("n", pa.int64()), *((name, pa.string()) for name in names)])
    harness = DeltaHarness(f"s3://{lake}")
    store = DeltaStore(harness.uri, partition_by=names)
    store.prepare(harness.table, schema)
    assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
    texts = [pa.array([str(n) * 90, str(n) * 200]) for n in range(len(names))]
    rows = [pa.record_batch([pa.array([0, 1]), *texts], schema=schema)]
    with pytest.raises(ConfigurationError, match="INVALID_OUTPUT") as caught:
        store.write(JOB, harness.table, iter(rows), [over(-1, 0)])
    assert caught.value.numbers["row"] == "1"
    assert store.write(JOB, harness.table, iter([rows[0].slice(0, 1)]), [over(-1, 0)]) == 1
