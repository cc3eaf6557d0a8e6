"""Places in a topic found by looking at few of its entries: they are those that reading all of it gives."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.entry_properties import KIND
from seqdedupe.errors import DamagedError
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar import finder as module
from seqdedupe.log.pulsar.entries import PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.finder import Finder, Known, last_of
from seqdedupe.log.pulsar.ledgers import Ledger, Ledgers
from seqdedupe.log.pulsar.terms import Terms, TermStanding, TermVerdict
from seqdedupe.message_id import NOWHERE, MessageId, Position
from tests.batches import batch
from tests.log.pulsar.standin import PulsarTopic
from tests.log.pulsar.test_terms import ACTIONS, play
from tests.log.pulsar.topics import INCARNATION, SETTINGS, marker, owner, packed, rows, stock, token


class Topic(Finder):
    """A finder in a topic in memory, which counts what it looks at."""

    def __init__(self, stored: PulsarTopic, earlier: MessageId = NOWHERE) -> None:
        sizes = Counter(entry.message_id.ledger_id for entry in stored.entries)
        ledgers = Ledgers([Ledger(ledger, entries, 100 * entries) for ledger, entries in sizes.items()])
        super().__init__("t", INCARNATION, ledgers, self._from, earlier)
        self.stored = stored
        self.looks = self.entries_read = 0

    async def _from(self, first: MessageId, last: MessageId) -> list[PulsarEntry]:
        found = [entry for entry in self.stored.entries if first <= entry.message_id <= last]
        self.looks += 1
        self.entries_read += len(found)
        return found


def oracle(topic: PulsarTopic) -> list[Known]:
    """Before the first entry and after each one, by reading all."""
    terms = Terms(TermStanding.start(INCARNATION))
    known = [Known(-1, terms.standing)]
    for at, entry in enumerate(topic.entries):
        found = terms.judge(entry.message, MessageId(0, at)) is TermVerdict.VALID and last_of(entry, terms.standing)
        known.append(Known(at, terms.standing, found or known[-1].last))
    return known


def topic_of(messages: list[PulsarMessage]) -> PulsarTopic:
    topic = PulsarTopic()
    for message in messages:
        topic.add(message)
    return topic


@given(st.text(ACTIONS.replace("l", ""), max_size=60), st.booleans(), st.integers(1, 3))
async def test_every_place_is_found_in_every_history(actions: str, deduplicates: bool, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP_ENTRIES", step)
        topic, _ = play("A" + actions, deduplicates=deduplicates)
        expected = oracle(topic)
        for known in expected:
            found = await Topic(topic).known_at(known.at)
            assert found.standing == known.standing
            if deduplicates and found.last:
                assert found.last == known.last
        end, last = await Topic(topic).end(), expected[-1].last
        assert end.standing == expected[-1].standing
        assert (end.last and end.last.index) == (last and last.index)
        for index in range(end.standing.next_index):
            before, after = await Topic(topic).around(index)
            assert before.standing.next_index == index
            assert after.standing.next_index == index + 1
            assert after.last
            assert after.last.index == index


@pytest.mark.parametrize("in_void", [1, 3, 5, 40, 200])
async def test_what_follows_a_hole_is_void_here_too(in_void: int) -> None:
    """After a hole in the midst, and after one behind the first marker; over a ledger's end; at the end, and not."""
    for missing in (1, 90):
        first, *others = of_owners(1, missing + in_void)
        topic = topic_of([first, *others[: missing - 1], *others[missing:-1]])
        topic.roll_over()
        next_rows = rows(2, 1, missing - 1, batch([("p", i) for i in range(7)]))
        for message in (others[-1], marker(2), *next_rows, marker(3)):
            topic.add(message)
        expected = oracle(topic)
        assert expected[-1].standing.next_index == missing - 1 + 7
        for known in expected:
            assert (await Topic(topic).known_at(known.at)).standing == known.standing
        for index in range(missing - 1 + 7):
            before, after = await Topic(topic).around(index)
            assert (before.standing.next_index, after.standing.next_index) == (index, index + 1)
        assert (await Topic(topic).end()).standing == expected[-1].standing


