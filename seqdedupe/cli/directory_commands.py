"""The commands about data directories and backups. `doctor` examines a data directory that no sidecar uses, and
salvages readable messages. `backup` asks a running sidecar to write a backup. The command then verifies the backup,
copies the backup to an object store, and removes old backups. `backup list`, `backup verify` and `backup restore` need
no sidecar."""

import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from seqdedupe.cli.common import as_json_option, common, connect
from seqdedupe.command import FAILED, WRONG_USAGE, echo, needing, print_json, print_table, printable, say, say_failure
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from seqdedupe.doctor.findings import Findings, Missing, TopicFindings
    from seqdedupe.doctor.salvage import Salvage
    from seqdedupe.log.embedded.inspection import Damage
    from seqdedupe.transfer.backup import Manifest
    from seqdedupe.transfer.backup_places import BackupPlace, BucketPlace, FolderPlace, KeptBackup


def _say(line: str) -> None:
    echo(printable(line))


# -- `doctor`.

SHOWN = 20
"""The maximum number of damaged places, and of ranges of missing IDs, that are printed per topic. `--json` prints all
of them."""


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--salvage",
    "to",
    type=click.Path(path_type=Path),
    metavar="NEW_DIRECTORY",
    help="Write the readable data to a new data directory, with a report of the missing data.",
)
@as_json_option
def doctor(directory: Path, to: Path | None, as_json: bool) -> int:
    """Check every byte of a data directory, and change nothing in it. No sidecar may use the directory.

    Exit status 0: all is whole; 1: something is damaged; 2: the check was not possible.
    """
    try:
        return _run(directory, to, as_json)
    except SeqdedupeError as e:
        say_failure("seqdedupe", e, as_json=as_json)
    except OSError as e:
        say_failure("seqdedupe", error("LOG_UNREADABLE", str(e)), as_json=as_json)
    return WRONG_USAGE


def prepare() -> None:
    """Prepare the imports of the modules that examine a data directory. Raises INVALID_CONFIGURATION if a package is
    missing."""
    # Log lines from opening a store are about the copy.
    logging.getLogger("seqdedupe").addHandler(logging.NullHandler())
    with needing("checking a data directory needs", "sidecar"):
        from broker_sidecar import kernels

        kernels.prepare()
        import seqdedupe.doctor.examine  # noqa: F401 (all that it needs is there)


def _run(directory: Path, to: Path | None, as_json: bool) -> int:
    prepare()
    from seqdedupe.doctor.examine import examine
    from seqdedupe.doctor.salvage import salvage
    from seqdedupe.files import kept_unused
    from seqdedupe.store.directories import parts_of

    with kept_unused(directory):
        parts = parts_of(directory)
        if parts != [directory]:
            return _run_on_workers(directory, [examine(part) for part in parts] if to is None else None, as_json)
        if to is None:
            findings = examine(directory)
            print_json(findings.to_json()) if as_json else print_findings(findings)
        else:
            made = salvage(directory, to)
            findings = made.findings
            print_json(made.to_json()) if as_json else _print_salvage(made, to)
        return 0 if findings.is_whole else FAILED


def _run_on_workers(directory: Path, each: "list[Findings] | None", as_json: bool) -> int:
    if each is None:
        why = f"{directory} has several workers: salvage each worker's directory separately"
        raise error(
            "INVALID_CONFIGURATION", why, hint=f"Give {directory}/worker-0, and then each other worker's directory."
        )
    is_whole = all(findings.is_whole for findings in each)
    if as_json:
        workers = [findings.to_json() for findings in each]
        print_json({"directory": str(directory), "whole": is_whole, "workers": workers})
        return 0 if is_whole else FAILED
    for findings in each:
        print_findings(findings)
    _say(f"{directory}, {counted(len(each), 'worker')}, is " + ("whole" if is_whole else "NOT WHOLE"))
    return 0 if is_whole else FAILED


