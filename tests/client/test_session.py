"""What the client makes of answers that a sidecar gives seldom, or never: the contract is the law, not one server."""

import asyncio
import itertools
import struct
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker_sidecar.server import MAX_REQUEST_BYTES
from seqdedupe.batch import Binary, single_producer
from seqdedupe.client import (
    AccessDeniedError,
    Client,
    DamagedError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    MessageId,
    NotFoundError,
    OutcomeUnknownError,
    Position,
    PositionError,
    ProducerConfig,
    SeqdedupeError,
    UnavailableError,
    Verdict,
    route,
)
from seqdedupe.client import reader as reading
from seqdedupe.client.builder import BATCH_OVERHEAD_BYTES, ROW_OVERHEAD_BYTES, _id_column
from seqdedupe.client.stream import FULL_MESSAGE_BYTES
from seqdedupe.errors import NEVER, ConfigurationError
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import batch_pb2, publish_pb2, read_pb2
from tests.client.fake_sidecar import INCARNATION, FakeSidecar, Refused, fake_sidecar
from tests.client.helpers import until
from tests.client.proxy import Proxy
from tests.listener import Listener

Frame = publish_pb2.Frame
Response = publish_pb2.PublishStreamResponse

ONE_BY_ONE = ProducerConfig(max_batch_rows=1)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSidecar]:
    async with fake_sidecar() as fake:
        yield fake


def sent_ids(fake: FakeSidecar) -> list[int]:
    return [sequence_id for frame in fake.frames for sequence_id in frame.batch.sequence_ids]


async def test_frames_are_what_the_contract_asks_for(fake: FakeSidecar) -> None:
    fake.on_open = lambda _: fake.opened(epoch=4711, persisted=9)
    async with Client(fake.address) as client, client.producer("t", "p", ONE_BY_ONE) as producer:
        for _ in range(3):
            await producer.send(b"x", key=b"k")
    assert fake.opens[0].topic == "persistent://public/default/t"
    assert list(fake.opens[0].producer_names) == ["p"]
    assert not fake.opens[0].epochs
    first = publish_pb2.PublishStreamRequest(topic="persistent://public/default/t", early_receipts=True)
    assert fake.messages[0] == first
    assert len({frame.number for frame in fake.frames} | {0}) == 4
    assert {message.topic for message in fake.messages[1:]} == {""}
    assert [list(frame.batch.epochs) for frame in fake.frames] == [[4711]] * 3
    assert [list(frame.batch.previous_sequence_ids) for frame in fake.frames] == [[9], [10], [11]]
    assert sent_ids(fake) == [10, 11, 12]


async def test_what_is_ready_goes_out_together_up_to_a_size(fake: FakeSidecar) -> None:
    """All is refused when it is there: what is sent then is ready at the same time."""
    batches, payload = 200, b"x" * 2_000

    def on_frame(frame: Frame) -> list[Response]:
        if len(fake.frames) > batches:
            return [fake.stored(frame)]
        if len(fake.frames) < batches:
            return []
        return [fake.refusal(one, "PREDECESSOR_MISSING", 0) for one in fake.frames]

    fake.on_frame = on_frame
    config = ProducerConfig(max_batch_rows=1, max_in_flight_batches=batches)
    async with Client(fake.address) as client, client.producer("t", "p", config) as producer:
        for _ in range(batches):
            await producer.send(payload)
    assert sent_ids(fake)[-batches:] == list(range(batches))
    whole = FULL_MESSAGE_BYTES // (len(payload) + BATCH_OVERHEAD_BYTES + ROW_OVERHEAD_BYTES) + 1
    assert [len(message.frames) for message in fake.messages[-4:]] == [whole, whole, whole, batches - 3 * whole]


def test_the_largest_message_is_below_the_limit_of_the_sidecar() -> None:
    assert FULL_MESSAGE_BYTES + MAX_BATCH_BYTES < MAX_REQUEST_BYTES - 1024 * 1024


