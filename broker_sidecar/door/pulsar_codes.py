"""The codes and words in which a stock client learns why something was refused."""

from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import ServerError

_CODES = {
    "CONSUMER_BUSY": ServerError.ConsumerBusy,
    "CURSOR_MOVED": ServerError.ServiceNotReady,
    "FENCED": ServerError.ProducerFenced,
    "INVALID_TOPIC_NAME": ServerError.InvalidTopicName,
    "LOG_DAMAGED": ServerError.PersistenceError,
    "NOT_ALLOWED": ServerError.AuthorizationError,
    "PRODUCER_BUSY": ServerError.ProducerBusy,
    "PULSAR_FORBIDS": ServerError.AuthorizationError,
    "TOKEN_EXPIRED": ServerError.AuthenticationError,
    "TOPIC_NOT_FOUND": ServerError.TopicNotFound,
    "TOPIC_TERMINATED": ServerError.TopicTerminatedError,
    "UNAUTHENTICATED": ServerError.AuthenticationError,
}
"""Pulsar's codes for reasons. Other reasons are ServiceNotReady if trying again helps, else NotAllowedError."""


def code_of(e: SeqdedupeError) -> Any:
    """Return Pulsar's code for an error."""
    if (code := _CODES.get(e.reason)) is not None:
        return code
    return ServerError.ServiceNotReady if e.retry_delay_ms >= 0 else ServerError.NotAllowedError


def lookup_code_of(e: SeqdedupeError) -> Any:
    """Return the code for a failed lookup. At ServiceNotReady a client ends the connection with all its producers."""
    code = code_of(e)
    return ServerError.MetadataError if code == ServerError.ServiceNotReady else code


def ending_code_of(e: SeqdedupeError) -> Any:
    """Return the code for a producer that was open before. After NotAllowedError, Java and Go try again for ever."""
    code = code_of(e)
    return ServerError.ProducerFenced if code == ServerError.NotAllowedError else code


def told(e: SeqdedupeError) -> str:
    """Return the text for a client."""
    return f"{e.message} [{e.reason}] {e.hint}"


def not_taken(field: str, *, is_own_log: bool) -> SeqdedupeError:
    """Return the error for a command that the door does not take, by its field."""
    hint = "Set pulsar.serve_consumers = true. Or let consumers and readers use the brokers' own URL."
    if is_own_log:
        hint = "Consumers of the types Exclusive and Failover, and readers, can name the topics that they read."
    return error("INVALID_REQUEST", f"the door does not take the command {field}", hint=hint)
