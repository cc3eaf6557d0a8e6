"""`seqdedupe pipe`: a Python function from topic to topic."""

import signal
from typing import Any

import click

from seqdedupe.cli.options import common, connect, naming_near, print_json
from seqdedupe.cli.python_object import PythonObject
from seqdedupe.client.blocking import Client
from seqdedupe.command import echo, told_credentials
from seqdedupe.services.pipe.blocking import Pipe


@click.command(short_help="Bring a topic's messages through a Python function to another topic, exactly once.")
@click.argument("source")
@click.argument("target")
@click.option(
    "--function", type=PythonObject(), required=True, metavar="MODULE:NAME", help="What each message goes to."
)
@click.option("--name", required=True, help="The pipe's name, always the same: its outputs are known by it.")
@click.option("--follow", is_flag=True, help="At the end wait for new messages instead of ending.")
@common
def pipe(source: str, target: str, function: Any, name: str, follow: bool, address: str, as_json: bool) -> None:
    """Call a Python function for each message of SOURCE, and publish what it gives to TARGET, exactly once."""
    if not callable(function):
        raise click.BadParameter("it is no function.", param_hint="'--function'")
    with Client(address, told_credentials()) if follow else connect(address) as client:
        one = Pipe(client, source, target, function, name=name)
        signal.signal(signal.SIGTERM, lambda *_: one.stop())
        with naming_near(client, source):
            one.run(follow=follow)
    if as_json:
        print_json(one.counts)
    else:
        again = f", {one.counts['outputs_again']:,} of them held already" if one.counts["outputs_again"] else ""
        echo(f"{one.counts['inputs']:,} messages read, {one.counts['outputs']:,} outputs sent{again}")
