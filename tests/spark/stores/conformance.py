"""What every output store must do: run it on a store of your own by deriving from `StoreConformance`.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

The rows are looked at with the database's own means, not through the store.
"""

import datetime
import decimal
import pickle
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from seqdedupe.errors import ConfigurationError, InvalidRequestError, SeqdedupeError, UnavailableError
from seqdedupe.message_id import MessageId, Position
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.stores.contract import Advance, Binding, OutputStore, Stored, StoreFactory

LIMIT_SECONDS = LAST_RESORT_SECONDS
"""Nothing here takes this long."""

JOB = "nightly"
TOPIC = "persistent://public/default/flights-partition-0"
OTHER = "persistent://public/default/flights-partition-1"
INCARNATION = 1_700_000_000_000_000_007
SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})


class StoreHarness(ABC):
    """One place for output, empty at first."""

    table = "flights"
    """The output table's name."""

    refuses_values = True
    """Whether there are values that do not fit a column whose type takes them."""

    @property
    @abstractmethod
    def factory(self) -> StoreFactory:
        """Opens the store."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The output table's rows, in any order."""

    def shown(self, field: pa.Field, value: Any) -> Any:
        """What `rows` gives for a value that was written."""
        return value

    types: tuple[pa.DataType, ...] = (
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.timestamp("us", "UTC"),
        pa.timestamp("ms", "Europe/Berlin"),
        pa.timestamp("us"),
        pa.date32(),
        pa.decimal128(12, 3),
        pa.map_(pa.string(), pa.string()),
        pa.list_(pa.int64()),
        pa.struct({"a": pa.int64(), "b": pa.string()}),
    )
    """The types that it takes."""


def at(index: int, incarnation: int = INCARNATION) -> Position:
    """The position after the message of that index."""
    return Position(incarnation, MessageId(incarnation, index) if index >= 0 else None, index)


def over(start: int, end: int, topic: str = TOPIC, epoch: int = 0, **watermarks: int) -> Advance:
    """The advance from one index to another."""
    return Advance(TopicRange(topic, at(start), at(end)), epoch, lambda: watermarks)


def numbers(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": values, "text": [str(n) for n in values]}, SCHEMA)


def samples(kind: pa.DataType) -> list[Any]:
    """Values of a type that are hard to get right, and a null."""
    t = pa.types
    if t.is_boolean(kind):
        return [True, False, None]
    if t.is_integer(kind):
        top = 2 ** (kind.bit_width - t.is_signed_integer(kind)) - 1
        return [top, 0, -top - 1 if t.is_signed_integer(kind) else 1, None]
    if t.is_floating(kind):
        return [1.5, -0.0, float("inf"), None]
    if t.is_string(kind) or t.is_large_string(kind):
        return ["", "Zürich 😀", "a'b\"c\\N\t\r\n", None]
    if t.is_binary(kind) or t.is_large_binary(kind):
        return [b"", b"\0\xff\\x", b"x" * 70_000, None]
    if t.is_timestamp(kind):
        zone = datetime.UTC if kind.tz else None
        micros = 1 if kind.unit == "us" else 1000
        return [
            datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000 + micros % 1000, zone),
            datetime.datetime(2024, 2, 29, 12, 0, 0, 0, zone),
            datetime.datetime(1601, 1, 1, 0, 0, 0, 0, zone),
            None,
        ]
    if t.is_date(kind):
        return [datetime.date(1969, 12, 31), datetime.date(2024, 2, 29), datetime.date(1601, 1, 1), None]
    if t.is_decimal(kind):
        return [decimal.Decimal("123456789.125"), decimal.Decimal("-0.001"), decimal.Decimal("0.000"), None]
    if t.is_map(kind):
        return [{"k": "v", "é": None}, {}, None]
    if t.is_list(kind):
        return [[1, None, 3], [], None]
    return [{"a": 1, "b": "x"}, {"a": None, "b": None}, None]