def of_owners(owners: int, entries: int) -> list[PulsarMessage]:
    """What owners wrote one after the other, each this many messages."""
    found: list[PulsarMessage] = []
    for k in range(owners):
        sent = batch([("p", k * entries + i + 1) for i in range(entries)], links={"p": k * entries or -1})
        found += [marker(k + 1), *rows(k + 1, 1, k * entries, sent)]
    return found


async def test_a_long_topic_is_hardly_looked_at() -> None:
    topic = Topic(topic_of(of_owners(20, 500)))
    end = await topic.end()
    assert end.last == Position(INCARNATION, MessageId(10, 20 * 501 - 1), 9999, owner(20).ownership)
    assert topic.looks <= 4
    before, _ = await topic.around(7321)
    assert before.standing == TermStanding(owner(15), 322, 7321)
    assert (topic.looks, topic.entries_read) <= (12, 200)


@pytest.mark.parametrize("rolls_over", [False, True])
async def test_what_was_there_before_a_take_over_is_not_looked_at(rolls_over: bool) -> None:
    """It may be very much, and each trigger of a query asks for the topic's ends."""
    stored = topic_of([stock()] * 5000)
    if rolls_over:
        stored.roll_over()
    for message in of_owners(2, 500):
        stored.add(message)
    topic = Topic(stored, MessageId(10, 4999))
    assert (await topic.end())._replace(last=None) == oracle(stored)[-1]._replace(last=None)
    assert (await topic.beginning()).at == 4999
    assert await topic.first_at(0) == 0
    before, after = await topic.around(0)
    assert (before.standing.next_index, after.standing.next_index) == (0, 1)
    assert topic.entries_read < 1000


async def test_a_fresh_marker_at_the_end() -> None:
    topic = Topic(topic_of([*of_owners(3, 500), marker(4)]))
    end = await topic.end()
    assert (end.standing, end.last and end.last.index) == (TermStanding(owner(4), 1, 1500), 1499)
    assert topic.entries_read < 300


class Believing(Topic):
    """Takes every entry for what it says of itself."""

    async def _by_its_marker(self, at: int) -> Known | None:
        entry = await self._entry(at)
        place = entry and module._place(entry)
        return module._after_valid(entry, place, at) if entry and place else None


async def test_void_entries_at_the_end_do_not_count() -> None:
    first, *late = of_owners(1, 900)
    stored = topic_of([first, *late[:400], marker(2), *late[400:]])
    end = await Topic(stored).end()
    assert (end.standing, end.last and end.last.index) == (TermStanding(owner(2), 1, 400), 399)
    # The control arm shows what nobody has.
    assert (await Believing(stored).end()).standing.next_index == 900


KNOWING = entries.marker_message(INCARNATION, 2, token(2), SETTINGS, 4)
"""Its writer did not know of the last message."""


@pytest.mark.parametrize("first", [marker(2), KNOWING, stock()], ids=["a marker", "a knowing one", "somebody else's"])
async def test_what_was_trimmed_is_not_the_beginning(first: PulsarMessage) -> None:
    messages = of_owners(1, 10)
    topic = topic_of(messages[:6])
    topic.roll_over()
    is_marker = KIND in first.properties
    for message in [first, *(rows(2, 1, 5, batch([("p", 5), ("p", 6)])) if is_marker else messages[6:])]:
        topic.add(message)
    assert (await Topic(topic).beginning()).standing.next_index == 0
    topic.trim(ledgers=1)
    left = Topic(topic)
    assert (await left.beginning()).standing.next_index == 5
    assert (await left.end()).standing.next_index == (7 if is_marker else 10)
    ownership = owner(2 if is_marker else 1).ownership
    assert (await left.around(5))[1].last == Position(INCARNATION, MessageId(13, 1), 5, ownership)


