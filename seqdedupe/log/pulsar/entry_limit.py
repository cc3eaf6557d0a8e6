"""The largest size of an entry: the broker's limit, sent on connection, and the topic's own policy.

Pulsar's client receives the broker's limit, and does not report it. So a separate connection asks for it, and does
nothing else.
"""

import asyncio
import ssl
import time
from collections.abc import Callable

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES
from seqdedupe.names import whole_of
from seqdedupe.pulsar_wire.connection import Connection, connect, connect_to_owner

FRESH_SECONDS = 30.0
"""The time for which an answer is reused. The topics of a sidecar ask each minute, and a broker answers the same to
all."""


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

    async def connection(self, topic: str) -> Connection:
        """Return a new connection to the topic's broker. Raises LOG_REFUSED, PULSAR_FORBIDS, TOPIC_NOT_FOUND, and the
        errors of the token."""
        return await connect_to_owner(self._service_url, topic, token=self._token, tls=self._tls)

    async def _first_answer(self) -> int:
        """Return the answer of the first host that gives one."""
        try:
            connection = await connect(self._service_url, token=self._token, tls=self._tls)
        except SeqdedupeError as e:
            if e.reason == "PULSAR_FORBIDS":
                raise
            raise error("LOG_UNREADABLE", f"Pulsar does not say how large an entry may be: {e.message}") from e
        await connection.close()
        return connection.max_message_bytes


async def max_entry_bytes(topic: str, admin: PulsarAdmin, brokers: Brokers | None) -> int:
    """Return the most bytes that an entry of the topic may have: the lower of its brokers' limit and its policies'
    limit.

    Raises the errors of both requests.
    """
    own = await admin.policy(whole_of(topic) or topic, "maxMessageSize")
    limits = [own] if isinstance(own, int) and own > 0 else []
    limits.append(await brokers.max_entry_bytes() if brokers is not None else MAX_ENTRY_BYTES)
    return min(limits)
