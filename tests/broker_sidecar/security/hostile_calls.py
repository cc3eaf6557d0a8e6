"""Calls without a token whose requests nobody may receive: parts of messages, compressed ones, other protocols.

`python -m tests.broker_sidecar.security.hostile_calls ADDRESS KIND METHOD...` makes a hundred of them, one method after
the other, over ten connections at a time. It imports little, so that it begins soon.
"""

import gzip
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.broker_sidecar.raw_http2 import RawConnection, message

CONNECTIONS = 10
CALLS = 100

LARGEST = bytes(16 * 1024 * 1024 - 64)
"""As a message of a stream may be."""
HALF = message(LARGEST)[:-10]
SMALL_GZIP = gzip.compress(LARGEST)
SMALL_DEFLATE = zlib.compress(LARGEST)

Call = tuple[bytes, dict[str, str]]
"""What is sent, and headers."""


def _random(seed: int) -> bytes:
    return random.Random(seed).randbytes(200_000)


KINDS: dict[str, Callable[[int], Call]] = {
    "half messages": lambda k: (HALF, {}),
    "gzip": lambda k: (message(SMALL_GZIP, compressed=True), {"grpc-encoding": "gzip"}),
    "deflate": lambda k: (message(SMALL_DEFLATE, compressed=True), {"grpc-encoding": "deflate"}),
    "compression without its name": lambda k: (message(SMALL_GZIP, compressed=True), {}),
    "unknown compression": lambda k: (message(SMALL_GZIP, compressed=True), {"grpc-encoding": "own"}),
    "half a message of gzip": lambda k: (message(_random(k) * 80, compressed=True)[:-10], {"grpc-encoding": "gzip"}),
    "no content type": lambda k: (HALF, {"content-type": ""}),
    "another content type": lambda k: (HALF, {"content-type": "application/json"}),
    "content type of gRPC for the web": lambda k: (HALF, {"content-type": "application/grpc-web-text"}),
    "more than a request may have": lambda k: (message(LARGEST, says_bytes=2**32 - 1), {}),
    "random bytes": lambda k: (_random(k), {}),
    "many messages": lambda k: (message(b"") * 300_000, {}),
}


@contextmanager
def connected(address: str, connections: int = CONNECTIONS) -> Iterator[list[RawConnection]]:
    opened = [RawConnection(address) for _ in range(connections)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def attack(address: str, kind: str, paths: list[str], patience_seconds: float = 1.0) -> None:
    with connected(address) as connections:
        threads = [
            threading.Thread(
                target=_call, args=(connection, kind, paths, range(first, CALLS, CONNECTIONS), patience_seconds)
            )
            for first, connection in enumerate(connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _call(connection: RawConnection, kind: str, paths: list[str], numbers: range, patience_seconds: float) -> None:
    for k in numbers:
        content, headers = KINDS[kind](k)
        call = connection.begin(paths[k % len(paths)], headers)
        connection.send(call, content, patience_seconds=patience_seconds)


def flood(address: str, path: str, connections: int, calls: int, is_over: Callable[[int, int], bool]) -> None:
    """Keeps this many calls open on each of this many connections. `is_over` is asked again and again; it gets how many
    calls and how many connections the other side has ended."""
    opened: list[tuple[RawConnection, set[int]]] = []
    ended_calls = ended_connections = 0
    try:
        while not is_over(ended_calls, ended_connections):
            opened += [(RawConnection(address), set()) for _ in range(connections - len(opened))]
            for connection, under_way in opened:
                ended_calls += len(under_way & connection.ended)
                under_way -= connection.ended
                connection.ended.clear()
                while len(under_way) < calls and not connection.is_closed:
                    under_way.add(connection.begin(path))
                connection.pump()
            ended_connections += sum(connection.is_closed for connection, _ in opened)
            for connection, _ in opened:
                if connection.is_closed:
                    connection.close()
            opened = [each for each in opened if not each[0].is_closed]
    finally:
        for connection, _ in opened:
            connection.close()


if __name__ == "__main__":
    attack(sys.argv[1], sys.argv[2], sys.argv[3:])
