"""What Pulsar's own tests assert, through gRPC, with a broker whose log is a list."""

from collections.abc import Callable
from typing import Any

import pytest

from seqdedupe.client import Client, Range, Verdict
from seqdedupe.testing import Sidecar
from tests.client.helpers import until
from tests.conformance.broker import ListBroker, Stored, position
from tests.conformance.cases import UPSTREAM, names
from tests.conformance.test_core import POKING

StartSidecar = Callable[..., Sidecar]

INACTIVE = {name for name, case in UPSTREAM.items() if any(step["op"] == "purge" for step in case["steps"])}
"""They pretend that time has passed: `test_inactivity` drives them, in this process."""

OTHERWISE = names("Cases that mean nothing here")
DRIVEN = [name for name in UPSTREAM if name not in INACTIVE | OTHERWISE | set(POKING)]


def harms(case: dict[str, Any]) -> bool:
    """Whether a case needs its own sidecar."""
    return "entries_interval" in case.get("config", {}) or any(step["op"] == "recover" for step in case["steps"])


class Case:
    """A case that is driven step by step. A step, or a thing that it expects, that nobody knows is an error."""

    def __init__(self, sidecar: Sidecar, broker: ListBroker) -> None:
        self.sidecar, self.broker = sidecar, broker
        self.published = 0
        self.consumed = 0

    async def do(self, step: dict[str, Any]) -> None:
        await getattr(self, f"_{step['op']}")(step)
        if "appends_total" in step:
            assert self.broker.appends == step["appends_total"]
        if "pushed" in step:
            numbers = await self.broker.numbers(step["producer"])
            assert numbers == tuple(-1 if step[k] is None else step[k] for k in ("pushed", "persisted")), step

    def _stored(self, step: dict[str, Any]) -> Stored:
        chunk = (step["chunk_id"], step["num_chunks"]) if "chunk_id" in step else None
        passes = step.get("marker", False) or (chunk is not None and chunk[0] + 1 < chunk[1])
        highest = max(step["highest"], step["seq"])
        sent = Range(step["producer"], step["seq"], highest, passes)
        return Stored(sent, (step["seq"],), f"my-message-{self.published}", chunk)

    async def _check(self, step: dict[str, Any]) -> None:
        appends = self.broker.appends
        verdict = await self.broker.check(self._stored(step))
        if "expect" in step:
            assert verdict.name == step["expect"], step
        if "reply" in step:
            assert (verdict is Verdict.DUP) == step["reply"]["ok"]
        if "stored" in step:
            assert (self.broker.appends > appends) == step["stored"]

    async def _persisted(self, step: dict[str, Any]) -> None:
        if self.broker.in_flight:
            self.broker.settle(self._stored(step).range)
        else:
            # What is reported as stored without having been asked for: an entry of the log that a replay tells.
            self.broker.log.append(self._stored(step))
            await self.broker.attach()
            assert self.broker.replayed == 1
        if "snapshot_counter" in step:
            await self._snapshot_is(step)

    async def _snapshot_is(self, step: dict[str, Any]) -> None:
        """Counters are not shown; that a snapshot was taken at this entry, or none yet, is."""
        await self.broker.settled(step["producer"])
        taken = step.get("snapshot")
        if taken is None:
            assert self.broker.attached.trim_position == b""
            return
        at = position(taken["position"][1])
        await until(lambda: self.broker.attached.trim_position == at)
        await self._recover({"kind": "broker restart"})
        assert self.broker.replayed == 0
        for name, persisted in taken["map"].items():
            assert (await self.broker.numbers(name)).persisted == persisted

    async def _failed(self, step: dict[str, Any]) -> None:
        self.broker.fail()

    async def _reset(self, step: dict[str, Any]) -> None:
        self.broker.fail()

    async def _state(self, step: dict[str, Any]) -> None:
        await self.broker.settled(next(iter(step["producers"])))
        async with Client(self.sidecar.address) as client:
            known = await client.admin.producers(self.broker.topic)
        assert step["exact"]
        found = {one.name: {"pushed": one.pushed, "persisted": one.persisted} for one in known if one.pushed >= 0}
        assert found == step["producers"]
        if "snapshot_counter" in step:
            assert self.broker.replayed == step["snapshot_counter"]

    async def _connect(self, step: dict[str, Any]) -> None:
        assert (await self.broker.numbers(step["producer"])).pushed == step["last_sequence_id"]

    async def _disconnect(self, step: dict[str, Any]) -> None:
        self.broker.attached.release(step["producer"])

    async def _publish(self, step: dict[str, Any]) -> None:
        verdict = await self.broker.publish(self._stored(step))
        self.published += 1
        # The test broker has nothing in flight when it is asked again: Unknown comes to an end before that.
        assert verdict.name == step["expect"].replace("DUP_OR_UNKNOWN_THEN_DUP", "DUP"), step
        assert (verdict is Verdict.NOT_DUP) == step["stored"]

    async def _publish_range(self, step: dict[str, Any]) -> None:
        before = len(self.broker.log)
        for sequence_id in range(step["from"], step["from"] + step["count"]):
            await self.broker.publish(Stored(Range(step["producer"], sequence_id), (sequence_id,)))
            assert step["last_sequence_id_each"] == "=seq"
            assert (await self.broker.numbers(step["producer"])).pushed == sequence_id
        assert len(self.broker.log) - before == step["stored"]

    async def _consume(self, step: dict[str, Any]) -> None:
        while self.broker.in_flight:
            self.broker.settle()
        since, self.consumed = self.broker.log[self.consumed :], len(self.broker.log)
        if "expect" in step:
            assert [entry.payload for entry in since] == step["expect"]
        else:
            assert lengths(since) == step["expect_lengths"]

    async def _recover(self, step: dict[str, Any]) -> None:
        if "snapshot" in step:
            await self._snapshot_of(step["snapshot"])
            for entry in step["log"]:
                self.broker.log.append(self._stored(entry))
                assert position(len(self.broker.log) - 1) == position(entry["position"][1])
        self.sidecar.restart()
        await self.broker.attach()

    async def _snapshot_of(self, snapshot: dict[str, Any]) -> None:
        """Makes one that says this: the last entry has the highest ID."""
        [(name, persisted)] = snapshot["map"].items()
        last = snapshot["position"][1]
        for number in range(last + 1):
            await self.broker.publish(Stored(Range(name, persisted - last + number)))
        async with Client(self.sidecar.address) as client:
            await self.broker.settled(name)
            await client.admin.snapshot(self.broker.topic)
        self.broker.replayed = 0


