"""The commands about backups: one is made by the sidecar, while it runs; it is checked and restored without one."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from seqdedupe.cli.doctor import prepare, print_findings
from seqdedupe.cli.options import as_json_option, common, connect, print_json
from seqdedupe.command import FAILED, echo, printable

if TYPE_CHECKING:
    from seqdedupe.backup.manifest import Manifest
    from seqdedupe.v1 import admin_pb2

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
