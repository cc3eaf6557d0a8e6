"""One producer process: publishes the departures of one airport, resuming by itself, over a bad network."""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator
from datetime import datetime

from demo.board import Board
from demo.flights import ORIGINS, departures
from demo.wire import Wire
from seqdedupe.client import Client, Producer, ProducerConfig, Receipt
from seqdedupe.errors import SeqdedupeError

TOPIC = "flights"
LOSE_ANSWERS_AT = (0.1, 0.35, 0.6, 0.85)
"""Parts of the file at which a producer's network loses answers."""

BYTES_PER_SECOND = 4_000_000
"""The bandwidth of a producer's network."""

LEAST_SECONDS = 3.0
"""With few flights the network is slower, so that publishing them takes about so long."""

TYPICAL_MESSAGE_BYTES = 450
MAX_BATCH_ROWS = 200
MAX_IN_FLIGHT_BATCHES = 16
REPORT_SECONDS = 0.02


def run(host: str, port: int, origin: str, flights: int, board: Board) -> None:
    """Publishes; returns when all of the origin's flights are durable. The process's main function."""
    try:
        asyncio.run(_run(host, port, origin, flights, board))
    except SeqdedupeError as e:
        sys.exit(f"demo: the producer of {origin}: {e}")


async def _run(host: str, port: int, origin: str, flights: int, board: Board) -> None:
    mine = 1 + flights // len(ORIGINS)  # about
    bytes_per_second = min(BYTES_PER_SECOND, TYPICAL_MESSAGE_BYTES * mine / LEAST_SECONDS)
    config = ProducerConfig(
        max_batch_rows=min(MAX_BATCH_ROWS, 1 + mine // 200),
        max_in_flight_batches=MAX_IN_FLIGHT_BATCHES,
        delivery_timeout_seconds=None,  # whatever is killed for however long, it goes on
    )
    async with (
        Wire(host, port, bytes_per_second) as wire,
        Client(wire.address).producer(TOPIC, origin, config) as producer,
    ):
        reporter = Reporter(board, origin, producer, wire)
        ticking = asyncio.create_task(reporter.run())
        await _publish(departures(origin, flights), flights, producer, wire, reporter)
        await producer.flush()
        ticking.cancel()
        reporter.report()


async def _publish(
    records: Iterator[tuple[int, dict[str, str]]], flights: int, producer: Producer, wire: Wire, reporter: "Reporter"
) -> None:
    """Sends what is not in the log yet. The record's number in the file is its sequence ID: gaps are fine."""
    resume_after = producer.persisted_sequence_id
    lose_at = [int(flights * part) for part in LOSE_ANSWERS_AT if flights * part > resume_after]
    for number, record in records:
        if number <= resume_after:
            reporter.done += 1
            continue
        if lose_at and number >= lose_at[0]:
            lose_at.pop(0)
            wire.lose_answers()
        receipt = await producer.send(
            json.dumps(record).encode(),
            number,
            key=record["tailnum"],
            event_time=datetime.fromisoformat(record["time_hour"]),
        )
        reporter.receipts.append(receipt)


class Reporter:
    """Writes a producer's numbers on the board, on top of those of the process before it that was killed."""

    def __init__(self, board: Board, origin: str, producer: Producer, wire: Wire) -> None:
        self.done = 0
        self.receipts: deque[Receipt] = deque()
        self._board = board
        self._origin = origin
        self._producer = producer
        self._wire = wire
        self._before = {name: board.get(origin, name) for name in self._counted()}

    def _counted(self) -> dict[str, int]:
        counters = self._producer.counters
        return {
            "sent": counters.rows_sent,
            "not_dup": counters.not_dup,
            "dup": counters.dup,
            "unknown": counters.unknown,
            "lost_answers": self._wire.losses,
        }

    def report(self) -> None:
        while self.receipts and self.receipts[0].done():
            self.receipts.popleft()
            self.done += 1
        for name, number in self._counted().items():
            self._board.set(self._origin, name, self._before[name] + number)
        self._board.set(self._origin, "done", self.done)
        self._board.set(self._origin, "in_flight", len(self.receipts))

    async def run(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(REPORT_SECONDS)
