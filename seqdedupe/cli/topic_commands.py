"""The operators' commands about topics: the list, single messages and producers, cursors, and policies."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from seqdedupe.cli.common import common, connect, connect_to, is_alone, position_json, tell
from seqdedupe.client.admin import MODES, ROUTES, PolicyState
from seqdedupe.command import echo, print_json, print_table, printable
from seqdedupe.exports import read_stock
from seqdedupe.figures import counted
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.sidecar_options import Command
from seqdedupe.topic_facts import cursor_lag, state_name
from seqdedupe.v1 import admin_pb2

T = TypeVar("T")


def _known(topic: admin_pb2.Topic, value: T) -> T | None:
    """Return the value. Return None if the value is unknown because the topic is damaged or could not be opened yet."""
    is_closed = not topic.HasField("last") and not topic.partitions
    return None if topic.state == admin_pb2.TOPIC_STATE_DAMAGED or is_closed else value


def _of_log(topic: admin_pb2.Topic, value: T) -> T | None:
    """Do the same as `_known`. Also return None for a partitioned topic, which has no separate log."""
    return None if topic.partitions else _known(topic, value)


def _messages(topic: admin_pb2.Topic) -> int | None:
    """Return the number of messages that can be read."""
    return _of_log(topic, topic.last.index + 1 - topic.first_index)


def _topic_json(topic: admin_pb2.Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
        "state": state_name(topic.state),
        "why": topic.why or None,
        "partitions": topic.partitions,
        "unused_partitions": topic.unused_partitions,
        "partition_of": topic.partition_of or None,
        "entry_format": _entry_format(topic) or None,
        "deduplication_mode": _mode(topic),
        "deduplication_route": _route(topic),
        "window": _window_json(topic),
        "deduplication_enabled": topic.policy.deduplication_enabled if topic.HasField("policy") else None,
        "messages": _messages(topic),
        "first_index": _of_log(topic, topic.first_index),
        "last": _of_log(topic, position_json(Position.from_proto(topic.last))),
        "snapshot_index": _of_log(topic, topic.snapshot_index),
        "term": _of_log(topic, topic.term),
        "producers": _of_log(topic, topic.producers),
        "log_bytes": _known(topic, topic.log_bytes),
        "not_dup": topic.not_dup,
        "dup": topic.dup,
        "unknown": topic.unknown,
        "refused": topic.refused,
        "purged": topic.purged,
        "resumed_after_purge": topic.resumed_after_purge,
        "damaged_places": topic.damaged_places,
        "damaged_messages": topic.damaged_messages,
        "log_void": topic.log_void,
        "log_repeats": topic.log_repeats,
        "log_foreign": topic.log_foreign,
        "log_earlier": topic.log_earlier,
        "may_lose_messages": topic.may_lose_messages,
        "may_lose_ms": topic.may_lose_ms,
        "not_durable_messages": topic.not_durable_messages,
    }


def _print_topic(topic: admin_pb2.Topic, as_json: bool) -> None:
    if as_json:
        print_json(_topic_json(topic))
        return
    for name, value in (
        ("topic", topic.name),
        ("state", state_name(topic.state) + (f": {topic.why}" if topic.why else "")),
        *(_of_whole(topic) if topic.partitions else _of_one(topic)),
        ("log", _known(topic, f"{topic.log_bytes:,} bytes")),
        ("verdicts", f"{topic.not_dup:,} NotDup, {topic.dup:,} Dup, {topic.unknown:,} Unknown since it was opened"),
        ("refused", f"{counted(topic.refused, 'frame')} since it was opened"),
        *_may_lose(topic),
        *_forgotten(topic),
        *_damage(topic),
        *_skipped(topic),
    ):
        echo(f"{name:<14}{printable(str(_shown(value)))}")


def _may_lose(topic: admin_pb2.Topic) -> list[tuple[str, object]]:
    """Return a line with the number of messages that a power cut may lose under the flush policy; no line if this
    number is 0."""
    if not topic.may_lose_messages:
        return []
    at_most = f"{counted(topic.may_lose_messages, 'message')} of the last {topic.may_lose_ms / 1000:g} s"
    now = f"{topic.not_durable_messages:,} now"
    return [("power cut", f"may take {at_most} at most from producers that have ended ({now})")]


def _of_whole(topic: admin_pb2.Topic) -> list[tuple[str, object]]:
    """Return the lines for a partitioned topic."""
    by_route = f"; partitions by {_route(topic)}" if _route(topic) else ""
    unused = f"{topic.unused_partitions} that Pulsar has added: the topic was made with {topic.partitions}, for good"
    return [
        ("partitions", f"{topic.partitions}, {topic.name}-partition-0 and on: each can be shown by its name"),
        *([("not used", unused)] if topic.unused_partitions else []),
        *([("entries", _entry_format(topic))] if topic.entry_format else []),
        ("deduplication", (_deduplication(topic) or "?") + by_route),
    ]


def _of_one(topic: admin_pb2.Topic) -> list[tuple[str, object]]:
    """Return the lines for a topic that has a log, also for a partition."""
    return [
        *([("partition of", topic.partition_of)] if topic.partition_of else []),
        *([("entries", _entry_format(topic))] if topic.entry_format else []),
        ("deduplication", _deduplication(topic)),
        *_window(topic),
        ("messages", _known(topic, _extent(topic))),
        ("last", _known(topic, Position.from_proto(topic.last))),
        ("snapshot", _known(topic, f"up to index {topic.snapshot_index}, not included")),
        ("producers", _known(topic, f"{topic.producers:,}")),
    ]


def _mode(topic: admin_pb2.Topic) -> str | None:
    """Return the name of the deduplication mode; None if it is not known."""
    return next((name for name, mode in MODES.items() if name and mode == topic.deduplication_mode), None)


def _route(topic: admin_pb2.Topic) -> str | None:
    """Return the name of the route by which messages find their partitions; None if the topic has no route."""
    return next((name for name, route in ROUTES.items() if name and route == topic.deduplication_route), None)


def _deduplication(topic: admin_pb2.Topic) -> str | None:
    on_off = _on_off(topic)
    is_by_id = topic.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    return f"{on_off}, by deduplication ID" if is_by_id and on_off is not None else on_off


def _window_json(topic: admin_pb2.Topic) -> dict[str, Any] | None:
    """Return how far back the topic recognizes copies of messages; None for a topic of sequence IDs."""
    if topic.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        return None
    return {
        "first_index": None if topic.partitions else topic.window_first_index,
        "first_publish_time_ms": topic.window_first_publish_time_ms or None,
        "messages": topic.window_messages,
        "messages_on_disk": topic.window_messages_on_disk,
        "forgotten": topic.window_forgotten,
        "memory_bytes": topic.window_memory_bytes,
        "imported": topic.window_imported,
        "imported_missing": topic.window_imported_missing,
    }


def _window(topic: admin_pb2.Topic) -> list[tuple[str, object]]:
    """Return a line for a topic of deduplication IDs."""
    if topic.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        return []
    since = ""
    if topic.window_first_publish_time_ms:
        since = f" since {datetime.fromtimestamp(topic.window_first_publish_time_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    reach = f"{counted(topic.window_messages, 'ID')}, from index {topic.window_first_index} on{since}"
    on_disk = f", {topic.window_messages_on_disk:,} on disk" if topic.window_messages_on_disk else ""
    memory = f"{topic.window_memory_bytes:,} bytes"
    lines: list[tuple[str, object]] = [("window", f"{reach}{on_disk}; {topic.window_forgotten:,} forgotten; {memory}")]
    if topic.window_imported or topic.window_imported_missing:
        missing = ", MISSING: import the same file again" if topic.window_imported_missing else ""
        lines.append(("imported", f"{counted(topic.window_imported, 'ID')}{missing}"))
    return lines


def _entry_format(topic: admin_pb2.Topic) -> str:
    if not topic.entry_format:
        return ""
    return admin_pb2.EntryFormat.Name(topic.entry_format).removeprefix("ENTRY_FORMAT_").lower()


def _extent(topic: admin_pb2.Topic) -> str:
    """Return the number of messages, and their indexes."""
    count = topic.last.index + 1 - topic.first_index
    if not count:
        return f"0, the next one gets index {topic.first_index}"
    return f"{count:,}, indexes {topic.first_index} to {topic.last.index}"


def _forgotten(topic: admin_pb2.Topic) -> list[tuple[str, str]]:
    """Return a line for a topic that has forgotten producers."""
    if not topic.purged and not topic.resumed_after_purge:
        return []
    return [
        (
            "forgotten",
            f"{counted(topic.purged, 'producer')} since it was opened; {topic.resumed_after_purge:,} came back",
        )
    ]


def _damage(topic: admin_pb2.Topic) -> list[tuple[str, str]]:
    """Return a line for a topic in whose log damage was found."""
    if not topic.damaged_places:
        return []
    found = f"{counted(topic.damaged_places, 'place')} of the log, {counted(topic.damaged_messages, 'message')}"
    return [("damaged", f"{found}: see the sidecar's log, and `seqdedupe doctor`")]


def _skipped(topic: admin_pb2.Topic) -> list[tuple[str, str]]:
    """Return a line with the number of log entries that do not belong to the topic; no line if there are none."""
    counts = {
        "of owners that had lost it": topic.log_void,
        "twice": topic.log_repeats,
        "of others": topic.log_foreign,
        "of others before it had an owner": topic.log_earlier,
    }
    if not any(counts.values()):
        return []
    return [
        ("skipped", ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) + " since it was opened")
    ]


def _shown(value: object) -> object:
    return "?" if value is None else value


def _title(topic: admin_pb2.Topic) -> str:
    """Return the name in the list, with the number of partitions."""
    return f"{topic.name} ({counted(topic.partitions, 'partition')})" if topic.partitions else topic.name


def _on_off(topic: admin_pb2.Topic) -> str | None:
    if not topic.HasField("policy"):
        return None
    return "on" if topic.policy.deduplication_enabled else "off"


def _print_topics(found: list[admin_pb2.Topic]) -> None:
    print_table(
        ("TOPIC", "STATE", "DEDUPLICATION", "MESSAGES", "PRODUCERS", "LOG BYTES"),
        [
            (_title(t), state_name(t.state), _on_off(t), _messages(t), _of_log(t, t.producers), _known(t, t.log_bytes))
            for t in found
        ],
    )
    if any(topic.state == admin_pb2.TOPIC_STATE_STANDBY for topic in found):
        echo("STANDBY: another sidecar owns the topic (`seqdedupe topics show TOPIC`).")


@click.group(invoke_without_command=True)
@common
@click.pass_context
def topics(context: click.Context, address: str, as_json: bool) -> None:
    """List the topics. The commands below create, delete, move and show a topic."""
    if not is_alone(context):
        return
    with connect(address) as client:
        found = client.admin.topics()
    if as_json:
        print_json([_topic_json(topic) for topic in found])
        return
    _print_topics(found)


@topics.command()
@click.argument("name")
@click.option(
    "--deduplication/--no-deduplication",
    default=None,
    help="Whether the topic deduplicates, regardless of its namespace's policy.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of partitions. Cannot be changed later.",
)
@click.option(
    "--entry-format",
    type=click.Choice(("plain", "packed", "native")),
    help="On a Pulsar cluster: one message per entry, one batch per entry, or genuine batches of Pulsar.",
)
@click.option(
    "--schema",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="On a Pulsar cluster: the schema of messages, as for `pulsar-admin schemas upload`.",
)
@click.option(
    "--deduplication-mode",
    type=click.Choice(("sequence-id", "deduplication-id")),
    help="What identifies a message: the producer's sequence ID, or a separate ID per message. Cannot be changed.",
)
@click.option(
    "--deduplication-route",
    type=click.Choice(("id", "key")),
    help="With partitions and deduplication IDs: what decides the partition. Cannot be changed later. Default: id.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="On a Pulsar cluster: make a topic that exists there a topic of the sidecar, with its messages.",
)
@click.option(
    "--watermarks",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --take-over: what `seqdedupe job bootstrap` has read at Pulsar's brokers. Only the rest is read then.",
)
@common
def create(
    name: str,
    deduplication: bool | None,
    partitions: int | None,
    entry_format: str | None,
    schema: TextIO | None,
    deduplication_mode: str | None,
    deduplication_route: str | None,
    take_over: bool,
    watermarks: Path | None,
    address: str,
    as_json: bool,
) -> None:
    """Create a topic, or take over one of Pulsar's, and show it."""
    if watermarks is not None and not take_over:
        raise click.UsageError("--watermarks is for --take-over.")
    read = read_stock(watermarks) if watermarks is not None else None
    with connect(address) as client:
        made = client.admin.create_topic(
            name,
            partitions=partitions or 0,
            deduplication_mode=deduplication_mode or "",
            deduplication_route=deduplication_route or "",
            entry_format=entry_format or "",
            schema=schema.read() if schema is not None else "",
            deduplication_enabled=deduplication,
            take_over=take_over,
            watermarks=read,
        )
    _print_topic(made, as_json)


