"""A whole client of one producer name, on nothing but the published schema. Begin with `SchemaClient.publish`."""

import bisect
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2

from seqdedupe.v1 import batch_pb2, publish_pb2, publish_pb2_grpc, read_pb2, read_pb2_grpc

FRAMES = itertools.count(1)
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 6 * 1024 * 1024),
]
NOT_DUP, DUP, UNKNOWN = publish_pb2.VERDICT_NOT_DUP, publish_pb2.VERDICT_DUP, publish_pb2.VERDICT_UNKNOWN


class Message(NamedTuple):
    id: int
    payload: bytes | None
    key: bytes | None = None
    properties: dict[str, str] = {}  # noqa: RUF012, nobody changes it
    event_time_ms: int = 0


class Receipt(NamedTuple):
    verdict: "publish_pb2.Verdict.ValueType"
    at_index: int  # -1 if it is not known
    message_id: batch_pb2.MessageId | None


class FinalError(RuntimeError):
    """Trying again does not help."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class AgainError(Exception):
    """The session has to be resumed after this delay."""

    def __init__(self, delay_ms: float) -> None:
        super().__init__(f"again after {delay_ms} ms")
        self.delay_ms = delay_ms


def of_call(e: Any) -> FinalError | AgainError:
    """What the status of a call means: final is only one with an ErrorInfo and without a RetryInfo (duty 8)."""
    info, retry, status = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), status_pb2.Status()
    for key, value in e.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    delays = [retry.retry_delay.ToMilliseconds() for detail in status.details if detail.Unpack(retry)]
    if any(detail.Unpack(info) for detail in status.details) and not delays:
        return FinalError(info.reason, e.details() or "")
    return AgainError(max([20, *delays]))


class SchemaClient:
    """IDs rise from one call to the next, or begin again with some that were sent before."""

    def __init__(self, address: str, topic: str, name: str, timeout_seconds: float = 900.0) -> None:
        self.address, self.topic, self.name, self.timeout_seconds = address, topic, name, timeout_seconds
        self.epochs: list[int] = []  # of the session; empty before the first Open
        self.incarnation = self.term = self.durable_index = 0
        self.persisted = -1  # the highest sequence ID that is known to be in the log
        self.dups = 0
        self.waiting: dict[int, Message] = {}  # those without a receipt, by ID, in order
        self.receipts: dict[int, Receipt] = {}
        self.failure: FinalError | None = None
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # answers, the end of the stream, None: look again
        self._known: list[int] = []  # what this session has sent or Open has answered, in order: for links
        self._has_resumed = False  # since the last receipt, because of a refusal
        self._since = time.monotonic()  # when the oldest message without a receipt began to wait

    def publish(self, messages: Iterable[Any], rows: int = 7, in_flight: int = 8) -> None:
        """Returns when every (sequence ID, payload) has a receipt, however often the sidecar is killed meanwhile."""
        self.add(messages)
        self.run(lambda: not self.waiting, rows, in_flight)

    def add(self, messages: Iterable[Any]) -> None:
        """Puts messages where `run`, in this thread or another one, sends them from."""
        if not self.waiting:
            self._since = time.monotonic()
        self.waiting |= {one[0]: Message(*one) for one in sorted(messages)}
        self.events.put(None)

    def run(self, is_done: Callable[[], bool], rows: int = 7, in_flight: int = 8) -> None:
        """Sends what is waiting until it is done. Raises FinalError."""
        while True:
            with grpc.insecure_channel(self.address, OPTIONS) as channel:
                try:
                    self._open(channel)
                    self._send(channel, is_done, rows, in_flight)
                    return
                except (grpc.RpcError, AgainError, FinalError) as e:
                    error = of_call(e) if isinstance(e, grpc.RpcError) else e
            if not isinstance(error, AgainError):
                self.failure = self.failure or error
                self.waiting.clear()
                raise error
            if is_done():
                return
            time.sleep(error.delay_ms / 1000)

    def _open(self, channel: grpc.Channel) -> None:
        """Starts the session, or resumes it: never without its epochs again (duties 5 to 7)."""
        request = publish_pb2.OpenRequest(topic=self.topic, producer_names=[self.name], epochs=self.epochs)
        answer = publish_pb2_grpc.PublishServiceStub(channel).Open(request, timeout=900)
        for refusal in answer.refusals:
            raise FinalError(refusal.reason, refusal.message)
        if not answer.epochs:
            raise AgainError(100)  # a proxy has said that
        if answer.forgotten:
            self._known, self.persisted = [], -1
        persisted = answer.persisted[0]
        if self.epochs:
            is_older = answer.incarnation != self.incarnation or answer.term < self.term
            is_shorter = answer.HasField("durable_index") and answer.durable_index < self.durable_index
            if is_older or is_shorter or persisted < self.persisted:
                raise FinalError("DATA_LOSS", "acknowledged data is gone")
            if persisted > max([self.persisted, *self._known[-1:]]) and not answer.forgotten:
                raise FinalError("FENCED", "another process has published under this name")
        self.epochs, self.incarnation, self.term = list(answer.epochs), answer.incarnation, answer.term
        self.persisted, self.durable_index = persisted, max(self.durable_index, answer.durable_index)
        self._knows(persisted)

    def _knows(self, one: int) -> None:
        place = bisect.bisect_left(self._known, one)
        if one >= 0 and self._known[place : place + 1] != [one]:
            self._known.insert(place, one)

    def _send(self, channel: grpc.Channel, is_done: Callable[[], bool], rows: int, in_flight: int) -> None:
        """Sends what is waiting, from the first message without a receipt, over one stream."""
        requests: queue.SimpleQueue[publish_pb2.PublishStreamRequest | None] = queue.SimpleQueue()
        requests.put(publish_pb2.PublishStreamRequest(topic=self.topic))
        answers = publish_pb2_grpc.PublishServiceStub(channel).PublishStream(iter(requests.get, None))
        self.events = queue.SimpleQueue()
        threading.Thread(target=self._receive, args=(answers, self.events), daemon=True).start()
        frames: dict[int, list[int]] = {}
        again_ms, last = -1, -1  # the last ID that was sent since the last time that all began again
        try:
            while not is_done():
                if again_ms >= 0 and not frames:
                    time.sleep(max(again_ms, 10) / 1000)
                    again_ms = last = -1
                while again_ms < 0 and len(frames) < in_flight:
                    some = list(itertools.islice((one for i, one in [*self.waiting.items()] if i > last), rows))
                    if not some:
                        break
                    number, last = next(FRAMES), some[-1].id
                    frame = publish_pb2.Frame(number=number, batch=self._batch(some))
                    requests.put(publish_pb2.PublishStreamRequest(frames=[frame]))
                    frames[number] = [one.id for one in some]
                try:
                    event = self.events.get(timeout=0.1)
                except queue.Empty:
                    event = None
                if self.waiting and time.monotonic() - self._since > self.timeout_seconds:
                    raise FinalError("OUTCOME_UNKNOWN", f"no receipt within {self.timeout_seconds} s")
                if isinstance(event, Exception):
                    raise event
                if event is not None:
                    again_ms = max(again_ms, self._take(event, frames))
        finally:
            requests.put(None)
            answers.cancel()
        if self.failure is not None:
            raise self.failure

    def _receive(self, answers: Any, events: "queue.SimpleQueue[Any]") -> None:
        try:
            for answer in answers:
                events.put(answer)
            events.put(AgainError(20))
        except grpc.RpcError as e:
            events.put(of_call(e))

    def _take(self, answer: publish_pb2.PublishStreamResponse, frames: dict[int, list[int]]) -> int:
        """Returns the delay after which all that is waiting has to be sent again, or -1."""
        if answer.term < self.term:  # duty 9
            for number in [one.frame for one in answer.receipts] + [one.frame for one in answer.refusals]:
                frames.pop(number, None)
            return 0
        if answer.incarnation != self.incarnation:
            raise FinalError("DATA_LOSS", "the topic was created again")
        self.term, again_ms = answer.term, -1
        self.durable_index = max(self.durable_index, answer.durable_index)
        for receipt in answer.receipts:
            ids = frames.pop(receipt.frame, [])
            verdicts = receipt.verdicts or [NOT_DUP] * len(ids)
            places = iter(range(len(ids)))
            for row, (i, verdict) in enumerate(zip(ids, verdicts, strict=False)):
                if verdict == UNKNOWN:
                    again_ms = max(again_ms, 0)
                elif i in self.waiting:
                    self._since, self._has_resumed = time.monotonic(), False
                    self.dups += verdict == DUP
                    self.persisted = max(self.persisted, i)
                    self.receipts[i] = _receipt(receipt, row, next(places) if verdict == NOT_DUP else -1)
                    del self.waiting[i]
        for refusal in answer.refusals:
            ids = frames.pop(refusal.frame, [])
            if not ids:
                continue
            is_first = ids[0] == next(iter(self.waiting))
            may_be_forgotten = refusal.reason == "INVALID_EPOCH" or (
                refusal.reason == "PREDECESSOR_MISSING" and is_first
            )
            if may_be_forgotten and not self._has_resumed:
                self._has_resumed = True
                raise AgainError(0)
            if refusal.retry_delay_ms < 0:
                self.failure = self.failure or FinalError(refusal.reason, refusal.message)
                if refusal.reason == "FENCED":
                    raise self.failure
                for i in [i for i in self.waiting if i >= ids[0]]:
                    del self.waiting[i]  # earlier messages go on
            again_ms = max(again_ms, refusal.retry_delay_ms)
        return again_ms

    def _batch(self, messages: list[Message]) -> batch_pb2.Batch:
        place = bisect.bisect_left(self._known, messages[0].id)
        link = self._known[place - 1] if place else -1
        for one in messages:
            self._knows(one.id)
        batch = batch_pb2.Batch(
            producer_name_offsets=[0, len(self.name.encode())],
            producer_names=self.name.encode(),
            epochs=self.epochs,
            previous_sequence_ids=[link],
            sequence_ids=[one.id for one in messages],
        )
        payloads, keys = [one.payload for one in messages], [one.key for one in messages]
        batch.payload_offsets[:], batch.payload_validity, batch.payloads = _binary(payloads)
        if any(key is not None for key in keys):
            batch.key_offsets[:], batch.key_validity, batch.keys = _binary(keys)
        if any(one.event_time_ms for one in messages):
            batch.event_times_ms[:] = [one.event_time_ms for one in messages]
        pairs = [pair for one in messages for pair in one.properties.items()]
        if pairs:
            batch.property_offsets[:] = [0, *itertools.accumulate(len(one.properties) for one in messages)]
            batch.property_name_offsets[:], _, batch.property_names = _binary([name.encode() for name, _ in pairs])
            batch.property_value_offsets[:], _, batch.property_values = _binary([value.encode() for _, value in pairs])
        return batch

    def read(self) -> Iterator[tuple[int, str, int, bytes]]:
        """(index, producer name, sequence ID, payload) of every message of the topic."""
        with grpc.insecure_channel(self.address, OPTIONS) as channel:
            request = read_pb2.ReadStreamRequest(topic=self.topic)
            for answer in read_pb2_grpc.ReadServiceStub(channel).ReadStream(request, wait_for_ready=True):
                for record in answer.records:
                    for row, (name, message) in enumerate(rows_of(record.batch)):
                        yield record.base_index + row, name, message.id, message.payload or b""


def _binary(values: list[bytes] | list[bytes | None]) -> tuple[list[int], bytes, bytes]:
    """Offsets, validity (empty if all values exist) and blob of a column (batch.proto)."""
    bits = bytearray((len(values) + 7) // 8)
    for i, value in enumerate(values):
        bits[i // 8] |= (value is not None) << i % 8
    offsets = [0, *itertools.accumulate(len(value or b"") for value in values)]
    return offsets, bytes(bits) if None in values else b"", b"".join(value or b"" for value in values)


def _receipt(receipt: publish_pb2.Receipt, row: int, place: int) -> Receipt:
    """Of one row, the `place`-th that was stored, or -1. The IDs of the embedded log are one run."""
    if place >= 0:
        first = receipt.first_message_id
        is_batch = first.batch_index >= 0
        return Receipt(
            NOT_DUP,
            receipt.first_index + place,
            batch_pb2.MessageId(
                ledger_id=first.ledger_id,
                entry_id=first.entry_id + (0 if is_batch else place),
                batch_index=first.batch_index + (place if is_batch else 0),
            ),
        )
    if row not in receipt.known_rows:
        return Receipt(DUP, -1, None)
    k = list(receipt.known_rows).index(row)
    batch_index = receipt.known_batch_indexes[k] if receipt.known_batch_indexes else -1
    ledger, entry = receipt.known_ledger_ids[k], receipt.known_entry_ids[k]
    one = batch_pb2.MessageId(ledger_id=ledger, entry_id=entry, batch_index=batch_index)
    return Receipt(DUP, receipt.known_indexes[k], one)


def rows_of(batch: batch_pb2.Batch) -> Iterator[tuple[str, Message]]:
    """The producer and the content of each message of a batch."""

    def value(offsets: Any, blob: bytes, i: int, validity: bytes = b"") -> bytes | None:
        exists = len(offsets) > 0 and (not validity or validity[i // 8] >> i % 8 & 1)
        return blob[offsets[i] : offsets[i + 1]] if exists else None

    b = batch
    for row in range(len(b.payload_offsets) - 1):
        of = range(*b.property_offsets[row : row + 2]) if b.property_offsets else range(0)
        pairs = [
            (value(b.property_name_offsets, b.property_names, k), value(b.property_value_offsets, b.property_values, k))
            for k in of
        ]
        producer = value(
            b.producer_name_offsets, b.producer_names, b.producer_indexes[row] if b.producer_indexes else 0
        )
        message = Message(
            b.sequence_ids[row] if b.sequence_ids else -1,
            value(b.payload_offsets, b.payloads, row, b.payload_validity),
            value(b.key_offsets, b.keys, row, b.key_validity),
            {(name or b"").decode(): (text or b"").decode() for name, text in pairs},
            b.event_times_ms[row] if b.event_times_ms else 0,
        )
        yield (producer or b"").decode(), message
