"""What a client does with a real sidecar: what it writes and reads, and that nothing is lost or doubled by faults."""

import asyncio
import base64
import itertools
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from seqdedupe.client import Client as PythonClient
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import batch_pb2
from tests.client.foreign import answering_http
from tests.client.proxy import Proxy
from tests.client_conformance.conftest import ROOT, python_program
from tests.client_conformance.lines import Client, Command, Message, Program, numbered

HIGHEST = 2**63 - 1
PARTS = 12
ROUNDS = 4
CONTROLS = 10
REJECTED = "each message is there once and in order"
NAMES = "abc"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, for proxies and for what the harness itself asks a sidecar."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(loop: asyncio.AbstractEventLoop, work: Awaitable[Any]) -> Any:
    async def awaited() -> Any:
        return await work

    return asyncio.run_coroutine_threadsafe(awaited(), loop).result()


def ask(loop: asyncio.AbstractEventLoop, sidecar: Sidecar, act: Callable[[PythonClient], Awaitable[Any]]) -> Any:
    """What an operator does at the sidecar."""

    async def asked() -> Any:
        async with PythonClient(sidecar.address) as client:
            return await act(client)

    return run(loop, asked())


@pytest.fixture
def proxy(real: Sidecar, loop: asyncio.AbstractEventLoop) -> Iterator[Proxy]:
    """A proxy before the sidecar."""

    async def made() -> Proxy:
        return await Proxy(real.address).__aenter__()

    proxy = run(loop, made())
    yield proxy
    run(loop, proxy.__aexit__())


@pytest.fixture
def connected(program: Program, real: Sidecar) -> Program:
    program.connect(real.address)
    return program


def stored(program: Program, messages: list[Message] | list[int], on: str = "p") -> list[int]:
    """Sends new messages, and returns their indexes when they have their receipts."""
    receipts = program.send(messages, on).receipts()
    assert {verdict for _, verdict, _ in receipts} == {"NOT_DUP"}, program.said("a new message is NOT_DUP")
    return [index for _, _, index in receipts]


def until_called_again(program: Program, came: list[int]) -> None:
    """Waits for two more requests."""
    before = len(came)
    program.until(lambda: len(came) > before + 1, "calls at the proxy")


def position_of(members: dict[str, Any]) -> batch_pb2.Position:
    return batch_pb2.Position.FromString(base64.b64decode(members["position"]))


# -- What is sent is read.


def test_what_is_sent_is_read_back_field_by_field(connected: Program, topic: str) -> None:
    messages = [
        Message(0, b"\x00\xff", b"key", (("a", "1"), ("b", "é\n")), 1_700_000_000_000),
        Message(2**53 + 1, None, b"", (), -1),
        Message(HIGHEST - 1, b"", b"\xff", (("empty", ""),), HIGHEST),
        Message(HIGHEST, b"last"),
    ]
    assert connected.open(topic) == -1
    assert stored(connected, messages) == [0, 1, 2, 3]
    assert connected.read_all(topic) == messages
    connected.call("close", "p")
    assert connected.open(topic) == HIGHEST


def test_a_copy_is_dup_and_names_its_original(connected: Program, topic: str) -> None:
    connected.open(topic)
    stored(connected, numbered([10, 20]))
    connected.call("close", "p")
    assert connected.open(topic) == 20
    command = connected.send([5, 10, 20, 30])
    assert command.receipts() == [(5, "DUP", -1), (10, "DUP", 0), (20, "DUP", 1), (30, "NOT_DUP", 2)]
    ids = [one["message_id"] for one in command.ok()["receipts"]]
    assert ids[0] is None
    assert [one[1:] for one in ids[1:]] == [["0", -1], ["1", -1], ["2", -1]]
    assert connected.read_all(topic) == numbered([10, 20, 30])


def test_the_largest_payload_passes_and_a_larger_one_is_refused(connected: Program, topic: str) -> None:
    connected.open(topic)
    largest = Message(1, b"x" * MAX_PAYLOAD_BYTES)
    stored(connected, [largest])
    connected.send([Message(2, b"x" * (MAX_PAYLOAD_BYTES + 1))]).error("MESSAGE_TOO_LARGE")
    assert connected.read_all(topic) == [largest]


def test_an_id_that_does_not_rise_is_refused(connected: Program, topic: str) -> None:
    connected.open(topic)
    stored(connected, [7])
    connected.send([7]).error("NOT_ASCENDING")
    assert connected.read_all(topic) == numbered([7])


