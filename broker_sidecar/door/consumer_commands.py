"""The commands of consumers and readers on one connection."""

import logging
from typing import Any

from broker_sidecar.door.pulsar_codes import code_of
from broker_sidecar.door.stock_consumer import Reach, StockClient, StockConsumer
from broker_sidecar.streams import unasked
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandAck,
    CommandAckResponse,
    CommandCloseConsumer,
    CommandSubscribe,
    CommandSuccess,
    Schema,
)

logger = logging.getLogger("broker_sidecar.door")

COMMANDS = frozenset(
    {
        "subscribe",
        "flow",
        "ack",
        "redeliverUnacknowledgedMessages",
        "seek",
        "getLastMessageId",
        "unsubscribe",
        "close_consumer",
    }
)
"""The fields of the commands that `Consumers` takes."""

MAX_CONSUMERS = 1_000
"""The most consumers of a connection."""

_NO_ENTRY = 2**64 - 1


class Consumers:
    """The consumers of one connection."""

    def __init__(self, client: StockClient, reach: Reach) -> None:
        self._client = client
        self._reach = reach
        self._all: dict[int, StockConsumer] = {}
        self._sought: dict[int, int] = {}
        """The indexes to which readers have sought. Such a reader subscribes again without stating the index."""
        self._refused: dict[int, SeqdedupeError] = {}
        """The reason why a consumer with this ID was ended permanently. It is the answer to the consumer's next
        SUBSCRIBE."""

    def __len__(self) -> int:
        return len(self._all)

    def take(self, field: str, command: Any) -> None:
        """Take one of COMMANDS."""
        consumer = self._all.get(command.consumer_id)
        match field:
            case "subscribe":
                self._subscribe(command)
            case "flow" if consumer is not None:
                consumer.give_permits(command.messagePermits)
            case "redeliverUnacknowledgedMessages" if consumer is not None:
                consumer.begin_again(command.consumer_epoch if command.HasField("consumer_epoch") else None)
            case "ack":
                self._acknowledge(consumer, command)
            case "close_consumer":
                self._sought.pop(command.consumer_id, None)
                self._refused.pop(command.consumer_id, None)
                self._client.start(self._close(consumer, command.request_id))
            case "seek" | "getLastMessageId" | "unsubscribe":
                self._client.start(self._ask(field, consumer, command))

    def stop(self) -> list[StockConsumer]:
        """Stop all consumers. Return the consumers that may not have ended yet."""
        consumers = list(self._all.values())
        for consumer in consumers:
            consumer.stop()
        return consumers

    def _subscribe(self, command: CommandSubscribe) -> None:
        consumer_id = command.consumer_id
        try:
            if (final := self._refused.pop(consumer_id, None)) is not None:
                raise final
            full = topic_name(command.topic)
            _check(command)
            before = self._all.get(consumer_id)
            if before is None and len(self._all) + len(self._refused) >= MAX_CONSUMERS:
                raise error("QUEUE_FULL", f"the connection has {MAX_CONSUMERS} consumers: that is the limit")
        except SeqdedupeError as e:
            self._client.say_error(command.request_id, e)
            return
        consumer = self._all[consumer_id] = StockConsumer(command, full, self._client, self._reach)
        consumer.start(before, self._sought.get(consumer_id), self._opened, self._ended)

    def _opened(self, consumer: StockConsumer) -> None:
        # Before this point the client may have to subscribe again.
        self._sought.pop(consumer.consumer_id, None)

    def _ended(self, consumer: StockConsumer, why: SeqdedupeError | None) -> None:
        """Forget a consumer that has ended. If the client does not know about the end, notify the client, which then
        subscribes again."""
        consumer_id = consumer.consumer_id
        if why is not None:
            logger.log(logging.INFO if _passes(why) else logging.WARNING, "a consumer has ended: %s", why)
            if not _passes(why):
                why.__traceback__ = why.__cause__ = why.__context__ = None
                self._refused[consumer_id] = why
            self._say_closed(consumer_id)
        unasked(self._forget(consumer))

    async def _forget(self, consumer: StockConsumer) -> None:
        await consumer.gone.wait()
        if self._all.get(consumer.consumer_id) is consumer:
            del self._all[consumer.consumer_id]

    def _say_closed(self, consumer_id: int) -> None:
        self._client.say("close_consumer", CommandCloseConsumer(consumer_id=consumer_id, request_id=_NO_ENTRY))

    def _acknowledge(self, consumer: StockConsumer | None, command: CommandAck) -> None:
        answer = CommandAckResponse(consumer_id=command.consumer_id, request_id=command.request_id)
        try:
            _there(consumer).acknowledge(command)
        except SeqdedupeError as e:
            logger.debug("an acknowledgement was refused: %s", e)
            answer.error, answer.message = code_of(e), e.message
        if command.HasField("request_id"):
            self._client.say("ackResponse", answer)

    async def _close(self, consumer: StockConsumer | None, request_id: int) -> None:
        if consumer is not None:
            consumer.stop()
            await consumer.gone.wait()
        self._client.say("success", CommandSuccess(request_id=request_id))

    async def _ask(self, field: str, found: StockConsumer | None, command: Any) -> None:
        try:
            consumer = _there(found)
            if field == "getLastMessageId":
                answer = consumer.last_message()
                answer.request_id = command.request_id
                self._client.say("getLastMessageIdResponse", answer)
                return
            if field == "unsubscribe":
                await consumer.remove_cursor()
                consumer.stop()
                await consumer.gone.wait()
            else:
                await self._seek(consumer, await consumer.place_to_seek(command))
        except SeqdedupeError as e:
            self._client.say_error(command.request_id, e)
        else:
            self._client.say("success", CommandSuccess(request_id=command.request_id))

    async def _seek(self, consumer: StockConsumer, index: int) -> None:
        """Make a subscription continue at this index.

        As at a broker, the consumer ends, and subscribes again. So messages that were sent before the seek cannot
        arrive after the seek.
        """
        # The consumer may have ended during the search for the place.
        _there(consumer)
        if not consumer.is_durable:
            self._sought[consumer.consumer_id] = index
        consumer.seek(index)
        self._say_closed(consumer.consumer_id)
        await consumer.gone.wait()
        if consumer.failed is not None:
            raise consumer.failed


def _check(command: CommandSubscribe) -> None:
    """Raise INVALID_REQUEST for a consumer with options that the door does not support."""
    schema = command.schema
    if command.subType not in (CommandSubscribe.Exclusive, CommandSubscribe.Failover):
        kind = "Key_Shared" if command.subType == CommandSubscribe.Key_Shared else "Shared"
        what, hint = f"has the type {kind}", "Use the type Exclusive or Failover."
    elif command.read_compacted:
        what, hint = "reads the compacted view", "Topics here are not compacted: read without it."
    elif command.HasField("schema") and schema.type not in map(Schema.Type.Value, ("None", "AutoConsume")):
        what, hint = "has a schema", "Read bytes, and decode them in the consumer: topics here have no schemas."
    else:
        return
    raise error("INVALID_REQUEST", f"the subscription {what}, which the door does not support", hint=hint)


def _there(consumer: StockConsumer | None) -> StockConsumer:
    if consumer is None or consumer.is_leaving:
        raise error("INVALID_REQUEST", "the connection has no such consumer")
    return consumer


def _passes(e: SeqdedupeError) -> bool:
    """Return whether a consumer that ended with this error can subscribe again."""
    return e.retry_delay_ms >= 0 or e.reason == "CURSOR_MOVED"
