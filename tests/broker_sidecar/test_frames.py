"""Messages of a publish stream: what is read from their bytes is what protobuf reads; several frames in one message."""

import struct
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from broker_sidecar.services.publish_service import MAX_FRAMES, parse_frames, parse_publish
from seqdedupe import wire
from seqdedupe.errors import InvalidRequestError
from seqdedupe.v1 import batch_pb2, publish_pb2
from tests.broker_sidecar.calls import DUP, FRAMES, NOT_DUP, Client, batch, encoded, receipt_of, refused, verdicts

Seen = tuple[str, list[tuple[int, bytes]]]


def as_protobuf_reads(data: bytes) -> Seen | None:
    """Topic and frames by the published schema; None if it is not a message of it."""
    try:
        request = publish_pb2.PublishStreamRequest.FromString(data)
    except DecodeError:
        return None
    return request.topic, [(frame.number, encoded(frame.batch)) for frame in request.frames]


def as_sidecar_reads(data: bytes) -> Seen | None:
    """The same by the sidecar. A batch is looked into only when it is admitted, so here, as that does."""
    try:
        topic, frames = parse_frames(data)
        return topic, [(number, encoded(batch_pb2.Batch.FromString(content))) for number, content in frames]
    except (InvalidRequestError, DecodeError):
        return None


numbers = st.integers(0, 2**64 - 1)
batches = st.builds(
    batch_pb2.Batch,
    producer_names=st.binary(max_size=3),
    sequence_ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    payloads=st.binary(max_size=200),
)
requests = st.builds(
    publish_pb2.PublishStreamRequest,
    topic=st.text(max_size=3),
    frames=st.lists(st.builds(publish_pb2.Frame, number=numbers, batch=st.none() | batches), max_size=4),
)


@given(requests)
def test_a_message_is_read_as_protobuf_reads_it(request: publish_pb2.PublishStreamRequest) -> None:
    assert as_sidecar_reads(encoded(request)) == as_protobuf_reads(encoded(request)) is not None


@given(requests, st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=3), st.integers(0, 2**16))
def test_a_bent_message_is_read_as_protobuf_reads_it(
    request: publish_pb2.PublishStreamRequest, bends: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(encoded(request))
    if data:
        for at, byte in bends:
            data[at % len(data)] = byte
        del data[len(data) - cut % min(len(data), 8) :]
    assert as_sidecar_reads(bytes(data)) == as_protobuf_reads(bytes(data))


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (parse_frames, parse_publish):
        with suppress(InvalidRequestError):
            read(data)


@given(st.lists(st.tuples(numbers, batches), min_size=1, max_size=4))
def test_what_the_client_writes_is_read_without_protobuf(frames: list[tuple[int, batch_pb2.Batch]]) -> None:
    """The control of the fast way: it is the one that is taken."""
    parts = [part for number, content in frames for part in wire.frame_parts(number, [encoded(content)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PublishStreamRequest", None)
        topic, read = parse_frames(b"".join(parts))
    assert (topic, read) == ("", [(number, encoded(content)) for number, content in frames])


def message(*frames: tuple[int, bytes]) -> bytes:
    return b"".join(part for number, content in frames for part in wire.frame_parts(number, [content]))


def test_frames_of_one_message_are_judged_one_by_one(client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "p", "q")
    stream = client.stream(topic)
    contents: list[batch_pb2.Batch | bytes] = [
        batch([("p", 0), ("p", 1)], epochs),
        batch([("p", 1), ("p", 2)], epochs),  # half of it is in the frame before
        batch([("p", 9)], epochs, {"p": 8}),  # its predecessor is missing
        b"\x07junk",
        b"",
        batch([("q", 0)], epochs, {"q": -1}),
        batch([("p", 9)], epochs, {"p": 2}),
    ]
    first = next(FRAMES)
    for _ in contents:
        next(FRAMES)
    stream.send_raw(message(*((first + i, encoded(content)) for i, content in enumerate(contents))))
    answers = [stream.answer(first + i) for i in range(len(contents))]
    reasons = [getattr(answer, "reason", "") for answer in answers]
    assert reasons == ["", "", "PREDECESSOR_MISSING", "MALFORMED_MESSAGE", "INVALID_BATCH", "", ""]
    # For the copy in flight nothing is known yet: Unknown, or Dup if it has been stored by then.
    assert list(receipt_of(answers[1]).verdicts) in ([3, NOT_DUP], [DUP, NOT_DUP])
    assert client.rows(topic) == [("p", 0), ("p", 1), ("p", 2), ("q", 0), ("p", 9)]


def test_many_small_frames_leave_others_their_turn(client: Client, topic: str) -> None:
    """A hundred times 256 frames of one row: all are answered, and others get their turn meanwhile. How long they wait
    follows from how many are settled at once, which `test_a_backlog_is_written_in_groups` counts."""
    other = topic + "-other"
    epochs = client.epochs(topic, "p") | client.epochs(other, "q")
    content = bytearray(encoded(batch([("p", 0)], epochs, {"p": -1}, [b""])))
    at_link, at_id = (content.index(struct.pack("<q", value)) for value in (-1, 0))
    frames = []
    for i in range(100 * MAX_FRAMES):
        content[at_link : at_link + 8] = struct.pack("<q", i - 1)
        content[at_id : at_id + 8] = struct.pack("<q", i)
        frames.append((next(FRAMES), bytes(content)))
    stream, bystander = client.stream(topic), client.stream(other)
    for at in range(0, len(frames), MAX_FRAMES):
        stream.send_raw(message(*frames[at : at + MAX_FRAMES]))
    between = 0
    while client.producer(topic, "p")[1] < len(frames) - 1:
        assert verdicts(bystander.receipt(batch([("q", between)], epochs)), 1) == [NOT_DUP]
        between += 1
    for number, _ in frames:
        assert not receipt_of(stream.answer(number)).verdicts
    assert client.end_index(topic) == len(frames)
    too_many = client.stream(topic)
    too_many.send_raw(message(*frames[: MAX_FRAMES + 1]))
    assert refused(too_many.end).reason == "INVALID_REQUEST"
    assert client.end_index(topic) == len(frames)
