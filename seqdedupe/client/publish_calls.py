"""The client's calls of `PublishService`: streams that send frames and receive answers, and calls that open sessions.

Begin with `exchange`, which runs a stream. `Openings` starts and resumes sessions.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from seqdedupe import wire
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, error_of_reason, typed_errors
from seqdedupe.client.pending import InFlightBatch, ReceiptColumns, Verdict
from seqdedupe.errors import NEVER, SeqdedupeError, error
from seqdedupe.message_id import MessageId, Position
from seqdedupe.v1 import publish_pb2

_NO_MESSAGE_ID = MessageId(-1, -1, -1)

# Plain integers: numpy takes five times as long with a member of an enumeration.
_STORED, _LAST_VERDICT = int(Verdict.NOT_DUP), int(max(Verdict))


def encode_frames(frames: Sequence[InFlightBatch]) -> bytes:
    """Return an encoded PublishStreamRequest that contains these frames."""
    message: list[bytes | memoryview] = []
    for frame in frames:
        message += wire.frame_parts(frame.number, frame.batch.encoded_parts())
    return b"".join(message)


class StreamAnswer(NamedTuple):
    """A PublishStreamResponse."""

    receipts: list[tuple[int, ReceiptColumns]]
    """The receipts, each with the number of its frame."""
    refusals: Sequence[Any]
    incarnation: int
    term: int
    durable_index: int


def decode_answer(raw: bytes, rows_of: Callable[[int], int | None]) -> StreamAnswer:
    """Decode an answer. `rows_of` returns the number of rows of a frame in flight. The result may omit receipts of
    other frames.

    Raises DecodeError if the answer cannot come from a sidecar. An answer from a sidecar is empty (a greeting), or
    contains the topic's incarnation and receipts that fit the rows of their frames.
    """
    if (usual := _usual_answer(raw)) is not None and usual.incarnation:
        return usual
    answer = wire.PublishStreamResponse.FromString(raw)
    if raw and not answer.incarnation:
        raise DecodeError("there is no incarnation in it")
    out = _of_frames_out(answer, rows_of)
    if not all(_is_plain(receipt, rows) for receipt, rows in out):
        answer = wire.PublishStreamResponse.FromString(_canonical(raw))
        out = _of_frames_out(answer, rows_of)
        for receipt, rows in out:
            if not _is_plain(receipt, rows):
                raise _misfit(rows)
    receipts = [(receipt.frame, _fitting(receipt, rows)) for receipt, rows in out]
    return StreamAnswer(receipts, answer.refusals, answer.incarnation, answer.term, answer.durable_index)


def _usual_answer(raw: bytes) -> StreamAnswer | None:
    """Decode an answer in its usual form, which has a fixed width, much faster than the general decoder. Return None
    for any other answer."""
    end = len(raw) - wire.STATE.size
    if end < 0 or end % wire.ALL_NEW.size:
        return None
    a, incarnation, b, term, c, durable_index = wire.STATE.unpack_from(raw, end)
    if (a, b, c) != wire.STATE_TAGS:
        return None
    receipts = []
    for at in range(0, end, wire.ALL_NEW.size):
        a, b, c, frame, d, first_index, e, f, g, ledger_id, h, entry_id, i, j = wire.ALL_NEW.unpack_from(raw, at)
        if (a, b, c, d, e, f, g, h, i, j) != wire.ALL_NEW_TAGS or first_index < 0:
            return None
        receipts.append((frame, ReceiptColumns.all_stored(first_index, MessageId(ledger_id, entry_id))))
    return StreamAnswer(receipts, (), incarnation, term, durable_index)


def _of_frames_out(answer: Any, rows_of: Callable[[int], int | None]) -> list[tuple[Any, int]]:
    """Return the receipts of frames that are in flight, each with the number of rows of its frame."""
    return [(receipt, rows) for receipt in answer.receipts if (rows := rows_of(receipt.frame)) is not None]


def _is_plain(receipt: Any, rows: int) -> bool:
    """Return whether all columns are complete when they are read as bytes. A legal but unusual encoding would hide a
    part of a column."""
    known, runs = len(receipt.known_rows) // 4, len(receipt.run_rows) // 4
    return (
        len(receipt.verdicts) in (0, rows)
        and len(receipt.known_rows) == 4 * known
        and len(receipt.run_rows) == 4 * runs
        and len(receipt.known_indexes) == len(receipt.known_ledger_ids) == len(receipt.known_entry_ids) == 8 * known
        and len(receipt.known_batch_indexes) in (0, 4 * known)
        and len(receipt.run_ledger_ids) == len(receipt.run_entry_ids) == 8 * runs
        and len(receipt.run_batch_indexes) == 4 * runs
        and len(receipt.imported_rows) % 4 == 0
        and not len(UnknownFieldSet(receipt))
    )


def _fitting(receipt: Any, rows: int) -> ReceiptColumns:
    """Return the columns of a plain receipt. Raises DecodeError if they do not fit a frame of `rows` rows."""
    columns = receipt_columns(receipt)
    verdicts, runs = columns.verdicts, columns.run_rows
    stored = int(np.count_nonzero(verdicts == _STORED)) if len(verdicts) else rows
    if stored and columns.first_index < 0:
        raise _misfit(rows)
    if columns.is_one_run:
        return columns
    if (
        (len(verdicts) and not _STORED <= verdicts.min() <= verdicts.max() <= _LAST_VERDICT)
        or (len(columns.known_rows) and columns.known_rows.max() >= rows)
        or (len(columns.imported_rows) and columns.imported_rows.max() >= rows)
        or (len(runs) and runs.sum(dtype=np.int64) != stored)
    ):
        raise _misfit(rows)
    return columns


def _misfit(rows: int) -> DecodeError:
    return DecodeError(f"a receipt does not fit its frame, which has {rows} rows")


def _canonical(raw: bytes) -> bytes:
    answer = publish_pb2.PublishStreamResponse.FromString(raw)
    answer.DiscardUnknownFields()
    return answer.SerializeToString()


def receipt_columns(receipt: Any) -> ReceiptColumns:
    """Return the columns of a receipt in the alias schema."""
    first = _NO_MESSAGE_ID
    if receipt.HasField("first_message_id"):
        first = MessageId.from_proto(receipt.first_message_id)
    if not (receipt.verdicts or receipt.known_rows or receipt.run_rows):
        return ReceiptColumns.all_stored(receipt.first_index, first, receipt.durable_at)
    return ReceiptColumns(
        np.frombuffer(receipt.verdicts, np.uint8),
        receipt.first_index,
        first,
        np.frombuffer(receipt.known_rows, "<u4"),
        np.frombuffer(receipt.known_indexes, "<i8"),
        np.frombuffer(receipt.known_ledger_ids, "<i8"),
        np.frombuffer(receipt.known_entry_ids, "<i8"),
        np.frombuffer(receipt.known_batch_indexes, "<i4"),
        np.frombuffer(receipt.run_rows, "<u4"),
        np.frombuffer(receipt.run_ledger_ids, "<i8"),
        np.frombuffer(receipt.run_entry_ids, "<i8"),
        np.frombuffer(receipt.run_batch_indexes, "<i4"),
        receipt.durable_at,
        np.frombuffer(receipt.imported_rows, "<u4"),
    )


# -- A running publish stream: frames out and answers in, until one side ends it.

Call = grpc.aio.StreamStreamCall[bytes, bytes]

_PUBLISH_STREAM = "/seqdedupe.v1.PublishService/PublishStream"
_OPEN = "/seqdedupe.v1.PublishService/Open"

_GREETED = ((wire.GREETING, "1"),)
"""The metadata that asks for a greeting. Some proxies, such as nginx with TLS, hold headers back until a message
follows. So the sidecar sends a greeting, an empty message, when it accepts a stream."""


def publish_call(channel: grpc.aio.Channel) -> Call:
    """Begin a publish stream without sending a message yet."""
    return channel.stream_stream(_PUBLISH_STREAM)(metadata=_GREETED)


async def exchange(
    call: Call,
    address: SidecarAddress,
    topic: str,
    *,
    frames: Callable[[], Awaitable[Sequence[InFlightBatch]]],
    rows_of: Callable[[int], int | None],
    take: Callable[[StreamAnswer], None],
    watch: Callable[[], Coroutine[Any, Any, None]],
    early_receipts: bool = False,
) -> None:
    """Run a publish stream: send the frames that `frames` returns, pass each answer to `take`, and run `watch` at the
    same time, until one of the three raises an error. With `early_receipts`, receipts may arrive before their messages
    are durable. `rows_of`: see `decode_answer`.

    Raises the errors of `frames`, `take` and `watch`, and the error with which the stream ends. Raises UNREACHABLE if
    the stream ends without an error.
    """

    async def write() -> None:
        with typed_errors(address):
            try:
                first = publish_pb2.PublishStreamRequest(topic=topic, early_receipts=early_receipts)
                await call.write(first.SerializeToString())
                while True:
                    await call.write(encode_frames(await frames()))
            except asyncio.InvalidStateError:
                # The call has ended: the task that reads the answers reports the reason.
                await asyncio.Event().wait()

    async def read() -> None:
        with typed_errors(address):
            while True:
                raw = await call.read()
                if not isinstance(raw, bytes):  # grpc.aio.EOF
                    raise error("UNREACHABLE", f"the sidecar at {address} ended the stream")
                take(decode_answer(raw, rows_of))

    reading = asyncio.create_task(read())
    others = [asyncio.create_task(work) for work in (write(), watch())]
    try:
        done, _ = await asyncio.wait([reading, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in others:
            task.cancel()
        call.cancel()
        # Wait until gRPC has reported the cancellation to the reading task. Afterwards the call does not report
        # anything to an event loop that may be closed by then.
        await asyncio.gather(reading, *others, return_exceptions=True)


# -- The opening of sessions. Names that come during a call go together in the next call.

MAX_NEW_NAMES = 64
"""The maximum number of new names in one call. With more names, the sidecar does not look up the positions of their
last messages."""

MAX_RESUMED_NAMES = 2_048
"""The maximum number of resumed names in one call. Even with the longest names the request stays below the limit of 1
MiB."""


class OpenedSession(NamedTuple):
    """The answer of `Open` for one name."""

    incarnation: int
    term: int
    epoch: int
    persisted: int
    position: Position | None
    """The position of the message with the ID `persisted`. None if the position is unknown, or if there is no
    message."""
    is_forgotten: bool
    durable_index: int | None
    """The topic's log is durable below this index. None: a sidecar of an earlier version has not sent the index."""


