"""The outbox: what a service writes to it in its own transaction is published exactly if that commits.

A service uses `table`. The relay begins with `steps`, which decide what it does, and `relay`, which does it; a
`row_page` has its rows. `store` is the contract of databases, which `postgres_outbox` and `sqlite_outbox` keep.
"""

from seqdedupe.services.outbox.relay import Counters, Relay, run_relay
from seqdedupe.services.outbox.store import Lag
from seqdedupe.services.outbox.table import Outbox, ddl

__all__ = ["Counters", "Lag", "Outbox", "Relay", "ddl", "run_relay"]
