"""A connection to a cluster, for the duration of a call or a task, and its credentials. Begin with `connected`."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import _pulsar
import pulsar
import pulsar.asyncio

from seqdedupe.entry_properties import FORMAT, INCARNATION
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers, open_reader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarEntry, PulsarMessage, content_bytes
from seqdedupe.log.pulsar.finder import Finder
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.reader import ReadsEntries
from seqdedupe.log.pulsar.taking_over import last_before
from seqdedupe.log.pulsar.tokens import OAuth2, Token, from_file
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import MessageIdData
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
    """Return the TLS context for admin calls and the topics of sidecars. It is as strict as the configuration of the
    client for other topics. Raises INVALID_OPTION."""
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


# -- Pulsar's own client, for topics that no sidecar writes.

logger = logging.getLogger("seqdedupe.pulsar")


def never_raises(token: Token) -> Token:
    """Return a token function for Pulsar's client. The client calls the function on a thread where no exception may be
    raised. So after an error the function returns no token."""

    def asked() -> str:
        try:
            return token()
        except Exception as e:  # noqa: BLE001 (after any failure the client's thread must go on)
            logger.warning("no token for Pulsar: %s", e if isinstance(e, SeqdedupeError) else type(e).__name__)
            return ""

    return asked


def client_logger() -> pulsar.FileLogger:
    """Return a logger that writes the client's errors to standard error, in the client's own words.

    Never use a Python logger. The client calls the logger at every step, even for messages that are not shown, while it
    holds the client's locks. A thread that has Python's lock and waits for one of the client's locks would wait
    forever. A Python logger also takes longer than all other work for a message.
    """
    return pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/stderr")


class PulsarClient(pulsar.asyncio.Client):  # type: ignore[misc]  # the library has no types
    """Pulsar's own client with a different `create_reader`. With Pulsar's own `create_reader`, closed readers, and the
    threads and descriptors of closed clients, are never released: a reader keeps the callback of its opening, and the
    callback keeps the reader."""

    async def create_reader(
        self,
        topic: str,
        start_message_id: pulsar.MessageId,
        *,
        receiver_queue_size: int,
        start_message_id_inclusive: bool,
    ) -> pulsar.asyncio.Reader:
        """Return a reader of bytes from that place on. The reader fetches `receiver_queue_size` entries in advance.
        Raises PulsarException."""
        schema = pulsar.schema.BytesSchema()
        settings = _pulsar.ReaderConfiguration()
        settings.schema(schema.schema_info())
        settings.receiver_queue_size(receiver_queue_size)
        settings.start_message_id_inclusive(start_message_id_inclusive)
        # `earliest` and `latest` belong to the library below.
        is_own = isinstance(start_message_id, pulsar.MessageId)
        start = start_message_id._msg_id if is_own else start_message_id
        reader = asyncio.get_running_loop().create_future()
        self._client.create_reader_async_v2(topic, start, settings, partial(_hand_over, [reader]))
        return pulsar.asyncio.Reader(await reader, schema)


_LATER_RESULTS = {46: "Disconnected"}
"""Results of the client that its Python library has no names for."""


def name_of(result: Any) -> str:
    """Return the name of a result of the client."""
    if result.name in pulsar.Result.__members__:
        return str(result.name)
    return _LATER_RESULTS.get(result.value, f"result {result.value}")


def told(failure: pulsar.asyncio.PulsarException) -> str:
    """Return the client's text about a failure."""
    name = name_of(failure.error())
    more = str(failure).partition(": ")[2]
    return f"{name}: {more}" if more else name


def _hand_over(waiting: "list[asyncio.Future[Any]]", outcome: Any) -> None:
    """Pass an outcome to the event loop. The client calls this once, on one of the client's threads. It keeps none of
    its arguments."""
    future = waiting.pop()
    future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, _pulsar.Error):
        future.set_exception(pulsar.asyncio.PulsarException(outcome.error, outcome.message))
    else:
        future.set_result(outcome)


# -- A reader of the client, which assembles messages of several entries.

