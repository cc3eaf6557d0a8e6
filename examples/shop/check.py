"""The check: the two databases against each other, and the topics between them."""

from collections import Counter
from typing import NamedTuple

from sqlalchemy import MetaData, Table, func, select

from examples.shop.payments import TOPICS, order_of
from examples.shop.tables import ACCOUNTS, BOOKINGS, ORDERS, connect
from seqdedupe.client.blocking import Client


class Line(NamedTuple):
    """What became of the orders, or of the refunds."""

    placed: int
    in_topic: int
    booked: int
    missing: int
    doubled: int
    disordered: int
    dead_letters: int


def compare(orders_url: str, payments_url: str, address: str) -> dict[str, Line]:
    """By topic. What nobody can read has to be in the topic, and among the dead letters, once."""
    placed: dict[str, Counter[object]] = {topic: Counter() for topic in TOPICS}
    engine = connect(orders_url)
    with engine.connect() as connection:
        for number, _, _, cents in connection.execute(select(ORDERS)):
            placed[TOPICS[cents is not None and cents < 0]][None if cents is None else number] += 1
    engine.dispose()
    booked: dict[str, Counter[object]] = {topic: Counter() for topic in TOPICS}
    disordered: Counter[str] = Counter()
    last: dict[str, int] = {}
    engine = connect(payments_url)
    with engine.connect() as connection:
        for _, number, customer, version, cents in connection.execute(select(BOOKINGS).order_by(BOOKINGS.c.place)):
            topic = TOPICS[cents < 0]
            booked[topic][number] += 1
            disordered[topic] += version != last.get(customer, 0) + 1
            last[customer] = version
        letters = Table("seqdedupe_dead_letters", MetaData(), autoload_with=connection)
        for topic in TOPICS:
            of_topic = letters.c.topic.endswith(topic)
            booked[topic][None] += connection.execute(select(func.count()).where(of_topic)).scalar_one()
    engine.dispose()
    lines = {}
    for topic in TOPICS:
        messages = _messages(address, topic)
        lines[topic] = Line(
            placed=placed[topic].total(),
            in_topic=messages.total(),
            booked=booked[topic].total() - booked[topic][None],
            missing=max((placed[topic] - found).total() for found in (messages, booked[topic])),
            doubled=max((found - placed[topic]).total() for found in (messages, booked[topic])),
            disordered=disordered[topic],
            dead_letters=booked[topic][None],
        )
    return lines


def _messages(address: str, topic: str) -> Counter[object]:
    found: Counter[object] = Counter()
    with Client(address) as client, client.reader(topic) as reader:
        for message in reader:
            try:
                found[order_of(message)["number"]] += 1
            except ValueError:
                found[None] += 1
    return found


def sums(orders_url: str, payments_url: str) -> tuple[int, int]:
    """In cents: what was ordered and not refunded, and what the accounts say."""
    found = []
    for url, column in ((orders_url, ORDERS.c.cents), (payments_url, ACCOUNTS.c.cents)):
        engine = connect(url)
        with engine.connect() as connection:
            found.append(int(connection.execute(select(func.coalesce(func.sum(column), 0))).scalar_one()))
        engine.dispose()
    return found[0], found[1]
