"""Random histories of a broker and its topic against a plain oracle: checks, reports, failures, crashes of either side.

The broker's log is a list that survives everything. Its producers send rising IDs, and again from the first one that
was not acknowledged whenever they are asked to. At the end the log holds what they sent, each range once, in order.
"""

import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.batch import Binary
from seqdedupe.core.rule import DUP, NOT_DUP, PERSISTED, PUSHED, UNKNOWN
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import attached
from seqdedupe.topic.attached import AttachedTopic, BrokerAttachment, Columns
from seqdedupe.topic.policy import Applied, GapPolicy
from tests.property.disk import CrashableStore

CASES = 120
PARTS = 2
STEPS = 60
NAMES = ("a", "b", "c")
SNAPSHOT_ENTRIES = 7

PASSING = ("", 0, 0)

Row = tuple[str, int, int]
"""Producer (empty: it passes), lowest and highest ID."""


class Violation(AssertionError):
    """The log holds something twice, or lacks what was acknowledged; or a verdict is not the oracle's."""


@dataclass
class Sender:
    """A producer: what it has sent and is not acknowledged, in order."""

    next_id: int = 0
    left: list[Row] = field(default_factory=list)
    all: list[Row] = field(default_factory=list)
    in_order: bool = True
    """Whether it may send new ranges: otherwise it first sends again from the first that is left."""


def position(number: int) -> bytes:
    return b"%x" % number if number >= 0 else b""


