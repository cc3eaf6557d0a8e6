"""Latencies by their frequency, to three digits, in the buckets of HdrHistogram."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_DIGIT_BITS = 11
"""Of so many bits of a value the first are kept: 2,048 is the first power of two that holds three digits twice."""

_HALF = 1 << (_DIGIT_BITS - 1)
_HIGHEST_US = (1 << 36) - 1
"""19 hours; what is longer counts as that."""

_BUCKETS = _HALF * (36 - _DIGIT_BITS + 2)
_TICKS_PER_HALF_DISTANCE = 5
"""Lines of a distribution from each percentile to the one halfway to 100: HdrHistogram's default."""

_US_IN_A_MS = 1000


class Histogram:
    """How often which latency was seen. In microseconds; answers are at most 0.1 % too high, and the maximum exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self.max_us = 0

    def record(self, seconds: npt.NDArray[np.float64]) -> None:
        """Adds latencies; what is below zero counts as zero."""
        values = np.clip(seconds * 1e6, 0, _HIGHEST_US).astype(np.int64)
        if not len(values):
            return
        shifts = np.maximum(np.frexp(values)[1] - _DIGIT_BITS, 0)
        np.add.at(self._counts, shifts * _HALF + (values >> shifts), 1)
        self.max_us = max(self.max_us, int(values.max()))

    def add(self, other: "Histogram") -> None:
        """Adds what another one has seen."""
        self._counts += other._counts
        self.max_us = max(self.max_us, other.max_us)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def percentile_ms(self, percentile: float) -> float | None:
        """The latency that so many percent do not exceed; None of nothing."""
        total = np.cumsum(self._counts)
        if not total[-1]:
            return None
        wanted = max(1, math.ceil(total[-1] * percentile / 100))
        return min(_highest_us(int(np.searchsorted(total, wanted))), self.max_us) / _US_IN_A_MS

    def distribution(self) -> Iterator[str]:
        """The lines of HdrHistogram's percentile distribution (`.hgrm`), in milliseconds, as its plotters read it."""
        yield f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}"
        yield ""
        total = np.cumsum(self._counts)
        count = int(total[-1])
        level = 0.0
        while count:
            place = int(np.searchsorted(total, max(1.0, count * level / 100)))
            seen = int(total[place])
            value, share = _highest_us(place) / _US_IN_A_MS, level / 100
            yield f"{value:12.3f} {share:2.12f} {seen:10d} {1 / (1 - share):14.2f}"
            if seen == count:
                yield f"{value:12.3f} {1:2.12f} {count:10d}"
                break
            halvings = int(math.log2(100 / (100 - level))) + 1
            level += 100 / (_TICKS_PER_HALF_DISTANCE * 2**halvings)
        mean, deviation = self._moments_us()
        yield f"#[Mean    = {mean / _US_IN_A_MS:12.3f}, StdDeviation   = {deviation / _US_IN_A_MS:12.3f}]"
        yield f"#[Max     = {self.max_us / _US_IN_A_MS:12.3f}, Total count    = {count:12d}]"
        yield f"#[Buckets = {_BUCKETS // _HALF - 1:12d}, SubBuckets     = {2 * _HALF:12d}]"

    def _moments_us(self) -> tuple[float, float]:
        """The mean and the standard deviation."""
        places = np.flatnonzero(self._counts)
        if not len(places):
            return 0.0, 0.0
        values = np.array([_middle_us(int(place)) for place in places])
        mean = float(np.average(values, weights=self._counts[places]))
        return mean, math.sqrt(float(np.average((values - mean) ** 2, weights=self._counts[places])))


def _range_us(place: int) -> tuple[int, int]:
    """The lowest value of a bucket, and how many there are."""
    shift = max(0, place // _HALF - 1)
    return (place - shift * _HALF) << shift, 1 << shift


def _highest_us(place: int) -> int:
    lowest, values = _range_us(place)
    return lowest + values - 1


def _middle_us(place: int) -> int:
    lowest, values = _range_us(place)
    return lowest + values // 2