def print_findings(findings: "Findings") -> None:
    """Print the findings for a person."""
    for topic in findings.topics:
        _print_topic(topic)
    _say(f"store: {findings.store.value}" + (f": {findings.store_why}" if findings.store_why else ""))
    if findings.journal_why:
        _say(f"journal: {findings.journal_why}")
    for cure in findings.cures:
        _say(f"what to do: {cure}")
    _say(f"{findings.directory} is " + ("whole" if findings.is_whole else "NOT WHOLE"))


def _print_topic(topic: "TopicFindings") -> None:
    _say(f"{topic.name}: " + ("whole" if topic.is_whole else "NOT WHOLE"))
    indexes = f", indexes {topic.first_index} to {topic.next_index - 1}" if topic.messages else ""
    _say(
        f"  {counted(topic.messages, 'message')} can be read{indexes}, {counted(topic.producers, 'producer')}, "
        f"{topic.log_bytes:,} bytes"
    )
    for damage in topic.damage[:SHOWN]:
        _say(f"  damage: {damage.file}, byte {damage.offset}: {damage.what}; it concerns {_indexes(damage)}")
    _say_more(len(topic.damage), "places of damage")
    for missing in topic.missing[:SHOWN]:
        _say(f"  missing: {_missing(missing)}")
    _say_more(len(topic.missing), "producers' missing messages")
    if topic.imported_ids:
        why = f", NOT there: {topic.imported_why}" if topic.imported_why else ""
        _say(f"  {counted(topic.imported_ids, 'imported deduplication ID')}{why}")
    for why in topic.disagreements:
        _say(f"  wrong: {why}")
    if (torn := topic.torn_end) is not None:
        _say(
            f"  no damage: {torn.file} has a torn end of {torn.size_bytes:,} bytes "
            f"(about {counted(torn.records, 'record')}) from byte {torn.offset} on. "
            "No client has a receipt for it; the next start removes it"
        )
    for note in topic.notes:
        _say(f"  no damage: {note}")
    for cure in dict.fromkeys(topic.cures):
        _say(f"  what to do: {cure}")


def _say_more(count: int, what: str) -> None:
    if count > SHOWN:
        _say(f"  … and {count - SHOWN:,} more {what}: --json has all")


def _indexes(damage: "Damage") -> str:
    first, following = damage.first_index, damage.next_index
    if following is None:
        return f"index {first} and an unknown number after it"
    if following == first:
        return f"no message (a marker or a control record before index {first})"
    return f"{counted(following - first, 'message')}, indexes {first} to {following - 1}"


def _missing(missing: "Missing") -> str:
    ids = f"producer {missing.producer!r}, sequence IDs {missing.first_sequence_id} to {missing.last_sequence_id}"
    if missing.messages is not None:
        return f"{ids}, {counted(missing.messages, 'message')}"
    if missing.is_perhaps_trimmed:
        return f"{ids}, as far as they were used and retention had not dropped them"
    return f"{ids}, as far as they were used"


def _print_salvage(made: "Salvage", to: Path) -> None:
    print_findings(made.findings)
    for topic in made.topics:
        how = "copied" if topic.is_copied else f"written again, incarnation {topic.record.incarnation}"
        _say(f"{topic.record.name}: {how}")
        for kept in topic.kept[:SHOWN] if not topic.is_copied else ():
            new = f"{kept.new_first_index} to {kept.new_first_index + kept.last_index - kept.first_index}"
            _say(f"  indexes {kept.first_index} to {kept.last_index} are {new} now")
        if not topic.is_copied:
            _say_more(len(topic.kept), "stretches")
    for name in made.left_out:
        _say(f"{name}: LEFT OUT")
    _say(f"{to} is ready; its file salvage.json says what is missing")


# -- Backups.


def _folder(argument: str) -> str:
    """Return the argument. Raises UsageError for a URL: otherwise the command would use the URL as a path."""
    if "://" in argument:
        how = "`seqdedupe backup list s3://BUCKET/PREFIX --verify` verifies, `seqdedupe restore --from` restores"
        raise click.UsageError(f"Give a folder, not a URL. In an object store, {how}.")
    return argument


class _Folder(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_folder(value), param, ctx)


