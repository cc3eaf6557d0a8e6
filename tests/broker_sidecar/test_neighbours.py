"""Whether another sidecar answers, which decides whether its topics may be taken from it; and its snapshots."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from broker_sidecar.cluster import peers
from broker_sidecar.cluster.peers import Neighbours
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar, reserved_port
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import Client, batch
from tests.client.foreign import listening

STOPPED_SECONDS = 0.5


async def test_one_that_serves_answers(shared_sidecar: Sidecar) -> None:
    assert await Neighbours().answers(shared_sidecar.address)


async def test_one_that_is_stopped_as_a_whole_does_not(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are taken all the same."""
    sidecar.signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "ANSWER_SECONDS", STOPPED_SECONDS)
        assert not await Neighbours().answers(sidecar.address)
    sidecar.signal(signal.SIGCONT)
    assert await _will_answer(sidecar.address)


async def _will_answer(address: str) -> bool:
    """One that was stopped takes its time."""
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not await Neighbours().answers(address):
            pass
    return True


async def test_nobody_does_not() -> None:
    with reserved_port() as nobody:
        assert not await Neighbours().answers("{}:{}".format(*nobody.getsockname()))


async def test_an_empty_answer_of_no_sidecar_is_none(tmp_path: Path) -> None:
    """It would say that the other one does not have a topic that was given to it: both would serve it."""

    class Foreign(grpc.GenericRpcHandler):
        def service(self, _: Any) -> Any:
            async def say(_: bytes, __: Any) -> bytes:
                return b""

            return grpc.unary_unary_rpc_method_handler(say)

    address = f"unix:{tmp_path}/socket"
    async with listening(address, Foreign()):
        for name, request in (
            ("SettleMove", admin_pb2.SettleMoveRequest()),
            ("TakeTopic", admin_pb2.TakeTopicRequest()),
            ("ListTopics", admin_pb2.ListTopicsRequest()),
        ):
            with pytest.raises(SeqdedupeError) as caught:
                await Neighbours().ask(address, name, request)
            assert caught.value.reason == "NOT_A_SIDECAR"


async def test_who_refuses_the_question_answers() -> None:
    """A server without health: its event loop moves."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await Neighbours().answers(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


MANY = 4000
"""Producers: their snapshot comes in several parts."""


@pytest.fixture
def exported(shared_sidecar: Sidecar, topic: str) -> list[admin_pb2.ExportSnapshotResponse]:
    """The topic's snapshot as the sidecar gives it."""
    client = Client(shared_sidecar.address)
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic))
    names = [f"p{i}" for i in range(MANY)]
    for some in (names[:2000], names[2000:]):
        epochs = client.epochs(topic, *some)
        client.publish_unary(topic, batch([(name, 7) for name in some], epochs, dict.fromkeys(some, -1)))
    answers = list(client.admin.ExportSnapshot(admin_pb2.ExportSnapshotRequest(topic=topic)))
    assert len(answers) > 2
    client.close()
    return answers


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_snapshot_comes_whole(
    shared_sidecar: Sidecar, topic: str, exported: list[admin_pb2.ExportSnapshotResponse], is_listed: bool
) -> None:
    among = Sidecars.parse(shared_sidecar.address) if is_listed else None
    incarnation, loaded = await Neighbours(among).snapshot_of(shared_sidecar.address, topic_name(topic))
    head = exported[0].part.head
    assert (incarnation, loaded.next_index, loaded.term) == (head.position.incarnation, MANY, head.term)
    assert sorted(loaded.names.some()) == sorted(b"p%d" % i for i in range(MANY))
    assert set(loaded.persisted.tolist()) == {7}


Answers = list[admin_pb2.ExportSnapshotResponse]


@asynccontextmanager
async def giving(given: Answers, *, then: Callable[[], Any]) -> AsyncIterator[str]:
    """The address of somebody who answers with these, and then does that."""

    async def export(_: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(())
        for answer in given:
            yield answer.SerializeToString()
        await then()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"ExportSnapshot": grpc.unary_stream_rpc_method_handler(export)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("seqdedupe.v1.AdminService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ends() -> None: ...


def without_its_end(given: Answers) -> Answers:
    return given[:-1]


def without_its_head(given: Answers) -> Answers:
    return given[1:]


def with_a_part_again(given: Answers) -> Answers:
    return [*given, given[-1]]


def of_another_topic(given: Answers) -> Answers:
    given[0].part.head.topic += "-another"
    return given


def of_nothing(_: Answers) -> Answers:
    return []


def in_a_term_that_cannot_be(given: Answers) -> Answers:
    given[0].part.head.term = 0
    return given


def too_large(given: Answers) -> Answers:
    given[1].part.producer_names += bytes(2**20)
    return given


@pytest.mark.parametrize(
    "changed",
    [
        without_its_end,
        without_its_head,
        with_a_part_again,
        of_another_topic,
        of_nothing,
        in_a_term_that_cannot_be,
        too_large,
    ],
)
async def test_what_is_no_snapshot_of_the_topic_is_refused(
    topic: str, exported: Answers, changed: Callable[[Answers], Answers]
) -> None:
    async with giving(exported, then=ends) as address:
        await Neighbours().snapshot_of(address, topic_name(topic))
    async with giving(changed(exported), then=ends) as address:
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            await Neighbours().snapshot_of(address, topic_name(topic))


async def test_one_that_says_nothing_more_is_left(
    topic: str, exported: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENT_SECONDS", STOPPED_SECONDS)
    monkeypatch.setattr(peers, "TURN_SECONDS", STOPPED_SECONDS)
    for given in ([], exported[:-1]):
        async with giving(given, then=asyncio.Event().wait) as address:
            with pytest.raises(SeqdedupeError, match="UNREACHABLE"):
                await Neighbours().snapshot_of(address, topic_name(topic))


async def test_one_whose_turn_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing while its export waits for a place."""
    monkeypatch.setattr(peers, "SILENT_SECONDS", STOPPED_SECONDS)

    async def ends_late() -> None:
        await asyncio.sleep(2 * STOPPED_SECONDS)

    async with giving([], then=ends_late) as address:
        # Then it learns that there are no parts.
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            await Neighbours().snapshot_of(address, topic_name("t"))


@pytest.mark.parametrize("among", ["127.0.0.1:1", "127.0.0.1:1,*.example.org"])
async def test_who_is_not_listed_is_not_asked(shared_sidecar: Sidecar, topic: str, among: str) -> None:
    with pytest.raises(SeqdedupeError, match="is not asked"):
        await Neighbours(Sidecars.parse(among)).snapshot_of(shared_sidecar.address, topic_name(topic))


async def test_what_the_owner_refuses_is_told(shared_sidecar: Sidecar) -> None:
    with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
        await Neighbours().snapshot_of(shared_sidecar.address, topic_name("nothing-of-that-name"))
    with reserved_port() as nobody, pytest.raises(SeqdedupeError, match="UNREACHABLE"):
        await Neighbours().snapshot_of("{}:{}".format(*nobody.getsockname()), topic_name("t"))
