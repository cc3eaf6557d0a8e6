"""The command `seqdedupe read`: it prints a topic's messages on stdout, as payloads or as JSON."""

import base64
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, cast

import click

from seqdedupe.cli.common import common, connect_to, seconds_of
from seqdedupe.client import Message, PartitionedPosition
from seqdedupe.client.blocking import Client, PartitionedReader, Reader
from seqdedupe.client.pending import NO_PARTITION
from seqdedupe.client.reader import Start
from seqdedupe.client.route import OnWaiting
from seqdedupe.command import json_text, printable, standard_output, tell_waiting
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_INDEX
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, topic_name

# -- The columns that `read` shows of a message, and the selection of messages by them.

_PROPERTY = "property."


def _utf8(value: bytes | None) -> str | None:
    """Return the value as text; None if there is no value, or if the value is not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _base64(value: bytes | None) -> str | None:
    """Return a value that is not UTF-8, in base64; None for all other values."""
    return base64.b64encode(value).decode() if value is not None and _utf8(value) is None else None


_COLUMNS: dict[str, Callable[[Message], int | str | None]] = {
    "partition": lambda message: message.partition if message.partition != NO_PARTITION else None,
    "index": lambda message: message.index,
    "message_id": lambda message: str(message.message_id),
    "producer_name": lambda message: message.producer_name or None,
    "sequence_id": lambda message: message.sequence_id if message.sequence_id >= 0 else None,
    "deduplication_id": lambda message: _utf8(message.deduplication_id),
    "deduplication_id_base64": lambda message: _base64(message.deduplication_id),
    "publish_time_ms": lambda message: message.publish_time_ms,
    "event_time_ms": lambda message: message.event_time_ms or None,
    "key": lambda message: _utf8(message.key),
    "key_base64": lambda message: _base64(message.key),
    "payload": lambda message: _utf8(message.payload),
    "payload_base64": lambda message: _base64(message.payload),
}


_ONLY_WHERE_THERE = ("partition", "deduplication_id")


def json_line(message: Message) -> bytes:
    """Return the message as a line of JSON. The fields are documented: keep them stable."""
    value: dict[str, object] = {}
    for name, column in _COLUMNS.items():
        if name == "payload":
            value["properties"] = message.properties
        found = column(message)
        if name.endswith("_base64"):
            if found is not None:  # in place of the text, which does not exist
                value.pop(name.removesuffix("_base64"), None)
                value[name] = found
        elif name not in _ONLY_WHERE_THERE or found is not None:
            value[name] = found
    return json_text(value).encode() + b"\n"


@dataclass(frozen=True)
class Condition:
    """The condition that a column or a property has this text. A message without the column or property does not meet
    the condition."""

    column: str
    text: str

    @staticmethod
    def parse(text: str) -> "Condition":
        """Parse `column=value`. Raises ValueError with the problem."""
        column, is_there, value = text.partition("=")
        if not is_there:
            raise ValueError(f"{text!r} is not COLUMN=VALUE.")
        if column not in _COLUMNS and (not column.startswith(_PROPERTY) or column == _PROPERTY):
            raise ValueError(f"there is no column {column!r}: they are {', '.join(_COLUMNS)} and {_PROPERTY}NAME.")
        return Condition(column, value)

    def holds(self, message: Message) -> bool:
        """Whether the message meets the condition."""
        column = _COLUMNS.get(self.column)
        if column is None:
            return message.properties.get(self.column.removeprefix(_PROPERTY)) == self.text
        found = column(message)
        return found is not None and str(found) == self.text


# -- The places where `read` starts and ends. `--to` a place ends before the first message that `--from` that place
# prints.

_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?(?P<zone>[Zz]|[+-]\d\d:\d\d)?", re.ASCII)
"""A time of RFC 3339, possibly without the zone."""

_EPOCH = datetime.fromtimestamp(0, UTC)


class PublishTime(NamedTuple):
    """A place in a topic: before the first message that was published at this time or later."""

    milliseconds: int

    @staticmethod
    def parse(text: str) -> "PublishTime | None":
        """Parse a time of RFC 3339, or a duration before now. Return None if the text is neither a time nor a duration.
        Raises ValueError, with the problem, for an invalid time."""
        if (ago_seconds := seconds_of(text)) is not None:
            return PublishTime(int((time.time() - ago_seconds) * 1000))
        if (found := _TIME.fullmatch(text)) is None:
            return None
        if found["zone"] is None:
            raise ValueError(f"{text!r} has no zone: end it with Z for UTC, or with an offset as +01:00.")
        try:
            since_epoch = datetime.fromisoformat(text.upper()) - _EPOCH
        except ValueError as e:
            raise ValueError(f"{text!r} is not a time: {e}.") from None
        return PublishTime(-(-since_epoch // timedelta(milliseconds=1)))


PlaceInTopic = int | Position | PublishTime
Place = PlaceInTopic | PartitionedPosition | Literal["earliest", "latest"]


class _PlaceType(click.ParamType[Place]):
    name = "place"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        text = str(value)
        if text in self._words:
            return text  # type: ignore[return-value]
        if re.fullmatch(r"\d{1,19}", text, re.ASCII) and int(text) <= MAX_INDEX:
            return int(text)
        with suppress(SeqdedupeError, ValueError):  # for numbers that are too large for a position
            return Position.from_proto(Position.parse(text).to_proto())
        with suppress(SeqdedupeError):
            return PartitionedPosition.parse(text)
        try:
            if (moment := PublishTime.parse(text)) is not None:
                return moment
        except ValueError as e:
            raise click.BadParameter(str(e), ctx, param) from None
        words = "".join(f"{word}, " for word in self._words)
        what = f"{text!r} is not {words}an index, a message ID, a position, a time such as 2026-11-29T08:00:00Z"
        raise click.BadParameter(f"{what} or a time ago such as 15m.", ctx, param)


def _check_range(start: Place, to: Place | None, tail: int | None, *, follow: bool, is_start_given: bool) -> None:
    """Raise UsageError for options that contradict each other."""
    if tail is not None and (is_start_given or to is not None):
        raise click.UsageError(f"--tail and {'--from' if is_start_given else '--to'} exclude each other.")
    if to is not None and follow:
        raise click.UsageError("--to and --follow exclude each other.")
    if to is not None and start == "latest":
        raise click.UsageError("--to and --from latest exclude each other.")
    is_after = False
    if isinstance(start, PublishTime) and isinstance(to, PublishTime):
        is_after = start > to
    elif isinstance(start, int | Position) and isinstance(to, int | Position):
        is_after = _next_index(start) > _next_index(to)
    if is_after:
        raise click.UsageError("--to is before --from.")


def _next_index(place: int | Position) -> int:
    return place if isinstance(place, int) else place.index + 1


def _in_each(topic: str, place: Place, partitions: int) -> Sequence[PlaceInTopic | Literal["earliest", "latest"]]:
    """Return the start or stop place in each partition, or in the topic itself if the topic has no partitions. Raises
    INVALID_POSITION for a position of a partitioned topic in a topic without partitions, or the reverse."""
    if isinstance(place, PartitionedPosition):
        if partitions == len(place.partitions):
            return place.partitions
        if partitions:
            what = f"the position has {counted(len(place.partitions), 'partition')}, and {topic} has {partitions}"
            raise error(
                "INVALID_POSITION",
                what,
                hint="The place belongs to a different topic, or the topic was deleted and created again.",
            )
    elif not partitions or isinstance(place, PublishTime | str):
        return [place] * max(partitions, 1)
    raise error(
        "INVALID_POSITION",
        f"{topic} has {counted(partitions, 'partition') if partitions else 'no partitions'}, "
        f"and {place} is no place in " + ("all of them" if partitions else "a topic that has none"),
        hint="Give a time, earliest or latest, or read one partition by its name." if partitions else None,
    )


def _start_in(client: Client, topic: str, place: PlaceInTopic | Literal["earliest", "latest"]) -> Start:
    """Return where a reader of the topic starts."""
    if isinstance(place, PublishTime):
        return Position.before(*client.locate_time(topic, place.milliseconds))
    return place


def _stop_in(client: Client, topic: str, place: PlaceInTopic) -> int:
    """Return the index of the first message that is not read. Raises POSITION_AFTER_END, POSITION_TRIMMED or
    POSITION_OF_ANOTHER_INCARNATION if no reader can reach the place."""
    if isinstance(place, PublishTime):
        return client.locate_time(topic, place.milliseconds).index
    first_index, last = client.ends(topic)
    stop_index = _next_index(place)
    if isinstance(place, Position) and place.incarnation != last.incarnation:
        reason, what = "POSITION_OF_ANOTHER_INCARNATION", f"the incarnation of {topic} is {last.incarnation}"
    elif stop_index > last.index + 1:
        reason, what = "POSITION_AFTER_END", f"the next message of {topic} gets index {last.index + 1}"
    elif stop_index < first_index:
        reason, what = "POSITION_TRIMMED", f"the first message left in {topic} has index {first_index}"
    else:
        return stop_index
    raise error(
        reason, f"--to is {place}, and {what}", hint="Use a place that `--from` also accepts.", index=stop_index
    )


class _ConditionType(click.ParamType[Condition]):
    name = "condition"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        try:
            return Condition.parse(str(value))
        except ValueError as e:
            raise click.BadParameter(str(e), ctx, param) from None


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    type=_PlaceType("earliest", "latest"),
    default="earliest",
    show_default=True,
    metavar="earliest|latest|INDEX|MESSAGE_ID|POSITION|TIME",
    help="Where to begin: at the first message left, the next one, an index, after an ID or position, or at a time "
    "(RFC 3339 with a zone, or ago: 90s, 15m, 2h, 7d).",
)
@click.option(
    "--to",
    type=_PlaceType(),
    metavar="INDEX|MESSAGE_ID|POSITION|TIME",
    help="End before the message at which --from with this value would begin. Default: after the last message.",
)
@click.option(
    "--tail",
    type=click.IntRange(min=1),
    metavar="N",
    help="Begin with the last N messages of each partition. With --follow, continue with new messages.",
)
@click.option("--follow", is_flag=True, help="At the end of the topic, wait for new messages.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N messages.")
@click.option(
    "--where",
    "conditions",
    type=_ConditionType(),
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Only messages with this value in a column of --json, or in property.NAME. If repeated, all must match.",
)
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Skip messages that are damaged on the sidecar's disk, and list them on stderr.",
)
@common
@click.pass_context
def read(
    context: click.Context,
    topic: str,
    start: Place,
    to: Place | None,
    tail: int | None,
    follow: bool,
    limit: int | None,
    conditions: tuple[Condition, ...],
    skip_damaged: bool,
    address: str,
    as_json: bool,
) -> None:
    """Print the messages of a topic: one payload per line, or with --json one object per line.

    A terminal shows control characters in payloads as escapes. The command reads all partitions of a partitioned topic.
    Only the messages of one partition are in order.
    """
    is_start_given = context.get_parameter_source("start") is click.core.ParameterSource.COMMANDLINE
    _check_range(start, to, tail, follow=follow, is_start_given=is_start_given)
    since_ms = start.milliseconds if isinstance(start, PublishTime) else None
    with standard_output():
        out = sys.stdout.buffer
    form = json_line if as_json else _escaped_line if sys.stdout.isatty() else _payload_line
    waiting = partial(tell_waiting, topic, as_json)
    with connect_to(address, topic, on_waiting=waiting if follow else None) as client:
        partitions = client.partitions(topic)
        names = [partition_name(topic_name(topic), k) for k in range(partitions)] or [topic]
        if not follow and limit is None:
            for name in names:
                client.ends(name)  # a topic that does not know its end raises that now
        left = limit
        with _reader(
            client, topic, start, to, tail, partitions, follow=follow, skip_damaged=skip_damaged, on_waiting=waiting
        ) as reader:
            told: set[tuple[str, range]] = set()
            for stored in reader.batches():
                told = _tell_skipped(reader, told, as_json)
                if since_ms is not None and stored.publish_time_ms < since_ms:
                    continue  # the time has not come yet
                messages = (Message(stored, row) for row in range(len(stored)))
                chosen = list(islice((m for m in messages if all(c.holds(m) for c in conditions)), left))
                with standard_output():
                    out.writelines(map(form, chosen))
                    out.flush()
                if left is not None:
                    left -= len(chosen)
                    if not left:
                        return
            _tell_skipped(reader, told, as_json)


def _reader(
    client: Client,
    topic: str,
    start: Place,
    to: Place | None,
    tail: int | None,
    partitions: int,
    *,
    follow: bool,
    skip_damaged: bool,
    on_waiting: OnWaiting,
) -> Reader | PartitionedReader:
    """Return a reader of the topic, or of all its partitions. Raises INVALID_POSITION for a position of a partitioned
    topic in a topic without partitions, or the reverse."""
    names = [partition_name(topic_name(topic), k) for k in range(partitions)] or [topic]
    starts: list[Start]
    stops: list[int] | None = None
    if tail is not None:
        ends = [client.ends(name) for name in names]
        starts = [
            Position.before(last.incarnation, max(first_index, last.index + 1 - tail)) for first_index, last in ends
        ]
        stops = None if follow else [last.index + 1 for _, last in ends]
    else:
        starts = [_start_in(client, *one) for one in zip(names, _in_each(topic, start, partitions), strict=True)]
        if to is not None:
            places = cast(Sequence[PlaceInTopic], _in_each(topic, to, partitions))  # `--to` takes no word
            stops = [_stop_in(client, *one) for one in zip(names, places, strict=True)]
    if not partitions:
        stop_index = stops[0] if stops else None
        return client.reader(
            topic, starts[0], follow=follow, stop_index=stop_index, skip_damaged=skip_damaged, on_waiting=on_waiting
        )
    whole = starts[0] if isinstance(starts[0], str) else PartitionedPosition(tuple(cast(list[Position], starts)))
    return client.partitioned_reader(
        topic,
        whole,
        follow=follow,
        stop_indexes=stops,
        skip_damaged=skip_damaged,
        on_waiting=on_waiting,
    )


def _skipped(reader: Reader | PartitionedReader) -> list[tuple[str, range]]:
    """Return the skipped ranges of messages, with the name of their topic."""
    if isinstance(reader, Reader):
        return [(reader.topic, skipped) for skipped in reader.skipped]
    return [(partition_name(reader.topic, k), skipped) for k, some in reader.skipped.items() for skipped in some]


def _tell_skipped(
    reader: Reader | PartitionedReader, told: set[tuple[str, range]], as_json: bool
) -> set[tuple[str, range]]:
    """Report the skipped messages that are not in `told`. Return all skipped messages."""
    passed_over = _skipped(reader)
    for topic, skipped in passed_over:
        if (topic, skipped) in told:
            continue
        first, next_index = skipped.start, skipped.stop
        if as_json:
            found = {"topic": topic, "first_index": first, "next_index": next_index, "messages": len(skipped)}
            click.echo(json.dumps({"skipped": found}), err=True)
        else:
            click.echo(
                f"seqdedupe: skipped {counted(len(skipped), 'damaged message')} of {printable(topic)}, "
                f"indexes {first} to {next_index - 1}",
                err=True,
            )
    return set(passed_over)


def _payload_line(message: Message) -> bytes:
    return (message.payload or b"") + b"\n"


def _escaped_line(message: Message) -> bytes:
    return printable((message.payload or b"").decode(errors="backslashreplace")).encode() + b"\n"
