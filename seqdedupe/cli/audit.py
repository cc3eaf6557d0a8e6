"""`seqdedupe audit`: whether an audit trail is as it was written."""

from pathlib import Path

import click

from seqdedupe.audit_trail import Link, verify
from seqdedupe.cli.options import as_json_option, print_json
from seqdedupe.command import echo
from seqdedupe.errors import error


@click.group(short_help="Check an audit trail.")
def audit() -> None:
    """The trail of what operators did and who was refused, see docs/audit.md."""


@audit.command("verify", short_help="Check that no line was changed, removed or put in.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--expect",
    metavar="NUMBER:HASH",
    help="A line that has to be there, as this command printed it before: that a trail was cut, or made anew from "
    "somewhere on, shows in this alone.",
)
@as_json_option
def verify_files(files: tuple[Path, ...], expect: str | None, as_json: bool) -> int:
    """Check a trail of FILES, the oldest first. Print its last line's number and hash: keep them elsewhere."""
    expected = Link.parse(expect) if expect else None
    found = verify(files, expected)
    if not found.has_expected:
        raise error("AUDIT_DAMAGED", f"line {expect} is not in the trail: it was cut, or made anew")
    if as_json:
        print_json(
            {
                "lines": found.lines,
                "first_number": found.first_number,
                "chains": found.chains,
                "last": str(found.last),
                "last_time": found.last_time,
                "torn_bytes": found.torn_bytes,
            }
        )
        return 0
    echo(f"{found.lines} lines, all as they were written" if found.lines else "no line")
    if found.lines:
        echo(f"last {found.last} at {found.last_time}")
    if found.first_number > 1:
        echo(f"The first one is line {found.first_number}: what came before is in other files.")
    if found.chains > 1:
        echo(f"The trail was begun anew {found.chains - 1} times: nothing tells whether lines are missing there.")
    if found.torn_bytes:
        echo(f"{found.torn_bytes} bytes at the end are of a line that is being written, or was cut off.")
    return 0