_FOLDER = _Folder(file_okay=False, path_type=Path)
_MAKE = "make"


class _Backup(click.Group):
    """`backup NAME` is short for `backup make NAME`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = [_MAKE, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Backup)
def backup() -> None:
    """Make a backup of a running sidecar (`backup [NAME]` is short for `backup make [NAME]`), or list backups."""


@backup.command(_MAKE, short_help="Make a backup of the running sidecar, and verify it.")
@click.argument("name", required=False)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Then keep the newest N good backups whose names are times, and remove older backups with such names.",
)
@click.option("--to", metavar="s3://BUCKET/PREFIX", help="Copy the backup to an object store.")
@common
def make(name: str | None, keep: int | None, to: str | None, address: str, as_json: bool) -> int:
    """Make a backup of all data of the running sidecar, in a new folder NAME in the sidecar's backup_directory.

    The default NAME is the time. If the command can read that folder, the command verifies every byte and confirms the
    backup to the sidecar. Exit status 1: the sidecar's data is damaged, so the backup is damaged too. In this case the
    command copies and removes nothing.
    """
    if name and keep:
        raise click.UsageError("--keep counts backups with a time as their name: give no NAME.")
    name = name or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    if to:
        # A problem there is raised before a backup is made.
        prepare()
        from seqdedupe.transfer.backup_places import BucketPlace

        BucketPlace(to)
    care = _Care(name, keep, to)
    with connect(address) as client:
        made = client.admin.backup(name, _say_progress)
        if (is_whole := _is_whole(made)) and care.begin(made):
            with care.locked():
                if care.drop_damaged_links():
                    with care.set_aside():
                        made = client.admin.backup(name, _say_progress)
                    is_whole = _is_whole(made)
                if is_whole:
                    care.copy()
                    client.admin.confirm_backup(made)
                    care.remove()
    if as_json:
        parts = [_part_json(one) for one in made]
        values = {"name": name, "verified": care.is_verified, "copied_to": care.copied_to, "removed": care.removed}
        print_json({"whole": is_whole, "parts": parts} | values)
        return 0 if is_whole else FAILED
    for one in made:
        _say(
            f"{one.directory}: {counted(one.topics, 'topic')}, {one.bytes:,} bytes, "
            f"{one.linked_bytes:,} of them shared with an earlier backup; as of {_moment(one.made_at_us)}"
        )
        _say_faults(one.damaged, one.left_out)
    _say("verified" if care.is_verified else "not verified: " + care.why_not)
    for url in care.copied_to:
        _say(f"copied to {url}, and verified there")
    for path in care.removed:
        _say(f"removed {path}")
    return 0 if is_whole else FAILED


def _is_whole(made: list[admin_pb2.BackupResponse]) -> bool:
    return not any(one.damaged or one.left_out for one in made)


@dataclass
class _Care:
    """The command's work on a backup after the sidecar has written the backup."""

    name: str
    keep: int | None
    to: str | None
    is_verified: bool = False
    why_not: str = "the sidecar's data were damaged when the backup was made"
    copied_to: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    _places: "list[tuple[FolderPlace, BucketPlace | None]]" = field(default_factory=list)
    """The folders with the backup, each with the place of its copy."""

    def begin(self, made: list[admin_pb2.BackupResponse]) -> bool:
        """Return whether this command can verify the backup. The command can do so if it can read the folders that
        contain the backup.

        Raises INVALID_REQUEST if this command cannot read the folders, but must copy the backup or remove older
        backups.
        """
        whole = [
            folder.parent if folder.name != self.name else folder for folder in (Path(one.directory) for one in made)
        ]
        folders = sorted(set(whole))
        if not all(os.access(folder, os.R_OK | os.X_OK) for folder in folders):
            self.why_not = f"this command cannot read {folders[0]}"
            if self.keep or self.to:
                hint = "Run the command as the sidecar's user, where backup_directory has the same path."
                raise error("INVALID_REQUEST", f"the backup is made, but not verified: {self.why_not}", hint=hint)
            return False
        prepare()
        from seqdedupe.transfer.backup_places import BucketPlace, FolderPlace

        for folder in folders:
            # With several sidecars, each has a prefix: the name of its folder of backups.
            below = f"/{folder.parent.name}" if len(folders) > 1 else ""
            bucket = BucketPlace(f"{self.to.rstrip('/')}{below}") if self.to else None
            self._places.append((FolderPlace(folder.parent), bucket))
        return True

    def locked(self) -> ExitStack:
        """Prevent other commands from copying or removing backups of these folders, until the returned object is
        closed."""
        stack = ExitStack()
        for place, _ in self._places if self.keep or self.to else ():
            stack.enter_context(place.locked())
        return stack

    def drop_damaged_links(self) -> bool:
        """Remove damaged files that the backup shares with older backups. Return whether the backup must be made
        again."""
        found = [place.url for place, _ in self._places if place.drop_damaged_links(self.name)]
        for folder in found:
            what = f"an older backup in {folder} has damaged files, which the new one does not share"
            say("seqdedupe", f"{what}. `seqdedupe backup list {folder} --verify` names it. Check that disk.")
        return bool(found)

    def set_aside(self) -> ExitStack:
        """Free the backup's name until the returned object is closed."""
        stack = ExitStack()
        for place, _ in self._places:
            stack.enter_context(place.set_aside(self.name))
        return stack

    def copy(self) -> None:
        """Verify every byte of the backup. If a place for copies is set, also copy the backup there and verify the
        copy."""
        for place, bucket in self._places:
            place.check(self.name)
            if bucket is not None:
                bucket.upload(Path(place.url, self.name), self.name)
                # Its files were read back already.
                bucket.check(self.name, reads_all=False)
                self.copied_to.append(f"{bucket.url}/{self.name}")
        self.is_verified = True

    def remove(self) -> None:
        """Remove older backups from the backup directory and from the place of copies."""
        if self.keep is None:
            return
        for places in self._places:
            for one in places:
                if one is not None:
                    kept = one.keep(self.name, self.keep)
                    self.removed += [f"{one.url}/{name}" for name in kept.removed]
                    _warn_of_future(one, kept.in_future, "does not count and is not removed")


