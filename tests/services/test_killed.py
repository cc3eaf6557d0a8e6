"""No matter what a consumer is doing when it dies, each message takes effect once. Costs 20 s."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from seqdedupe.client.blocking import Client
from seqdedupe.services.consumer import work
from seqdedupe.services.consumer.database import RowLease
from tests.services.conftest import KINDS, Publish, url_of
from tests.services.effects import make_table, numbers, places_as_written
from tests.services.killed import Killed, dead_letters, live_and_die

MESSAGES = 80
SEEDS = 9
KEYS: list[str | None] = ["a", "b", "c", None]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_message_takes_effect_once_and_in_the_order_of_its_key(
    request: pytest.FixtureRequest, client: Client, topic: str, publish: Publish, seed: int
) -> None:
    engine = create_engine(url_of(request, KINDS[seed % len(KINDS)]))
    make_table(engine)
    publish(*numbers(MESSAGES), keys=KEYS * (MESSAGES // len(KEYS)))
    always = live_and_die(seed, client, topic, engine)
    wanted = [n for n in range(MESSAGES) if n not in always]
    with engine.connect() as connection:
        assert list(connection.execute(text("SELECT place FROM effects ORDER BY place")).scalars()) == wanted
    assert sorted(dead_letters(engine)) == [n for n in range(MESSAGES) if n in always]
    if engine.dialect.name == "sqlite":
        for key in range(3):
            places = [place for place in places_as_written(engine) if place % 4 == key]
            assert places == sorted(places)
    engine.dispose()


def test_a_position_committed_apart_doubles(
    sqlite: Engine, client: Client, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: first the effects, then the position."""

    died: list[bool] = []

    def apart(
        engine: Engine, ownership: RowLease, position: str, refused: frozenset[str], do: Callable[[Connection], str]
    ) -> str:
        with engine.begin() as connection:
            to = do(connection)
        if not died:
            died.append(True)
            raise Killed
        with engine.begin() as connection:
            ownership.move(connection, position, to)
        return to

    monkeypatch.setattr(work, "carry_out", apart)
    make_table(sqlite)
    publish(*numbers(MESSAGES))
    live_and_die(0, client, topic, sqlite)
    places = places_as_written(sqlite)
    assert len(places) > len(set(places))
