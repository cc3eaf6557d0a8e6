"""Memory between two pages that nobody may touch: a read past either end kills the process."""

import ctypes
import mmap

import numpy as np

from seqdedupe.format.jit import Uint8s

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Room for `pages` pages of bytes."""

    def __init__(self, pages: int) -> None:
        self._map = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        self._start = mmap.PAGESIZE
        self._end = (pages + 1) * mmap.PAGESIZE
        self._all = np.frombuffer(self._map, np.uint8)
        address = self._all.ctypes.data
        for page in (address, address + self._end):
            if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect failed")

    def at_the_end(self, data: bytes) -> Uint8s:
        """The bytes right before the page that nobody may touch; valid until the next call."""
        begin = self._end - len(data)
        self._map[begin : self._end] = data
        return self._all[begin : self._end]

    def at_the_start(self, data: bytes) -> Uint8s:
        """The bytes right after the page that nobody may touch; valid until the next call."""
        end = self._start + len(data)
        self._map[self._start : end] = data
        return self._all[self._start : end]
