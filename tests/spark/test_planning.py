"""Planning: topics, places, losses, limits, splits."""

import random

import pytest

from seqdedupe.client import blocking
from seqdedupe.client.client import TopicEnds
from seqdedupe.errors import NotFoundError, PositionError, SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import planning
from seqdedupe_spark.options import Least, ReadLimits, Selection, Time
from seqdedupe_spark.planning import Loss, TopicListing, find_loss
from seqdedupe_spark.ranges import TopicRange, packed, shares, split
from seqdedupe_spark.source import Delaying

T = "persistent://public/default/t"


def selected(*names: str) -> Selection:
    return Selection("topics", tuple(map(topic_name, names)))


def full(*names: str) -> list[str]:
    return [topic_name(name) for name in names]


def send(client: blocking.Client, topic: str, count: int, size: int = 10) -> None:
    with client.producer(topic, "p") as producer:
        for _ in range(count):
            producer.send_batch([bytes(size)])


class TestTopics:
    def test_a_name_stands_for_its_topic_or_its_partitions(self, client: blocking.Client, topic: str) -> None:
        for name in ("", "-partition-0", "-partition-10", "-partition-2", "s-partition-1", "s"):
            client.admin.create_topic(topic + name)
        client.admin.create_topic(f"persistent://a/b/{topic}-partition-0")
        client.admin.create_topic(f"{topic}x-partition-1")
        client.admin.create_topic(f"{topic}x-partition-0")
        assert TopicListing(client).select(selected(topic)) == full(topic)
        assert TopicListing(client).select(selected(topic + "x")) == full(
            f"{topic}x-partition-0", f"{topic}x-partition-1"
        )
        assert TopicListing(client).select(selected(f"persistent://a/b/{topic}")) == full(
            f"persistent://a/b/{topic}-partition-0"
        )
        client.admin.delete_topic(topic)
        parts = full(f"{topic}-partition-0", f"{topic}-partition-2", f"{topic}-partition-10")
        assert TopicListing(client).select(selected(topic)) == parts
        assert TopicListing(client).select(selected(f"{topic}-partition-2", topic, topic)) == parts

    def test_the_name_of_a_partitioned_topic_stands_for_all_of_its_partitions(
        self, client: blocking.Client, topic: str
    ) -> None:
        client.admin.create_topic(topic, partitions=11)
        parts = [f"{topic}-partition-{k}" for k in range(11)]
        assert TopicListing(client).select(selected(topic)) == full(*parts)
        assert TopicListing(client).select(Selection("topicsPattern", pattern=topic)) == full(*parts)
        assert TopicListing(client).select(selected(parts[3])) == full(parts[3])

    def test_no_partition_is_left_out_in_silence(self, client: blocking.Client, topic: str) -> None:
        client.admin.create_topic(topic, partitions=2)
        lacking = TopicListing(client)
        del lacking._topics[topic_name(f"{topic}-partition-1")]
        for selection in (selected(topic), Selection("topicsPattern", pattern=topic)):
            with pytest.raises(NotFoundError, match=r"has 2 partitions, but .*-partition-1 does not exist"):
                lacking.select(selection)

    def test_a_missing_name_is_an_error_unless_it_is_known(self, client: blocking.Client, topic: str) -> None:
        client.admin.create_topic(topic)
        with pytest.raises(NotFoundError, match=rf"no topic .*/{topic}-no"):
            TopicListing(client).select(selected(topic, f"{topic}-no"))
        known = full(f"{topic}-no-partition-0", "other")
        assert TopicListing(client).select(selected(topic, f"{topic}-no"), known) == full(
            topic, f"{topic}-no-partition-0"
        )

    def test_partitions_that_are_read_are_read_on_when_a_topic_of_that_name_comes(
        self, client: blocking.Client, topic: str
    ) -> None:
        parts = full(*[f"{topic}-partition-{k}" for k in range(3)])
        for name in (*parts[:2], topic):
            client.admin.create_topic(name)
        assert TopicListing(client).select(selected(topic), parts[:1]) == full(topic) + parts[:2]
        client.admin.create_topic(parts[2])
        assert TopicListing(client).select(selected(topic), [*parts[:2], topic_name(topic)]) == full(topic) + parts
        # Nobody has read them by that name.
        for known in ([], full(topic), full("other-partition-0")):
            assert TopicListing(client).select(selected(topic), known) == full(topic)
        by_themselves = selected(topic, parts[0])
        assert TopicListing(client).select(by_themselves, full(topic, parts[0])) == full(topic, parts[0])

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("{}", [""]),
            ("{}-.*", ["-a", "-b-partition-1"]),
            ("{}-b", ["-b-partition-1"]),
            ("persistent://public/default/{}-[ab]", ["-a", "-b-partition-1"]),
            ("{}-b-partition-1", ["-b-partition-1"]),
            (".*://a/b/{}", []),
            ("{}-", []),
        ],
    )
    def test_a_pattern_matches_whole_names(
        self, client: blocking.Client, topic: str, pattern: str, found: list[str]
    ) -> None:
        for name in ("", "-a", "-b-partition-1"):
            client.admin.create_topic(topic + name)
        assert TopicListing(client).select(Selection("topicsPattern", pattern=pattern.format(topic))) == full(
            *[topic + name for name in found]
        )


