"""Which producers somebody uses, by producer number: what it takes to tell who has been idle for long.

Time is counted in periods, each of which somebody says has passed. Whoever uses a producer sets its count to 0: a
stream when it begins to, and from then on for as long as it is connected. So it costs a stream nothing to go on with
the producers that it has, and a producer five bytes; only those that several streams use are kept in sets, too.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from seqdedupe.core.name_table import Growing
from seqdedupe.format.jit import Int64s, Uint8s

Int32s = npt.NDArray[np.int32]

NO_STREAM = 0
"""Of a use that is over at once. Streams have numbers from 1 on."""

MAX_STREAM = 2**31 - 1
"""After so many the streams' numbers begin again."""

MAX_PERIODS = 255
"""Counting ends here."""

_ROW = np.dtype([("idle", np.uint8), ("stream", np.int32)])


class Activity:
    """Of each producer the periods that it has been idle, and the stream that used it last; and the streams."""

    def __init__(self, capacity: int) -> None:
        self._table = Growing(capacity, (), _ROW)
        self._last_stream = NO_STREAM
        self._connected: dict[int, set[int]] = {}
        """By the streams' numbers, the producers that another stream has used since."""

    def reserve(self, capacity: int) -> None:
        """There is room for so many producers; new ones are in use."""
        self._table.reserve(capacity)

    @property
    def _idle(self) -> Uint8s:
        return self._table.rows["idle"]

    @property
    def _stream(self) -> Int32s:
        return self._table.rows["stream"]

    def connect(self) -> int:
        """A stream begins: its number. What it uses is in use until `disconnect`."""
        self._last_stream = self._last_stream % MAX_STREAM + 1
        self._connected[self._last_stream] = set()
        return self._last_stream

    def disconnect(self, stream: int) -> None:
        """The stream with this number has ended."""
        self._connected.pop(stream, None)

    def use(self, numbers: Int64s, stream: int = NO_STREAM) -> None:
        """These are being used, by this stream for as long as it is connected."""
        self._idle[numbers] = 0
        if stream == NO_STREAM:
            return
        before = self._stream[numbers]
        of_others = (before != stream) & (before != NO_STREAM)
        if of_others.any():
            for number, other in zip(numbers[of_others].tolist(), before[of_others].tolist(), strict=True):
                if other in self._connected:
                    self._connected[other].add(number)
        self._stream[numbers] = stream

    def use_shared(self) -> Iterator[None]:
        """What several streams have used is in use as long as one of them is connected; a stream at each step."""
        for shared in list(self._connected.values()):
            self._idle[np.fromiter(shared, np.int64, len(shared))] = 0
            yield

    def renew_all(self) -> None:
        """All are in use now."""
        self._idle[:] = 0

    def pass_period(self, first: int, end: int) -> None:
        """A period has passed for the producers `first` to `end` (not included)."""
        idle = self._idle[first:end]
        idle += idle < MAX_PERIODS
        idle[np.isin(self._stream[first:end], np.array(list(self._connected), np.int32))] = 0

    def idle_for(self, periods: int, first: int, end: int) -> Int64s:
        """Those of `first` to `end` (not included) that have been idle for as long, rising."""
        return first + np.flatnonzero(self._idle[first:end] >= periods)

    def keep(self, kept: Int64s, new_numbers: Int64s, capacity: int) -> None:
        """These go on under new numbers, in this order (`new_numbers`: by the old ones); the others are gone."""
        left = Growing(capacity, (), _ROW)
        left.rows[: len(kept)] = self._table.rows[kept]
        self._table = left
        for stream, shared in self._connected.items():
            left_numbers = new_numbers[np.fromiter(shared, np.int64, len(shared))]
            self._connected[stream] = set(left_numbers[left_numbers >= 0].tolist())
