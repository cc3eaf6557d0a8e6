"""Sending to all partitions of a topic, for threads: each has a producer of its own, in one order of calls."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol

from seqdedupe.batch import Batch
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.blocking.receipts import BatchReceipt, Receipt
from seqdedupe.client.builder import Keys, Numbers, Payloads, Properties, PropertyRows, key_bytes
from seqdedupe.client.partitioned import Numbering
from seqdedupe.client.pending import PendingBatch, SpreadBatch
from seqdedupe.client.session import Session
from seqdedupe.errors import error


class Part(Protocol):
    """The producer of a partition."""

    name: str
    _session: Session
    _must_pause: bool

    def _wait_until_it_goes_on(self) -> None: ...

    def _check_open(self) -> None: ...

    def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt: ...

    def _add_batch(self, batch: Batch) -> PendingBatch: ...

    def _end(self) -> bool: ...

    def _seal_now(self) -> None: ...


class Spread:
    """The calls of a producer over its parts, which were opened. They mean what they mean there."""

    def __init__(self, numbers: Numbering, parts: Sequence[Part]) -> None:
        self._numbers = numbers
        self._parts = parts
        self._is_sending = False
        self.after_fork()

    def after_fork(self) -> None:
        """In the child no call waits for a thread that is not there."""
        self._lock = threading.RLock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call after the other. An interrupt in the middle of one leaves it open what was sent: it was the last."""
        with self._lock:
            if self._is_sending:
                what = f"producer {self._parts[0].name!r} was interrupted in mid-send; what has no receipt by now may"
                raise error("OUTCOME_UNKNOWN", f"{what} still become durable, or not")
            self._is_sending = True
            try:
                yield
            except Exception:
                self._is_sending = False
                raise
            self._is_sending = False

    def send(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> Receipt:
        with self._turn():
            sequence_id, key = self._numbers.next_id(sequence_id), key_bytes(key)
            part = self._parts[self._numbers.partition(key)]
            self._room(part)
            receipt = part.send(payload, sequence_id, key=key, event_time=event_time, properties=properties)
            self._numbers.sent(sequence_id, () if receipt._row else (receipt._pending,))
            return receipt

    def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None,
        keys: Keys | None,
        event_times_ms: Numbers | None,
        properties: PropertyRows | None,
    ) -> BatchReceipt:
        with self._turn():
            batch = self._numbers.check_columns(payloads, sequence_ids, keys, event_times_ms, properties)
            some = [(self._parts[k], rows) for k, rows in self._numbers.rows_by_partition(batch)]
            for part, _ in some:
                self._room(part)
            sent = [(rows, part._add_batch(batch.take(rows))) for part, rows in some]
            self._numbers.sent_batch(batch, [pending for _, pending in sent])
            return BatchReceipt(SpreadBatch(batch.sequence_ids, sent))

    def _room(self, part: Part) -> None:
        if part._must_pause:  # once a batch
            part._wait_until_it_goes_on()
            part._must_pause = True
            for other in self._parts:
                other._check_open()
            part._must_pause = False

    def flush(self) -> None:
        for part in self._parts:
            part._seal_now()
        self._all(lambda session: session.flush())

    def close(self) -> None:
        for part in self._parts:
            part._end()
        self._all(lambda session: session.close())

    def abort(self) -> None:
        for part in self._parts:
            part._end()
        self._all(lambda session: session.stop())

    def _all(self, call: Callable[[Session], Coroutine[Any, Any, None]]) -> None:
        """Does it to all, and raises what the first one that failed has raised."""

        async def do() -> list[BaseException | None]:
            return await asyncio.gather(*(call(part._session) for part in self._parts), return_exceptions=True)

        for end in run(do):
            if end is not None:
                raise end
