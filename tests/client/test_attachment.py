"""What `BrokerClient` and its attachments keep a broker from doing wrong, against a real sidecar."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from seqdedupe.client import Attachment, BrokerClient, Entry, Range
from seqdedupe.client.pending import Verdict
from seqdedupe.errors import InvalidRequestError, SeqdedupeError
from seqdedupe.limits import MAX_BATCH_ROWS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.proxy import Proxy

HANG_SECONDS = LAST_RESORT_SECONDS


@pytest.fixture(scope="module")
def brokers_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for brokers, that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("brokers"), log="broker") as sidecar:
        yield sidecar


class Log:
    """A broker's log, as a list."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @property
    def last_position(self) -> bytes:
        return self.entries[-1].position if self.entries else b""

    def append(self, name: str, sequence_id: int, position: bytes = b"") -> bytes:
        entry = Entry(Range(name, sequence_id), position or b"%d" % len(self.entries), self.last_position)
        self.entries.append(entry)
        return entry.position

    async def after(self, position: bytes) -> AsyncIterator[Entry]:
        known = position == b""
        for entry in self.entries:
            if known:
                yield entry
            known = known or entry.position == position

    async def attach(self, client: BrokerClient, topic: str) -> Attachment:
        async with asyncio.timeout(HANG_SECONDS):
            return await client.attach(topic, self.after, last_position=self.last_position)


async def publish(attachment: Attachment, log: Log, name: str, first: int, count: int) -> None:
    """This many new messages, written and reported."""
    verdicts = await attachment.check([Range(name, i) for i in range(first, first + count)])
    assert verdicts == [Verdict.NOT_DUP] * count
    for i in range(first, first + count):
        attachment.persisted(log.append(name, i))


async def test_a_log_that_has_lost_its_end_is_not_attached(brokers_sidecar: Sidecar, topic: str) -> None:
    """Nothing is replayed then, and still the log must say where it ends."""
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        await publish(attachment, log, "a", 0, 10)
        # Answers come in order: what was reported before is known.
        await attachment.check([Range("a", 0)])
        attachment.close()
        lost = log.entries.pop()
        with pytest.raises(SeqdedupeError, match="REPLAY_GAP"):
            await log.attach(client, topic)
        log.entries.append(lost)
        assert (await (await log.attach(client, topic)).check([Range("a", 9)])) == [Verdict.DUP]


async def test_an_entry_is_left_out(brokers_sidecar: Sidecar, topic: str) -> None:
    log = Log()
    for i in range(100):
        log.append("a", i)
    del log.entries[50]
    async with BrokerClient(brokers_sidecar.address) as client:
        with pytest.raises(SeqdedupeError, match="REPLAY_GAP"):
            await log.attach(client, topic)


async def test_a_gap_early_in_a_long_replay_ends_it(brokers_sidecar: Sidecar, topic: str) -> None:
    """The refusal comes while there is much to send yet; nobody waits for room that never comes."""
    log = Log()
    for i in range(50_000):
        log.append("a", i, b"p" * 200 + b"%d" % i)
    del log.entries[1]
    async with BrokerClient(brokers_sidecar.address) as client:
        # For a stream that ends while something is being written gRPC does not say why: mostly, so more than once.
        for _ in range(3):
            with pytest.raises(SeqdedupeError, match="REPLAY_GAP"):
                await log.attach(client, topic)


@pytest.mark.parametrize("name", ["", "x" * 256, "\ud800", "a\nb"])
async def test_a_bad_name_ends_no_attachment(brokers_sidecar: Sidecar, topic: str, name: str) -> None:
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        with pytest.raises(SeqdedupeError, match="INVALID_NAME"):
            await attachment.check([Range("good", 0), Range(name, 0)])
        await publish(attachment, log, "good", 0, 1)
        assert attachment.ended is None


@pytest.mark.parametrize("wrong", [Range("a", -1), Range("a", 2**63), Range("a", 3, 1)])
async def test_a_bad_range_is_refused_alone(brokers_sidecar: Sidecar, topic: str, wrong: Range) -> None:
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        with pytest.raises(SeqdedupeError, match="INVALID_SEQUENCE_ID"):
            await attachment.check([Range("a", 0), wrong])
        # Nothing of it was admitted.
        await publish(attachment, log, "a", 0, 1)