class History:
    """One case."""

    def __init__(self, store: CrashableStore, incarnation: int, seed: int, *, forgets_the_replay: bool = False) -> None:
        self.store, self.incarnation = store, incarnation
        self.rng = random.Random(seed)
        self.gap = self.rng.choice(list(GapPolicy))
        self.forgets_the_replay = forgets_the_replay
        self.log: list[Row] = []
        self.senders = {name: Sender() for name in NAMES}
        self.pushed = dict.fromkeys(NAMES, -1)
        self.persisted = dict.fromkeys(NAMES, -1)
        self.in_flight: list[Row] = []
        self.written = 0
        self.has_failed = False
        self.trim_told = -1
        store.watch(incarnation)

    # -- the two processes -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """A sidecar starts with what the store has kept."""
        snapshots = Snapshots(self.store, self.incarnation)
        self.topic = AttachedTopic(
            "t",
            self.incarnation,
            self.store,
            snapshots,
            snapshots.load(),
            applied=Applied(
                deduplication_entries_interval=SNAPSHOT_ENTRIES,
                deduplication_snapshot_interval_seconds=0,
                gap=self.gap,
            ),
            now_seconds=lambda: 0.0,
            on_state=lambda _: None,
        )
        known = int(self.topic.position or b"-1", 16)
        expect(known >= self.trim_told, f"the snapshot covers {known}, and {self.trim_told} was trimmed")

    def attach(self) -> None:
        """A broker process begins: of what it was writing only what is in the log is left."""
        self.attachment = attachment = self.topic.attach(lambda why: None, lambda: None)
        attachment.register(0, [name.encode() for name in NAMES])
        first = int(attachment.position or b"-1", 16) + 1
        while first < len(self.log):
            rows = self.log[first : first + self.rng.randint(1, 5)]
            if self.forgets_the_replay:
                attachment.position = self.topic.position = position(first + len(rows) - 1)
            else:
                replay(self.topic, attachment, rows, first)
            first += len(rows)
        attachment.end_replay(position(len(self.log) - 1))
        self.topic.ready()
        self.in_flight, self.written, self.has_failed = [], 0, False
        for name in NAMES:
            self.persisted[name] = max((high for n, _, high in self.log if n == name), default=-1)
        self.drop_producers()
        self.compare_numbers()

    def drop_producers(self) -> None:
        self.pushed = dict(self.persisted)
        for sender in self.senders.values():
            sender.in_order = False

    def compare_numbers(self) -> None:
        producers = self.topic.producers
        for name in NAMES:
            number = producers.add(name.encode())
            row = producers.numbers[number]
            expected = (self.pushed[name], self.persisted[name])
            expect((int(row[PUSHED]), int(row[PERSISTED])) == expected, f"{name} has {row[:2]}, not {expected}")

    # -- steps -------------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        kinds = ["send"] * 8 + ["write"] * 6 + ["report"] * 5 + ["fail", "reset", "reset", "detach", "kill", "snapshot"]
        kinds += ["bad_snapshot", "bad_report"]
        await getattr(self, f"_{self.rng.choice(kinds)}")()
        self.compare_numbers()
        self.trim_told = max(self.trim_told, int(self.topic.trim_position or b"-1", 16))
        expect(self.trim_told < len(self.log), "the trim position is not in the log")

    async def _send(self) -> None:
        rows: list[Row] = []
        for name in self.rng.sample(NAMES, self.rng.randint(1, len(NAMES))):
            rows += self._of(name)
        if self.rng.random() < 0.2:
            rows.insert(self.rng.randint(0, len(rows)), PASSING)
        if rows:
            self._check(rows)

    def _of(self, name: str) -> list[Row]:
        """What a producer sends: what is left, if it has to or happens to, then new ranges."""
        sender = self.senders[name]
        rows = [] if sender.in_order and self.rng.random() < 0.6 else list(sender.left)
        sender.in_order = True
        for _ in range(self.rng.randint(0, 3)):
            low = sender.next_id + (self.rng.choice([0, 0, 0, 1, 7]) if self.gap is GapPolicy.ALLOW else 0)
            high = low + self.rng.choice([0, 0, 0, 3])
            sender.next_id = high + 1
            rows.append((name, low, high))
            sender.left.append(rows[-1])
            sender.all.append(rows[-1])
        return rows

    def _check(self, rows: list[Row]) -> None:
        self._check_gap()
        expected = [self._judge(row) for row in rows]
        self._check_overlap()
        verdicts = self.topic.check(self.attachment, columns(rows)).verdicts.tolist()
        expect(verdicts == expected, f"{rows} are {verdicts}, not {expected}")
        for row, verdict in zip(rows, verdicts, strict=True):
            if verdict == DUP:
                self._acknowledge(row)
            elif verdict == UNKNOWN and row != PASSING:
                self.senders[row[0]].in_order = False

    def _judge(self, row: Row) -> int:
        """The oracle."""
        name, low, high = row
        if self.has_failed:
            return UNKNOWN
        if name and low <= self.pushed[name]:
            return DUP if low <= self.persisted[name] else UNKNOWN
        if name:
            self.pushed[name] = max(self.pushed[name], high)
        self.in_flight.append(row)
        return NOT_DUP

    def _check_overlap(self) -> None:
        """A range that straddles is refused, with all that is next to it, and changes nothing."""
        name = self.rng.choice(NAMES)
        if self.persisted[name] >= 0 and self.rng.random() < 0.1:
            low, high = self.persisted[name], self.persisted[name] + 1
            before = self.topic.producers.numbers.copy()
            with pytest.raises(SeqdedupeError, match="OVERLAP"):
                self.topic.check(self.attachment, columns([(NAMES[0], 10**9, 10**9), (name, low, high)]))
            assert (before == self.topic.producers.numbers).all()

    def _check_gap(self) -> None:
        """A range that leaves an ID out is refused where the policy says so: the one that was expected is named."""
        name = self.rng.choice(NAMES)
        pushed = self.pushed[name]
        if self.gap is GapPolicy.REJECT and pushed >= 0 and not self.has_failed:
            before = self.topic.producers.numbers.copy()
            with pytest.raises(SeqdedupeError) as refused:
                self.topic.check(self.attachment, columns([(name, pushed + 1, pushed + 2), (name, pushed + 4, 10**9)]))
            numbers = refused.value.numbers
            assert (refused.value.reason, numbers["row"]) == ("GAP", "1")
            assert numbers["expected_sequence_id"] == str(pushed + 3)
            assert (before == self.topic.producers.numbers).all()

    def _acknowledge(self, row: Row) -> None:
        expect(row in self.log, f"{row} is acknowledged, and the log does not hold it")
        if row[0] and row in self.senders[row[0]].left:
            self.senders[row[0]].left.remove(row)

    async def _write(self) -> None:
        """The log stores some more of what is in flight: after a failure nothing, or it would have a hole."""
        count = 0 if self.has_failed else self.rng.randint(0, len(self.in_flight) - self.written)
        self.log += self.in_flight[self.written : self.written + count]
        self.written += count

    async def _report(self) -> None:
        self._persisted(self.rng.randint(0, self.written))

    def _persisted(self, count: int, failed: int = 0) -> None:
        if not count and not failed:
            return
        last = len(self.log) - self.written + count - 1
        first = self.attachment._settled
        self.topic.report(self.attachment, first, count, position(last) if count else b"", failed)
        for row in self.in_flight[:count]:
            if row[0]:
                self.persisted[row[0]] = max(self.persisted[row[0]], row[2])
            self._acknowledge(row)
        del self.in_flight[: count + failed]
        self.written -= count

    async def _bad_report(self) -> None:
        """A report is lost, comes twice, too early, or says too much: nothing changes, and the attachment is over."""
        settled, in_flight = self.attachment._settled, len(self.in_flight)
        bad = [(settled + 1, 1, 0), (settled + 1, 0, 1), (settled, in_flight + 1, 0), (settled, 0, in_flight + 1)]
        if settled:
            bad += [(settled - 1, 1, 0), (0, settled, 0)]
        if self.has_failed and in_flight:
            bad += [(settled, 1, 0)]
        first, persisted, failed = self.rng.choice(bad)
        with pytest.raises(SeqdedupeError, match="NOT_ATTACHED"):
            self.topic.report(self.attachment, first, persisted, b"no position" if persisted else b"", failed)
        self.compare_numbers()
        self.topic.detach(self.attachment)
        self.attach()

    async def _fail(self) -> None:
        """The log refuses what it has not stored: of some of it the sidecar hears later."""
        if self.written < len(self.in_flight):
            self._persisted(self.written, self.rng.randint(1, len(self.in_flight) - self.written))
            self.has_failed = True

    async def _reset(self) -> None:
        if self.has_failed:
            if self.in_flight:
                with pytest.raises(SeqdedupeError, match="in flight"):
                    self.attachment.reset()
                self._persisted(0, len(self.in_flight))
            self.attachment.reset()
            self.has_failed = False
            self.drop_producers()

    async def _detach(self) -> None:
        """The broker is gone, or another one takes the topic from it."""
        if self.rng.random() < 0.5:
            self.topic.detach(self.attachment)
        self.attach()

    async def _kill(self) -> None:
        """The sidecar is gone, and the machine's power with it: what was not synced is lost, from some point on."""
        await self.topic.keeper.snapshotter.close()
        self.store.cut_power(self.rng.randint(0, 3))
        self.store.restart()
        await self.start()
        self.attach()

    async def _snapshot(self) -> None:
        await self.topic.keeper.snapshot()

    async def _bad_snapshot(self) -> None:
        """The store fails; of what was written then some may be there all the same."""
        self.store.fail_next_sync(self.rng.randint(0, 2))
        with suppress(UnavailableError):
            await self.topic.keeper.snapshot()

    # -- a case ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self.start()
        self.attach()
        for _ in range(STEPS):
            await self.step()
        await self._kill()
        while rows := [row for sender in self.senders.values() for row in sender.left]:
            self._check(rows)
            self.log += self.in_flight[self.written :]
            self.written = len(self.in_flight)
            self._persisted(self.written)
        await self.topic.drain()
        for name, sender in self.senders.items():
            stored = [row for row in self.log if row[0] == name]
            expect(stored == sender.all, f"the log has {stored}, and {name} sent {sender.all}")


