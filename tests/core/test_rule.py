"""The rule, against Pulsar's own tables, against a model of one line, and compiled against plain."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Batch
from seqdedupe.core import recent, rule
from seqdedupe.core.producers import Producers
from seqdedupe.core.recent import RECENT_MESSAGES
from seqdedupe.core.rule import (
    ADMITTED,
    DUP,
    DURABLE_EPOCH,
    EPOCH,
    FENCED,
    GAP,
    INVALID_PREDECESSOR,
    LINK_REQUIRED,
    NOT_DUP,
    NUMBERS,
    PERSISTED,
    PREDECESSOR_MISSING,
    PUSHED,
    UNKNOWN,
)
from seqdedupe.format import layout
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.format.layout import BASE_INDEX, PLACES
from tests.batches import Row, batch
from tests.plain import PLAIN

N, D, U = NOT_DUP, DUP, UNKNOWN


class OneTopic:
    """Producers, compiled and plain side by side, fed with batches; both must always agree."""

    def __init__(self, *names: str) -> None:
        self.both: list[Producers] = [Producers(), PLAIN["producers"].Producers()]
        self.stored = 0
        self.reasons: list[int] = []
        self.expected: list[int] = []
        for producers in self.both:
            for name in names:
                number = np.array([producers.add(name.encode())])
                producers.confirm_sessions(number, np.array([1]), None, 0)

    def _each(self, encoded: bytes) -> Iterator[tuple[Producers, Uint8s, Int64s, Int64s]]:
        view = np.frombuffer(encoded, np.uint8)
        for producers in self.both:
            places = np.zeros(PLACES, np.int64)
            assert layout.layout(view, 0, len(encoded), places) == layout.CANONICAL
            slots = producers.known(view, places)
            assert slots is not None
            yield producers, view, places, slots

    def refusal(self, b: Batch, lone: bool = False, gapless: bool = False) -> int:
        answers = []
        for producers, view, places, slots in self._each(b.encode()):
            reasons = producers.reasons(view, places, slots, lone, gapless).tolist()
            expected = producers.expected_ids(view, places, slots).tolist()
            answers.append((producers.refusal(view, places, slots, lone, gapless), reasons, expected))
        assert answers[0] == answers[1]
        why, self.reasons, self.expected = answers[0]
        assert why == min(filter(None, self.reasons), default=ADMITTED)
        return why

    def decide(self, b: Batch, deduplicate: bool = True) -> list[int]:
        answers = []
        for producers, view, places, slots in self._each(b.encode()):
            new, verdicts = producers.decide(view, places, slots, deduplicate)
            assert new == (verdicts == NOT_DUP).sum()
            answers.append(list(verdicts))
        assert answers[0] == answers[1]
        return answers[0]

    def persist(self, b: Batch) -> None:
        for producers, view, places, slots in self._each(b.encode()):
            places[BASE_INDEX] = self.stored
            producers.persist(view, places, slots)
        self.stored += len(b)

    def fail(self) -> None:
        for producers in self.both:
            producers.fail_in_flight()

    def originals(self, b: Batch) -> dict[int, int]:
        answers = []
        for producers, view, places, slots in self._each(b.encode()):
            rows, indexes = producers.originals(view, places, slots, np.full(len(b), DUP, np.uint8))
            answers.append(dict(zip(rows.tolist(), indexes.tolist(), strict=True)))
        assert answers[0] == answers[1]
        return answers[0]

    def numbers(self, name: str) -> tuple[int, int]:
        answers = {
            (int(p.numbers[p.number(name.encode()), PUSHED]), int(p.numbers[p.number(name.encode()), PERSISTED]))
            for p in self.both
        }
        assert len(answers) == 1
        return answers.pop()


def test_pulsars_core_table() -> None:
    """MessageDuplicationTest.testIsDuplicate of Apache Pulsar, single messages."""
    topic = OneTopic("p1", "p2")
    for name, sequence_id, verdict, pushed in [
        ("p1", 0, N, 0), ("p2", 1, N, 1), ("p1", 1, N, 1), ("p1", 5, N, 5), ("p1", 0, U, 5),
    ]:  # fmt: skip
        assert topic.decide(batch([(name, sequence_id)])) == [verdict]
        assert topic.numbers(name)[0] == pushed
    topic.persist(batch([("p1", 0)]))
    assert topic.decide(batch([("p1", 0)])) == [D]
    assert topic.numbers("p1") == (5, 0)


def test_pulsars_failure_table() -> None:
    """testIsDuplicateWithFailure: what failed may be sent again, what was stored may not."""
    topic = OneTopic("p1")
    for sequence_id in (0, 1, 5):
        assert topic.decide(batch([("p1", sequence_id)])) == [N]
        topic.persist(batch([("p1", sequence_id)]))
    assert topic.decide(batch([("p1", 0)])) == [D]
    assert topic.decide(batch([("p1", 6)])) == [N]
    assert topic.decide(batch([("p1", 6)])) == [U]
    topic.persist(batch([("p1", 6)]))
    assert topic.decide(batch([("p1", 7)])) == [N]
    topic.fail()
    assert topic.numbers("p1") == (6, 6)
    assert topic.decide(batch([("p1", 6)])) == [D]
    assert topic.decide(batch([("p1", 8)])) == [N]
    topic.persist(batch([("p1", 8)]))
    assert topic.numbers("p1") == (8, 8)


def test_a_batch_that_mixes_old_and_new_is_judged_per_message() -> None:
    topic = OneTopic("a")
    old = batch([("a", i) for i in range(1, 6)])
    assert topic.decide(old) == [N] * 5
    topic.persist(old)
    assert topic.decide(batch([("a", 6)])) == [N]
    assert topic.decide(batch([("a", i) for i in range(4, 9)])) == [D, D, U, N, N]


def test_with_deduplication_off_everything_is_new_and_numbers_never_fall() -> None:
    topic = OneTopic("a")
    b = batch([("a", 5), ("a", 9)])
    for _ in range(2):
        assert topic.decide(b, deduplicate=False) == [N, N]
        topic.persist(b)
    assert topic.decide(batch([("a", 3)]), deduplicate=False) == [N]
    assert topic.numbers("a") == (9, 9)


@pytest.mark.parametrize(
    ("pushed", "link", "first", "why"),
    [
        (-1, -1, 0, 0),
        (-1, -1, 100, 0),
        (4, 4, 6, 0),
        (4, 3, 6, 0),
        (4, 5, 6, PREDECESSOR_MISSING),
        (4, 5, 4, INVALID_PREDECESSOR),
        (4, 4, 4, INVALID_PREDECESSOR),
        (4, -3, 4, INVALID_PREDECESSOR),
        (-1, 0, 1, PREDECESSOR_MISSING),
        (9, 2, 3, 0),
        (9, 20, 30, PREDECESSOR_MISSING),
        (9, 20, 9, INVALID_PREDECESSOR),
    ],
)
def test_the_link(pushed: int, link: int, first: int, why: int) -> None:
    topic = OneTopic("a")
    if pushed >= 0:
        topic.persist(batch([("a", pushed)]))
    assert topic.refusal(batch([("a", first)], links={"a": link})) == why


def test_a_link_may_be_left_out_only_by_a_lone_call_with_nothing_in_flight() -> None:
    topic = OneTopic("a")
    b = batch([("a", 3)], links={"a": -2})
    assert topic.refusal(b) == LINK_REQUIRED
    assert topic.refusal(b, lone=True) == 0
    topic.decide(b)
    assert topic.refusal(batch([("a", 4)], links={"a": -2}), lone=True) == LINK_REQUIRED
    topic.persist(b)
    assert topic.refusal(batch([("a", 4)], links={"a": -2}), lone=True) == 0


def test_one_wrong_producer_refuses_the_whole_frame_and_changes_nothing() -> None:
    topic = OneTopic("a", "b", "c")
    fine = [("a", 1), ("b", 1), ("c", 1)]
    assert topic.refusal(batch(fine)) == 0
    assert topic.refusal(batch(fine, epochs={"b": 2})) == FENCED
    assert topic.refusal(batch(fine, links={"c": 0})) == PREDECESSOR_MISSING
    assert topic.refusal(batch(fine, links={"c": 0}, epochs={"a": 0})) == FENCED
    assert topic.refusal(batch(fine, links={"c": 0, "b": 1})) == INVALID_PREDECESSOR
    assert [topic.numbers(n) for n in "abc"] == [(-1, -1)] * 3


def test_of_each_producer_the_reason_that_is_looked_for_first_is_told() -> None:
    topic = OneTopic("a", "b", "c", "d")
    fine = [(name, 1) for name in "abcd"]
    links = {"b": 0, "c": 1, "d": -2}
    assert topic.refusal(batch(fine, links=links, epochs={"c": 7})) == INVALID_PREDECESSOR
    assert topic.reasons == [ADMITTED, PREDECESSOR_MISSING, INVALID_PREDECESSOR, LINK_REQUIRED]
    assert topic.refusal(batch(fine, links=links | {"c": -1}, epochs={"c": 7, "d": 7}), lone=True) == FENCED
    assert topic.reasons == [ADMITTED, PREDECESSOR_MISSING, FENCED, FENCED]
    assert topic.refusal(batch(fine, links={"b": 0, "d": -2}), lone=True) == PREDECESSOR_MISSING
    assert topic.reasons == [ADMITTED, PREDECESSOR_MISSING, ADMITTED, ADMITTED]


@pytest.mark.parametrize(
    ("pushed", "persisted", "ids", "expected"),
    [
        (-1, -1, [0], -1),
        (-1, -1, [100, 101], -1),
        (-1, -1, [100, 102], 101),
        (4, 4, [5, 6], -1),
        (4, 4, [6], 5),
        (4, 4, [5, 7, 9], 6),
        (4, 2, [3, 4, 5], -1),
        (4, 2, [1, 3], -1),
        (4, 2, [1, 5], -1),
        (4, 2, [3, 6], 5),
        (4, -1, [0, 5], -1),
        (2**63 - 2, 2**63 - 2, [2**63 - 1], -1),
        (2**63 - 3, 0, [2**63 - 1], 2**63 - 2),
        (2**63 - 1, 2**63 - 1, [5, 2**63 - 1], -1),
    ],
)
def test_gaps_are_judged_above_what_was_pushed(pushed: int, persisted: int, ids: list[int], expected: int) -> None:
    topic = OneTopic("other", "a")
    if persisted >= 0:
        topic.persist(batch([("a", persisted)]))
    if pushed > persisted:
        topic.decide(batch([("a", pushed)]))
    link = max(min(pushed, ids[0] - 1), -1)
    # Among rows of another producer, which has no gap.
    frame = batch([("other", 7), *(("a", i) for i in ids), ("other", 8)], links={"a": link, "other": -1})
    assert topic.refusal(frame) == ADMITTED
    assert topic.refusal(frame, gapless=True) == (GAP if expected >= 0 else ADMITTED)
    assert (topic.reasons, topic.expected) == ([ADMITTED, GAP if expected >= 0 else ADMITTED], [-1, expected])
    assert topic.numbers("a") == (pushed, persisted)


def test_a_gap_is_looked_for_after_the_link() -> None:
    topic = OneTopic("a")
    topic.persist(batch([("a", 3)]))
    # What is between was refused, or is on its way: that is no gap yet.
    assert topic.refusal(batch([("a", 6)], links={"a": 5}), gapless=True) == PREDECESSOR_MISSING
    assert topic.refusal(batch([("a", 6)], links={"a": 3}), gapless=True) == GAP
    assert topic.refusal(batch([("a", 6)], links={"a": 3}, epochs={"a": 0}), gapless=True) == FENCED
    assert topic.refusal(batch([("a", 6)], links={"a": -2}), lone=True, gapless=True) == GAP
    # What failed is not there: the ID after the last one that is comes next.
    topic.decide(batch([("a", 4)]))
    topic.fail()
    assert topic.refusal(batch([("a", 5)], links={"a": 3}), gapless=True) == GAP
    assert topic.expected == [4]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8)), min_size=1, max_size=8), st.integers(-1, 8))
def test_without_gaps_ids_follow_one_another(rows: list[tuple[str, int]], pushed: int) -> None:
    topic = OneTopic("a", "b")
    if pushed >= 0:
        topic.persist(batch([("a", pushed), ("b", pushed)]))
    rows = sorted(set(rows), key=lambda row: row[1])
    names = list(dict.fromkeys(name for name, _ in rows))
    topic.refusal(batch(rows, links=dict.fromkeys("ab", -1)), gapless=True)
    for p, name in enumerate(names):
        above = [i for n, i in rows if n == name and i > pushed]
        every = list(range(pushed + 1 if pushed >= 0 else above[0] if above else 0, above[-1] + 1)) if above else []
        missing = [i for i in every if i not in above]
        assert topic.expected[p] == (missing[0] if missing else -1)


RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["check", "check", "persist", "fail"]), RANGES), max_size=20), st.booleans())
def test_of_a_range_the_lowest_id_decides_and_the_highest_is_recorded(
    operations: list[tuple[str, list[tuple[int, int, int]]]], deduplicate: bool
) -> None:
    numbers = {module: module.numbers_of(3) for module in (_Ranges(rule), _Ranges(PLAIN["rule"]))}
    pushed, persisted = [-1] * 3, [-1] * 3
    in_flight: list[tuple[int, int]] = []
    for operation, ranges in operations:
        if operation == "check":
            expected = []
            for p, low, length in ranges:
                new = low > pushed[p] or not deduplicate
                expected.append(N if new else D if low <= persisted[p] else U)
                if new:
                    pushed[p] = max(pushed[p], low + length)
                    in_flight.append((p, low + length))
            assert [ranges_of.decide(ranges, at, deduplicate) for ranges_of, at in numbers.items()] == [expected] * 2
        elif operation == "persist" and in_flight:
            p, high = in_flight.pop(0)
            persisted[p] = max(persisted[p], high)
            for ranges_of, at in numbers.items():
                ranges_of.confirm(p, high, at)
        elif operation == "fail":
            in_flight.clear()
            pushed = list(persisted)
            for ranges_of, at in numbers.items():
                ranges_of.rule.fail(at, 3)
        for at in numbers.values():
            assert (at[:, PUSHED].tolist(), at[:, PERSISTED].tolist()) == (pushed, persisted)


class _Ranges:
    """The rule on plain arrays, as a broker with its own log asks it."""

    def __init__(self, module: Any) -> None:
        self.rule = module

    def numbers_of(self, producers: int) -> Int64s:
        numbers = np.zeros((producers, NUMBERS), np.int64)
        numbers[:, [PUSHED, PERSISTED]] = -1
        return numbers

    def decide(self, ranges: list[tuple[int, int, int]], numbers: Int64s, deduplicate: bool) -> list[int]:
        owners, lowest, lengths = np.array(ranges).T
        verdicts = np.zeros(len(ranges), np.uint8)
        rows = np.arange(3)
        new = self.rule.decide(
            rows,
            owners.astype(np.int32),
            lowest.copy(),
            lowest + lengths,
            np.zeros(0, np.uint8),
            numbers,
            deduplicate,
            verdicts,
        )
        assert new == (verdicts == N).sum()
        return list(verdicts)

    def confirm(self, producer_row: int, highest: int, numbers: Int64s) -> None:
        rows, none = np.array([producer_row]), np.zeros(0, np.int32)
        self.rule.confirm(rows, np.array([0]), none, np.array([highest]), 0, numbers, np.zeros(3, np.uint8))


def test_an_epoch_is_in_force_at_once_and_is_taken_back_if_the_log_never_held_it() -> None:
    topic = OneTopic("a")
    for producers in topic.both:
        numbers = producers.add_all([b"a", b"b"])
        producers.confirm_sessions(numbers, np.array([3, 3]), None, 0)
        producers.collect_dirty()
        producers.open(numbers[:1], np.array([8]))
        assert producers.numbers[:2, [EPOCH, DURABLE_EPOCH]].tolist() == [[8, 3], [3, 3]]
        assert len(producers.collect_dirty()[0]) == 0, "a snapshot keeps what is durable"
        producers.fail_in_flight()
        assert producers.numbers[:2, [EPOCH, DURABLE_EPOCH]].tolist() == [[3, 3], [3, 3]]
        producers.open(numbers[:1], np.array([9]))
        producers.confirm_sessions(numbers[:1], np.array([9]), None, 0)
        producers.fail_in_flight()
        assert producers.numbers[:2, [EPOCH, DURABLE_EPOCH]].tolist() == [[9, 9], [3, 3]]
        changed, _, epochs, _ = producers.collect_dirty()
        assert (changed.tolist(), epochs.tolist()) == ([0], [9])


def test_a_batch_makes_the_epoch_durable_that_it_names() -> None:
    topic = OneTopic("a")
    topic.persist(batch([("a", 1)], epochs={"a": 9}))
    topic.fail()
    assert all(p.numbers[0, [EPOCH, DURABLE_EPOCH]].tolist() == [9, 9] for p in topic.both)


SESSIONS = st.tuples(st.just("sessions"), st.integers(0, 2), st.none() | st.integers(0, 3))
STORED = st.tuples(st.just("batch"), st.integers(0, 2), st.integers(0, 12))
OPENED = st.tuples(st.just("open"), st.integers(0, 2), st.none())


@given(st.lists(SESSIONS | STORED | OPENED, max_size=25))
def test_what_is_not_to_be_stated_again_stands_in_the_rest_of_the_log(
    records: list[tuple[str, int, int | None]],
) -> None:
    """No matter which part of the log is dropped: the rest of it and what is stated again give the same numbers."""
    topic = OneTopic("a", "b", "c")
    names = [b"a", b"b", b"c"]
    epochs = [1, 1, 1]
    log: list[tuple[int, int, int, int]] = []
    for kind, p, value in records:
        if kind == "open":
            epochs[p] += 1
            continue
        if kind == "batch":
            assert value is not None
            epoch = max(epochs[p] - value % 2, 1)
            log.append((topic.stored, p, epoch, value))
            topic.persist(batch([(names[p].decode(), value)], epochs={names[p].decode(): epoch}))
            continue
        known = int(topic.both[0].numbers[p, PERSISTED])
        persisted = None if value is None else max(known - value, -1)
        # A control record goes with the message before it at the latest.
        log.append((topic.stored - 1, p, epochs[p], -1 if persisted is None else persisted))
        for producers in topic.both:
            at = None if persisted is None else np.array([persisted])
            producers.confirm_sessions(np.array([p]), np.array([epochs[p]]), at, topic.stored)
    for producers in topic.both:
        whole = producers.numbers[:3, [DURABLE_EPOCH, PERSISTED]].tolist()
        for first in range(topic.stored + 1):
            rest = [list(whole[p]) if p in producers.stated_below(first) else [0, -1] for p in range(3)]
            for index, p, epoch, sequence_id in log:
                if index >= first:
                    rest[p] = [max(rest[p][0], epoch), max(rest[p][1], sequence_id)]
            assert [r for r, w in zip(rest, whole, strict=True) if w[0] > 1 or w[1] >= 0] == [
                w for w in whole if w[0] > 1 or w[1] >= 0
            ]
    everything = topic.both[0].stated_below(topic.stored + 1)
    durable, persisted_ids = topic.both[0].numbers[everything][:, [DURABLE_EPOCH, PERSISTED]].T.copy()
    topic.both[0].confirm_sessions(everything, durable, persisted_ids, topic.stored + 9)
    assert len(topic.both[0].stated_below(topic.stored + 8)) == 0, "what was stated again is not stated for ever"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "persist", "fail"]),
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), min_size=1, max_size=4),
    ),
    max_size=30,
)


@given(OPERATIONS, st.booleans())
def test_the_rule_is_its_one_line_definition(operations: list[tuple[str, list[Row]]], deduplicate: bool) -> None:
    topic = OneTopic("a", "b")
    pushed, persisted = {"a": -1, "b": -1}, {"a": -1, "b": -1}
    in_flight = []
    for operation, drawn in operations:
        rows = sorted(set(drawn))
        b = batch(rows)
        if operation == "send":
            expected = []
            for name, sequence_id in rows:
                new = sequence_id > pushed[name] or not deduplicate
                expected.append(N if new else D if sequence_id <= persisted[name] else U)
                pushed[name] = max(pushed[name], sequence_id) if new else pushed[name]
            assert topic.decide(b, deduplicate) == expected
            kept = [row for row, verdict in zip(rows, expected, strict=True) if verdict == N]
            in_flight += [batch(kept)] if kept else []
        elif operation == "persist" and in_flight:
            stored = in_flight.pop(0)
            topic.persist(stored)
            for row, p in enumerate(stored.producer_indexes if len(stored.epochs) > 1 else [0] * len(stored)):
                name = stored.names()[p]
                persisted[name] = max(persisted[name], int(stored.sequence_ids[row]))
        elif operation == "fail":
            topic.fail()
            in_flight.clear()
            pushed = dict(persisted)
        assert {n: topic.numbers(n) for n in "ab"} == {n: (pushed[n], persisted[n]) for n in "ab"}


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=1, max_size=5), max_size=12))
def test_originals_are_found_exactly(batches_drawn: list[list[Row]]) -> None:
    """Everything that was stored is found at the index of its newest copy that a falling walk meets, or not at all."""
    topic = OneTopic("a", "b", "c")
    where: dict[tuple[str, int], set[int]] = {}
    highest = {"a": -1, "b": -1, "c": -1}
    for drawn in batches_drawn:
        rows = [(name, i) for name, i in sorted(set(drawn)) if i > highest[name]]
        if not rows:
            continue
        for offset, (name, i) in enumerate(rows):
            where.setdefault((name, i), set()).add(topic.stored + offset)
            highest[name] = i
        topic.persist(batch(rows))
    asked = [(name, i) for name in "abc" for i in range(31)]
    found = topic.originals(batch(asked))
    assert found == {row: where[key].pop() for row, key in enumerate(asked) if key in where}


def test_the_ring_forgets_the_oldest_and_only_them() -> None:
    topic = OneTopic("a", "b")
    topic.both = topic.both[:1] * 2
    per_batch = 4096
    topic.persist(batch([("b", 7)]))
    for start in range(0, RECENT_MESSAGES, per_batch):
        rows = [("a", i) for i in range(start, start + per_batch)]
        encoded = batch(rows, payloads=[b""] * per_batch).encode()
        view = np.frombuffer(encoded, np.uint8)
        places = np.zeros(PLACES, np.int64)
        layout.layout(view, 0, len(encoded), places)
        places[BASE_INDEX] = topic.stored
        producers = topic.both[0]
        slots = producers.known(view, places)
        assert slots is not None
        producers.persist(view, places, slots)
        topic.stored += per_batch
    assert topic.originals(batch([("b", 7)])) == {}, "one message more than the ring holds has entered since"
    assert topic.originals(batch([("a", 0), ("a", RECENT_MESSAGES - 1)])) == {0: 1, 1: RECENT_MESSAGES}


def test_epochs_come_back_from_the_log_by_maximum() -> None:
    topic = OneTopic("a")
    topic.persist(batch([("a", 1)], epochs={"a": 9}))
    topic.persist(batch([("a", 2)], epochs={"a": 4}))
    assert all(p.numbers[0, EPOCH] == 9 for p in topic.both)


def test_constants_of_the_two_modules_agree() -> None:
    assert (rule.NOT_DUP, rule.DUP, rule.UNKNOWN) == (1, 2, 3)
    assert recent.RECENT_MESSAGES == 65_536
