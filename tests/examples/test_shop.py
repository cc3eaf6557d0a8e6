"""The shop on a small scale, and that its check finds what is amiss. Costs 15 s: a dozen short processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from examples.shop import __main__ as shop
from examples.shop import orders, payments
from examples.shop.check import Line, compare, sums
from examples.shop.tables import connect, make_orders_database, make_payments_database
from seqdedupe.client.blocking import Client
from seqdedupe.services.consumer import Consumer
from seqdedupe.services.inbox import Inbox
from seqdedupe.services.outbox import run_relay
from seqdedupe.testing import Sidecar
from tests.spark.postgres import postgres_url as postgres_url

ORDERS = 120

TAMPER = {
    "missing": "DELETE FROM bookings WHERE place = 7",
    "doubled": "INSERT INTO bookings (number, customer, version, cents) "
    "SELECT number, customer, version, cents FROM bookings WHERE place = 9",
    "disordered": "UPDATE bookings SET version = version + 1 WHERE place = 11",
    "dead_letters": "DELETE FROM seqdedupe_dead_letters",
}
"""What would be amiss, and what makes it so."""


def test_whoever_is_killed_each_order_is_booked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("orders", "payments")]
    flags = [f"--{name}-database={url}" for name, url in zip(("orders", "payments"), urls, strict=True)]
    tampered: dict[str, tuple[Line, int]] = {}

    def and_then_tampered(orders: str, payments: str, address: str) -> dict[str, Line]:
        found = compare(orders, payments, address)
        for what, statement in TAMPER.items():
            undo = _change(payments, statement)
            lines = compare(orders, payments, address)
            total = Line(*map(sum, zip(*lines.values(), strict=True)))
            tampered[what] = total, shop.verdict(lines, 0, 0, ORDERS, 0.0)
            undo()
        return found

    monkeypatch.setattr(shop, "compare", and_then_tampered)
    assert shop.main([f"--orders={ORDERS}", "--kills=1", *flags]) == 0
    for what, (line, status) in tampered.items():
        assert status == 1
        assert getattr(line, what) == (0 if what == "dead_letters" else line.disordered if what == "disordered" else 1)
    assert tampered["disordered"][0].disordered > 0
    assert tampered["dead_letters"][0].missing == 1


def _change(url: str, statement: str) -> Callable[[], None]:
    """Returns what takes it back: the tables as they were."""
    engine = connect(url)
    tables = ("bookings", "seqdedupe_dead_letters")
    with engine.begin() as connection:
        for table in tables:
            connection.execute(text(f"CREATE TABLE kept_{table} AS SELECT * FROM {table}"))
        connection.execute(text(statement))

    def undo() -> None:
        with engine.begin() as connection:
            for table in tables:
                connection.execute(text(f"DELETE FROM {table}"))
                connection.execute(text(f"INSERT INTO {table} SELECT * FROM kept_{table}"))
                connection.execute(text(f"DROP TABLE kept_{table}"))
        engine.dispose()

    return undo


def test_in_postgresql(postgres_url: str, shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services in one database, in this process."""
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    make_orders_database(url)
    make_payments_database(url)
    monkeypatch.setattr("sys.argv", ["orders", url, "30"])
    orders.main()
    run_relay(shared_sidecar.address, url, f"{topic}-{{aggregatetype}}", "shop", follow=False)
    engine = connect(url)
    with Client(shared_sidecar.address) as client:
        for kind in ("order", "refund", "order"):
            inbox = Inbox("accounts", engine, payments.book, versions=payments.versions_of)
            Consumer(client, f"{topic}-{kind}", kind, engine, inbox, config=payments.CONFIG).run(follow=False)
    engine.dispose()
    ordered, booked = sums(url, url)
    assert ordered == booked != 0
