"""`seqdedupe read`: a topic's messages on stdout, all of their columns or those that are asked for."""

import base64
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import click

from seqdedupe.cli.common import common, connect_to
from seqdedupe.client import Message, PartitionedPosition
from seqdedupe.client.blocking import Client, PartitionedReader, Reader
from seqdedupe.client.pending import NO_PARTITION
from seqdedupe.client.reader import Start
from seqdedupe.client.route import OnWaiting
from seqdedupe.command import json_text, printable, standard_output, tell_waiting
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_INDEX
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, topic_name

# -- What `read` shows of a message, column by column, and choosing messages by it.

_PROPERTY = "property."


def _utf8(value: bytes | None) -> str | None:
    """The value as text; None if there is none, or if it is not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _base64(value: bytes | None) -> str | None:
    """What is not UTF-8; None of all else."""
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
    """The form is documented: keep it stable."""
    value: dict[str, object] = {}
    for name, column in _COLUMNS.items():
        if name == "payload":
            value["properties"] = message.properties
        found = column(message)
        if name.endswith("_base64"):
            if found is not None:  # in place of the text, which there is not
                value.pop(name.removesuffix("_base64"), None)
                value[name] = found
        elif name not in _ONLY_WHERE_THERE or found is not None:
            value[name] = found
    return json_text(value).encode() + b"\n"


@dataclass(frozen=True)
class Condition:
    """That a column or a property has this text; what a message does not have, has none."""

    column: str
    text: str

    @staticmethod
    def parse(text: str) -> "Condition":
        """Of `column=value`. Raises ValueError with what is wrong."""
        column, is_there, value = text.partition("=")
        if not is_there:
            raise ValueError(f"{text!r} is not COLUMN=VALUE.")
        if column not in _COLUMNS and (not column.startswith(_PROPERTY) or column == _PROPERTY):
            raise ValueError(f"there is no column {column!r}: they are {', '.join(_COLUMNS)} and {_PROPERTY}NAME.")
        return Condition(column, value)

    def holds(self, message: Message) -> bool:
        """Whether the message is as told."""
        column = _COLUMNS.get(self.column)
        if column is None:
            return message.properties.get(self.column.removeprefix(_PROPERTY)) == self.text
        found = column(message)
        return found is not None and str(found) == self.text


class _StartType(click.ParamType[Start | PartitionedPosition]):
    name = "start"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Start | PartitionedPosition:
        text = str(value)
        if text == "earliest" or text == "latest":
            return text  # type: ignore[return-value]
        if re.fullmatch(r"\d{1,19}", text, re.ASCII) and int(text) <= MAX_INDEX:
            return int(text)
        with suppress(SeqdedupeError, ValueError):  # of numbers that are too large for a position
            return Position.from_proto(Position.parse(text).to_proto())
        with suppress(SeqdedupeError):
            return PartitionedPosition.parse(text)
        raise click.BadParameter(f"{text!r} is not earliest, latest, an index, a message ID or a position.", ctx, param)


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
    type=_StartType(),
    default="earliest",
    show_default=True,
    metavar="earliest|latest|INDEX|MESSAGE_ID|POSITION",
    help="The first message left, the next one published, the one at an index, or the one after an ID or position.",
)
@click.option("--follow", is_flag=True, help="At the end wait for new messages instead of ending.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N messages.")
@click.option(
    "--where",
    "conditions",
    type=_ConditionType(),
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Only messages with this value in a column of --json, or in property.NAME. More than once: all must hold.",
)
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Pass over messages that are damaged on the sidecar's disk, and say on stderr which.",
)
@common
def read(
    topic: str,
    start: Start | PartitionedPosition,
    follow: bool,
    limit: int | None,
    conditions: tuple[Condition, ...],
    skip_damaged: bool,
    address: str,
    as_json: bool,
) -> None:
    """Print the messages of a topic: the payloads as they are, one a line, or with --json one object a line.

    On a terminal, control characters in payloads are shown as escapes. Of a partitioned topic all partitions are read,
    each in its own order.
    """
    with standard_output():
        out = sys.stdout.buffer
    form = json_line if as_json else _escaped_line if sys.stdout.isatty() else _payload_line
    waiting = partial(tell_waiting, topic, as_json)
    with connect_to(address, topic, on_waiting=waiting if follow else None) as client:
        partitions = client.admin.topic(topic).partitions
        names = [partition_name(topic_name(topic), k) for k in range(partitions)] or [topic]
        if not follow and limit is None:
            for name in names:
                client.ends(name)  # a topic that does not know its end says so in time
        left = limit
        with _reader(
            client, topic, start, partitions, follow=follow, skip_damaged=skip_damaged, on_waiting=waiting
        ) as reader:
            told: set[tuple[str, range]] = set()
            for stored in reader.batches():
                told = _tell_skipped(reader, told, as_json)
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
    start: Start | PartitionedPosition,
    partitions: int,
    *,
    follow: bool,
    skip_damaged: bool,
    on_waiting: OnWaiting,
) -> Reader | PartitionedReader:
    """A reader of the topic, or of all of its partitions. Raises INVALID_POSITION for a place of the other kind."""
    if not partitions and not isinstance(start, PartitionedPosition):
        return client.reader(topic, start, follow=follow, skip_damaged=skip_damaged, on_waiting=on_waiting)
    if partitions and (isinstance(start, PartitionedPosition) or start in ("earliest", "latest")):
        return client.partitioned_reader(topic, start, follow=follow, skip_damaged=skip_damaged, on_waiting=on_waiting)
    raise error(
        "INVALID_POSITION",
        f"{topic} has {partitions or 'no'} partitions, and {start} is no place in "
        + ("all of them" if partitions else "a topic that has none"),
        hint="Begin at earliest or latest, or read one partition by its name." if partitions else None,
    )


def _skipped(reader: Reader | PartitionedReader) -> list[tuple[str, range]]:
    """What was passed over, by the name of its topic."""
    if isinstance(reader, Reader):
        return [(reader.topic, skipped) for skipped in reader.skipped]
    return [(partition_name(reader.topic, k), skipped) for k, some in reader.skipped.items() for skipped in some]


def _tell_skipped(
    reader: Reader | PartitionedReader, told: set[tuple[str, range]], as_json: bool
) -> set[tuple[str, range]]:
    """Says which messages were passed over, but for those that were told; all of them."""
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
                f"seqdedupe: {len(skipped):,} messages of {printable(topic)} are damaged and were skipped, "
                f"indexes {first} to {next_index - 1}",
                err=True,
            )
    return set(passed_over)


def _payload_line(message: Message) -> bytes:
    return (message.payload or b"") + b"\n"


def _escaped_line(message: Message) -> bytes:
    return printable((message.payload or b"").decode(errors="backslashreplace")).encode() + b"\n"
