"""A running instance of a function. It passes Pulsar's messages to the wrapped function, and the results to the
pipeline.

Begin with `FunctionInstance`, at the end. The parts before it are the credentials for the sidecar, the detection of
void entries, the context of the wrapped function, and the code that finds and calls the wrapped function.
"""

import importlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from seqdedupe.client.credentials import Credentials
from seqdedupe.client.route import Sidecars
from seqdedupe.entry_properties import BATCH, CONTROL, MARKER, EntryOwner, EntryPlace
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.functions import text_of, traceback_of
from seqdedupe.functions.deployment import FunctionSettings, check_deployment, settings_of
from seqdedupe.functions.identity import (
    Callback,
    FunctionOutput,
    InputIdentity,
    InputSource,
    by_index,
    by_message_id,
    check_fits,
    check_names,
)
from seqdedupe.functions.pipeline import Input, Pipeline, Process
from seqdedupe.message_id import MessageId
from seqdedupe.names import topic_name

# -- The credentials of a function for the sidecar: files, or a secret of Pulsar's secrets provider.


def credentials_of(settings: FunctionSettings, get_secret: Callable[[str], str | None]) -> Credentials:
    """Return credentials from userConfig. Values that are missing there come from the environment. The secret is read
    at each use.

    Raises INVALID_FUNCTION if the secret does not exist, INVALID_CREDENTIALS.
    """
    name = settings.sidecar_token_secret
    if name and get_secret(name) is None:
        raise error(
            "INVALID_FUNCTION",
            f"sidecar_token_secret is {name!r} in userConfig: the function was deployed without this secret",
        )
    return Credentials.from_environment(
        token=(lambda: get_secret(name) or "") if name else None,
        token_file=settings.sidecar_token_file,
        tls_ca_file=settings.sidecar_tls_ca_file,
        tls_certificate_file=settings.sidecar_tls_certificate_file,
        tls_key_file=settings.sidecar_tls_key_file,
    )


# -- The void entries of a sidecar's topic. docs/internals/formats-pulsar.md has the rule.


class Owners:
    """Tracks the owners of a topic or partition, to detect void entries.

    A void entry is an entry that an owner wrote after a newer owner had taken over, or after Pulsar had refused an
    earlier entry. The producer of a void entry received no success and sends the message again, so readers ignore the
    entry. A reader that starts among void entries cannot detect them. A missing entry number between two ledgers does
    not prove that an entry is void.
    """

    def __init__(self) -> None:
        self._last: EntryPlace | None = None
        """The last entry of the current owner before which no entry is missing."""
        self._since = self._at = -1, -1
        """The position of the current owner's first entry, and the highest position so far."""
        self._is_whole = False
        """Whether every position since the current owner's last entry was seen."""
        self._hole: tuple[EntryOwner, tuple[int, int]] | None = None
        """The owner that wrote the newest gap, and the position of the first entry after the gap."""

    def is_void(self, place: EntryPlace | None, ledger_id: int, entry_id: int) -> bool:
        """Return whether an entry is void. An entry without a place was not written by a sidecar. Entries must be
        passed in order; an entry may be passed again."""
        at, is_new = (ledger_id, entry_id), (ledger_id, entry_id) > self._at
        if is_new:
            self._is_whole = self._is_whole and ledger_id == self._at[0] and entry_id == self._at[1] + 1
            self._at = at
        if place is None:
            return False
        last = self._last
        if last is None or place.owner.incarnation != last.owner.incarnation or place.owner.term > last.owner.term:
            self._last, self._since, self._is_whole = place, at, True
            return False
        if self._hole is not None and place.owner == self._hole[0] and at >= self._hole[1]:
            return True
        if place.owner != last.owner:
            return at > self._since
        if is_new and place.number > last.number + 1 and self._is_whole:
            self._hole = place.owner, at
            return True
        if is_new:
            self._last, self._is_whole = max(last, place, key=lambda one: one.number), True
        return False


# -- The context of the wrapped function: Pulsar's context, except that published outputs are gathered.

Serialize = Callable[[Any], bytes]


def payload_of(serialize: Serialize, value: Any) -> bytes:
    """Return the bytes that a SerDe makes of a value. Raises the errors of the SerDe, and TypeError if the SerDe does
    not return bytes."""
    payload = serialize(value)
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"a SerDe has made {type(payload).__name__} of an output: bytes are needed")
    return bytes(payload)


