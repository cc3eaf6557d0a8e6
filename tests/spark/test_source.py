"""The data source's readers, called as Spark calls them, without Spark."""

import json
import logging
import pickle
import random
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from seqdedupe.client import blocking
from seqdedupe.client.message import Message
from seqdedupe.errors import ConfigurationError, NotFoundError, PositionError, SeqdedupeError
from seqdedupe.figures import counted
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.source import (
    NOTHING_YET,
    BatchReader,
    Offsets,
    SeqdedupeDataSource,
    StreamReader,
    as_texts,
    offset_after,
    positions_in,
)


@pytest.fixture
def source(client: blocking.Client) -> "Source":
    return Source(client.address)


class Source:
    """Readers for options, made as Spark makes them."""

    def __init__(self, address: str) -> None:
        self.address = address

    def _made(self, options: dict[str, Any]) -> SeqdedupeDataSource:
        given = {"service.url": self.address} | {name.lower(): str(value) for name, value in options.items()}
        return SeqdedupeDataSource(given)

    def batch(self, **options: Any) -> BatchReader:
        made = self._made(options)
        return made.reader(made.schema())

    def stream(self, **options: Any) -> "Stream":
        made = self._made(options)
        return Stream(made.streamReader(made.schema()))

    def rows(self, **options: Any) -> list[bytes]:
        reader = self.batch(**options)
        return read(reader, reader.partitions())


def read(reader: BatchReader | StreamReader, partitions: list[Any]) -> list[bytes]:
    """What tasks would read: all of it is pickled on the way."""
    found = []
    for partition in partitions:
        there = pickle.loads(cloudpickle.dumps(reader))  # type: ignore[no-untyped-call]
        for batch in there.read(pickle.loads(pickle.dumps(partition))):
            assert batch.schema.equals(reader.schema, check_metadata=True)
            found += batch.column("value").to_pylist()
    return found


class Stream:
    """A query: the offset it has reached, and what each trigger reads."""

    def __init__(self, reader: StreamReader, offset: Offsets | None = None) -> None:
        self.reader = reader
        self.offset = offset

    def trigger(self) -> list[bytes] | None:
        """What a micro-batch reads; None where Spark would run none."""
        start = self.reader.initialOffset() if self.offset is None else self.offset
        end = as_logged(self.reader.latestOffset(as_logged(start), self.reader.getDefaultReadLimit()))
        if json.dumps(end) == json.dumps(start):
            assert self.offset is not None, "Spark always runs the first batch"
            return None
        found = self.replayed(end)
        self.offset = end
        return found

    def replayed(self, end: Offsets) -> list[bytes]:
        """What a micro-batch reads whose end is logged already: Spark asks for the start of the first one again."""
        start = self.reader.initialOffset() if self.offset is None else self.offset
        partitions = self.reader.partitions(as_logged(start), as_logged(end))
        assert all(len(partition.value) for partition in partitions)
        return read(self.reader, partitions)

    def rest(self) -> Iterator[list[bytes]]:
        while (found := self.trigger()) is not None:
            yield found


def as_logged(offset: Offsets) -> Offsets:
    found: Offsets = json.loads(json.dumps(offset))
    return found


def send(client: blocking.Client, topic: str, *values: bytes) -> None:
    with client.producer(topic, "p") as producer:
        for value in values:
            producer.send(value)


def numbers(first: int, stop: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, stop)]