def test_several_producers_of_one_topic(connected: Program, topic: str) -> None:
    """Each has its order."""
    names = ["a", "b", "ü", "d"]
    for name in names:
        connected.open(topic, name)
    commands = [connected.send(range(k, k + 10), name) for k in range(0, 50, 10) for name in names]
    for command in commands:
        assert {verdict for _, verdict, _ in command.receipts()} == {"NOT_DUP"}
    connected.call("open_reader", "r", topic=topic, start="earliest")
    found: dict[str, list[int]] = {name: [] for name in names}
    for one in connected.call("read", "r", count=1000)["messages"]:
        found[one["producer_name"]].append(int(one["sequence_id"]))
    assert found == {name: [*range(50)] for name in names}


def test_who_opens_a_name_later_fences_who_had_it(connected: Program, topic: str) -> None:
    connected.open(topic, "old", producer_name="p")
    stored(connected, [1], "old")
    assert connected.open(topic, "new", producer_name="p") == 1
    connected.send([2], "old").error("FENCED")
    connected.send([3], "old").error("FENCED")
    stored(connected, [2], "new")
    assert connected.read_all(topic) == numbered([1, 2])


# -- Readers.


def test_a_reader_starts_and_stops_where_it_is_told(connected: Program, topic: str) -> None:
    connected.open(topic)
    stored(connected, [*range(10)])

    def read(start: Any, count: int = 100, **more: Any) -> tuple[list[int], bool]:
        connected.call("open_reader", "r", topic=topic, start=start, **more)
        answer = connected.call("read", "r", count=count)
        connected.call("close", "r")
        return [int(one["index"]) for one in answer["messages"]], answer["ended"]

    assert read("earliest") == ([*range(10)], True)
    assert read({"index": "7"}) == ([7, 8, 9], True)
    assert read({"index": "2"}, stop_index="4") == ([2, 3], True)
    assert read("earliest", count=3) == ([0, 1, 2], False)
    connected.call("open_reader", "r", topic=topic, start={"index": "4"})
    (fifth,) = connected.call("read", "r", count=1)["messages"]
    assert position_of(fifth).message_id.entry_id == 4
    assert fifth["message_id"] == [str(position_of(fifth).incarnation), "4", -1]
    connected.call("close", "r")
    assert read({"position": fifth["position"]}) == ([5, 6, 7, 8, 9], True)
    ends = connected.call("ends", topic=topic)
    assert (ends["first_index"], ends["last_index"]) == ("0", "9")


def test_a_reader_that_follows_waits(connected: Program, topic: str) -> None:
    connected.open(topic)
    stored(connected, [1])
    connected.call("open_reader", "r", topic=topic, start="earliest", follow=True)
    assert connected.begin("read", "r", count=1).messages() == numbered([1])
    waits = connected.begin("read", "r", count=2)
    stored(connected, [2])
    assert waits.answer is None
    stored(connected, [3])
    assert waits.messages() == numbered([2, 3])


def test_positions_that_cannot_be_read_on_from(
    connected: Program, topic: str, real: Sidecar, loop: asyncio.AbstractEventLoop
) -> None:
    connected.open(topic)
    stored(connected, [1, 2, 3])
    connected.call("open_reader", "r", topic=topic, start={"index": "1"})
    (second,) = connected.call("read", "r", count=1)["messages"]

    def error(position: batch_pb2.Position, reason: str) -> None:
        text = base64.b64encode(position.SerializeToString()).decode()
        connected.call("open_reader", "x", topic=topic, start={"position": text})
        connected.begin("read", "x", count=1).error(reason)
        connected.call("close", "x")

    after = position_of(second)
    after.message_id.entry_id = after.index = 99
    error(after, "POSITION_AFTER_END")
    ask(loop, real, lambda client: client.admin.delete_topic(topic))
    ask(loop, real, lambda client: client.admin.create_topic(topic))
    error(position_of(second), "POSITION_OF_ANOTHER_INCARNATION")


def test_cursors(connected: Program, topic: str) -> None:
    connected.needs("cursors")
    connected.open(topic)
    stored(connected, [1, 2])
    connected.call("open_reader", "r", topic=topic, start="earliest")
    first, second = ({"position": one["position"]} for one in connected.call("read", "r", count=2)["messages"])
    of = {"topic": topic, "name": "c"}
    assert connected.call("get_cursor", **of) == {"kept": None}
    one, two = first | {"note": "ü"}, second | {"note": ""}
    connected.call("move_cursor", expected=None, new=one, **of)
    assert connected.call("get_cursor", **of) == {"kept": one}
    connected.begin("move_cursor", expected=two, new=two, **of).error("CURSOR_MOVED")
    connected.begin("move_cursor", expected=None, new=two, **of).error("CURSOR_MOVED")
    connected.call("move_cursor", expected=one, new=two, **of)
    assert connected.call("get_cursor", **of) == {"kept": two}


# -- Deduplication IDs.


