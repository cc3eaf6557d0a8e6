"""A sidecar that a scenario plays: it waits for what the client must do, and says what the sidecar answers.

It judges every frame by the duties in publish.proto: its number, its epochs, its links, the order of its messages.
"""

import os
import queue
import socket
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import grpc

from seqdedupe.v1 import admin_pb2, batch_pb2, publish_pb2, read_pb2
from tests.client.fake_sidecar import Refused
from tests.client_conformance.lines import PATIENCE_SECONDS, Command, Program

INCARNATION = 5
LAST_INDEX = 99
"""Of the messages that readers may read."""
NEVER = -1
NOT_DUP, DUP, UNKNOWN = publish_pb2.VERDICT_NOT_DUP, publish_pb2.VERDICT_DUP, publish_pb2.VERDICT_UNKNOWN
NO_MESSAGE_ID = batch_pb2.MessageId(ledger_id=-1, entry_id=-1, batch_index=-1)

_POLL_SECONDS = 0.02
_THREADS = 64
_OPTIONS = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", 16 * 1024 * 1024)]
_MOST_HELD = 64
_HELD: deque[int] = deque()
"""Sockets that hold the ports of the last sidecars: the client of an earlier scenario, which may still run, must come
neither to a later sidecar nor to one of another process."""


class Name:
    """What the sidecar knows of a producer name."""

    def __init__(self) -> None:
        self.epoch = 0
        self.known: list[int] = []
        """The IDs that this session has sent or that `Open` has returned, in order."""

    def link(self, first: int) -> int:
        """What the frame that begins with this ID must state."""
        place = bisect_left(self.known, first)
        return self.known[place - 1] if place else -1

    def add(self, one: int) -> None:
        if one >= 0 and self.known[bisect_left(self.known, one) :][:1] != [one]:
            insort(self.known, one)


class Opening:
    """A call of `Open`."""

    def __init__(self, sidecar: "Scripted", request: publish_pb2.OpenRequest) -> None:
        self._sidecar = sidecar
        self.request = request
        self.came_at = time.monotonic()
        self.outcome: queue.SimpleQueue[publish_pb2.OpenResponse | Refused] = queue.SimpleQueue()

    def answer(self, persisted: int = -1, *, is_forgotten: bool = False, **columns: Any) -> None:
        """The sessions are open."""
        names = self.request.producer_names
        epochs = [self._sidecar.opened(name, persisted, is_forgotten) for name in names]
        state = {"incarnation": INCARNATION, "term": self._sidecar.term, "durable_index": self._sidecar.durable_index}
        columns = state | columns
        answer = publish_pb2.OpenResponse(
            epochs=epochs,
            persisted=[persisted] * len(names),
            persisted_indexes=[-1] * len(names),
            persisted_message_ids=[NO_MESSAGE_ID] * len(names),
            forgotten=range(len(names)) if is_forgotten else [],
            **columns,
        )
        self.outcome.put(answer)

    def refuse_names(self, reason: str) -> None:
        """No session is open, for this reason."""
        count = len(self.request.producer_names)
        refusals = [publish_pb2.OpenRefusal(index=k, reason=reason, message="no") for k in range(count)]
        answer = publish_pb2.OpenResponse(
            incarnation=INCARNATION,
            term=self._sidecar.term,
            epochs=[0] * count,
            persisted=[-1] * count,
            persisted_indexes=[-1] * count,
            persisted_message_ids=[NO_MESSAGE_ID] * count,
            refusals=refusals,
        )
        self.outcome.put(answer)

    def fail(
        self, code: grpc.StatusCode, reason: str | None = None, delay_ms: int | None = None, **numbers: str
    ) -> None:
        """The call ends with this status, reason and delay."""
        self.outcome.put(Refused(code, reason, delay_ms, **numbers))


