"""Does a topic still know the IDs of what a write may have written before? Only then is writing it again harmless."""

import time
from datetime import UTC, datetime
from typing import NamedTuple

from seqdedupe.errors import error
from seqdedupe.v1 import admin_pb2

CLOCKS_MS = 5_000
"""The clocks of driver and sidecar may differ by so much."""


class Began(NamedTuple):
    """When what is written may have been written for the first time, and whether it may have been before now."""

    at_ms: int
    may_repeat: bool
    batch: int | None = None
    """The number that the checkpoint of a stream gives it."""

    def is_known_by(self, topic: admin_pb2.Topic) -> bool:
        """Whether the topic knows the IDs of all that came since."""
        return not topic.window_forgotten or topic.window_first_publish_time_ms <= self.at_ms - CLOCKS_MS

    def check(self, topic: admin_pb2.Topic) -> None:
        """Raises IDS_FORGOTTEN."""
        if not self.is_known_by(topic):
            since = _shown(topic.window_first_publish_time_ms)
            what = (
                f"{topic.name} knows the IDs of what came since {since}, and what is to be written again was begun at"
            )
            raise error("IDS_FORGOTTEN", f"{what} {_shown(self.at_ms)}: some of it may be there, and would be doubled")


def now() -> Began:
    """Of a write that begins, as far as is known."""
    return Began(time.time_ns() // 1_000_000, may_repeat=False)


def _shown(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