def test_a_publisher(connected: Program, topic: str, real: Sidecar, loop: asyncio.AbstractEventLoop) -> None:
    connected.needs("publisher")
    ask(loop, real, lambda client: client.admin.create_topic(topic, deduplication_mode="deduplication-id"))
    connected.call("open_publisher", "i", topic=topic)
    first = [Message(b"\xff\x00", b"a", b"k", (("p", "v"),), 5), Message(b"i" * 255, None)]
    indexes = {one: index for one, _, index in connected.send(first, "i").receipts()}
    assert sorted(indexes.values()) == [0, 1]
    again = connected.send([*first, Message(b"new", b"")], "i").receipts()
    assert [(one, verdict) for one, verdict, _ in again] == [
        (b"\xff\x00", "DUP"),
        (b"i" * 255, "DUP"),
        (b"new", "NOT_DUP"),
    ]
    assert {one: index for one, _, index in again} == indexes | {b"new": 2}
    assert sorted(connected.read_all(topic)) == sorted([*first, Message(b"new", b"")], key=lambda one: one.id)
    sending = [connected.send([Message(b"%d" % k, b"x")], "i") for k in range(5)]
    real.restart()
    sending += [connected.send([Message(b"%d" % k, b"x")], "i") for k in range(5, 10)]
    for command in sending:
        command.ok()
    assert len(connected.read_all(topic)) == 13


# -- Faults.


def test_kill_9_of_the_sidecar(connected: Program, topic: str, real: Sidecar) -> None:
    """Producers send and a reader follows meanwhile: all there, once, in order."""
    names = ["a", "b", "c"]
    for name in names:
        connected.open(topic, name)
    connected.call("open_reader", "r", topic=topic, start="earliest", follow=True)
    reading = connected.begin("read", "r", count=PARTS * 10 * len(names))
    commands = []
    for part in range(PARTS):
        commands += [connected.send(range(part * 10, part * 10 + 10), name) for name in names]
        if part % 4 == 1:
            commands[part].ok()
            real.restart()
    for command in commands:
        command.ok()
    found: dict[str, list[int]] = {name: [] for name in names}
    messages = reading.ok()["messages"]
    assert [int(one["index"]) for one in messages] == [*range(len(messages))]
    for one in messages:
        found[one["producer_name"]].append(int(one["sequence_id"]))
    assert found == {name: [*range(PARTS * 10)] for name in names}


