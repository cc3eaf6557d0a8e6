"""`python -m examples.shop`: kills each of the services while they work, and compares the two databases at the end."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from examples.shop.check import Line, compare, sums
from examples.shop.run import BROKEN, Shop

ORDERS = 2000
KILLS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 0 if nothing is missing, nothing doubled, and all in order."""
    parser = argparse.ArgumentParser(prog="python -m examples.shop", description=__doc__)
    parser.add_argument("--orders", type=int, default=ORDERS, metavar="N", help="number of orders and refunds")
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help="number of kills of each process")
    for which in ("orders", "payments"):
        what = f"an empty database for {which}, sqlite:///path or postgresql+psycopg://…; default: SQLite"
        parser.add_argument(f"--{which}-database", metavar="URL", help=what)
    told = parser.parse_args(arguments)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # of processes that do not end
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seqdedupe-shop-") as name:
        folder = Path(name)
        orders_url = told.orders_database or f"sqlite:///{folder / 'orders.db'}"
        payments_url = told.payments_database or f"sqlite:///{folder / 'payments.db'}"
        print(f"{told.orders:,} orders and refunds. Starting sidecar, order service, relay, two payment services.")
        with Shop(folder, orders_url, payments_url, told.orders) as shop:
            shop.run(told.kills)
            print(
                f"All is booked, after {sum(shop.kills.values())} kills. Comparing the two databases, and the topics."
            )
            lines = compare(orders_url, payments_url, shop.sidecar.address)
        return verdict(lines, *sums(orders_url, payments_url), told.orders, time.monotonic() - began)


def verdict(lines: dict[str, Line], ordered_cents: int, booked_cents: int, count: int, seconds: float) -> int:
    """Prints the table and what it means; the exit status."""
    print("\n" + " " * 12 + "".join(f"{name.replace('_', ' '):>14}" for name in Line._fields))
    for topic, line in lines.items():
        print(f"{topic:>12}" + "".join(f"{number:>14,}" for number in line))
    print(f"\nOrdered, less refunds: {ordered_cents / 100:,.2f}; on the accounts: {booked_cents / 100:,.2f}.", end=" ")
    print(f"Took {seconds:.0f} s.")
    total = Line(*(sum(column) for column in zip(*lines.values(), strict=True)))
    is_right = total.placed == total.in_topic == count and total.booked == count - BROKEN == count - total.dead_letters
    if not is_right or total.missing or total.doubled or total.disordered or ordered_cents != booked_cents:
        print("FAILED: the two databases differ.")
        return 1
    print(
        "Each order and refund is booked exactly once, in the order of its customer; unreadable messages are set aside."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, OSError) as e:
        print(f"shop: {e}", file=sys.stderr)
        sys.exit(1)
