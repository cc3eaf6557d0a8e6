"""The demo's flights as inputs of a function, and the results as a stock consumer has them."""

import heapq
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pulsar

from demo.flights import ORIGINS, departures
from examples.pulsar.messages import Topic
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.pulsar.owners import quiet

LIMIT_SECONDS = LAST_RESORT_SECONDS
"""For everything that is waited for."""
LOOK_SECONDS = 0.05
MAX_BATCH_ROWS = 500
MAX_BATCH_BYTES = 1 << 20
MAX_DELAY_MS = 60_000
"""A batch is sent when it is full, or by a flush."""


class Given(NamedTuple):
    """A flight as an input."""

    key: str
    payload: bytes
    fields: dict[str, Any]


class Result(NamedTuple):
    """An output, with the key of its input."""

    key: str
    text: str


def flights(count: int) -> list[Given]:
    """The demo's first ones, in the order of its file."""
    found = []
    for number, fields in heapq.merge(*(departures(origin, count) for origin in ORIGINS), key=lambda each: each[0]):
        flight: dict[str, Any] = {"number": number} | fields
        found.append(Given(fields["tailnum"] or "none", json.dumps(flight).encode(), flight))
    return found


def differences(found: Sequence[Result], expected: Sequence[Result], *, by_key: bool = False) -> Counter[str]:
    """What is wrong with results; nothing if they are those that are expected, in order, or in that of each key."""
    have, want = Counter(found), Counter(expected)
    wrong = Counter({"missing": (want - have).total(), "too many": (have - want).total()})
    if not +wrong:
        wrong["out of order"] = sum(
            mine != theirs for mine, theirs in zip(_orders(found, by_key), _orders(expected, by_key), strict=True)
        )
    return +wrong


def _orders(results: Iterable[Result], by_key: bool) -> list[list[str]]:
    orders = defaultdict[str, list[str]](list)
    for result in results:
        orders[result.key if by_key else ""].append(result.text)
    return [orders[key] for key in sorted(orders)]


def read(service_url: str, topic: str) -> list[Result]:
    """A topic as a consumer of Pulsar's own client has it: what counts of it (docs/internals/formats-pulsar.md)."""
    client = pulsar.Client(service_url, logger=quiet())
    try:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        state, found = Topic(), []
        while reader.has_message_available():
            message = reader.read_next(int(LIMIT_SECONDS * 1000))
            place = message.message_id()
            if state.counts(message.properties(), place.ledger_id(), place.entry_id()):
                found.append(Result(message.partition_key(), message.data().decode()))
        return found
    finally:
        client.close()


def give(service_url: str, topic: str, some: Sequence[Given], *, batched: bool) -> None:
    """Publishes flights by Pulsar's own client. Less than a MAX_BATCH_ROWS in batches are one entry."""
    client = pulsar.Client(service_url, logger=quiet())
    try:
        producer = _producer(client, topic, batched)
        for one in some:
            producer.send_async(one.payload, None, partition_key=one.key)
        producer.flush()
    finally:
        client.close()


def _producer(client: pulsar.Client, topic: str, batched: bool) -> Any:
    """A broker that was just started may need a while."""
    give_up_at = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return client.create_producer(
                topic,
                batching_enabled=batched,
                batching_max_messages=MAX_BATCH_ROWS,
                batching_max_allowed_size_in_bytes=MAX_BATCH_BYTES,
                batching_max_publish_delay_ms=MAX_DELAY_MS,
                block_if_queue_full=True,
                send_timeout_millis=0,
            )
        except pulsar.PulsarException:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(LOOK_SECONDS)
