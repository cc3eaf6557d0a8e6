"""`seqdedupe top`: how a sidecar does, in a terminal."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from seqdedupe.cli.options import common, connect, print_json
from seqdedupe.errors import error
from seqdedupe.figures import ORDERS, beyond_snapshot, per_second, state_name
from seqdedupe.v1 import admin_pb2

DEFAULT_TOPICS = 20

Ask = Callable[[], admin_pb2.GetStatisticsResponse]


@click.command(short_help="Show how a sidecar does, again and again.")
@click.option("--once", is_flag=True, help="Show it once and end.")
@click.option(
    "--order", type=click.Choice(tuple(ORDERS)), default="rate", show_default=True, help="Which topics come first."
)
@click.option("--search", default="", metavar="TEXT", help="Only topics with this in their names.")
@click.option(
    "--topics", "limit", type=click.IntRange(1, 500), default=DEFAULT_TOPICS, show_default=True, help="At most so many."
)
@common
def top(once: bool, order: str, search: str, limit: int, address: str, as_json: bool) -> None:
    """Show the busiest topics of a sidecar with their rates, states and refusals, and what it warned of, every few
    seconds. Press q to end.

    With --json it prints a line each time. Where the output is no terminal, it shows it once.
    """
    with connect(address) as client:
        ask = partial(client.admin.statistics, search=search, order=ORDERS[order], limit=limit)
        if as_json:
            _print_again_and_again(ask, once)
            return
        try:
            from seqdedupe.cli import top_view
        except ModuleNotFoundError as e:
            raise error(
                "INVALID_CONFIGURATION",
                f"`top` needs {e.name}, which is not installed",
                hint="Install it: pip install 'seqdedupe[top]'. With --json it is not needed.",
            ) from e
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            top_view.show_once(first(ask), address)
        else:
            top_view.show(ask, address)


def first(ask: Ask) -> admin_pb2.GetStatisticsResponse:
    """With rates: where nobody has asked before, counting begins with the first question."""
    while not (found := ask()).activity.not_dup:
        time.sleep(found.interval_ms / 1000)
    return found


def _print_again_and_again(ask: Ask, once: bool) -> None:
    found = first(ask)
    print_json(_json(found))
    while not once:
        time.sleep(found.interval_ms / 1000)
        found = ask()
        print_json(_json(found))


def _json(found: admin_pb2.GetStatisticsResponse) -> dict[str, Any]:
    """The form is documented: keep it stable."""
    return {
        "version": found.version,
        "uptime_seconds": found.uptime_seconds,
        "is_serving": found.is_serving,
        "now_ms": found.now_ms,
        "interval_ms": found.interval_ms,
        "intervals": len(found.activity.not_dup),
        **_rates(found.activity, found.interval_ms),
        "states": {state_name(one.state): one.topics for one in found.states},
        "replay_left_messages": found.replay_left_messages,
        "refusals": {one.reason: one.count for one in found.refusals},
        "topics_found": found.topics_found,
        "topics": [
            {
                "name": one.topic.name,
                "state": state_name(one.topic.state),
                "why": one.topic.why or None,
                **_rates(one.activity, found.interval_ms),
                "beyond_snapshot": beyond_snapshot(one.topic),
                "snapshot_age_ms": one.snapshot_age_ms,
                "replay_left_messages": one.replay_left_messages,
                "producers": one.topic.producers,
            }
            for one in found.topics
        ],
        "warnings": [{"time_ms": one.time_ms, "level": one.level, "message": one.message} for one in found.warnings],
    }


def _rates(activity: admin_pb2.Activity, interval_ms: int) -> dict[str, float | int]:
    """Of the last interval a second, and sums of all intervals."""
    return {
        "stored_per_second": round(per_second(activity.not_dup, interval_ms), 3),
        "stored_bytes_per_second": round(per_second(activity.stored_bytes, interval_ms), 3),
        "dup_per_second": round(per_second(activity.dup, interval_ms), 3),
        "stored": sum(activity.not_dup),
        "dup": sum(activity.dup),
        "unknown": sum(activity.unknown),
        "refused": sum(activity.refused),
    }
