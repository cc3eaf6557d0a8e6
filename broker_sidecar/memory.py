"""What the C library does with freed memory."""

import ctypes
import logging

# Parameters of glibc's mallopt(3), with the values in bytes.
_PARAMETERS = ((-1, 1 << 30), (-2, 64 << 20), (-3, 256 << 20))
"""M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD."""


def keep_freed_memory() -> None:
    """Gives back what start-up has freed, and keeps what is freed from now on, where the C library is glibc.

    Pages given back while serving have to be fetched again, at microseconds a page.
    """
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for parameter, value in _PARAMETERS:
            library.mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        logging.getLogger("seqdedupe.server").debug("the C library has no mallopt")
