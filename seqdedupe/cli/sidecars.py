"""The operators' commands about sidecars as a whole: clusters, numbers to and from files, backups, named cursors."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from seqdedupe import exports, files
from seqdedupe.cli.doctor import prepare, print_findings
from seqdedupe.cli.options import as_json_option, common, connect, connect_to, is_alone, print_json, print_table
from seqdedupe.cli.topics import position_json, topics
from seqdedupe.command import FAILED, echo, printable
from seqdedupe.figures import state_name
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from seqdedupe.backup.manifest import Manifest
    from seqdedupe.v1 import admin_pb2


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


# -- The operators' commands that take a topic's numbers to a file, from one, and from its log.

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export", short_help="Write a topic's snapshot, or its watermarks, to a file.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@click.option(
    "--watermarks", "only_watermarks", is_flag=True, help="The highest sequence IDs alone, for another topic."
)
@common
def export_file(topic: str, file: Path, only_watermarks: bool, address: str, as_json: bool) -> None:
    """Write a topic's snapshot to a file, as of one moment; one that is there is replaced."""
    values = {"topic": topic_name(topic), "kind": "watermarks" if only_watermarks else "snapshot"}
    with connect_to(address, topic) as client:
        if only_watermarks:
            producers = client.admin.export_watermarks(topic, file)
            text = f"the watermarks of {producers:,} producers are in {file}"
            _say(values | {"producers": producers}, text, as_json)
            return
        head = client.admin.export_snapshot(topic, file)
    position = Position.from_proto(head.position)
    text = f"a snapshot with {head.producers:,} producers, up to {position}, is in {file}"
    _say(values | {"producers": head.producers, "position": position_json(position)}, text, as_json)


@click.command("import", short_help="Take a file of export or bootstrap over into a topic.")
@click.argument("topic")
@click.argument("file", type=_FILE)
@common
def import_file(topic: str, file: Path, address: str, as_json: bool) -> None:
    """Take a file that `export` or `job bootstrap` wrote over into a topic; durable when this returns.

    A snapshot goes into the topic that it was taken of. Watermarks go into one that was created, and that no producer
    has opened yet; a window of deduplication IDs into one of these without messages.
    """
    magic = files.magic_of(file)
    if magic not in (exports.SNAPSHOT_MAGIC, exports.WATERMARKS_MAGIC, exports.WINDOW_MAGIC):
        raise files.not_as_written(
            file, "it begins neither as a snapshot nor as a file of watermarks or of a window does"
        )
    with connect_to(address, topic) as client:
        if magic == exports.SNAPSHOT_MAGIC:
            _say_opened(client.admin.import_snapshot(topic, file), "snapshot", "from the snapshot", as_json)
            return
        if magic == exports.WINDOW_MAGIC:
            ids = client.admin.import_window(topic, file)
            values = {"topic": topic_name(topic), "kind": "window", "ids": ids}
            _say(values, f"a window of {ids:,} deduplication IDs is in force", as_json)
            return
        producers = client.admin.import_watermarks(topic, file)
    values = {"topic": topic_name(topic), "kind": "watermarks", "producers": producers}
    _say(values, f"the watermarks of {producers:,} producers are in force", as_json)


@click.command("rebuild-topic", short_help="Make the store's records of a topic anew from its log.")
@click.argument("topic")
@common
def rebuild_topic(topic: str, address: str, as_json: bool) -> None:
    """Make the store's records of a topic anew from all that is left in its log, while the other topics serve."""
    with connect_to(address, topic) as client:
        _say_opened(client.admin.rebuild_topic(topic), "log", "from its log", as_json)


def _say_opened(topic: admin_pb2.Topic, kind: str, where: str, as_json: bool) -> None:
    state = state_name(topic.state)
    text = f"{topic.name} was opened again {where}, and is {state}" + (f": {topic.why}" if topic.why else "")
    values = {"topic": topic.name, "kind": kind, "producers": topic.producers, "state": state, "why": topic.why or None}
    _say(values, text, as_json)