class Stream:
    """A call of `PublishStream`."""

    def __init__(self) -> None:
        self.out: queue.SimpleQueue[publish_pb2.PublishStreamResponse | Refused | None] = queue.SimpleQueue()
        self.has_ended = False
        self.has_early_receipts = False

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        reason: str | None = None,
        delay_ms: int | None = None,
        **numbers: str,
    ) -> None:
        """The stream ends with this status, reason and delay."""
        self.has_ended = True
        self.out.put(None if code is grpc.StatusCode.OK else Refused(code, reason, delay_ms, **numbers))


class Reading:
    """A call of `ReadStream`."""

    def __init__(self, request: read_pb2.ReadStreamRequest) -> None:
        self.request = request
        self.out: queue.SimpleQueue[read_pb2.ReadStreamResponse | Refused | None] = queue.SimpleQueue()

    @property
    def first_index(self) -> int:
        """The index at which the reader wants to start."""
        start = self.request.start
        return start.after.index + 1 if start.HasField("after") else start.index

    def page(self, first_index: int, payloads: Sequence[bytes], incarnation: int = INCARNATION) -> None:
        """Messages with these payloads; the sequence IDs are the indexes."""
        next_index = first_index + len(payloads)
        batch = batch_pb2.Batch(
            producer_name_offsets=[0, 1],
            producer_names=b"p",
            epochs=[1],
            previous_sequence_ids=[first_index - 1],
            sequence_ids=range(first_index, next_index),
            payload_offsets=[0, *accumulate(map(len, payloads))],
            payloads=b"".join(payloads),
        )
        record = batch_pb2.Record(
            format_version=2,
            incarnation=incarnation,
            base_index=first_index,
            publish_time_ms=1,
            rows=len(payloads),
            batch=batch,
        )
        self.out.put(
            read_pb2.ReadStreamResponse(
                records=[record], next_index=next_index, end_index=next_index, incarnation=incarnation
            )
        )

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, *given: Any) -> None:
        """The stream ends with this status, reason and delay."""
        self.out.put(None if code is grpc.StatusCode.OK else Refused(code, *given))


class Frames:
    """Frames that wait for answers, each with its stream."""

    def __init__(self, sidecar: "Scripted", frames: list[tuple[Stream, publish_pb2.Frame]], came_at: float) -> None:
        self._sidecar = sidecar
        self._frames = frames
        self.came_at = came_at

    @property
    def frames(self) -> list[publish_pb2.Frame]:
        return [frame for _, frame in self._frames]

    @property
    def stream(self) -> Stream:
        """The stream of the last one."""
        return self._frames[-1][0]

    @property
    def ids(self) -> list[int]:
        return [one for frame in self.frames for one in frame.batch.sequence_ids]

    def answer(
        self, receipts: Iterable[publish_pb2.Receipt] = (), refusals: Iterable[publish_pb2.Refusal] = (), **columns: Any
    ) -> None:
        """Each stream has one answer, with what is for its frames."""
        columns = {"incarnation": INCARNATION, "term": self._sidecar.term} | columns
        columns["durable_index"] = self._sidecar.durable_index
        all_receipts, all_refusals = [*receipts], [*refusals]
        for stream in dict.fromkeys(stream for stream, _ in self._frames):
            numbers = {frame.number for of, frame in self._frames if of is stream}
            columns["receipts"] = [one for one in all_receipts if one.frame in numbers]
            columns["refusals"] = [one for one in all_refusals if one.frame in numbers]
            stream.out.put(publish_pb2.PublishStreamResponse(**columns))

    def store(self, dup_up_to: int = -1, *, is_early: bool = False, **columns: Any) -> None:
        """All rows are new, but for those up to an ID, which are Dup. They are durable unless the receipt is early."""
        receipts = [self._receipt(frame, dup_up_to) for frame in self.frames]
        if is_early:
            for receipt in receipts:
                receipt.durable_at = self._sidecar.next_index
        else:
            self._sidecar.durable_index = self._sidecar.next_index
        self.answer(receipts, **columns)

    def _receipt(self, frame: publish_pb2.Frame, dup_up_to: int) -> publish_pb2.Receipt:
        verdicts = [DUP if one <= dup_up_to else NOT_DUP for one in frame.batch.sequence_ids]
        verdicts = verdicts or [NOT_DUP] * (len(frame.batch.deduplication_id_offsets) - 1)
        new = verdicts.count(NOT_DUP)
        receipt = publish_pb2.Receipt(frame=frame.number, first_index=-1, verdicts=verdicts if DUP in verdicts else [])
        if new:
            receipt.first_index = self._sidecar.next_index
            receipt.first_message_id.CopyFrom(
                batch_pb2.MessageId(ledger_id=INCARNATION, entry_id=self._sidecar.next_index, batch_index=-1)
            )
            self._sidecar.next_index += new
        return receipt

    def unknown(self) -> None:
        """A copy of each row is in flight."""
        self.answer(
            publish_pb2.Receipt(frame=frame.number, first_index=-1, verdicts=[UNKNOWN] * _rows(frame))
            for frame in self.frames
        )

    def refuse(self, reason: str, delay_ms: int, name: str = "", owner_address: str = "", **columns: Any) -> None:
        """Every frame is refused for this reason; or those with a producer, who is the cause, and others are stored."""
        refused = [frame for frame in self.frames if not name or name in names_of(frame.batch)]
        refusals = [
            publish_pb2.Refusal(
                frame=frame.number,
                reason=reason,
                message="no",
                retry_delay_ms=delay_ms,
                owner_address=owner_address,
                producers=[
                    publish_pb2.ProducerRefusal(
                        producer_name=one,
                        epoch=frame.batch.epochs[place],
                        current_epoch=self._sidecar.names[one].epoch + (reason == "FENCED"),
                        sequence_id=rows_of(frame, one)[0],
                        previous_sequence_id=frame.batch.previous_sequence_ids[place],
                        pushed=-1,
                        persisted=-1,
                    )
                    for place, one in enumerate(names_of(frame.batch))
                    if name in ("", one)
                ],
            )
            for frame in refused
        ]
        others = [self._receipt(frame, -1) for frame in self.frames if frame not in refused]
        self.answer(others, refusals=refusals, **columns)


