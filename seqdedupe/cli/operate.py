"""The operators' commands about single messages and producers."""

from datetime import UTC, datetime
from typing import Any

import click

from seqdedupe.cli.options import common, connect_to, print_json, print_table
from seqdedupe.cli.topics import position_json
from seqdedupe.command import echo, printable
from seqdedupe.message_id import Position
from seqdedupe.v1 import admin_pb2

_PREFIX = "MESSAGE_STATE_"


_NEGATIVE_NUMBERS = {"ignore_unknown_options": True}
"""So that -1 is an argument, and no option."""


@click.command("message-state", context_settings=_NEGATIVE_NUMBERS, short_help="Show what is known of one message.")
@click.argument("topic")
@click.argument("producer", required=False)
@click.argument("sequence_id", type=click.IntRange(0, 2**63 - 1), required=False)
@click.option("--deduplication-id", metavar="ID", help="Instead, in a topic of deduplication IDs: the message's ID.")
@common
def message_state(
    topic: str, producer: str | None, sequence_id: int | None, deduplication_id: str | None, address: str, as_json: bool
) -> None:
    """Show what is known of the message with this sequence ID: whether it is stored, and where."""
    by_id = bool(deduplication_id)
    if by_id != (producer is None) or by_id != (sequence_id is None):
        raise click.UsageError("Say PRODUCER and SEQUENCE_ID, or --deduplication-id.")
    with connect_to(address, topic) as client:
        found = client.admin.message_state(
            topic, producer or "", sequence_id or 0, deduplication_id=deduplication_id or ""
        )
    known = found.state in admin_pb2.MessageState.values()  # a newer sidecar may say more
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


@click.command("in-flight", short_help="List producers whose messages have been in flight for long.")
@click.argument("topic")
@click.option("--longer-than-ms", type=click.IntRange(0), default=1000, show_default=True, help="At least so long.")
@common
def in_flight(topic: str, longer_than_ms: int, address: str, as_json: bool) -> None:
    """List the producers that have had messages in flight for so long: at most 1,000, the longest first."""
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
        echo(f"and {found.producers - len(rows):,} producers more")


@click.command(
    "reset-producer",
    context_settings=_NEGATIVE_NUMBERS,
    short_help="Set a producer's highest sequence ID to a lower one.",
)
@click.argument("topic")
@click.argument("producer")
@click.argument("persisted", type=click.IntRange(-1, 2**63 - 1))
@common
def reset_producer(topic: str, producer: str, persisted: int, address: str, as_json: bool) -> None:
    """Set a producer's highest persisted sequence ID (-1: none), durable when this returns.

    What it sends above that ID is new again, also what the topic holds. Its sessions end.
    """
    with connect_to(address, topic) as client:
        done = client.admin.reset_producer(topic, producer, persisted)
    if as_json:
        print_json({"name": producer, "persisted": persisted, "persisted_before": done.persisted_before})
    else:
        echo(f"producer {printable(producer)} is reset from {done.persisted_before} to {persisted}")