def columns(rows: list[Row]) -> Columns:
    handles = [NAMES.index(name) if name else 99 for name, _, _ in rows]
    lowest, highest = (np.array([row[k] for row in rows], np.int64) for k in (1, 2))
    passes = np.array([not name for name, _, _ in rows], np.uint8)
    return Columns(np.array(handles, np.int32), lowest, highest, passes if passes.any() else passes[:0])


def replay(topic: AttachedTopic, attachment: BrokerAttachment, rows: list[Row], first: int) -> None:
    """Tells these entries of the log, the first of which has this number."""
    positions = [position(first + i) for i in range(-1, len(rows))]
    attachment.replay(columns(rows), Binary.of_all(positions[1:]), Binary.of_all(positions[:-1]))
    topic.replayed(attachment, len(rows))


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashableStore]:
    monkeypatch.setattr(attached, "COUNT_SECONDS", 0.0)
    logger = logging.getLogger("seqdedupe")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    store = CrashableStore.open_crashable(tmp_path / "store")
    yield store
    store.close()
    logger.setLevel(level)


@pytest.mark.parametrize("part", range(PARTS))
async def test_the_log_holds_everything_once(store: CrashableStore, pytestconfig: pytest.Config, part: int) -> None:
    first_seed = 1_000_000 * (pytestconfig.getoption("randomly_seed", 1) % 1000) + part * CASES // PARTS
    for seed in range(first_seed, first_seed + CASES // PARTS):
        try:
            await History(store, store.next_incarnation(1), seed).run()
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise


async def test_a_sidecar_that_forgets_the_replay_is_found_out(store: CrashableStore) -> None:
    found = 0
    for seed in range(10):
        try:
            await History(store, store.next_incarnation(1), seed, forgets_the_replay=True).run()
        except Violation:
            found += 1
    assert found >= 5