class TestBatch:
    def test_all_there_is_once(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 5))
        assert source.rows(topic=topic) == numbers(0, 5)
        assert source.rows(topic=topic, startingOffsets="latest") == []
        assert source.rows(topic=topic, startingOffsets="latest", plainColumnNames=True) == []

    def test_an_empty_topic(self, client: blocking.Client, source: Source, topic: str) -> None:
        client.admin.create_topic(topic)
        reader = source.batch(topic=topic)
        assert reader.partitions() == []
        assert list(reader.read(InputPartition(None))) == []

    def test_places(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 9))
        with client.reader(topic) as reader:
            messages = list(reader)
        for chosen in (random.Random(seed) for seed in range(20)):
            start, end = chosen.choices(range(9), k=2)
            forms = [str(messages[start].message_id), str(messages[end].position)]
            given = {
                name: f'{{"{topic}": "{text}"}}'
                for name, text in zip(("startingOffsets", "endingOffsets"), forms, strict=True)
            }
            if start > end:
                with pytest.raises(ConfigurationError, match=r"nothing to read: .* is behind the end, after .*"):
                    source.rows(topic=topic, **given)
                continue
            # After the one, up to and with the other.
            assert source.rows(topic=topic, **given) == numbers(start + 1, end + 1)
            first, last = messages[start].publish_time_ms, messages[end].publish_time_ms
            assert source.rows(topic=topic, startingTime=first, endingTime=last) == [
                message.payload for message in messages if first <= message.publish_time_ms < last
            ]

    def test_places_that_are_turned_round(self, client: blocking.Client, source: Source, topic: str) -> None:
        """Nobody takes them for a topic that has nothing."""
        send(client, topic, *numbers(0, 9))
        cases: list[dict[str, Any]] = [
            {"startingOffsets": f'{{"{topic}": 8}}', "endingOffsets": f'{{"{topic}": 3}}'},
            {"startingOffsets": "latest", "endingOffsets": f'{{"{topic}": 8}}'},
            {"startingOffsets": f'{{"{topic}": 1}}', "endingTime": 1},
        ]
        for places in cases:
            for accepts in ({}, {"failOnDataLoss": False}):
                with pytest.raises(
                    ConfigurationError, match=rf"in .*/{topic} the start, after .*, is behind .* \[INVALID_OPT"
                ):
                    source.rows(topic=topic, **places, **accepts)
        with pytest.raises(ConfigurationError, match="startingTime 2 is after endingTime 1"):
            source.rows(topic=topic, startingTime=2, endingTime=1)
        # The same place is none of that, nor is a time after the end.
        for places in (
            {"startingOffsets": f'{{"{topic}": 3}}', "endingOffsets": f'{{"{topic}": 3}}'},
            {"startingOffsets": "latest", "endingOffsets": "latest"},
            {"startingTime": 2**62},
        ):
            assert source.rows(topic=topic, **places) == []

    def test_min_partitions_splits_what_is_there(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, f"{topic}-partition-0", *numbers(0, 10))
        send(client, f"{topic}-partition-1", *numbers(10, 12))
        reader = source.batch(topic=topic)
        assert [[len(one) for one in partition.value] for partition in reader.partitions()] == [[10, 2]]
        reader = source.batch(topic=topic, minPartitions=4)
        partitions = reader.partitions()
        assert len(partitions) >= 4
        assert read(reader, partitions) == numbers(0, 12)

    def test_options_cut_what_a_filter_would_drop(self, client: blocking.Client, source: Source, topic: str) -> None:
        """Exactly that, by topic, index and time, in tasks of any size."""
        names = [f"{topic}-{i}" for i in range(3)]
        messages: dict[str, list[Message]] = {}
        for name in names:
            send(client, name, *[b"%s %d" % (name.encode(), i) for i in range(9)])
            with client.reader(name) as there:
                messages[name] = list(there)
        what: dict[str, Callable[[Message], int]] = {
            "Offsets": lambda message: message.index,
            "Time": lambda message: message.publish_time_ms,
        }

        def places(name: str, kind: str, which: int) -> int:
            """The index of the first message to be read, or not to be."""
            given = by[kind][name][which]
            return next((one.index for one in messages[name] if what[kind](one) >= given), len(messages[name]))

        for chosen in (random.Random(seed) for seed in range(20)):
            some = chosen.sample(names, chosen.randint(1, 3))
            by = {
                kind: {name: sorted(map(of, chosen.choices(messages[name], k=2))) for name in some}
                for kind, of in what.items()
            }
            start, end, most = chosen.choice([*by]), chosen.choice([*by]), chosen.choice([1, 4, 100])
            options = {
                "topics": ",".join(some),
                f"starting{start}": json.dumps({name: by[start][name][0] for name in some}),
                f"ending{end}": json.dumps({name: by[end][name][1] for name in some}),
                "minPartitions": chosen.choice([1, 7]),
                "maxRecordsPerPartition": most,
            }
            reader = source.batch(**options)
            if any(places(name, start, 0) > places(name, end, 1) for name in some):
                with pytest.raises(ConfigurationError, match="nothing to read"):
                    reader.partitions()
                continue
            partitions = reader.partitions()
            assert all(sum(map(len, partition.value)) <= most for partition in partitions)
            assert sorted(read(reader, partitions)) == sorted(
                message.payload or b""
                for name in some
                for message in messages[name]
                if by[start][name][0] <= what[start](message) and what[end](message) < by[end][name][1]
            )

    def test_a_partitioned_topic_is_read_by_its_name(self, client: blocking.Client, source: Source, topic: str) -> None:
        """Once, each partition with its own range; also as it grows."""
        client.admin.create_topic(topic, partitions=3)
        stream = source.stream(topic=topic, startingOffsets="earliest")
        assert stream.trigger() == []
        with client.producer(topic, "p") as producer:
            for number in numbers(0, 40):
                producer.send(number, key=number)
        reader = source.batch(topic=topic, minPartitions=3)
        ranges = [one for partition in reader.partitions() for one in partition.value]
        assert sorted({one.partition for one in ranges}) == [0, 1, 2]
        assert sorted(source.rows(topic=topic)) == sorted(numbers(0, 40))
        assert sorted(value for found in stream.rest() for value in found) == sorted(numbers(0, 40))

    def test_what_is_not_there(self, client: blocking.Client, source: Source, topic: str) -> None:
        with pytest.raises(NotFoundError, match=f"no topic .*{topic}"):
            source.rows(topics=topic)
        with pytest.raises(NotFoundError, match=f"^topicsPattern: no topic matches {topic}"):
            source.rows(topicsPattern=topic)
        send(client, topic, b"0")
        incarnation = client.ends(topic).last.incarnation
        for option in ("startingOffsets", "endingOffsets"):
            # Nobody waits for messages that may never come.
            beyond = f'{{"{topic}": "{Position.before(incarnation, 5)}"}}'
            with pytest.raises(PositionError, match="it lacks indexes 1 to 4"):
                source.rows(topic=topic, **{option: beyond})
            with pytest.raises(PositionError, match="recreated"):
                source.rows(topic=topic, **{option: f'{{"{topic}": "5:0"}}'})
            with pytest.raises(ConfigurationError, match=f"{option} has a topic that is not read"):
                source.rows(topic=topic, **{option: f'{{"{topic}": "{incarnation}:0", "o": "{incarnation}:0"}}'})

    def test_what_only_the_other_kind_has(self, source: Source) -> None:
        for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"):
            with pytest.raises(ConfigurationError, match=name):
                source.batch(topic="t", **{name: 5})
        for options in ({"endingOffsets": "latest"}, {"endingTime": 5}):
            with pytest.raises(ConfigurationError, match=next(iter(options))):
                source.stream(topic="t", **options)