async def test_a_resume_names_its_epoch_and_uses_the_new_one(fake: FakeSidecar) -> None:
    epochs = itertools.count(100)
    fake.on_open = lambda _: fake.opened(epoch=next(epochs))
    breaks = iter([True, True, False])

    def on_frame(frame: Frame) -> list[Response]:
        if next(breaks, False):
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        return [fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        await (await producer.send(b""))
    assert [list(request.epochs) for request in fake.opens] == [[], [100], [101]]
    assert [list(frame.batch.epochs) for frame in fake.frames] == [[100], [101], [102]]


async def test_a_stream_that_was_ended_for_being_idle_is_resumed_when_there_is_something_to_send(
    fake: FakeSidecar,
) -> None:
    """Were it begun again at once, it would take the place of another idle one, and so on for ever."""
    fake.idle_streams = 1
    epochs = itertools.count(100)
    fake.on_open = lambda _: fake.opened(next(epochs))
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        await fake.was_idle.wait()
        await asyncio.sleep(0.3)
        assert [list(request.epochs) for request in fake.opens] == [[]]
        assert (await (await producer.send(b""))).verdict is Verdict.NOT_DUP
    assert [list(request.epochs) for request in fake.opens] == [[], [100]]


async def test_a_stream_that_ends_is_begun_again(fake: FakeSidecar) -> None:
    fake.ends_streams = 1
    ends = iter(
        [Refused(code) for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)]
    )

    def on_frame(frame: Frame) -> list[Response]:
        end = next(ends, None)
        if end is not None:
            raise end
        return [fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        assert (await (await producer.send(b""))).verdict is Verdict.NOT_DUP
        assert producer.counters.connections == 5


@pytest.mark.parametrize("delay_ms", [2_000, 0])
async def test_the_delay_that_a_refusal_asks_for_is_kept(fake: FakeSidecar, delay_ms: int) -> None:
    times: list[float] = []

    def on_frame(frame: Frame) -> list[Response]:
        times.append(asyncio.get_running_loop().time())
        return [fake.refusal(frame, "LOG_REFUSED", delay_ms) if len(times) == 1 else fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        await (await producer.send(b""))
    waited_ms = (times[1] - times[0]) * 1000
    assert waited_ms >= 1_995 if delay_ms else waited_ms < 1_995


async def test_the_delay_that_open_asks_for_is_kept(fake: FakeSidecar) -> None:
    times: list[float] = []

    def on_open(_: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 3:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 200)
        return fake.opened()

    fake.on_open = on_open
    async with Client(fake.address) as client, client.producer("t", "p"):
        assert all(later - earlier >= 0.195 for earlier, later in itertools.pairwise(times))


async def test_unknown_is_sent_again_until_it_ends(fake: FakeSidecar) -> None:
    unknowns = iter(range(4))

    def on_frame(frame: Frame) -> list[Response]:
        if next(unknowns, None) is None:
            return [fake.stored(frame)]
        return [fake.answer(receipts=[{"frame": frame.number, "verdicts": [3], "first_index": -1}])]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        assert (await (await producer.send(b""))).verdict is Verdict.NOT_DUP
        assert (producer.counters.unknown, producer.counters.not_dup) == (4, 1)


async def test_what_is_refused_for_its_content_ends_the_producer_after_what_was_before(fake: FakeSidecar) -> None:
    held: list[Frame] = []

    def on_frame(frame: Frame) -> Iterable[Response]:
        held.append(frame)
        if len(held) == 3:
            yield fake.refusal(held[1], "INVALID_BATCH", NEVER)
            yield fake.stored(held[0])

    fake.on_frame = on_frame
    async with Client(fake.address) as client:
        producer = client.producer("t", "p", ONE_BY_ONE)
        await producer.open()
        receipts = [await producer.send(b"") for _ in range(3)]
        assert (await receipts[0]).verdict is Verdict.NOT_DUP
        for receipt in receipts[1:]:
            with pytest.raises(InvalidRequestError):
                await receipt
        with pytest.raises(InvalidRequestError) as caught:
            await producer.send(b"")
        assert caught.value.reason == "INVALID_BATCH"
        with pytest.raises(InvalidRequestError):
            await producer.close()
    assert len(fake.opens) == 1


async def test_answers_of_a_lower_term_are_ignored(fake: FakeSidecar) -> None:
    """Receipts and refusals: what they were for is sent again, and answered."""
    fake.term = 7
    answered: set[int] = set()

    def on_frame(frame: Frame) -> list[Response]:
        sequence_id = frame.batch.sequence_ids[0]
        if sequence_id in answered:
            return [fake.stored(frame)]
        answered.add(sequence_id)
        if sequence_id == 0:
            receipt = publish_pb2.Receipt(frame=frame.number, first_index=666)
            return [fake.answer(receipts=[receipt], term=6)]
        refusal = publish_pb2.Refusal(frame=frame.number, reason="FENCED", message="", retry_delay_ms=NEVER)
        return [fake.answer(refusals=[refusal], term=6)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p", ONE_BY_ONE) as producer:
        assert [(await (await producer.send(b""))).index for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("of_open", [True, False])
async def test_a_term_that_is_none_does_not_make_a_producer_wait_for_ever(fake: FakeSidecar, of_open: bool) -> None:
    """As after a bit that was changed on the way: all later answers, and the next Open, have a lower one."""
    wrong = 1 << 40

    def on_frame(frame: Frame) -> list[Response]:
        stored = fake.stored(frame)
        if not of_open and len(fake.frames) == 1:
            stored.term = wrong
        return [stored]

    fake.on_frame = on_frame
    fake.on_open = lambda _: fake.opened(term=wrong if of_open and len(fake.opens) == 1 else fake.term)
    async with Client(fake.address) as client:
        producer = client.producer("t", "p", ProducerConfig(delivery_timeout_seconds=None))
        await producer.open()
        if not of_open:
            await (await producer.send(b""))
        receipt = await producer.send(b"")
        with pytest.raises(DataLossError, match=f"term 1 \\({wrong} before\\)"):
            await receipt
        await producer.abort()
    assert len(fake.opens) == 2


@pytest.mark.parametrize(
    "columns",
    [
        {"verdicts": [1, 1, 1]},
        {"verdicts": [1, 9]},
        {"verdicts": [0, 1]},
        {"first_index": -1},
        {"verdicts": [1, 3], "first_index": -1},
        {"verdicts": [2, 2], "known_rows": [0, 7], "known_indexes": [0, 0], "known_ledger_ids": [0, 0],
         "known_entry_ids": [0, 0]},
        {"verdicts": [2, 2], "known_rows": [0], "known_indexes": [0], "known_ledger_ids": [0, 0],
         "known_entry_ids": [0]},
        {"verdicts": [2, 2], "imported_rows": [2]},
        {"run_rows": [1], "run_ledger_ids": [1], "run_entry_ids": [1], "run_batch_indexes": [1]},
    ],
)  # fmt: skip
async def test_a_receipt_that_does_not_fit_its_frame_breaks_the_connection(
    fake: FakeSidecar, columns: dict[str, list[int]]
) -> None:
    def on_frame(frame: Frame) -> list[Response]:
        if len(fake.frames) > 1:
            return [fake.stored(frame)]
        return [fake.answer(receipts=[{"frame": frame.number, "first_index": 0} | columns])]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        result = await (await producer.send_batch([b"", b""]))
        assert result.indexes.tolist() == [0, 1]
    assert len(fake.opens) == 2


@pytest.mark.parametrize(
    ("resumed", "kind"),
    [
        ({"persisted": 1}, None),
        ({"persisted": 0}, DataLossError),
        ({"persisted": 3}, FencedError),
        ({"persisted": 1, "term": 0}, DataLossError),
        ({"persisted": 1, "incarnation": INCARNATION + 1}, DataLossError),
        (Refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_EPOCH"), DataLossError),
        (Refused(grpc.StatusCode.FAILED_PRECONDITION, "FENCED"), FencedError),
        (Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"), DataLossError),
    ],
)
async def test_a_resume_that_cannot_be_right_ends_the_producer(
    fake: FakeSidecar, resumed: dict[str, int] | Refused, kind: type[SeqdedupeError] | None
) -> None:
    def on_open(request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        if not request.epochs:
            return fake.opened()
        if isinstance(resumed, Refused):
            raise resumed
        return fake.opened(**resumed)

    def on_frame(frame: Frame) -> list[Response]:
        if frame.batch.sequence_ids[0] == 2 and len(fake.opens) == 1:
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        return [fake.stored(frame)]

    fake.on_open, fake.on_frame = on_open, on_frame
    async with Client(fake.address) as client:
        producer = client.producer("t", "p", ONE_BY_ONE)
        await producer.open()
        for _ in range(2):
            await (await producer.send(b""))
        receipt = await producer.send(b"")
        if kind is None:
            assert (await receipt).verdict is Verdict.NOT_DUP
        else:
            with pytest.raises(kind):
                await receipt
        await producer.abort()


@pytest.mark.parametrize("addresses", [2, 1])
async def test_a_stream_that_was_refused_before_the_topic_came_is_begun_again(
    fake: FakeSidecar, addresses: int
) -> None:
    """A topic may come to a sidecar between what it says to the stream and what it says to the `Open`. The control: the
    only sidecar that there is does not say so of a topic that it has."""
    refused = 0

    def on_frame(frame: Frame) -> list[Response]:
        nonlocal refused
        if len(fake.opens) == 2 and not refused:
            refused += 1
            raise Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
        if len(fake.opens) == 1 and frame.batch.sequence_ids[0] == 1:
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        return [fake.stored(frame)]

    def not_its_own(_: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "NOT_OWNER", 0)

    fake.on_frame = on_frame
    fake.on_open = lambda request: fake.opened(persisted=0 if request.epochs else -1)
    async with fake_sidecar() as other:
        other.on_open = not_its_own
        where = ",".join([fake.address, other.address][:addresses])
        async with Client(where) as client:
            producer = client.producer("t", "p", ONE_BY_ONE)
            await producer.open()
            await (await producer.send(b""))
            receipt = await producer.send(b"")
            if addresses == 2:
                assert (await receipt).verdict is Verdict.NOT_DUP
            else:
                with pytest.raises(NotFoundError):
                    await receipt
            await producer.abort()
    assert refused == 1


def varint_field(number: int, value: int) -> bytes:
    return bytes((number << 3, value))


def message_field(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2, len(data))) + data


def fixed64_field(number: int, value: int) -> bytes:
    return bytes((number << 3 | 1,)) + struct.pack("<q", value)


@pytest.mark.parametrize("form", ["unpacked", "split", "unpacked and none new", "with a field of the future"])
async def test_legal_but_unusual_encodings_of_receipts_are_understood(fake: FakeSidecar, form: str) -> None:
    """Read carelessly, unpacked verdicts look like none at all: as if every row were new."""

    def on_frame(frame: Frame) -> list[bytes]:
        number = bytes((1 << 3 | 1,)) + struct.pack("<Q", frame.number)
        dups = [1, 2, 2] if form != "unpacked and none new" else [2, 2, 2]
        if form == "split":
            verdicts = message_field(2, bytes(dups[:1])) + message_field(2, bytes(dups[1:]))
        elif form == "with a field of the future":
            verdicts = message_field(2, bytes(dups)) + varint_field(15, 1)
        else:
            verdicts = b"".join(varint_field(2, verdict) for verdict in dups)
        known = b"".join(
            (
                bytes((5 << 3 | 5,)) + struct.pack("<I", 2),
                fixed64_field(6, 40),
                fixed64_field(7, 41),
                fixed64_field(8, 42),
            )
        )
        receipt = number + verdicts + fixed64_field(3, 30 if dups[0] == 1 else -1) + known
        return [message_field(1, receipt) + fixed64_field(3, INCARNATION) + fixed64_field(4, 1)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p") as producer:
        result = await (await producer.send_batch([b"", b"", b""]))
    new = form != "unpacked and none new"
    assert [result[row].verdict for row in range(3)] == [1 if new else 2, 2, 2]
    assert result.indexes.tolist() == [30 if new else -1, -1, 40]
    assert result[1].message_id is None
    assert str(result[2].message_id) == "41:42"


async def test_a_defect_leaves_nobody_waiting(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("seqdedupe.client.publish_calls.decode_answer", fails)
    async with Client(fake.address) as client:
        producer = client.producer("t", "p")
        await producer.open()
        receipt = await producer.send(b"")
        with pytest.raises(SeqdedupeError) as caught:
            await receipt
        assert caught.value.reason == "INTERNAL"
        await producer.abort()


@pytest.mark.parametrize(
    ("refused", "kind", "reason", "delay_ms"),
    [
        (Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"), InvalidRequestError, "TOPIC_NOT_FOUND", NEVER),
        # Longer than a call waits in all.
        (Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 40_000), UnavailableError, "RECOVERING", 40_000),
        (Refused(grpc.StatusCode.UNAVAILABLE, "NEW_ONE", 5), UnavailableError, "NEW_ONE", 5),
        (Refused(grpc.StatusCode.UNKNOWN, "NEW_TWO"), SeqdedupeError, "NEW_TWO", NEVER),
        (Refused(grpc.StatusCode.UNAVAILABLE), UnavailableError, "UNREACHABLE", 100),
        (Refused(grpc.StatusCode.INTERNAL), OutcomeUnknownError, "OUTCOME_UNKNOWN", 0),
        (Refused(grpc.StatusCode.CANCELLED), OutcomeUnknownError, "OUTCOME_UNKNOWN", 0),
        (Refused(grpc.StatusCode.UNIMPLEMENTED), UnavailableError, "NOT_A_SIDECAR", 500),
        (Refused(grpc.StatusCode.UNAUTHENTICATED), UnavailableError, "NOT_A_SIDECAR", 500),
        (Refused(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), AccessDeniedError, "UNAUTHENTICATED", NEVER),
    ],
)
async def test_errors_are_typed_by_their_reason(
    fake: FakeSidecar, refused: Refused, kind: type[SeqdedupeError], reason: str, delay_ms: int
) -> None:
    def on_unary(_: str) -> bytes:
        raise refused

    fake.on_unary = on_unary
    async with Client(fake.address) as client:
        with pytest.raises(SeqdedupeError) as caught:
            await client.admin.topic("t")
    assert type(caught.value) is kind or reason == "TOPIC_NOT_FOUND"
    assert isinstance(caught.value, kind)
    assert (caught.value.reason, caught.value.retry_delay_ms) == (reason, delay_ms)


async def test_numbers_of_an_error_arrive(fake: FakeSidecar) -> None:
    def on_unary(_: str) -> bytes:
        raise Refused(grpc.StatusCode.OUT_OF_RANGE, "POSITION_TRIMMED", first_index="17", hint="do so")

    fake.on_unary = on_unary
    async with Client(fake.address) as client:
        with pytest.raises(PositionError) as caught:
            await client.admin.topic("t")
    assert (caught.value.numbers, caught.value.hint) == ({"first_index": "17"}, "do so")
    assert str(caught.value) == "refused [POSITION_TRIMMED]"


async def test_wait_ready_waits_for_serving(fake: FakeSidecar) -> None:
    answers = iter([b"\x08\x02", b"\x08\x02"])
    asked: list[str] = []

    def on_unary(method: str) -> bytes:
        asked.append(method)
        return next(answers, b"\x08\x01")

    fake.on_unary = on_unary
    async with Client(fake.address) as client:
        await client.wait_ready(LAST_RESORT_SECONDS)
        assert asked == ["/grpc.health.v1.Health/Check"] * 3
        fake.on_unary = lambda _: b"\x08\x02"
        with pytest.raises(UnavailableError, match="NOT_SERVING"):
            await client.wait_ready(0.2)


def page(*records: tuple[int, int], incarnation: int = INCARNATION) -> read_pb2.ReadStreamResponse:
    """Records of (base index, rows)."""
    answer = read_pb2.ReadStreamResponse(incarnation=incarnation)
    for base_index, rows in records:
        batch = single_producer(b"p", 1, -1, _id_column(list(range(rows))), Binary.of_all([b""] * rows))
        answer.records.add(
            incarnation=incarnation,
            base_index=base_index,
            rows=rows,
            batch=batch_pb2.Batch.FromString(batch.encode()),
        )
    return answer


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ([page((0, 2), (2, 1)), page(), page((3, 1))], None),
        ([page((0, 2), (3, 1))], DamagedError),
        ([page((0, 2)), page((1, 1))], DamagedError),
        ([page((0, 2)), page((2, 1), incarnation=INCARNATION + 1)], PositionError),
    ],
)
async def test_a_reader_passes_over_nothing(
    fake: FakeSidecar, pages: list[read_pb2.ReadStreamResponse], kind: type[Exception] | None
) -> None:
    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=3))
    fake.on_unary = lambda _: last.SerializeToString()
    fake.on_read = lambda _: pages
    seen: list[int] = []
    async with Client(fake.address) as client, client.reader("t") as reader:
        if kind is None:
            assert [message.index async for message in reader] == [0, 1, 2, 3]
            return
        with pytest.raises(kind):  # noqa: PT012 (what came before the error counts)
            async for message in reader:
                seen.append(message.index)  # noqa: PERF401
    assert seen == [0, 1]


def skipping(first_index: int, next_index: int) -> read_pb2.ReadStreamResponse:
    skipped = read_pb2.IndexRange(first_index=first_index, next_index=next_index)
    return read_pb2.ReadStreamResponse(incarnation=INCARNATION, skipped=skipped)


def broken(page: read_pb2.ReadStreamResponse, **columns: Any) -> read_pb2.ReadStreamResponse:
    """The page, whose only record has these columns."""
    [record] = page.records
    for name, value in columns.items():
        setattr(record, name, value)
    return page


MISFITS = {
    "doubled": page((0, 2)),
    "left out": page((3, 1)),
    "from another incarnation": page((2, 1), incarnation=INCARNATION + 1),
    "record from another incarnation": broken(page((2, 1)), incarnation=INCARNATION + 1),
    "fewer rows than it says": broken(page((2, 1)), rows=2),
    "skipped too far": skipping(3, 4),
}
"""What may come after `page((0, 2))` and does not follow it."""


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("by_record", [False, True])
async def test_a_reader_reads_again_where_answers_do_not_fit(
    fake: FakeSidecar, misfit: read_pb2.ReadStreamResponse, by_record: bool
) -> None:
    """As after something on the way that has doubled one, or left one out: the log need not be damaged."""
    requests: list[read_pb2.ReadStreamRequest] = []
    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=3))

    def on_read(request: read_pb2.ReadStreamRequest) -> list[read_pb2.ReadStreamResponse]:
        requests.append(request)
        if len(requests) > 1:
            return [page((2, 1)), page((3, 1))] if request.start.HasField("after") else [page((0, 2)), page((2, 2))]
        if not by_record:
            return [page((0, 2)), misfit, page((2, 2))]
        both = page((0, 2))
        both.records.extend(misfit.records)
        return [both, page((2, 2))]

    fake.on_unary, fake.on_read = lambda _: last.SerializeToString(), on_read
    async with Client(fake.address) as client, client.reader("t", skip_damaged=True) as reader:
        seen: list[int] = []
        while await reader.fetch():
            while (message := reader.next_in_hand()) is not None or reader.take_record():
                seen += [] if message is None else [message.index]
        assert seen == [0, 1, 2, 3]
        assert reader.skipped == []
    # The record that only skips is none: nothing is amiss then.
    assert len(requests) == 1 + (bool(misfit.records) or not by_record)
    assert [request.start.after.index for request in requests[1:]] == [1] * (len(requests) - 1)


async def test_answers_that_never_fit_are_an_error_that_blames_no_disk(fake: FakeSidecar) -> None:
    streams = 0

    def on_read(request: read_pb2.ReadStreamRequest) -> list[read_pb2.ReadStreamResponse]:
        nonlocal streams
        streams += 1
        # Everything that comes first is progress: it is counted from there.
        return [page((0, 2)), page((3, 1))] if request.start.earliest else [page((3, 1))]

    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=3))
    fake.on_unary, fake.on_read = lambda _: last.SerializeToString(), on_read
    async with Client(fake.address) as client, client.reader("t") as reader:
        assert [(await anext(reader)).index for _ in range(2)] == [0, 1]
        with pytest.raises(DamagedError, match="read up to index 2, then came 3 with 1 of 1 row") as caught:
            await anext(reader)
    assert caught.value.reason == "ANSWERS_INCONSISTENT"
    assert "seqdedupe doctor" in caught.value.hint
    assert "backup" not in caught.value.hint
    assert streams == 1 + reading.MAX_MISFITS


