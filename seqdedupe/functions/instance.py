"""An instance of a function at work: from Pulsar's message to what the pipeline has under way."""

import logging
import re
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

from seqdedupe.errors import error
from seqdedupe.functions import identity as identities
from seqdedupe.functions.context import Source
from seqdedupe.functions.identity import Identity
from seqdedupe.functions.outputs import Output
from seqdedupe.functions.pipeline import Input, Pipeline, Process
from seqdedupe.functions.settings import check_deployment, settings_of
from seqdedupe.functions.wrapped import Wrapped
from seqdedupe.names import topic_name

logger = logging.getLogger("seqdedupe.functions")

REPORT_SECONDS = 1.0
"""Metrics are recorded so often."""
MAX_ERROR_CHARACTERS = 1000
"""Of the error's text in a dead letter."""

MARKER, CONTROL, BATCH = "marker", "control", "batch"
"""What KIND says of an entry that is no message."""

_PARTITION = re.compile(r"-partition-\d+$")


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
        self._given_topics = {topic_name(str(topic)): topic for topic in context.get_input_topics()}
        self._wrapped = Wrapped(settings, settings.output_topic or str(details.sink.topic or ""))
        self._pipeline = Pipeline(settings, process)
        self._lanes: set[str] = set()
        self._set_aside: dict[str, int] = {}
        """By the source of dead letters: up to which sequence ID inputs need not be run."""
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._report_at = 0.0

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
        lane = str(context.get_current_message_topic_name())
        if lane not in self._lanes:
            identities.check_names(self._function, lane)
            self._lanes.add(lane)
        given = self._given_topics.get(lane) or self._given_topics.get(_PARTITION.sub("", lane), lane)
        one = Input(lane, partial(context.ack, message_id, given))
        kind = context.get_message_properties().get(identities.KIND)
        if kind in (MARKER, CONTROL):
            self._pipeline.add(one, Identity(lane, 0), ())
            return
        if kind == BATCH:
            raise error(
                "INVALID_FUNCTION",
                f"{lane} is a topic of packed batches, which a function cannot read",
                hint="Make the input topic with the format `plain`.",
            )
        identity = self._identity(context, lane, message_id)
        if self._is_set_aside(identity):
            self._pipeline.add(one, identity, ())
            return
        outputs, is_dead = self._run(context, lane)
        if is_dead:
            identity = identity.of_dead_letter()
            # A barrier on both sides: a dead letter says that all before it is settled; and were a later output settled
            # first, and the instance ended, the message would be run again, and what it gives taken for a duplicate.
            self._pipeline.settle()
            self._set_aside[identity.source] = identity.sequence_id
        self._pipeline.add(one, identity, outputs)
        if is_dead:
            self._pipeline.settle()
        self._report(context)

    def _identity(self, context: Any, lane: str, message_id: Any) -> Identity:
        if self._settings.identity == "index":
            return identities.by_index(self._function, lane, context.get_message_properties().get(identities.ENTRY))
        return identities.by_message_id(
            self._function, lane, message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()
        )

    def _run(self, context: Any, lane: str) -> tuple[list[Output], bool]:
        """What the function gives for the message; or a dead letter, and True, if it fails for good."""
        payload = context.message.data()
        for attempt in range(self._settings.max_message_retries + 1):
            if attempt:
                self._counts["retries"] += 1
                self._sleep(self._settings.retry_delay_ms / 1000)
            try:
                return self._wrapped.outputs(payload, context), False
            except Exception as e:
                logger.exception("the function has failed on message %s of %s", context.get_message_id(), lane)
                failure = e
        if not self._settings.dead_letter_topic:
            what = f"the function fails on message {context.get_message_id()} of {lane}"
            raise error("FUNCTION_FAILED", f"{what}: {type(failure).__name__}: {failure}")
        self._counts["dead_letters"] += 1
        return [self._dead_letter(context, payload, lane, failure)], True

    def _dead_letter(self, context: Any, payload: bytes, lane: str, failure: Exception) -> Output:
        letter = Source(context).output(self._settings.dead_letter_topic, payload)
        told = {
            "dedupe.function": self._function,
            "dedupe.topic": lane,
            "dedupe.message_id": str(context.get_message_id()),
            "dedupe.error": f"{type(failure).__name__}: {failure}"[:MAX_ERROR_CHARACTERS],
        }
        logger.error("message %s of %s goes to %s", context.get_message_id(), lane, letter.topic)
        return Output(letter.topic, payload, letter.key, letter.event_time_ms, {**letter.properties, **told})

    def _is_set_aside(self, identity: Identity) -> bool:
        """Whether a dead letter says that the input is settled; the topic is asked once for each source."""
        if not self._settings.dead_letter_topic:
            return False
        of_letter = identity.of_dead_letter()
        if of_letter.source not in self._set_aside:
            topic = topic_name(self._settings.dead_letter_topic)
            self._set_aside[of_letter.source] = self._pipeline.persisted(topic, of_letter.producer_name(0))
        return identity.sequence_id <= self._set_aside[of_letter.source]

    def _sleep(self, seconds: float) -> None:
        """For so long, or until the process is to stop."""
        until = time.monotonic() + seconds
        waiting = threading.Event()
        while (left := until - time.monotonic()) > 0:
            if self._process.is_stopping:
                self._process.end("the instance was told to stop", failed=False)
            waiting.wait(min(left, 0.1))

    def _report(self, context: Any) -> None:
        """Records metrics, at most once in REPORT_SECONDS."""
        if (now := time.monotonic()) < self._report_at:
            return
        self._report_at = now + REPORT_SECONDS
        counts = self.counts
        for name, count in (counts - self._reported).items():
            context.record_metric(f"dedupe_{name}", count)
        self._reported = counts
        context.record_metric("dedupe_in_flight", self.in_flight)