class TestSchemas:
    def reader(self, *fields: StructField, **options: str) -> BatchReader:
        return SeqdedupeDataSource({"topic": "t"} | options).reader(StructType(list(fields)))

    def test_some_columns_in_any_order(self) -> None:
        reader = self.reader(StructField("__index", LongType(), False), StructField("value", BinaryType()))
        assert reader.schema.names == ["__index", "value"]
        assert [field.nullable for field in reader.schema] == [False, True]
        assert self.reader(StructField("index", LongType()), plaincolumnnames="true").schema.names == ["index"]

    @pytest.mark.parametrize(
        ("name", "kind", "said"),
        [
            ("index", LongType(), "no column index; the columns are value, __key"),
            ("__index", IntegerType(), "column __index is int, it should be bigint"),
            ("value", StringType(), "column value is string, it should be binary"),
            ("__publishTime", TimestampNTZType(), "column __publishTime is timestamp_ntz, it should be timestamp"),
        ],
    )
    def test_what_does_not_fit_is_named(self, name: str, kind: DataType, said: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"^schema: .*{said}"):
            self.reader(StructField("__topic", StringType()), StructField(name, kind))

    def test_no_column_at_all(self) -> None:
        with pytest.raises(ConfigurationError, match="it has no column"):
            self.reader()

    def test_all_columns(self) -> None:
        assert SeqdedupeDataSource({"topic": "t"}).schema().names == SCHEMA.names


