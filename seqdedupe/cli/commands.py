"""All commands, and what becomes of their errors."""

import sys
import traceback
from importlib import metadata
from types import TracebackType

import click

from seqdedupe.cli.audit import audit
from seqdedupe.cli.auth import auth
from seqdedupe.cli.backup import backup, restore, verify
from seqdedupe.cli.bench import bench
from seqdedupe.cli.consumer import consumer
from seqdedupe.cli.cursors import cursors
from seqdedupe.cli.doctor import doctor
from seqdedupe.cli.inbox import inbox
from seqdedupe.cli.job import job
from seqdedupe.cli.operate import in_flight, message_state, reset_producer
from seqdedupe.cli.outbox import outbox
from seqdedupe.cli.pipe import pipe
from seqdedupe.cli.policy import policy
from seqdedupe.cli.publish import publish
from seqdedupe.cli.read import read
from seqdedupe.cli.serve import serve
from seqdedupe.cli.sidecars import sidecars
from seqdedupe.cli.token import token
from seqdedupe.cli.top import top
from seqdedupe.cli.topics import producers, snapshot, topics, version
from seqdedupe.cli.transfer import export_file, import_file, rebuild_topic
from seqdedupe.command import run_command, say_failure, says_json
from seqdedupe.errors import error

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
