"""The operators' commands that concern a whole sidecar: compiling kernels, listing a cluster's sidecars, exports and
imports, `top`, checking a configuration, and listing profiles."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from seqdedupe import exports, files
from seqdedupe.cli.common import as_json_option, common, connect, connect_to, is_alone, position_json, tell
from seqdedupe.command import echo, needing, print_json, print_table, printable
from seqdedupe.errors import error
from seqdedupe.figures import counted, per_second
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.sidecar_options import PROFILE_KEYS, PROFILE_VARIABLE, read_profiles
from seqdedupe.topic_facts import ORDERS, beyond_snapshot, state_name
from seqdedupe.v1 import admin_pb2


@click.command()
@common
def version(address: str, as_json: bool) -> None:
    """Show the versions of this command and of the sidecar, and the sidecar's limits."""
    with connect(address) as client:
        answer = client.admin.version()
    own = metadata.version("seqdedupe")
    if as_json:
        numbers = ("record_format_version", "uptime_seconds", "max_batch_bytes", "max_batch_rows")
        print_json({"command": own, "sidecar": answer.version} | {name: getattr(answer, name) for name in numbers})
        return
    echo(f"command       {own}")
    where = f"one of {address}" if "," in address else address
    echo(f"sidecar       {answer.version}, serving at {where} for {answer.uptime_seconds:,} s")
    echo(f"batches       at most {answer.max_batch_rows:,} rows and {answer.max_batch_bytes:,} bytes")


@click.command("compile")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compile_kernels(as_json: bool) -> None:
    """Compile the kernels of the sidecar once for all users of this installation. Afterwards a sidecar starts without
    compiling them.

    The command takes up to a minute. The kernels are for this CPU and these versions of seqdedupe, numba and Python.
    Run the command on each machine and after each upgrade, as the user who installs seqdedupe.
    """
    with needing("the sidecar needs", "sidecar"):
        from broker_sidecar import kernels

        folder = kernels.compile_for_installation()
    tell(
        as_json,
        {"folder": str(folder), "fits": kernels.fits()},
        f"compiled kernels are in {folder}",
        f"they fit {kernels.fits()}",
    )


@click.group(invoke_without_command=True)
@common
@click.pass_context
def sidecars(context: click.Context, address: str, as_json: bool) -> None:
    """List the sidecars of a cluster, and how many entries the cluster keeps for each sidecar. `sidecars forget`
    removes a sidecar from the list."""
    if not is_alone(context):
        return
    with connect(address) as client:
        found = client.admin.sidecars()
    if as_json:
        values = ("topics_owned", "subscriptions", "kept_entries", "kept_bytes", "is_this")
        print_json(
            [
                {"name": one.name, "addresses": list(one.addresses)}
                | {name: getattr(one, name) for name in values}
                | {"shards": one.shards or None}
                for one in found
            ]
        )
        return
    if any(one.shards for one in found):
        print_table(("ADDRESS", "SHARDS", "OWNS TOPICS"), [(one.name, one.shards, one.topics_owned) for one in found])
        return
    print_table(
        ("SIDECAR", "ADDRESS", "OWNS TOPICS", "SUBSCRIPTIONS", "KEPT ENTRIES", "KEPT BYTES"),
        [
            (
                one.name,
                " ".join(one.addresses) or None,
                one.topics_owned,
                one.subscriptions,
                one.kept_entries,
                one.kept_bytes,
            )
            for one in found
        ],
    )
    for one in found:
        if len(one.addresses) > 1:
            two = "it has moved, or two sidecars have the same name, which is not allowed"
            echo(printable(f"{one.name} has {len(one.addresses)} addresses: {two}"))


@sidecars.command()
@click.argument("name")
@common
def forget(name: str, address: str, as_json: bool) -> None:
    """Remove the subscriptions of a sidecar that will never run again. The cluster then keeps no messages for this
    sidecar."""
    with connect(address) as client:
        removed = client.admin.forget_sidecar(name)
    lines = [f"{topic}: the subscription of {name} is removed" for topic in removed]
    tell(as_json, {"forgotten": name, "topics": removed}, *lines)


