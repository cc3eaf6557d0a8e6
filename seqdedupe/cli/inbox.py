"""`seqdedupe inbox`: what inboxes have parked."""

from collections.abc import Mapping
from typing import Any

import click

from seqdedupe.cli.database import database_options, opened, told_errors
from seqdedupe.cli.options import as_json_option, print_json, print_table
from seqdedupe.cli.python_object import PythonObject
from seqdedupe.command import echo, printable

_SHOWN = 80
"""Characters of an error in the table."""


@click.group(short_help="Look after messages that inboxes have parked.")
def inbox() -> None:
    """Look after messages that came before the versions that they follow, and that inboxes have parked."""


@inbox.command(short_help="List the messages that are parked, and what they wait for.")
@click.argument("name")
@click.option("--longer-than", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Parked for so long.")
@database_options
def waiting(name: str, longer_than: float, database: str, as_json: bool) -> None:
    """List what the inbox NAME has parked, the longest first: what it waits for, and the error if it was refused."""
    with opened(database, "inbox") as engine:
        from seqdedupe.services.inbox import operating

        found = operating.waiting(engine, name, longer_than)
    if as_json:
        print_json([_json(one) for one in found])
        return
    rows: list[tuple[object, ...]] = [
        (
            one.message.index,
            _versions(one.versions),
            f"{_versions(one.missing)}{' (a cycle)' if one.in_cycle else ''}",
            int(one.seconds),
            one.error[:_SHOWN],
        )
        for one in found
    ]
    print_table(("INDEX", "VERSIONS", "WAITS FOR", "SECONDS", "ERROR"), rows)


def _versions(versions: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {version}" for key, version in versions.items()) or "-"


def _json(one: Any) -> dict[str, Any]:
    return {
        "position": str(one.message.position),
        "index": one.message.index,
        "versions": dict(one.versions),
        "missing": dict(one.missing),
        "in_cycle": one.in_cycle,
        "seconds": one.seconds,
        "error": one.error,
    }


@inbox.command(short_help="Look once more at all that is parked.")
@click.argument("inbox", type=PythonObject(), metavar="MODULE:NAME")
@as_json_option
def sweep(inbox: Any, as_json: bool) -> None:
    """Look once more at all that an inbox has parked, with its handler: MODULE:NAME is the `Inbox` of the service. It
    may run beside consumers."""
    from seqdedupe.services.inbox import Inbox

    if not isinstance(inbox, Inbox):
        raise click.BadParameter("it is no Inbox.", param_hint="'MODULE:NAME'")
    with told_errors("inbox"):
        count, left = inbox.sweep(), len(inbox.waiting())
    if as_json:
        print_json({"handled": count, "parked": left})
        return
    said = "message is" if count == 1 else "messages are"
    echo(f"{count:,} {said} parked no more in {printable(inbox.name)}, {left:,} still")