class TestStream:
    def test_latest_is_decided_by_the_first_batch(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, b"0")
        stream = source.stream(topic=topic)
        assert stream.trigger() == [], "the first batch says where it starts"
        send(client, topic, b"1")
        assert list(stream.rest()) == [[b"1"]]

    def test_each_message_comes_once_within_the_limit(
        self, client: blocking.Client, source: Source, topic: str
    ) -> None:
        for partition in range(2):
            send(client, f"{topic}-partition-{partition}", *numbers(100 * partition, 100 * partition + 40))
        stream = source.stream(topic=topic, startingOffsets="earliest", maxOffsetsPerTrigger=20, minPartitions=3)
        assert stream.reader.getDefaultReadLimit() == ReadMaxRows(20)
        found = list(stream.rest())
        assert [len(one) for one in found] == [20] * 4
        assert sorted(chain(*found)) == sorted(numbers(0, 40) + numbers(100, 140))
        everything = positions_in(stream.reader.latestOffset(stream.reader.initialOffset(), ReadAllAvailable()))
        assert as_texts(everything) == stream.reader.reportLatestOffset() == stream.offset

    def test_limits(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *[bytes(10_000)] * 20)
        assert source.stream(topic=topic).reader.getDefaultReadLimit() == ReadAllAvailable()
        stream = source.stream(topic=topic, startingTime=0, maxBytesPerTrigger=1)
        assert stream.reader.getDefaultReadLimit() == ReadMaxBytes(1)
        assert stream.reader.reportLatestOffset() is None
        found = list(stream.rest())
        assert list(chain(*found)) == [bytes(10_000)] * 20

    def test_it_waits_for_the_least_that_is_worth_a_trigger(
        self, client: blocking.Client, source: Source, topic: str
    ) -> None:
        send(client, topic, *numbers(0, 3))
        options = {"topic": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 5}
        stream = source.stream(**options, maxTriggerDelay="1h")
        assert stream.reader.getDefaultReadLimit() == ReadMinRows(5)
        assert stream.trigger() == numbers(0, 3), "the first one waits for nothing"
        send(client, topic, *numbers(3, 7))
        assert stream.trigger() is None
        assert stream.reader.reportLatestOffset() != stream.offset, "what is there is known all the same"
        send(client, topic, b"7")
        assert stream.trigger() == numbers(3, 8)
        send(client, topic, b"8")
        assert stream.trigger() is None
        # What a query that is started again, or another trigger, makes of the same place.
        again = Stream(source.stream(**options, maxTriggerDelay="1h").reader, stream.offset)
        assert again.trigger() == [b"8"]
        once = stream.reader.latestOffset(dict(stream.offset or {}), ReadAllAvailable())
        assert once == again.offset
        send(client, topic, b"9")
        assert again.trigger() is None
        hasty = Stream(source.stream(**options, maxTriggerDelay="0").reader, again.offset)
        assert hasty.trigger() == [b"9"]
        send(client, topic, b"10")
        assert hasty.trigger() == [b"10"], "the delay is over"
        again.reader.prepareForTriggerAvailableNow()
        assert list(again.rest()) == [numbers(9, 11)], "nothing is left that nobody comes back for"

    def test_it_waits_for_less_than_a_trigger_takes(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 25))
        stream = source.stream(
            topic=topic, startingOffsets="earliest", minOffsetsPerTrigger=10, maxOffsetsPerTrigger=10, minPartitions=2
        )
        assert stream.reader.getDefaultReadLimit() == ReadMaxRows(10)
        assert list(stream.rest()) == [numbers(0, 10), numbers(10, 20)]
        stream.reader.prepareForTriggerAvailableNow()
        assert list(stream.rest()) == [numbers(20, 25)]

    def test_a_loss_is_accepted_while_it_waits(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 4))
        stream = source.stream(
            topic=topic, startingOffsets="earliest", minOffsetsPerTrigger=2, maxTriggerDelay="1h", failOnDataLoss=False
        )
        assert stream.trigger() == numbers(0, 4)
        client.admin.delete_topic(topic)
        send(client, topic, b"new")
        assert stream.trigger() == []
        assert stream.trigger() is None
        send(client, topic, b"newer")
        assert stream.trigger() == [b"new", b"newer"]

    def test_topics_found_later_start_at_their_earliest(
        self, client: blocking.Client, source: Source, topic: str
    ) -> None:
        stream = source.stream(topicsPattern=f"{topic}-.*")
        assert [stream.trigger(), stream.trigger()] == [[], None]
        send(client, f"{topic}-a", b"a")
        assert stream.trigger() == [b"a"]
        send(client, f"{topic}-b-partition-3", b"b")
        send(client, f"{topic}-a", b"aa")
        assert sorted(stream.trigger() or []) == [b"aa", b"b"]
        assert stream.trigger() is None

    def test_partitions_are_read_on_when_a_topic_of_their_name_comes(
        self, client: blocking.Client, source: Source, topic: str
    ) -> None:
        for part in range(2):
            send(client, f"{topic}-partition-{part}", b"%d" % part)
        stream = source.stream(topic=topic, startingOffsets="earliest")
        assert sorted(stream.trigger() or []) == numbers(0, 2)
        send(client, topic, b"whole")
        for part in range(3):
            send(client, f"{topic}-partition-{part}", b"later")
        assert sorted(stream.trigger() or []) == [b"later"] * 3 + [b"whole"]
        assert stream.trigger() is None

    def test_available_now_ends_with_what_was_there(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 5))
        stream = source.stream(topic=topic, startingOffsets="earliest", maxOffsetsPerTrigger=2)
        stream.reader.prepareForTriggerAvailableNow()
        found = []
        for number, one in enumerate(stream.rest()):
            found += one
            send(client, topic, *numbers(5 + number, 6 + number))
        assert found == numbers(0, 5)

    def test_what_was_planned_is_read_again(self, client: blocking.Client, source: Source, topic: str) -> None:
        send(client, topic, *numbers(0, 5))
        reader = source.stream(topic=topic, startingOffsets="earliest").reader
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        send(client, topic, *numbers(5, 9))
        for _ in range(2):
            again = source.stream(topic=topic).reader
            assert read(again, again.partitions(start, end)) == numbers(0, 5)
        assert again.partitions(end, end) == []

    def test_offsets_that_are_none(self, source: Source, topic: str) -> None:
        reader = source.stream(topic=topic).reader
        with pytest.raises(SeqdedupeError, match=r"the checkpoint's offsets are not from this source: '5'"):
            reader.latestOffset({topic_name(topic): "5"}, ReadAllAvailable())

    def test_a_missing_topic_is_named(self, source: Source, topic: str) -> None:
        with pytest.raises(NotFoundError, match=f"no topic .*{topic}"):
            source.stream(topic=topic).trigger()


