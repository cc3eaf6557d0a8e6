"""The list of all commands, and the handling of errors. The commands `serve` and `job` run commands of other packages.

A command is imported when it is used. So help, and the error for an invalid command line, do not wait for the imports
of other commands.
"""

import importlib
import sys
import traceback
from types import TracebackType

import click
from click.shell_completion import CompletionItem, ShellComplete

from seqdedupe.command import needing, run_command, say_failure, says_json
from seqdedupe.errors import error

# -- `seqdedupe serve`: the sidecar.


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run a sidecar.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def serve(flags: tuple[str, ...]) -> None:
    """Run a sidecar until a signal stops it. Takes the flags of `python -m broker_sidecar`."""
    with needing("the sidecar needs", "sidecar"):
        from broker_sidecar.__main__ import main

        status = main(list(flags), prog="seqdedupe serve")
    sys.exit(status)


# -- `seqdedupe job`: the Spark jobs.

_MODULES = {"audit": "seqdedupe_spark.audit_job", "bootstrap": "seqdedupe_spark.bootstrap_job"}
"""The jobs with separate modules. All other commands of `job` belong to the reader job."""

_READER = "seqdedupe_spark.reader_job"

_JOBS = {
    "audit": "Report what is doubled, out of order or missing.",
    "bootstrap": "Write a file for `seqdedupe import`.",
    "lag": "Show how far behind the job is.",
    "positions": "Show the job's positions.",
    "reset": "Set where the job continues.",
    "run": "Run the job.",
}
"""The commands, for completion."""


class _Job(click.Command):
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a job command. If Spark's packages are installed, also complete that command's
        options."""
        arguments = list(ctx.params.get("arguments") or ())
        if not arguments:
            return [CompletionItem(name, help=line) for name, line in _JOBS.items() if name.startswith(incomplete)]
        name = arguments[0] if arguments[0] in _MODULES else None
        try:
            module = importlib.import_module(_MODULES[name] if name else _READER)
        except ModuleNotFoundError:
            return []
        command, rest = (module.main, arguments[1:]) if name else (module.cli, arguments)
        return ShellComplete(command, {}, NAME, "").get_completions(rest, incomplete)


def _complete_job(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return ctx.command.shell_complete(ctx, incomplete)


@click.command(
    cls=_Job,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Read topics into a table with Spark; audit topics.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_job)
def job(arguments: tuple[str, ...]) -> None:
    """Run a Spark job: `run`, `positions`, `lag` and `reset` of the reader job, `audit`, `bootstrap`.

    Accepts the arguments of `python -m seqdedupe_spark.reader_job`. `audit` and `bootstrap` accept the arguments of
    their own modules.
    """
    name = arguments[0] if arguments and arguments[0] in _MODULES else None
    with needing("Spark jobs need", "spark"):
        module = importlib.import_module(_MODULES[name] if name else _READER)
    sys.exit(module.run_main(list(arguments[1:] if name else arguments), f"seqdedupe job{f' {name}' if name else ''}"))


# -- All commands.

NAME = "seqdedupe"

_COMMANDS = {
    "audit": ("token_commands.audit", "Verify an audit trail."),
    "auth": ("token_commands.auth", "Show which rule allows or denies a call."),
    "backup": ("directory_commands.backup", "Make a backup of a running sidecar; list backups."),
    "bench": ("bench_command.bench", "Publish test messages and measure latencies."),
    "compile": ("sidecar_commands.compile_kernels", "Compile the kernels for all users of this installation."),
    "config": ("sidecar_commands.config", "Check a sidecar's configuration without starting it."),
    "consumer": ("service_commands.consumer", "Show the lag of consumers; list, retry, drop parked messages."),
    "cursors": ("topic_commands.cursors", "List a topic's cursors; make retention wait for one; remove one."),
    "doctor": ("directory_commands.doctor", "Check a data directory; salvage what is readable."),
    "export": ("sidecar_commands.export_file", "Write a topic's snapshot, or its watermarks, to a file."),
    "import": ("sidecar_commands.import_file", "Import a file of `export` or `job bootstrap` into a topic."),
    "in-flight": ("topic_commands.in_flight", "List producers with messages in flight for a long time."),
    "inbox": ("service_commands.inbox", "List the messages that inboxes have parked; try them again."),
    "message-state": ("topic_commands.message_state", "Show the state of one message."),
    "outbox": (
        "service_commands.outbox",
        "Publish each row of an outbox exactly once.",
    ),
    "pipe": (
        "service_commands.pipe",
        "Publish what a Python function returns for each message of a topic, exactly once.",
    ),
    "policy": ("topic_commands.policy", "Show and change the policy of a topic or a namespace."),
    "producers": ("topic_commands.producers", "List a topic's producers."),
    "profiles": ("sidecar_commands.profiles", "List the profiles, which name sidecars and their connection options."),
    "publish": ("publish_command.publish", "Publish the records of a file or a query."),
    "read": ("read_command.read", "Print a topic's messages."),
    "rebuild-topic": ("sidecar_commands.rebuild_topic", "Build the store's records of a topic again from its log."),
    "reset-producer": ("topic_commands.reset_producer", "Set a producer's highest sequence ID to a lower one."),
    "restore": ("directory_commands.restore", "Make a data directory from a backup."),
    "sidecars": ("sidecar_commands.sidecars", "List the sidecars of a cluster; forget one."),
    "snapshot": ("topic_commands.snapshot", "Take a snapshot of a topic now."),
    "token": ("token_commands.token", "Create keys; sign and validate tokens."),
    "top": ("sidecar_commands.top", "Show the busiest topics of a sidecar, every few seconds."),
    "topics": ("topic_commands.topics", "List, create, show, move, delete topics."),
    "verify": ("directory_commands.verify", "Verify every byte of a backup."),
    "version": ("sidecar_commands.version", "Show the versions of this command and of the sidecar."),
}
"""For each command: its module in this folder, and its line in the list of all commands."""


class _Commands(click.Group):
    """A group of commands. Until a command is used, the group contains only the command's name and a line of help."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, and return it. Return None if no command has this name."""
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = _COMMANDS[cmd_name][0].partition(".")
        command: click.Command = getattr(importlib.import_module(f"seqdedupe.cli.{module}"), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Do the same as the method of click, without importing commands."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self.commands[name].short_help) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Do the same as the method of click, without importing commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].short_help or "") for name in self.list_commands(ctx)])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="seqdedupe", message="%(version)s")
def cli() -> None:
    """Effectively-once publishing: run a sidecar, publish files, read topics."""


for _command in serve, job, *(click.Command(name, short_help=line) for name, (_, line) in _COMMANDS.items()):
    cli.add_command(_command)


def run() -> int:
    """Run the command of this process. Return the exit status."""
    sys.excepthook = _defect
    return run_command(cli, NAME)


def _defect(kind: type[BaseException], defect: BaseException, trace: TracebackType | None) -> None:
    where = traceback.extract_tb(trace)[-1] if trace else None
    place = f" at {where.filename}:{where.lineno}" if where else ""
    failure = error("INTERNAL", f"{kind.__name__}: {defect}{place}", hint="This is a defect. Please report it.")
    say_failure(NAME, failure, as_json=says_json(sys.argv[1:]))
