"""How many files and connections this process may have open, and what they are for.

A topic holds none while nobody publishes to it, so their number is no matter; connections do, one each.
"""

import resource

from seqdedupe.errors import error
from seqdedupe.log.embedded.commit import MAX_ROUND, open_files_within

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
    # What is open from one round of the commit thread to the next, what waits to be synced, and what a round opens.
    others = 2 * open_files_within(limit) + MAX_ROUND + RESERVE
    connections = limit - others
    if connections < 1:
        raise error(
            "INVALID_CONFIGURATION",
            f"the process may have {limit} files open: {others + 1} are needed at least",
            hint="Raise the limit of open files (ulimit -n, LimitNOFILE=); 1024 are enough for any number of topics.",
            limit=limit,
        )
    return connections
