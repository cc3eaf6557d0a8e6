"""Plain calls to a sidecar, as a client in any language makes them: generated classes, and bytes where those refuse."""

import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from seqdedupe import wire
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import admin_pb2, admin_pb2_grpc, batch_pb2, publish_pb2, publish_pb2_grpc, read_pb2, read_pb2_grpc

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
SOON_AGAIN = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))
NOT_DUP, DUP, UNKNOWN = 1, 2, 3

FRAMES = itertools.count(1)
"""Frame numbers are unique in a process."""

Row = tuple[str, int]
Answer = publish_pb2.Receipt | publish_pb2.Refusal


@dataclass(frozen=True)
class Refused:
    """What an error status says."""

    code: grpc.StatusCode
    reason: str
    message: str
    numbers: dict[str, str]
    retry_delay_ms: int
    """-1: there is no RetryInfo."""


def batch(
    rows: Sequence[Row],
    epochs: dict[str, int],
    links: dict[str, int] | None = None,
    payloads: Sequence[bytes] | None = None,
    **columns: Any,
) -> batch_pb2.Batch:
    """A batch of (producer name, sequence ID) rows. A link is the ID before the first one unless given."""
    names = list(dict.fromkeys(name for name, _ in rows))
    firsts = dict(reversed(rows))
    if payloads is None:
        payloads = [payload_of(*row) for row in rows]
    return batch_pb2.Batch(
        producer_name_offsets=offsets([name.encode() for name in names]),
        producer_names="".join(names).encode(),
        epochs=[epochs[name] for name in names],
        previous_sequence_ids=[(links or {}).get(name, firsts[name] - 1) for name in names],
        producer_indexes=[names.index(name) for name, _ in rows] if len(names) > 1 else [],
        sequence_ids=[sequence_id for _, sequence_id in rows],
        payload_offsets=offsets(payloads),
        payloads=b"".join(payloads),
        **columns,
    )


def payload_of(name: str, sequence_id: int) -> bytes:
    """What `batch` puts into a row: read back, it tells whether columns were mixed up."""
    return f"{name}/{sequence_id}".encode()


def offsets(values: Iterable[bytes]) -> list[int]:
    return [0, *itertools.accumulate(len(value) for value in values)]


