"""Mutated batches, entries and streams of frames: each is read or refused as protobuf alone does.

    python -m tests.kernels tests.pulsar_wire.fuzz KIND --cases N --seed S [--planted BUG]

KIND is `rows`, `entries` or `streams`. The kernels get rows right before and right after pages that nobody may touch,
so a read out of bounds kills the process. Nothing but an error of our tree may be raised, and memory stays bounded.
Exits with 1 at the first case that fails. A planted bug must be found.
"""

import argparse
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire import rows as kernels
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, PulsarBatch, batch_of, kind_of, rows_of
from seqdedupe.pulsar_wire.frames import (
    COMPRESSIONS,
    Splitter,
    WireEntry,
    command_frame,
    entry_frame,
    entry_of,
    metadata_of,
    stamped,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandMessage,
    CommandPing,
    CommandProducer,
    CommandSend,
    MessageIdData,
    MessageMetadata,
    Property,
)
from tests.format.guarded import Guarded
from tests.pulsar_wire import oracle

BLOCK = 1000
GUARDED_PAGES = 4
MAX_BYTES = 64 * 1024
MAX_MEMORY_BYTES = 40 * MAX_BYTES
"""Rows of six bytes have twelve numbers each, and their decoded metadata are larger than they were."""
_memory = Guarded(GUARDED_PAGES)

Seen = Counter[str]


class Failure(Exception):
    """A case that is neither read rightly nor refused."""


def some_rows(random: Random) -> list[EntryRow]:
    def text() -> bytes:
        # What does not get smaller is not compressed.
        return random.choice((random.randbytes(5), b"r")) * random.choice((0, 1, 26))

    return [
        EntryRow(
            random.choice((0, k, 2**63 - 1, random.randrange(2**40))),
            text(),
            random.choice((None, text())),
            random.choice((None, None, text())),
            tuple((text(), text()) for _ in range(random.choice((0, 0, 1, 2)))),
            random.choice((0, 0, -1, 2**62)),
            random.choice((0, 0, kernels.KEY_IS_BASE64, kernels.NULL_VALUE, kernels.COMPACTED_OUT)),
        )
        for k in range(random.randrange(1, 5))
    ]