@backup.command("list", short_help="List backups, and show which backups are good.")
@click.argument("place", metavar="DEST")
@click.option("--verify", "reads_all", is_flag=True, help="Read every byte. Default: compare sizes only.")
@as_json_option
def list_backups(place: str, reads_all: bool, as_json: bool) -> int:
    """List the backups in DEST, a folder or s3://BUCKET/PREFIX. Show each backup's time, size and topics, and whether
    the backup is good.

    A good backup is complete and has no damage. Exit status 1: a backup is not good.
    """
    prepare()
    from seqdedupe.transfer.backup_places import place_at

    at = place_at(place)
    found = [at.look(name, reads_all=reads_all) for name in at.names()]
    if as_json:
        print_json({"place": at.url, "verified": reads_all, "backups": [_kept_json(one) for one in found]})
    else:
        rows = [
            (one.name, _moment(one.made_at_us) if one.made_at_us else None, one.size_bytes, one.topics, _state(one))
            for one in found
        ]
        print_table(("NAME", "AS OF", "BYTES", "TOPICS", "STATE"), rows)
    return FAILED if any(one.problem for one in found) else 0


def _state(one: "KeptBackup") -> str:
    if one.problem:
        return f"NOT GOOD: {one.problem}"
    return "IN THE FUTURE: good, but never the newest" if one.is_in_future else "good"


def _kept_json(one: "KeptBackup") -> dict[str, Any]:
    """Return the backup. The form is documented: keep it stable."""
    return {
        "name": one.name,
        "made_at_us": one.made_at_us or None,
        "bytes": one.size_bytes,
        "topics": one.topics,
        "good": not one.problem,
        "problem": one.problem or None,
        "in_future": one.is_in_future,
    }