def test_places(client: blocking.Client, topic: str) -> None:
    name = topic_name(topic)
    client.admin.create_topic(topic)
    empty = Position.start(client.ends(topic).last.incarnation)
    for place in ("earliest", "latest", Time(0)):
        assert TopicListing(client).resolve([name], place, "o") == {name: empty}
    send(client, topic, 3)
    last = client.ends(topic).last
    assert TopicListing(client).resolve([name], "latest", "o") == {name: last}
    assert TopicListing(client).resolve([name], "earliest", "o") == {name: empty}
    with client.reader(topic) as reader:
        stored = list(reader.batches())
    times = [one.publish_time_ms for one in stored]
    for milliseconds in (0, times[0], times[1], times[2], times[2] + 1):
        before = sum(len(one) for one in stored if one.publish_time_ms < milliseconds)
        at = Position.before(empty.incarnation, before)
        assert TopicListing(client).resolve([name], Time(milliseconds), "o") == {name: at}
    given = {name: Position.before(5, 7)}
    assert TopicListing(client).resolve([name], given, "o") == given
    assert TopicListing(client).resolve([name], {name: "latest"}, "o") == {name: last}
    with pytest.raises(SeqdedupeError, match=r"startingOffsets lacks topic .*/other \[INVALID_OPTION\]"):
        TopicListing(client).resolve([name, topic_name("other")], given, "startingOffsets")
    with pytest.raises(SeqdedupeError, match=r"startingTime lacks topic .*/other \[INVALID_OPTION\]"):
        TopicListing(client).resolve([name, topic_name("other")], {name: Time(0)}, "startingOffsets")
    with pytest.raises(SeqdedupeError, match=r"startingOffsets has a topic that is not read: .*/other"):
        TopicListing(client).resolve([name], given | {topic_name("other"): "latest"}, "startingOffsets")


def test_an_index_is_a_place_and_a_whole_topic_stands_for_its_partitions(client: blocking.Client, topic: str) -> None:
    parts = full(f"{topic}-partition-0", f"{topic}-partition-1")
    for name in parts:
        send(client, name, 3)
    starts = {name: Position.before(client.ends(name).last.incarnation, 0) for name in parts}
    listing = TopicListing(client)
    found = listing.resolve(parts, {topic_name(topic): 2, parts[1]: "earliest"}, "o")
    assert found == {parts[0]: Position.before(starts[parts[0]].incarnation, 2), parts[1]: starts[parts[1]]}
    assert listing.resolve(parts, {topic_name(topic): "earliest"}, "o") == starts


def test_each_topic_has_a_time_of_its_own(client: blocking.Client, topic: str) -> None:
    """A time after the last message is the end."""
    parts = full(f"{topic}-partition-0", f"{topic}-partition-1", f"{topic}-partition-2")
    for name in parts:
        send(client, name, 2)
    last = {name: client.ends(name).last for name in parts}
    times = {topic_name(topic): Time(0), parts[1]: Time(2**63 - 1), parts[2]: Time(1)}
    found = TopicListing(client).resolve(parts, times, "startingOffsets")
    assert [found[name].index for name in parts] == [-1, 1, -1]
    assert [found[name].incarnation for name in parts] == [last[name].incarnation for name in parts]


