"""The commands about policies: of topics and of namespaces."""

from typing import Any

import click

from seqdedupe.cli.options import common, connect_to, print_json, print_table
from seqdedupe.client.admin import PolicyState
from seqdedupe.v1 import admin_pb2

_WORDS = {"gap": ("ALLOW", "REJECT"), "overlap": ("REJECT", "PULSAR")}
_NAMES = [field.name for field in admin_pb2.TopicPolicy.DESCRIPTOR.fields]


def _values(policy: Any) -> dict[str, Any]:
    """Each value by name, None where it is not set."""
    values: dict[str, Any] = {}
    for field in policy.DESCRIPTOR.fields:
        value = getattr(policy, field.name) if policy.HasField(field.name) else None
        if value is not None and field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)  # a newer sidecar may say more
            value = str(value) if known is None else known.name.rpartition("_")[2]
        values[field.name] = value
    return values


def _print(name: str, state: PolicyState, as_json: bool) -> None:
    is_set, applied = _values(state.set), _values(state.applied)
    if as_json:
        print_json({"name": name, "set": is_set, "applied": applied})
        return
    rows = [(value, _text(is_set[value]), _text(applied[value])) for value in _NAMES]
    print_table(("POLICY", "SET", "APPLIED"), rows)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)


@click.group(short_help="Show, set, remove the policy of a topic or a namespace.")
def policy() -> None:
    """Show, set and remove what is set for a topic, or for a namespace (tenant/namespace)."""


@policy.command()
@click.argument("name", metavar="TOPIC|NAMESPACE")
@common
def get(name: str, address: str, as_json: bool) -> None:
    """Show what is set, and what is in force."""
    with connect_to(address, name) as client:
        _print(name, client.admin.policy(name), as_json)


@policy.command("set")
@click.argument("name", metavar="TOPIC|NAMESPACE")
@click.option("--deduplication/--no-deduplication", "deduplication_enabled", default=None, help="On or off.")
@click.option("--gap", type=click.Choice(_WORDS["gap"], case_sensitive=False), help="What becomes of gaps.")
@click.option(
    "--overlap",
    type=click.Choice(_WORDS["overlap"], case_sensitive=False),
    help="What becomes of a broker's ranges that are persisted in part.",
)
@click.option("--deduplication-entries-interval", type=int, help="A snapshot after so many stored batches.")
@click.option(
    "--deduplication-snapshot-interval-seconds", type=int, help="A snapshot so long after news; 0: not by time."
)
@click.option("--retention-size-in-mb", type=int, help="So much of the log is kept; -1: all of it.")
@click.option("--retention-time-in-minutes", type=int, help="So long messages are kept; -1: for ever.")
@click.option(
    "--deduplication-producer-inactivity-timeout-minutes",
    type=int,
    help="A producer that nobody has used for so long is forgotten; 0: never.",
)
@click.option("--log-flush-interval-messages", type=int, help="A sync after so many messages; 1: every commit.")
@click.option("--log-flush-interval-ms", type=int, help="A sync so long after a message; 0: every commit.")
@click.option(
    "--deduplication-window-max-messages", type=int, help="A copy is known until so many messages came after."
)
@click.option("--deduplication-window-max-bytes", type=int, help="Or until their IDs have so many bytes; -1: no limit.")
@click.option("--deduplication-window-max-minutes", type=int, help="Or so long after its original; -1: no limit.")
@common
def set_values(name: str, address: str, as_json: bool, **values: Any) -> None:
    """Set the values that are given; the others stay. In force, and durable, when this returns."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        raise click.UsageError("Say at least one value to set.")
    for key in _WORDS.keys() & given.keys():
        given[key] = f"{key.upper()}_POLICY_{given[key].upper()}"
    with connect_to(address, name) as client:
        _print(name, client.admin.set_policy(name, admin_pb2.TopicPolicy(**given)), as_json)


@policy.command()
@click.argument("name", metavar="TOPIC|NAMESPACE")
@click.argument("values", nargs=-1, metavar="[VALUE]...", type=click.Choice(_NAMES))
@common
def remove(name: str, values: tuple[str, ...], address: str, as_json: bool) -> None:
    """Values that are to be inherited again; without VALUE, all of them."""
    with connect_to(address, name) as client:
        _print(name, client.admin.remove_policy(name, *values), as_json)
