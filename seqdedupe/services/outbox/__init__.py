"""The outbox: a service writes rows in its own transaction, and the rows are published if, and only if, this
transaction commits.

A service uses `table`. In the relay, `steps` decides the next step, and `relay` executes the steps. `store` is the
contract for databases, with the pages of rows; `postgres_outbox` and `sqlite_outbox` implement it.
"""

from seqdedupe.services.outbox.relay import Counters, Relay, run_relay
from seqdedupe.services.outbox.store import Lag
from seqdedupe.services.outbox.table import Outbox, ddl

__all__ = ["Counters", "Lag", "Outbox", "Relay", "ddl", "run_relay"]
