"""The client for a broker that has its own log. The client attaches topics to a sidecar, asks the sidecar for verdicts,
and reports which messages are in the log.

Begin with `BrokerClient`. An `Attachment` represents one attached topic. dedupe.proto states the duties of a broker.
This module fulfils the duties that do not concern the broker's own log.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc.aio
import numpy as np

from seqdedupe.address import SidecarAddress
from seqdedupe.batch import Binary
from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, call, error_of_reason, new_channel, typed_errors
from seqdedupe.client.credentials import Credentials
from seqdedupe.client.pending import Verdict
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_BATCH_ROWS
from seqdedupe.names import new_producer_name, topic_name
from seqdedupe.v1 import dedupe_pb2
from seqdedupe.v1.dedupe_pb2_grpc import DedupeServiceStub
from seqdedupe.wire import alias

# -- A broker's attachment to a topic: one stream, on which it replays, asks and reports.

ATTACH = "/seqdedupe.v1.DedupeService/Attach"

# The messages of `Attach` with columns as `bytes`.
AttachRequest = alias(dedupe_pb2.AttachRequest)
AttachResponse = alias(dedupe_pb2.AttachResponse)
Begin = alias(dedupe_pb2.Begin)
Check = alias(dedupe_pb2.Check)
EndReplay = alias(dedupe_pb2.EndReplay)
Register = alias(dedupe_pb2.Register)
Release = alias(dedupe_pb2.Release)
ReplayStep = alias(dedupe_pb2.Replay)
Report = alias(dedupe_pb2.Report)
Reset = alias(dedupe_pb2.Reset)

REGISTER_NAMES = 16_384
"""The maximum number of names in one message. With names of the maximum length, the message has 4 MiB."""

FULL_MESSAGE_BYTES = 160 * 1024
MAX_CHECKS = 256
"""The most checks in one message."""

CHECKS = dedupe_pb2.AttachRequest.DESCRIPTOR.fields_by_name["checks"].number


@dataclass(frozen=True, slots=True)
class Range:
    """A message or batch that a broker received: the sequence IDs from `sequence_id` to `highest_sequence_id`. If
    `highest_sequence_id` is None, the range has the single ID `sequence_id`.

    `passes` is set for an entry that is not a complete message: a marker, or a chunk other than the last chunk of a
    message. The verdict of such an entry is always NOT_DUP. The sidecar ignores the entry's producer name and ID and
    records nothing.
    """

    producer_name: str
    sequence_id: int
    highest_sequence_id: int | None = None
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the broker's log: its range, its position, and the position of the previous entry (empty for the
    first entry)."""

    range: Range
    position: bytes
    previous_position: bytes


