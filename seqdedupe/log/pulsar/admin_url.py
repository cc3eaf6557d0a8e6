"""The sidecar's requests to a Pulsar cluster, in addition to messages: topics, their writers, and their policies."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_plus, urljoin, urlsplit

from seqdedupe.errors import ConfigurationError, InvalidRequestError, NotFoundError, SeqdedupeError, error
from seqdedupe.log.pulsar.ledgers import Ledger, Ledgers
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.names import whole_of

# -- Calls of Pulsar's admin URL: JSON in, JSON out. Each call has a time limit, and each failure a reason.

TIMEOUT_SECONDS = 30.0
MAX_REDIRECTS = 5
"""A cluster redirects a call to the broker that has the topic: once, or twice while topics move."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""More than the names of half a million topics."""

JSON = "application/json"

_CHUNK_BYTES = 64 * 1024
_CHARACTERS_SHOWN = 300
_REDIRECTS = (301, 302, 307, 308)
_PASSING = (408, 409, 429)
"""Statuses, in addition to 500 and above, whose answer may differ the next time."""
_TITLE = re.compile(r"<title>([^<]+)")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class AdminAnswer(NamedTuple):
    status: int
    raw: bytes
    headers: Mapping[str, str] = {}
    """The headers by their names in lower case."""

    @property
    def why(self) -> str:
        """Pulsar's explanation of a failure, for a person."""
        try:
            said = json.loads(self.raw)["reason"]
        except (ValueError, KeyError, TypeError):
            text = self.raw.decode(errors="replace")
            # Some answers are a page for a browser.
            title = _TITLE.search(text)
            said = title[1] if title else text
        return " ".join(str(said).split())[:_CHARACTERS_SHOWN] or "without a word"


class AdminUrl:
    """Calls paths below an admin URL, such as `http://pulsar:8080`, each in a thread and on a separate connection."""

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        pause_seconds: float = 0.0,
    ) -> None:
        """Make the object. `token` is called for every request, so the token may change. No error ever contains a part
        of the token. Two calls begin at least `pause_seconds` apart.

        Raises INVALID_CONFIGURATION if the URL is not an HTTP URL.
        """
        self._url = url.rstrip("/")
        self._token = token
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = pause_seconds
        self._next_seconds = 0.0
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise error(
                "INVALID_CONFIGURATION",
                "pulsar.admin_url should be like http://host:8080 or https://host:8443, without a user",
            )

    async def get(self, path: str) -> Any:
        """Return the answer of a GET request for the path; None if the answer is empty. Raises the errors of `call`,
        with LOG_UNREADABLE for temporary failures."""
        answer = await self.call("GET", path)
        if not answer.raw.strip():
            return None
        try:
            return json.loads(answer.raw)
        except ValueError as e:
            raise error("PULSAR_REFUSES", f"GET {path} of pulsar.admin_url is not answered in JSON") from e

    async def call(
        self, method: str, path: str, body: object = None, conflict: str = "LOG_REFUSED", media_type: str = JSON
    ) -> AdminAnswer:
        """Return the answer of a successful call, after all redirects in the cluster. `media_type` is the type of the
        body.

        Raises TOPIC_NOT_FOUND (404), `conflict` (409), TOPIC_IN_USE (412), PULSAR_FORBIDS (401, 403), PULSAR_REFUSES
        (other permanent refusals), LOG_REFUSED (500 and above, or no answer in time; for GET LOG_UNREADABLE). A call
        without an answer may have been carried out.
        """
        if self._pause_seconds:
            now = time.monotonic()
            begins = max(now, self._next_seconds)
            self._next_seconds = begins + self._pause_seconds
            await asyncio.sleep(begins - now)
        try:
            answer = await asyncio.to_thread(self._call, method, path, body, media_type)
        except (OSError, HTTPException, ValueError) as e:
            raise _unavailable(method, path, str(e) or type(e).__name__) from e
        if answer.status >= 300:
            raise _refusal(method, path, answer, conflict)
        return answer

    def _call(self, method: str, path: str, body: object, media_type: str) -> AdminAnswer:
        limit = time.monotonic() + self._timeout_seconds
        url = f"{self._url}/admin/v2/{path}"
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Accept": JSON} | ({"Content-Type": media_type} if raw is not None else {})
        for _ in range(1 + MAX_REDIRECTS):
            with HttpConnection(url, self._tls, limit) as connection:
                answer, location = connection.call(method, raw, headers | self._authorization())
            if answer.status not in _REDIRECTS or not location:
                return answer
            onward = urljoin(url, location)
            if urlsplit(onward).scheme != urlsplit(url).scheme:
                # A redirect never makes the client send a token over an unencrypted connection.
                raise HTTPException("sent on from https to http, or the other way")
            url = onward
        raise HTTPException(f"sent on more than {MAX_REDIRECTS} times")

    def _authorization(self) -> dict[str, str]:
        if self._token is None:
            return {}
        token = self._token().strip()
        if not _TOKEN.fullmatch(token):
            # The error of another check would show the token.
            raise error(
                "INVALID_CONFIGURATION", "the token for Pulsar is empty, or has characters that a token cannot have"
            )
        return {"Authorization": f"Bearer {token}"}