class GatheringContext:
    """Pulsar's context of one input, with two changes: `publish` only collects outputs, and `ack` does nothing.

    `publish` raises at once for an output that cannot be accepted, and raises INVALID_REQUEST after `process` has
    returned. When the output is settled, its callback is called with `pulsar.Result.Ok` and None, in another thread.
    """

    def __init__(
        self, context: Any, source: InputSource, serialize_for: Callable[[str], Serialize], output_topic: str
    ) -> None:
        self._context = context
        self._source = source
        self._serialize_for = serialize_for
        self._output_topic = output_topic
        self._is_over = False
        self.outputs: list[FunctionOutput] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def publish(
        self,
        topic_name: str,
        message: Any,
        serde_class_name: str = "serde.IdentitySerDe",
        properties: Mapping[str, str] | None = None,
        compression_type: object = None,
        callback: Callback | None = None,
        message_conf: Mapping[str, Any] | None = None,
    ) -> None:
        """Gather an output. The parameters are the same as those of Pulsar's `publish`. The compression is ignored,
        because the sidecar chooses it."""
        if self._is_over:
            raise error("INVALID_REQUEST", "publish was called after process() had returned")
        conf = dict(message_conf or {})
        if properties:
            conf["properties"] = properties
        payload = payload_of(self._serialize_for(serde_class_name), message)
        self.outputs.append(self._source.output(topic_name, payload, conf, callback))

    def get_output_topic(self) -> str:
        """Return the topic for return values of `process`: `output_topic` of userConfig has priority."""
        return self._output_topic

    def ack(self, msgid: object, topic: str) -> None:
        """Do nothing: an input is acknowledged when its outputs are settled."""

    def end(self) -> None:
        """Record that `process` has returned."""
        self._is_over = True


# -- The wrapped function: it is found by name, called with the input that it expects, and its results become bytes.

_OF_PULSAR = "serde."
"""The prefix of Pulsar's own SerDes, an abbreviation of `pulsar.functions.serde`."""


def _invalid(what: str, e: BaseException) -> SeqdedupeError:
    return error("INVALID_FUNCTION", f"{what}: {type(e).__name__}: {e}")


def find(name: str) -> Any:
    """Return the module with this dotted name, or the object with this name in a module. Raises INVALID_FUNCTION."""
    if name.startswith(_OF_PULSAR):
        name = f"pulsar.functions.{name}"
    module, _, attribute = name.rpartition(".")
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            # If a different module is missing, it is a module that the found module imports.
            if not module or e.name != name:
                raise
            return getattr(importlib.import_module(module), attribute)
    except Exception as e:
        raise _invalid(f"{name} cannot be imported", e) from e


def _made(name: str) -> Any:
    """Return an object of the class with this name. If the name belongs to a module, return the module."""
    found = find(name)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as e:
        raise _invalid(f"{name}() has failed", e) from e


def as_bytes(value: Any) -> bytes:
    """Return bytes unchanged. Convert text and numbers as Pulsar's default SerDe does. Raises TypeError."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | int | float | complex):
        return str(value).encode()
    raise TypeError(f"an output is {type(value).__name__}: bytes, text or a number is needed, or output_serde")


class Wrapped:
    """The wrapped function with its SerDes. Raises INVALID_FUNCTION if the function is not found."""

    def __init__(self, settings: FunctionSettings, output_topic: str) -> None:
        self._output_topic = output_topic
        function = _made(settings.wrapped)
        process: Callable[..., Any] | None = getattr(function, "process", None)
        if not callable(process):
            raise error("INVALID_FUNCTION", f"wrapped is {settings.wrapped}, which has no process()")
        self._process = process
        self._takes_context = not isinstance(function, ModuleType)
        self._deserialize: Callable[[bytes], Any] = (
            _made(settings.input_serde).deserialize if settings.input_serde else lambda payload: payload
        )
        self._serialize: Serialize = _made(settings.output_serde).serialize if settings.output_serde else as_bytes
        self._serializers: dict[str, Serialize] = {"serde.IdentitySerDe": as_bytes}

    def _serialize_for(self, name: str) -> Serialize:
        if name not in self._serializers:
            self._serializers[name] = _made(name).serialize
        return self._serializers[name]

    def outputs(self, payload: bytes, context: Any, source: InputSource) -> list[FunctionOutput]:
        """Run the function once, and return its outputs. Raises the errors of the function, and the error of an output
        that cannot be published."""
        if source.unreadable is not None:
            raise source.unreadable
        gathering = GatheringContext(context, source, self._serialize_for, self._output_topic)
        value = self._deserialize(payload)
        try:
            result = self._process(value, gathering) if self._takes_context else self._process(value)
        finally:
            gathering.end()
        outputs = gathering.outputs
        if result is not None:
            if not self._output_topic:
                raise error("INVALID_FUNCTION", "the function returns something, and output_topic is not set")
            outputs = [*outputs, source.output(self._output_topic, payload_of(self._serialize, result))]
        by_topic: dict[str, list[FunctionOutput]] = {}
        for output in outputs:
            by_topic.setdefault(output.topic, []).append(output)
        for of_topic in by_topic.values():
            check_fits(of_topic)
        return outputs


logger = logging.getLogger("seqdedupe.functions")

_WITHOUT_MESSAGES = (MARKER, CONTROL)
"""The kinds of entries that have no message of a producer."""
MAX_ERROR_CHARACTERS = 1000
"""The maximum number of characters of the error's text in a dead letter."""