class Attachment:
    """A topic that a broker has attached. `BrokerClient.attach` returns the attachment. Use it on one event loop. An
    attachment ends if a second broker attaches the topic, the connection breaks, or a report is late. After the end,
    every call raises the reason. The broker must stop writing to the topic, and attach it again."""

    def __init__(self, stream: Any, address: SidecarAddress) -> None:
        self.trim_position = b""
        """The position up to which, inclusive, entries may be trimmed."""
        self._stream = stream
        self._address = address
        self._token = 0
        self._handles: dict[str, int] = {}
        self._registered = 0
        self._frames = itertools.count(1)
        self._checks: dict[int, asyncio.Future[list[Verdict]]] = {}
        self._admitted = 0
        self._reported = 0
        self._to_send: deque[Any] = deque()
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: SeqdedupeError | None = None
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- attaching ---------------------------------------------------------------------------------------------

    async def begin(self, topic: str) -> bytes:
        """Open the attachment's stream, and return the position after which the broker must replay its log."""
        with typed_errors(self._address):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                    # If the server does not implement the call, it ends the call at once. Writing before that would
                    # hide the reason.
                    await self._stream.initial_metadata()
                    # If the stream has ended already, the read below gives the reason.
                    with suppress(asyncio.InvalidStateError):
                        await self._stream.write(AttachRequest(begin=Begin(topic=topic)))
                    data = await self._stream.read()
            except TimeoutError as e:
                raise error("UNREACHABLE", f"the sidecar at {self._address} does not answer") from e
        if data is grpc.aio.EOF:
            raise error("NOT_ATTACHED", f"the sidecar at {self._address} ended the stream at its beginning")
        answer = AttachResponse.FromString(data)
        self._token = answer.attached.token
        self.trim_position = answer.trim_position
        self._tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]
        after: bytes = answer.attached.replay_after
        return after

    async def replay(self, entries: Sequence[Entry]) -> None:
        """Send entries of the log, and return when there is room for more entries."""
        self._check_not_ended()
        columns = self._columns([entry.range for entry in entries])
        positions = Binary.of_all([entry.position for entry in entries])
        previous = Binary.of_all([entry.previous_position for entry in entries])
        replay = ReplayStep(
            **columns,
            position_offsets=positions.offsets.tobytes(),
            positions=positions.data,
            previous_position_offsets=previous.offsets.tobytes(),
            previous_positions=previous.data,
        )
        self._has_room.clear()
        self._ask(replay=replay)
        await self._has_room.wait()
        self._check_not_ended()

    async def end_replay(self, last_position: bytes) -> None:
        """End the replay with the position of the log's last entry. Return when the sidecar answers checks."""
        self._ask(end_replay=EndReplay(last_position=last_position))
        await asyncio.shield(self._ready)

    # -- publishing --------------------------------------------------------------------------------------------

    async def check(self, ranges: Sequence[Range]) -> list[Verdict]:
        """Return the verdicts of at most MAX_BATCH_ROWS ranges. The sidecar judges the ranges in the order of the
        calls. Then write the ranges with NOT_DUP to the log, in the same order.

        Raises INVALID_NAME, INVALID_SEQUENCE_ID, OVERLAP, GAP, QUEUE_FULL, etc. After these errors, the sidecar has
        admitted none of the ranges, and the topic is still attached. Raises NOT_ATTACHED and other reasons if the
        attachment has ended. If the call is cancelled, it is unknown which ranges were admitted: close the attachment
        and attach again.
        """
        self._check_not_ended()
        if not 1 <= len(ranges) <= MAX_BATCH_ROWS:
            raise error("INVALID_REQUEST", f"a check has 1 to {MAX_BATCH_ROWS} ranges, not {len(ranges)}")
        columns = self._columns(ranges)
        frame = next(self._frames)
        answered: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()
        self._checks[frame] = answered
        self._ask(checks=[Check(frame=frame, **columns)])
        return await answered

    def persisted(self, position: bytes, count: int = 1) -> None:
        """Report that the oldest `count` unreported admissions are in the log. `position` is the log position of the
        last of these admissions."""
        self._report(persisted=count, position=position)

    def failed(self, count: int = 1) -> None:
        """Report that the oldest `count` unreported admissions will never be in the log.

        From now on every verdict is UNKNOWN. Report all other admissions in flight as failed too, drop the producers'
        connections, then call `reset`.
        """
        self._report(failed=count)

    def _report(self, *, persisted: int = 0, position: bytes = b"", failed: int = 0) -> None:
        self._check_not_ended()
        count, in_flight = persisted + failed, self._admitted - self._reported
        if not 1 <= count <= in_flight:
            raise error("INVALID_REQUEST", f"{count} admissions are reported, and {in_flight} are in flight")
        unsent = self._to_send[-1].report if self._to_send and self._to_send[-1].HasField("report") else None
        if unsent is None or (persisted and unsent.failed):
            what = Report(first_admission=self._reported, persisted=persisted, position=position, failed=failed)
            self._ask(report=what)
        else:
            # Extend the unsent report, which ends where the new report begins.
            unsent.persisted += persisted
            unsent.failed += failed
            unsent.position = position or unsent.position
        self._reported += count

    def reset(self) -> None:
        """Reset the attachment after `failed`, when all admissions have been reported. Afterwards checks return
        verdicts again.

        Raises INVALID_REQUEST while an admission is in flight, or a check has no answer yet.
        """
        self._check_not_ended()
        if self._checks or self._reported != self._admitted:
            raise error(
                "INVALID_REQUEST",
                f"{self._admitted - self._reported} admissions and {len(self._checks)} checks are in flight: report "
                "them as failed before the reset",
            )
        self._ask(reset=Reset())

    def release(self, producer_name: str) -> None:
        """Release a producer name that no producer uses at present."""
        self._check_not_ended()
        handle = self._handles.pop(producer_name, None)
        if handle is not None:
            self._ask(release=Release(handles=np.array([handle], "<i4").tobytes()))

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> SeqdedupeError | None:
        """The reason why the attachment has ended; None while the topic is attached."""
        return self._ended

    async def wait_until_ended(self) -> SeqdedupeError:
        """Wait until the attachment has ended, and return the reason."""
        await self._over.wait()
        return self._ended or error("NOT_ATTACHED", "the attachment has ended")

    def close(self) -> None:
        """Release the topic."""
        self._end(error("NOT_ATTACHED", "the attachment was closed"))
        self._stream.cancel()

    def _end(self, why: SeqdedupeError) -> None:
        if self._ended is not None:
            return
        self._ended = why
        self._over.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._checks.values()]
        self._checks.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(why)
                # Mark the exception as read: perhaps no task waits for the future any more.
                future.exception()
        self._has_room.set()

    def _check_not_ended(self) -> None:
        if self._ended is not None:
            # Without this line, each raise would extend the traceback.
            raise self._ended.with_traceback(None)

    # -- messages ----------------------------------------------------------------------------------------------

    def _columns(self, ranges: Sequence[Range]) -> dict[str, bytes]:
        """Return the columns of these ranges. Register the producer names that the sidecar does not have yet first."""
        self._register(name for name in dict.fromkeys(one.producer_name for one in ranges if not one.passes))
        handles = self._handles
        columns = {
            "handles": np.array([handles.get(one.producer_name, 0) for one in ranges], "<i4").tobytes(),
            "sequence_ids": _ids([one.sequence_id for one in ranges]),
        }
        if any(one.highest_sequence_id is not None for one in ranges):
            columns["highest_sequence_ids"] = _ids(
                [one.sequence_id if one.highest_sequence_id is None else one.highest_sequence_id for one in ranges]
            )
        if any(one.passes for one in ranges):
            columns["passes"] = bytes(one.passes for one in ranges)
        return columns

    def _register(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._handles]
        # If the sidecar refused this name, the attachment would end. So the client checks the name first.
        all_encoded = [new_producer_name(name) for name in new]
        for first in range(0, len(new), REGISTER_NAMES):
            some = new[first : first + REGISTER_NAMES]
            encoded = Binary.of_all(all_encoded[first : first + REGISTER_NAMES])
            register = Register(
                first_handle=self._registered,
                producer_name_offsets=encoded.offsets.tobytes(),
                producer_names=encoded.data,
            )
            self._ask(register=register)
            self._handles.update(zip(some, itertools.count(self._registered)))
            self._registered += len(some)

    def _ask(self, **step: Any) -> None:
        self._to_send.append(AttachRequest(token=self._token, **step))
        self._news.set()

    async def _send(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._to_send:
                    request = self._to_send.popleft()
                    size = request.ByteSize()
                    while self._to_send and _goes_with(self._to_send[0], request):
                        size += self._to_send[0].ByteSize()
                        if size > FULL_MESSAGE_BYTES:
                            break
                        request.MergeFrom(self._to_send.popleft())
                    with typed_errors(self._address):
                        await self._stream.write(request)
                self._has_room.set()
        except (SeqdedupeError, asyncio.InvalidStateError):
            # The stream has ended: the reader gets the reason.
            return

    async def _receive(self) -> None:
        why = error("NOT_ATTACHED", "the sidecar ended the attachment")
        try:
            with typed_errors(self._address):
                while (data := await self._stream.read()) is not grpc.aio.EOF:
                    self._take(AttachResponse.FromString(data))
        except SeqdedupeError as e:
            why = e
        finally:
            # After any failure no answers are read, so no caller may wait for one.
            self._end(why)

    def _take(self, answer: Any) -> None:
        self.trim_position = answer.trim_position
        for checked in answer.checked:
            verdicts = [Verdict(verdict) for verdict in checked.verdicts]
            self._admitted += verdicts.count(Verdict.NOT_DUP)
            self._answer(checked.frame, verdicts)
        for refusal in answer.refusals:
            numbers = {"row": str(refusal.row), "pushed": str(refusal.pushed), "persisted": str(refusal.persisted)}
            if refusal.HasField("expected_sequence_id"):
                numbers["expected_sequence_id"] = str(refusal.expected_sequence_id)
            self._answer(
                refusal.frame, error_of_reason(refusal.reason, refusal.message, refusal.retry_delay_ms, numbers)
            )
        if answer.HasField("end"):
            raise error_of_reason(answer.end.reason, answer.end.message, answer.end.retry_delay_ms, {})
        if answer.HasField("ready") and not self._ready.done():
            self._ready.set_result(None)

    def _answer(self, frame: int, answer: list[Verdict] | SeqdedupeError) -> None:
        waiting = self._checks.pop(frame, None)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, SeqdedupeError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)


