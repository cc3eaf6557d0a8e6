"""`seqdedupe serve`: the sidecar."""

import sys

import click

from seqdedupe.errors import error

_OURS = ("seqdedupe", "broker_sidecar")


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run a sidecar.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def serve(flags: tuple[str, ...]) -> None:
    """Run a sidecar until it is told to stop. Takes the flags of `python -m broker_sidecar`."""
    try:
        from broker_sidecar.__main__ import main

        status = main(list(flags), prog="seqdedupe serve")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] in _OURS:
            raise
        raise error(
            "INVALID_CONFIGURATION",
            f"the sidecar needs {e.name}, which is not installed",
            hint="Install it: pip install 'seqdedupe[sidecar]'",
        ) from e
    sys.exit(status)
