"""The commands of the services: `consumer`, `inbox`, `outbox`, `pipe`. Each command names a database or topics."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from seqdedupe.cli.common import DATABASE_VARIABLE, as_json_option, common, connect, connect_to, naming_near, tell
from seqdedupe.client.blocking import Client, Cursor
from seqdedupe.client.blocking.loop import run as run_on_loop
from seqdedupe.command import Seconds, echo, json_text, needing, print_json, print_table, say
from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.services.command_options import lag_options, metrics_options, metrics_told, show_lag
from seqdedupe.services.pipe.pipe import BlockingPipe, piped_up_to
from seqdedupe.sidecar_options import Command, sidecar_options, told_credentials

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from seqdedupe.services.outbox import Lag

# -- The database of a service's consumers and inboxes, as an option of a command.


def database_options(command: Command) -> Command:
    """Add `--database` and `--json`."""
    return _database_option("The database of consumers and inboxes, as an SQLAlchemy URL.")(as_json_option(command))


def _database_option(about: str) -> Callable[[Command], Command]:
    return click.option(
        "--database", envvar=DATABASE_VARIABLE, show_envvar=True, required=True, metavar="URL", help=about
    )


@contextmanager
def opened(url: str, whose: str) -> Iterator["Engine"]:
    """Open an engine, for the tables of a consumer or an inbox. Raises INVALID_CONFIGURATION, INVALID_OPTION and
    OUTPUT_UNAVAILABLE, which quote no password."""
    with needing("services need", "services"):
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError

        from seqdedupe.databases.tables import UrlError, missing_file, url_of
    hint = "Give the URL that the service passes to create_engine, and install its driver."
    try:
        parsed = url_of(url)
        if parsed.get_backend_name() == "sqlite" and (what := missing_file(parsed.database)):
            raise error("INVALID_OPTION", what, hint=f"Name the {whose}'s database.")
        engine = create_engine(parsed)
    except UrlError as e:
        raise error("INVALID_OPTION", f"the database's URL {e}", hint=hint) from None
    except ArgumentError:  # SQLAlchemy knows no such database
        raise error("INVALID_OPTION", "the database's URL cannot be read", hint=hint) from None
    except ModuleNotFoundError as e:
        raise error("INVALID_OPTION", f"the database's URL needs {e.name}, which is not installed", hint=hint) from e
    try:
        with told_errors(whose):
            yield engine
    finally:
        engine.dispose()


@contextmanager
def told_errors(whose: str) -> Iterator[None]:
    """Convert the database's errors about the tables of a consumer or an inbox to OUTPUT_UNAVAILABLE."""
    from sqlalchemy.exc import SQLAlchemyError

    from seqdedupe.databases.failures import told

    try:
        yield
    except SQLAlchemyError as e:
        what = f"the {whose}'s tables cannot be used: {told(e)}"
        raise error("OUTPUT_UNAVAILABLE", what, hint=f"Check that it is the {whose}'s database.") from e


class PythonObject(click.ParamType[Any]):
    """A Python object, imported also from the current directory."""

    name = "object"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        module, _, name = str(value).partition(":")
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as e:
            raise click.BadParameter(f"{value} cannot be imported: {e}", ctx, param) from e


_SHOWN = 80
"""The number of characters of an error in the table."""


@click.group()
def consumer() -> None:
    """Show the lag of consumers. List, retry and drop parked messages and dead letters. A dead letter is a message that
    a consumer has given up."""


