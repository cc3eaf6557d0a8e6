"""The rule of terms: no matter what two owners do at once, what either confirms is in the topic once, and valid."""

from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.entry_properties import ADDRESS, ENTRY, KIND, SCHEMA_VERSION, TOKEN, VERSION
from seqdedupe.errors import DamagedError
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.entries import PulsarMessage
from seqdedupe.log.pulsar.terms import REMEMBERED_ENTRIES, Receipts, Terms, TermStanding, TermVerdict
from seqdedupe.message_id import NOWHERE, MessageId
from tests.batches import batch
from tests.log.pulsar.owners import Process, judged, payloads_of, valid_in
from tests.log.pulsar.standin import PulsarTopic
from tests.log.pulsar.topics import INCARNATION, SETTINGS, marker, owner, packed, rows, stock, token

ACTIONS = "aAbBxylsS~|fh"
"""a, b: that owner appends · x, y: the broker takes the oldest that a, or b, has on its way · l: it refuses the oldest
of a alone · A, B: it opens; of what it had on its way one lands · S: B opens with a term that it read before anything
stood there · ~: both clients connect again · |: the ledger rolls over · f: a stranger writes · h: receipts come · s:
the broker takes all that is sent."""


def play(actions: str, *, believes: bool = False, deduplicates: bool = False) -> tuple[PulsarTopic, list[Process]]:
    """A history of two owners; at its end all that they have on its way is stored, and they hear of it.

    The second one writes the format's newer version: both may stand in one topic.
    """
    topic = PulsarTopic(deduplicates=deduplicates)
    versions = zip("ab", (VERSION, SCHEMA_VERSION), strict=True)
    a, b = owners = [Process(topic, name, believes=believes, version=version) for name, version in versions]
    for action in actions + "sh":
        acting = a if action in "aAx" else b
        if action in "ab":
            if acting.is_open:
                acting.append()
        elif action in "xy":
            acting.producer.store(1)
        elif action in "AB":
            acting.open(lands=1)
        elif action == "S":
            b.open(highest_term=0)
        elif action == "l":
            a.producer.lose()
        elif action == "|":
            topic.roll_over()
        elif action == "f":
            topic.add(stock())
        else:
            for each in owners:
                {"s": each.producer.store, "~": each.producer.connect_again, "h": each.hear}[action]()
    return topic, owners


def check(topic: PulsarTopic, owners: list[Process]) -> None:
    terms, verdicts = judged(topic)
    valid = valid_in(topic)
    assert [at for at, verdict in enumerate(verdicts) if verdict is TermVerdict.VALID] == [at for at, _ in valid]
    indexes = [int(message.properties[ENTRY].split(":")[5]) for _, message in valid if message.payload]
    assert indexes == list(range(len(indexes)))
    assert terms.next_index == len(indexes)
    found = payloads_of(valid)
    assert len(found) == len(set(found))
    for each in owners:
        assert [payload for payload in found if payload in each.confirmed] == each.confirmed
    counts = terms.counts
    assert len(valid) + counts.void + counts.repeats + counts.foreign + counts.earlier == len(topic.entries)


@pytest.mark.parametrize("deduplicates", [False, True])
def test_two_owners_in_every_order(deduplicates: bool) -> None:
    """All histories of four actions after an owner's appends; each fault that they are about comes up."""
    void = repeats = confirmed = lost = 0
    for actions in product("aBbx~|sh", repeat=4):
        topic, owners = play("Aax" + "".join(actions), deduplicates=deduplicates)
        check(topic, owners)
        terms, _ = judged(topic)
        void, repeats = void + terms.counts.void, repeats + terms.counts.repeats
        confirmed += sum(len(each.confirmed) for each in owners)
        lost += not owners[0].is_open
    assert min(void, confirmed, lost) > 500
    assert repeats == 0 if deduplicates else repeats > 500


@given(st.text(ACTIONS, max_size=40), st.booleans())
def test_two_owners_at_length(actions: str, deduplicates: bool) -> None:
    check(*play(actions, deduplicates=deduplicates))


