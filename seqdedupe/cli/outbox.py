"""`seqdedupe outbox`: the tables of an outbox, its relay, and how far behind that is."""

import importlib
from dataclasses import asdict
from typing import Any

import click

from seqdedupe.cli.options import as_json_option, common, print_json
from seqdedupe.command import echo, json_text, say, told_credentials
from seqdedupe.errors import error

DATABASE_VARIABLE = "SEQDEDUPE_DATABASE"

_database_option = click.option(
    "--database",
    envvar=DATABASE_VARIABLE,
    show_envvar=True,
    required=True,
    metavar="URL",
    help="postgresql://user@host/database or sqlite:///path. All users of a machine see what is on a command line: a "
    "password belongs into the environment.",
)


@click.group()
def outbox() -> None:
    """Publish what services write to an outbox in their own transactions, each row exactly once."""


@outbox.command("ddl")
@click.argument("kind", type=click.Choice(["postgresql", "sqlite"]))
@click.option(
    "--payload",
    type=click.Choice(["bytea", "jsonb", "json", "text"]),
    default="bytea",
    show_default=True,
    help="The type of the column payload in PostgreSQL, if the table is not there yet.",
)
@click.option(
    "--lock-aggregates",
    is_flag=True,
    help="In PostgreSQL, an insert locks its aggregate until its transaction ends. Then the order is that of the "
    "commits also for transactions that do not write or lock the aggregate before.",
)
def print_ddl(kind: str, payload: str, lock_aggregates: bool) -> None:
    """Print the statements that make the tables and triggers of an outbox. They may be run again."""
    echo(_services().ddl(kind, payload=payload, lock_aggregates=lock_aggregates).rstrip())


@outbox.command("relay")
@_database_option
@click.option("--topic", required=True, help="The topic. {aggregatetype} in it is replaced by that of each row.")
@click.option("--producer", "name", required=True, help="The name of this outbox; the producers are NAME/token.")
@click.option("--once", is_flag=True, help="End when all that can be read is published; waits up to 10 s for the rest.")
@common
def run_relay(database: str, topic: str, name: str, once: bool, address: str, as_json: bool) -> None:
    """Publish the rows of an outbox, per aggregate in the order of the commits, and delete them. Kill it and start it
    again at any moment, or run several: one works, the others stand by.

    With --once the last line says what is left and why; the exit status is 0 then, too."""
    services = _services()

    def report(line: str) -> None:
        if as_json:
            click.echo(json_text({"report": line}), err=True)
        else:
            say("seqdedupe", line)

    counters = services.run_relay(
        address, database, topic, name, follow=not once, credentials=told_credentials(), report=report
    )
    found = asdict(counters)
    lag = _lag(database) if once else None
    if as_json:
        print_json(found if lag is None else found | {"left": asdict(lag)})
        return
    echo(f"{found['published']:,} published, {found['found']:,} found there, {found['set_aside']:,} set aside")
    if lag is not None:
        echo(f"left: {lag.rows:,} rows in outbox{_why_left(lag)}, {lag.set_aside_rows:,} in outbox_aside")


@outbox.command("lag")
@_database_option
@as_json_option
def show_lag(database: str, as_json: bool) -> None:
    """Show how many rows wait for the relay, and what holds them."""
    lag = _lag(database)
    if as_json:
        print_json(asdict(lag))
        return
    echo(f"{lag.rows:,} rows in the outbox, {lag.set_aside_rows:,} set aside")
    if lag.held_by:
        who = f"{lag.unreadable_rows:,} of them wait" if lag.unreadable_rows else "a relay that starts now waits"
        echo(f"{who} {_for_whom(lag)}")


def _lag(database: str) -> Any:
    _services()
    store = importlib.import_module("seqdedupe.services.outbox.store").open_store(database)
    try:
        store.open()
        return store.lag()
    finally:
        store.close()


def _for_whom(lag: Any) -> str:
    return f"for a transaction of {lag.held_seconds:.0f} s: {lag.held_by}"


def _why_left(lag: Any) -> str:
    if lag.held_by:
        return f" (they wait {_for_whom(lag)})"
    return " (they came, or what they waited for ended, since it looked last: run it again)" if lag.rows else ""


def _services() -> Any:
    try:
        return importlib.import_module("seqdedupe.services.outbox")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "seqdedupe":
            raise
        raise error(
            "INVALID_CONFIGURATION",
            f"an outbox needs {e.name}, which is not installed",
            hint="Install it: pip install 'seqdedupe[services]'",
        ) from e
