"""The operators' commands that take a topic's numbers to a file, and from one."""

from pathlib import Path

import click

from seqdedupe.cli.options import common, connect_to, print_json
from seqdedupe.command import echo, printable
from seqdedupe.names import topic_name

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export", short_help="Write a topic's watermarks to a file.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@click.option("--watermarks", is_flag=True, required=True, help="The highest sequence IDs alone, for another topic.")
@common
def export_file(topic: str, file: Path, watermarks: bool, address: str, as_json: bool) -> None:
    """Write the highest persisted sequence ID of every producer of a topic to a file; one that is there is replaced."""
    with connect_to(address, topic) as client:
        producers = client.admin.export_watermarks(topic, file)
    _say(topic, "watermarks", producers, f"the watermarks of {producers:,} producers are in {file}", as_json)


@click.command("import", short_help="Take a file of watermarks over into a new topic.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@common
def import_file(topic: str, file: Path, address: str, as_json: bool) -> None:
    """Take a file that `export` wrote over into a topic; durable when this returns.

    Watermarks go into a topic that was created and that no producer has opened yet.
    """
    with connect_to(address, topic) as client:
        producers = client.admin.import_watermarks(topic, file)
    _say(topic, "watermarks", producers, f"the watermarks of {producers:,} producers are in force", as_json)


def _say(topic: str, kind: str, producers: int, text: str, as_json: bool) -> None:
    if as_json:
        print_json({"topic": topic_name(topic), "kind": kind, "producers": producers})
    else:
        echo(printable(text))