class TestReplay:
    """A batch that was planned and not completed, when it is read by a query that is started again."""

    @pytest.mark.parametrize("latest", [{}, {"startingTime": 2**62}])
    def test_the_first_batch_is_what_was_planned(
        self, client: blocking.Client, source: Source, topic: str, latest: dict[str, Any]
    ) -> None:
        """Wherever the starting options lead to by then."""
        send(client, topic, *numbers(0, 5))
        planned = source.stream(topic=topic, startingOffsets=json.dumps({topic: 2}))
        assert planned.trigger() == numbers(2, 5)
        end = planned.offset or {}
        send(client, topic, *numbers(5, 9))
        for _ in range(2):
            again = source.stream(topic=topic, **latest)
            assert again.replayed(end) == numbers(2, 5)
        again.offset = end
        assert list(again.rest()) == [numbers(5, 9)]

    def test_the_first_batch_may_be_empty(self, client: blocking.Client, source: Source, topic: str) -> None:
        """As that of `latest` is; what came since is of the next one."""
        names = [f"{topic}-0", f"{topic}-1"]
        for name in names:
            send(client, name, *numbers(0, 5))
        planned = source.stream(topics=",".join(names))
        assert planned.trigger() == []
        end = planned.offset or {}
        for name in names:
            send(client, name, *numbers(5, 9))
        again = source.stream(topics=",".join(names), startingOffsets="earliest")
        assert again.replayed(end) == []
        again.offset = end
        assert list(again.rest()) == [2 * numbers(5, 9)]

    def test_a_topic_that_is_found_later_is_read_from_where_it_was_planned(
        self, client: blocking.Client, source: Source, topic: str
    ) -> None:
        pattern = f"{topic}-.*"
        stream = source.stream(topicsPattern=pattern)
        assert stream.trigger() == []
        send(client, f"{topic}-a", *numbers(0, 3))
        start = dict(stream.offset or {})
        assert stream.trigger() == numbers(0, 3)
        end = stream.offset or {}
        assert Stream(source.stream(topicsPattern=pattern).reader, start).replayed(end) == numbers(0, 3)
        # It is said once: the next offset has positions alone, and there is none while nothing is new.
        assert stream.trigger() is None
        send(client, f"{topic}-a", *numbers(3, 5))
        assert stream.trigger() == numbers(3, 5)
        assert [*(stream.offset or {})] == [topic_name(f"{topic}-a")]

    def test_checkpoints_of_older_versions(self, client: blocking.Client, source: Source, topic: str) -> None:
        """Their offsets have positions alone. Where the first batch started at `latest` nobody knows any more."""
        send(client, topic, *numbers(0, 5))
        incarnation = client.ends(topic).last.incarnation
        start, end = ({topic_name(topic): str(Position.before(incarnation, index))} for index in (1, 4))
        assert Stream(source.stream(topic=topic).reader, start).replayed(end) == numbers(1, 4)
        assert Stream(source.stream(topicsPattern=topic).reader, {}).replayed(end) == numbers(0, 4)
        assert source.stream(topic=topic, startingOffsets="earliest").replayed(end) == numbers(0, 4)
        for options in ({}, {"startingTime": 5}, {"startingOffsets": json.dumps({topic: 2})}):
            with pytest.raises(SeqdedupeError, match="does not contain the first batch") as failure:
                source.stream(topic=topic, **options).replayed(end)
            assert "a new checkpoint" in failure.value.hint