def test_with_receipts_believed_something_acknowledged_is_void() -> None:
    """The control arm: a receipt proves that an entry is stored, not that it is anybody's."""
    topic, (a, b) = play("AasBabs", believes=True)
    assert (a.confirmed, b.confirmed) == (["a1", "a2"], ["b1"])
    assert payloads_of(valid_in(topic)) == ["a1", "b1"]
    topic, (a, b) = play("AasBabs")
    assert (a.confirmed, b.confirmed) == (["a1"], ["b1"])
    assert not a.is_open
    assert b.is_open


def test_with_receipts_believed_something_acknowledged_is_nowhere() -> None:
    """The control arm of (-1, -1): what Pulsar's deduplication has seen need not be there. It forgot to store it."""
    for believes in (True, False):
        topic = PulsarTopic()
        a = Process(topic, "a", believes=believes)
        a.open()
        a.append()
        a.producer.store()
        topic.entries.pop()
        a.producer.connect_again()
        a.producer.store()
        a.hear()
        assert a.confirmed == (["a1"] if believes else [])
        assert payloads_of(valid_in(topic)) == []
        assert a.is_open == believes


def test_an_owner_that_has_lost_hears_of_it_with_its_next_receipt() -> None:
    for between in ("", "|", "bby", "~", "f"):
        _, (a, b) = play("AaashB" + between + "ax")
        assert a.confirmed == ["a1", "a2"]
        assert not a.is_open
        assert b.is_open


def test_what_was_on_its_way_when_another_took_over() -> None:
    """It stands before the marker, and is the next owner's too to know of; or after it, and is nobody's."""
    topic, (a, b) = play("AaaxBsh")
    assert payloads_of(valid_in(topic)) == a.confirmed == ["a1"]
    assert (a.is_open, b.is_open) == (False, True)


@pytest.mark.parametrize("marks", [True, False])
def test_what_was_settled_as_lost_does_not_land_later(marks: bool) -> None:
    """The control arm reads without marking: what it did not find, and would send again, is stored after all."""
    topic = PulsarTopic()
    a, b = Process(topic, "a"), Process(topic, "b")
    a.open()
    a.append()
    if marks:
        b.open()
    assert payloads_of(valid_in(topic)) == []
    a.producer.store()
    assert payloads_of(valid_in(topic)) == ([] if marks else ["a1"])


def test_what_was_trimmed_is_noticed() -> None:
    """A Reader jumps over it in silence. Anyone who did not count would go on as if nothing had been there."""
    topic, _ = play("AaasBbbs|bs")
    standing, last = TermStanding.start(INCARNATION), None
    for entry in topic.read():
        terms = Terms(standing)
        terms.judge(entry.message, entry.message_id)
        standing, last = terms.standing, entry.message_id
        if standing.next_index == 1:
            break
    topic.trim(ledgers=1)
    left = list(topic.read(last))
    assert len(left) == 1
    assert refused(Terms(standing), left[0].message) == "LOG_GAP"


def test_receipts_confirm_in_one_ledger_without_a_gap() -> None:
    receipts = Receipts(MessageId(7, 3))
    for receipt in ((7, 5), (8, 0), (7, 3), (8, 4), (7, 4, 0)):
        assert not receipts.confirms(MessageId(*receipt))
    assert receipts.confirms(MessageId(7, 4))
    assert receipts.confirms(MessageId(7, 5))
    assert not receipts.confirms(MessageId(8, 0))
    receipts.was_read(MessageId(8, 0))
    assert receipts.confirms(MessageId(8, 1))


# A hole.


def test_what_follows_a_refused_entry_is_void_and_the_topic_goes_on() -> None:
    """Anyone who reads it, and anyone who owns it then: what was not acknowledged is sent again, and stored once."""
    topic, (a, b) = play("AasaaaxlsAaa")
    terms, verdicts = judged(topic)
    assert (terms.counts.holes, verdicts.count(TermVerdict.VOID)) == (1, 1)
    assert payloads_of(valid_in(topic)) == a.confirmed == ["a1", "a2", "a5", "a6"]
    check(topic, [a, b])
    topic, (a, b) = play("AasaaaxlsBb|b")
    assert payloads_of(valid_in(topic)) == ["a1", "a2", "b1", "b2"]
    check(topic, [a, b])


