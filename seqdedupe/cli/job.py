"""`seqdedupe job`: the Spark jobs."""

import importlib
import sys

import click

from seqdedupe.errors import error

_OURS = ("seqdedupe", "seqdedupe_spark")

_MODULES = {"audit": "seqdedupe_spark.audit_job", "bootstrap": "seqdedupe_spark.bootstrap_job"}
"""What has a module of its own; all other commands are the reader job's."""


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Read topics into a table with Spark, audit them.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def job(arguments: tuple[str, ...]) -> None:
    """Run a Spark job: `run`, `positions` and `reset` of the reader job, `audit`, `bootstrap`. Takes the arguments of
    `python -m seqdedupe_spark.reader_job`, and after `audit` and `bootstrap` those of their modules."""
    name = arguments[0] if arguments and arguments[0] in _MODULES else None
    try:
        module = importlib.import_module(_MODULES[name] if name else "seqdedupe_spark.reader_job")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] in _OURS:
            raise
        raise error(
            "INVALID_CONFIGURATION",
            f"Spark jobs need {e.name}, which is not installed",
            hint="Install it: pip install 'seqdedupe[spark]'",
        ) from e
    sys.exit(module.run_main(list(arguments[1:] if name else arguments), f"seqdedupe job{f' {name}' if name else ''}"))