# -- The operators' commands that write a topic's numbers to a file, read them from one, and make them from its log.

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export")
@click.argument("topic")
@click.argument("file", type=_FILE)
@click.option(
    "--watermarks",
    "only_watermarks",
    is_flag=True,
    help="Write only the producers' highest sequence IDs, to import them into another topic.",
)
@common
def export_file(topic: str, file: Path, only_watermarks: bool, address: str, as_json: bool) -> None:
    """Write a snapshot of a topic, as of one moment, to a file. An existing file is replaced."""
    values = {"topic": topic_name(topic), "kind": "watermarks" if only_watermarks else "snapshot"}
    with connect_to(address, topic) as client:
        if only_watermarks:
            producers = client.admin.export_watermarks(topic, file)
            text = f"the watermarks of {counted(producers, 'producer')} are in {file}"
            tell(as_json, values | {"producers": producers}, text)
            return
        head = client.admin.export_snapshot(topic, file)
    position = Position.from_proto(head.position)
    text = f"a snapshot with {counted(head.producers, 'producer')}, up to {position}, is in {file}"
    tell(as_json, values | {"producers": head.producers, "position": position_json(position)}, text)


@click.command("import")
@click.argument("topic")
@click.argument("file", type=_FILE)
@common
def import_file(topic: str, file: Path, address: str, as_json: bool) -> None:
    """Import a file of `export` or `job bootstrap` into a topic. The import is durable when the command ends.

    Import a snapshot into the topic from which it was exported. Import watermarks into a new topic that no producer has
    opened. Import a window into a topic of deduplication IDs without messages.
    """
    magic = files.magic_of(file)
    if magic not in (exports.SNAPSHOT_MAGIC, exports.WATERMARKS_MAGIC, exports.WINDOW_MAGIC):
        raise files.not_as_written(file, "it is neither a snapshot nor a file of watermarks or of a window")
    with connect_to(address, topic) as client:
        if magic == exports.SNAPSHOT_MAGIC:
            _say_opened(client.admin.import_snapshot(topic, file), "snapshot", "from the snapshot", as_json)
            return
        if magic == exports.WINDOW_MAGIC:
            ids = client.admin.import_window(topic, file)
            values = {"topic": topic_name(topic), "kind": "window", "ids": ids}
            tell(as_json, values, f"a window of {counted(ids, 'deduplication ID')} is in force")
            return
        producers = client.admin.import_watermarks(topic, file)
    values = {"topic": topic_name(topic), "kind": "watermarks", "producers": producers}
    tell(as_json, values, f"the watermarks of {counted(producers, 'producer')} are in force")


@click.command("rebuild-topic")
@click.argument("topic")
@common
def rebuild_topic(topic: str, address: str, as_json: bool) -> None:
    """Rebuild the store's records of a topic from the topic's log. The other topics stay available."""
    with connect_to(address, topic) as client:
        _say_opened(client.admin.rebuild_topic(topic), "log", "from its log", as_json)


def _say_opened(topic: admin_pb2.Topic, kind: str, where: str, as_json: bool) -> None:
    state = state_name(topic.state)
    text = f"{topic.name} was opened again {where}, and is {state}" + (f": {topic.why}" if topic.why else "")
    values = {"topic": topic.name, "kind": kind, "producers": topic.producers, "state": state, "why": topic.why or None}
    tell(as_json, values, text)


# -- `seqdedupe top`: the state of a sidecar, in a terminal.

DEFAULT_TOPICS = 20


Ask = Callable[[], admin_pb2.GetStatisticsResponse]