def test_with_receipts_believed_after_a_hole_something_acknowledged_is_void() -> None:
    """The control arm: an owner that goes on after a refused entry."""
    topic, (a, _) = play("Aaaals", believes=True)
    assert a.confirmed == ["a2", "a3"]
    assert payloads_of(valid_in(topic)) == []


def at(terms: Terms, message: PulsarMessage, ledger_id: int, entry_id: int, batch_index: int = -1) -> TermVerdict:
    return terms.judge(message, MessageId(ledger_id, entry_id, batch_index))


def with_first(last_entry: int = 2) -> Terms:
    terms = Terms(TermStanding.start(INCARNATION))
    for entry_id, message in enumerate(FIRST, last_entry - 2):
        assert at(terms, message, 7, entry_id) is TermVerdict.VALID
    return terms


def test_a_hole_is_void_up_to_the_next_marker() -> None:
    terms = with_first()
    assert at(terms, message_of(2, 4, 3), 7, 3) is TermVerdict.VOID
    assert terms.standing == TermStanding(owner(2), 3, 2, has_hole=True)
    # Also what would fit, should it come late, and what nobody could write after it.
    for entry_id, number in enumerate((5, 3, 4, 1), 4):
        assert at(terms, message_of(2, number, number - 1), 7, entry_id) is TermVerdict.VOID
    assert (terms.counts.holes, terms.counts.void) == (1, 5)
    assert at(terms, marker(3), 7, 8) is TermVerdict.VALID
    assert at(terms, message_of(3, 1, 2), 7, 9) is TermVerdict.VALID
    assert terms.standing == TermStanding(owner(3), 2, 3)


def test_what_is_read_between_is_no_hole_of_the_reader() -> None:
    """What is void and what others wrote stand there; a client's batch has several messages in one position."""
    terms = with_first()
    for entry_id, batch_index in ((3, 0), (3, 1), (4, -1)):
        assert at(terms, stock(), 7, entry_id, batch_index) is TermVerdict.FOREIGN
    assert at(terms, marker(1), 7, 5) is TermVerdict.VOID
    assert at(terms, message_of(2, 4, 3), 7, 6) is TermVerdict.VOID
    assert terms.counts.holes == 1


@pytest.mark.parametrize("places", [[(7, 4)], [(8, 0)], [(7, 3), (7, 5)], [(7, 4), (7, 5)], [(8, 0), (8, 1)]], ids=str)
def test_where_a_position_was_not_read_it_is_a_gap(places: list[tuple[int, int]]) -> None:
    terms = with_first()
    *others, last = places
    for place in others:
        assert at(terms, stock(), *place) is TermVerdict.FOREIGN
    for _ in range(2):
        with pytest.raises(DamagedError, match="LOG_GAP"):
            at(terms, message_of(2, 4, 3), *last)
    assert len(terms.borders) == 1
    # It was found out that nothing stands there.
    terms.borders.clear()
    assert at(terms, message_of(2, 4, 3), *last) is TermVerdict.VOID


def test_a_reader_that_begins_after_the_last_valid_entry_comes_to_the_same() -> None:
    for after, is_hole in ((MessageId(7, 2), True), (MessageId(7, 1), False), (NOWHERE, False)):
        terms = Terms(with_first().standing, after)
        if is_hole:
            assert at(terms, message_of(2, 4, 3), 7, 3) is TermVerdict.VOID
        else:
            with pytest.raises(DamagedError, match="LOG_GAP"):
                at(terms, message_of(2, 4, 3), 7, 3)
    # And so does one that begins in the midst of what is void.
    terms = Terms(TermStanding(owner(2), 3, 2, has_hole=True), MessageId(7, 4))
    assert at(terms, NEXT, 7, 5) is TermVerdict.VOID


def test_a_marker_that_knows_of_more_proves_that_it_was_no_hole() -> None:
    terms = with_first()
    assert at(terms, message_of(2, 4, 3), 7, 3) is TermVerdict.VOID
    knowing = entries.marker_message(INCARNATION, 3, token(3), SETTINGS, 4)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        at(terms, knowing, 7, 4)


