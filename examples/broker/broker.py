"""A broker in one file: an append-only file as its log, and a socket. It deduplicates by asking a sidecar.

    python -m examples.broker.broker example.log        # beside: seqdedupe serve --data-directory data --log broker

A producer connects and sends its name as a line, then a line for each message, `SEQUENCE-ID PAYLOAD`. It gets a line
for each: `SEQUENCE-ID stored POSITION`, `SEQUENCE-ID dup`, or `SEQUENCE-ID again`: then, and whenever the connection
ends, it connects again and sends from its first message that was neither stored nor dup. What the broker keeps to is
the comment of DedupeService in dedupe.proto; the numbers in the comments here are those of that list.
"""

import argparse
import asyncio
import fcntl
import os
import struct
import sys
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from seqdedupe.client import Attachment, BrokerClient, Entry, Range, Verdict
from seqdedupe.errors import ConfigurationError, DataLossError, InvalidRequestError, SeqdedupeError, error
from seqdedupe.names import new_producer_name

MAX_GROUP = 1000
"""Messages that are checked, written and synced together."""

MAX_WAITING = 10_000
"""Messages that were received and not looked at; who sends more waits."""

MAX_LINE_BYTES = 1024 * 1024
MAX_SEQUENCE_ID = 2**63 - 1
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.05, 1.0

CRC = struct.Struct("<I")
HEAD = struct.Struct("<12sqHI")
"""Of a record, after its CRC: position of the record before it, sequence ID, lengths of name and payload."""

POSITION = struct.Struct(">QI")
"""Where a record ends, and its CRC: as that covers the position before it, another history has other positions."""


class WriteRefused(Exception):
    """The log did not take a group of messages; nothing of it is there."""


class OutcomeUnknown(Exception):
    """What became of a group of messages, or where the log ends, cannot be told now."""


class Log(Protocol):
    """What the broker needs of a log. It has the prefix property: a message is there only if all before it are."""

    async def take(self) -> bytes:
        """1 and 2: shuts out every earlier writer, and what is still on its way; returns the last entry's position.

        All that is in the log is durable then. Raises OutcomeUnknown: try again.
        """

    def after(self, position: bytes) -> AsyncIterator[Entry]:
        """2: the entries after a position; empty: from the first."""

    async def append(self, messages: Sequence["Message"]) -> list[bytes]:
        """Makes messages durable; returns their positions. Raises WriteRefused, OutcomeUnknown."""


@dataclass(frozen=True, slots=True)
class Record:
    """A message in the log."""

    producer_name: str
    sequence_id: int
    payload: bytes
    position: bytes
    previous_position: bytes