class HttpConnection:
    """A connection for one call, with a time limit by `time.monotonic()`. Raises OSError, HTTPException, ValueError."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, limit: float) -> None:
        parts = urlsplit(url)
        self._target = parts.path + (f"?{parts.query}" if parts.query else "")
        self._limit = limit
        host, timeout = parts.hostname or "", self._left()
        self._connection: HTTPConnection = (
            HTTPSConnection(host, parts.port, timeout=timeout, context=tls)
            if parts.scheme == "https"
            else HTTPConnection(host, parts.port, timeout=timeout)
        )

    def __enter__(self) -> "HttpConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def call(self, method: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[AdminAnswer, str | None]:
        """Return the answer, and the target of its redirect."""
        self._connection.request(method, self._target, body, dict(headers))
        with self._connection.getresponse() as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return AdminAnswer(response.status, self._read(response), headers), headers.get("location")

    def _read(self, response: HTTPResponse) -> bytes:
        read = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            read += chunk
            if len(read) > MAX_ANSWER_BYTES:
                raise HTTPException(f"answered with more than {MAX_ANSWER_BYTES} bytes")
            self._left()
        if response.length:
            raise HTTPException(f"the answer ends {response.length} bytes too early")
        return bytes(read)

    def _left(self) -> float:
        left = self._limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


def _unavailable(method: str, path: str, why: str) -> SeqdedupeError:
    return error(
        "LOG_UNREADABLE" if method == "GET" else "LOG_REFUSED",
        f"{method} {path} of pulsar.admin_url: {why}",
        hint="See whether the Pulsar cluster serves, and whether pulsar.admin_url is right; it is tried again.",
    )


def _refusal(method: str, path: str, answer: AdminAnswer, conflict: str) -> SeqdedupeError:
    what = f"{method} {path} of pulsar.admin_url: {answer.status}, {answer.why}"
    if answer.status == 409 and conflict != "LOG_REFUSED":
        return error(conflict, what)
    if answer.status >= 500 or answer.status in _PASSING:
        return _unavailable(method, path, f"{answer.status}, {answer.why}")
    if answer.status in (401, 403):
        return error("PULSAR_FORBIDS", what)
    if answer.status == 404:
        return error("TOPIC_NOT_FOUND", what)
    if answer.status == 412:
        return error("TOPIC_IN_USE", what, hint="Close the topic's producers and consumers first.")
    return error("PULSAR_REFUSES", what)


class ConnectedProducer(NamedTuple):
    """A producer that is connected to a topic."""

    name: str
    metadata: dict[str, str]
    """The properties that it was opened with."""


class Subscription(NamedTuple):
    """A subscription of a topic."""

    name: str
    properties: dict[str, str]
    backlog_entries: int
    """The number of entries that it keeps."""
    backlog_bytes: int
    consumers: int
    """The number of connected consumers."""


class TopicStats(NamedTuple):
    """The present statistics of a topic, from its broker."""

    publishers: tuple[ConnectedProducer, ...]
    waiting_publishers: int
    """Producers that wait to be the exclusive one."""
    subscriptions: tuple[Subscription, ...] = ()
    replicated_to: tuple[str, ...] = ()
    """The other clusters that have the topic."""


class Partitioned(NamedTuple):
    """Pulsar's information about a partitioned topic."""

    partitions: int
    """The present number of partitions; 0 if it is not partitioned."""
    properties: dict[str, str]


