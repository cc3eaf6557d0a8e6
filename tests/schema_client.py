"""A whole client of one producer name, on nothing but the published schema. IDs rise from one call to the next."""

import itertools
import queue
import time
from collections.abc import Iterator

import grpc

from seqdedupe.v1 import batch_pb2, publish_pb2, publish_pb2_grpc, read_pb2, read_pb2_grpc

FRAMES = itertools.count(1)
RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


class SchemaClient:
    def __init__(self, address: str, topic: str, name: str) -> None:
        self.address, self.topic, self.name = address, topic, name
        self.epochs: list[int] = []  # of the session; empty before the first Open
        self.incarnation = 0
        self.persisted = -1  # the highest sequence ID that is known to be in the log
        self.dups = 0

    def publish(self, messages: list[tuple[int, bytes]], rows: int = 7, in_flight: int = 8) -> None:
        """Returns when every (sequence ID, payload) has a receipt, however often the sidecar is killed meanwhile."""
        left = dict(sorted(messages))
        while left:
            with grpc.insecure_channel(self.address, RECONNECT) as channel:
                try:
                    self._open(channel)
                    self._send(channel, left, rows, in_flight)
                except grpc.RpcError as e:
                    if e.code() != grpc.StatusCode.UNAVAILABLE:
                        raise  # FENCED, and no matter what trying again does not help
                    time.sleep(0.05)

    def _open(self, channel: grpc.Channel) -> None:
        """Starts the session, or resumes it: never without its epochs again."""
        request = publish_pb2.OpenRequest(topic=self.topic, producer_names=[self.name], epochs=self.epochs)
        answer = publish_pb2_grpc.PublishServiceStub(channel).Open(request, wait_for_ready=True, timeout=900)
        if answer.refusals or answer.persisted[0] < self.persisted or self.incarnation not in (0, answer.incarnation):
            raise RuntimeError("".join(one.message for one in answer.refusals) or "acknowledged data is gone")
        self.epochs, self.incarnation, self.persisted = list(answer.epochs), answer.incarnation, answer.persisted[0]

    def _send(self, channel: grpc.Channel, left: dict[int, bytes], rows: int, in_flight: int) -> None:
        """Sends what is left, from the first message without a receipt; returns early when that has to begin again."""
        requests: queue.SimpleQueue[publish_pb2.PublishStreamRequest | None] = queue.SimpleQueue()
        requests.put(publish_pb2.PublishStreamRequest(topic=self.topic))
        answers = publish_pb2_grpc.PublishServiceStub(channel).PublishStream(iter(requests.get, None))
        frames: dict[int, list[int]] = {}
        waiting, again_ms = iter([*left.items()]), -1
        # What is sent rises, so the link is the ID before, or what Open answered if that is below the first one.
        link = self.persisted if self.persisted < next(iter(left)) else -1
        while again_ms < 0:
            while len(frames) < in_flight and (some := list(itertools.islice(waiting, rows))):
                number = next(FRAMES)
                frame = publish_pb2.Frame(number=number, batch=self._batch(some, link))
                requests.put(publish_pb2.PublishStreamRequest(frames=[frame]))
                link, frames[number] = some[-1][0], [i for i, _ in some]
            if not frames:
                break
            answer = next(answers)
            for refusal in answer.refusals:
                if refusal.retry_delay_ms < 0:
                    raise RuntimeError(f"{refusal.reason}: {refusal.message}")
                again_ms = max(again_ms, refusal.retry_delay_ms)
            for receipt in answer.receipts:
                ids = frames.pop(receipt.frame)
                for i, verdict in zip(ids, receipt.verdicts or [publish_pb2.VERDICT_NOT_DUP] * len(ids), strict=True):
                    if verdict == publish_pb2.VERDICT_UNKNOWN:
                        again_ms = max(again_ms, 0)
                    else:
                        self.dups += verdict == publish_pb2.VERDICT_DUP
                        self.persisted = max(self.persisted, i)
                        left.pop(i, None)
        requests.put(None)
        time.sleep(max(again_ms, 0) / 1000)

    def _batch(self, messages: list[tuple[int, bytes]], link: int) -> batch_pb2.Batch:
        return batch_pb2.Batch(
            producer_name_offsets=[0, len(self.name.encode())],
            producer_names=self.name.encode(),
            epochs=self.epochs,
            previous_sequence_ids=[link],
            sequence_ids=[i for i, _ in messages],
            payload_offsets=[0, *itertools.accumulate(len(payload) for _, payload in messages)],
            payloads=b"".join(payload for _, payload in messages),
        )

    def read(self) -> Iterator[tuple[int, str, int, bytes]]:
        """(index, producer name, sequence ID, payload) of every message of the topic."""
        with grpc.insecure_channel(self.address, RECONNECT) as channel:
            request = read_pb2.ReadStreamRequest(topic=self.topic)
            for answer in read_pb2_grpc.ReadServiceStub(channel).ReadStream(request, wait_for_ready=True):
                for record in answer.records:
                    b = record.batch
                    names = [b.producer_names[x:y].decode() for x, y in itertools.pairwise(b.producer_name_offsets)]
                    for row, (x, y) in enumerate(itertools.pairwise(b.payload_offsets)):
                        name = names[b.producer_indexes[row] if b.producer_indexes else 0]
                        yield record.base_index + row, name, b.sequence_ids[row], b.payloads[x:y]
