"""Windows from a topic of deduplication IDs, and from a history in Parquet files, up to the verdicts of a new topic."""

import random
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seqdedupe import exports
from seqdedupe.client import Verdict
from seqdedupe.client.blocking import Client
from seqdedupe.errors import ConfigurationError, InvalidRequestError
from seqdedupe_spark import bootstrap_job
from seqdedupe_spark.bootstrap_job import bootstrap_window_from_parquet
from seqdedupe_spark.session import run_command
from tests.spark.test_bootstrap_job import history


def known_in(path: Path) -> dict[bytes, int]:
    _, *blocks = exports.read_window(path)
    found: dict[bytes, int] = {}
    for raw in blocks:
        times, sizes, ids = exports.parse_block(raw)
        bounds = pairwise([0, *sizes.cumsum(dtype=int).tolist()])
        found |= {ids[a:b].tobytes(): t for (a, b), t in zip(bounds, times.tolist(), strict=True)}
    return found


def run(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(bootstrap_job, "start_session", lambda name: spark)
    return run_command(bootstrap_job.main, "bootstrap", arguments=arguments)


def test_years_of_parquet_files_are_known_in_a_new_topic(
    spark: SparkSession,
    client: Client,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(1)
    ids = [rng.randbytes(rng.choice([1, 8, 16, 255])) for _ in range(1500)]
    rows = [(rng.choice(ids), rng.randrange(10**12, 2 * 10**12)) for _ in range(4000)]
    expected: dict[bytes, int] = {}
    for one, time_ms in rows:
        expected[one] = max(expected.get(one, 0), time_ms)
    columns = ("value", "__producerName", "__sequenceId", "__deduplicationId", "__publishTime")
    nothing = {
        "__producerName": pa.array([None] * 1000, pa.string()),
        "__sequenceId": pa.array([None] * 1000, pa.int64()),
    }
    files = [
        {"value": pa.array([b""] * 1000)}
        | nothing
        | {
            "__deduplicationId": [one for one, _ in part],
            "__publishTime": pa.array([1000 * t for _, t in part], pa.timestamp("us", "UTC")),
        }
        for part in (rows[i : i + 1000] for i in range(0, 4000, 1000))
    ]
    assert all(tuple(file) == columns for file in files), "as the data source gives a topic of deduplication IDs"
    output = tmp_path / "window"
    assert run(spark, monkeypatch, str(output), "--parquet", history(tmp_path / "history", *files)) == 0
    assert capsys.readouterr().out == f"{output}: a window of {len(expected):,} deduplication IDs\n"
    assert known_in(output) == expected
    client.admin.create_topic(topic, deduplication_mode="deduplication-id")
    assert client.admin.import_window(topic, output) == len(expected)
    with client.publisher(topic) as publisher:
        result = publisher.send_batch([b""] * (len(expected) + 1), [*expected, b"new"])
    assert result.verdicts.tolist() == [Verdict.DUP] * len(expected) + [Verdict.NOT_DUP]


def test_a_topic_of_deduplication_ids_gives_these(
    spark: SparkSession,
    client: Client,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, address = tmp_path / "window", ("--address", client.address)
    client.admin.create_topic(topic, deduplication_mode="deduplication-id")
    assert run(spark, monkeypatch, str(output), "--topic", topic, *address) == 0
    assert known_in(output) == {}
    with client.publisher(topic) as publisher:
        for k in range(3):
            publisher.send_batch([b""] * 50, [b"%d" % (k * 40 + j) for j in range(50)])
    assert run(spark, monkeypatch, str(output), "--topic", topic, *address) == 0
    assert capsys.readouterr().out.endswith(f"{output}: a window of 130 deduplication IDs\n")
    found = known_in(output)
    assert set(found) == {b"%d" % k for k in range(130)}
    assert all(abs(t - datetime.now(UTC).timestamp() * 1000) < 3_600_000 for t in found.values())
    new = f"{topic}-new"
    client.admin.create_topic(new, deduplication_mode="deduplication-id")
    client.admin.import_window(new, output)
    before = output.read_bytes()
    assert run(spark, monkeypatch, str(output), "--topic", new, *address) == 1
    assert "LOG_INCOMPLETE" in capsys.readouterr().err
    assert output.read_bytes() == before
    client.admin.create_topic(f"{topic}-by-sequence")
    with pytest.raises(InvalidRequestError, match="sequence IDs"):
        client.admin.import_window(f"{topic}-by-sequence", output)


def test_all_partitions_of_a_topic_go_into_all_of_another_one(
    spark: SparkSession,
    client: Client,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By key an ID may be in several partitions: it counts from its latest message on."""
    output, new = tmp_path / "window", f"{topic}-new"
    by_id: dict[str, Any] = {"deduplication_mode": "deduplication-id"}
    client.admin.create_topic(topic, partitions=3, deduplication_route="key", **by_id)
    ids = [b"%d" % k for k in range(100)]
    with client.publisher(topic) as publisher:
        publisher.send_batch([b""] * 200, ids + ids, keys=[b"%d" % (k % 37) for k in range(200)])
    assert run(spark, monkeypatch, str(output), "--topic", topic, "--address", client.address) == 0
    assert capsys.readouterr().out == f"{output}: a window of 100 deduplication IDs\n"
    assert set(known_in(output)) == set(ids)
    client.admin.create_topic(new, partitions=2, **by_id)
    assert client.admin.import_window(new, output) == 100
    with client.publisher(new) as publisher:
        result = publisher.send_batch([b""] * 101, [*ids, b"new"])
    assert result.verdicts.tolist() == [Verdict.DUP] * 100 + [Verdict.NOT_DUP]
    assert run(spark, monkeypatch, str(tmp_path / "again"), "--topic", new, "--address", client.address) == 1
    assert "LOG_INCOMPLETE" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_files_of_partitions_are_of_one_topic(spark: SparkSession, tmp_path: Path) -> None:
    names = ["t-partition-0", "t-partition-11", "t"]
    columns = {"deduplicationId": ["a", "b", "c"], "publishTime": pa.array([1, 2, 3], pa.int64()), "topic": names}
    folder = history(tmp_path / "history", columns)
    assert bootstrap_window_from_parquet(spark, [folder], tmp_path / "window") == 3


GOOD = {"deduplicationId": ["a", "b"], "publishTime": pa.array([1, 2], pa.int64())}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"deduplicationId": ["a", None]}, "the column deduplicationId holds nulls"),
        ({"deduplicationId": ["a", ""]}, "of 0 bytes; an ID has 1 to 255"),
        ({"deduplicationId": ["a", "x" * 256]}, "of 256 bytes"),
        ({"publishTime": pa.array([1, None], pa.int64())}, "the column publishTime holds 1 nulls, one of the ID b'b'"),
        ({"publishTime": pa.array([1, -1], pa.int64())}, "-1 ms, of the ID b'b', which is no publish time"),
        ({"publishTime": pa.array([1, 2**62], pa.int64())}, "which is no publish time"),
        ({"publishTime": ["1", "2"]}, "the column publishTime is string, it should be timestamps or milliseconds"),
        ({"deduplicationId": [1, 2]}, "the column deduplicationId is bigint, it should be text"),
        ({"topic": ["t", "u"]}, "the column topic holds t and u"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    folder = history(tmp_path / "history", GOOD | columns)
    output = tmp_path / "window"
    output.write_bytes(b"before")
    with pytest.raises(ConfigurationError, match=said) as caught:
        bootstrap_window_from_parquet(spark, [folder], output)
    assert caught.value.reason == "INVALID_SOURCE"
    assert output.read_bytes() == b"before"


def test_columns_of_other_names(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = pa.array([datetime(2024, 1, 1, tzinfo=UTC), datetime(2023, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    folder = history(tmp_path / "history", {"event": [b"\0", b"\0"], "at": times, "producerName": ["p", "p"]})
    output = tmp_path / "window"
    named = ("--deduplication-id-column", "event", "--publish-time-column", "at")
    assert run(spark, monkeypatch, str(output), "--parquet", folder, *named) == 0
    assert known_in(output) == {b"\0": 1_704_067_200_000}
    assert run(spark, monkeypatch, str(output), "--parquet", folder, *named, "--producer-column", "p") == 2
    assert "but not both" in capsys.readouterr().err