class TestLoss:
    """A topic that was deleted, and made again."""

    @pytest.fixture
    def offset(self, client: blocking.Client, topic: str) -> Offsets:
        """After the second of four messages of a topic that was deleted since."""
        send(client, topic, *numbers(0, 4))
        incarnation = client.ends(topic).last.incarnation
        client.admin.delete_topic(topic)
        return {topic_name(topic): str(Position.before(incarnation, 2))}

    def test_it_fails(self, client: blocking.Client, source: Source, topic: str, offset: Offsets) -> None:
        with pytest.raises(NotFoundError, match="was deleted"):
            Stream(source.stream(topic=topic).reader, offset).trigger()
        send(client, topic, b"new")
        with pytest.raises(PositionError, match="was recreated"):
            Stream(source.stream(topic=topic).reader, offset).trigger()

    def test_it_goes_on_where_that_is_allowed(
        self,
        client: blocking.Client,
        source: Source,
        topic: str,
        offset: Offsets,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        stream = Stream(source.stream(topic=topic, failOnDataLoss=False).reader, offset)
        with caplog.at_level(logging.WARNING):
            assert stream.trigger() is None
            assert stream.trigger() is None
            assert [record.message.split(" was ")[1][:7] for record in caplog.records] == ["deleted"]
            send(client, topic, *numbers(10, 13))
            assert list(stream.rest()) == [[], numbers(10, 13)]
        assert len(caplog.records) == 2
        assert "messages after index 1 are gone, and the topic begins with index 0" in caplog.records[1].message

    @pytest.mark.parametrize("fails", [True, False])
    def test_a_batch_that_was_planned_before(
        self, client: blocking.Client, source: Source, topic: str, offset: Offsets, fails: bool
    ) -> None:
        name = topic_name(topic)
        incarnation = Position.parse(offset[name]).incarnation
        end = {name: str(Position.before(incarnation, 4))}
        reader = source.stream(topic=topic, failOnDataLoss=fails).reader
        planned = [InputPartition([TopicRange(name, Position.before(incarnation, 2), Position.before(incarnation, 4))])]
        makes: list[Callable[[], None]] = [lambda: None, lambda: send(client, topic, b"new")]
        for make in makes:
            make()
            if fails:
                with pytest.raises((NotFoundError, PositionError)):
                    reader.partitions(offset, end)
                with pytest.raises((NotFoundError, PositionError)):
                    read(reader, planned)
            else:
                assert reader.partitions(offset, end) == []
                assert read(reader, planned) == []

    @pytest.mark.parametrize("fails", [True, False])
    def test_a_topic_that_has_lost_its_end(
        self, client: blocking.Client, source: Source, topic: str, fails: bool
    ) -> None:
        name = topic_name(topic)
        send(client, topic, *numbers(0, 4))
        incarnation = client.ends(topic).last.incarnation
        beyond, end = Position.before(incarnation, 10), Position.before(incarnation, 20)
        reader = source.stream(topic=topic, failOnDataLoss=fails).reader
        planned = [InputPartition([TopicRange(name, beyond, end)])]
        # Going on from where it ends would give what was read already, once it is there again.
        with pytest.raises(PositionError):
            read(reader, planned)
        with pytest.raises(PositionError, match="lacks indexes 4 to 9"):
            Stream(reader, {name: str(beyond)}).trigger()

    def test_available_now_ends_over_it(
        self, client: blocking.Client, source: Source, topic: str, offset: Offsets
    ) -> None:
        send(client, topic, b"new")
        stream = Stream(source.stream(topic=topic, failOnDataLoss=False).reader, offset)
        stream.reader.prepareForTriggerAvailableNow()
        assert list(stream.rest()) == [[], [b"new"]]


PAYLOAD_BYTES = 1_990_000
SEGMENT_BYTES = 128 * 1024 * 1024
MESSAGES = 2 * (SEGMENT_BYTES // (2 * PAYLOAD_BYTES) + 3)
"""A little more than one segment of the log, which is what retention drops."""


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Source, Position, int]]:
    """A topic that has lost its beginning; its last position, and the first index that is left."""
    with (
        Sidecar(tmp_path_factory.mktemp("trimmed"), default_retention_size_in_mb=1) as sidecar,
        blocking.Client(sidecar.address) as client,
    ):
        with client.producer("t", "p") as producer:
            for first in range(0, MESSAGES, 2):
                if first == MESSAGES - 2:
                    producer.flush()  # a segment is left behind between two writes
                producer.send_batch([value + bytes(PAYLOAD_BYTES) for value in numbers(first, first + 2)])
        client.admin.snapshot("t")
        until = time.monotonic() + LAST_RESORT_SECONDS
        while not client.ends("t").first_index:
            assert time.monotonic() < until
            time.sleep(0.01)
        first, last = client.ends("t")
        yield Source(sidecar.address), last, first