class FileLog:
    """Records one after the other in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Nobody else writes to it, for as long as this process lives.
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end, self._last_position = 0, b""
        for record in self.records():
            self._last_position = record.position
            self._end, _ = POSITION.unpack(record.position)
        # What a crash left half written goes; what it left whole may not be on the disk yet.
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def records(self, start: int = 0) -> Iterator[Record]:
        """The records from this offset on, up to the first that is not whole."""
        with self._path.open("rb") as file:
            file.seek(start)
            while len(head := file.read(CRC.size + HEAD.size)) == CRC.size + HEAD.size:
                [crc] = CRC.unpack_from(head)
                previous, sequence_id, name_bytes, payload_bytes = HEAD.unpack_from(head, CRC.size)
                body = file.read(name_bytes + payload_bytes)
                if zlib.crc32(body, zlib.crc32(head[CRC.size :])) != crc or len(body) < name_bytes + payload_bytes:
                    return
                start += len(head) + len(body)
                name, payload = body[:name_bytes].decode(), body[name_bytes:]
                yield Record(name, sequence_id, payload, POSITION.pack(start, crc), previous if any(previous) else b"")

    async def take(self) -> bytes:
        return self._last_position

    async def append(self, messages: Sequence["Message"]) -> list[bytes]:
        # Nobody cancels it: a write that goes on after the broker has let go of the topic would be one too many.
        return await asyncio.to_thread(self._append, messages)

    def _append(self, messages: Sequence["Message"]) -> list[bytes]:
        data, positions, previous = bytearray(), [], self._last_position
        for message in messages:
            name = message.range.producer_name.encode()
            head = HEAD.pack(previous, message.range.sequence_id, len(name), len(message.payload))
            crc = zlib.crc32(name + message.payload, zlib.crc32(head))
            data += CRC.pack(crc) + head + name + message.payload
            previous = POSITION.pack(self._end + len(data), crc)
            positions.append(previous)
        try:
            self._write(bytes(data))
        except OSError as e:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            raise WriteRefused(str(e)) from e
        # If this fails nobody knows what is on the disk: the process ends, and its next start looks.
        os.fdatasync(self._fd)
        self._end += len(data)
        self._last_position = previous
        return positions

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._end + written)

    async def after(self, position: bytes) -> AsyncIterator[Entry]:
        # Is it a position of another log? The first entry's predecessor shows it.
        start = POSITION.unpack(position)[0] if position else 0
        for record in self.records(start):
            yield Entry(Range(record.producer_name, record.sequence_id), record.position, record.previous_position)


@dataclass(eq=False, slots=True)
class Connection:
    """A producer's connection."""

    writer: asyncio.StreamWriter
    producer_name: str = ""
    unanswered: int = 0
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_dropped(self) -> bool:
        return self.writer.is_closing()

    def answer(self, message: "Message", answer: str) -> None:
        if not self.is_dropped:
            self.writer.write(f"{message.range.sequence_id} {answer}\n".encode())
            self.unanswered -= 1
            if not self.unanswered:
                self.all_answered.set()

    def drop(self) -> None:
        """4: nothing more is taken of what it has sent."""
        self.writer.close()
        self.all_answered.set()

    def send_back(self, message: "Message") -> None:
        """4: the producer sends again from this message on, or from an earlier one that has no answer."""
        self.answer(message, "again")
        self.drop()


@dataclass(frozen=True, slots=True)
class Message:
    """What a producer has sent."""

    connection: Connection
    range: Range
    payload: bytes


def parse(line: bytes, connection: Connection) -> Message:
    """The message in a line. Raises SeqdedupeError."""
    number, _, payload = line.removesuffix(b"\n").partition(b" ")
    if not number.isdigit() or int(number) > MAX_SEQUENCE_ID:
        raise error("INVALID_SEQUENCE_ID", f"a line begins with a sequence ID, 0 to {MAX_SEQUENCE_ID}")
    return Message(connection, Range(connection.producer_name, int(number)), payload)