@topics.command()
@click.argument("name")
@common
def delete(name: str, address: str, as_json: bool) -> None:
    """Delete a topic with its messages, producers and partitions. The command does not ask for confirmation, and the
    deletion cannot be undone."""
    with connect_to(address, name) as client:
        client.admin.delete_topic(name)
    tell(as_json, {"deleted": topic_name(name)}, f"{topic_name(name)} is deleted")


@topics.command()
@click.argument("name")
@common
def show(name: str, address: str, as_json: bool) -> None:
    """Show a topic."""
    with connect_to(address, name) as client:
        _print_topic(client.admin.topic(name), as_json)


@topics.command()
@click.argument("name")
@click.option(
    "--to", metavar="ADDRESS", default="", help="The new sidecar. Default: any sidecar that accepts the topic."
)
@common
def move(name: str, to: str, address: str, as_json: bool) -> None:
    """Move a topic to another sidecar of the cluster, or to a sidecar with a separate log. The command ends when the
    other sidecar serves the topic."""
    with connect_to(address, name) as client:
        owner = client.admin.move_topic(name, to)
    name = topic_name(name)
    tell(as_json, {"topic": name, "owner_address": owner}, f"{name} is served by the sidecar at {owner}")


@click.command()
@click.argument("topic")
@common
def producers(topic: str, address: str, as_json: bool) -> None:
    """List a topic's producers with their highest sequence IDs, in the order of their first use."""
    with connect_to(address, topic) as client:
        found = client.admin.producers(topic)
    if as_json:
        print_json([{"name": p.name, "persisted": p.persisted, "pushed": p.pushed, "epoch": p.epoch} for p in found])
        return
    print_table(("PRODUCER", "PERSISTED", "PUSHED"), [(p.name, p.persisted, p.pushed) for p in found])