READ_STEP_ENTRIES = 500
"""The most entries that are taken in one step: a few milliseconds of the event loop."""
READ_STEP_BYTES = 256 * 1024
"""After this number of payload bytes a step takes no more entries."""
OPEN_TIMEOUTS_SECONDS = (2.0, 4.0)
"""The opening of a reader while its topic is unloaded ends with the client's own time-out. Another reader is opened at
once."""
_AT_ONCE_MS = 0


class ClientReader:
    """Reads from one place on, until it is closed. All methods are called on one event loop.

    Entries that Pulsar has trimmed are skipped silently. After a broker's crash, entries may be delivered again. So the
    caller must compare their places with the topic's ledgers.
    """

    def __init__(self, reader: Any) -> None:
        """Make the reader, for `open_client_reader`."""
        self._reader = reader
        self._next: asyncio.Future[Any] | None = None

    async def read(self) -> list[PulsarEntry]:
        """Return the next entries, at least one. Wait for the first entry. If this is cancelled, no entry is lost.

        Raises LOG_UNREADABLE. After this error a new reader is needed.
        """
        # A message that arrives when no caller waits any more would be lost.
        if self._next is None:
            self._next = asyncio.ensure_future(self._reader.read_next())
        try:
            message = await asyncio.shield(self._next)
        except pulsar.asyncio.PulsarException as e:
            self._next = None
            raise _unreadable(self._reader.topic(), e) from e
        self._next = None
        entries = [_entry(message._message)]
        size_bytes = 0
        while len(entries) < READ_STEP_ENTRIES and size_bytes < READ_STEP_BYTES:
            size_bytes += content_bytes(entries[-1].message)
            # The layer below the client's reader for event loops, which wakes the loop for every message.
            try:
                entries.append(_entry(self._reader._reader.read_next(_AT_ONCE_MS)))
            except pulsar.PulsarException:
                # No entry is there yet. Any other failure shows in the next wait.
                break
        if len(entries) > 1 and entries[1].message_id < entries[0].message_id:
            # Pulsar's client passes an entry to a waiting caller even while it still queues the entry before. That
            # happens if the earlier entry was received when no caller waited yet.
            entries[:2] = entries[1], entries[0]
        return entries

    async def is_at_end(self) -> bool:
        """Return whether there are no more entries now. Do not call this while a caller waits in `read`. Raises
        LOG_UNREADABLE."""
        try:
            has_more = await self._reader.has_message_available()
        except pulsar.asyncio.PulsarException as e:
            raise _unreadable(self._reader.topic(), e) from e
        # An entry may have arrived for a caller that was cancelled.
        return not (has_more or (self._next is not None and self._next.done()))

    async def close(self) -> None:
        """Close the reader. A caller that waits in `read` gets LOG_UNREADABLE."""
        # On an error the broker has closed the reader, or will when the connection ends.
        with suppress(pulsar.asyncio.PulsarException):
            await self._reader.close()
        waiting = self._next
        if waiting is not None:
            await asyncio.wait([waiting])
            # Retrieve the exception, in case no caller waits in `read`.
            waiting.exception()


async def open_client_reader(
    client: pulsar.asyncio.Client, topic: str, start: MessageId | None, queue_entries: int
) -> ClientReader:
    """Return a reader whose first entry is the entry at `start`. If that entry was trimmed, or `start` is None, the
    reader begins with the first stored entry.

    The reader fetches `queue_entries` entries of any size in advance. Raises LOG_UNREADABLE.
    """
    place = pulsar.MessageId.earliest if start is None else pulsar.MessageId(-1, *start)
    try:
        for timeout_seconds in OPEN_TIMEOUTS_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    return ClientReader(await _opened(client, topic, place, queue_entries))
        return ClientReader(await _opened(client, topic, place, queue_entries))
    except pulsar.asyncio.PulsarException as e:
        raise _unreadable(topic, e) from e


async def _opened(client: pulsar.asyncio.Client, topic: str, place: pulsar.MessageId, queue_entries: int) -> Any:
    """Return a reader. If this is cancelled, the reader is closed as soon as it is open, because no other code could
    close it: the client ends an opening in its own time."""
    task = asyncio.ensure_future(
        client.create_reader(topic, place, receiver_queue_size=queue_entries, start_message_id_inclusive=True)
    )
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close)
        raise


