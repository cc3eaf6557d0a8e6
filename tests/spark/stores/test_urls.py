"""Which store a URL names."""

import pickle
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError
from seqdedupe_spark.stores.contract import OutputStore
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.postgresql import PostgresStore
from seqdedupe_spark.stores.sql import SqliteStore
from seqdedupe_spark.stores.urls import from_url


def test_a_relative_path_is_from_the_folder_where_the_url_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    factory = pickle.loads(pickle.dumps(from_url("sqlite:///output.db")))
    monkeypatch.chdir("/")
    with factory() as store:
        assert isinstance(store, SqliteStore)
        assert store.is_local
    assert (tmp_path / "output.db").exists()


def test_an_absolute_path(tmp_path: Path) -> None:
    with from_url(f"sqlite:///{tmp_path}/output.db")():
        assert (tmp_path / "output.db").exists()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("postgresql://me@127.0.0.1:5432/flights?sslmode=require", PostgresStore),
        ("postgres:///flights", PostgresStore),
        ("delta:///lake/flights", DeltaStore),
        ("delta:///lake/flights?partitionBy=day,country&mergeSchema=TRUE", DeltaStore),
        ("delta+s3://lake/a..b/.flights", DeltaStore),
        ("delta+s3://lake-1.eu/a/day=1/flights/?mergeschema=false", DeltaStore),
    ],
)
def test_nothing_is_reached_before_it_is_used(url: str, kind: type[OutputStore]) -> None:
    with pickle.loads(pickle.dumps(from_url(url)))() as store:
        assert isinstance(store, kind)
        assert not store.is_local


@pytest.mark.parametrize(
    "url",
    [
        "",
        "flights.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://flights.db",
        "delta://lake",
        "delta:///",
        "delta:///lake/a%20b/flights",
        "delta:///lake?other=1",
        "delta:///lake?mergeSchema=1",
        "delta:///lake?partitionBy=a,,b",
        "delta:///lake?partitionBy=a&partitionBy=b",
        "s3://lake/flights",
        "delta+s3://",
        "delta+s3://lake",
        "delta+s3://key:secret@lake/flights",
        "delta+s3://lake/../flights",
        "delta+s3://lake/a%20b/flights",
        "delta+s3://lake//flights",
        "delta+s3://lake/flights//",
        "delta+s3://lake/./flights",
        "delta+s3://lake/flights/.",
        "delta+s3://lake/flights/..",
        "delta+s3://./flights",
        "delta+gs://lake/flights",
        "mysql://me:secret@host/db",
        "postgresql://me:secret@host:x/db?nonsense=secret",
        "postgresql://me:sec%ret@host/db",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"\A.*INVALID_OPTION") as caught:
        from_url(url)
    assert "\n" not in str(caught.value)
    assert "sec" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
