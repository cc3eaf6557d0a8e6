"""How many files and connections this process may have open, and what they are for.

A topic holds none while nobody publishes to it, so their number is no matter; connections do, one each.
"""

import resource

from seqdedupe.errors import error
from seqdedupe.log.embedded.commit import MAX_OPEN_FILES
from seqdedupe.log.embedded.syncing import MAX_LEFT

LOG_FILES = 2 * MAX_OPEN_FILES + MAX_LEFT
"""Kept from one round of the commit thread to the next, opened in it, and left to be synced."""

RESERVE = 64
"""For the store, reading and making logs, and whatever the process itself has open."""


def raise_limit() -> int:
    """Raises the limit to the highest that the process may set itself; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31 - 1


def connections_within(limit: int) -> int:
    """How many connections there may be, so that store and log never want for a descriptor.

    Raises INVALID_CONFIGURATION if that is none.
    """
    connections = limit - LOG_FILES - RESERVE
    if connections < 1:
        raise error(
            "INVALID_CONFIGURATION",
            f"the process may have {limit} files open: {LOG_FILES + RESERVE + 1} are needed at least",
            hint="Raise the limit of open files (ulimit -n, LimitNOFILE=); 1024 are enough for any number of topics.",
            limit=limit,
        )
    return connections