class TestListing:
    def test_many_topics_are_looked_up_in_one_call(
        self, client: blocking.Client, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = full(*(f"{topic}-{i}" for i in range(20)))
        for name in names:
            send(client, name, 1)
        ends = {name: client.ends(name).last for name in names}
        calls: list[str] = []
        for single in ("ends", "locate_bytes", "locate_time"):
            monkeypatch.setattr(blocking.Client, single, lambda *_: calls.append("one"))
        listing = TopicListing(client)
        starts = listing.resolve(listing.select(selected(*names)), "earliest", "o")
        ranges = listing.plan(starts, ReadLimits(1000, 64 * 1024 * 1024))
        assert {one.topic: one.end for one in ranges} == ends
        assert calls == []

    def test_an_end_that_only_another_call_knows_is_asked_for(self, client: blocking.Client, topic: str) -> None:
        """A topic that has not recovered, and a position that another run has moved on since."""
        send(client, topic, 2)
        name, listing = topic_name(topic), TopicListing(client)
        send(client, topic, 2)
        now = client.ends(topic).last
        assert listing.look(name, now) == now
        recovering = TopicListing(client)
        recovering._topics[name].state = admin_pb2.TOPIC_STATE_RECOVERING
        recovering._topics[name].last.index = 0
        assert recovering.look(name, Position.start(now.incarnation)) == now


def test_small_ranges_share_a_task() -> None:
    assert packed([]) == []
    assert packed([5] * 500) == [range(i, min(i + 32, 500)) for i in range(0, 500, 32)]
    assert packed([4_000, 4_000, 4_000, 50_000, 1, 1]) == [range(2), range(2, 3), range(3, 4), range(4, 6)]
    assert len(packed([5] * 500, least_parts=100)) >= 100
    assert packed([1, 1], least_parts=8) == [range(1), range(1, 2)]


class TestLosses:
    def test_an_end_of_another_history_is_a_loss(self) -> None:
        """Without an ownership, or further from the end, only the sidecar can tell."""
        end = Position.before(1, 10)._replace(ownership=7)
        for same in (end, end._replace(ownership=0), Position.before(1, 9)._replace(ownership=8)):
            assert find_loss(T, same, TopicEnds(0, end)) is None
        loss = find_loss(T, end._replace(ownership=8), TopicEnds(0, end))
        assert loss is not None
        assert (loss.reason, loss.next, loss.may_be_accepted) == ("POSITION_DIVERGED", None, False)

    def test_what_is_none(self) -> None:
        for index in (4, 5, 9):
            assert find_loss(T, Position.before(1, index + 1), TopicEnds(5, Position.before(1, 10))) is None
        assert find_loss(T, Position.start(1), TopicEnds(0, Position.start(1))) is None

    def test_retention(self) -> None:
        loss = find_loss(T, Position.before(1, 3), TopicEnds(5, Position.before(1, 10)))
        assert loss is not None
        assert (loss.next, loss.reason) == (Position.before(1, 5), "POSITION_TRIMMED")
        assert "2 messages" in loss.message
        assert "indexes 3 to 4" in loss.message
        with pytest.raises(PositionError, match="indexes 3 to 4"):
            raise loss.error()

    def test_a_lost_end(self) -> None:
        loss = find_loss(T, Position.before(1, 13), TopicEnds(0, Position.before(1, 10)))
        assert loss is not None
        assert (loss.next, loss.reason, loss.may_be_accepted) == (None, "POSITION_AFTER_END", False)
        assert "indexes 10 to 12" in loss.message

    def test_another_incarnation_is_neither_earlier_nor_later(self) -> None:
        for incarnation in (1, 3):
            for index in (0, 5, 50):
                loss = find_loss(T, Position.before(incarnation, index), TopicEnds(5, Position.before(2, 10)))
                assert loss is not None
                assert (loss.next, loss.reason) == (Position.before(2, 5), "POSITION_OF_ANOTHER_INCARNATION")

    def test_on_a_sidecar(self, client: blocking.Client, topic: str) -> None:
        name = topic_name(topic)
        client.admin.create_topic(topic)
        send(client, topic, 3)
        old = client.ends(topic).last
        assert TopicListing(client).look(name, old) == old
        assert TopicListing(client).plan({name: old}) == []
        assert TopicListing(client).plan({name: Position.start(old.incarnation)}) == [
            TopicRange(name, Position.start(old.incarnation), old)
        ]
        client.admin.delete_topic(topic)
        gone = TopicListing(client).look(name, old)
        assert isinstance(gone, Loss)
        assert gone.next is None
        with pytest.raises(NotFoundError, match="was deleted"):
            TopicListing(client).plan({name: old})
        client.admin.create_topic(topic)
        new = TopicListing(client).look(name, old)
        assert isinstance(new, Loss)
        assert new.next == Position.start(client.ends(topic).last.incarnation)
        with pytest.raises(PositionError, match="recreated"):
            TopicListing(client).plan({name: old})


class TestLimits:
    @pytest.mark.parametrize("seed", range(200))
    def test_shares(self, seed: int) -> None:
        chosen = random.Random(seed)
        there = [chosen.choice([1, 2, 10, 1000, 10**12]) for _ in range(chosen.randint(1, 8))]
        limit = chosen.choice([1, 3, 10, 500, 10**6, 10**13])
        given = shares(there, limit)
        assert all(one >= 1 for one in given)
        if limit >= sum(there):
            assert all(one >= wanted for one, wanted in zip(given, there, strict=True))
        elif limit >= len(there):
            assert limit - len(there) < sum(given) <= limit
        assert sorted(given) == [one for _, one in sorted(zip(there, given, strict=True))]

    def test_no_topic_starves_and_each_message_comes_once(self, client: blocking.Client, topic: str) -> None:
        names = full(*(f"{topic}-partition-{i}" for i in range(3)))
        counts = [200, 1, 20]
        for name, count in zip(names, counts, strict=True):
            send(client, name, count)
        starts = {name: Position.start(client.ends(name).last.incarnation) for name in names}
        first = TopicListing(client).plan(starts, ReadLimits(messages=22))
        assert [len(one) for one in first] == [18, 1, 2]
        done = [0] * 3
        rounds = 0
        while ranges := TopicListing(client).plan(starts, ReadLimits(messages=22, size_bytes=2000)):
            assert sum(map(len, ranges)) <= 22
            rounds += 1
            for one in ranges:
                assert one.start == starts[one.topic]
                starts[one.topic] = one.end
                done[one.partition] += len(one)
        assert done == counts
        assert rounds >= 10

    def test_bytes(self, client: blocking.Client, topic: str) -> None:
        name = topic_name(topic)
        send(client, topic, 50, 10_000)
        start = {name: Position.start(client.ends(topic).last.incarnation)}
        assert [len(one) for one in TopicListing(client).plan(start, ReadLimits(size_bytes=1))] == [1]
        assert 8 <= len(TopicListing(client).plan(start, ReadLimits(size_bytes=100_000))[0]) <= 12
        assert len(TopicListing(client).plan(start, ReadLimits(size_bytes=10**9))[0]) == 50
        assert len(TopicListing(client).plan(start, ReadLimits(messages=3, size_bytes=10**9))[0]) == 3

    def test_a_range_that_is_cut_ends_with_a_message_of_which_all_is_known(
        self, client: blocking.Client, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = topic_name(topic)
        send(client, topic, 5)
        start = {name: Position.start(client.ends(topic).last.incarnation)}
        [cut] = TopicListing(client).plan(start, ReadLimits(messages=3))
        with client.reader(topic, stop_index=3) as reader:
            assert cut.end == [message.position for message in reader][-1]

        def damaged(*_: object) -> Position:
            raise error("LOG_DAMAGED", "message 2 is damaged")

        # Who reads the range will find that out.
        monkeypatch.setattr(blocking.Client, "position_at", damaged)
        [cut] = TopicListing(client).plan(start, ReadLimits(messages=3))
        assert cut.end == Position.before(start[name].incarnation, 3)

    def test_more_topics_than_the_limit(self, client: blocking.Client, topic: str) -> None:
        names = full(*(f"{topic}-partition-{i}" for i in range(3)))
        for name in names:
            send(client, name, 2)
        starts = {name: Position.start(client.ends(name).last.incarnation) for name in names}
        assert [len(one) for one in TopicListing(client).plan(starts, ReadLimits(messages=1))] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(300))
def test_splits_have_the_same_messages(seed: int) -> None:
    """No matter what is asked for, each message is in one task: as a list of single messages says it."""
    chosen = random.Random(seed)
    ranges = []
    for i in range(chosen.randint(0, 5)):
        first = chosen.choice([0, 3, 1000])
        count = chosen.choice([1, 2, 7, 1000])
        ranges.append(TopicRange(f"t-partition-{i}", Position.before(i, first), Position.before(i, first + count)))
    parts, most = chosen.choice([1, 2, 5, 16, 100]), chosen.choice([None, 1, 3, 64, 999, 1000, 10**9])
    pieces = split(ranges, parts, most)
    assert len(pieces) >= min(parts, sum(map(len, ranges)))
    assert all(0 < len(piece) <= (most or 10**9) for piece in pieces)
    expected = [(one.topic, index) for one in ranges for index in range(one.first_index, one.stop_index)]
    assert [(one.topic, index) for one in pieces for index in range(one.first_index, one.stop_index)] == expected
    for one in ranges:
        sizes = [len(piece) for piece in pieces if piece.topic == one.topic]
        assert max(sizes) - min(sizes) <= 1
        assert [piece.end for piece in pieces if piece.topic == one.topic][-1] == one.end
    if parts == 1 and (most is None or most >= 1000):
        assert pieces == ranges
    tasks = packed([len(piece) for piece in pieces], parts, most)
    assert [number for task in tasks for number in task] == list(range(len(pieces)))
    assert all(sum(len(pieces[number]) for number in task) <= (most or 10**9) for task in tasks)


def test_what_is_counted_by_entries_is_not_cut() -> None:
    stock = TopicRange("t", Position.before(0, 5), Position.before(0, 5000), entries=70)
    none = TopicRange("t", Position.before(0, 5), Position.before(0, 5000), entries=0)
    assert split([stock, none], 16, 7) == [stock]


class TestDelaying:
    def test_it_waits_for_so_many_but_not_for_ever(self) -> None:
        delaying = Delaying(Least(10, 60.0))
        seen = [
            (1, 100.0),
            (9, 101.0),
            (10, 102.0),
            (9, 161.9),
            (9, 162.0),
            (9, 221.9),
            (0, 222.0),
            (1, 223.0),
            (9, 224.0),
        ]
        assert [delaying.waits(*one) for one in seen] == [False, True, False, True, False, True, False, False, True]

    def test_one_that_is_started_again_takes_what_there_is(self) -> None:
        delaying = Delaying(Least(10, 60.0))
        assert not delaying.waits(9, 5.0)
        assert delaying.waits(9, 5.0)
        assert not Delaying(delaying.least).waits(9, 5.0)


class TestPatience:
    def test_it_ends(self) -> None:
        with blocking.Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            planning.patiently(lambda: client.ends("t"), 0.3)

    def test_it_helps(self) -> None:
        answers = iter([UnavailableError("UNREACHABLE", "", "", 1, {})] * 3)

        def call() -> str:
            if (failure := next(answers, None)) is not None:
                raise failure
            return "answer"

        assert planning.patiently(call) == "answer"

    def test_a_topic_that_recovers_is_waited_for_without_a_limit(self, caplog: pytest.LogCaptureFixture) -> None:
        answers = iter([UnavailableError("RECOVERING", "it is being read", "", 1, {})] * 8)

        def call() -> str:
            if (failure := next(answers, None)) is not None:
                raise failure
            return "answer"

        assert planning.patiently(call, seconds=1.5) == "answer"

    def test_it_ends_when_it_should(self) -> None:
        def call() -> None:
            raise UnavailableError("RECOVERING", "", "", 1, {})

        with pytest.raises(UnavailableError):
            planning.patiently(call, should_stop=lambda: True)
