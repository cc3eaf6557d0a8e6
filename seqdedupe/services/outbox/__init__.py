"""The outbox: the rows that a service writes in its own transaction are published if, and only if, it commits.

A service uses `table`. The relay begins with `steps`, which decide what to do, and `relay`, which does it. A `row_page`
has its rows. `store` is the contract for databases; `postgres_outbox` and `sqlite_outbox` implement it.
"""

from seqdedupe.services.outbox.relay import Counters, Relay, run_relay
from seqdedupe.services.outbox.store import Lag
from seqdedupe.services.outbox.table import Outbox, ddl

__all__ = ["Counters", "Lag", "Outbox", "Relay", "ddl", "run_relay"]
