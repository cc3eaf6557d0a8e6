"""A database's URL that is written wrongly is refused before anything is connected, and no error shows its password."""

from collections.abc import Callable

import pytest

from seqdedupe.cli.query_source import QuerySource
from seqdedupe.cli.service_commands import opened
from seqdedupe.errors import SeqdedupeError
from seqdedupe.services.outbox.store import open_store
from seqdedupe_spark.stores.general import GeneralStore
from seqdedupe_spark.stores.postgresql import PostgresStore


def of_query(url: str) -> None:
    QuerySource(url, "SELECT 1", sequence_id_column="id", on_waiting=lambda why: None)


def of_consumer(url: str) -> None:
    with opened(url, "consumer"):
        pass


TAKERS: list[Callable[[str], object]] = [of_query, of_consumer, open_store, GeneralStore, PostgresStore]


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("rest", ["u:hunter@2secret@127.0.0.1:1/db", "u:sE@2secret/x@127.0.0.1:1/db", "u:2secret"])
def test_what_sqlalchemy_reads_in_another_way_is_refused(take: Callable[[str], object], rest: str) -> None:
    with pytest.raises(SeqdedupeError) as caught:
        take(f"postgresql://{rest}")
    assert caught.value.reason in ("INVALID_SOURCE", "INVALID_OPTION", "INVALID_CONFIGURATION")
    assert "secret" not in f"{caught.value} {caught.value.hint}"
    if "@" in rest:
        assert "as %40" in caught.value.message


@pytest.mark.parametrize("take", TAKERS)
def test_an_escaped_one_is_taken(take: Callable[[str], object]) -> None:
    scheme = "postgresql+psycopg" if take is GeneralStore else "postgresql"
    take(f"{scheme}://u:a%40b%2Fc@127.0.0.1:1/db")
