"""Frames with random changes: the sidecar neither fails nor grows, and serves others meanwhile.

`python -m tests.kernels tests.broker_sidecar.door.test_mutated_frames --frames 200000 --seed 1` runs a long campaign.
"""

import argparse
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from seqdedupe.pulsar_wire.frames import Splitter, WireEntry, command_frame, entry_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    LZ4,
    NONE,
    SNAPPY,
    ZLIB,
    ZSTD,
    BaseCommand,
    CommandAck,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnect,
    CommandFlow,
    CommandGetLastMessageId,
    CommandLookupTopic,
    CommandPartitionedTopicMetadata,
    CommandPing,
    CommandProducer,
    CommandRedeliverUnacknowledgedMessages,
    CommandSeek,
    CommandSend,
    CommandSubscribe,
    CommandUnsubscribe,
    MessageIdData,
    MessageMetadata,
    Property,
)
from seqdedupe.testing import Sidecar
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.wire import CPP, GO, JAVA, Wire, batch, door_of, single

TOPIC, GOOD = "mutated", "good"
FRAMES_A_CONNECTION = 50
EDGES = (0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1)


def _connect(client: str) -> bytes:
    command = CommandConnect(client_version=client, protocol_version=20, auth_method_name="none")
    return command_frame(BaseCommand(type=BaseCommand.CONNECT, connect=command))


def _produce(producer_id: int, name: str, topic: str = TOPIC) -> bytes:
    command = CommandProducer(topic=topic, producer_id=producer_id, request_id=1, producer_name=name)
    return command_frame(BaseCommand(type=BaseCommand.PRODUCER, producer=command))


def _commands(rng: random.Random) -> bytes:
    """A command without an entry."""
    number = rng.choice(EDGES)
    topic = rng.choice((TOPIC, "", "a b", "persistent://public/default/t", "non-persistent://a/b/c", "t" * 300))
    kinds: dict[BaseCommand.Type.ValueType, tuple[str, Message]] = {
        BaseCommand.CLOSE_PRODUCER: ("close_producer", CommandCloseProducer(producer_id=number & 3, request_id=number)),
        BaseCommand.LOOKUP: ("lookupTopic", CommandLookupTopic(topic=topic, request_id=number)),
        BaseCommand.PARTITIONED_METADATA: (
            "partitionMetadata",
            CommandPartitionedTopicMetadata(topic=topic, request_id=number),
        ),
        BaseCommand.PING: ("ping", CommandPing()),
    } | _consumer_commands(rng, topic, number)
    kind = rng.choice([*kinds, BaseCommand.PRODUCER])
    if kind == BaseCommand.PRODUCER:
        return _produce(rng.randrange(3), f"f{rng.randrange(5)}", TOPIC)
    field, value = kinds[kind]
    return command_frame(BaseCommand(type=kind, **{field: value}))  # type: ignore[arg-type]


def _consumer_commands(
    rng: random.Random, topic: str, number: int
) -> dict[BaseCommand.Type.ValueType, tuple[str, Message]]:
    # Most commands are about few consumers, and some of these are open.
    consumer_id = rng.choice((1, 1, 2, number))
    asks: Any = {"consumer_id": consumer_id, "request_id": number}
    message_id = MessageIdData(ledgerId=rng.choice(EDGES), entryId=rng.choice(EDGES))
    start: Any = {} if rng.random() < 0.5 else {"start_message_id": message_id}
    subscribe = CommandSubscribe(
        topic=rng.choice((topic, TOPIC, GOOD)),
        subscription=rng.choice("st"),
        subType=rng.choice(CommandSubscribe.SubType.values()),
        durable=rng.random() < 0.5,
        initialPosition=CommandSubscribe.Earliest,
        **start,
        **asks,
    )
    where: Any = {"message_id": message_id} if rng.random() < 0.5 else {"message_publish_time": number}
    return {
        BaseCommand.SUBSCRIBE: ("subscribe", subscribe),
        BaseCommand.FLOW: ("flow", CommandFlow(consumer_id=consumer_id, messagePermits=rng.choice(EDGES) % 2**32)),
        BaseCommand.ACK: (
            "ack",
            CommandAck(message_id=[message_id], ack_type=rng.choice(CommandAck.AckType.values()), **asks),
        ),
        BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES: (
            "redeliverUnacknowledgedMessages",
            CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id, consumer_epoch=number),
        ),
        BaseCommand.SEEK: ("seek", CommandSeek(**where, **asks)),
        BaseCommand.GET_LAST_MESSAGE_ID: ("getLastMessageId", CommandGetLastMessageId(**asks)),
        BaseCommand.UNSUBSCRIBE: ("unsubscribe", CommandUnsubscribe(**asks)),
        BaseCommand.CLOSE_CONSUMER: ("close_consumer", CommandCloseConsumer(**asks)),
    }


