"""A topic that goes to another sidecar with a log of its own, under load, and whichever of the two dies meanwhile.

Costs a minute and a half of CPU: some fifty starts.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.client import Client, Producer
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import dying_moving
from tests.client.helpers import ids_in_log

TOPIC = "persistent://public/default/moved"
BEFORE = 200
"""Messages that are there when the move begins: several segments."""

OLD_STEPS = [
    "broker_sidecar.leaving._answer before 1",
    "seqdedupe.log.embedded.moved.leave before",
    "seqdedupe.log.embedded.moved.leave after",
    "broker_sidecar.leaving._answer before 2",
    "broker_sidecar.leaving._answer after 2",
    "seqdedupe.log.embedded.moved.has_left before",
    "seqdedupe.log.embedded.moved.has_left after",
]
NEW_STEPS = [
    "broker_sidecar.arriving._check_is_free before 2",
    "broker_sidecar.arriving._take before",
    "broker_sidecar.arriving.Snapshots before",
    "broker_sidecar.arriving.Closed before",
    "broker_sidecar.arriving._take after",
]


class Two:
    """The sidecar that has the topic, and the one that is to have it."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = (self._made(folder / name) for name in ("old", "new"))

    def _made(self, folder: Path) -> Sidecar:
        sidecar = Sidecar(folder, module=dying_moving.MODULE, environment=dying_moving.environment())
        # Else whichever a client asks first would make another topic of that name.
        sidecar.keys = {"allow_auto_topic_creation": False}
        return sidecar

    def start(self, old: str = "", new: str = "", planted: str = "") -> None:
        self.old._environment = dying_moving.environment(old, planted)
        self.new._environment = dying_moving.environment(new)
        self.dies = self.old if old else self.new if new else None
        self.old.start()
        self.new.start()

    @property
    def addresses(self) -> str:
        return f"{self.old.address},{self.new.address}"

    def revive(self, sidecar: Sidecar) -> None:
        """Starts one that died, without the step."""
        sidecar.wait()
        sidecar._environment = dying_moving.environment()
        sidecar.start()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    for sidecar in (made.old, made.new):
        sidecar.kill()


async def made(two: Two) -> int:
    """The topic with its first messages, at the old one; its incarnation."""
    async with Client(two.old.address) as client:
        await client.admin.create_topic(TOPIC)
        async with client.producer(TOPIC, "p") as producer:
            for receipt in [await producer.send(b"%d" % k * 40) for k in range(BEFORE)]:
                await receipt
        return (await client.admin.topic(TOPIC)).incarnation


async def load(producer: Producer, stopping: asyncio.Event) -> int:
    """Sends until it is told to stop; how many have a receipt, all."""
    receipts = []
    while not stopping.is_set():
        receipts.append(await producer.send(b"under load"))
        await asyncio.sleep(0.002)
    for receipt in receipts:
        await receipt
    return len(receipts)


async def owners(two: Two) -> list[Sidecar]:
    """Who serves the topic."""
    found = []
    for sidecar in (two.old, two.new):
        async with Client(sidecar.address) as client:
            try:
                if (await client.admin.topic(TOPIC)).state == admin_pb2.TOPIC_STATE_SERVING:
                    found.append(sidecar)
            except SeqdedupeError:
                pass
    return found


async def the_owner(two: Two, seconds: float = 120) -> Sidecar:
    async with asyncio.timeout(seconds):
        while len(found := await owners(two)) != 1:
            assert len(found) < 2, "both serve it"
            await asyncio.sleep(0.1)
    return found[0]


async def moved_under_load(two: Two, seconds: float = 30) -> tuple[int, SeqdedupeError | None]:
    """How many messages there are in all, and why the call failed."""
    stopping = asyncio.Event()
    why: SeqdedupeError | None = None
    async with Client(two.addresses) as client, client.producer(TOPIC, "p") as producer:
        sending = asyncio.create_task(load(producer, stopping))
        async with Client(two.old.address) as operator:
            try:
                await operator.admin.move_topic(TOPIC, two.new.address)
            except SeqdedupeError as e:
                why = e
        if two.dies is not None:
            await asyncio.to_thread(two.revive, two.dies)
        try:
            await the_owner(two, seconds)
        finally:
            stopping.set()
        return BEFORE + await asyncio.wait_for(sending, 30), why


async def test_it_moves_under_load_and_nothing_is_lost_or_doubled(two: Two) -> None:
    two.start()
    incarnation = await made(two)
    total, why = await moved_under_load(two)
    assert why is None
    assert await the_owner(two) is two.new
    assert total > BEFORE
    assert await ids_in_log(two.new, TOPIC) == list(range(total))
    async with Client(two.new.address) as client:
        assert (await client.admin.topic(TOPIC)).incarnation == incarnation
    # The old one says where it is, after a start too, and makes no other one of that name.
    for _ in range(2):
        async with Client(two.old.address) as client:
            with pytest.raises(SeqdedupeError) as raised:
                await client.admin.create_topic(TOPIC)
        assert raised.value.numbers["owner_address"] == two.new.address
        two.old.kill()
        two.old.start()


@pytest.mark.parametrize(
    ("died", "step"), [("old", step) for step in OLD_STEPS] + [("new", step) for step in NEW_STEPS]
)
async def test_one_of_them_dies_and_one_of_them_has_it(two: Two, died: str, step: str) -> None:
    two.start(**{died: step})
    incarnation = await made(two)
    total, _ = await moved_under_load(two)
    owner = await the_owner(two)
    assert await ids_in_log(owner, TOPIC) == list(range(total))
    async with Client(owner.address) as client:
        assert (await client.admin.topic(TOPIC)).incarnation == incarnation


async def test_both_would_serve_if_nothing_said_that_it_leaves(two: Two) -> None:
    two.start(old="broker_sidecar.leaving._answer after 2", planted="nothing says that it leaves")
    await made(two)
    with pytest.raises(AssertionError, match="both serve it"):
        await moved_under_load(two)


async def test_none_would_have_it_if_it_were_let_go_before_the_other_one_has_it(two: Two) -> None:
    two.start(new="broker_sidecar.arriving._take before", planted="lets go first")
    await made(two)
    with pytest.raises(TimeoutError):
        await moved_under_load(two, seconds=5)


async def test_what_is_refused_leaves_it_where_it_is(two: Two) -> None:
    two.start()
    await made(two)
    async with Client(two.new.address) as client:
        await client.admin.create_topic(TOPIC)
    async with Client(two.old.address) as client:
        for to, reason in ((two.new.address, "MOVE_FAILED"), ("", "INVALID_ADDRESS"), ("127.0.0.1:1", "MOVE_FAILED")):
            with pytest.raises(SeqdedupeError) as raised:
                await client.admin.move_topic(TOPIC, to)
            assert raised.value.reason == reason
        async with client.producer(TOPIC, "p") as producer:
            await (await producer.send(b"goes on"))
    assert await ids_in_log(two.old, TOPIC) == list(range(BEFORE + 1))
