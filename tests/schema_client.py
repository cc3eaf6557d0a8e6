"""A whole client on nothing but the published schema: open, pipelined publish, resend, read.

It keeps to the duty in `PublishService`'s comment, in fewer than a hundred lines, for one producer name.
"""

import itertools
import queue
import time
from collections.abc import Iterator

import grpc

from seqdedupe.v1 import batch_pb2, publish_pb2, publish_pb2_grpc, read_pb2, read_pb2_grpc

FRAMES = itertools.count(1)
DONE = (publish_pb2.VERDICT_NOT_DUP, publish_pb2.VERDICT_DUP)


class SchemaClient:
    def __init__(self, address: str, topic: str, name: str) -> None:
        self.address, self.topic, self.name = address, topic, name
        self.epochs: list[int] = []
        self.highest = -1
        self.dups = 0

    def open(self, channel: grpc.Channel) -> int:
        request = publish_pb2.OpenRequest(topic=self.topic, producer_names=[self.name], epochs=self.epochs)
        answer = publish_pb2_grpc.PublishServiceStub(channel).Open(request, wait_for_ready=True, timeout=60)
        self.epochs = list(answer.epochs)
        self.highest = max(self.highest, answer.persisted[0])
        return answer.persisted[0]

    def batch(self, messages: list[tuple[int, bytes]]) -> batch_pb2.Batch:
        offsets = [0, *itertools.accumulate(len(payload) for _, payload in messages)]
        link = max((i for i in [*self.sent, self.opened] if i < messages[0][0]), default=-1)
        self.sent.update(i for i, _ in messages)
        return batch_pb2.Batch(
            producer_name_offsets=[0, len(self.name.encode())],
            producer_names=self.name.encode(),
            epochs=self.epochs,
            previous_sequence_ids=[link],
            sequence_ids=[i for i, _ in messages],
            payload_offsets=offsets,
            payloads=b"".join(payload for _, payload in messages),
        )

    def publish(self, messages: list[tuple[int, bytes]], rows: int = 7, in_flight: int = 8) -> None:
        """Returns when every message has a receipt, however often the sidecar is killed meanwhile."""
        self.sent: set[int] = set()
        self.opened = -1
        left = dict(messages)
        while left:
            try:
                with grpc.insecure_channel(self.address) as channel:
                    self.opened = self.open(channel)
                    self._send(channel, left, rows, in_flight)
            except grpc.RpcError as e:
                if e.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                time.sleep(0.05)

    def _send(self, channel: grpc.Channel, left: dict[int, bytes], rows: int, in_flight: int) -> None:
        frames: dict[int, list[int]] = {}
        requests: queue.SimpleQueue[publish_pb2.PublishStreamRequest | None] = queue.SimpleQueue()
        requests.put(publish_pb2.PublishStreamRequest(topic=self.topic))
        answers = publish_pb2_grpc.PublishServiceStub(channel).PublishStream(iter(requests.get, None))
        waiting = iter(sorted(left.items()))

        def send_more() -> None:
            while len(frames) < in_flight and (some := list(itertools.islice(waiting, rows))):
                number = next(FRAMES)
                frames[number] = [i for i, _ in some]
                requests.put(publish_pb2.PublishStreamRequest(frame=number, batch=self.batch(some)))

        send_more()
        while frames:
            answer = next(answers)
            resend_after_ms = -1
            for refusal in answer.refusals:
                if refusal.retry_delay_ms < 0:
                    raise RuntimeError(f"{refusal.reason}: {refusal.message}")
                resend_after_ms = max(resend_after_ms, refusal.retry_delay_ms)
            for receipt in answer.receipts:
                ids = frames.pop(receipt.frame)
                for i, verdict in zip(ids, receipt.verdicts or [DONE[0]] * len(ids), strict=True):
                    self.dups += verdict == publish_pb2.VERDICT_DUP
                    if verdict in DONE:
                        left.pop(i, None)
                    else:
                        resend_after_ms = max(resend_after_ms, 0)
            if resend_after_ms >= 0:
                time.sleep(resend_after_ms / 1000)
                break  # a new stream: from the first message without a receipt
            send_more()
        requests.put(None)

    def read(self) -> Iterator[tuple[int, str, int, bytes]]:
        """(index, producer name, sequence ID, payload) of every message of the topic."""
        with grpc.insecure_channel(self.address) as channel:
            stub = read_pb2_grpc.ReadServiceStub(channel)
            for answer in stub.ReadStream(read_pb2.ReadStreamRequest(topic=self.topic), wait_for_ready=True):
                for record in answer.records:
                    b = record.batch
                    for row, sequence_id in enumerate(b.sequence_ids):
                        p = b.producer_indexes[row] if b.producer_indexes else 0
                        name = b.producer_names[b.producer_name_offsets[p] : b.producer_name_offsets[p + 1]].decode()
                        payload = b.payloads[b.payload_offsets[row] : b.payload_offsets[row + 1]]
                        yield record.base_index + row, name, sequence_id, payload