class _Waiting:
    def __init__(self, name: str, epoch: int | None, answer: asyncio.Future[OpenedSession]) -> None:
        self.name = name
        self.epoch = epoch
        self.answer = answer
        self.goes_alone = False


class Openings:
    """Starts and resumes the sessions of one topic at one sidecar."""

    def __init__(self, channel: grpc.aio.Channel, address: SidecarAddress, topic: str) -> None:
        self._channel = channel
        self._address = address
        self._topic = topic
        self.term = 0
        """The highest term in an answer."""
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def open(self, name: str, epoch: int | None) -> OpenedSession:
        """Start a session of this producer name, or resume the session with this epoch. Raises the reason of a
        refusal."""
        waiting = _Waiting(name, epoch, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._open_all())
        return await waiting.answer

    async def close(self) -> None:
        """Cancel the call in progress. No caller waits for this call any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _open_all(self) -> None:
        try:
            while some := self._take_some():
                try:
                    answers = await self._call(some)
                except SeqdedupeError as e:
                    if e.reason == "INVALID_NAME" and len(some) > 1:
                        # Only one name is invalid. Open each name in a separate call, so that the valid names get their
                        # answers.
                        for one in some:
                            one.goes_alone = True
                        self._waiting.extendleft(reversed(some))
                        continue
                    answers = [e] * len(some)
                except Exception as e:  # noqa: BLE001 (callers must get any failure, or they would wait forever)
                    answers = [e] * len(some)
                for one, answer in zip(some, answers, strict=True):
                    if one.answer.done():  # the waiter was cancelled
                        continue
                    if isinstance(answer, OpenedSession):
                        one.answer.set_result(answer)
                    else:
                        one.answer.set_exception(answer)
                        # Mark the exception as read: the waiter may be cancelled before it reads the exception.
                        one.answer.exception()
        finally:
            self._task = None

    def _take_some(self) -> list[_Waiting]:
        """Return the next names that can share one call. One call contains only new or only resumed sessions, and no
        name twice.

        Names whose waiter was cancelled are skipped: opening such a name would take the name from its current owner.
        """
        some: dict[str, _Waiting] = {}
        is_new, most = False, MAX_RESUMED_NAMES
        while self._waiting and len(some) < most:
            one = self._waiting[0]
            if not one.answer.done():
                if not some:
                    is_new = one.epoch is None
                    most = 1 if one.goes_alone else MAX_NEW_NAMES if is_new else MAX_RESUMED_NAMES
                elif (one.epoch is None) != is_new or one.name in some or one.goes_alone:
                    break
                some[one.name] = one
            self._waiting.popleft()
        return list(some.values())

    async def _call(self, some: list[_Waiting]) -> list[OpenedSession | Exception]:
        """Return the answers, in the order of the names."""
        names, epochs = [one.name for one in some], [one.epoch for one in some if one.epoch is not None]
        answer = await open_sessions(self._channel, self._address, self._topic, names, epochs)
        self.term = max(self.term, answer.term)
        answers: list[OpenedSession | Exception] = [_opened(answer, place) for place in range(len(some))]
        for refusal in answer.refusals:
            numbers = {"producer_name": names[refusal.index], "current_epoch": str(refusal.current_epoch)}
            answers[refusal.index] = error_of_reason(refusal.reason, refusal.message, NEVER, numbers)
        return answers


async def open_sessions(
    channel: grpc.aio.Channel, address: SidecarAddress, topic: str, names: list[str], epochs: list[int]
) -> publish_pb2.OpenResponse:
    """Start sessions of these producer names, or resume the sessions with these epochs. Raises the error of the call,
    and NOT_A_SIDECAR if a sidecar cannot have sent the answer."""
    method = channel.unary_unary(
        _OPEN,
        request_serializer=publish_pb2.OpenRequest.SerializeToString,
        response_deserializer=publish_pb2.OpenResponse.FromString,
    )
    request = publish_pb2.OpenRequest(topic=topic, producer_names=names, epochs=epochs)
    with typed_errors(address):
        answer: publish_pb2.OpenResponse | None = await method(request, timeout=CALL_TIMEOUT_SECONDS)
        if answer is None:
            raise DecodeError("it cannot be decoded")
        columns = answer.epochs, answer.persisted, answer.persisted_indexes, answer.persisted_message_ids
        has_all = all(len(column) == len(names) for column in columns)
        if not answer.incarnation or not has_all or any(refusal.index >= len(names) for refusal in answer.refusals):
            raise DecodeError(f"it does not open {len(names)} sessions")
        return answer


def _opened(answer: publish_pb2.OpenResponse, place: int) -> OpenedSession:
    position = None
    if answer.persisted_indexes[place] >= 0:
        message_id = MessageId.from_proto(answer.persisted_message_ids[place])
        position = Position(answer.incarnation, message_id, answer.persisted_indexes[place])
    return OpenedSession(
        answer.incarnation,
        answer.term,
        answer.epochs[place],
        answer.persisted[place],
        position,
        place in answer.forgotten,
        answer.durable_index if answer.HasField("durable_index") else None,
    )