@click.command()
@click.argument("topic")
@common
def snapshot(topic: str, address: str, as_json: bool) -> None:
    """Take a snapshot of a topic. The command ends when the snapshot is durable."""
    with connect_to(address, topic) as client:
        position = client.admin.snapshot(topic)
    values = {"topic": topic_name(topic), "position": position_json(position)}
    tell(as_json, values, f"the snapshot is durable: recovery would start after {position}")


# -- The operators' commands about cursors, single messages and producers.


@click.command()
@click.argument("topic")
@click.option("--remove", metavar="NAME", help="Remove this cursor.")
@click.option(
    "--hold",
    nargs=2,
    type=(str, click.IntRange(0, 2**31 - 1)),
    metavar="NAME MB",
    help="Retention keeps messages after this cursor, up to MB of log. 0: retention ignores the cursor.",
)
@common
def cursors(topic: str, remove: str | None, hold: tuple[str, int] | None, address: str, as_json: bool) -> None:
    """List the cursors of a topic, after --hold and --remove have taken effect."""
    with connect_to(address, topic) as client:
        if hold is not None:
            client.admin.hold_cursor(topic, *hold)
        if remove is not None:
            client.admin.delete_cursor(topic, remove)
        found = client.admin.cursors(topic)
        seen = client.admin.topic(topic) if found else None
    lags = [None if seen is None else cursor_lag(one, seen) for one in found]
    if as_json:
        listed = [
            {
                "name": one.name,
                "position": position_json(Position.from_proto(one.position)),
                "note": one.note,
                "hold_retention_in_mb": one.hold_retention_in_mb,
                "lag_messages": lag,
            }
            for one, lag in zip(found, lags, strict=True)
        ]
        print_json(listed)
        return
    rows = [
        (one.name, one.position.index, lag, one.hold_retention_in_mb or "-", one.note)
        for one, lag in zip(found, lags, strict=True)
    ]
    print_table(("CURSOR", "INDEX", "LAG", "HOLDS MB", "NOTE"), rows)
    if not rows:
        echo(f"{printable(topic)} has none")


