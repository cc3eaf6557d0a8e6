"""From entries to stored records: what a log's readers are given, read with the published schema alone."""

import base64

import numpy as np
import pytest
from google.protobuf.message import Message as Proto
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.entry_properties import BATCH, KEY_BASE64, KIND, ROWS, SCHEMA_VERSION, VERSION
from seqdedupe.errors import DamagedError
from seqdedupe.format.layout import OWNERSHIP, TERM
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, PulsarMessage
from seqdedupe.log.pulsar.places import ENTRY_BYTES, size_of
from seqdedupe.message_id import MessageId
from seqdedupe.v1 import batch_pb2, read_pb2
from tests.batches import batch
from tests.log.pulsar.topics import (
    INCARNATION,
    all_rows,
    batches_in,
    collected,
    collector,
    ids_in,
    marker,
    owner,
    packed,
    rows,
    stock,
    stored,
    token,
)

CONTROL = batch_pb2.Control(sessions=batch_pb2.ControlSessions(epochs=[5])).SerializeToString()


def parsed(raw: bytes) -> list[batch_pb2.Record]:
    return list(read_pb2.ReadStreamResponse.FromString(raw).records)


def topic_of(*, is_packed: bool, version: int = VERSION) -> list[PulsarMessage]:
    """A marker, three messages, a control record, another owner, two messages."""
    first = batch([("p", 1), ("q", 1), ("p", 4)])
    second = batch([("p", 6), ("p", 7)], links={"p": 4})
    if is_packed:
        return [
            marker(1),
            packed(1, 1, 0, first),
            entries.control_message(owner(1), 2, 3, CONTROL),
            marker(2),
            packed(2, 1, 3, second),
        ]
    return [
        marker(1, version=version),
        *rows(1, 1, 0, first, version=version),
        entries.control_message(owner(1), 4, 3, CONTROL, version=version),
        marker(2, version=version),
        *rows(2, 1, 3, second, version=version),
    ]


@pytest.mark.parametrize(
    ("is_packed", "version"),
    [(False, VERSION), (True, VERSION), (False, SCHEMA_VERSION)],
    ids=["plain", "packed", "with a schema"],
)
def test_records_are_those_of_every_log(is_packed: bool, version: int) -> None:
    found = collected(stored(topic_of(is_packed=is_packed, version=version)))
    records = parsed(found.raw)
    assert [(r.WhichOneof("body"), r.base_index, r.rows) for r in records] == [
        ("marker", 0, 0),
        ("batch", 0, 3),
        ("control", 3, 0),
        ("marker", 3, 0),
        ("batch", 3, 2),
    ]
    assert [r.marker.term for r in records] == found.table[:, TERM].tolist() == [1, 0, 0, 2, 0]
    assert [r.marker.token for r in records if r.HasField("marker")] == [token(1), token(2)]
    assert records[2].control.sessions.epochs == [5]
    of_owners = [owner(term).ownership for term in (1, 1, 1, 2, 2)]
    assert [r.ownership for r in records] == of_owners == [int(o) % 2**64 for o in found.table[:, OWNERSHIP]]
    assert {(r.format_version, r.incarnation, r.file_offset, r.synced_offset, r.tag) for r in records} == {
        (2, INCARNATION, 0, 0, 0)
    }
    assert list(records[1].batch.sequence_ids) == [1, 1, 4]
    assert list(records[4].batch.previous_sequence_ids) == [4]
    expected = [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1)] if is_packed else [(1, -1), (2, -1), (3, -1), (6, -1), (7, -1)]
    assert ids_in(found) == [MessageId(10, *place) for place in expected]
    assert found.next_index == 5


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_wherever_one_stops_and_reads_on(is_packed: bool) -> None:
    """However the reading is cut into steps, the same messages come, contiguous."""
    topic = stored(topic_of(is_packed=is_packed))
    whole = collected(topic)
    for cut in range(1, len(topic)):
        reading = collector()
        steps = []
        for i, entry in enumerate(topic):
            reading.add(entry)
            if i + 1 == cut or i + 1 == len(topic):
                assert len(reading) > 0
                steps.append(reading.take())
                assert len(reading) == 0
                assert reading.take() is None
        found = [step for step in steps if step is not None]
        assert [row for step in found for row in all_rows(batches_in(step))] == all_rows(batches_in(whole))
        assert [one for step in found for one in ids_in(step)] == ids_in(whole)
        assert found[-1].next_index == whole.next_index


def test_what_is_not_valid_is_left_out() -> None:
    sent = topic_of(is_packed=False)
    void = rows(1, 5, 3, batch([("p", 99)]))
    mixed = [stock(), *sent[:2], stock(), sent[1], *sent[2:6], *void, *sent[6:], *void, sent[6]]
    reading = collector()
    for entry in stored(mixed):
        reading.add(entry)
    found = reading.take()
    assert found is not None
    assert all_rows(batches_in(found)) == all_rows(batches_in(collected(stored(sent))))
    counts = reading.terms.counts
    assert (counts.earlier, counts.foreign, counts.repeats, counts.void) == (1, 1, 2, 2)


