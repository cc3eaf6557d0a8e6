"""`seqdedupe bench`: a load generator, and the latencies of its receipts."""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import IO

import click
import numpy as np
import numpy.typing as npt

from seqdedupe.cli.common import common
from seqdedupe.client import Client, Producer, Receipt
from seqdedupe.command import INTERRUPTED, echo, print_json
from seqdedupe.errors import SeqdedupeError
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.names import topic_name
from seqdedupe.sidecar_options import told_credentials

# -- Latencies by their frequency, to three digits, in the buckets of HdrHistogram.

_DIGIT_BITS = 11
"""The number of leading bits of a value that are kept. With 2,048 steps, a value keeps three decimal digits."""

_HALF = 1 << (_DIGIT_BITS - 1)
_HIGHEST_US = (1 << 36) - 1
"""19 hours. A longer latency counts as that."""

_BUCKETS = _HALF * (36 - _DIGIT_BITS + 2)
_TICKS_PER_HALF_DISTANCE = 5
"""The number of lines in a distribution between each percentile and the percentile halfway to 100. This is
HdrHistogram's default."""

_US_IN_A_MS = 1000


class Histogram:
    """The frequency of each latency, in microseconds. Results are at most 0.1 % too high, and the maximum is exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self.max_us = 0

    def record(self, seconds: npt.NDArray[np.float64]) -> None:
        """Add latencies. A value below zero counts as zero."""
        values = np.clip(seconds * 1e6, 0, _HIGHEST_US).astype(np.int64)
        if not len(values):
            return
        shifts = np.maximum(np.frexp(values)[1] - _DIGIT_BITS, 0)
        np.add.at(self._counts, shifts * _HALF + (values >> shifts), 1)
        self.max_us = max(self.max_us, int(values.max()))

    def add(self, other: "Histogram") -> None:
        """Add the latencies of another histogram."""
        self._counts += other._counts
        self.max_us = max(self.max_us, other.max_us)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def percentile_ms(self, percentile: float) -> float | None:
        """Return the latency that this percentage does not exceed; None if there are no latencies."""
        total = np.cumsum(self._counts)
        if not total[-1]:
            return None
        wanted = max(1, math.ceil(total[-1] * percentile / 100))
        return min(_highest_us(int(np.searchsorted(total, wanted))), self.max_us) / _US_IN_A_MS

    def distribution(self) -> Iterator[str]:
        """Yield the lines of HdrHistogram's percentile distribution (`.hgrm`), in milliseconds, in the form that
        HdrHistogram's plotters read."""
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
        """Return the mean and the standard deviation."""
        places = np.flatnonzero(self._counts)
        if not len(places):
            return 0.0, 0.0
        values = np.array([_middle_us(int(place)) for place in places])
        mean = float(np.average(values, weights=self._counts[places]))
        return mean, math.sqrt(float(np.average((values - mean) ** 2, weights=self._counts[places])))


