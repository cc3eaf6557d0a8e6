"""Keep freed memory: pages given back to the system have to be fetched again, at microseconds a page."""

import ctypes
import logging

# Parameters of glibc's mallopt(3), with the values in bytes.
_PARAMETERS = ((-1, 1 << 30), (-2, 64 << 20), (-3, 256 << 20))
"""M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD."""


def keep_freed_memory() -> None:
    """Tells the C library so, where it is glibc; elsewhere nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        logging.getLogger("seqdedupe.server").debug("the C library has no mallopt")
        return
    for parameter, value in _PARAMETERS:
        mallopt(parameter, value)