class StoreConformance:
    """The suite."""

    @pytest.fixture
    def store(self, harness: StoreHarness) -> Iterator[OutputStore]:
        """The store, with its tables and one topic at its start."""
        with harness.factory() as store:
            store.prepare(harness.table, SCHEMA)
            assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
            yield store

    # Rows and positions are one.

    def test_rows_and_the_position_are_written_together(self, harness: StoreHarness, store: OutputStore) -> None:
        assert store.write(JOB, harness.table, iter([numbers(0, 1), numbers(2)]), [over(-1, 2)]) == 3
        assert ns(harness) == [0, 1, 2]
        assert store.positions(JOB) == {TOPIC: Stored(at(2), 0)}

    def test_one_range_follows_the_other(self, harness: StoreHarness, store: OutputStore) -> None:
        for n in range(5):
            store.write(JOB, harness.table, iter([numbers(n)]), [over(n - 1, n)])
        assert ns(harness) == [0, 1, 2, 3, 4]
        assert store.positions(JOB) == {TOPIC: Stored(at(4), 0)}

    def test_a_range_with_no_rows_moves_the_position(self, harness: StoreHarness, store: OutputStore) -> None:
        assert store.write(JOB, harness.table, iter([]), [over(-1, 9)]) == 0
        assert store.write(JOB, harness.table, iter([numbers().slice(0, 0)]), [over(9, 19)]) == 0
        assert ns(harness) == []
        assert store.positions(JOB) == {TOPIC: Stored(at(19), 0)}

    def test_it_can_be_opened_again(self, harness: StoreHarness, store: OutputStore) -> None:
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
        with pickle.loads(pickle.dumps(harness.factory))() as again:
            assert again.positions(JOB) == {TOPIC: Stored(at(0), 0)}
            again.write(JOB, harness.table, iter([numbers(1)]), [over(0, 1)])
        assert ns(harness) == [0, 1]

    def test_a_failure_of_the_input_writes_nothing_and_comes_out_as_it_is(
        self, harness: StoreHarness, store: OutputStore
    ) -> None:
        class Broken(Exception):
            pass

        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(0, 1)
            raise Broken

        with pytest.raises(Broken):
            store.write(JOB, harness.table, rows(), [over(-1, 5)])
        assert ns(harness) == []
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
        assert ns(harness) == [0]

    def test_a_batch_that_does_not_fit_writes_nothing(self, harness: StoreHarness, store: OutputStore) -> None:
        stranger = pa.record_batch({"n": [1], "unheard_of": [1]})
        with refused("INVALID_OUTPUT", "unheard_of"):
            store.write(JOB, harness.table, iter([numbers(0), stranger]), [over(-1, 1)])
        assert ns(harness) == []
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}

    def test_a_value_that_is_refused_names_its_row(self, harness: StoreHarness, store: OutputStore) -> None:
        if not harness.refuses_values:
            return
        far = pa.record_batch({"n": pa.array([1, 2, 2**64 - 1, 4], pa.uint64())})
        with refused("INVALID_OUTPUT") as caught:
            store.write(JOB, harness.table, iter([numbers(0), numbers().slice(0, 0), far]), [over(-1, 9)])
        assert (caught.value.numbers["batch"], caught.value.numbers["row"]) == ("2", "2")
        assert ns(harness) == []
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}

    def test_several_positions_move_together_or_not_at_all(self, harness: StoreHarness, store: OutputStore) -> None:
        assert store.replace(JOB, OTHER, None, Stored(at(-1), 0))
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 4), over(-1, 6, OTHER)])
        assert store.positions(JOB) == {TOPIC: Stored(at(4), 0), OTHER: Stored(at(6), 0)}
        for wrong in ([over(4, 5), over(5, 7, OTHER)], [over(3, 5), over(6, 7, OTHER)]):
            with refused("POSITION_CHANGED"):
                store.write(JOB, harness.table, iter([numbers(1)]), wrong)
        assert store.positions(JOB) == {TOPIC: Stored(at(4), 0), OTHER: Stored(at(6), 0)}
        assert ns(harness) == [0]

    # The stored position has to be the range's start.

    @pytest.mark.parametrize(
        "wrong",
        [
            over(-1, 2),
            over(0, 2),
            over(2, 3),
            over(1, 2, epoch=1),
            over(1, 2, topic=OTHER),
            Advance(TopicRange(TOPIC, at(1, INCARNATION + 1), at(2, INCARNATION + 1)), 0),
            Advance(TopicRange(TOPIC, Position(INCARNATION, MessageId(INCARNATION, 8), 1), at(2)), 0),
            Advance(TopicRange(TOPIC, Position(INCARNATION, None, 1), at(2)), 0),
            Advance(TopicRange(TOPIC, at(1)._replace(ownership=1), at(2)), 0),
        ],
        ids=[
            "before",
            "inside",
            "ahead",
            "epoch",
            "unknown topic",
            "incarnation",
            "message ID",
            "no message ID",
            "ownership",
        ],
    )
    def test_another_start_is_refused(self, harness: StoreHarness, store: OutputStore, wrong: Advance) -> None:
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 1)])
        with refused("POSITION_CHANGED"):
            store.write(JOB, harness.table, iter([numbers(7)]), [wrong])
        assert ns(harness) == [0]
        assert store.positions(JOB) == {TOPIC: Stored(at(1), 0)}

    def test_jobs_do_not_see_each_other(self, harness: StoreHarness, store: OutputStore) -> None:
        assert store.replace("hourly", TOPIC, None, Stored(at(-1), 3))
        store.write("hourly", harness.table, iter([numbers(1)]), [over(-1, 5, epoch=3)])
        assert store.positions("hourly") == {TOPIC: Stored(at(5), 3)}
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}
        assert store.positions("nobody's") == {}

    @pytest.mark.parametrize(
        "position",
        [
            Position(INCARNATION, None, -1),
            Position(2**63 - 1, MessageId(2**63 - 1, 2**62, 2**31 - 1), 2**62),
            Position(1, MessageId(0, 0, 0), 0),
            Position(1, MessageId(1, 7), 7, 2**64 - 1),
            Position(1, MessageId(1, 7), 7, 2**63),
            Position(1, MessageId(1, 7), 7, 1),
            Position(1, None, 7),
            Position(1, None, 0, 1),
        ],
        ids=str,
    )
    def test_positions_come_back_whole(self, harness: StoreHarness, store: OutputStore, position: Position) -> None:
        assert store.replace(JOB, OTHER, None, Stored(position, 2**40))
        assert store.positions(JOB)[OTHER] == Stored(position, 2**40)
        end = Position(position.incarnation, MessageId(2**61, 5, 17), 2**62 + 5, 2**63 + 5)
        store.write(JOB, harness.table, iter([]), [Advance(TopicRange(OTHER, position, end), 2**40)])
        with harness.factory() as again:
            assert again.positions(JOB)[OTHER] == Stored(end, 2**40)
            unknown = end._replace(index=end.index + 1, message_id=None, ownership=0)
            again.write(JOB, harness.table, iter([]), [Advance(TopicRange(OTHER, end, unknown), 2**40)])
            assert again.positions(JOB)[OTHER] == Stored(unknown, 2**40)

    # Others.

    def test_of_two_that_write_a_range_one_does(self, harness: StoreHarness, store: OutputStore) -> None:
        def write(n: int, store: OutputStore) -> int:
            return store.write(JOB, harness.table, iter([numbers(n)]), [over(n - 1, n)])

        for n in range(6):
            outcomes = at_once(harness, 3, partial(write, n))
            assert sorted(map(str, outcomes)) == ["1", "POSITION_CHANGED", "POSITION_CHANGED"]
        assert ns(harness) == list(range(6))

    def test_of_those_who_store_a_first_position_one_does(self, harness: StoreHarness, store: OutputStore) -> None:
        def replace(job: str, turns: Iterator[Stored], store: OutputStore) -> bool:
            return store.replace(job, TOPIC, None, next(turns))

        for n in range(4):
            job = f"job {n}"
            new = [Stored(at(k), 0) for k in range(3)]
            outcomes = at_once(harness, 3, partial(replace, job, iter(new)))
            assert outcomes.count(True) == 1
            assert set(outcomes) <= {True, False, "OUTPUT_UNAVAILABLE"}
            assert store.positions(job)[TOPIC] in new

    def test_a_writer_that_stalls_holds_up_no_other(self, harness: StoreHarness, store: OutputStore) -> None:
        stalled, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[pa.RecordBatch]:
            yield numbers(0)
            stalled.set()
            assert go_on.wait(LIMIT_SECONDS)
            yield numbers(1)

        def zombie() -> Any:
            with harness.factory() as other:
                return other.write(JOB, harness.table, slow(), [over(-1, 1, TOPIC, **watermarks)])

        watermarks = {"a": 1} if store.keeps_watermarks else {}
        with ThreadPoolExecutor() as pool:
            late = pool.submit(zombie)
            try:
                assert stalled.wait(LIMIT_SECONDS)
                successor = pool.submit(self._succeed, harness, watermarks)
                assert successor.result(LIMIT_SECONDS / 3) == 2
            finally:
                go_on.set()
            with refused("POSITION_CHANGED"):
                late.result(LIMIT_SECONDS)
        assert ns(harness) == [0, 1]
        assert store.positions(JOB) == {TOPIC: Stored(at(1), 0)}

    def _succeed(self, harness: StoreHarness, watermarks: dict[str, int]) -> int:
        with harness.factory() as store:
            store.prepare(harness.table, SCHEMA)
            return store.write(JOB, harness.table, iter([numbers(0, 1)]), [over(-1, 1, TOPIC, **watermarks)])

    def test_a_reset_in_the_middle_of_a_write_refuses_it(self, harness: StoreHarness, store: OutputStore) -> None:
        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(0)
            with harness.factory() as other:
                assert other.replace(JOB, TOPIC, Stored(at(-1), 0), Stored(at(-1), 1))

        with refused("POSITION_CHANGED"):
            store.write(JOB, harness.table, rows(), [over(-1, 0)])
        assert ns(harness) == []
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 1)}

    # Positions that are set.

    def test_a_position_is_replaced_only_by_who_knows_it(self, harness: StoreHarness, store: OutputStore) -> None:
        new = Stored(at(50), 1)
        for wrong in (None, Stored(at(-1), 1), Stored(at(0), 0), Stored(at(-1, 3), 0), new):
            assert not store.replace(JOB, TOPIC, wrong, new)
        assert not store.replace(JOB, OTHER, Stored(at(-1), 0), new)
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}
        assert store.replace(JOB, TOPIC, Stored(at(-1), 0), new)
        assert store.positions(JOB) == {TOPIC: new}
        store.write(JOB, harness.table, iter([numbers(51)]), [over(50, 51, epoch=1)])
        # Back to where it was once, and on from there.
        assert store.replace(JOB, TOPIC, Stored(at(51), 1), Stored(at(-1), 2))
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 2)}
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0, epoch=2)])
        assert store.positions(JOB) == {TOPIC: Stored(at(0), 2)}
        assert ns(harness) == [0, 51]

    def test_a_position_never_moves_back_but_by_a_reset(self, harness: StoreHarness, store: OutputStore) -> None:
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 9)])
        with pytest.raises(SeqdedupeError, match="would move back"):
            store.replace(JOB, TOPIC, Stored(at(9), 0), Stored(at(8), 0))
        with pytest.raises(SeqdedupeError, match="would move from"):
            store.write(JOB, harness.table, iter([numbers(1)]), [over(9, 8)])
        assert store.positions(JOB) == {TOPIC: Stored(at(9), 0)}
        assert ns(harness) == [0]
        # Positions of two incarnations have no order.
        assert store.replace(JOB, TOPIC, Stored(at(9), 0), Stored(at(3, INCARNATION + 1), 0))
        assert store.positions(JOB) == {TOPIC: Stored(at(3, INCARNATION + 1), 0)}

    # What a job is bound to.

    def test_a_job_is_bound_to_its_table_and_mode_for_good(self, harness: StoreHarness, store: OutputStore) -> None:
        first = Binding(harness.table, False)
        assert store.bind(JOB, first) == first
        for other in (Binding(harness.table, True), Binding("trains", False)):
            if store.keeps_watermarks:
                with harness.factory() as again:
                    assert again.bind(JOB, other) == first
                with refused("JOB_CHANGED"):
                    other.check(JOB, first)
                assert store.bind(f"another {other}", other) == other
            else:
                with pytest.raises(ConfigurationError):
                    store.bind(JOB, other)

    def test_of_those_who_bind_a_job_one_does(self, harness: StoreHarness) -> None:
        with harness.factory() as store:
            if not store.keeps_watermarks:
                return
        modes = iter([True, False, True, False])

        def bind(store: OutputStore) -> Binding:
            return store.bind(JOB, Binding(harness.table, next(modes)))

        assert len(set(at_once(harness, 4, bind))) == 1

    def test_it_knows_whether_the_table_is_there(self, harness: StoreHarness) -> None:
        with harness.factory() as store:
            store.bind(JOB, Binding(harness.table, False))
            assert not store.has_table(harness.table)
            store.prepare(harness.table, SCHEMA)
            assert store.has_table(harness.table)

    # Watermarks.

    def test_watermarks_are_raised_with_the_position(self, harness: StoreHarness, store: OutputStore) -> None:
        if not store.keeps_watermarks:
            assert store.watermarks(JOB, TOPIC) == (Stored(at(-1), 0), {})
            with refused("UNSUPPORTED_STORE"):
                store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0, a=1)])
            assert ns(harness) == []
            return
        assert store.replace(JOB, OTHER, None, Stored(at(-1), 0))
        assert store.watermarks(JOB, TOPIC) == (Stored(at(-1), 0), {})
        assert store.watermarks(JOB, "nothing") == (None, {})
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 4, a=2, b=2**63 - 1), over(-1, 1, OTHER, a=9)])
        store.write(JOB, harness.table, iter([numbers(1)]), [over(4, 6, a=3, c=0)])
        with refused("POSITION_CHANGED"):
            store.write(JOB, harness.table, iter([numbers(2)]), [over(4, 6, a=77)])
        assert store.watermarks(JOB, TOPIC) == (Stored(at(6), 0), {"a": 3, "b": 2**63 - 1, "c": 0})
        assert store.watermarks(JOB, OTHER) == (Stored(at(1), 0), {"a": 9})
        assert store.watermarks("hourly", TOPIC) == (None, {})
        assert store.replace(JOB, TOPIC, Stored(at(6), 0), Stored(at(-1), 1))
        assert store.watermarks(JOB, TOPIC) == (Stored(at(-1), 1), {})
        assert store.watermarks(JOB, OTHER) == (Stored(at(1), 0), {"a": 9})

    def test_watermarks_are_asked_for_after_the_last_row(self, harness: StoreHarness, store: OutputStore) -> None:
        taken: list[int] = []

        def rows() -> Iterator[pa.RecordBatch]:
            for n in range(3):
                yield numbers(n)
                taken.append(n)

        def changed() -> dict[str, int]:
            assert taken == [0, 1, 2]
            taken.append(-1)
            return {}

        store.write(JOB, harness.table, rows(), [Advance(over(-1, 2).range, 0, changed)])
        assert taken == [0, 1, 2, -1]

    def test_position_and_watermarks_are_read_in_one_snapshot(self, harness: StoreHarness, store: OutputStore) -> None:
        if not store.keeps_watermarks:
            return
        done = threading.Event()

        def write() -> None:
            with harness.factory() as other:
                for n in range(60):
                    other.write(JOB, harness.table, iter([]), [over(n - 1, n, a=n, b=n)])

        with ThreadPoolExecutor() as pool:
            writing = pool.submit(write)
            writing.add_done_callback(lambda _: done.set())
            while not done.is_set():
                stored, watermarks = store.watermarks(JOB, TOPIC)
                assert stored is not None
                index = stored.position.index
                assert watermarks == ({"a": index, "b": index} if index >= 0 else {})
            writing.result(LIMIT_SECONDS)

    # The table.

    def test_it_can_be_prepared_by_many_and_again(self, harness: StoreHarness) -> None:
        assert set(at_once(harness, 5, lambda store: store.prepare(harness.table, SCHEMA))) == {None}
        assert ns(harness) == []

    def test_a_table_that_does_not_fit_is_refused(self, harness: StoreHarness, store: OutputStore) -> None:
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
        wrong = pa.schema({"n": pa.string(), "text": pa.string(), "delay": pa.int64(), "at": pa.date32()})
        with refused("INVALID_OUTPUT", "n", "delay", "at"):
            store.prepare(harness.table, wrong)
        with refused("INVALID_OUTPUT"):
            store.prepare(harness.table, pa.schema([]))
        store.prepare(harness.table, SCHEMA)
        # Fewer columns than the table has are fine: the others are null.
        store.prepare(harness.table, pa.schema({"text": pa.string()}))
        store.write(JOB, harness.table, iter([pa.record_batch({"text": ["one"]})]), [over(0, 1)])
        rows = sorted(harness.rows(), key=lambda row: str(row["n"]))
        assert rows == [{"n": 0, "text": "0"}, {"n": None, "text": "one"}]

    def test_every_value_comes_back(self, harness: StoreHarness) -> None:
        fields = [pa.field(f"column {n}", kind) for n, kind in enumerate(harness.types)]
        columns = [samples(field.type) for field in fields]
        longest = max(map(len, columns))
        columns = [values + [None] * (longest - len(values)) for values in columns]
        arrays = [
            pa.array(
                [
                    list(value.items()) if pa.types.is_map(field.type) and value is not None else value
                    for value in values
                ],
                field.type,
            )
            for field, values in zip(fields, columns, strict=True)
        ]
        batch = pa.record_batch(arrays, schema=pa.schema([pa.field("row", pa.int64()), *fields]).remove(0))
        batch = batch.append_column("row", pa.array(range(longest)))
        with harness.factory() as store:
            store.prepare(harness.table, batch.schema)
            store.prepare(harness.table, batch.schema)
            assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
            store.write(JOB, harness.table, iter([batch]), [over(-1, 0)])
        found = sorted(harness.rows(), key=lambda row: int(row["row"]))
        for field, values in zip(fields, columns, strict=True):
            expected = [None if value is None else harness.shown(field, value) for value in values]
            assert [row[field.name] for row in found] == expected, field


def ns(harness: StoreHarness) -> list[int]:
    """The numbers of the rows that are in the table."""
    return sorted(row["n"] for row in harness.rows())


def refused(reason: str, *words: str) -> Any:
    """The block raises an error of that reason, on one line, that names these words. (Below it stands what to do.)"""
    pattern = re.compile("".join(rf"(?=.*\b{word}\b)" for word in (*words, reason)) + r"[^\n]*\Z")
    kinds = (UnavailableError, ConfigurationError, InvalidRequestError)
    return pytest.raises(kinds, check=lambda e: pattern.match(str(e)) is not None)


def at_once(harness: StoreHarness, many: int, what: Callable[[OutputStore], Any]) -> list[Any]:
    """Does it in this many threads at the same moment, each with its own store: the results, or the reasons of
    errors."""
    together = threading.Barrier(many, timeout=LIMIT_SECONDS)

    def one() -> Any:
        with harness.factory() as store:
            together.wait()
            try:
                return what(store)
            except SeqdedupeError as e:
                return e.reason

    with ThreadPoolExecutor(many) as pool:
        futures: list[Future[Any]] = [pool.submit(one) for _ in range(many)]
        return [future.result(LIMIT_SECONDS) for future in futures]