@consumer.command("lag", short_help="Show the lag of a consumer.")
@click.argument("name")
@lag_options
@database_options
@sidecar_options
def consumer_lag(
    name: str, max_messages: int | None, max_seconds: float | None, database: str, as_json: bool, address: str
) -> int:
    """Show how many messages the consumer NAME has not applied, and the age of the oldest such message. The consumer
    need not run: the command counts from the position in its database to the topic's end."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer.database import positions_of

        positions = positions_of(engine, name)
    with connect(address) as client:
        return show_lag(client, positions, max_messages, max_seconds, as_json=as_json)


@consumer.command(short_help="List parked messages and dead letters.")
@click.argument("name")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="The maximum number of parked messages, and of dead letters.",
)
@database_options
def parked(name: str, limit: int, database: str, as_json: bool) -> None:
    """List the parked messages and dead letters of the consumer NAME, with the error of the last attempt."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer.dead_letters import set_aside

        found = set_aside(engine, name, limit)
    if as_json:
        print_json([_json(kind, row) for kind, row in found])
        return
    rows: list[tuple[object, ...]] = [
        (kind, str(row.message_index), _text(row.message_key), row.attempts, str(_when(kind, row)), row.error[:_SHOWN])
        for kind, row in found
    ]
    heads: tuple[str, ...] = ("STATE", "INDEX", "KEY", "ATTEMPTS", "NEXT MS", "ERROR")
    if any(row.consumer != name for _, row in found):
        heads, rows = ("CONSUMER", *heads), [(one.consumer, *row) for (_, one), row in zip(found, rows, strict=True)]
    print_table(heads, rows)


def _text(value: bytes | None) -> str:
    return "-" if value is None else value.decode(errors="backslashreplace")


def _when(kind: str, row: Any) -> object:
    """Return the time of the next attempt, in milliseconds since 1970. Return `-` for a message that waits behind
    another message, and for a dead letter."""
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