def spoilt(random: Random, data: bytes) -> bytes:
    """The bytes with some changes: flipped, cut, doubled, moved, or replaced by numbers that are likely to matter."""
    raw = bytearray(data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 5))):
        at = random.randrange(len(raw) + 1)
        match random.randrange(6):
            case 0 if raw:
                raw[at % len(raw)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 1:
                del raw[at : at + random.choice((1, 4, 30))]
            case 2:
                raw[at:at] = raw[at : at + random.choice((1, 4, 30))]
            case 3:
                raw[at:at] = random.choice((b"\xff" * 9 + b"\x01", b"\x0b", b"\x0d\x00\x00\x00\x00", b"\xf8\x0f\x01"))
            case 4:
                raw[at : at + 4] = struct.pack(">I", random.choice((0, 1, 4, MAX_BYTES + 1, 2**31, 2**32 - 1)))
            case _:
                del raw[at:]
    return bytes(raw)


def rows_case(random: Random, seen: Seen) -> None:
    """A batch's payload, of which protobuf must read the same rows."""
    rows = some_rows(random)
    payload = spoilt(random, oracle.written(rows, with_ids=random.random() < 0.8))
    if len(payload) > GUARDED_PAGES * 4096:
        return
    count = len(rows)
    for place in (_memory.at_the_end, _memory.at_the_start):
        places = np.empty(count * kernels.PLACES, np.int64)
        view = place(payload)
        found = SCAN(view, count, places)
        if found >= 0:
            kernels.find_properties(view, count, places, np.empty(4 * found, np.int64))
    metadata = MessageMetadata(producer_name=b"p", sequence_id=7, publish_time=1, num_messages_in_batch=count)
    try:
        expected = oracle.read(payload, count, 7)
    except (ValueError, struct.error, DecodeError):
        expected = None
    try:
        batch = PulsarBatch(metadata, payload)
        columns = batch.rows()
    except SeqdedupeError as e:
        if expected is not None:
            raise Failure(f"protobuf reads {payload.hex()} as {expected}, and we refuse it: {e}") from e
        seen[e.reason] += 1
        return
    if expected is None:
        raise Failure(f"protobuf refuses {payload.hex()}")
    if [columns.row(k) for k in range(count)] != expected:
        raise Failure(f"protobuf reads {payload.hex()} as {expected}")
    marks = np.array([random.randrange(2) for _ in range(count)], np.uint8)
    marks[random.randrange(count)] = 1
    taken = batch.take(marks)
    kept = [row for row, mark in zip(expected, marks, strict=True) if mark]
    if oracle.read(bytes(taken.payload), len(kept), metadata_of(taken).sequence_id) != kept:
        raise Failure(f"rows {marks} of {payload.hex()} are taken wrongly")
    seen["read"] += 1


def entries_case(random: Random, seen: Seen) -> None:
    """A whole entry in which anything may be changed, behind a checksum that is right or wrong."""
    entry = batch_of(EntryRows.of(some_rows(random)), b"p", 1, random.choice(COMPRESSIONS))
    metadata, payload = bytes(stamped(entry, b"ours").metadata), bytes(entry.payload)
    if random.random() < 0.5:
        metadata = spoilt(random, metadata)
    else:
        payload = spoilt(random, payload)
    command = BaseCommand(type=BaseCommand.SEND, send=CommandSend(producer_id=1))
    frame = b"".join(entry_frame(command, WireEntry(metadata, payload)))
    if random.random() < 0.1:
        frame = frame[:8] + spoilt(random, frame[8:])
        frame = struct.pack(">I", len(frame) - 4) + frame[4:]
    try:
        for one in Splitter(10 * MAX_BYTES).feed(frame):
            read = entry_of(one.content)
            of_entry = metadata_of(read)
            kind_of(of_entry)
            rows_of(read, of_entry, MAX_BYTES)
        seen["read"] += 1
    except SeqdedupeError as e:
        seen[e.reason] += 1


_COMMANDS = [
    BaseCommand(type=BaseCommand.PING, ping=CommandPing()),
    BaseCommand(
        type=BaseCommand.PRODUCER,
        producer=CommandProducer(topic="t", producer_id=1, metadata=[Property(key=b"a", value=b"b")] * 3),
    ),
    BaseCommand(
        type=BaseCommand.MESSAGE,
        message=CommandMessage(message_id=MessageIdData(first_chunk_message_id=MessageIdData(ledgerId=1))),
    ),
]


def streams_case(random: Random, seen: Seen) -> None:
    """A stream, which must be the same frames however it is cut, or end with the same error."""
    data = spoilt(random, b"".join(command_frame(random.choice(_COMMANDS)) for _ in range(random.randrange(1, 6))))
    ends = []
    for step in (len(data) or 1, random.randrange(1, 9)):
        splitter = Splitter(MAX_BYTES)
        frames: list[bytes] = []
        try:
            for at in range(0, len(data), step):
                frames += (bytes(frame.raw) for frame in splitter.feed(data[at : at + step]))
            ends.append((frames, "read"))
        except SeqdedupeError as e:
            ends.append((frames, e.reason))
    if ends[0][1] != ends[1][1] or (ends[0][1] == "read" and ends[0] != ends[1]):
        raise Failure(f"{data.hex()} depends on how it is cut: {ends}")
    seen[ends[0][1]] += 1


def reads_past_the_end(raw: npt.NDArray[Any], rows: int, places: npt.NDArray[Any]) -> int:
    """The rows of one byte more than there are."""
    longer = np.lib.stride_tricks.as_strided(raw, (len(raw) + 1,))
    return kernels.scan(longer, rows, places)


CASES: dict[str, Callable[[Random, Seen], None]] = {
    "rows": rows_case,
    "entries": entries_case,
    "streams": streams_case,
}
SCAN: Callable[[npt.NDArray[Any], int, npt.NDArray[Any]], int] = kernels.scan


def main() -> int:
    global SCAN
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("kind", choices=sorted(CASES))
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", action="store_true", help="a kernel that reads one byte too many")
    given = parser.parse_args()
    if given.planted:
        SCAN = reads_past_the_end
    seen: Seen = Counter()
    for block in range(-(-given.cases // BLOCK)):
        random = Random(given.seed << 32 | block)
        # Tracing takes time, and a block is as good as another.
        if block == 0:
            tracemalloc.start()
        for number in range(BLOCK):
            try:
                CASES[given.kind](random, seen)
            except Failure as e:
                print(f"seed {given.seed}, block {block}, case {number}: {e}")
                return 1
        if block == 0:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > MAX_MEMORY_BYTES:
                print(f"{peak} bytes of memory")
                return 1
    print("seen", *(f"{why}={count}" for why, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
