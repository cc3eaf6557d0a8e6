"""An attachment by hand: plain generated messages on a stream, each sent and read when the test says so."""

import itertools
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import dedupe_pb2 as pb
from seqdedupe.v1.dedupe_pb2_grpc import DedupeServiceStub

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
NOT_DUP, DUP, UNKNOWN = 1, 2, 3


class Ended(Exception):
    """The stream has ended, for this reason."""


class Cut(Exception):
    """The connection was cut here, as the test wanted."""


@dataclass
class Log:
    """A broker's log: of each entry the sequence ID (all are of one producer) and the position."""

    entries: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def last(self) -> bytes:
        return self.entries[-1][1] if self.entries else b""

    def append(self, sequence_id: int, position: bytes | None = None) -> bytes:
        self.entries.append((sequence_id, b"at %d" % len(self.entries) if position is None else position))
        return self.last

    def after(self, position: bytes) -> list[tuple[int, bytes, bytes]]:
        """ID, position and previous position of what follows."""
        before = [b"", *(at for _, at in self.entries)]
        rows = [(i, at, previous) for (i, at), previous in zip(self.entries, before, strict=False)]
        return rows[before.index(position) :]


class ByHand:
    """A stream. After `cut_after` messages, sent and received ones counted, it is cancelled and raises Cut."""

    def __init__(self, channel: grpc.Channel, topic: str, cut_after: int = 1 << 30) -> None:
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._call: Any = DedupeServiceStub(channel).Attach(iter(self._requests.get, None), timeout=TIMEOUT_SECONDS)
        self._left = cut_after
        self._topic = topic
        self.token = 0
        self._frames = itertools.count(1)

    def _one_more(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.cancel()
            raise Cut

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)

    def send(self, token: int | None = None, **steps: Any) -> None:
        self._requests.put(pb.AttachRequest(token=self.token if token is None else token, **steps))
        self._one_more()

    def read(self) -> pb.AttachResponse:
        """The next message that is more than news of the trim position. Raises Ended."""
        try:
            for answer in self._call:
                if answer.ListFields() and answer.ListFields()[-1][0].name != "trim_position":
                    self._one_more()
                    return answer  # type: ignore[no-any-return]
        except grpc.RpcError as e:
            self._requests.put(None)
            raise Ended(reason_of(e)) from e
        raise Ended("OK")

    def ends(self) -> str:
        """Reads to the end; the reason of it."""
        try:
            while True:
                self.read()
        except Ended as e:
            return str(e)

    # -- steps of an honest broker -----------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Begins, and registers the producer; returns where the replay begins."""
        self.send(begin=pb.Begin(topic=self._topic))
        attached = self.read().attached
        self.token = attached.token
        self.send(register=pb.Register(producer_name_offsets=[0, 1], producer_names=b"p"))
        return bytes(attached.replay_after)

    def attach(self, log: Log) -> None:
        rows = log.after(self.begin())
        if rows:
            self.send(replay=replay_of(rows))
        self.send(end_replay=pb.EndReplay(last_position=log.last))
        assert self.read().HasField("ready")

    def ask(self, *ids: int) -> None:
        self.send(checks=[check_of(next(self._frames), ids)])

    def check(self, *ids: int) -> list[int]:
        self.ask(*ids)
        [checked] = self.read().checked
        return list(checked.verdicts)

    def report(self, first: int, persisted: int = 0, position: bytes = b"", failed: int = 0) -> None:
        self.send(report=pb.Report(first_admission=first, persisted=persisted, position=position, failed=failed))


def check_of(frame: int, ids: Sequence[int]) -> pb.Check:
    return pb.Check(frame=frame, handles=[0] * len(ids), sequence_ids=ids)


def replay_of(rows: Sequence[tuple[int, bytes, bytes]]) -> pb.Replay:
    """Entries of ID, position, previous position."""
    return pb.Replay(
        handles=[0] * len(rows),
        sequence_ids=[row[0] for row in rows],
        position_offsets=[0, *itertools.accumulate(len(row[1]) for row in rows)],
        positions=b"".join(row[1] for row in rows),
        previous_position_offsets=[0, *itertools.accumulate(len(row[2]) for row in rows)],
        previous_positions=b"".join(row[2] for row in rows),
    )


def reason_of(e: grpc.RpcError) -> str:
    """The reason that an error status says."""
    status = rpc_status.from_call(e)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else []:
        if detail.Unpack(info):
            return str(info.reason)
    return str(e)
