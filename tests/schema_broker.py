"""A whole broker of one topic, on nothing but the published schema. What it does is numbered as in dedupe.proto."""

import queue
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import grpc

from seqdedupe.v1 import dedupe_pb2, dedupe_pb2_grpc, publish_pb2

NOT_DUP, DUP = publish_pb2.VERDICT_NOT_DUP, publish_pb2.VERDICT_DUP
PAGE = 1000

Message = tuple[str, int]  # producer name, sequence ID


class Log:
    """What survives the broker: messages in order, from number `first` on. A position is the number as text."""

    def __init__(self) -> None:
        self.first, self.messages = 0, list[Message]()

    def end(self) -> int:
        return self.first + len(self.messages)

    def append(self, messages: list[Message]) -> None:
        self.messages += messages  # OSError: none of them is in the log, or ever will be

    def trim(self, last: int) -> None:
        del self.messages[: max(last + 1 - self.first, 0)]
        self.first = max(self.first, last + 1)


class SchemaBroker:
    def __init__(self, address: str, topic: str, log: Log, drop_producers: Callable[[], None] = lambda: None) -> None:
        self.address, self.topic, self.log, self.drop_producers = address, topic, log, drop_producers
        self.channel: grpc.Channel | None = None  # while the topic is attached

    def publish(self, messages: list[Message]) -> list[bool]:
        """For each message whether it is in the log; if one is not, its producer sends again from there, in order."""
        try:
            if self.channel is None:
                self._attach()
            return self._publish(messages)
        except grpc.RpcError as e:
            self.close()  # 8
            if e.code() != grpc.StatusCode.UNAVAILABLE:
                raise  # REPLAY_GAP, and no matter what trying again does not help
            time.sleep(0.05)
            return [False] * len(messages)

    def close(self) -> None:
        if self.channel is not None:
            self.channel = self.channel.close()

    def _attach(self) -> None:  # 1, 2
        self.channel = grpc.insecure_channel(self.address)
        self.requests: queue.SimpleQueue[dedupe_pb2.AttachRequest | None] = queue.SimpleQueue()
        stub = dedupe_pb2_grpc.DedupeServiceStub(self.channel)
        self.answers: Iterator[dedupe_pb2.AttachResponse] = stub.Attach(iter(self.requests.get, None))
        self.handles: dict[str, int] = {}
        self.token = self.admitted = 0
        self._say(begin=dedupe_pb2.Begin(topic=self.topic))
        attached = next(self.answers).attached
        self.token = attached.token
        for start in range(int(attached.replay_after or -1) + 1, self.log.end(), PAGE):
            page = self.log.messages[start - self.log.first :][:PAGE]
            positions = [_position(start + i) for i in range(-1, len(page))]
            replay = dedupe_pb2.Replay(
                handles=self._register(page),
                sequence_ids=[sequence_id for _, sequence_id in page],
                position_offsets=[0, *accumulate(map(len, positions[1:]))],
                positions=b"".join(positions[1:]),
                previous_position_offsets=[0, *accumulate(map(len, positions[:-1]))],
                previous_positions=b"".join(positions[:-1]),
            )
            self._say(replay=replay)
        self._say(end_replay=dedupe_pb2.EndReplay(last_position=_position(self.log.end() - 1)))
        next(one for one in self.answers if one.HasField("ready"))

    def _register(self, messages: list[Message]) -> list[int]:  # 3
        first = len(self.handles)
        new = [name for name in dict.fromkeys(name for name, _ in messages) if name not in self.handles]
        if new:
            names = list(map(str.encode, new))
            register = dedupe_pb2.Register(first_handle=first, producer_name_offsets=[0, *accumulate(map(len, names))])
            register.producer_names = b"".join(names)
            self._say(register=register)
            self.handles |= zip(new, range(first, first + len(new)), strict=True)
        return [self.handles[name] for name, _ in messages]

    def _publish(self, messages: list[Message]) -> list[bool]:
        handles, ids = self._register(messages), [sequence_id for _, sequence_id in messages]
        self._say(checks=[dedupe_pb2.Check(handles=handles, sequence_ids=ids)])  # 4
        answer = next(one for one in self.answers if one.checked or one.refusals)
        if answer.refusals:
            raise ValueError(answer.refusals[0].message)
        verdicts = answer.checked[0].verdicts
        new = [message for message, verdict in zip(messages, verdicts, strict=True) if verdict == NOT_DUP]
        first, self.admitted, stored = self.admitted, self.admitted + len(new), {NOT_DUP, DUP}
        try:
            self.log.append(new)
            last = _position(self.log.end() - 1) if new else b""
            self._say(report=dedupe_pb2.Report(first_admission=first, persisted=len(new), position=last))  # 5
        except OSError:
            stored = {DUP}
            self._say(report=dedupe_pb2.Report(first_admission=first, failed=len(new)))
            self.drop_producers()
            self._say(reset=dedupe_pb2.Reset())  # 6
        self.log.trim(int(answer.trim_position or -1))  # 7
        return [verdict in stored for verdict in verdicts]

    def _say(self, **step: Any) -> None:
        self.requests.put(dedupe_pb2.AttachRequest(token=self.token, **step))


def _position(number: int) -> bytes:
    return str(number).encode() if number >= 0 else b""