@consumer.command(short_help="Make the consumer try messages again now.")
@click.argument("name")
@click.argument("indexes", nargs=-1, type=click.IntRange(0, 2**63 - 1), metavar="[INDEX]...")
@database_options
def retry(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Make the consumer NAME retry the messages with these indexes. Without indexes, it retries all parked messages,
    but no dead letters."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer import dead_letters

        found = dead_letters.retry(engine, name, indexes)
    tell(
        as_json,
        {"retried": found.now, "behind": found.behind, "leaving": found.leaving},
        _text_of(name, found.now, "tried again when the consumer runs"),
        *(f"{index} waits for an earlier message of its key" for index in found.behind),
        *(f"{index} is being moved to the topic of dead letters, and is not tried again" for index in found.leaving),
    )


@consumer.command(short_help="Remove messages for good.")
@click.argument("name")
@click.argument("indexes", nargs=-1, required=True, type=click.IntRange(0, 2**63 - 1), metavar="INDEX...")
@database_options
def drop(name: str, indexes: tuple[int, ...], database: str, as_json: bool) -> None:
    """Remove the messages with these indexes from the parked messages and dead letters of the consumer NAME."""
    with opened(database, "consumer") as engine:
        from seqdedupe.services.consumer import dead_letters

        count = dead_letters.drop(engine, name, indexes)
    tell(as_json, {"dropped": count}, _text_of(name, count, "removed"))


def _text_of(name: str, count: int, said: str) -> str:
    return f"{counted(count, 'message')} of {name} {'is' if count == 1 else 'are'} {said}"


# -- `seqdedupe inbox`: the messages that inboxes have parked.


@click.group()
def inbox() -> None:
    """List and retry the messages that inboxes have parked because an earlier version is missing."""


@inbox.command(short_help="List the parked messages, and the versions they wait for.")
@click.argument("name")
@click.option(
    "--longer-than",
    type=Seconds(),
    default=0.0,
    metavar="SECONDS",
    help="Only messages parked for SECONDS or longer.",
)
@database_options
def waiting(name: str, longer_than: float, database: str, as_json: bool) -> None:
    """List the parked messages of the inbox NAME, the oldest first. For each message, show which versions are missing,
    and the error, if any."""
    with opened(database, "inbox") as engine:
        from seqdedupe.services.inbox import check_used, waiting_in

        found = waiting_in(engine, name, longer_than)
        if not found:
            check_used(engine, name)
    if as_json:
        print_json([_parked_json(one) for one in found])
        return
    rows: list[tuple[object, ...]] = [
        (
            str(one.message.index),
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


def _parked_json(one: Any) -> dict[str, Any]:
    return {
        "position": str(one.message.position),
        "index": one.message.index,
        "versions": dict(one.versions),
        "missing": dict(one.missing),
        "in_cycle": one.in_cycle,
        "seconds": one.seconds,
        "error": one.error,
    }


@inbox.command(short_help="Retry all parked messages.")
@click.argument("inbox", type=PythonObject(), metavar="MODULE:NAME")
@as_json_option
def sweep(inbox: Any, as_json: bool) -> None:
    """Retry all parked messages of an inbox with the inbox's handler. MODULE:NAME is the Python object `Inbox` of the
    service. Consumers may run at the same time."""
    from seqdedupe.services.inbox import Inbox

    if not isinstance(inbox, Inbox):
        raise click.BadParameter("it is not an Inbox.", param_hint="'MODULE:NAME'")
    with told_errors("inbox"):
        count, left = inbox.sweep(), len(inbox.waiting())
    text = f"{counted(count, 'message is', 'messages are')} no longer parked in {inbox.name}, {left:,} still"
    tell(as_json, {"handled": count, "parked": left}, text)


# -- `seqdedupe outbox`: the tables of an outbox, its relay, and the relay's lag.

_outbox_option = _database_option(
    "postgresql://user@host/database or sqlite:///path. All users of a machine see command lines: put a URL with a "
    "password into the variable."
)


@click.group()
def outbox() -> None:
    """Publish the rows that services write to an outbox in their transactions. Each row is published exactly once."""


@outbox.command("ddl")
@click.argument("kind", type=click.Choice(["postgresql", "sqlite"]))
@click.option(
    "--payload",
    type=click.Choice(["bytea", "jsonb", "json", "text"]),
    default="bytea",
    show_default=True,
    help="In PostgreSQL, the type of the payload column of a new table.",
)
@click.option(
    "--lock-aggregates",
    is_flag=True,
    help="In PostgreSQL, an insert locks its aggregate until its transaction ends. Messages then have the order of the "
    "commits, even if transactions do not write or lock the aggregate.",
)
def print_ddl(kind: str, payload: str, lock_aggregates: bool) -> None:
    """Print the statements that create the tables and triggers of an outbox. The statements can be repeated."""
    with _needing_services():
        from seqdedupe.services.outbox import ddl
    echo(ddl(kind, payload=payload, lock_aggregates=lock_aggregates).rstrip())


@outbox.command("relay")
@_outbox_option
@click.option("--topic", required=True, help="The topic. {aggregatetype} is replaced by the value of the row.")
@click.option(
    "--producer", "name", required=True, help="The name of this outbox. The names of its producers are NAME/token."
)
@click.option("--once", is_flag=True, help="End when all readable rows are published. Wait up to 10 s for other rows.")
@metrics_options
@common
def run_relay(database: str, topic: str, name: str, once: bool, address: str, as_json: bool) -> None:
    """Publish the rows of an outbox and delete them.

    The rows of one aggregate are published in the order of the commits. You may kill and restart the relay at any
    moment. If you run several relays, one relay works, and the others stand by. With --once, the last line shows how
    many rows are left and why. The exit status is 0 even if rows are left."""
    with _needing_services():
        from seqdedupe.services.outbox import relay

    def report(line: str) -> None:
        if as_json:
            click.echo(json_text({"report": line}), err=True)
        else:
            say("seqdedupe", line)

    counters = relay.run_relay(
        address,
        database,
        topic,
        name,
        follow=not once,
        credentials=told_credentials(),
        report=report,
        serving=metrics_told(as_json=as_json),
    )
    found = asdict(counters)
    lag = _lag(database) if once else None
    if as_json:
        print_json(found if lag is None else found | {"left": asdict(lag)})
        return
    echo(f"{found['published']:,} published, {found['found']:,} found there, {found['set_aside']:,} set aside")
    if lag is not None:
        echo(f"left: {counted(lag.rows, 'row')} in outbox{_why_left(lag)}, {lag.set_aside_rows:,} in outbox_aside")


@outbox.command("lag")
@_outbox_option
@as_json_option
def outbox_lag(database: str, as_json: bool) -> None:
    """Show how many rows wait for the relay, and why they wait."""
    lag = _lag(database)
    if as_json:
        print_json(asdict(lag))
        return
    echo(f"{counted(lag.rows, 'row')} in the outbox, {lag.set_aside_rows:,} set aside")
    if lag.held_by:
        who = f"{lag.unreadable_rows:,} of them wait" if lag.unreadable_rows else "a relay that starts now waits"
        echo(f"{who} {_for_whom(lag)}")


def _lag(database: str) -> "Lag":
    with _needing_services():
        from seqdedupe.services.outbox.store import open_store
    store = open_store(database)
    try:
        store.open()
        return store.lag()
    finally:
        store.close()


def _for_whom(lag: "Lag") -> str:
    return f"for a transaction of {lag.held_seconds:.0f} s: {lag.held_by}"


def _why_left(lag: "Lag") -> str:
    if lag.held_by:
        return f" (they wait {_for_whom(lag)})"
    return " (they are new, or no longer held: run it again)" if lag.rows else ""


def _needing_services() -> AbstractContextManager[None]:
    return needing("an outbox needs", "services")


# -- `seqdedupe pipe`: a Python function from topic to topic.


def _cursor_of(client: Client, name: str, topic: str) -> Cursor:
    return client.cursor(topic, name)


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--function", type=PythonObject(), metavar="MODULE:NAME", help="The function that is called for each message."
)
@click.option(
    "--name", required=True, help="The name of the pipe. Never change the name, because it identifies the outputs."
)
@click.option("--follow", is_flag=True, help="At the end of the topic, wait for new messages.")
@click.option(
    "--lag",
    is_flag=True,
    help="Only show how many messages follow the last one whose outputs the target has, or the cursor.",
)
@click.option(
    "--cursor",
    metavar="CURSOR",
    help="The name of a cursor of SOURCE in the sidecar. It remembers messages without outputs: a start does not read "
    "them again, and --lag does not count them.",
)
@lag_options
@metrics_options
@common
def pipe(
    source: str,
    target: str,
    function: Any,
    name: str,
    follow: bool,
    lag: bool,
    cursor: str | None,
    max_messages: int | None,
    max_seconds: float | None,
    address: str,
    as_json: bool,
) -> int:
    """Call a Python function for each message of SOURCE, and publish the function's result to TARGET exactly once."""
    if lag:
        if function is not None or follow:
            raise click.UsageError("--lag calls nothing: it goes without --function and --follow.")
        with connect_to(address, source) as client:
            positions = run_on_loop(lambda: piped_up_to(client.on_loop, source, target, name, cursor))
            return show_lag(client, positions, max_messages, max_seconds, as_json=as_json)
    if max_messages is not None or max_seconds is not None:
        raise click.UsageError("--max-messages and --max-seconds are for --lag.")
    if function is None:
        raise click.UsageError("Missing option '--function'.")
    if not callable(function):
        raise click.BadParameter("it is not a function.", param_hint="'--function'")
    with Client(address, told_credentials()) if follow else connect(address) as client:
        of = None if cursor is None else partial(_cursor_of, client, cursor)
        one = BlockingPipe(client, source, target, function, name=name, cursor=of)
        signal.signal(signal.SIGTERM, lambda *_: one.stop())
        with naming_near(client, source), metrics_told(as_json=as_json)(one):
            one.run(follow=follow)
    counts = one.counts
    again = f", {counts['outputs_again']:,} of them held already" if counts["outputs_again"] else ""
    tell(
        as_json,
        counts,
        f"{counted(counts['inputs'], 'message')} read, {counted(counts['outputs'], 'output')} sent{again}",
    )
    return 0