async def test_an_owner_whose_marker_is_gone_is_not_looked_at_longer() -> None:
    topic = topic_of(of_owners(1, 5000)[:1000])
    topic.roll_over()
    for message in of_owners(1, 5000)[1000:]:
        topic.add(message)
    topic.trim(ledgers=1)
    left = Topic(topic)
    assert (await left.end()).standing == TermStanding(owner(1), 5001, 5000)
    assert left.looks <= 3
    assert (await left.around(3210))[0].standing == TermStanding(owner(1), 3211, 3210)
    assert left.looks <= 8


async def test_only_a_marker_is_left() -> None:
    """It says how far its writer knew the topic."""
    assert await Topic(topic_of([KNOWING])).end() == Known(0, TermStanding(owner(2), 1, 4))


async def test_a_packed_entry_has_many_messages() -> None:
    several = [batch([("p", k * 10 + i + 1) for i in range(10)], links={"p": k * 10 or -1}) for k in range(200)]
    topic = Topic(topic_of([marker(1), *(packed(1, k + 1, k * 10, one) for k, one in enumerate(several))]))
    assert (await topic.end()).last == Position(INCARNATION, MessageId(10, 200, 9), 1999, owner(1).ownership)
    before, after = await topic.around(1234)
    assert (before.standing.next_index, after.standing.next_index) == (1230, 1240)
    assert await topic.first_at(1000 + 51) == 490


async def test_a_row_is_as_old_as_its_batch() -> None:
    several = [batch([("p", k * 10 + i + 1) for i in range(10)], links={"p": k * 10 or -1}) for k in range(20)]
    topic = Topic(
        topic_of([marker(1), *(row for k, one in enumerate(several) for row in rows(1, 1 + k * 10, k * 10, one))])
    )
    assert [await topic.first_at(1002 + index) for index in (0, 1, 50, 55, 191)] == [0, 10, 50, 60, 200]


async def test_an_empty_topic() -> None:
    assert await Topic(topic_of([])).end() == Known(-1, TermStanding.start(INCARNATION))
    end = await Topic(topic_of([marker(1)])).end()
    assert (end.standing, end.last) == (TermStanding(owner(1), 1, 0), None)


async def test_another_incarnation_is_damage() -> None:
    topic = Topic(topic_of(of_owners(1, 3)))
    topic.incarnation += 1
    topic.stored.entries = [one._replace(producer_name="seqdedupe-one-0") for one in topic.stored.entries]
    with pytest.raises(DamagedError):
        await topic.end()


def test_ledgers_count_their_entries() -> None:
    ledgers = Ledgers([Ledger(3, 0, 0), Ledger(5, 10, 1000), Ledger(7, 5, 5000), Ledger(9, 0, 0)])
    assert (len(ledgers), ledgers.size_bytes) == (15, 6000)
    ids = [ledgers.message_id(at) for at in range(15)]
    assert ids == [MessageId(5, i) for i in range(10)] + [MessageId(7, i) for i in range(5)]
    assert [ledgers.ordinal(one) for one in ids] == list(range(15))
    assert [ledgers.before(one) for one in ids] == [MessageId(-1, -1), *ids[:-1]]
    assert ledgers.are_neighbours(MessageId(5, 9), MessageId(7, 0))
    for pair in ((ids[8], ids[10]), (ids[10], ids[9]), (MessageId(3, 0), ids[0]), (ids[14], MessageId(9, 0))):
        assert not ledgers.are_neighbours(*pair)
    assert [ledgers.ordinal(MessageId(*one)) for one in ((3, 0), (5, 10), (6, 0), (8, 1))] == [None] * 4
    assert [ledgers.after(*one) for one in ((0, 300), (5, 500), (5, 1500), (12, 10**6))] == [3, 10, 11, 14]
