"""Messages at a rate, or as fast as it goes, and how long their receipts took."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np

from seqdedupe.cli.histogram import Histogram
from seqdedupe.client import Client, Producer, Receipt
from seqdedupe.command import told_credentials

_INTERVAL_SECONDS = 1.0
_INTERRUPT_GRACE_SECONDS = 5.0
"""After Ctrl-C, receipts that are under way are waited for so long."""


@dataclass(frozen=True)
class Plan:
    """What is to be sent."""

    topic: str
    size_bytes: int
    names: int
    rate: int | None
    """Messages a second, of all producers together; None: as fast as it goes."""
    messages: int | None
    seconds: int | None


@dataclass
class Lane:
    """A producer and its messages without a receipt: when each was due."""

    producer: Producer
    next_sequence_id: int
    """Of the oldest message without a receipt; each message has the next ID."""
    pending: deque[tuple[float, Receipt]] = field(default_factory=deque)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    is_complete: bool = False


@dataclass(frozen=True)
class Interval:
    """What came since the interval before."""

    elapsed_seconds: float
    """Since the beginning."""
    seconds: float
    size_bytes: int
    latencies: Histogram


class Load:
    """One run of a plan. Latencies count from when a message was due: under a rate its place in the timetable, however
    late it was sent; without one the call of `send`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.total = Histogram()
        self.sent = 0
        self.interrupted = False
        self.elapsed_seconds = 0.0
        """From the beginning to the last receipt."""
        self.due = 0
        """How many messages were to be sent until the sending ended."""
        self._latencies = Histogram()  # of the interval
        self._payload = os.urandom(plan.size_bytes)
        self._lanes: list[Lane] = []
        self._stop = asyncio.Event()
        self._began = 0.0

    async def run(self, address: str, on_interval: Callable[[Interval], None]) -> None:
        """Sends, and calls `on_interval` about once a second. Returns when all that
        was sent has its receipts, or after Ctrl-C; raises what a producer failed with."""
        async with Client(address, told_credentials()) as client, AsyncExitStack() as stack:
            await client.admin.version()  # a sidecar that is not there is said so at once
            for number in range(self.plan.names):
                producer = client.producer(self.plan.topic, f"bench-{number}")
                await producer.open()
                stack.push_async_callback(producer.abort)
                # Each message is another one: none is sent again that an earlier run may have left open.
                self._lanes.append(Lane(producer, max(one.sequence_id for one in producer.persisted) + 1))
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
        """How many messages should have been sent by now."""
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

    async def _send(self, lane: Lane, number: int) -> None:
        """Sends every `names`th message, from this one on."""
        plan = self.plan
        sequence_id: int | None = lane.next_sequence_id
        while plan.messages is None or number < plan.messages:
            now = due = time.perf_counter()
            if plan.rate is not None:
                due = self._began + number / plan.rate
                if due > now:
                    await asyncio.sleep(due - now)
            receipt = await lane.producer.send(self._payload, sequence_id)
            sequence_id = None  # from here on it is the next one
            lane.pending.append((due, receipt))
            lane.has_more.set()
            self.sent += 1
            number += plan.names

    async def _collect(self, lane: Lane) -> None:
        """Takes the time when receipts come. They come in order, a batch at a time."""
        while True:
            while not lane.pending:
                if lane.is_complete:
                    return
                lane.has_more.clear()
                await lane.has_more.wait()
            await lane.pending[0][1]  # which raises what the message failed with
            now = time.perf_counter()
            came = max(1, lane.producer.durable_sequence_id + 1 - lane.next_sequence_id)
            lane.next_sequence_id += came
            self._latencies.record(now - np.array([lane.pending.popleft()[0] for _ in range(came)]))
            self.elapsed_seconds = now - self._began
