"""The common parts of all command lines: the handling of errors, and the form of the output."""

import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

import click

from seqdedupe.errors import (
    EXIT_FAILED,
    EXIT_WRONG,
    INSTALL_HINT,
    NEVER,
    SeqdedupeError,
    UnavailableError,
    error,
    exit_status,
)
from seqdedupe.names import topic_name

FAILED = EXIT_FAILED
WRONG_USAGE = EXIT_WRONG
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit statuses."""

_OURS = ("seqdedupe", "broker_sidecar", "seqdedupe_spark")

_NOT_PRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal may act on (except the tab): control characters, and those that change text direction."""

_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s/:@]*:)\S*@")
"""The password of a URL, up to the last @. A URL that was taken as a path has one slash. A password may contain any
other character, also a slash or an @ that should be %2F or %40."""

_OS_HINTS = {
    errno.ENOSPC: "Make room on the disk, or choose a place on another one.",
    errno.EDQUOT: "Make room within the quota, or choose a place on another disk.",
    errno.EROFS: "Mount the file system for writing, or choose a place on another one.",
    errno.EACCES: "Run the command as a user who may use that file or folder.",
    errno.EPERM: "Run the command as a user who may use that file or folder.",
    errno.ENOENT: "Is that its name, and is its folder there?",
}
"""Hints for errors of the operating system."""

MAX_SECONDS = 366 * 24 * 60 * 60.0
"""The largest value of an option in seconds: a year."""


class Seconds(click.FloatRange):
    """The type of an option in seconds: a number from 0 to MAX_SECONDS."""

    def __init__(self) -> None:
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse NaN and infinity too."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds) or seconds > MAX_SECONDS:
            self.fail(f"{value!r} is not a number from 0 to {MAX_SECONDS:.0f}.", param, ctx)
        return seconds


def run_command(
    command: click.Command, name: str, *, arguments: Sequence[str] | None = None, failed: int = FAILED
) -> int:
    """Run the command, with this process's arguments if none are given. Return the command's exit status, or 0.

    An error is one line on stderr, with `--json` in JSON. The exit status is then `failed`. For wrong usage and a wrong
    configuration the exit status is 2. For an interrupted command the exit status is 130.
    """
    as_json = says_json(sys.argv[1:] if arguments is None else arguments)
    try:
        status: Any = command.main(arguments, prog_name=name, standalone_mode=False)
        return status or 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return WRONG_USAGE
    except click.ClickException as e:
        path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else name
        hint = f"See {path} --help."
        if as_json:
            _say_json(reason="WRONG_USAGE", message=_plain(e.format_message()), hint=hint)
        else:
            message = _plain(e.format_message())
            say(name, f"{message}{'' if message.endswith(('.', '?', '!')) else '.'} {hint}")
        return e.exit_code
    except SeqdedupeError as e:
        say_failure(name, e, as_json=as_json)
        if e.reason == "INTERRUPTED":
            return INTERRUPTED
        return WRONG_USAGE if exit_status(e) == WRONG_USAGE else failed
    except OSError as e:
        message = f"{e.filename}: {e.strerror}" if e.filename and e.strerror else str(e)
        say_foreign(name, "OS_ERROR", message, as_json=as_json, hint=_OS_HINTS.get(e.errno or 0, ""))
        return failed


@contextmanager
def needing(what: str, extra: str, *, otherwise: str = "") -> Iterator[None]:
    """Wrap imports of packages of an extra. Raises INVALID_CONFIGURATION if a package that `what` needs is not
    installed."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] in _OURS:
            raise
        hint = f"{INSTALL_HINT.format(extra)}{otherwise}"
        raise error("INVALID_CONFIGURATION", f"{what} {e.name}, which is not installed", hint=hint) from e


def _plain(usage: str) -> str:
    """Return click's message without the names of click's internal types."""
    for name, word in {"integer range": "whole number", "integer": "whole number", "float range": "number"}.items():
        usage = usage.replace(f"is not a valid {name}.", f"is not a {word}.")
    return usage


def says_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, even if the command line is otherwise invalid."""
    return "--json" in takewhile("--".__ne__, arguments)


def say_failure(name: str, failure: SeqdedupeError, *, as_json: bool) -> None:
    """Print the error on stderr, in one line: for a person, or as JSON."""
    if not as_json:
        say(name, f"{failure} {failure.hint}")
        return
    _say_json(
        reason=failure.reason,
        message=failure.message,
        hint=failure.hint,
        retry_delay_ms=None if failure.retry_delay_ms == NEVER else failure.retry_delay_ms,
        numbers=failure.numbers,
    )


def say_foreign(name: str, reason: str, message: str, *, as_json: bool, hint: str = "") -> None:
    """Print an error that is not a SeqdedupeError, as `say_failure` does. `reason` names the origin of the error."""
    if as_json:
        _say_json(reason=reason, message=message, hint=hint)
    else:
        say(name, f"{message} [{reason}] {hint}")


def _say_json(**values: Any) -> None:
    """Print the error in its documented form. Keep that form stable."""
    click.echo(json_text({"error": without_passwords_in(values)}), err=True)


def without_passwords_in(value: Any) -> Any:
    """Apply `without_passwords` to all texts in a JSON value."""
    if isinstance(value, dict):
        return {name: without_passwords_in(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_passwords_in(one) for one in value]
    return without_passwords(value) if isinstance(value, str) else value


def tell_waiting(topic: str, as_json: bool, why: UnavailableError) -> None:
    """Print why the command waits. The client's thread calls this function once per reason. If the function cannot
    print, the command still continues to wait."""
    with suppress(OSError):
        if as_json:
            found = {"topic": topic_name(topic), "reason": why.reason, "message": why.message}
            click.echo(json_text({"waiting": found}), err=True)
        else:
            say("seqdedupe", f"waiting: {why}")


@contextmanager
def standard_output() -> Iterator[None]:
    """Raise STANDARD_OUTPUT_FAILED if the block cannot write to standard output.

    If the reader has closed the pipe (`| head`), the command ends silently, with the status of a SIGPIPE."""
    if sys.stdout is None:
        hint = "What the command has done stands; only what it prints is missing."
        raise error("STANDARD_OUTPUT_FAILED", "standard output is closed", hint=hint)
    try:
        yield
    except OSError as e:
        # Text that is left in the buffer would fail once more at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if isinstance(e, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        raise error("STANDARD_OUTPUT_FAILED", f"standard output cannot be written: {e.strerror or e}") from e


def echo(text: str) -> None:
    """Print one line on standard output. Raises STANDARD_OUTPUT_FAILED."""
    with standard_output():
        click.echo(text)


def say(name: str, message: str) -> None:
    """Print one line on stderr."""
    click.echo(f"{name}: " + printable(without_passwords(" ".join(message.split()))), err=True)


def without_passwords(text: str) -> str:
    """Return the text with *** in place of the passwords in URLs. Users sometimes pass a URL instead of a path or
    address."""
    return _PASSWORD.sub(r"\1***@", text)


def printable(text: str) -> str:
    """Return the text with escapes in place of characters that a terminal may act on."""
    return _NOT_PRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def json_text(value: Any) -> str:
    """Return one line of JSON, without characters that a terminal may act on."""
    return _NOT_PRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    echo(json_text(value))


def _cell(value: object) -> str:
    if value is None:
        return "?"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. Each column is as wide as needed, and numbers are aligned to the right. An unknown value (None) is
    printed as `?`, and a missing value as `-`."""
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