def test_producers_from_before_the_first_marker() -> None:
    reading = collector()
    earlier = stored([stock()] * 4)
    for entry, name, sequence_id in zip(earlier, ("a", "b", "a", ""), (7, 1, 5, 9), strict=True):
        reading.add(entry._replace(producer_name=name, sequence_id=sequence_id))
    reading.add(earlier[0]._replace(producer_name="c", sequence_id=-1))
    for entry in stored([marker(1), stock()]):
        reading.add(entry._replace(producer_name="a", sequence_id=100))
    assert reading.earlier == {"a": 7, "b": 1}
    assert (reading.terms.counts.earlier, reading.terms.counts.foreign) == (5, 1)


def bad_packed() -> list[PulsarMessage]:
    good = packed(1, 1, 0, batch([("p", 1), ("p", 2)]))
    payload = good.payload or b""
    elsewhere = packed(1, 1, 5, batch([("p", 1), ("p", 2)]))
    older = packed(3, 1, 0, batch([("p", 1), ("p", 2)]))
    two = [packed(1, 1, i, batch([("p", i + 1)])).payload or b"" for i in range(2)]
    return [
        good._replace(payload=changed)
        for changed in (
            None,
            b"",
            payload[:-1],
            payload + b"\0",
            payload[:-1] + bytes([payload[-1] ^ 1]),
            payload[:110] + bytes([payload[110] ^ 1]) + payload[111:],
            elsewhere.payload,
            older.payload,
            two[0] + two[1],
        )
    ] + [good._replace(properties={**good.properties, ROWS: "3"})]


@pytest.mark.parametrize("bad", bad_packed())
def test_a_packed_payload_is_what_its_properties_say(bad: PulsarMessage) -> None:
    for following in ([], [packed(1, 2, 2, batch([("p", 3)], links={"p": 2}))]):
        reading = collector()
        with pytest.raises(DamagedError):  # noqa: PT012
            for entry in stored([marker(1), bad, *following]):
                reading.add(entry)
            reading.take()


def test_a_packed_payload_ends_where_its_record_does() -> None:
    first, second = (packed(1, 1 + i, i, batch([("p", i + 1)], links={"p": i})) for i in range(2))
    both = (first.payload or b"") + (second.payload or b"")
    reading = collector()
    cut = len(both) // 2 + 1
    for entry in stored([marker(1), first._replace(payload=both[:cut]), second._replace(payload=both[cut:])]):
        reading.add(entry)
    with pytest.raises(DamagedError):
        reading.take()


@pytest.mark.parametrize(
    "changes",
    [
        {"message": None},
        {"message": "hello"},
        {"message": "1:1:0:-1:1"},
        {"message": "1:1:0:-1:1:"},
        {"message": f"1:1:0:-1:1:{'p' * 256}"},
        {"message": "-1:1:-2:-1:1:p"},
        {"message": f"{2**63}:1:0:-1:1:p"},
        {"message": f"1:{2**64}:0:-1:1:p"},
        {"message": "1:one:0:-1:1:p"},
        {"message": f"1:1:0:{-(2**70)}:1:p"},
        {"key_base64": "?"},
        {"event_time_ms": "soon"},
    ],
)
def test_a_row_that_is_none(changes: dict[str, str | None]) -> None:
    (message,) = rows(1, 1, 0, batch([("p", 1)]))
    named = {f"seqdedupe.{name}": value for name, value in changes.items()}
    properties = {name: value for name, value in {**message.properties, **named}.items() if value is not None}
    reading = collector()
    with pytest.raises(DamagedError) as error:  # noqa: PT012
        for entry in stored([marker(1), message._replace(properties=properties)]):
            reading.add(entry)
        reading.take()
    assert error.value.reason == "LOG_DAMAGED"


def test_a_batch_too_large_for_an_entry_is_split() -> None:
    payloads = [bytes([i]) * 1_000_000 for i in range(8)]
    large = batch([("pq"[i % 2], i) for i in range(8)], payloads=payloads)
    parts = entries.split_part(entries.encoded_part(large))
    assert len(parts) == 2
    at, messages = 0, [marker(1)]
    for part in parts:
        messages.append(entries.packed_message(owner(1), len(messages), at, 1000, part))
        at += part.rows
    assert all(len(message.payload or b"") <= MAX_ENTRY_BYTES for message in messages)
    assert all_rows(batches_in(collected(stored(messages)))) == all_rows([large])
    small = entries.encoded_part(batch([("p", 1)]))
    assert entries.split_part(small) == [small]


