"""What a function may give, and the frames that it goes in. No sidecar: a second."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Binary, decode, single_producer
from seqdedupe.client import Message, ProducerConfig, SeqdedupeError
from seqdedupe.client.builder import BATCH_OVERHEAD_BYTES, PROPERTY_OVERHEAD_BYTES, ROW_OVERHEAD_BYTES, Builder
from seqdedupe.client.message import StoredBatch
from seqdedupe.client.pending import PendingBatch
from seqdedupe.entry_properties import SCHEMA_VERSION_OF
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_EVENT_TIME_MS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, MIN_EVENT_TIME_MS
from seqdedupe.services.pipe import MAX_OUTPUTS, Output
from seqdedupe.services.pipe.outputs import FULL_FRAME_BYTES, MAX_INPUT_INDEX, Calling, Function, OutputBatch
from tests.batches import batch


def stored(payloads: list[bytes], base_index: int = 0, keys: list[bytes | None] | None = None) -> StoredBatch:
    ids = np.arange(len(payloads))
    batch = single_producer(b"p", 1, -1, ids, Binary.of_all(payloads), keys=Binary.of(keys or []))
    return StoredBatch(batch, base_index, 1, 77)


def frames(function: Function, *batches: StoredBatch) -> tuple[list[OutputBatch], Calling]:
    calling = Calling(function, "persistent://public/default/t")
    calling.take(batches)
    made = []
    while calling.fill():
        made.append(calling.frame())
    made.append(calling.frame())
    return [frame for frame in made if frame is not None], calling


def payloads(frame: OutputBatch) -> list[bytes | None]:
    column = frame.payloads
    return column.rows(len(frame.sequence_ids)) if isinstance(column, Binary) else column


def test_bytes_keep_the_key_and_several_outputs_are_numbered() -> None:
    def function(message: Message) -> Any:
        given: dict[bytes, Any] = {
            b"none": None,
            b"bytes": b"B",
            b"output": Output(b"O", "key", 5, {"a": "b"}),
            b"list": [b"1", Output(None), b"3"],
            b"empty": [],
            b"generator": (b"%d" % i for i in range(2)),
            b"same": message,
        }
        return given[message.payload or b""]

    names = [b"none", b"bytes", b"output", b"list", b"empty", b"generator", b"same"]
    (frame,), calling = frames(function, stored(names, 10, [b"k%d" % i for i in range(6)] + [None]))
    assert calling.failure is None
    assert payloads(frame) == [b"B", b"O", b"1", None, b"3", b"0", b"1", b"same"]
    ids = [(11, 0), (12, 0), (13, 0), (13, 1), (13, 2), (15, 0), (15, 1), (16, 0)]
    assert frame.sequence_ids.tolist() == [index << 10 | number for index, number in ids]
    assert frame.keys == [b"k1", b"key", b"k3", None, b"k3", b"k5", b"k5", None]
    assert frame.event_times_ms is not None
    assert frame.event_times_ms.tolist() == [0, 5, 0, 0, 0, 0, 0, 0]
    assert frame.properties == [None, {"a": "b"}, *[None] * 6]


def test_a_message_that_is_passed_on_leaves_the_version_of_its_schema() -> None:
    """It is one of the source: a consumer of the target would look for it there."""
    told = [{"a": "b", SCHEMA_VERSION_OF: "0000000000000000"}, {SCHEMA_VERSION_OF: "00"}]
    source = StoredBatch(batch([("p", 0), ("p", 1)], row_properties=told), 0, 1, 77)
    (frame,), _ = frames(lambda message: message, source)
    assert frame.properties == [{"a": "b"}, None]


@pytest.mark.parametrize("size", [1, 500, 40_000, 3_000_000])
def test_an_input_is_never_cut_and_a_frame_can_always_be_sent(size: int) -> None:
    counts = [1, 2, 0, 2, 1, 2, 2, 1]
    (*made,), calling = frames(
        lambda m: [bytes(size)] * counts[m.index % 8], stored([b""] * 60), stored([b""] * 40, base_index=60)
    )
    assert calling.failure is None
    ids = [i for frame in made for i in frame.sequence_ids.tolist()]
    assert ids == [index << 10 | k for index in range(100) for k in range(counts[index % 8])]
    for before, after in pairwise(made):
        assert before.sequence_ids[-1] >> 10 < after.sequence_ids[0] >> 10
    for frame in made:
        assert sum(map(len, filter(None, payloads(frame)))) <= MAX_BATCH_BYTES
    if size == 1:
        assert len(made) == 1


def test_large_keys_leave_room_in_the_frame() -> None:
    key = bytes(MAX_BATCH_BYTES - MAX_PAYLOAD_BYTES - 4096)
    batches = [stored([bytes(100_000)], k, [key]) for k in range(3)]
    made, calling = frames(lambda m: m.payload, *batches)
    assert calling.failure is None
    for frame in made:
        assert sum(len(k or b"") for k in frame.keys or []) + len(frame.sequence_ids) * 100_033 < MAX_BATCH_BYTES
    assert [i for frame in made for i in frame.sequence_ids.tolist()] == [0, 1 << 10, 2 << 10]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=4),
        st.none() | st.binary(max_size=4),
        st.integers(MIN_EVENT_TIME_MS, MAX_EVENT_TIME_MS) | st.sampled_from([0, MIN_EVENT_TIME_MS, MAX_EVENT_TIME_MS]),
        st.dictionaries(TEXTS, TEXTS, max_size=2),
    ),
    min_size=1,
    max_size=5,
)


def content(message: Message) -> tuple[Any, ...]:
    return message.payload, message.key, message.event_time_ms, message.properties


@given(ROWS)
def test_what_a_reader_returned_can_be_published_again_unchanged(rows: list[tuple[Any, ...]]) -> None:
    """Everything that the sidecar takes: as it came, as an output, one by one and as columns."""
    payloads, keys, times, of_rows = zip(*rows, strict=True)
    ids = [("p", n) for n in range(len(rows))]
    taken = batch(ids, payloads=payloads, keys=keys, event_times_ms=np.array(times), row_properties=of_rows)
    source = StoredBatch(decode(taken.encode()), 0, 1, 77)
    read = [Message(source, row) for row in range(len(rows))]
    assert [content(message) for message in read] == rows
    sent: list[PendingBatch] = []
    builder = Builder(b"p", -1, ProducerConfig(), sent.append)
    for message in read:
        builder.append(message.payload, None, message.key, message.event_time_ms, message.properties)
    builder.seal()
    for function in (lambda m: m, lambda m: [m], lambda m: Output(*content(m))):
        (frame,), calling = frames(function, source)
        assert calling.failure is None
        builder = Builder(b"p", -1, ProducerConfig(), sent.append)
        builder.add_columns(frame.payloads, frame.sequence_ids, frame.keys, frame.event_times_ms, frame.properties)
    for pending in sent:
        assert pending.batch is not None
        again = StoredBatch(decode(pending.batch.encode()), 0, 1, 77)
        assert [content(Message(again, row)) for row in range(len(again))] == rows


def too_many(message: Message) -> Iterator[bytes]:
    while True:
        yield b""


def raises(message: Message) -> bytes:
    raise RuntimeError("no such customer")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raises_unspeakably(message: Message) -> bytes:
    raise Unspeakable


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, "RuntimeError: no such customer"),
        (raises_unspeakably, "Unspeakable"),
        (too_many, "it gives more than 1,024 outputs"),
        (lambda m: [b""] * (MAX_OUTPUTS + 1), "it gives more than 1,024 outputs"),
        (lambda m: "text", "it gives str"),
        (lambda m: 5, "it gives int"),
        (lambda m: [b"a", "b"], "it gives str among its outputs"),
        (
            lambda m: Output("text"),  # type: ignore[arg-type]
            "an Output with something else than bytes",
        ),
        (
            lambda m: Output(b"", 5),  # type: ignore[arg-type]
            "a key is bytes, not int",
        ),
        (lambda m: Output(b"", "\ud800"), "a key is not valid Unicode"),
        (lambda m: Output(b"", None, 1 << 63), "event time"),
        (lambda m: Output(b"", None, -(1 << 63) - 1), "event time"),
        (
            lambda m: Output(b"", None, 0, {"a": 5}),  # type: ignore[dict-item]
            "AttributeError",
        ),
        (lambda m: bytes(MAX_PAYLOAD_BYTES + 1), "at most 5242880 are taken"),
        (lambda m: [bytes(FULL_FRAME_BYTES)] * 65, "all of them go in one frame"),
    ],
)
def test_what_cannot_be_published_ends_with_its_message(function: Any, why: str) -> None:
    def after_some(message: Message) -> Any:
        assert message.index <= 42
        return message if message.index < 42 else function(message)

    (*made,), calling = frames(after_some, stored([b"x"] * 50), stored([b"x"]))
    failure = calling.failure
    assert failure is not None
    assert failure.reason == "FUNCTION_FAILED"
    assert why in failure.message
    assert "message 77:42 (index 42) of persistent://public/default/t" in failure.message
    assert failure.numbers == {"topic": "persistent://public/default/t", "index": "42", "message_id": "77:42"}
    # All that came before goes out, and nothing of the message itself.
    assert [i for frame in made for i in frame.sequence_ids.tolist()] == [i << 10 for i in range(42)]
    assert not calling.fill() or calling.frame() is None


def large(row_bytes: int) -> StoredBatch:
    """Messages 0 and 2 are small; with its key and a property, message 1 takes this much of a frame."""
    left = (
        row_bytes - BATCH_OVERHEAD_BYTES - ROW_OVERHEAD_BYTES - PROPERTY_OVERHEAD_BYTES - MAX_PAYLOAD_BYTES - len("kn")
    )
    of_rows = [{}, {"n": "v" * left}, {}]
    of_payloads = [b"", bytes(MAX_PAYLOAD_BYTES), b""]
    ids = [("p", n) for n in range(3)]
    return StoredBatch(batch(ids, payloads=of_payloads, keys=[None, b"k", None], row_properties=of_rows), 0, 1, 77)


PASSED_ON: list[Function] = [lambda m: m, lambda m: (one for one in [m]), lambda m: Output(*content(m))]


@pytest.mark.parametrize("function", PASSED_ON, ids=["itself", "generator", "output"])
def test_a_message_that_is_too_large_to_be_passed_on_is_no_fault_of_the_function(function: Function) -> None:
    made, calling = frames(function, large(MAX_BATCH_BYTES))
    assert calling.failure is None
    assert [i >> 10 for frame in made for i in frame.sequence_ids.tolist()] == [0, 1, 2]
    sent: list[PendingBatch] = []
    builder = Builder(b"n" * MAX_NAME_BYTES, -1, ProducerConfig(), sent.append)
    for frame in made:
        builder.add_columns(frame.payloads, frame.sequence_ids, frame.keys, frame.event_times_ms, frame.properties)
    assert max(len(pending.batch.encode()) for pending in sent if pending.batch) <= MAX_BATCH_BYTES

    made, calling = frames(function, large(MAX_BATCH_BYTES + 1))
    failure = calling.failure
    assert failure is not None
    assert failure.reason == "MESSAGE_TOO_LARGE"
    assert "message 77:1 (index 1) of persistent://public/default/t cannot be passed on" in failure.message
    assert failure.numbers["index"] == "1"
    assert (failure.numbers["size_bytes"], failure.numbers["limit_bytes"]) == ("8388609", "8388608")
    assert "(None)" in failure.hint
    assert [i >> 10 for frame in made for i in frame.sequence_ids.tolist()] == [0]
    # What the function adds to it is the function's.
    _, calling = frames(lambda m: [m, b"more"], large(MAX_BATCH_BYTES - 1))
    assert calling.failure is not None
    assert calling.failure.reason == "FUNCTION_FAILED"
    # A function that gives nothing for it gets past it.
    made, calling = frames(lambda m: None if m.index == 1 else m, large(MAX_BATCH_BYTES + 1))
    assert calling.failure is None
    assert [i >> 10 for frame in made for i in frame.sequence_ids.tolist()] == [0, 2]


def test_the_most_outputs_are_taken_and_indexes_have_an_end() -> None:
    (frame,), _ = frames(lambda m: [b""] * MAX_OUTPUTS, stored([b""], base_index=MAX_INPUT_INDEX - 1))
    assert frame.sequence_ids[-1] == (MAX_INPUT_INDEX << 10) - 1
    with pytest.raises(SeqdedupeError) as caught:
        frames(lambda m: b"", stored([b""], base_index=MAX_INPUT_INDEX))
    assert caught.value.reason == "INVALID_SEQUENCE_ID"


def test_once_stopped_no_message_is_begun() -> None:
    called: list[None] = []
    calling = Calling(lambda m: called.append(calling.stop()), "t")  # type: ignore[func-returns-value]
    calling.take([stored([b""] * 10)])
    calling.fill()
    assert len(called) == 1
