"""The wrapper from the message to its acknowledgement, on a real sidecar."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from seqdedupe.client import blocking
from seqdedupe.client.blocking import Message as Stored
from seqdedupe.entry_properties import ENTRY
from seqdedupe.functions import pipeline
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.foreign import CODES, answering
from tests.client.fronts import addresses, fronts, move
from tests.client.helpers import until
from tests.client.proxy import Proxy
from tests.conftest import StartSidecar
from tests.functions import examples
from tests.functions.runtime import TOPIC, Ended, Id, Message, Runtime, details, inputs, written

OF_ME = "tests.functions.examples"

Start = Callable[..., Runtime]


def stored(sidecar: Sidecar, topic: str) -> list[Stored]:
    with blocking.Client(sidecar.address) as client, client.reader(topic) as reader:
        return list(reader)


def payloads(sidecar: Sidecar, topic: str) -> list[bytes | None]:
    return [message.payload for message in stored(sidecar, topic)]


@pytest.fixture
def start(shared_sidecar: Sidecar, topic: str) -> Iterator[Start]:
    """Starts instances of one function, whose output topic is the test's own."""

    started: list[Runtime] = []

    def begin(wrapped: str = "Copy", *, address: str = shared_sidecar.address, **config: Any) -> Runtime:
        deployed = config.pop("deployed", None) or details(name=topic)
        name = wrapped if "." in wrapped else f"{OF_ME}.{wrapped}"
        started.append(Runtime(address, name, deployed=deployed, **({"output_topic": topic} | config)))
        return started[-1]

    yield begin
    for runtime in started:
        if runtime.instance is not None:
            runtime.instance.close()


def test_a_copy_is_published_and_acknowledged_in_order(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start()
    runtime.give(inputs(500))
    runtime.until_acknowledged(500)
    assert runtime.entries == list(range(500))
    assert {given for given, _ in runtime.acks} == {TOPIC}
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(500)]