def _range_us(place: int) -> tuple[int, int]:
    """Return the lowest value of a bucket, and the number of values in the bucket's range."""
    shift = max(0, place // _HALF - 1)
    return (place - shift * _HALF) << shift, 1 << shift


def _highest_us(place: int) -> int:
    lowest, values = _range_us(place)
    return lowest + values - 1


def _middle_us(place: int) -> int:
    lowest, values = _range_us(place)
    return lowest + values // 2


# -- Messages at a rate, or as fast as possible, and the latencies of their receipts.

_INTERVAL_SECONDS = 1.0
_INTERRUPT_GRACE_SECONDS = 5.0
"""The time after Ctrl-C to wait for receipts."""


@dataclass(frozen=True)
class Plan:
    """The messages to send."""

    topic: str
    size_bytes: int
    names: int
    rate: int | None
    """Messages a second, of all producers together; None: as fast as possible."""
    messages: int | None
    seconds: int | None


@dataclass
class BenchLane:
    """A producer, the producer's messages without a receipt, and the time when each of these messages was due."""

    producer: Producer
    next_sequence_id: int
    """The ID of the oldest message without a receipt; each message has the next ID."""
    pending: deque[tuple[float, Receipt]] = field(default_factory=deque)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    is_complete: bool = False


@dataclass(frozen=True)
class Interval:
    """The results since the previous interval."""

    elapsed_seconds: float
    """The time since the beginning."""
    seconds: float
    size_bytes: int
    latencies: Histogram


class Load:
    """One run of a plan. A latency begins when the message was due. With a rate, a message is due at its time in the
    timetable, even if the message is sent later. Without a rate, a message is due when `send` is called."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.total = Histogram()
        self.sent = 0
        self.interrupted = False
        self.elapsed_seconds = 0.0
        """The time from the beginning to the last receipt."""
        self.due = 0
        """The number of messages that were due before the sending ended."""
        self._latencies = Histogram()  # of the interval
        self._payload = os.urandom(plan.size_bytes)
        self._lanes: list[BenchLane] = []
        self._stop = asyncio.Event()
        self._began = 0.0

    async def run(self, address: str, on_interval: Callable[[Interval], None]) -> None:
        """Send messages, and call `on_interval` about once a second. Return when all sent messages have receipts, or
        after Ctrl-C. Raises the failure of a producer."""
        async with Client(address, told_credentials()) as client, AsyncExitStack() as stack:
            await client.admin.version()  # a sidecar that is not there is reported at once
            for number in range(self.plan.names):
                producer = client.producer(self.plan.topic, f"bench-{number}")
                await producer.open()
                stack.push_async_callback(producer.abort)
                # Each message is new. No message repeats a message of an earlier run whose outcome may be unknown.
                self._lanes.append(BenchLane(producer, max(one.sequence_id for one in producer.persisted) + 1))
            self._began = time.perf_counter()
            work = asyncio.create_task(self._work())
            try:
                await self._watch(work, on_interval)
            except asyncio.CancelledError:  # Ctrl-C
                self.interrupted = True
                self._stop.set()
                await asyncio.wait({work}, timeout=_INTERRUPT_GRACE_SECONDS)
            finally:
                work.cancel()
                await asyncio.wait({work})
                self.total.add(self._latencies)
            if not work.cancelled():
                work.result()

    async def _watch(self, work: "asyncio.Task[None]", on_interval: Callable[[Interval], None]) -> None:
        before, line = 0.0, 1
        while not work.done():
            await asyncio.wait({work}, timeout=self._began + line * _INTERVAL_SECONDS - time.perf_counter())
            now = time.perf_counter() - self._began
            if now >= line * _INTERVAL_SECONDS:
                seen, self._latencies = self._latencies, Histogram()
                self.total.add(seen)
                on_interval(Interval(now, now - before, self.plan.size_bytes, seen))
                before, line = now, line + 1

    async def _work(self) -> None:
        collectors = [asyncio.create_task(self._collect(lane)) for lane in self._lanes]
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({sending, stopping}, timeout=self.plan.seconds, return_when=asyncio.FIRST_COMPLETED)
            self.due = self._due()
            sending.cancel()
            await asyncio.wait({sending})
            for lane in self._lanes:
                lane.is_complete = True
                lane.has_more.set()
            await asyncio.gather(*collectors)
            if not sending.cancelled():
                sending.result()
        finally:
            for task in (sending, stopping, *collectors):
                task.cancel()
            await asyncio.gather(sending, stopping, *collectors, return_exceptions=True)

    def _due(self) -> int:
        """Return the number of messages that should have been sent by now."""
        if self.plan.rate is None:
            return self.sent
        by_now = int((time.perf_counter() - self._began) * self.plan.rate) + 1
        return max(self.sent, by_now if self.plan.messages is None else min(by_now, self.plan.messages))

    async def _send_all(self) -> None:
        senders = [asyncio.create_task(self._send(lane, place)) for place, lane in enumerate(self._lanes)]
        try:
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()

    async def _send(self, lane: BenchLane, number: int) -> None:
        """Send every `names`th message, from this one on."""
        plan = self.plan
        sequence_id: int | None = lane.next_sequence_id
        while plan.messages is None or number < plan.messages:
            now = due = time.perf_counter()
            if plan.rate is not None:
                due = self._began + number / plan.rate
                if due > now:
                    await asyncio.sleep(due - now)
            receipt = await lane.producer.send(self._payload, sequence_id)
            sequence_id = None  # from here on the next one
            lane.pending.append((due, receipt))
            lane.has_more.set()
            self.sent += 1
            number += plan.names

    async def _collect(self, lane: BenchLane) -> None:
        """Record the time when each receipt arrives. Receipts arrive in order, one batch at a time."""
        while True:
            while not lane.pending:
                if lane.is_complete:
                    return
                lane.has_more.clear()
                await lane.has_more.wait()
            await lane.pending[0][1]  # which raises the message's failure
            now = time.perf_counter()
            came = max(1, lane.producer.durable_sequence_id + 1 - lane.next_sequence_id)
            lane.next_sequence_id += came
            self._latencies.record(now - np.array([lane.pending.popleft()[0] for _ in range(came)]))
            self.elapsed_seconds = now - self._began


_PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
_INTERVAL_PERCENTILES = {"p50": 50.0, "p99": 99.0}
_BYTES_IN_A_MEGABYTE = 1_000_000
_RATE_REACHED = 0.99
"""The command prints a warning if the reached rate is below this fraction of the requested rate."""

_MOST_NAMES = 10_000
"""The largest number that has been tried on a sidecar with its default limits. Each producer is a separate task. With
thousands of them, the tasks are much of what is measured."""

_Positive = click.IntRange(min=1)


@click.command()
@click.argument("topic")
@click.option(
    "--rate",
    type=_Positive,
    metavar="N",
    help="Messages per second, of all producers together. Default: as fast as possible.",
)
@click.option(
    "--size", "size_bytes", type=click.IntRange(0, MAX_PAYLOAD_BYTES), default=1024, show_default=True, metavar="BYTES",
    help="The size of a payload.",
)  # fmt: skip
@click.option(
    "--names", type=click.IntRange(1, _MOST_NAMES), default=1, show_default=True, metavar="N",
    help="Use N producers, bench-0, bench-1 and so on, on one connection.",
)  # fmt: skip
@click.option("--messages", type=_Positive, metavar="N", help="End after N messages.")
@click.option("--seconds", type=_Positive, metavar="N", help="End after N seconds. Default: end at Ctrl-C.")
@click.option(
    "--histogram", type=click.File("w", lazy=False), help="Write the latencies to this file, in HdrHistogram's format."
)
@common
def bench(
    topic: str,
    rate: int | None,
    size_bytes: int,
    names: int,
    messages: int | None,
    seconds: int | None,
    histogram: IO[str] | None,
    address: str,
    as_json: bool,
) -> int:
    """Publish messages of random bytes to TOPIC. Show the rate and the latency of the receipts. The messages stay in
    the topic.

    With --rate, a latency is measured from the time when the message was due, even if the message was sent later.
    """
    load = Load(Plan(topic_name(topic), size_bytes, names, rate, messages, seconds))
    failure: SeqdedupeError | None = None
    try:
        asyncio.run(load.run(address, _print_json_interval if as_json else _print_interval))
    except SeqdedupeError as e:
        if not load.sent:
            raise
        failure = e
    if histogram is not None:
        histogram.writelines(f"{line}\n" for line in load.total.distribution())
    if as_json:
        print_json({"summary": _summary(load)})
    else:
        _print_summary(load)
    if failure is not None:
        raise failure
    return INTERRUPTED if load.interrupted else 0


def _figures(histogram: Histogram, seconds: float, size_bytes: int, percentiles: dict[str, float]) -> dict[str, object]:
    """Return the figures. The fields are documented: keep them stable."""
    rate = histogram.count / seconds if seconds else 0.0
    return {
        "messages": histogram.count,
        "messages_per_second": round(rate, 1),
        "megabytes_per_second": round(rate * size_bytes / _BYTES_IN_A_MEGABYTE, 3),
        **{f"{name}_ms": histogram.percentile_ms(percentile) for name, percentile in percentiles.items()},
    }


def _interval(interval: Interval) -> dict[str, object]:
    figures = _figures(interval.latencies, interval.seconds, interval.size_bytes, _INTERVAL_PERCENTILES)
    return {"elapsed_seconds": round(interval.elapsed_seconds, 3), **figures}


def _print_json_interval(interval: Interval) -> None:
    print_json({"interval": _interval(interval)})


def _print_interval(interval: Interval) -> None:
    figures = _interval(interval)
    echo(f"{interval.elapsed_seconds:6.1f} s  {_rates(figures)}  {_latencies(figures, _INTERVAL_PERCENTILES)}")


def _summary(load: Load) -> dict[str, object]:
    plan = load.plan
    return {
        "topic": plan.topic,
        "producers": plan.names,
        "size_bytes": plan.size_bytes,
        "rate": plan.rate,
        "elapsed_seconds": round(load.elapsed_seconds, 3),
        "not_sent": load.due - load.sent,
        "without_receipt": load.sent - load.total.count,
        **_figures(load.total, load.elapsed_seconds, plan.size_bytes, _PERCENTILES),
    }


def _print_summary(load: Load) -> None:
    plan, figures = load.plan, _summary(load)
    echo(
        f"{counted(load.total.count, 'message')} of {plan.size_bytes:,} bytes, {counted(plan.names, 'producer')}, "
        f"to {plan.topic}"
    )
    echo(f"{load.elapsed_seconds:6.1f} s  {_rates(figures)}  {_latencies(figures, _PERCENTILES)}")
    if load.due * _RATE_REACHED > load.sent:
        echo(f"the rate was not reached: {load.due - load.sent:,} of {counted(load.due, 'due message')} not sent")
    if load.sent > load.total.count:
        echo(f"without a receipt: {counted(load.sent - load.total.count, 'message')} sent")


def _rates(figures: dict[str, object]) -> str:
    return f"{figures['messages_per_second']:11,.0f} messages/s  {figures['megabytes_per_second']:9,.3f} MB/s"


def _latencies(figures: dict[str, object], percentiles: dict[str, float]) -> str:
    """Return the latencies as text, in milliseconds."""
    found = ((name.replace("_", "."), figures[f"{name}_ms"]) for name in percentiles)
    return "  ".join(f"{name} " + ("-" if value is None else f"{value:,.3f} ms") for name, value in found)