def _rows(frame: publish_pb2.Frame) -> int:
    return len(frame.batch.payload_offsets) - 1


class Scripted:
    """The sidecar. All waits end with an AssertionError as soon as the client cannot do any more what is waited for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.term = 1
        self.next_index = self.durable_index = 0
        self.names: dict[str, Name] = {}
        self.epochs = 0
        self.breaks_streams = 0
        """This many streams end at once."""
        self.opens_with: int | None = None
        """If set, resumes are answered with this persisted ID, and no scenario waits for them."""
        self.is_proxy = False
        """Whether empty answers are a proxy's, so that GetVersion has one too."""
        self._is_closed = False
        self._opened: list[Opening] = []
        self._openings: queue.SimpleQueue[Opening] = queue.SimpleQueue()
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._read: list[Reading] = []
        self._frames: queue.SimpleQueue[tuple[Stream, publish_pb2.Frame, float]] = queue.SimpleQueue()
        self._streams: list[Stream] = []
        self._numbers: set[int] = set()
        self._wrong: list[str] = []
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{held.getsockname()[1]}"
        _HELD.append(held.detach())
        if len(_HELD) > _MOST_HELD:
            os.close(_HELD.popleft())
        self._server = grpc.server(ThreadPoolExecutor(_THREADS), options=_OPTIONS)
        self._server.add_insecure_port(self.address)
        self._server.add_generic_rpc_handlers((self._publish_service(), self._read_service(), self._admin_service()))
        self._server.start()

    def shares_with(self, other: "Scripted") -> None:
        """Both have the same log: sessions, messages and numbers of frames."""
        self.names, self._numbers, self.epochs = other.names, other._numbers, 1000

    def close(self) -> None:
        """Ends; a duty that was broken fails the scenario."""
        self._is_closed = True  # a call that comes now ends too
        for stream in self._streams:
            stream.end()
        for reading in self._read:
            reading.end()
        for opening in self._opened:
            opening.fail(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()

    def is_wrong(self, what: str) -> None:
        """The scenario fails because of this."""
        self._wrong.append(what)

    def check(self) -> None:
        """Raises AssertionError if a duty was broken."""
        assert not self._wrong, self.program.said(f"a duty was broken: {self._wrong[0]}")

    @property
    def opens_seen(self) -> int:
        """The number of calls of `Open`."""
        return len(self._opened)

    # -- What a scenario waits for.

    def opening(self, *names: str) -> Opening:
        """The next call of `Open`, which must be for these names, and a resume if they were opened before."""
        opening: Opening = self._next(self._openings, f"Open of {names}")
        said = self.program.said
        request = opening.request
        assert request.topic.rpartition("/")[2] == "t", said(f"Open of the topic {request.topic}")
        assert sorted(request.producer_names) == sorted(names), said(f"Open of {request.producer_names}, not {names}")
        epochs = [self.names[name].epoch for name in request.producer_names if name in self.names]
        had = list(request.epochs)
        assert had == epochs, said(f"Open has the epochs {had}, and not {epochs} (duty 5)")
        return opening

    def reading(self) -> Reading:
        """The next call of `ReadStream`."""
        reading: Reading = self._next(self._readings, "ReadStream")
        return reading

    def take(self, ids: Sequence[int], maybe: Sequence[int] = (), name: str = "p") -> Frames:
        """The next frames, until they have all of these messages, in their order. `maybe` may be sent again too."""
        return self.take_of({name: ids}, maybe)

    def take_of(self, ids: Mapping[str, Sequence[int]], maybe: Sequence[int] = ()) -> Frames:
        """The same for several producers, whose messages may share streams and frames."""
        got: list[tuple[Stream, publish_pb2.Frame]] = []
        streams: dict[str, Stream] = {}
        left = {name: list(some) for name, some in ids.items()}
        came_at = 0.0
        while any(left.values()):
            stream, frame, at = self._next(self._frames, f"the messages {left}")
            if stream.has_ended:
                continue
            came_at = came_at or at
            got = [one for one in got if not one[0].has_ended] + [(stream, frame)]
            for name in names_of(frame.batch):
                if streams.setdefault(name, stream) is not stream:
                    streams[name], left[name] = stream, [*ids.get(name, ())]
                for one in rows_of(frame, name):
                    due = left.get(name, [])
                    if due and one == due[0]:
                        del due[0]
                    else:
                        wrong = f"message {one} of {name} was sent where {due or 'nothing'} was due (duty 4)"
                        assert one in maybe, self.program.said(wrong)
        self.check()
        return Frames(self, got, came_at)

    def take_some(self, ids: Sequence[int]) -> Frames:
        """The next frame, which must begin with the first of these messages and go on in their order."""
        stream, frame, came_at = self._next(self._frames, f"the messages {ids}")
        while stream.has_ended:
            stream, frame, came_at = self._next(self._frames, f"the messages {ids}")
        frames = Frames(self, [(stream, frame)], came_at)
        due = list(ids[: len(frames.ids)])
        assert frames.ids == due, self.program.said(f"messages {frames.ids} were sent where {due} were due (duty 4)")
        self.check()
        return frames

    def finish(self, ids: Sequence[int], dup_up_to: int = -1) -> None:
        """Stores all of these messages, as they come: a client may send one frame at a time after a break."""
        left = list(ids)
        while left:
            frames = self.take_some(left)
            frames.store(dup_up_to)
            left = left[len(frames.ids) :]

    def play(
        self, answer: Callable[[Frames], None], *commands: Command, until: Callable[[], bool] = lambda: True
    ) -> None:
        """Answers each frame so, until these commands have their answers, and `until` is true."""

        def is_done() -> bool:
            while not self._frames.empty():
                stream, frame, came_at = self._frames.get()
                if not stream.has_ended:
                    answer(Frames(self, [(stream, frame)], came_at))
            self.check()
            return until() and all(command.answer is not None for command in commands)

        self.program.until(is_done, f"answers of {[command.what for command in commands]}")

    def ids_taken(self, count: int) -> Frames:
        """The next frames, until they have this many messages of a topic of deduplication IDs."""
        got: list[tuple[Stream, publish_pb2.Frame]] = []
        while sum(_rows(frame) for _, frame in got) < count:
            stream, frame, _ = self._next(self._frames, f"{count} messages")
            if not stream.has_ended:
                got = [one for one in got if not one[0].has_ended] + [(stream, frame)]
        return Frames(self, got, 0.0)

    def fails(self, command: Command, *reasons: str) -> None:
        """The command fails with one of these reasons, and no message is sent."""
        command.is_expected_to_fail = True

        def has_failed() -> bool:
            self.nothing_came()
            return command.answer is not None

        self.program.until(has_failed, f"{command.what} fails")
        command.error(*reasons)

    def nothing_came(self) -> None:
        """Raises AssertionError if a message has come."""
        while not self._frames.empty():
            stream, frame, _ = self._frames.get()
            ids = list(frame.batch.sequence_ids)
            assert stream.has_ended, self.program.said(f"messages {ids} were sent where nothing was due")

    def _next(self, waiting: "queue.SimpleQueue[Any]", what: str) -> Any:
        ends = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return waiting.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self.check()
                self.program.check()
                hinders = waiting is self._frames and not self._openings.empty()
                assert not hinders, self.program.said(f"Open was called where there were due: {what}")
                assert time.monotonic() < ends, self.program.said(f"after {PATIENCE_SECONDS:g} seconds, not: {what}")

    # -- What the sidecar does.

    def opened(self, name: str, persisted: int, is_forgotten: bool) -> int:
        """The epoch of a session that is open from now on."""
        self.epochs += 1
        known = self.names.setdefault(name, Name())
        known.epoch = self.term << 32 | self.epochs
        if is_forgotten:
            known.known.clear()
        known.add(persisted)
        return known.epoch

    def open(self, request: publish_pb2.OpenRequest, context: Any) -> publish_pb2.OpenResponse:
        opening = Opening(self, request)
        self._opened.append(opening)
        if self._is_closed:
            opening.fail(grpc.StatusCode.UNAVAILABLE)
        if self.opens_with is None:
            self._openings.put(opening)
        else:
            if list(request.epochs) != [self.names[name].epoch for name in request.producer_names]:
                self.is_wrong("a resume without its epochs (duty 5)")
            opening.answer(self.opens_with)
        outcome = opening.outcome.get()
        return _abort(context, outcome) if isinstance(outcome, Refused) else outcome

    def _publish_stream(
        self, requests: Iterator[publish_pb2.PublishStreamRequest], context: Any
    ) -> Iterator[publish_pb2.PublishStreamResponse]:
        stream = Stream()
        self._streams.append(stream)
        context.send_initial_metadata(())
        if any(key == "seqdedupe-greeting" for key, _ in context.invocation_metadata()):
            yield publish_pb2.PublishStreamResponse()
        if self.breaks_streams or self._is_closed:
            self.breaks_streams -= 1
            stream.end()
            return
        threading.Thread(target=self._receive, args=(stream, requests), daemon=True).start()
        while (answer := stream.out.get()) is not None:
            if isinstance(answer, Refused):
                _abort(context, answer)
            yield answer

    def _read_stream(self, request: read_pb2.ReadStreamRequest, context: Any) -> Iterator[read_pb2.ReadStreamResponse]:
        reading = Reading(request)
        self._read.append(reading)
        self._readings.put(reading)
        if self._is_closed:
            return
        while (answer := reading.out.get()) is not None:
            if isinstance(answer, Refused):
                _abort(context, answer)
            yield answer

    def _get_last_message_id(
        self, request: read_pb2.GetLastMessageIdRequest, context: Any
    ) -> read_pb2.GetLastMessageIdResponse:
        last = batch_pb2.MessageId(ledger_id=INCARNATION, entry_id=LAST_INDEX, batch_index=-1)
        position = batch_pb2.Position(incarnation=INCARNATION, message_id=last, index=LAST_INDEX)
        return read_pb2.GetLastMessageIdResponse(last=position, first_index=0)

    def _receive(self, stream: Stream, requests: Iterator[publish_pb2.PublishStreamRequest]) -> None:
        is_first = True
        try:
            for request in requests:
                if is_first == (request.topic == ""):
                    self.is_wrong("the topic is in the first message of a stream, and in no other")
                stream.has_early_receipts |= request.early_receipts
                is_first = False
                for frame in request.frames:
                    if not stream.has_ended:
                        self._judge(frame)
                        self._frames.put((stream, frame, time.monotonic()))
        except Exception:  # noqa: BLE001, the call has ended, in whatever way
            pass
        stream.end()

    def _judge(self, frame: publish_pb2.Frame) -> None:
        """Notes what is against the duties."""
        if frame.number in self._numbers:
            self.is_wrong(f"the frame number {frame.number} is used twice (duty 2)")
        self._numbers.add(frame.number)
        batch = frame.batch
        for place, name in enumerate(names_of(batch)):
            ids = rows_of(frame, name)
            known = self.names.get(name)
            if known is None or batch.epochs[place] != known.epoch:
                self.is_wrong(f"a frame of {name} has the epoch {batch.epochs[place]}, which is not the last one")
                continue
            link, due = batch.previous_sequence_ids[place], known.link(ids[0])
            if link != due:
                self.is_wrong(f"the batch of {name} with {ids} has the link {link} instead of {due} (duty 7)")
            if any(later <= earlier for earlier, later in pairwise(ids)):
                self.is_wrong(f"the IDs {ids} do not ascend")
            for one in ids:
                known.add(one)

    def _get_version(self, request: admin_pb2.GetVersionRequest, context: Any) -> admin_pb2.GetVersionResponse:
        return admin_pb2.GetVersionResponse(version="" if self.is_proxy else "scripted")

    def _get_topic(self, request: admin_pb2.GetTopicRequest, context: Any) -> admin_pb2.GetTopicResponse:
        return admin_pb2.GetTopicResponse(topic=admin_pb2.Topic(name=request.topic))

    def _publish_service(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Open": grpc.unary_unary_rpc_method_handler(
                self.open, publish_pb2.OpenRequest.FromString, publish_pb2.OpenResponse.SerializeToString
            ),
            "PublishStream": grpc.stream_stream_rpc_method_handler(
                self._publish_stream,
                publish_pb2.PublishStreamRequest.FromString,
                publish_pb2.PublishStreamResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler("seqdedupe.v1.PublishService", handlers)

    def _read_service(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ReadStream": grpc.unary_stream_rpc_method_handler(
                self._read_stream,
                read_pb2.ReadStreamRequest.FromString,
                read_pb2.ReadStreamResponse.SerializeToString,
            ),
            "GetLastMessageId": grpc.unary_unary_rpc_method_handler(
                self._get_last_message_id,
                read_pb2.GetLastMessageIdRequest.FromString,
                read_pb2.GetLastMessageIdResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler("seqdedupe.v1.ReadService", handlers)

    def _admin_service(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetVersion": grpc.unary_unary_rpc_method_handler(
                self._get_version,
                admin_pb2.GetVersionRequest.FromString,
                admin_pb2.GetVersionResponse.SerializeToString,
            ),
            "GetTopic": grpc.unary_unary_rpc_method_handler(
                self._get_topic, admin_pb2.GetTopicRequest.FromString, admin_pb2.GetTopicResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("seqdedupe.v1.AdminService", handlers)


def names_of(batch: batch_pb2.Batch) -> list[str]:
    """The producers of a batch."""
    return [batch.producer_names[x:y].decode() for x, y in pairwise(batch.producer_name_offsets)]


def rows_of(frame: publish_pb2.Frame, name: str) -> list[int]:
    """The sequence IDs of one producer."""
    batch = frame.batch
    names = names_of(batch)
    indexes = batch.producer_indexes or [0] * len(batch.sequence_ids)
    return [one for one, k in zip(batch.sequence_ids, indexes, strict=True) if names[k] == name]


def _abort(context: Any, why: Refused) -> NoReturn:
    context.set_trailing_metadata(why.trailing_metadata())
    context.abort(why.code, why.message)
    raise AssertionError("unreachable")