def lengths(entries: list[Stored]) -> list[int]:
    """The lengths of the messages that a consumer puts together: a chunk that comes again is dropped."""
    whole, have = [], 0
    for entry in entries:
        assert entry.chunk is not None
        have += entry.chunk[0] == have
        if have == entry.chunk[1]:
            whole.append(have)
            have = 0
    return whole


@pytest.mark.parametrize("name", DRIVEN)
async def test_pulsars_case(name: str, for_brokers: Sidecar, start_sidecar: StartSidecar, topic: str) -> None:
    case = UPSTREAM[name]
    sidecar = for_brokers
    if harms(case):
        every = case.get("config", {}).get("entries_interval", 1000)
        sidecar = start_sidecar(log="broker", deduplication_entries_interval=every)
    broker = ListBroker(sidecar.address, topic)
    await broker.attach()
    driven = Case(sidecar, broker)
    for step in case["steps"]:
        await driven.do(step)
    await broker.close()


def test_every_case_is_driven_or_listed() -> None:
    assert len(UPSTREAM) == 14
    assert set(UPSTREAM) >= OTHERWISE, "a case is listed that is none"
    assert not INACTIVE & OTHERWISE
    assert len(DRIVEN) == len(UPSTREAM) - len(INACTIVE) - len(OTHERWISE) - len(POKING)


def test_two_attachments_of_one_topic_do_not_share_a_replay() -> None:
    assert {"Recovery.concurrentStatusChecksShareOneReplay"} == OTHERWISE
