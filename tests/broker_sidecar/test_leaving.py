"""A topic that goes to another sidecar under load, and no matter which of the two is killed meanwhile, at every step.

One pair of sidecars has a topic for each step of a share, and only who died is started again.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.client import Client, Producer
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import dying_moving
from tests.client.helpers import ids_in_log

BEFORE = 120
"""Messages that are there when the move begins: several segments."""

LIMIT_SECONDS = LAST_RESORT_SECONDS

OLD_STEPS = [
    ("broker_sidecar.cluster.departures.Giving._answer", "before", 1),
    ("broker_sidecar.cluster.departures.Giving._answer", "after", 1),
    # While the snapshot is read.
    ("broker_sidecar.cluster.departures.Giving._answer", "before", 2),
    ("broker_sidecar.cluster.departures.Giving._answer", "after", 2),
    ("seqdedupe.log.embedded.log_folder.leave", "before", 1),
    ("seqdedupe.log.embedded.log_folder.leave", "after", 1),
    ("broker_sidecar.cluster.departures.Giving._answer", "before", 3),
    ("broker_sidecar.cluster.departures.Giving._answer", "after", 3),
    ("broker_sidecar.cluster.departures.Departures._let_go", "after", 1),
    ("seqdedupe.log.embedded.log_folder.has_left", "before", 1),
    ("seqdedupe.log.embedded.log_folder.has_left", "after", 1),
    ("seqdedupe.log.embedded.log_folder.remove_messages", "before", 1),
    ("seqdedupe.log.embedded.log_folder.remove_messages", "after", 1),
]
NEW_STEPS = [
    ("seqdedupe.log.embedded.log_folder.Arrival.begin", "after", 1),
    ("seqdedupe.transfer.stored_records.IncomingSnapshot.add", "after", 1),
    ("seqdedupe.transfer.stored_records.IncomingSnapshot.finish", "before", 1),
    ("seqdedupe.transfer.stored_records.IncomingSnapshot.finish", "after", 1),
    ("broker_sidecar.services.arrival_calls.Coming.read", "after", 1),
    ("broker_sidecar.services.arrival_calls._check_is_free", "before", 2),
    ("broker_sidecar.services.arrival_calls._take", "before", 1),
    ("seqdedupe.store.db.Store.put_topics", "after", 1),
    ("seqdedupe.log.embedded.log_folder.Arrival.finish", "before", 1),
    ("seqdedupe.log.embedded.log_folder.Arrival.finish", "after", 1),
    ("seqdedupe.store.db.Store.put_topics", "before", 2),
    ("seqdedupe.store.db.Store.put_topics", "after", 2),
    ("seqdedupe.topic.lives.Lives._begins", "after", 1),
    ("broker_sidecar.services.arrival_calls._take", "after", 1),
    ("seqdedupe.log.embedded.log_folder.is_known", "before", 1),
    ("seqdedupe.log.embedded.log_folder.is_known", "after", 1),
]
BACK_STEPS = [
    ("broker_sidecar.services.arrival_calls._keep_from_who_had_it", "after", 1),
    ("seqdedupe.transfer.stored_records.IncomingSnapshot.add", "after", 1),
    ("seqdedupe.transfer.stored_records.IncomingSnapshot.finish", "after", 1),
    ("broker_sidecar.services.arrival_calls._take", "before", 1),
    ("seqdedupe.store.db.Store.put_topics", "after", 1),
    ("seqdedupe.topic.lives.PublishedTopics.delete", "after", 1),
    ("seqdedupe.log.embedded.log_folder.Arrival.finish", "after", 1),
    ("seqdedupe.store.db.Store.put_topics", "before", 2),
    ("seqdedupe.store.db.Store.put_topics", "after", 2),
]
"""For one that takes a topic back."""


SHARES = 2
"""Every second step is killed at in one test, and the others in another one."""

each_share = pytest.mark.parametrize("share", range(SHARES))


class Two:
    """The sidecar that has the topics, and the one that is to have them."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = (self._made(folder / name) for name in ("old", "new"))
        self.old.keys["peers"], self.new.keys["peers"] = self.new.address, self.old.address
        self.topic = ""

    def _made(self, folder: Path) -> Sidecar:
        environment = {dying_moving.FILE: str(folder / "dies-at")}
        # Else the one that a client asks first would make another topic of that name.
        return Sidecar(folder, module=dying_moving.MODULE, environment=environment, allow_auto_topic_creation=False)

    def plant(self, bug: str) -> None:
        """The old one has a bug from its next start on."""
        self.old.folder.mkdir(parents=True)
        (self.old.folder / "dies-at").with_suffix(dying_moving.PLANTED).write_text(bug)

    def start(self) -> None:
        self.old.start()
        self.new.start()

    @property
    def addresses(self) -> str:
        return f"{self.old.address},{self.new.address}"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    for sidecar in (made.old, made.new):
        sidecar.kill()


async def made(two: Two, topic: str) -> None:
    """A new topic at the old one, with its first messages."""
    async with Client(two.old.address) as client:
        await client.admin.create_topic(topic)
        async with client.producer(topic, "p") as producer:
            for receipt in [await producer.send(b"%d" % k * 40) for k in range(BEFORE)]:
                await receipt


