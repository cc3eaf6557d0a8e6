"""A connection to a cluster, for the duration of a call or a task, and its credentials. Begin with `connected`."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pulsar
import pulsar.asyncio

from seqdedupe.entry_properties import FORMAT, INCARNATION
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarEntry
from seqdedupe.log.pulsar.entry_limit import Brokers
from seqdedupe.log.pulsar.finder import Finder
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.native_topic import open_native_reader
from seqdedupe.log.pulsar.pulsar_client import OAuth2, PulsarClient, Token, client_logger, from_file, never_raises
from seqdedupe.log.pulsar.reader import ReadsEntries, open_reader
from seqdedupe.log.pulsar.taking_over import last_before
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe_spark.service import PulsarCluster, path_of
from seqdedupe_spark.stock import STOCK, StockEnds

# -- The credentials for a cluster: Pulsar's own names for them, and their meaning. No error ever shows a secret.

_PARAMS = "pulsar.client.authParams"
_TOKEN = "token:"


def token_of(cluster: PulsarCluster) -> Token | None:
    """Return the function that provides the token; None if there is no token. Raises INVALID_OPTION."""
    params = cluster.credentials
    if cluster.authentication == "AuthenticationOAuth2":
        return _oauth2(params)
    if cluster.authentication != "AuthenticationToken":
        if params:
            raise error("INVALID_OPTION", f"{_PARAMS} is given without pulsar.client.authPluginClassName")
        return None
    if params.startswith(_TOKEN) and params != _TOKEN:
        return lambda: params.removeprefix(_TOKEN)
    if path := path_of(params):
        return from_file(Path(path))
    raise _wrong("token:… or file:///path")


def _oauth2(params: str) -> Token:
    try:
        given = json.loads(params)
        issuer_url, path, audience = given["issuerUrl"], path_of(given["privateKey"]), given.get("audience", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _wrong('JSON, as {"issuerUrl": "https://…", "privateKey": "file:///path", "audience": "…"}') from None
    if path is None or urlsplit(issuer_url).scheme not in ("https", "http"):
        raise _wrong("such that privateKey is like file:///path, and issuerUrl like https://host")
    return OAuth2(issuer_url, Path(path), audience)


def _wrong(should_be: str) -> SeqdedupeError:
    return error("INVALID_OPTION", f"{_PARAMS}: it should be {should_be}")


def tls_of(cluster: PulsarCluster) -> ssl.SSLContext | None:
    """Return the TLS context for admin calls and native entries. It is as strict as the configuration of the client for
    other messages. Raises INVALID_OPTION."""
    if not cluster.admin_url.startswith("https:") and not cluster.service_url.startswith("pulsar+ssl:"):
        return None
    try:
        context = ssl.create_default_context(cafile=cluster.trust_certs_path or None)
    except (OSError, ssl.SSLError) as e:
        what = f"pulsar.client.tlsTrustCertsFilePath is {cluster.trust_certs_path!r}: no certificate can be read ({e})"
        raise error("INVALID_OPTION", what) from e
    context.check_hostname = cluster.verifies_hostname and not cluster.allows_insecure
    if cluster.allows_insecure:
        context.verify_mode = ssl.CERT_NONE
    return context


OPERATION_TIMEOUT_SECONDS = 10
CLOSE_TIMEOUT_SECONDS = 5.0
"""The time limit for closing. If a cluster does not answer, the connection is abandoned."""
READ_TIMEOUT_SECONDS = 10.0
"""The time limit for reading an existing entry. If it takes longer, the cluster has a problem."""
QUICK_SECONDS = 2.0

QUEUE_BYTES = 8 * 1024 * 1024
"""The approximate number of bytes that are fetched ahead."""
MAX_QUEUE_ENTRIES = 5000
STEP_BYTES = 1024 * 1024
"""The approximate number of bytes that are read at a time."""
_LOOK_ENTRIES = 4


class BrokerConnection:
    """A connection, made by `connected`. Its methods raise LOG_UNREADABLE for temporary failures."""

    def __init__(
        self,
        client: pulsar.asyncio.Client,
        brokers: Brokers,
        admin: PulsarAdmin,
        quick_admin: PulsarAdmin,
        subscription: str,
    ) -> None:
        self.admin = admin
        self.quick_admin = quick_admin
        """The client for calls to which a broker may not answer at all."""
        self._client = client
        self._brokers = brokers
        self._subscription = subscription
        self._native = set[str]()
        """Topics of native entries, as `incarnation` has found them. Pulsar's client does not show what is needed of
        such entries."""
        self._earlier = dict[str, MessageId]()
        """By topic: its last entry from before a sidecar took it over, as `incarnation` has found it."""

    async def is_log(self, topic: str) -> bool:
        """Return whether a sidecar writes the topic. Raises TOPIC_NOT_FOUND."""
        return INCARNATION in await self.admin.properties(topic)

    async def incarnation(self, topic: str) -> int:
        """Return the incarnation of a topic that a sidecar writes, or STOCK for any other topic. Call this before the
        topic is read. Raises TOPIC_NOT_FOUND."""
        # Opening a reader on a topic that was deleted would recreate the topic.
        properties = await self.admin.properties(topic)
        self._earlier[topic] = last_before(properties)
        self._native.discard(topic)
        if properties.get(FORMAT) == EntryFormat.NATIVE.value:
            self._native.add(topic)
        found = properties.get(INCARNATION, "")
        return int(found) if found.isdecimal() else STOCK

    async def finder(self, topic: str, incarnation: int) -> Finder:
        """Return a finder for the topic in its current state."""
        ledgers, earlier = await self.admin.ledgers(topic), self._earlier.get(topic, NOWHERE)
        return Finder(topic, incarnation, ledgers, partial(self.entries, topic), earlier)

    async def finder_of(self, topic: str, incarnation: int) -> Finder:
        """Return a finder for a reader of this incarnation. Raises TOPIC_NOT_FOUND, POSITION_OF_ANOTHER_INCARNATION."""
        now = await self.incarnation(topic)
        if now != incarnation:
            raise error(
                "POSITION_OF_ANOTHER_INCARNATION", f"{topic} was recreated: its incarnation is {now}, not {incarnation}"
            )
        return await self.finder(topic, incarnation)

    async def open_reader(self, topic: str, start: MessageId, ledgers: Ledgers) -> ReadsEntries:
        # Pulsar's client limits the entries that it fetches ahead only by number.
        of_size = QUEUE_BYTES * len(ledgers) // max(ledgers.size_bytes, 1)
        return await self._reader(topic, start, max(2, min(MAX_QUEUE_ENTRIES, of_size)))

    async def _reader(self, topic: str, start: MessageId, queue_entries: int) -> ReadsEntries:
        if topic in self._native:
            return await open_native_reader(self._brokers, topic, start)
        return await open_reader(self._client, topic, start, queue_entries)

    async def stored(self, topic: str) -> StockEnds:
        """Return the stored entries of a topic that no sidecar writes. Raises TOPIC_NOT_FOUND."""
        ledgers, first_ledger, let_go = await self.admin.storage(topic, self._subscription)
        return StockEnds(ledgers, first_ledger, let_go, len(ledgers))

    async def entries(self, topic: str, first: MessageId, last: MessageId) -> list[PulsarEntry]:
        """Return the entries that a reader receives from `first` to `last`, without their payloads."""
        reader = await self._reader(topic, first, _LOOK_ENTRIES)
        found, seen = list[PulsarEntry](), NOWHERE
        try:
            while seen < last and not await reader.is_at_end():
                for entry in await next_entries(reader, topic):
                    seen = entry.message_id._replace(batch_index=-1)
                    if first <= seen <= last:
                        # Payloads may be large, and are not needed for places.
                        found.append(entry._replace(message=entry.message._replace(payload=b"")))
            return found
        finally:
            await reader.close()


async def next_entries(reader: ReadsEntries, topic: str) -> list[PulsarEntry]:
    """Return the next entries of a topic. The caller ensures that they exist. Raises LOG_UNREADABLE."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            return await reader.read()
    except TimeoutError as e:
        raise error("LOG_UNREADABLE", f"{topic}: no entry came for {READ_TIMEOUT_SECONDS:.0f} s") from e


