"""Pulsar's case of producers that have been away for long, on a topic of a broker in this process.

The case pretends that time has passed, and forgets what is pushed and not persisted. Here that is never forgotten
(docs/reference/pulsar-differences.md), so the entries are persisted as soon as they are admitted.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.client import Verdict
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.attached import AttachedTopic, Columns
from seqdedupe.topic.keeper import DUE_PERIODS
from seqdedupe.topic.policy import Applied, Policy
from tests.conformance.cases import UPSTREAM, names
from tests.conformance.test_upstream import INACTIVE

MILLISECONDS_A_MINUTE = 60_000


class Broker:
    """A topic and the broker that has attached it, driven step by step."""

    def __init__(self, store: Store, minutes: int) -> None:
        snapshots = Snapshots(store, 1)
        self.topic = AttachedTopic(
            "t",
            1,
            store,
            snapshots,
            snapshots.load(),
            applied=Applied(deduplication_producer_inactivity_timeout_minutes=minutes),
            now_seconds=lambda: 0.0,
            on_state=lambda topic: None,
        )
        self.attachment = self.topic.attach(lambda why: None, lambda: None)
        self.attachment.end_replay(b"")
        self.topic.ready()
        self.timeout_ms = minutes * MILLISECONDS_A_MINUTE
        self.handles: dict[str, int] = {}
        self.admitted = 0
        self.trimmed = b""

    async def do(self, step: dict[str, Any]) -> None:
        await getattr(self, f"_{step['op']}")(step)

    async def _check(self, step: dict[str, Any]) -> None:
        name = step["producer"]
        if name not in self.handles:
            self.handles[name] = len(self.handles)
            self.attachment.register(self.handles[name], [name.encode()])
        handle, lowest, highest = (
            np.array([value], kind)
            for value, kind in ((self.handles[name], np.int32), (step["seq"], np.int64), (step["highest"], np.int64))
        )
        checked = self.topic.check(self.attachment, Columns(handle, lowest, highest))
        assert Verdict(checked.verdicts[0]).name == step["expect"], step
        self.topic.report(self.attachment, checked.first_admission, 1, b"%d" % self.admitted, 0)
        self.admitted += 1

    async def _disconnect(self, step: dict[str, Any]) -> None:
        self.attachment.release(np.array([self.handles[step["producer"]]], np.int32))

    async def _set_enabled(self, step: dict[str, Any]) -> None:
        await self.topic.set_policy(Policy(deduplication_enabled=step["enabled"]))

    async def _set_inactive_age(self, step: dict[str, Any]) -> None:
        number = self.topic.producers.number(step["producer"].encode())
        assert number is not None
        is_due = step["age_ms"] > self.timeout_ms
        self.topic.producers.activity._idle[number] = DUE_PERIODS if is_due else 0

    async def _purge(self, step: dict[str, Any]) -> None:
        before, purged = self.known(), step.get("purged", [])
        await self.topic.keeper.inactivity.look()
        assert before.keys() - self.known().keys() == set(purged)
        if step.get("takes_snapshot"):
            assert self.topic.trim_position == b"%d" % (self.admitted - 1)

    async def _state(self, step: dict[str, Any]) -> None:
        assert self.known().keys() == step["producers"].keys()
        for name, numbers in step["producers"].items():
            assert self.known()[name] == (numbers["pushed"], numbers["pushed"])

    def known(self) -> dict[str, tuple[int, int]]:
        """Pushed and persisted, by name."""
        producers = self.topic.producers
        return {
            name.decode(): (int(producers.numbers[number, PUSHED]), int(producers.numbers[number, PERSISTED]))
            for number, name in enumerate(producers.names_from(0))
            if producers.is_known(number)
        }


@pytest.mark.parametrize("name", sorted(INACTIVE))
async def test_pulsars_case(name: str, tmp_path: Path) -> None:
    case = UPSTREAM[name]
    store = Store.open(tmp_path / "store")
    broker = Broker(store, case["config"]["inactivity_timeout_minutes"])
    for step in case["steps"]:
        await broker.do(step)
    await broker.topic.delete()
    store.close()


def test_the_page_lists_the_cases_in_which_nothing_is_in_flight() -> None:
    assert names("Cases that are driven with everything persisted") == INACTIVE
    assert len(INACTIVE) == 1