@pytest.mark.parametrize("as_status", [True, False])
async def test_a_producer_whose_topic_is_gone_is_told_that_it_was_there(fake: FakeSidecar, as_status: bool) -> None:
    """As of one whose session another sidecar has opened than the one that got the frame."""

    def on_frame(frame: Frame) -> list[Response]:
        if as_status:
            raise Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
        return [fake.refusal(frame, "TOPIC_NOT_FOUND", NEVER)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client:
        producer = client.producer("t", "p")
        await producer.open()
        receipt = await producer.send(b"")
        with pytest.raises(NotFoundError) as caught:
            await receipt
        assert caught.value.hint.startswith("The topic existed before: it was deleted, or another sidecar answers")
        await producer.abort()


async def test_a_reader_whose_topic_is_gone_is_told_that_it_was_there(fake: FakeSidecar) -> None:
    def on_read(request: read_pb2.ReadStreamRequest) -> list[read_pb2.ReadStreamResponse]:
        if request.start.HasField("after"):
            raise Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
        return [page((0, 1))]

    def not_found(_: str) -> bytes:
        raise Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")

    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=3))
    fake.on_unary, fake.on_read = lambda _: last.SerializeToString(), on_read
    async with Client(fake.address) as client:
        reader = client.reader("t", follow=True)
        assert (await anext(reader)).index == 0
        with pytest.raises(NotFoundError) as caught:
            await anext(reader)
        assert caught.value.hint.startswith("The topic existed before: it was deleted, or another sidecar answers")
        fake.on_unary = not_found
        for start in ("earliest", Position.start(INCARNATION)):
            with pytest.raises(NotFoundError) as caught:
                await anext(client.reader("t", start=start))
            assert caught.value.hint.startswith("Check the topic's name")


