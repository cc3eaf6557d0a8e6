"""The commands about who may do what."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from seqdedupe.cli.options import as_json_option, print_json
from seqdedupe.command import FAILED, WRONG_USAGE, echo, printable, say_failure
from seqdedupe.errors import SeqdedupeError
from seqdedupe.names import is_namespace, namespace_name, producer_name, topic_name

if TYPE_CHECKING:
    from broker_sidecar.security.rules import Decision

ACTIONS = ("publish", "read", "create", "observe", "administer", "attach")
_ALSO_OF_SEVERAL = ("observe", "administer")
"""There are calls that need it on a whole namespace, or on everything."""

_EVERYTHING = "*"


@click.group(short_help="Explain what rules allow.")
def auth() -> None:
    """Who may do what, as a rules file says."""


def _of_actions(command: click.decorators.FC) -> click.decorators.FC:
    for action in reversed(ACTIONS):
        what = "topic, tenant/namespace, or *: everything" if action in _ALSO_OF_SEVERAL else "topic"
        command = click.option(f"--{action}", metavar="NAME", help=f"Whether it may {action} this {what}.")(command)
    return command


@auth.command(short_help="Say which rule decides.")
@click.option(
    "--rules",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The rules file.",
)
@click.option("--as", "subject", required=True, help="The caller: the name in its token or certificate.")
@_of_actions
@click.option(
    "--producer",
    help="With --publish: under this producer name; '': without one, by deduplication ID. Left out: under some name.",
)
@click.option("--cursor", help="With --read: whether it may move this cursor. Left out: whether it may read messages.")
@as_json_option
def explain(
    file: Path, subject: str, producer: str | None, cursor: str | None, as_json: bool, **asked: str | None
) -> int:
    """Say which rule of a file decides, without a sidecar. It reads the file alone: the data directory's own token may
    do everything.

    The exit status is 0 if it is allowed, 1 if it is denied, 2 if it could not be found out.
    """
    given = [(action, what) for action, what in asked.items() if what is not None]
    if len(given) != 1:
        raise click.UsageError(f"Say one of {', '.join(f'--{action}' for action in ACTIONS)}.")
    [(action, what)] = given
    if producer is not None and action != "publish":
        raise click.UsageError("--producer goes with --publish.")
    if cursor is not None and action != "read":
        raise click.UsageError("--cursor goes with --read.")
    try:
        name, decision = _decide(file, subject, action, what, producer, cursor)
    except SeqdedupeError as e:
        say_failure("seqdedupe", e, as_json=as_json)
        return WRONG_USAGE
    rule = decision.rule and decision.rule.name
    if as_json:
        asked_for = {"subject": subject, "action": action, "name": name, "producer_name": producer, "cursor": cursor}
        print_json(asked_for | {"is_allowed": decision.is_allowed, "rule": rule})
    else:
        echo(f"{'allowed' if decision.is_allowed else 'denied'}: {printable(rule or 'no rule allows it')}")
    return 0 if decision.is_allowed else FAILED


def _decide(
    file: Path, subject: str, action: str, what: str, producer: str | None, cursor: str | None
) -> "tuple[str, Decision]":
    """The full name of what it is about, and the decision. Raises INVALID_CONFIGURATION, and what the names are."""
    from broker_sidecar import kernels

    kernels.prepare()
    from broker_sidecar.security import rules_file
    from broker_sidecar.security.rules import Action

    rules = rules_file.read(file).rules
    if action in _ALSO_OF_SEVERAL and what == _EVERYTHING:
        return what, rules.decide_everything(subject, Action(action))
    if action in _ALSO_OF_SEVERAL and is_namespace(what):
        return what, rules.decide_namespace(subject, Action(action), namespace_name(what))
    topic = topic_name(what)
    if producer:
        producer_name(producer)
    return topic, rules.decide(subject, Action(action), topic, producer if cursor is None else cursor)