# What the entries say of themselves.

_ledgers = count()


def judge(terms: Terms, message: PulsarMessage) -> TermVerdict:
    """For an entry before which others may stand that were not read."""
    return terms.judge(message, MessageId(next(_ledgers), 0))


def reading(*messages: PulsarMessage) -> Terms:
    terms = Terms(TermStanding.start(INCARNATION))
    for message in messages:
        assert judge(terms, message) is TermVerdict.VALID
    return terms


def message_of(term: int, number: int, index: int, whose: str = "") -> PulsarMessage:
    (message,) = rows(term, number, index, batch([("p", index)]), whose)
    return message


def with_properties(message: PulsarMessage, **changes: str | None) -> PulsarMessage:
    properties = dict(message.properties)
    for name, value in changes.items():
        if value is None:
            del properties[f"seqdedupe.{name}"]
        else:
            properties[f"seqdedupe.{name}"] = value
    return message._replace(properties=properties)


FIRST = (marker(2), message_of(2, 1, 0), message_of(2, 2, 1))
NEXT = message_of(2, 3, 2)
OF_SECOND, OF_THIRD = owner(2).prefix(), owner(3).prefix()


def refused(terms: Terms, message: PulsarMessage) -> str:
    before = terms.standing
    with pytest.raises(DamagedError) as error:
        judge(terms, message)
    assert terms.standing == before
    return error.value.reason


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(message_of(2, 4, 3), id="a message"),
        pytest.param(message_of(2, 4, 2), id="a control record"),
        pytest.param(message_of(2, 3, 3), id="the end of the term before"),
        pytest.param(message_of(3, 1, 2), id="a marker"),
    ],
)
def test_what_is_missing_is_a_gap(missing: PulsarMessage) -> None:
    assert refused(reading(*FIRST), missing) == "LOG_GAP"


def test_a_log_without_its_beginning_is_a_gap() -> None:
    for message in (NEXT, packed(2, 3, 2, batch([("p", 1)])), entries.control_message(owner(2), 1, 0, b"")):
        assert refused(reading(), message) == "LOG_GAP"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param(message_of(2, 3, 1), "LOG_DAMAGED", id="an index again"),
        pytest.param(with_properties(NEXT, entry=f"{OF_SECOND}:2"), "LOG_DAMAGED", id="no number"),
        pytest.param(with_properties(NEXT, entry=f"{OF_SECOND}3"), "LOG_DAMAGED", id="no index"),
        pytest.param(with_properties(NEXT, entry=f"{OF_SECOND}3:two"), "LOG_DAMAGED", id="an index that is none"),
        pytest.param(with_properties(NEXT, entry=f"{OF_SECOND}3:-2"), "LOG_DAMAGED", id="an index below 0"),
        pytest.param(with_properties(NEXT, kind="marker"), "LOG_DAMAGED", id="a second marker"),
        pytest.param(with_properties(NEXT, kind="batch", rows="0"), "LOG_DAMAGED", id="no rows"),
        pytest.param(with_properties(NEXT, kind="batch", rows="-1"), "LOG_DAMAGED", id="fewer rows than none"),
        pytest.param(with_properties(NEXT, kind="batch"), "LOG_DAMAGED", id="rows that it does not say"),
        pytest.param(with_properties(NEXT, kind="cursor"), "NEWER_FORMAT", id="a kind to come"),
        pytest.param(with_properties(NEXT, entry="3:hello"), "NEWER_FORMAT", id="a format to come"),
        pytest.param(
            with_properties(NEXT, entry=f"{owner(2).prefix(SCHEMA_VERSION + 1)}3:2"),
            "NEWER_FORMAT",
            id="in its owner's",
        ),
        pytest.param(with_properties(NEXT, entry=f"1:1:9:{'0' * 16}:3:2"), "LOG_DAMAGED", id="another incarnation"),
        pytest.param(with_properties(marker(3), token=None), "LOG_DAMAGED", id="a marker without token"),
        pytest.param(with_properties(marker(3), token="00" * 16), "LOG_DAMAGED", id="a marker of another token"),
        pytest.param(with_properties(marker(3), token="zz"), "LOG_DAMAGED", id="a token that is none"),
        pytest.param(with_properties(marker(3), format="round"), "LOG_DAMAGED", id="a marker of no format"),
        pytest.param(with_properties(marker(3), partitions="many"), "LOG_DAMAGED", id="partitions that are no number"),
        pytest.param(
            with_properties(marker(3), entry=f"{OF_THIRD}1:-1"),
            "LOG_DAMAGED",
            id="a marker after its owner's entries",
        ),
    ],
)
def test_what_cannot_stand_there_is_damage(bad: PulsarMessage, reason: str) -> None:
    assert refused(reading(*FIRST), bad) == reason