class StoredBefore(NamedTuple):
    """What a topic has had so far."""

    last: MessageId
    """Its last entry."""
    numbers: dict[str, int]
    """The highest sequence ID of each producer by the broker's own deduplication, without the newest entries; empty if
    that is off."""
    ledgers: Ledgers = Ledgers(())
    """Its ledgers."""


class Storage(NamedTuple):
    """The stored entries of a topic, and the entries it keeps for a subscription."""

    ledgers: Ledgers
    first_ledger: int
    """The oldest ledger left; it may have no entry."""
    let_go: MessageId | None
    """The last entry that the subscription does not need any more, -1 before a ledger's first one; None if there is no
    such subscription."""


_OF_DEDUPLICATION = "pulsar.dedup"
"""The cursor of the broker's own deduplication."""
_PARTITIONED = "application/vnd.partitioned-topic-metadata+json"
"""In this form properties go with the number of partitions."""


class PulsarAdmin:
    """The admin calls that the log needs. All raise the errors of `AdminUrl.call`.

    Topics are given by their full names; a partition is a topic, `…-partition-0`.
    """

    def __init__(self, url: AdminUrl) -> None:
        self._url = url

    async def create_topic(self, topic: str, properties: Mapping[str, str]) -> None:
        """Make a topic that is not partitioned, with these properties. Raises TOPIC_EXISTS."""
        await self._url.call("PUT", _path(topic), dict(properties), conflict="TOPIC_EXISTS")

    async def create_partitioned(self, topic: str, partitions: int, properties: Mapping[str, str]) -> None:
        """Make a partitioned topic with these properties in one step, and then its partitions without properties.

        Raises TOPIC_EXISTS, also if a topic with the name of a partition exists.
        """
        body = {"partitions": partitions, "properties": dict(properties)}
        await self._url.call("PUT", f"{_path(topic)}/partitions", body, "TOPIC_EXISTS", _PARTITIONED)

    async def partitioned(self, topic: str) -> Partitioned:
        """Return Pulsar's information about a partitioned topic. Raises TOPIC_NOT_FOUND."""
        path = f"{_path(topic)}/partitions"
        answer = await self._url.get(path)
        try:
            return Partitioned(int(answer["partitions"]), _texts(answer.get("properties") or {}, path))
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def partitions(self, topic: str) -> int:
        """Return the number of a topic's partitions; 0 for a topic without partitions, or that does not exist."""
        try:
            return (await self.partitioned(topic)).partitions
        except NotFoundError:
            return 0

    async def set_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Set properties of a topic, partitioned or not; its other properties stay."""
        await self._url.call("PUT", f"{_path(topic)}/properties", dict(properties))

    async def delete_partitioned(self, topic: str) -> None:
        """Delete a partitioned topic with all its partitions, their messages and subscriptions.

        Raises TOPIC_NOT_FOUND, TOPIC_IN_USE if a client is connected to a partition. After TOPIC_IN_USE, other
        partitions may already be deleted.
        """
        await self._url.call("DELETE", f"{_path(topic)}/partitions")

    async def create_subscription(self, topic: str, name: str) -> None:
        """Make a durable subscription at the first stored message. If a subscription with this name exists, do not move
        it."""
        path = f"{_path(topic)}/subscription/{quote(name, safe='')}"
        try:
            await self._url.call("PUT", path, {"ledgerId": -1, "entryId": -1}, conflict="TOPIC_EXISTS")
        except InvalidRequestError as e:
            if e.reason != "TOPIC_EXISTS":
                raise

    async def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Set the properties of a subscription, which other sidecars read. Raises TOPIC_NOT_FOUND if the topic or the
        subscription does not exist."""
        await self._url.call("PUT", f"{_path(topic)}/subscription/{quote(name, safe='')}/properties", dict(properties))

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription. Raises TOPIC_NOT_FOUND if the topic or the subscription does not exist, TOPIC_IN_USE
        if a client consumes with the subscription."""
        await self._url.call("DELETE", f"{_path(topic)}/subscription/{quote(name, safe='')}")

    async def keep_from(self, topic: str, name: str, message_id: MessageId) -> None:
        """Move a durable subscription: Pulsar keeps this entry for it, and all later ones."""
        place = {"ledgerId": message_id.ledger_id, "entryId": message_id.entry_id, "partitionIndex": -1}
        await self._url.call("POST", f"{_path(topic)}/subscription/{quote(name, safe='')}/resetcursor", place)

    async def first_ledger(self, topic: str) -> int:
        """Return the topic's first stored ledger. The broker loads the topic for this request."""
        path = f"{_path(topic)}/internalStats"
        answer = await self._url.get(path)
        try:
            return int(answer["ledgers"][0]["ledgerId"])
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages and subscriptions. Raises TOPIC_NOT_FOUND, TOPIC_IN_USE if a client is
        connected to the topic."""
        await self._url.call("DELETE", _path(topic))

    async def topics(self, namespace: str) -> list[str]:
        """Return the full names of all topics of a namespace, `tenant/namespace`, each partition separately. Raises an
        error if the list would be incomplete: INVALID_NAMESPACE if the namespace does not exist."""
        return await self._names(f"persistent/{namespace}", namespace)

    async def partitioned_topics(self, namespace: str) -> list[str]:
        """Return the full names of all partitioned topics of a namespace. Raises as `topics`."""
        return await self._names(f"persistent/{namespace}/partitioned", namespace)

    async def _names(self, path: str, namespace: str) -> list[str]:
        try:
            names = await self._url.get(path)
        except NotFoundError as e:
            raise error(
                "INVALID_NAMESPACE",
                f"Pulsar has no namespace {namespace}",
                hint=f"Is the name mistyped? Or create it: pulsar-admin namespaces create {namespace}",
            ) from e
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _not_pulsar(path)
        return names

    async def properties(self, topic: str) -> dict[str, str]:
        """Return the properties of a topic itself."""
        path = f"{_path(topic)}/properties"
        return _texts(await self._url.get(path) or {}, path)

    async def stats(self, topic: str) -> TopicStats:
        """Return the producers and subscriptions of a topic. The broker loads the topic for this request."""
        path = f"{_path(topic)}/stats"
        answer = await self._url.get(path)
        try:
            return TopicStats(
                tuple(
                    ConnectedProducer(str(p["producerName"]), _texts(p["metadata"], path)) for p in answer["publishers"]
                ),
                int(answer["waitingPublishers"]),
                tuple(_subscription(name, one, path) for name, one in answer["subscriptions"].items()),
                tuple(answer.get("replication") or ()),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def upload_schema(self, topic: str, kind: str, definition: str, properties: Mapping[str, str]) -> int:
        """Add a version to a topic's schema, and return the version's number. If an equal version exists, return its
        number.

        Raises INVALID_REQUEST for a schema that Pulsar refuses, or that is not compatible with the topic's schema.
        """
        body = {"type": kind, "schema": definition, "properties": dict(properties)}
        try:
            answer = await self._url.call("POST", _schema_path(topic), body, conflict="INVALID_REQUEST")
        except InvalidRequestError as e:
            if e.reason != "INVALID_REQUEST":
                raise
            hint = "Change the schema, or the topic's schema compatibility strategy in Pulsar."
            why = f"the schema is not compatible with the schema that {topic} has in Pulsar"
            raise error("INVALID_REQUEST", why, hint=hint) from e
        except ConfigurationError as e:
            if e.reason != "PULSAR_REFUSES":
                raise
            raise error("INVALID_REQUEST", f"schema: {e.message}") from e
        try:
            return int(json.loads(answer.raw)["version"]["version"])
        except (ValueError, KeyError, TypeError) as e:
            raise _not_pulsar(_schema_path(topic)) from e

    async def schema(self, topic: str) -> tuple[str, str, int]:
        """Return type, definition and version of a topic's newest schema. Raises TOPIC_NOT_FOUND if the topic has no
        schema."""
        path = _schema_path(topic)
        answer = await self._url.get(path)
        try:
            return str(answer["type"]), str(answer["data"]), int(answer["version"])
        except (KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def ledgers(self, topic: str) -> Ledgers:
        """Return the ledgers of a topic, up to the last entry. The broker loads the topic for this request."""
        path = f"{_path(topic)}/internalStats"
        return _ledgers(await self._url.get(path), path)

    async def storage(self, topic: str, subscription: str) -> Storage:
        """Return the ledgers, and the position of a subscription."""
        path = f"{_path(topic)}/internalStats"
        answer = await self._url.get(path)
        ledgers = _ledgers(answer, path)
        try:
            # Pulsar writes the names of cursors in the encoding of URLs.
            cursors = {unquote_plus(name): cursor["markDeletePosition"] for name, cursor in answer["cursors"].items()}
            let_go = entry_in(cursors[subscription]) if subscription in cursors else None
            return Storage(ledgers, int(answer["ledgers"][0]["ledgerId"]), let_go)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
            raise _not_pulsar(path) from e

    async def is_terminated(self, topic: str) -> bool:
        """Return whether a topic is terminated: it never accepts messages again. The broker loads the topic for this
        request."""
        path = f"{_path(topic)}/internalStats"
        answer = await self._url.get(path)
        try:
            return bool(answer["state"] == "Terminated")
        except (KeyError, TypeError) as e:
            raise _not_pulsar(path) from e

    async def entry(self, topic: str, entry: MessageId) -> AdminAnswer:
        """Return an entry's payload, and the broker's information about the entry as headers `x-pulsar-…`, even if the
        broker sends the entry to no reader.

        Raises TOPIC_NOT_FOUND, also if the entry does not exist.
        """
        return await self._url.call("GET", f"{_path(topic)}/ledger/{entry.ledger_id}/entry/{entry.entry_id}")

    async def end_after(self, topic: str, after: MessageId) -> MessageId | None:
        """Return the topic's last entry if no reader gets an entry after the given one; otherwise None."""
        ledgers = await self.ledgers(topic)
        last = ledgers.ordinal(after)
        for at in range(0 if last is None else last + 1, len(ledgers)):
            if not _is_hidden((await self.entry(topic, ledgers.message_id(at))).headers):
                return None
        return ledgers.message_id(len(ledgers) - 1) if len(ledgers) else None

    async def first_since(self, topic: str, publish_time_ms: int) -> MessageId:
        """Return the first entry published at that time or later; if no such entry exists, the place of the next
        entry."""
        path = f"{_path(topic)}/messageid/{publish_time_ms}"
        answer = await self._url.get(path)
        try:
            return MessageId(int(answer["ledgerId"]), int(answer["entryId"]))
        except (KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def stored_before(self, topic: str) -> StoredBefore:
        """Return the topic's last entry, and the sequence IDs in Pulsar's deduplication cursor. If deduplication is on,
        these IDs cover all trimmed entries, because the cursor retains all other entries. The broker loads the topic
        for this request."""
        path = f"{_path(topic)}/internalStats"
        answer = await self._url.get(path)
        try:
            cursor = answer["cursors"].get(_OF_DEDUPLICATION) or {}
            numbers = {str(name): int(number) for name, number in (cursor.get("properties") or {}).items()}
            return StoredBefore(entry_in(answer["lastConfirmedEntry"]), numbers, _ledgers(answer, path))
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def has_had_entries(self, topic: str, since: MessageId = NOWHERE) -> bool:
        """Return whether the topic's last entry or one of its cursors shows that the topic had entries after this
        place."""
        path = f"{_path(topic)}/internalStats"
        answer = await self._url.get(path)
        try:
            cursors = [cursor["markDeletePosition"] for cursor in answer["cursors"].values()]
            places = [entry_in(text) for text in [answer["lastConfirmedEntry"], *cursors]]
            return any(place.entry_id >= 0 and place > since for place in places)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise _not_pulsar(path) from e

    async def unload(self, topic: str) -> None:
        """Unload the topic, so that a broker loads it again. All producers and readers must reconnect; frozen ones lose
        the topic."""
        await self._url.call("PUT", f"{_path(topic)}/unload")

    async def policy(self, topic: str, name: str) -> Any:
        """Return the policy of this name in force for a topic, no matter where it was set."""
        return await self._url.get(f"{_path(topic)}/{name}?applied=true")

    async def namespace_policy(self, namespace: str, name: str) -> Any:
        """Return the policy of this name that is set for a namespace."""
        return await self._url.get(f"namespaces/{namespace}/{name}")

    async def set_policy(self, topic: str, name: str, value: object) -> None:
        """Set a policy of the topic itself. It is in force soon after."""
        await self._url.call("POST", f"{_path(topic)}/{name}", value)

    async def subscription_expiration_minutes(self, namespace: str) -> int | None:
        """Return the time after which Pulsar removes unused subscriptions of a namespace: 0 is never, None is not
        set."""
        path = f"namespaces/{namespace}/subscriptionExpirationTime"
        minutes = await self._url.get(path)
        if minutes is not None and not isinstance(minutes, int):
            raise _not_pulsar(path)
        return minutes

    async def broker_keys(self) -> dict[str, str]:
        """Return the configuration of a broker. Needs the permissions of a superuser."""
        path = "brokers/configuration/runtime"
        return _texts(await self._url.get(path), path)


def _schema_path(topic: str) -> str:
    """Return the path of a topic's schema. Partitions have the schema of their topic."""
    return f"schemas/{_path(whole_of(topic) or topic).partition('/')[2]}/schema"


def _path(topic: str) -> str:
    domain, _, name = topic.partition("://")
    tenant, namespace, local = name.split("/", 2)
    return f"{domain}/{tenant}/{namespace}/{quote(local, safe='')}"


def entry_in(text: str) -> MessageId:
    """Return the entry in a text `ledger:entry`, in which -1 is none. Raises ValueError."""
    ledger, _, entry = text.partition(":")
    return MessageId(int(ledger), int(entry))


def _subscription(name: str, answer: Any, path: str) -> Subscription:
    properties = _texts(answer["subscriptionProperties"], path)
    return Subscription(
        name, properties, int(answer["msgBacklog"]), int(answer["backlogSize"]), len(answer["consumers"])
    )


def _is_hidden(headers: Mapping[str, str]) -> bool:
    """Return whether a broker gives an entry to no reader: it is Pulsar's own, of an aborted transaction, or a batch
    without messages."""
    return (
        "x-pulsar-marker-type" in headers
        or headers.get("x-pulsar-txn-aborted") == "true"
        or headers.get("x-pulsar-num-batch-message") == "0"
    )


def _ledgers(answer: Any, path: str) -> Ledgers:
    try:
        # The listed numbers of the ledger that is being written are not up to date.
        last_ledger, last_entry, _ = entry_in(answer["lastConfirmedEntry"])
        written = int(answer["currentLedgerSize"])
        listed = [(int(one["ledgerId"]), int(one["entries"]), int(one["size"])) for one in answer["ledgers"]]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _not_pulsar(path) from e
    return Ledgers(
        [
            Ledger(ledger_id, last_entry + 1 if ledger_id == last_ledger else entries, size or written)
            for ledger_id, entries, size in listed
            if ledger_id <= last_ledger
        ]
    )


def _texts(answer: object, path: str) -> dict[str, str]:
    if not isinstance(answer, dict):
        raise _not_pulsar(path)
    return {str(name): str(value) for name, value in answer.items()}


def _not_pulsar(path: str) -> SeqdedupeError:
    return error("PULSAR_REFUSES", f"GET {path} of pulsar.admin_url is not answered as Pulsar does")