async def test_a_reader_says_once_what_it_waits_for(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "SAY_WAITING_SECONDS", 0.2)
    said: list[str] = []
    refusals = [2, 2]  # this many more after each has been said

    def on_read(request: read_pb2.ReadStreamRequest) -> Iterable[read_pb2.ReadStreamResponse]:
        if not request.start.HasField("after"):
            return [page((0, 1))]
        at = request.start.after.index
        if len(said) > at:
            refusals[at] -= 1
        if refusals[at] >= 0:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 20)
        return [page((at + 1, 1))]

    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=2))
    fake.on_unary, fake.on_read = lambda _: last.SerializeToString(), on_read
    async with Client(fake.address) as client:
        async with client.reader("t", on_waiting=lambda why: said.append(why.reason)) as reader:
            assert [message.index async for message in reader] == [0, 1, 2]
        assert said == ["RECOVERING", "RECOVERING"]
        fake.on_read = lambda _: [page((0, 3))]
        async with client.reader("t", on_waiting=lambda why: said.append(why.reason)) as reader:
            assert [message.index async for message in reader] == [0, 1, 2]
    assert len(said) == 2


def with_message_ids(page: read_pb2.ReadStreamResponse, *runs: tuple[int, int, int, int]) -> Any:
    """The page, whose only record brings these runs."""
    [record] = page.records
    columns = record.run_rows, record.run_ledger_ids, record.run_entry_ids, record.run_batch_indexes
    for column, values in zip(columns, zip(*runs, strict=True), strict=True):
        column.extend(values)
    return page