class Broker:
    """Serves a topic, whose log it is given."""

    def __init__(self, log: Log, sidecar: BrokerClient, topic: str) -> None:
        self._log = log
        self._sidecar = sidecar
        self._topic = topic
        self._connections: set[Connection] = set()
        self._received: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)
        """In the order in which they came. None: look whether the topic is still attached."""
        self._attachment: Attachment | None = None

    # -- producers ---------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A producer's connection: what comes waits in line, until the producer goes or is sent back."""
        connection = Connection(writer)
        self._connections.add(connection)
        try:
            connection.producer_name = (await reader.readline()).decode().removesuffix("\n")
            new_producer_name(connection.producer_name)
            # A line without its end is a producer's that has died.
            while (line := await reader.readline()).endswith(b"\n") and not connection.is_dropped:
                message = parse(line, connection)
                connection.unanswered += 1
                connection.all_answered.clear()
                if self._attachment is None:
                    # 8: without the sidecar there are no verdicts.
                    connection.send_back(message)
                else:
                    await self._received.put(message)
            if connection.unanswered and not connection.is_dropped:
                await connection.all_answered.wait()
        except (ConnectionError, SeqdedupeError, ValueError) as e:
            writer.write(f"refused: {e}\n".encode())
        finally:
            connection.drop()
            self._connections.discard(connection)
            self._release(connection.producer_name)

    def _release(self, name: str) -> None:
        """3: nobody publishes under this name for now, unless on another connection."""
        attachment = self._attachment
        is_used = any(connection.producer_name == name for connection in self._connections)
        if not is_used and attachment is not None and attachment.ended is None:
            attachment.release(name)

    # -- the sidecar -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Attaches the topic and publishes what comes, again and again. Raises what trying again does not mend."""
        delay_seconds = FIRST_DELAY_SECONDS
        while True:
            try:
                last = await self._log.take()
                attachment = await self._sidecar.attach(self._topic, self._log.after, last_position=last)
            except (SeqdedupeError, OutcomeUnknown) as e:
                if isinstance(e, DataLossError | InvalidRequestError | ConfigurationError):
                    raise
                if delay_seconds == FIRST_DELAY_SECONDS:
                    print(f"not attached: {e}", file=sys.stderr)
                await asyncio.sleep(delay_seconds)
                delay_seconds = min(2 * delay_seconds, LONGEST_DELAY_SECONDS)
                continue
            delay_seconds = FIRST_DELAY_SECONDS
            print(f"attached: {self._topic}", file=sys.stderr)
            await self._hold(attachment)

    async def _hold(self, attachment: Attachment) -> None:
        """Publishes until the attachment has ended."""
        self._attachment = attachment
        waking = asyncio.ensure_future(self._wake_at_the_end_of(attachment))
        group: list[Message] = []
        try:
            while attachment.ended is None:
                group = await self._group()
                await self._publish(attachment, group)
        except (SeqdedupeError, OutcomeUnknown) as e:
            print(f"no longer attached: {e}", file=sys.stderr)
        # 8: what was received, and has no answer, has no verdict.
        self._attachment = None
        attachment.close()
        for message in group:
            message.connection.send_back(message)
        while not (waking.done() and self._received.empty()):
            for message in await self._group():
                message.connection.send_back(message)

    async def _wake_at_the_end_of(self, attachment: Attachment) -> None:
        await attachment.wait_until_ended()
        await self._received.put(None)

    async def _group(self) -> list[Message]:
        """The messages that are there; waits for news if there are none. What was dropped meanwhile is left out."""
        group = [await self._received.get()]
        while len(group) < MAX_GROUP and not self._received.empty():
            group.append(self._received.get_nowait())
        return [message for message in group if message is not None and not message.connection.is_dropped]

    async def _publish(self, attachment: Attachment, group: list[Message]) -> None:
        """Checks messages, writes those that are new, reports and answers. Raises why the attachment has ended."""
        if not group:
            return
        verdicts = await attachment.check([message.range for message in group])
        new = []
        for message, verdict in zip(group, verdicts, strict=True):
            if verdict is Verdict.NOT_DUP:
                new.append(message)
            elif verdict is Verdict.DUP:
                message.connection.answer(message, "dup")
            else:
                message.connection.send_back(message)
        if not new:
            return
        try:
            positions = await self._log.append(new)
        except WriteRefused as e:
            print(f"not written: {e}", file=sys.stderr)
            # 6: all of it has failed, everybody sends again, and only then are there verdicts again.
            for connection in self._connections:
                connection.drop()
            attachment.failed(len(new))
            attachment.reset()
            return
        # They are in the log, whether the sidecar hears it or not.
        for message, position in zip(new, positions, strict=True):
            message.connection.answer(message, f"stored {position.hex()}")
        attachment.persisted(positions[-1], len(new))


async def serve_log(log: Log, options: argparse.Namespace) -> None:
    """Serves producers of a topic that has this log."""
    async with BrokerClient(options.sidecar) as sidecar:
        broker = Broker(log, sidecar, options.topic)
        host, _, port = options.listen.rpartition(":")
        server = await asyncio.start_server(broker.serve, host, int(port), limit=MAX_LINE_BYTES)
        async with server:
            print(f"serving: {host}:{server.sockets[0].getsockname()[1]}", file=sys.stderr)
            await broker.run()


def options_of(description: str) -> argparse.ArgumentParser:
    """What every broker here can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--topic", default="example", help="the topic's name at the sidecar")
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="address for producers")
    address = os.environ.get("SEQDEDUPE_ADDRESS", "127.0.0.1:6660")
    parser.add_argument(
        "--sidecar",
        default=address,
        metavar="HOST:PORT",
        help="address of the sidecar, started with seqdedupe serve --log broker",
    )
    return parser


def main() -> None:
    parser = options_of("A broker whose log is a file, deduplicated by a sidecar.")
    parser.add_argument("log", type=Path, help="file of the log")
    parser.add_argument("--print", action="store_true", help="print what the log holds, and end")
    options = parser.parse_args()
    if options.print:
        for record in FileLog(options.log).records():
            print(record.producer_name, record.sequence_id, record.payload.decode(errors="replace"))
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_log(FileLog(options.log), options))


if __name__ == "__main__":
    main()
