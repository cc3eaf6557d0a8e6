"""Pulsar's cases that poke at its tracker's state, on the core alone."""

from typing import Any

import numpy as np
import pytest

from seqdedupe.client import Verdict
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.topic.attached import BrokerAttachment, Columns
from seqdedupe.topic.policy import Applied
from tests.conformance.cases import UPSTREAM


def pokes(case: dict[str, Any]) -> bool:
    """Whether a case sets numbers by hand."""
    return any(step["op"] == "set_state" for step in case["steps"])


POKING = {name: case for name, case in UPSTREAM.items() if pokes(case)}


class Tracker:
    """The rule and its numbers, as a topic's attachment has them."""

    def __init__(self) -> None:
        self.producers = Producers()
        self.attachment = BrokerAttachment(self.producers, b"")
        self.attachment.end_replay(b"")
        self._handles: dict[str, int] = {}

    def _number(self, name: str) -> int:
        if name not in self._handles:
            self.attachment.register(len(self._handles), [name.encode()])
            self._handles[name] = len(self._handles)
        number = self.producers.number(name.encode())
        assert number is not None
        return number

    def do(self, step: dict[str, Any]) -> None:
        row = self.producers.numbers[self._number(step["producer"])]
        match step["op"]:
            case "set_state":
                for key, column in (("pushed", PUSHED), ("persisted", PERSISTED)):
                    if key in step:
                        row[column] = step[key]
            case "check":
                lowest = np.array([step["seq"]], np.int64)
                columns = Columns(
                    np.array([self._handles[step["producer"]]], np.int32),
                    lowest,
                    np.maximum(lowest, step["highest"]),
                )
                [verdict] = self.attachment.check(columns, Applied(), 0.0).verdicts
                assert Verdict(verdict).name == step["expect"], step
                for key, column in (("pushed", PUSHED), ("persisted", PERSISTED)):
                    assert row[column] == (-1 if step[key] is None else step[key]), (key, step)
            case op:
                raise AssertionError(f"{op} is not done on the core")


@pytest.mark.parametrize("name", POKING)
def test_pulsars_case(name: str) -> None:
    tracker = Tracker()
    for step in POKING[name]["steps"]:
        tracker.do(step)


def test_there_are_such_cases() -> None:
    assert set(POKING) == {"MessageDuplicationTest.testIsDuplicate"}