async def test_a_reader_takes_the_message_ids_that_a_record_brings(fake: FakeSidecar) -> None:
    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=5))
    fake.on_unary = lambda _: last.SerializeToString()
    fake.on_read = lambda _: [with_message_ids(page((0, 4)), (1, 7, 41, -1), (3, 8, 0, 2)), page((4, 2))]
    given = [MessageId(7, 41), MessageId(8, 0, 2), MessageId(8, 0, 3), MessageId(8, 0, 4)]
    of_index = [MessageId(INCARNATION, 4), MessageId(INCARNATION, 5)]
    async with Client(fake.address) as client:
        async with client.reader("t") as reader:
            assert [message.message_id async for message in reader] == given + of_index
        async with client.reader("t") as reader:
            assert [(await anext(reader)).position for _ in range(2)][-1] == Position(INCARNATION, given[1], 1)
            rest = [stored async for stored in reader.batches()]
            assert [stored.message_id(row) for stored in rest for row in range(len(stored))] == given[2:] + of_index
            assert reader.position == Position(INCARNATION, of_index[1], 5)


@pytest.mark.parametrize(
    "runs", [[(1, 7, 41, -1), (2, 7, 41, -1)], [(2, 7, 41, -1)], [(4, 7, 41, -1)], [(3, 7, 41, -1), (0, 8, 0, -1)]]
)
async def test_a_reader_refuses_message_ids_that_cannot_be(fake: FakeSidecar, runs: Any) -> None:
    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=4))
    fake.on_unary = lambda _: last.SerializeToString()
    fake.on_read = lambda _: [page((0, 2)), with_message_ids(page((2, 3)), *runs)]
    async with Client(fake.address) as client, client.reader("t") as reader:
        assert [(await anext(reader)).index for _ in range(2)] == [0, 1]
        with pytest.raises(DamagedError, match=r"the message IDs of .* from index 2 on are wrong") as caught:
            await anext(reader)
        assert caught.value.reason == "ANSWERS_INCONSISTENT"
        assert reader.position == Position(INCARNATION, MessageId(INCARNATION, 1), 1)