@click.command()
@click.argument("directory", type=_FOLDER)
@as_json_option
def verify(directory: Path, as_json: bool) -> int:
    """Verify a backup: every file is unchanged, and logs and store are intact and belong together (as `doctor` checks).

    Exit status 1: the backup is damaged or incomplete.
    """
    prepare()
    from seqdedupe.doctor.examine import examine
    from seqdedupe.transfer.backup import check, parts_of

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
        _say(f"the backup {directory} is " + ("whole" if is_whole else "NOT WHOLE"))
    return 0 if is_whole else FAILED


@click.command()
@click.argument("places", nargs=-1, metavar="[BACKUP] DATA_DIRECTORY")
@click.option("--from", "place", metavar="DEST", help="A folder or s3://BUCKET/PREFIX with backups, instead of BACKUP.")
@click.option(
    "--backup", "name", metavar="NAME", help="The name of the backup in DEST. Default: the newest good backup."
)
@as_json_option
def restore(places: tuple[str, ...], place: str | None, name: str | None, as_json: bool) -> int:
    """Make a data directory from a backup. DATA_DIRECTORY must be empty or missing. After that, start a sidecar with
    this data directory.

    The command verifies each file. Exit status 1: the data was already damaged when the backup was made.
    """
    if name and not place:
        raise click.UsageError("--backup is the name of a backup in DEST: give --from DEST too.")
    if len(places) != (wanted := 1 if place else 2):
        words = "BACKUP and DATA_DIRECTORY" if wanted == 2 else "DATA_DIRECTORY alone"
        raise click.UsageError(f"Give {words}, or --from DEST and DATA_DIRECTORY.")
    *folders, to = (Path(_folder(one)) for one in places)
    prepare()
    from seqdedupe.transfer import backup
    from seqdedupe.transfer.backup_places import place_at

    if place:
        at = place_at(place)
        if not name:
            name, in_future = at.newest_good()
            _warn_of_future(at, in_future, "is not taken for the newest")
        source, manifests = f"{at.url}/{name}", at.restore(name, to)
    else:
        source, manifests = places[0], backup.restore(folders[0], to)
    is_whole = not any(one.damaged or one.left_out for one in manifests)
    if as_json:
        values = [_manifest_json(to, manifest) for manifest in manifests]
        print_json({"directory": str(to), "backup": source, "whole": is_whole, "parts": values})
    else:
        _say(f"restored {source}")
        for manifest in manifests:
            _say_manifest(to, manifest)
    return 0 if is_whole else FAILED


def _warn_of_future(place: "BackupPlace", names: list[str], effect: str) -> None:
    for name in names:
        what = f"the moment of {place.url}/{name} is in the future: it {effect}"
        say("seqdedupe", f"{what}. If this host's clock is right, remove it.")


def _say_progress(so_far: "list[admin_pb2.BackupResponse]") -> None:
    """Show the progress on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r{sum(one.bytes for one in so_far):,} bytes ", err=True, nl=False)


def _moment(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _say_manifest(place: Path, manifest: "Manifest") -> None:
    size = f"{counted(len(manifest.files), 'file')}, {manifest.size_bytes:,} bytes"
    text = f"{place}: {size}, as of {_moment(manifest.made_at_us)}"
    _say(text)
    _say_faults(manifest.damaged, manifest.left_out)


def _say_faults(damaged: Any, left_out: Any) -> None:
    for one in damaged:
        _say(f"  damaged when the backup was made: {one.topic}: {one.what}")
    for one in left_out:
        _say(f"  LEFT OUT: {one.topic}: {one.what}")


def _faults_json(faults: Any) -> list[dict[str, Any]]:
    return [{"topic": one.topic, "incarnation": one.incarnation, "what": one.what} for one in faults]


def _part_json(one: Any) -> dict[str, Any]:
    """Return the part. The form is documented: keep it stable."""
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
    """Return the manifest. The form is documented: keep it stable."""
    return {
        "directory": str(place),
        "made_at_us": manifest.made_at_us,
        "version": manifest.version,
        "files": len(manifest.files),
        "bytes": manifest.size_bytes,
        "damaged": _faults_json(manifest.damaged),
        "left_out": _faults_json(manifest.left_out),
    }
