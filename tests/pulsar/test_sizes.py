"""Entries that a broker or a topic's policy does not take: known before, and where they were not, no damage."""

from collections.abc import AsyncIterator

import pytest

from seqdedupe.errors import InvalidRequestError, UnavailableError
from seqdedupe.log.contract import Failure
from seqdedupe.log.pulsar import writer
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog
from tests.log.batches import encoded_batch
from tests.log.conformance import Owner, replayed, what
from tests.pulsar.conftest import LIMIT_BYTES
from tests.pulsar.owners import Cluster
from tests.pulsar.test_log import INCARNATION, shared

POLICY_BYTES = 600_000
TOO_LARGE = 2 * LIMIT_BYTES
BOTH = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)


async def _learn_nothing(admin: PulsarAdmin) -> None:
    pass


class Logs:
    """For one topic, by a sidecar that asks how large an entry may be, or does not."""

    def __init__(self, cluster: Cluster, topic: str, entry_format: EntryFormat) -> None:
        self._cluster = cluster
        self._topic = topic
        self._settings = EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680")
        self._open: list[PulsarLog] = []

    async def open(self, *, asks: bool = True) -> PulsarLog:
        log = PulsarLog(shared(self._cluster), self._topic, INCARNATION, self._settings)
        if not asks:
            # A log has brokers, which may not answer.
            log._learn_limits = _learn_nothing  # type: ignore[method-assign]
        self._open.append(log)
        await log.begin(0)
        return log

    async def close(self) -> None:
        for log in self._open:
            await log.close()


@pytest.fixture(params=EntryFormat, ids=lambda entry_format: entry_format.value)
async def logs(request: pytest.FixtureRequest, cluster: Cluster, topic: str) -> AsyncIterator[Logs]:
    await cluster.create(topic)
    logs = Logs(cluster, topic, request.param)
    yield logs
    await logs.close()


async def test_what_a_broker_takes_is_asked(cluster: Cluster) -> None:
    assert await Brokers(cluster.service_url).max_entry_bytes() == LIMIT_BYTES
    # For several the first one that answers.
    several = cluster.service_url.replace("//", "//127.0.0.1:1,")
    assert await Brokers(several, lambda: "a token").max_entry_bytes() == LIMIT_BYTES
    for nobody in ("pulsar://127.0.0.1:1", cluster.admin_url.replace("http", "pulsar")):
        with pytest.raises(UnavailableError, match="LOG_UNREADABLE"):
            await Brokers(nobody).max_entry_bytes()


async def test_what_is_too_large_is_refused_before_and_the_rest_is_split(logs: Logs) -> None:
    log = await logs.open()
    owner = await Owner(log, 1).open()
    with pytest.raises(InvalidRequestError, match=f"allow {LIMIT_BYTES} .MESSAGE_TOO_LARGE"):
        log.check(encoded_batch(0, 1, LIMIT_BYTES - 500)[0])
    for first_id, rows, payload_bytes in ((0, 1, LIMIT_BYTES - 2048), (1, 2000, 1500), (2001, 3, LIMIT_BYTES // 2)):
        log.check(encoded_batch(first_id, rows, payload_bytes)[0])
        owner.append(first_id, rows, payload_bytes)
    await owner.until_stored(3)
    ids = [one for record in await replayed(log) for one in record.batch.sequence_ids]
    assert ids == list(range(2004))


async def test_one_that_was_refused_alone_is_no_damage(logs: Logs) -> None:
    """By who did not know, and had more to send."""
    log = await logs.open(asks=False)
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    for first_id in range(1, 6):
        owner.append(first_id, 1, TOO_LARGE if first_id == 2 else 10)
    assert await owner.until_failed() is Failure.UNKNOWN
    assert owner.stored <= 2
    await log.let_go()

    again = await logs.open()
    other = await Owner(again, 2).open()
    # The writer knows what the broker takes, and has sent nothing after it.
    assert not again.skipped.void
    assert again.certain_index == 2
    for first_id in (2, 3, 4):
        other.append(first_id, 1)
    await other.until_stored(3)
    expected = [("marker", 1, 0), ("batch", 0, 1), ("batch", 1, 1), ("marker", 2, 0)]
    expected += [("batch", index, 1) for index in (2, 3, 4)]
    for each in (again, await logs.open()):
        assert [what(record) for record in await replayed(each)] == expected


async def test_a_topics_own_limit_that_is_set_while_it_is_written(
    logs: Logs, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses it each time that it is sent. Opened again, the sidecar knows, and says so at once."""
    monkeypatch.setattr(writer, "SEND_TIMEOUT_SECONDS", 2.0)
    log = await logs.open()
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    await cluster.admin.set_policy(topic, "maxMessageSize", POLICY_BYTES)
    large = encoded_batch(1, 1, POLICY_BYTES + 1)[0]
    log.check(large)
    # Until it is in force.
    first_id = 1
    while owner.failure is None:
        owner.append(first_id, 1, POLICY_BYTES + 1)
        owner.append(first_id + 1, 1)
        await owner.until_settled(first_id + 2)
        first_id += 2
    stored = owner.stored
    again = await Owner(log, 2).open()
    with pytest.raises(InvalidRequestError, match=f"allow {POLICY_BYTES} .MESSAGE_TOO_LARGE"):
        log.check(large)
    assert log.certain_index >= stored
    again.append(log.certain_index, 1)
    await again.until_stored(1)
    await cluster.url.call("DELETE", topic.replace("://", "/") + "/maxMessageSize")
    await log._learn_limits(cluster.admin)
    log.check(large)