async def test_a_reader_that_connects_again_asks_for_what_is_left_and_no_more(fake: FakeSidecar) -> None:
    ends = iter([3, 9])
    requests: list[read_pb2.ReadStreamRequest] = []

    def on_unary(_: str) -> bytes:
        last = batch_pb2.Position(incarnation=INCARNATION, index=next(ends))
        return read_pb2.GetLastMessageIdResponse(last=last).SerializeToString()

    def on_read(request: read_pb2.ReadStreamRequest) -> Iterable[read_pb2.ReadStreamResponse]:
        requests.append(request)
        return [page((0, 2))] if len(requests) == 1 else [page((2, 2))]

    fake.on_unary, fake.on_read = on_unary, on_read
    async with Client(fake.address) as client, client.reader("t") as reader:
        assert [message.index async for message in reader] == [0, 1, 2, 3]
    assert [request.stop_index for request in requests] == [4, 4]
    assert requests[0].start.earliest
    assert (requests[1].start.after.incarnation, requests[1].start.after.index) == (INCARNATION, 1)


async def test_an_opening_that_is_cancelled_leaves_nothing_behind(fake: FakeSidecar) -> None:
    def on_open(_: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 10)

    fake.on_open = on_open
    async with Client(fake.address) as client:
        producer = client.producer("t", "p")
        opening = asyncio.create_task(producer.open())
        await until(lambda: len(fake.opens) > 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        with pytest.raises(InvalidRequestError):
            await producer.send(b"")
        await producer.close()


async def test_a_silent_sidecar_is_left(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.client.stream.ANSWER_TIMEOUT_SECONDS", 0.2)
    fake.on_frame = lambda _: []
    async with Client(fake.address) as client:
        producer = client.producer("t", "p")
        await producer.open()
        receipt = await producer.send(b"")
        await until(lambda: len(fake.opens) >= 3)
        assert not receipt.done()
        fake.on_frame = lambda frame: [fake.stored(frame)]
        await receipt
        await producer.close()


async def test_a_delivery_timeout_carries_the_last_refusal(fake: FakeSidecar) -> None:
    def on_frame(frame: Frame) -> list[Response]:
        if frame.batch.sequence_ids[0] == 0:
            return [fake.stored(frame)]
        refusal = {"frame": frame.number, "reason": "LOG_REFUSED", "message": "no space left on device"}
        return [fake.answer(refusals=[refusal | {"retry_delay_ms": 10}])]

    fake.on_frame = on_frame
    # Long enough for a refusal to come on a busy machine.
    config = ProducerConfig(max_batch_rows=1, delivery_timeout_seconds=2)
    async with Client(fake.address) as client:
        producer = client.producer("t", "p", config)
        await producer.open()
        await (await producer.send(b""))
        receipt = await producer.send(b"")
        with pytest.raises(
            OutcomeUnknownError, match=r"no space left on device.*up to sequence ID 0 is durable"
        ) as caught:
            await receipt
        assert caught.value.numbers["last_refusal"] == "LOG_REFUSED"
        assert "disk" in caught.value.hint
        # Nothing can be sent any more, though the sidecar would answer.
        await until(lambda: fake.open_streams == 0)
        await producer.abort()


async def test_a_producer_says_once_each_time_why_nothing_becomes_durable(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "SAY_WAITING_SECONDS", 0.2)
    said: list[str] = []

    def on_frame(frame: Frame) -> list[Response]:
        is_refused = len(said) == frame.batch.sequence_ids[0] or refusals[0] > 0
        refusals[0] = 2 if len(said) == frame.batch.sequence_ids[0] else refusals[0] - 1
        return [fake.refusal(frame, "LOG_REFUSED", 10)] if is_refused else [fake.stored(frame)]

    refusals = [0]  # this many more after it has been said
    fake.on_frame = on_frame
    async with (
        Client(fake.address) as client,
        client.producer("t", "p", ONE_BY_ONE, on_waiting=lambda why: said.append(why.reason)) as producer,
    ):
        for number in range(2):
            assert (await (await producer.send(b""))).sequence_id == number
            assert said == ["LOG_REFUSED"] * (number + 1)


async def test_an_error_of_who_is_told_of_waiting_ends_nothing(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "SAY_WAITING_SECONDS", 0.05)
    handled: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: handled.append(str(context["exception"])))

    def on_frame(frame: Frame) -> list[Response]:
        return [fake.stored(frame) if handled else fake.refusal(frame, "LOG_REFUSED", 10)]

    def fail(why: UnavailableError) -> None:
        raise RuntimeError(why.reason)

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p", ONE_BY_ONE, on_waiting=fail) as producer:
        for number in range(2):
            assert (await (await producer.send(b""))).sequence_id == number
    assert handled == ["LOG_REFUSED"]


async def test_a_producer_with_nothing_to_send_that_is_connected_again_waits_for_nothing(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost then, with no receipt in between, is another time."""
    monkeypatch.setattr(route, "SAY_WAITING_SECONDS", 0.2)
    said: list[str] = []
    async with (
        Proxy(fake.address) as proxy,
        Client(proxy.address) as client,
        client.producer("t", "p", on_waiting=lambda why: said.append(why.reason)) as producer,
    ):
        for streams in (1, 2):
            await until(lambda: producer.counters.connections == len(fake.messages) == streams)  # noqa: B023
            proxy.refuses = True
            proxy.cut()
            await until(lambda: len(said) == streams)  # noqa: B023
            proxy.refuses = False
    assert said == ["UNREACHABLE"] * 2


def stored_early(fake: FakeSidecar, frame: Frame) -> Response:
    """As `FakeSidecar.stored`, and nothing of it is durable yet."""
    index = frame.batch.sequence_ids[0]
    return fake.answer(receipts=[{"frame": frame.number, "first_index": index, "durable_at": index + 1}])


async def test_what_is_to_have_another_receipt_has_all_the_time_for_it(fake: FakeSidecar) -> None:
    """A power cut takes what had its receipt, which had not been late until then."""
    timeout_seconds = 1.0
    fake.on_frame = lambda frame: [stored_early(fake, frame)]
    config = ProducerConfig(max_batch_rows=1, delivery_timeout_seconds=timeout_seconds)
    loop = asyncio.get_running_loop()
    async with Proxy(fake.address) as proxy, Client(proxy.address) as client:
        producer = client.producer("t", "p", config)
        await producer.open()
        receipt = await producer.send(b"")
        await receipt
        over_at = loop.time() + 1.5 * timeout_seconds
        await until(lambda: loop.time() > over_at)
        fake.on_frame = lambda frame: []
        cut_at = loop.time()
        proxy.cut()
        with pytest.raises(OutcomeUnknownError, match="no receipt within 1 seconds"):
            await receipt.until_durable()
        assert loop.time() - cut_at >= timeout_seconds
        await producer.abort()


async def test_control_what_never_had_a_receipt_gets_no_more_time_by_a_resume(fake: FakeSidecar) -> None:
    fake.on_frame = lambda frame: []
    async with (
        Proxy(fake.address) as proxy,
        Client(proxy.address) as client,
        client.producer("t", "p", ONE_BY_ONE) as producer,
    ):
        receipt = await producer.send(b"")
        await until(lambda: len(fake.frames) == 1)
        queued_at = receipt._pending.queued_at
        fake.on_frame = lambda frame: [fake.stored(frame)]
        proxy.cut()
        await receipt
        assert sent_ids(fake) == [0, 0]
        assert receipt._pending.queued_at == queued_at


async def test_time_in_which_the_process_stood_still_is_made_up_for(fake: FakeSidecar) -> None:
    config = ProducerConfig(max_batch_rows=1, delivery_timeout_seconds=1)
    async with Client(fake.address) as client, client.producer("t", "p", config) as producer:
        await (await producer.send(b""))
        receipt = await producer.send(b"")
        time.sleep(3)  # noqa: ASYNC251 (the event loop stands still)
        assert (await receipt).verdict is Verdict.NOT_DUP


async def test_without_a_timeout_a_producer_never_gives_up(fake: FakeSidecar) -> None:
    fake.on_frame = lambda frame: [fake.refusal(frame, "LOG_REFUSED", 10)]
    config = ProducerConfig(delivery_timeout_seconds=None)
    async with Client(fake.address) as client, client.producer("t", "p", config) as producer:
        receipt = await producer.send(b"")
        await until(lambda: len(fake.frames) > 5)
        assert not receipt.done()
        fake.on_frame = lambda frame: [fake.stored(frame)]
        await receipt


async def test_a_topic_that_recovers_is_waited_for(fake: FakeSidecar) -> None:
    asked: list[float] = []
    last = read_pb2.GetLastMessageIdResponse(last=batch_pb2.Position(incarnation=INCARNATION, index=3))

    def on_unary(_: str) -> bytes:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) < 4:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 50)
        return last.SerializeToString()

    def recovering_for_long(_: str) -> bytes:
        asked.append(asyncio.get_running_loop().time())
        # At last for longer than a call waits in all.
        raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 50 if len(asked) < 3 else 40_000)

    fake.on_unary = on_unary
    async with Client(fake.address) as client:
        assert (await client.ends("t")).last.index == 3
        assert all(later - earlier >= 0.045 for earlier, later in itertools.pairwise(asked))
        asked.clear()
        async with client.reader("t", "latest", follow=True) as reader:
            fake.on_read = lambda _: [page((4, 1))]
            assert (await anext(reader)).index == 4
        # It ends by itself, with the sidecar's own answer.
        fake.on_unary = recovering_for_long
        for call in (client.ends("t"), client.locate_time("t", 0), client.admin.topics()):
            asked.clear()
            with pytest.raises(UnavailableError) as caught:
                await call
            assert (caught.value.reason, len(asked)) == ("RECOVERING", 3)


@pytest.mark.parametrize(
    "address", ["localhost", "http://127.0.0.1:6660", "127.0.0.1:", ":6660", "127.0.0.1:65536", "::1:6660", "unix:", ""]
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigurationError, match="host:port or unix:/path"):
        Client(address)


@pytest.mark.parametrize("address", ["localhost:6660", "[::1]:6660", "unix:/run/seqdedupe.sock", "side-car.example:1"])
def test_addresses(address: str) -> None:
    assert Client(address).address == address


async def test_the_hint_fits_what_is_wrong_with_the_connection(tmp_path: Path) -> None:
    async def no_sidecar(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with Listener(no_sidecar) as web:
        for address, hint in (
            ("127.0.0.1:1", "is the sidecar running"),
            (f"unix:{tmp_path}/nobody", "no such socket"),
            (f"127.0.0.1:{web.port}", "is the port right"),
        ):
            async with Client(address) as client:
                with pytest.raises(UnavailableError) as caught:
                    await client.admin.version()
            assert hint in caught.value.hint, caught.value.message
