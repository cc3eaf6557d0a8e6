"""Pulsar's client for event loops, whose readers are let go of."""

import asyncio
from functools import partial
from typing import Any

import _pulsar
import pulsar
import pulsar.asyncio


class PulsarClient(pulsar.asyncio.Client):  # type: ignore[misc]  # the library has no types
    """As Pulsar's own, but for `create_reader`, after which a closed reader and a closed client's threads and
    descriptors stay for good: a reader keeps the callback of its opening, and that one keeps the reader."""

    async def create_reader(
        self,
        topic: str,
        start_message_id: pulsar.MessageId,
        *,
        receiver_queue_size: int,
        start_message_id_inclusive: bool,
    ) -> pulsar.asyncio.Reader:
        """A reader of bytes from there on, with so many entries fetched ahead. Raises PulsarException."""
        schema = pulsar.schema.BytesSchema()
        settings = _pulsar.ReaderConfiguration()
        settings.schema(schema.schema_info())
        settings.receiver_queue_size(receiver_queue_size)
        settings.start_message_id_inclusive(start_message_id_inclusive)
        # `earliest` and `latest` are of the library below.
        is_own = isinstance(start_message_id, pulsar.MessageId)
        start = start_message_id._msg_id if is_own else start_message_id
        reader = asyncio.get_running_loop().create_future()
        self._client.create_reader_async_v2(topic, start, settings, partial(_hand_over, [reader]))
        return pulsar.asyncio.Reader(await reader, schema)


_LATER_RESULTS = {46: "Disconnected"}
"""Results of the client that its Python library has no names for."""


def name_of(result: Any) -> str:
    """What a result of the client is called."""
    if result.name in pulsar.Result.__members__:
        return str(result.name)
    return _LATER_RESULTS.get(result.value, f"result {result.value}")


def told(failure: pulsar.asyncio.PulsarException) -> str:
    """What the client says of a failure."""
    name = name_of(failure.error())
    more = str(failure).partition(": ")[2]
    return f"{name}: {more}" if more else name


def _hand_over(waiting: "list[asyncio.Future[Any]]", outcome: Any) -> None:
    """Is called on a thread of the client, once, and keeps nothing of what it is given."""
    future = waiting.pop()
    future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, _pulsar.Error):
        future.set_exception(pulsar.asyncio.PulsarException(outcome.error, outcome.message))
    else:
        future.set_result(outcome)
