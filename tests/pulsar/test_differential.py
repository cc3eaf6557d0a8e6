"""Side by side with Pulsar's own deduplication, on the same broker: verdict by verdict."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pulsar_broker.standalone import Broker
from seqdedupe.log.pulsar.entries import EntryFormat
from tests.conformance.cases import DIFFERENTIAL, SIDECARS_LOG, compare, hold_against_the_page, listed
from tests.pulsar.drivers import OfPulsar, OfTopic
from tests.pulsar.owners import Cluster, kill_and_start
from tests.pulsar.publishers import Process

RESTART = "restart_broker"


class Case:
    """A scenario with those that it is played to: Pulsar, and a topic over its log."""

    def __init__(self, name: str, pulsar: OfPulsar, here: OfTopic) -> None:
        self.name = name
        self.pulsar, self.here = pulsar, here
        self._answers: dict[OfPulsar | OfTopic, list[str]] = {pulsar: [], here: []}
        self._steps = iter(DIFFERENTIAL[name]["steps"])

    async def go_on(self) -> bool:
        """To where the broker restarts, or to the end, which has come if this is True."""
        for step in self._steps:
            for side, answers in self._answers.items():
                answers.append(await side.do(step) if step["op"] != RESTART else "")
            if step["op"] == RESTART:
                return False
        return True

    async def check(self) -> None:
        """Pulsar does what it was observed to do, and the topic what the page says."""
        as_observed = compare(self.name, self._answers[self.pulsar], await self.pulsar.log())
        assert not list(as_observed)
        found = compare(self.name, self._answers[self.here], await self.here.log())
        hold_against_the_page(listed(SIDECARS_LOG, self.name), list(found))


async def test_what_a_broker_answered(mortal_broker: Broker, topic: str, tmp_path: Path) -> None:
    """It answers the same still, and a topic over the Pulsar log on it answers as the page says.

    One kill -9 of the broker is that of all scenarios with one. What the topic knows afterwards it has from its log.
    """
    cluster = Cluster(mortal_broker.service_url, mortal_broker.admin_url)
    made = itertools.count()
    async with AsyncExitStack() as stack:

        def make(name: str, entry_format: EntryFormat) -> Process:
            process = Process(cluster, name, entry_format, tmp_path, f"one-{next(made)}")
            stack.push_async_callback(process.close)
            return process

        going_on = []
        for name, entry_format in zip(DIFFERENTIAL, itertools.cycle(EntryFormat), strict=False):
            pulsars, ours = f"{topic}-{name}", f"{topic}-{name}-here"
            for one in (pulsars, ours):
                await cluster.create(one)
            here = OfTopic(cluster, ours, partial(make, ours, entry_format))
            case = Case(name, OfPulsar(cluster, pulsars), here)
            stack.push_async_callback(case.pulsar.close)
            await here.start()
            if await case.go_on():
                await case.check()
                await here.close()
            else:
                going_on.append(case)
        assert len(going_on) == 3
        await kill_and_start(mortal_broker)
        for case in going_on:
            await case.here.close()
            await case.here.start()
            assert await case.go_on()
            await case.check()


# -- sequences of our own -------------------------------------------------------------------------------------------

PRODUCERS = st.sampled_from("AB")
BATCHES = st.sets(st.integers(0, 12), min_size=1, max_size=4).map(sorted)
STEPS = st.one_of(
    st.tuples(st.just("publish"), PRODUCERS, BATCHES),
    st.tuples(st.just("pipeline"), PRODUCERS, st.lists(st.integers(0, 12), min_size=2, max_size=4)),
    st.tuples(st.just("drop"), PRODUCERS, st.none()),
)
HISTORIES = 20
UNLOADED_EVERY = 8
"""This many histories."""


class Pair:
    """Pulsar's deduplication and a topic over its log, which are asked the same. Each history has its own names."""

    def __init__(self, pulsar: OfPulsar, here: OfTopic) -> None:
        self.pulsar, self.here = pulsar, here
        self.mixed = self.old = 0
        self._histories = itertools.count()
        self._prefix = ""

    async def play(self, steps: list[tuple[str, str, Any]]) -> None:
        number = next(self._histories)
        self._prefix = f"{number}-"
        for name in "AB":
            await self._open(name)
        for place, (kind, name, ids) in enumerate(steps):
            if kind == "publish":
                await self._publish(name, ids)
            elif kind == "pipeline":
                await self._pipeline(name, ids)
            else:
                await self._both({"op": "drop_connection", "session": name})
                await self._open(name)
            if place == len(steps) // 2 and number % UNLOADED_EVERY == 0:
                await self._both({"op": "unload_topic"})
                for one in "AB":
                    await self._open(one)

    async def _both(self, step: dict[str, Any]) -> tuple[str, str]:
        return await self.pulsar.do(step), await self.here.do(step)

    async def _open(self, name: str) -> None:
        pulsars, here = await self._both({"op": "open", "session": name, "producer": self._prefix + name})
        assert pulsars == here

    async def _publish(self, name: str, ids: list[int]) -> None:
        step = {"op": "publish", "session": name, "sequence_id": ids[0]}
        if len(ids) > 1:
            step |= {"message_ids": ids, "highest_sequence_id": ids[-1]}
        pulsars, here = await self._both(step)
        self.old += pulsars == "dup"
        if pulsars == here:
            return
        # What the page says of a batch with old and new messages; and then they are even again.
        old, _, new = here.partition("; ")
        assert (pulsars, old[:4], new[:7]) == ("dup", "dup ", "stored ")
        self.mixed += 1
        rest = [int(one) for one in new.removeprefix("stored ").split("+")]
        assert old.removeprefix("dup ").split("+") + list(map(str, rest)) == list(map(str, ids))
        step = {"op": "publish", "session": name, "sequence_id": rest[0], "message_ids": rest}
        assert await self._both(step | {"highest_sequence_id": rest[-1]}) == ("stored", "dup")

    async def _pipeline(self, name: str, ids: list[int]) -> None:
        """All on their way at once; whether a copy finds the first one on its way or stored is up to the broker."""
        step = {"op": "pipeline", "session": name, "publishes": [{"sequence_id": i} for i in ids]}
        pulsars, here = [sorted(one.replace("unknown", "dup").split(", ")) for one in await self._both(step)]
        assert pulsars == here

    async def check(self) -> None:
        """For each producer the same messages are there, in the same order."""
        logs = []
        for side in (self.pulsar, self.here):
            log: dict[str, list[int]] = {}
            for producer, ids in await side.entries():
                log.setdefault(producer, []).extend(ids)
            logs.append(log)
        assert logs[0] == logs[1]


@pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)
def test_sequences_of_our_own(cluster: Cluster, topic: str, tmp_path: Path, entry_format: EntryFormat) -> None:
    here = f"{topic}-here"
    with asyncio.Runner() as runner:

        async def begin() -> Pair:
            for one in (topic, here):
                await cluster.create(one)
            of_topic = OfTopic(cluster, here, lambda: Process(cluster, here, entry_format, tmp_path, "one"))
            await of_topic.start()
            return Pair(OfPulsar(cluster, topic), of_topic)

        pair = runner.run(begin())

        @settings(max_examples=HISTORIES, derandomize=True, database=None, phases=[Phase.generate])
        @given(st.lists(STEPS, min_size=6, max_size=12))
        def play(steps: list[tuple[str, str, Any]]) -> None:
            runner.run(pair.play(steps))

        try:
            play()
            runner.run(pair.check())
        finally:
            runner.run(pair.pulsar.close())
            runner.run(pair.here.close())
    assert min(pair.mixed, pair.old) > 3
