"""The operators' commands that take a topic's numbers to a file, from one, and from its log."""

from pathlib import Path

import click

from seqdedupe import sealed, snapshot_file, watermarks, windows
from seqdedupe.cli.options import common, connect_to, print_json
from seqdedupe.cli.topics import position_json
from seqdedupe.command import echo, printable
from seqdedupe.figures import state_name
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export", short_help="Write a topic's snapshot, or its watermarks, to a file.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@click.option(
    "--watermarks", "only_watermarks", is_flag=True, help="The highest sequence IDs alone, for another topic."
)
@common
def export_file(topic: str, file: Path, only_watermarks: bool, address: str, as_json: bool) -> None:
    """Write a topic's snapshot to a file, as of one moment; one that is there is replaced."""
    values = {"topic": topic_name(topic), "kind": "watermarks" if only_watermarks else "snapshot"}
    with connect_to(address, topic) as client:
        if only_watermarks:
            producers = client.admin.export_watermarks(topic, file)
            text = f"the watermarks of {producers:,} producers are in {file}"
            _say(values | {"producers": producers}, text, as_json)
            return
        head = client.admin.export_snapshot(topic, file)
    position = Position.from_proto(head.position)
    text = f"a snapshot with {head.producers:,} producers, up to {position}, is in {file}"
    _say(values | {"producers": head.producers, "position": position_json(position)}, text, as_json)


@click.command("import", short_help="Take a file of export or bootstrap over into a topic.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@common
def import_file(topic: str, file: Path, address: str, as_json: bool) -> None:
    """Take a file that `export` or `job bootstrap` wrote over into a topic; durable when this returns.

    A snapshot goes into the topic that it was taken of. Watermarks go into one that was created, and that no producer
    has opened yet; a window of deduplication IDs into one of these without messages.
    """
    magic = sealed.magic_of(file)
    if magic not in (snapshot_file.MAGIC, watermarks.MAGIC, windows.MAGIC):
        raise sealed.damaged(file, "it begins neither as a snapshot nor as a file of watermarks or of a window does")
    with connect_to(address, topic) as client:
        if magic == snapshot_file.MAGIC:
            _say_opened(client.admin.import_snapshot(topic, file), "snapshot", "from the snapshot", as_json)
            return
        if magic == windows.MAGIC:
            ids = client.admin.import_window(topic, file)
            values = {"topic": topic_name(topic), "kind": "window", "ids": ids}
            _say(values, f"a window of {ids:,} deduplication IDs is in force", as_json)
            return
        producers = client.admin.import_watermarks(topic, file)
    values = {"topic": topic_name(topic), "kind": "watermarks", "producers": producers}
    _say(values, f"the watermarks of {producers:,} producers are in force", as_json)


@click.command("rebuild-topic", short_help="Make the store's records of a topic anew from its log.")
@click.argument("topic")
@common
def rebuild_topic(topic: str, address: str, as_json: bool) -> None:
    """Make the store's records of a topic anew from all that is left in its log, while the other topics serve."""
    with connect_to(address, topic) as client:
        _say_opened(client.admin.rebuild_topic(topic), "log", "from its log", as_json)


def _say_opened(topic: admin_pb2.Topic, kind: str, where: str, as_json: bool) -> None:
    state = state_name(topic.state)
    text = f"{topic.name} was opened again {where}, and is {state}" + (f": {topic.why}" if topic.why else "")
    values = {"topic": topic.name, "kind": kind, "producers": topic.producers, "state": state, "why": topic.why or None}
    _say(values, text, as_json)


def _say(values: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        echo(printable(text))
