"""Producers of one client share a connection, a stream and its frames, and nothing else: no fate, no wait, no error."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from seqdedupe.client import (
    Client,
    FencedError,
    InvalidRequestError,
    OutcomeUnknownError,
    Producer,
    ProducerConfig,
    SeqdedupeError,
    UnavailableError,
    Verdict,
    blocking,
)
from seqdedupe.client.connection import refusal_error
from seqdedupe.client.publish_calls import MAX_NEW_NAMES, Openings
from seqdedupe.client.stream import Answers, PublishStream
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import batch_pb2, publish_pb2
from tests.broker_sidecar import with_constants
from tests.client.fake_sidecar import FakeSidecar, Refused, fake_sidecar
from tests.client.helpers import ids_in_log, read_all, until
from tests.client.proxy import Proxy

Frame = publish_pb2.Frame
Response = publish_pb2.PublishStreamResponse

MANY = 10_000

ONE_BY_ONE = ProducerConfig(max_batch_rows=1)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSidecar]:
    async with fake_sidecar() as fake:
        epochs = itertools.count(100)

        def on_open(request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
            names = len(request.producer_names)
            answer = fake.opened()
            for column in (answer.epochs, answer.persisted, answer.persisted_indexes, answer.persisted_message_ids):
                del column[:]
            answer.epochs.extend(itertools.islice(epochs, names))
            answer.persisted.extend([-1] * names)
            answer.persisted_indexes.extend([-1] * names)
            answer.persisted_message_ids.extend(batch_pb2.MessageId() for _ in range(names))
            return answer

        fake.on_open = on_open
        yield fake


async def opened(client: Client, topic: str, names: int, config: ProducerConfig = ONE_BY_ONE) -> list[Producer]:
    """This many producers, p0 and on, opened at the same time."""
    producers = [client.producer(topic, f"p{k}", config) for k in range(names)]
    await asyncio.gather(*(producer.open() for producer in producers))
    return producers


def names_in(frame: Frame) -> list[str]:
    batch = frame.batch
    cuts = itertools.pairwise(batch.producer_name_offsets)
    return [batch.producer_names[start:end].decode() for start, end in cuts]


async def ids_by_name(sidecar: Sidecar, topic: str) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = defaultdict(list)
    for message in await read_all(sidecar, topic):
        ids[message.producer_name].append(message.sequence_id)
    return ids


async def test_ten_thousand_names_with_the_default_limits(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producers = await opened(client, topic, MANY)
        receipts = [await producer.send(b"x") for producer in producers]
        published = [await receipt for receipt in receipts]
        assert proxy.connections == 2  # one for streams, and one for `Open`
        await asyncio.gather(*(producer.close() for producer in producers))
    assert {one.verdict for one in published} == {Verdict.NOT_DUP}
    assert sorted(one.index for one in published) == list(range(MANY))
    stored = {message.index: message.producer_name for message in await read_all(shared_sidecar, topic)}
    assert [stored[one.index] for one in published] == [producer.name for producer in producers]


async def test_what_is_ready_at_the_same_time_shares_a_frame(fake: FakeSidecar) -> None:
    async with Client(fake.address) as client:
        producers = await opened(client, "t", 5)
        other = client.producer("u", "p0", ONE_BY_ONE)
        await other.open()
        assert fake.open_streams == 2  # one a topic
        await asyncio.gather(*(one.send(b"x", key="k") for producer in [*producers, other] for one in [producer]))
        await asyncio.gather(*(producer.close() for producer in [*producers, other]))
        await until(lambda: fake.open_streams == 0)
    shared = next(frame for frame in fake.frames if len(frame.batch.epochs) > 1)
    assert names_in(shared) == [f"p{k}" for k in range(len(shared.batch.epochs))]
    assert list(shared.batch.producer_indexes) == list(range(len(shared.batch.epochs)))
    assert len(set(shared.batch.epochs)) == len(shared.batch.epochs)


async def messages_behind_one_that_is_out(fake: FakeSidecar, count: int) -> int:
    """In how many messages this many batches go out that one task sends while another batch waits for its answer."""
    fake.on_frame = lambda frame: []
    async with Client(fake.address) as client:
        producer = client.producer("t", "p")
        await producer.open()
        await producer.send_batch([b"x"])
        await until(lambda: len(fake.frames) == 1)
        before = len(fake.messages)
        for _ in range(count):
            await producer.send_batch([b"x"])
        await until(lambda: len(fake.frames) == 1 + count)
        await producer.abort()
    return len(fake.messages) - before


async def test_batches_that_one_task_sends_share_a_message(fake: FakeSidecar) -> None:
    assert await messages_behind_one_that_is_out(fake, 9) == 1


async def test_control_who_does_not_wait_a_turn_sends_the_first_alone(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frames_to_send(self: PublishStream) -> Any:
        parts: list[Any] = []
        while not self._add_ready(parts):
            self._work.clear()
            await self._work.wait()
        return [self._frame_of([part]) for part in parts]

    monkeypatch.setattr(PublishStream, "_frames_to_send", frames_to_send)
    assert await messages_behind_one_that_is_out(fake, 9) > 1


async def test_a_connection_lasts_as_long_as_a_producer_needs_it(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy:
        async with Client(proxy.address) as client:
            first, second = await opened(client, topic, 2)
            await first.close()
            await (await second.send(b"x"))
            assert proxy.connections == 2  # one for streams, and one for `Open`
        await (await second.send(b"x"))  # closing the client is none of its business
        await second.close()
        assert proxy.connections == 2
        async with client.producer(topic, "p2") as third:
            await (await third.send(b"x"))
        assert proxy.connections == 4


async def test_the_end_of_one_is_not_that_of_others(shared_sidecar: Sidecar, topic: str) -> None:
    """One is fenced by another process, one is closed, one is given up, while all of them send."""
    names, rounds = 12, 30
    async with Client(shared_sidecar.address) as client, Client(shared_sidecar.address) as elsewhere:
        producers = await opened(client, topic, names)

        async def send(producer: Producer) -> list[int]:
            receipts = [await producer.send(b"x") for _ in range(rounds)]
            return [(await receipt).sequence_id for receipt in receipts]

        fenced, closed, aborted, *others = producers
        await asyncio.gather(*map(send, producers))
        thief = elsewhere.producer(topic, fenced.name)
        await thief.open()
        sending = [asyncio.create_task(send(producer)) for producer in [fenced, *others]]
        late = await aborted.send(b"x")
        await aborted.abort()
        await closed.close()
        ends = await asyncio.gather(*sending, return_exceptions=True)
        assert isinstance(ends[0], FencedError)
        assert f"'{fenced.name}'" in ends[0].message
        assert ends[1:] == [list(range(rounds, 2 * rounds))] * len(others)
        if not late.done():
            with pytest.raises(OutcomeUnknownError):
                await late
        for producer in others:
            assert producer.counters.not_dup == 2 * rounds
            assert producer.counters.connections == 1
            await producer.close()
        with pytest.raises(FencedError):
            await fenced.close()
        await thief.abort()
    by_name = await ids_by_name(shared_sidecar, topic)
    assert all(by_name[producer.name] == list(range(2 * rounds)) for producer in others)
    assert by_name[fenced.name] == by_name[closed.name] == list(range(rounds))


def refuse_p1(fake: FakeSidecar, reason: str, delay_ms: int, *, names: bool, times: int) -> None:
    """Every frame with rows of p1 is refused so, `times` times of frames that it is alone in; then no more."""
    left = [times]

    def on_frame(frame: Frame) -> list[Response]:
        named = names_in(frame)
        if "p1" not in named or not left[0]:
            return [fake.stored(frame)]
        left[0] -= len(named) == 1
        producers = [{"producer_name": "p1"}] if names else []
        refusal = {"frame": frame.number, "reason": reason, "message": "no", "retry_delay_ms": delay_ms}
        return [fake.answer(refusals=[refusal | {"producers": producers}])]

    fake.on_frame = on_frame


async def send_together(producers: list[Producer]) -> list[int | SeqdedupeError]:
    """A message of each, in one shared frame; the sequence ID or what came of it."""
    receipts = await asyncio.gather(*(producer.send(b"x") for producer in producers))

    async def result(receipt: Any) -> int:
        return (await receipt).sequence_id  # type: ignore[no-any-return]

    results = await asyncio.gather(*map(result, receipts), return_exceptions=True)
    assert all(isinstance(one, int | SeqdedupeError) for one in results)
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("names", [True, False], ids=["named", "nobody-named"])
async def test_a_final_refusal_ends_its_cause_only(fake: FakeSidecar, names: bool) -> None:
    refuse_p1(fake, "FENCED", -1, names=names, times=10)
    async with Client(fake.address) as client:
        producers = await opened(client, "t", 4)
        results = await send_together(producers)
        assert isinstance(results[1], FencedError)
        assert [results[k] for k in (0, 2, 3)] == [0, 0, 0]
        assert await send_together([producers[k] for k in (0, 2, 3)]) == [1, 1, 1]
        await asyncio.gather(*(producer.abort() for producer in producers))
    shared = [frame for frame in fake.frames if "p1" in names_in(frame) and len(names_in(frame)) > 1]
    assert len(shared) == 1  # it was refused, and the others went on without it
    assert len(fake.opens) == 1


async def test_control_who_does_not_take_a_frame_apart_ends_all(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell_all(_: PublishStream, parts: Any, refusal: Any, told: dict[Any, Answers]) -> None:
        for part in parts:
            answers = told.setdefault(part.sender, Answers([], []))
            answers.refusals.append((part.frame.number, refusal_error(refusal)))

    monkeypatch.setattr(PublishStream, "_take_refusal", tell_all)
    refuse_p1(fake, "FENCED", -1, names=True, times=10)
    async with Client(fake.address) as client:
        producers = await opened(client, "t", 4)
        results = await send_together(producers)
        assert all(isinstance(one, FencedError) for one in results)
        await asyncio.gather(*(producer.abort() for producer in producers))


async def test_the_others_do_not_wait_for_the_cause_of_a_refusal(fake: FakeSidecar) -> None:
    """It is asked to wait for longer than this test may take."""
    refuse_p1(fake, "RECOVERING", 3_600_000, names=True, times=1)
    async with Client(fake.address) as client:
        producers = await opened(client, "t", 4)
        receipts = await asyncio.gather(*(producer.send(b"x") for producer in producers))
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            for k in (0, 2, 3):
                assert (await receipts[k]).sequence_id == 0
                assert (await (await producers[k].send(b"x"))).sequence_id == 1
        assert not receipts[1].done()
        await asyncio.gather(*(producer.abort() for producer in producers))


async def test_all_wait_where_the_topic_takes_nothing(fake: FakeSidecar) -> None:
    refusals = [2]

    def on_frame(frame: Frame) -> list[Response]:
        refusals[0] -= 1
        return [fake.refusal(frame, "LOG_REFUSED", 10) if refusals[0] >= 0 else fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client:
        producers = await opened(client, "t", 4)
        assert await send_together(producers) == [0] * 4
        assert await send_together(producers) == [1] * 4
        await asyncio.gather(*(producer.close() for producer in producers))


async def test_one_without_answers_holds_up_nobody(fake: FakeSidecar) -> None:
    fake.on_frame = lambda frame: [] if names_in(frame) == ["p1"] else [fake.stored(frame)]
    config = ProducerConfig(max_batch_rows=1, max_in_flight_batches=1)
    async with Client(fake.address) as client:
        first, stuck = await opened(client, "t", 2, config)
        receipt = await stuck.send(b"x")
        await until(lambda: len(fake.frames) == 1)
        more = asyncio.create_task(stuck.send(b"x"))
        for k in range(100):
            assert (await (await first.send(b"x"))).sequence_id == k
        assert not receipt.done()
        assert not more.done()
        more.cancel()
        await stuck.abort()
        with pytest.raises(OutcomeUnknownError):
            await receipt
        await first.close()


async def test_a_topic_that_is_not_read_holds_up_no_other(fake: FakeSidecar) -> None:
    """What its stream may have on the way is used up; the connection has more."""
    fake.unread_topics = {"persistent://public/default/full"}
    sent_bytes = 64 * 1024 * 1024
    config = ProducerConfig(max_in_flight_batches=sent_bytes, max_in_flight_bytes=sent_bytes)
    async with Client(fake.address) as client:
        full, other = client.producer("full", "p", config), client.producer("t", "p", ONE_BY_ONE)
        await full.open()
        await other.open()
        payload = b"x" * 1024 * 1024
        for _ in range(sent_bytes // len(payload)):
            await full.send(payload)
        for k in range(20):
            assert (await (await other.send(payload))).sequence_id == k
        assert full.counters.rows_sent < sent_bytes // len(payload)
        await other.close()
        await full.abort()


async def test_a_delivery_timeout_ends_one(fake: FakeSidecar) -> None:
    fake.on_frame = lambda frame: [] if names_in(frame) == ["p1"] else [fake.stored(frame)]
    async with Client(fake.address) as client:
        (first,) = await opened(client, "t", 1)
        stuck = client.producer("t", "p1", ProducerConfig(delivery_timeout_seconds=0.2))
        await stuck.open()
        with pytest.raises(OutcomeUnknownError, match="no receipt within"):
            await (await stuck.send(b"x"))
        assert (await (await first.send(b"x"))).sequence_id == 0
        assert first.counters.connections == 1
        await first.close()
        await stuck.abort()


@pytest.mark.parametrize("seed", range(3))
async def test_lost_connections(shared_sidecar: Sidecar, topic: str, seed: int) -> None:
    """No matter what is lost, each producer's messages are stored once and in order."""
    names, rounds = 20, 40
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producers = await opened(client, topic, names)

        async def send(producer: Producer) -> None:
            for _ in range(rounds):
                await producer.send(b"x")
                await asyncio.sleep(0)
            await producer.flush()

        sending = asyncio.gather(*map(send, producers))
        for cut in range(3):
            stored = (cut + 1) * (rounds // 4) * (seed + 1) // 3
            await until(lambda: sending.done() or producers[0].durable_sequence_id >= stored)  # noqa: B023
            proxy.cut()
        await sending
        proxy.cut()
        assert await send_together(producers) == [rounds] * names
        await asyncio.gather(*(producer.close() for producer in producers))
    assert await ids_by_name(shared_sidecar, topic) == {f"p{k}": list(range(rounds + 1)) for k in range(names)}


async def test_one_name_twice_in_a_client(shared_sidecar: Sidecar, topic: str) -> None:
    """The second one takes it from the first, as it would from any other process."""
    async with Client(shared_sidecar.address) as client:
        first, second = client.producer(topic, "p"), client.producer(topic, "p")
        await asyncio.gather(first.open(), second.open())
        results = await asyncio.gather(send_together([first]), send_together([second]))
        assert isinstance(results[0][0], FencedError)
        assert results[1] == [0]
        await first.abort()
        await second.close()
    assert await ids_in_log(shared_sidecar, topic) == [0]


async def test_names_are_opened_together_and_refused_alone(fake: FakeSidecar) -> None:
    on_open = fake.on_open

    def refusing(request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        if "p3" in request.producer_names:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NAME")
        answer = on_open(request)
        if request.epochs and "p1" in request.producer_names:
            place = list(request.producer_names).index("p1")
            answer.refusals.add(index=place, reason="FENCED", message="another one", current_epoch=9)
        return answer

    fake.on_open = refusing
    names = 2 * MAX_NEW_NAMES
    async with Proxy(fake.address) as proxy, Client(proxy.address) as client:
        producers = [client.producer("t", f"p{k}", ONE_BY_ONE) for k in range(names)]
        ends = await asyncio.gather(*(producer.open() for producer in producers), return_exceptions=True)
        assert isinstance(ends.pop(3), InvalidRequestError)
        assert ends == [None] * (names - 1)
        assert (
            sorted(len(request.producer_names) for request in fake.opens) == [1] * MAX_NEW_NAMES + [MAX_NEW_NAMES] * 2
        )
        producers.pop(3)
        proxy.cut()
        # One is fenced when they are resumed.
        results = await send_together(producers)
        assert isinstance(results.pop(1), FencedError)
        assert results == [0] * (names - 2)
        await asyncio.gather(*(producer.abort() for producer in producers))


async def test_an_opening_that_is_cancelled_leaves_the_others_alone(fake: FakeSidecar) -> None:
    on_open = fake.on_open
    recovers = [True]

    def recovering(request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        if recovers[0]:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 10)
        return on_open(request)

    fake.on_open = recovering
    async with Client(fake.address) as client:
        producers = [client.producer("t", f"p{k}") for k in range(3)]
        opening = [asyncio.create_task(producer.open()) for producer in producers]
        await until(lambda: len(fake.opens) > 1)
        opening[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening[1]
        recovers[0] = False
        await opening[0]
        await opening[2]
        assert await send_together([producers[0], producers[2]]) == [0, 0]
        await asyncio.gather(*(producer.abort() for producer in producers))


@pytest.fixture
def one_stream(tmp_path: Path) -> Iterator[Sidecar]:
    """For which one never gives way to another."""
    environment = with_constants.environment(streams__IDLE_SECONDS=10**9)
    with Sidecar(tmp_path, module=with_constants.MODULE, environment=environment, max_streams=1) as sidecar:
        yield sidecar


async def test_a_limit_is_an_error_of_open(one_stream: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Client(one_stream.address) as client, Client(one_stream.address) as elsewhere:
        producers = await opened(client, "t", 3)  # which are one stream
        monkeypatch.setattr("seqdedupe.client.producer_session.OPEN_TIMEOUT_SECONDS", 0.5)
        for one_too_many in (elsewhere.producer("t", "q"), client.producer("u", "q")):
            with pytest.raises(UnavailableError, match="1 stream is open") as caught:
                await one_too_many.open()
            assert caught.value.reason == "TOO_MANY_STREAMS"
        assert await send_together(producers) == [0] * 3
        await asyncio.gather(*(producer.close() for producer in producers))
        monkeypatch.undo()
        async with elsewhere.producer("t", "q") as producer:  # there is room again
            assert (await (await producer.send(b"x"))).sequence_id == 0


async def test_control_who_only_opens_waits_for_a_receipt_in_silence(
    one_stream: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: PublishStream, **_how: bool) -> None: ...

    async with Client(one_stream.address) as client, client.producer("t", "p"), Client(one_stream.address) as elsewhere:
        monkeypatch.setattr(PublishStream, "begin", nothing)
        monkeypatch.setattr(PublishStream, "check", nothing)
        one_too_many = elsewhere.producer("t", "one too many")
        await one_too_many.open()
        receipt = await one_too_many.send(b"x")
        await until(lambda: one_too_many._topic.session.queue.last_refusal is not None)
        assert not receipt.done()
        await one_too_many.abort()


def test_producers_for_threads_share_too(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        with client.producer(topic, "p0") as first, client.producer(topic, "p1") as second:
            receipts = [producer.send(b"x") for producer in (first, second)]
            assert [receipt.result().verdict for receipt in receipts] == [Verdict.NOT_DUP] * 2
            (shared,) = client.on_loop._connections._shared.values()
            assert [stream.users for stream in shared.streams.values()] == [2]
        assert not client.on_loop._connections._shared


async def test_a_refused_opening_that_nobody_waits_for_is_no_defect(fake: FakeSidecar) -> None:
    """The call goes on when the one who asked for it has left, and its answer is nobody's."""
    asked = asyncio.Event()

    def on_open(_: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        asked.set()
        raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 10)

    fake.on_open = on_open
    async with grpc.aio.insecure_channel(fake.address) as channel:
        openings = Openings(channel, Client(fake.address)._sidecars.addresses[0], "t")
        opening = asyncio.create_task(openings.open("p", None))
        other = asyncio.create_task(openings.open("q", None))
        await asked.wait()
        opening.cancel()
        with pytest.raises(UnavailableError):
            await other
        with pytest.raises(asyncio.CancelledError):
            await opening
        await openings.close()


async def names_that_are_opened(fake: FakeSidecar) -> list[list[str]]:
    """By calls, when one of two that wait for the first call is given up meanwhile."""
    answer, asked, may_go_on = fake._open, asyncio.Event(), asyncio.Event()

    async def held_up(data: bytes, context: Any) -> bytes:
        await context.send_initial_metadata(())
        asked.set()
        await may_go_on.wait()
        return await answer(data, context)

    fake._open = held_up  # type: ignore[method-assign]
    async with Client(fake.address) as client:
        producers = [client.producer("t", f"p{k}") for k in range(3)]
        opening = [asyncio.create_task(producers[0].open())]
        await asked.wait()
        opening += [asyncio.create_task(producer.open()) for producer in producers[1:]]
        (shared,) = client._connections._shared.values()
        (stream,) = shared.streams.values()
        await until(lambda: len(stream.openings._waiting) == 2)
        opening[1].cancel()
        await asyncio.wait({opening[1]})
        may_go_on.set()
        await opening[0]
        await opening[2]
        await asyncio.gather(*(producer.abort() for producer in producers))
    return [list(request.producer_names) for request in fake.opens]


async def test_who_gave_up_takes_the_name_from_nobody(fake: FakeSidecar) -> None:
    """Another process may have opened it by then."""
    assert await names_that_are_opened(fake) == [["p0"], ["p2"]]


async def test_control_all_who_ever_asked_are_opened(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_all(self: Openings) -> Any:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    monkeypatch.setattr(Openings, "_take_some", take_all)
    assert await names_that_are_opened(fake) == [["p0"], ["p1", "p2"]]


class LateAnswer:
    """For the first frame of p0: it was made before the topic began a term in which p1 is opened, and comes later."""

    def __init__(self, fake: FakeSidecar, client: Client) -> None:
        self._fake, self._client = fake, client
        self._held: list[Response] = []
        fake.on_frame = self._on_frame

    def _on_frame(self, frame: Frame) -> list[Response]:
        if names_in(frame) == ["p0"] and frame is self._fake.frames[0]:
            self._held.append(self._fake.stored(frame))
            return []
        answers = [*self._held, self._fake.stored(frame)]
        self._held.clear()
        return answers

    async def comes(self) -> tuple[Producer, Producer, Any]:
        """The producers, when p1 has had answers after it, and the receipt of p0."""
        (first,) = await opened(self._client, "t", 1)
        receipt = await first.send(b"x")
        await until(lambda: bool(self._held))
        self._fake.term += 1
        second = self._client.producer("t", "p1", ONE_BY_ONE)
        await second.open()
        for k in range(3):
            assert (await (await second.send(b"x"))).sequence_id == k
        return first, second, receipt


async def test_an_answer_of_an_earlier_term_leaves_nobody_without_one(fake: FakeSidecar) -> None:
    async with Client(fake.address) as client:
        first, second, receipt = await LateAnswer(fake, client).comes()
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            assert (await receipt).sequence_id == 0
        assert (first.counters.connections, first.counters.rows_sent) == (1, 2)
        await first.close()
        await second.close()


async def test_control_who_only_ignores_it_waits_for_ever(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as others are answered."""
    monkeypatch.setattr("seqdedupe.client.stream._put_back", lambda parts, told: None)
    async with Client(fake.address) as client:
        first, second, receipt = await LateAnswer(fake, client).comes()
        assert not receipt.done()
        assert first.counters.rows_sent == 1
        await first.abort()
        await second.close()
