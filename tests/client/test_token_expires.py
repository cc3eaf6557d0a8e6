"""Tokens that expire while a client is at work: it goes on with a fresh one, and nothing is lost or doubled."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.client import (
    AccessDeniedError,
    Client,
    Credentials,
    OutcomeUnknownError,
    Producer,
    ProducerConfig,
    SeqdedupeError,
    UnavailableError,
    blocking,
)
from seqdedupe.errors import error
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.fronts import Front, fronts
from tests.client.helpers import ids_in_log, until

MESSAGES = 400
FEW = ProducerConfig(max_batch_rows=5)
IMPATIENT = ProducerConfig(delivery_timeout_seconds=6)


class Issuer:
    """Issues tokens, and lets a front take the last one alone. The one before has expired, all others are forged."""

    def __init__(self, front: Front, path: Path) -> None:
        self._numbers: Iterator[int] = itertools.count()
        self._front = front
        self._path = path
        self.last = ""
        self.before = ""
        self.renew()
        front.judges = self._judge

    def issue(self) -> None:
        """Another token, which nobody has yet."""
        self.before, self.last = self.last, f"t0ken-{next(self._numbers)}"
        self._front.judge_again()

    def write(self) -> None:
        """Into the file, as a file that is read meanwhile has to be written."""
        new = self._path.with_suffix(".new")
        new.write_text(self.last)
        new.replace(self._path)

    def renew(self) -> None:
        self.issue()
        self.write()

    def _judge(self, shown: str | None) -> SeqdedupeError | None:
        if shown == f"Bearer {self.last}":
            return None
        if shown == f"Bearer {self.before}":
            return error("TOKEN_EXPIRED", "the token has expired")
        return error("UNAUTHENTICATED", "that is no token of this sidecar's")


@pytest.fixture
async def front(shared_sidecar: Sidecar) -> AsyncIterator[Front]:
    async with fronts(shared_sidecar.address, 1) as (one,):
        yield one


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "token"


@pytest.fixture
def issuer(front: Front, path: Path) -> Issuer:
    return Issuer(front, path)


async def test_producers_and_readers_go_on_with_a_fresh_token(
    shared_sidecar: Sidecar, front: Front, issuer: Issuer, path: Path, topic: str
) -> None:
    shows = Credentials(token_file=path)
    read: list[int] = []
    sent = [0, 0]
    is_over = asyncio.Event()

    async def publish() -> None:
        async with Client(front.address, shows) as client, client.producer(topic, "tasks", FEW) as producer:
            for sent[0] in range(1, MESSAGES + 1):
                await producer.send(b"task")
                await asyncio.sleep(0.001)

    def publish_in_thread() -> None:
        client = blocking.Client(front.address, Credentials(token=path.read_text))
        with client, client.producer(topic, "threads", FEW) as producer:
            for sent[1] in range(1, MESSAGES + 1):
                producer.send(b"thread")
                if sent[1] % 5 == 0:
                    producer.flush()

    async def follow() -> None:
        async with Client(front.address, shows) as client, client.reader(topic, 0, follow=True) as reader:
            async for message in reader:
                read.append(message.index)
                if len(read) == 2 * MESSAGES:
                    return

    async def renew() -> None:
        for late in itertools.cycle([False, True]):
            at = sum(sent)
            await until(lambda at=at: is_over.is_set() or sum(sent) > at + 40)  # type: ignore[misc]
            if is_over.is_set():
                return
            issuer.issue()
            if late:  # it is tried with the old one meanwhile
                await until(lambda: front.shown[-1] == f"Bearer {issuer.before}")
            issuer.write()

    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        renewing = group.create_task(renew())
        await asyncio.gather(publish(), asyncio.to_thread(publish_in_thread))
        is_over.set()
        await renewing
        await following
    assert read == list(range(2 * MESSAGES))
    stored = await ids_in_log(shared_sidecar, topic)
    assert sorted(stored) == sorted([*range(MESSAGES), *range(MESSAGES)])
    assert len(set(front.shown)) > 4


async def test_a_call_is_made_again_with_a_fresh_token(front: Front, issuer: Issuer) -> None:
    issuer.issue()
    answers = iter([issuer.before, issuer.last])
    async with Client(front.address, Credentials(token=lambda: next(answers))) as client:
        await client.admin.version()
    async with Client(front.address, Credentials(token=issuer.before)) as client:
        with pytest.raises(UnavailableError) as e:
            await client.admin.version()
    assert e.value.reason == "TOKEN_EXPIRED"


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_text("")


def leave(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "reason"),
    [(remove, "CREDENTIALS_UNAVAILABLE"), (empty, "CREDENTIALS_UNAVAILABLE"), (leave, "TOKEN_EXPIRED")],
)
async def test_without_a_fresh_token_a_producer_fails_by_its_delivery_timeout(
    front: Front, issuer: Issuer, path: Path, topic: str, happens: Callable[[Path], None], reason: str
) -> None:
    waited_for: list[UnavailableError] = []
    client = Client(front.address, Credentials(token_file=path))
    producer = client.producer(topic, "p", IMPATIENT, on_waiting=waited_for.append)
    async with client:
        await producer.open()
        await (await producer.send(b"one"))
        happens(path)
        issuer.issue()
        receipt = await producer.send(b"two")
        with pytest.raises(OutcomeUnknownError, match=r"no receipt within 6 seconds") as e:
            await receipt
        assert (e.value.numbers["last_refusal"], waited_for[0].reason) == (reason, reason)
        assert "t0ken" not in str(e.value)
        with pytest.raises(OutcomeUnknownError):
            await producer.close()


async def test_it_goes_on_when_the_file_is_back(
    shared_sidecar: Sidecar, front: Front, issuer: Issuer, path: Path, topic: str
) -> None:
    waited_for: list[UnavailableError] = []
    async with (
        Client(front.address, Credentials(token_file=path)) as client,
        client.producer(topic, "p", on_waiting=waited_for.append) as producer,
    ):
        remove(path)
        issuer.issue()
        receipt = await producer.send(b"one")
        await until(lambda: waited_for != [])
        issuer.write()
        assert (await receipt).sequence_id == 0
    assert [why.reason for why in waited_for] == ["CREDENTIALS_UNAVAILABLE"]
    assert await ids_in_log(shared_sidecar, topic) == [0]


async def test_who_is_not_known_does_not_get_in(front: Front, issuer: Issuer, topic: str) -> None:
    for shows in (Credentials(), Credentials(token="f0rged")):
        client = Client(front.address, shows)
        async with client:
            with pytest.raises(AccessDeniedError, match="UNAUTHENTICATED") as e:
                await client.producer(topic, "p").open()
            assert "SEQDEDUPE_TOKEN_FILE" in e.value.hint
            with pytest.raises(AccessDeniedError):
                await client.reader(topic).next_batch()
            with pytest.raises(AccessDeniedError):
                await client.admin.version()
    assert len(front.calls) < 8, "they are not made again"


async def until_it_fails(producer: Producer) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            await producer.flush()
            await asyncio.sleep(0.005)


async def test_who_is_not_known_any_more_does_not_go_on(
    shared_sidecar: Sidecar, front: Front, issuer: Issuer, topic: str
) -> None:
    first = issuer.last
    async with Client(front.address, Credentials(token=first)) as client:
        producer = client.producer(topic, "p")
        idle = client.producer(topic, "idle")
        await producer.open()
        await idle.open()
        front.swallows_receipts = True
        receipt = await producer.send(b"one")
        await until(lambda: front.swallowed > 0)
        front.swallows_receipts = False
        issuer.issue()
        issuer.issue()
        # It is stored: who may not ask is not told so, and must not learn that nothing was changed.
        with pytest.raises(OutcomeUnknownError, match="UNAUTHENTICATED"):
            await receipt
        with pytest.raises(AccessDeniedError):
            await until_it_fails(idle)
        await producer.abort()
        await idle.abort()
    assert await ids_in_log(shared_sidecar, topic) == [0]
