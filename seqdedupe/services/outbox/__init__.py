"""The outbox: what a service writes to it in its own transaction is published exactly if that commits."""

from seqdedupe.services.outbox.relay import Counters, Relay, run_relay
from seqdedupe.services.outbox.store import Lag
from seqdedupe.services.outbox.table import Outbox, ddl

__all__ = ["Counters", "Lag", "Outbox", "Relay", "ddl", "run_relay"]
