"""`seqdedupe consumer`: what consumers have set aside."""

from typing import Any

import click

from seqdedupe.cli.database import database_options, opened
from seqdedupe.cli.options import print_json, print_table
from seqdedupe.command import echo, printable

_SHOWN = 80
"""Characters of an error in the table."""


@click.group(short_help="Look after messages that consumers have set aside.")
def consumer() -> None:
    """Look after messages that consumers have set aside: parked to be tried again, or given up (dead letters)."""


@consumer.command(short_help="List the messages that are parked, and the dead letters.")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many of each.")
@database_options
def parked(name: str, limit: int, database: str, as_json: bool) -> None:
    """List what the consumer NAME has parked and given up, with the error of the last attempt."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer.operating import set_aside

        found = set_aside(engine, name, limit)
    if as_json:
        print_json([_json(kind, row) for kind, row in found])
        return
    rows: list[tuple[object, ...]] = [
        (kind, row.message_index, _text(row.message_key), row.attempts, str(_when(kind, row)), row.error[:_SHOWN])
        for kind, row in found
    ]
    heads: tuple[str, ...] = ("STATE", "INDEX", "KEY", "ATTEMPTS", "NEXT MS", "ERROR")
    if any(row.consumer != name for _, row in found):
        heads, rows = ("CONSUMER", *heads), [(one.consumer, *row) for (_, one), row in zip(found, rows, strict=True)]
    print_table(heads, rows)


def _text(value: bytes | None) -> str:
    return "-" if value is None else value.decode(errors="backslashreplace")


def _when(kind: str, row: Any) -> object:
    """When it is tried next, in milliseconds since 1970: `-` for what waits behind another one, or was given up."""
    return "-" if kind == "dead" or row.next_attempt_ms is None else row.next_attempt_ms


def _json(kind: str, row: Any) -> dict[str, Any]:
    when = _when(kind, row)
    return {
        "state": kind,
        "consumer": row.consumer,
        "position": row.position,
        "index": row.message_index,
        "key": None if row.message_key is None else _text(row.message_key),
        "attempts": row.attempts,
        "next_attempt_ms": None if when == "-" else when,
        "error": row.error,
    }


@consumer.command(short_help="Let messages be tried again now.")
@click.argument("name")
@click.argument("indexes", nargs=-1, type=click.IntRange(0, 2**63 - 1), metavar="[INDEX]...")
@database_options
def retry(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Let the consumer NAME try the messages with these indexes again, or all that are parked; dead letters only where
    their index is given."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer import operating

        found = operating.retry(engine, name, indexes)
    if as_json:
        print_json({"retried": found.now, "behind": found.behind, "leaving": found.leaving})
        return
    _tell(name, found.now, "tried again as soon as the consumer runs")
    for index in found.behind:
        echo(f"{index} waits behind an earlier message of its key, and follows it")
    for index in found.leaving:
        echo(f"{index} is on its way to the topic of dead letters, and is left alone")


@consumer.command(short_help="Give messages up for good.")
@click.argument("name")
@click.argument("indexes", nargs=-1, required=True, type=click.IntRange(0, 2**63 - 1), metavar="INDEX...")
@database_options
def drop(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Remove the messages with these indexes from what the consumer NAME has parked, and from its dead letters."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer import operating

        count = operating.drop(engine, name, indexes)
    if as_json:
        print_json({"dropped": count})
        return
    _tell(name, count, "removed")


def _tell(name: str, count: int, said: str) -> None:
    echo(f"{count:,} message{'' if count == 1 else 's'} of {printable(name)} {'is' if count == 1 else 'are'} {said}")