def test_a_module_is_a_function_too(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start(OF_ME)
    runtime.give(inputs(3))
    runtime.until_acknowledged(3)
    assert payloads(shared_sidecar, topic) == [b"0", b"1", b"2"]


def test_an_instance_that_begins_again_doubles_nothing(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    first, second = start(), start()
    first.give(inputs(300))
    first.until_acknowledged(300)
    second.give(inputs(300, first=150))
    second.until_acknowledged(300)
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(450)]


def test_bytes_key_time_and_properties_pass_unchanged(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start()
    given = Message(b" 7 \xff", Id(0), key="k", event_time_ms=77, properties={"a": "b", ENTRY: "x"})
    runtime.give([given])
    runtime.until_acknowledged(1)
    (message,) = stored(shared_sidecar, topic)
    assert message.payload == b" 7 \xff"
    assert message.key == b"k"
    assert message.event_time_ms == 77
    assert message.properties == {"a": "b"}


def test_several_outputs_for_several_topics(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start("Three", output_topic="out")
    runtime.details.name = topic
    began = len(payloads(shared_sidecar, "out")) if "out" in topics(shared_sidecar) else 0
    runtime.give([Message(b"%d" % i, Id(i), key="mine") for i in range(20)])
    runtime.until_acknowledged(20)
    out = payloads(shared_sidecar, "out")[began:]
    assert out == [b"%d%s" % (i, k) for i in range(20) for k in (b"a", b"c")]
    other = [m for m in stored(shared_sidecar, "other") if f"/{topic}/" in m.producer_name]
    assert {(m.key, m.properties["own"]) for m in other} == {(b"k", "yes")}
    assert len(other) == 20


def topics(sidecar: Sidecar) -> set[str]:
    with blocking.Client(sidecar.address) as client:
        return {topic.name.rpartition("/")[2] for topic in client.admin.topics()}


def test_inputs_without_output_are_acknowledged_in_their_turn(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start("Odd")
    runtime.give(inputs(101))
    runtime.until_acknowledged(101)
    assert runtime.entries == list(range(101))
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(1, 101, 2)]


def test_markers_and_control_records_are_acknowledged_unseen(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start()
    kinds = ["marker", None, "control", None]
    runtime.give(
        [Message(b"%d" % i, Id(i), properties=written(i, kind) if kind else {}) for i, kind in enumerate(kinds)]
    )
    runtime.until_acknowledged(4)
    assert runtime.entries == [0, 1, 2, 3]
    assert payloads(shared_sidecar, topic) == [b"1", b"3"]


def test_a_topic_of_packed_batches_is_refused(start: Start) -> None:
    runtime = start()
    with pytest.raises(Exception, match="packed"):
        runtime.give([Message(b"", Id(0), properties=written(0, "batch"))])


def test_by_index_ledgers_do_not_matter(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    first, second = start(identity="index"), start(identity="index")
    first.give([Message(b"%d" % i, Id(i), properties=written(i)) for i in range(10)])
    first.until_acknowledged(10)
    second.give([Message(b"%d" % i, Id(i, ledger_id=8), properties=written(i)) for i in range(5, 15)])
    second.until_acknowledged(10)
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(15)]
    with pytest.raises(Exception, match="written by no sidecar"):
        second.give(inputs(1))


def test_a_serde_is_applied_within(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start(input_serde=f"{OF_ME}.Upper", output_serde=f"{OF_ME}.Upper")
    runtime.give([Message(b"a", Id(0))])
    runtime.until_acknowledged(1)
    assert payloads(shared_sidecar, topic) == [b"<A>"]


@pytest.mark.parametrize(
    ("wrapped", "said"),
    [
        ("no.such.Module", "cannot be imported"),
        ("tests.functions.lacking.Copy", "No module named 'no_such_package'"),
        (f"{OF_ME}.Nothing", "cannot be imported"),
        (f"{OF_ME}.Broken", r"Broken\(\) has failed"),
        (f"{OF_ME}.threading", "no process"),
    ],
)
def test_what_is_no_function_is_refused(start: Start, wrapped: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        start(wrapped).give(inputs(1))


def test_publishing_after_the_return_raises_in_the_function(start: Start) -> None:
    runtime = start("Late")
    runtime.give(inputs(1))
    runtime.until_acknowledged(1)
    assert examples.Late.done.wait(LAST_RESORT_SECONDS)
    assert "after process()" in str(examples.Late.raised)


# -- failing functions ---------------------------------------------------------------------------------------------


def test_a_function_that_fails_once_is_called_again(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start("Twice", retry_delay_ms=1.0)
    runtime.give(inputs(5))
    runtime.until_acknowledged(5)
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(5)]


def test_without_a_topic_for_dead_letters_the_process_would_end(start: Start, topic: str) -> None:
    runtime = start("Fails", bad="1", max_message_retries=1.0, retry_delay_ms=1.0)
    with pytest.raises(Exception, match="fails on message") as failure:
        runtime.give(inputs(3))
    assert getattr(failure.value, "reason", "") == "FUNCTION_FAILED"
    runtime.until_acknowledged(1)
    assert runtime.entries == [0]


def test_a_dead_letter_has_the_input_and_the_error_and_work_goes_on(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    dead = f"dead-{topic}"
    runtime = start("Fails", bad="3,5", max_message_retries=1.0, retry_delay_ms=1.0, dead_letter_topic=dead)
    runtime.give([Message(b"%d" % i, Id(i), key="k", properties={"a": "b"}) for i in range(8)])
    runtime.until_acknowledged(8)
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(8) if i not in (3, 5)]
    letters = stored(shared_sidecar, dead)
    assert [letter.payload for letter in letters] == [b"3", b"5"]
    told = letters[0].properties
    assert told["a"] == "b"
    assert told["dedupe.error"] == "ValueError: bad 3"
    assert told["dedupe.topic"] == TOPIC
    other = [m.payload for m in stored(shared_sidecar, "other") if f"/{topic}/" in m.producer_name]
    assert other == [b"%d" % i for i in range(8) if i not in (3, 5)]


def test_what_a_dead_letter_says_is_settled_is_not_run_again(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    dead = f"dead-{topic}"
    config: dict[str, Any] = {"max_message_retries": 0.0, "dead_letter_topic": dead}
    first = start("Fails", bad="3", **config)
    first.give(inputs(5))
    first.until_acknowledged(5)
    # The second one does not fail on it: but what is settled stays so.
    second = start("Fails", bad="", **config)
    calls = examples.Fails.calls
    second.give(inputs(6, first=2))
    second.until_acknowledged(6)
    assert examples.Fails.calls - calls == 4
    assert payloads(shared_sidecar, dead) == [b"3"]
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(8) if i != 3]


def test_an_output_that_is_too_large_is_the_functions_failure(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start("Large", dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)
    runtime.give(inputs(1))
    runtime.until_acknowledged(1)
    (letter,) = stored(shared_sidecar, f"dead-{topic}")
    assert "MESSAGE_TOO_LARGE" in letter.properties["dedupe.error"]


def test_a_message_that_comes_after_later_ones_is_taken_for_a_duplicate(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    """What raising, a nack or a Shared subscription would do: why `process` never raises, and order is required."""
    runtime = start()
    messages = inputs(10)
    runtime.give([*messages[:3], *messages[4:], messages[3]])
    runtime.until_acknowledged(10)
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(10) if i != 3]


# -- faults --------------------------------------------------------------------------------------------------------


def overlap(first: Runtime, second: Runtime, messages: list[Message]) -> None:
    """Both instances get all messages at the same time."""
    threads = [threading.Thread(target=one.give, args=(messages,)) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in (first, second):
        one.until_acknowledged(len(messages))


def test_two_instances_that_overlap_lose_and_double_nothing(
    start: Start, shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "LONGEST_TRUCE_SECONDS", 0.15)
    first, second = start(max_in_flight_messages=20.0), start(max_in_flight_messages=20.0)
    first.give(inputs(20))
    overlap(first, second, inputs(1500))
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(1500)]
    assert first.instance is not None
    assert first.instance.counts["resumes"] > 0, "nobody was fenced"


def test_two_instances_that_overlap_while_ledgers_come_and_go(
    start: Start, shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "LONGEST_TRUCE_SECONDS", 0.15)
    first, second = start(max_in_flight_messages=20.0), start(max_in_flight_messages=20.0)
    overlap(first, second, [Message(b"%d" % i, Id(0, ledger_id=i)) for i in range(200)])
    assert payloads(shared_sidecar, topic) == [b"%d" % i for i in range(200)]


def test_instances_that_publish_under_names_of_their_own_double(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    first, second = (start(deployed=details(name=f"{topic}-{k}")) for k in range(2))
    overlap(first, second, inputs(50))
    assert len(payloads(shared_sidecar, topic)) == 100


async def test_broken_connections_lose_and_double_nothing(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy:
        runtime = start(address=proxy.address, max_in_flight_messages=50.0)
        giving = asyncio.get_running_loop().run_in_executor(None, runtime.give, inputs(2000))
        for k in range(5):
            await asyncio.to_thread(runtime.until_acknowledged, 300 * (k + 1))
            proxy.swallows_answers = True
            proxy.cut()
            proxy.swallows_answers = False
        await giving
        await asyncio.to_thread(runtime.until_acknowledged, 2000)
    assert runtime.entries == list(range(2000))
    assert await asyncio.to_thread(payloads, shared_sidecar, topic) == [b"%d" % i for i in range(2000)]


def test_a_sidecar_that_is_killed_and_comes_back(start: Start, start_sidecar: StartSidecar, topic: str) -> None:
    sidecar = start_sidecar()
    runtime = start(address=sidecar.address, max_in_flight_messages=30.0)
    giving = threading.Thread(target=runtime.give, args=(inputs(1200),))
    giving.start()
    for k in range(3):
        runtime.until_acknowledged(300 * (k + 1))
        sidecar.kill()
        sidecar.start()
    giving.join()
    runtime.until_acknowledged(1200)
    assert payloads(sidecar, topic) == [b"%d" % i for i in range(1200)]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_what_a_proxy_answers_is_waited_out_and_final_at_the_start(
    start: Start, start_sidecar: StartSidecar, topic: str, code: grpc.StatusCode
) -> None:
    sidecar = await asyncio.to_thread(start_sidecar)
    works, starts = start("OddElsewhere", address=sidecar.address), start(address=sidecar.address)
    await asyncio.to_thread(works.give, [Message(b"0", Id(0))])
    await asyncio.to_thread(works.until_acknowledged, 1)
    await asyncio.to_thread(sidecar.kill)
    async with answering(sidecar.address, code) as calls:
        # To a topic that it has not published to before, too.
        await asyncio.to_thread(works.give, [Message(b"2", Id(1)), Message(b"1", Id(2))])
        await until(lambda: calls["Open"] >= 6)
        await asyncio.to_thread(starts.give, [Message(b"0", Id(0))])
        assert await asyncio.to_thread(starts.process.ended.wait, LAST_RESORT_SECONDS)
    assert not works.process.ended.is_set()
    assert starts.process.failed
    assert code.name in starts.process.why
    assert "a proxy on the way: not here [NOT_A_SIDECAR] Check that the address" in starts.process.why
    assert starts.acks == []
    await asyncio.to_thread(sidecar.start)
    await asyncio.to_thread(works.until_acknowledged, 3)
    assert works.entries == [0, 1, 2]
    assert await asyncio.to_thread(payloads, sidecar, topic) == [b"0", b"2"]
    assert await asyncio.to_thread(payloads, sidecar, "other") == [b"1"]


async def test_it_follows_its_topic_from_sidecar_to_sidecar(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    async with fronts(shared_sidecar.address) as some:
        move(some, some[0])
        runtime = start(address=addresses(some), max_in_flight_messages=50.0)
        giving = asyncio.get_running_loop().run_in_executor(None, runtime.give, inputs(1500))
        for k, owner in enumerate((some[1], some[2], some[0])):
            await asyncio.to_thread(runtime.until_acknowledged, 300 * (k + 1))
            move(some, owner, knows=k != 1)
        await giving
        await asyncio.to_thread(runtime.until_acknowledged, 1500)
        assert all(front.calls for front in some)
    assert runtime.entries == list(range(1500))
    assert await asyncio.to_thread(payloads, shared_sidecar, topic) == [b"%d" % i for i in range(1500)]


def test_data_loss_ends_the_process(start: Start, start_sidecar: StartSidecar, topic: str) -> None:
    sidecar = start_sidecar()
    runtime = start(address=sidecar.address)
    runtime.give(inputs(5))
    runtime.until_acknowledged(5)
    with blocking.Client(sidecar.address) as client:
        client.admin.delete_topic(topic)
    runtime.give(inputs(1, first=5))
    assert runtime.process.ended.wait(LAST_RESORT_SECONDS)
    assert runtime.process.failed
    assert runtime.process.why
    assert len(runtime.acks) == 5


def test_it_waits_for_a_sidecar_and_gives_up_by_ending_the_process(start: Start) -> None:
    runtime = start(address="127.0.0.1:1", give_up_after_seconds=1.0)
    runtime.give(inputs(1))
    assert runtime.process.ended.wait(LAST_RESORT_SECONDS)
    assert runtime.process.failed
    assert "has waited for 1 seconds" in runtime.process.why
    assert "UNREACHABLE" in runtime.process.why
    assert runtime.acks == []


@pytest.mark.parametrize("dead", ["", "dead"])
def test_told_to_stop_it_does_not_wait_on(start: Start, dead: str) -> None:
    runtime = start(address="127.0.0.1:1", max_in_flight_messages=1.0, dead_letter_topic=dead)
    threading.Timer(0.3, setattr, (runtime.process, "is_stopping", True)).start()
    with pytest.raises(Ended, match="asked to stop"):
        runtime.give(inputs(2))
    assert not runtime.process.failed


def test_what_is_in_flight_is_bounded_by_bytes_too(start: Start) -> None:
    runtime = start(address="127.0.0.1:1", max_in_flight_bytes=10_000.0, give_up_after_seconds=600.0)
    threading.Timer(1.0, setattr, (runtime.process, "is_stopping", True)).start()
    with pytest.raises(Ended):
        runtime.give([Message(bytes(3000), Id(i)) for i in range(100)])
    assert runtime.instance is not None
    assert runtime.instance.in_flight <= 4


def test_metrics_are_recorded(start: Start) -> None:
    runtime = start()
    recorded, total = threading.Event(), Counter[str]()

    def record(name: str, value: float) -> None:
        total[name] += int(value)
        if total["dedupe_not_dup"] == 3:
            recorded.set()

    runtime.on_metric = record
    runtime.give(inputs(3))
    assert recorded.wait(LAST_RESORT_SECONDS)