def test_connections_that_are_cut(program: Program, topic: str, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
    """And answers that never arrive: what was stored is Dup when it is sent again."""
    program.connect(proxy.address)
    program.open(topic)
    program.call("open_reader", "r", topic=topic, start="earliest", follow=True)
    reading = program.begin("read", "r", count=PARTS * 10)
    commands = []
    for part in range(PARTS):
        commands.append(program.send(range(part * 10, part * 10 + 10)).accepted())
        if part % 3 == 1:
            proxy.swallows_answers = True
            commands.append(program.send([]))
            loop.call_soon_threadsafe(proxy.cut)
            proxy.swallows_answers = False
    for command in commands:
        command.ok()
    assert reading.messages() == numbered(range(PARTS * 10))


def test_a_proxy_that_answers_by_itself_is_waited_for(
    program: Program, topic: str, proxy: Proxy, real: Sidecar, loop: asyncio.AbstractEventLoop
) -> None:
    """A 404 and a 502 with a page, in the middle of a session."""
    program.connect(proxy.address)
    program.open(topic)
    stored(program, [1])
    for number, status in enumerate((404, 502), start=2):
        pages = answering_http(status)
        address, came = run(loop, pages.__aenter__())
        proxy.leads_to(address)
        loop.call_soon_threadsafe(proxy.cut)
        command = program.send([number]).accepted()
        until_called_again(program, came)
        program.check()
        proxy.leads_to(real.address)
        run(loop, pages.__aexit__(None, None, None))
        assert command.receipts() == [(number, "NOT_DUP", number - 1)]
    assert program.read_all(topic) == numbered([1, 2, 3])


@pytest.fixture(params=range(75))
def seed(request: pytest.FixtureRequest) -> int:
    """Of a history of kills."""
    return int(request.param)


def test_kills_of_client_and_sidecar(
    seed: int, program: Program, topic: str, real: Sidecar, loop: asyncio.AbstractEventLoop
) -> None:
    """In each round, kill -9 of the sidecar, and then of the client's process, in the middle of what is sent. The next
    process goes on after what Open says; what has a deduplication ID and no receipt it sends again."""
    rng, client, by_id = random.Random(seed), program.client, f"{topic}-ids"
    publishes = program.has("publisher")
    ask(loop, real, lambda one: one.admin.create_topic(by_id, deduplication_mode="deduplication-id"))
    confirmed, ids = dict.fromkeys(NAMES, -1), 0
    pending: dict[int, Message] = {}
    try:
        for _ in range(ROUNDS):
            last = opened(program, topic, real, confirmed)
            sending: list[tuple[Command, str, int]] = []
            publishing: list[tuple[Command, list[int]]] = []
            if publishes:
                program.call("open_publisher", "i", topic=by_id)
                publishing = [(program.send(pending.values(), "i"), [*pending])] if pending else []
            for part in range(PARTS):
                for name in NAMES:
                    first, last[name] = last[name] + 1, last[name] + rng.randint(1, 50)
                    sending.append((program.send(range(first, last[name] + 1), name), name, last[name]))
                if publishes:
                    some = {k: Message(b"%d" % k) for k in range(ids, ids + 20)}
                    ids += len(some)
                    pending |= some
                    publishing.append((program.send(some.values(), "i"), [*some]))
                if part == PARTS // 2:
                    rng.choice(sending)[0].ok()
                    real.restart()
            rng.choice(sending)[0].ok()
            program.kill()
            for command, name, upto in sending:
                if command.answer is not None:
                    command.ok()
                    confirmed[name] = max(confirmed[name], upto)
            for command, some_ids in publishing:
                if command.answer is not None:
                    command.ok()
                    for one in some_ids:
                        pending.pop(one, None)
            program = Program(client)
        last = opened(program, topic, real, confirmed)
        program.call("open_reader", "r", topic=topic, start="earliest")
        found: dict[str, list[Message]] = {name: [] for name in NAMES}
        for one in program.call("read", "r", count=1_000_000)["messages"]:
            found[one["producer_name"]].append(Message.of(one))
        for name in NAMES:
            pairs = itertools.zip_longest(found[name], numbered(range(last[name] + 1)))
            first_wrong = next(((name, k, *pair) for k, pair in enumerate(pairs) if pair[0] != pair[1]), None)
            assert first_wrong is None, program.said(REJECTED)
        if publishes:
            program.call("open_publisher", "i", topic=by_id)
            if pending:
                program.send(pending.values(), "i").ok()
            stored_ids = sorted(int(one.id) for one in program.read_all(by_id))
            assert stored_ids == [*range(ids)], program.said("each deduplication ID is there once")
    finally:
        program.kill()


def test_the_control_who_sends_again_under_other_ids_is_rejected(
    topic: str, real: Sidecar, loop: asyncio.AbstractEventLoop
) -> None:
    """By the first history whose kills meet something under way."""
    why = ""
    for seed in range(CONTROLS):
        program = Program(Client("renumbers", python_program("--fault", "renumbers-a-resend"), ROOT))
        try:
            test_kills_of_client_and_sidecar(seed, program, f"{topic}-{seed}", real, loop)
        except AssertionError as e:
            why = str(e)
            if REJECTED in why:
                break
    assert REJECTED in why, why


def opened(program: Program, topic: str, real: Sidecar, confirmed: Mapping[str, int]) -> dict[str, int]:
    """The names are open in this process. Returns the last ID of each, in the log."""
    program.connect(real.address)
    last = {name: program.open(topic, name) for name in NAMES}
    assert all(last[name] >= confirmed[name] for name in NAMES), program.said("what has a receipt is gone")
    return last


def test_an_older_copy_of_the_data_is_data_loss(connected: Program, topic: str, real: Sidecar) -> None:
    """For a producer, and for a reader that was beyond it."""
    connected.open(topic)
    stored(connected, [0])
    connected.call("open_reader", "r", topic=topic, start="earliest", follow=True)
    copy = real.folder / f"copy-{topic}"
    assert real.stop() == 0
    shutil.copytree(real.data, copy)
    real.start()
    stored(connected, [1, 2, 3])
    assert connected.begin("read", "r", count=4).messages() == numbered(range(4))
    real.kill()
    command, reading = connected.send([4]), connected.begin("read", "r", count=1)
    shutil.rmtree(real.data)
    copy.rename(real.data)
    real.start()
    command.error("DATA_LOSS")
    reading.error("POSITION_AFTER_END", "POSITION_DIVERGED", "DATA_LOSS")
    connected.send([5]).error("DATA_LOSS")
    assert connected.read_all(topic, "again") == numbered([0])


def test_a_topic_that_was_made_again_is_data_loss(
    connected: Program, topic: str, real: Sidecar, loop: asyncio.AbstractEventLoop
) -> None:
    connected.open(topic)
    stored(connected, [0])
    ask(loop, real, lambda client: client.admin.delete_topic(topic))
    ask(loop, real, lambda client: client.admin.create_topic(topic))
    connected.send([1]).error("DATA_LOSS", "TOPIC_NOT_FOUND")  # the stream may hear of the deletion first
    assert connected.read_all(topic) == []
