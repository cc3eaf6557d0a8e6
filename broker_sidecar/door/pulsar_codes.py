"""The error codes and texts that tell a stock client the reason of a refusal."""

from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandProducer, ServerError

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
"""Pulsar's codes for reasons. The code for any other reason is ServiceNotReady if a retry helps, and otherwise
NotAllowedError."""


def code_of(e: SeqdedupeError) -> Any:
    """Return Pulsar's code for an error."""
    if (code := _CODES.get(e.reason)) is not None:
        return code
    return ServerError.ServiceNotReady if e.retry_delay_ms >= 0 else ServerError.NotAllowedError


def lookup_code_of(e: SeqdedupeError) -> Any:
    """Return the code for a failed lookup. After ServiceNotReady, a client ends the connection with all producers of
    the connection."""
    code = code_of(e)
    return ServerError.MetadataError if code == ServerError.ServiceNotReady else code


def ending_code_of(e: SeqdedupeError) -> Any:
    """Return the code for a producer that was open before. After NotAllowedError, the Java and Go clients would retry
    forever."""
    code = code_of(e)
    return ServerError.ProducerFenced if code == ServerError.NotAllowedError else code


def told(e: SeqdedupeError) -> str:
    """Return the text for a client."""
    return f"{e.message} [{e.reason}] {e.hint}"


def not_taken(field: str, *, is_own_log: bool) -> SeqdedupeError:
    """Return the error for a command that the door does not accept. `field` is the name of the command's field."""
    hint = "Set pulsar.serve_consumers = true. Or let consumers and readers use the brokers' own URL."
    if is_own_log:
        hint = "Consumers of the types Exclusive and Failover, and readers, can name the topics that they read."
    return error("INVALID_REQUEST", f"the door does not take the command {field}", hint=hint)


def check_options(command: CommandProducer) -> None:
    """Raise INVALID_REQUEST for a producer with options that the door does not support."""
    if command.txn_enabled:
        what, hint = "takes part in transactions", "Publish outside of transactions."
    elif command.encrypted:
        what, hint = "encrypts its messages", "Turn off encryption: the door must see the sequence IDs."
    elif command.initial_subscription_name:
        what, hint = "creates a subscription", "Create the subscription at the brokers."
    else:
        return
    raise error("INVALID_REQUEST", f"the producer {what}, which the door does not support", hint=hint)