def _close(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()._reader.close_async(lambda _: None)


def _entry(native: Any) -> PulsarEntry:
    place = native.message_id()
    try:
        properties = native.properties()
    except UnicodeDecodeError:
        # C++ and Go clients send any bytes.
        properties = {}
    message = PulsarMessage(
        None if native.has_null_value() else native.data(),
        properties,
        _text(native.partition_key),
        native.event_timestamp(),
    )
    message_id = MessageId(place.ledger_id(), place.entry_id(), place.batch_index())
    producer_name = _text(native.producer_name)
    sequence_id = _sequence_id(native, producer_name)
    of_id = MessageIdData.FromString(place.serialize())
    return PulsarEntry(
        message,
        message_id,
        native.publish_timestamp(),
        producer_name,
        sequence_id,
        _batch_size(of_id) if message_id.batch_index >= 0 else 0,
        _raw(native.ordering_key),
        native.int_schema_version(),
        _first_chunk(of_id),
    )


def _text(read: Callable[[], str]) -> str:
    """Return a text from the client. The text may have bytes that are not UTF-8, because C++ and Go clients send any
    bytes."""
    return _raw(read).decode(errors="replace")


def _raw(read: Callable[[], str]) -> bytes:
    """Return bytes that the client takes for text. It fails if they are none."""
    try:
        return read().encode()
    except UnicodeDecodeError as e:
        return e.object


def _batch_size(of_id: MessageIdData) -> int:
    """Return the number of messages in the batch of a message. The client shows this number only in the message ID."""
    if not of_id.HasField("batch_size"):
        raise error("INTERNAL", f"Pulsar's client does not say of how many messages a batch is: {of_id}")
    return of_id.batch_size


def _first_chunk(of_id: MessageIdData) -> MessageId | None:
    if not of_id.HasField("first_chunk_message_id"):
        return None
    first = of_id.first_chunk_message_id
    return MessageId(first.ledgerId, first.entryId)


def _sequence_id(native: Any, producer_name: str) -> int:
    """Return the sequence ID; -1 if the client does not show it. The client has no call for the ID, so it is read from
    the printed form."""
    head = f"Message(prod={producer_name}, seq="
    text = _text(native.__str__)
    digits = text[len(head) :].partition(",")[0]
    found = int(digits) if text.startswith(head) and digits.isdecimal() else -1
    # An invalid ID says nothing: no producer of the sidecar can have it.
    return found if found <= MAX_SEQUENCE_ID else -1


def _unreadable(topic: str, failure: pulsar.asyncio.PulsarException) -> SeqdedupeError:
    return error(
        "LOG_UNREADABLE",
        f"{topic} cannot be read: Pulsar's client says {told(failure)}",
        hint="See whether the Pulsar cluster serves, and whether the sidecar may read the topic; it is tried again.",
    )


# -- A connection, for the duration of a call or a task.

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
        self._formats = dict[str, EntryFormat]()
        """The entry formats of topics that sidecars write, as `incarnation` has found them."""
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
        self._formats.pop(topic, None)
        if not (found := properties.get(INCARNATION, "")).isdecimal():
            return STOCK
        try:
            self._formats[topic] = EntryFormat(properties[FORMAT])
        except (KeyError, ValueError) as e:
            raise error("LOG_DAMAGED", f"the properties of {topic} do not say {e}") from e
        return int(found)

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
        # Pulsar's client, for stock topics, limits the entries that it fetches ahead only by number.
        of_size = QUEUE_BYTES * len(ledgers) // max(ledgers.size_bytes, 1)
        return await self._reader(topic, start, max(2, min(MAX_QUEUE_ENTRIES, of_size)))

    async def _reader(self, topic: str, start: MessageId, queue_entries: int) -> ReadsEntries:
        if (entry_format := self._formats.get(topic)) is not None:
            return await open_reader(self._brokers, topic, start, entry_format)
        return await open_client_reader(self._client, topic, start, queue_entries)

    async def open_stock_reader(self, topic: str, start: MessageId) -> ReadsEntries:
        """Return a reader of the entries themselves, of a topic that no sidecar writes."""
        return await open_reader(self._brokers, topic, start, None)

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