async def test_as_many_long_new_names_as_a_check_holds(brokers_sidecar: Sidecar, topic: str) -> None:
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        verdicts = await attachment.check([Range(f"{i:0255}", 7) for i in range(MAX_BATCH_ROWS)])
        assert verdicts == [Verdict.NOT_DUP] * MAX_BATCH_ROWS
        attachment.persisted(log.append("any", 0), MAX_BATCH_ROWS)
        assert await attachment.check([Range(f"{5:0255}", 7)]) == [Verdict.DUP]


async def test_a_reset_waits_for_what_is_in_flight(brokers_sidecar: Sidecar, topic: str) -> None:
    """A check that has no answer yet may have been admitted before the failure came: a reset then would end all."""
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        assert await attachment.check([Range("a", 0)]) == [Verdict.NOT_DUP]
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            attachment.reset()
        unanswered = asyncio.ensure_future(attachment.check([Range("a", 1)]))
        await asyncio.sleep(0)
        attachment.failed()
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            attachment.reset()
        assert await unanswered == [Verdict.NOT_DUP]
        attachment.failed()
        assert await attachment.check([Range("a", 0), Range("b", 0)]) == [Verdict.UNKNOWN] * 2
        attachment.reset()
        await publish(attachment, log, "a", 0, 2)


async def test_reports_that_wait_are_one(brokers_sidecar: Sidecar, topic: str) -> None:
    """A broker reports one entry at a time: what waits to be sent is one report, with failures at its end."""
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        attachment = await log.attach(client, topic)
        verdicts = await attachment.check([Range("a", i) for i in range(100)])
        assert verdicts == [Verdict.NOT_DUP] * 100
        for i in range(90):
            attachment.persisted(log.append("a", i))
        for _ in range(10):
            attachment.failed()
        [waiting] = attachment._to_send
        report = waiting.report
        assert (report.first_admission, report.persisted, report.failed) == (0, 90, 10)
        assert report.position == log.last_position
        attachment.reset()
        assert await attachment.check([Range("a", 89), Range("a", 90)]) == [Verdict.DUP, Verdict.NOT_DUP]
        attachment.persisted(log.append("a", 90))
        assert (await client.producer(topic, "a")) is not None
        assert await attachment.check([Range("a", 90)]) == [Verdict.DUP]


async def test_an_ended_attachment_says_why_however_often(brokers_sidecar: Sidecar, topic: str) -> None:
    log = Log()
    async with BrokerClient(brokers_sidecar.address) as client:
        first = await log.attach(client, topic)
        await log.attach(client, topic)
        lengths = []
        for _ in range(4):
            with pytest.raises(SeqdedupeError, match="another broker has attached") as e:
                await first.check([Range("a", 0)])
            lengths.append(len(traceback.extract_tb(e.value.__traceback__)))
        assert lengths[-1] == lengths[-2]
        with pytest.raises(SeqdedupeError, match="NOT_ATTACHED"):
            first.persisted(b"1")


async def test_nobody_answers(brokers_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Proxy(brokers_sidecar.address) as proxy, BrokerClient(proxy.address) as client:
        (await Log().attach(client, topic)).close()
        monkeypatch.setattr("seqdedupe.client.broker.CALL_TIMEOUT_SECONDS", 0.5)
        proxy.swallows_answers = True
        with pytest.raises(SeqdedupeError, match="UNREACHABLE"):
            await Log().attach(client, topic)


async def test_a_sidecar_that_publishes_takes_no_broker(tmp_path: Path, topic: str) -> None:
    with Sidecar(tmp_path) as sidecar:
        async with BrokerClient(sidecar.address) as client:
            with pytest.raises(InvalidRequestError, match="UNKNOWN_CALL"):
                await Log().attach(client, topic)


async def test_a_client_that_was_closed_connects_anew(brokers_sidecar: Sidecar, topic: str) -> None:
    log = Log()
    client = BrokerClient(brokers_sidecar.address)
    await publish(await log.attach(client, topic), log, "p", 0, 1)
    await client.close()
    await publish(await log.attach(client, topic), log, "p", 1, 1)
    await client.close()