_PREFIX = "MESSAGE_STATE_"


_NEGATIVE_NUMBERS = {"ignore_unknown_options": True}
"""The setting with which -1 is an argument, and no option."""


@click.command("message-state", context_settings=_NEGATIVE_NUMBERS)
@click.argument("topic")
@click.argument("producer", required=False)
@click.argument("sequence_id", type=click.IntRange(0, 2**63 - 1), required=False)
@click.option(
    "--deduplication-id",
    metavar="ID",
    help="In a topic of deduplication IDs: the message's ID, instead of PRODUCER and SEQUENCE_ID.",
)
@common
def message_state(
    topic: str, producer: str | None, sequence_id: int | None, deduplication_id: str | None, address: str, as_json: bool
) -> None:
    """Show the state of the message with this sequence ID: whether the message is stored, and where."""
    by_id = bool(deduplication_id)
    if by_id != (producer is None) or by_id != (sequence_id is None):
        raise click.UsageError("Give PRODUCER and SEQUENCE_ID, or --deduplication-id.")
    with connect_to(address, topic) as client:
        found = client.admin.message_state(
            topic, producer or "", sequence_id or 0, deduplication_id=deduplication_id or ""
        )
    known = found.state in admin_pb2.MessageState.values()  # a newer sidecar may have more
    state = admin_pb2.MessageState.Name(found.state).removeprefix(_PREFIX) if known else str(found.state)
    position = Position.from_proto(found.position) if found.HasField("position") else None
    if as_json:
        print_json(
            {
                "state": state,
                "in_flight_ms": found.in_flight_ms if state == "IN_FLIGHT" else None,
                "position": position and position_json(position),
                "publish_time_ms": found.publish_time_ms or None,
                "pushed": found.pushed,
                "persisted": found.persisted,
            }
        )
        return
    lines: list[tuple[str, Any]] = [("state", state)]
    if state == "IN_FLIGHT":
        lines.append(("in flight", f"for {found.in_flight_ms:,} ms"))
    if position is not None:
        lines += [("index", position.index), ("message ID", position.message_id)]
    if found.publish_time_ms:
        published = datetime.fromtimestamp(found.publish_time_ms / 1000, UTC)
        lines.append(("published", f"{published.isoformat(sep=' ', timespec='milliseconds')}"))
    numbers = f"persisted {found.persisted}, pushed {found.pushed}"
    if found.pushed < 0:
        numbers = f"no sequence ID of it counts in this topic: {numbers}"
    if not by_id:
        lines.append(("producer", numbers))
    for name, value in lines:
        echo(f"{name:<14}{printable(str(value))}")


