"""The common part of commands: the sidecar's address, a client of the sidecar, hints for a missing topic, and a
position as JSON."""

import difflib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from seqdedupe.client.blocking import Client
from seqdedupe.client.connection import HINT_OF_GONE, NOT_A_SIDECAR
from seqdedupe.client.listeners import hint_of_http
from seqdedupe.client.producer_session import OPEN_TIMEOUT_SECONDS
from seqdedupe.client.route import OnWaiting
from seqdedupe.command import echo, print_json, printable, without_passwords, without_passwords_in
from seqdedupe.errors import REASONS, NotFoundError, OutcomeUnknownError, SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.sidecar_options import CONNECTION_PARAMETERS, Command, sidecar_options, told_credentials

DATABASE_VARIABLE = "SEQDEDUPE_DATABASE"
"""The variable with the URL of a service's or a query's database."""

_SHORT_NAMES = "persistent://public/default/"

_POLL_SECONDS = 0.2

_SHORTEST_NEAR_NAME = 4
"""The shortest name for which a similar name is suggested. Shorter names are similar to too many other names."""

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result and errors as JSON (docs/reference/cli.md)."
)


def common(command: Command) -> Command:
    """Add `--address`, `--profile`, the options for credentials, and `--json`."""
    return sidecar_options(as_json_option(command))


def tell(as_json: bool, values: object, *lines: str) -> None:
    """Print the result of a command: with `as_json`, print `values` as JSON; otherwise print these lines."""
    if as_json:
        print_json(without_passwords_in(values))
        return
    for line in lines:
        echo(printable(without_passwords(line)))


def seconds_of(duration: str) -> int | None:
    """Return the seconds of a text such as `90s`, `15m`, `12h` or `30d`; None for any other text."""
    found = _DURATION.fullmatch(duration)
    return None if found is None else int(found[1]) * _UNIT_SECONDS[found[2]]


def is_alone(context: click.Context) -> bool:
    """Return whether the user called a group without one of the group's commands. Raises UsageError if an option of
    such a command precedes the command's name."""
    if context.invoked_subcommand is None:
        return True
    given = click.core.ParameterSource.COMMANDLINE
    if any(context.get_parameter_source(name) is given for name in (*CONNECTION_PARAMETERS, "as_json")):
        raise click.UsageError(f"Options come after {context.invoked_subcommand!r}.", context)
    return False


def connect(address: str, on_waiting: OnWaiting | None = None) -> Client:
    """Return a client of a sidecar that answers. If the sidecar does not answer, raises UNREACHABLE: at once, or after
    CALL_TIMEOUT_SECONDS. If another server answers, raises NOT_A_SIDECAR.

    With `on_waiting`, wait for a sidecar that does not answer yet, for as long as a producer would wait. The function
    calls `on_waiting` once with the reason.
    """
    client = Client(address, told_credentials())
    give_up_at = time.monotonic() + OPEN_TIMEOUT_SECONDS
    while True:
        try:
            client.admin.version()
            return client
        except UnavailableError as e:
            why = _unanswered(address, e)
            if on_waiting is None or why.reason == NOT_A_SIDECAR or time.monotonic() > give_up_at:
                raise why from e.__cause__
            on_waiting(why)
            on_waiting = _told_already
        time.sleep(_POLL_SECONDS)


def _unanswered(address: str, e: UnavailableError) -> UnavailableError:
    """Return UNREACHABLE in place of OUTCOME_UNKNOWN. The unanswered call changes nothing, so its outcome does not
    matter."""
    if not isinstance(e, OutcomeUnknownError):
        return e
    known = REASONS["UNREACHABLE"]
    what = f"no answer from the sidecar at {address}: {e.message}"
    hint = hint_of_http(e.message) or known.hint
    return UnavailableError("UNREACHABLE", what, hint, known.retry_delay_ms, e.numbers)


def _told_already(_why: UnavailableError) -> None:
    pass


@contextmanager
def connect_to(
    address: str, topic: str, *, makes: bool = False, on_waiting: OnWaiting | None = None
) -> Iterator[Client]:
    """Do the same as `connect`. If the topic does not exist, the block's error is the error of `naming_near`."""
    with connect(address, on_waiting) as client, naming_near(client, topic, makes=makes):
        yield client


@contextmanager
def naming_near(client: Client, topic: str, *, makes: bool = False) -> Iterator[None]:
    """If the block raises TOPIC_NOT_FOUND, add to the error the name of an existing topic that the user may mean. Set
    `makes` if the block can create topics. If no topic has a similar name, the error then keeps its hint, which
    describes how to create a topic."""
    try:
        yield
    except NotFoundError as e:
        if e.reason != "TOPIC_NOT_FOUND" or e.hint == HINT_OF_GONE or "was deleted" in e.message:
            raise
        wanted, near = topic_name(topic).removeprefix(_SHORT_NAMES), None
        with suppress(SeqdedupeError):
            near = _near_name(wanted, client)
        if near is None and makes:
            raise
        hint = f"Do you mean {near}?" if near else "Check the name: `seqdedupe topics` lists the topics."
        if near == wanted:
            hint = "It is listed now: it was just created, or several sidecars with different data share one address."
        raise error(e.reason, e.message, hint=hint) from e


def _near_name(wanted: str, client: Client) -> str | None:
    """Return this name if a topic has the name; otherwise the name of a topic that differs by about one edit, or
    None."""
    names = [known.name.removeprefix(_SHORT_NAMES) for known in client.admin.topics()]
    if wanted in names:
        return wanted
    long_names = [name for name in names if min(len(name), len(wanted)) >= _SHORTEST_NEAR_NAME]
    return next(iter(difflib.get_close_matches(wanted, long_names, 1, max(0.0, 1 - 1.5 / len(wanted)))), None)


def position_json(position: Position) -> dict[str, Any]:
    """Return a position as an object for JSON. `message_id` is null for the position before a topic's first message.
    `ownership` has the same form as in the position's text, and is null if the ownership is not known."""
    return {
        "incarnation": position.incarnation,
        "index": position.index,
        "message_id": None if position.message_id is None else str(position.message_id),
        "ownership": f"{position.ownership:016x}" if position.ownership else None,
    }