class TestRetention:
    def test_it_fails(self, trimmed: tuple[Source, Position, int]) -> None:
        source, last, first = trimmed
        for index in (0, first - 1):
            offset = {topic_name("t"): str(Position.before(last.incarnation, index))}
            lost = counted(first - index, "message")
            with pytest.raises(PositionError, match=f"{lost} to retention: indexes {index} to"):
                Stream(source.stream(topic="t").reader, offset).trigger()
        with pytest.raises(PositionError, match="retention"):
            source.rows(topic="t", startingOffsets=f'{{"t": "{Position.start(last.incarnation)}"}}')
        # An end before what is left is not taken for one that is turned round.
        with pytest.raises(PositionError, match="retention"):
            source.rows(topic="t", endingOffsets='{"t": 1}')
        assert source.rows(topic="t", endingOffsets='{"t": 1}', failOnDataLoss=False) == []

    def test_it_goes_on_where_that_is_allowed(
        self, trimmed: tuple[Source, Position, int], caplog: pytest.LogCaptureFixture
    ) -> None:
        source, last, first = trimmed
        offset = {topic_name("t"): str(Position.before(last.incarnation, 1))}
        stream = Stream(source.stream(topic="t", failOnDataLoss=False).reader, offset)
        found = [value[:10].rstrip(b"\0") for one in stream.rest() for value in one]
        assert found == numbers(first, MESSAGES)
        assert [f"indexes 1 to {first - 1}" in record.message for record in caplog.records] == [True]

    def test_earliest_is_the_first_one_left(self, trimmed: tuple[Source, Position, int]) -> None:
        source, _, first = trimmed
        assert len(source.rows(topic="t")) == MESSAGES - first
        new = Stream(source.stream(topicsPattern="t").reader, {})
        assert len(new.trigger() or []) == MESSAGES - first

    @pytest.mark.parametrize("before", [NOTHING_YET, {}], ids=["first batch", "found later"])
    def test_what_is_trimmed_before_a_batch_is_repeated(
        self, trimmed: tuple[Source, Position, int], before: Offsets
    ) -> None:
        source, last, first = trimmed
        name = topic_name("t")
        end = offset_after(before, {name: last}, {name: Position.start(last.incarnation)})
        options = {"topicsPattern": "t", "startingOffsets": "earliest"}
        with pytest.raises(PositionError, match=f"has lost {first} messages to retention: indexes 0 to"):
            Stream(source.stream(**options).reader, before).replayed(end)
        again = Stream(source.stream(**options, failOnDataLoss=False).reader, before)
        assert len(again.replayed(end)) == MESSAGES - first

    @pytest.mark.parametrize("fails", [True, False])
    def test_what_is_trimmed_after_planning(self, trimmed: tuple[Source, Position, int], fails: bool) -> None:
        source, last, first = trimmed
        start = Position.before(last.incarnation, first - 2)
        planned = [InputPartition([TopicRange(topic_name("t"), start, last)])]
        reader = source.stream(topic="t", failOnDataLoss=fails).reader
        if fails:
            with pytest.raises(PositionError, match=str(first)):
                read(reader, planned)
        else:
            assert len(read(reader, planned)) == MESSAGES - first
