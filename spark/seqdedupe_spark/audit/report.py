"""What an audit has found, for a person and for a machine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("doubled", "out_of_order", "missing")


@dataclass(frozen=True)
class Example:
    """A message that is doubled, stands out of order, or proves by its link that another one is missing."""

    producer: str
    sequence_id: int
    message_id: str
    first_message_id: str | None = None
    """doubled: where the first copy stands."""
    higher_before: int | None = None
    """out of order: the higher sequence ID that stands before it."""
    link: int | None = None
    """missing: the message with this sequence ID, or one between it and `highest_before`, is missing."""
    highest_before: int | None = None
    """missing: the highest sequence ID of the producer that stands before; none: nothing of it does."""

    def __str__(self) -> str:
        if self.first_message_id is not None:
            what = f"the first copy is {self.first_message_id}"
        elif self.higher_before is not None:
            what = f"comes after {self.higher_before}"
        else:
            before = "nothing" if self.highest_before is None else f"nothing above {self.highest_before}"
            what = f"was sent after {self.link}, but {before} stands before it"
        return f"{self.producer!r} {self.sequence_id} at {self.message_id}: {what}"


@dataclass
class Finding:
    """What there is of one kind: how many messages (missing: at least so many), of how many producers."""

    messages: int = 0
    producers: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class TopicReport:
    """A topic of sequence IDs from its first message left, at `first_index`, to before `end_index`.

    `links`: "all" can prove that something is missing, or those "after_first" message left of a producer, or "none".
    `unlinked` counts batches of a producer whose link was left out, so that nothing is proved about what is before.
    """

    topic: str
    incarnation: int
    first_index: int
    end_index: int
    producers: int
    links: str
    unlinked: int
    doubled: Finding
    out_of_order: Finding
    missing: Finding
    deduplication_mode: str = "sequence-id"

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, kind).messages for kind in KINDS)

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        count = self.end_index - self.first_index
        held = f", indexes {self.first_index:,} to {self.end_index - 1:,}" if count else ""
        yield f"{self.topic}: {count:,} messages of {self.producers:,} producers{held}"
        yield f"  {'':<14}{'MESSAGES':>12}{'PRODUCERS':>12}"
        for kind in KINDS:
            finding: Finding = getattr(self, kind)
            yield f"  {kind.replace('_', ' '):<14}{finding.messages:>12,}{finding.producers:>12,}"
            for example in finding.examples:
                yield f"    {example}"
        if self.links == "none":
            yield "  What is missing cannot be told: its start is trimmed, and deduplication is off."
        elif self.links == "after_first":
            yield "  Its start is trimmed: what is missing before a producer's first message left cannot be told."
        if self.unlinked:
            yield f"  {self.unlinked:,} batches left their link out: what is missing before those cannot be told."


@dataclass(frozen=True)
class IdExample:
    """A further copy of a message of a topic of deduplication IDs. The ID as text where it is UTF-8."""

    message_id: str
    first_message_id: str
    deduplication_id_base64: str
    deduplication_id: str | None = None

    def __str__(self) -> str:
        shown = (
            f"base64 {self.deduplication_id_base64}" if self.deduplication_id is None else repr(self.deduplication_id)
        )
        return f"{shown} at {self.message_id}: the first copy is {self.first_message_id}"


@dataclass
class IdFinding:
    """How many further copies there are, of how many IDs."""

    messages: int = 0
    ids: int = 0
    examples: list[IdExample] = field(default_factory=list)


@dataclass
class IdTopicReport:
    """A topic of deduplication IDs from its first message left, at `first_index`, to before `end_index`."""

    topic: str
    incarnation: int
    first_index: int
    end_index: int
    doubled: IdFinding
    deduplication_mode: str = "deduplication-id"

    @property
    def is_clean(self) -> bool:
        return not self.doubled.messages

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        count = self.end_index - self.first_index
        held = f", indexes {self.first_index:,} to {self.end_index - 1:,}" if count else ""
        yield f"{self.topic}: {count:,} messages with deduplication IDs{held}"
        yield f"  {'':<14}{'MESSAGES':>12}{'IDS':>12}"
        yield f"  {'doubled':<14}{self.doubled.messages:>12,}{self.doubled.ids:>12,}"
        for example in self.doubled.examples:
            yield f"    {example}"


@dataclass
class Report:
    """What an audit has found, topic by topic."""

    topics: list[TopicReport | IdTopicReport]

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found in any."""
        return all(topic.is_clean for topic in self.topics)

    def as_json(self) -> dict[str, Any]:
        """As `docs/spark-audit.md` describes it."""
        return {"clean": self.is_clean, "topics": [_without_none(asdict(topic)) for topic in self.topics]}

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        for topic in self.topics:
            yield from topic.lines()
        wrong = sum(not topic.is_clean for topic in self.topics)
        yield f"not clean: {wrong} of {_topics(len(self.topics))}" if wrong else f"clean: {_topics(len(self.topics))}"


def _topics(count: int) -> str:
    return "1 topic" if count == 1 else f"{count} topics"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