async def load(producer: Producer, stopping: asyncio.Event) -> int:
    """Sends until it is asked to stop; how many have a receipt, all."""
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
            with contextlib.suppress(SeqdedupeError):
                if (await client.admin.topic(two.topic)).state == admin_pb2.TOPIC_STATE_SERVING:
                    found.append(sidecar)
    return found


async def the_owner(two: Two, seconds: float = LIMIT_SECONDS) -> Sidecar:
    async with asyncio.timeout(seconds):
        while len(found := await owners(two)) != 1:
            assert len(found) < 2, "both serve it"
            await asyncio.sleep(0.02)
    return found[0]


def revive(dies: Sidecar | None) -> None:
    """Starts it again when it has died."""
    if dies is not None:
        dies.wait()
        dies.start()


async def moved(
    two: Two, topic: str, dies: Sidecar | None = None, seconds: float = LIMIT_SECONDS, *, is_back: bool = False
) -> tuple[int, SeqdedupeError | None]:
    """Moves it under load, there or back; how many messages are sent meanwhile and before, and why the call failed. Who
    dies is started again."""
    two.topic = topic
    here, there = (two.new, two.old) if is_back else (two.old, two.new)
    stopping = asyncio.Event()
    why: SeqdedupeError | None = None
    async with Client(two.addresses) as client, client.producer(topic, "p") as producer:
        sending = asyncio.create_task(load(producer, stopping))
        reviving = asyncio.create_task(asyncio.to_thread(revive, dies))
        async with Client(here.address) as operator:
            try:
                await asyncio.wait_for(operator.admin.move_topic(topic, there.address), LIMIT_SECONDS)
            except SeqdedupeError as e:
                why = e
        await reviving
        try:
            await the_owner(two, seconds)
        except BaseException:
            sending.cancel()
            raise
        stopping.set()
        return BEFORE + await asyncio.wait_for(sending, LIMIT_SECONDS), why


@each_share
async def test_whoever_is_killed_one_has_it_and_nothing_is_lost_or_doubled(two: Two, share: int) -> None:
    two.start()
    await made(two, "quiet")
    total, why = await moved(two, "quiet")
    assert why is None
    ends = {"quiet": (two.new, total)}
    for dies, steps in ((two.old, OLD_STEPS), (two.new, NEW_STEPS)):
        for number, (step, when, count) in enumerate(steps[share::SHARES]):
            topic = f"{dies.folder.name}-{number}"
            await made(two, topic)
            dying_moving.say(dies.folder / "dies-at", step, when, count)
            total, _ = await moved(two, topic, dies)
            ends[topic] = await the_owner(two), total
            assert await ids_in_log(ends[topic][0], topic) == list(range(total)), (step, when)
    # All of it stays so, no matter what is started again: nothing is taken back, and nothing is there twice.
    two.old.restart()
    two.new.restart()
    for topic, (owner, total) in ends.items():
        two.topic = topic
        assert await the_owner(two) is owner, topic
        assert await ids_in_log(owner, topic) == list(range(total)), topic
    assert {owner.folder.name for owner, _ in ends.values()} == {"old", "new"}
    for sidecar in (two.old, two.new):
        assert not [path for path in (sidecar.data / "logs" / "arriving").rglob("*") if path.is_file()]


@each_share
async def test_one_that_comes_back_has_what_was_there_before_in_its_way(two: Two, share: int) -> None:
    two.start()
    ends: dict[str, int] = {}
    for number, (step, when, count) in enumerate(BACK_STEPS[share::SHARES]):
        topic = f"back-{number}"
        await made(two, topic)
        total, why = await moved(two, topic)
        assert why is None
        dying_moving.say(two.old.folder / "dies-at", step, when, count)
        more, _ = await moved(two, topic, two.old, is_back=True)
        ends[topic] = total + more - BEFORE
        # Wherever it is, it can be moved.
        if await the_owner(two) is two.new:
            more, why = await moved(two, topic, is_back=True)
            assert why is None, (step, when)
            ends[topic] += more - BEFORE
        assert await the_owner(two) is two.old
        assert await ids_in_log(two.old, topic) == list(range(ends[topic])), (step, when)
    two.old.restart()
    two.new.restart()
    for two.topic, total in ends.items():
        assert await the_owner(two) is two.old
        assert await ids_in_log(two.old, two.topic) == list(range(total))


async def test_both_would_serve_if_nothing_said_that_it_leaves(two: Two) -> None:
    two.plant("nothing says that it leaves")
    two.start()
    await made(two, "t")
    dying_moving.say(two.old.folder / "dies-at", "broker_sidecar.cluster.departures.Giving._answer", "after", 3)
    with pytest.raises(AssertionError, match="both serve it"):
        await moved(two, "t", two.old)


async def test_none_would_have_it_if_it_were_let_go_before_the_other_one_has_it(two: Two) -> None:
    two.plant("lets go first")
    two.start()
    await made(two, "t")
    dying_moving.say(two.new.folder / "dies-at", "broker_sidecar.services.arrival_calls._take", "before", 1)
    with pytest.raises(TimeoutError):
        await moved(two, "t", two.new, seconds=3)
