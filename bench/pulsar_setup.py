"""What the benchmarks with a Pulsar broker share."""

from types import MappingProxyType
from typing import Any

from pulsar_broker.standalone import Broker

NAMESPACE = "persistent://public/default"
KEYS: dict[str, Any] = {
    "brokerDeduplicationEnabled": "true",
    "defaultRetentionTimeInMinutes": -1,
    "defaultRetentionSizeInMB": -1,
}
"""Of the broker."""
DURABLE: dict[str, Any] = KEYS | {"journalSyncData": "true"}
"""Of a broker that syncs before it confirms."""


class WarmBroker(Broker):
    """Compiles all that is worth it."""

    environment = MappingProxyType({})
