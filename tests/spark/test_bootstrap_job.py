"""Watermarks from a topic, and from a history in Parquet files."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from seqdedupe.client.blocking import Client
from seqdedupe.errors import ConfigurationError, NotFoundError
from seqdedupe.exports import read_watermarks
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe_spark import bootstrap_job
from seqdedupe_spark.bootstrap_job import bootstrap_from_parquet, bootstrap_from_topic
from seqdedupe_spark.session import run_command


def test_a_topic_s_watermarks_are_those_of_its_producers(client: Client, topic: str, tmp_path: Path) -> None:
    output = tmp_path / "marks"
    for name, last in (("ü", 3), ("b", 0), ("a", 7)):
        with client.producer(topic, name) as producer:
            for sequence_id in range(last + 1):
                producer.send(b"", sequence_id)
    with client.producer(topic, "has sent nothing"):
        pass
    assert bootstrap_from_topic(client, topic, output) == 3
    before = output.read_bytes()
    with pytest.raises(NotFoundError):
        bootstrap_from_topic(client, "nowhere", output)
    assert list(read_watermarks(output)) == [(b"a", 7), (b"b", 0), ("ü".encode(), 3)]
    assert output.read_bytes() == before


def history(folder: Path, *files: dict[str, pa.Array]) -> str:
    folder.mkdir(exist_ok=True)
    for number, columns in enumerate(files):
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return str(folder)


def test_parquet_files_against_a_plain_loop(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(1)
    names = [*(f"producer {i}" for i in range(500)), "ü", "\U0001f600", "x" * 255]
    rows = [(rng.choice(names), rng.choice([rng.randrange(1000), MAX_SEQUENCE_ID])) for _ in range(5000)]
    expected: dict[bytes, int] = {}
    for name, sequence_id in rows:
        expected[name.encode()] = max(expected.get(name.encode(), -1), sequence_id)
    files = [
        {"value": pa.array([b""] * 1000), "__sequenceId": [i for _, i in part], "__producerName": [n for n, _ in part]}
        for part in (rows[i : i + 1000] for i in range(0, 5000, 1000))
    ]
    output = tmp_path / "marks"
    folder = history(tmp_path / "history", *files)
    for paths in ([folder], [f"{folder}/part-[0-2].parquet", f"{folder}/part-3.parquet", f"{folder}/part-4.parquet"]):
        assert bootstrap_from_parquet(spark, paths, output) == len(expected)
        assert list(read_watermarks(output)) == sorted(expected.items())


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"producerName": ["a", "a"], "sequenceId": pa.array([1, 2], pa.int32()), "topic": ["t", "t"]}, {}),
        ({"who": pa.array([b"a", b"a"]), "n`o": pa.array([2, 1], pa.uint64())}, {"names": ("who", "n`o")}),
        (
            {"__producerName": ["a"], "producerName": ["b"], "__sequenceId": [2], "topic.x": [1]},
            {"names": ("__producerName", "__sequenceId")},
        ),
        ({"__producerName": pa.array(["a"]).dictionary_encode(), "__sequenceId": [2], "__topic": ["t"]}, {}),
    ],
)
def test_columns_and_types_that_fit(
    spark: SparkSession, tmp_path: Path, columns: dict[str, Any], options: dict[str, tuple[str, str]]
) -> None:
    folder = history(tmp_path / "history", columns)
    bootstrap_from_parquet(spark, [folder], tmp_path / "marks", *options.get("names", ()))
    assert list(read_watermarks(tmp_path / "marks")) == [(b"a", 2)]


GOOD = {"__producerName": ["a", "b"], "__sequenceId": [0, 1]}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"__producerName": ["a", None]}, "the column __producerName holds nulls"),
        ({"__producerName": ["a", ""]}, "the column __producerName holds '', of 0 bytes"),
        ({"__producerName": ["a", "ü" * 128]}, r"the column __producerName holds 'ü{20}', of 256 bytes"),
        (
            {"__producerName": pa.array([b"a", b"\xff"])},
            r"the column __producerName holds b'\\xff', which is not UTF-8",
        ),
        ({"__sequenceId": [1, None]}, "the column __sequenceId holds 1 nulls, one of producer 'b'"),
        ({"__sequenceId": [-1, 1]}, "the column __sequenceId holds -1, of producer 'a'"),
        ({"__sequenceId": pa.array([1, 2**63], pa.uint64())}, f"holds {2**63}, of producer 'b'"),
        ({"__sequenceId": [1.0, 2.0]}, "--sequence-id-column: the column __sequenceId is double"),
        ({"__sequenceId": ["1", "2"]}, "--sequence-id-column: the column __sequenceId is string"),
        ({"__producerName": [1, 2]}, "--producer-column: the column __producerName is bigint"),
        ({"__topic": ["t", "u"]}, "the column __topic holds t and u"),
        ({"__topic": ["t", None]}, "the column __topic holds t and None"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    folder = history(tmp_path / "history", GOOD | columns)
    output = tmp_path / "output" / "marks"
    output.parent.mkdir()
    output.write_bytes(b"before")
    with pytest.raises(ConfigurationError, match=said) as caught:
        bootstrap_from_parquet(spark, [folder], output)
    assert caught.value.reason == "INVALID_SOURCE"
    assert output.read_bytes() == b"before"
    assert list(output.parent.iterdir()) == [output]


def test_columns_that_are_not_there(spark: SparkSession, tmp_path: Path) -> None:
    folder = history(tmp_path / "history", GOOD)
    with pytest.raises(ConfigurationError, match="--producer-column: the files have no column who; they have __prod"):
        bootstrap_from_parquet(spark, [folder], tmp_path / "marks", "who")
    both = history(tmp_path / "both", GOOD | {"producerName": GOOD["__producerName"]})
    with pytest.raises(ConfigurationError, match="columns __producerName and producerName: name one of them"):
        bootstrap_from_parquet(spark, [both], tmp_path / "marks")
    with pytest.raises(ConfigurationError, match=r"--parquet: .*nowhere"):
        bootstrap_from_parquet(spark, [str(tmp_path / "nowhere")], tmp_path / "marks")


def test_the_command(
    spark: SparkSession,
    client: Client,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bootstrap_job, "start_session", lambda name: spark)
    output = tmp_path / "marks"
    folder = history(tmp_path / "history", GOOD)
    with client.producer(topic, "a") as producer:
        producer.send(b"", 5)
    for arguments, status, said in (
        (["--parquet", folder], 0, f"{output}: watermarks of 2 producers\n"),
        (["--topic", topic, "--address", client.address], 0, f"{output}: watermarks of 1 producer\n"),
        (["--topic", "nowhere", "--address", client.address], 1, "TOPIC_NOT_FOUND"),
        (["--parquet", folder, "--sequence-id-column", "x"], 1, "INVALID_SOURCE"),
        ([], 2, "Give either --topic or --parquet."),
        (["--parquet", folder, "--topic", "t"], 2, "Give either --topic or --parquet."),
    ):
        monkeypatch.setattr("sys.argv", ["bootstrap", str(output), *arguments])
        assert run_command(bootstrap_job.main, "bootstrap") == status
        out, err = capsys.readouterr()
        assert said in (err if status else out)
        assert bool(err) == bool(status)
    for wrong, said in (
        (tmp_path / "none" / "marks", f"there is no folder {tmp_path}/none for marks"),
        (folder, "is a directory"),
    ):
        monkeypatch.setattr("sys.argv", ["bootstrap", str(wrong), "--topic", topic, "--address", client.address])
        assert run_command(bootstrap_job.main, "bootstrap") in (1, 2)
        assert said in capsys.readouterr().err
    assert list(read_watermarks(output)) == [(b"a", 5)]
