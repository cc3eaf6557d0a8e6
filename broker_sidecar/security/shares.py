"""How much of a sidecar one caller may use, and all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass

from seqdedupe.core.patterns import Pattern

OF_THE_CONFIGURATION = {"streams": "max_streams", "topics": "max_topics"}
"""What the configuration limits for all callers together."""


@dataclass(frozen=True, slots=True)
class Limits:
    """At most so much; None: as much as there is."""

    connections: int | None = None
    """From which streams are open."""
    streams: int | None = None
    bytes_per_second: int | None = None
    """That are sent to the sidecar, by streams and by unary publishing."""
    bytes_in_flight: int | None = None
    """Frames that have no answer yet, answers and pages that were not read yet."""
    producer_names: int | None = None
    """In any one topic, that it may publish under."""
    topics: int | None = None
    """That it may create: those that are there count, whoever has made them."""
    bytes_on_disk: int | None = None
    """Of the topics that it may publish to."""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Share:
    """What each caller with such a name may use."""

    name: str
    subjects: tuple[str, ...]
    limits: Limits


def limits_of(subject: str, shares: Sequence[Share]) -> Limits:
    """Those of the first share that is about this caller."""
    name = subject.encode(errors="surrogatepass")
    for share in shares:
        if any(Pattern(text).matches(name) for text in share.subjects):
            return share.limits
    return NO_LIMITS
