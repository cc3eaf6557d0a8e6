"""All commands and what becomes of their errors; `serve` and `job`, which run what other packages have."""

import importlib
import sys
import traceback
from importlib import metadata
from types import TracebackType

import click

from seqdedupe.cli.bench_command import bench
from seqdedupe.cli.common import needing
from seqdedupe.cli.doctor_commands import backup, doctor, restore, verify
from seqdedupe.cli.publish_command import publish
from seqdedupe.cli.read_command import read
from seqdedupe.cli.service_commands import consumer, inbox, outbox, pipe
from seqdedupe.cli.sidecar_commands import export_file, import_file, rebuild_topic, sidecars, top, version
from seqdedupe.cli.token_commands import audit, auth, token
from seqdedupe.cli.topic_commands import (
    cursors,
    in_flight,
    message_state,
    policy,
    producers,
    reset_producer,
    snapshot,
    topics,
)
from seqdedupe.command import run_command, say_failure, says_json
from seqdedupe.errors import error

# -- `seqdedupe serve`: the sidecar.


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run a sidecar.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def serve(flags: tuple[str, ...]) -> None:
    """Run a sidecar until it is told to stop. Takes the flags of `python -m broker_sidecar`."""
    with needing("the sidecar needs", "sidecar"):
        from broker_sidecar.__main__ import main

        status = main(list(flags), prog="seqdedupe serve")
    sys.exit(status)


# -- `seqdedupe job`: the Spark jobs.

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
    with needing("Spark jobs need", "spark"):
        module = importlib.import_module(_MODULES[name] if name else "seqdedupe_spark.reader_job")
    sys.exit(module.run_main(list(arguments[1:] if name else arguments), f"seqdedupe job{f' {name}' if name else ''}"))


NAME = "seqdedupe"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metadata.version("seqdedupe"), message="%(version)s")
def cli() -> None:
    """Effectively-once publishing: run a sidecar, publish files, read topics."""


for _command in (
    serve,
    publish,
    read,
    topics,
    sidecars,
    top,
    policy,
    producers,
    message_state,
    in_flight,
    reset_producer,
    cursors,
    snapshot,
    export_file,
    import_file,
    rebuild_topic,
    bench,
    pipe,
    job,
    consumer,
    inbox,
    outbox,
    backup,
    verify,
    restore,
    doctor,
    audit,
    token,
    auth,
    version,
):
    cli.add_command(_command)


def run() -> int:
    """Runs the command of this process; returns its exit status."""
    sys.excepthook = _defect
    return run_command(cli, NAME)


def _defect(kind: type[BaseException], defect: BaseException, trace: TracebackType | None) -> None:
    where = traceback.extract_tb(trace)[-1] if trace else None
    place = f" at {where.filename}:{where.lineno}" if where else ""
    failure = error("INTERNAL", f"{kind.__name__}: {defect}{place}", hint="This is a defect: please report it.")
    say_failure(NAME, failure, as_json=says_json(sys.argv[1:]))
