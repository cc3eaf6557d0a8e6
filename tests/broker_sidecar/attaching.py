"""A broker's side of `Attach` in plain steps: generated classes, and bytes where those refuse."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from seqdedupe.v1 import dedupe_pb2, dedupe_pb2_grpc
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Refused, offsets, refused

AttachRequest = dedupe_pb2.AttachRequest
Check = dedupe_pb2.Check

Entry = tuple[int, int, int, bytes]
"""Handle, lowest and highest sequence ID, position."""


class Attaching:
    """A stream that has begun."""

    def __init__(self, channel: grpc.Channel, topic: str | None = None) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call: grpc.StreamStreamMultiCallable[bytes, dedupe_pb2.AttachResponse] = channel.stream_stream(
            "/seqdedupe.v1.DedupeService/Attach", response_deserializer=dedupe_pb2.AttachResponse.FromString
        )
        self.call: Any = call(iter(self._requests.get, None), timeout=TIMEOUT_SECONDS, wait_for_ready=True)
        self.trim_position = b""
        self.told_end: dedupe_pb2.End | None = None
        self.token = self._frame = 0
        if topic is not None:
            self.send_raw(AttachRequest(begin=dedupe_pb2.Begin(topic=topic)).SerializeToString())
            attached = self.answer().attached
            self.token, self.replay_after = attached.token, attached.replay_after
            self.incarnation = attached.incarnation

    # -- any message -------------------------------------------------------------------------------------------

    def send(self, **steps: Any) -> None:
        self.send_raw(self.message(**steps))

    def message(self, **steps: Any) -> bytes:
        return AttachRequest(token=self.token, **steps).SerializeToString()

    def send_raw(self, data: bytes) -> None:
        self._requests.put(data)

    def answer(self) -> dedupe_pb2.AttachResponse:
        """The next answer that is more than news of the trim position. Raises grpc.RpcError when the stream ends."""
        while True:
            answer: dedupe_pb2.AttachResponse = next(self.call)
            self.trim_position = answer.trim_position
            if answer.HasField("end"):
                self.told_end = answer.end
            if len(answer.ListFields()) > bool(answer.trim_position) + answer.HasField("end"):
                return answer

    def ended(self) -> Refused:
        """Why the attachment, which must end without another answer, has ended: told in the stream, then its status."""
        why = refused(self.answer)
        assert not self.call.is_active()
        if self.token:
            told = self.told_end
            assert told is not None
            assert (told.reason, told.message, told.retry_delay_ms) == (why.reason, why.message, why.retry_delay_ms)
        return why

    def end(self) -> None:
        """Says that nothing more comes; returns when the sidecar has let go."""
        self._requests.put(None)
        for _ in self.call:
            pass

    # -- steps -------------------------------------------------------------------------------------------------

    def register(self, *names: str, first: int = 0) -> None:
        self.send(register=register(*names, first=first))

    def replay(self, *entries: Entry, after: bytes = b"") -> None:
        self.send(replay=replay(*entries, after=after))

    def ready(self, last: bytes = b"") -> int:
        """Ends the replay; returns how many entries it had."""
        self.send(end_replay=dedupe_pb2.EndReplay(last_position=last))
        return self.answer().ready.replayed

    def judge(self, *ranges: tuple[int, int] | tuple[int, int, int]) -> list[int]:
        """The verdicts of (handle, lowest[, highest])."""
        self.send(checks=[check(*ranges)])
        [checked] = self.answer().checked
        return list(checked.verdicts)

    def refusal(self, content: Check | bytes) -> dedupe_pb2.CheckRefusal:
        """Sends a check, which must be refused."""
        if isinstance(content, bytes):
            content = Check.FromString(content)
        self.send(checks=[content])
        answer = self.answer()
        assert not answer.checked, answer
        [refusal] = answer.refusals
        return refusal

    def report(self, first: int, persisted: int = 0, position: bytes = b"", failed: int = 0) -> None:
        self.send(report=report(first, persisted, position, failed))

    def reset(self) -> None:
        self.send(reset=dedupe_pb2.Reset())


def register(*names: str, first: int = 0) -> dedupe_pb2.Register:
    encoded = [name.encode() for name in names]
    return dedupe_pb2.Register(
        first_handle=first, producer_name_offsets=offsets(encoded), producer_names=b"".join(encoded)
    )


def replay(*entries: Entry, after: bytes = b"") -> dedupe_pb2.Replay:
    positions = [position for *_, position in entries]
    previous = [after, *positions[:-1]]
    return dedupe_pb2.Replay(
        handles=[handle for handle, *_ in entries],
        sequence_ids=[lowest for _, lowest, _, _ in entries],
        highest_sequence_ids=[highest for _, _, highest, _ in entries],
        position_offsets=offsets(positions),
        positions=b"".join(positions),
        previous_position_offsets=offsets(previous),
        previous_positions=b"".join(previous),
    )


def check(*ranges: Sequence[int], frame: int = 1, passes: bytes = b"") -> Check:
    return Check(
        frame=frame,
        handles=[one[0] for one in ranges],
        sequence_ids=[one[1] for one in ranges],
        highest_sequence_ids=[one[-1] for one in ranges],
        passes=passes,
    )


def report(first: int, persisted: int = 0, position: bytes = b"", failed: int = 0) -> dedupe_pb2.Report:
    return dedupe_pb2.Report(first_admission=first, persisted=persisted, position=position, failed=failed)


@contextmanager
def attached(address: str, topic: str, *names: str) -> Iterator[Attaching]:
    """An attachment of a topic that is new, with these names, ready for checks."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        attaching = Attaching(channel, topic)
        if names:
            attaching.register(*names)
        attaching.ready(attaching.replay_after)
        yield attaching


def numbers(address: str, topic: str, name: str) -> tuple[int, int]:
    """Pushed and persisted of a producer."""
    with grpc.insecure_channel(address) as channel:
        request = dedupe_pb2.DedupeServiceGetProducerRequest(topic=topic, producer_name=name)
        found = dedupe_pb2_grpc.DedupeServiceStub(channel).GetProducer(request, timeout=TIMEOUT_SECONDS)
        return found.pushed, found.persisted
