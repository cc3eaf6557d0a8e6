"""The order service: `python -m examples.shop.orders DATABASE COUNT`.

It places so many orders and refunds, goes on where the database is when it is started again, and ends. What it has to
tell, it writes into its outbox, in the transaction of what it tells of; it knows nothing of topics and sidecars.
"""

import json
import sys

from sqlalchemy import Connection, func, insert, select

from examples.shop.tables import CUSTOMERS, ORDERS, connect
from seqdedupe.services.outbox import Outbox


def place(connection: Connection, number: int) -> None:
    """An order, or every third time a refund, and the message that tells of it: both or none is committed."""
    customer = CUSTOMERS[number % len(CUSTOMERS)]
    last = select(func.coalesce(func.max(ORDERS.c.version), 0)).where(ORDERS.c.customer == customer)
    version = connection.execute(last).scalar_one() + 1
    kind = "refund" if number % 3 == 2 else "order"
    cents = 100 + number % 900
    order = {
        "number": number,
        "customer": customer,
        "version": version,
        "cents": cents if kind == "order" else -cents,
    }
    connection.execute(insert(ORDERS).values(order))
    Outbox(connection).add(kind, customer, "Placed", json.dumps(order).encode())


def place_broken(connection: Connection, number: int) -> None:
    """What an old version of this service would do: nobody can read its message, and it is no customer's next one."""
    connection.execute(insert(ORDERS).values(number=number))
    Outbox(connection).add("order", "nobody", "Placed", b"7 euros, please")


def main() -> None:
    """Places the orders that are not placed yet."""
    engine, count = connect(sys.argv[1]), int(sys.argv[2])
    with engine.begin() as connection:
        first = connection.execute(select(func.coalesce(func.max(ORDERS.c.number), -1))).scalar_one() + 1
    for number in range(first, count):
        with engine.begin() as connection:
            (place_broken if number == count // 2 else place)(connection, number)
    engine.dispose()


if __name__ == "__main__":
    main()