def _entry(rng: random.Random) -> WireEntry:
    first = rng.choice((*EDGES, *range(100)))
    if rng.random() < 0.4:
        fields = rng.choice(
            (
                {},
                {"properties": [Property(key=b"k", value=b"\xff")]},
                {"partition_key": b"=", "partition_key_b64_encoded": True},
                {"highest_sequence_id": rng.choice(EDGES)},
                {"compression": rng.randrange(5), "uncompressed_size": rng.choice((0, 3, 2**31))},
                {"event_time": rng.choice(EDGES)},
            )
        )
        return single(first, **fields)
    ids = [rng.randrange(100) for _ in range(rng.randrange(1, 6))]
    entry = batch(*ids, compression=rng.choice((NONE, LZ4, ZLIB, ZSTD, SNAPPY)), key=b"k", ordering_key=b"o")
    metadata = MessageMetadata.FromString(bytes(entry.metadata))
    if rng.random() < 0.3:
        metadata.num_messages_in_batch = rng.choice((0, -1, 1, 2**31 - 1, len(ids) + 1))
    if rng.random() < 0.2:
        metadata.uncompressed_size = rng.choice((0, 1, 2**32 - 1, metadata.uncompressed_size + 1))
    if rng.random() < 0.2:
        metadata.sequence_id = first
    return WireEntry(metadata.SerializeToString(), entry.payload)


def _changed(rng: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changes."""
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw)) if raw else 0
        match rng.randrange(4):
            case 0 if raw:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 2:
                del raw[at : at + rng.randrange(1, 9)]
            case _:
                raw[at : at + 4] = rng.choice(EDGES).to_bytes(8, "big")[-4:]
    return bytes(raw)


def _frame(rng: random.Random) -> bytes:
    """A frame, mostly changed: within its entry, with the right checksum; or anywhere."""
    if rng.random() < 0.25:
        frame = _commands(rng)
    else:
        entry = _entry(rng)
        match rng.randrange(30):
            case 0:
                entry = WireEntry(_changed(rng, bytes(entry.metadata)), entry.payload)
            case k if k < 20:
                entry = WireEntry(entry.metadata, _changed(rng, bytes(entry.payload)))
        send = CommandSend(
            producer_id=rng.randrange(3), sequence_id=rng.choice(EDGES), highest_sequence_id=rng.choice(EDGES)
        )
        frame = b"".join(entry_frame(BaseCommand(type=BaseCommand.SEND, send=send), entry))
    return _changed(rng, frame) if rng.random() < 0.02 else frame


def _resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def _connections(rng: random.Random, frames: int) -> Iterator[bytes]:
    for k in range(0, frames, FRAMES_A_CONNECTION):
        begin = [_connect(rng.choice((JAVA, CPP, GO))), *(_produce(i, f"f{k}-{i}") for i in range(2))]
        yield b"".join(begin)


def campaign(sidecar: Sidecar, frames: int, seed: int) -> list[int]:
    """Send this many frames. Return the sidecar's memory, every tenth of the way, in MB."""
    rng = random.Random(seed)
    address = door_of(sidecar)
    good = Wire(address)
    good.produce(GOOD)
    resident: list[int] = []
    sent = 0
    for number, begin in enumerate(_connections(rng, frames)):
        some = [_frame(rng) for _ in range(FRAMES_A_CONNECTION)]
        with socket.create_connection((address.host, address.port), 60) as there, suppress(OSError):
            there.sendall(begin)
            splitter, answers = Splitter(1 << 24), 0
            while answers < 3 and (data := there.recv(1 << 16)):
                answers += len(list(splitter.feed(data)))
            # Until its producer is open, an entry is ignored.
            if answers == 3:
                there.sendall(b"".join(some))
                there.shutdown(socket.SHUT_WR)
                while there.recv(1 << 16):
                    pass
        sent += FRAMES_A_CONNECTION
        good.send(number, single(number))
        assert good.receipts(1)[0][0] == number
        if sent * 10 // frames > len(resident):
            resident.append(_resident_mb(sidecar.pid))
            print(f"seed {seed}: {sent} frames, {resident[-1]} MB, {time.monotonic():.0f}", flush=True)
    good.close()
    defects = [entry for entry in sidecar.log if "defect" in str(entry) or "Traceback" in str(entry)]
    assert not defects, defects[:2]
    log = calls.Client(sidecar.address)
    try:
        assert [i for _, i in log.rows(GOOD)] == list(range(number + 1))
        seen: dict[str, int] = {}
        for record in log.records(TOPIC):
            [name] = calls.names_of(record.batch)
            for i in record.batch.sequence_ids:
                assert i > seen.get(name, -1), (name, i)
                seen[name] = i
        assert seen
    finally:
        log.close()
    return resident


def test_mutated_frames(tmp_path: Path) -> None:
    with Sidecar(tmp_path, pulsar_listen="127.0.0.1:0") as sidecar:
        resident = campaign(sidecar, 5_000, 1)
    assert resident[-1] < resident[1] + 50


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder), pulsar_listen="127.0.0.1:0") as run:
        print(campaign(run, told.frames, told.seed))
