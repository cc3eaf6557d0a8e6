"""`seqdedupe config check`: what a start would refuse, without a start."""

import os
from pathlib import Path

import click

from seqdedupe.cli.common import as_json_option, tell
from seqdedupe.command import needing
from seqdedupe.errors import error


@click.group()
def config() -> None:
    """Check the configuration of a sidecar."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@as_json_option
def check(file: Path | None, as_json: bool) -> None:
    """List everything that would prevent a start with this file. Start nothing.

    As at a start, SEQDEDUPE_* variables come before FILE. The command locks, creates and writes nothing. Run it as the
    sidecar's user. Warnings do not prevent a start.
    """
    with needing("this needs", "sidecar"):
        from broker_sidecar.config_check import find_problems

        problems = find_problems(file, os.environ)
    errors = sum(problem.ends_start for problem in problems)
    values = [
        {
            "is_error": ends_start,
            "key": why.numbers.get("key"),
            "reason": why.reason,
            "message": why.message,
            "hint": why.hint,
        }
        for why, ends_start in problems
    ]
    lines = [f"{'error' if ends_start else 'warning'}: {why} {why.hint}" for why, ends_start in problems]
    if not errors:
        lines.append(f"the configuration is valid{': warnings alone' if problems else ''}")
    tell(as_json, {"file": None if file is None else str(file), "problems": values}, *lines)
    if errors:
        what = f"the configuration has {errors} error{'' if errors == 1 else 's'}: a start would end with the first"
        raise error("INVALID_CONFIGURATION", what, errors=errors)
