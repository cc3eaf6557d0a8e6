"""gRPC over a plain socket: for what no client of gRPC sends, such as the first half of a message."""

import select
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4

FRAME_BYTES = 16 * 1024
FIRST_WINDOW = 65_535


def message(content: bytes, *, compressed: bool = False, says_bytes: int | None = None) -> bytes:
    """A message as gRPC frames it; `says_bytes` is what it says of its length, if that is not true."""
    return struct.pack(">BI", compressed, len(content) if says_bytes is None else says_bytes) + content


class RawConnection:
    """A connection whose calls are sent as far as the server's windows allow."""

    def __init__(self, address: str) -> None:
        if address.startswith("unix:"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self._socket = socket.create_connection((host, int(port)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, b""))
        self._readable = select.poll()  # which takes any descriptor, where `select` takes the first thousand
        self._readable.register(self._socket, select.POLLIN)
        self._received = b""
        self._next_stream = 1
        self._window = FIRST_WINDOW
        self._first_window = FIRST_WINDOW
        self._windows: Counter[int] = Counter()
        """Number of streams in addition to the first one."""
        self.is_closed = False
        self.ended: set[int] = set()
        """The calls that the server has ended."""
        self.answers: defaultdict[int, bytes] = defaultdict(bytes)
        """The headers and trailers of each call, as the server has packed them: gRPC writes a `grpc-message` out."""

    def begin(self, method: str | bytes, headers: Mapping[str, str | bytes] = {}) -> int:
        """A call without a message so far."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        known = {"content-type": "application/grpc", "te": "trailers"}
        where = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
        fields: dict[str, str | bytes] = {**where, **known, **headers}
        self._send(_frame(HEADERS, END_HEADERS, stream, b"".join(_field(*field) for field in fields.items())))
        return stream

    def send(self, stream: int, content: bytes, *, ends: bool = False, patience_seconds: float = 1.0) -> int:
        """Sends as much as the server takes, and gives up when it takes no more for this long; how much it was."""
        sent = 0
        self.pump()
        while sent < len(content) and not self.is_closed and stream not in self.ended:
            room = min(self._window, self._first_window + self._windows[stream], FRAME_BYTES, len(content) - sent)
            if room <= 0:
                if not self.pump(patience_seconds):
                    return sent
                continue
            self._window -= room
            self._windows[stream] -= room
            self._send(_frame(DATA, 0, stream, content[sent : sent + room]))
            sent += room
            self.pump()
        if ends:
            self._send(_frame(DATA, END_STREAM, stream, b""))
        return sent

    def reset(self, stream: int) -> None:
        self._send(_frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def wait_ended(self, streams: Iterable[int], seconds: float) -> bool:
        """Whether the server has ended all of these within this long."""
        wanted, until = set(streams), time.monotonic() + seconds
        while not wanted <= self.ended and not self.is_closed and time.monotonic() < until:
            self.pump(0.1)
        return self.is_closed or wanted <= self.ended

    def pump(self, seconds: float = 0.0) -> bool:
        """Takes what the server has sent; waits at most this long for it. Whether there was something."""
        some = False
        while not self.is_closed and self._readable.poll(0 if some else int(seconds * 1000)):
            some = True
            try:
                data = self._socket.recv(1 << 18)
            except ConnectionError:
                data = b""
            self.is_closed = not data
            self._received += data
            while len(self._received) >= 9:
                size = int.from_bytes(self._received[:3], "big")
                if len(self._received) < 9 + size:
                    break
                kind, flags, stream = self._received[3], self._received[4], int.from_bytes(self._received[5:9], "big")
                self._take(kind, flags, stream, self._received[9 : 9 + size])
                self._received = self._received[9 + size :]
        return some

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()

    def _take(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(content), 6):
                name, value = struct.unpack_from(">HI", content, at)
                if name == INITIAL_WINDOW_SIZE:
                    self._first_window = value
            self._send(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._send(_frame(PING, ACK, 0, content))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(content, "big")
            if stream:
                self._windows[stream] += more
            else:
                self._window += more
        if kind == HEADERS:
            self.answers[stream] += content
        if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)

    def _send(self, data: bytes) -> None:
        if not self.is_closed:
            try:
                self._socket.sendall(data)
            except ConnectionError:
                self.is_closed = True


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def _field(name: str, value: str | bytes) -> bytes:
    """A header in HPACK, without its tables."""
    content = value.encode() if isinstance(value, str) else value
    return b"\0" + b"".join(_length(len(text)) + text for text in (name.encode(), content))


def _length(size: int) -> bytes:
    if size < 127:
        return bytes((size,))
    rest, out = size - 127, bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes(out) + bytes((rest,))
