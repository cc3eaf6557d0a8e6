"""`plain`: rows that are an entry each come back as they were, also over Pulsar's wire."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Batch
from seqdedupe.entry_properties import ENTRY, MESSAGE, PREFIX, USER
from seqdedupe.errors import DamagedError, InvalidRequestError
from seqdedupe.format.layout import PUBLISH_TIME_MS, ROWS
from seqdedupe.limits import LINK_LEFT_OUT, MAX_EVENT_TIME_MS, MIN_EVENT_TIME_MS
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, PulsarMessage
from seqdedupe.log.pulsar.native import single_entry, single_wire_entry
from seqdedupe.log.pulsar.reader import Collector
from seqdedupe.log.pulsar.terms import Terms, TermStanding
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.frames import metadata_of
from tests.batches import batch
from tests.log.pulsar.topics import all_rows, batches_in, collected, collector, ids_in, marker, owner, rows, stored

NAMES = st.sampled_from(["p", "q", "ü" * 3, "a:b:"])
# The time of an event is as far as Pulsar's own field reaches, and before 1970.
TIMES = st.integers(MIN_EVENT_TIME_MS, MAX_EVENT_TIME_MS) | st.sampled_from([0, MIN_EVENT_TIME_MS])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PROPERTY_NAMES = TEXTS | st.sampled_from([MESSAGE, USER, USER + "x", ENTRY, PREFIX, "seqdedupe"])
ROW = st.tuples(
    NAMES,
    st.none() | st.binary(max_size=5),
    st.none() | st.binary(max_size=4) | TEXTS.map(str.encode),
    TIMES,
    st.dictionaries(PROPERTY_NAMES, TEXTS, max_size=3),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Batch]:
    """Batches as an owner is given them: IDs rise for each producer in a batch, links are any that are legal."""
    history, last = [], dict.fromkeys(["p", "q", "ü" * 3, "a:b:"], -1)
    for _ in range(draw(st.integers(1, 3))):
        drawn = draw(st.lists(ROW, min_size=1, max_size=6))
        links = {name: draw(st.sampled_from([last[name], -1, LINK_LEFT_OUT])) for name, *_ in drawn}
        ids = []
        for name, *_ in drawn:
            last[name] += draw(st.integers(1, 3))
            ids.append((name, last[name]))
        producers = list(dict.fromkeys(name for name, _ in ids))
        says = draw(st.booleans())
        history.append(
            batch(
                ids,
                epochs={name: draw(st.integers(1, 2)) for name in producers},
                links=links,
                payloads=[row[1] for row in drawn],
                keys=[row[2] for row in drawn],
                event_times_ms=np.array([row[3] for row in drawn], np.int64),
                row_properties=[row[4] for row in drawn],
                complete_up_to=np.array([draw(st.integers(-1, 3)) if says else -1 for _ in producers], np.int64),
            )
        )
    return history


def messages_of(history: list[Batch]) -> list[PulsarMessage]:
    found = [marker(1)]
    for each in history:
        found += rows(1, len(found), len(found) - 1, each)
    return found


def itself(message: PulsarMessage) -> PulsarMessage:
    return message


def over_the_wire(message: PulsarMessage) -> PulsarMessage:
    """What a reader gets of a message that was encoded as it is sent."""
    sent = single_wire_entry(message, "seqdedupe-one-0", 7, 1_000, b"v")
    metadata = metadata_of(sent)
    assert (metadata.sequence_id, metadata.publish_time, metadata.schema_version) == (7, 1_000, b"v")
    return single_entry(MessageId(1, 0), sent, metadata).message


@pytest.mark.parametrize("way", [itself, over_the_wire])
@given(history=histories())
def test_what_was_stored_comes_back(way: Callable[[PulsarMessage], PulsarMessage], history: list[Batch]) -> None:
    messages = messages_of(history)
    found = collected(stored(map(way, messages)))
    assert all_rows(batches_in(found)) == all_rows(history)
    assert len(ids_in(found)) == len(messages) - 1
    assert found.next_index == len(messages) - 1


def test_what_a_stock_consumer_sees() -> None:
    sent = batch(
        [("the:orders", 7), ("the:orders", 9)],
        epochs={"the:orders": (1 << 32) + 2},
        links={"the:orders": 4},
        payloads=[b"one", None],
        keys=[b"k", None],
        event_times_ms=np.array([5, 0], np.int64),
        row_properties=[{"colour": "blue", "seqdedupe.index": "mine"}, None],
    )
    first, second = rows(3, 12, 100, sent)
    assert (first.payload, first.key, first.event_time_ms) == (b"one", "k", 5)
    assert first.properties == {
        "seqdedupe.entry": "1:1700000000000000:3:2e2e2e2e33303030:12:100",
        "seqdedupe.message": "7:4294967298:4:-1:2:the:orders",
        "seqdedupe.user.seqdedupe.index": "mine",
        "colour": "blue",
    }
    assert (second.payload, second.key, second.event_time_ms) == (None, "", 0)
    assert second.properties == {
        "seqdedupe.entry": "1:1700000000000000:3:2e2e2e2e33303030:13:101",
        "seqdedupe.message": "9:4294967298:7:-1:0:the:orders",
    }


def test_records_are_the_batches_that_were_published() -> None:
    history = [
        batch([("p", 1), ("q", 1)]),
        batch([("p", 5)], links={"p": 1}),
        batch([("p", i) for i in range(6, 2000)]),
    ]
    messages = messages_of(history)
    found = collected(stored(messages))
    assert [each.encode() for each in batches_in(found)] == [each.encode() for each in history]
    # Anyone who begins within a batch gets the rows of it that are left, and then whole batches.
    reading = Collector(Terms(TermStanding(owner(1), 2, 1)))
    for entry in stored(messages)[2:]:
        reading.add(entry)
    rest = reading.take()
    assert rest is not None
    assert rest.table[:, ROWS].tolist() == [1, 1, 1994]
    assert all_rows(batches_in(rest)) == all_rows(history)[1:]


def test_a_batch_whose_owner_ended_within_it() -> None:
    whole = batch([("p", 1), ("p", 2), ("p", 3)])
    found = collected(stored([*messages_of([whole])[:3], marker(2), *rows(2, 1, 2, batch([("p", 3)], links={"p": 2}))]))
    assert found.table[:, ROWS].tolist() == [0, 2, 0, 1]
    assert all_rows(batches_in(found)) == all_rows([whole])


@pytest.mark.parametrize("said", ["2:2:1:-1:0:p", "2:1:0:-1:0:p", "2:1:1:0:0:p"])
def test_a_row_that_does_not_go_on_with_its_batch_is_damage(said: str) -> None:
    first, second, third = messages_of([batch([("p", 1), ("p", 2)])])
    reading = collector()
    for entry in stored([first, second]):
        reading.add(entry)
    with pytest.raises(DamagedError):
        reading.add(stored([third._replace(properties={**third.properties, MESSAGE: said})])[0])


def test_a_ledger_that_rolls_over_is_another_run() -> None:
    sent = messages_of([batch([("p", i) for i in range(6)])])
    topic = stored(sent[:4]) + stored(sent[4:6], 13) + stored(sent[6:], 13, 5)
    found = collected(topic)
    assert [tuple(map(tuple, runs)) for runs in found.runs] == [
        (),
        ((3, 10, 1, -1), (2, 13, 0, -1), (1, 13, 5, -1)),
    ]
    assert ids_in(found) == [entry.message_id for entry in topic[1:]]


def test_the_publish_time_never_falls() -> None:
    """Clients stamp entries by their own clocks, and that of the next owner may be behind."""
    sent = messages_of([batch([("p", 1)])])
    again = [marker(2), *rows(2, 1, 1, batch([("p", 2)], links={"p": 1}))]
    found = collected(stored(sent, now_ms=5000) + stored(again, 11, now_ms=3000))
    assert found.table[:, PUBLISH_TIME_MS].tolist() == [5000, 5001, 5001, 5001]


def test_what_a_broker_would_not_take_is_refused() -> None:
    fits = batch([("p", 1)], payloads=[bytes(MAX_ENTRY_BYTES - 3000)], keys=[b"k" * 1000])
    assert len(rows(1, 1, 0, fits)) == 1
    for bad in (
        batch([("p", 1)], payloads=[bytes(MAX_ENTRY_BYTES)]),
        batch([("p", 1)], payloads=[bytes(MAX_ENTRY_BYTES - 3000)], keys=[b"k" * 3000]),
        batch([("p", 1)], payloads=[bytes(MAX_ENTRY_BYTES - 3000)], row_properties=[{"a": "ü" * 1500}]),
        batch([("p", 1)], row_properties=[{"a": "x" * MAX_ENTRY_BYTES}]),
        # In base64, twice.
        batch([("p", 1)], keys=[b"\xff" * (2 * 1024 * 1024)]),
        batch([("p", 1)], payloads=[bytes(3 * 1024 * 1024)], keys=[("ü" * 2**20).encode()]),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            rows(1, 1, 0, bad)
        assert refused.value.reason == "MESSAGE_TOO_LARGE"
