"""What the commands share: where the sidecar is, the form of the output, a hint for a topic that is not there."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from seqdedupe.client.blocking import Client
from seqdedupe.command import address_option, echo, json_text, printable
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.names import topic_name

Command = Callable[..., Any]

_SHORT_NAMES = "persistent://public/default/"

_SHORTEST_NEAR_NAME = 4
"""A shorter name is near to too many."""

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too, as docs/cli.md describes it.")


def common(command: Command) -> Command:
    """Adds `--address` and `--json`."""
    return address_option(_as_json(command))


def connect(address: str) -> Client:
    """A client of a sidecar that answers. Raises UNREACHABLE at once if it does not."""
    client = Client(address)
    client.admin.version()
    return client


@contextmanager
def connect_to(address: str, topic: str) -> Iterator[Client]:
    """As `connect`; if the topic is not there, the error names the one that may be meant."""
    with connect(address) as client:
        try:
            yield client
        except NotFoundError as e:
            near = None
            if e.reason == "TOPIC_NOT_FOUND" and "was deleted" not in e.message:
                with suppress(SeqdedupeError):
                    near = _near_name(topic, client)
            if near is None:
                raise
            raise error(e.reason, e.message, hint=f"Do you mean {near}?") from e


def _near_name(topic: str, client: Client) -> str | None:
    """The topic whose name is one edit or so from this one."""
    wanted = topic_name(topic).removeprefix(_SHORT_NAMES)
    names = [known.name.removeprefix(_SHORT_NAMES) for known in client.admin.topics()]
    long_names = [name for name in names if min(len(name), len(wanted)) >= _SHORTEST_NEAR_NAME]
    return next(iter(difflib.get_close_matches(wanted, long_names, 1, max(0.0, 1 - 1.5 / len(wanted)))), None)


def print_json(value: Any) -> None:
    """One line of JSON."""
    echo(json_text(value))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as needed; numbers, and `-` for none, stand to the right."""
    cells_of = [tuple(f"{c:,}" if isinstance(c, int) else printable(str(c)) for c in row) for row in rows]
    table = [tuple(heads), *cells_of]
    numeric = [
        all((cell.replace(",", "").lstrip("-") or "0").isdigit() for cell in column[1:])
        for column in zip(*table, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        echo("  ".join(cells).rstrip())
