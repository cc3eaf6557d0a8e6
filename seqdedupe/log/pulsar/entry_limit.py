"""The largest size of an entry: the broker's limit, sent on connection, and the topic's own policy.

Pulsar's client receives the broker's limit, and does not report it. So a separate connection asks for it, and does
nothing else.
"""

import asyncio
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES
from seqdedupe.log.pulsar.reader import fields_of
from seqdedupe.names import whole_of
from seqdedupe.wire import varint

TIMEOUT_SECONDS = 10.0
FRESH_SECONDS = 30.0
"""The time for which an answer is reused. The topics of a sidecar ask each minute, and a broker answers the same to
all."""
_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_MAX_ANSWER_BYTES = 64 * 1024
_CONNECT, _CONNECTED, _ERROR = 2, 3, 14
"""Types of commands. The command is in the field with the same number."""
_TYPE = 1
_PROTOCOL_VERSION = 20
_VARINT, _BYTES = 0, 2


class Brokers:
    """The brokers of a cluster: `service_url` has one host or several, `pulsar://one:6650,two:6650`."""

    def __init__(
        self, service_url: str, token: Callable[[], str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Set the brokers. `token` is as in `AdminUrl`."""
        self._service_url = service_url
        self._token = token
        self._tls = tls
        self._asking = asyncio.Lock()
        self._answer = MAX_ENTRY_BYTES
        self._asked_at = -FRESH_SECONDS

    async def max_entry_bytes(self) -> int:
        """Return the most that a broker accepts, by its own word. A caller that asks again soon gets the same answer.

        Raises LOG_UNREADABLE, PULSAR_FORBIDS.
        """
        async with self._asking:
            if time.monotonic() - self._asked_at >= FRESH_SECONDS:
                self._answer = await self._first_answer()
                self._asked_at = time.monotonic()
            return self._answer

    async def _first_answer(self) -> int:
        """Return the answer of the first host that gives one."""
        parts = urlsplit(self._service_url)
        token = await asyncio.to_thread(self._token) if self._token is not None else ""
        failure: SeqdedupeError | None = None
        for host in parts.netloc.split(","):
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    return await self._ask(parts.scheme, host, token)
            except (OSError, EOFError, ValueError, struct.error) as e:
                failure = _unreadable(host, str(e) or type(e).__name__)
        raise failure or _unreadable(self._service_url, "it names no host")

    async def _ask(self, scheme: str, host: str, token: str) -> int:
        place = urlsplit(f"//{host}")
        tls = (self._tls or ssl.create_default_context()) if scheme == "pulsar+ssl" else None
        reader, writer = await asyncio.open_connection(
            place.hostname, place.port or _PORTS[scheme], ssl=tls, limit=_MAX_ANSWER_BYTES
        )
        try:
            connect = _text(1, b"seqdedupe") + _number(4, _PROTOCOL_VERSION)
            if token:
                connect += _text(3, token.encode()) + _text(5, b"token")
            command = _number(_TYPE, _CONNECT) + _text(_CONNECT, connect)
            writer.write(struct.pack(">II", len(command) + 4, len(command)) + command)
            _, size = struct.unpack(">II", await reader.readexactly(8))
            if size > _MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has {size} bytes")
            answer = _fields(await reader.readexactly(size))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if answer.get(_TYPE) == _ERROR:
            said = _fields(_bytes(answer.get(_ERROR))).get(3, b"")
            raise error("PULSAR_FORBIDS", f"{host} refuses the connection: {_bytes(said).decode(errors='replace')}")
        if answer.get(_TYPE) != _CONNECTED:
            raise ValueError(f"it answers a connection with a command of type {answer.get(_TYPE)!r}")
        limit = _fields(_bytes(answer.get(_CONNECTED))).get(3, MAX_ENTRY_BYTES)
        return limit if isinstance(limit, int) and limit > 0 else MAX_ENTRY_BYTES


async def max_entry_bytes(topic: str, admin: PulsarAdmin, brokers: Brokers | None) -> int:
    """Return the most bytes that an entry of the topic may have: the lower of its brokers' limit and its policies'
    limit.

    Raises the errors of both requests.
    """
    own = await admin.policy(whole_of(topic) or topic, "maxMessageSize")
    limits = [own] if isinstance(own, int) and own > 0 else []
    limits.append(await brokers.max_entry_bytes() if brokers is not None else MAX_ENTRY_BYTES)
    return min(limits)


def _unreadable(where: str, why: str) -> SeqdedupeError:
    return error("LOG_UNREADABLE", f"{where} does not say how large an entry may be: {why}")


# Protobuf, as far as these commands use it.


def _number(field: int, value: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(value)


def _text(field: int, value: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(value)) + value


def _fields(raw: bytes) -> dict[int, int | bytes]:
    """Return the fields as `fields_of`. Raises ValueError if it is no message of numbers and bytes."""
    try:
        return fields_of(raw)
    except (IndexError, KeyError) as e:
        raise ValueError(
            "its answer is cut off" if isinstance(e, IndexError) else "its answer is not as Pulsar's"
        ) from e


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("its answer is not as Pulsar's")
    return value
