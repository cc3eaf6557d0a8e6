"""What the commands share: where the sidecar is, the form of the output."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from seqdedupe.client.blocking import Client
from seqdedupe.command import address_option

Command = Callable[..., Any]

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/cli.md describes it.")


def common(command: Command) -> Command:
    """Adds `--address` and `--json`."""
    return address_option(_as_json(command))


def connect(address: str) -> Client:
    """A client of a sidecar that answers. Raises UNREACHABLE at once if it does not."""
    client = Client(address)
    client.admin.version()
    return client


def print_json(value: Any) -> None:
    """One line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as needed; numbers stand to the right."""
    table = [tuple(heads), *(tuple(f"{c:,}" if isinstance(c, int) else str(c) for c in row) for row in rows)]
    numeric = [
        all(cell.replace(",", "").lstrip("-").isdigit() for cell in column[1:]) for column in zip(*table, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        click.echo("  ".join(cells).rstrip())