@click.command()
@click.option("--once", is_flag=True, help="Show the sidecar once, then end.")
@click.option(
    "--order", type=click.Choice(tuple(ORDERS)), default="rate", show_default=True, help="The order of the topics."
)
@click.option("--search", default="", metavar="TEXT", help="Only topics with this text in their names.")
@click.option(
    "--topics",
    "limit",
    type=click.IntRange(1, 500),
    default=DEFAULT_TOPICS,
    show_default=True,
    help="The most topics to show.",
)
@common
def top(once: bool, order: str, search: str, limit: int, address: str, as_json: bool) -> None:
    """Show the busiest topics of a sidecar with their rates, states and refusals, and its last warnings.

    The view changes every few seconds; q ends it. With --json the command prints a line at each update. If the output
    is not a terminal, the command prints the view once.
    """
    with connect(address) as client:
        ask = partial(client.admin.statistics, search=search, order=ORDERS[order], limit=limit)
        if as_json:
            _print_again_and_again(ask, once)
            return
        with needing("`top` needs", "top", otherwise=" With --json it is not needed."):
            from seqdedupe.cli.top_view import show, show_once
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            show_once(first(ask), address)
        else:
            show(ask, address)


def first(ask: Ask) -> admin_pb2.GetStatisticsResponse:
    """Return statistics with rates. The sidecar begins to count at the first request, so the first answer may have no
    rates."""
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
    """Return the statistics. The form is documented: keep it stable."""
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
    """Return the rates of the last interval per second, and the sums of all intervals."""
    return {
        "stored_per_second": round(per_second(activity.not_dup, interval_ms), 3),
        "stored_bytes_per_second": round(per_second(activity.stored_bytes, interval_ms), 3),
        "dup_per_second": round(per_second(activity.dup, interval_ms), 3),
        "stored": sum(activity.not_dup),
        "dup": sum(activity.dup),
        "unknown": sum(activity.unknown),
        "refused": sum(activity.refused),
    }


@click.group()
def config() -> None:
    """Check the configuration of a sidecar."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@as_json_option
def check(file: Path | None, as_json: bool) -> None:
    """List everything that would prevent a start with this file. Start nothing.

    As at a start, SEQDEDUPE_* variables override FILE. The command locks, creates and writes nothing. Run the command
    as the sidecar's user. Warnings do not prevent a start.
    """
    with needing("this needs", "sidecar"):
        from broker_sidecar.__main__ import find_problems

        problems = find_problems(file, os.environ)
    errors = sum(problem.ends_start for problem in problems)
    values = [
        {
            "is_error": ends_start,
            "key": why.numbers.get("key"),
            "reason": why.reason,
            "message": why.message,
            "hint": why.hint,
        }
        for why, ends_start in problems
    ]
    lines = [f"{'error' if ends_start else 'warning'}: {why} {why.hint}" for why, ends_start in problems]
    if not errors:
        lines.append(f"the configuration is valid{': warnings alone' if problems else ''}")
    tell(as_json, {"file": None if file is None else str(file), "problems": values}, *lines)
    if errors:
        what = f"the configuration has {counted(errors, 'error')}: a start would end with the first"
        raise error("INVALID_CONFIGURATION", what, errors=errors)


@click.command()
@as_json_option
def profiles(as_json: bool) -> None:
    """List the profiles of this user: the addresses of sidecars and the names of files.

    SEQDEDUPE_PROFILE or --profile of a command chooses a profile. The command shows no content of the files.
    """
    chosen = os.environ.get(PROFILE_VARIABLE)
    found = read_profiles()
    if as_json:
        print_json(
            [
                {"name": name, **{key: profile.get(key) for key in PROFILE_KEYS}, "is_chosen": name == chosen}
                for name, profile in found.items()
            ]
        )
        return
    print_table(
        ("PROFILE", *(key.replace("_", " ").upper() for key in PROFILE_KEYS), "CHOSEN"),
        [
            (name, *(profile.get(key, "-") for key in PROFILE_KEYS), "yes" if name == chosen else "-")
            for name, profile in found.items()
        ],
    )