@click.command("in-flight")
@click.argument("topic")
@click.option(
    "--longer-than-ms",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Count only messages that have been in flight for N ms or longer.",
    metavar="N",
)
@common
def in_flight(topic: str, longer_than_ms: int, address: str, as_json: bool) -> None:
    """List the producers that have had messages in flight for a long time: at most 1,000, the longest time first."""
    with connect_to(address, topic) as client:
        found = client.admin.in_flight(topic, longer_than_ms=longer_than_ms)
    rows = [(p.producer_name, p.first_sequence_id, p.last_sequence_id, p.in_flight_ms) for p in found.in_flight]
    if as_json:
        names = ("producer_name", "first_sequence_id", "last_sequence_id", "in_flight_ms")
        listed = [dict(zip(names, row, strict=True)) for row in rows]
        print_json({"producers": found.producers, "in_flight": listed})
        return
    print_table(("PRODUCER", "FIRST ID", "LAST ID", "IN FLIGHT MS"), rows)
    if found.producers > len(rows):
        echo(f"and {counted(found.producers - len(rows), 'more producer')}")


@click.command("reset-producer", context_settings=_NEGATIVE_NUMBERS)
@click.argument("topic")
@click.argument("producer")
@click.argument("persisted", type=click.IntRange(-1, 2**63 - 1))
@common
def reset_producer(topic: str, producer: str, persisted: int, address: str, as_json: bool) -> None:
    """Set a producer's highest persisted sequence ID to a lower one (-1: none). The change is durable when the command
    ends.

    Messages of the producer above that ID are then new again, even if the topic already has them. The producer's
    sessions end.
    """
    with connect_to(address, topic) as client:
        done = client.admin.reset_producer(topic, producer, persisted)
    values = {"name": producer, "persisted": persisted, "persisted_before": done.persisted_before}
    tell(as_json, values, f"producer {producer} is reset from {done.persisted_before} to {persisted}")


