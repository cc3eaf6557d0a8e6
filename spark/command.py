"""What the Spark commands share: where the sidecar is, a session, and what becomes of errors."""

from typing import Any

import click
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.errors import SeqdedupeError
from spark.session import start_session

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130

address_option = click.option(
    "--address",
    envvar="SEQDEDUPE_ADDRESS",
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="The sidecar, or unix:PATH.",
)


def session(name: str) -> SparkSession:
    """The session of spark-submit or of Spark Connect where there is one, else a new one on this machine."""
    return start_session(name, None)


def run_command(command: click.Command, name: str, *, failed: int = FAILED) -> int:
    """Runs the command of this process; returns the exit status that it returned, or 0.

    An error is one line on stderr, and status `failed`, or 2 for wrong usage.
    """
    try:
        status: Any = command.main(prog_name=name, standalone_mode=False)
        return status or 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return WRONG_USAGE
    except click.ClickException as e:
        path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else name
        return _say(name, f"{e.format_message()} See {path} --help.", e.exit_code)
    except SeqdedupeError as e:
        return _say(name, f"{e} {e.hint}", failed)
    except Py4JJavaError as e:
        return _say(name, f"Spark: {e.java_exception.toString().splitlines()[0]}", failed)
    except (PySparkException, Py4JError) as e:
        return _say(name, f"Spark: {str(e).strip().splitlines()[0]}", failed)
    except OSError as e:
        return _say(name, str(e), failed)


def _say(name: str, message: str, status: int) -> int:
    click.echo(f"{name}: " + " ".join(message.split()), err=True)
    return status
