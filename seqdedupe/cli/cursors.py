"""`seqdedupe cursors`: the named cursors of a topic."""

import click

from seqdedupe.cli.options import common, connect_to, print_json, print_table
from seqdedupe.cli.topics import position_json
from seqdedupe.command import echo, printable
from seqdedupe.message_id import Position


@click.command(short_help="List a topic's named cursors; have retention wait for one, or remove it.")
@click.argument("topic")
@click.option("--remove", metavar="NAME", help="Remove this cursor: it keeps nothing any more.")
@click.option(
    "--hold",
    nargs=2,
    type=(str, click.IntRange(0, 2**31 - 1)),
    metavar="NAME MB",
    help="Have retention keep what this cursor has not passed, while the log is not larger than MB; 0: no more.",
)
@common
def cursors(topic: str, remove: str | None, hold: tuple[str, int] | None, address: str, as_json: bool) -> None:
    """List the named cursors that the sidecar keeps of a topic, after what --hold and --remove do."""
    with connect_to(address, topic) as client:
        if hold is not None:
            client.admin.hold_cursor(topic, *hold)
        if remove is not None:
            client.admin.delete_cursor(topic, remove)
        found = client.admin.cursors(topic)
    if as_json:
        listed = [
            {
                "name": one.name,
                "position": position_json(Position.from_proto(one.position)),
                "note": one.note,
                "hold_retention_in_mb": one.hold_retention_in_mb,
            }
            for one in found
        ]
        print_json(listed)
        return
    rows = [(one.name, one.position.index, one.hold_retention_in_mb or "-", one.note) for one in found]
    print_table(("CURSOR", "INDEX", "HOLDS MB", "NOTE"), rows)
    if not rows:
        echo(f"{printable(topic)} has none")