@asynccontextmanager
async def connected(cluster: PulsarCluster) -> AsyncGenerator[BrokerConnection, None]:
    """Open a connection for the duration of a `with` block. Raises INVALID_OPTION, PULSAR_FORBIDS."""
    token, tls = token_of(cluster), tls_of(cluster)
    client = PulsarClient(
        cluster.service_url,
        authentication=pulsar.AuthenticationToken(never_raises(token)) if token is not None else None,
        operation_timeout_seconds=OPERATION_TIMEOUT_SECONDS,
        tls_trust_certs_file_path=cluster.trust_certs_path or None,
        tls_allow_insecure_connection=cluster.allows_insecure,
        tls_validate_hostname=cluster.verifies_hostname,
        stats_interval_in_seconds=0,
        logger=client_logger(),
    )
    try:
        admin = PulsarAdmin(AdminUrl(cluster.admin_url, token, tls))
        quick_admin = PulsarAdmin(AdminUrl(cluster.admin_url, token, tls, QUICK_SECONDS))
        brokers = Brokers(cluster.service_url, token, tls)
        yield BrokerConnection(client, brokers, admin, quick_admin, cluster.subscription)
    finally:
        # Not `shutdown`: it keeps the interpreter's lock, for which the client's threads may wait.
        with suppress(TimeoutError, pulsar.asyncio.PulsarException):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await client.close()