def test_a_row_too_large_for_an_entry_is_refused() -> None:
    part = entries.encoded_part(batch([("p", 1)], payloads=[bytes(MAX_ENTRY_BYTES - 1000)]))
    assert entries.split_part(part) == [part]
    with pytest.raises(Exception, match="MESSAGE_TOO_LARGE"):
        entries.packed_message(owner(1), 1, 0, 1000, part)


def test_no_tag_is_asked_for() -> None:
    """The secret of other logs' records is in nobody's hands here: who may write is Pulsar's to say."""
    (record,) = parsed(packed(1, 1, 0, batch([("p", 1)])).payload or b"")
    assert record.tag == 0
    assert isinstance(record, Proto)
    assert packed(1, 1, 0, batch([("p", 1)])).properties[KIND] == BATCH
    assert np.array_equal(collected(stored([marker(1)])).table[:, TERM], [1])


def test_what_is_no_message_has_no_payload_in_a_topic_with_a_schema() -> None:
    with_schema, without = (topic_of(is_packed=False, version=version) for version in (SCHEMA_VERSION, VERSION))
    for one, other in zip(with_schema, without, strict=True):
        if KIND not in one.properties:
            assert one.payload == other.payload
            continue
        assert one.payload is None
        if one.properties[KIND] == "control":
            assert base64.b64decode(one.properties["seqdedupe.control_base64"]) == other.payload == CONTROL


@pytest.mark.parametrize("said", [None, "!", "AAA"], ids=["nothing", "no base64", "half of it"])
def test_a_control_record_without_content_is_damage(said: str | None) -> None:
    """It is never taken for an empty one, which would say nothing."""
    bad = entries.control_message(owner(1), 1, 0, CONTROL, version=SCHEMA_VERSION)
    properties = {name: value for name, value in bad.properties.items() if name != "seqdedupe.control_base64"}
    properties |= {"seqdedupe.control_base64": said} if said is not None else {}
    with pytest.raises(DamagedError, match="does not say what it should"):
        collected(stored([marker(1, version=SCHEMA_VERSION), bad._replace(properties=properties)]))


def test_a_control_record_counts_by_its_content_wherever_that_is() -> None:
    """By which readers know how much they may take at once."""
    sizes = {size_of(entries.control_message(owner(1), 1, 0, bytes(3000), version=version)) for version in (1, 2)}
    assert sizes == {3000 + ENTRY_BYTES, 4000 + ENTRY_BYTES}


WHOLE = [
    stock(),
    *topic_of(is_packed=False),
    marker(3),
    packed(3, 1, 5, batch([("p", 8), ("q", 2)], links={"p": 7, "q": 1})),
    entries.control_message(owner(3), 2, 7, CONTROL),
    marker(4, version=SCHEMA_VERSION),
    entries.control_message(owner(4), 1, 7, CONTROL, version=SCHEMA_VERSION),
]
TEXTS = st.sampled_from(["", "0", "-1", "1:2", "batch", "control", "marker", str(2**63), "1e3", "²", "\0"]) | st.text(
    max_size=5
)


@st.composite
def mutated(draw: st.DrawFn) -> list[PulsarMessage]:
    """A topic of both formats in which one entry or two are something else, or elsewhere."""
    messages = list(WHOLE)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(messages) - 1))
        message = messages[at]
        name = draw(st.sampled_from([*message.properties, "seqdedupe.kind", "seqdedupe.rows", KEY_BASE64]))
        said = message.properties.get(name, "")
        parts = said.split(":")
        parts[draw(st.integers(0, len(parts) - 1))] = draw(TEXTS)
        match draw(st.integers(0, 4)):
            case 0:
                messages[at] = message._replace(properties={**message.properties, name: ":".join(parts)})
            case 1:
                messages[at] = message._replace(properties={**message.properties, name: draw(TEXTS)})
            case 2:
                payload = bytearray(message.payload or b"\0")
                payload[draw(st.integers(0, len(payload) - 1)) if payload else 0 :] = draw(st.binary(max_size=3))
                messages[at] = message._replace(payload=bytes(payload))
            case 3:
                messages.insert(draw(st.integers(0, len(messages))), message)
            case _:
                del messages[at]
    return messages


@given(mutated())
def test_whatever_stands_there_is_read_or_is_damage(messages: list[PulsarMessage]) -> None:
    assert outcome_of(messages) in ("read", "LOG_GAP", "LOG_DAMAGED", "NEWER_FORMAT")


def outcome_of(messages: list[PulsarMessage]) -> str:
    reading = collector()
    try:
        for entry in stored(messages):
            reading.add(entry)
        reading.take()
    except DamagedError as e:
        return e.reason
    return "read"


def test_what_is_mutated_can_be_read() -> None:
    assert outcome_of(WHOLE) == "read"
