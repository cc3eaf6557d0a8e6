"""An instance of a function at work: from Pulsar's message to what the pipeline has under way."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from seqdedupe.client.sidecars import Sidecars
from seqdedupe.entry_properties import BATCH, CONTROL, MARKER
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.functions import identity as identities
from seqdedupe.functions.credentials import credentials_of
from seqdedupe.functions.identity import Identity
from seqdedupe.functions.outputs import Output
from seqdedupe.functions.owners import Owners
from seqdedupe.functions.pipeline import Input, Pipeline, Process
from seqdedupe.functions.process import text_of, traceback_of
from seqdedupe.functions.settings import check_deployment, settings_of
from seqdedupe.functions.source import Source
from seqdedupe.functions.wrapped import Wrapped
from seqdedupe.names import topic_name

logger = logging.getLogger("seqdedupe.functions")

MAX_ERROR_CHARACTERS = 1000
"""Of the error's text in a dead letter."""

_PARTITION = re.compile(r"-partition-\d+$")


def _as_text(said: str) -> str:
    """As UTF-8 can say it: an error may have half a character of a file's name in it."""
    return said.encode(errors="backslashreplace").decode()


def _full_name(topic: str) -> str:
    """A topic's, as messages have it: it may be any that Pulsar takes."""
    if "://" in topic:
        return topic
    return f"persistent://{topic}" if "/" in topic else f"persistent://public/default/{topic}"


class Instance:
    """Made for the first message, whose context says how the function is deployed.

    Raises INVALID_FUNCTION and what else is wrong with the deployment.
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
        """The input's topics and partitions."""
        self._set_aside: dict[str, Identity] = {}
        """By the input's topic or partition: the last dead letter of the ledger from which inputs come."""
        self._counts = Counter(retries=0, dead_letters=0, void=0)
        self._reported: Counter[str] = Counter()
        self._record_metric: Callable[[str, float], None] = context.record_metric
        sidecars = Sidecars.parse(settings.sidecar_address, credentials_of(settings, context.get_secret))
        self._pipeline = Pipeline(settings, sidecars, process, self._report)

    @property
    def in_flight(self) -> int:
        """Inputs that are not acknowledged."""
        return self._pipeline.in_flight

    @property
    def counts(self) -> Counter[str]:
        """How many outputs were new, duplicates and unknown, and how often something was tried again or set aside."""
        return self._counts + Counter(self._pipeline.counts())

    def close(self) -> None:
        """Ends what it has under way: nothing more is published or acknowledged."""
        self._pipeline.close()

    def take(self, context: Any) -> None:
        """Takes the context's message; returns when its outputs are under way. Never raises for a message."""
        message_id = context.get_message_id()
        source = Source(context)
        if source.topic not in self._lanes:
            identities.check_names(self._function, source.topic)
            self._lanes[source.topic] = Owners()
        one = Input(source.topic, partial(context.ack, message_id, self._given_topic(source.topic)))
        if self._counts_for_nobody(source, message_id):
            self._pipeline.add(one, Identity(source.topic, 0), ())
            return
        identity = self._identity(source, message_id)
        if self._is_set_aside(source.topic, identity):
            self._pipeline.add(one, identity, ())
            return
        outputs, is_dead = self._run(context, source)
        if is_dead:
            identity = identity.of_dead_letter()
            # A barrier on both sides: a dead letter says that all before it is settled; and were a later output settled
            # first, and the instance ended, the message would be run again, and what it gives taken for a duplicate.
            self._pipeline.settle()
            self._set_aside[source.topic] = identity
        self._pipeline.add(one, identity, outputs)
        if is_dead:
            self._pipeline.settle()

    def _given_topic(self, topic: str) -> str:
        """What an input topic is called where the function is deployed: by that name Pulsar acknowledges."""
        return self._given_topics.get(topic) or self._given_topics.get(_PARTITION.sub("", topic), topic)

    def _counts_for_nobody(self, source: Source, message_id: Any) -> bool:
        """Whether it is no message of a producer's, in a topic that a sidecar writes: these are acknowledged unseen."""
        if self._lanes[source.topic].is_void(source.place, message_id.ledger_id(), message_id.entry_id()):
            self._counts["void"] += 1
            logger.warning("%s of %s counts for nobody: it was never acknowledged", message_id, source.topic)
            return True
        if source.kind == BATCH:
            raise error(
                "INVALID_FUNCTION",
                f"{source.topic} is a topic of packed batches, which a function cannot read",
                hint="Make the input topic with the format `plain`.",
            )
        return source.kind in (MARKER, CONTROL)

    def _identity(self, source: Source, message_id: Any) -> Identity:
        if self._settings.identity == "index":
            return identities.by_index(self._function, source.topic, source.place)
        return identities.by_message_id(
            self._function, source.topic, message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()
        )

    def _run(self, context: Any, source: Source) -> tuple[list[Output], bool]:
        """What the function gives for the message; or a dead letter, and True, if it fails for good."""
        payload = context.message.data()
        which = f"message {context.get_message_id()} of {source.topic}"
        for attempt in range(self._settings.max_message_retries + 1):
            if attempt:
                self._counts["retries"] += 1
                self._sleep(self._settings.retry_delay_ms / 1000)
            try:
                return self._wrapped.outputs(payload, context, source), False
            except BaseException as e:  # `sys.exit` too, or a cancelled task: else it would end every instance
                if isinstance(e, SeqdedupeError) and e.reason == "INVALID_FUNCTION":
                    raise  # of every message: nothing is set aside for that
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

    def _is_set_aside(self, lane: str, identity: Identity) -> bool:
        """Whether a dead letter says that the input is settled; its topic is asked when inputs of a ledger begin."""
        if not self._settings.dead_letter_topic:
            return False
        of_letter = identity.of_dead_letter()
        known = self._set_aside.get(lane)
        if known is None or known.source != of_letter.source:
            topic = topic_name(self._settings.dead_letter_topic)
            persisted = self._pipeline.persisted(topic, of_letter.producer_name(0))
            known = self._set_aside[lane] = Identity(of_letter.source, persisted)
        return identity.sequence_id <= known.sequence_id

    def _sleep(self, seconds: float) -> None:
        """For so long, or until the process is to stop."""
        until = time.monotonic() + seconds
        waiting = threading.Event()
        while (left := until - time.monotonic()) > 0:
            if self._process.is_stopping:
                self._process.end("the instance was told to stop", failed=False)
            waiting.wait(min(left, 0.1))

    def _report(self, of_outputs: dict[str, int], in_flight: int) -> None:
        """Records metrics, in the pipeline's thread."""
        counts = self._counts + Counter(of_outputs)
        for name, count in (counts - self._reported).items():
            self._record_metric(f"dedupe_{name}", count)
        self._reported = counts
        self._record_metric("dedupe_in_flight", in_flight)
