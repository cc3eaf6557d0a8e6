"""The database of a service's consumers and inboxes, as a command is told it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from seqdedupe.cli.options import as_json_option
from seqdedupe.command import Command
from seqdedupe.errors import error

if TYPE_CHECKING:
    from sqlalchemy import Engine


def database_options(command: Command) -> Command:
    """`--database` and `--json`."""
    database = click.option(
        "--database",
        envvar="SEQDEDUPE_DATABASE",
        show_envvar=True,
        required=True,
        metavar="URL",
        help="The database of consumers and inboxes, as SQLAlchemy names it.",
    )
    return database(as_json_option(command))


@contextmanager
def opened(url: str, whose: str) -> Iterator["Engine"]:
    """An engine, for the tables of a consumer or an inbox. Raises INVALID_CONFIGURATION, INVALID_OPTION and
    OUTPUT_UNAVAILABLE, which quote no password."""
    try:
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError
    except ModuleNotFoundError as e:
        hint = "Install it: pip install 'seqdedupe[services]'"
        raise error("INVALID_CONFIGURATION", f"services need {e.name}, which is not installed", hint=hint) from e
    hint = "Give the URL that the service's create_engine is given, and install its driver."
    try:
        engine = create_engine(url)
    except ArgumentError:
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
    """Raises OUTPUT_UNAVAILABLE for what the database says of the tables of a consumer or an inbox."""
    from sqlalchemy.exc import SQLAlchemyError

    from seqdedupe.databases.failures import told

    try:
        yield
    except SQLAlchemyError as e:
        what = f"the {whose}'s tables cannot be used: {told(e)}"
        raise error("OUTPUT_UNAVAILABLE", what, hint=f"Is it the {whose}'s database?") from e