# -- The commands about policies: of topics and of namespaces.

_WORDS = {"gap": ("ALLOW", "REJECT"), "overlap": ("REJECT", "PULSAR")}
_NAMES = [field.name for field in admin_pb2.TopicPolicy.DESCRIPTOR.fields]


def _values(policy: Any) -> dict[str, Any]:
    """Return each value by name; None for a value that is not set."""
    values: dict[str, Any] = {}
    for field in policy.DESCRIPTOR.fields:
        value = getattr(policy, field.name) if policy.HasField(field.name) else None
        if value is not None and field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)  # a newer sidecar may have more
            value = str(value) if known is None else known.name.rpartition("_")[2]
        values[field.name] = value
    return values


def _print(name: str, state: PolicyState, as_json: bool) -> None:
    is_set, applied = _values(state.set), _values(state.applied)
    if as_json:
        print_json({"name": name, "set": is_set, "applied": applied})
        return
    rows = [(value, _text(is_set[value]), _text(applied[value])) for value in _NAMES]
    print_table(("POLICY", "SET", "APPLIED"), rows)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)


@click.group()
def policy() -> None:
    """Show, set and remove the policy of a topic or a namespace (tenant/namespace)."""


@policy.command()
@click.argument("name", metavar="TOPIC|NAMESPACE")
@common
def get(name: str, address: str, as_json: bool) -> None:
    """Show the values that are set, and the effective values."""
    with connect_to(address, name) as client:
        _print(name, client.admin.policy(name), as_json)


_NUMBERS = {
    "deduplication-entries-interval": "Take a snapshot after N stored batches.",
    "deduplication-snapshot-interval-seconds": "Take a snapshot N seconds after a change; 0: no limit.",
    "retention-size-in-mb": "Keep N MB of the log; -1: keep the whole log.",
    "retention-time-in-minutes": "Keep messages for N minutes; -1: for ever.",
    "deduplication-producer-inactivity-timeout-minutes": "Forget a producer that was not used for N minutes; 0: never.",
    "log-flush-interval-messages": "Sync the log after N messages; 1: at every commit.",
    "log-flush-interval-ms": "Sync the log N ms after a message; 0: at every commit.",
    "deduplication-window-max-messages": "Forget a deduplication ID after N later messages.",
    "deduplication-window-max-bytes": "Forget the oldest IDs when all IDs have more than N bytes; -1: no limit.",
    "deduplication-window-max-minutes": "Forget an ID N minutes after its message; -1: no limit.",
}
"""The values that are numbers, and their help."""


def _number_options(command: Command) -> Command:
    for name, what in reversed(_NUMBERS.items()):
        command = click.option(f"--{name}", type=int, metavar="N", help=what)(command)
    return command


@policy.command("set")
@click.argument("name", metavar="TOPIC|NAMESPACE")
@click.option(
    "--deduplication/--no-deduplication",
    "deduplication_enabled",
    default=None,
    help="Whether messages are deduplicated.",
)
@click.option(
    "--gap", type=click.Choice(_WORDS["gap"], case_sensitive=False), help="Whether sequence IDs may have gaps."
)
@click.option(
    "--overlap",
    type=click.Choice(_WORDS["overlap"], case_sensitive=False),
    help="The answer to a broker's range of IDs of which a part is persisted.",
)
@_number_options
@common
def set_values(name: str, address: str, as_json: bool, **values: Any) -> None:
    """Set the given values, and keep the other values. When the command ends, the new values are in force and
    durable."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        raise click.UsageError("Give at least one value to set.")
    for key in _WORDS.keys() & given.keys():
        given[key] = f"{key.upper()}_POLICY_{given[key].upper()}"
    with connect_to(address, name) as client:
        _print(name, client.admin.set_policy(name, admin_pb2.TopicPolicy(**given)), as_json)


@policy.command()
@click.argument("name", metavar="TOPIC|NAMESPACE")
@click.argument("values", nargs=-1, metavar="[VALUE]...", type=click.Choice(_NAMES))
@common
def remove(name: str, values: tuple[str, ...], address: str, as_json: bool) -> None:
    """Remove the named values, or all values. The removed values are then inherited again."""
    with connect_to(address, name) as client:
        _print(name, client.admin.remove_policy(name, *values), as_json)
