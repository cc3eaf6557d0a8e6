"""The operators' commands about the sidecars of a cluster."""

import click

from seqdedupe.cli.options import common, connect, connect_to, is_alone, print_json, print_table
from seqdedupe.cli.topics import topics
from seqdedupe.command import echo, printable
from seqdedupe.names import topic_name


@click.group(invoke_without_command=True, short_help="List the sidecars of a cluster, forget one.")
@common
@click.pass_context
def sidecars(context: click.Context, address: str, as_json: bool) -> None:
    """List the sidecars of a cluster, and what its topics keep for each. The command below forgets one."""
    if not is_alone(context):
        return
    with connect(address) as client:
        found = client.admin.sidecars()
    if as_json:
        values = ("topics_owned", "subscriptions", "kept_entries", "kept_bytes", "is_this")
        print_json(
            [
                {"name": one.name, "addresses": list(one.addresses)}
                | {name: getattr(one, name) for name in values}
                | {"shards": one.shards or None}
                for one in found
            ]
        )
        return
    if any(one.shards for one in found):
        print_table(("ADDRESS", "SHARDS", "OWNS TOPICS"), [(one.name, one.shards, one.topics_owned) for one in found])
        return
    print_table(
        ("SIDECAR", "ADDRESS", "OWNS TOPICS", "SUBSCRIPTIONS", "KEPT ENTRIES", "KEPT BYTES"),
        [
            (
                one.name,
                " ".join(one.addresses) or None,
                one.topics_owned,
                one.subscriptions,
                one.kept_entries,
                one.kept_bytes,
            )
            for one in found
        ],
    )
    for one in found:
        if len(one.addresses) > 1:
            two = "it was elsewhere before, or two sidecars have one name, which must not be"
            echo(printable(f"{one.name} has {len(one.addresses)} addresses: {two}"))


@sidecars.command()
@click.argument("name")
@common
def forget(name: str, address: str, as_json: bool) -> None:
    """Remove the subscriptions of a sidecar that is gone for good, so that the cluster keeps nothing for it."""
    with connect(address) as client:
        removed = client.admin.forget_sidecar(name)
    if as_json:
        print_json({"forgotten": name, "topics": removed})
        return
    for topic in removed:
        echo(f"{topic}: the subscription of {printable(name)} is removed")


@topics.command()
@click.argument("name")
@click.option("--to", metavar="ADDRESS", default="", help="The sidecar that is to have it. Left out: who takes it.")
@common
def move(name: str, to: str, address: str, as_json: bool) -> None:
    """Move a topic to another sidecar, of a cluster or with a log of its own; returns when that one serves it."""
    with connect_to(address, name) as client:
        owner = client.admin.move_topic(name, to)
    if as_json:
        print_json({"topic": topic_name(name), "owner_address": owner})
    else:
        echo(printable(f"{topic_name(name)} is served by the sidecar at {owner}"))