def _say(values: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        echo(printable(text))


# -- The commands about backups: one is made by the sidecar, while it runs; it is checked and restored without one.

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(short_help="Have the sidecar make a backup of all that it has.")
@click.argument("name")
@common
def backup(name: str, address: str, as_json: bool) -> int:
    """Have the running sidecar make a backup of all that it has, in a new folder NAME in its backup_directory.

    Exit status 1 if something was damaged where it was taken, and is so in the backup.
    """
    with connect(address) as client:
        made = client.admin.backup(name, _say_progress)
    is_whole = not any(one.damaged or one.left_out for one in made)
    if as_json:
        print_json({"whole": is_whole, "parts": [_part_json(one) for one in made]})
    else:
        for one in made:
            echo(
                printable(
                    f"{one.directory}: {one.topics:,} topics, {one.bytes:,} bytes, {one.linked_bytes:,} of them shared "
                    f"with an earlier backup; as of {_moment(one.made_at_us)}"
                )
            )
            _say_faults(one.damaged, one.left_out)
    return 0 if is_whole else FAILED


@click.command(short_help="Check a backup, every byte of it.")
@click.argument("directory", type=_FOLDER)
@as_json_option
def verify(directory: Path, as_json: bool) -> int:
    """Check a backup: that each file is what was written, and, as the doctor does, that logs and store are whole and
    belong together.

    Exit status 1 if not.
    """
    prepare()
    from seqdedupe.backup.restoring import check, parts_of
    from seqdedupe.doctor.examine import examine

    parts = parts_of(directory)
    manifests = [check(part) for part in parts]
    findings = [examine(part) for part in parts]
    is_whole = all(found.is_whole for found in findings) and not any(one.damaged or one.left_out for one in manifests)
    if as_json:
        values = [
            _manifest_json(part, manifest) | {"findings": found.to_json()}
            for part, manifest, found in zip(parts, manifests, findings, strict=True)
        ]
        print_json({"directory": str(directory), "whole": is_whole, "parts": values})
    else:
        for part, manifest, found in zip(parts, manifests, findings, strict=True):
            print_findings(found)
            _say_manifest(part, manifest)
        echo(printable(f"the backup {directory} is " + ("whole" if is_whole else "NOT WHOLE")))
    return 0 if is_whole else FAILED


@click.command(short_help="Make a data directory of a backup.")
@click.argument("backup", type=_FOLDER)
@click.argument("data_directory", type=_FOLDER)
@as_json_option
def restore(backup: Path, data_directory: Path, as_json: bool) -> int:
    """Make a data directory of a backup, for a sidecar to be started on. It must be empty or not there.

    Each file is checked against what was written. Exit status 1 if something was damaged already where the backup was
    taken.
    """
    prepare()
    from seqdedupe.backup.restoring import restore

    manifests = restore(backup, data_directory)
    is_whole = not any(one.damaged or one.left_out for one in manifests)
    if as_json:
        values = [_manifest_json(data_directory, manifest) for manifest in manifests]
        print_json({"directory": str(data_directory), "whole": is_whole, "parts": values})
    else:
        for manifest in manifests:
            _say_manifest(data_directory, manifest)
    return 0 if is_whole else FAILED


def _say_progress(so_far: "list[admin_pb2.BackupResponse]") -> None:
    """To whoever looks on."""
    if sys.stderr.isatty():
        click.echo(f"\r{sum(one.bytes for one in so_far):,} bytes ", err=True, nl=False)


def _moment(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _say_manifest(place: Path, manifest: "Manifest") -> None:
    text = (
        f"{place}: {len(manifest.files):,} files, {manifest.size_bytes:,} bytes, as of {_moment(manifest.made_at_us)}"
    )
    echo(printable(text))
    _say_faults(manifest.damaged, manifest.left_out)


def _say_faults(damaged: Any, left_out: Any) -> None:
    for one in damaged:
        echo(printable(f"  damaged, as where it was taken: {one.topic}: {one.what}"))
    for one in left_out:
        echo(printable(f"  LEFT OUT: {one.topic}: {one.what}"))


def _faults_json(faults: Any) -> list[dict[str, Any]]:
    return [{"topic": one.topic, "incarnation": one.incarnation, "what": one.what} for one in faults]


def _part_json(one: Any) -> dict[str, Any]:
    """The form is documented: keep it stable."""
    return {
        "directory": one.directory,
        "made_at_us": one.made_at_us,
        "topics": one.topics,
        "bytes": one.bytes,
        "linked_bytes": one.linked_bytes,
        "damaged": _faults_json(one.damaged),
        "left_out": _faults_json(one.left_out),
    }


def _manifest_json(place: Path, manifest: "Manifest") -> dict[str, Any]:
    """The form is documented: keep it stable."""
    return {
        "directory": str(place),
        "made_at_us": manifest.made_at_us,
        "version": manifest.version,
        "files": len(manifest.files),
        "bytes": manifest.size_bytes,
        "damaged": _faults_json(manifest.damaged),
        "left_out": _faults_json(manifest.left_out),
    }


# -- `seqdedupe cursors`: the named cursors of a topic.


@click.command(short_help="List a topic's named cursors; have retention wait for one, or remove it.")
@click.argument("topic")
@click.option("--remove", metavar="NAME", help="Remove this cursor: it keeps nothing any more.")
@click.option(
    "--hold",
    nargs=2,
    type=(str, click.IntRange(0, 2**31 - 1)),
    metavar="NAME MB",
    help="Have retention keep what this cursor has not passed, while the log is not larger than MB; 0: no more.",
)
@common
def cursors(topic: str, remove: str | None, hold: tuple[str, int] | None, address: str, as_json: bool) -> None:
    """List the named cursors that the sidecar keeps of a topic, after what --hold and --remove do."""
    with connect_to(address, topic) as client:
        if hold is not None:
            client.admin.hold_cursor(topic, *hold)
        if remove is not None:
            client.admin.delete_cursor(topic, remove)
        found = client.admin.cursors(topic)
    if as_json:
        listed = [
            {
                "name": one.name,
                "position": position_json(Position.from_proto(one.position)),
                "note": one.note,
                "hold_retention_in_mb": one.hold_retention_in_mb,
            }
            for one in found
        ]
        print_json(listed)
        return
    rows = [(one.name, one.position.index, one.hold_retention_in_mb or "-", one.note) for one in found]
    print_table(("CURSOR", "INDEX", "HOLDS MB", "NOTE"), rows)
    if not rows:
        echo(f"{printable(topic)} has none")
