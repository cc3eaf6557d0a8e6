"""Frames of Pulsar's protocol: however the bytes are cut, what was sent is received; what is malformed is refused."""

import struct
import tracemalloc
from collections.abc import Callable

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire.frames import (
    MAX_COMMAND_BYTES,
    SEQDEDUPE_FIELD,
    PulsarFrame,
    Splitter,
    WireEntry,
    checksum,
    command_frame,
    entry_frame,
    entry_frame_bytes,
    entry_of,
    frame_of,
    metadata_of,
    stamped,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandConnect,
    CommandPing,
    CommandSend,
    MessageMetadata,
)

MAX_BYTES = 100_000
METADATA = MessageMetadata(producer_name=b"p", sequence_id=3, publish_time=1).SerializeToString()
ENTRY = WireEntry(METADATA, b"payload" * 100)
PING = command_frame(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
CONNECT = command_frame(
    BaseCommand(type=BaseCommand.CONNECT, connect=CommandConnect(client_version="x", protocol_version=20))
)
SEND = b"".join(entry_frame(BaseCommand(type=BaseCommand.SEND, send=CommandSend(producer_id=1, sequence_id=3)), ENTRY))
STREAM = PING + CONNECT + SEND + PING


def split(data: bytes, step: int) -> list[PulsarFrame]:
    splitter = Splitter(MAX_BYTES)
    return [frame for at in range(0, len(data), step) for frame in splitter.feed(data[at : at + step])]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 13, 100, 1000, len(STREAM)])
def test_however_a_stream_is_cut_the_frames_are_the_same(step: int) -> None:
    frames = split(STREAM, step)
    assert [frame.field for frame in frames] == ["ping", "connect", "send", "ping"]
    assert b"".join(frame.raw for frame in frames) == STREAM
    assert frames[1].command.connect.protocol_version == 20
    assert tuple(map(bytes, entry_of(frames[2].content))) == ENTRY


def test_a_payload_is_not_copied() -> None:
    [frame] = Splitter(MAX_BYTES).feed(SEND)
    payload = entry_of(frame.content).payload
    assert isinstance(payload, memoryview)
    assert payload.obj is SEND
    assert entry_frame(frame.command, ENTRY)[1] is ENTRY.payload


def test_a_command_of_a_newer_pulsar_is_passed_on() -> None:
    raw = command_frame(BaseCommand(type=99))  # type: ignore[arg-type]
    [frame] = Splitter(MAX_BYTES).feed(raw)
    assert (frame.field, bytes(frame.raw)) == ("", raw)


def test_a_claimed_size_is_refused_before_it_is_kept() -> None:
    splitter = Splitter(MAX_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(SeqdedupeError, match="MESSAGE_TOO_LARGE"):
            list(splitter.feed(struct.pack(">I", 2**32 - 1)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_limit_may_rise() -> None:
    splitter = Splitter(4)
    with pytest.raises(SeqdedupeError, match="MESSAGE_TOO_LARGE"):
        list(splitter.feed(PING))
    splitter = Splitter(4)
    splitter.max_frame_bytes = MAX_BYTES
    assert len(list(splitter.feed(PING))) == 1


def framed(command: bytes, content: bytes = b"", size: int | None = None, command_size: int | None = None) -> bytes:
    return (
        struct.pack(
            ">II",
            4 + len(command) + len(content) if size is None else size,
            len(command) if command_size is None else command_size,
        )
        + command
        + content
    )


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(struct.pack(">I", 0), id="no command"),
        pytest.param(struct.pack(">I", 3), id="less than a size"),
        pytest.param(framed(b"\x08\x12", command_size=3), id="command longer than its frame"),
        pytest.param(framed(b"\x08\x12", command_size=2**32 - 1), id="command of 4 GiB"),
        pytest.param(framed(b"\xff\xff"), id="no protobuf"),
        pytest.param(framed(b"\x08\x06"), id="type without its field"),
        pytest.param(framed(b"\x08\x02\x12\x03\x0a\x01\xff"), id="text that is no UTF-8"),
    ],
)
def test_a_malformed_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        split(raw, len(raw))


def test_a_large_command_is_refused() -> None:
    command = b"\x08\x12" + b"\x92\x01\x00" * (MAX_COMMAND_BYTES // 3)
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        frame_of(memoryview(framed(command)))


def test_a_frame_that_was_cut_is_refused() -> None:
    for end in range(len(PING)):
        with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
            frame_of(memoryview(PING[:end]))


CONTENT = struct.pack(">I", len(METADATA)) + METADATA + b"payload"
SUMMED = b"\x0e\x01" + struct.pack(">I", checksum(CONTENT)) + CONTENT


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(CONTENT, id="no checksum"),
        pytest.param(SUMMED, id="checksum"),
        pytest.param(b"\x0e\x02\x00\x00\x00\x02\x08\x01" + SUMMED, id="the broker's metadata"),
    ],
)
def test_every_shape_of_an_entry_is_read(content: bytes) -> None:
    assert tuple(map(bytes, entry_of(memoryview(content)))) == (METADATA, b"payload")
    for end in range(len(content) - len(b"payload")):
        with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
            entry_of(memoryview(content[:end]))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda raw: raw[:-1] + b"?", id="payload"),
        pytest.param(lambda raw: raw[:3] + bytes([raw[3] ^ 1]) + raw[4:], id="checksum"),
        pytest.param(lambda raw: b"\x0e\x02" + b"\xff" * 4 + raw, id="the broker's metadata"),
        pytest.param(lambda raw: struct.pack(">I", 2**32 - 1) + raw[10:], id="metadata of 4 GiB"),
    ],
)
def test_a_spoilt_entry_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        entry_of(memoryview(spoil(SUMMED)))


@pytest.mark.parametrize("field", ["producer_name", "sequence_id", "publish_time"])
def test_metadata_without_what_pulsar_requires_are_refused(field: str) -> None:
    metadata = MessageMetadata.FromString(METADATA)
    metadata.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(SeqdedupeError, match=field):
        metadata_of(WireEntry(metadata.SerializeToString(), b""))
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        metadata_of(WireEntry(METADATA[:-1], b""))


def test_our_field_is_appended_and_the_last_one_counts() -> None:
    once = stamped(ENTRY, b"a" * 200)
    assert bytes(once.metadata).startswith(METADATA)
    assert once.payload is ENTRY.payload
    twice = stamped(once, b"ours")
    assert metadata_of(twice).seqdedupe == b"ours"
    assert metadata_of(twice).producer_name == b"p"
    assert SEQDEDUPE_FIELD == 50001
    raw = b"".join(entry_frame(BaseCommand(type=BaseCommand.SEND, send=CommandSend()), twice))
    [frame] = Splitter(MAX_BYTES).feed(raw)
    assert metadata_of(entry_of(frame.content)).seqdedupe == b"ours"
    assert entry_frame_bytes(twice) == len(frame.content)