_PARTITION = re.compile(r"-partition-\d+$")


def _as_text(said: str) -> str:
    """Return text that UTF-8 can encode. The text of an error may contain an invalid part of a file's name."""
    return said.encode(errors="backslashreplace").decode()


def _full_name(topic: str) -> str:
    """Return a topic's full name in the form that messages contain. The argument may have any form that Pulsar
    accepts."""
    if "://" in topic:
        return topic
    return f"persistent://{topic}" if "/" in topic else f"persistent://public/default/{topic}"


class FunctionInstance:
    """The running instance. It is created for the first message, whose context describes the deployment.

    Raises INVALID_FUNCTION and other errors of the deployment.
    """

    def __init__(self, context: Any, process: Process) -> None:
        details = context.instance_config.function_details
        check_deployment(details)
        self._settings = settings = settings_of(context.get_user_config_map() or {})
        self._process = process
        self._function = f"{details.tenant}/{details.namespace}/{details.name}"
        self._given_topics: dict[str, str] = {_full_name(str(topic)): topic for topic in context.get_input_topics()}
        self._wrapped = Wrapped(settings, settings.output_topic or str(details.sink.topic or ""))
        self._lanes: dict[str, Owners] = {}
        """The owners, by input topic or partition."""
        self._native: set[str] = set()
        """The input topics and partitions that have native entries, as far as their sidecars have said so."""
        self._set_aside: dict[str, InputIdentity] = {}
        """The last dead letter in the current ledger, for each input topic or partition."""
        self._counts = Counter(retries=0, dead_letters=0, void=0)
        self._reported: Counter[str] = Counter()
        self._record_metric: Callable[[str, float], None] = context.record_metric
        sidecars = Sidecars.parse(settings.sidecar_address, credentials_of(settings, context.get_secret))
        self._pipeline = Pipeline(settings, sidecars, process, self._report)

    @property
    def in_flight(self) -> int:
        """The number of inputs that are not acknowledged."""
        return self._pipeline.in_flight

    @property
    def counts(self) -> Counter[str]:
        """The numbers of new outputs, duplicates, unknown outcomes, restarts, retries, dead letters and void
        entries."""
        return self._counts + Counter(self._pipeline.counts())

    def close(self) -> None:
        """End all work: nothing more is published or acknowledged."""
        self._pipeline.close()

    def take(self, context: Any) -> None:
        """Process the context's message, and return when its outputs are in flight. Never raises an exception for a
        message."""
        message_id = context.get_message_id()
        source = InputSource(context)
        if source.topic not in self._lanes:
            check_names(self._function, source.topic)
            self._lanes[source.topic] = Owners()
        one = Input(source.topic, partial(context.ack, message_id, self._given_topic(source.topic)))
        if self._counts_for_nobody(source, message_id):
            self._pipeline.add(one, InputIdentity(source.topic, 0), ())
            return
        identity = self._identity(source, message_id)
        if self._is_set_aside(source.topic, identity):
            self._pipeline.add(one, identity, ())
            return
        outputs, is_dead = self._run(context, source)
        if is_dead:
            identity = identity.of_dead_letter()
            # Wait on both sides of a dead letter. A dead letter means that everything before it is settled. And if a
            # later output settled first and the instance ended, the message would run again, and its outputs would be
            # duplicates.
            self._pipeline.settle()
            self._set_aside[source.topic] = identity
        self._pipeline.add(one, identity, outputs)
        if is_dead:
            self._pipeline.settle()

    def _given_topic(self, topic: str) -> str:
        """Return the name under which the deployment lists the input topic. Pulsar acknowledges by that name."""
        return self._given_topics.get(topic) or self._given_topics.get(_PARTITION.sub("", topic), topic)

    def _counts_for_nobody(self, source: InputSource, message_id: Any) -> bool:
        """Return whether the entry is in a topic that a sidecar writes, and contains no valid message of any producer.
        Such entries are acknowledged without a call of the function."""
        is_native = source.topic in self._native
        if not is_native and self._lanes[source.topic].is_void(
            source.place, message_id.ledger_id(), message_id.entry_id()
        ):
            self._counts["void"] += 1
            logger.warning("%s of %s is void and skipped: it was never acknowledged", message_id, source.topic)
            return True
        if source.place is None or is_native:
            return self._is_without_index(source, message_id)
        if source.kind == BATCH:
            raise error(
                "INVALID_FUNCTION",
                f"{source.topic} is a topic of packed batches, which a function cannot read",
                hint="Create the input topic with the format `native` or `plain`.",
            )
        return source.kind in _WITHOUT_MESSAGES

    def _is_without_index(self, source: InputSource, message_id: Any) -> bool:
        """Return whether inputs are identified by their index, and this message without a place has no index. For a
        message of a native entry, this method finds the place. The message's properties are not used for this, because
        a producer may have set properties that look like a place."""
        if self._settings.identity != "index":
            if source.kind in _WITHOUT_MESSAGES:
                raise error(
                    "INVALID_FUNCTION",
                    f"{source.topic} has native entries: Pulsar's message IDs do not show which entries are void",
                    hint="Set identity to 'index' in userConfig.",
                )
            return False
        if source.kind in _WITHOUT_MESSAGES:
            return True
        place = MessageId(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
        found = self._pipeline.message(source.topic, place)
        self._native.add(source.topic)
        if found is not None:
            source.restore_from(found)
            return False
        self._counts["void"] += 1
        logger.warning("%s of %s has no index and is skipped: it is void, or no sidecar wrote it", place, source.topic)
        return True

    def _identity(self, source: InputSource, message_id: Any) -> InputIdentity:
        if self._settings.identity == "index":
            return by_index(self._function, source.topic, source.place)
        return by_message_id(
            self._function, source.topic, message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()
        )

    def _run(self, context: Any, source: InputSource) -> tuple[list[FunctionOutput], bool]:
        """Run the function on the message. Return the outputs and false, or a dead letter and true if the function
        fails at each attempt."""
        payload = context.message.data()
        which = f"message {context.get_message_id()} of {source.topic}"
        for attempt in range(self._settings.max_message_retries + 1):
            if attempt:
                self._counts["retries"] += 1
                self._sleep(self._settings.retry_delay_ms / 1000)
            try:
                return self._wrapped.outputs(payload, context, source), False
            # also for `sys.exit` and a cancelled task, which would otherwise end each new instance
            except BaseException as e:
                if isinstance(e, SeqdedupeError) and e.reason == "INVALID_FUNCTION":
                    raise  # every message would fail, so there must be no dead letters
                if attempt:
                    logger.error("the function has failed again on %s: %s", which, _as_text(text_of(e)))
                else:
                    logger.error("the function has failed on %s\n%s", which, _as_text(traceback_of(e)))
                failure = e
        if not self._settings.dead_letter_topic:
            raise error("FUNCTION_FAILED", f"the function fails on {which}: {_as_text(text_of(failure))}") from failure
        self._counts["dead_letters"] += 1
        logger.error("%s goes to %s", which, self._settings.dead_letter_topic)
        told = {
            "dedupe.function": self._function,
            "dedupe.topic": source.topic,
            "dedupe.message_id": str(context.get_message_id()),
            "dedupe.error": _as_text(text_of(failure)[:MAX_ERROR_CHARACTERS]),
        }
        return [source.dead_letter(self._settings.dead_letter_topic, payload, told)], True

    def _is_set_aside(self, lane: str, identity: InputIdentity) -> bool:
        """Return whether the dead letter topic shows that the input is settled. This method queries the dead letter
        topic at the first input of each ledger."""
        if not self._settings.dead_letter_topic:
            return False
        of_letter = identity.of_dead_letter()
        known = self._set_aside.get(lane)
        if known is None or known.source != of_letter.source:
            topic = topic_name(self._settings.dead_letter_topic)
            persisted = self._pipeline.persisted(topic, of_letter.producer_name(0))
            known = self._set_aside[lane] = InputIdentity(of_letter.source, persisted)
        return identity.sequence_id <= known.sequence_id

    def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the process is asked to stop."""
        until = time.monotonic() + seconds
        waiting = threading.Event()
        while (left := until - time.monotonic()) > 0:
            if self._process.is_stopping:
                self._process.end("the instance was asked to stop", failed=False)
            waiting.wait(min(left, 0.1))

    def _report(self, of_outputs: dict[str, int], in_flight: int) -> None:
        """Record metrics, in the pipeline's thread."""
        counts = self._counts + Counter(of_outputs)
        for name, count in (counts - self._reported).items():
            self._record_metric(f"dedupe_{name}", count)
        self._reported = counts
        self._record_metric("dedupe_in_flight", in_flight)
