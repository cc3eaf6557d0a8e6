"""An attachment that learns anything: what it refuses has changed nothing."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import Binary
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_POSITION_BYTES
from seqdedupe.topic.attached import BrokerAttachment, Columns
from seqdedupe.topic.policy import Applied, GapPolicy, OverlapPolicy

CASES = 500
STEPS = 40

REASONS = {
    "INVALID_REQUEST",
    "INVALID_NAME",
    "INVALID_SEQUENCE_ID",
    "OVERLAP",
    "GAP",
    "NOT_ATTACHED",
    "REPLAY_GAP",
}


class Anything:
    """Steps with values that are right now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.producers = Producers()
        self.attachment = BrokerAttachment(self.producers, self.rng.choice([b"", b"p"]))
        if self.rng.random() < 0.8:
            self.attachment.register(0, [b"a", b"b", b"c"])
            self.attachment.end_replay(self.attachment.position)
        self.policy = Applied(
            gap=self.rng.choice(list(GapPolicy)),
            overlap=self.rng.choice(list(OverlapPolicy)),
            deduplication_enabled=self.rng.random() < 0.8,
        )

    def number(self, right: int) -> int:
        return self.rng.choice([right, right, right, right + 1, right - 1, 0, 2**63 - 1])

    def columns(self) -> Columns:
        rows = self.rng.choice([0, 1, 1, 2, 5])

        def column(kind: Any, value: Callable[[], int]) -> np.ndarray:
            return np.array([value() for _ in range(rows + (self.rng.random() < 0.05))], kind)

        lowest = column(np.int64, lambda: self.rng.choice([*range(-1, 12), *range(1, 12), 2**63 - 1]))
        highest = lowest
        if self.rng.random() < 0.4:
            highest = np.where(lowest < 12, lowest + self.rng.choice([-1, 0, 1, 3, 3]), lowest)
        passes = column(np.uint8, lambda: self.rng.randint(0, 1))
        if self.rng.random() < 0.8:
            passes = passes[:0]
        handles = column(np.int32, lambda: self.rng.choice([0] * 8 + [1, 2, -1, 2**31 - 1]))
        return Columns(handles, lowest, highest, passes)

    def positions(self, count: int) -> tuple[Binary, Binary]:
        """The positions of this many entries, and those before them; some are none, or lie."""
        made = [b"%x" % self.rng.getrandbits(40) * self.rng.choice([1, 1, 1, 1, 30]) for _ in range(count)]
        previous = [self.attachment.position, *made[:-1]] if made else []
        if made and self.rng.random() < 0.1:
            made[self.rng.randrange(count)] = self.rng.choice([b"", b"x" * (MAX_POSITION_BYTES + 1)])
        if previous and self.rng.random() < 0.1:
            previous[self.rng.randrange(count)] = b"p1"
        pair = Binary.of_all(made), Binary.of_all(previous)
        if self.rng.random() < 0.1:
            one = self.rng.choice(pair)
            one.offsets = one.offsets + np.int32(self.rng.choice([-1, 1]))
        if self.rng.random() < 0.05:
            self.rng.choice(pair).data += b"x"
        return pair

    def step(self) -> None:
        attachment = self.attachment
        match self.rng.choice(["register", "release", "replay", "end", *["check"] * 4, *["report"] * 3, "reset"]):
            case "register":
                names = [
                    self.rng.choice([b"a", b"b", b"c", b"", b"\xff", b"a\0"]) for _ in range(self.rng.randint(1, 3))
                ]
                attachment.register(self.number(attachment._handles), names)
            case "release":
                attachment.release(np.array([self.rng.randint(-1, 4) for _ in range(self.rng.randint(0, 2))], np.int32))
            case "replay":
                columns = self.columns()
                attachment.replay(columns, *self.positions(len(columns)))
            case "end":
                attachment.end_replay(self.rng.choice([attachment.position, b"", b"x"]))
            case "check":
                attachment.check(self.columns(), self.policy, 0.0)
            case "report":
                persisted = self.rng.choice([0, 1, attachment.in_flight, attachment.in_flight + 1])
                position = b"q" if persisted else b""
                if self.rng.random() < 0.2:
                    position = self.rng.choice([b"", b"q", b"x" * (MAX_POSITION_BYTES + 1)])
                failed = self.rng.choice([0, 0, 0, 1, attachment.in_flight - persisted])
                attachment.report(self.number(attachment._settled), persisted, position, max(0, failed))
            case "reset":
                attachment.reset()

    def state(self) -> list[Any]:
        """All that counts."""
        a = self.attachment
        known = len(self.producers)
        return [
            (a.position, a.replayed, a.is_ready, a.has_failed, a.in_flight, a._settled),
            (a._rows_of[: a._handles].tolist(), a._is_live.tolist()),
            self.producers.names_from(0),
            self.producers.numbers[:known].tolist(),
            self.producers.dirty.tolist(),
            [(one.columns.handles.tolist(), one.columns.highest.tolist()) for one in a._in_flight],
        ]


def test_what_is_refused_has_changed_nothing(pytestconfig: pytest.Config) -> None:
    first_seed = 1_000_000 * (pytestconfig.getoption("randomly_seed", 1) % 1000)
    refused, taken = set[str](), 0
    for seed in range(first_seed, first_seed + CASES):
        anything = Anything(seed)
        for _ in range(STEPS):
            before, why = anything.state(), None
            try:
                anything.step()
                taken += 1
            except SeqdedupeError as e:
                why = e
            if why is not None:
                refused.add(why.reason)
                assert anything.state() == before, f"seed {seed}: {why}"
            numbers = anything.producers.numbers[: len(anything.producers)]
            assert (numbers[:, PUSHED] >= numbers[:, PERSISTED]).all()
    assert refused == REASONS
    assert taken > CASES * STEPS // 10
