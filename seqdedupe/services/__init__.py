"""Patterns of services that use the sidecar. Each pattern is one class; all of them need the extra `services`.

Each pattern has a folder or file: `outbox`, `consumer`, `inbox`, `pipe`. This file contains their shared code: the
decision when a standby process may take over, the reports about failed attempts, and the check of the topic that a
service publishes to.
"""

import time
from collections.abc import Callable

from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.v1 import admin_pb2

REPEAT_SECONDS = 30.0
"""The least time between two lines about the same reason."""


class Stillness:
    """Decides whether the working process has shown no change for long enough, so that a standby process may take over.

    The standby process looks at the state at intervals, and measures the time with its own clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: object = self  # an object that is equal to nothing else
        self._since = 0.0

    def has_lasted(self, seen: object) -> bool:
        """Return whether the state has not changed for the configured number of seconds. `seen` is the current
        state."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._seconds


class Retries:
    """Reports why a service tries again. Each reason is reported at the first failure, and then at most every
    REPEAT_SECONDS with the number of failures. When the service works again, `Retries` reports that once."""

    def __init__(self, report: Callable[[str], None], now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now_seconds = now_seconds
        self._failures = 0
        self._reported: dict[str, float] = {}
        """When each reason was reported last."""

    def failed(self, failure: SeqdedupeError) -> None:
        """Count a failure after which the service tries again."""
        self._failures += 1
        now, since = self._now_seconds(), self._reported.get(failure.reason)
        if since is None or now - since >= REPEAT_SECONDS:
            self._reported[failure.reason] = now
            times = f" (failed {counted(self._failures, 'time')})" if self._failures > 1 else ""
            self._report(f"trying again{times}: {failure}")

    def works(self) -> None:
        """Record that the service works."""
        if self._failures:
            self._report(f"working again (failed {counted(self._failures, 'time')})")
            self._failures = 0
            self._reported.clear()


def check_kind(topic: admin_pb2.Topic, who: str) -> None:
    """Raise INVALID_OPTION for a topic of deduplication IDs."""
    if topic.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"{topic.name} is a topic of deduplication IDs, and {who} publishes with sequence IDs",
            hint="Name another topic. `seqdedupe topics create NAME` creates a topic of sequence IDs.",
        )


async def check_target(client: Client, topic: str, who: str) -> None:
    """Raise INVALID_OPTION for a topic of deduplication IDs, and UnavailableError if the sidecar does not answer.

    A topic that does not exist passes the check, because such a topic is created with sequence IDs. If the sidecar
    refuses the question, the topic also passes the check; the caller then sees the refusal when the topic is opened.
    """
    try:
        found = await client.admin.topic(topic)
    except UnavailableError:
        raise
    except SeqdedupeError:
        return
    check_kind(found, who)