def encoded(content: Message | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.SerializeToString()


def frame_bytes(frame: int, content: Message | bytes, topic: str = "") -> bytes:
    """A PublishStreamRequest with one frame, with any bytes as its batch."""
    return b"".join([topic_bytes(topic), *wire.frame_parts(frame, [encoded(content)])])


def topic_bytes(topic: str) -> bytes:
    """A PublishStreamRequest that only names the topic."""
    return publish_pb2.PublishStreamRequest(topic=topic).SerializeToString()


def receipt_of(answer: Answer) -> publish_pb2.Receipt:
    """The answer, which must be a receipt."""
    assert isinstance(answer, publish_pb2.Receipt), answer
    return answer


def refusal_of(answer: Answer) -> publish_pb2.Refusal:
    """The answer, which must be a refusal."""
    assert isinstance(answer, publish_pb2.Refusal), answer
    return answer


class Stream:
    """A publish stream: frames go out at once, answers are looked up by frame number in any order they come."""

    def __init__(self, channel: grpc.Channel, topic: str) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(topic_bytes(topic))
        call: grpc.StreamStreamMultiCallable[bytes, publish_pb2.PublishStreamResponse] = channel.stream_stream(
            "/seqdedupe.v1.PublishService/PublishStream",
            response_deserializer=publish_pb2.PublishStreamResponse.FromString,
        )
        self.call: Any = call(iter(self._requests.get, None), timeout=TIMEOUT_SECONDS, wait_for_ready=True)
        self._answers: dict[int, list[Answer]] = {}
        self.arrived: list[int] = []
        """Frame numbers in the order of their answers."""

    def send(self, content: Message | bytes, frame: int | None = None, topic: str = "") -> int:
        """Sends a frame; returns its number."""
        number = next(FRAMES) if frame is None else frame
        self._requests.put(frame_bytes(number, content, topic))
        return number

    def send_raw(self, data: bytes) -> None:
        """Sends any bytes as a message of the stream."""
        self._requests.put(data)

    def answer(self, frame: int) -> Answer:
        """The answer to a frame, waited for. Raises grpc.RpcError when the stream breaks."""
        while not self._answers.get(frame):
            self._take(next(self.call))
        return self._answers[frame].pop(0)

    def _take(self, response: publish_pb2.PublishStreamResponse) -> None:
        assert response.incarnation > 0
        # A topic that has not recovered since the start may know of no owner: then it refuses everything.
        assert response.term > 0 or not response.receipts
        answers: list[Answer] = [*response.receipts, *response.refusals]
        for one in answers:
            self._answers.setdefault(one.frame, []).append(one)
            self.arrived.append(one.frame)

    def receipt(self, content: Message | bytes) -> publish_pb2.Receipt:
        """Sends a frame; returns its receipt."""
        return receipt_of(self.answer(self.send(content)))

    def refusal(self, content: Message | bytes) -> publish_pb2.Refusal:
        """Sends a frame; returns its refusal."""
        return refusal_of(self.answer(self.send(content)))

    def end(self) -> None:
        """Says that nothing more comes; returns when everything has been answered."""
        self._requests.put(None)
        for response in self.call:
            self._take(response)


class Client:
    """A channel to a sidecar and what is called over it."""

    def __init__(self, address: str) -> None:
        # Its own: a shared one would break for all when a test cuts it.
        self.address = address
        options = [("grpc.use_local_subchannel_pool", 1), *SOON_AGAIN]
        self.channel = grpc.insecure_channel(address, options)
        self.publish = publish_pb2_grpc.PublishServiceStub(self.channel)
        self.reading = read_pb2_grpc.ReadServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def open(self, topic: str, *names: str, epochs: Sequence[int] = ()) -> publish_pb2.OpenResponse:
        request = publish_pb2.OpenRequest(topic=topic, producer_names=names, epochs=epochs)
        return self.publish.Open(request, timeout=TIMEOUT_SECONDS, wait_for_ready=True)

    def resume_refused(self, topic: str, name: str, epoch: int) -> publish_pb2.OpenRefusal:
        """Resumes a session, which must be refused."""
        answer = self.open(topic, name, epochs=[epoch])
        assert (list(answer.epochs), list(answer.persisted), list(answer.persisted_indexes)) == ([0], [-1], [-1])
        [refusal] = answer.refusals
        assert refusal.index == 0
        return refusal

    def epochs(self, topic: str, *names: str) -> dict[str, int]:
        """Starts sessions: epochs by name."""
        return dict(zip(names, self.open(topic, *names).epochs, strict=True))

    def stream(self, topic: str) -> Stream:
        return Stream(self.channel, topic)

    def raw(self, method: str, data: bytes) -> bytes:
        """A unary call with any bytes."""
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(method)
        answer = call(data, timeout=TIMEOUT_SECONDS)
        assert isinstance(answer, bytes)
        return answer

    def publish_unary(self, topic: str, content: Message | bytes) -> publish_pb2.Receipt:
        head = publish_pb2.PublishRequest(topic=topic).SerializeToString()
        data = b"".join([head, *wire.length_delimited(15, encoded(content))])
        return publish_pb2.PublishResponse.FromString(self.raw("/seqdedupe.v1.PublishService/Publish", data)).receipt

    def topic(self, name: str) -> admin_pb2.Topic:
        return self.admin.GetTopic(admin_pb2.GetTopicRequest(topic=name)).topic

    def producer(self, topic: str, name: str) -> tuple[int, int, int]:
        """pushed, persisted, epoch."""
        one = self.admin.GetProducer(admin_pb2.GetProducerRequest(topic=topic, producer_name=name)).producer
        return one.pushed, one.persisted, one.epoch

    def end_index(self, topic: str) -> int:
        return self.reading.GetLastMessageId(read_pb2.GetLastMessageIdRequest(topic=topic)).last.index + 1

    def state(self, topic: str) -> tuple[object, ...]:
        """All that a publish may change: every producer's numbers, the end of the log and its size."""
        answer = self.admin.ListProducers(admin_pb2.ListProducersRequest(topic=topic))
        now = self.topic(topic)
        return [str(one) for one in answer.producers], now.last.index, now.log_bytes, now.incarnation

    def records(self, topic: str, **start: Any) -> Iterator[batch_pb2.Record]:
        """The stored records of a topic, up to its end."""
        request = read_pb2.ReadStreamRequest(topic=topic, start=read_pb2.ReadStart(**start) if start else None)
        for answer in self.reading.ReadStream(request, timeout=TIMEOUT_SECONDS, wait_for_ready=True):
            yield from answer.records

    def rows(self, topic: str, **start: Any) -> list[Row]:
        """Name and sequence ID of every message of a topic; indexes and payloads are checked on the way."""
        rows: list[Row] = []
        next_index = -1
        for record in self.records(topic, **start):
            assert next_index in (-1, record.base_index)
            next_index = record.base_index + record.rows
            rows += record_rows(record)
        return rows


def names_of(stored: batch_pb2.Batch) -> list[str]:
    """The producer names of a batch."""
    ends = itertools.pairwise(stored.producer_name_offsets)
    return [stored.producer_names[start:end].decode() for start, end in ends]


def record_rows(record: batch_pb2.Record) -> list[Row]:
    """Name and sequence ID of a record's messages; the payloads must be theirs."""
    stored = record.batch
    names = names_of(stored)
    payloads = [stored.payloads[start:end] for start, end in itertools.pairwise(stored.payload_offsets)]
    owners = stored.producer_indexes or [0] * record.rows
    rows = [(names[p], sequence_id) for p, sequence_id in zip(owners, stored.sequence_ids, strict=True)]
    assert payloads == [payload_of(*row) for row in rows]
    return rows


def verdicts(receipt: publish_pb2.Receipt, rows: int) -> list[int]:
    return list(receipt.verdicts) or [NOT_DUP] * rows


def refused(call: Callable[[], object]) -> Refused:
    """Makes a call that must be refused; returns what the status says."""
    try:
        call()
    except grpc.RpcError as e:
        return status(e)
    raise AssertionError("the call was not refused")


def status(e: Any) -> Refused:
    """What an error status says: ErrorInfo and RetryInfo are taken from its details."""
    details = rpc_status.from_call(e)
    assert details is not None, e
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    delay_ms = -1
    for detail in details.details:
        if detail.Unpack(retry):
            delay_ms = retry.retry_delay.ToMilliseconds()
        else:
            assert detail.Unpack(info)
    assert info.domain == "seqdedupe"
    return Refused(e.code(), info.reason, details.message, dict(info.metadata), delay_ms)
