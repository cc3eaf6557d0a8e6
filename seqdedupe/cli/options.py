"""What the commands share: where the sidecar is, the form of the output, a hint for a topic that is not there."""

import difflib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from seqdedupe.client.blocking import Client
from seqdedupe.client.connection import NOT_A_SIDECAR
from seqdedupe.client.producer_session import OPEN_TIMEOUT_SECONDS
from seqdedupe.client.route import OnWaiting
from seqdedupe.command import (
    CREDENTIAL_PARAMETERS,
    Command,
    echo,
    json_text,
    printable,
    say,
    sidecar_options,
    told_credentials,
)
from seqdedupe.errors import (
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    SeqdedupeError,
    UnavailableError,
    error,
)
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

_SHORT_NAMES = "persistent://public/default/"

_POLL_SECONDS = 0.2

_SHORTEST_NEAR_NAME = 4
"""A shorter name is near to too many."""

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, errors too, as docs/cli.md describes it."
)


def common(command: Command) -> Command:
    """Adds `--address`, the options for credentials, and `--json`."""
    return sidecar_options(as_json_option(command))


def is_alone(context: click.Context) -> bool:
    """Whether a group was called without one of its commands. Raises UsageError if it got the command's options."""
    if context.invoked_subcommand is None:
        return True
    given = click.core.ParameterSource.COMMANDLINE
    if any(context.get_parameter_source(name) is given for name in ("address", *CREDENTIAL_PARAMETERS, "as_json")):
        raise click.UsageError(f"Options come after {context.invoked_subcommand!r}.", context)
    return False


def connect(address: str, on_waiting: OnWaiting | None = None) -> Client:
    """A client of a sidecar that answers. Raises UNREACHABLE if it does not: at once, or after CALL_TIMEOUT_SECONDS;
    NOT_A_SIDECAR if something else does.
    With `on_waiting`, which is told why, one that is not up yet is waited for as long as a producer waits for it."""
    client = Client(address, told_credentials())
    give_up_at = time.monotonic() + OPEN_TIMEOUT_SECONDS
    while True:
        try:
            client.admin.version()
            return client
        except OutcomeUnknownError as e:  # nothing was asked for whose outcome could matter
            raise error("UNREACHABLE", f"no answer from the sidecar at {address}: {e.message}") from e
        except UnavailableError as e:
            if on_waiting is None or e.reason == NOT_A_SIDECAR or time.monotonic() > give_up_at:
                raise
            on_waiting(e)
            on_waiting = _told_already
        time.sleep(_POLL_SECONDS)


def _told_already(_why: UnavailableError) -> None:
    pass


@contextmanager
def connect_to(
    address: str, topic: str, *, makes: bool = False, on_waiting: OnWaiting | None = None
) -> Iterator[Client]:
    """As `connect`; if the topic is not there, the error is that of `naming_near`."""
    with connect(address, on_waiting) as client, naming_near(client, topic, makes=makes):
        yield client


@contextmanager
def naming_near(client: Client, topic: str, *, makes: bool = False) -> Iterator[None]:
    """If the topic is not there, the error names the one that may be meant; how it could be made it says only where the
    block `makes` topics."""
    try:
        yield
    except NotFoundError as e:
        if e.reason != "TOPIC_NOT_FOUND" or "was deleted" in e.message:
            raise
        near = None
        with suppress(SeqdedupeError):
            near = _near_name(topic, client)
        if near is None and makes:
            raise
        hint = f"Do you mean {near}?" if near else "Is the name mistyped? `seqdedupe topics` lists the topics."
        raise error(e.reason, e.message, hint=hint) from e


@contextmanager
def right_kind(client: Client, topic: str, *, by_id: bool) -> Iterator[None]:
    """What cannot be published in the block because the topic is of the other kind says with which options it can."""
    try:
        yield
    except InvalidRequestError as e:
        found = None
        with suppress(SeqdedupeError):
            found = client.admin.topic(topic).deduplication_mode
        if by_id and found == admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID:
            what, hint = "sequence IDs", "Say --producer, and no deduplication IDs."
        elif not by_id and found == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
            what = "deduplication IDs"
            hint = "Say --deduplication-id-column or --deduplication-id-path, and no producer."
        else:
            raise
        raise error(e.reason, f"{topic_name(topic)} is a topic of {what}", hint=hint) from e


def _near_name(topic: str, client: Client) -> str | None:
    """The topic whose name is one edit or so from this one."""
    wanted = topic_name(topic).removeprefix(_SHORT_NAMES)
    names = [known.name.removeprefix(_SHORT_NAMES) for known in client.admin.topics()]
    long_names = [name for name in names if min(len(name), len(wanted)) >= _SHORTEST_NEAR_NAME]
    return next(iter(difflib.get_close_matches(wanted, long_names, 1, max(0.0, 1 - 1.5 / len(wanted)))), None)


def tell_waiting(topic: str, as_json: bool, why: UnavailableError) -> None:
    """Says what the command waits for: from the client's thread, once each time. If nobody reads that, it waits on."""
    with suppress(OSError):
        if as_json:
            found = {"topic": topic_name(topic), "reason": why.reason, "message": why.message}
            click.echo(json_text({"waiting": found}), err=True)
        else:
            say("seqdedupe", f"waiting: {why}")


def print_json(value: Any) -> None:
    """One line of JSON."""
    echo(json_text(value))


def _cell(value: object) -> str:
    if value is None:
        return "?"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as needed; those with numbers stand to the right. A value that is not known (None) is a
    `?`, and one that there is not a `-`."""
    values = [tuple(row) for row in rows]
    table = [tuple(heads), *(tuple(map(_cell, row)) for row in values)]
    numeric = [
        all(value in (None, "-") or isinstance(value, int) for value in column)
        and any(value is not None for value in column)
        for column in zip(*values, strict=True)
    ] or [False] * len(heads)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        echo("  ".join(cells).rstrip())