def _goes_with(step: Any, request: Any) -> bool:
    """Return whether the protobuf message can carry one more step. The sidecar executes a message's steps in the order
    of the message's fields."""
    kind = _last_step(step)
    return kind > _last_step(request) or (kind == CHECKS and len(request.checks) < MAX_CHECKS)


def _last_step(request: Any) -> int:
    number: int = request.ListFields()[-1][0].number
    return number


def _ids(values: Sequence[int]) -> bytes:
    try:
        return np.array(values, "<i8").tobytes()
    except OverflowError as e:
        raise error("INVALID_SEQUENCE_ID", "a sequence ID is above 2^63 - 1") from e


REPLAY_ROWS = 8192
"""The most entries in one message of the replay."""


class ProducerNumbers(NamedTuple):
    """Two sequence IDs of one producer: the highest ID with the verdict NOT_DUP, and the highest ID in the log. -1
    means that there is no such ID."""

    pushed: int
    persisted: int


Replay = Callable[[bytes], AsyncIterator[Entry]]
"""A function that yields every entry of the log after a position (empty: from the first), in order."""


class BrokerClient:
    """A broker's connection to its sidecar. Use the client as an async context manager, or close the client with
    `close`."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Make a client without connecting. By default `credentials` come from the environment. Raises INVALID_ADDRESS,
        INVALID_CREDENTIALS."""
        self._address = SidecarAddress.parse(address)
        self._credentials = Credentials.from_environment() if credentials is None else credentials
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which ends its attachments."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = new_channel(self._address, self._credentials)
        return self._channel

    async def attach(self, topic: str, replay: Replay, *, last_position: bytes) -> Attachment:
        """Attach a topic, replay the entries of the log that the sidecar lacks, and return when the sidecar answers
        checks.

        Call this only when all earlier writes to the topic have ended, and everything in the log is durable.
        `last_position` is the position of the log's last entry as the log itself reports it (empty: the log has no
        entry). By comparing this position with the replay, the sidecar detects a log whose last entries are lost.
        Raises REPLAY_GAP, INVALID_NAME, and an error if the sidecar cannot be reached or refuses the topic. After an
        error the topic is not attached.
        """
        stub: Any = self._connected().stream_stream(ATTACH, AttachRequest.SerializeToString)
        attachment = Attachment(stub(wait_for_ready=False), self._address)
        try:
            after = await attachment.begin(topic_name(topic))
            entries: list[Entry] = []
            async for entry in replay(after):
                entries.append(entry)
                if len(entries) == REPLAY_ROWS:
                    await attachment.replay(entries)
                    entries = []
            if entries:
                await attachment.replay(entries)
            await attachment.end_replay(last_position)
        except BaseException:
            attachment.close()
            raise
        return attachment

    async def producer(self, topic: str, producer_name: str) -> ProducerNumbers | None:
        """Return a producer's numbers in an attached topic; None if its name is unknown. Raises NOT_ATTACHED, …"""
        stub = DedupeServiceStub(self._connected())
        request = dedupe_pb2.DedupeServiceGetProducerRequest(topic=topic_name(topic), producer_name=producer_name)
        try:
            found = await call(self._address, self._connected(), stub.GetProducer, request)
        except SeqdedupeError as e:
            if e.reason == "PRODUCER_NOT_FOUND":
                return None
            raise
        return ProducerNumbers(found.pushed, found.persisted)
