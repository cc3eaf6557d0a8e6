"""`seqdedupe consumer`: what consumers have set aside."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from seqdedupe.cli.options import as_json_option, print_json, print_table
from seqdedupe.command import Command, echo, printable
from seqdedupe.errors import error

if TYPE_CHECKING:
    from sqlalchemy import Engine

_SHOWN = 80
"""Characters of an error in the table."""


def _options(command: Command) -> Command:
    database = click.option(
        "--database",
        envvar="SEQDEDUPE_DATABASE",
        show_envvar=True,
        required=True,
        metavar="URL",
        help="The consumer's database, as SQLAlchemy names it.",
    )
    return database(as_json_option(command))


@contextmanager
def _database(url: str) -> Iterator["Engine"]:
    """An engine. Raises INVALID_CONFIGURATION, INVALID_OPTION and OUTPUT_UNAVAILABLE, which quote no password."""
    try:
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError, SQLAlchemyError
    except ModuleNotFoundError as e:
        hint = "Install it: pip install 'seqdedupe[services]'"
        raise error("INVALID_CONFIGURATION", f"consumers need {e.name}, which is not installed", hint=hint) from e
    hint = "Give the URL that the consumer's create_engine is given, and install its driver."
    try:
        engine = create_engine(url)
    except ArgumentError:
        raise error("INVALID_OPTION", "the database's URL cannot be read", hint=hint) from None
    except ModuleNotFoundError as e:
        raise error("INVALID_OPTION", f"the database's URL needs {e.name}, which is not installed", hint=hint) from e
    try:
        yield engine
    except SQLAlchemyError as e:
        from seqdedupe.databases.failures import told

        what = f"the consumer's tables cannot be used: {told(e)}"
        raise error("OUTPUT_UNAVAILABLE", what, hint="Is it the consumer's database?") from e
    finally:
        engine.dispose()


@click.group(short_help="Look after messages that consumers have set aside.")
def consumer() -> None:
    """Look after messages that consumers have set aside: parked to be tried again, or given up (dead letters)."""


@consumer.command(short_help="List the messages that are parked, and the dead letters.")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many of each.")
@_options
def parked(name: str, limit: int, database: str, as_json: bool) -> None:
    """List what the consumer NAME has parked and given up, with the error of the last attempt."""
    with _database(database) as engine:
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
@_options
def retry(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Let the consumer NAME try the messages with these indexes again, or all that are parked; dead letters only where
    their index is given."""
    with _database(database) as engine:
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
@_options
def drop(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Remove the messages with these indexes from what the consumer NAME has parked, and from its dead letters."""
    with _database(database) as engine:
        from seqdedupe.services.consumer import operating

        count = operating.drop(engine, name, indexes)
    if as_json:
        print_json({"dropped": count})
        return
    _tell(name, count, "removed")


def _tell(name: str, count: int, said: str) -> None:
    echo(f"{count:,} message{'' if count == 1 else 's'} of {printable(name)} {'is' if count == 1 else 'are'} {said}")
