"""What the C library does with freed memory."""

import ctypes
import logging

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3), with values in bytes."""

_AT_START = ((_TRIM_THRESHOLD, 8 << 20), (_MMAP_THRESHOLD, 4 << 20))
_WHILE_SERVING = ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 256 << 20))


def give_back_freed_memory() -> None:
    """Gives large blocks back as soon as start-up frees them, where the C library is glibc.

    Each thread frees into a heap of its own, and what stays at the end of one cannot be given back later: tens of
    megabytes for each thread that reads a log or a snapshot.
    """
    _set(_AT_START)


def keep_freed_memory() -> None:
    """Gives back what start-up has freed, and keeps what is freed from now on, where the C library is glibc.

    Pages given back while serving have to be fetched again, at microseconds a page.
    """
    _set(_WHILE_SERVING)


def _set(parameters: tuple[tuple[int, int], ...]) -> None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for parameter, value in parameters:
            library.mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        logging.getLogger("seqdedupe.server").debug("the C library has no mallopt")
