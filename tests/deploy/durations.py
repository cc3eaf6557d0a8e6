"""How long a drain may take, for anyone who kills afterwards."""

from broker_sidecar.server import STOP_GRACE_SECONDS

SPARE_SECONDS = 20
"""To close the store, and to start and end on a machine that is busy."""


def longest_stop_seconds(drain_timeout_seconds: int) -> float:
    """From SIGTERM to the end of a sidecar with this key."""
    return drain_timeout_seconds + STOP_GRACE_SECONDS + SPARE_SECONDS