def test_others_are_counted_and_passed_over() -> None:
    terms = Terms(TermStanding.start(INCARNATION))
    unreadable = PulsarMessage(b"", {ENTRY: "hello"})
    no_term = PulsarMessage(b"", {ENTRY: f"1:{INCARNATION}:0:{'0' * 16}:1:0"})
    for message in (stock(), unreadable, no_term):
        assert judge(terms, message) is TermVerdict.EARLIER
    for message in FIRST:
        assert judge(terms, message) is TermVerdict.VALID
    for message in (stock(), unreadable, no_term):
        assert judge(terms, message) is TermVerdict.FOREIGN
    for message in (marker(1), marker(2, "b"), message_of(1, 1, 0), message_of(2, 3, 2, "b")):
        assert judge(terms, message) is TermVerdict.VOID
    assert judge(terms, NEXT) is TermVerdict.VALID
    counts = terms.counts
    assert (counts.earlier, counts.foreign, counts.void, counts.repeats) == (3, 3, 4, 0)
    assert terms.standing == TermStanding(owner(2), 4, 3)


def test_a_repeat_is_the_same_or_damage() -> None:
    control = entries.control_message(owner(2), 3, 2, b"control")
    written = (*FIRST, control, packed(2, 4, 2, batch([("p", 8)])))
    terms = reading(*written)
    for message in (*written, *written):
        assert judge(terms, message) is TermVerdict.REPEAT
    assert terms.counts.repeats == 2 * len(written)
    for message in written[1:]:
        for other in (
            message._replace(payload=b"other"),
            message._replace(key="other"),
            message._replace(event_time_ms=1),
            message._replace(properties={**message.properties, "more": ""}),
        ):
            assert refused(reading(*written), other) == "LOG_DAMAGED"


def test_how_far_back_repeats_are_compared() -> None:
    terms = Terms(TermStanding(owner(1), 1000, 0))
    assert judge(terms, marker(2)) is TermVerdict.VALID
    sent = [entries.control_message(owner(2), number, 0, b"%d" % number) for number in range(1, REMEMBERED_ENTRIES + 1)]
    for message in sent:
        assert judge(terms, message) is TermVerdict.VALID
    assert judge(terms, sent[0]) is TermVerdict.REPEAT
    assert refused(terms, marker(2)) == "LOG_DAMAGED"


def test_reading_on_from_where_another_stopped() -> None:
    """What stands there again from before cannot be compared: it is passed over. What comes then is judged as ever."""
    terms = Terms(reading(*FIRST).standing)
    assert judge(terms, FIRST[1]._replace(payload=b"other")) is TermVerdict.REPEAT
    assert judge(terms, NEXT) is TermVerdict.VALID
    assert refused(terms, NEXT._replace(payload=b"other")) == "LOG_DAMAGED"
    assert judge(terms, marker(3)) is TermVerdict.VALID
    assert judge(terms, message_of(3, 1, 3)) is TermVerdict.VALID


def test_what_a_marker_says() -> None:
    terms = reading(marker(4))
    assert terms.marker == (4, token(4), SETTINGS)
    properties = marker(4).properties
    assert properties[TOKEN] == token(4).hex()
    assert properties[ADDRESS] == "host:6680"
    assert (properties[KIND], properties[ENTRY]) == ("marker", f"{owner(4).prefix()}0:-1")
