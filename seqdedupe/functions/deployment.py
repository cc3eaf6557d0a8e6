"""The settings of a function in its `userConfig`, and the checks of the function's deployment."""

import difflib
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name

logger = logging.getLogger("seqdedupe.functions")

GUARANTEES = ("ATLEAST_ONCE", "ATMOST_ONCE", "EFFECTIVELY_ONCE", "MANUAL")
"""Pulsar's `ProcessingGuarantees`, in the order of their numbers."""

IDENTITIES = ("message_id", "index")


@dataclass(frozen=True, kw_only=True)
class FunctionSettings:
    """The keys of `userConfig` that belong to the wrapper. All other keys belong to the wrapped function."""

    wrapped: str
    """The wrapped function: `module.Class`, or `module` with a `process(input)`."""
    sidecar_address: str = DEFAULT_ADDRESS
    """One address, or several addresses separated by commas, as for a client."""
    sidecar_token_file: str = ""
    """The path of the token's file, which must exist at each instance, like the TLS files below. If unset, the token
    comes from the environment."""
    sidecar_token_secret: str = ""
    """The name of the function's secret that contains the token, as an alternative to the file."""
    sidecar_tls_ca_file: str = ""
    sidecar_tls_certificate_file: str = ""
    sidecar_tls_key_file: str = ""
    output_topic: str = ""
    """The topic for the function's return values. If unset: the output topic of the deployment."""
    dead_letter_topic: str = ""
    """The topic for inputs on which the function fails. If unset, such an input ends the process."""
    max_message_retries: int = 3
    """How often a failing function is called again for the same input."""
    retry_delay_ms: int = 100
    """The delay between two calls."""
    identity: str = "message_id"
    """The identity of an input: `message_id` is Pulsar's message ID; `index` is the index that a sidecar assigned."""
    input_serde: str = ""
    """A class that converts the message's bytes to the function's input. If unset, the function receives the bytes."""
    output_serde: str = ""
    """A class that converts the function's output to bytes. If unset, bytes are not converted, and text and numbers are
    written as text."""
    max_in_flight_messages: int = 1000
    """The maximum number of inputs that wait for their outputs to settle."""
    max_in_flight_bytes: int = 16 * 1024 * 1024
    give_up_after_seconds: int = 600
    """The maximum time that an input may wait for its outputs. After this time the process ends, and its successor
    continues."""


_LEAST = {"max_message_retries": 0, "retry_delay_ms": 0}
"""The minimum of these settings. The minimum of all other numbers is 1."""


def _invalid(why: str, hint: str | None = None) -> SeqdedupeError:
    return error("INVALID_FUNCTION", why, hint=hint)


def settings_of(user_config: Mapping[str, Any]) -> FunctionSettings:
    """Return the settings in `userConfig`. Raises INVALID_FUNCTION, INVALID_ADDRESS, INVALID_TOPIC_NAME."""
    kinds = {item.name: type(item.default) if item.name != "wrapped" else str for item in fields(FunctionSettings)}
    values: dict[str, Any] = {}
    for key, value in user_config.items():
        if key in kinds:
            values[key] = _number(key, value, _LEAST.get(key, 1)) if kinds[key] is int else value
            if not isinstance(values[key], kinds[key]):
                raise _invalid(f"{key} is {value!r} in userConfig: text is needed")
        elif near := difflib.get_close_matches(key, kinds, 1, cutoff=0.8):
            logger.warning("%s in userConfig is taken for the function's own: do you mean %s?", key, near[0])
    if not values.get("wrapped"):
        raise _invalid("wrapped is required in userConfig: the function, as 'module.Class' or 'module'")
    settings = FunctionSettings(**values)
    if settings.identity not in IDENTITIES:
        raise _invalid(f"identity is {settings.identity!r}: it should be {' or '.join(IDENTITIES)}")
    Sidecars.parse(settings.sidecar_address)
    for topic in (settings.output_topic, settings.dead_letter_topic):
        if topic:
            topic_name(topic)
    return settings


def _number(key: str, value: object, least: int) -> int:
    """Return an integer from `userConfig`, in which all numbers may be floats. Raises INVALID_FUNCTION."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _invalid(f"{key} is {value!r} in userConfig: a whole number is needed, at least {least}")
    return operator.index(value)


def check_deployment(details: Any) -> None:
    """Check that the deployment of the function fits the wrapper. `details` are Pulsar's `FunctionDetails`.

    Raises INVALID_FUNCTION, whose text names the settings to change. Shared subscriptions deliver messages out of
    order, and a watermark would then drop late messages as duplicates. So shared subscriptions are refused for both
    kinds of identity.
    """
    if (chosen := GUARANTEES[details.processingGuarantees]) != "MANUAL":
        raise _invalid(
            f"the function's processing guarantee is {chosen}: only MANUAL leaves it to the wrapper when an input is "
            "acknowledged",
            "Deploy it with processingGuarantees: MANUAL (--processing-guarantees MANUAL).",
        )
    if not details.retainOrdering:
        raise _invalid(
            "the function does not retain the order of its inputs: its subscription is not Failover, and messages that "
            "come late would be taken for duplicates, and lost",
            "Deploy it with retainOrdering: true (--retain-ordering).",
        )
    source, sink = details.source, details.sink
    if sink.serDeClassName or sink.schemaType:
        raise _invalid(
            f"the function is deployed with {sink.serDeClassName or sink.schemaType} for its outputs, which are not "
            "published by Pulsar's runtime",
            "Deploy it without output SerDe and schema, and name a SerDe as output_serde in userConfig.",
        )
    if source.timeoutMs:
        raise _invalid(
            f"the function has an ack timeout of {source.timeoutMs} ms: inputs that wait for their outputs come again "
            "then, out of order",
            "Deploy it without timeoutMs (--timeout-ms).",
        )
    if source.topicsToSerDeClassName and any(source.topicsToSerDeClassName.values()):
        raise _serde("an input SerDe")
    for topic, spec in source.inputSpecs.items():
        if topic.startswith("non-persistent:"):
            raise _invalid(
                f"{topic} is not persistent: its messages never come again, and nothing tells one from another",
                "Take the input from a persistent topic.",
            )
        if spec.isRegexPattern:
            raise _invalid(f"{topic} is a pattern of topics", "Name each input topic.")
        if spec.serdeClassName:
            raise _serde(f"the SerDe {spec.serdeClassName} for {topic}")
        if spec.schemaType:
            raise _serde(f"the schema {spec.schemaType} for {topic}")


def _serde(what: str) -> SeqdedupeError:
    return _invalid(
        f"the function is deployed with {what}: one that fails loses the message before the wrapper sees it",
        "Deploy it without, and name the SerDe as input_serde in userConfig.",
    )
