"""The contents of MESSAGE frames: sidecars' own entries in each format, and messages that look like them."""

from typing import Any

from seqdedupe.entry_properties import KIND, MARKER, SCHEMA_VERSION
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage, control_message, marker_message
from seqdedupe.log.pulsar.native import wire_entry
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.frames import WireEntry, command_of, entry_frame, frame_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandMessage, MessageMetadata, Property
from seqdedupe.pulsar_wire.rows import NULL_VALUE
from tests.batches import batch
from tests.log.pulsar import topics

SIDECAR, NATIVE_SIDECAR = "seqdedupe-one-0", "seqdedupe-one-\x1f0"
BODY = b"\x00\xffcontrol"

MARK = EntryRow(5, properties=((KIND.encode(), MARKER.encode()),), flags=NULL_VALUE)


def single(message: PulsarMessage, producer_name: str = SIDECAR, **more: Any) -> WireEntry:
    """As Pulsar's client writes it."""
    metadata = MessageMetadata(
        producer_name=producer_name.encode(),
        sequence_id=3,
        publish_time=1_764_500_000_000,
        properties=[Property(key=name.encode(), value=value.encode()) for name, value in message.properties.items()],
        null_value=True if message.payload is None else None,
        **more,
    )
    return WireEntry(metadata.SerializeToString(), message.payload or b"")


def native_marker(producer_name: str = NATIVE_SIDECAR) -> WireEntry:
    settings = topics.SETTINGS._replace(format=EntryFormat.NATIVE)
    return wire_entry(marker_message(topics.INCARNATION, 1, topics.token(1), settings), producer_name, 77)


def native_control(producer_name: str = NATIVE_SIDECAR) -> WireEntry:
    return wire_entry(control_message(topics.owner(1), 4, 9, BODY * 100), producer_name, 78)


def plain_control(version: int = 1) -> PulsarMessage:
    return control_message(topics.owner(1), 4, 9, BODY, version=version)


OWN = {
    "native marker": native_marker(),
    "native control record": native_control(),
    "plain marker": single(topics.marker(1)),
    "plain control record": single(plain_control()),
    "marker of a topic with a schema": single(topics.marker(1, version=SCHEMA_VERSION)),
    "control record of a topic with a schema": single(plain_control(SCHEMA_VERSION)),
}

_SENT = batch([("p", 1), ("p", 2)], row_properties=[{KIND: MARKER}, {"x": "y"}])
_STOCK = PulsarMessage(b"hello", {KIND: MARKER})

OTHERS = {
    "native messages": wire_entry(topics.native(1, 1, 0, _SENT)[0], NATIVE_SIDECAR, 77),
    "plain message": single(topics.rows(1, 1, 0, _SENT)[0]),
    "packed messages": single(topics.packed(1, 1, 0, _SENT)),
    "message of a producer": single(_STOCK, "p"),
    "null value of a producer": single(_STOCK._replace(payload=None), "p"),
    "message under a sidecar's name": single(_STOCK),
    "batch of a producer": batch_of(EntryRows.of([MARK]), b"p", 1),
    "batch under a sidecar's name": batch_of(EntryRows.of([MARK]), NATIVE_SIDECAR.encode(), 1),
    "copy of a native marker": native_marker("p"),
    "copy of a native control record": native_control("p"),
    "copy of a plain marker": single(topics.marker(1), "p"),
    "copy of a plain control record": single(plain_control(), "p"),
    "plain marker in a batch": single(topics.marker(1), num_messages_in_batch=1),
    "marker with an invalid place": single(PulsarMessage(b"", {"seqdedupe.entry": "1:2", KIND: MARKER})),
    "marker of a newer version": single(PulsarMessage(b"", {"seqdedupe.entry": "9:1:1:0:0:0", KIND: MARKER})),
    "native marker with messages": native_marker()._replace(
        payload=batch_of(EntryRows.of([MARK._replace(flags=0)]), b"p", 1).payload
    ),
}


def message_frame(entry: WireEntry, command: CommandMessage | None = None) -> bytes:
    """As a broker sends it."""
    sent = command_of("message", command or CommandMessage(consumer_id=1))
    return b"".join(map(bytes, entry_frame(sent, entry)))


def content_of(entry: WireEntry) -> memoryview:
    return frame_of(memoryview(message_frame(entry))).content
